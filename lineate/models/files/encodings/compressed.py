"""quant_method "compressed-tensors", as llm-compressor and vLLM write it.

    pack-quantized   X.weight_packed      int32 `rows words`, codes along the columns, that of 0 at 8 or 128
                     X.weight_scale       `rows groups`, or `rows 1`
                     X.weight_zero_point  int32 `words groups`, codes along the rows; or int8 `rows groups`, from -8 on
                     X.weight_g_idx       the group of each column, if columns were ordered by activations
                     X.weight_shape       rows and columns; with groups the other shapes imply them
    int-quantized    X.weight int8, X.weight_scale `rows 1`, X.weight_zero_point int8
    float-quantized  X.weight float8, X.weight_scale `rows 1`, `1`, or one a block

Of a group of the config only the scheme is read, not the modules that it targets: each weight has the scheme that its
tensors fit. Shapes are more reliable than patterns of names, which an untrusted file could make slow to match.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lineate.models.files.encodings.bits import codes_of, words_for
from lineate.models.files.encodings.encoded import INTEGERS, Encoded, Source, Stored
from lineate.models.files.encodings.plain import FLOAT8, PlainCodes, SignedCodes, float8_format
from lineate.models.files.encodings.settings import Settings
from lineate.models.files.encodings.tensors import StoredTensors, placed, wrong_shape
from lineate.models.files.safetensors import CheckpointError, Reader

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
STRATEGIES = ("tensor", "channel", "group", "block")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Scheme:
    """The quantisation scheme of a group of the config."""

    bits: int
    floating: bool
    strategy: str
    group: int | None
    block: tuple[int, int] | None
    symmetric: bool
    ordered: bool

    def blocks(self, rows: int, columns: int) -> tuple[int, int]:
        """Return how many rows and columns share a scale."""
        if self.strategy == "block":
            assert self.block is not None
            return self.block
        return (rows if self.strategy == "tensor" else 1), (self.group or columns)

    def __str__(self) -> str:
        size = f" of {self.group}" if self.group else f" of {self.block[0]} x {self.block[1]}" if self.block else ""
        return f"{'float' if self.floating else 'int'}{self.bits}, strategy {self.strategy}{size}"


@dataclass(frozen=True)
class PackedCodes(Encoded):
    """Codes in words of 32 bits along the columns."""

    def _codes(self, source: Source, matrix: int, first: int, last: int) -> Tensor:
        words = source.rows(self.codes, first, last)
        return codes_of(words, self.bits).flatten(1)[:, : self.shape[1]]

    def _zeros(self, source: Source, matrix: int, first: int, last: int) -> Tensor | None:
        if self.zeros is None:
            return None
        if self.zeros.entry.dtype != torch.int32:
            return self._of_rows(source, self.zeros, matrix, first, last).float() + self.zero
        each = 32 // self.bits
        words = source.rows(self.zeros, first // each, (last - 1) // each + 1)  # words groups
        codes = codes_of(words, self.bits).transpose(1, 2).flatten(0, 1)
        return codes[first % each : first % each + last - first]


def read(settings: Settings, tensors: StoredTensors) -> None:
    """Find the quantised weights and their scales."""
    schemes = _schemes(settings, tensors)
    for name in tensors.stems("_packed"):
        if name.endswith(".weight"):
            _add_packed(tensors, name, schemes)
    for name, entry in tensors.entries.items():
        if name.endswith(".weight") and entry.dtype in (torch.int8, FLOAT8):
            _add_plain(tensors, Stored(name, entry), schemes)
    if tensors.drop(r"\.(input|output)_(scale|zero_point)$"):
        tensors.note_activations()
    tensors.check_scales(r"\.weight_(scale|zero_point|packed|shape)$")


def _schemes(settings: Settings, tensors: StoredTensors) -> list[Scheme]:
    """Return the schemes of the config's groups, after a check that the weights were not changed otherwise."""
    settings.word("format", allowed=FORMATS, default="dense")
    sparse = settings.part("sparsity_config")
    if sparse is not None and sparse.values:
        sparse.word("format", allowed=("dense",), remedy="; sparse weights are not read")
    if settings.values.get("transform_config"):
        raise settings.error("must have no transform_config, got one; weights that are rotated are not read")
    if settings.values.get("kv_cache_scheme") is not None:
        tensors.note_cache()
    groups, found = settings.part("config_groups"), []
    for name in groups.values if groups is not None else ():
        assert groups is not None
        group = groups.part(name)
        weights = None if group is None else group.part("weights")
        if group is None or weights is None:
            continue
        group.word("format", allowed=FORMATS, default="dense")
        inputs = group.part("input_activations")
        if inputs is not None and inputs.values.get("dynamic") in (None, False):
            tensors.note_activations()
        found.append(_scheme(weights))
    if not found:
        raise settings.error("must have config_groups with weights, got none")
    return found


def _scheme(weights: Settings) -> Scheme:
    floating = weights.word("type", allowed=("int", "float"), default="int") == "float"
    bits = weights.whole("num_bits", default=8)
    if bits not in ((8,) if floating else (4, 8)):
        raise weights.error(f"must have num_bits = {'8' if floating else '4 or 8'}, got {bits}")
    size = weights.values.get("group_size")
    group = None if size in (None, -1) else weights.whole("group_size")
    usual = "group" if group else "channel" if size == -1 else "tensor"
    strategy = weights.word("strategy", allowed=STRATEGIES, default=usual)
    if (group is None) == (strategy == "group"):
        raise weights.error(f"must have a group_size with strategy group alone, got {group} with {strategy}")
    block = weights.pair("block_structure")
    if (block is None) == (strategy == "block"):
        raise weights.error(f"must have a block_structure with strategy block alone, got {block} with {strategy}")
    ordered = weights.values.get("actorder") in (True, "group", "dynamic")
    return Scheme(bits, floating, strategy, group, block, weights.flag("symmetric", default=True), ordered)


def _add_packed(tensors: StoredTensors, name: str, schemes: list[Scheme]) -> None:
    """Take a weight whose codes are packed, by the first scheme that it fits."""
    codes = tensors.need(f"{name}_packed", f"{name}_packed")
    scales, sizes = tensors.need(codes.name, f"{name}_scale"), tensors.need(codes.name, f"{name}_shape")
    if codes.entry.dtype != torch.int32 or len(codes.entry.shape) != 2 or 0 in codes.entry.shape:
        raise wrong_shape(codes, "int32 of 2 dimensions, none of them 0", "as packed weights are")
    problems = []
    for scheme in (scheme for scheme in schemes if not scheme.floating):
        try:
            shape = _shape_of(sizes, codes, scales, scheme)
            if codes.entry.shape != (wanted := (shape[0], words_for(shape[1], scheme.bits))):
                raise wrong_shape(codes, f"int32 of shape {wanted}", f"{scheme.bits} bits for each of {shape}")
            zeros, order = _others(tensors, codes, name, shape, scheme)
            _check_grid(scales, codes, shape, scheme)
        except CheckpointError as error:
            problems.append(error)
            continue
        parts = {"codes": codes, "scales": scales, "zeros": zeros, "order": order}
        sizes_of = {"bits": scheme.bits, "block": scheme.blocks(*shape), "form": INTEGERS[scheme.bits]}
        encoded = PackedCodes(**placed(codes, shape), **parts, **sizes_of)  # type: ignore[arg-type]
        tensors.add(name, encoded, sizes)
        return
    raise _unfit(codes, problems, schemes)


def _add_plain(tensors: StoredTensors, codes: Stored, schemes: list[Scheme]) -> None:
    """Take a weight whose codes are int8 or float8, by the first scheme that it fits."""
    scales, shape, floating = (
        tensors.need(codes.name, f"{codes.name}_scale"),
        codes.entry.shape,
        codes.entry.dtype == FLOAT8,
    )
    if len(shape) != 2 or 0 in shape:
        raise wrong_shape(codes, "a matrix of at least one number", "as quantised weights are")
    problems = []
    for scheme in (scheme for scheme in schemes if scheme.floating == floating and scheme.bits == 8):
        try:
            zeros, order = _others(tensors, codes, codes.name, shape, scheme)
            _check_grid(scales, codes, shape, scheme)
        except CheckpointError as error:
            problems.append(error)
            continue
        form = float8_format(scales) if floating else INTEGERS[8]
        parts = {"codes": codes, "scales": scales, "zeros": zeros, "order": order, "form": form}
        kind = PlainCodes if floating else SignedCodes
        encoded = kind(**placed(codes, shape), block=scheme.blocks(*shape), **parts)  # type: ignore[arg-type]
        tensors.add(codes.name, encoded)
        return
    raise _unfit(codes, problems, schemes)


def _unfit(codes: Stored, problems: list[CheckpointError], schemes: list[Scheme]) -> CheckpointError:
    """Return the error of a weight that no scheme of the config describes."""
    if len(problems) == 1:
        return problems[0]
    known = "; ".join(dict.fromkeys(map(str, schemes)))
    return wrong_shape(codes, f"quantised by a scheme of the config ({known})", "as its config_groups say")


def _shape_of(sizes: Stored, codes: Stored, scales: Stored, scheme: Scheme) -> tuple[int, int]:
    """Return rows and columns: in groups from the number of scales, otherwise from weight_shape."""
    if sizes.entry.shape != (2,) or sizes.entry.dtype not in (torch.int64, torch.int32):
        raise wrong_shape(sizes, "two whole numbers", "rows and columns")
    rows, words = codes.entry.shape
    if scheme.group is not None and len(scales.entry.shape) == 2:
        return rows, scales.entry.shape[1] * scheme.group
    if not sizes.entry.file.is_file():  # only the headers were fetched
        return rows, words * 32 // scheme.bits
    found = Source(Reader()).whole(sizes).tolist()
    if found[0] != rows or not 0 < found[1] <= words * 32 // scheme.bits:
        raise CheckpointError(
            f"{sizes.entry.file}: {sizes.name} must say {rows} rows and at most {words * 32 // scheme.bits} columns, "
            f"as {codes.name} has, got {found}"
        )
    return rows, found[1]


def _others(
    tensors: StoredTensors, codes: Stored, name: str, shape: Shape, scheme: Scheme
) -> tuple[Stored | None, Stored | None]:
    """Return the codes of 0, and the groups of the columns, if there are any."""
    zeros, order = tensors.find(f"{name}_zero_point"), tensors.find(f"{name}_g_idx")
    if zeros is None and not scheme.symmetric:
        zeros = tensors.need(codes.name, f"{name}_zero_point")
    if order is None and scheme.ordered:
        order = tensors.need(codes.name, f"{name}_g_idx")
    if zeros is not None:
        grid = _grid(shape, scheme)
        packed = zeros.entry.dtype == torch.int32 and codes.entry.dtype == torch.int32
        wanted = (words_for(shape[0], scheme.bits), grid[1]) if packed else grid
        flat = math.prod(zeros.entry.shape) == math.prod(wanted) and not packed
        if not (zeros.entry.shape == wanted or flat):
            raise wrong_shape(zeros, f"of shape {wanted}", f"one for each scale of {codes.name}")
    if order is not None and (order.entry.shape != shape[1:] or order.entry.dtype.is_floating_point):
        raise wrong_shape(order, f"whole numbers of shape {shape[1:]}", f"one for each column of {codes.name}")
    return zeros, order


def _grid(shape: Shape, scheme: Scheme) -> tuple[int, int]:
    """Return how many scales there are along rows and columns."""
    rows, columns = scheme.blocks(*shape)
    return math.ceil(shape[0] / rows), math.ceil(shape[1] / columns)


def _check_grid(scales: Stored, codes: Stored, shape: Shape, scheme: Scheme) -> None:
    if scheme.group is not None and shape[1] % scheme.group:
        raise wrong_shape(codes, f"of columns that groups of {scheme.group} divide", f"as {scales.name} has")
    grid = _grid(shape, scheme)
    same = scales.entry.shape == grid or (1 in grid and scales.entry.shape == (math.prod(grid),))
    if not (same or (grid == (1, 1) and scales.entry.shape == ())) or not scales.entry.dtype.is_floating_point:
        raise wrong_shape(scales, f"floats of shape {grid}", f"as {codes.name} {shape} in {scheme} needs")

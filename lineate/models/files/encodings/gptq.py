"""quant_method "gptq", as GPTQModel and AutoGPTQ write it: the transpose of a weight, in words along its columns.

X.qweight  int32 `columns / codes rows`    codes of one row, 4 or 8 bits each
X.scales   `groups rows`
X.qzeros   int32 `groups rows / codes`     codes of 0 of neighbouring rows; checkpoint_format "gptq" has them less 1
X.g_idx    int32 `columns`                 the group of each column; with desc_act not that of its position
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lineate.models.files.encodings.bits import codes_of
from lineate.models.files.encodings.encoded import INTEGERS, Encoded, Source, Stored
from lineate.models.files.encodings.settings import Settings
from lineate.models.files.encodings.tensors import StoredTensors, placed, wrong_shape

BITS = (4, 8)
ONES = {4: 0x11111111, 8: 0x01010101}
"""A word of which every code is 1."""


@dataclass(frozen=True)
class TurnedCodes(Encoded):
    """Codes of the transpose, in words along the columns of the weight."""

    offset: int = 0
    """The number that the file has subtracted from every code of 0."""

    @property
    def by_rows(self) -> bool:
        return False

    def _codes(self, source: Source, matrix: int, first: int, last: int) -> Tensor:
        words = source.columns(self.codes, first, last)  # words rows
        return codes_of(words, self.bits).transpose(0, 1).flatten(1)

    def _scales(self, source: Source, matrix: int, first: int, last: int) -> Tensor:
        return source.columns(self.scales, first, last).float().t()

    def _zeros(self, source: Source, matrix: int, first: int, last: int) -> Tensor | None:
        assert self.zeros is not None
        each = 32 // self.bits
        words = source.columns(self.zeros, first // each, (last - 1) // each + 1)  # groups words
        # GPTQModel subtracts from the word, so that a 0 borrows from its neighbour: the sum of words undoes it.
        codes = codes_of(words + self.offset * ONES[self.bits], self.bits).flatten(1)
        return codes[:, first % each : first % each + last - first].t()


def read(settings: Settings, tensors: StoredTensors) -> None:
    """Find the quantised weights and their scales."""
    form = settings.word("checkpoint_format", "format", allowed=("gptq", "gptq_v2"), default="gptq")
    settings.word("pack_dtype", allowed=("int32",), default="int32")
    bits, size = settings.whole("bits"), settings.whole("group_size", least=-1)
    if bits not in BITS or size == 0:
        raise settings.error(f"must have bits = 4 or 8 and a group_size of -1 or above 0, got {bits} and {size}")
    ordered = settings.flag("desc_act", default=False)
    varied = bool(settings.values.get("dynamic"))  # some modules have other bits and groups
    for stem in tensors.stems(".qweight"):
        codes = Stored(f"{stem}.qweight", tensors.entries[f"{stem}.qweight"])
        names = [f"{stem}.{part}" for part in ("scales", "qzeros", "g_idx")]
        scales, zeros = (tensors.need(codes.name, name) for name in names[:2])
        order = tensors.need(codes.name, names[2]) if ordered else tensors.find(names[2])
        encoded = _encoded(codes, scales, zeros, order, (bits, size), varied)
        offset = 1 if form == "gptq" else 0
        tensors.add(f"{stem}.weight", TurnedCodes(**encoded, offset=offset))  # type: ignore[arg-type]
    tensors.check_scales(r"\.(scales|qzeros|g_idx)$")


def _encoded(
    codes: Stored, scales: Stored, zeros: Stored, order: Stored | None, sizes: tuple[int, int], varied: bool
) -> dict[str, object]:
    """Return the fields of an encoded weight, after a check that its tensors fit."""
    bits, size = sizes
    if codes.entry.dtype != torch.int32 or len(codes.entry.shape) != 2:
        raise wrong_shape(codes, "int32 of 2 dimensions", "as GPTQ has")
    words, rows = codes.entry.shape
    if varied and len(zeros.entry.shape) == 2 and rows:
        bits = zeros.entry.shape[1] * 32 // rows
        if bits not in BITS:
            raise wrong_shape(zeros, "of 4 or 8 bits a code", f"one for each of {rows} rows")
    columns = words * 32 // bits
    group = columns if size == -1 else min(size, columns)
    if varied and len(scales.entry.shape) == 2 and scales.entry.shape[0]:
        group = math.ceil(columns / scales.entry.shape[0])
    groups = math.ceil(columns / max(1, group))
    if scales.entry.shape != (groups, rows) or not scales.entry.dtype.is_floating_point:
        why = f"one scale for {group} of the {columns} columns of {codes.name}"
        raise wrong_shape(scales, f"floats of shape {(groups, rows)}", why)
    if zeros.entry.shape != (groups, rows * bits // 32) or zeros.entry.dtype != torch.int32 or rows * bits % 32:
        why = f"{bits} bits for each scale of {codes.name}"
        raise wrong_shape(zeros, f"int32 of shape {(groups, rows * bits // 32)} for rows in whole words", why)
    if order is not None and (order.entry.shape != (columns,) or order.entry.dtype.is_floating_point):
        raise wrong_shape(order, f"whole numbers of shape {(columns,)}", f"one for each column of {codes.name}")
    parts = {"codes": codes, "scales": scales, "zeros": zeros, "order": order, "bits": bits, "form": INTEGERS[bits]}
    return {**placed(codes, (rows, columns)), **parts, "block": (1, group)}

"""Writers of quantised checkpoints, from the descriptions of their formats; lineate only reads them.

Each takes a weight, rounds it, and returns the tensors that a file has for it, by the ends of their names, and the
numbers that these stand for, in float32. Codes are put into words by sums of shifted int64, and not as they are read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
FLOAT8 = torch.float8_e4m3fn
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Put unsigned codes, `... n`, into int32 words, `... ceil(n bits / 32)`; codes that are missing are 0."""
    each = 32 // bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    shifted = [codes[..., place] << (bits * i) for i, place in enumerate(order or range(each))]
    total = torch.stack(shifted, -1).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def rounded(x: Tensor, bits: int, group: int, asymmetric: bool, order: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return codes `rows columns` from 0 on, zeros and scales `rows groups` in float16, and what they stand for.

    order: the group of each column; None: that of its place. Zeros are never 0.
    """
    rows, columns = x.shape
    index = torch.arange(columns) // group if order is None else order
    groups, top = int(index.max()) + 1, 2**bits - 1
    scales, zeros = torch.empty(rows, groups), torch.full((rows, groups), 2 ** (bits - 1))
    for g in range(groups):
        part = x[:, index == g]
        if asymmetric:
            scales[:, g] = (part.amax(1) - part.amin(1)).clamp(min=1e-4) / (top - 1)
            zeros[:, g] = (1 - part.amin(1) / scales[:, g]).round().clamp(1, top).int()
        else:
            scales[:, g] = part.abs().amax(1).clamp(min=1e-4) / (top // 2)
    scales = scales.half()
    spread, offset = scales.float()[:, index], zeros[:, index]
    codes = (x / spread + offset).round().clamp(0, top).int()
    return codes, zeros, scales, (codes - offset).float() * spread


def fp8_blocks(x: Tensor, block: tuple[int, int], dtype: torch.dtype = torch.float32) -> Written:
    """quant_method fp8: a scale for each block of each matrix, also where a block is cut by the edge."""
    *front, rows, columns = x.shape
    scales = torch.empty(*front, -(-rows // block[0]), -(-columns // block[1]))
    codes, value = torch.empty(x.shape, dtype=FLOAT8), torch.empty_like(x)
    for i in range(scales.shape[-2]):
        for j in range(scales.shape[-1]):
            at = ..., slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale = (x[at].abs().amax((-1, -2)).clamp(min=1e-4) / 448).to(dtype)
            scales[..., i, j] = scale.float()
            spread = scale.float()[..., None, None]
            codes[at] = (x[at] / spread).clamp(-448, 448).to(FLOAT8)
            value[at] = codes[at].float() * spread
    return {"": codes, "_scale_inv": scales.to(dtype)}, value


def fp8_one_scale(x: Tensor, end: str = "_scale") -> Written:
    """quant_method fp8 without blocks."""
    scale = x.abs().max() / 448
    codes = (x / scale).clamp(-448, 448).to(FLOAT8)
    return {"": codes, end: scale, "@input_scale": torch.tensor(0.5)}, codes.float() * scale


def compressed_packed(
    x: Tensor, bits: int, group: int | None = None, asymmetric: bool = False, order: Tensor | None = None,
    plain_zeros: bool = False,
) -> Written:  # fmt: skip
    """pack-quantized; codes along columns, zeros along rows, or as int8 as older versions wrote them."""
    codes, zeros, scales, value = rounded(x, bits, group or x.shape[1], asymmetric, order)
    tensors = {"_packed": words(codes, bits), "_scale": scales, "_shape": torch.tensor(x.shape)}
    if asymmetric:
        packed = words(zeros.t(), bits).t().contiguous()
        tensors["_zero_point"] = (zeros - 2 ** (bits - 1)).to(torch.int8) if plain_zeros else packed
    if order is not None:
        tensors["_g_idx"] = order.int()
    return tensors, value


def compressed_int8(x: Tensor, asymmetric: bool = False) -> Written:
    """int-quantized, a scale a row."""
    codes, zeros, scales, value = rounded(x, 8, x.shape[1], asymmetric)
    tensors = {"": (codes - 128).to(torch.int8), "_scale": scales.bfloat16()}
    value = (codes - zeros).float() * scales.bfloat16().float()
    return tensors | ({"_zero_point": (zeros - 128).to(torch.int8)} if asymmetric else {}), value


def compressed_float8(x: Tensor, block: tuple[int, int]) -> Written:
    """float-quantized, a scale a block, which may be a row or everything."""
    tensors, value = fp8_blocks(x, block)
    scales = tensors.pop("_scale_inv")
    return tensors | {"_scale": scales[0] if scales.numel() == 1 else scales}, value


def gptq(
    x: Tensor, bits: int, group: int, version: int = 1, asymmetric: bool = False, order: Tensor | None = None
) -> Written:
    """GPTQ: the transpose, codes along columns of the weight; version 1 has zeros less 1."""
    codes, zeros, scales, value = rounded(x, bits, group, asymmetric, order)
    index = torch.arange(x.shape[1]) // group if order is None else order
    stored = zeros.t() - (1 if version == 1 else 0)  # groups rows
    return {
        "@qweight": words(codes, bits).t().contiguous(),
        "@qzeros": words(stored, bits),
        "@scales": scales.t().contiguous(),
        "@g_idx": index.int(),
    }, value


def awq(x: Tensor, group: int, asymmetric: bool = True) -> Written:
    """AWQ, version gemm: the transpose, codes along rows of the weight in an order of their own."""
    codes, zeros, scales, value = rounded(x, 4, group, asymmetric)
    return {
        "@qweight": words(codes.t(), 4, AWQ_ORDER),
        "@qzeros": words(zeros.t(), 4, AWQ_ORDER),
        "@scales": scales.t().contiguous(),
    }, value


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True} | weights}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {"group_0": group}, "quantization_status": "compressed",
    }  # fmt: skip


def gptq_config(**values: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True} | values


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head"],
}


@dataclass(frozen=True)
class Encoding:
    """A way to write a checkpoint."""

    config: dict[str, Any]
    write: Callable[[Tensor], Written]
    multiple: int = 1
    """What rows and columns of a weight must be multiples of."""

    def takes(self, name: str, x: Tensor) -> bool:
        """Whether such a weight would be quantised: no router, embedding, convolution or norm."""
        kept = ("embed", "conv1d", ".gate.weight", "shared_expert_gate", "norm")
        matrix = name.endswith(".weight") and x.dim() == 2 and all(n % self.multiple == 0 for n in x.shape)
        return matrix and not any(word in name for word in kept)


def mixed_up(columns: int, group: int) -> Tensor:
    """Return a group for each column, in no order, of equal sizes."""
    return (torch.arange(columns) // group)[torch.randperm(columns, generator=torch.Generator().manual_seed(3))]


ENCODINGS: dict[str, Encoding] = {
    "fp8 blocks": Encoding(FP8_CONFIG | {"weight_block_size": [16, 24]}, lambda x: fp8_blocks(x, (16, 24))),
    "fp8 blocks, bfloat16 scales": Encoding(
        FP8_CONFIG | {"weight_block_size": [128, 128]}, lambda x: fp8_blocks(x, (128, 128), torch.bfloat16)
    ),
    "fp8 one scale": Encoding(FP8_CONFIG | {"activation_scheme": "static"}, fp8_one_scale),
    "packed 4 bits": Encoding(
        compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=8),
        lambda x: compressed_packed(x, 4, 8), 8,
    ),
    "packed 4 bits, asymmetric": Encoding(
        compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=8, symmetric=False),
        lambda x: compressed_packed(x, 4, 8, asymmetric=True), 8,
    ),
    "packed 4 bits, int8 zeros": Encoding(
        compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=8, symmetric=False),
        lambda x: compressed_packed(x, 4, 8, asymmetric=True, plain_zeros=True), 8,
    ),
    "packed 4 bits, ordered": Encoding(
        compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=8, actorder="group"),
        lambda x: compressed_packed(x, 4, 8, order=mixed_up(x.shape[1], 8)), 8,
    ),
    "packed 8 bits, a scale a row": Encoding(
        compressed_config("pack-quantized", num_bits=8, strategy="channel"), lambda x: compressed_packed(x, 8)
    ),
    "packed 4 bits, a scale a row": Encoding(
        compressed_config("pack-quantized", num_bits=4, strategy="channel", symmetric=False),
        lambda x: compressed_packed(x, 4, asymmetric=True),
    ),
    "int8": Encoding(compressed_config("int-quantized", strategy="channel"), compressed_int8),
    "int8, asymmetric": Encoding(
        compressed_config("int-quantized", strategy="channel", symmetric=False),
        lambda x: compressed_int8(x, asymmetric=True),
    ),
    "float8 a scale a row": Encoding(
        compressed_config("float-quantized", type="float", strategy="channel"),
        lambda x: compressed_float8(x, (1, x.shape[1])),
    ),
    "float8 one scale": Encoding(
        compressed_config("float-quantized", type="float", strategy="tensor"),
        lambda x: compressed_float8(x, (x.shape[0], x.shape[1])),
    ),
    "float8 blocks": Encoding(
        compressed_config("float-quantized", type="float", strategy="block", block_structure=[12, 16]),
        lambda x: compressed_float8(x, (12, 16)),
    ),
    "gptq 4 bits": Encoding(gptq_config(), lambda x: gptq(x, 4, 8), 8),
    "gptq 4 bits, version 2": Encoding(
        gptq_config(checkpoint_format="gptq_v2", sym=False), lambda x: gptq(x, 4, 8, version=2, asymmetric=True), 8
    ),
    "gptq 4 bits, asymmetric, ordered": Encoding(
        gptq_config(desc_act=True, sym=False),
        lambda x: gptq(x, 4, 8, asymmetric=True, order=mixed_up(x.shape[1], 8)), 8,
    ),
    "gptq 8 bits, a scale a row": Encoding(
        gptq_config(bits=8, group_size=-1), lambda x: gptq(x, 8, x.shape[1]), 4
    ),
    "awq": Encoding(AWQ_CONFIG, lambda x: awq(x, 8), 8),
    "awq, a scale a row": Encoding(AWQ_CONFIG | {"group_size": -1}, lambda x: awq(x, x.shape[1]), 8),
}  # fmt: skip


def stored_name(name: str, end: str) -> str:
    """Return the name in the file of a part of X.weight: X.weight + end, or, for "@end", X.end."""
    return f"{name.removesuffix('weight')}{end[1:]}" if end.startswith("@") else name + end


def write_quantised(tensors: dict[str, Tensor], encoding: Encoding) -> dict[str, Tensor]:
    """Replace, in place, all weights that the encoding takes by their parts; return the numbers they stand for."""
    values = {}
    for name in [name for name, x in tensors.items() if encoding.takes(name, x)]:
        parts, values[name] = encoding.write(tensors.pop(name))
        tensors |= {stored_name(name, end): x for end, x in parts.items()}
    return values

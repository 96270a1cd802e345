"""The block types of GGUF files: numbers in blocks of 32 or 256 with scales, and their decoding to float32.

    Q4_0  d16 | 16 bytes                      x = d (q - 8)
    Q4_1  d16 m16 | 16 bytes                  x = d q + m
    Q5_0  d16 | 4 bytes of fifth bits | 16    x = d (q - 16)
    Q5_1  d16 m16 | 4 | 16                    x = d q + m
    Q8_0  d16 | 32 signed bytes               x = d q
    Q4_K  d16 m16 | 12 bytes | 128            x = (d s_j) q - (m t_j)      8 sub-blocks j of 32; s_j, t_j have 6 bits
    Q5_K  d16 m16 | 12 | 32 | 128             x = (d s_j) q - (m t_j)
    Q6_K  128 | 64 | 16 signed bytes | d16    x = (d s_j) (q - 32)         16 sub-blocks of 16

Where two numbers share a byte, the low half belongs to the first half of the (sub-)block's pair. The order of the
products and sums is the one above, in float32, so that results equal those of llama.cpp's Python package to the bit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockType:
    """The storage of a tensor's numbers in a file.

    Args:
        name: of the type.
        size: numbers in a block.
        nbytes: bytes of a block.
        dtype: of the tensor for callers: its own, or float32 if it is decoded.
        decode: makes float32 `n size` of bytes `n nbytes`; None: the numbers are stored plainly.
        kept: the format of lineate.quantised that keeps codes and scales exactly, if there is one.
        codes: makes codes `n 32` (one per byte, as in lineate.quantised) and scales `n` of bytes, if `kept`.
    """

    name: str
    size: int
    nbytes: int
    dtype: torch.dtype = torch.float32
    decode: Callable[[Tensor], Tensor] | None = None
    kept: str | None = None
    codes: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None


def _scale(blocks: Tensor, first: int) -> Tensor:
    """Return the float16 at this byte of every block, `n 1`, in float32."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(qs: Tensor) -> Tensor:
    """Return the low halves of all bytes of the last dim, then the high halves."""
    return torch.cat([qs & 15, qs >> 4], -1)


def _bits(qh: Tensor) -> Tensor:
    """Return the bits of bytes `n m`, the lowest of each byte first, `n (8 m)`."""
    return (qh[:, :, None] >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1).flatten(1)


def _fives(blocks: Tensor, first: int) -> Tensor:
    """Return the 32 numbers of 5 bits whose fifth bits begin at this byte, the rest four bytes later."""
    return _nibbles(blocks[:, first + 4 :]) | _bits(blocks[:, first : first + 4]) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _scale(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _scale(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _scale(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _scale(blocks, 0) * (_fives(blocks, 2).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _scale(blocks, 0) * _fives(blocks, 4).float() + _scale(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _scale(blocks, 0)


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8 scales and 8 minima of 6 bits from 12 bytes.

    Bytes 0 .. 3 and 4 .. 7 have the first four of each; their two highest bits belong to the last four, whose other
    bits are the halves of bytes 8 .. 11.
    """
    scales, minima, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    last_scales = (rest & 15) | (scales >> 2 & 48)
    last_minima = (rest >> 4) | (minima >> 2 & 48)
    return torch.cat([scales & 63, last_scales], 1), torch.cat([minima & 63, last_minima], 1)


def _with_minima(blocks: Tensor, q: Tensor) -> Tensor:
    """Return the values of numbers `n 8 32`; the blocks begin with d, m and 12 bytes of scales and minima."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    factors = (_scale(blocks, 0) * scales.float())[:, :, None]
    return (factors * q.float() - (_scale(blocks, 2) * minima.float())[:, :, None]).flatten(1)


def _sub_blocks(qs: Tensor) -> Tensor:
    """Return 8 sub-blocks of 32 halves of bytes, `n 8 32`: 32 bytes have two of them, the low halves first."""
    quarters = qs.unflatten(1, (4, 32))
    return torch.stack([quarters & 15, quarters >> 4], 2).flatten(1, 2)


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, _sub_blocks(blocks[:, 16:]))


def _q5_k(blocks: Tensor) -> Tensor:
    bits = torch.arange(8, dtype=torch.uint8, device="cpu")[:, None]
    fifth = blocks[:, None, 16:48] >> bits & 1  # n 8 32: bit j of a byte
    return _with_minima(blocks, _sub_blocks(blocks[:, 48:]) | fifth << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device="cpu")[:, None]
    low = blocks[:, :128].unflatten(1, (2, 1, 64)) >> shifts[::2] & 15
    high = blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts & 3
    q = low.flatten(1) | high.flatten(1) << 4  # halves of 128: low bits of 64 bytes twice, high bits of 32 four times
    factors = _scale(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return (factors[:, :, None] * (q.float() - 32).unflatten(1, (16, 16))).flatten(1)


def _codes_8(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return blocks[:, 2:] ^ 128, blocks[:, :2].contiguous().view(torch.float16)[:, 0]  # -128 .. 127 -> 0 .. 255


def _codes_4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _nibbles(blocks[:, 2:]), blocks[:, :2].contiguous().view(torch.float16)[:, 0]


TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2, torch.float16),
    2: BlockType("Q4_0", 32, 18, decode=_q4_0, kept="int4", codes=_codes_4),
    3: BlockType("Q4_1", 32, 20, decode=_q4_1),
    6: BlockType("Q5_0", 32, 22, decode=_q5_0),
    7: BlockType("Q5_1", 32, 24, decode=_q5_1),
    8: BlockType("Q8_0", 32, 34, decode=_q8_0, kept="int8", codes=_codes_8),
    12: BlockType("Q4_K", 256, 144, decode=_q4_k),
    13: BlockType("Q5_K", 256, 176, decode=_q5_k),
    14: BlockType("Q6_K", 256, 210, decode=_q6_k),
    30: BlockType("BF16", 1, 2, torch.bfloat16),
}
"""The types that can be read, by their number in a file."""
UNREAD = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Names of types that exist and cannot be read, for messages."""

"""Round a float32 memory to bfloat16: to the nearest, or up or down by chance so that the mean is exact.

    nearest       to the nearest bfloat16; to the even one of two that are as near, as Tensor.to(torch.bfloat16) does
    stochastic    away from zero with the probability (x - below) / (above - below), where |below| <= |x| < |above|

bfloat16 is the first 16 bits of float32. So stochastic rounding adds 16 random bits to the last 16, and drops the sum's
last 16. The random bits are a hash of a seed, the head and the place in [k, v], in arithmetic modulo 2^32:

    mix(x)   x ^= x >> 16;  x *= 0x85EBCA6B;  x ^= x >> 13;  x *= 0xC2B2AE35;  x ^= x >> 16
    key      mix(mix(mix(low 32 bits of seed) ^ high 32 bits of seed) ^ head)
    bits     mix(key + i v + j) >> 16                                              of the memory's row i and column j

kernels/portable/rounding.py computes the same bits on a GPU.
"""

import torch
from torch import Tensor

NEAREST, STOCHASTIC = ROUNDINGS = ("nearest", "stochastic")
_ALL = 0xFFFFFFFF


def round_memory(x: Tensor, seeds: Tensor | None = None) -> Tensor:
    """Return x `rows hv k v`, float32, rounded to numbers that bfloat16 has, still in float32.

    Args:
        x: the memory.
        seeds: `rows`, int: rounds stochastically, with the random numbers of these seeds; None: to the nearest.
    """
    if seeds is None:
        return x.to(torch.bfloat16).to(x.dtype)
    bits = (x.contiguous().view(torch.int32) + random_bits(seeds, x.shape[1:])) & ~0xFFFF
    return torch.where(x.isnan(), x, bits.view(torch.float32))  # adding to the bits of NaN may give a number


def random_bits(seeds: Tensor, shape: torch.Size) -> Tensor:
    """Return the 16 random bits `rows hv k v` of every number of memories, int32.

    Args:
        seeds: `rows`, int.
        shape: the shape `hv k v` of a row's memory.
    """
    heads, size = shape[0], shape[1] * shape[2]
    seeds = seeds.to(torch.int64)
    of_row = _mix(_mix(seeds & _ALL) ^ (seeds >> 32 & _ALL))  # rows
    key = _mix(of_row[:, None] ^ torch.arange(heads, device=seeds.device))  # rows hv
    place = torch.arange(size, device=seeds.device)
    bits = _mix(key[..., None] + place & _ALL) >> 16  # rows hv k*v
    return bits.to(torch.int32).view(-1, *shape)


def _mix(x: Tensor) -> Tensor:
    """Return a hash of 32 bits each, in int64."""
    x = (x ^ x >> 16) * 0x85EBCA6B & _ALL
    x = (x ^ x >> 13) * 0xC2B2AE35 & _ALL
    return x ^ x >> 16

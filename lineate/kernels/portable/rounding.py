"""Rounds a memory in registers to bfloat16 numbers, with the random bits of lineate/rounding.py."""

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    """Return a hash of 32 bits, uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def seed_of_head(seed, head):
    """Return the key of a head's random bits, uint32, from the seed of its row, int64."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return _mix(_mix(_mix(low) ^ high) ^ head.to(tl.uint32))


@triton.jit
def _cut(S, added):
    """Return the float32 numbers whose bits are those of S and `added`, summed, without the last 16."""
    bits = (S.to(tl.uint32, bitcast=True) + added) & 0xFFFF0000
    return tl.where(S == S, bits.to(tl.float32, bitcast=True), S)


@triton.jit
def round_nearest(S, INTERPRETED: tl.constexpr):
    """Return float32 numbers rounded to the nearest bfloat16, ties to even; Triton's interpreter cuts, so add there."""
    if INTERPRETED:
        return _cut(S, 0x7FFF + ((S.to(tl.uint32, bitcast=True) >> 16) & 1))
    return S.to(tl.bfloat16).to(tl.float32)


@triton.jit
def round_stochastic(S, key, i, j, V: tl.constexpr):
    """Return a tile of a memory [k, v], float32, rounded stochastically to bfloat16.

    i are its rows and j its columns. The key is added to i first, so that no tile of places stays in registers.
    """
    places = (key + (i * V).to(tl.uint32))[:, None] + j.to(tl.uint32)[None, :]
    return _cut(S, _mix(places) >> 16)

"""bench/models/long_attention.py without a GPU: its cases and its bounds."""

import argparse

import pytest

from bench.models.long_attention import ROWS, bound_us, cases


def cases_of(quick: bool, only: str | None) -> list[tuple[str, int, int, int, bool]]:
    return cases(argparse.Namespace(quick=quick, only=only))


def test_cases():
    every, short = cases_of(False, None), cases_of(True, None)
    assert set(short) < set(every)
    assert {rows for _, rows, _, t, decoding in every if decoding and t == 1} == set(ROWS)
    assert ("kimi", 1, 131072 + 4096, 4096, False) in every
    assert all(decoding for *_, decoding in cases_of(False, "decode"))
    assert not any(decoding for *_, decoding in cases_of(False, "pieces"))
    assert all(n >= t for _, _, n, t, _ in every)


def test_bounds_are_of_bytes_or_of_operations():
    """A token of one row reads its cache once; a piece of latent attention expands the cache and compares pairs."""
    weights = 2 * 32 * 512 * 256
    assert bound_us("kimi", 1, 32768, 1) == pytest.approx(1e6 * (32768 * 1152 + 32 * 320 * 2 + weights) / 4.8e12)
    pairs = 4096 * 4096 + 4096 * 4097 // 2
    flops = weights * 8192 + 2 * 32 * 320 * pairs
    assert bound_us("kimi", 1, 8192, 4096) == pytest.approx(1e6 * flops / 790e12)
    assert bound_us("qwen", 1, 8192, 4096) == pytest.approx(1e6 * 4 * 16 * 256 * pairs / 790e12)

"""bench/models/experts.py without a GPU: its bound, its reference, and the configurations that it tries."""

import pytest
import torch

from bench.models import experts
from lineate.layers import MixtureOfExperts


def layer() -> MixtureOfExperts:
    torch.manual_seed(0)
    return MixtureOfExperts(32, 6, 2, 16, shared_size=16, shared_gate=True).requires_grad_(False)


def test_the_reference_is_the_layer():
    made, x = layer(), torch.randn(5, 32)
    torch.testing.assert_close(experts.reference(made, x, *made.route(x)), made(x))


def test_the_bound_reads_each_touched_weight_once():
    made, x = layer(), torch.randn(1, 32)
    read, us = experts.bound(made, [x])
    others = 6 * 32 + 3 * 32 * 16 + 32
    assert read == 4 * (2 * 3 * 32 * 16 + others)
    assert us == pytest.approx(1e6 * read / experts.BYTES_PER_SECOND)


@pytest.mark.parametrize("rows", [1, 64, 256, 4096])
@pytest.mark.parametrize("first", [False, True])
def test_configurations_differ_and_fit_into_shared_memory(rows, first):
    pytest.importorskip("triton")
    found = list(experts.configurations(rows, first))
    assert len(found) > 4 and len({tuple(x.items()) for x in found}) == len(found)
    for x in found:
        wide = x["BN"] * (2 if first else 1)
        assert 2 * (x["num_stages"] - 1) * x["BK"] * (x["BM"] + wide) < 232448

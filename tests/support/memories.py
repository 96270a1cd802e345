"""Helpers that the tests of the memories that learn share."""

import torch
from torch import Tensor

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def floats(state: dict[str, Tensor]) -> list[Tensor]:
    return [state[name] for name in sorted(state) if name != "position"]


def check_close(got, expected, **tolerance):
    """Check that outputs and states agree, and that states have the same names."""
    (y, state), (wanted, end) = got, expected
    torch.testing.assert_close(y, wanted, **tolerance)
    assert set(state) == set(end)
    for name in end:
        torch.testing.assert_close(state[name], end[name], **tolerance)

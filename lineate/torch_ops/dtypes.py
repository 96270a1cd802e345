"""Parses the names of dtypes, for arguments in Python and on the command line."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

HALF_AND_SINGLE: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
FLOATING = HALF_AND_SINGLE | {"fp64": torch.float64, "float64": torch.float64}
"""The dtypes that a model computes in."""


def parse_dtype(
    given: Any,
    argument: str = "dtype",
    known: Mapping[str, torch.dtype] = FLOATING,
    also: Sequence[str] = (),
) -> torch.dtype:
    """Return the dtype of a name in `known`, or of a torch.dtype among them; also: other choices, for the message."""
    if isinstance(given, torch.dtype) and given in known.values():
        return given
    name = given.removeprefix("torch.") if isinstance(given, str) else ""
    if name not in known:
        choices = ", ".join((*also, *known))
        raise ValueError(f"{argument} must be one of {choices}, got {str(given).removeprefix('torch.')!r}")
    return known[name]


def full_name(name: Any) -> Any:
    """Return "bfloat16" for "bf16", and so on; any other value is returned unchanged."""
    known = FLOATING.get(name) if isinstance(name, str) else None
    return name if known is None else str(known).removeprefix("torch.")

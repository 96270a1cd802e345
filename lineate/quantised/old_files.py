"""The one place where a format is found by the shapes and dtypes of codes and scales: files of before it was stored."""

import torch
from torch import Tensor

from lineate.quantised.format import FORMATS, Format


def format_of_parts(codes: Tensor, scales: Tensor | None) -> Format:
    """Return the format of a weight that torch.save wrote before 0.2.0, which had the formats of then alone."""
    if scales is None:
        return FORMATS[str(codes.dtype).removeprefix("torch.")]
    return FORMATS["fp8" if scales.dtype is torch.float32 else "int8" if codes.shape[-3] == 8 else "int4"]

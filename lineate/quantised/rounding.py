"""Rounds weights to integers of 8 and 4 bits and to float8, by groups of columns, and back.

    int8, int4   weight_rc = scale_rg (code_rc - zero)   g = c / 32;  zero = 128 or 8; the scale is float16
    fp8          weight_rc = scale_rg code_rc            g = c / 128; codes are float8 (e4m3), the scale is float32

Codes are `... rows columns`, one a byte; scales are `... rows groups`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.native import quantised as native
from lineate.native.build import available
from lineate.torch_ops.tracing import is_eager

GROUP = 32
"""Columns of int8 and int4 that share a scale."""
FLOAT8_GROUP = 128
"""Columns of fp8 that share a scale."""
FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of float8."""


class TooLargeError(ValueError):
    """A weight with a number that codes and scales cannot stand for; the message goes on after the weight's name."""


def check_half(x: Tensor) -> None:
    """Raise TooLargeError if a number did not fit when it was rounded to float16."""
    if x.dtype is not torch.float16 or x.is_meta or x.numel() == 0:
        return
    if not all(map(math.isfinite, torch.aminmax(x))):  # makes no tensors of x's size; NaN counts for both
        raise TooLargeError("must have finite numbers of at most 65,504 in size to be kept in float16; use bfloat16")


# ---- integers


def round_to_integers(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round a weight to codes of 8 or 4 bits, whose 0 is in their middle, and scales in float16.

    Raise TooLargeError for numbers that are not finite, or so large that float16 has no scale for them.
    """
    groups = x.detach().float().unflatten(-1, (-1, GROUP))
    scales = _scales(groups, bits)
    if not scales.is_meta and not bool(scales.isfinite().all()):
        raise TooLargeError(
            f"must have finite numbers of at most {65504 * (127 if bits == 8 else 8.5):,.0f} in size to be kept in "
            f"{bits} bits, got {float(groups.abs().amax()):g}; keep it in 16 or 32 bits"
        )
    return _codes(groups, scales, bits)


def integers(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return the numbers of codes `... columns` and scales `... groups`, in float32."""
    x = codes.float().sub_(1 << (bits - 1))
    return x.unflatten(-1, (-1, GROUP)).mul_(scales.float()[..., None]).flatten(-2)


def _codes(groups: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round `... rows groups 32` by scales `... rows groups`; return codes `... rows columns` and the scales."""
    zero = 1 << (bits - 1)
    inverse = torch.where(scales == 0, 0, 1 / scales.float())[..., None]
    return (groups * inverse).round_().clamp_(-zero, zero - 1).add_(zero).to(torch.uint8).flatten(-2), scales


DIVISORS = {8: [127 - 0.5 * n for n in range(15)], 4: [0.125 * n - 8.5 for n in range(18)]}
"""The scales that are tried for a group: its largest number divided by these. Whole numbers find the scale of a weight
that was rounded before. With 4 bits some clip the largest number, and the sign matters, as codes go from -8 to 7."""


def _scales(groups: Tensor, bits: int) -> Tensor:
    """Return the scales with the least squared error, of those that are tried."""
    divisors = torch.tensor(DIVISORS[bits], dtype=torch.float32, device=groups.device)
    if bits == 8:
        scales = groups.abs().amax(-1, keepdim=True) / divisors
        digits = (scales * 2**24).ceil_().clamp_(max=1024).mul_(2**-24)  # where float16 has few, it is not rounded down
        scales = torch.maximum(scales, digits).half()
    else:
        largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))  # ... rows groups 1
        scales = (largest / divisors).half()
    zero = 1 << (bits - 1)
    if groups.is_cpu and groups.numel() and is_eager(groups) and available("products"):
        best = native.best_scales(groups.contiguous(), scales.float(), zero)
    else:
        best = _best_scales(groups, scales.float(), zero)
    return scales.gather(-1, best)[..., 0]


def _best_scales(groups: Tensor, scales: Tensor, zero: int) -> Tensor:
    """Return which of the scales `... candidates` leaves the least squared error of each group, `... 1`."""
    errors = []
    for n in range(scales.shape[-1]):
        factor = scales[..., n, None]
        made = (groups * torch.where(factor == 0, 0, 1 / factor)).round_().clamp_(-zero, zero - 1).mul_(factor)
        errors.append(made.sub_(groups).square_().sum(-1))
    return torch.stack(errors, -1).nan_to_num(torch.inf).argmin(-1, keepdim=True)


# ---- float8


def round_to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round `... columns` to the bytes of float8 and scales `... groups`, which map the largest number to 448."""
    columns = x.shape[-1]
    groups = F.pad(x.detach().float(), (0, -columns % FLOAT8_GROUP)).unflatten(-1, (-1, FLOAT8_GROUP))
    scales = groups.abs().amax(-1) / LARGEST
    made = (groups / torch.where(scales == 0, 1, scales)[..., None]).clamp_(-LARGEST, LARGEST)
    codes = made.to(FLOAT8).flatten(-2)[..., :columns]
    if not scales.is_meta and not bool(scales.isfinite().all()):
        raise TooLargeError("must have finite numbers to be kept in fp8, got one that is not; correct the weight")
    return codes.view(torch.uint8), scales


def float8_numbers(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of codes `... columns`, the bytes of float8, and scales `... groups`, in float32."""
    columns = codes.shape[-1]
    x = codes.view(FLOAT8).float()
    if rest := columns % FLOAT8_GROUP:
        x = F.pad(x, (0, FLOAT8_GROUP - rest))
    return x.unflatten(-1, (-1, FLOAT8_GROUP)).mul_(scales.float()[..., None]).flatten(-2)[..., :columns]


def are_float8_numbers(codes: Tensor) -> bool:
    """Whether none of these bytes of float8 is NaN, which products would take for 480."""
    return not any(bool((part & 127 == 127).any()) for part in codes.flatten().split(2**22))

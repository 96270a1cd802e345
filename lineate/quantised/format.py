"""How a weight of 8 or 4 bits is written: codes in groups of 32 columns, with scales; 16 rows make a tile.

    int8, int4   weight_rc = scale_rg (code_rc - zero)   g = c / 32;  zero = 128 or 8; the scale is float16
    fp8          weight_rc = scale_rg code_rc            g = c / 128; codes are float8 (e4m3), the scale is float32

A tile's codes lie in the order in which a processor multiplies them (native/small.c): group by group, in each group
step by step, and a step has 4 columns of all 16 rows.

    codes   `... tiles groups 8 16 4` uint8          int8: 8 steps
            `... tiles groups 4 16 4` uint8          int4: step s in the low half of a byte, step s + 4 in its high half
            `... tiles groups 8 16 4` uint8          fp8: 8 steps; a byte is a number of float8
    scales  `... tiles groups 16` float16            fp8: `... tiles ceil(columns / 128) 16` float32

Rows are filled up to whole tiles with codes of zero and scales of 0. Files have the same layout as memory. A scale of
fp8 for each row and 128 columns has every scale of a published block of 128 x 128, and one of a row, as it is.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.native import small as native
from lineate.native.build import available
from lineate.torch_ops.tracing import is_eager

GROUP = 32
"""Columns whose codes lie together; those of int8 and int4 share a scale."""
FLOAT8_GROUP = 128
"""Columns of fp8 that share a scale."""
FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of float8."""
TILE = 16
"""Rows whose codes lie side by side."""
STEP = 4
"""Columns of a row that lie side by side."""


@dataclass(frozen=True)
class Format:
    """A way to keep a weight small.

    Args:
        name: of the format.
        bits: of a number.
        dtype: of the numbers, if they have 16 bits; None: codes and scales.
        floating: whether codes are float8 numbers.
    """

    name: str
    bits: int
    dtype: torch.dtype | None = None
    floating: bool = False

    @property
    def zero(self) -> int:
        """The code of 0."""
        return 0 if self.floating else 1 << (self.bits - 1)

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return FLOAT8_GROUP if self.floating else GROUP

    @property
    def codes_dtype(self) -> torch.dtype:
        return self.dtype or torch.uint8

    @property
    def scales_dtype(self) -> torch.dtype:
        return torch.float32 if self.floating else torch.float16

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a weight of this shape, `... rows columns`, can be kept so."""
        return len(shape) >= 2 and (self.dtype is not None or shape[-1] % GROUP == 0) and 0 not in shape

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the shapes of the codes and of the scales, None if there are none, of a weight of this shape."""
        if self.dtype is not None:
            return shape, None
        *front, rows, columns = shape
        tiles, groups = -(-rows // TILE), columns // GROUP
        return (*front, tiles, groups, self.bits, TILE, STEP), (*front, tiles, -(-columns // self.group), TILE)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a weight of this shape."""
        codes, scales = self.shapes(shape)
        factors = 0 if scales is None else torch.Size(scales).numel() * self.scales_dtype.itemsize
        return torch.Size(codes).numel() * self.codes_dtype.itemsize + factors


FORMATS = {
    "bfloat16": Format("bfloat16", 16, torch.bfloat16),
    "float16": Format("float16", 16, torch.float16),
    "int8": Format("int8", 8),
    "int4": Format("int4", 4),
    "fp8": Format("fp8", 8, floating=True),
}
BY_BITS: dict[int | str, str] = {16: "bfloat16", 8: "int8", 4: "int4", "fp8": "fp8"}
"""The format that a number of bits, or a name beside them, stands for."""


class TooLargeError(ValueError):
    """A weight with a number that codes and scales cannot stand for; the message goes on after the weight's name."""


def check_half(x: Tensor) -> None:
    """Raise TooLargeError if a number did not fit when it was rounded to float16."""
    if x.dtype is not torch.float16 or x.is_meta or x.numel() == 0:
        return
    if not all(map(math.isfinite, torch.aminmax(x))):  # makes no tensors of x's size; NaN counts for both
        raise TooLargeError("must have finite numbers of at most 65,504 in size to be kept in float16; use bfloat16")


def are_floating(scales: Tensor) -> bool:
    """Whether these are scales of fp8."""
    return scales.dtype is torch.float32


def encode(x: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Round a weight `... rows columns` to codes of 8 or 4 bits and scales, both in tiles."""
    return to_tiles(*round_to_codes(x, form), form.bits)


def round_to_codes(x: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Round a weight `... rows columns` to codes of its shape, one a byte, and scales `... rows groups`.

    Raise TooLargeError for numbers that are not finite, or so large that float16 has no scale for them.
    """
    if form.floating:
        codes, scales = round_to_float8(x)
        if not scales.is_meta and not bool(scales.isfinite().all()):
            raise TooLargeError("must have finite numbers to be kept in fp8, got one that is not; correct the weight")
        return codes.view(torch.uint8), scales
    bits, groups = form.bits, x.detach().float().unflatten(-1, (-1, GROUP))
    scales = _scales(groups, bits)
    if not scales.is_meta and not bool(scales.isfinite().all()):
        raise TooLargeError(
            f"must have finite numbers of at most {65504 * (127 if bits == 8 else 8.5):,.0f} in size to be kept in "
            f"{bits} bits, got {float(groups.abs().amax()):g}; keep it in 16 or 32 bits"
        )
    return _codes(groups, scales, bits)


def round_to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round `... columns` to float8 and scales `... groups` of 128 columns, which map the largest number to 448."""
    columns = x.shape[-1]
    groups = F.pad(x.detach().float(), (0, -columns % FLOAT8_GROUP)).unflatten(-1, (-1, FLOAT8_GROUP))
    scales = groups.abs().amax(-1) / LARGEST
    made = (groups / torch.where(scales == 0, 1, scales)[..., None]).clamp_(-LARGEST, LARGEST)
    return made.to(FLOAT8).flatten(-2)[..., :columns], scales


def decode(codes: Tensor, scales: Tensor, rows: int) -> Tensor:
    """Return the weight `... rows columns` in float32 that these tiles stand for."""
    plain, factors = from_tiles(codes, scales, rows)
    return _numbers(plain, factors, codes.shape[-3])


def _numbers(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return what codes `... columns`, one a byte, and scales `... groups` stand for, in float32."""
    floating = are_floating(scales)
    x, factors = (codes.view(FLOAT8) if floating else codes).float(), scales.float()[..., None]
    if floating and (rest := x.shape[-1] % FLOAT8_GROUP):
        x = F.pad(x, (0, FLOAT8_GROUP - rest))
    x = x if floating else x.sub_(1 << (bits - 1))
    made = x.unflatten(-1, (-1, FLOAT8_GROUP if floating else GROUP)).mul_(factors).flatten(-2)
    return made[..., : codes.shape[-1]]


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


def to_tiles(codes: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Put codes `... rows columns`, one a byte, and scales `... rows groups` into tiles."""
    *front, rows, columns = codes.shape
    more = -rows % TILE
    if more:
        zero = 0 if are_floating(scales) else 1 << (bits - 1)
        codes = torch.cat([codes, codes.new_full((*front, more, columns), zero)], -2)
        scales = torch.cat([scales, scales.new_zeros(*front, more, scales.shape[-1])], -2)
    tiles = codes.unflatten(-2, (-1, TILE)).unflatten(-1, (-1, 8, STEP))  # ... tiles 16 groups 8 4
    tiles = tiles.movedim(-4, -2)
    tiles = (tiles[..., :4, :, :] | tiles[..., 4:, :, :] << 4) if bits == 4 else tiles
    return tiles.contiguous(), scales.unflatten(-2, (-1, TILE)).transpose(-1, -2).contiguous()


def from_tiles(codes: Tensor, scales: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return codes `... rows columns`, one a byte, and scales `... rows groups`: to_tiles backwards."""
    if codes.shape[-3] == 4:
        codes = torch.cat([codes & 15, codes >> 4], -3)
    plain = codes.movedim(-2, -4).flatten(-3).flatten(-3, -2)  # ... tiles 16 groups 8 4
    return plain[..., :rows, :], scales.transpose(-1, -2).flatten(-3, -2)[..., :rows, :]


def decode_rows(codes: Tensor, scales: Tensor, ids: Tensor) -> Tensor:
    """Return these rows of a weight `rows columns` in float32, `... columns`, as an embedding looks them up."""
    tile, row = ids // TILE, ids % TILE
    found = codes[tile, :, :, row]  # ... groups steps 4
    if codes.shape[-3] == 4:
        found = torch.cat([found & 15, found >> 4], -2)
    return _numbers(found.flatten(-3), scales[tile, :, row], codes.shape[-3])

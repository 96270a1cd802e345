"""How a weight of 8 or 4 bits is written: codes in groups of 32 columns, each with a scale; 16 rows make a tile.

    weight_rc = scale_rg (code_rc - zero)      g = c / 32;  zero = 128 for 8 bits, 8 for 4; the scale is float16

A tile's codes lie in the order in which a processor multiplies them (native/small.c): group by group, in each group
step by step, and a step has 4 columns of all 16 rows.

    codes   `... tiles groups 8 16 4` uint8    8 bits: 8 steps
            `... tiles groups 4 16 4` uint8    4 bits: step s in the low half of a byte, step s + 4 in its high half
    scales  `... tiles groups 16` float16

Rows are filled up to whole tiles with codes of zero and scales of 0. Files have the same layout as memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lineate.native import small as native
from lineate.native.build import available
from lineate.tracing import is_eager

GROUP = 32
"""Columns that share a scale."""
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
    """

    name: str
    bits: int
    dtype: torch.dtype | None = None

    @property
    def zero(self) -> int:
        """The code of 0."""
        return 1 << (self.bits - 1)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a weight of this shape, `... rows columns`, can be kept so."""
        return len(shape) >= 2 and (self.dtype is not None or shape[-1] % GROUP == 0) and 0 not in shape

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the shapes of the codes and of the scales, None if there are none, of a weight of this shape."""
        if self.dtype is not None:
            return shape, None
        *front, rows, columns = shape
        tiles, groups = -(-rows // TILE), columns // GROUP
        return (*front, tiles, groups, self.bits, TILE, STEP), (*front, tiles, groups, TILE)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a weight of this shape."""
        codes, scales = self.shapes(shape)
        itemsize = 1 if self.dtype is None else self.dtype.itemsize
        return torch.Size(codes).numel() * itemsize + (0 if scales is None else 2 * torch.Size(scales).numel())


FORMATS = {
    "bfloat16": Format("bfloat16", 16, torch.bfloat16),
    "float16": Format("float16", 16, torch.float16),
    "int8": Format("int8", 8),
    "int4": Format("int4", 4),
}
BY_BITS = {16: "bfloat16", 8: "int8", 4: "int4"}
"""The format that a number of bits stands for."""


class TooLargeError(ValueError):
    """A weight with a number that codes and scales cannot stand for; the message goes on after the weight's name."""


def check_half(x: Tensor) -> None:
    """Raise TooLargeError if a number did not fit when it was rounded to float16, a few million at a time."""
    if x.dtype is not torch.float16 or x.is_meta:
        return
    for part in x.flatten().split(2**22):
        if not bool(part.isfinite().all()):
            raise TooLargeError(
                "must have finite numbers of at most 65,504 in size to be kept in float16; use bfloat16"
            )


def encode(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round a weight `... rows columns` to codes of 8 or 4 bits and scales, both in tiles."""
    return to_tiles(*round_to_codes(x, bits), bits)


def round_to_codes(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round a weight `... rows columns` to codes of its shape, one a byte, and scales `... rows groups`.

    Raise TooLargeError for numbers that are not finite, or so large that float16 has no scale for them.
    """
    groups = x.detach().float().unflatten(-1, (-1, GROUP))
    scales = _scales_8(groups) if bits == 8 else _scales_4(groups)
    if not scales.is_meta and not bool(scales.isfinite().all()):
        raise TooLargeError(
            f"must have finite numbers of at most {65504 * (127 if bits == 8 else 8.5):,.0f} in size to be kept in "
            f"{bits} bits, got {float(groups.abs().amax()):g}; keep it in 16 or 32 bits"
        )
    return _codes(groups, scales, bits)


def decode(codes: Tensor, scales: Tensor, rows: int) -> Tensor:
    """Return the weight `... rows columns` in float32 that these tiles stand for."""
    plain, factors = from_tiles(codes, scales, rows)
    zero = 1 << (codes.shape[-3] - 1)
    return plain.float().sub_(zero).unflatten(-1, (-1, GROUP)).mul_(factors.float()[..., None]).flatten(-2)


def _codes(groups: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round `... rows groups 32` by scales `... rows groups`; return codes `... rows columns` and the scales."""
    zero = 1 << (bits - 1)
    inverse = torch.where(scales == 0, 0, 1 / scales.float())[..., None]
    return (groups * inverse).round_().clamp_(-zero, zero - 1).add_(zero).to(torch.uint8).flatten(-2), scales


def _scales_8(groups: Tensor) -> Tensor:
    """Return the scales that map the largest number to 127; a tiny one, of few bits in float16, is rounded up."""
    largest = groups.abs().amax(-1)
    scales = (largest / 127).half()
    clips = (scales.float() * 127.5 < largest) & (scales < torch.finfo(torch.float16).tiny)
    return (scales.view(torch.int16) + clips.to(torch.int16)).view(torch.float16)


CANDIDATES = 18
"""Scales that are tried for a group of 4 bits, between those that use all codes and some that clip the largest."""


def _scales_4(groups: Tensor) -> Tensor:
    """Return the scales with the least squared error; codes go from -8 to 7, so that the sign of a scale matters."""
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))  # ... rows groups 1
    divisors = torch.tensor([0.125 * n - 8.5 for n in range(CANDIDATES)], dtype=torch.float32, device=groups.device)
    scales = (largest / divisors).half()
    if groups.is_cpu and groups.numel() and is_eager(groups) and available():
        best = native.best_scales(groups.contiguous(), scales.float())
    else:
        best = _best_scales(groups, scales.float())
    return scales.gather(-1, best)[..., 0]


def _best_scales(groups: Tensor, scales: Tensor) -> Tensor:
    """Return which of the scales `... candidates` leaves the least squared error of each group, `... 1`."""
    errors = []
    for n in range(scales.shape[-1]):
        factor = scales[..., n, None]
        made = (groups * torch.where(factor == 0, 0, 1 / factor)).round_().clamp_(-8, 7).mul_(factor)
        errors.append(made.sub_(groups).square_().sum(-1))
    return torch.stack(errors, -1).nan_to_num(torch.inf).argmin(-1, keepdim=True)


def to_tiles(codes: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Put codes `... rows columns`, one a byte, and scales `... rows groups` into tiles."""
    *front, rows, columns = codes.shape
    more = -rows % TILE
    if more:
        codes = torch.cat([codes, codes.new_full((*front, more, columns), 1 << (bits - 1))], -2)
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
    zero = 1 << (codes.shape[-3] - 1)
    if codes.shape[-3] == 4:
        found = torch.cat([found & 15, found >> 4], -2)
    return (found.flatten(-2).float().sub_(zero) * scales[tile, :, row].float()[..., None]).flatten(-2)

"""Tiles of the matrices of memories that learn: loaded, stored and multiplied, all in float32.

A matrix can be shared by several programs, a group: each has some of the rows or columns, and what all of them need is
added up. Program p of PARTS stores its summand, waits until all have stored theirs (a group runs at one time, which
launch_cooperative_grid sees to), and adds all of them in the order of p: the group agrees to the bit.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineate.kernels.launching import ceil_div, next_power

PRECISION = tl.constexpr("ieee")
"""Of all products; "tf32x3" is the same to float32 on tensor cores."""
NARROWEST = 16
"""Rows or columns of a shared matrix that a program has, at least."""
WARPS_ALONE, WARPS_TOGETHER = 8, 4
"""Of a program that has all of a matrix (4 would spill 16 tokens of 64 channels), and of those that share it."""


@triton.jit
def dot(x, y):
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def load_tile(x, i, j, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x[i, j] of a matrix `ROWS COLUMNS`, 0 outside."""
    mask = (i[:, None] < ROWS) & (j[None, :] < COLUMNS)
    return tl.load(x + i[:, None] * COLUMNS + j[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(x, value, i, j, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    mask = (i[:, None] < ROWS) & (j[None, :] < COLUMNS)
    tl.store(x + i[:, None] * COLUMNS + j[None, :], value, mask=mask)


@triton.jit
def own_room(room, arrived, NUMBERS: tl.constexpr, PARTS: tl.constexpr):
    """Where the summands of NUMBERS numbers and the counter of this program's group lie, which is program_id(0)."""
    group = tl.program_id(0).to(tl.int64)
    return room + group * (2 * PARTS * NUMBERS), arrived + group


@triton.jit
def put_part(x, room, turn, i, j, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's summand x[i, j]; room `2 PARTS ROWS COLUMNS` is the group's, one half for every other turn."""
    if PARTS > 1:
        size = ROWS * COLUMNS
        store_tile(room + ((turn % 2) * PARTS + tl.program_id(1)) * size, x, i, j, ROWS, COLUMNS)


@triton.jit
def meet(arrived, turn, PARTS: tl.constexpr):
    """Waits for the group; arrived: its counter, 0 before turn 0."""
    if PARTS > 1:
        tl.debug_barrier()  # what other threads stored is there for the group
        seen = tl.atomic_add(arrived, 1, sem="acq_rel") + 1
        while seen < (turn + 1) * PARTS:
            seen = tl.atomic_add(arrived, 0, sem="acquire")
        tl.debug_barrier()


@triton.jit
def add_parts(x, room, turn, i, j, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of the group's summands, after they met; of one program alone x."""
    if PARTS > 1:
        size = ROWS * COLUMNS
        mask = (i[:, None] < ROWS) & (j[None, :] < COLUMNS)
        own = room + (turn % 2) * (PARTS * size) + i[:, None] * COLUMNS + j[None, :]
        x = tl.zeros_like(x)
        for part in tl.static_range(PARTS):
            x += tl.load(own + part * size, mask=mask, other=0.0, cache_modifier=".cg")  # others' stores: not from L1
    return x


class Sharing(NamedTuple):
    """How the programs of a group share the rows or columns of a matrix."""

    parts: int
    """Programs of a group."""
    slice: int
    """Rows or columns of each."""
    tile: int
    """Of these at a time."""

    def room(self, groups: int, numbers: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """For summands of so many numbers, and the counters of those who arrived."""
        room = torch.empty(groups, 2, self.parts, numbers, device=device)
        return room, torch.zeros(groups, dtype=torch.int32, device=device)

    @property
    def options(self) -> dict[str, int]:
        """Of the launch. One stage: loads fetched ahead would overtake the stores of the chunk before."""
        if self.parts == 1:
            return {"num_warps": WARPS_ALONE, "num_stages": 1}
        return {"num_warps": WARPS_TOGETHER, "num_stages": 1, "launch_cooperative_grid": True}


def share(groups: int, width: int, tile: int, device: torch.device) -> Sharing:
    """So many groups, tiles of at most `tile`: as many programs as run at one time; one each where no GPU is there."""
    most = min(ceil_div(width, NARROWEST), _multiprocessors(device) // groups) if device.type == "cuda" else 1
    return divided(width, tile, 1 << (max(most, 1).bit_length() - 1))


def divided(width: int, tile: int, parts: int) -> Sharing:
    """Among so many programs; the last may have less, or nothing."""
    own = ceil_div(width, parts)
    tile = min(tile_size(own), tile)
    return Sharing(parts, ceil_div(own, tile) * tile, tile)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def tile_size(n: int) -> int:
    """The tile of n rows or columns: a power of two, and tl.dot takes no less than 16."""
    return max(next_power(n), 16)

"""Functions that load, store and multiply tiles of the matrices of memories that learn, all in float32.

Several programs, a group, can share a matrix: each has some of its rows or columns, and they sum the quantities that
all of them need. Program p of PARTS stores its summand, waits until all have stored theirs (launch_cooperative_grid
makes a group run at one time), and adds all summands in the order of p, so the group agrees to the bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineate.kernels.launching import ceil_div, multiprocessors, next_power

PRECISION = tl.constexpr("ieee")
"""The precision of all products; "tf32x3" gives the same float32 results on tensor cores."""
NARROWEST = 16
"""The least number of rows or columns of a shared matrix that a program has."""
WARPS_ALONE, WARPS_TOGETHER = 8, 4
"""Warps of a program that has a whole matrix (4 would spill 16 tokens of 64 channels), and of those that share one."""


@triton.jit
def dot(x, y):
    return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def load_tile(x, i, j, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load x[i, j] of a matrix `ROWS COLUMNS`, 0 outside."""
    mask = (i[:, None] < ROWS) & (j[None, :] < COLUMNS)
    return tl.load(x + i[:, None] * COLUMNS + j[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(x, value, i, j, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    mask = (i[:, None] < ROWS) & (j[None, :] < COLUMNS)
    tl.store(x + i[:, None] * COLUMNS + j[None, :], value, mask=mask)


@triton.jit
def own_room(room, arrived, NUMBERS: tl.constexpr, PARTS: tl.constexpr):
    """Return the memory of the summands (NUMBERS numbers) of this program's group, program_id(0), and its counter."""
    group = tl.program_id(0).to(tl.int64)
    return room + group * (2 * PARTS * NUMBERS), arrived + group


@triton.jit
def put_part(x, room, turn, i, j, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store this program's summand x[i, j] in the group's buffer `2 PARTS ROWS COLUMNS`, whose halves alternate."""
    if PARTS > 1:
        size = ROWS * COLUMNS
        store_tile(room + ((turn % 2) * PARTS + tl.program_id(1)) * size, x, i, j, ROWS, COLUMNS)


@triton.jit
def meet(arrived, turn, PARTS: tl.constexpr):
    """Wait for the group to arrive; arrived is its counter, which is 0 before turn 0."""
    if PARTS > 1:
        tl.debug_barrier()  # the group must see the stores of all threads of this program
        seen = tl.atomic_add(arrived, 1, sem="acq_rel") + 1
        while seen < (turn + 1) * PARTS:
            seen = tl.atomic_add(arrived, 0, sem="acquire")
        tl.debug_barrier()


@triton.jit
def add_parts(x, room, turn, i, j, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sum of the group's summands, once the group has met; return x if the group is one program."""
    if PARTS > 1:
        size = ROWS * COLUMNS
        mask = (i[:, None] < ROWS) & (j[None, :] < COLUMNS)
        own = room + (turn % 2) * (PARTS * size) + i[:, None] * COLUMNS + j[None, :]
        x = tl.zeros_like(x)
        for part in tl.static_range(PARTS):
            # Other programs stored these, so they must not be read from L1.
            x += tl.load(own + part * size, mask=mask, other=0.0, cache_modifier=".cg")
    return x


@triton.jit
def sum_parts(x, room, arrived, turn, i, j, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sum of the summands x[i, j] of the group's programs."""
    put_part(x, room, turn, i, j, PARTS, ROWS, COLUMNS)
    meet(arrived, turn, PARTS)
    return add_parts(x, room, turn, i, j, PARTS, ROWS, COLUMNS)


class Walk(NamedTuple):
    """The cells that the programs of a walk visit: cell base[j] + row is the row's j-th chunk."""

    base: Tensor
    """The first cell of each chunk, int32."""
    chunks: Tensor
    """How many chunks each row has, int32: at least 1, and no row has more than the one before it."""
    cells: int


class Sharing(NamedTuple):
    """The shares of a group's programs in the rows or columns of a matrix."""

    parts: int
    """The number of programs of a group."""
    slice: int
    """The rows or columns of each program."""
    tile: int
    """The rows or columns that a program takes at a time."""

    def room(self, groups: int, numbers: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the memory for summands of this many numbers, and the groups' counters."""
        room = torch.empty(groups, 2, self.parts, numbers, device=device)
        return room, torch.zeros(groups, dtype=torch.int32, device=device)

    @property
    def options(self) -> dict[str, int]:
        """The options of the launch.

        There is one stage, because loads fetched ahead would overtake the stores of the previous chunk.
        """
        if self.parts == 1:
            return {"num_warps": WARPS_ALONE, "num_stages": 1}
        return {"num_warps": WARPS_TOGETHER, "num_stages": 1, "launch_cooperative_grid": True}


def share(groups: int, width: int, tile: int, device: torch.device) -> Sharing:
    """Return the division of matrices among the programs of `groups` groups, in tiles of at most `tile`.

    A group gets as many programs as the GPU can run at one time, or one program if there is no GPU.
    """
    most = min(ceil_div(width, NARROWEST), multiprocessors(device) // groups) if device.type == "cuda" else 1
    return divided(width, tile, 1 << (max(most, 1).bit_length() - 1))


def divided(width: int, tile: int, parts: int) -> Sharing:
    """Return the division of a matrix among `parts` programs; the last ones may have less, or nothing."""
    own = ceil_div(width, parts)
    tile = min(tile_size(own), tile)
    return Sharing(parts, ceil_div(own, tile) * tile, tile)


def tile_size(n: int) -> int:
    """Return the tile size for n rows or columns: a power of two, and at least 16 for tl.dot."""
    return max(next_power(n), 16)

"""The elementwise steps of LaCT's scan, one launch each, with the same names as in lineate/memory/lact/steps.py.

With a | u `r c 2E`, z `r c E` and rates `r c 3`, the steps are (s and hidden for each token):

    s = [rate0 z u silu'(a), rate2 z silu(a)],  hidden = rate1 silu(a) u
    C = sums + mean * previous,  x = C / (|C| + eps)                   for each of the three matrices, `E D`
    M' = M + step,  its rows (for W1^T: columns) rescaled to norms     M = [W0; W2; W1^T] `r 3E D`

Tiles are [ROWS, BE] of tokens, [ROWS, BD] of the rows of W0 and W2, [BR, BC] of W1^T. All arithmetic is float32.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineate.kernels.launching import ceil_div, next_power, start
from lineate.kernels.layers.ops import glu

__all__ = [
    "change",
    "change_backward",
    "glu",
    "glu_backward",
    "rescale",
    "rescale_backward",
    "writes",
    "writes_backward",
]

# Tokens


@triton.jit
def _silu(a):
    """Return silu(a), its slope, and the slope's slope."""
    gate = tl.sigmoid(a)
    opened = a * gate
    fall = gate * (1.0 - gate)
    return opened, gate + a * fall, fall * (2.0 + a * (1.0 - 2.0 * gate))


@triton.jit
def _load_rates(rates, r, rows):
    rates += r.to(tl.int64) * 3
    rate0 = tl.load(rates, mask=r < rows, other=0.0)
    rate1 = tl.load(rates + 1, mask=r < rows, other=0.0)
    rate2 = tl.load(rates + 2, mask=r < rows, other=0.0)
    return rate0[:, None], rate1[:, None], rate2[:, None]


@triton.jit
def _places(r, j, rows, E: tl.constexpr):
    """Return which elements of a tile exist, their offsets in `rows E`, and those in the first half of `rows 2E`."""
    has = (r < rows)[:, None] & (j < E)[None, :]
    r = r.to(tl.int64)[:, None]
    return has, r * E + j[None, :], r * (2 * E) + j[None, :]


@triton.jit
def _tile(E: tl.constexpr, ROWS: tl.constexpr, BE: tl.constexpr):
    """Return the rows and columns of this program's tile."""
    BLOCKS: tl.constexpr = (E + BE - 1) // BE
    r = (tl.program_id(0) // BLOCKS) * ROWS + tl.arange(0, ROWS)
    return r, (tl.program_id(0) % BLOCKS) * BE + tl.arange(0, BE)


@triton.jit(do_not_specialize=["rows"])
def write_tokens(au, z, rates, s, hidden, rows, E: tl.constexpr, ROWS: tl.constexpr, BE: tl.constexpr):
    """Store s and hidden; one program takes one tile."""
    r, j = _tile(E, ROWS, BE)
    has, at, wide = _places(r, j, rows, E)
    u = tl.load(au + wide + E, mask=has, other=0.0)
    back = tl.load(z + at, mask=has, other=0.0)
    opened, slope, _ = _silu(tl.load(au + wide, mask=has, other=0.0))
    rate0, rate1, rate2 = _load_rates(rates, r, rows)
    tl.store(s + wide, rate0 * back * u * slope, mask=has)
    tl.store(s + wide + E, rate2 * back * opened, mask=has)
    tl.store(hidden + at, rate1 * opened * u, mask=has)


@triton.jit(do_not_specialize=["rows"])
def write_tokens_backward(
    au, z, rates, ds, dhidden, drates, rows, E: tl.constexpr, ROWS: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """Overwrite a | u and z with their gradients, where e_i is rate_i times the gradient of the write into W_i:

        da = z (e0 u silu'' + e2 silu') + e1 u silu'    du = e0 z silu' + e1 silu    dz = e0 u silu' + e2 silu

    Also overwrite ds and dhidden with s and hidden. One program takes ROWS whole rows.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rate0, rate1, rate2 = _load_rates(rates, r, rows)
    drate0 = tl.zeros((ROWS,), tl.float32)
    drate1 = tl.zeros((ROWS,), tl.float32)
    drate2 = tl.zeros((ROWS,), tl.float32)
    for first in range(0, E, BE):
        j = first + tl.arange(0, BE)
        has, at, wide = _places(r, j, rows, E)
        u = tl.load(au + wide + E, mask=has, other=0.0)
        back = tl.load(z + at, mask=has, other=0.0)
        ds0 = tl.load(ds + wide, mask=has, other=0.0)
        ds2 = tl.load(ds + wide + E, mask=has, other=0.0)
        d1 = tl.load(dhidden + at, mask=has, other=0.0)
        opened, slope, bend = _silu(tl.load(au + wide, mask=has, other=0.0))
        drate0 += tl.sum(ds0 * back * u * slope, 1)
        drate1 += tl.sum(d1 * opened * u, 1)
        drate2 += tl.sum(ds2 * back * opened, 1)
        e0, e1, e2 = rate0 * ds0, rate1 * d1, rate2 * ds2
        tl.store(au + wide, back * (e0 * u * bend + e2 * slope) + e1 * u * slope, mask=has)
        tl.store(au + wide + E, e0 * back * slope + e1 * opened, mask=has)
        tl.store(z + at, e0 * u * slope + e2 * opened, mask=has)
        tl.store(ds + wide, rate0 * back * u * slope, mask=has)
        tl.store(ds + wide + E, rate2 * back * opened, mask=has)
        tl.store(dhidden + at, rate1 * opened * u, mask=has)
    drates += r.to(tl.int64) * 3
    tl.store(drates, drate0, mask=r < rows)
    tl.store(drates + 1, drate1, mask=r < rows)
    tl.store(drates + 2, drate2, mask=r < rows)


@triton.jit(do_not_specialize=["rows"])
def read_tokens_backward(au, dhidden, dau, rows, E: tl.constexpr, ROWS: tl.constexpr, BE: tl.constexpr):
    """Store da = dhidden u silu'(a), du = dhidden silu(a), and overwrite dhidden by silu(a) u."""
    r, j = _tile(E, ROWS, BE)
    has, at, wide = _places(r, j, rows, E)
    u = tl.load(au + wide + E, mask=has, other=0.0)
    d = tl.load(dhidden + at, mask=has, other=0.0)
    opened, slope, _ = _silu(tl.load(au + wide, mask=has, other=0.0))
    tl.store(dau + wide, d * u * slope, mask=has)
    tl.store(dau + wide + E, d * opened, mask=has)
    tl.store(dhidden + at, opened * u, mask=has)


# Matrices. For C, a program takes a matrix of N numbers; for M, some rows of W0 and W2, or columns of W1^T.


@triton.jit
def _load_change(sums, previous, mean, at, has):
    """Return C; the multiplication and addition are fused by hand, so that both passes have the same bits."""
    return tl.fma(mean, tl.load(previous + at, mask=has, other=0.0), tl.load(sums + at, mask=has, other=0.0))


@triton.jit
def make_change(sums, mean, previous, changes, x, eps, N: tl.constexpr, BN: tl.constexpr):
    """Store C and C / (|C| + eps)."""
    n = tl.program_id(0)
    j = n.to(tl.int64) * N + tl.arange(0, BN)
    momentum = tl.load(mean + n // 3)
    squares = tl.zeros((BN,), tl.float32)
    for first in range(0, N, BN):
        found = _load_change(sums, previous, momentum, first + j, first + tl.arange(0, BN) < N)
        squares += found * found
    size = 1.0 / (tl.sqrt_rn(tl.sum(squares, 0)) + eps)
    for first in range(0, N, BN):
        has = first + tl.arange(0, BN) < N
        found = _load_change(sums, previous, momentum, first + j, has)
        tl.store(changes + first + j, found, mask=has)
        tl.store(x + first + j, found * size, mask=has)


@triton.jit
def make_change_backward(
    dx, x, size, inverse, base, mean, dchanges, dprevious, N: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Store dC = base + dx size - x <dx, x> / |C| and dprevious = mean dC; base may be None."""
    n = tl.program_id(0)
    j = n.to(tl.int64) * N + tl.arange(0, BN)
    products = tl.zeros((BN,), tl.float32)
    for first in range(0, N, BN):
        has = first + tl.arange(0, BN) < N
        d = tl.load(dx + first + j, mask=has, other=0.0)
        products += d * tl.load(x + first + j, mask=has, other=0.0)
    dot = tl.sum(products, 0) * tl.load(inverse + n)
    scale = tl.load(size + n)
    momentum = tl.load(mean + n // 3)
    for first in range(0, N, BN):
        has = first + tl.arange(0, BN) < N
        d = tl.load(dx + first + j, mask=has, other=0.0) * scale
        d -= tl.load(x + first + j, mask=has, other=0.0) * dot
        if base is not None:
            d += tl.load(base + first + j, mask=has, other=0.0)
        tl.store(dchanges + first + j, d, mask=has)
        tl.store(dprevious + first + j, d * momentum, mask=has)


@triton.jit
def _load_sum(x, y, at, has):
    """Return x + y; y may be None."""
    found = tl.load(x + at, mask=has, other=0.0)
    if y is not None:
        found += tl.load(y + at, mask=has, other=0.0)
    return found


@triton.jit
def _bend(dnorm, scale, length):
    """Return <given, x> norm / (l (l + eps)^2), or 0 if the length is 0."""
    return tl.where(length > 0, dnorm * scale / tl.where(length > 0, length, 1.0), 0.0)


@triton.jit
def _rescale_rows(
    x, step, given, norms, out, dnorms, eps, i, E: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Rescale the rows i of W0 and W2."""
    j = tl.arange(0, BD)
    has = (i < 2 * E)[:, None] & (j < D)[None, :]
    at = i[:, None] * D + j[None, :]
    tile = _load_sum(x, step, at, has)
    length = tl.sqrt_rn(tl.sum(tile * tile, 1))
    inverse = 1.0 / (length + eps)
    scale = tl.load(norms + i, mask=i < 2 * E, other=0.0) * inverse
    if given is None:
        tl.store(out + at, tile * scale[:, None], mask=has)
    else:
        d = tl.load(given + at, mask=has, other=0.0)
        dnorm = tl.sum(d * tile, 1) * inverse
        tl.store(dnorms + i, dnorm, mask=i < 2 * E)
        tl.store(out + at, d * scale[:, None] - tile * _bend(dnorm, scale, length)[:, None], mask=has)


@triton.jit
def _rescale_columns(
    x, step, given, norms, out, dnorms, eps, j, E: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Rescale the columns j of W1^T, which follows W0 and W2 in memory."""
    squares = tl.zeros((BR, BC), tl.float32)
    products = tl.zeros((BR, BC), tl.float32)
    for first in range(0, E, BR):
        i = first + tl.arange(0, BR)
        has = (i < E)[:, None] & (j < D)[None, :]
        at = (2 * E + i)[:, None] * D + j[None, :]
        tile = _load_sum(x, step, at, has)
        squares += tile * tile
        if given is not None:
            products += tile * tl.load(given + at, mask=has, other=0.0)
    length = tl.sqrt_rn(tl.sum(squares, 0))
    inverse = 1.0 / (length + eps)
    scale = tl.load(norms + j, mask=j < D, other=0.0) * inverse
    dnorm = tl.sum(products, 0) * inverse
    if given is not None:
        tl.store(dnorms + j, dnorm, mask=j < D)
    bend = _bend(dnorm, scale, length)
    for first in range(0, E, BR):
        i = first + tl.arange(0, BR)
        has = (i < E)[:, None] & (j < D)[None, :]
        at = (2 * E + i)[:, None] * D + j[None, :]
        tile = _load_sum(x, step, at, has)
        if given is None:
            tl.store(out + at, tile * scale[None, :], mask=has)
        else:
            d = tl.load(given + at, mask=has, other=0.0)
            tl.store(out + at, d * scale[None, :] - tile * bend[None, :], mask=has)


@triton.jit
def rescale_lines(
    x, step, given, rows, columns, out, drows, dcolumns, eps,
    E: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store x + step with its lines, of length l, rescaled; with given, store the gradients by x and the norms.

        out = x norm / (l + eps)
        dx = given norm / (l + eps) - x <given, x> norm / (l (l + eps)^2),  dnorm = <given, x> / (l + eps)

    Of the programs of each M, the first take rows of W0 and W2, the others columns of W1^T.
    """
    ROW_BLOCKS: tl.constexpr = (2 * E + ROWS - 1) // ROWS
    PROGRAMS: tl.constexpr = ROW_BLOCKS + (D + BC - 1) // BC
    n = tl.program_id(0) // PROGRAMS
    block = tl.program_id(0) % PROGRAMS
    at = n.to(tl.int64) * (3 * E * D)
    x += at
    out += at
    if step is not None:
        step += at
    if given is not None:
        given += at
        drows += n * (2 * E)
        dcolumns += n * D
    if block < ROW_BLOCKS:
        i = block * ROWS + tl.arange(0, ROWS)
        _rescale_rows(x, step, given, rows + n * (2 * E), out, drows, eps, i, E, D, BD)
    else:
        j = (block - ROW_BLOCKS) * BC + tl.arange(0, BC)
        _rescale_columns(x, step, given, columns + n * D, out, dcolumns, eps, j, E, D, BR, BC)


# Launches


def _token_tiles(z: Tensor, elements: int) -> tuple[int, dict[str, int]]:
    """Return how many tokens there are, and the sizes of a tile of this many elements."""
    e = z.shape[-1]
    width = min(1024, next_power(e))
    return z.numel() // e, {"E": e, "ROWS": max(elements // width, 1), "BE": width, "num_warps": 4}


def _programs(rows: int, tile: dict[str, int]) -> int:
    return ceil_div(rows, tile["ROWS"]) * ceil_div(tile["E"], tile["BE"])


def writes(au: Tensor, z: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """Compute steps.writes in one launch."""
    s, hidden = torch.empty_like(au), torch.empty_like(z)
    rows, tile = _token_tiles(z, 2048)
    with torch.cuda.device_of(z):
        start(write_tokens, (_programs(rows, tile),))(au, z, rates, s, hidden, rows, **tile)
    return s, hidden


def writes_backward(au: Tensor, z: Tensor, rates: Tensor, ds: Tensor, dhidden: Tensor, drates: Tensor) -> None:
    """Compute steps.writes_backward in one launch."""
    rows, tile = _token_tiles(z, 1024)
    with torch.cuda.device_of(z):
        start(write_tokens_backward, (ceil_div(rows, tile["ROWS"]),))(au, z, rates, ds, dhidden, drates, rows, **tile)


def glu_backward(au: Tensor, dhidden: Tensor) -> tuple[Tensor, Tensor]:
    """Compute steps.glu_backward in one launch."""
    dau = torch.empty_like(au)
    rows, tile = _token_tiles(dhidden, 2048)
    with torch.cuda.device_of(au):
        start(read_tokens_backward, (_programs(rows, tile),))(au, dhidden, dau, rows, **tile)
    return dhidden, dau


def _matrix_tiles(e: int, d: int) -> dict[str, int]:
    return {"N": e * d, "BN": min(8192, next_power(e * d)), "num_warps": 16}


def change(sums: Tensor, mean: Tensor, previous: Tensor, out: Tensor, eps: float) -> Tensor:
    """Compute steps.change in one launch."""
    r, e, d = sums.shape[0], sums.shape[1] // 3, sums.shape[2]
    x = sums.new_empty(3 * r, e, d)
    with torch.cuda.device_of(sums):
        start(make_change, (3 * r,))(sums, mean.contiguous(), previous, out, x, eps, **_matrix_tiles(e, d))
    return x


def change_backward(
    dx: Tensor, at: tuple[Tensor, Tensor, Tensor], base: Tensor | None, mean: Tensor, out: Tensor
) -> Tensor:  # fmt: skip
    """Compute steps.change_backward in one launch; `at` is x, size and inverse of the unit matrices."""
    x, size, inverse = at
    dprevious = torch.empty_like(out)
    base = None if base is None else base.contiguous()
    with torch.cuda.device_of(dx):
        start(make_change_backward, (dx.shape[0],))(
            dx.contiguous(), x.contiguous(), size.contiguous(), inverse.contiguous(), base, mean.contiguous(),
            out, dprevious, **_matrix_tiles(*dx.shape[1:]),
        )  # fmt: skip
    return dprevious


def rescale(matrices: Tensor, step: Tensor, norms: Sequence[Tensor], out: Tensor, eps: float) -> None:
    """Compute steps.rescale in one launch."""
    _rescale(matrices, step, None, norms, out, (None, None), eps)


def rescale_backward(
    given: Tensor, moved: Tensor, norms: Sequence[Tensor], dnorms: Sequence[Tensor], eps: float
) -> Tensor:  # fmt: skip
    """Compute steps.rescale_backward in one launch."""
    dmoved = torch.empty_like(moved)
    _rescale(moved, None, given.contiguous(), norms, dmoved, dnorms, eps)
    return dmoved


def _rescale(
    x: Tensor, step: Tensor | None, given: Tensor | None, norms: Sequence[Tensor], out: Tensor,
    dnorms: Sequence[Tensor | None], eps: float,
) -> None:  # fmt: skip
    r, e, d = x.shape[0], x.shape[1] // 3, x.shape[2]
    wide = next_power(d)
    tile = {"ROWS": max(4096 // wide, 1), "BD": wide, "BR": min(64, next_power(e)), "BC": min(32, wide)}
    programs = r * (ceil_div(2 * e, tile["ROWS"]) + ceil_div(d, tile["BC"]))
    with torch.cuda.device_of(x):
        start(rescale_lines, (programs,))(
            x, step, given, *(y.contiguous() for y in norms), out, *dnorms, eps, E=e, D=d, **tile, num_warps=4
        )

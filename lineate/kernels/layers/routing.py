"""The router of a mixture of experts, in two launches without waiting for the device.

    l = x R^T, or norm(x) R^T      scores `rows experts`, and the shared expert's gate as one more column
    s = softmax(l), or sigmoid(l)
    c = the `active` largest of s (sigmoid: of s + bias, within the best groups)
    w = scale s_c / sum s_c        and sigmoid(gate), or 1, for the shared expert

Experts are chosen by l (sigmoid: by s + bias) in float32, in descending order; of equal scores the expert of the lowest
index comes first, and NaN counts as the largest number. torch.topk chooses the same experts where scores differ, and
any of equal ones. A shared expert is the last column of weights and experts, with the number `experts`.

A row's sums do not depend on the other rows: up to FEW rows, or in a batch-invariant step all rows, have one
configuration, more rows another.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lineate.kernels.launching import ceil_div, next_power, overlap_options, start
from lineate.kernels.layers.products import Norm
from lineate.torch_ops.invariance import is_batch_invariant

FEW = 64
"""Up to this many rows are multiplied in the configuration of one row."""
SPLIT = 8
"""Sums that the product of few rows cuts the channels into."""
WIDEST = 4096
"""The most experts, after rounding up groups and their sizes to powers of two."""


@dataclass(frozen=True)
class Routing:
    """How a router chooses experts; see lineate.layers.MixtureOfExperts.

    Args:
        active: experts that a token goes to.
        sigmoid: whether scores are sigmoids, otherwise a softmax.
        renormalize: whether the weights of a token's experts sum to 1.
        scale: multiplies these weights.
        groups: groups of experts.
        active_groups: groups that a token's experts come from.
    """

    active: int
    sigmoid: bool
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    active_groups: int = 1


@triton.jit(do_not_specialize=["rows"])
def score_experts(
    x, norm, router, gate, logits, normed, rows, eps,
    EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr,
    BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, SHIFT: tl.constexpr, EXACT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """BE columns of logits `parts rows COLUMNS` of BM rows of x `rows K`; part p sums PART channels from p PART on.

    With the weight `K` of an RMSNorm, x is one row, and the norm of it is multiplied and stored in normed `1 K`.
    """
    TILES: tl.constexpr = (COLUMNS + BE - 1) // BE
    part = tl.program_id(0) // TILES
    n = tl.program_id(0) % TILES * BE + tl.arange(0, BE)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    i = tl.arange(0, BK)
    at_w = router + n[None, :].to(tl.int64) * K
    if gate is not None:
        at_w = tl.where((n < EXPERTS)[None, :], at_w, gate + n[None, :] * 0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at_x = x + m[:, None].to(tl.int64) * K
    if norm is not None:
        j = tl.arange(0, WIDTH)
        whole = tl.load(x + j, mask=j < K, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(whole * whole, 0) * (1.0 / K) + eps)
    total = tl.zeros((BM, BE), tl.float32)
    for step in range(0, PART, BK):
        k = part * PART + step + i
        a = tl.load(at_x + k[None, :], mask=(m < rows)[:, None] & (k < K)[None, :], other=0.0)
        if norm is not None:
            factor = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32) + SHIFT
            a = (a.to(tl.float32) * inverse * factor[None, :]).to(x.dtype.element_ty)
            if tl.program_id(0) % TILES == 0:
                tl.store(normed + m[:, None] * K + k[None, :], a, mask=(m < rows)[:, None] & (k < K)[None, :])
        w = tl.load(at_w + k[:, None], mask=(n < COLUMNS)[None, :] & (k < K)[:, None], other=0.0)
        if EXACT:
            total = tl.dot(a, w, total, input_precision="ieee")
        else:
            total = tl.dot(a, w, total)
    at = (part * rows + m).to(tl.int64)[:, None] * COLUMNS + n[None, :]
    tl.store(logits + at, total, mask=(m < rows)[:, None] & (n < COLUMNS)[None, :])


@triton.jit
def _ordered(x):
    """Return integers in the order of x, where NaN is the largest and -0 equals 0."""
    x = tl.where(x != x, float("inf"), x + 0.0)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit(do_not_specialize=["rows"])
def choose_experts(
    logits, bias, weights, chosen, rows, scale,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, ACTIVE: tl.constexpr, WIDTH: tl.constexpr,
    NAMED: tl.constexpr, GROUPS: tl.constexpr, ACTIVE_GROUPS: tl.constexpr,
    BG: tl.constexpr, BS: tl.constexpr, BA: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, ROUND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Choose ACTIVE experts of a row: weights `rows WIDTH`, chosen `rows NAMED` from logits `PARTS rows COLUMNS`.

    Experts are `BG groups, BS places`. WIDTH, NAMED > ACTIVE: there is a shared expert, or it is named, too. logits are
    rounded to the dtype ROUND.
    """
    REMOVED: tl.constexpr = -(2**31)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BG)
    place = tl.arange(0, BS)
    there = (group < GROUPS)[:, None] & (place < SIZE)[None, :]
    expert = group[:, None] * SIZE + place[None, :]
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at = row * COLUMNS + expert
    found = tl.zeros((BG, BS), tl.float32)
    for part in tl.static_range(PARTS):
        found += tl.load(logits + part * rows.to(tl.int64) * COLUMNS + at, mask=there, other=0.0)
    found = found.to(ROUND).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-found))
        wanted = scores + tl.load(bias + expert, mask=there, other=0.0).to(tl.float32)
    else:
        most = tl.max(tl.max(tl.where(there, found, float("-inf")), 1), 0)
        scores = tl.where(there, tl.exp(found - most), 0.0)
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
        wanted = found
    if GROUPS > 1:
        place_rank = tl.where(there, _ordered(wanted), REMOVED)
        first = tl.max(place_rank, 1)
        best_place = tl.min(tl.where(place_rank == first[:, None], place[None, :], BS), 1)
        best = tl.sum(tl.where(place[None, :] == best_place[:, None], wanted, 0.0), 1)
        others = there & (place[None, :] != best_place[:, None])
        second = tl.max(tl.where(others, wanted, float("-inf")), 1)
        rank = tl.where(group < GROUPS, _ordered(best + second), REMOVED)
        opened = group < 0
        for _ in tl.static_range(ACTIVE_GROUPS):
            top = tl.max(rank, 0)
            one = tl.min(tl.where(rank == top, group, BG), 0)
            opened = opened | (group == one)
            rank = tl.where(group == one, REMOVED, rank)
        wanted = tl.where(opened[:, None], wanted, float("-inf"))
    rank = tl.where(there, _ordered(wanted), REMOVED)
    rank = tl.reshape(rank, (BG * BS,))
    flat = tl.reshape(tl.where(there, expert, EXPERTS), (BG * BS,))
    scores = tl.reshape(scores, (BG * BS,))
    a = tl.arange(0, BA)
    kept = tl.zeros((BA,), tl.float32)
    names = tl.zeros((BA,), tl.int32) + EXPERTS
    for i in tl.static_range(ACTIVE):
        top = tl.max(rank, 0)
        one = tl.min(tl.where(rank == top, flat, EXPERTS - 1), 0)
        kept = tl.where(a == i, tl.sum(tl.where(flat == one, scores, 0.0), 0), kept)
        names = tl.where(a == i, one, names)
        rank = tl.where(flat == one, REMOVED, rank)
    if RENORMALIZE:
        kept = kept / tl.sum(kept, 0)
    kept *= scale
    if WIDTH > ACTIVE:
        opening = 1.0
        if COLUMNS > EXPERTS:
            opening = 0.0
            for part in tl.static_range(PARTS):
                opening += tl.load(logits + (part * rows.to(tl.int64) + row) * COLUMNS + EXPERTS)
            opening = 1.0 / (1.0 + tl.exp(-opening))
        kept = tl.where(a == ACTIVE, opening, kept)
    tl.store(weights + row * WIDTH + a, kept, mask=a < WIDTH)
    tl.store(chosen + row * NAMED + a, names, mask=a < NAMED)


_NAMES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def fits(routing: Routing, experts: int) -> bool:
    """Whether `choose` supports this number of experts."""
    size = experts // routing.groups
    if size * routing.groups != experts or not 0 < routing.active <= experts:
        return False
    if routing.groups > 1 and (size < 2 or routing.active > size * routing.active_groups):
        return False
    return next_power(routing.groups) * next_power(size) <= WIDEST


def score(
    x: Tensor,
    router: Tensor,
    gate: Tensor | None,
    tile: dict[str, int] | None = None,
    *,
    norm: Norm | None = None,
    normed: Tensor | None = None,
) -> Tensor:
    """Return the sums of the products x router^T, and x gate^T as a last column: `parts rows columns` in float32.

    Args:
        x: `rows k`, dense.
        router: `experts k` in the dtype of x.
        gate: `1 k`, or None.
        tile: The configuration of the kernel; None: the one for this number of rows.
        norm: An RMSNorm of x, which is then one row; its result is multiplied.
        normed: Where the result of the norm is stored, `1 k`.
    """
    assert norm is None or (len(x) == 1 and normed is not None)
    (rows, k), experts = x.shape, router.shape[0]
    columns = experts + (gate is not None)
    if tile is None:
        tile = tile_of_scores(rows, x.dtype)
    options = dict(tile)
    split = options.pop("SPLIT")
    part = ceil_div(ceil_div(k, options["BK"]), split) * options["BK"]
    parts = ceil_div(k, part)
    logits = torch.empty(parts, rows, columns, dtype=torch.float32, device=x.device)
    grid = ceil_div(columns, options["BE"]) * parts, ceil_div(rows, options["BM"])
    weight, eps, zero_centred = (None, 0.0, False) if norm is None else norm
    start(score_experts, grid)(
        x, weight, router, gate, logits, normed, rows, eps, EXPERTS=experts, COLUMNS=columns, K=k,
        WIDTH=0 if norm is None else next_power(k), PART=part, SHIFT=float(zero_centred),
        EXACT=x.dtype is torch.float32, **options, **overlap_options(x.device),
    )  # fmt: skip
    return logits


def tile_of_scores(rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the configuration of score_experts."""
    wide = dtype is torch.float32
    if rows <= FEW or is_batch_invariant():
        return {"BM": 16, "BE": 32, "BK": 64 if wide else 128, "SPLIT": SPLIT, "num_warps": 4, "num_stages": 3}
    if wide:
        return {"BM": 32, "BE": 32, "BK": 32, "SPLIT": 1, "num_warps": 4, "num_stages": 3}
    return {"BM": 64, "BE": 64, "BK": 64, "SPLIT": 1, "num_warps": 4, "num_stages": 4}


def choose(
    logits: Tensor,
    bias: Tensor | None,
    routing: Routing,
    *,
    experts: int,
    rounded: torch.dtype,
    shared: bool = False,
    named: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return weights, float32, and experts, int32, of each row, `rows active`.

    Args:
        logits: `parts rows columns`, as `score` returns them.
        bias: `experts` (sigmoid), or None.
        routing: How to choose.
        experts: How many experts there are.
        rounded: The dtype that logits are rounded to before they are compared.
        shared: Whether weights have a last column for a shared expert.
        named: Whether the experts have it too; its number is `experts`.
    """
    parts, rows, columns = logits.shape
    width = routing.active + shared
    weights = torch.empty(rows, width, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(rows, routing.active + named, dtype=torch.int32, device=logits.device)
    across, along = next_power(routing.groups), next_power(experts // routing.groups)
    start(choose_experts, (rows,))(
        logits, bias, weights, chosen, rows, routing.scale,
        PARTS=parts, EXPERTS=experts, COLUMNS=columns, ACTIVE=routing.active, WIDTH=width,
        NAMED=chosen.shape[1], GROUPS=routing.groups, ACTIVE_GROUPS=routing.active_groups,
        BG=across, BS=along, BA=next_power(width),
        SIGMOID=routing.sigmoid, RENORMALIZE=routing.renormalize, ROUND=_NAMES[rounded],
        num_warps=max(1, min(4, across * along // 512)), **overlap_options(logits.device),
    )  # fmt: skip
    return weights, chosen

"""Context parallelism: one sequence split over the ranks of a process group, with the results of one process.

Every rank holds a contiguous segment of the tokens. What a mixer needs is the state that enters its segment:

    linear rules   S_out = A S_in + B over a segment: the pairs (A, B) are gathered, every rank composes those before it
    convolution    the last few inputs of the ranks before
    attention      the keys and values (or latents) of the text on the ranks before

Gradients go the other way by the same maps: dS_in = A^T dS_out + U^T dO, where S_in^T U_t is what token t reads of it.

All ranks must run the same layers in the same order, forward and backward, and need gradients of the same things.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lineate import checks
from lineate.layers.state import TokenCache
from lineate.ops import Attended
from lineate.rule import compute_dtype, full_precision

if TYPE_CHECKING:  # absent from builds of torch without torch.distributed
    from torch.distributed import ProcessGroup

READ_AT_ONCE = 4096
"""Tokens whose gradients are summed into the state's at a time: bounds the copy in float32."""


P = ParamSpec("P")
R = TypeVar("R")


def _uncompiled(run: Callable[P, R]) -> Callable[P, R]:
    """Outside the graphs of torch.compile: a rank's would lack the collectives whose results it does not need."""

    @wraps(run)
    def outside(*args: P.args, **named: P.kwargs) -> R:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes seconds
            return torch.compiler.disable(run)(*args, **named)
        return run(*args, **named)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    return outside


class Told(NamedTuple):
    """What a rank tells all others about a call; its leaving text is the last one of its segment."""

    rows: int
    """b; 0: packed texts."""
    continues: int
    """Whether its first text began on an earlier rank."""
    through: int
    """Whether its leaving text did, which is then the only one."""
    tokens: int
    """Of the leaving text, in this segment."""
    seen: int
    """Of the leaving text before its first token: in its initial state, if it begins here."""


class Context:
    """The ranks that share one sequence: rank r holds the r-th segment."""

    def __init__(self, group: "ProcessGroup") -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    @_uncompiled
    def segment(
        self, x: Tensor, cu_seqlens: Tensor | None = None, continues: bool | None = None, seen: int | Tensor = 0
    ) -> "Segment":
        """This rank's part x `b t ...` of a call; all ranks must make it together.

        cu_seqlens: the bounds of this rank's packed texts, from 0 to t. continues: whether the first of them began on
        an earlier rank; must be given with cu_seqlens. Without cu_seqlens every row is one sequence over all ranks.
        seen: tokens of each row's initial state.
        """
        checks.check_cu_seqlens(cu_seqlens, *x.shape[:2])
        if cu_seqlens is None:
            continues = self.rank > 0 if continues is None else continues
        elif continues is None:
            raise ValueError(
                "continues must be given with cu_seqlens under context parallelism: whether this rank's first text "
                "began on an earlier rank; to a mixer pass mixer.context.segment(x, cu_seqlens, continues)"
            )
        bounds = (0, x.shape[1]) if cu_seqlens is None else tuple(cu_seqlens.tolist())
        through = continues and len(bounds) == 2
        if isinstance(seen, Tensor):
            if cu_seqlens is None and not continues and bool((seen != seen[0]).any()):
                raise ValueError(
                    f"state must have as many tokens in every row under context parallelism, got {seen.tolist()}; "
                    "pack the texts with cu_seqlens"
                )
            seen = int(seen[-1])
        rows = x.shape[0] if cu_seqlens is None else 0
        told = Told(rows, int(continues), int(through), bounds[-1] - bounds[-2], 0 if through else seen)
        everyone = self.gather(torch.tensor([told], device=x.device)).view(self.size, -1).tolist()
        segment = Segment(self, cu_seqlens, bounds, tuple(Told(*each) for each in everyone))
        if segment.told[0].continues:
            raise ValueError("continues must be False on rank 0, which has no rank before it, got True")
        if len({each.rows for each in segment.told}) > 1:
            raise ValueError(
                "x must have the same b on all ranks, and cu_seqlens on all or none, got b = "
                + ", ".join(str(each.rows or "packed") for each in segment.told)
            )
        return segment

    def gather(self, x: Tensor) -> Tensor:
        """x of every rank, `size ...`."""
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        _all_gather(out, x.contiguous(), group=self.group)
        return out.unflatten(0, (self.size, -1))

    def scatter_sum(self, x: Tensor) -> Tensor:
        """The sum over ranks of x[rank], from x `size ...` on each."""
        out = x.new_empty(x.shape[1:])
        _reduce_scatter(out, x.flatten(0, 1), group=self.group)
        return out


# torch 2.13 renamed them and warns about the old names
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Segment:
    """A rank's part of one call. Passed where cu_seqlens is, so that a recomputed forward sees the same one."""

    context: Context
    cu_seqlens: Tensor | None
    bounds: tuple[int, ...]
    """cu_seqlens, or (0, t)."""
    told: tuple[Told, ...]
    """By every rank."""

    @property
    def own(self) -> Told:
        return self.told[self.context.rank]

    @property
    def continues(self) -> bool:
        return bool(self.own.continues)

    @property
    def first(self) -> int:
        """Tokens of the first text here."""
        return self.bounds[1]

    @property
    def first_rows(self) -> slice:
        """The rows of the state that are the first text's: all, or one of the packed."""
        return slice(None) if self.cu_seqlens is None else slice(0, 1)

    @property
    def last_rows(self) -> slice:
        """The rows of the state that are the leaving text's."""
        return slice(None) if self.cu_seqlens is None else slice(len(self.bounds) - 2, None)

    @property
    def before(self) -> list[int]:
        """The earlier ranks that hold tokens of this rank's first text."""
        if not self.continues:
            return []
        begins = self.context.rank - 1
        while self.told[begins].through:
            begins -= 1
        return list(range(begins, self.context.rank))

    @property
    def anything_continues(self) -> bool:
        return any(each.continues for each in self.told)

    def hands_on(self, rank: int) -> bool:
        """Whether the rank's leaving text continues on the next."""
        return rank + 1 < self.context.size and bool(self.told[rank + 1].continues)

    def parts(self, most: int | None = None) -> list[int]:
        """How many tokens of its leaving text each rank hands on, those of an initial state included.

        most: as many, if there are; an initial state has always enough (the convolution's).
        """
        counts = []
        for rank, each in enumerate(self.told):
            if most is None:
                count = each.seen + each.tokens
            else:
                count = min(each.tokens, most) if each.through else most
            counts.append(count if self.hands_on(rank) else 0)
        return counts

    @_uncompiled
    def lengths(self, seen: int | Tensor) -> int | Tensor:
        """Tokens of each row before this segment, from those of its initial states."""
        if not self.continues:
            return seen
        parts = self.parts()
        past = sum(parts[rank] for rank in self.before)
        if self.cu_seqlens is None:
            return past
        others = torch.zeros_like(self.cu_seqlens[2:]) + (seen if isinstance(seen, int) else seen[1:])
        return F.pad(others, (1, 0), value=past)

    def lengths_after(self, seen: int | Tensor) -> int | Tensor:
        more = self.bounds[1] if self.cu_seqlens is None else self.cu_seqlens.diff()
        return self.lengths(seen) + more


Bounds = Tensor | Segment | None
"""What a mixer takes as cu_seqlens."""


def segment_of(
    context: Context | None, x: Tensor, bounds: Bounds, seen: int | Tensor = 0
) -> tuple[Segment | None, Tensor | None]:
    """The segment of a mixer's call, None without context parallelism, and the bounds of its packed texts."""
    if isinstance(bounds, Segment):
        return bounds, bounds.cu_seqlens
    if context is None:
        return None, bounds
    return context.segment(x, bounds, None, seen), bounds


class _HandOn(torch.autograd.Function):
    """Pieces `rows n c` of leaving texts go to later ranks, their gradients come back; x, which is always used, passes
    through so that the backward runs on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, piece: Tensor, segment: Segment, parts: list[int]) -> tuple[Tensor, Tensor]:
        ctx.segment, ctx.parts = segment, parts
        padded = F.pad(piece, (0, 0, 0, max(parts) - piece.shape[1]))
        pieces = segment.context.gather(padded)  # size rows n c
        before = [pieces[rank][:, : parts[rank]] for rank in segment.before]
        return x.view_as(x), torch.cat(before, 1) if before else piece.new_empty(piece.shape[0], 0, piece.shape[2])

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dbefore: Tensor) -> tuple[Tensor, Tensor, None, None]:
        segment, parts = ctx.segment, ctx.parts
        rows, _, channels = dbefore.shape
        dpieces = dbefore.new_zeros(segment.context.size, rows, max(parts), channels)
        ranks = segment.before
        for rank, part in zip(ranks, dbefore.split([parts[rank] for rank in ranks], 1), strict=True):
            dpieces[rank, :, : parts[rank]] = part
        return dx, segment.context.scatter_sum(dpieces)[:, : parts[segment.context.rank]], None, None


def _hand_on(segment: Segment, x: Tensor, piece: Tensor, parts: list[int]) -> tuple[Tensor, Tensor]:
    """x, and the tokens of this rank's first text on the ranks before, `rows n c`; piece: what this rank hands on."""
    if not any(parts):
        return x, piece.new_empty(piece.shape[0], 0, piece.shape[2])
    return _HandOn.apply(x, piece, segment, parts)


@_uncompiled
def enter_convolution(segment: Segment, x: Tensor, state: Tensor | None, past: int) -> tuple[Tensor, Tensor | None]:
    """x `b t c` and the convolution's state `rows c past`, with the inputs before the segment in the first text's."""
    parts = segment.parts(past)
    mine = parts[segment.context.rank]
    piece = x[:, segment.bounds[-2] :]
    if piece.shape[1] < mine:  # the text begins here, or is shorter
        front = x.new_zeros(piece.shape[0], past, x.shape[2])
        if state is not None:
            front = state[segment.last_rows].transpose(1, 2).to(x.dtype)
        piece = torch.cat((front, piece), 1)
    x, before = _hand_on(segment, x, piece[:, piece.shape[1] - mine :], parts)
    if not segment.continues:
        return x, state
    entering = before[:, before.shape[1] - past :].transpose(1, 2)
    if segment.cu_seqlens is not None:
        rows = len(segment.bounds) - 1
        others = x.new_zeros(rows - 1, x.shape[2], past) if state is None else state[1:].to(x.dtype)
        entering = torch.cat((entering, others))
    return x, entering.contiguous()


@_uncompiled
def enter_attention(
    segment: Segment, new: dict[str, Tensor], state: TokenCache | None
) -> tuple[dict[str, Tensor], Tensor | None]:
    """All entries of the texts of this segment so far: new `b t ...` behind those of earlier ranks and initial states.

    Returns `b n ...`, or packed `1 n ...` with their bounds.
    """
    x = torch.cat([y.flatten(2) for y in new.values()], -1)  # b t c
    starts = 1 if segment.continues else 0  # the first packed text with an initial state of its own
    rows = slice(None) if segment.cu_seqlens is None else slice(starts, None)
    cached: list[Tensor] = []
    if state is not None and not (segment.cu_seqlens is None and segment.continues):
        kept = torch.cat([state[name][rows].flatten(2) for name in new], -1)  # rows n c
        if segment.cu_seqlens is None:
            cached = [kept[:, : segment.own.seen]]
        else:
            counts = [state.lengths] * state.rows if isinstance(state.lengths, int) else state.lengths.tolist()
            cached = [kept[i : i + 1, :n] for i, n in enumerate(counts[starts:])]
    parts = segment.parts()
    piece = x[:, segment.bounds[-2] :]
    if cached:
        piece = torch.cat((cached[-1], piece), 1)
    x, before = _hand_on(segment, x, piece[:, : parts[segment.context.rank]], parts)
    fronts = [before] * starts + cached
    texts = x.split([end - start for start, end in zip(segment.bounds, segment.bounds[1:], strict=False)], 1)
    both = [part for i, text in enumerate(texts) for part in (*fronts[i : i + 1], text)]
    full = torch.cat(both, 1) if fronts else x
    bounds = None
    if segment.cu_seqlens is not None:
        lengths = segment.lengths_after(0 if state is None else state.lengths)
        assert isinstance(lengths, Tensor)
        bounds = F.pad(lengths.cumsum(0), (1, 0))
    split = full.split([y.shape[2:].numel() for y in new.values()], -1)
    return {name: y.unflatten(-1, new[name].shape[2:]) for name, y in zip(new, split, strict=True)}, bounds


def run_rule(
    op: Callable[..., Attended[Tensor]],
    tensors: Sequence[Tensor],
    memory: Tensor | None,
    bounds: Bounds,
    *,
    corrects: bool,
) -> Attended[Tensor]:
    """op(*tensors, state=memory, cu_seqlens=bounds), linear in its state, from the memory that enters the segment.

    tensors: q, k, v `b t heads d` and the gates, `b t ...`. corrects: A is a matrix k x k, else its diagonal is enough.
    """
    if not isinstance(bounds, Segment):
        return op(*tensors, state=memory, cu_seqlens=bounds)
    return _run_segment(op, tensors, memory, bounds, corrects)


@_uncompiled
def _run_segment(
    op: Callable[..., Attended[Tensor]],
    tensors: Sequence[Tensor],
    memory: Tensor | None,
    bounds: Segment,
    corrects: bool,
) -> Attended[Tensor]:
    if not bounds.anything_continues:
        return op(*tensors, state=memory, cu_seqlens=bounds.cu_seqlens)
    q, k, v = tensors[:3]
    rank, b, texts = bounds.context.rank, v.shape[0], len(bounds.bounds) - 1
    sizes = (b, v.shape[2], k.shape[3])
    empty = v.new_zeros(*sizes, v.shape[3], dtype=compute_dtype(v.dtype))
    with torch.no_grad():
        reads = across = None
        if bounds.continues:  # U and A: what the rule makes of the identity with no values
            identity = torch.eye(sizes[2], dtype=empty.dtype, device=v.device).expand(*sizes, sizes[2]).contiguous()
            nothing = v.new_zeros(*v.shape[:3], sizes[2])
            reads, across = _run(op, (q, k, nothing, *tensors[3:]), identity, slice(0, bounds.first))
            across = across if corrects else across.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).contiguous()
        left = empty
        if bounds.hands_on(rank):
            own = None if memory is None or bounds.own.through else memory[bounds.last_rows]
            _, left = _run(op, tensors, empty if own is None else own, slice(*bounds.bounds[-2:]))
        maps = _maps(bounds, across, empty, corrects)
        entering = _scan(bounds.context, maps, left, range(rank))
    if bounds.continues:
        memory = entering if bounds.cu_seqlens is None else torch.cat(
            (entering, empty.expand(texts - 1, -1, -1, -1) if memory is None else memory[1:])
        )  # fmt: skip
    output, final = op(*tensors, state=memory, cu_seqlens=bounds.cu_seqlens)
    return Attended(*_Leave.apply(output, final, reads, across, bounds, corrects))


class _Leave(torch.autograd.Function):
    """The identity on output and final state; backward adds to the latter's gradient what later ranks make of it."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        final: Tensor,
        reads: Tensor | None,
        across: Tensor | None,
        segment: Segment,
        corrects: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.segment, ctx.corrects = segment, corrects
        ctx.save_for_backward(reads, across)
        return output.view_as(output), final.view_as(final)

    @staticmethod
    def backward(ctx: Any, doutput: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        segment: Segment = ctx.segment
        reads, across = ctx.saved_tensors
        dentering = torch.zeros_like(dfinal[segment.first_rows])
        with full_precision(dfinal):
            if across is not None:
                across = across.mT if ctx.corrects else across  # of a diagonal: itself
                dentering = _times(across, dfinal[segment.first_rows])
                pieces = (y[:, : segment.first].split(READ_AT_ONCE, 1) for y in (reads, doutput))
                for read, dread in zip(*pieces, strict=True):
                    dentering += torch.einsum("bthk,bthv->bhkv", read.to(dfinal.dtype), dread.to(dfinal.dtype))
            maps = _maps(segment, across, dentering, ctx.corrects)
            later = range(segment.context.size - 1, segment.context.rank, -1)
            dleft = _scan(segment.context, maps, dentering, later)
        dfinal = dfinal.clone()
        dfinal[segment.last_rows] += dleft
        return doutput, dfinal, None, None, None, None


def _run(
    op: Callable[..., Attended[Tensor]], tensors: Sequence[Tensor], state: Tensor, tokens: slice
) -> tuple[Tensor, Tensor]:
    """The op on some of the tokens, as one text a row."""
    cut = [x[:, tokens] for x in tensors]
    return op(*cut, state=state, cu_seqlens=None) if cut[0].shape[1] else (cut[2], state)


def _maps(segment: Segment, across: Tensor | None, like: Tensor, corrects: bool) -> Tensor:
    """A of the text that runs through; 0 if none does, and nothing passes."""
    if segment.own.through:
        assert across is not None
        return across
    return like.new_zeros(*like.shape[:3], like.shape[2] if corrects else 1)


def _scan(context: Context, maps: Tensor, added: Tensor, ranks: Iterable[int]) -> Tensor:
    """S = maps S + added of each of these ranks in turn, from 0; maps `b hv k k|1`, added `b hv k v`."""
    with full_precision(added):
        everyone = context.gather(torch.cat((maps, added), -1))  # size b hv k (k|1)+v
        S = torch.zeros_like(added)
        for rank in ranks:
            across, more = everyone[rank].split((maps.shape[-1], added.shape[-1]), -1)
            S = more + _times(across, S)
    return S


def _times(across: Tensor, S: Tensor) -> Tensor:
    """A S; A a matrix `... k k`, or a diagonal `... k 1`."""
    return across @ S if across.shape[-1] > 1 else across * S

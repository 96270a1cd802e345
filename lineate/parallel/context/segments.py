"""Context parallelism: sequences split over the ranks of a process group, and which rank holds which segment.

Every rank holds a contiguous segment of the tokens, and knows in every call on which ranks each sequence continues.
carry.py passes the state of the linear mixers from one segment to the next, split_attention.py the keys and values of
attention. All ranks must run the same layers in the same order, forward and backward, and must need gradients of the
same tensors. None of this is compiled, because the graph of a rank would lack the collectives whose results that rank
does not need.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lineate import checks
from lineate.parallel.context.balance import Move, Part, attention_pairs, plan_moves
from lineate.parallel.context.workload import Workload
from lineate.torch_ops.tracing import uncompiled

if TYPE_CHECKING:  # absent from builds of torch without torch.distributed
    from torch.distributed import ProcessGroup


class Told(NamedTuple):
    """The description of a call that a rank sends to all others; its leaving sequence is the last of its segment."""

    rows: int
    """The batch size b; 0 for packed sequences."""
    continues: int
    """Whether its first sequence began on an earlier rank."""
    others: int
    """The number of sequences in its segment besides the leaving one; the ranks then exchange those too."""
    tokens: int
    """Tokens of the leaving sequence in this segment."""
    seen: int
    """Tokens in the initial state of the leaving sequence; 0 if that sequence began on an earlier rank."""

    @property
    def through(self) -> bool:
        """Whether its leaving sequence began on an earlier rank; it is then the only sequence of the segment."""
        return bool(self.continues) and not self.others


class Context:
    """The ranks that share one sequence: rank r holds the r-th segment."""

    def __init__(self, group: "ProcessGroup") -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    @uncompiled
    def segment(
        self, x: Tensor, cu_seqlens: Tensor | None = None, continues: bool | None = None, seen: int | Tensor = 0
    ) -> "Segment":
        """Exchange the descriptions of each rank's part x `b t ...` of a call; all ranks must call this together.

        cu_seqlens: the bounds of this rank's packed sequences, from 0 to t. continues: whether the first of them began
        on an earlier rank; must be given with cu_seqlens. Without cu_seqlens every row is one sequence over all ranks.
        seen: tokens of each row's initial state.
        """
        checks.check_cu_seqlens(cu_seqlens, *x.shape[:2])
        if cu_seqlens is None:
            continues = self.rank > 0 if continues is None else continues
        elif continues is None:
            raise ValueError(
                "continues must be given with cu_seqlens under context parallelism: whether this rank's first "
                "sequence began on an earlier rank; to a mixer pass mixer.context.segment(x, cu_seqlens, continues)"
            )
        bounds = (0, x.shape[1]) if cu_seqlens is None else tuple(cu_seqlens.tolist())
        lengths = [end - start for start, end in pairwise(bounds)]
        if isinstance(seen, Tensor):
            if cu_seqlens is None and not continues and bool((seen != seen[0]).any()):
                raise ValueError(
                    f"state must have as many tokens in every row under context parallelism, got {seen.tolist()}; "
                    "pack the sequences with cu_seqlens"
                )
            known = seen.tolist()[-len(lengths) :]
        else:
            known = [seen] * len(lengths)
        known[0] = 0 if continues else known[0]
        rows = x.shape[0] if cu_seqlens is None else 0
        told = Told(rows, int(continues), len(lengths) - 1, lengths[-1], known[-1])
        everyone = self.gather(torch.tensor([told], device=x.device)).view(self.size, -1).tolist()
        ranks = tuple(Told(*each) for each in everyone)
        if ranks[0].continues:
            raise ValueError("continues must be False on rank 0, which has no rank before it, got True")
        if len({each.rows for each in ranks}) > 1:
            raise ValueError(
                "x must have the same b on all ranks, and cu_seqlens on all or none, got b = "
                + ", ".join(str(each.rows or "packed") for each in ranks)
            )
        sequences = self._sequences(ranks, torch.tensor([lengths[:-1], known[:-1]], dtype=torch.int64, device=x.device))
        return Segment(self, cu_seqlens, bounds, ranks, sequences)

    def _sequences(self, ranks: Sequence[Told], own: Tensor) -> tuple[tuple[Part, ...], ...]:
        """Return the sequences of every rank; own `2 n`: tokens of this rank's other sequences, and in their states."""
        others: list[list[list[int]]] = [[]] * self.size
        if most := max(each.others for each in ranks):
            others = self.gather(F.pad(own, (0, most - own.shape[1]))).mT.tolist()  # size most 2
        found: list[tuple[Part, ...]] = []
        for each, known in zip(ranks, others, strict=True):
            parts = [*(Part(*other) for other in known[: each.others]), Part(each.tokens, each.seen)]
            if each.continues:
                parts[0] = parts[0].after(found[-1][-1])
            found.append(tuple(parts))
        return tuple(found)

    def gather(self, x: Tensor) -> Tensor:
        """Return x of every rank, `size ...`."""
        return self.gather_later(x).wait()

    def gather_later(self, x: Tensor) -> "Pending":
        """Begin to gather x of every rank; the result is `size ...`."""
        x = x.contiguous()
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        work = _all_gather(out, x, group=self.group, async_op=True)
        return Pending(work, x, out.unflatten(0, (self.size, -1)))

    def scatter_sum(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of x[rank], from x `size ...` on each."""
        out = x.new_empty(x.shape[1:])
        _reduce_scatter(out, x.flatten(0, 1), group=self.group)
        return out

    def exchange_later(self, x: Tensor, sends: list[int], receives: list[int]) -> "Pending":
        """Begin to send the first sends[0] entries of x to rank 0, the next sends[1] to rank 1, and so on.

        The result is the entries that all ranks send to this one, in the order of the ranks: receives[r] from rank r.
        """
        x = x.contiguous()
        out = x.new_empty(sum(receives), *x.shape[1:])
        work = dist.all_to_all_single(out, x, receives, sends, group=self.group, async_op=True)
        return Pending(work, x, out)


class Pending:
    """A tensor that the ranks are still sending."""

    def __init__(self, work: Any, sent: Tensor, result: Tensor) -> None:
        self._work, self._sent, self._result = work, sent, result  # the sent tensor must live until it has arrived

    def wait(self) -> Tensor:
        """Return the tensor when it has arrived; on a GPU only the stream waits for it."""
        self._work.wait()
        del self._sent
        return self._result


# torch 2.13 renamed them and warns about the old names
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Segment:
    """A rank's part of one call; passed in place of cu_seqlens, so that a recomputed forward gets the same one."""

    context: Context
    cu_seqlens: Tensor | None
    bounds: tuple[int, ...]
    """cu_seqlens, or (0, t)."""
    told: tuple[Told, ...]
    """The Told of every rank."""
    sequences: tuple[tuple[Part, ...], ...] = ()
    """The sequences of every rank, with the tokens before them."""

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The queries that other ranks attend with, so that all have equal work (balance.py)."""
        return plan_moves(self.sequences, max(self.own.rows, 1))

    @cached_property
    def workload(self) -> Workload:
        """The work of this rank in an attention layer."""
        continues = [bool(each.continues) for each in self.told]
        return Workload(self.context.rank, self.sequences, continues, self.moves)

    @cached_property
    def entry_bounds(self) -> Tensor | None:
        """The bounds of the entries that the packed sequences have at the end of this segment."""
        if self.cu_seqlens is None:
            return None
        bounds = [0, *accumulate(self.workload.lengths)]
        return torch.tensor(bounds, dtype=self.cu_seqlens.dtype, device=self.cu_seqlens.device)

    @cached_property
    def call_bounds(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """The bounds of queries and keys in each of the rank's own calls; all layers use the same tensors."""
        whole, found = (self.cu_seqlens, self.entry_bounds), []
        for call in self.workload.own_calls:
            bounds: tuple[Tensor | None, Tensor | None] = (None, None)
            if call.sequences == slice(0, len(self.bounds) - 1):
                bounds = whole
            elif call.sequences is not None and self.cu_seqlens is not None and self.entry_bounds is not None:
                first, last = call.sequences.start, call.sequences.stop
                queries, keys = self.cu_seqlens[first : last + 1], self.entry_bounds[first : last + 1]
                bounds = queries - queries[0], keys - keys[0]
            found.append(bounds)
        return found

    @property
    def pairs(self) -> list[int]:
        """How many pairs of a query and a key each rank compares in an attention layer, for one row and head."""
        return attention_pairs(self.sequences, self.moves)

    @property
    def own(self) -> Told:
        return self.told[self.context.rank]

    @property
    def continues(self) -> bool:
        return bool(self.own.continues)

    @property
    def first(self) -> int:
        """The number of tokens of the first sequence in this segment."""
        return self.bounds[1]

    @property
    def first_rows(self) -> slice:
        """The rows of the state that belong to the first sequence: all of them, or the first one if packed."""
        return slice(None) if self.cu_seqlens is None else slice(0, 1)

    @property
    def last_rows(self) -> slice:
        """The rows of the state that belong to the leaving sequence."""
        return slice(None) if self.cu_seqlens is None else slice(len(self.bounds) - 2, None)

    @property
    def before(self) -> list[int]:
        """The earlier ranks that hold tokens of this rank's first sequence."""
        if not self.continues:
            return []
        begins = self.context.rank - 1
        while self.told[begins].through:
            begins -= 1
        return list(range(begins, self.context.rank))

    @property
    def after(self) -> list[int]:
        """The later ranks that hold tokens of this rank's leaving sequence."""
        ends = self.context.rank
        while self.hands_on(ends) and (ends == self.context.rank or self.told[ends].through):
            ends += 1
        return list(range(self.context.rank + 1, ends + 1))

    @property
    def anything_continues(self) -> bool:
        return any(each.continues for each in self.told)

    def hands_on(self, rank: int) -> bool:
        """Whether the rank's leaving sequence continues on the next rank."""
        return rank + 1 < self.context.size and bool(self.told[rank + 1].continues)

    def parts(self, most: int | None = None) -> list[int]:
        """Return how many tokens of its leaving sequence each rank passes on: 0 if the sequence ends there.

        Tokens in the sequence's initial state count too. most: the number of last tokens that are needed (for the
        convolution); a rank on which the sequence begins passes on exactly this number, because the initial state has
        as many.
        """
        counts = []
        for rank, each in enumerate(self.told):
            if most is None:
                count = each.seen + each.tokens
            else:
                count = min(each.tokens, most) if each.through else most
            counts.append(count if self.hands_on(rank) else 0)
        return counts

    @uncompiled
    def lengths(self, seen: int | Tensor) -> int | Tensor:
        """Return how many tokens each row has before this segment, given those of its initial states."""
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


def check_splits(*mixers: Any) -> None:
    """Raise unless every mixer supports sequences split over ranks, that is, its class has a `context`."""
    others = sorted({type(mixer).__name__ for mixer in mixers if not hasattr(type(mixer), "context")})
    if others:
        raise ValueError(
            "layers whose sequences are split over ranks (context parallelism) must be LinearAttention (L), "
            "GatedLinearAttention (R), DeltaNet (D), GatedDeltaNet (G), KimiDeltaAttention (K), Mamba2 (S), "
            "HGRN2 (H), Retention (O), GatedDeltaProduct (U), GatedDeltaNet2 (J), Comba (Q), "
            "PreconditionedGatedDeltaNet (I), PreconditionedKimiDeltaAttention (F), "
            f"GatedAttention (A) or LatentAttention (M), got {', '.join(others)}, whose memory cannot be handed from "
            "rank to rank; keep sequences whole and split the batch instead"
        )


Bounds = Tensor | Segment | None
"""The type of the argument cu_seqlens of a mixer."""


def segment_of(
    context: Context | None, x: Tensor, bounds: Bounds, seen: int | Tensor = 0
) -> tuple[Segment | None, Tensor | None]:
    """Return the segment of a checked call (None without context parallelism), and the bounds of packed sequences."""
    if isinstance(bounds, Segment):
        return bounds, bounds.cu_seqlens
    if context is None:
        return None, bounds
    return context.segment(x, bounds, None, seen), bounds

"""Attention under context parallelism (context.py), as if in one process.

All ranks gather the keys and values (or latent vectors) of split sequences. A rank with more to do than others sends
some of its queries to them and gets the outputs back (balance.py); workload.py says which. Both exchanges, and those of
the gradients, run while the ranks attend with other queries or gather keys.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.layers.state import TokenCache
from lineate.parallel.context.segments import Pending, Segment
from lineate.parallel.context.workload import Source
from lineate.torch_ops.tracing import uncompiled


@uncompiled
def attend_segment(
    segment: Segment,
    q: Tensor,
    new: dict[str, Tensor],
    state: TokenCache | None,
    expand: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]],
    attend: Callable[..., Tensor],
    scale: float,
) -> tuple[Tensor, TokenCache]:
    """Attend with q `b t heads k` to all tokens of its sequences; return `b t heads v` and the cache of all entries.

    new: the entries of the segment's tokens, `b t ...`. expand: makes keys and values `b n kv k|v` from entries.
    attend: attend(q, k, v, scale, cu_seqlens, key_bounds), with q's tokens the last ones of k's and v's.
    """
    workload = segment.workload
    x = torch.cat([y.flatten(2) for y in new.values()], -1)  # b t c
    cached = _cached(segment, new, state)
    sent = _collect(workload.sent, x, cached, None)
    given = [q[:, workload.tokens_of(move)] for move in workload.given]
    received = taken = None
    if any(workload.counts):
        x, received, taken = _Enter.apply(x, sent, torch.cat(given, 1) if given else q[:, :0], segment)
    named = _named(_collect(workload.entries, x, cached, received), new)
    del x, cached, sent, received  # as large as all entries
    keys, values = expand(named)

    returned, exchange = None, _Exchange(segment, q.dtype)
    if workload.anything_moves:  # others wait for their outputs, so these come first
        assert taken is not None
        theirs = [
            attend(taken[:, call.queries], keys[:, call.keys], values[:, call.keys], scale, None)
            for call in workload.taken_calls
        ]
        width = q.shape[2], values.shape[3]
        returned = _Return.apply(exchange, width, taken, *theirs)
    outputs = [
        attend(q[:, call.queries], keys[:, call.keys], values[:, call.keys], scale, *bounds)
        for call, bounds in zip(workload.own_calls, segment.call_bounds, strict=True)
    ]
    output = outputs[0] if returned is None else _Join.apply(exchange, q.shape[1], returned, *outputs)
    if workload.extended:
        own = [slice(start, start + count) for start, count in zip(workload.starts, workload.lengths, strict=False)]
        named = {name: torch.cat([y[:, part] for part in own], 1) for name, y in named.items()}
    return output, TokenCache.of(named, segment.entry_bounds)


def _named(entries: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cut entries `b n c` into the tensors `b n ...` that a cache has; both it and the kernels need them contiguous."""
    parts = entries.split([y.shape[2:].numel() for y in like.values()], -1)
    return {name: part.contiguous().unflatten(-1, like[name].shape[2:]) for name, part in zip(like, parts, strict=True)}


def _cached(segment: Segment, new: dict[str, Tensor], state: TokenCache | None) -> Tensor | None:
    """Return the entries of the initial states, `rows n c`; those of sequences that began earlier are not read."""
    if state is None:
        return None
    counts = [state.lengths] * state.rows if isinstance(state.lengths, int) else state.lengths.tolist()
    counts = counts[:1] if segment.cu_seqlens is None else counts
    known = [part.before for part in segment.sequences[segment.context.rank]]
    skipped = 1 if segment.continues else 0
    if counts[skipped:] != known[skipped:]:
        raise ValueError(
            f"state must have as many tokens as the segment was told, {known[skipped:]}, got {counts[skipped:]}; "
            "pass seen=state.lengths to context.segment"
        )
    return torch.cat([state[name].flatten(2) for name in new], -1)


def _collect(sources: list[Source], x: Tensor, cached: Tensor | None, received: Tensor | None) -> Tensor:
    """Return entries `b n c` from new tokens `b t c`, initial states `rows n c`, and what came from other ranks."""
    found, at = [], 0
    for kind, start, count, _ in sources:
        if kind == "new":
            found.append(x[:, start : start + count])
        elif kind == "state":
            assert cached is not None
            rows = slice(None) if cached.shape[0] == x.shape[0] else slice(start, start + 1)
            found.append(cached[rows, :count])
        else:
            assert received is not None
            found.append(received[:, at : at + count])
            at += count
    return found[0] if len(found) == 1 else torch.cat(found, 1) if found else x[:, :0]


class _Enter(torch.autograd.Function):
    """Sends entries `b n c` to all ranks and queries `b n heads k` to some; and their gradients back.

    x passes through because every rank uses it, so that the backward runs on every rank.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Tensor, given: Tensor, segment: Segment) -> tuple[Tensor, ...]:
        ctx.segment, workload, context = segment, segment.workload, segment.context
        queries = (
            context.exchange_later(_tokens_first(given), workload.gives, workload.takes)
            if workload.anything_moves
            else None
        )
        pieces = context.gather(F.pad(sent, (0, 0, 0, max(workload.counts) - sent.shape[1])))  # size b n c
        found = [pieces[source.rank][:, source.start : source.start + source.size] for source in workload.received]
        received = torch.cat(found, 1) if found else x.new_empty(x.shape[0], 0, x.shape[2])
        return x.view_as(x), received, given[:, :0] if queries is None else _rows_first(queries.wait())

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dreceived: Tensor, dtaken: Tensor) -> tuple[Tensor | None, ...]:
        workload, context = ctx.segment.workload, ctx.segment.context
        dgiven = None
        if workload.anything_moves:
            dgiven = context.exchange_later(_tokens_first(dtaken), workload.takes, workload.gives)
        rows, _, channels = dreceived.shape
        dpieces = dreceived.new_zeros(context.size, rows, max(workload.counts), channels)
        parts = dreceived.split([source.size for source in workload.received], 1)
        for source, part in zip(workload.received, parts, strict=True):
            dpieces[source.rank, :, source.start : source.start + source.size] = part
        dsent = context.scatter_sum(dpieces)[:, : workload.counts[context.rank]]
        return dx, dsent, dtaken if dgiven is None else _rows_first(dgiven.wait()), None


class _Exchange:
    """The outputs that go back to their ranks, or their gradients, while this rank attends with its own queries."""

    def __init__(self, segment: Segment, dtype: torch.dtype) -> None:
        self.segment, self.workload, self.dtype = segment, segment.workload, dtype
        self.pending: Pending | None = None

    def begin(self, x: Tensor, sends: list[int], receives: list[int]) -> None:
        self.pending = self.segment.context.exchange_later(_tokens_first(x.to(self.dtype)), sends, receives)

    def end(self) -> Tensor:
        assert self.pending is not None
        result, self.pending = self.pending.wait(), None
        return _rows_first(result)


class _Return(torch.autograd.Function):
    """Begins to send outputs of taken queries back; its result only stands for what _Join receives.

    The backward waits for the gradients that _Join's backward sent. `taken` is an input so that it always runs.
    """

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, width: tuple[int, int], taken: Tensor, *outputs: Tensor) -> Tensor:
        ctx.exchange, ctx.kinds = exchange, [(output.shape[1], output.dtype) for output in outputs]
        empty = taken.new_empty(taken.shape[0], 0, *width)
        exchange.begin(torch.cat(outputs, 1) if outputs else empty, exchange.workload.takes, exchange.workload.gives)
        return empty

    @staticmethod
    def backward(ctx: Any, dempty: Tensor) -> tuple[Tensor | None, ...]:
        parts = ctx.exchange.end().split([count for count, _ in ctx.kinds], 1)
        return None, None, None, *(part.to(dtype) for part, (_, dtype) in zip(parts, ctx.kinds, strict=True))


class _Join(torch.autograd.Function):
    """Puts the outputs of a rank's own queries together: those that it computed, and those that come back."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, tokens: int, returned: Tensor, *outputs: Tensor) -> Tensor:
        ctx.exchange, ctx.returned = exchange, (returned.shape, returned.dtype)
        workload, result = exchange.workload, outputs[0].new_empty(returned.shape[0], tokens, *returned.shape[2:])
        for call, output in zip(workload.own_calls, outputs, strict=True):
            result[:, call.queries] = output
        arrived = exchange.end().split([move.queries for move in workload.given], 1)
        for move, output in zip(workload.given, arrived, strict=True):
            result[:, workload.tokens_of(move)] = output
        return result

    @staticmethod
    def backward(ctx: Any, dresult: Tensor) -> tuple[Tensor | None, ...]:
        workload = ctx.exchange.workload
        given = [dresult[:, workload.tokens_of(move)] for move in workload.given]
        ctx.exchange.begin(torch.cat(given, 1) if given else dresult[:, :0], workload.gives, workload.takes)
        own = (dresult[:, call.queries] for call in workload.own_calls)
        shape, dtype = ctx.returned
        return None, None, dresult.new_zeros(shape, dtype=dtype), *own


def _tokens_first(x: Tensor) -> Tensor:
    """Return `n b ...` for x `b n ...`."""
    return x.transpose(0, 1).contiguous()


def _rows_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)

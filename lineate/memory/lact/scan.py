"""LaCT over many tokens without a graph inside: states chunk by chunk, all else for many chunks at once, by hand.

The three matrices are one, M = [W0; W2; W1^T] `3e d`, e the hidden channels, so that each step is one launch for all:

    [a u] = k [W0; W2]^T,  z = v W1                                        `c 2e`, `c e`
    s = [rate0 z u silu'(a), rate2 z silu(a)],  hid = rate1 silu(a) u      `c 2e`, `c e`
    sums = [s^T k; hid^T v]                                                `3e d`
    C = sums + mean of momentum * C of the last chunk
    M = M + NewtonSchulz(C), rows of W0 and W2 and columns of W1^T rescaled

A run is some chunks of one length, computed together except where they depend on each other. Backward, from the last
run to the first, with L the gradient by M at a chunk's end and T that by its sums:

    1. the whole run: the reads of q, and intermediate results that the forward did not keep
    2. from chunk to chunk: L -> T, by Newton-Schulz backwards; T -> da, du, dz; these -> L of the chunk before
    3. the whole run: dk = s T + [da du] [W0; W2], dv = hid T + dz W1^T

Shapes: r = rows * heads, m chunks of a run, c tokens of a chunk.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import lineate.memory.lact.steps as torch_steps
from lineate.memory.chunks import ChunkRun, cut_runs
from lineate.memory.gpu import on_gpu
from lineate.memory.lact.steps import (
    Course,
    Unit,
    add_times,
    halves,
    newton_schulz,
    newton_schulz_backward,
    times,
    unit,
)
from lineate.memory.parts import MUON_EPS, ROW_EPS
from lineate.rule import full_precision
from lineate.torch_ops.tracing import in_memory, needs_grad, uncompiled


class ScanState(NamedTuple):
    """The state of all rows and heads; None: zeros."""

    matrices: Tensor
    """M `r 3e d`."""
    sums: Tensor | None
    """`r 3e d`."""
    previous: Tensor | None
    """C of the last chunk, `r 3e d`."""
    total: Tensor | None
    """The sum of momentum in the chunk so far, `r`."""


class ScanOptions(NamedTuple):
    """The options of a scan."""

    position: int
    """Where all rows stand in their chunks."""
    chunk: int
    muon: bool
    keep: bool
    """Whether a backward will follow."""


@uncompiled
def scan(
    tokens: Sequence[Tensor], state: ScanState, norms: tuple[Tensor, Tensor], position: int, chunk: int, muon: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return y like v, and the four tensors of the state at the end.

    Args:
        tokens: q, k, v `b t h d`, rates `b t h 3`, momentum `b t h`.
        state: The state at the beginning.
        norms: The lengths of the rows of W0 and W2 `r 2e 1`, and of the columns of W1^T `r 1 d`.
        position: Where all rows stand in their chunks.
        chunk: Tokens of a chunk.
        muon: Whether steps are orthogonalised.
    """
    tensors = in_memory((*tokens, *state, *norms))
    y, *end = _Scan.apply(ScanOptions(position, chunk, muon, needs_grad(*tensors)), *tensors)
    return y, end


def _steps(x: Tensor) -> ModuleType:
    """Return the module of the steps: torch's, or the kernels' on a GPU."""
    if not on_gpu(x):
        return torch_steps
    from lineate.kernels.memories import lact  # triton, at its first use

    return lact


def _means(run: ChunkRun, momentum: Tensor, total: Tensor | None, chunk: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the sums of momentum in the chunks, and their means, `m r` both."""
    sums = run.view(momentum).sum(-1, dtype=dtype).flatten(1)
    if run.first == 0 and total is not None:
        sums[0] += total
    return sums, sums / chunk


def _plus(x: Tensor, y: Tensor | None) -> Tensor:
    return x if y is None else x + y


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: ScanOptions, *tensors: Any) -> tuple[Tensor, ...]:
        """Return y and the state at the end; tensors: those of the tokens (5), of the state (4), and the norms (2)."""
        position, chunk, muon, keep = options
        q, k, v, rates, momentum, *_ = tensors
        (matrices, sums, previous, total), norms = ScanState(*tensors[5:9]), tensors[9:]
        (rows, _, d), e, dtype, steps = matrices.shape, matrices.shape[1] // 3, matrices.dtype, _steps(matrices)
        kept: list[Tensor] = []
        runs = cut_runs(q.shape[1], position, chunk, rows * max(2 * min(chunk, q.shape[1]) * e, 3 * e * d))
        ctx.options, first = (runs, chunk, muon), total
        y, adding = v.new_empty(v.shape), sums is not None
        sums = torch.zeros_like(matrices) if sums is None else sums.clone()
        places = halves(sums)
        for run in runs:
            own_q, own_k, own_v, own_rates = (run.cells(x, dtype) for x in (q, k, v, rates))
            totals, means = _means(run, momentum, first, chunk, dtype)
            # M at the start of each chunk and, if it ends, of the next one; C before it and after
            held, changes = (matrices.new_empty(run.n + run.ends, *matrices.shape) for _ in range(2))
            held[0], changes[0] = matrices, 0 if previous is None else previous
            starts, ends, uppers, lowers = (x.unbind() for x in (held, changes, *(x.mT for x in halves(held))))
            chunks = (x.unflatten(0, (run.n, rows)).unbind() for x in (own_k, own_v, own_rates))
            for i, (one_k, one_v, one_rates) in enumerate(zip(*chunks, strict=True)):
                s, hidden = steps.writes(times(one_k, uppers[i]), times(one_v, lowers[i]), one_rates)
                for place, x, given in zip(places, (s, hidden), (one_k, one_v), strict=True):
                    if adding:
                        add_times(place, x.mT, given, out=place)
                    else:
                        times(x.mT, given, out=place)
                adding = False
                if not run.ends:
                    continue
                if muon:
                    x = steps.change(sums, means[i], ends[i], ends[i + 1], MUON_EPS)
                    step = newton_schulz(x).reshape(sums.shape)
                else:
                    step = torch.addcmul(sums, means[i, :, None, None], ends[i], out=ends[i + 1])
                steps.rescale(starts[i], step, norms, starts[i + 1], ROW_EPS)
            upper, lower = halves(held[: run.n].flatten(0, 1))
            run.store(y, times(steps.glu(times(own_q, upper.mT)), lower))
            matrices, previous, total = held[-1], changes[-1], totals[-1]
            if keep:
                kept += [held, changes]
        if runs and runs[-1].ends:
            sums, total = torch.zeros_like(matrices), None
        previous = torch.zeros_like(matrices) if previous is None else previous
        total = matrices.new_zeros(rows) if total is None else total
        ctx.save_for_backward(q, k, v, rates, momentum, first, *norms, *kept)
        ctx.set_materialize_grads(False)
        return y, matrices, sums, previous, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, *by_end = in_memory((dy, *dstate))
        q, k, v, rates, momentum, total, *saved = ctx.saved_tensors
        runs, chunk, muon = ctx.options
        norms, slots = saved[:2], list(zip(runs, saved[2::2], saved[3::2], strict=True))
        back = _Backward([q, k, v, rates, momentum], total, norms, chunk, muon, *by_end)
        with full_precision(q):
            for run, held, changes in reversed(slots):
                starts = held[: run.n]
                by_matrices = back.read(run, torch.zeros_like(v) if dy is None else dy, starts)
                if run is runs[-1] and back.asleep(run):
                    last = run._replace(first=run.first + (run.n - 1) * run.length, n=1)
                    for x in back.dtokens[1:]:
                        last.view(x).zero_()
                    run = run._replace(n=run.n - 1)
                    back.dmatrices = _plus(by_matrices[-1], back.dmatrices)
                if run.n:
                    back.write(run, starts[: run.n], changes, by_matrices)
        given = (back.dmatrices, back.dsums, back.dprevious, back.dtotal)  # parts of larger tensors
        asked = zip(given, ctx.needs_input_grad[6:10], strict=True)
        by_state = [x.clone() if need and x is not None else None for x, need in asked]
        return None, *back.dtokens, *by_state, *back.dnorms


class _Backward:
    """The backward from run to run: it fills in gradients by tokens and norms, and has those by the state so far."""

    def __init__(
        self, tokens: list[Tensor], total: Tensor | None, norms: list[Tensor], chunk: int, muon: bool,
        dmatrices: Tensor | None, dsums: Tensor | None, dprevious: Tensor | None, dtotal: Tensor | None,
    ) -> None:  # fmt: skip
        self.tokens, self.total, self.norms, self.chunk, self.muon = tokens, total, norms, chunk, muon
        self.dmatrices, self.dsums, self.dprevious, self.dtotal = dmatrices, dsums, dprevious, dtotal
        self.steps = _steps(norms[0])
        self.dtokens = [x.new_empty(x.shape) for x in tokens]
        self.dnorms = [torch.zeros_like(x) for x in norms]

    def asleep(self, run: ChunkRun) -> bool:
        """Whether no gradient arrives for the writes of the last chunk of the call; `run` is the last run.

        If that chunk is complete, its writes reach the result only through the update at its end. The sums that the
        call returned are then new zeros, so their gradients are dropped.
        """
        if run.ends:
            self.dsums = self.dtotal = None
            return self.dmatrices is None and self.dprevious is None
        return self.dsums is None and self.dtotal is None

    def read(self, run: ChunkRun, dy: Tensor, starts: Tensor) -> Tensor:
        """Store dq, and return the gradient by M at the start of each chunk, `m r 3e d`."""
        q, dy = (run.cells(x, starts.dtype) for x in (self.tokens[0], dy))
        upper, lower = halves(starts.flatten(0, 1))
        hidden, dau = self.steps.glu_backward(times(q, upper.mT), times(dy, lower.mT))
        run.store(self.dtokens[0], times(dau, upper))
        found = torch.empty_like(starts)
        for place, x, given in zip(halves(found.flatten(0, 1)), (dau, hidden), (q, dy), strict=True):
            times(x.mT, given, out=place)
        return found

    def write(self, run: ChunkRun, starts: Tensor, changes: Tensor, by_matrices: Tensor) -> None:
        """Store dk, dv, drates and dmomentum, and add to by_matrices, q's gradient by M at each chunk's start."""
        m, rows = starts.shape[:2]
        k, v, rates = (run.cells(x, starts.dtype) for x in self.tokens[1:4])
        upper, lower = halves(starts.flatten(0, 1))
        # The loop stores gradients in s and hidden; then s and hidden are restored, and au and z hold gradients.
        au, z = times(k, upper.mT), times(v, lower.mT)
        s, hidden, drates = (torch.empty_like(x) for x in (au, z, rates))
        by_sums = torch.empty_like(starts)
        tensors = [x.unflatten(0, (m, rows)) for x in (k, v, au, z, rates, s, hidden, drates)]
        tensors += [by_matrices[:m], *halves(by_matrices[:m]), by_sums, *(x.mT for x in halves(by_sums))]
        chunks = list(zip(*(x.unbind() for x in tensors), strict=True))
        _, means = _means(run, self.tokens[4], self.total, self.chunk, starts.dtype)
        ends = _Ends(self.steps, starts, changes[1 : m + 1], means, self.norms, self.muon) if run.ends else None
        for i, (one_k, one_v, *values, asked, asked_upper, asked_lower, by, by_upper, by_lower) in zip(
            reversed(range(m)), reversed(chunks), strict=True
        ):
            given = self.dmatrices
            if ends is not None:
                given, self.dprevious = ends.backward(i, given, self.dprevious, by)
            else:
                by[:] = 0 if self.dsums is None else self.dsums
            if given is not None:
                asked += given
            times(one_k, by_upper, out=values[3])
            times(one_v, by_lower, out=values[4])
            self.steps.writes_backward(*values)
            add_times(asked_upper, values[0].mT, one_k, out=asked_upper)
            add_times(asked_lower, values[1].mT, one_v, out=asked_lower)
            self.dmatrices = asked
        by_upper, by_lower = halves(by_sums.flatten(0, 1))
        dk, dv = times(s, by_upper), times(hidden, by_lower)
        add_times(dk, au, upper, out=dk)
        add_times(dv, z, lower, out=dv)
        if ends is not None:
            dtotals = (by_sums * changes[:m]).sum((-1, -2)) / self.chunk  # m r
            for total, x in zip(self.dnorms, ends.dnorms, strict=True):
                total += x.sum(0)
        else:
            dtotals = by_sums.new_zeros(1, rows) if self.dtotal is None else self.dtotal[None]
        for x, own in zip(
            self.dtokens[1:], (dk, dv, drates, dtotals[..., None].expand(m, rows, run.length)), strict=True
        ):
            run.store(x, own)
        self.dsums, self.dtotal = by_sums[0], dtotals[0]


class _Ends:
    """The recomputed ends of a run's chunks, all at once, and their gradients, in turn; starts, changes `m r 3e d`."""

    def __init__(
        self, steps: ModuleType, starts: Tensor, changes: Tensor, means: Tensor, norms: list[Tensor], muon: bool
    ) -> None:
        self.steps, self.means, self.norms, self.flat = steps, means, norms, (-1, starts.shape[2] // 3, starts.shape[3])
        self.course: list[tuple[Tensor, ...]] = []
        step = changes
        if muon:
            course: Course = []
            at = unit(changes)
            step = newton_schulz(at.x, course).reshape(starts.shape)
            parts = (*at, *(x for triple in course for x in triple))
            self.course = list(zip(*(x.unflatten(0, (len(starts), -1)).unbind() for x in parts), strict=True))
        self.moved = (starts + step).unbind()
        self.dnorms = [x.new_empty(len(starts), *x.shape) for x in norms]

    def backward(self, i: int, given: Tensor | None, base: Tensor | None, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients by M and C before chunk i from that by M after it; out takes that by its C plus base."""
        given = torch.zeros_like(out) if given is None else given
        dnorms = [x[i] for x in self.dnorms]
        dmoved = self.steps.rescale_backward(given, self.moved[i], self.norms, dnorms, ROW_EPS)
        if not self.course:
            out.copy_(_plus(dmoved, base))
            return dmoved, out * self.means[i, :, None, None]
        x, size, inverse, *course = self.course[i]
        dx = newton_schulz_backward(dmoved.view(self.flat), list(zip(*(course[n::3] for n in range(3)), strict=True)))
        return dmoved, self.steps.change_backward(dx, Unit(x, size, inverse), base, self.means[i], out)

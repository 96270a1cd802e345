"""One call in the layout of the kernels: its tensors as rows, and the positions of the sequences and their chunks."""

from typing import NamedTuple

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.kernels import STAGES_READ
from lineate.kernels.launching import ceil_div, linked, multiprocessors, start
from lineate.kernels.portable.layout import clear_outside, find_slots
from lineate.kernels.segments import CHUNK as CHUNK
from lineate.kernels.segments import WHOLE, Cutting


class Sequences(NamedTuple):
    """The positions of the sequences, their chunks and segments; portable/layout.py calls a sequence a text."""

    number: int
    slots: int
    """An upper bound: a packed sequence may end in part of a chunk, and only the device knows how many do."""
    bounds: Tensor | None
    first_slots: Tensor | None
    slot_sequences: Tensor | None
    cutting: Cutting
    segments: int
    """The segments of every batch row; 1 for packed sequences, each of which has its own number."""
    cuts: int
    """The cuts between the segments of all sequences: an upper bound if sequences are packed."""
    likely_cuts: int
    """The cuts if packed sequences are equally long, by which the programs of a walk are chosen."""
    first_cuts: Tensor | None = None
    """`number + 1`: how many cuts the sequences before each one have; None if not packed, or without cuts."""
    cut_sequences: Tensor | None = None
    """`cuts`: the sequence of each cut, -1 if there are fewer."""

    @property
    def packed(self) -> bool:
        """Whether several sequences share one batch row."""
        return self.bounds is not None

    def walks(self, map_only: bool, likely: bool = False) -> int:
        """Return the segments of a walk, at most or likely: all before cuts and, unless it finds maps, the last."""
        return (self.likely_cuts if likely else self.cuts) + (0 if map_only else self.number)

    @property
    def chains(self) -> int:
        """The most sequences that are cut, each with a chain of its own over its segments, by the least cuts of one."""
        return ceil_div(self.cuts, self.cutting.least_cuts) if self.packed else self.number

    def places(self, t: int, map_only: bool) -> tuple[Tensor | int | None, ...]:
        """Return the arguments of text_bounds and find_segment of layout.py, with which a walk finds its segments."""
        lasts = 0 if map_only else self.number
        return self.bounds, self.first_slots, self.first_cuts, self.cut_sequences, t, lasts, self.segments


def count_slots(t: int, sequences: int) -> int:
    """Return the most chunks of `number` sequences with t tokens in total."""
    return (t + sequences * (CHUNK - 1)) // CHUNK


def find_sequences(
    q: Tensor, cu_seqlens: Tensor | None, cutting: Cutting = WHOLE, output: Tensor | None = None, writes: int = 1
) -> Sequences:  # fmt: skip
    """Find the sequences: the batch rows, or those packed into one row. Nothing waits for the device.

    cu_seqlens counts tokens, each of which has `writes` rows; everything else counts rows.

    Tokens of output `1 t ...` that lie in no packed sequence are set to 0: bounds on a GPU are not checked, so there
    may be some, and filling all of it first would take as long as writing the results.
    """
    b, t = q.shape[:2]
    if cu_seqlens is None:
        chunks = count_slots(t, 1)
        segments = cutting.count_segments(chunks)
        cuts = b * (segments - 1)
        return Sequences(b, b * chunks, None, None, None, cutting, segments, cuts, cuts)
    count = cu_seqlens.shape[0] - 1
    slots = count_slots(t, count)
    given = cu_seqlens.to(q.device).contiguous()
    bounds, first_slots = (torch.empty(count + 1, dtype=torch.int64, device=q.device) for _ in range(2))
    slot_sequences = torch.empty(slots, dtype=torch.int64, device=q.device)
    cuts = cutting.most_cuts(t, count)
    first_cuts, cut_sequences = (
        torch.empty(n, dtype=torch.int32, device=q.device) if cuts else None for n in (count + 1, cuts)
    )
    with torch.cuda.device_of(q):
        programs = ceil_div(slots, 64)
        if output is not None:
            programs = max(programs, min(ceil_div(t, CHUNK), multiprocessors(q.device)))
        start(find_slots, (programs,))(
            given, bounds, first_slots, slot_sequences, first_cuts, cut_sequences, output, t, count, slots, cuts,
            *cutting, BT=16 if count <= 16 else 256, BS=64, C=CHUNK, SIZE=0 if output is None else output.numel() // t,
            WRITES=writes, num_warps=4, **linked(q.device),
        )  # fmt: skip
    likely = count * (cutting.count_segments(ceil_div(t, max(count, 1) * CHUNK)) - 1)
    places = bounds, first_slots, slot_sequences
    return Sequences(count, slots, *places, cutting, 1, cuts, likely, first_cuts, cut_sequences)


def clear(sequences: Sequences, t: int, *tensors: Tensor | None) -> None:
    """Set the tokens of up to five dense tensors `1 t ...` that lie in no packed sequence to 0."""
    if sequences.bounds is None:
        return
    given = (*tensors, *[None] * (5 - len(tensors)))
    sizes = [0 if x is None else x.numel() // t for x in given]
    start(clear_outside, (ceil_div(t, 64),))(
        sequences.bounds, *given, t, sequences.number, *sizes, BT=64, num_warps=4,
        **linked(sequences.bounds.device, last=True),
    )  # fmt: skip


class Gates(NamedTuple):
    """The gates of a call, and whether they are raw."""

    log_decay: Tensor | None
    """`b t hv`, `b t hv k` or None; the raw gate if raw_decay."""
    beta: Tensor | None
    """`b t hv` or None; the raw logit if raw_beta."""
    A_log: Tensor | None = None
    """`hv`, or None for exp(A_log) = 1."""
    dt_bias: Tensor | None = None
    """`hv`, or `hv k`."""
    beta_scale: float = 1.0
    raw_decay: bool = False
    """Whether log_decay = rule.decay_of_gate(gate, A_log, dt_bias, lower_bound)."""
    raw_beta: bool = False
    """Whether beta = beta_scale sigmoid(logit)."""
    lower_bound: float | None = None
    probe: Tensor | None = None
    """`b t hv k`, contiguous: what the memory is compared with, or its factor of k, in rules of the general row."""
    direction: Tensor | None = None
    """`b t hv k`, contiguous: what is erased, if it is not the key that is written."""
    compared: str = "key"
    """The vector that is compared: "key", or with a probe "erase" (probe * k), or with a direction "probe".

    With a probe, decay is per channel, log_decay is no raw gate, and there is no beta: v is the value that is written.
    """

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """log_decay, beta, A_log, dt_bias."""
        return self.log_decay, self.beta, self.A_log, self.dt_bias


class Call(NamedTuple):
    """One call: its tensors as rows, its options, and properties derived from them. make_call makes it."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates
    sequences: Sequences
    corrects: bool
    scale: float
    normalize_qk: bool
    channel: bool
    """Whether the decay is per key channel."""
    sizes: tuple[int, int, int, int, int]
    """t, h, hv, K, V."""
    lone_chunks: int
    """The chunks of the call's only sequence, 0 if it has several; those of the whole call, if this is a part of it."""

    @property
    def gates_outside(self) -> bool:
        """Whether the gradients of raw gates come after those of all slices (per head); per channel they do not."""
        return (self.gates.raw_decay or self.gates.raw_beta) and not self.channel

    @property
    def where(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
        """bounds, first_slots, slot_sequences and t, from which the kernels compute the tokens of a chunk."""
        places = self.sequences
        return places.bounds, places.first_slots, places.slot_sequences, self.sizes[0]

    def part(self, rows: slice, tokens: slice, cutting: Cutting | None = None) -> "Call":
        """Return this call on a slice of its rows and tokens, or with other cuts; itself, if nothing changes."""
        b, t = self.q.shape[:2]
        cutting = self.sequences.cutting if cutting is None else cutting
        if tokens == slice(0, t) and rows == slice(0, b) and cutting == self.sequences.cutting:
            return self
        given = self.gates.log_decay, self.gates.beta, self.gates.probe, self.gates.direction
        log_decay, beta, probe, direction = (None if x is None else x[rows, tokens] for x in given)
        q, k, v = (x[rows, tokens] for x in (self.q, self.k, self.v))
        return self._replace(
            q=q,
            k=k,
            v=v,
            gates=self.gates._replace(log_decay=log_decay, beta=beta, probe=probe, direction=direction),
            sequences=find_sequences(q, self.sequences.bounds, cutting),
            sizes=(q.shape[1], *self.sizes[1:]),
        )


def make_call(
    inputs: Inputs, options: Options, cutting: Cutting = WHOLE, output: Tensor | None = None, writes: int = 1
) -> Call:  # fmt: skip
    """Return the call of these inputs, its sequences cut by this rule; their state is passed to the stages separately.

    Tokens of output, if it is given, that lie in no sequence are set to 0. With `writes` rows of each token one after
    another, only cu_seqlens counts tokens.
    """
    inputs.refuse_unread(STAGES_READ, "the stages")
    q, k, v, erase = inputs.q, inputs.k, inputs.v, inputs.erase
    given = inputs.log_decay, inputs.beta, inputs.A_log, inputs.dt_bias
    log_decay, beta, A_log, dt_bias = (None if x is None else dense(x) for x in given)
    probe = inputs.probe if erase is None else erase
    probe, direction = (None if x is None else dense(x) for x in (probe, inputs.direction))
    compared = "key" if probe is None else "probe" if erase is None else "erase"
    sequences = find_sequences(q, inputs.cu_seqlens, cutting, output, writes)
    return Call(
        in_rows(q),
        in_rows(k),
        in_rows(v),
        Gates(
            log_decay, beta, A_log, dt_bias,
            options.beta_scale, options.raw_decay, options.raw_beta, options.lower_bound, probe, direction,
            compared,
        ),
        sequences,
        options.corrects,
        options.scale,
        options.normalize_qk,
        log_decay is not None and log_decay.dim() == 4,
        (*q.shape[1:3], v.shape[2], q.shape[3], v.shape[3]),
        sequences.slots if sequences.number == 1 else 0,
    )  # fmt: skip


def in_rows(x: Tensor) -> Tensor:
    """Return x `b t heads k` such that token i of row b is at (b t + i) stride(1); a copy only if it is not."""
    return x if lies_in_rows(x) else dense(x)


def lies_in_rows(x: Tensor) -> bool:
    """Whether in_rows returns x itself."""
    b, t = x.shape[:2]
    even = x.stride(3) == 1 and x.stride(1) % 8 == 0 and x.stride(2) % 8 == 0 and x.data_ptr() % 16 == 0
    return even and (b == 1 or x.stride(0) == t * x.stride(1))


def lies_dense(x: Tensor) -> bool:
    """Whether x is contiguous and aligned."""
    return x.is_contiguous() and x.data_ptr() % 16 == 0


def dense(x: Tensor) -> Tensor:
    """Return x contiguous, with the strides that follow from its shape even in dimensions of size 1."""
    return aligned(x.contiguous()).view(-1).view(x.shape)


def aligned(x: Tensor) -> Tensor:
    """Return x, or a copy if its address is not a multiple of 16 bytes, which TMA needs."""
    return x.clone() if x.data_ptr() % 16 else x

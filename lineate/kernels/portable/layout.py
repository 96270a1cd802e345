"""The layout in memory of sequences, their chunks, and the rows of tokens.

A sequence (`text` in the code) is one batch row, or one of the sequences packed into one row. Chunks of all sequences
are numbered consecutively; `slot` is that number. Buffers with one item per chunk and head are `slot hv ...`, tensors
with one item per token `token heads ...`.

A long sequence is cut into segments (segments.py has the rule). A `cut` is the place between two of them. The cuts of
all sequences are numbered consecutively; buffers with one item per cut and head are `cut hv ...`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def link(LINK: tl.constexpr):
    """Wait for the end of the previous launch; then, if LINK is 1, let the next one begin to wait.

    So a kernel may read, before it waits, the results of the launch before the previous one. LINK 0: the launches of a
    stream wait for each other without this. Every program must call it, also one without work: otherwise this launch
    could end before the previous one.
    """
    if LINK != 0:
        gdc_wait()
    if LINK == 1:
        gdc_launch_dependents()


@triton.jit
def text_bounds(text, bounds, first_slots, t, C: tl.constexpr, PACKED: tl.constexpr):
    """Return the first token, number of tokens and first slot of a sequence."""
    if PACKED:
        start = tl.load(bounds + text).to(tl.int64)
        length = (tl.load(bounds + text + 1).to(tl.int64) - start).to(tl.int32)
        slot = tl.load(first_slots + text).to(tl.int64)
    else:
        start = text.to(tl.int64) * t
        length = t
        slot = text.to(tl.int64) * tl.cdiv(t, C)
    return start, length, slot


@triton.jit
def find_segment(item, first_cuts, cut_texts, lasts, segments, PACKED: tl.constexpr):
    """Return which segment is an item of a walk: its sequence, its number, and the sequence's segments and first cut.

    Items 0 .. lasts - 1 are the last segments of all sequences; after them comes the segment before each cut. If there
    is no such cut, the sequence is -1. Segments are numbered in the order of the walk, which may go backwards.
    """
    cut = item - lasts
    last = cut < 0
    if PACKED:
        if cut_texts is None:
            text = item
            first_cut = 0
            segments = 1
        else:
            text = tl.load(cut_texts + cut, mask=cut >= 0, other=0)
            text = tl.where(last, item, text)
            first_cut = tl.load(first_cuts + text, mask=text >= 0, other=0)
            segments = tl.load(first_cuts + text + 1, mask=text >= 0, other=0) - first_cut + 1
    else:
        text = tl.where(last, item, cut // tl.maximum(segments - 1, 1))
        first_cut = text * (segments - 1)
    return text, tl.where(last, segments - 1, cut - first_cut), segments, first_cut


@triton.jit
def chunk_bounds(slot, bounds, first_slots, slot_texts, t, C: tl.constexpr, PACKED: tl.constexpr):
    """Return a chunk's first token and how many of its C rows are tokens: 0 for a slot that no sequence uses."""
    if PACKED:
        text = tl.load(slot_texts + slot)
        start = tl.load(bounds + text).to(tl.int64)
        end = tl.load(bounds + text + 1).to(tl.int64)
        start += (slot - tl.load(first_slots + text)).to(tl.int64) * C
        rows = tl.minimum(tl.maximum(end - start, 0), C).to(tl.int32)
    else:
        chunks = tl.cdiv(t, C)
        text = slot // chunks
        begin = (slot % chunks) * C
        start = text.to(tl.int64) * t + begin
        rows = tl.minimum(t - begin, C)
    return start, rows


@triton.jit
def load_tile(base, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Load [ROWS, COLUMNS] with a row stride of `stride`, and 0 outside rows x columns. EVEN: columns == COLUMNS."""
    i = tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    at = base + i[:, None] * stride + j[None, :]
    if EVEN:
        tile = tl.load(at, mask=(i < rows)[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=(i < rows)[:, None] & (j < columns)[None, :], other=0.0)
    return tile


@triton.jit
def store_tile(
    base, stride, tile, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, first=0
):  # fmt: skip
    """Store a tile as load_tile reads it; its first row is row `first`."""
    i = tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    at = base + i[:, None] * stride + j[None, :]
    tile = tile.to(base.dtype.element_ty)
    if EVEN:
        tl.store(at, tile, mask=((i >= first) & (i < rows))[:, None])
    else:
        tl.store(at, tile, mask=((i >= first) & (i < rows))[:, None] & (j < columns)[None, :])


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def count_cuts(chunks, shortest, most, least):
    """Return the number of cuts of sequences of `chunks` chunks: that of segments.Cutting.count_segments, less 1."""
    return tl.where(chunks < shortest, 0, tl.minimum(most, chunks // least) - 1)


@triton.jit
def _clear_tokens(x, first, low, high, t, SIZE: tl.constexpr, BT: tl.constexpr):
    """Set those of the BT tokens from `first` on that are not in low .. high to 0; each has SIZE numbers.

    x may be None. Sequences follow each other without gaps, so no others lie outside of all sequences.
    """
    BN: tl.constexpr = 256
    some = (first < low) | (first + BT > high)
    end = tl.where(some, tl.minimum(first + BT, t), first)
    if x is not None:
        for token in range(first, end):
            if (token < low) | (token >= high):
                for begin in range(0, SIZE, BN):
                    j = begin + tl.arange(0, BN)
                    at = tl.cast(token, tl.int64) * SIZE + j
                    tl.store(x + at, tl.zeros((BN,), x.dtype.element_ty), mask=j < SIZE)


@triton.jit
def _row_of(token, WRITES: tl.constexpr):
    """Return the first row of tokens with WRITES rows each."""
    row = token
    if WRITES != 1:
        row = token * WRITES
    return row


@triton.jit(do_not_specialize=["t", "texts", "slots", "cuts", "shortest", "most", "least"])
def find_slots(
    cu_seqlens, bounds, first_slots, slot_texts, first_cuts, cut_texts, output,
    t, texts, slots, cuts, shortest, most, least, BT: tl.constexpr, BS: tl.constexpr, C: tl.constexpr,
    SIZE: tl.constexpr, WRITES: tl.constexpr, LINK: tl.constexpr,
):  # fmt: skip
    """Find the sequence of each slot and, unless cut_texts is None, of each cut: BS of them per program.

    The first program also writes bounds, first_slots and first_cuts. There are no more cuts than slots. Wrong bounds
    are harmless: they are clamped to 0 .. t, and none is less than an earlier one. They count tokens of WRITES rows.

    Tokens of output, unless it is None, that lie in no sequence are set to 0; each has SIZE numbers.
    """
    link(LINK)
    slot = tl.program_id(0) * BS + tl.arange(0, BS)
    ended = tl.zeros((BS,), tl.int32)  # sequences that end before a slot
    passed = tl.zeros((BS,), tl.int32)  # sequences whose cuts all come before a cut
    before = tl.zeros((), tl.int32)
    top = tl.zeros((), tl.int64)
    lowest = tl.minimum(tl.maximum(_row_of(tl.load(cu_seqlens), WRITES), 0), t).to(tl.int32)
    used = tl.zeros((), tl.int32)
    for begin in range(0, texts, BT):
        i = begin + tl.arange(0, BT)
        there = i < texts
        here = _row_of(tl.load(cu_seqlens + i, mask=there, other=0).to(tl.int64), WRITES)
        after = _row_of(tl.load(cu_seqlens + i + 1, mask=there, other=0).to(tl.int64), WRITES)
        here, after = tl.minimum(tl.maximum(here, 0), t), tl.minimum(tl.maximum(after, 0), t)
        low = tl.maximum(tl.associative_scan(here, 0, larger), top)
        high = tl.maximum(low, after)
        chunks = tl.where(there, (high - low + C - 1) // C, 0).to(tl.int32)
        ends = used + tl.cumsum(chunks, 0)
        if tl.program_id(0) == 0:
            tl.store(bounds + i, low, mask=there)
            tl.store(first_slots + i, (ends - chunks).to(tl.int64), mask=there)
        ended += tl.sum(((ends[None, :] <= slot[:, None]) & there[None, :]).to(tl.int32), 1)
        if cut_texts is not None:
            own = count_cuts(chunks, shortest, most, least)
            cut_ends = before + tl.cumsum(own, 0)
            if tl.program_id(0) == 0:
                tl.store(first_cuts + i, cut_ends - own, mask=there)
            passed += tl.sum(((cut_ends[None, :] <= slot[:, None]) & there[None, :]).to(tl.int32), 1)
            before += tl.sum(own, 0)
        top = tl.max(high, 0)
        used += tl.sum(chunks, 0)
    if tl.program_id(0) == 0:
        tl.store(bounds + texts, top)
        tl.store(first_slots + texts, used.to(tl.int64))
    tl.store(slot_texts + slot, tl.minimum(ended, texts - 1).to(tl.int64), mask=slot < slots)
    if cut_texts is not None:
        if tl.program_id(0) == 0:
            tl.store(first_cuts + texts, before)
        tl.store(cut_texts + slot, tl.where(passed < texts, passed, -1), mask=slot < cuts)
    if output is not None:
        for first in range(tl.program_id(0) * C, t, tl.num_programs(0) * C):
            _clear_tokens(output, first, lowest, top, t, SIZE, C)


@triton.jit(do_not_specialize=["t", "texts"])
def clear_outside(
    bounds, a, b, c, d, e, t, texts,
    A: tl.constexpr, B: tl.constexpr, D: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    BT: tl.constexpr, LINK: tl.constexpr,
):  # fmt: skip
    """Set the tokens of a .. e `t ...` that lie in no sequence to 0; a token of them has A, B, D, E, F numbers."""
    link(LINK)
    low = tl.load(bounds).to(tl.int32)
    high = tl.load(bounds + texts).to(tl.int32)
    first = tl.program_id(0) * BT
    _clear_tokens(a, first, low, high, t, A, BT)
    _clear_tokens(b, first, low, high, t, B, BT)
    _clear_tokens(c, first, low, high, t, D, BT)
    _clear_tokens(d, first, low, high, t, E, BT)
    _clear_tokens(e, first, low, high, t, F, BT)

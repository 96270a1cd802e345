"""Where things lie: texts, their chunks, and the rows of tokens.

A text is one batch row, or one of the texts packed into one row. Chunks of all texts are numbered through; `slot` is
that number. Buffers of one item a chunk and head are `slot hv ...`, tensors of one item a token `token heads ...`.
"""

import triton
import triton.language as tl


@triton.jit
def text_bounds(text, bounds, first_slots, t, C: tl.constexpr, PACKED: tl.constexpr):
    """First token, number of tokens and first slot of a text."""
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
def chunk_bounds(slot, bounds, first_slots, slot_texts, t, C: tl.constexpr, PACKED: tl.constexpr):
    """First token of a chunk and how many of its C rows are tokens: 0 for a slot that no text uses."""
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
    """[ROWS, COLUMNS] from rows `stride` apart; what is outside rows x columns is 0. EVEN: columns == COLUMNS."""
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
    """What load_tile reads, written; row `first` is the first one."""
    i = tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    at = base + i[:, None] * stride + j[None, :]
    tile = tile.to(base.dtype.element_ty)
    if EVEN:
        tl.store(at, tile, mask=((i >= first) & (i < rows))[:, None])
    else:
        tl.store(at, tile, mask=((i >= first) & (i < rows))[:, None] & (j < columns)[None, :])

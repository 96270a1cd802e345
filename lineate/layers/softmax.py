"""Softmax attention of new tokens, and of tokens over a cache: which kernel runs, for which tensors.

On a GPU, tokens over a longer cache need no mask: a few read the cache in parts (kernels/layers/cached.py), a piece of
a prompt reads it causally from the end (kernels/layers/pieces.py), and a long piece reads whole blocks of it
(kernels/layers/squares.py). Elsewhere torch computes with a mask, in blocks of queries where it would be large.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from inspect import signature
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lineate.dispatch import kernels_run
from lineate.forms.sequences import sequence_lengths
from lineate.layers.gpu import kernels_for
from lineate.layers.state import TokenCache
from lineate.native.low_precision_matmul import attention, has_separate_rows
from lineate.torch_ops.invariance import is_batch_invariant
from lineate.torch_ops.opaque import opaque
from lineate.torch_ops.tracing import constant_in_graphs, is_eager, needs_grad, recorded

if TYPE_CHECKING:
    from lineate.kernels.layers.pieces import Block
    from lineate.kernels.layers.squares import Keys

WINDOW = 64
"""On a CPU, a decoding step reads a multiple of this many cached entries, so that most calls have known shapes."""
LARGEST_MASK = 2**26
"""The most elements of a mask; with more, attention runs in blocks of queries."""
_PLANLESS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend_new(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor | None, key_bounds: Tensor | None = None,
    window: int = 0,
) -> Tensor:  # fmt: skip
    """Attend causally with q `b t heads k` to keys `b n kv k` and values `b n kv v`; q's tokens are the last t of n.

    Returns `b t heads v`. cu_seqlens are the bounds of q, key_bounds those of packed keys; None means the same bounds.
    window (only if takes_packed): a token sees itself and the window - 1 tokens before it; 0 means all before it.
    """
    b, t, n = *q.shape[:2], k.shape[1]
    if t == n and cu_seqlens is None and not window and runs_kernels(q, k, v) and takes_square(q, k, v.shape[3]):
        return attend_long(q, lambda begin, end: (k[:, begin:end], v[:, begin:end]), n, scale)
    fast = takes_packed(q)
    if cu_seqlens is None:
        if not fast or (t in (1, n) and not window):
            return _softmax_last(q, k, v, scale)
        cu_seqlens, key_bounds = (torch.arange(b + 1, device=q.device) * length for length in (t, n))
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
        return _packed_softmax(q, k, v, scale, cu_seqlens, key_bounds, (t, n), window).unflatten(1, (b, t))[0]
    key_bounds = cu_seqlens if key_bounds is None else key_bounds
    if fast:
        # No graph, torch's or CUDA's, can wait for the lengths; upper bounds suffice.
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            longest = t, n
        else:
            longest = max(sequence_lengths(cu_seqlens)), max(sequence_lengths(key_bounds))
        return _packed_softmax(q, k, v, scale, cu_seqlens, key_bounds, longest, window)
    return _attend_texts(q, k, v, cu_seqlens, key_bounds, scale)


def _text_by_text(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, key_bounds: Tensor, scale: float) -> Tensor:
    """Run attend_new on packed sequences, one after another."""
    lengths, seen = sequence_lengths(cu_seqlens), sequence_lengths(key_bounds)
    texts = zip(q.split(lengths, 1), k.split(seen, 1), v.split(seen, 1), strict=True)
    return torch.cat([_softmax_last(*qkv, scale) for qkv in texts if qkv[0].shape[1]], 1)


_attend_texts = opaque(
    "attend_texts",
    _text_by_text,
    lambda q, k, v, *_: q.new_empty(*q.shape[:3], v.shape[3]),
    gradients=3,
)


def attend(q: Tensor, cache: TokenCache, keys: str, values: str, scale: float, cu_seqlens: Tensor | None) -> Tensor:
    """Attend causally with q `b t heads k` to cached keys `rows n kv k` and values `rows n kv v`, q's tokens included.

    Returns `b t heads v`. The rows of the cache are the rows of q or, with cu_seqlens, its packed sequences.
    """
    k, v = cache[keys], cache[values]
    if runs_kernels(q, k, v):
        output = _attend_on_gpu(q, k, v, cache, scale, cu_seqlens)
        if output is not None:
            return output
    if cu_seqlens is None:
        if isinstance(cache.lengths, int):
            return _softmax_last(q, k, v, scale)
        return _softmax_ragged(q, k, v, cache.lengths, scale)
    lengths = cache.lengths if isinstance(cache.lengths, Tensor) else torch.full_like(cu_seqlens[1:], cache.lengths)
    return _attend_rows(q, k, v, cu_seqlens, lengths, scale)


def runs_kernels(*tensors: Tensor) -> bool:
    """Whether kernels of ours may read a cache with these tensors: on a GPU, eagerly and without gradients."""
    return not needs_grad(*tensors) and is_eager(*tensors) and kernels_for(*tensors) is not None


def takes_square(q: Tensor, k: Tensor, value: int) -> bool:
    """Whether attend_long takes q `b t heads k`, with keys like k (or a tensor of their cache) and values of a size."""
    from lineate.kernels.layers.squares import serves_square  # triton, at its first use

    return serves_square(q, k, value)


def attend_long(q: Tensor, keys: "Keys", n: int, scale: float) -> Tensor:
    """Attend with q `b t heads k`, the last t of n tokens, to keys that a function returns (kernels/layers/squares.py).

    Returns `b t heads v`.
    """
    from lineate.kernels.layers.squares import long_attention  # triton, at its first use

    return long_attention(q, keys, n, scale)


def _attend_on_gpu(
    q: Tensor, k: Tensor, v: Tensor, cache: TokenCache, scale: float, cu_seqlens: Tensor | None
) -> Tensor | None:  # fmt: skip
    """Run attend without a mask; None where torch's kernels are to run."""
    from lineate.kernels.layers import cached, pieces  # triton, at its first use

    t, even = q.shape[1], isinstance(cache.lengths, int)
    if cu_seqlens is None:
        if isinstance(cache.lengths, int) and takes_square(q, k, v.shape[3]):
            return attend_long(q, lambda begin, end: (k[:, begin:end], v[:, begin:end]), cache.lengths, scale)
        if even and t in (1, cache.n):
            return None
        if cached.serves_cached(q, k, v):
            return cached.cached_attention(q, k, v, lengths_of(cache, q.device), scale)
    if not pieces.serves_piece(q, k, k.shape[3], v.shape[3]):
        return None
    return attend_blocks(q, [pieces.Block(k, v)], cache, scale, cu_seqlens)


def lengths_of(cache: TokenCache, device: torch.device) -> Tensor:
    """Return the lengths of all rows of a cache, int64 on a device."""
    if isinstance(cache.lengths, Tensor):
        return cache.lengths
    return torch.full((cache.rows,), cache.lengths, dtype=torch.int64, device=device)


def attend_blocks(
    q: Tensor, blocks: "Iterable[Block]", cache: TokenCache, scale: float, cu_seqlens: Tensor | None
) -> Tensor:  # fmt: skip
    """Run attend on keys and values that are made from a cache, block by block (kernels/layers/pieces.py)."""
    from lineate.kernels.layers.pieces import piece_attention  # triton, at its first use

    longest = 0
    if cu_seqlens is not None:
        longest, cu_seqlens = max(sequence_lengths(cu_seqlens), default=0), cu_seqlens.to(q.device)
    return piece_attention(q, blocks, cache.n, cache.lengths, scale, cu_seqlens, longest)


def _softmax_ragged(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Attend causally; the tokens of q `rows t heads k` are the last t of the first lengths[row] of k and v."""
    t, n = q.shape[1], k.shape[1]
    size = _block_of_queries(t, n * q.shape[0])
    if size < t:
        ends = [min(at + size, t) for at in range(0, t, size)]
        parts = zip(q.split(size, 1), ends, strict=True)
        return torch.cat([_softmax_ragged(part, k, v, lengths - (t - end), scale) for part, end in parts], 1)
    first = lengths[:, None] - t + torch.arange(t, device=q.device)  # rows t: the last key that is seen
    mask = torch.arange(n, device=q.device) <= first[..., None]  # rows t n
    if has_separate_rows(q, k, v) or (q.is_cpu and is_batch_invariant() and not recorded()):
        return _rows_alone(q, k, v, scale, mask, lengths.tolist())
    return _softmax(q, k, v, scale, mask[:, None], causal=False)


def _rows_alone(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor, lengths: list[int]) -> Tensor:
    """Run attention of each row by itself, over a window that its own length decides; mask `rows t n`."""
    outputs = []
    for row, length in enumerate(lengths):
        n, at = min(k.shape[1], -(-length // WINDOW) * WINDOW), slice(row, row + 1)
        outputs.append(_softmax(q[at], k[at, :n], v[at, :n], scale, mask[at, None, :, :n], causal=False))
    return torch.cat(outputs)


def reads_own_length(mixer: nn.Module, t: int) -> bool:
    """Whether t new tokens of cached rows cost what their own lengths cost, whatever room the caches have.

    Args:
        mixer: A mixer on a GPU that keeps an entry a token.
        t: The new tokens of a row.
    """
    reads: Callable[[int], bool] | None = getattr(mixer, "reads_own_length", None)
    return reads is not None and kernels_run() and reads(t)


def _row_by_row(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Run attend on packed sequences, each over the first lengths[row] keys `n kv k` of its row."""
    bounds = zip(pairwise(cu_seqlens.tolist()), lengths.tolist(), strict=True)
    outputs = [
        _softmax_last(q[:, start:end], k[row : row + 1, :length], v[row : row + 1, :length], scale)
        for row, ((start, end), length) in enumerate(bounds)
        if end > start
    ]
    return torch.cat(outputs, 1) if outputs else q.new_empty(1, 0, q.shape[2], v.shape[3])


_attend_rows = opaque(
    "attend_rows",
    _row_by_row,
    lambda q, k, v, *_: q.new_empty(*q.shape[:3], v.shape[3]),
    gradients=3,
)


def _softmax_last(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend causally; the tokens of q `b t heads k` are the last t of those of k and v `b n kv k|v`."""
    t, n = q.shape[1], k.shape[1]
    if not 1 < t < n:
        return _softmax(q, k, v, scale, None, causal=1 < t == n)
    size = _block_of_queries(t, n)
    if size < t:
        seen = (n - t + min(at + size, t) for at in range(0, t, size))
        parts = zip(q.split(size, 1), seen, strict=True)
        return torch.cat([_softmax_last(part, k[:, :end], v[:, :end], scale) for part, end in parts], 1)
    mask = torch.ones(t, n, dtype=torch.bool, device=q.device).tril(n - t)
    return _softmax(q, k, v, scale, mask, causal=False)


def _block_of_queries(t: int, keys: int) -> int:
    """Return how many of t queries one mask is for, with this many keys of all rows; a graph is for all numbers."""
    return t if recorded() or t * keys <= LARGEST_MASK else max(1, LARGEST_MASK // keys)


def takes_packed(q: Tensor) -> bool:
    """Whether one launch serves packed sequences and windows, which needs 16-bit tensors on a GPU."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] <= 256 and q.shape[3] % 8 == 0


def _packed_softmax(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor, key_bounds: Tensor, longest: tuple[int, int],
    window: int,
) -> Tensor:  # fmt: skip
    """Run attend_new on packed sequences on a GPU in one launch; longest: the longest lengths of q and of the keys."""
    from torch.nn.attention.varlen import varlen_attn  # absent from builds of torch for CPUs

    width, softmax = v.shape[3], partial(varlen_attn, scale=scale, window_size=(window - 1, 0))
    if k.shape[2] < q.shape[2]:
        if _varlen_shares_keys():
            softmax = partial(softmax, enable_gqa=True)
        else:
            k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    v = F.pad(v, (0, q.shape[3] - width))
    q, k, v = (x[0].contiguous() for x in (q, k, v))
    bounds = cu_seqlens.int(), key_bounds.int()
    out = softmax(q, k, v, *bounds, *longest)
    assert isinstance(out, Tensor)
    return out[None, ..., :width]


@cache
def _shares_keys() -> bool:
    """Whether this version of torch accepts fewer heads of keys than of queries."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


@constant_in_graphs
def _varlen_shares_keys() -> bool:
    return _shares_keys()


def _softmax(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, *, causal: bool) -> Tensor:
    """Return softmax attention `b t heads v` of q `b t heads k`, k and v `b n kv k|v`, and mask `t n` or `b 1 t n`."""
    t, heads, kv = q.shape[1], q.shape[2], k.shape[2]
    if v.shape[3] < k.shape[3]:  # the fast kernels need keys and values of one width
        widened = F.pad(v, (0, k.shape[3] - v.shape[3]))
        return _softmax(q, k, widened, scale, mask, causal=causal)[..., : v.shape[3]]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if t == 1 and kv < heads:  # the queries of a group read the same keys: one product, nothing repeated
        grouped = q.view(q.shape[0], kv, heads // kv, q.shape[3])
        if mask is not None:
            mask = mask.expand(-1, 1, heads // kv, -1)
        with _kernels_without_plans(q):
            return attention(grouped, k, v, mask, scale=scale).flatten(1, 2)[:, None]
    with _kernels_without_plans(q):
        out = attention(q.transpose(1, 2), k, v, mask, causal=causal, scale=scale, shared_keys=kv < heads)
    return out.transpose(1, 2)


def _kernels_without_plans(q: Tensor) -> AbstractContextManager[None]:
    """Avoid cuDNN's kernels for few tokens on a GPU: they plan every new length of the cache, for tens of ms each."""
    return sdpa_kernel(_PLANLESS) if q.is_cuda and q.shape[1] < 1024 else nullcontext()

"""Softmax attention: grouped queries, q and k norms, partial rotary positions, a sigmoid gate on the output."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from inspect import signature
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lineate import checks
from lineate.dispatch import kernels_run
from lineate.forms.sequences import sequence_lengths
from lineate.layers.configs import AttentionConfig
from lineate.layers.costs.attention import ATTENTION, attention_kept
from lineate.layers.entry import check_call
from lineate.layers.gpu import kernels_for
from lineate.layers.norm import RMSNorm
from lineate.layers.projection import project, project_out
from lineate.layers.registry import Look, MixerKind, ModelSizes, register
from lineate.layers.rope import Turn, rotate, turns
from lineate.layers.split_attention import attend_segment
from lineate.layers.state import TensorSpec, TokenCache, token_positions
from lineate.native.low_precision_matmul import attention, has_separate_rows
from lineate.parallel.context.segments import Bounds, Context, segment_of
from lineate.parallel.tensor.ranks import Ranks, rms_norm_over
from lineate.parallel.tensor.shards import Cut, Part, Shard, linear_cuts, share_out
from lineate.rule import compute_dtype
from lineate.torch_ops.elementwise import elementwise
from lineate.torch_ops.opaque import opaque
from lineate.torch_ops.tracing import constant_in_graphs, is_eager, needs_grad

WINDOW = 64
"""On a CPU, a decoding step reads a multiple of this many cached entries, so that most calls have known shapes."""
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
    fast = takes_packed(q)
    if cu_seqlens is None:
        if not fast or (t in (1, n) and not window):
            return _softmax_last(q, k, v, scale)
        cu_seqlens, key_bounds = (torch.arange(b + 1, device=q.device) * length for length in (t, n))
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
        return _packed_softmax(q, k, v, scale, cu_seqlens, key_bounds, (t, n), window).unflatten(1, (b, t))[0]
    key_bounds = cu_seqlens if key_bounds is None else key_bounds
    if fast:
        if torch.compiler.is_compiling():  # a graph cannot wait for the lengths; upper bounds suffice
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
    t, k, v = q.shape[1], cache[keys], cache[values]
    if cu_seqlens is None:
        if isinstance(cache.lengths, int):
            mask = None
            if 1 < t < cache.n:
                mask = torch.ones(t, cache.n, dtype=torch.bool, device=q.device).tril(cache.n - t)
            return _softmax(q, k, v, scale, mask, causal=1 < t == cache.n)
        if not needs_grad(q, k, v) and is_eager(q, k, v) and kernels_for(q, k, v) is not None:
            from lineate.kernels.layers.cached import cached_attention, serves_cached  # triton, at its first use

            if serves_cached(q, k, v):
                return cached_attention(q, k, v, cache.lengths, scale)
        first = cache.lengths[:, None] - t + torch.arange(t, device=q.device)  # rows t: the last key that is seen
        mask = torch.arange(cache.n, device=q.device) <= first[..., None]  # rows t n
        if has_separate_rows(q, k, v):
            return _rows_alone(q, k, v, scale, mask, cache.lengths.tolist())
        return _softmax(q, k, v, scale, mask[:, None], causal=False)
    lengths = cache.lengths if isinstance(cache.lengths, Tensor) else torch.full_like(cu_seqlens[1:], cache.lengths)
    return _attend_rows(q, k, v, cu_seqlens, lengths, scale)


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
    if not isinstance(mixer, GatedAttention) or not kernels_run():
        return False
    from lineate.kernels.layers.cached import MOST_QUERIES, WIDEST_HEAD  # triton, at its first use

    return mixer.head_dim <= WIDEST_HEAD and t * mixer.heads // mixer.kv_heads <= MOST_QUERIES


def _row_by_row(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Run attend on packed sequences, each over the first lengths[row] keys `n kv k` of its row."""
    outputs = []
    for row, ((start, end), length) in enumerate(zip(pairwise(cu_seqlens.tolist()), lengths.tolist(), strict=True)):
        if end == start:
            continue
        mask = None
        if 1 < end - start < length:
            mask = torch.ones(end - start, length, dtype=torch.bool, device=q.device).tril(length - (end - start))
        own_k, own_v = k[row : row + 1, :length], v[row : row + 1, :length]
        outputs.append(_softmax(q[:, start:end], own_k, own_v, scale, mask, causal=1 < end - start == length))
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
    mask = torch.ones(t, n, dtype=torch.bool, device=q.device).tril(n - t) if 1 < t < n else None
    return _softmax(q, k, v, scale, mask, causal=1 < t == n)


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


class GatedAttention(nn.Module):
    """Causal softmax attention with o = attention(q, k, v) * sigmoid(gate) before the output projection.

    in_proj is q | gate | k | v, one projection.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        heads: query heads, a multiple of kv_heads.
        kv_heads: heads of keys and values; None is heads.
        head_dim: channels of a head; None is hidden_size / heads.
        rotary_dim: how many of a head's first channels carry positions; 0 means none do.
        rope_theta: base of the rotation's frequencies.
        gated: whether the output is multiplied by sigmoid(gate).
        qk_norm: RMSNorm of q and k: of every "head", of all heads together ("full"), or None.
        bias: whether the projections have a bias.
        norm_eps: epsilon of these norms.
        zero_centred_norm: whether these norms multiply by 1 + weight.
        scale: multiplies the scores; None is 1/sqrt(head_dim).
    """

    context: Context | None = None
    """If set, x is this rank's segment of sequences that are split over ranks (docs/scaling.md)."""
    ranks: Ranks | None = None
    """If set, the other heads are on other ranks, and the result is this rank's summand (docs/scaling.md)."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary_dim: int = 0,
        rope_theta: float = 10000.0,
        gated: bool = True,
        qk_norm: str | None = "head",
        bias: bool = False,
        norm_eps: float = 1e-6,
        zero_centred_norm: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        checks.check_choice("qk_norm", str(qk_norm), ("head", "full", "None"))
        kv_heads = heads if kv_heads is None else kv_heads
        head_dim = hidden_size // heads if head_dim is None else head_dim
        if heads % kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads = {kv_heads}, got {heads}")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.rotary_dim, self.rope_theta, self.gated, self.qk_norm = rotary_dim, rope_theta, gated, qk_norm
        self.scale = head_dim**-0.5 if scale is None else scale
        wide, narrow = heads * head_dim, kv_heads * head_dim
        self.splits = (wide, wide if gated else 0, narrow, narrow)
        self.in_proj = nn.Linear(hidden_size, sum(self.splits), bias=bias)
        if qk_norm is not None:
            sizes = (head_dim, head_dim) if qk_norm == "head" else (wide, narrow)
            self.q_norm = RMSNorm(sizes[0], norm_eps, zero_centred=zero_centred_norm)
            self.k_norm = RMSNorm(sizes[1], norm_eps, zero_centred=zero_centred_norm)
        self.out_proj = nn.Linear(wide, hidden_size, bias=bias)

    @property
    def state_spec(self) -> tuple[TensorSpec, ...]:
        dtype = self.in_proj.weight.dtype
        return tuple(TensorSpec(name, ("t", self.kv_heads, self.head_dim), dtype) for name in ("keys", "values"))

    def forward(
        self, x: Tensor, state: TokenCache | None = None, cu_seqlens: Bounds = None
    ) -> tuple[Tensor, TokenCache]:
        """Mix the tokens of x `b t hidden`; the state is all keys and values so far.

        Args:
            x: `b t hidden`; with cu_seqlens `1 t hidden`.
            state: what an earlier call returned, to continue its sequences; with None they begin here.
            cu_seqlens: where sequences packed into one row begin and end, `n_seqs + 1`.
        """
        check_call(self, x, state, cu_seqlens)
        past = 0 if state is None else state.lengths
        segment, cu_seqlens = segment_of(self.context, x, cu_seqlens, past)
        q, gate, k, v = project(self.in_proj, x).split(self.splits, -1)
        if self.qk_norm == "full":
            q, k = self._norm_all(self.q_norm, q), self._norm_all(self.k_norm, k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary_dim:
            turn = self._turn(x, state, past if segment is None else segment.lengths(past), cu_seqlens)
            q, k = rotate(q, turn), rotate(k, turn)
        new, scale = {"keys": k, "values": v}, self.scale
        if segment is not None:
            output, state = attend_segment(segment, q, new, state, _keys_and_values, attend_new, scale)
        elif state is None:
            if x.is_cuda:  # both the kernel and the cache need it contiguous
                new["values"] = v = v.contiguous()
            output, state = attend_new(q, k, v, scale, cu_seqlens), TokenCache.of(new, cu_seqlens)
        else:
            state = state.append(new) if cu_seqlens is None else state.append_packed(new, cu_seqlens)
            output = attend(q, state, "keys", "values", scale, cu_seqlens)
        output = output.flatten(2)
        if self.gated:
            output = output * elementwise(torch.sigmoid, gate)
        return project_out(self.out_proj, output, self.ranks), state

    def _norm_all(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """Normalise all heads together, those on other ranks too."""
        if self.ranks is None:
            result: Tensor = norm(x)
            return result
        dtype = compute_dtype(x.dtype)
        weight = norm.weight.to(dtype) + norm.zero_centred
        return rms_norm_over(self.ranks, x.to(dtype), weight, norm.eps, self.ranks.size * x.shape[-1]).to(x.dtype)

    def cuts(self) -> dict[str, Cut]:
        """Return how the parameters are shared out among ranks; several may have the same head of keys and values."""
        wide, gate, narrow, _ = self.splits
        queries, keys = Part(wide, self.heads), Part(narrow, self.kv_heads)
        cuts = linear_cuts("in_proj", self.in_proj, 0, (queries, Part(gate, self.heads), keys, keys))
        cuts |= linear_cuts("out_proj", self.out_proj, 1, (queries,))
        if self.qk_norm == "full":
            cuts |= {"q_norm.weight": Cut(0, (queries,)), "k_norm.weight": Cut(0, (keys,))}
        return cuts

    def _turn(self, x: Tensor, state: TokenCache | None, past: int | Tensor, cu_seqlens: Tensor | None) -> Turn:
        def turn() -> Turn:
            return turns(token_positions(past, x, cu_seqlens), self.rotary_dim, self.rope_theta, x.dtype)

        return turn() if state is None else state.once(("turn", self.rotary_dim, self.rope_theta, x.dtype), turn)


def _keys_and_values(entries: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return entries["keys"], entries["values"]


def _make(model: ModelSizes, config: AttentionConfig) -> GatedAttention:
    return GatedAttention(
        model.hidden_size, config.heads, kv_heads=config.kv_heads, head_dim=config.head_dim,
        rotary_dim=config.rotary_dim, rope_theta=config.rope_theta, gated=config.gated, qk_norm=config.qk_norm,
        bias=config.bias, norm_eps=model.norm_eps, zero_centred_norm=model.zero_centred_norm,
        scale=config.scale,
    )  # fmt: skip


def _divide(x: AttentionConfig, ranks: int) -> AttentionConfig:
    """Return the sizes of one rank's share of the heads."""
    full = x.qk_norm == "full"  # the mean would count a head once for each rank that has it
    return replace(
        x,
        heads=share_out("the query heads", x.heads, ranks),
        kv_heads=share_out("the heads of keys and values", x.kv_heads, ranks, several=not full),
    )


LOOK = Look("#444444", "x", (0, (1, 1)))
SOFTMAX = register(
    MixerKind(
        letter="A",
        name="softmax_attention",
        label="softmax attention",
        short="softmax",
        short_label="softmax",
        config=AttentionConfig,
        section="attention",
        make=_make,
        operations=ATTENTION,
        kept_bytes=attention_kept,
        cache="keys and values",
        look=LOOK,
        shard=Shard(_divide, GatedAttention.cuts),
    )
)

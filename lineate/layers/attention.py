"""Softmax attention: grouped queries, q and k norms, partial rotary positions, a sigmoid gate on the output."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from lineate import checks
from lineate.layers.configs import AttentionConfig
from lineate.layers.costs.attention import ATTENTION, attention_kept
from lineate.layers.entry import check_call
from lineate.layers.norm import RMSNorm
from lineate.layers.projection import project, project_out
from lineate.layers.registry import Look, MixerKind, ModelSizes, register
from lineate.layers.rope import Turn, rotate, turns
from lineate.layers.softmax import attend, attend_new, runs_kernels
from lineate.layers.split_attention import attend_segment
from lineate.layers.state import TensorSpec, TokenCache, token_positions
from lineate.parallel.context.segments import Bounds, Context, segment_of
from lineate.parallel.tensor.ranks import Ranks, rms_norm_over
from lineate.parallel.tensor.shards import Cut, Part, Shard, linear_cuts, share_out
from lineate.rule import compute_dtype
from lineate.torch_ops.elementwise import elementwise


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
        if self.gated and runs_kernels(output, gate):
            from lineate.kernels.layers.around_attention import gated  # triton, at its first use

            output = gated(output, gate)
        elif self.gated:
            output = output * elementwise(torch.sigmoid, gate)
        return project_out(self.out_proj, output, self.ranks), state

    def reads_own_length(self, t: int) -> bool:
        """Whether t new tokens of a row read only the entries that the row has; see softmax.reads_own_length."""
        from lineate.kernels.layers.cached import MOST_QUERIES, WIDEST_HEAD  # triton, at its first use

        return self.head_dim <= WIDEST_HEAD and t * self.heads // self.kv_heads <= MOST_QUERIES

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

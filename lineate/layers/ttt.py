"""TTT-Linear and TTT-MLP as token mixers (arXiv 2407.04620): a memory that is a small model, trained while reading.

q | k | v | z | r = in_proj(x)               one projection for everything
q | k | v = silu(conv(q | k | v))            the short convolution; then rotary positions in the chunk for q, k
rate = base_rate sigmoid(r + rate_bias) / d
o, state = ttt(q, k, v, rate, ...)           lineate.memory.ttt
y = out_proj(LayerNorm(o) * gelu(z))         over all heads

This is the paper's layer except for q, k and v. In the paper, q and k share one projection, followed by two
convolutions without silu, and v has no convolution; here each has its own projection and convolution,
as in the other mixers.
"""

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.layers.configs import MemoryConfig
from lineate.layers.costs.learning import LearningCosts, learning_kept
from lineate.layers.learning import LearningMixer, divide_memory, shared_sizes
from lineate.layers.registry import Look, MixerKind, ModelSizes, register
from lineate.layers.rope import rotate, turns
from lineate.layers.state import Memory, TensorSpec, token_positions
from lineate.memory.ttt import ttt
from lineate.parallel.tensor.ranks import Ranks, rms_norm_over
from lineate.parallel.tensor.shards import Cut, Part, Shard
from lineate.rule import compute_dtype
from lineate.torch_ops.elementwise import elementwise


class TTTMixer(LearningMixer):
    """The base class of TTTLinear and TTTMLP: heads of head_dim channels, each with a model of its own."""

    ranks: Ranks | None = None
    """If set, the other heads are on other ranks, and the result is this rank's summand (docs/scaling.md)."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        widths: tuple[int, ...],
        head_dim: int,
        chunk: int,
        base_rate: float,
        conv_size: int,
        rope_theta: float | None,
        norm_eps: float,
        recompute_chunks: int,
    ) -> None:
        """Make the mixer.

        Args:
            hidden_size: Channels of x.
            heads: Heads, each with a model of its own.
            widths: Hidden channels of the model; empty if it is one layer.
            head_dim: Channels of a head.
            chunk: Tokens that share one gradient point.
            base_rate: The largest step size, times head_dim.
            conv_size: Tokens that the short convolution sees; 0 means no convolution.
            rope_theta: The base of the rotary positions in the chunk; None: no positions.
            norm_eps: Added to the variance in the norms.
            recompute_chunks: Chunks of a group that keeps only its first weights and is recomputed in the backward; 0
                keeps everything.
        """
        channels = heads * head_dim
        splits = 3 * channels, channels, heads  # q | k | v, z, r
        super().__init__(hidden_size, heads, splits=splits, chunk=chunk, conv_size=conv_size, norm_eps=norm_eps)
        self.head_dim, self.widths, self.base_rate = head_dim, widths, base_rate
        self.rope_theta, self.recompute_chunks = rope_theta, recompute_chunks
        self.rate_bias = nn.Parameter(torch.empty(heads))
        self.factor_offset = nn.Parameter(torch.empty(chunk))
        self.norm_weight = nn.Parameter(torch.empty(heads, head_dim))
        self.norm_bias = nn.Parameter(torch.empty(heads, head_dim))
        self.start = nn.ParameterDict()
        for name, shape in self.shapes().items():
            self.start[name] = nn.Parameter(torch.empty(shape))
        self.post_norm = nn.LayerNorm(channels, norm_eps)
        self.finish(channels)

    def reset_parameters(self) -> None:
        """Draw normal weights of deviation .02; set the biases to 0 and the norm's weight to 1."""
        for x in (self.rate_bias, self.factor_offset, self.norm_bias):
            nn.init.zeros_(x)
        nn.init.ones_(self.norm_weight)
        for name, x in self.start.items():
            if name.startswith("weight"):
                nn.init.normal_(x, std=0.02)
            else:
                nn.init.zeros_(x)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the model's weights and biases: weight1, bias1, ..."""
        shapes: dict[str, tuple[int, ...]] = {}
        sizes = self.head_dim, *self.widths, self.head_dim
        for i, (n, m) in enumerate(pairwise(sizes), 1):
            shapes |= {f"weight{i}": (self.heads, n, m), f"bias{i}": (self.heads, m)}
        return shapes

    def memory_spec(self, dtype: torch.dtype, wide: torch.dtype) -> list[TensorSpec]:
        """Return the specs of the model, its summed gradients, and the position in the chunk."""
        specs = [TensorSpec(name + end, shape, wide) for end in ("", "_sum") for name, shape in self.shapes().items()]
        return [*specs, TensorSpec("position", (), torch.int64)]

    def learn(
        self, x: Tensor, mixed: Tensor, gates: list[Tensor], state: Memory | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return LayerNorm(o) * gelu(z), and the model with its summed gradients."""
        z, r = gates
        q, k, v = mixed.unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        if self.rope_theta is not None:
            places = token_positions(0 if state is None else state["position"], x, cu_seqlens) % self.chunk
            turn = turns(places, self.head_dim // 2 * 2, self.rope_theta, x.dtype)
            q, k = rotate(q, turn), rotate(k, turn)
        dtype = compute_dtype(r.dtype)
        rate = self.base_rate / self.head_dim * elementwise(torch.sigmoid, r.to(dtype) + self.rate_bias.to(dtype))
        places = torch.arange(1, self.chunk + 1, device=x.device, dtype=dtype)
        factor = (1 / places + self.factor_offset.to(dtype)).clamp(min=0)
        output, memory = ttt(
            q, k, v, rate, self.norm_weight, self.norm_bias,
            dict(self.start.items()) if state is None else self.memory_of(state),
            factor=factor, chunk=self.chunk, cu_seqlens=cu_seqlens, eps=self.norm_eps,
            recompute_chunks=self.recompute_chunks,
        )  # fmt: skip
        return self._norm_all(output.flatten(2)) * elementwise(partial(F.gelu, approximate="tanh"), z), memory

    def _norm_all(self, x: Tensor) -> Tensor:
        """Normalise the channels of all heads together, including those on other ranks."""
        if self.ranks is None:
            result: Tensor = self.post_norm(x)
            return result
        wide, size = x.to(compute_dtype(x.dtype)), self.ranks.size * x.shape[-1]
        wide = wide - self.ranks.total(wide.sum(-1, keepdim=True)) / size
        normed = rms_norm_over(self.ranks, wide, self.post_norm.weight.to(wide.dtype), self.post_norm.eps, size)
        return (normed + self.post_norm.bias.to(wide.dtype)).to(x.dtype)

    def cuts(self) -> dict[str, Cut]:
        """Return the division of the parameters among ranks, by heads."""
        channels, heads = Part(self.heads * self.head_dim, self.heads), Part(self.heads, self.heads)
        cuts = self.shared_cuts((channels,) * 3, (channels, heads))
        cuts |= {f"post_norm.{name}": Cut(0, (channels,)) for name in ("weight", "bias")}
        by_head = ["rate_bias", "norm_weight", "norm_bias", *(f"start.{name}" for name in self.start)]
        return cuts | {name: Cut(0, (heads,)) for name in by_head}


class TTTLinear(TTTMixer):
    """W_t = W_0 - f sum_s rate_s grad 1/2 |LN(W k_s + b) - (v_s - k_s)|^2, o = q + LN(W_t q + b_t)."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        head_dim: int | None = None,
        chunk: int = 16,
        base_rate: float = 1.0,
        conv_size: int = 4,
        rope_theta: float | None = 10000.0,
        norm_eps: float = 1e-6,
        recompute_chunks: int = 0,
    ) -> None:
        """Make the mixer.

        Args:
            hidden_size: Channels of x.
            heads: Heads, each with a model of its own.
            head_dim: Channels of a head; None is hidden_size / heads.
            chunk: Tokens that share one gradient point.
            base_rate: The largest step size, times head_dim.
            conv_size: Tokens that the short convolution sees; 0 means no convolution.
            rope_theta: The base of the rotary positions in the chunk; None: no positions.
            norm_eps: Added to the variance in the norms.
            recompute_chunks: Chunks of a group that keeps only its first weights and is recomputed in the backward; 0
                keeps everything.
        """
        super().__init__(
            hidden_size, heads, widths=(), head_dim=hidden_size // heads if head_dim is None else head_dim, chunk=chunk,
            base_rate=base_rate, conv_size=conv_size, rope_theta=rope_theta, norm_eps=norm_eps,
            recompute_chunks=recompute_chunks,
        )  # fmt: skip


class TTTMLP(TTTMixer):
    """TTTLinear with W_2 gelu(W_1 x + b_1) + b_2 in place of W x + b.

    base_rate is 0.1 in the paper; with 1, models learn recall in at most half as many steps, and training is as stable.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        head_dim: int | None = None,
        expand: int = 4,
        chunk: int = 16,
        base_rate: float = 1.0,
        conv_size: int = 4,
        rope_theta: float | None = 10000.0,
        norm_eps: float = 1e-6,
        recompute_chunks: int = 0,
    ) -> None:
        """Make the mixer.

        Args:
            hidden_size: Channels of x.
            heads: Heads, each with a model of its own.
            head_dim: Channels of a head; None is hidden_size / heads.
            expand: Hidden channels of the model over head_dim.
            chunk: Tokens that share one gradient point.
            base_rate: The largest step size, times head_dim.
            conv_size: Tokens that the short convolution sees; 0 means no convolution.
            rope_theta: The base of the rotary positions in the chunk; None: no positions.
            norm_eps: Added to the variance in the norms.
            recompute_chunks: Chunks of a group that keeps only its first weights and is recomputed in the backward; 0
                keeps everything.
        """
        head_dim = hidden_size // heads if head_dim is None else head_dim
        super().__init__(
            hidden_size, heads, widths=(expand * head_dim,), head_dim=head_dim, chunk=chunk, base_rate=base_rate,
            conv_size=conv_size, rope_theta=rope_theta, norm_eps=norm_eps, recompute_chunks=recompute_chunks,
        )  # fmt: skip
        self.expansion = expand


def _make_linear(model: ModelSizes, memory: MemoryConfig) -> nn.Module:
    return TTTLinear(**shared_sizes(model, memory), head_dim=memory.head_dim)


TTT_LINEAR_COSTS = LearningCosts(chunk=16, gates=1)
"""What TTTLinear costs."""
TTT_LINEAR_KIND = register(
    MixerKind(
        letter="T",
        name="ttt_linear",
        label="TTT-Linear",
        short="ttt",
        config=MemoryConfig,
        section="memory",
        make=_make_linear,
        operations=TTT_LINEAR_COSTS.operations(),
        kept_bytes=learning_kept(_make_linear),
        look=Look("#0072B2", "v", (0, (5, 3))),
        shard=Shard(divide_memory, TTTMixer.cuts),
    )
)


def _make_mlp(model: ModelSizes, memory: MemoryConfig) -> nn.Module:
    return TTTMLP(**shared_sizes(model, memory), head_dim=memory.head_dim)


TTT_MLP_COSTS = LearningCosts(chunk=16, gates=1, hidden=lambda memory: 4)
"""What TTTMLP costs."""
TTT_MLP_KIND = register(
    MixerKind(
        letter="P",
        name="ttt_mlp",
        label="TTT-MLP",
        short="ttt-mlp",
        config=MemoryConfig,
        section="memory",
        make=_make_mlp,
        operations=TTT_MLP_COSTS.operations(),
        kept_bytes=learning_kept(_make_mlp),
        look=Look("#882255", "P", (0, (3, 3))),
        shard=Shard(divide_memory, TTTMixer.cuts),
    )
)

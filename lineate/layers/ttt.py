"""TTT-Linear and TTT-MLP as token mixers (arXiv 2407.04620): a memory that is a small model, trained while reading.

q | k | v | z | r = in_proj(x)               one projection for everything
q | k | v = silu(conv(q | k | v))            the short convolution; q and k then turn with the place in the chunk
rate = base_rate sigmoid(r + rate_bias) / d
o, state = ttt(q, k, v, rate, ...)           lineate.memory.ttt
y = out_proj(LayerNorm(o) * gelu(z))         over all heads

As in the paper but for q, k and v: there q and k are one projection behind two convolutions without silu, and v has
none; here all three have their own, as in the other mixers.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate import checks
from lineate.layers.convolution import ShortConvolution, convolution_spec
from lineate.layers.entry import check_call
from lineate.layers.projection import project
from lineate.layers.rope import rotate, turns
from lineate.layers.state import Memory, TensorSpec, token_positions
from lineate.memory.ttt import ttt
from lineate.rule import compute_dtype


class TTTMixer(nn.Module):
    """What the two have in common: heads of head_dim channels, each with a model of its own.

    chunk: tokens that share one gradient point; conv_size 0: no convolution; rope_theta None: no rotary positions;
    recompute_chunks: for the backward, so many chunks at a time keep only their first weights and run again.
    """

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
        super().__init__()
        checks.check_chunk_size(chunk)
        self.heads, self.head_dim, self.widths, self.chunk, self.base_rate = heads, head_dim, widths, chunk, base_rate
        self.rope_theta, self.norm_eps, self.recompute_chunks = rope_theta, norm_eps, recompute_chunks
        channels = heads * head_dim
        self.splits = 3 * channels, channels, heads  # q | k | v, z, r
        self.in_proj = nn.Linear(hidden_size, sum(self.splits), bias=False)
        self.conv = ShortConvolution(3 * channels, conv_size) if conv_size else None
        self.rate_bias = nn.Parameter(torch.empty(heads))
        self.factor_offset = nn.Parameter(torch.empty(chunk))
        self.norm_weight = nn.Parameter(torch.empty(heads, head_dim))
        self.norm_bias = nn.Parameter(torch.empty(heads, head_dim))
        self.start = nn.ParameterDict()
        for name, shape in self.shapes().items():
            self.start[name] = nn.Parameter(torch.empty(shape))
        self.post_norm = nn.LayerNorm(channels, norm_eps)
        self.out_proj = nn.Linear(channels, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The model's weights before the first token: normal with deviation .02, no bias; rates and norms as given."""
        for x in (self.rate_bias, self.factor_offset, self.norm_bias):
            nn.init.zeros_(x)
        nn.init.ones_(self.norm_weight)
        for name, x in self.start.items():
            if name.startswith("weight"):
                nn.init.normal_(x, std=0.02)
            else:
                nn.init.zeros_(x)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the model's weights and biases: weight1, bias1, ..."""
        shapes: dict[str, tuple[int, ...]] = {}
        sizes = self.head_dim, *self.widths, self.head_dim
        for i, (n, m) in enumerate(pairwise(sizes), 1):
            shapes |= {f"weight{i}": (self.heads, n, m), f"bias{i}": (self.heads, m)}
        return shapes

    @property
    def state_spec(self) -> tuple[TensorSpec, ...]:
        dtype = self.in_proj.weight.dtype
        specs = [*convolution_spec(self.conv, dtype)]
        for suffix in ("", "_sum"):
            specs += [TensorSpec(name + suffix, shape, compute_dtype(dtype)) for name, shape in self.shapes().items()]
        return (*specs, TensorSpec("position", (), torch.int64))

    def forward(
        self, x: Tensor, state: Memory | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Memory]:
        """x `b t hidden` -> the same; the state is the model, its summed gradients, and the convolution's inputs."""
        check_call(self, x, state, cu_seqlens)
        mixed, z, r = project(self.in_proj, x).split(self.splits, -1)
        tensors: dict[str, Tensor] = {}
        if self.conv is not None:
            mixed, tensors["conv"] = self.conv(mixed, None if state is None else state["conv"], cu_seqlens)
        q, k, v = mixed.unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        if self.rope_theta is not None:
            places = token_positions(0 if state is None else state["position"], x, cu_seqlens) % self.chunk
            turn = turns(places, self.head_dim // 2 * 2, self.rope_theta, x.dtype)
            q, k = rotate(q, turn), rotate(k, turn)
        dtype = compute_dtype(r.dtype)
        rate = self.base_rate / self.head_dim * (r.to(dtype) + self.rate_bias.to(dtype)).sigmoid()
        places = torch.arange(1, self.chunk + 1, device=x.device, dtype=dtype)
        factor = (1 / places + self.factor_offset.to(dtype)).clamp(min=0)
        if state is None:
            memory = dict(self.start.items())
        else:
            memory = {name: y for name, y in state.tensors.items() if name != "conv"}
        output, memory = ttt(
            q, k, v, rate, self.norm_weight, self.norm_bias, memory,
            factor=factor, chunk=self.chunk, cu_seqlens=cu_seqlens, eps=self.norm_eps,
            recompute_chunks=self.recompute_chunks,
        )  # fmt: skip
        y = self.post_norm(output.flatten(2)) * F.gelu(z, approximate="tanh")
        return project(self.out_proj, y), Memory(tensors | memory)


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
        super().__init__(
            hidden_size, heads, widths=(), head_dim=hidden_size // heads if head_dim is None else head_dim, chunk=chunk,
            base_rate=base_rate, conv_size=conv_size, rope_theta=rope_theta, norm_eps=norm_eps,
            recompute_chunks=recompute_chunks,
        )  # fmt: skip


class TTTMLP(TTTMixer):
    """As TTTLinear with W_2 gelu(W_1 x + b_1) + b_2 for W x + b; `expand` times head_dim hidden channels.

    base_rate is 0.1 in the paper; with 1 recall is learnt in half as many steps or less, and stays as stable.
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
        head_dim = hidden_size // heads if head_dim is None else head_dim
        super().__init__(
            hidden_size, heads, widths=(expand * head_dim,), head_dim=head_dim, chunk=chunk, base_rate=base_rate,
            conv_size=conv_size, rope_theta=rope_theta, norm_eps=norm_eps, recompute_chunks=recompute_chunks,
        )  # fmt: skip

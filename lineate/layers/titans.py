"""The Titans mixer: a memory of one matrix or an MLP per head that learns its text, with momentum and forgetting."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from lineate import checks
from lineate.layers.convolution import ShortConvolution, convolution_spec
from lineate.layers.entry import check_call
from lineate.layers.norm import GatedRMSNorm
from lineate.layers.projection import project
from lineate.layers.state import Memory, TensorSpec
from lineate.memory.titans import titans, titans_state
from lineate.rule import compute_dtype, normalize


class Titans(nn.Module):
    """S = eta S - theta grad, M = (1 - alpha) M + S, y = M(q); grad of 1/2 |M(k) - v|^2 at the chunk's start.

    in_proj is q | k | v | z | theta | eta | alpha. q | k | v = silu(conv(q | k | v)), q and k of norm 1; theta =
    max_rate sigmoid, eta and alpha sigmoids, per head and token; y = out_proj(norm(y) * act(z)). memory "linear": M is
    a matrix; "mlp": two, with expansion * head_dim channels and silu between them. The weights that a text begins with
    are learned. clip: largest norm of a token's gradient; without it a text of repeated keys can make the memory grow
    without bound.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        head_dim: int | None = None,
        memory: str = "linear",
        expansion: int = 2,
        residual: bool = False,
        memory_norm: bool = False,
        chunk: int = 16,
        clip: float | None = 1.0,
        max_rate: float = 1.0,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
        gate_activation: str = "silu",
    ) -> None:
        super().__init__()
        checks.check_choice("memory", memory, ("linear", "mlp"))
        checks.check_choice("gate_activation", gate_activation, ("silu", "sigmoid"))
        head_dim = hidden_size // heads if head_dim is None else head_dim
        self.heads, self.head_dim, self.memory, self.chunk, self.clip = heads, head_dim, memory, chunk, clip
        self.residual, self.memory_norm, self.max_rate = residual, memory_norm, max_rate
        width = heads * head_dim
        self.splits = (3 * width, width, 3 * heads)  # q k v, z, gates
        self.in_proj = nn.Linear(hidden_size, sum(self.splits), bias=False)
        self.conv = ShortConvolution(3 * width, conv_size) if conv_size else None
        self.gate_bias = nn.Parameter(torch.empty(3, heads, dtype=torch.float32))
        """Of theta, eta and alpha."""
        sizes = (head_dim, head_dim) if memory == "linear" else (head_dim, expansion * head_dim, head_dim)
        shapes = pairwise(sizes)
        self.initial = nn.ParameterList([torch.empty(heads, *shape, dtype=torch.float32) for shape in shapes])
        self.norm = GatedRMSNorm(head_dim, norm_eps, activation=gate_activation)
        self.out_proj = nn.Linear(width, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A matrix begins at 0, an MLP at random.

        Rates begin so low that 16 tokens with one key do not overshoot: 16 theta / (1 - eta) < 1. Forgetting begins at
        less than 1 % a token; of an MLP much lower, since it cannot learn its way back from weights of 0.
        """
        for x in self.initial:
            nn.init.normal_(x, std=0.0 if self.memory == "linear" else x.shape[1] ** -0.5)
        bias = torch.tensor([-3.5, 0.0, -5.0 if self.memory == "linear" else -8.0], device=self.gate_bias.device)
        with torch.no_grad():
            self.gate_bias.copy_(bias[:, None].expand_as(self.gate_bias))

    @property
    def state_spec(self) -> tuple[TensorSpec, ...]:
        dtype = self.in_proj.weight.dtype
        specs = [*convolution_spec(self.conv, dtype)]
        for i, x in enumerate(self.initial):
            names = (f"{name}_{i}" for name in ("weights", "momentum", "start"))
            specs += [TensorSpec(name, tuple(x.shape), compute_dtype(dtype)) for name in names]
        return (*specs, TensorSpec("position", (), torch.int64))

    def forward(
        self, x: Tensor, state: Memory | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Memory]:
        """x `b t hidden` -> the same; the state is the memory, its momentum, where its chunk began, and the
        convolution's last inputs."""
        check_call(self, x, state, cu_seqlens)
        mixed, z, gates = project(self.in_proj, x).split(self.splits, -1)
        tensors: dict[str, Tensor] = {}
        if self.conv is not None:
            mixed, tensors["conv"] = self.conv(mixed, None if state is None else state["conv"], cu_seqlens)
        else:
            mixed = nn.functional.silu(mixed)
        q, k, v = mixed.unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        dtype = compute_dtype(x.dtype)
        q, k = (normalize(y.to(dtype)).to(v.dtype) for y in (q, k))
        gates = gates.to(dtype).unflatten(-1, (3, self.heads)) + self.gate_bias.to(dtype)
        theta, eta, alpha = gates.sigmoid().unbind(2)
        if state is None:
            rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            before = titans_state([weights.to(dtype) for weights in self.initial], rows)
            del before["position"]
        else:
            before = {name: y for name, y in state.tensors.items() if name != "conv"}
        y, after = titans(
            q, k, v, self.max_rate * theta, eta, alpha, before,
            chunk=self.chunk, clip=self.clip, residual=self.residual, norm=self.memory_norm, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        y = self.norm(y, z.unflatten(-1, (self.heads, self.head_dim)))
        return project(self.out_proj, y.flatten(2)), Memory(tensors | after)

    def extra_repr(self) -> str:
        return f"memory={self.memory!r}, chunk={self.chunk}, clip={self.clip}"

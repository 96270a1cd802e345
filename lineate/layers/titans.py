"""The Titans mixer: a matrix or an MLP per head that learns what it reads, with momentum and forgetting."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from lineate import checks
from lineate.layers.configs import MemoryConfig
from lineate.layers.costs.learning import TitansCosts, learning_kept
from lineate.layers.learning import LearningMixer, check_chunked, divide_memory, rows_of, shared_sizes
from lineate.layers.norm import GatedRMSNorm
from lineate.layers.registry import Look, MixerKind, ModelSizes, register
from lineate.layers.state import Memory, TensorSpec
from lineate.memory.titans import titans, titans_state
from lineate.parallel.tensor.shards import Cut, Part, Shard
from lineate.rule import compute_dtype, normalize
from lineate.torch_ops.elementwise import elementwise


class Titans(LearningMixer):
    """S = eta S - theta grad, M = (1 - alpha) M + S, y = M(q); grad of 1/2 |M(k) - v|^2 at the chunk's start.

    in_proj is q | k | v | z | theta | eta | alpha. q | k | v = silu(conv(q | k | v)), q and k of norm 1; theta =
    max_rate sigmoid, eta and alpha sigmoids, per head and token; y = out_proj(norm(y) * act(z)). The weights that a
    sequence begins with are learned.
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
        """Make the mixer.

        Args:
            hidden_size: Channels of x.
            heads: Heads, each with a memory of its own.
            head_dim: Channels of a head; None is hidden_size / heads.
            memory: "linear": M is a matrix; "mlp": two, with silu between them.
            expansion: Hidden channels of the MLP over head_dim.
            residual: Whether the memory returns M(x) + x.
            memory_norm: Whether a layer norm without weights follows the last matrix.
            chunk: Tokens that share one gradient point.
            clip: The largest norm of a token's gradient; None: no clipping, and a sequence of repeated keys can make
                the memory grow without bound.
            max_rate: The largest step size.
            conv_size: Tokens that the short convolution sees; 0 means no convolution.
            norm_eps: Added to the mean square in the output norm.
            gate_activation: The activation of the output gate, "silu" or "sigmoid".
        """
        check_chunked("memory", memory, ("linear", "mlp"))
        checks.check_choice("gate_activation", gate_activation, ("silu", "sigmoid"))
        head_dim = hidden_size // heads if head_dim is None else head_dim
        width = heads * head_dim
        splits = (3 * width, width, 3 * heads)  # q k v, z, gates
        super().__init__(hidden_size, heads, splits=splits, chunk=chunk, conv_size=conv_size, norm_eps=norm_eps)
        self.head_dim, self.memory, self.clip = head_dim, memory, clip
        self.residual, self.memory_norm, self.max_rate = residual, memory_norm, max_rate
        self.expansion = 0 if memory == "linear" else expansion
        self.gate_bias = nn.Parameter(torch.empty(3, heads, dtype=torch.float32))
        """The biases of theta, eta and alpha."""
        sizes = (head_dim, head_dim) if memory == "linear" else (head_dim, expansion * head_dim, head_dim)
        shapes = pairwise(sizes)
        self.initial = nn.ParameterList([torch.empty(heads, *shape, dtype=torch.float32) for shape in shapes])
        self.norm = GatedRMSNorm(head_dim, norm_eps, activation=gate_activation)
        self.finish(width)

    def reset_parameters(self) -> None:
        """Begin with a matrix of 0, or an MLP at random.

        Rates begin so low that 16 tokens with one key do not overshoot: 16 theta / (1 - eta) < 1. Forgetting begins at
        less than 1 % a token, and much lower for an MLP, since it cannot recover from weights of 0.
        """
        for x in self.initial:
            nn.init.normal_(x, std=0.0 if self.memory == "linear" else x.shape[1] ** -0.5)
        bias = torch.tensor([-3.5, 0.0, -5.0 if self.memory == "linear" else -8.0], device=self.gate_bias.device)
        with torch.no_grad():
            self.gate_bias.copy_(bias[:, None].expand_as(self.gate_bias))

    def memory_spec(self, dtype: torch.dtype, wide: torch.dtype) -> list[TensorSpec]:
        """Return the specs of the memory, its momentum, its weights as the chunk began, and its position there."""
        specs = []
        for i, x in enumerate(self.initial):
            specs += [TensorSpec(f"{name}_{i}", tuple(x.shape), wide) for name in ("weights", "momentum", "start")]
        return [*specs, TensorSpec("position", (), torch.int64)]

    def learn(
        self, x: Tensor, mixed: Tensor, gates: list[Tensor], state: Memory | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return norm(y) * act(z), and the memory."""
        z, logits = gates
        q, k, v = mixed.unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        dtype = compute_dtype(x.dtype)
        q, k = (normalize(y.to(dtype)).to(v.dtype) for y in (q, k))
        logits = logits.to(dtype).unflatten(-1, (3, self.heads)) + self.gate_bias.to(dtype)
        theta, eta, alpha = elementwise(torch.sigmoid, logits).unbind(2)
        if state is None:
            before = titans_state([weights.to(dtype) for weights in self.initial], rows_of(x, cu_seqlens))
            del before["position"]
        else:
            before = self.memory_of(state)
        y, after = titans(
            q, k, v, self.max_rate * theta, eta, alpha, before,
            chunk=self.chunk, clip=self.clip, residual=self.residual, norm=self.memory_norm, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return self.norm(y, z.unflatten(-1, (self.heads, self.head_dim))).flatten(2), after

    def cuts(self) -> dict[str, Cut]:
        """Return the division of the parameters among ranks, by heads."""
        channels, heads = Part(self.heads * self.head_dim, self.heads), Part(self.heads, self.heads)
        cuts = self.shared_cuts((channels,) * 3, (channels, heads, heads, heads))
        cuts |= {f"initial.{i}": Cut(0, (heads,)) for i in range(len(self.initial))}
        return cuts | {"gate_bias": Cut(1, (heads,))}

    def extra_repr(self) -> str:
        return f"memory={self.memory!r}, chunk={self.chunk}, clip={self.clip}"


def _make(model: ModelSizes, memory: MemoryConfig) -> nn.Module:
    return Titans(**shared_sizes(model, memory), head_dim=memory.head_dim, memory=memory.titans)


COSTS = TitansCosts(chunk=16, gates=3, hidden=lambda memory: 2 if memory.titans == "mlp" else 0)
"""What Titans costs."""
KIND = register(
    MixerKind(
        letter="N",
        name="titans",
        label="Titans",
        config=MemoryConfig,
        section="memory",
        make=_make,
        operations=COSTS.operations(),
        kept_bytes=learning_kept(_make),
        look=Look("#999933", "<", (0, (8, 2))),
        shard=Shard(divide_memory, Titans.cuts),
    )
)

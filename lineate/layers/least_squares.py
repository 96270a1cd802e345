"""The mixer whose memory is the exact least-squares fit of all pairs so far.

q | k | v | z | b | f = in_proj(x)       q | k | v = silu(conv(q | k | v)), q and k of unit length
beta = sigmoid(b)                        the weight of the pair
lambda = floor^sigmoid(f + bias)         the decay of the older ones, near 1
o, (P, S) = least_squares(q, k, v, log lambda, beta)
y = out_proj(norm(o) * act(z))
"""

import math

import torch
from torch import Tensor, nn

from lineate import checks
from lineate.layers.configs import MemoryConfig
from lineate.layers.costs.learning import LeastSquaresCosts, learning_kept
from lineate.layers.learning import LearningMixer, divide_memory, shared_sizes
from lineate.layers.norm import GatedRMSNorm
from lineate.layers.registry import Look, MixerKind, ModelSizes, register
from lineate.layers.state import Memory, TensorSpec
from lineate.memory.least_squares import least_squares
from lineate.parallel.tensor.shards import Cut, Part, Shard
from lineate.rule import compute_dtype, normalize
from lineate.torch_ops.elementwise import elementwise


class LeastSquares(LearningMixer):
    """S = argmin_S sum_s w_s ||S^T k_s - v_s||^2 + ridge ||S||^2, o = S^T q: the fit that DeltaNet approaches.

    The state of a head is S `k v` and P `k k`. The weight of a pair is beta, times lambda in (decay_floor, 1)
    for every token that follows; with decay_floor=1 nothing is forgotten. The ridge is restored after each `chunk`
    tokens; if a chunk is so long that floor^chunk < e^-25, the floor is e^(-25/chunk) instead.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        ridge: float = 0.01,
        decay_floor: float = 0.95,
        chunk: int = 64,
        norm_eps: float = 1e-6,
        gate_activation: str = "silu",
    ) -> None:
        """Make the mixer.

        Args:
            hidden_size: Channels of x.
            heads: Heads, each with a memory of its own.
            key_dim: Channels of a key; None is hidden_size / heads.
            value_dim: Channels of a value; None is key_dim.
            conv_size: Tokens that the short convolution sees; 0 means no convolution.
            ridge: The weight of the squared length of S.
            decay_floor: The least lambda; 1: nothing is forgotten.
            chunk: Tokens between two restorations of the ridge.
            norm_eps: Added to the mean square in the output norm.
            gate_activation: The activation of the output gate, "silu" or "sigmoid".
        """
        checks.check_choice("gate_activation", gate_activation, ("silu", "sigmoid"))
        if not 0 < ridge < float("inf"):
            raise ValueError(f"ridge must be finite and above 0, got {ridge}; 0.01 is usual")
        if not 0 < decay_floor <= 1:
            raise ValueError(f"decay_floor must be in (0, 1], got {decay_floor}; 0.95 is usual, 1 forgets nothing")
        key_dim = hidden_size // heads if key_dim is None else key_dim
        value_dim = key_dim if value_dim is None else value_dim
        width = heads * (2 * key_dim + value_dim)  # of q | k | v
        splits = (width, heads * value_dim, heads, *([heads] if decay_floor < 1 else []))
        super().__init__(hidden_size, heads, splits=splits, chunk=chunk, conv_size=conv_size, norm_eps=norm_eps)
        self.key_dim, self.value_dim, self.width, self.ridge, self.decay_floor = (
            key_dim, value_dim, width, ridge, decay_floor,
        )  # fmt: skip
        # The part left after a chunk must be more than e^-25, until the ridge is restored.
        self.log_floor = max(math.log(decay_floor), 0.99 * checks.LEAST_LEFT / chunk)
        self.norm = GatedRMSNorm(value_dim, norm_eps, activation=gate_activation)
        self.decay_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32)) if decay_floor < 1 else None
        self.finish(heads * value_dim)

    def reset_parameters(self) -> None:
        """Begin with -log lambda between .0001 and .01, uniform in its logarithm, as far as the floor allows."""
        bias = self.decay_bias
        if bias is None or bias.is_meta:  # nothing to fill, and log on meta tensors imports 150 MB of torch
            return
        with torch.no_grad():
            share = bias.uniform_(math.log(1e-4), math.log(1e-2)).exp_() / -self.log_floor
            bias.copy_(torch.logit(share.clamp(max=0.5)))

    def memory_spec(self, dtype: torch.dtype, wide: torch.dtype) -> list[TensorSpec]:
        """Return the specs of P, S, the ridge, and the tokens since it was restored."""
        return [
            TensorSpec("P", (self.heads, self.key_dim, self.key_dim), wide),
            TensorSpec("S", (self.heads, self.key_dim, self.value_dim), wide),
            TensorSpec("ridge", (self.heads,), wide),
            TensorSpec("position", (), torch.int64),
        ]

    def learn(
        self, x: Tensor, mixed: Tensor, gates: list[Tensor], state: Memory | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return norm(o) * act(z), and P, S, the ridge and the position."""
        z, b, *forgetting = gates
        keys = self.heads * self.key_dim
        q, k, v = mixed.split((keys, keys, self.heads * self.value_dim), -1)
        dtype = compute_dtype(x.dtype)
        q, k = (normalize(y.unflatten(-1, (self.heads, self.key_dim)).to(dtype)) for y in (q, k))
        v = v.unflatten(-1, (self.heads, self.value_dim))
        log_decay = None
        if self.decay_bias is not None:
            log_decay = self.log_floor * elementwise(torch.sigmoid, forgetting[0].to(dtype) + self.decay_bias.to(dtype))
        output, memory = least_squares(
            q, k, v.to(dtype), log_decay, elementwise(torch.sigmoid, b.to(dtype)),
            ridge=self.ridge, state=None if state is None else self.memory_of(state), cu_seqlens=cu_seqlens,
            chunk=self.chunk,
        )  # fmt: skip
        y = self.norm(output.to(v.dtype), z.unflatten(-1, (self.heads, self.value_dim)))
        return y.flatten(2), memory

    def cuts(self) -> dict[str, Cut]:
        """Return the division of the parameters among ranks, by heads."""
        keys, values, heads = (Part(n * self.heads, self.heads) for n in (self.key_dim, self.value_dim, 1))
        if self.decay_bias is None:
            return self.shared_cuts((keys, keys, values), (values, heads))
        return self.shared_cuts((keys, keys, values), (values, heads, heads)) | {"decay_bias": Cut(0, (heads,))}


def _make(model: ModelSizes, memory: MemoryConfig) -> nn.Module:
    return LeastSquares(**shared_sizes(model, memory), key_dim=memory.head_dim, value_dim=memory.head_dim)


COSTS = LeastSquaresCosts(chunk=64, gates=2)
"""What LeastSquares costs."""
KIND = register(
    MixerKind(
        letter="E",
        name="least_squares",
        label="least squares",
        short="least-squares",
        config=MemoryConfig,
        section="memory",
        make=_make,
        operations=COSTS.operations(),
        kept_bytes=learning_kept(_make),
        look=Look("#332288", "h", (0, (2, 4))),
        shard=Shard(divide_memory, LeastSquares.cuts),
    )
)

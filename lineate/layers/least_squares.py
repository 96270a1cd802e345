"""The mixer whose memory is the exact least-squares fit of all pairs so far.

q | k | v | z | b | f = in_proj(x)       q | k | v = silu(conv(q | k | v)), q and k of unit length
beta = sigmoid(b)                        how much the pair counts
lambda = floor^sigmoid(f + bias)         what is kept of the older ones, near 1
o, (P, S) = least_squares(q, k, v, log lambda, beta)
y = out_proj(norm(o) * act(z))
"""

import math

import torch
from torch import Tensor, nn

from lineate import checks
from lineate.layers.convolution import ShortConvolution, convolution_spec
from lineate.layers.entry import check_call
from lineate.layers.norm import GatedRMSNorm
from lineate.layers.projection import project
from lineate.layers.state import Memory, TensorSpec
from lineate.memory.least_squares import least_squares
from lineate.rule import compute_dtype, normalize


class LeastSquares(nn.Module):
    """S = argmin_S sum_s w_s ||S^T k_s - v_s||^2 + ridge ||S||^2, o = S^T q: the fit that DeltaNet approaches.

    The state of a head is S `k v` and P `k k`. Each pair weighs beta, and lambda in (decay_floor, 1) less with every
    token that follows; decay_floor=1: nothing is forgotten. The ridge is restored after each `chunk` tokens; where a
    chunk is so long that floor^chunk < e^-25, the floor is e^(-25/chunk) instead.
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
        super().__init__()
        checks.check_choice("gate_activation", gate_activation, ("silu", "sigmoid"))
        if not 0 < ridge < float("inf"):
            raise ValueError(f"ridge must be finite and above 0, got {ridge}; 0.01 is usual")
        if not 0 < decay_floor <= 1:
            raise ValueError(f"decay_floor must be in (0, 1], got {decay_floor}; 0.95 is usual, 1 forgets nothing")
        checks.check_chunk_size(chunk)
        key_dim = hidden_size // heads if key_dim is None else key_dim
        value_dim = key_dim if value_dim is None else value_dim
        self.heads, self.key_dim, self.value_dim = heads, key_dim, value_dim
        self.ridge, self.decay_floor, self.chunk = ridge, decay_floor, chunk
        # What is left after a chunk must be more than e^-25, until the ridge is restored.
        self.log_floor = max(math.log(decay_floor), 0.99 * checks.LEAST_LEFT / chunk)
        self.width = heads * (2 * key_dim + value_dim)  # of q | k | v
        self.splits = (self.width, heads * value_dim, heads, *([heads] if decay_floor < 1 else []))
        self.in_proj = nn.Linear(hidden_size, sum(self.splits), bias=False)
        self.conv = ShortConvolution(self.width, conv_size) if conv_size else None
        self.norm = GatedRMSNorm(value_dim, norm_eps, activation=gate_activation)
        self.out_proj = nn.Linear(heads * value_dim, hidden_size, bias=False)
        self.decay_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32)) if decay_floor < 1 else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """-log lambda between .0001 and .01, uniform in its logarithm, as far as the floor allows."""
        bias = self.decay_bias
        if bias is None or bias.is_meta:  # nothing to fill, and log on meta tensors imports 150 MB of torch
            return
        with torch.no_grad():
            share = bias.uniform_(math.log(1e-4), math.log(1e-2)).exp_() / -self.log_floor
            bias.copy_(torch.logit(share.clamp(max=0.5)))

    @property
    def state_spec(self) -> tuple[TensorSpec, ...]:
        given = self.in_proj.weight.dtype
        dtype = compute_dtype(given)
        return (
            *convolution_spec(self.conv, given),
            TensorSpec("P", (self.heads, self.key_dim, self.key_dim), dtype),
            TensorSpec("S", (self.heads, self.key_dim, self.value_dim), dtype),
            TensorSpec("ridge", (self.heads,), dtype),
            TensorSpec("position", (), torch.int64),
        )

    def forward(
        self, x: Tensor, state: Memory | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Memory]:
        """x `b t hidden` -> the same; the state is P, S, where each row stands, and the convolution's last inputs."""
        check_call(self, x, state, cu_seqlens)
        mixed, z, *gates = project(self.in_proj, x).split(self.splits, -1)
        tensors: dict[str, Tensor] = {}
        if self.conv is not None:
            mixed, tensors["conv"] = self.conv(mixed, None if state is None else state["conv"], cu_seqlens)
        keys = self.heads * self.key_dim
        q, k, v = mixed.split((keys, keys, self.heads * self.value_dim), -1)
        dtype = compute_dtype(x.dtype)
        q, k = (normalize(y.unflatten(-1, (self.heads, self.key_dim)).to(dtype)) for y in (q, k))
        v = v.unflatten(-1, (self.heads, self.value_dim))
        beta = gates[0].to(dtype).sigmoid()
        log_decay = None
        if self.decay_bias is not None:
            log_decay = self.log_floor * (gates[1].to(dtype) + self.decay_bias.to(dtype)).sigmoid()
        names = ("P", "S", "ridge", "position")
        memory = None if state is None else {name: state[name] for name in names}
        output, memory = least_squares(
            q, k, v.to(dtype), log_decay, beta,
            ridge=self.ridge, state=memory, cu_seqlens=cu_seqlens, chunk=self.chunk,
        )  # fmt: skip
        tensors.update(memory)
        y = self.norm(output.to(v.dtype), z.unflatten(-1, (self.heads, self.value_dim)))
        return project(self.out_proj, y.flatten(2)), Memory(tensors)

"""Retention: gated linear attention whose decay is a constant of each head, as in RetNet and lightning attention.

    S = e^log_decay S + k v^T        o = S^T q / sqrt(k)        out = out_proj(RMSNorm(o) * act(z))

    decay         log_decay of head i of n, from 0               in
    "retnet"      log(1 - 2^(-5 - i))                            RetNet; q and k are rotated by their positions
    "lightning"   -2^(-8 (i + 1) / n)                            lightning attention (MiniMax-01, Ling 2.x)

For n that is no power of two, the slopes of "lightning" are those of the next lower power m, then every second one of
2 m. Published lightning models also scale the slopes by layer: write the tensor `A_log`, the log of -log_decay.

Positions are relative, and so is the memory: it is rotated back by the tokens of a call when the call ends, as if the
next token had position 0. So its state holds no position, and the angles do not grow with the sequence.
"""

import math
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate import checks
from lineate.call import Inputs
from lineate.forms.sequences import locate
from lineate.layers.configs import LinearConfig
from lineate.layers.linear import LINEAR_SHARD
from lineate.layers.mixer import Entered, LinearMixer
from lineate.layers.registry import Look, MixerKind, ModelSizes, register
from lineate.layers.rope import rotate, turns
from lineate.layers.state import Memory
from lineate.layers.variants.norm import AllHeadsNorm
from lineate.parallel.context.segments import Bounds, Segment
from lineate.parallel.tensor.shards import Cut, Part
from lineate.rule import GATED_LINEAR, compute_dtype
from lineate.torch_ops.elementwise import elementwise


def retnet_decays(heads: int) -> Tensor:
    """Return RetNet's log_decay of each head, log(1 - 2^(-5 - i)), in float64."""
    return torch.log1p(-(2.0 ** -(5 + torch.arange(heads, dtype=torch.float64))))


def lightning_decays(heads: int) -> Tensor:
    """Return the log_decay of each head in lightning attention, -2^(-8 (i + 1) / heads), in float64."""
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-8 * (2 * i + 1) / (2 * power)) for i in range(heads - power)]
    return -torch.tensor(slopes, dtype=torch.float64)


class Retention(LinearMixer):
    """S = e^log_decay S + k v^T with a constant log_decay = -exp(A_log) of each head; in_proj is q | k | v | z.

    A_log is a parameter without a gradient; with requires_grad_() the decays are learned.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        heads: key heads.
        value_heads: value heads, a multiple of heads; None is heads.
        key_dim: channels of a key; None is hidden_size / heads.
        value_dim: channels of a value; None is key_dim.
        conv_size: tokens that the short convolution sees; 0: no convolution.
        norm_eps: epsilon of the output norm.
        gate_activation: activation of the output gate, "silu", "sigmoid" or "none" (no gate).
        decay: "retnet" or "lightning".
        qk_activation: activation of q and k, "none", "silu" or "relu".
        value_activation: activation of v, "none" or "silu".
        norm: whether the output norm is one a "head" or one over "all" heads.
    """

    rule = GATED_LINEAR
    gates = ("values",)
    options: ClassVar[tuple[str, ...]] = ("decay", "qk_activation", "value_activation", "norm")

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        value_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 0,
        norm_eps: float = 1e-6,
        gate_activation: str = "silu",
        decay: str = "retnet",
        qk_activation: str = "none",
        value_activation: str = "none",
        norm: str = "head",
    ) -> None:
        checks.check_choice("decay", decay, ("retnet", "lightning"))
        checks.check_choice("qk_activation", qk_activation, ("none", "silu", "relu"))
        checks.check_choice("value_activation", value_activation, ("none", "silu"))
        checks.check_choice("norm", norm, ("head", "all"))
        super().__init__(
            hidden_size, heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size,
            norm_eps=norm_eps, gate_activation=gate_activation,
        )  # fmt: skip
        self.decay, self.qk_activation, self.value_activation = decay, qk_activation, value_activation
        if norm == "all":
            self.norm = AllHeadsNorm(self.value_heads * self.value_dim, norm_eps, activation=gate_activation)
        self.reset_parameters()

    @classmethod
    def from_config(cls, model: ModelSizes, config: LinearConfig) -> Self:
        """Make the mixer that a configuration describes, with the hidden size of the model."""
        if config.rope_theta is not None and "rope_theta" not in cls.options:
            return RotaryRetention.from_config(model, config)  # type: ignore[return-value]
        return super().from_config(model, config)

    def add_gates(self) -> None:
        self.A_log = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32), requires_grad=False)

    def reset_parameters(self) -> None:
        if not self.A_log.is_meta:
            decays = (retnet_decays if self.decay == "retnet" else lightning_decays)(self.value_heads)
            with torch.no_grad():
                self.A_log.copy_((-decays).log())

    def cuts(self) -> dict[str, Cut]:
        """Return how the parameters are shared out among ranks, by heads."""
        if not isinstance(self.norm, AllHeadsNorm):
            return super().cuts()
        values = Part(self.value_heads * self.value_dim, self.value_heads)
        return super().cuts() | {"norm.weight": Cut(0, (values,))}

    def enter(
        self, x: Tensor, state: Memory | None = None, packed: Tensor | None = None, segment: Segment | None = None
    ) -> Entered:
        """Return what the rule reads of x `b t hidden`, after the activations."""
        entered = super().enter(x, state, packed, segment)
        q, k, v = entered[:3]
        if self.qk_activation != "none":
            activation = F.silu if self.qk_activation == "silu" else F.relu
            q, k = elementwise(activation, q), elementwise(activation, k)
        if self.value_activation != "none":
            v = elementwise(F.silu, v)
        return entered._replace(q=q, k=k, v=v)

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        log_decay = -self.A_log.to(compute_dtype(v.dtype)).exp()
        return Inputs(q=q, k=k, v=v, log_decay=log_decay.expand(*v.shape[:3]))  # b t hv


class RotaryRetention(Retention):
    """Retention whose q and k are rotated by their positions, all channels of a head.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        heads: key heads.
        rope_theta: base of the rotation's frequencies.
        value_heads: value heads, a multiple of heads; None is heads.
        key_dim: channels of a key, an even number; None is hidden_size / heads.
        value_dim: channels of a value; None is key_dim.
        conv_size: tokens that the short convolution sees; 0: no convolution.
        norm_eps: epsilon of the output norm.
        gate_activation: activation of the output gate, "silu", "sigmoid" or "none" (no gate).
        decay: "retnet" or "lightning".
        qk_activation: activation of q and k, before the rotation, "none", "silu" or "relu".
        value_activation: activation of v, "none" or "silu".
        norm: whether the output norm is one a "head" or one over "all" heads.
    """

    options: ClassVar[tuple[str, ...]] = (*Retention.options, "rope_theta")

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        rope_theta: float = 10000.0,
        value_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 0,
        norm_eps: float = 1e-6,
        gate_activation: str = "silu",
        decay: str = "retnet",
        qk_activation: str = "none",
        value_activation: str = "none",
        norm: str = "head",
    ) -> None:
        super().__init__(
            hidden_size, heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size,
            norm_eps=norm_eps, gate_activation=gate_activation, decay=decay, qk_activation=qk_activation,
            value_activation=value_activation, norm=norm,
        )  # fmt: skip
        if self.key_dim % 2:
            raise ValueError(f"key_dim must be even to be rotated, got {self.key_dim}")
        self.rope_theta = rope_theta

    def enter(
        self, x: Tensor, state: Memory | None = None, packed: Tensor | None = None, segment: Segment | None = None
    ) -> Entered:
        """Return what the rule reads of x `b t hidden`; the first token of this call has position 0."""
        if segment is not None:
            raise ValueError(
                "rope_theta must be None for sequences that are split over ranks (context parallelism), got "
                f"{self.rope_theta}; keep sequences whole and split the batch instead"
            )
        entered = super().enter(x, state, packed)
        t = x.shape[1]
        positions = torch.arange(t, device=x.device) if packed is None else locate(packed, t)[1]
        turn = turns(positions, self.key_dim, self.rope_theta, entered.v.dtype)
        return entered._replace(q=rotate(entered.q, turn), k=rotate(entered.k, turn))

    def forward(self, x: Tensor, state: Memory | None = None, cu_seqlens: Bounds = None) -> tuple[Tensor, Memory]:
        """Mix the tokens of x `b t hidden`, as LinearMixer does; the memory is as if the next position were 0.

        Args:
            x: `b t hidden`; with cu_seqlens `1 t hidden`.
            state: what an earlier call returned, to continue its sequences; with None they begin here.
            cu_seqlens: where sequences packed into one row begin and end, `n_seqs + 1`.
        """
        y, after = super().forward(x, state, cu_seqlens)
        if cu_seqlens is None:
            tokens = torch.full((1,), x.shape[1], device=x.device)
        else:
            assert isinstance(cu_seqlens, Tensor)  # enter refuses segments
            tokens = cu_seqlens.diff()
        memory = self._turn_back(after["memory"], tokens)
        return y, Memory({name: memory if name == "memory" else tensor for name, tensor in after.tensors.items()})

    def _turn_back(self, memory: Tensor, tokens: Tensor) -> Tensor:
        """Return the memory `rows hv k v` with its keys rotated by -tokens `rows`, or `1` for all rows."""
        cos, sin = (y[:, None, :, None] for y in turns(tokens, self.key_dim, self.rope_theta, memory.dtype))
        first, second = memory.chunk(2, 2)  # rows hv k/2 v
        return torch.cat((first * cos + second * sin, second * cos - first * sin), 2)


RETENTION_KIND = register(
    MixerKind(
        letter="O",
        name="retention",
        label="retention",
        short="retnet",
        config=LinearConfig,
        section="linear",
        make=Retention.from_config,
        trace=Retention.trace,
        look=Look("#999933", "X", (0, (5, 2, 1, 2))),
        rule="gated_linear_attention",
        shard=LINEAR_SHARD,
    )
)

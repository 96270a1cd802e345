"""Preconditioned delta rules: Gated DeltaNet and Kimi Delta Attention whose written key is scaled by past keys.

    c_t = e^past_decay c_{t-1} + past_rate k_t^2                    the curvature, per key head and channel
    m_t = bound^(-s / (1 + |s|)),  s = log(c_t + 1e-6) - center     in (1 / bound, bound): small where c is large
    S'  = Diag(e^log_decay) S_{t-1}
    S_t = S' + beta_t (m_t * k_t) (v_t - S'^T k_t)^T                compared at k, written at m * k; k has norm 1

c is the diagonal of the discounted key covariance, so m is a bounded, diagonal stand-in for the inverse matrix with
which recursive least squares multiplies its key (docs/derivation.md, sections 8 and 10). The eigenvalue of a write is
1 - beta sum m k^2, in [-1, 1] while beta * bound <= 2. Writes with different m can still make the memory grow together.

c is the rule of gated linear attention with a key of one channel, past_rate, and the value k^2. The other lines are
gated_delta_rule_2 with the key m * k, erase = beta / m and write = beta.
"""

import math
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from lineate.call import Inputs, RawGates, Request
from lineate.layers.configs import LinearConfig
from lineate.layers.entry import check_call
from lineate.layers.linear import LINEAR_SHARD, GatedDeltaNet, KimiDeltaAttention, init_decay
from lineate.layers.mixer import Entered, LinearMixer
from lineate.layers.registry import Look, MixerKind, register
from lineate.layers.state import Memory, TensorSpec
from lineate.ops import Attended
from lineate.ops.raw_gates import activated
from lineate.ops.rules import attend
from lineate.parallel.context.carry import run_rule
from lineate.parallel.context.segments import Bounds, segment_of
from lineate.parallel.tensor.shards import Cut, Part
from lineate.rule import GATED_DELTA_2, GATED_LINEAR, Rule, compute_dtype, decay_of_gate, normalize
from lineate.torch_ops.elementwise import elementwise

CURVATURE = "curvature"
"""The name of c in the state."""
LEAST = 1e-6
"""Is added to c before its logarithm."""
CENTER = -0.2
"""The first value of `center`, the log of the curvature at which m is 1."""


class Preconditioned(LinearMixer):
    """The parts of a mixer whose written key is m * k; its last two gates are past_rate and past_decay, raw.

    past_rate = sigmoid, past_decay = -exp(past_A_log) softplus(gate + past_dt_bias), both per key head.
    """

    rule: ClassVar[Rule | None] = GATED_DELTA_2
    gates_alone = False  # erase is divided by m
    normalize_qk = False  # the written key must keep its length; `scaled` normalises q and k
    precondition: float

    def add_gates(self) -> None:
        super().add_gates()
        self.past_A_log, self.past_dt_bias, self.center = (
            nn.Parameter(torch.empty(self.heads, dtype=torch.float32)) for _ in range(3)
        )

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]
        init_decay(self.past_A_log, self.past_dt_bias)
        nn.init.constant_(self.center, CENTER)

    def cuts(self) -> dict[str, Cut]:
        """Return how the parameters are shared out among ranks, by heads."""
        keys = Cut(0, (Part(self.heads, self.heads),))
        return super().cuts() | dict.fromkeys(("past_A_log", "past_dt_bias", "center"), keys)

    def further_spec(self, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        return (TensorSpec(CURVATURE, (self.heads, self.key_dim), dtype),)

    def forward(self, x: Tensor, state: Memory | None = None, cu_seqlens: Bounds = None) -> tuple[Tensor, Memory]:
        """Mix the tokens of x `b t hidden`; the state is the memory, the curvature and the convolution's last inputs.

        Args:
            x: `b t hidden`; with cu_seqlens `1 t hidden`.
            state: what an earlier call returned, to continue its sequences; with None they begin here.
            cu_seqlens: where sequences packed into one row begin and end, `n_seqs + 1`.
        """
        check_call(self, x, state, cu_seqlens)
        segment, packed = segment_of(self.context, x, cu_seqlens)
        entered = self.enter(x, state, packed, segment)
        bounds = packed if segment is None else segment
        inputs, curvature = self.scaled(entered, None if state is None else state[CURVATURE], bounds)
        inputs = inputs.replace(state=None if state is None else state["memory"])
        owned = state is not None and state.owned and segment is None
        run = partial(self.run_rule, owned=owned)
        output, memory = run_rule(run, inputs, bounds, corrects=GATED_DELTA_2.corrects)
        tensors = {} if entered.conv is None else {"conv": entered.conv}
        tensors |= {"memory": memory, CURVATURE: curvature}
        return self.leave(output, self.output_gate(entered.gates)), Memory(tensors)

    def scaled(self, entered: Entered, curvature: Tensor | None = None, bounds: Bounds = None) -> tuple[Inputs, Tensor]:
        """Return the arguments of gated_delta_rule_2, without a state, and the curvature after the last token.

        Args:
            entered: what `enter` returned.
            curvature: c before the first token, `rows h k`; None: 0.
            bounds: as `forward` has them.
        """
        *gates, rate, decay = entered.gates
        q, k, v = entered[:3]
        dtype = compute_dtype(v.dtype)
        unit = normalize(k.to(dtype))  # b t h k
        after, curvature = self.curvature_of(unit, rate, decay, curvature, bounds)
        s = (after + LEAST).log() - self.center.to(dtype)[:, None]
        m = elementwise(torch.exp, -math.log(self.precondition) * s / (1 + s.abs()))
        own = self.rule_inputs(q, k, v, gates)
        if own.A_log is not None:
            own = activated(own, RawGates(beta_scale=self.beta_scale, lower_bound=self.gate_lower_bound))
        assert own.beta is not None
        beta = own.beta.to(dtype).unsqueeze(-1)  # b t hv 1
        group = self.value_heads // self.heads
        inputs = Inputs(
            q=normalize(q.to(dtype)).to(q.dtype), k=(m * unit).to(k.dtype), v=v, log_decay=own.log_decay,
            erase=beta / m.repeat_interleave(group, 2), write=beta.expand(*beta.shape[:3], self.value_dim),
        )  # fmt: skip
        return inputs, curvature

    def curvature_of(
        self, k: Tensor, rate: Tensor, decay: Tensor, before: Tensor | None, bounds: Bounds
    ) -> tuple[Tensor, Tensor]:
        """Return c after each token `b t h k`, and after the last one `rows h k`.

        k: unit keys, in the compute dtype; rate and decay: raw gates `b t h`.
        """
        rate = elementwise(torch.sigmoid, rate.to(k.dtype)).unsqueeze(-1)  # b t h 1
        log_decay = decay_of_gate(decay.to(k.dtype), self.past_A_log, self.past_dt_bias, None)
        inputs = Inputs(
            q=torch.ones_like(rate), k=rate, v=k * k, log_decay=log_decay,
            state=None if before is None else before.unsqueeze(2),
        )  # fmt: skip
        output, after = run_rule(_sum, inputs, bounds, corrects=GATED_LINEAR.corrects)
        return output, after.squeeze(2)

    def trace(self, x: Tensor) -> Inputs:
        """Return the arguments of gated_delta_rule_2 on a sequence x `1 t hidden`, in the compute dtype."""
        entered = self.enter(x)
        q, k, v = (y.to(compute_dtype(y.dtype)) for y in entered[:3])
        return self.scaled(entered._replace(q=q, k=k, v=v))[0]


def _sum(inputs: Inputs) -> Attended[Tensor]:
    """Run S = e^log_decay S + k v^T, read with q."""
    return attend(GATED_LINEAR, inputs, Request(scale=1.0))


class PreconditionedGatedDeltaNet(Preconditioned, GatedDeltaNet):
    """GatedDeltaNet that writes at m * k; in_proj is q | k | v | z | b | a | past_rate | past_decay.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        heads: key heads, each with a curvature of its own.
        value_heads: value heads, a multiple of heads; None is heads.
        key_dim: channels of a key; None is hidden_size / heads.
        value_dim: channels of a value; None is key_dim.
        conv_size: tokens that the short convolution sees; 0: no convolution.
        beta_scale: beta lies in (0, beta_scale).
        norm_eps: epsilon of the output norm.
        gate_activation: activation of the output gate, "silu", "sigmoid" or "none" (no gate).
        gate_lower_bound: if given, log_decay lies in (gate_lower_bound, 0); it must be below 0.
        precondition: the bound of m, above 1; at most 2 / beta_scale keeps the eigenvalue of every write in [-1, 1].
    """

    gates: tuple[str, ...] = ("values", "heads", "heads", "key_heads", "key_heads")
    options: ClassVar[tuple[str, ...]] = ("beta_scale", "gate_lower_bound", "precondition")

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        value_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        beta_scale: float = 1.0,
        norm_eps: float = 1e-6,
        gate_activation: str = "silu",
        gate_lower_bound: float | None = None,
        precondition: float = 1.5,
    ) -> None:
        super().__init__(
            hidden_size, heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size,
            beta_scale=beta_scale, norm_eps=norm_eps, gate_activation=gate_activation,
            gate_lower_bound=gate_lower_bound,
        )  # fmt: skip
        self.precondition, self.normalize_qk = _checked(precondition), False


class PreconditionedKimiDeltaAttention(Preconditioned, KimiDeltaAttention):
    """KimiDeltaAttention that writes at m * k; in_proj is q | k | v | f | z | b | past_rate | past_decay.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        heads: key heads, each with a curvature of its own.
        value_heads: value heads, a multiple of heads; None is heads.
        key_dim: channels of a key; None is hidden_size / heads.
        value_dim: channels of a value; None is key_dim.
        conv_size: tokens that the short convolution sees; 0: no convolution.
        decay_rank: channels of f; None is value_dim, 0 is one for each channel of the keys of all value heads.
        gate_rank: channels of z; None is value_dim, 0 is one for each channel of the values.
        gate_bias: whether gate_proj has a bias.
        beta_scale: beta lies in (0, beta_scale).
        norm_eps: epsilon of the output norm.
        gate_activation: activation of the output gate, "silu" or "sigmoid".
        gate_lower_bound: if given, log_decay lies in (gate_lower_bound, 0); it must be below 0.
        precondition: the bound of m, above 1; at most 2 / beta_scale keeps the eigenvalue of every write in [-1, 1].
    """

    gates: tuple[str, ...] = ("decay_rank", "gate_rank", "heads", "key_heads", "key_heads")
    options: ClassVar[tuple[str, ...]] = (
        "beta_scale", "decay_rank", "gate_rank", "gate_bias", "gate_lower_bound", "precondition",
    )  # fmt: skip

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        value_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        decay_rank: int | None = None,
        gate_rank: int | None = None,
        gate_bias: bool = False,
        beta_scale: float = 1.0,
        norm_eps: float = 1e-5,
        gate_activation: str = "sigmoid",
        gate_lower_bound: float | None = None,
        precondition: float = 1.5,
    ) -> None:
        super().__init__(
            hidden_size, heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size,
            decay_rank=decay_rank, gate_rank=gate_rank, gate_bias=gate_bias, beta_scale=beta_scale, norm_eps=norm_eps,
            gate_activation=gate_activation, gate_lower_bound=gate_lower_bound,
        )  # fmt: skip
        self.precondition, self.normalize_qk = _checked(precondition), False


def _checked(bound: float) -> float:
    if not 1 < bound < math.inf:
        raise ValueError(f"precondition must be finite and above 1, the bound of m, got {bound}; the authors take 1.5")
    return bound


PRECONDITIONED_KIND = register(
    MixerKind(
        letter="I",
        name="preconditioned_gated_delta",
        label="preconditioned Gated DeltaNet",
        short="pgdn",
        short_label="precond. GDN",
        config=LinearConfig,
        section="linear",
        make=PreconditionedGatedDeltaNet.from_config,
        trace=PreconditionedGatedDeltaNet.trace,
        look=Look("#882255", "<", (0, (1, 2))),
        rule="gated_delta_rule_2",
        shard=LINEAR_SHARD,
    )
)
PRECONDITIONED_KIMI_KIND = register(
    MixerKind(
        letter="F",
        name="preconditioned_kimi_delta",
        label="preconditioned Kimi Delta Attention",
        short="pkda",
        short_label="precond. Kimi Delta",
        config=LinearConfig,
        section="linear",
        make=PreconditionedKimiDeltaAttention.from_config,
        trace=PreconditionedKimiDeltaAttention.trace,
        look=Look("#AA4499", ">", (0, (4, 1))),
        rule="gated_delta_rule_2",
        shard=LINEAR_SHARD,
    )
)

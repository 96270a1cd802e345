"""The token mixers with a fixed-size memory: one class a rule, all of the same parts.

q | k | v | ... = in_proj(x)         one projection for everything
q | k | v = silu(conv(q | k | v))    the short convolution
o, S = rule(q, k, v, gates, S)       lineate's ops
y = out_proj(norm(o) * act(z))       z: the output gate
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate import checks
from lineate.call import Inputs
from lineate.decoding import decode
from lineate.fused import fused_delta_rule
from lineate.layers import linear_costs as costs
from lineate.layers.carry import enter_convolution, run_rule
from lineate.layers.configs import LinearConfig
from lineate.layers.context import Bounds, Context, Segment, segment_of
from lineate.layers.convolution import ShortConvolution, convolution_spec
from lineate.layers.entry import check_call
from lineate.layers.norm import GatedRMSNorm
from lineate.layers.projection import project
from lineate.layers.registry import Look, MixerKind, ModelSizes, register
from lineate.layers.state import Memory, TensorSpec
from lineate.ops import (
    Attended,
    delta_rule,
    divide_by_last,
    gated_delta_rule,
    gated_linear_attention,
    kimi_delta_attention,
    linear_attention,
    with_ones,
)
from lineate.rule import activate, compute_dtype, normalize


class LinearMixer(nn.Module):
    """What the five have in common; each names its `gates`, the rows of in_proj behind q | k | v, and has its rule.

    Each of `heads` key heads of key_dim channels serves value_heads / heads value heads of value_dim channels.
    conv_size 0: no convolution. gate_activation: of the output gate, "silu" or "sigmoid"; KimiDeltaAttention has
    sigmoid by default, as Kimi Linear does, the others silu, as Qwen3-Next does.
    """

    gates: ClassVar[tuple[str, ...]]
    """How wide each is: "values" hv*v, "heads" hv, or a rank."""
    normalize_qk: ClassVar[bool] = False
    """Whether the rule normalises q and k."""
    beta_scale: float = 1.0
    """beta lies in (0, beta_scale) where it is made from a raw logit."""
    context: Context | None = None
    """Set: x is this rank's segment of sequences that are split over ranks (docs/scaling.md)."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        value_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
        gate_activation: str = "silu",
        decay_rank: int | None = None,
        gate_rank: int | None = None,
    ) -> None:
        super().__init__()
        checks.check_choice("gate_activation", gate_activation, ("silu", "sigmoid"))
        value_heads = heads if value_heads is None else value_heads
        key_dim = hidden_size // heads if key_dim is None else key_dim
        value_dim = key_dim if value_dim is None else value_dim
        if value_heads % heads:
            raise ValueError(f"value_heads must be a multiple of heads = {heads}, got {value_heads}")
        self.heads, self.value_heads, self.key_dim, self.value_dim = heads, value_heads, key_dim, value_dim
        self.width = 2 * heads * key_dim + value_heads * value_dim  # of q | k | v
        widths = {
            "values": value_heads * value_dim, "heads": value_heads,
            "decay_rank": value_dim if decay_rank is None else decay_rank,
            "gate_rank": value_dim if gate_rank is None else gate_rank,
        }  # fmt: skip
        self.splits = (self.width, *(widths[gate] for gate in self.gates))
        self.in_proj = nn.Linear(hidden_size, sum(self.splits), bias=False)
        self.conv = ShortConvolution(self.width, conv_size) if conv_size else None
        self.norm = GatedRMSNorm(value_dim, norm_eps, activation=gate_activation)
        self.out_proj = nn.Linear(value_heads * value_dim, hidden_size, bias=False)
        self.add_gates()

    def add_gates(self) -> None:
        """Parameters of the gates beside in_proj, if there are any."""

    @property
    def state_spec(self) -> tuple[TensorSpec, ...]:
        dtype = self.in_proj.weight.dtype
        memory = TensorSpec("memory", (self.value_heads, self.key_dim, self.memory_columns), compute_dtype(dtype))
        return (*convolution_spec(self.conv, dtype), memory)

    @property
    def memory_columns(self) -> int:
        return self.value_dim

    def forward(self, x: Tensor, state: Memory | None = None, cu_seqlens: Bounds = None) -> tuple[Tensor, Memory]:
        """x `b t hidden` -> the same; the state is the memory and the convolution's last inputs."""
        check_call(self, x, state, cu_seqlens)
        segment, packed = segment_of(self.context, x, cu_seqlens)
        mixed, *gates = self.project(x)
        tensors: dict[str, Tensor] = {}
        if self.conv is not None:
            inputs = None if state is None else state["conv"]
            if segment is not None:
                mixed, inputs = enter_convolution(segment, mixed, inputs, self.conv.weight.shape[1] - 1)
            mixed, tensors["conv"] = self.conv(mixed, inputs, packed)
        q, k, v = self._split(mixed)
        memory, owned = (None, False) if state is None else (state["memory"], state.owned)
        bounds = packed if segment is None else segment
        (output, tensors["memory"]), z = self.attend(q, k, v, gates, memory, bounds, owned)
        y = self.norm(output, z.unflatten(-1, (self.value_heads, self.value_dim)))
        return project(self.out_proj, y.flatten(2)), Memory(tensors)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """in_proj(x), cut into q | k | v and the gates.

        On a GPU rows of 16 bit that are no multiple of 16 bytes multiply half as fast: then the few columns of the
        gates per head, which come last, are a product of their own.
        """
        heads = sum(gate == "heads" for gate in self.gates)
        aligned = sum(self.splits) % 8 == 0 or not heads or not x.is_cuda
        if aligned or x.shape[1] == 1 or type(self.in_proj) is not nn.Linear:
            return project(self.in_proj, x).split(self.splits, -1)
        weight: Tensor = self.in_proj.weight
        wide, narrow = weight.split((sum(self.splits[:-heads]), sum(self.splits[-heads:])))
        return (
            *F.linear(x, wide).split(self.splits[:-heads], -1),
            *F.linear(x, narrow).split(self.splits[-heads:], -1),
        )

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cut q | k | v into heads."""
        keys = self.heads * self.key_dim
        q, k, v = mixed.split((keys, keys, self.width - 2 * keys), -1)
        q, k = (y.unflatten(-1, (self.heads, self.key_dim)) for y in (q, k))
        return q, k, v.unflatten(-1, (self.value_heads, self.value_dim))

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        """Return what the rule is called with: its gates, or raw ones together with A_log.

        Which of log_decay and beta are given decides which rule runs. A mixer of your own overrides this method.
        """
        raise NotImplementedError

    def output_gate(self, gates: Sequence[Tensor]) -> Tensor:
        """Return z `b t hv*v`, before its activation."""
        return gates[self.gates.index("values")]

    def features(self, x: Tensor) -> Tensor:
        """Return q or k `b t h k` as the rule uses it."""
        return normalize(x) if self.normalize_qk else x

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, gates: list[Tensor], memory: Tensor | None, bounds: Bounds, owned: bool
    ) -> tuple[Attended[Tensor], Tensor]:
        """Run the rule, and return the output gate too. owned: the memory may be overwritten, and returned."""
        inputs = self.rule_inputs(q, k, v, gates)
        tensors = [x for x in inputs[:5] if x is not None]  # q, k, v, log_decay, beta
        op: Callable[..., Attended[Tensor]] = partial(_op_of(inputs), normalize_qk=self.normalize_qk)
        if inputs.A_log is not None:
            op = partial(self._from_raw_gates, inputs.A_log, inputs.dt_bias, owned)
        return run_rule(op, tensors, memory, bounds, corrects=inputs.beta is not None), self.output_gate(gates)

    def _from_raw_gates(
        self, A_log: Tensor, dt_bias: Tensor | None, owned: bool, *tensors: Tensor, state: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> Attended[Tensor]:  # fmt: skip
        q, k, v, gate, write = tensors
        inputs = Inputs(q, k, v, gate, write, state, cu_seqlens, A_log, dt_bias)
        return delta_from_raw_gates(inputs, self.beta_scale, in_place=owned)

    def trace(self, x: Tensor) -> Inputs:
        """Return what the rule uses on a sequence x `1 t hidden`: features or unit keys, and gates as activated."""
        mixed, *gates = self.project(x)
        if self.conv is not None:
            mixed, _ = self.conv(mixed)
        q, k, v = (y.to(compute_dtype(y.dtype)) for y in self._split(mixed))
        inputs = self.rule_inputs(q, k, v, gates)
        log_decay, beta = inputs.log_decay, inputs.beta
        if inputs.A_log is not None:
            log_decay, beta = activate(log_decay, beta, inputs.A_log, inputs.dt_bias, self.beta_scale)
        return Inputs(self.features(inputs.q), self.features(inputs.k), inputs.v, log_decay, beta)


class LinearAttention(LinearMixer):
    """S = S + phi(k) v^T, divided by phi(q) . sum of phi(k); in_proj is q | k | v | z."""

    gates = ("values",)

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        value_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
        gate_activation: str = "silu",
        feature_map: str = "elu+1",
    ) -> None:
        super().__init__(
            hidden_size, heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size,
            norm_eps=norm_eps, gate_activation=gate_activation,
        )  # fmt: skip
        self.feature_map = feature_map

    @property
    def memory_columns(self) -> int:
        return self.value_dim + 1  # the last column is the sum of the keys

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        return Inputs(q, k, v)

    def features(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1 if self.feature_map == "elu+1" else x

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, gates: list[Tensor], memory: Tensor | None, bounds: Bounds, owned: bool
    ) -> tuple[Attended[Tensor], Tensor]:
        (z,) = gates
        op = partial(linear_attention, feature_map=self.feature_map)
        if isinstance(bounds, Segment):  # the division is not linear in the memory: after the rule
            output, memory = run_rule(op, with_ones(q, k, v), memory, bounds, corrects=False)
            return Attended(divide_by_last(output, v.dtype), memory), z
        return op(q, k, v, state=memory, cu_seqlens=bounds, normalize=True), z


class GatedLinearAttention(LinearMixer):
    """S = Diag(e^log_decay) S + k v^T with log_decay = logsigmoid(decay_proj(f)) / 16, f of low rank (GLA).

    in_proj is q | k | v | f | z.
    """

    gates = ("decay_rank", "values")

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
        norm_eps: float = 1e-6,
        gate_activation: str = "silu",
    ) -> None:
        super().__init__(
            hidden_size, heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size,
            norm_eps=norm_eps, gate_activation=gate_activation, decay_rank=decay_rank,
        )  # fmt: skip

    def add_gates(self) -> None:
        self.decay_proj = nn.Linear(self.splits[1], self.value_heads * self.key_dim)

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        decay = project(self.decay_proj, gates[0]).unflatten(-1, (self.value_heads, self.key_dim))
        return Inputs(q, k, v, F.logsigmoid(decay.to(compute_dtype(decay.dtype))) / 16)


class DeltaNet(LinearMixer):
    """S = S + beta k (v - S^T k)^T with beta = beta_scale sigmoid(b); in_proj is q | k | v | z | b."""

    gates: ClassVar[tuple[str, ...]] = ("values", "heads")
    normalize_qk = True

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
    ) -> None:
        super().__init__(
            hidden_size, heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size,
            norm_eps=norm_eps, gate_activation=gate_activation,
        )  # fmt: skip
        self.beta_scale = beta_scale

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        b = gates[1]
        return Inputs(q, k, v, beta=self.beta_scale * b.to(compute_dtype(b.dtype)).sigmoid())


class GatedDeltaNet(DeltaNet):
    """S' = e^log_decay S, S = S' + beta k (v - S'^T k)^T; log_decay = -exp(A_log) softplus(a + dt_bias) per head.

    in_proj is q | k | v | z | b | a. The output gate is silu(z) unless gate_activation says otherwise.
    """

    gates = ("values", "heads", "heads")

    def add_gates(self) -> None:
        self.A_log = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_decay(self.A_log, self.dt_bias)

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        _, b, a = gates
        return Inputs(q, k, v, a, b, A_log=self.A_log, dt_bias=self.dt_bias)


class KimiDeltaAttention(LinearMixer):
    """As GatedDeltaNet with one decay per key channel; the decay and the output gate come from low-rank projections.

    in_proj is q | k | v | f | z | b: decay_proj(f) is the a of GatedDeltaNet, per channel, and the output gate is
    sigmoid(gate_proj(z)), where GatedDeltaNet has silu(z), unless gate_activation says otherwise.
    """

    gates = ("decay_rank", "gate_rank", "heads")
    normalize_qk = True

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
        beta_scale: float = 1.0,
        norm_eps: float = 1e-5,
        gate_activation: str = "sigmoid",
    ) -> None:
        super().__init__(
            hidden_size, heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size,
            norm_eps=norm_eps, gate_activation=gate_activation, decay_rank=decay_rank, gate_rank=gate_rank,
        )  # fmt: skip
        self.beta_scale = beta_scale

    def add_gates(self) -> None:
        _, decay_rank, gate_rank, rows = self.splits
        self.decay_proj = nn.Linear(decay_rank, rows * self.key_dim, bias=False)
        self.gate_proj = nn.Linear(gate_rank, rows * self.value_dim, bias=False)
        self.A_log = nn.Parameter(torch.empty(rows, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(rows, self.key_dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_decay(self.A_log, self.dt_bias)

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        f, _, b = gates
        decay = project(self.decay_proj, f).unflatten(-1, (self.value_heads, self.key_dim))
        return Inputs(q, k, v, decay, b, A_log=self.A_log, dt_bias=self.dt_bias)

    def output_gate(self, gates: Sequence[Tensor]) -> Tensor:
        return project(self.gate_proj, gates[1])


def init_decay(A_log: Tensor, dt_bias: Tensor) -> None:
    """exp(A_log) uniform in 1 .. 16; softplus(dt_bias) between .001 and .1, uniform in its logarithm."""
    if A_log.is_meta:  # nothing to fill, and log on meta tensors imports 150 MB of torch
        return
    with torch.no_grad():
        A_log.uniform_(1, 16).log_()
        step = dt_bias.uniform_(-6.9078, -2.3026).exp_()
        dt_bias.copy_(step + torch.log(-torch.expm1(-step)))


def delta_from_raw_gates(inputs: Inputs, beta_scale: float, in_place: bool = False) -> Attended[Tensor]:
    """fused_delta_rule; for one token a row, on a GPU one launch on a copy of the memory, else the recurrent form.

    in_place: that launch may overwrite the memory, and returns it.
    """
    q, k, v, gate, write, state, cu_seqlens, A_log, dt_bias = inputs
    assert gate is not None and write is not None and A_log is not None
    if q.shape[1] == 1 and cu_seqlens is None:
        if not q.is_cuda:
            log_decay, beta = activate(gate, write, A_log, dt_bias, beta_scale)
            assert log_decay is not None and beta is not None
            op = kimi_delta_attention if gate.dim() == 4 else gated_delta_rule
            return op(q, k, v, log_decay, beta, state=state, normalize_qk=True)
        if state is not None and not torch.is_grad_enabled():
            state = state if in_place else state.clone()
            output = decode(
                q, k, v, gate, write,
                state=state, normalize_qk=True, raw_gates=True, A_log=A_log, dt_bias=dt_bias, beta_scale=beta_scale,
            )  # fmt: skip
            return Attended(output, state)
    return fused_delta_rule(
        q, k, v, gate, write, A_log, dt_bias, beta_scale=beta_scale, state=state, cu_seqlens=cu_seqlens
    )


def _op_of(inputs: Inputs) -> Callable[..., Attended[Tensor]]:
    """Return the rule that has these gates."""
    if inputs.beta is None:
        return linear_attention if inputs.log_decay is None else gated_linear_attention
    if inputs.log_decay is None:
        return delta_rule
    return gated_delta_rule if inputs.log_decay.dim() == 3 else kimi_delta_attention


def _maker(mixer: Callable[..., LinearMixer], *more: str) -> Callable[[ModelSizes, LinearConfig], LinearMixer]:
    """Return what makes a mixer of a configuration; more: fields that only some mixers have."""
    names = ("value_heads", "key_dim", "value_dim", "conv_size", "norm_eps", "gate_activation", *more)

    def make(model: ModelSizes, config: LinearConfig) -> LinearMixer:
        options: dict[str, Any] = {name: getattr(config, name) for name in names}
        return mixer(model.hidden_size, config.heads, **options)

    return make


def _register(
    letter: str, name: str, label: str, short: str, make: Callable[[ModelSizes, LinearConfig], LinearMixer],
    cost: costs.LinearCosts, look: Look, short_label: str | None = None,
) -> MixerKind:  # fmt: skip
    return register(
        MixerKind(
            letter=letter,
            name=name,
            label=label,
            short=short,
            short_label=short_label,
            config=LinearConfig,
            section="linear",
            make=make,
            operations=cost.operations(),
            kept_bytes=cost.kept_bytes,
            trace=LinearMixer.trace,
            look=look,
        )
    )


LINEAR = _register(
    "L", "linear_attention", "linear attention", "linear", _maker(LinearAttention, "feature_map"), costs.LINEAR,
    Look("#E69F00", "o", "-"),
)  # fmt: skip
GATED_LINEAR = _register(
    "R", "gated_linear_attention", "gated linear attention", "gla", _maker(GatedLinearAttention, "decay_rank"),
    costs.GATED_LINEAR, Look("#56B4E9", "s", "--"), "gated linear",
)  # fmt: skip
DELTA = _register(
    "D", "delta_rule", "DeltaNet", "deltanet", _maker(DeltaNet, "beta_scale"), costs.DELTA, Look("#009E73", "^", "-."),
)  # fmt: skip
GATED_DELTA = _register(
    "G", "gated_delta_rule", "Gated DeltaNet", "gdn", _maker(GatedDeltaNet, "beta_scale"), costs.GATED_DELTA,
    Look("#CC79A7", "D", ":"),
)  # fmt: skip
KIMI_DELTA = _register(
    "K", "kimi_delta_attention", "Kimi Delta Attention", "kda",
    _maker(KimiDeltaAttention, "beta_scale", "decay_rank", "gate_rank"), costs.KIMI_DELTA,
    Look("#D55E00", "*", (0, (6, 1, 1, 1, 1, 1))), "Kimi Delta",
)  # fmt: skip

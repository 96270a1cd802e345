"""The token mixers with a fixed-size memory: one class a rule, and its row in the registry."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate import checks
from lineate.call import Inputs
from lineate.layers.configs import FEATURE_MAPS, LinearConfig
from lineate.layers.costs import linear as costs
from lineate.layers.mixer import Entered, LinearMixer
from lineate.layers.projection import project
from lineate.layers.registry import Look, MixerKind, register
from lineate.layers.state import Memory
from lineate.layers.step.spec import StepSpec
from lineate.layers.variants.features import divide_by_sum, features_of, make_feature_map
from lineate.ops import Attended, divide_by_last, linear_attention, with_ones
from lineate.parallel.context.carry import run_rule
from lineate.parallel.context.segments import Bounds, Segment
from lineate.parallel.tensor.shards import Shard, share_out
from lineate.rule import DELTA, GATED_DELTA, GATED_LINEAR, KIMI_DELTA, LINEAR, Rule, compute_dtype
from lineate.torch_ops.elementwise import elementwise


class LinearAttention(LinearMixer):
    """S = S + phi(k) v^T, divided by phi(q) . sum of phi(k) if `normalize`; in_proj is q | k | v | z.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        heads: key heads.
        value_heads: value heads, a multiple of heads; None is heads.
        key_dim: channels of a key; None is hidden_size / heads.
        value_dim: channels of a value; None is key_dim.
        conv_size: tokens that the short convolution sees; 0: no convolution.
        norm_eps: epsilon of the output norm.
        gate_activation: activation of the output gate, "silu", "sigmoid" or "none" (no gate).
        feature_map: phi, "identity", "elu+1", or one of lineate/layers/variants/features.py.
        normalize: whether the output is divided by phi(q) . sum of phi(k).
        sum_to_one: which of phi(q) and phi(k) is divided by its sum, "q", "k", "qk", or "" for none of them.
    """

    rule = LINEAR
    gates = ("values",)
    options = ("feature_map", "normalize", "sum_to_one")
    narrows = False  # it never forgets: its sums outgrow what bfloat16 can still add to them

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
        normalize: bool = True,
        sum_to_one: str = "",
    ) -> None:
        checks.check_choice("feature_map", feature_map, FEATURE_MAPS)
        checks.check_choice("sum_to_one", sum_to_one, ("", "q", "k", "qk"))
        super().__init__(
            hidden_size, heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size,
            norm_eps=norm_eps, gate_activation=gate_activation,
        )  # fmt: skip
        self.feature_map, self.normalize, self.sum_to_one = feature_map, normalize, sum_to_one
        self.q_map, self.k_map = (make_feature_map(feature_map, self.key_dim) for _ in "qk")

    @property
    def memory_rows(self) -> int:
        return self.key_dim * features_of(self.feature_map)

    @property
    def memory_columns(self) -> int:
        return self.value_dim + self.normalize  # the last column is the sum of the keys

    @property
    def _map(self) -> str:
        """The feature map that the rule computes: not one that `enter` has."""
        return "elu+1" if self.feature_map == "elu+1" and not self.sum_to_one else "identity"

    def enter(
        self, x: Tensor, state: Memory | None = None, packed: Tensor | None = None, segment: Segment | None = None
    ) -> Entered:
        """Return what the rule reads of x `b t hidden`, after the feature maps that have weights or are normalised."""
        entered = super().enter(x, state, packed, segment)
        if self.q_map is None and not self.sum_to_one:
            return entered
        mapped = []
        for name, y, phi in (("q", entered.q, self.q_map), ("k", entered.k, self.k_map)):
            y = self._elu(y) if phi is None else phi(y)
            mapped.append(divide_by_sum(y) if name in self.sum_to_one else y)
        return entered._replace(q=mapped[0], k=mapped[1])

    def _elu(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1 if self.feature_map == "elu+1" else x

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        return Inputs(q=q, k=k, v=v)

    def features(self, x: Tensor) -> Tensor:
        return self._elu(x) if self._map == "elu+1" else x

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, gates: list[Tensor], memory: Tensor | None, bounds: Bounds, owned: bool
    ) -> tuple[Attended[Tensor], Tensor]:
        if not self.normalize:
            q, k = self.features(q), self.features(k)
            return super().attend(q, k, v, gates, memory, bounds, owned)
        z = self.output_gate(gates)
        if isinstance(bounds, Segment):  # after the rule, because the division is not linear in the memory
            q, k, v_and_ones = with_ones(q, k, v)
            inputs = Inputs(q=q, k=k, v=v_and_ones, state=memory)
            output, memory = run_rule(self._sums, inputs, bounds, corrects=LINEAR.corrects)
            return Attended(divide_by_last(output, v.dtype), memory), z
        op = partial(linear_attention, feature_map=self._map)
        return op(q, k, v, state=memory, cu_seqlens=bounds, normalize=True), z

    def _sums(self, inputs: Inputs) -> Attended[Tensor]:
        """Run the rule without its division."""
        q, k, v, state, cu_seqlens = inputs.q, inputs.k, inputs.v, inputs.state, inputs.cu_seqlens
        return linear_attention(q, k, v, state=state, cu_seqlens=cu_seqlens, feature_map=self._map)


class GatedLinearAttention(LinearMixer):
    """S = Diag(e^log_decay) S + k v^T with log_decay = logsigmoid(decay_proj(f)) / 16, f of low rank (GLA).

    in_proj is q | k | v | f | z.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        heads: key heads.
        value_heads: value heads, a multiple of heads; None is heads.
        key_dim: channels of a key; None is hidden_size / heads.
        value_dim: channels of a value; None is key_dim.
        conv_size: tokens that the short convolution sees; 0: no convolution.
        decay_rank: channels of f; None is value_dim.
        norm_eps: epsilon of the output norm.
        gate_activation: activation of the output gate, "silu", "sigmoid" or "none" (no gate).
    """

    rule = GATED_LINEAR
    gates = ("decay_rank", "values")
    options = ("decay_rank",)
    temperature = 16.0

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
        if not self.decay_rank:
            raise ValueError("decay_rank must be at least 1, got 0; give None for value_dim")
        self.decay_proj = nn.Linear(self.splits[1], self.value_heads * self.key_dim)

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        decay = project(self.decay_proj, gates[0]).unflatten(-1, (self.value_heads, self.key_dim))
        log_decay = elementwise(F.logsigmoid, decay.to(compute_dtype(decay.dtype))) / self.temperature
        return Inputs(q=q, k=k, v=v, log_decay=log_decay)


class DeltaNet(LinearMixer):
    """S = S + beta k (v - S^T k)^T with beta = beta_scale sigmoid(b); in_proj is q | k | v | z | b.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        heads: key heads.
        value_heads: value heads, a multiple of heads; None is heads.
        key_dim: channels of a key; None is hidden_size / heads.
        value_dim: channels of a value; None is key_dim.
        conv_size: tokens that the short convolution sees; 0: no convolution.
        beta_scale: beta lies in (0, beta_scale); 2 allows negative eigenvalues.
        rate: the rate of writing: "beta", with unit keys, or "exact" or "kaczmarz", with keys of any length
            (lineate/ops/rates.py).
        norm_eps: epsilon of the output norm.
        gate_activation: activation of the output gate, "silu", "sigmoid" or "none" (no gate).
    """

    rule: ClassVar[Rule | None] = DELTA
    gates: tuple[str, ...] = ("values", "heads")
    options: ClassVar[tuple[str, ...]] = ("beta_scale", "rate")
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
        rate: str = "beta",
    ) -> None:
        super().__init__(
            hidden_size, heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size,
            norm_eps=norm_eps, gate_activation=gate_activation,
        )  # fmt: skip
        self.beta_scale = beta_scale
        self.set_rate(rate)

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        b = gates[1]
        beta = self.beta_scale * elementwise(torch.sigmoid, b.to(compute_dtype(b.dtype)))
        return self.with_rate(Inputs(q=q, k=k, v=v, beta=beta))


class GatedDeltaNet(DeltaNet):
    """S' = e^log_decay S, S = S' + beta k (v - S'^T k)^T; log_decay = -exp(A_log) softplus(a + dt_bias) per head.

    With gate_lower_bound, log_decay = gate_lower_bound sigmoid(exp(A_log) (a + dt_bias)). in_proj is
    q | k | v | z | b | a. The output gate is silu(z) unless gate_activation says otherwise.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        heads: key heads.
        value_heads: value heads, a multiple of heads; None is heads.
        key_dim: channels of a key; None is hidden_size / heads.
        value_dim: channels of a value; None is key_dim.
        conv_size: tokens that the short convolution sees; 0: no convolution.
        beta_scale: beta lies in (0, beta_scale); 2 allows negative eigenvalues.
        rate: the rate of writing: "beta", with unit keys, or "exact" or "kaczmarz", with keys of any length
            (lineate/ops/rates.py).
        norm_eps: epsilon of the output norm.
        gate_activation: activation of the output gate, "silu", "sigmoid" or "none" (no gate).
        gate_lower_bound: if given, log_decay lies in (gate_lower_bound, 0); it must be below 0.
    """

    rule: ClassVar[Rule | None] = GATED_DELTA
    gates: tuple[str, ...] = ("values", "heads", "heads")
    options: ClassVar[tuple[str, ...]] = ("beta_scale", "gate_lower_bound", "rate")

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
        rate: str = "beta",
    ) -> None:
        checks.check_lower_bound(gate_lower_bound, "gate_lower_bound")
        super().__init__(
            hidden_size, heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size,
            beta_scale=beta_scale, norm_eps=norm_eps, gate_activation=gate_activation, rate=rate,
        )  # fmt: skip
        self.gate_lower_bound = gate_lower_bound
        self.reset_parameters()

    def add_gates(self) -> None:
        self.A_log = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32))

    def reset_parameters(self) -> None:
        init_decay(self.A_log, self.dt_bias, self.gate_lower_bound is not None)

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        _, b, a = gates
        inputs = Inputs(q=q, k=k, v=v, log_decay=a, beta=b, A_log=self.A_log, dt_bias=self.dt_bias)
        return self.with_rate(inputs)


class KimiDeltaAttention(LinearMixer):
    """GatedDeltaNet with one decay per key channel; the decay and the output gate come from low-rank projections.

    in_proj is q | k | v | f | z | b: decay_proj(f) is the a of GatedDeltaNet, per channel, and the output gate is
    sigmoid(gate_proj(z)), where GatedDeltaNet has silu(z), unless gate_activation says otherwise. With a rank of 0, f
    or z itself is the decay or the gate, of full rank.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        heads: key heads.
        value_heads: value heads, a multiple of heads; None is heads.
        key_dim: channels of a key; None is hidden_size / heads.
        value_dim: channels of a value; None is key_dim.
        conv_size: tokens that the short convolution sees; 0: no convolution.
        decay_rank: channels of f; None is value_dim, 0 is one for each channel of the keys of all value heads.
        gate_rank: channels of z; None is value_dim, 0 is one for each channel of the values.
        gate_bias: whether gate_proj has a bias.
        beta_scale: beta lies in (0, beta_scale); 2 allows negative eigenvalues.
        rate: the rate of writing: "beta", with unit keys, or "exact" or "kaczmarz", with keys of any length
            (lineate/ops/rates.py).
        norm_eps: epsilon of the output norm.
        gate_activation: activation of the output gate, "silu" or "sigmoid".
        gate_lower_bound: if given, log_decay lies in (gate_lower_bound, 0); it must be below 0.
    """

    rule: ClassVar[Rule | None] = KIMI_DELTA
    gates: tuple[str, ...] = ("decay_rank", "gate_rank", "heads")
    options: ClassVar[tuple[str, ...]] = (
        "beta_scale", "decay_rank", "gate_rank", "gate_bias", "gate_lower_bound", "rate",
    )  # fmt: skip
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
        gate_bias: bool = False,
        beta_scale: float = 1.0,
        norm_eps: float = 1e-5,
        gate_activation: str = "sigmoid",
        gate_lower_bound: float | None = None,
        rate: str = "beta",
    ) -> None:
        checks.check_lower_bound(gate_lower_bound, "gate_lower_bound")
        checks.check_choice("gate_activation", gate_activation, ("silu", "sigmoid"))
        super().__init__(
            hidden_size, heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size,
            norm_eps=norm_eps, gate_activation=gate_activation, decay_rank=decay_rank, gate_rank=gate_rank,
            gate_bias=gate_bias,
        )  # fmt: skip
        self.beta_scale, self.gate_lower_bound = beta_scale, gate_lower_bound
        self.set_rate(rate)
        self.reset_parameters()

    def add_gates(self) -> None:
        rows, decays, values = self.value_heads, self.value_heads * self.key_dim, self.value_heads * self.value_dim
        self.decay_proj = nn.Linear(self.decay_rank, decays, bias=False) if self.decay_rank else None
        self.gate_proj = nn.Linear(self.gate_rank, values, bias=self.gate_bias) if self.gate_rank else None
        self.A_log = nn.Parameter(torch.empty(rows, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(rows, self.key_dim, dtype=torch.float32))

    def reset_parameters(self) -> None:
        init_decay(self.A_log, self.dt_bias, self.gate_lower_bound is not None)

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        f, _, b = gates
        decay = f if self.decay_proj is None else project(self.decay_proj, f)
        decay = decay.unflatten(-1, (self.value_heads, self.key_dim))
        inputs = Inputs(q=q, k=k, v=v, log_decay=decay, beta=b, A_log=self.A_log, dt_bias=self.dt_bias)
        return self.with_rate(inputs)

    def output_gate(self, gates: Sequence[Tensor]) -> Tensor:
        return gates[1] if self.gate_proj is None else project(self.gate_proj, gates[1])


def init_decay(A_log: Tensor, dt_bias: Tensor, bounded: bool = False) -> None:
    """Draw exp(A_log) uniformly in 1 .. 16, and softplus(dt_bias) in .001 .. .1, uniformly in its logarithm.

    bounded: whether the decay has a lower bound. exp(A_log) is 1 then, as in GLM-5-Next: it multiplies the gate inside
    the sigmoid, where larger numbers would close most gates.
    """
    if A_log.is_meta:  # nothing to fill, and log on meta tensors imports 150 MB of torch
        return
    with torch.no_grad():
        A_log.uniform_(1, 16).log_()
        if bounded:
            A_log.zero_()
        step = dt_bias.uniform_(-6.9078, -2.3026).exp_()
        dt_bias.copy_(step + torch.log(-torch.expm1(-step)))


def _divide(x: LinearConfig, ranks: int) -> LinearConfig:
    """Return the sizes of one rank's share; value heads stay with their key head."""
    return replace(
        x,
        heads=share_out("the key heads", x.heads, ranks),
        value_heads=share_out("the value heads", x.value_heads, ranks),
    )


LINEAR_SHARD = Shard(_divide, lambda mixer: mixer.cuts())
"""How mixers with the sizes of LinearConfig are shared out among ranks: by heads, as LinearMixer.cuts says."""


def _register(
    letter: str, name: str, label: str, short: str, mixer: type[LinearMixer], cost: costs.LinearCosts, look: Look,
    step: StepSpec, short_label: str | None = None,
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
            make=mixer.from_config,
            operations=cost.operations(),
            kept_bytes=cost.kept_bytes,
            trace=mixer.trace,
            look=look,
            shard=LINEAR_SHARD,
            step=step,
        )
    )


LINEAR_KIND = _register(
    "L", "linear_attention", "linear attention", "linear", LinearAttention, costs.LINEAR_COSTS,
    Look("#E69F00", "o", "-"),
    StepSpec(LinearAttention, LINEAR, ("gate",), features="map", divides=True),
)  # fmt: skip
GATED_LINEAR_KIND = _register(
    "R", "gated_linear_attention", "gated linear attention", "gla", GatedLinearAttention,
    costs.GATED_LINEAR_COSTS, Look("#56B4E9", "s", "--"),
    StepSpec(
        GatedLinearAttention, GATED_LINEAR, ("decay", "gate"), decay="channel", decay_gate="sigmoid",
        low_rank=("decay",),
    ),
    "gated linear",
)  # fmt: skip
DELTA_KIND = _register(
    "D", "delta_rule", "DeltaNet", "deltanet", DeltaNet, costs.DELTA_COSTS, Look("#009E73", "^", "-."),
    StepSpec(DeltaNet, DELTA, ("gate", "write"), features="unit"),
)  # fmt: skip
GATED_DELTA_KIND = _register(
    "G", "gated_delta_rule", "Gated DeltaNet", "gdn", GatedDeltaNet, costs.GATED_DELTA_COSTS,
    Look("#CC79A7", "D", ":"),
    StepSpec(
        GatedDeltaNet, GATED_DELTA, ("gate", "write", "decay"), features="unit", decay="head", decay_gate="speed",
    ),
)  # fmt: skip
KIMI_DELTA_KIND = _register(
    "K", "kimi_delta_attention", "Kimi Delta Attention", "kda",
    KimiDeltaAttention, costs.KIMI_DELTA_COSTS,
    Look("#D55E00", "*", (0, (6, 1, 1, 1, 1, 1))),
    StepSpec(
        KimiDeltaAttention, KIMI_DELTA, ("decay", "gate", "write"), features="unit", decay="channel",
        decay_gate="speed", low_rank=("decay", "gate"),
    ),
    "Kimi Delta",
)  # fmt: skip

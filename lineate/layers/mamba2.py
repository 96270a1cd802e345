"""Mamba-2: gated linear attention whose step dt scales both the value and the decay.

    x | B | C = silu(conv(x | B | C))            dt = softplus(dt + dt_bias), within bounds
    S = exp(-exp(A_log) dt) S + B (dt x)^T       y = S^T C + D x
    out = out_proj(RMSNorm(y * silu(z)))         or RMSNorm(y) * silu(z)

In the notation of the rules q = C, k = B, v = dt x and log_decay = -exp(A_log) dt, one a head; the scale is 1. Each
group of B and C serves several heads of x. So `gated_linear_attention` computes it, in all its forms and backends.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.call import Inputs
from lineate.layers.configs import LinearConfig, MambaConfig
from lineate.layers.costs.linear import LinearCosts, values_of
from lineate.layers.linear import init_decay
from lineate.layers.mixer import LinearMixer
from lineate.layers.registry import Look, MixerKind, ModelSizes, Operations, register
from lineate.layers.step.spec import StepSpec
from lineate.parallel.tensor.ranks import Ranks, rms_norm_over
from lineate.parallel.tensor.shards import Cut, Part, Shard, share_out
from lineate.rule import GATED_LINEAR, compute_dtype
from lineate.torch_ops.elementwise import elementwise


class GroupedGatedNorm(nn.Module):
    """RMSNorm(x * silu(gate)), or RMSNorm(x) * silu(gate), over groups of all heads' channels, in float32.

    Args:
        size: channels of all heads.
        groups: groups of channels that are normalised apart from each other; 0: they are a part of one group.
        eps: added to the mean square.
        gate_first: whether the norm follows the gate.
    """

    activation = "silu"
    ranks: Ranks | None = None
    """The ranks that have the other channels, if groups is 0."""

    def __init__(self, size: int, groups: int = 1, eps: float = 1e-5, *, gate_first: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.groups, self.eps, self.gate_first = groups, eps, gate_first
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise x `b t heads head_dim` and multiply it by the activated gate of the same shape; in x's dtype."""
        dtype = compute_dtype(x.dtype)
        y, z = x.to(dtype).flatten(2), elementwise(F.silu, gate.to(dtype)).flatten(2)
        if self.gate_first:
            y = y * z
        if self.groups == 0:
            assert self.ranks is not None
            y = rms_norm_over(self.ranks, y, None, self.eps, self.ranks.size * y.shape[-1])
        else:
            groups = y.unflatten(-1, (self.groups, -1))
            y = F.rms_norm(groups, groups.shape[-1:], None, self.eps).flatten(2)
        y = y * self.weight.to(dtype)
        return (y if self.gate_first else y * z).to(x.dtype).view_as(x)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, groups={self.groups}, eps={self.eps}, gate_first={self.gate_first}"


class Mamba2(LinearMixer):
    """S = exp(-exp(A_log) dt) S + B (dt x)^T, y = S^T C + D x, with a gated norm of y; in_proj is C | B | x | z | dt.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        heads: heads of x.
        head_dim: channels of a head of x; None is 2 hidden_size / heads.
        state_dim: channels of B and C.
        groups: heads of B and C, a divisor of heads.
        conv_size: tokens that the short convolution over C, B and x sees; 0: no convolution.
        conv_bias: whether that convolution has a bias.
        bias: whether the projections have a bias.
        norm_groups: groups of channels that the output norm normalises apart from each other; 0, on one of several
            ranks: they are a part of one group.
        gate_first: whether the norm follows the output gate; otherwise the gate multiplies what was normalised.
        step_least: smallest step dt, at least 0: with a step below 0 the memory would grow.
        step_most: largest step dt; None means no bound.
        norm_eps: epsilon of the output norm.
    """

    gates = ("values", "heads")
    rule = GATED_LINEAR
    scale = 1.0

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        head_dim: int | None = None,
        state_dim: int = 128,
        groups: int = 1,
        conv_size: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        norm_groups: int = 1,
        gate_first: bool = True,
        step_least: float = 0.0,
        step_most: float | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        head_dim = 2 * hidden_size // heads if head_dim is None else head_dim
        MambaConfig(
            heads, head_dim, state_dim, groups, norm_groups=norm_groups, step_least=step_least, step_most=step_most
        ).check_sizes()
        super().__init__(
            hidden_size, groups, value_heads=heads, key_dim=state_dim, value_dim=head_dim, conv_size=conv_size,
            norm_eps=norm_eps, bias=bias, conv_bias=conv_bias,
        )  # fmt: skip
        self.step_least, self.step_most = step_least, step_most
        norm = GroupedGatedNorm(heads * head_dim, norm_groups, norm_eps, gate_first=gate_first)
        self.norm = norm  # type: ignore[assignment]

    def add_gates(self) -> None:
        self.A_log = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(self.value_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_decay(self.A_log, self.dt_bias)
        nn.init.ones_(self.D)

    def cuts(self) -> dict[str, Cut]:
        """Return how the parameters are shared out among ranks; several may have the same group of B and C."""
        values = Part(self.value_heads * self.value_dim, self.value_heads)
        return super().cuts() | {"norm.weight": Cut(0, (values,))}

    def steps(self, dt: Tensor) -> Tensor:
        """Return the steps of raw ones `b t heads`: softplus(dt + dt_bias) within the bounds, in float32."""
        dtype = compute_dtype(dt.dtype)
        steps = elementwise(F.softplus, dt.to(dtype) + self.dt_bias.to(dtype))
        if self.step_least or self.step_most is not None:
            steps = steps.clamp(self.step_least, self.step_most)
        return steps

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        steps = self.steps(gates[1])
        log_decay = -self.A_log.to(steps.dtype).exp() * steps
        return Inputs(q=q, k=k, v=(v * steps[..., None]).to(v.dtype), log_decay=log_decay)

    def read(self, output: Tensor, v: Tensor) -> Tensor:
        """Return the rule's output with D x added."""
        dtype = compute_dtype(v.dtype)
        skip = self.D.to(dtype)[:, None] * v.to(dtype)
        return (output.to(dtype) + skip).to(output.dtype)

    def trace(self, x: Tensor) -> Inputs:
        """Return the inputs of the rule on a sequence x `1 t hidden`; D x is not part of it.

        q is C times sqrt(k), because the rules multiply their output by 1/sqrt(k) unless they are told otherwise.
        """
        found = super().trace(x)
        return found.replace(q=found.q * self.key_dim**0.5)


def _as_linear(x: MambaConfig) -> LinearConfig:
    """Return the sizes in the words of the rules."""
    return LinearConfig(x.groups, x.heads, x.state_dim, x.head_dim, conv_size=x.conv_size)


_COSTS = LinearCosts(lambda x: values_of(x) + x.value_heads, lambda x, half: 0)
_COUNTS = _COSTS.operations()
OPERATIONS = Operations(
    lambda model, x: _COUNTS.projections(model, _as_linear(x)),
    lambda x, tokens, convention: _COUNTS.mixing(_as_linear(x), tokens, convention),
    lambda x, context, convention: _COUNTS.mixing_one(_as_linear(x), context, convention),
)


def mamba_kept(x: MambaConfig, half: bool) -> float:
    """Return the bytes a token that the backward keeps.

    In addition to those of every rule, these are the steps and their decays; the sum with D x, the gate and two stages
    of the norm, all in float32; and, if the convolution has a bias, its padded input and its output before silu.
    """
    e, sizes = 2 if half else 4, _as_linear(x)
    values = values_of(sizes)
    width = 2 * x.groups * x.state_dim + values
    steps = 4 if x.step_least or x.step_most is not None else 3
    kept = 4 * (values * (6 if half else 4) + steps * x.heads + x.norm_groups)  # half: x and z are widened too
    convolved = 2 * e * width if x.conv_size and x.conv_bias else 0
    return _COSTS.kept_bytes(sizes, half) + kept + convolved


def _make(model: ModelSizes, x: MambaConfig) -> Mamba2:
    return Mamba2(
        model.hidden_size, x.heads, head_dim=x.head_dim, state_dim=x.state_dim, groups=x.groups,
        conv_size=x.conv_size, conv_bias=x.conv_bias, bias=x.bias, norm_groups=x.norm_groups,
        gate_first=x.gate_first, step_least=x.step_least, step_most=x.step_most, norm_eps=x.norm_eps,
    )  # fmt: skip


def _divide(x: MambaConfig, ranks: int) -> MambaConfig:
    """Return the sizes of one rank's share of the heads."""
    return replace(
        x,
        heads=share_out("the heads", x.heads, ranks),
        groups=share_out("the groups", x.groups, ranks, several=True),
        norm_groups=0 if x.norm_groups == 1 else share_out("the groups of the norm", x.norm_groups, ranks),
    )


MAMBA2 = register(
    MixerKind(
        letter="S",
        name="mamba2",
        label="Mamba-2",
        short="mamba2",
        config=MambaConfig,
        section="mamba",
        make=_make,
        operations=OPERATIONS,
        kept_bytes=mamba_kept,
        trace=Mamba2.trace,
        look=Look("#117733", "p", (0, (4, 1, 1, 1))),
        rule="gated_linear_attention",
        shard=Shard(_divide, Mamba2.cuts),
        step=StepSpec(
            Mamba2, GATED_LINEAR, ("gate", "decay"), decay="head", decay_gate="step", skips=True, grouped=True
        ),
    )
)

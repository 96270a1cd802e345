"""Comba: Gated DeltaNet that compares before it forgets, with a probe of its own, and corrects its query.

    p = s k        r = beta (v - S_{t-1}^T p)        S_t = e^log_decay S_{t-1} + k r^T        o = S_t^T (q - D p)

s = sigmoid(probe_logit) and D = correction are parameters of each key head. They and the norms of q, k and p meet in
two ways:

    probe       query                            probe, where q^ is q with norm 1
    "unit"      (q - D s k)^, from raw q, k      k^: s acts on the query alone      flash-linear-attention
    "scaled"    q^ - D s k^                      s k^                               the equation with unit q and k

The row of the rule compares after the decay, so its probe is divided by the decay: erase = beta s / e^log_decay. So
that this is finite, a decay is at least a hundredth of the rounding error of S, from where it makes no difference.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lineate import checks
from lineate.call import Inputs
from lineate.layers.by_hand import ByHand, HandMade, one_head
from lineate.layers.configs import LinearConfig
from lineate.layers.linear import LINEAR_SHARD, init_decay
from lineate.layers.mixer import LinearMixer
from lineate.layers.registry import Look, MixerKind, register
from lineate.parallel.tensor.shards import Cut, Part
from lineate.rule import EPSILON, GATED_DELTA_2, compute_dtype, decay_of_gate, normalize
from lineate.torch_ops.elementwise import elementwise

LEAST = 0.01
"""The least decay, in units of the rounding error of S."""


class Comba(LinearMixer):
    """S = e^log_decay S + beta k (v - S^T p)^T, read with q - correction p; in_proj is q | k | v | z | b | a.

    beta = sigmoid(b), log_decay = -exp(A_log) softplus(a + dt_bias) per head, p = sigmoid(probe_logit) k. New layers
    have correction = 1; the authors take 0.02 for models of 0.3 billion parameters.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        heads: key heads.
        value_heads: value heads, a multiple of heads; None is heads.
        key_dim: channels of a key; None is hidden_size / heads.
        value_dim: channels of a value; None is key_dim.
        conv_size: tokens that the short convolution sees; 0: no convolution.
        norm_eps: epsilon of the output norm.
        gate_activation: activation of the output gate, "silu", "sigmoid" or "none" (no gate).
        probe: "unit": the probe is normalised as flash-linear-attention does; "scaled": it is shorter than the key.
    """

    rule = GATED_DELTA_2
    gates_alone = False  # erase is divided by the decay
    gates = ("values", "heads", "heads")
    options = ("probe",)

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
        gate_activation: str = "sigmoid",
        probe: str = "unit",
    ) -> None:
        checks.check_choice("probe", probe, ("unit", "scaled"))
        super().__init__(
            hidden_size, heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size,
            norm_eps=norm_eps, gate_activation=gate_activation,
        )  # fmt: skip
        self.probe, self.normalize_qk = probe, probe == "unit"
        self.reset_parameters()

    def add_gates(self) -> None:
        self.A_log = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32))
        self.probe_logit = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        self.correction = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))

    def reset_parameters(self) -> None:
        init_decay(self.A_log, self.dt_bias)
        nn.init.ones_(self.probe_logit)
        nn.init.ones_(self.correction)

    def cuts(self) -> dict[str, Cut]:
        """Return how the parameters are shared out among ranks, by heads."""
        keys = Cut(0, (Part(self.heads, self.heads),))
        return super().cuts() | {"probe_logit": keys, "correction": keys}

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        _, b, a = gates
        wide, group = compute_dtype(a.dtype), self.value_heads // self.heads
        log_decay = decay_of_gate(a.to(wide), self.A_log, self.dt_bias, None).clamp(min=_least(wide))  # b t hv
        beta = elementwise(torch.sigmoid, b.to(wide))
        s, D = self.probe_logit.to(wide).sigmoid(), self.correction.to(wide)  # h
        full_q, full_k = q.to(wide), k.to(wide)
        length = s.expand(q.shape[:3])  # b t h: of the probe, in units of the key's
        if self.probe == "unit":
            square = (full_k * full_k).sum(-1)
            length = s * ((square + EPSILON) / (s * s * square + EPSILON)).sqrt()
        else:
            full_q, full_k = normalize(full_q), normalize(full_k)
        full_q = full_q - (D * s).unsqueeze(-1) * full_k
        erase = beta * length.repeat_interleave(group, 2) * elementwise(torch.exp, -log_decay)
        return Inputs(
            q=full_q.to(q.dtype), k=full_k.to(k.dtype), v=v, log_decay=log_decay,
            erase=erase.unsqueeze(-1).expand(*erase.shape, self.key_dim),
            write=beta.unsqueeze(-1).expand(*beta.shape, self.value_dim),
        )  # fmt: skip


def _least(dtype: torch.dtype) -> float:
    """Return the log of the least decay."""
    return math.log(LEAST * torch.finfo(dtype).eps)


def _by_hand(x: HandMade) -> Inputs:
    """Compare at the key itself (s = 1), with a rate of at most 1, as the mixer's."""
    log_decay, beta = x.log_decay.clamp(min=_least(x.k.dtype)), x.beta.clamp(max=1.0)
    k, v = one_head(x.k), one_head(x.v)
    erase, write = (one_head(rate[:, None]) for rate in (beta * (-log_decay).exp(), beta))
    return Inputs(q=k, k=k, v=v, log_decay=one_head(log_decay), erase=erase.expand_as(k), write=write.expand_as(v))


COMBA_KIND = register(
    MixerKind(
        letter="Q",
        name="comba",
        label="Comba",
        short="comba",
        config=LinearConfig,
        section="linear",
        make=Comba.from_config,
        trace=Comba.trace,
        by_hand=ByHand(_by_hand, "compares with its key before it forgets"),
        look=Look("#44AA99", "v", (0, (3, 2))),
        rule="gated_delta_rule_2",
        shard=LINEAR_SHARD,
    )
)

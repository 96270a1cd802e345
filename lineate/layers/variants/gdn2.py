"""Gated DeltaNet-2: Kimi Delta Attention with beta in two, to erase per key channel and to write per value channel.

S' = Diag(e^log_decay) S            S = S' + k (write * v - S'^T (erase * k))^T            o = S^T q
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lineate import checks
from lineate.call import Inputs
from lineate.layers.by_hand import ByHand, HandMade, one_head
from lineate.layers.configs import LinearConfig
from lineate.layers.linear import LINEAR_SHARD, init_decay
from lineate.layers.mixer import LinearMixer
from lineate.layers.projection import project
from lineate.layers.registry import Look, MixerKind, register
from lineate.layers.step.spec import StepSpec
from lineate.rule import GATED_DELTA_2, compute_dtype, decay_of_gate
from lineate.torch_ops.elementwise import elementwise


class GatedDeltaNet2(LinearMixer):
    """KimiDeltaAttention with erase = beta_scale sigmoid(b), write = sigmoid(w); in_proj is q | k | v | f | z | b | w.

    decay_proj(f) is the raw decay per channel; the output gate is sigmoid(gate_proj(z)) unless gate_activation says
    otherwise. With a rank of 0, f or z itself is the decay or the gate, of full rank.

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
        beta_scale: erase lies in (0, beta_scale); 2 allows negative eigenvalues.
        norm_eps: epsilon of the output norm.
        gate_activation: activation of the output gate, "silu" or "sigmoid".
        gate_lower_bound: if given, log_decay lies in (gate_lower_bound, 0); it must be below 0.
    """

    rule = GATED_DELTA_2
    gates = ("decay_rank", "gate_rank", "keys", "written")
    options = ("beta_scale", "decay_rank", "gate_rank", "gate_bias", "gate_lower_bound")
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
    ) -> None:
        checks.check_lower_bound(gate_lower_bound, "gate_lower_bound")
        checks.check_choice("gate_activation", gate_activation, ("silu", "sigmoid"))
        super().__init__(
            hidden_size, heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size,
            norm_eps=norm_eps, gate_activation=gate_activation, decay_rank=decay_rank, gate_rank=gate_rank,
            gate_bias=gate_bias,
        )  # fmt: skip
        self.beta_scale, self.gate_lower_bound = beta_scale, gate_lower_bound
        self.reset_parameters()

    def add_gates(self) -> None:
        decays, values = self.value_heads * self.key_dim, self.value_heads * self.value_dim
        self.decay_proj = nn.Linear(self.decay_rank, decays, bias=False) if self.decay_rank else None
        self.gate_proj = nn.Linear(self.gate_rank, values, bias=self.gate_bias) if self.gate_rank else None
        self.A_log = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads, self.key_dim, dtype=torch.float32))

    def reset_parameters(self) -> None:
        init_decay(self.A_log, self.dt_bias, self.gate_lower_bound is not None)

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        f, _, b, w = gates
        keys, values = (self.value_heads, self.key_dim), (self.value_heads, self.value_dim)
        decay = (f if self.decay_proj is None else project(self.decay_proj, f)).unflatten(-1, keys)
        wide = compute_dtype(decay.dtype)
        log_decay = decay_of_gate(decay.to(wide), self.A_log, self.dt_bias, self.gate_lower_bound)
        erase = self.beta_scale * elementwise(torch.sigmoid, b.to(wide).unflatten(-1, keys))
        write = elementwise(torch.sigmoid, w.to(wide).unflatten(-1, values))
        return Inputs(q=q, k=k, v=v, log_decay=log_decay, erase=erase, write=write)

    def output_gate(self, gates: Sequence[Tensor]) -> Tensor:
        return gates[1] if self.gate_proj is None else project(self.gate_proj, gates[1])


def _by_hand(x: HandMade) -> Inputs:
    k, v = one_head(x.k), one_head(x.v)
    erase, write = (one_head(rate[:, None]) for rate in (x.erase, x.write))
    return Inputs(
        q=k, k=k, v=v, log_decay=one_head(x.log_decays), erase=erase.expand_as(k), write=write.expand_as(v)
    )  # fmt: skip


GATED_DELTA_2_KIND = register(
    MixerKind(
        letter="J",
        name="gated_delta_rule_2",
        label="Gated DeltaNet-2",
        short="gdn2",
        config=LinearConfig,
        section="linear",
        make=GatedDeltaNet2.from_config,
        trace=GatedDeltaNet2.trace,
        by_hand=ByHand(_by_hand, "erases and writes at rates of their own"),
        look=Look("#117733", "X", (0, (1, 1))),
        shard=LINEAR_SHARD,
        step=StepSpec(
            GatedDeltaNet2, GATED_DELTA_2, ("decay", "gate", "erase", "write"), features="unit", decay="channel",
            decay_gate="speed", low_rank=("decay", "gate"),
        ),
    )
)  # fmt: skip

"""HGRN2: gated linear attention whose key is what the memory forgets, with a learned lower bound of the decay.

    decay = l + (1 - l) sigmoid(f)        k = 1 - decay = (1 - l) sigmoid(-f)        q = silu(q)
    S = Diag(decay) S + k v^T             o = S^T q / sqrt(k)
    out = out_proj(RMSNorm(o))            over the channels of all heads; * act(z) if there is an output gate

l lies in (0, 1), one a key channel: a layer keeps at least this share of its memory at every token. Published models
have bounds that grow from layer to layer, 0 in the first one.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.call import Inputs
from lineate.layers.configs import LinearConfig
from lineate.layers.linear import LINEAR_SHARD
from lineate.layers.mixer import LinearMixer
from lineate.layers.registry import Look, MixerKind, ModelSizes, register
from lineate.layers.variants.norm import AllHeadsNorm
from lineate.parallel.tensor.shards import Cut, Part
from lineate.rule import GATED_LINEAR, compute_dtype
from lineate.torch_ops.elementwise import elementwise

FIRST_BOUNDS = 0.02, 0.9
"""The bounds of a new layer are evenly spaced between these over the channels of a head; it does not know its depth."""


class HGRN2(LinearMixer):
    """S = Diag(decay) S + (1 - decay) v^T, decay = l + (1 - l) sigmoid(f), l learned; in_proj is q | f | v | z.

    There is no short convolution. `lower_bound` has the logits of l; a logit of -inf is a bound of 0.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        heads: key heads.
        value_heads: value heads, a multiple of heads; None is heads.
        key_dim: channels of a key; None is hidden_size / heads.
        value_dim: channels of a value; None is key_dim.
        norm_eps: epsilon of the output norm, which is one over all heads.
        gate_activation: activation of the output gate, "silu", "sigmoid" or "none" (no gate).
        learned_bound: whether the decay has the lower bound l; otherwise l is 0.
    """

    rule = GATED_LINEAR
    gates = ("values",)
    lower_bound: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        value_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        norm_eps: float = 1e-6,
        gate_activation: str = "none",
        learned_bound: bool = True,
    ) -> None:
        super().__init__(
            hidden_size, heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_size=0,
            norm_eps=norm_eps, gate_activation=gate_activation,
        )  # fmt: skip
        bound = torch.empty(self.heads * self.key_dim, dtype=torch.float32)
        self.lower_bound = nn.Parameter(bound) if learned_bound else None
        self.reset_parameters()
        self.norm = AllHeadsNorm(self.value_heads * self.value_dim, norm_eps, activation=gate_activation)

    @classmethod
    def from_config(cls, model: ModelSizes, config: LinearConfig) -> "HGRN2":
        """Make the mixer that a configuration describes, with the hidden size of the model."""
        return cls(
            model.hidden_size, config.heads, value_heads=config.value_heads, key_dim=config.key_dim,
            value_dim=config.value_dim, norm_eps=config.norm_eps, gate_activation=config.gate_activation,
            learned_bound=config.learned_bound,
        )  # fmt: skip

    def reset_parameters(self) -> None:
        if self.lower_bound is not None and not self.lower_bound.is_meta:
            with torch.no_grad():
                spaced = torch.linspace(*FIRST_BOUNDS, self.key_dim, device=self.lower_bound.device)
                self.lower_bound.copy_(spaced.logit().repeat(self.heads))

    def cuts(self) -> dict[str, Cut]:
        """Return how the parameters are shared out among ranks, by heads."""
        keys = Part(self.heads * self.key_dim, self.heads)
        values = Part(self.value_heads * self.value_dim, self.value_heads)
        cuts = super().cuts() | {"norm.weight": Cut(0, (values,))}
        return cuts if self.lower_bound is None else cuts | {"lower_bound": Cut(0, (keys,))}

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        """Return the arguments of the rule; k is f, from which the decay and the key are made."""
        f = k.to(compute_dtype(k.dtype))
        key, log_decay = elementwise(torch.sigmoid, -f), elementwise(F.logsigmoid, f)
        if self.lower_bound is not None:
            bound = self.lower_bound.to(f.dtype).view(self.heads, self.key_dim)
            key = elementwise(torch.sigmoid, -bound) * key
            bound, above = elementwise(F.logsigmoid, bound), elementwise(F.logsigmoid, -bound) + log_decay
            near = elementwise(F.softplus, -(bound - above).abs())
            log_decay = (torch.maximum(bound, above) + near).clamp(max=0)  # log(l + (1 - l) sigmoid(f))
        log_decay = log_decay.repeat_interleave(self.value_heads // self.heads, 2)  # b t hv k
        return Inputs(q=elementwise(F.silu, q), k=key.to(v.dtype), v=v, log_decay=log_decay)


HGRN2_KIND = register(
    MixerKind(
        letter="H",
        name="hgrn2",
        label="HGRN2",
        short="hgrn2",
        config=LinearConfig,
        section="linear",
        make=HGRN2.from_config,
        trace=HGRN2.trace,
        look=Look("#882255", "h", (0, (3, 1, 1, 1, 1, 1))),
        rule="gated_linear_attention",
        shard=LINEAR_SHARD,
    )
)

"""Gated DeltaProduct: Gated DeltaNet with n keys and values a token.

    S' = e^log_decay S            S = S' + beta_j k_j (v_j - S^T k_j)^T   for j = 1 .. n            o = S^T q

Megatron-LM's mixer is this one with writes=3, keys for groups of heads (heads < value_heads) and group_norm=True;
from_megatron reads its tensors.

n writes with beta near 2 are n reflections, so one layer follows permutations of n + 1 items (docs/derivation.md,
section 10).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lineate.call import Inputs
from lineate.layers.by_hand import ByHand, HandMade, one_head
from lineate.layers.configs import LinearConfig
from lineate.layers.linear import LINEAR_SHARD, init_decay
from lineate.layers.mamba2 import GroupedGatedNorm
from lineate.layers.mixer import LinearMixer
from lineate.layers.registry import Look, MixerKind, register
from lineate.layers.step.spec import StepSpec
from lineate.parallel.tensor.shards import Cut, Part
from lineate.rule import GATED_DELTA_PRODUCT, compute_dtype, decay_of_gate
from lineate.torch_ops.elementwise import elementwise


class GatedDeltaProduct(LinearMixer):
    """S' = e^log_decay S, then n corrections a token; in_proj is q | k_1 .. k_n | v_1 .. v_n | z | b_1 .. b_n | a.

    beta = beta_scale sigmoid(b), log_decay = -exp(A_log) softplus(a + dt_bias) per head.

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
        writes: n.
        forgets: whether there is a decay; without one it is DeltaProduct, and in_proj has no a.
        group_norm: whether the output norm is one over the heads that share a key, after the output gate, which is then
            "silu"; otherwise it is one a head, before the gate.
    """

    rule = GATED_DELTA_PRODUCT
    options = ("beta_scale", "writes", "forgets", "rate", "group_norm")
    normalize_qk = True
    A_log: nn.Parameter | None
    dt_bias: nn.Parameter | None

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
        writes: int = 2,
        forgets: bool = True,
        rate: str = "beta",
        group_norm: bool = False,
    ) -> None:
        if group_norm and gate_activation != "silu":
            raise ValueError(f"gate_activation must be 'silu' with group_norm=True, got {gate_activation!r}")
        self.gates = ("values", "writes", "heads") if forgets else ("values", "writes")
        super().__init__(
            hidden_size, heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size,
            norm_eps=norm_eps, gate_activation=gate_activation, writes=writes,
        )  # fmt: skip
        self.beta_scale = beta_scale
        self.set_rate(rate)
        if group_norm:
            size = self.value_heads * self.value_dim
            self.norm = GroupedGatedNorm(size, self.heads, norm_eps)  # type: ignore[assignment]
        self.reset_parameters()

    def add_gates(self) -> None:
        self.A_log = self.dt_bias = None
        if "heads" in self.gates:
            self.A_log = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32))
            self.dt_bias = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32))

    def reset_parameters(self) -> None:
        if self.A_log is not None and self.dt_bias is not None:
            init_decay(self.A_log, self.dt_bias)

    def cuts(self) -> dict[str, Cut]:
        """Return how the parameters are shared out among ranks, by heads."""
        if not isinstance(self.norm, GroupedGatedNorm):
            return super().cuts()
        values = Part(self.value_heads * self.value_dim, self.value_heads)
        return super().cuts() | {"norm.weight": Cut(0, (values,))}

    def split_heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cut q | k | v into heads: q `b t h k`, k `b t n h k`, v `b t n hv v`."""
        keys, n = self.heads * self.key_dim, self.writes
        q, k, v = mixed.split((keys, n * keys, n * self.value_heads * self.value_dim), -1)
        return (
            q.unflatten(-1, (self.heads, self.key_dim)),
            k.unflatten(-1, (n, self.heads, self.key_dim)),
            v.unflatten(-1, (n, self.value_heads, self.value_dim)),
        )

    def rule_inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor]) -> Inputs:
        b = gates[1].unflatten(-1, (self.writes, self.value_heads))
        beta = self.beta_scale * elementwise(torch.sigmoid, b.to(compute_dtype(b.dtype)))
        log_decay = None
        if self.A_log is not None:
            a = gates[2].to(compute_dtype(gates[2].dtype))
            log_decay = decay_of_gate(a, self.A_log, self.dt_bias, None)
        return self.with_rate(Inputs(q=q, k=k, v=v, log_decay=log_decay, beta=beta))


def from_megatron(mixer: GatedDeltaProduct, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state_dict of a mixer from that of Megatron-LM's GatedDeltaProductMixer.

    Megatron's in_proj is z | v_1 .. v_n | k_1 .. k_n | q | b_1 .. b_n | a, and its convolution is over v | k | q. The
    tensors are whole, joined over tensor-parallel ranks. The norm before in_proj is a part of the block.

    >>> mixer = GatedDeltaProduct(hidden, groups, value_heads=heads, key_dim=state, value_dim=dim, writes=3,
    ...                           group_norm=True, norm_eps=1e-5)
    >>> mixer.load_state_dict(from_megatron(mixer, tensors))

    Args:
        mixer: the mixer, with group_norm, a decay and a convolution.
        tensors: in_proj.weight, conv1d.weight, A_log, dt_bias, norm.weight and out_proj.weight; of other names, only
            biases are refused.
    """
    if mixer.A_log is None or mixer.conv is None or not isinstance(mixer.norm, GroupedGatedNorm):
        raise ValueError("mixer must have a decay, a convolution and group_norm=True, as Megatron's, got another one")
    if biases := sorted({"in_proj.bias", "conv1d.bias", "out_proj.bias"} & set(tensors)):
        raise ValueError(f"tensors must have no bias of a projection or convolution, got {', '.join(biases)}")
    own = {name: x.shape for name, x in mixer.state_dict().items()}
    taken = {"conv.weight" if name == "conv1d.weight" else name: x for name, x in tensors.items()}
    if "conv.weight" in taken:
        taken["conv.weight"] = taken["conv.weight"].squeeze(1)  # channels 1 taps
    for name, shape in own.items():
        if name not in taken or taken[name].shape != shape:
            got = "none" if name not in taken else tuple(taken[name].shape)
            raise ValueError(f"tensors must have {name} of shape {tuple(shape)} (conv1d for conv), got {got}")
    keys, n = mixer.heads * mixer.key_dim, mixer.writes
    values = mixer.value_heads * mixer.value_dim
    z, v, k, q, b, a = taken["in_proj.weight"].split(
        (values, n * values, n * keys, keys, n * mixer.value_heads, mixer.value_heads)
    )
    taken["in_proj.weight"] = torch.cat((q, k, v, z, b, a))
    v, k, q = taken["conv.weight"].split((n * values, n * keys, keys))
    taken["conv.weight"] = torch.cat((q, k, v))
    return {name: taken[name] for name in own}


def _by_hand(x: HandMade) -> Inputs:
    """Join every two writes in one token, which forgets before the first of them; a step that forgets is a token."""
    second, log_decay = False, x.log_decay.clone()
    for i, writes in enumerate(x.k.any(-1).tolist()):
        if second and writes:
            log_decay[i] = 0.0
        second = writes and not second
    k = one_head(x.k)
    return Inputs(q=k, k=k, v=one_head(x.v), log_decay=one_head(log_decay), beta=one_head(x.beta))


DELTA_PRODUCT_KIND = register(
    MixerKind(
        letter="U",
        name="gated_delta_product",
        label="Gated DeltaProduct",
        short="product",
        short_label="DeltaProduct",
        config=LinearConfig,
        section="linear",
        make=GatedDeltaProduct.from_config,
        trace=GatedDeltaProduct.trace,
        by_hand=ByHand(_by_hand, "two writes a token; forgets before the first"),
        look=Look("#332288", "P", (0, (5, 2))),
        shard=LINEAR_SHARD,
        step=StepSpec(
            GatedDeltaProduct, GATED_DELTA_PRODUCT, ("gate", "write", "decay"), features="unit", decay="head",
            decay_gate="speed",
        ),
    )
)  # fmt: skip

"""Gated DeltaProduct: Gated DeltaNet with n keys and values a token.

    S' = e^log_decay S            S = S' + beta_j k_j (v_j - S^T k_j)^T   for j = 1 .. n            o = S^T q

n writes with beta near 2 are n reflections, so one layer follows permutations of n + 1 items (docs/derivation.md,
section 10).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lineate.call import Inputs
from lineate.layers.configs import LinearConfig
from lineate.layers.linear import LINEAR_SHARD, init_decay
from lineate.layers.mixer import LinearMixer
from lineate.layers.registry import Look, MixerKind, register
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
        norm_eps: epsilon of the output norm.
        gate_activation: activation of the output gate, "silu", "sigmoid" or "none" (no gate).
        writes: n.
        forgets: whether there is a decay; without one it is DeltaProduct, and in_proj has no a.
    """

    rule = GATED_DELTA_PRODUCT
    options = ("beta_scale", "writes", "forgets")
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
    ) -> None:
        self.gates = ("values", "writes", "heads") if forgets else ("values", "writes")
        super().__init__(
            hidden_size, heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size,
            norm_eps=norm_eps, gate_activation=gate_activation, writes=writes,
        )  # fmt: skip
        self.beta_scale = beta_scale
        self.reset_parameters()

    def add_gates(self) -> None:
        self.A_log = self.dt_bias = None
        if "heads" in self.gates:
            self.A_log = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32))
            self.dt_bias = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32))

    def reset_parameters(self) -> None:
        if self.A_log is not None and self.dt_bias is not None:
            init_decay(self.A_log, self.dt_bias)

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
        return Inputs(q=q, k=k, v=v, log_decay=log_decay, beta=beta)


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
        look=Look("#332288", "P", (0, (5, 2))),
        shard=LINEAR_SHARD,
    )
)

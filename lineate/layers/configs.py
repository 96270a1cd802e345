"""The sizes of the mixers: one frozen dataclass for each group of mixers that share them.

`check_sizes` raises if fields do not fit each other; `describe` returns one readable line. A field's metadata may
have `choices`, the values it takes, `least`, its smallest number, and `negative`, if it is below 0
(lineate/models/fields.py reads them).
"""

import math
from dataclasses import dataclass, field

FEATURE_MAPS = ("identity", "elu+1", "relu", "product", "t2r", "hedgehog")
"""The feature maps of linear attention (lineate/layers/variants/features.py)."""
WRITING_RATES = ("beta", "exact", "kaczmarz")
"""The rates of writing of delta rules; all but the first are those of lineate/ops/rates.py."""


@dataclass(frozen=True)
class LinearConfig:
    """The sizes of the mixers with a fixed-size memory.

    Args:
        heads: key heads.
        value_heads: value heads, a multiple of heads; each key head serves value_heads / heads of them.
        key_dim: channels of a key.
        value_dim: channels of a value.
        conv_size: tokens that the short convolution sees; 0 means no convolution (H has none).
        decay_rank: width of the low-rank projection to the decay per channel (K, R); None is value_dim, 0 (K) is none.
        gate_rank: the same for the output gate (K); None is value_dim, 0 is none.
        gate_bias: whether the projection behind gate_rank has a bias (K).
        beta_scale: beta lies in (0, beta_scale); 2 allows negative eigenvalues.
        rate: the rate of writing (D, G, K, U): "beta", with unit keys, or, with keys of any length, "exact" (EFLA) or
            "kaczmarz" (lineate/ops/rates.py).
        gate_lower_bound: if given, log_decay lies in (gate_lower_bound, 0) (G, K); GLM-5-Next and Ring have -5.
        norm_eps: epsilon of the output norm.
        gate_activation: activation of the output gate, "silu" or "sigmoid" (published KDA); "none" (not K) is no gate.
        feature_map: feature map of linear attention (L), "identity", "elu+1", "relu", "product", "t2r" or "hedgehog"
            (layers/variants/features.py); the last three have weights.
        normalize: whether linear attention is divided by q . (sum of keys) (L).
        sum_to_one: which features are divided by their sum (L): "q", "k", "qk", or "" for none of them.
        learned_bound: whether the decay of HGRN2 has a learned lower bound (H).
        decay: the constant decays of retention (O), "retnet" or "lightning".
        rope_theta: base of the rotation of q and k in retention (O); None: they carry no positions.
        qk_activation: activation of q and k in retention (O), "none", "silu" or "relu".
        value_activation: activation of v in retention (O), "none" or "silu".
        writes: keys and values a token of Gated DeltaProduct (U).
        forgets: whether Gated DeltaProduct has a decay (U).
        probe: what Comba (Q) compares, a "unit" key (flash-linear-attention) or one that is "scaled" (its equation).
        precondition: the bound of the factor of written keys (I, F), above 1; the factor lies between 1 / it and it.
        norm: whether the output norm of retention (O) is one a "head" or one over "all" heads.
        group_norm: whether the output norm of U is one over the heads that share a key, after the output gate.
    """

    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int = field(default=4, metadata={"least": 0})
    decay_rank: int | None = field(default=None, metadata={"least": 0})
    gate_rank: int | None = field(default=None, metadata={"least": 0})
    gate_bias: bool = False
    beta_scale: float = 1.0
    gate_lower_bound: float | None = field(default=None, metadata={"negative": True})
    norm_eps: float = 1e-6
    gate_activation: str = field(default="silu", metadata={"choices": ("silu", "sigmoid", "none")})
    feature_map: str = field(default="elu+1", metadata={"choices": FEATURE_MAPS})
    normalize: bool = True
    sum_to_one: str = field(default="", metadata={"choices": ("", "q", "k", "qk")})
    learned_bound: bool = True
    decay: str = field(default="retnet", metadata={"choices": ("retnet", "lightning")})
    rope_theta: float | None = None
    qk_activation: str = field(default="none", metadata={"choices": ("none", "silu", "relu")})
    value_activation: str = field(default="none", metadata={"choices": ("none", "silu")})
    norm: str = field(default="head", metadata={"choices": ("head", "all")})
    writes: int = field(default=2, metadata={"least": 1})
    forgets: bool = True
    group_norm: bool = False
    probe: str = field(default="unit", metadata={"choices": ("unit", "scaled")})
    rate: str = field(default="beta", metadata={"choices": WRITING_RATES})
    precondition: float = 1.5

    def check_sizes(self) -> None:
        """Raise if value heads cannot be divided among the key heads."""
        if self.value_heads % self.heads:
            raise ValueError(
                f"LinearConfig.value_heads must be a multiple of heads = {self.heads}, got {self.value_heads}"
            )
        if self.rope_theta is not None and self.key_dim % 2:
            raise ValueError(f"LinearConfig.key_dim must be even to be rotated, got {self.key_dim}")
        if not 1 < self.precondition < math.inf:
            raise ValueError(f"LinearConfig.precondition must be finite and above 1, got {self.precondition}")

    def describe(self) -> str:
        """Return the sizes in words."""
        heads = f"{self.heads} key heads of {self.key_dim}, {self.value_heads} value heads of {self.value_dim}"
        return f"{heads}, convolution over {self.conv_size} tokens"


@dataclass(frozen=True)
class MambaConfig:
    """The sizes of Mamba-2 (S).

    Args:
        heads: heads of x, each with a decay of its own; their number times head_dim is the inner width.
        head_dim: channels of a head of x.
        state_dim: channels of B and C, the keys and queries.
        groups: heads of B and C, a divisor of heads; each serves heads / groups heads of x.
        conv_size: tokens that the short convolution over x, B and C sees; 0 means no convolution.
        conv_bias: whether that convolution has a bias.
        bias: whether the projections have a bias.
        norm_groups: groups of the inner channels that the output norm normalises separately; 0, on one of
            several ranks: they are a part of one group.
        gate_first: whether the norm follows the output gate; otherwise the gate multiplies what was normalised.
        step_least: smallest step dt, at least 0: with a step below 0 the memory would grow.
        step_most: largest step dt; None means no bound.
        norm_eps: epsilon of the output norm.
    """

    heads: int
    head_dim: int
    state_dim: int
    groups: int = 1
    conv_size: int = field(default=4, metadata={"least": 0})
    conv_bias: bool = True
    bias: bool = False
    norm_groups: int = field(default=1, metadata={"least": 0})
    gate_first: bool = True
    step_least: float = 0.0
    step_most: float | None = None
    norm_eps: float = 1e-5

    def check_sizes(self) -> None:
        """Raise if heads or channels cannot be cut into these groups, or if no step lies within the bounds."""
        if self.heads % self.groups:
            raise ValueError(f"MambaConfig.heads must be a multiple of groups = {self.groups}, got {self.heads}")
        if self.norm_groups and self.heads * self.head_dim % self.norm_groups:
            raise ValueError(
                f"MambaConfig.norm_groups must divide heads x head_dim = {self.heads * self.head_dim}, got "
                f"{self.norm_groups}"
            )
        if not 0 <= self.step_least < math.inf:
            raise ValueError(f"MambaConfig.step_least must be finite and at least 0, got {self.step_least}")
        if self.step_most is not None and not self.step_most >= self.step_least:
            raise ValueError(
                f"MambaConfig.step_most must be at least step_least = {self.step_least}, got {self.step_most}"
            )

    def describe(self) -> str:
        """Return the sizes in words."""
        states = f"states of {self.state_dim} in {self.groups} group{'s' * (self.groups > 1)}"
        return f"{self.heads} heads of {self.head_dim}, {states}, convolution over {self.conv_size} tokens"


def rwkv_rank(hidden_size: int, factor: float) -> int:
    """Return factor * sqrt(hidden_size), rounded to a multiple of 32 that is at least 32."""
    return max(32, round(factor * math.sqrt(hidden_size) / 32) * 32)


@dataclass(frozen=True)
class RwkvConfig:
    """The sizes of RWKV-7 (V).

    Args:
        heads: heads, of queries, keys and values.
        head_dim: channels of a key.
        value_dim: channels of a value; None is head_dim.
        decay_rank: width of the low-rank projection to the decay per channel.
        rate_rank: width of the low-rank projection to the learning rate per channel.
        value_rank: width of the low-rank projection that mixes values with those of the first layer; 0: the layer is
            the first one. (The first layer with the letter V gets 0 by itself.)
        gate_rank: width of the low-rank projection to the output gate.
        norm_eps: epsilon of the output norm.
    """

    heads: int
    head_dim: int
    value_dim: int | None = None
    decay_rank: int = 64
    rate_rank: int = 64
    value_rank: int = field(default=32, metadata={"least": 0})
    gate_rank: int = 128
    norm_eps: float = 64e-5

    @staticmethod
    def of_width(hidden_size: int, heads: int, head_dim: int) -> "RwkvConfig":
        """Return the sizes with the ranks that the authors take for a number of channels.

        Args:
            hidden_size: channels of the residual stream.
            heads: heads.
            head_dim: channels of a key.
        """
        decay, value, gate = (rwkv_rank(hidden_size, factor) for factor in (2.5, 1.7, 5.0))
        return RwkvConfig(heads, head_dim, decay_rank=decay, rate_rank=decay, value_rank=value, gate_rank=gate)

    def describe(self) -> str:
        """Return the sizes in words."""
        values = "" if self.value_dim is None else f", values of {self.value_dim}"
        ranks = f"decay {self.decay_rank}, rate {self.rate_rank}, value {self.value_rank}, gate {self.gate_rank}"
        return f"{self.heads} heads of {self.head_dim}{values}, ranks: {ranks}"


@dataclass(frozen=True)
class MemoryConfig:
    """The sizes of the mixers whose memory learns while it reads (T, P, N, C, E).

    Args:
        heads: heads, each with a memory of its own.
        head_dim: channels of a head.
        chunk: tokens that share one gradient point (E: between two restored ridges); None is the mixer's default.
        conv_size: tokens that the short convolution sees; 0 means no convolution.
        titans: Titans' memory (N), "linear" or "mlp".
        window: tokens that LaCT's attention (C) sees; None is its chunk, 0 means no attention.
    """

    heads: int
    head_dim: int
    chunk: int | None = None
    conv_size: int = field(default=4, metadata={"least": 0})
    titans: str = field(default="linear", metadata={"choices": ("linear", "mlp")})
    window: int | None = field(default=None, metadata={"least": 0})

    def describe(self) -> str:
        """Return the sizes in words."""
        chunk = "" if self.chunk is None else f", chunks of {self.chunk}"
        return f"{self.heads} heads of {self.head_dim}{chunk}"


@dataclass(frozen=True)
class AttentionConfig:
    """The sizes of softmax attention (A).

    Args:
        heads: query heads, a multiple of kv_heads.
        kv_heads: heads of keys and values.
        head_dim: channels of a head.
        rotary_dim: how many of a head's first channels are rotated; 0 means no positions.
        rope_theta: base of the rotation's frequencies.
        gated: whether the output is multiplied by sigmoid(gate) before the output projection.
        qk_norm: RMSNorm of q and k: of every "head", of all heads together ("full"), or None.
        bias: whether the projections have a bias.
        scale: multiplies the scores; None is 1/sqrt(head_dim).
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int = 0
    rope_theta: float = 10000.0
    gated: bool = True
    qk_norm: str | None = field(default="head", metadata={"choices": ("head", "full", None)})
    bias: bool = False
    scale: float | None = None

    def check_sizes(self) -> None:
        """Raise if heads do not divide each other, or if the rotated channels are odd or too many."""
        if self.heads % self.kv_heads:
            raise ValueError(
                f"AttentionConfig.heads must be a multiple of kv_heads = {self.kv_heads}, got {self.heads}"
            )
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"AttentionConfig.rotary_dim must be even and at most head_dim = {self.head_dim}, got {self.rotary_dim}"
            )

    def describe(self) -> str:
        """Return the sizes in words."""
        rope = f"{self.rotary_dim} rotated, base {self.rope_theta:g}" if self.rotary_dim else "no positions"
        gate = ", output gate" if self.gated else ""
        return f"{self.heads} heads of {self.head_dim}, {self.kv_heads} for keys and values, {rope}{gate}"


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention (M): keys and values are made from one latent vector a token.

    Args:
        heads: heads of queries, keys and values.
        rank: channels of the latent vector; the cache holds only it and rope_dim shared channels.
        nope_dim: channels of a key that come from the latent vector.
        rope_dim: channels of a key that all heads share.
        value_dim: channels of a value.
        rope_theta: base of the rotation of the shared channels; None: they carry no positions.
        norm_eps: epsilon of the latent vector's norm.
        gate: the output's sigmoid gate: one a "head", one a "channel", or None.
    """

    heads: int
    rank: int
    nope_dim: int = field(metadata={"least": 0})
    rope_dim: int = field(metadata={"least": 0})
    value_dim: int
    rope_theta: float | None = None
    norm_eps: float = 1e-6
    gate: str | None = field(default=None, metadata={"choices": ("head", "channel", None)})

    @property
    def gate_width(self) -> int:
        """The channels of the output gate."""
        return {None: 0, "head": self.heads, "channel": self.heads * self.value_dim}[self.gate]

    def check_sizes(self) -> None:
        """Raise if the rotated channels are odd."""
        if self.rope_theta is not None and self.rope_dim % 2:
            raise ValueError(f"LatentConfig.rope_dim must be even to be rotated, got {self.rope_dim}")

    def describe(self) -> str:
        """Return the sizes in words."""
        dims = f"keys {self.nope_dim} + {self.rope_dim} shared, values {self.value_dim}"
        gate = "" if self.gate is None else f", one output gate a {self.gate}"
        return f"{self.heads} heads, latent {self.rank}, {dims}{gate}"

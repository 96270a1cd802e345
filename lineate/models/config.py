"""What a hybrid language model is made of: sizes of its parts, and which layer has which mixer.

    HybridConfig(vocab_size=256, hidden_size=512, n_layers=8, pattern="GGGA", linear=..., attention=..., feed=...)

A pattern is tiled over the layers, one letter a layer:

    L linear attention      D DeltaNet          K Kimi Delta Attention      A (gated) softmax attention
    R gated linear          G Gated DeltaNet    E least squares             M latent attention (MLA)
    T TTT-Linear            P TTT-MLP           N Titans                    C LaCT
"""

from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from lineate.models.fields import MOST_CHANNELS, MOST_PIECES, check_fields, check_product, show

LINEAR_LETTERS = "LRDGK"
MEMORY_LETTERS = "TPNCE"
LETTERS = LINEAR_LETTERS + MEMORY_LETTERS + "AM"


@dataclass(frozen=True)
class LinearConfig:
    """The mixers with a fixed-size memory."""

    heads: int
    """Key heads."""
    value_heads: int
    """A multiple of heads: each key head serves value_heads / heads of them."""
    key_dim: int
    value_dim: int
    conv_size: int = 4
    """Tokens that the short convolution sees; 0: no convolution."""
    decay_rank: int | None = None
    """Width of the low-rank projection to the decay per channel (K, R); None is value_dim."""
    gate_rank: int | None = None
    """The same for the output gate (K); None is value_dim."""
    beta_scale: float = 1.0
    """beta lies in (0, beta_scale): 2 allows negative eigenvalues."""
    norm_eps: float = 1e-6
    gate_activation: str = "silu"
    """Of the output gate of all these mixers: "silu" or "sigmoid", which is what KDA (K) has where it is published."""
    feature_map: str = "elu+1"
    """Of linear attention (L): "identity" or "elu+1"."""


@dataclass(frozen=True)
class MemoryConfig:
    """The mixers whose memory learns while it reads (T, P, N, C, E)."""

    heads: int
    head_dim: int
    chunk: int | None = None
    """Tokens that share one gradient point (E: between two restored ridges); None is the mixer's own."""
    conv_size: int = 4
    """Tokens that the short convolution sees; 0: no convolution."""
    titans: str = "linear"
    """Titans' memory (N): "linear" or "mlp"."""
    window: int | None = None
    """Tokens that LaCT's attention (C) sees; None is its chunk, 0: no attention."""


@dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention (A)."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int = 0
    """The first so many channels of a head are rotated; 0: no positions."""
    rope_theta: float = 10000.0
    gated: bool = True
    """output * sigmoid(gate) before the output projection."""
    qk_norm: str | None = "head"
    """RMSNorm of q and k: of every "head", of all heads together ("full"), or none."""
    bias: bool = False


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention (M): keys and values are made from one latent vector a token."""

    heads: int
    rank: int
    """Of the latent vector, which is all that is kept (with rope_dim more)."""
    nope_dim: int
    """Channels of a key that come from the latent vector."""
    rope_dim: int
    """Channels of a key that all heads share."""
    value_dim: int
    rope_theta: float | None = None
    """Rotates the shared channels; None: they carry no positions."""
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class FeedConfig:
    """A dense feed-forward (SwiGLU)."""

    size: int


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts."""

    count: int
    active: int
    """Experts that a token goes to."""
    size: int
    shared_size: int = 0
    """Of the expert that every token goes to; 0: none."""
    shared_gate: bool = False
    """The shared expert is weighted by sigmoid(gate)."""
    scores: str = "softmax"
    """Of the router: "softmax", or "sigmoid" with a bias that counts for the choice alone."""
    renormalize: bool = True
    """The weights of a token's experts sum to 1."""
    scale: float = 1.0
    """Multiplies these weights."""
    groups: int = 1
    """Experts are chosen within the best active_groups of these (sigmoid scores)."""
    active_groups: int = 1


@dataclass(frozen=True)
class HybridConfig:
    """A hybrid language model."""

    vocab_size: int
    hidden_size: int
    n_layers: int
    pattern: str = "GGGA"
    """One letter a layer, tiled."""
    linear: LinearConfig | None = None
    memory: MemoryConfig | None = None
    attention: AttentionConfig | None = None
    latent: LatentConfig | None = None
    feed: FeedConfig | None = None
    """Of dense layers; needed unless every layer has experts."""
    experts: ExpertsConfig | None = None
    dense_layers: tuple[int, ...] = ()
    """Layers that have a dense feed-forward although there are experts."""
    norm_eps: float = 1e-6
    zero_centred_norm: bool = False
    """RMSNorm multiplies by 1 + weight."""
    norm_after: str = ""
    """Letters whose layers normalise what is added to the residual, not what is read from it."""
    tie_embeddings: bool = False
    initializer_range: float = 0.02
    max_position: int | None = None
    """The longest text it was trained on, if known. Nothing stops there."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    family: str = "lineate"
    """Where it came from: "lineate", or the model_type of its checkpoint."""
    letters: str = field(init=False)
    """The pattern, tiled: n_layers letters."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.pattern or set(self.pattern) - set(LETTERS):
            raise ValueError(f"pattern must be made of the letters {', '.join(LETTERS)}, got {show(self.pattern)}")
        repeats = -(-self.n_layers // len(self.pattern))
        object.__setattr__(self, "letters", (self.pattern * repeats)[: self.n_layers])
        parts = (("linear", LINEAR_LETTERS), ("memory", MEMORY_LETTERS), ("attention", "A"), ("latent", "M"))
        for name, letters in parts:
            used = [letter for letter in letters if letter in self.letters]
            if used and getattr(self, name) is None:
                raise ValueError(
                    f"{name} must be given for the letter {used[0]!r} of pattern {show(self.pattern)}, got None"
                )
        if set(self.norm_after) - set(LETTERS):
            raise ValueError(
                f"norm_after must be made of the letters {', '.join(LETTERS)}, got {show(self.norm_after)}"
            )
        inside = all(0 <= i < self.n_layers for i in self.dense_layers)
        if not inside or len(self.dense_layers) > self.n_layers:
            raise ValueError(f"dense_layers must lie in 0 .. {self.n_layers - 1}, got {show(self.dense_layers)}")
        if self.feed is None and (self.experts is None or self.dense_layers):
            raise ValueError("feed must be given, the size of the dense feed-forward, got None")
        for name in _PARTS:
            if (part := getattr(self, name)) is not None:
                _check_part(part)
                pieces = "count" if name == "experts" else "heads"
                check_product(f"n_layers x {name}.{pieces}", self.n_layers * getattr(part, pieces, 1), MOST_PIECES)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return self.experts is not None and layer not in self.dense_layers

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {name: value for name, value in asdict(self).items() if name != "letters"}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "HybridConfig":
        """From JSON; unknown keys are errors."""
        values = _known(cls, values, "config")
        for name, part in _PARTS.items():
            if isinstance(given := values.get(name), dict):
                values[name] = part(**_known(part, given, f"config.{name}"))
        for name in ("dense_layers", "eos_token_ids"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        return cls(**values)


_PARTS: dict[str, type[Any]] = {
    "linear": LinearConfig,
    "memory": MemoryConfig,
    "attention": AttentionConfig,
    "latent": LatentConfig,
    "feed": FeedConfig,
    "experts": ExpertsConfig,
}


def _known(part: type[Any], values: dict[str, Any], where: str) -> dict[str, Any]:
    """A copy of the values, if all of them are fields."""
    allowed = [f.name for f in fields(part) if f.init]
    if unknown := sorted(set(values) - set(allowed)):
        found = ", ".join(map(show, unknown[:8])) + ", ..." * (len(unknown) > 8)
        raise ValueError(f"{where} has unknown keys {found}; known are {', '.join(allowed)}")
    needed = [f.name for f in fields(part) if f.init and f.default is MISSING]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{where} must have {', '.join(needed)}, got none of the name {missing[0]!r}")
    return dict(values)


def _check_part(part: Any) -> None:
    """Fields are as declared, heads divide each other, and what is multiplied stays possible."""
    name = type(part).__name__
    check_fields(part, f"{name}.")
    heads = max(getattr(part, "heads", 0), getattr(part, "value_heads", 0))
    for f in fields(part):
        if f.name.endswith("_dim"):
            check_product(f"{name}: heads x {f.name}", heads * getattr(part, f.name))
    if isinstance(part, LinearConfig) and part.value_heads % part.heads:
        raise ValueError(f"LinearConfig.value_heads must be a multiple of heads = {part.heads}, got {part.value_heads}")
    if isinstance(part, AttentionConfig):
        if part.heads % part.kv_heads:
            raise ValueError(
                f"AttentionConfig.heads must be a multiple of kv_heads = {part.kv_heads}, got {part.heads}"
            )
        if part.rotary_dim % 2 or part.rotary_dim > part.head_dim:
            raise ValueError(
                f"AttentionConfig.rotary_dim must be even and at most head_dim = {part.head_dim}, got {part.rotary_dim}"
            )
    if isinstance(part, LatentConfig) and part.rope_theta is not None and part.rope_dim % 2:
        raise ValueError(f"LatentConfig.rope_dim must be even to be rotated, got {part.rope_dim}")
    if isinstance(part, ExpertsConfig):
        check_product(f"{name}: count x size", part.count * part.size, MOST_CHANNELS * 128)
        if part.active > part.count:
            raise ValueError(f"ExpertsConfig.active must be at most count = {part.count}, got {part.active}")
        within = part.count // part.groups  # experts of a group
        if part.groups > 1 and (
            part.scores != "sigmoid" or within < 2 or part.active > within * part.active_groups
        ):  # fmt: skip
            raise ValueError(
                f"ExpertsConfig.groups must leave at least 2 experts a group, enough for active = {part.active} in "
                f"active_groups = {part.active_groups}, with sigmoid scores; got {part.groups} of {part.count} and "
                f"{part.scores}"
            )
        if part.count % part.groups or part.active_groups > part.groups:
            raise ValueError(
                f"ExpertsConfig.groups must divide count = {part.count} and be at least active_groups = "
                f"{part.active_groups}, got {part.groups}"
            )

"""The configuration of a hybrid language model: sizes of its parts, and which layer has which mixer.

    HybridConfig(vocab_size=256, hidden_size=512, n_layers=8, pattern="GGGA", linear=..., attention=..., feed=...)

A pattern is tiled over the layers, one letter a layer:

    L linear attention      D DeltaNet          K Kimi Delta Attention      A (gated) softmax attention
    R gated linear          G Gated DeltaNet    E least squares             M latent attention (MLA)
    T TTT-Linear            P TTT-MLP           N Titans                    C LaCT
    S Mamba-2               H HGRN2             O retention (RetNet, lightning attention)
    V RWKV-7                J Gated DeltaNet-2  U Gated DeltaProduct        Q Comba
    I preconditioned G      F preconditioned K

Letters that lineate.layers.register has added are allowed too; `mixers` has their sizes, under the name of the kind.
"""

import json
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, get_origin, get_type_hints

from lineate.layers import kinds
from lineate.layers.configs import AttentionConfig, LatentConfig, LinearConfig, MambaConfig, MemoryConfig, RwkvConfig
from lineate.layers.feed import DENSE_KINDS, KINDS
from lineate.layers.registry import MixerKind, kind_of, letters
from lineate.models.fields import MOST_CHANNELS, MOST_PIECES, alternatives, check_fields, check_product, show

__all__ = [
    "AttentionConfig",
    "ExpertsConfig",
    "FeedConfig",
    "HybridConfig",
    "LatentConfig",
    "LinearConfig",
    "MambaConfig",
    "MemoryConfig",
    "RwkvConfig",
]


@dataclass(frozen=True)
class FeedConfig:
    """A dense feed-forward.

    Args:
        size: hidden channels.
        kind: "swiglu", down(silu(gate) * up), "relu2", down(relu(up)^2), or "channel_mix", RWKV's: relu2 behind a token
            shift, which adds the last token to the state of the layer.
    """

    size: int
    kind: str = field(default="swiglu", metadata={"choices": DENSE_KINDS})


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts.

    Args:
        count: how many experts there are.
        active: experts that a token goes to.
        size: hidden channels of an expert.
        shared_size: hidden channels of the expert that every token goes to; 0: there is none.
        shared_gate: whether the shared expert is weighted by sigmoid(gate).
        scores: of the router: "softmax", or "sigmoid" with a bias that counts for the choice alone.
        renormalize: whether the weights of a token's experts sum to 1.
        scale: multiplies these weights.
        groups: experts are chosen within the best active_groups of these (sigmoid scores).
        active_groups: groups that a token's experts come from.
        kind: of the experts, "swiglu" or "relu2", as in FeedConfig.
    """

    count: int
    active: int
    size: int
    shared_size: int = 0
    shared_gate: bool = False
    scores: str = field(default="softmax", metadata={"choices": ("softmax", "sigmoid")})
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    active_groups: int = 1
    kind: str = field(default="swiglu", metadata={"choices": KINDS})

    def check_sizes(self) -> None:
        """Raise if there are too few experts, or if they cannot be cut into these groups."""
        check_product("ExpertsConfig: count x size", self.count * self.size, MOST_CHANNELS * 128)
        if self.active > self.count:
            raise ValueError(f"ExpertsConfig.active must be at most count = {self.count}, got {self.active}")
        within = self.count // self.groups  # experts of a group
        if self.groups > 1 and (
            self.scores != "sigmoid" or within < 2 or self.active > within * self.active_groups
        ):  # fmt: skip
            raise ValueError(
                f"ExpertsConfig.groups must leave at least 2 experts a group, enough for active = {self.active} in "
                f"active_groups = {self.active_groups}, with sigmoid scores; got {self.groups} of {self.count} and "
                f"{self.scores}"
            )
        if self.count % self.groups or self.active_groups > self.groups:
            raise ValueError(
                f"ExpertsConfig.groups must divide count = {self.count} and be at least active_groups = "
                f"{self.active_groups}, got {self.groups}"
            )


@dataclass(frozen=True)
class HybridConfig:
    """A hybrid language model.

    Args:
        vocab_size: tokens of the vocabulary.
        hidden_size: channels of the residual stream.
        n_layers: blocks of a mixer and a feed-forward.
        pattern: one letter a layer, tiled.
        linear: sizes of the mixers with a fixed-size memory; needed if the pattern has one.
        mamba: sizes of Mamba-2; needed if the pattern has it.
        rwkv: sizes of RWKV-7; needed if the pattern has it.
        memory: sizes of the mixers whose memory learns; needed if the pattern has one.
        attention: sizes of softmax attention; needed if the pattern has it.
        latent: sizes of latent attention; needed if the pattern has it.
        feed: size of dense feed-forwards; needed if a layer has one.
        experts: sizes of the mixtures of experts; None: all layers are dense.
        dense_layers: layers that have a dense feed-forward although there are experts.
        mixer_only: layers that have a mixer and no feed-forward.
        norm: of the mixers' and feed-forwards' inputs and of the head's: "rms", or "layer", LayerNorm with a bias.
        norm_eps: epsilon of these norms.
        zero_centred_norm: whether RMSNorm multiplies by 1 + weight.
        norm_after: letters whose layers normalise their output, which is added to the residual, not their input.
        embedding_norm: whether the embeddings of the tokens go through a norm of their own.
        embedding_scale: multiplies the embeddings of the tokens.
        residual_scale: multiplies the output of a mixer or a feed-forward that is added to the residual stream.
        logit_scale: multiplies the logits.
        tie_embeddings: whether the embedding is the head too.
        initializer_range: standard deviation of the first weights.
        max_position: the longest sequence it was trained on, if known. Nothing stops there.
        bos_token_id: the token that begins a sequence, if there is one.
        eos_token_ids: tokens that end a sequence.
        pad_token_id: the token that fills a batch's rows, if there is one.
        family: where it came from: "lineate", or the model_type of its checkpoint.
        mixers: configurations of mixers that were registered by you, by the name of their kind.
        prediction: whether there is a head that predicts the tokens after the next, with a block of attention.
    """

    vocab_size: int
    hidden_size: int
    n_layers: int
    pattern: str = "GGGA"
    linear: LinearConfig | None = None
    mamba: MambaConfig | None = None
    rwkv: RwkvConfig | None = None
    memory: MemoryConfig | None = None
    attention: AttentionConfig | None = None
    latent: LatentConfig | None = None
    feed: FeedConfig | None = None
    experts: ExpertsConfig | None = None
    dense_layers: tuple[int, ...] = ()
    mixer_only: tuple[int, ...] = ()
    norm: str = field(default="rms", metadata={"choices": ("rms", "layer")})
    norm_eps: float = 1e-6
    zero_centred_norm: bool = False
    norm_after: str = ""
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    tie_embeddings: bool = False
    initializer_range: float = 0.02
    max_position: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    family: str = "lineate"
    mixers: dict[str, Any] = field(default_factory=dict, hash=False)
    prediction: bool = False
    letters: str = field(init=False)
    """The pattern, tiled: n_layers letters."""

    def __repr__(self) -> str:
        shown = [f.name for f in fields(self) if f.name != "mixers" or self.mixers]
        return f"HybridConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Accept pickles of earlier versions, which lack the newest fields."""
        missing = {f.name: f.default for f in fields(self) if f.init and f.default is not MISSING}
        self.__dict__.update(missing | {"mixers": {}} | state)

    def __post_init__(self) -> None:
        check_fields(self)
        _check_letters("pattern", self.pattern, least=1)
        repeats = -(-self.n_layers // len(self.pattern))
        object.__setattr__(self, "letters", (self.pattern * repeats)[: self.n_layers])
        object.__setattr__(self, "mixers", dict(self.mixers))
        self._check_mixers()
        for kind in self.mixer_kinds():
            self._check_given(kind)
        _check_letters("norm_after", self.norm_after)
        for name in ("dense_layers", "mixer_only"):
            listed = getattr(self, name)
            if not all(0 <= i < self.n_layers for i in listed) or len(listed) > self.n_layers:
                raise ValueError(f"{name} must lie in 0 .. {self.n_layers - 1}, got {show(listed)}")
        if both := set(self.dense_layers) & set(self.mixer_only):
            raise ValueError(f"mixer_only must have no layer of dense_layers, got {show(min(both))} in both")
        if self.feed is None and any(map(self.has_dense, range(self.n_layers))):
            raise ValueError("feed must be given, the size of the dense feed-forward, got None")
        if self.prediction and self.attention is None:
            raise ValueError("attention must be given for the block of prediction, got None")
        self._check_norms()
        self._check_shifts()
        given = {name: getattr(self, name) for name in _PARTS} | self.mixers
        for name, part in given.items():
            if part is not None:
                _check_part(part)
                pieces = "count" if name == "experts" else "heads"
                check_product(f"n_layers x {name}.{pieces}", self.n_layers * getattr(part, pieces, 1), MOST_PIECES)

    def _check_mixers(self) -> None:
        own = {kind.name: kind for kind in kinds() if kind.section is None}
        for name, part in self.mixers.items():
            if name not in own:
                known = ", ".join(own) or "none"
                raise ValueError(f"mixers must have names of registered kinds ({known}), got {show(name)}")
            if type(part) is not own[name].config:
                raise TypeError(f"mixers[{name!r}] must be a {own[name].config.__name__}, got {show(part)}")

    def _check_given(self, kind: MixerKind) -> None:
        if kind.section is None and kind.name not in self.mixers:
            raise ValueError(
                f"mixers must have {kind.name!r} for the letter {kind.letter!r} of pattern {show(self.pattern)}, got "
                f"{', '.join(map(repr, self.mixers)) or 'none'}; give mixers={{{kind.name!r}: "
                f"{kind.config.__name__}(...)}}; a preset takes it by "
                "dataclasses.replace(preset(...), pattern=..., mixers=...)"
            )
        if self.part(kind) is None:
            raise ValueError(
                f"{kind.section} must be given for the letter {kind.letter!r} of pattern {show(self.pattern)}, got None"
            )

    def _check_norms(self) -> None:
        if self.norm == "layer" and (self.zero_centred_norm or self.logit_scale != 1):
            raise ValueError(
                "norm must be 'rms' with zero_centred_norm or a logit_scale, got 'layer'; leave them at their defaults"
            )
        if self.embedding_norm and self.embedding_scale != 1:
            raise ValueError(f"embedding_scale must be 1 with embedding_norm, got {self.embedding_scale}")

    def _check_shifts(self) -> None:
        """Raise if a feed-forward with a state is in a layer whose mixer has a cache, which holds nothing else."""
        for layer, letter in enumerate(self.letters):
            shifts = self.has_dense(layer) and self.feed is not None and self.feed.kind == "channel_mix"
            if shifts and kind_of(letter).grows:
                raise ValueError(
                    f"feed.kind must be 'swiglu' or 'relu2' in a layer of {kind_of(letter).label}, whose state is a "
                    f"cache, got 'channel_mix' with {letter!r} in layer {layer}; choose another kind, or make these "
                    "layers mixer_only"
                )

    def mixer_kinds(self) -> list[MixerKind]:
        """Return the rows of the mixers that the layers have, in the registry's order."""
        return [kind for kind in kinds() if kind.letter in self.letters]

    def part(self, kind: MixerKind) -> Any:
        """Return the configuration of a kind of mixer; None if there is none."""
        return self.mixers.get(kind.name) if kind.section is None else getattr(self, kind.section)

    def part_of(self, layer: int) -> Any:
        """Return the configuration of a layer's mixer, which may be another one in the first layer of its kind."""
        letter = self.letters[layer]
        kind = kind_of(letter)
        part = self.part(kind)
        return part if kind.first is None or letter in self.letters[:layer] else kind.first(part)

    @property
    def carries(self) -> bool:
        """Whether layers hand something on to later ones in addition to the residual stream."""
        return any(kind_of(letter).first is not None for letter in set(self.letters))

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return self.experts is not None and layer not in self.dense_layers and layer not in self.mixer_only

    def has_dense(self, layer: int) -> bool:
        """Whether a layer has a dense feed-forward."""
        return layer not in self.mixer_only and not self.has_experts(layer)

    def of_prediction(self) -> "HybridConfig":
        """Return the configuration of the one block that prediction has: attention, with experts if there are any."""
        return replace(
            self, n_layers=1, pattern="A", dense_layers=(), mixer_only=(), norm_after="", mixers={}, prediction=False
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; for mixers of your own, also the modules to import first."""
        values = {name: value for name, value in asdict(self).items() if name not in ("letters", "mixers")}
        own = [kind for kind in kinds() if kind.name in self.mixers]
        own += [kind for kind in self.mixer_kinds() if kind.section is not None and not kind.built_in]
        if own:
            values["mixers"] = {kind.name: self._described(kind) for kind in own}
        return values

    def _described(self, kind: MixerKind) -> dict[str, Any]:
        entry = {"letter": kind.letter, "import": kind.module}
        if kind.section is None:
            part = self.mixers[kind.name]
            entry["fields"] = _values(part)
            _check_readable(kind.name, part, entry)
        return entry

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "HybridConfig":
        """Make a configuration from JSON values; unknown keys are errors.

        Args:
            values: as to_dict returns them.
        """
        values = _known(cls, values, "config")
        if values.get("mixers") is None:
            values.pop("mixers", None)
        elif isinstance(given := values["mixers"], dict):
            read = {name: _read_mixer(name, entry) for name, entry in given.items()}
            values["mixers"] = {name: part for name, part in read.items() if part is not None}
        return cls(**values)


_PARTS: dict[str, type[Any]] = {
    "linear": LinearConfig,
    "mamba": MambaConfig,
    "rwkv": RwkvConfig,
    "memory": MemoryConfig,
    "attention": AttentionConfig,
    "latent": LatentConfig,
    "feed": FeedConfig,
    "experts": ExpertsConfig,
}


def _check_letters(name: str, given: str, least: int = 0) -> None:
    if len(given) < least or set(given) - set(letters()):
        raise ValueError(f"{name} must be made of the letters {', '.join(letters())}, got {show(given)}")


def _read_mixer(name: str, entry: Any) -> Any:
    """Return the configuration of a registered kind from to_dict's values; None if another field holds it."""
    if not isinstance(entry, dict) or not {"letter", "import"} <= entry.keys() <= {"letter", "import", "fields"}:
        raise ValueError(f"config.mixers[{show(name)}] must have letter, import and fields, got {show(entry)}")
    letter, module = entry["letter"], entry["import"]
    kind = next((kind for kind in kinds() if kind.name == name), None)
    if kind is None or kind.letter != letter:
        named = isinstance(module, str) and len(module) <= 200 and all(x.isidentifier() for x in module.split("."))
        raise ValueError(
            f"config has the mixer {show(name)}, letter {show(letter)}, which is not registered; register it first: "
            + (f"import {module}" if named else "import the module that registers it")
            + f", or, on the command line, lineate --import {module if named else 'MODULE'} ..."
        )
    if "fields" not in entry:
        return None
    if not isinstance(entry["fields"], dict):
        raise ValueError(f"config.mixers[{name!r}].fields must be an object, got {show(entry['fields'])}")
    return kind.config(**_known(kind.config, entry["fields"], f"config.mixers[{name!r}]"))


def _values(part: Any) -> Any:
    """Return the fields of a dataclass that its constructor takes, and those of dataclasses inside; else the value."""
    if not is_dataclass(part):
        return part
    return {f.name: _values(getattr(part, f.name)) for f in fields(part) if f.init}


def _check_readable(name: str, part: Any, entry: dict[str, Any]) -> None:
    """Raise if the sizes of a user's mixer would not be the same after they were written and read."""
    why = ""
    try:
        read = _read_mixer(name, json.loads(json.dumps(entry)))
        for f in fields(part):
            before, after = getattr(part, f.name), getattr(read, f.name)
            if not _same(before, after):
                why = f"{f.name} would be {show(after)}, not {show(before)}"
    except (TypeError, ValueError) as error:
        why = str(error)
    if why:
        raise ValueError(
            f"mixers[{name!r}] cannot be written to config.json and read back: {why}; use fields of bool, int, float, "
            "str, tuple[int, ...] and frozen dataclasses"
        )


def _same(x: Any, y: Any) -> bool:
    """Whether two values are equal and of one type; dataclasses are compared field by field."""
    if type(x) is not type(y) or not is_dataclass(x):
        return type(x) is type(y) and bool(x == y)
    return all(_same(getattr(x, f.name), getattr(y, f.name)) for f in fields(x))


def _known(part: type[Any], values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a copy of the values, with tuples and dataclasses where the fields are; raise for an unknown key."""
    allowed = [f.name for f in fields(part) if f.init]
    if unknown := sorted(set(values) - set(allowed)):
        found = ", ".join(map(show, unknown[:8])) + ", ..." * (len(unknown) > 8)
        raise ValueError(f"{where} has unknown keys {found}; known are {', '.join(allowed)}")
    needed = [f.name for f in fields(part) if f.init and f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{where} must have {', '.join(needed)}, got none of the name {missing[0]!r}")
    hints = get_type_hints(part)
    return {name: _read(hints[name], value, f"{where}.{name}") for name, value in values.items()}


def _read(hint: Any, value: Any, where: str) -> Any:
    """Return a JSON value converted for a field with this annotation; a value of a wrong type is returned unchanged."""
    kinds = alternatives(hint)
    if isinstance(value, list) and any(tuple in (kind, get_origin(kind)) for kind in kinds):
        return tuple(value)
    inner = [kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)]
    if isinstance(value, dict) and len(inner) == 1:
        return inner[0](**_known(inner[0], value, where))
    return value


def _check_part(part: Any) -> None:
    """Raise unless fields have their types, heads divide each other, and products of sizes stay within bounds."""
    name = type(part).__name__
    check_fields(part, f"{name}.")
    heads = max(_sizes(part, ("heads", "value_heads")), default=0)
    for f in fields(part):
        if is_dataclass(inner := getattr(part, f.name)):
            _check_inner(f"{name}.{f.name}", inner)
        if f.name.endswith("_dim"):
            check_product(f"{name}: heads x {f.name}", heads * max(_sizes(part, (f.name,)), default=0))
    if hasattr(part, "check_sizes"):
        part.check_sizes()


def _check_inner(name: str, inner: Any) -> None:
    """Raise unless a dataclass inside a user's configuration is frozen and its fields have their types."""
    if isinstance(inner, type) or not type(inner).__dataclass_params__.frozen:
        got = inner.__name__ if isinstance(inner, type) else type(inner).__name__
        raise TypeError(f"{name} must be a value of a frozen dataclass, got {got}; use @dataclass(frozen=True)")
    _check_part(inner)


def _sizes(part: Any, names: Iterable[str]) -> list[int]:
    """Return those of these fields that are numbers; a user's own dataclass may have fields of other types."""
    return [value for name in names if isinstance(value := getattr(part, name, None), int)]

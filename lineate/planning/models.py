"""The model to plan: its sizes and its dtype, from a preset, a folder, a config.json or numbers."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lineate.console.names import nearest, user_path
from lineate.layers import kind_of
from lineate.models.config import (
    AttentionConfig,
    ExpertsConfig,
    FeedConfig,
    HybridConfig,
    LatentConfig,
    LinearConfig,
    MambaConfig,
    MemoryConfig,
    RwkvConfig,
)
from lineate.models.families import FAMILIES, OWN, make_plan, other_family, read_config, what_it_lacks
from lineate.models.families.gguf import open_gguf
from lineate.models.families.values import Values
from lineate.models.files.checkpoint import CONFIG, INDEX, SINGLE, Checkpoint, read_json
from lineate.models.files.gguf_header import find_gguf
from lineate.models.files.hub import fetch, is_hub_name
from lineate.models.files.loading import check_tensors, stored_dtype
from lineate.models.files.safetensors import CheckpointError
from lineate.models.files.tiled import written_format
from lineate.models.hybrid import empty_model
from lineate.models.nbytes import Formats
from lineate.models.presets import PRESETS, preset
from lineate.models.pretrained import stored_formats, usual_dtype
from lineate.quantised.format import FORMATS, Format, find_format
from lineate.torch_ops.dtypes import HALF_AND_SINGLE, parse_dtype

DTYPES: dict[str, torch.dtype] = HALF_AND_SINGLE | {
    "fp8": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}
"""Dtypes by name. fp8 and int8 take a byte an element; the scales of a quantised model are not counted."""
PLAIN_FAMILIES: dict[str, str | None] = {
    **dict.fromkeys(("ernie4_5", "granite", "granitemoe", "llama", "mistral", "mixtral", "phi3", "smollm3")),
    **dict.fromkeys(("qwen2", "qwen2_moe")),
    **dict.fromkeys(("qwen3", "qwen3_moe"), "head"),
    **dict.fromkeys(("flex_olmo", "minimax_m2", "olmo2", "olmoe"), "full"),
}
"""Families of plain softmax attention with SwiGLU, and the norm of their queries and keys."""


@dataclass(frozen=True)
class Split:
    """The numbers of ranks that share a model; split_model makes the model of one of them."""

    tensor: int = 1
    """Ranks that divide heads, channels and vocabulary among them."""
    context: int = 1
    """Ranks that divide each sequence among them."""
    replicas: int = 1
    """Copies of all this, each with sequences of its own."""

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.tensor * self.context * self.replicas


WHOLE = Split()
"""One rank has the whole model."""


@dataclass(frozen=True)
class Model:
    """A model to plan."""

    name: str
    """Its name in tables."""
    config: HybridConfig
    """Its sizes."""
    dtype: torch.dtype
    """The dtype of weights, cache and convolution state."""
    origin: str
    """"preset", "folder", "gguf", "config.json", "hub", "numbers" or "config"."""
    weights: str | None = None
    """The format of large weights, of lineate.quantised.FORMATS; None: they have the dtype too."""
    kept: tuple[tuple[str, str], ...] = ()
    """Names and formats of the quantised weights of a GGUF file; `weights` is then that of most of them."""
    split: Split = WHOLE
    """How ranks share it; the sizes are then those of one rank."""
    whole: HybridConfig | None = None
    """The sizes of the whole model, if tensor ranks share it."""

    @property
    def form(self) -> Format | None:
        """The format of large weights."""
        return None if self.weights is None else FORMATS[self.weights]

    @property
    def formats(self) -> Formats:
        """The format of large weights, or that of each one for a GGUF file."""
        return {name: FORMATS[form] for name, form in self.kept} if self.kept else self.form

    @property
    def weights_text(self) -> str | None:
        """The formats of large weights in words; None if there are none."""
        others = sorted({form for _, form in self.kept} - {self.weights})
        return None if self.weights is None else " and ".join([self.weights, *others])

    @property
    def dtype_name(self) -> str:
        """bfloat16, float32, ..."""
        return str(self.dtype).removeprefix("torch.")


def dtype_of(name: str | torch.dtype, argument: str = "dtype") -> torch.dtype:
    """Return the dtype of a name."""
    return parse_dtype(name, argument, DTYPES)


def check_size(name: str, value: int, smallest: int = 1) -> None:
    """Raise unless this is a whole number that is large enough."""
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ValueError(f"{name} must be a whole number of at least {smallest}, got {value!r}")


def read_model(
    source: str | Path | HybridConfig, dtype: str | None = None, pattern: str | None = None, weights: str | None = None
) -> Model:
    """Read the sizes and the dtype of a model that is to be planned; no weights are read.

    Args:
        source: A preset's name; a checkpoint's folder or a GGUF file (only headers are read); a folder with config.json
            alone; a config.json of lineate, of a family of lineate.models.families or of a model with plain softmax
            attention; a name on the hub (its config alone is fetched); or a HybridConfig.
        dtype: Dtype of the weights. None: as stored, else as config.json says; bfloat16 for published presets, float32
            for sizes to train. A quantised model needs one; it is planned as if all its weights were in it.
        pattern: Other mixers for its layers, at its sizes; a part that they need and the model lacks is derived
            (variants).
            None keeps its own.
        weights: The format of large weights, "bfloat16", "float16", "int8", "int4" or "fp8". None: as stored. If there
            is one, a dtype of None is float32, as on a CPU.

    >>> read_model("qwen3-next-80b"), read_model("small", pattern="KKKM"), read_model("config.json", dtype="fp8")
    """
    chosen = None if dtype is None else dtype_of(dtype)
    if weights is not None:
        weights = find_format(weights).name
        return replace(read_model(source, dtype or "float32", pattern), weights=weights, kept=())
    if isinstance(source, HybridConfig):
        return _with_pattern(Model(source.family, source, chosen or _usual(source), "config"), pattern)
    if str(source) in PRESETS:
        config = preset(str(source))
        if config.family == OWN:
            config, pattern = preset(str(source), pattern), None
        return _with_pattern(Model(str(source), config, chosen or _usual(config), "preset"), pattern)
    return _with_pattern(_read_file(source, chosen), pattern)


def _read_file(source: str | Path, chosen: torch.dtype | None) -> Model:
    """Read a checkpoint's folder, a GGUF file, a config.json, or that of a hub name."""
    if is_hub_name(source):
        folder = fetch(str(source), [CONFIG, "generation_config.json"])
        values = read_json(folder / CONFIG)
        config = _read(Checkpoint(folder, values, {}), chosen)
        return Model(str(source), config, chosen or _written(values, config), "hub", _weights(values))
    path = user_path(source)
    if not path.exists():
        name = str(source)
        raise ValueError(
            f"model must be a preset ({', '.join(PRESETS)}), a folder with {CONFIG}, a GGUF file, a {CONFIG}, or a hub "
            f"name such as Qwen/Qwen3.5-4B, got {name!r}, which is no preset and does not exist{nearest(name, PRESETS)}"
        )
    if (file := find_gguf(path)) is not None:
        return _read_gguf(path, open_gguf(file), chosen)
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and any((path / name).is_file() for name in (SINGLE, INDEX)):
        checkpoint = Checkpoint.open(path, decode=False)
        config, weights = _read(checkpoint, chosen), _weights(checkpoint.config)
        stored = stored_dtype(checkpoint) if weights is None else _written(checkpoint.config, config)
        return Model(path.resolve().name, config, chosen or stored, "folder", weights)
    file = path / CONFIG if path.is_dir() else path
    values = read_json(file)
    config = _read(Checkpoint(folder, values, {}), chosen)
    name = file.parent.resolve().name if file.name == CONFIG else file.stem
    return Model(name, config, chosen or _written(values, config), "config.json", _weights(values))


def _read_gguf(path: Path, checkpoint: Checkpoint, chosen: torch.dtype | None) -> Model:
    """Read the header of a GGUF file; its weights are planned as from_pretrained keeps them."""
    config = read_config(checkpoint)
    model = empty_model(config)
    plan = make_plan(checkpoint, config, model)
    shapes = model.state_dict()
    floating = {name for name, x in shapes.items() if x.is_floating_point()}
    check_tensors(plan, checkpoint, floating, other_family(checkpoint))
    dtype = chosen or usual_dtype(checkpoint, None, "cpu")
    quantised = stored_formats(model, checkpoint, plan, dtype)
    sizes: dict[str, int] = {}
    for name, form in quantised.items():
        sizes[form.name] = sizes.get(form.name, 0) + shapes[name].numel()
    most = max(sizes, key=lambda name: sizes[name]) if sizes else None
    kept = tuple((name, form.name) for name, form in quantised.items())
    name = path.stem if path.is_file() else path.resolve().name
    return Model(name, config, dtype, "gguf", most, kept)


def _weights(values: dict[str, Any]) -> str | None:
    """Return the format of large weights that a checked config.json of lineate names."""
    form = written_format(values) if values.get("model_type") == OWN else None
    return None if form is None else form.name


def from_numbers(
    emb_dim: int,
    n_heads: int,
    n_layers: int,
    dtype: str = "bf16",
    kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab_size: int | None = None,
    feed_size: int | None = None,
    pattern: str = "GGGA",
    conv_size: int = 4,
    tie_embeddings: bool = False,
) -> Model:
    """Make a model from the few numbers that estimators take.

    Linear layers have n_heads heads of head_dim channels for keys and for values; a latent (M) has emb_dim / 4
    channels, at least 64, and head_dim / 2 more that carry positions.

    Args:
        emb_dim: Channels of a token.
        n_heads: Heads of every mixer.
        n_layers: Layers.
        dtype: Dtype of the weights.
        kv_heads: Heads of keys and values of softmax attention; None is n_heads.
        head_dim: Channels of a head; None is emb_dim / n_heads.
        vocab_size: Tokens of the vocabulary; None is 32768.
        feed_size: Hidden channels of the feed-forward; None is 8/3 emb_dim, up to the next multiple of 64.
        pattern: Letters of the mixers, repeated over the layers.
        conv_size: Tokens that the short convolution of linear layers sees; 0: no convolution.
        tie_embeddings: Whether the head is the embedding.
    """
    given = {"emb_dim": emb_dim, "n_heads": n_heads, "n_layers": n_layers, "kv_heads": kv_heads, "head_dim": head_dim}
    given |= {"vocab_size": vocab_size, "feed_size": feed_size}
    for name, value in given.items():
        if value is not None:
            check_size(name, value)
    if head_dim is None:
        if emb_dim % n_heads:
            raise ValueError(f"emb_dim must be a multiple of n_heads = {n_heads}, got {emb_dim}; or give head_dim")
        head_dim = emb_dim // n_heads
    kv_heads = n_heads if kv_heads is None else kv_heads
    if n_heads % kv_heads:
        raise ValueError(f"kv_heads must divide n_heads = {n_heads}, got {kv_heads}")
    config = HybridConfig(
        vocab_size=32768 if vocab_size is None else vocab_size, hidden_size=emb_dim, n_layers=n_layers,
        pattern=pattern, tie_embeddings=tie_embeddings,
        linear=LinearConfig(n_heads, n_heads, head_dim, head_dim, conv_size=conv_size),
        mamba=MambaConfig(2 * n_heads, head_dim, head_dim, conv_size=conv_size),
        rwkv=RwkvConfig.of_width(emb_dim, n_heads, head_dim),
        memory=MemoryConfig(n_heads, head_dim, conv_size=conv_size),
        attention=AttentionConfig(n_heads, kv_heads, head_dim, rotary_dim=head_dim // 4 * 2),
        latent=LatentConfig(n_heads, max(64, emb_dim // 4), head_dim, head_dim // 2, head_dim),
        feed=FeedConfig(-(-8 * emb_dim // 3 // 64) * 64 if feed_size is None else feed_size),
    )  # fmt: skip
    return Model(f"{emb_dim} wide, {n_heads} heads, {n_layers} layers", config, dtype_of(dtype), "numbers")


def variants(model: Model) -> dict[str, Model]:
    """Return the same sizes with softmax attention in every layer, in none, and in every 4th.

    Letters are the first of each kind in the model's pattern, else G and A. A part that the model lacks is derived:
    attention with the value heads of its linear layers, or linear layers with the heads of its attention.

    Args:
        model: The model whose sizes are taken.
    """
    config = model.config
    full = next((letter for letter in config.letters if kind_of(letter).grows), "A")
    linear = next((letter for letter in config.letters if not kind_of(letter).grows), "G")
    config = _complete(config)
    patterns = {"softmax only": full, "linear only": linear, "3:1 hybrid": 3 * linear + full}
    whole = None if model.whole is None else _complete(model.whole)
    return {
        name: replace(
            _with_mixers(model, f"{model.name}, {name}", replace(config, pattern=pattern)),
            whole=None if whole is None else replace(whole, pattern=pattern),
        )
        for name, pattern in patterns.items()
    }


def mixed_ratio(config: HybridConfig) -> tuple[int, int]:
    """Return the ratio of linear layers to softmax attention in the pattern, in lowest terms.

    It is (3, 1) if there is only one kind, or if a pattern that names every layer (Kimi Linear's) has no ratio n : 1.
    """
    pattern = config.pattern
    length = next(n for n in range(1, len(pattern) + 1) if (pattern[:n] * len(pattern)).startswith(pattern))
    full = sum(kind_of(letter).grows for letter in pattern[:length])
    linear = length - full
    common = math.gcd(full, linear)
    if not full or not linear or (full > common and length >= config.n_layers):
        return 3, 1
    return linear // common, full // common


def _with_pattern(model: Model, pattern: str | None) -> Model:
    """Return the model with other mixers, and a name that shows it."""
    if pattern is None:
        return model
    config = replace(_complete(model.config), pattern=pattern)
    return _with_mixers(model, f"{model.name}, {pattern}", config)


def _with_mixers(model: Model, name: str, config: HybridConfig) -> Model:
    """Return the model with other mixers; formats of single weights go with the mixers that they are of."""
    return replace(model, name=name, config=config, kept=model.kept if config.letters == model.config.letters else ())


def _complete(config: HybridConfig) -> HybridConfig:
    """Return the config with a part for every letter; a part that it lacks gets the heads of another part."""
    heads, dim = _heads(config)
    return replace(
        config,
        linear=config.linear or LinearConfig(heads, heads, dim, dim),
        mamba=config.mamba or MambaConfig(heads, dim, dim),
        rwkv=config.rwkv or RwkvConfig.of_width(config.hidden_size, heads, dim),
        memory=config.memory or MemoryConfig(heads, dim),
        attention=config.attention or AttentionConfig(heads, heads, dim),
        latent=config.latent or LatentConfig(heads, max(64, config.hidden_size // 4), dim, dim // 2, dim),
    )


def _heads(config: HybridConfig) -> tuple[int, int]:
    """Return heads and channels of a head, of whichever part there is."""
    if config.attention is not None:
        return config.attention.heads, config.attention.head_dim
    if config.linear is not None:
        return config.linear.value_heads, config.linear.value_dim
    if config.mamba is not None:
        return config.mamba.heads, config.mamba.head_dim
    if config.rwkv is not None:
        return config.rwkv.heads, config.rwkv.head_dim
    if config.latent is not None:
        return config.latent.heads, config.latent.value_dim
    if config.memory is not None:
        return config.memory.heads, config.memory.head_dim
    heads = max(1, config.hidden_size // 64)  # all mixers are the user's own
    return heads, config.hidden_size // heads


def _usual(config: HybridConfig) -> torch.dtype:
    """Return bfloat16 for published models, float32 for lineate's presets to train."""
    return torch.float32 if config.family == OWN else torch.bfloat16


def _written(values: dict[str, Any], config: HybridConfig) -> torch.dtype:
    """Return the dtype that a config.json names."""
    for part in (values, values.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part, dict) and isinstance(part.get(key), str) and part[key] in DTYPES:
                return DTYPES[part[key]]
    return _usual(config)


def _read(checkpoint: Checkpoint, dtype: torch.dtype | None) -> HybridConfig:
    kind, quantised = checkpoint.config.get("model_type"), checkpoint.config.get("quantization_config")
    if not isinstance(kind, str):
        raise CheckpointError(f"{checkpoint.folder}: the config must say its model_type, got {kind!r}")
    if quantised is not None and dtype is None:
        method = quantised.get("quant_method", "an unknown method") if isinstance(quantised, dict) else quantised
        raise CheckpointError(
            f"{checkpoint.folder / CONFIG} must not be quantised, got {method}; give a dtype (--dtype fp8) to plan with"
        )
    values = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    checkpoint = replace(checkpoint, config=values)
    if kind == OWN or kind in FAMILIES:
        return read_config(checkpoint)
    try:
        return _softmax_config(kind, values)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint.folder / CONFIG}: {error}") from None


def _softmax_config(kind: str, values: dict[str, Any]) -> HybridConfig:
    """Read a decoder with plain softmax attention and SwiGLU (llama, mistral, qwen3, ...), dense or with experts."""
    v = Values(kind, values)
    if (why := what_it_lacks(kind)) is not None:
        raise v.error(f"cannot be planned: {why}")
    if kind not in PLAIN_FAMILIES:
        known = sorted({*FAMILIES, *PLAIN_FAMILIES, OWN})
        raise v.error(f"cannot be planned: model_type must be one of {', '.join(known)}, got {kind!r}")
    why = f"model_type {kind!r} is planned only as plain softmax attention with SwiGLU"
    v.must_be("hidden_act", "silu", why)
    for key in ("mlp_bias", "use_bias", "mlp_only_layers"):
        if v.get(key):
            raise v.error(f"must not have {key}, got {v.get(key)!s:.40}; {why}")
    v.must_be("decoder_sparse_step", 1, why)
    for key in ("kv_lora_rank", "ssm_state_size", "state_size", "text_config", "encoder_layers"):
        if v.get(key) is not None:
            raise v.error(f"must not have {key}, got {v.get(key)!s:.40}; {why}")
    if other := sorted(set(v.words("layer_types") or ()) - {"full_attention"}):
        raise v.error(f"must have layer_types of full_attention alone, got {other[0]!r}; {why}")
    hidden, n_layers, heads = v.number("hidden_size"), v.layers(), v.number("num_attention_heads")
    head_dim = v.number("head_dim", default=hidden // heads)
    longest, window = v.longest("max_position_embeddings"), v.longest("sliding_window")
    if window is not None and v.flag("use_sliding_window", default=True) and (longest is None or window < longest):
        raise v.error(f"must have no sliding_window, got {window}; {why}")
    count = v.number("num_experts", "num_local_experts", default=0, least=0)
    experts = None
    if count:
        size = v.number("moe_intermediate_size", "intermediate_size")
        shared = v.number("shared_expert_intermediate_size", default=0, least=0)
        experts = ExpertsConfig(
            count, v.number("num_experts_per_tok"), size, shared_size=shared, shared_gate=shared > 0
        )
    return HybridConfig(
        vocab_size=v.number("vocab_size"), hidden_size=hidden, n_layers=n_layers, pattern="A", family=kind,
        attention=AttentionConfig(
            heads, v.number("num_key_value_heads", default=heads), head_dim, rotary_dim=head_dim // 2 * 2, gated=False,
            qk_norm=PLAIN_FAMILIES[kind], bias=v.flag("attention_bias", default=False),
        ),
        feed=None if experts else FeedConfig(v.number("intermediate_size")), experts=experts,
        tie_embeddings=v.flag("tie_word_embeddings", default=False),
        max_position=longest,
    )  # fmt: skip

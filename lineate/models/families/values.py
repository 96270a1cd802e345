"""Reads the config.json of a checkpoint: what is missing or not understood is an error that names the key."""

from typing import Any

from lineate.models.config import AttentionConfig, FeedConfig, LinearConfig
from lineate.models.safetensors import CheckpointError

_NONE = object()


class Values:
    """The keys of one family's config.json."""

    def __init__(self, family: str, values: dict[str, Any]) -> None:
        self.family = family
        self.values = values
        if values.get("quantization_config") is not None:
            method = dict(values["quantization_config"]).get("quant_method", "an unknown method")
            raise self.error(f"must not be quantised, got {method}; use the unquantised checkpoint")

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"config.json of family {self.family} {text}")

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these keys that is there."""
        for name in names:
            if name in self.values:
                return self.values[name]
        return default

    def number(self, *names: str, default: Any = _NONE, kind: type = int) -> Any:
        """A number under the first of these keys that is there and not null."""
        found = [(name, self.values[name]) for name in names if self.values.get(name) is not None]
        if not found and default is not _NONE:
            return default
        if not found:
            raise self.error(f"must have {' or '.join(names)}, got none; its keys are {', '.join(sorted(self.values))}")
        name, value = found[0]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or (kind is int and value != int(value)):
            raise self.error(f"must have a number in {name}, got {value!r}")
        return kind(value)

    def must_be(self, name: str, allowed: Any, why: str, default: Any = _NONE) -> None:
        """A key that, if it is there, may have one value."""
        value = self.values.get(name, allowed if default is _NONE else default)
        if value != allowed:
            raise self.error(f"must have {name} = {allowed!r}, got {value!r}; {why}")

    def eos(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        value = self.get("eos_token_id")
        if value is None:
            return ()
        return tuple(int(token) for token in (value if isinstance(value, list) else [value]))

    def token(self, name: str) -> int | None:
        """A token's number, if it has one."""
        return self.number(name, default=None)

    def layer_letters(self, linear: str, full: str) -> str:
        """One letter a layer, from layer_types or from full_attention_interval."""
        n_layers = self.number("num_hidden_layers")
        types = self.get("layer_types")
        if types is None:
            interval = self.number("full_attention_interval", default=4)
            return "".join(linear if (i + 1) % interval else full for i in range(n_layers))
        letters = {"linear_attention": linear, "full_attention": full}
        unknown = sorted({str(kind) for kind in types} - letters.keys())
        if unknown:
            raise self.error(f"must have layer_types of {', '.join(letters)}, got {unknown[0]!r}")
        if len(types) != n_layers:
            raise self.error(f"must have {n_layers} layer_types (num_hidden_layers), got {len(types)}")
        return "".join(letters[kind] for kind in types)

    def rope(self, head_dim: int, factor: float) -> tuple[int, float]:
        """How many channels of a head are rotated, and the base; (0, ...) if the base is null: no positions."""
        parameters = self.get("rope_parameters") or self.get("rope_scaling") or {}
        parameters = parameters.get("full_attention", parameters)
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            raise self.error(f"must have rope_type 'default', got {kind!r}; scaled positions are not supported")
        theta = parameters.get("rope_theta", self.get("rope_theta", default=10000.0))
        share = parameters.get("partial_rotary_factor", self.get("partial_rotary_factor", default=factor))
        if theta is None:
            return 0, 10000.0
        return int(head_dim * (factor if share is None else share)), float(theta)

    def grouped_linear(self, norm_eps: float, beta_scale: float = 1.0) -> LinearConfig:
        """Gated DeltaNet's sizes as Qwen and OLMo name them."""
        return LinearConfig(
            heads=self.number("linear_num_key_heads"),
            value_heads=self.number("linear_num_value_heads"),
            key_dim=self.number("linear_key_head_dim"),
            value_dim=self.number("linear_value_head_dim"),
            conv_size=self.number("linear_conv_kernel_dim", default=4),
            beta_scale=beta_scale,
            norm_eps=norm_eps,
        )

    def attention(self, factor: float, gated: bool, qk_norm: str) -> AttentionConfig:
        """Softmax attention; factor: which part of a head is rotated, unless the config says so."""
        heads = self.number("num_attention_heads")
        head_dim = self.number("head_dim", default=self.number("hidden_size") // heads)
        rotary_dim, theta = self.rope(head_dim, factor)
        return AttentionConfig(
            heads=heads,
            kv_heads=self.number("num_key_value_heads", default=heads),
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rope_theta=theta,
            gated=gated,
            qk_norm=qk_norm,
            bias=bool(self.get("attention_bias", default=False)),
        )

    def feed(self, needed: bool) -> FeedConfig | None:
        """The dense feed-forward, if any layer has one."""
        return FeedConfig(self.number("intermediate_size")) if needed else None


def shortest(letters: str) -> str:
    """The shortest pattern that, tiled, gives these letters."""
    for length in range(1, len(letters)):
        if (letters[:length] * len(letters))[: len(letters)] == letters:
            return letters[:length]
    return letters

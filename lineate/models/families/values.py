"""Reads the config.json of a checkpoint; a key that is missing or not understood raises an error that names it."""

from typing import Any

from lineate.models.config import AttentionConfig, FeedConfig, LinearConfig
from lineate.models.fields import MOST_CHANNELS, MOST_LAYERS, MOST_NUMBER, check_whole_numbers, show
from lineate.models.files.safetensors import CheckpointError

_NONE = object()


class Values:
    """The keys of one family's config.json.

    layer_letters, rope, grouped_linear, attention and feed read the keys as Qwen and OLMo name them. A family with
    other names reads each key with number, flag, words, numbers, part and so on.
    """

    def __init__(self, family: str, values: dict[str, Any], inside: str = "") -> None:
        self.family = family
        self.values = values
        self.inside = inside

    def error(self, text: str) -> CheckpointError:
        where = f", in {self.inside}," if self.inside else ""
        return CheckpointError(f"config.json of family {self.family}{where} {text}")

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of these keys that exists."""
        for name in names:
            if name in self.values:
                return self.values[name]
        return default

    def mapping(self, name: str) -> dict[str, Any]:
        """Return the object under this key; empty if it is null or absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"must have an object in {name}, got {show(value)}")
        return value or {}

    def part(self, name: str) -> "Values":
        """Return the Values of the object under this key; its error messages name the object too."""
        return Values(self.family, self.mapping(name), f"{self.inside}.{name}".removeprefix("."))

    def words(self, name: str, layers: str = "num_hidden_layers") -> list[str] | None:
        """Return the list of words under this key, if present: one a layer; the key `layers` has their number."""
        value = self.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(word, str) for word in value)):
            raise self.error(f"must have a list of words in {name}, got {show(value)}")
        if value is not None and len(value) != self.layers(layers):
            raise self.error(f"must have {self.layers(layers)} {name} ({layers}), got {len(value)}")
        return value

    def numbers(self, name: str) -> list[int]:
        """Return a list of whole numbers; empty if it is null or absent."""
        value = self.get(name)
        if value is None:
            return []
        try:
            check_whole_numbers(name, value)
        except (TypeError, ValueError) as error:
            raise self.error(f"is not understood: {error}") from None
        return list(value)

    def flag(self, *names: str, default: bool) -> bool:
        """Return the flag under the first of these keys that is present and not null; null does not count as true."""
        given = [self.values[name] for name in names if name in self.values]
        value = next((x for x in given if x is not None), None if given and default else default)
        if not isinstance(value, bool):
            raise self.error(f"must have true or false in {names[0]}, got {show(value)}")
        return value

    def number(
        self, *names: str, default: Any = _NONE, kind: type = int, least: int = 1, most: int = MOST_CHANNELS
    ) -> Any:
        """Return the number under the first of these keys that is not null; least and most bound whole ones."""
        found = [(name, self.values[name]) for name in names if self.values.get(name) is not None]
        if not found and default is not _NONE:
            return default
        if not found and any(name in self.values for name in names):
            raise self.error(f"must have {' or '.join(names)}, got null")
        if not found:
            keys = sorted(self.values)
            shown = ", ".join(keys[:100]) + ", ..." * (len(keys) > 100)
            raise self.error(f"must have {' or '.join(names)}, got none; its keys are {shown}")
        name, value = found[0]
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST_NUMBER
        if not good or (kind is int and value != int(value)):
            raise self.error(f"must have a number in {name}, got {show(value)}")
        if kind is int and not least <= value <= most:
            bound = f"a whole number of at least {least}" if value < least else f"at most {most:,}"
            raise self.error(f"is not possible: {name} must be {bound}, got {show(int(value))}")
        return kind(value)

    def layers(self, name: str = "num_hidden_layers") -> int:
        """Return the number of layers; raise if it exceeds the most that a model may have."""
        return int(self.number(name, most=MOST_LAYERS))

    def must_be(self, name: str, allowed: Any, why: str, default: Any = _NONE) -> None:
        """Raise if a key exists and has another value than this."""
        value = self.values.get(name, allowed if default is _NONE else default)
        if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
            raise self.error(f"must have {name} = {allowed!r}, got {show(value)}; {why}")

    def eos(self, name: str = "eos_token_id") -> tuple[int, ...]:
        """Return the tokens that end a sequence."""
        return token_ids(name, self.get(name))

    def token(self, name: str) -> int | None:
        """Return a token's number, if it has one."""
        return self.number(name, default=None, least=-MOST_NUMBER, most=MOST_NUMBER)

    def longest(self, *names: str) -> int | None:
        """Return the longest sequence it was trained on, if that is given."""
        return self.number(*names, default=None, most=MOST_NUMBER)

    def layer_letters(self, linear: str, full: str) -> str:
        """Return one letter a layer, from layer_types or from full_attention_interval."""
        types = self.words("layer_types")
        if types is None:
            interval = self.number("full_attention_interval", default=4)
            return "".join(linear if (i + 1) % interval else full for i in range(self.layers()))
        letters = {"linear_attention": linear, "full_attention": full}
        if unknown := sorted(set(types) - letters.keys()):
            raise self.error(f"must have layer_types of {', '.join(letters)}, got {show(unknown[0])}")
        return "".join(letters[kind] for kind in types)

    def rope(self, head_dim: int, factor: float) -> tuple[int, float]:
        """Return how many channels of a head are rotated, and the base; (0, ...) if the base is null: no positions."""
        part = self.mapping("rope_parameters") or self.mapping("rope_scaling")
        part = Values(self.family, part).mapping("full_attention") or part
        kind = part.get("rope_type", part.get("type", "default"))
        if kind != "default":
            raise self.error(f"must have rope_type 'default', got {show(kind)}; scaled positions are not supported")
        both = Values(self.family, {"rope_theta": 10000.0, **self.values, **part})
        if both.get("rope_theta") is None:
            return 0, 10000.0
        share = both.number("partial_rotary_factor", default=factor, kind=float)
        return int(head_dim * share), float(both.number("rope_theta", kind=float))

    def grouped_linear(self, norm_eps: float, beta_scale: float = 1.0) -> LinearConfig:
        """Return Gated DeltaNet's sizes as Qwen and OLMo name them."""
        return LinearConfig(
            heads=self.number("linear_num_key_heads"),
            value_heads=self.number("linear_num_value_heads"),
            key_dim=self.number("linear_key_head_dim"),
            value_dim=self.number("linear_value_head_dim"),
            conv_size=self.number("linear_conv_kernel_dim", default=4, least=0),
            beta_scale=beta_scale,
            norm_eps=norm_eps,
        )

    def attention(self, factor: float, gated: bool, qk_norm: str | None) -> AttentionConfig:
        """Return softmax attention's sizes; factor: the rotated part of a head if the config gives none."""
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
            bias=self.flag("attention_bias", default=False),
        )

    def feed(self, needed: bool) -> FeedConfig | None:
        """Return the size of the dense feed-forward, if any layer has one."""
        return FeedConfig(self.number("intermediate_size")) if needed else None


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Return one token, a list of them, or none, as a tuple."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    check_whole_numbers(name, values)
    return tuple(values)


def shortest(letters: str) -> str:
    """Return the shortest pattern that, tiled, gives these letters."""
    for length in range(1, len(letters)):
        if letters[length:] == letters[:-length]:
            return letters[:length]
    return letters

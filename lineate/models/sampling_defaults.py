"""The sampling options that a checkpoint names: in generation_config.json, or in the metadata of a GGUF file.

generation_config.json   do_sample, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, ...
GGUF                     general.sampling.temp, general.sampling.top_k, ..., general.sampling.penalty_repeat
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lineate.models.fields import show
from lineate.models.files.checkpoint import Checkpoint
from lineate.models.files.companions import GENERATION
from lineate.models.files.safetensors import CheckpointError

LARGEST_TOP_K = 2**31 - 1
LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (-1, LARGEST_TOP_K),
    "top_p": (1e-6, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
"""The least and the largest value of each default; top_k is a whole number, of which -1 and 0 are all tokens."""
DO_SAMPLE = "do_sample"
"""The key of generation_config.json that is false if the likeliest token is taken."""
GGUF_PREFIX = "general.sampling."
GGUF_NAMES = {
    "temperature": "temp",
    "repetition_penalty": "penalty_repeat",
    "frequency_penalty": "penalty_freq",
    "presence_penalty": "penalty_present",
}
"""Names after the prefix that differ from those of generation_config.json."""


@dataclass(frozen=True)
class SamplingDefaults:
    """The options of sampling that a checkpoint names; None: it does not name this one.

    Args:
        temperature: Divides the logits; 0 takes the likeliest token, as does `do_sample: false` in the file.
        top_k: Draw only from the k likeliest tokens; 0 for all.
        top_p: Draw only from the likeliest tokens whose probabilities together reach p.
        min_p: Draw only from tokens with at least this part of the likeliest token's probability.
        repetition_penalty: Above 1, tokens that occurred become less likely.
        presence_penalty: Is subtracted from the logits of tokens that were generated.
        frequency_penalty: Is subtracted from the logits of tokens for each time that they were generated.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.named().items():
            _check(name, value)

    def named(self) -> dict[str, Any]:
        """Return the options that the checkpoint names, with their values."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    def __bool__(self) -> bool:
        return bool(self.named())

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.named().items())


def read_sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults | None:
    """Return the sampling options that a checkpoint names, or None; a wrong value raises and is named with its file.

    Args:
        checkpoint: A folder, or a GGUF file.
    """
    metadata = checkpoint.metadata
    if metadata is not None:
        keys = {name: GGUF_PREFIX + GGUF_NAMES.get(name, name) for name in LIMITS}
        # A float32 of the file reads as 0.6000000238418579; these are the digits that it has.
        short = {key: float(f"{x:.7g}") if isinstance(x := metadata.get(key), float) else x for key in keys.values()}
        return _read(checkpoint.config_file, short, keys)
    return parse_sampling_defaults(checkpoint.folder / GENERATION, checkpoint.extra(GENERATION))


def parse_sampling_defaults(file: Path, values: Mapping[str, Any]) -> SamplingDefaults | None:
    """Return the sampling options in the contents of a generation_config.json, or None if it has none.

    Args:
        file: The file, which an error names.
        values: Its contents.
    """
    found = _read(file, values, {x: x for x in LIMITS})
    samples = values.get(DO_SAMPLE)
    if samples is not None and not isinstance(samples, bool):
        raise CheckpointError(f"{file}: {DO_SAMPLE} must be true or false, got {show(samples)}{_REMEDY}")
    if samples is False:
        return SamplingDefaults(**((found or SamplingDefaults()).named() | {"temperature": 0.0}))
    return found


def with_sampling_defaults(values: Mapping[str, Any], defaults: SamplingDefaults) -> dict[str, Any]:
    """Return the contents of a generation_config.json with these sampling options in place of its own.

    Args:
        values: The contents.
        defaults: The options.
    """
    named = defaults.named()
    kept = {name: value for name, value in values.items() if name not in (*LIMITS, DO_SAMPLE)}
    if not named:
        return kept
    if named.get("temperature") == 0:  # transformers refuses a temperature of 0
        return kept | {DO_SAMPLE: False} | {name: value for name, value in named.items() if name != "temperature"}
    return kept | {DO_SAMPLE: True} | named


_REMEDY = "; correct it, or leave it out"


def _read(file: Path, values: Mapping[str, Any], keys: Mapping[str, str]) -> SamplingDefaults | None:
    """Return the options under these keys; None if there are none."""
    found: dict[str, Any] = {}
    for name, key in keys.items():
        if (value := values.get(key)) is None:
            continue
        try:
            _check(name, value, key)
        except ValueError as error:
            raise CheckpointError(f"{file}: {error}{_REMEDY}") from None
        found[name] = max(int(value), 0) if name == "top_k" else float(value)
    return SamplingDefaults(**found) if found else None


def _check(name: str, value: Any, key: str | None = None) -> None:
    """Raise ValueError unless the value is a number in the range of this option."""
    least, most = LIMITS[name]
    kind = "a whole number" if name == "top_k" else "a number"
    right = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most  # NaN is not
    if not right or (name == "top_k" and value != int(value)):
        raise ValueError(f"{key or name} must be {kind} from {least:g} to {most:,}, got {show(value)}")

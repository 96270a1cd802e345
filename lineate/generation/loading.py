"""A model and its tokenizer, from a run's folder, a model's folder or a name on the hub."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lineate.console.names import named_path, user_path
from lineate.console.terminal import printable
from lineate.models.files import runs
from lineate.models.files.hub import ALL, TEXTS, fetch, is_hub_name
from lineate.models.pretrained import check_target
from lineate.quantised import shrink
from lineate.torch_ops.dtypes import parse_dtype

if TYPE_CHECKING:
    from lineate.models import HybridConfig, HybridLM
    from lineate.parallel.tensor.ranks import Ranks
    from lineate.text import Tokenizer


def load_model(
    name: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    weights: str | None = None,
    ranks: "Ranks | None" = None,
    sampling_defaults: bool = True,
) -> "tuple[HybridLM, Tokenizer]":
    """Return a model in eval mode and its tokenizer, which is read first because it is quick.

    Args:
        name: Folder of a run, or of a model with its tokenizer, or a name on the hub.
        dtype: A torch.dtype or its name; None or "auto": as stored.
        device: Where the weights are loaded to.
        weights: The format of large weights, "bfloat16", "float16", "int8", "int4" or "fp8"; None: as stored.
        ranks: The ranks that share the model (lineate.parallel.tensor.ranks); None: this process has all of it.
        sampling_defaults: Whether the sampling options that the checkpoint names are read.
    """
    from lineate.models import HybridLM
    from lineate.text import load_tokenizer

    place = locate(name)
    tokenizer = load_tokenizer(place)
    model = HybridLM.from_pretrained(
        place, dtype=dtype, device=device, progress=False, weights=weights, ranks=ranks,
        sampling_defaults=sampling_defaults,
    )  # fmt: skip
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer of {place} has {tokenizer.vocab_size} tokens and its model a vocabulary of "
            f"{model.config.vocab_size}; both must come from one model"
        )
    return model, tokenizer


def load_random(
    name: str | None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    weights: str | None = None,
) -> "tuple[HybridLM, Tokenizer]":
    """Return a model in the shape of a preset with random weights, and a tokenizer of its whole vocabulary.

    A vocabulary below 257 tokens, which the smallest presets have, is raised to that: bytes and end-of-text.

    Args:
        name: A preset.
        dtype: As in load_model; None or "auto": float32 on a CPU, bfloat16 elsewhere.
        device: Where the weights are made.
        weights: The format of large weights; None: all have the dtype.
    """
    from lineate.models.random_weights import random_model
    from lineate.text import Numbered

    config = random_shape(name)
    return random_model(config, dtype, device, weights), Numbered(config.vocab_size)


def random_shape(name: str | None) -> "HybridConfig":
    """Return the shape that `--random-weights` serves; raise ValueError unless it is a preset's.

    Args:
        name: The name of the preset.
    """
    from lineate.models.presets import PRESETS, preset
    from lineate.text import Bytes

    if name not in PRESETS:
        got = "none" if name is None else repr(name)
        remedy = "" if name is None else "; to serve a checkpoint, leave --random-weights out"
        raise ValueError(f"--random-weights must be given with a preset, {', '.join(PRESETS)}, got {got}{remedy}")
    config = preset(name)
    return replace(config, vocab_size=max(config.vocab_size, Bytes.vocab_size))


def check_model(name: str | Path) -> None:
    """Raise ValueError or OSError if a model cannot be loaded; its tokenizer and headers are read, but no weights.

    Args:
        name: Folder of a run, or of a model with its tokenizer, or a name on the hub.
    """
    from lineate.models.opening import open_checkpoint
    from lineate.text import load_tokenizer

    place = fetch_model(str(name)) if is_hub_name(name) else find_model(user_path(named_path(name)))
    load_tokenizer(place)
    open_checkpoint(place)


def load_or_builtin(
    name: str | Path | None,
    dtype: str,
    device: str,
    report: Callable[[str], None],
    weights: str | None = None,
    sampling_defaults: bool = True,
) -> "tuple[HybridLM, Tokenizer]":
    """Return a model and its tokenizer as load_model does, or the built-in model.

    Args:
        name: Folder of a run, or of a model with its tokenizer, or a name on the hub; None: the built-in model.
        dtype: Name of the dtype of the weights; "auto": as stored.
        device: "cpu" or "cuda".
        report: Called with a sentence when the built-in model is trained.
        weights: The format of large weights, "bfloat16", "float16", "int8", "int4" or "fp8"; None: as stored.
        sampling_defaults: Whether the sampling options that the checkpoint names are read.
    """
    if name is not None:
        return load_model(name, dtype, device, weights, sampling_defaults=sampling_defaults)
    from lineate.generation.builtin import builtin_model

    chosen = None if dtype == "auto" else parse_dtype(dtype, also=("auto",))
    check_target(device)
    model, tokenizer = builtin_model(report)
    if weights is not None:
        shrink(model, weights)
    return model.to(device=device, dtype=chosen), tokenizer


def locate(name: str | Path) -> Path:
    """Return the folder of a model, which is downloaded if it is a name on the hub.

    Args:
        name: Folder of a run, or of a model with its tokenizer, or a name on the hub.
    """
    return fetch_model(str(name)) if is_hub_name(name) else find_model(user_path(named_path(name)))


def find_device(device: str) -> str:
    """Return the device of a name, of which "auto" is a GPU if torch can use one, else the CPU.

    Args:
        device: "auto", "cpu", "cuda", or a GPU with its number.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"device must be auto, cpu or cuda, got {device!r}")
    return device


def fetch_model(name: str) -> Path:
    """Download a model from the hub and return its folder; the weights come only if its tokenizer can be read."""
    from lineate.text import load_tokenizer

    load_tokenizer(fetch(name, TEXTS))
    return fetch(name, ALL)


def find_model(folder: Path) -> Path:
    """Return the folder of a run's finished model, or else its newest checkpoint; or the folder, if it is a model's."""
    return runs.find_model(folder, lambda text: print(f"warning: {printable(text)}", file=sys.stderr))


def model_folder(folder: Path) -> Path:
    """Return find_model(folder) if the folder is a run without weights of its own, else the folder."""
    if runs.has_own_weights(folder):
        return folder
    is_run = (folder / "model" / "config.json").is_file() or (folder / "checkpoints").is_dir()
    return find_model(folder) if is_run else folder

"""A small model that needs no download: trained once on Python's own documentation, then kept in the cache folder.

Its answers imitate that documentation without meaning, which is enough to try commands, states, caches and samplers.
"""

import hashlib
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lineate.models import HybridConfig, HybridLM, preset
from lineate.system.folders import cache_folder
from lineate.system.seeding import own_random_numbers
from lineate.text import Bytes, Tokenizer, load_tokenizer

RECIPE = 1
"""The version of the recipe; models of other versions are retrained. Increase it with every change below."""
STEPS, ROWS, TOKENS = 200, 8, 160
RATE = 5e-3
LONGEST = 240
"""Sentences of more characters are left out, so that answers are short."""
Report = Callable[[str], None]


def builtin_model(report: Report | None = None) -> tuple[HybridLM, Tokenizer]:
    """Return the built-in model in eval mode and its tokenizer; the first call trains it, which takes some seconds.

    Args:
        report: Called with a sentence when the model is trained, or cannot be kept.
    """
    say = report or (lambda text: None)
    try:
        place = builtin_folder()
    except FileNotFoundError as error:
        place = None
        say(f"the built-in model cannot be kept: {error}")
    if place is not None and place.is_dir():
        try:
            return HybridLM.from_pretrained(place, progress=False), load_tokenizer(place)
        except (ValueError, OSError) as error:
            say(f"the built-in model in {place} is damaged and is trained again: {error}")
            shutil.rmtree(place, ignore_errors=True)
    say("training the built-in model on Python's documentation; this happens once and takes some seconds")
    model = train_builtin(STEPS)
    tokenizer = Bytes()
    if place is not None:
        try:
            _keep(model, tokenizer, place)
        except OSError as error:
            say(f"the built-in model cannot be kept in {place.parent} ({error.strerror}); set LINEATE_CACHE")
    return model, tokenizer


def builtin_folder() -> Path:
    """Return the folder of the built-in model of this version, which exists only if the model has been trained."""
    from lineate import __version__

    made_from = (RECIPE, __version__, sys.version_info[:2], torch.__version__)
    return cache_folder() / "builtin" / hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]


@torch.inference_mode(False)
def train_builtin(steps: int) -> HybridLM:
    """Return the built-in model, trained for a number of steps; torch's random state is unchanged.

    Args:
        steps: Steps of AdamW.
    """
    generator = torch.Generator("cpu").manual_seed(RECIPE)
    data = _tokens(generator)
    with own_random_numbers(RECIPE), torch.device("cpu"), torch.enable_grad():
        model = HybridLM(builtin_config())
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1, (step + 1) / 20) * (0.525 + 0.475 * math.cos(math.pi * step / steps))
            at = torch.randint(len(data) - TOKENS - 1, (ROWS, 1), generator=generator)
            rows = data[at + torch.arange(TOKENS + 1)]  # rows tokens+1
            (model.loss_sum(rows[:, :-1], rows[:, 1:]) / (ROWS * TOKENS)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model.eval().requires_grad_(False)


def builtin_config() -> HybridConfig:
    """Return the configuration of the built-in model: one layer of Gated DeltaNet, one of softmax attention."""
    return replace(preset("tiny", pattern="GA", vocab_size=Bytes.vocab_size), n_layers=2, eos_token_ids=(Bytes.end,))


def _tokens(generator: torch.Generator) -> Tensor:
    """Return all conversations, each after an end-of-text, in an order of the generator."""
    tokenizer = Bytes()
    pairs = list(sentences())
    ids: list[int] = []
    for n in torch.randperm(len(pairs), generator=generator, device="cpu").tolist():
        topic, sentence = pairs[n]
        ids += [tokenizer.end, *tokenizer.encode(f"User: What about {topic}?\n\nAssistant: {sentence}\n\n")]
    return torch.tensor([*ids, tokenizer.end], device="cpu")


def sentences() -> Iterator[tuple[str, str]]:
    """Yield topics of Python's documentation with a sentence each."""
    for topic, text in sorted(_topics().items()):
        for paragraph in text.split("\n\n"):
            if paragraph[:1].isspace():  # an example or a list
                continue
            words = " ".join(paragraph.replace('"', "").split())
            for sentence in re.split(r"(?<=[.:]) (?=[A-Z])", words):
                if 30 < len(sentence) < LONGEST and sentence[0].isupper() and sentence.isascii():
                    yield topic, sentence


def _topics() -> dict[str, str]:
    """Return texts of Python's documentation by topic: its language reference, or else the help of its builtins."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions omit it
        import builtins

        return {name: value.__doc__ for name, value in vars(builtins).items() if isinstance(value.__doc__, str)}
    return dict(topics)


def _keep(model: HybridLM, tokenizer: Tokenizer, place: Path) -> None:
    """Write the model to its folder completely or not at all; one that another process has just written is kept."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".partial-") as partial:
        made = Path(partial) / "model"
        model.save_pretrained(made)
        tokenizer.save(made)
        try:
            os.rename(made, place)
        except OSError:
            if not place.is_dir():
                raise

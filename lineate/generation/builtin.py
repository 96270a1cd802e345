"""The built-in small model, trained once on texts of Python itself and kept in the cache folder: no download is needed.

Every command without a model uses it. Its answers imitate Python's documentation without meaning, which is enough to
try commands, states, caches and samplers; pictures of its states show what layers learn from code.
"""

import hashlib
import math
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from lineate.models import AttentionConfig, FeedConfig, HybridConfig, HybridLM, LinearConfig
from lineate.system.folders import cache_folder
from lineate.system.seeding import own_random_numbers
from lineate.system.threads import one_thread
from lineate.text import Bytes, Tokenizer, load_tokenizer

RECIPE = 2
"""The version of the recipe; models of other versions are retrained. Increase it with every change below."""
STEPS, TOKENS, RATE = 180, 128, 2e-2
CHATS, SOURCES = 8, 3
"""Rows of a batch with conversations about Python's documentation, and with source code of its library."""
CHARACTERS = 2_000_000
"""Characters of source code."""
LONGEST = 240
"""Sentences of more characters are left out, so that answers are short."""
Report = Callable[[str], None]


def builtin_model(report: Report | None = None) -> tuple[HybridLM, Tokenizer]:
    """Return the built-in model in eval mode and its tokenizer; the first call trains it, which takes half a minute.

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
    say("training the built-in model on texts of Python; this happens once and takes half a minute")
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
    return cache_folder() / "builtin" / _digest(repr(made_from))[:16]


@torch.inference_mode(False)
def train_builtin(steps: int) -> HybridLM:
    """Return the built-in model, trained for a number of steps; torch's random state is unchanged.

    Args:
        steps: Steps of the optimisers.
    """
    generator = torch.Generator("cpu").manual_seed(RECIPE)
    texts = (conversations(generator), CHATS), (source_code(), SOURCES)
    with own_random_numbers(RECIPE), torch.device("cpu"), torch.enable_grad(), one_thread():
        model = HybridLM(builtin_config())
        optimizers = _optimizers(model)
        for step in range(steps):
            rows = torch.cat([_rows(text, count, generator) for text, count in texts])
            (model.loss_sum(rows[:, :-1], rows[:, 1:]) / rows[:, 1:].numel()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = RATE * min(1, (step + 1) / 10) * (0.525 + 0.475 * math.cos(math.pi * step / steps))
                optimizer.step()
                optimizer.zero_grad()
    return model.eval().requires_grad_(False)


def _optimizers(model: HybridLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside of the layers, and AdamW for all other parameters."""
    inside = {id(x) for layer in model.layers for x in layer.parameters() if x.dim() == 2}
    matrices = [x for x in model.parameters() if id(x) in inside]
    others = [x for x in model.parameters() if id(x) not in inside]
    return [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def _rows(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return ids `count TOKENS+1` from anywhere in a text."""
    starts = torch.randint(len(text) - TOKENS - 1, (count, 1), generator=generator)
    return text[starts + torch.arange(TOKENS + 1)]


def builtin_config() -> HybridConfig:
    """Return the configuration of the built-in model: both gated delta rules, and one layer of softmax attention."""
    return HybridConfig(
        vocab_size=Bytes.vocab_size, hidden_size=64, n_layers=6, pattern="KGKGKA", tie_embeddings=True,
        linear=LinearConfig(2, 2, 32, 32),
        attention=AttentionConfig(2, 2, 32, rotary_dim=16),
        feed=FeedConfig(128),
        eos_token_ids=(Bytes.end,),
    )  # fmt: skip


def conversations(generator: torch.Generator) -> Tensor:
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


def source_code() -> Tensor:
    """Return bytes of the modules of Python's library, in an order that mixes their subjects."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda file: _digest(file.name))
    joined = b""
    for file in files:
        joined += file.read_bytes()
        if len(joined) > CHARACTERS:
            break
    if len(joined) <= TOKENS + 1:  # some distributions omit the sources
        joined = " ".join(sentence for _, sentence in sentences()).encode()
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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

"""The built-in small model: a hybrid that is trained once, in seconds on the standard library's text, and kept."""

import hashlib
import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.explore.cost import one_thread
from lineate.models import AttentionConfig, FeedConfig, HybridConfig, HybridLM, LinearConfig
from lineate.system.folders import cache_folder
from lineate.system.seeding import own_random_numbers
from lineate.torch_ops.tracing import cpu_by_default

SMALL_CONFIG = HybridConfig(
    vocab_size=257, hidden_size=64, n_layers=6, pattern="KGKGKA", tie_embeddings=True,
    linear=LinearConfig(2, 2, 32, 32),
    attention=AttentionConfig(2, 2, 32, rotary_dim=16),
    feed=FeedConfig(128),
)  # fmt: skip
"""The model has layers of both gated delta rules, so that it shows forgetting per head and per channel."""
TRAINING_STEPS, ROWS, LENGTH, RATE = 45, 5, 128, 2e-2
CHARACTERS = 2_000_000
"""How many characters of text it learns from."""
VERSION = 1
"""A number that changes when the training does."""


@cpu_by_default
def small_model() -> HybridLM:
    """Return the model from the user's cache folder, else train it now (about 7 s) and keep it there if possible."""
    folder = cache_folder() / f"small-{_fingerprint()}"
    with suppress(Exception):  # with a damaged cache the model is trained anew
        return HybridLM.from_pretrained(folder, progress=False)
    model = train_small(TRAINING_STEPS)
    with suppress(OSError):
        _keep(model, folder)
    return model


@cpu_by_default
def train_small(steps: int) -> HybridLM:
    """Return a trained model, the same for the same text, torch and machine.

    The caller's random state is unchanged.
    """
    from lineate.training.optim import make_optimizer

    with own_random_numbers(seed=0), torch.enable_grad(), one_thread():
        model = HybridLM(SMALL_CONFIG)
        optimizer = make_optimizer(model, "muon", RATE, 0.1, (0.9, 0.95))
        text = training_text()
        for step in range(steps):
            ids = _windows(text)
            logits = model(ids[:, :-1]).logits
            F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = RATE * min((step + 1) / 10, 1.05 - step / steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return model.eval()


def training_text() -> Tensor:
    """Return bytes of the standard library, one file after the other, in an order that mixes its subjects."""
    from lineate.training.sources import documents

    texts = sorted(documents(("stdlib",), lambda warning: None), key=lambda x: hashlib.sha256(x.encode()).digest())
    joined, length = [], 0
    for text in texts:
        joined.append(text.encode())
        length += len(joined[-1])
        if length > CHARACTERS:
            break
    return torch.frombuffer(bytearray(b"".join(joined)), dtype=torch.uint8)


def _windows(text: Tensor) -> Tensor:
    """Return ids `ROWS LENGTH+1` from anywhere in the text."""
    starts = torch.randint(0, len(text) - LENGTH - 1, (ROWS, 1))
    return text[starts + torch.arange(LENGTH + 1)].long()


def _fingerprint() -> str:
    what = [SMALL_CONFIG.to_dict(), TRAINING_STEPS, ROWS, LENGTH, RATE, CHARACTERS, VERSION]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _keep(model: HybridLM, folder: Path) -> None:
    """Write next to the target and rename, so that no other process ever sees an incomplete model."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".small-", dir=folder.parent))
    try:
        model.save_pretrained(partial)
        if folder.exists():  # damaged, or just made by another process
            shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)

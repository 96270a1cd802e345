"""How far weights of 8 and 4 bits take a model from its float32 self: random models, and a small trained one.

The trained model has 3.5 million parameters. `lineate train` makes it from this repository's own text, byte by byte,
without a tenth of the files, and it is kept in a folder.
"""

import copy
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.models.small_model import draw_weights, shrink
from lineate.generation import generate
from lineate.models import HybridConfig, HybridLM
from lineate.models.presets import small, tiny

ROOT = Path(__file__).parents[2]
TEXTS = ("docs/**/*.md", "lineate/**/*.py", "bench/**/*.py", "tests/**/*.py", "examples/**/*.py")
HELD_OUT = 10  # one file of so many is not trained on
ROW, PROMPT = 512, 64  # bytes of a row of text, and of a prompt
RANDOM: dict[str, Callable[[], HybridConfig]] = {
    "tiny GGGA": lambda: tiny("GGGA"),
    "tiny KKKM": lambda: tiny("KKKM"),
    "tiny S": lambda: tiny("S"),
    "tiny A": lambda: tiny("A"),
    "small GGGA": lambda: small("GGGA", 4096),
    "small KKKM": lambda: small("KKKM", 4096),
}


def smaller(model: HybridLM, form: str) -> HybridLM:
    """Return a copy of a model with small weights."""
    return shrink(copy.deepcopy(model), form)


def relative(found: Tensor, exact: Tensor) -> float:
    """Return the root mean square of the difference, relative to that of the exact values."""
    return ((found - exact).norm() / exact.norm()).item()


@torch.no_grad()
def random_errors(names: list[str], forms: list[str], seeds: int, tokens: int = 256) -> list[dict[str, Any]]:
    """Return the relative errors of logits of random models, the worst of the seeds, one row a model."""
    rows = []
    for name in names:
        row: dict[str, Any] = {"model": name}
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = HybridLM(RANDOM[name]()).eval()
            draw_weights(model, seed)
            ids = torch.randint(model.config.vocab_size, (1, tokens))
            exact = model(ids).logits
            for form in forms:
                logits = smaller(model, form)(ids).logits
                row[form] = max(row.get(form, 0.0), relative(logits, exact))
        row["parameters"] = sum(x.numel() for x in model.parameters())
        rows.append(row)
    return rows


# ---- a trained model


def trained_model(folder: Path, steps: int) -> tuple[HybridLM, bytes, float]:
    """Return a model trained for so many steps, text that it was not trained on, and the seconds of training.

    A model that the folder has already took 0 seconds.
    """
    folder, seconds = folder / f"trained-{steps}", 0.0
    texts = {name: folder / "text" / name for name in ("train", "held-out")}
    model = folder / "run" / "model"
    if not (model / "config.json").exists():
        begun = time.perf_counter()
        shutil.rmtree(folder, ignore_errors=True)
        for path in texts.values():
            path.mkdir(parents=True)
        files = sorted(file for pattern in TEXTS for file in ROOT.glob(pattern))
        for n, file in enumerate(files):
            target = texts["train" if n % HELD_OUT else "held-out"]
            (target / f"{n:04}.txt").write_bytes(file.read_bytes())
        base = tiny("GGGA", 257)  # the bytes, and the token that ends a document
        config = replace(
            base, hidden_size=256,
            linear=replace(base.linear, heads=4, value_heads=4),
            attention=replace(base.attention, heads=4, kv_heads=1),
            feed=replace(base.feed, size=704),
        )  # fmt: skip
        torch.manual_seed(0)
        HybridLM(config).save_pretrained(folder / "begin")
        options = {
            "--model": folder / "begin", "--data": texts["train"], "--out": folder / "run", "--steps": steps,
            "--cache": folder / "tokens", "--eval-every": 0, "--sample-every": 0, "--save-every": 0,
        }  # fmt: skip
        command = [sys.executable, "-m", "lineate.cli", "train", *(str(x) for pair in options.items() for x in pair)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - begun
    held_out = b"".join(file.read_bytes() for file in sorted(texts["held-out"].iterdir()))
    return HybridLM.from_pretrained(model, progress=False), held_out, seconds


def rows_of(text: bytes, n: int) -> Tensor:
    """Return n rows of bytes from all over the text."""
    starts = torch.linspace(0, len(text) - ROW, n).long().tolist()
    return torch.tensor([list(text[start : start + ROW]) for start in starts])


@torch.no_grad()
def logits_of(model: HybridLM, ids: Tensor, at_a_time: int = 16) -> Tensor:
    return torch.cat([model(rows).logits for rows in ids.split(at_a_time)])


def perplexity(logits: Tensor, ids: Tensor) -> float:
    return math.exp(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item())


def greedy(model: HybridLM, prompts: Tensor, new: int) -> Tensor:
    return torch.stack(list(generate(model, prompts, new, temperature=0, stop=())), 1)


def same_until(a: Tensor, b: Tensor) -> Tensor:
    """Return how many tokens of each row are the same before the first that is not."""
    return (a == b).long().cumprod(1).sum(1)


@torch.no_grad()
def trained_errors(
    model: HybridLM, held_out: bytes, forms: list[str], rows: int = 64, tokens: int = 2000
) -> list[dict[str, Any]]:
    """Compare small weights with float32 on held-out text; one row a form, that of float32 first.

    - text: the part of all positions of held-out rows at which the likeliest next byte is the same (teacher-forced).
    - own: the same over `tokens` tokens that float32 itself has chosen after held-out prompts.
    - free: the part of `tokens` tokens that are the same when each side goes on from its own tokens.
    """
    ids = rows_of(held_out, rows)
    exact = logits_of(model, ids)
    each = 100
    prompts = rows_of(held_out, tokens // each)[:, :PROMPT]
    said = greedy(model, prompts, each)
    whole = torch.cat([prompts, said], 1)
    found: list[dict[str, Any]] = [{"form": "float32", "perplexity": perplexity(exact, ids)}]
    for form in forms:
        other = smaller(model, form)
        logits = logits_of(other, ids)
        forced = logits_of(other, whole)[:, PROMPT - 1 : -1].argmax(-1)
        free = greedy(other, prompts, each)
        found.append(
            {
                "form": form,
                "logits": relative(logits, exact),
                "text": (logits.argmax(-1) == exact.argmax(-1)).float().mean().item(),
                "positions": ids.numel(),
                "own": (forced == said).float().mean().item(),
                "free": (free == said).float().mean().item(),
                "free_until": same_until(free, said).float().mean().item(),
                "tokens": said.numel(),
                "perplexity": perplexity(logits, ids),
                "perplexity_rise": perplexity(logits, ids) / found[0]["perplexity"] - 1,
            }
        )
    return found

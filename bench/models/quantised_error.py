"""How far weights of 8 and 4 bits take a model from its float32 self: random models, and trained ones.

    python -m bench.models.quantised_error [--model compact] [--steps N] [--json FILE]

`lineate train` makes the trained models, byte by byte, without a tenth of the files, and they are kept in a folder: one
of 3.5 million parameters from this repository's own text, and one of 50 million (compact), which needs a GPU, from
Python's standard library.
"""

import argparse
import copy
import json
import math
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.models.quantised_model import draw_weights, shrink
from bench.models.quantised_tables import trained_table
from lineate.generation import generate
from lineate.models import HybridConfig, HybridLM
from lineate.models.presets import compact, small, tiny

ROOT = Path(__file__).parents[2]
TEXTS = ("docs/**/*.md", "lineate/**/*.py", "bench/**/*.py", "tests/**/*.py", "examples/**/*.py")
HELD_OUT = 10  # one file of this many is not trained on
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
    """Return a copy of a model with quantised weights."""
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


# ---- trained models


class Trained(NamedTuple):
    """A model to train."""

    config: Callable[[], HybridConfig]
    files: Callable[[], list[Path]]
    steps: int
    options: dict[str, Any]
    """Of `lineate train`."""


def _little() -> HybridConfig:
    base = tiny("GGGA", 257)  # the bytes, and the token that ends a document
    return replace(
        base, hidden_size=256,
        linear=replace(base.linear, heads=4, value_heads=4),
        attention=replace(base.attention, heads=4, kv_heads=1),
        feed=replace(base.feed, size=704),
    )  # fmt: skip


TRAINED = {
    "little": Trained(_little, lambda: [file for pattern in TEXTS for file in ROOT.glob(pattern)], 400, {}),
    "compact": Trained(
        lambda: compact("GGGA", 257),
        lambda: [x for x in Path(sysconfig.get_path("stdlib")).rglob("*.py") if "site-packages" not in x.parts],
        600,
        {"--length": 2048, "--rows": 16, "--lr": 2e-3, "--warmup": 40, "--dtype": "bfloat16"},
    ),
}


def trained_model(folder: Path, steps: int, name: str = "little") -> tuple[HybridLM, bytes, float]:
    """Return a model trained for n steps, text that it was not trained on, and the seconds of training.

    A model that the folder has already took 0 seconds.
    """
    kind = TRAINED[name]
    folder, seconds = folder / (f"trained-{steps}" if name == "little" else f"{name}-{steps}"), 0.0
    texts = {name: folder / "text" / name for name in ("train", "held-out")}
    model = folder / "run" / "model"
    if not (model / "config.json").exists():
        begun = time.perf_counter()
        shutil.rmtree(folder, ignore_errors=True)
        for path in texts.values():
            path.mkdir(parents=True)
        for n, file in enumerate(sorted(kind.files())):
            target = texts["train" if n % HELD_OUT else "held-out"]
            (target / f"{n:04}.txt").write_bytes(file.read_bytes())
        torch.manual_seed(0)
        HybridLM(kind.config()).save_pretrained(folder / "begin")
        options = {
            "--model": folder / "begin", "--data": texts["train"], "--out": folder / "run", "--steps": steps,
            "--cache": folder / "tokens", "--eval-every": 0, "--sample-every": 0, "--save-every": 0, **kind.options,
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
    """Compare quantised weights with float32 on held-out text; one row a form, that of float32 first.

    - text: the part of all positions of held-out rows at which the likeliest next byte is the same (teacher-forced).
    - own: the same over `tokens` tokens that float32 itself has chosen after held-out prompts.
    - free: the part of `tokens` tokens that are the same when each side goes on from its own tokens.
    """
    device = model.embed.weight.device
    ids = rows_of(held_out, rows).to(device)
    exact = logits_of(model, ids)
    each = 100
    prompts = rows_of(held_out, tokens // each)[:, :PROMPT].to(device)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=TRAINED, default="compact")
    parser.add_argument("--steps", type=int, help="of training")
    parser.add_argument("--forms", nargs="+", default=["bfloat16", "fp8", "int8", "int4"])
    parser.add_argument("--folder", type=Path, default=Path("bench/out/quantised-weights"), help="where files are kept")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=Path("bench/out/quantised-error.json"))
    args = parser.parse_args()
    steps = args.steps or TRAINED[args.model].steps
    model, held_out, seconds = trained_model(args.folder, steps, args.model)
    rows = trained_errors(model.to(args.device).eval(), held_out, args.forms)
    about = {"steps": steps, "seconds": seconds, "held_out_bytes": len(held_out), "model": args.model}
    about["parameters"] = sum(x.numel() for x in model.parameters())
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    head = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "device": device, "torch": torch.__version__, "training": about}
    data = {"header": head, "trained_model": rows}
    trained_table(data)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

"""The steps of `lineate train` on a GPU: how much longer they take than the GPU works.

    python -m bench.archive.train_loop [--json FILE] [--patterns G,K] [--optimizers muon,adamw] [--rows 16]

For each pattern (preset compact, about 50M parameters) and optimiser, a run of bfloat16 autocast on random text makes
steps of rows x 4096 tokens in two ways, in turn: `ahead`, as `lineate train` does on one GPU, where the CPU queues a
step before it reads the loss of the one before, and `waiting`, where it reads every loss before the update. The
learning rate is so low that the weights stay what they are.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.models.train import busy_ms
from bench.timing import show
from lineate.training.config import TrainConfig
from lineate.training.loop import Trainer
from lineate.training.prepare import prepare

LENGTH = 4096
WAYS = ("ahead", "waiting")


def make_text(folder: Path) -> Path:
    """Write 4 MB of random words in 64 documents."""
    rng, texts = random.Random(0), folder / "texts"
    texts.mkdir()
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(2000)]
    for n in range(64):
        (texts / f"{n}.txt").write_text(" ".join(rng.choices(words, k=10_000)))
    return texts


def step_ms(trainer: Trainer, way: str, steps: int) -> float:
    """Return the milliseconds of a step, from an idle GPU to the look at the last loss."""
    trainer.runs_ahead = way == "ahead"
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        trainer.train_step()
    trainer.settle()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1e3


def measure(folder: Path, pattern: str, optimizer: str, rows: int, rounds: int, steps: int) -> dict[str, Any]:
    config = TrainConfig(
        out=str(folder / f"{pattern}-{optimizer}"), model="compact", pattern=pattern, data=(str(folder / "texts"),),
        cache=str(folder / "cache"), length=LENGTH, rows=rows, steps=10_000, optimizer=optimizer, dtype="bfloat16",
        lr=1e-5, device="cuda", eval_every=0, save_every=0, sample_every=0,
    )  # fmt: skip
    trainer = prepare(config)
    for way in WAYS:
        step_ms(trainer, way, 3)  # compiles, allocates, records
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for n in range(rounds):
        for way in WAYS if n % 2 else WAYS[::-1]:
            times[way].append(step_ms(trainer, way, steps))
    busy = busy_ms(trainer.train_step)
    trainer.close()
    return {"pattern": pattern, "optimizer": optimizer, "tokens": rows * LENGTH, "busy_ms": busy, "all_ms": times} | {
        f"{way}_ms": statistics.median(times[way]) for way in WAYS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("bench/out/train-loop.json"))
    parser.add_argument("--patterns", default="G,K")
    parser.add_argument("--optimizers", default="muon,adamw")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed together")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_text(folder)
        for pattern in args.patterns.split(","):
            for optimizer in args.optimizers.split(","):
                results.append(measure(folder, pattern, optimizer, args.rows, args.rounds, args.steps))
                torch.cuda.empty_cache()
    head = {
        "date": datetime.now(UTC).date().isoformat(), "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__}, "tokens": args.rows * LENGTH, "steps": args.steps,
    }  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"header": head, "results": results}, indent=1) + "\n")
    table = [
        [
            x["pattern"], x["optimizer"], f"{x['ahead_ms']:.1f}", f"{x['waiting_ms']:.1f}", f"{x['busy_ms']:.1f}",
            f"{x['ahead_ms'] / x['busy_ms']:.2f}x", f"{x['waiting_ms'] / x['busy_ms']:.2f}x",
        ]
        for x in results
    ]  # fmt: skip
    show(
        f"lineate train, {args.rows * LENGTH} tokens a step, ms, medians of {args.rounds} rounds of {args.steps} steps",
        ["pattern", "optimiser", "ahead", "waiting", "GPU busy", "ahead / busy", "waiting / busy"],
        table,
    )
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

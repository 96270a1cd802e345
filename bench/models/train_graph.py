"""Training steps of few tokens on a GPU: launch by launch from Python, and as one CUDA graph a step.

    python -m bench.models.train_graph [--patterns G,K,GGGA] [--tokens 2048] [--optimizer adamw] [--json FILE]

The models are those of bench.models.train (preset compact, about 50M parameters), in bfloat16 autocast over float32
weights, with clipping, one packed row of --tokens tokens, and bounds with empty sequences after it, as `lineate train`
has them. Steps follow each other without waiting; the batch and the learning rate are copied from the CPU every time.

    ms          wall time of a step, of many, from the first call to the end of the last on the GPU
    host ms     what the host spends on a step while the GPU has room in its queue
    busy ms     the sum of the kernels' times in a step (torch.profiler), launch by launch
    over        ms / busy ms: 1 if the GPU never waits for the host. Graphs are to reach 1.1
    replay ms   a replay alone, between events
"""

import argparse
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.models.train import busy_ms
from bench.rules.gpu_timing import back_to_back
from bench.timing import show
from lineate.models import HybridLM, preset
from lineate.training.graphed import GraphedStep
from lineate.training.optim import make_optimizer

PATTERNS = ("L", "R", "D", "G", "K", "A", "GGGA", "KKKM")
SEQUENCES = 8
"""The sequences of a batch: one with all tokens, and empty ones."""
WARM_UP = 5
QUEUED = 3
"""Steps that are queued while the host's time is measured: few enough for the queue of launches."""

Step = Callable[[], object]


def make_steps(pattern: str, tokens: int, optimizer: str, graph: bool) -> tuple[HybridLM, GraphedStep, Step]:
    """Return a model, its steps, and a function that makes the next one.

    Args:
        pattern: The letters of the layers.
        tokens: Tokens of a step.
        optimizer: The kind.
        graph: Whether a step is a graph.
    """
    torch.manual_seed(0)
    config = preset("compact", pattern=pattern)
    model = HybridLM(config).cuda()
    draw = torch.Generator().manual_seed(0)
    bounds = torch.tensor([0] + [tokens] * SEQUENCES).pin_memory()
    rows = [torch.randint(config.vocab_size, (1, tokens + 1), generator=draw) for _ in range(4)]
    given = [[(x[:, :-1].pin_memory(), x[:, 1:].pin_memory(), bounds, float(tokens))] for x in rows]

    def loss(ids: Tensor, targets: Tensor, cu_seqlens: Tensor, count: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            total: Tensor = model.loss_sum(ids, targets, cu_seqlens)
        return total / count

    made = GraphedStep(
        model, make_optimizer(model, optimizer, 1e-4, 0.1, (0.9, 0.95)), loss, given[0], clip=1.0, graph=graph
    )
    done = 0

    def step() -> Tensor:
        nonlocal done
        done += 1
        return made(given[done % len(given)], 1e-4 / done).numbers

    return model, made, step


def wall_ms(step: Step, steps: int) -> float:
    """Return the milliseconds of a step, of many that are not waited for."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1e3


def host_ms(step: Step, rounds: int) -> float:
    """Return the milliseconds that the host spends on a step while the GPU's queue is not full."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(QUEUED):
            step()
        found.append((time.perf_counter() - begin) / QUEUED * 1e3)
    torch.cuda.synchronize()
    return statistics.median(found)


def measure(pattern: str, tokens: int, optimizer: str, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Measure both kinds of steps of a model, and compare their weights after the same steps.

    Args:
        pattern: The letters of the layers.
        tokens: Tokens of a step.
        optimizer: The kind.
        rounds: How often each is measured; medians are kept.
        steps: Steps in a measurement.
    """
    rows: list[dict[str, Any]] = []
    weights = []
    for graph in (False, True):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        model, made, step = make_steps(pattern, tokens, optimizer, graph)
        for _ in range(WARM_UP):
            step()
        torch.cuda.synchronize()
        first = time.perf_counter() - begin
        weights.append([x.detach().cpu() for x in model.parameters()])
        times = [wall_ms(step, steps) for _ in range(rounds)]
        row = {
            "pattern": pattern, "optimizer": optimizer, "kind": "graph" if graph else "launches", "why": made.why,
            "ms": statistics.median(times), "all_ms": times, "host_ms": host_ms(step, rounds),
            "between_events_ms": statistics.median(back_to_back([step], steps)), "first_s": first,
            "parameters": sum(x.numel() for x in model.parameters()),
            "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
            "reserved_mib": torch.cuda.max_memory_reserved() / 2**20,
        }  # fmt: skip
        row["busy_ms"] = busy_ms(step) if not graph else rows[0]["busy_ms"]
        rows.append(row)
        print({key: x for key, x in row.items() if key != "all_ms"}, flush=True)
        del model, made, step
    rows[1]["same_bits"] = all(map(torch.equal, *weights))
    return rows


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table: a model, with launches and as a graph.

    Args:
        results: What `measure` returned for all models.
    """
    made = []
    for plain, graph in zip(results[::2], results[1::2], strict=True):
        busy = plain["busy_ms"]
        made.append([
            plain["pattern"], plain["optimizer"], f"{plain['parameters'] / 1e6:.1f}", f"{busy:.2f}",
            f"{plain['ms']:.2f}", f"{plain['host_ms']:.2f}", f"{plain['ms'] / busy:.2f}x",
            f"{graph['ms']:.2f}", f"{graph['host_ms']:.2f}", f"{graph['ms'] / busy:.2f}x",
            f"{graph['between_events_ms']:.2f}", f"{plain['ms'] / graph['ms']:.2f}x",
            "yes" if graph["same_bits"] else "no", graph["why"] or "",
        ])  # fmt: skip
    return made


COLUMNS = (
    "pattern", "optimizer", "M parameters", "busy ms", "launches ms", "host", "over", "graph ms", "host", "over",
    "replay ms", "faster", "same bits", "why no graph",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("bench/out/train-graph.json"))
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    head = {
        "date": datetime.now(UTC).date().isoformat(), "gpu": torch.cuda.get_device_name(), "tokens": args.tokens,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton")},
    }  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for pattern in args.patterns.split(","):
        results += measure(pattern, args.tokens, args.optimizer, args.rounds, args.steps)
        args.json.write_text(json.dumps({"header": head, "results": results}, indent=1) + "\n")
    show(f"1 x {args.tokens} tokens a step, medians", list(COLUMNS), table(results))
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

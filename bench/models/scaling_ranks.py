"""Tensor ranks over gloo on this machine: bytes that are counted and planned, times that are measured and simulated.

    python -m bench.models.scaling_ranks [--ranks 2,4] [--rounds 60] [--json FILE]

The simulation is that of bench.models.scaling, with this machine's numbers in place of an H200's: a rank's time
without its collectives (all ranks run at once, and sums do nothing), plus what its collectives should take. That is a
time for each call and a rate, fitted to sums of 1 KiB to 16 MiB. More ranks than cores share the cores.
"""

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from bench.timing import OtherProcesses, cpu_model, show
from lineate.models import AttentionConfig, FeedConfig, HybridConfig, HybridLM, LinearConfig
from lineate.models.sharding import share_out_model, sum_shared_gradients
from lineate.parallel.tensor.ranks import Ranks
from lineate.planning import (
    Model,
    Received,
    decode_received,
    plan_memory,
    prefill_received,
    split_model,
    training_received,
)

CONFIG = HybridConfig(
    vocab_size=4096, hidden_size=512, n_layers=4, pattern="GGGA", linear=LinearConfig(8, 8, 64, 64),
    attention=AttentionConfig(8, 4, 64, rotary_dim=32), feed=FeedConfig(1536),
)  # fmt: skip
TOKENS, ROWS = 64, 8
SIZES = tuple(2**n for n in range(10, 25, 2))
"""Bytes of the sums to which time and rate are fitted."""


class Silent(Ranks):
    """Ranks whose collectives do nothing, so that a rank's own time remains."""

    def sum_in_place(self, x: Tensor) -> Tensor:
        return x

    def largest(self, x: Tensor) -> Tensor:
        return x.clone()

    def gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        return torch.cat([x] * self.size, -1)


class Counted(Ranks):
    """Ranks that add up the bytes that they receive."""

    received, calls = 0, 0

    def _count(self, nbytes: int) -> None:
        self.received, self.calls = self.received + nbytes, self.calls + 1

    def sum_in_place(self, x: Tensor) -> Tensor:
        self._count(2 * (x.nbytes - x.nbytes // self.size))
        return super().sum_in_place(x)

    def largest(self, x: Tensor) -> Tensor:
        self._count(2 * (x.nbytes - x.nbytes // self.size))
        return super().largest(x)

    def gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        self._count(x.nbytes // x.shape[-1] * max(sizes) * (self.size - 1))
        return super().gather(x, sizes)


def calls_of(model: HybridLM) -> dict[str, Callable[[], Any]]:
    """Return a prefill, a decoding step and a training step of a model."""
    ids = torch.randint(CONFIG.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    rows = ids.view(ROWS, -1)
    with torch.no_grad():
        state = model(rows, last_only=True).state

    def prefill() -> None:
        with torch.no_grad():
            model(ids, last_only=True)

    def decode() -> None:
        with torch.no_grad():
            model(rows[:, :1], state=state)

    def train() -> None:
        model.loss_sum(ids, ids).backward()
        sum_shared_gradients(model)
        model.zero_grad()

    return {"prefill": prefill, "decode": decode, "training": train}


def planned(ranks: int) -> dict[str, Received]:
    """Return what `lineate plan` says that a rank receives."""
    plan = plan_memory(split_model(Model("benched", CONFIG, torch.float32, "config"), tensor=ranks))
    return {
        "prefill": prefill_received(plan, 1, TOKENS),
        "decode": decode_received(plan, ROWS),
        "training": training_received(plan, TOKENS, TOKENS, half=False),
    }


def fastest(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the seconds of the slowest rank in the fastest of the rounds, in which the calls take turns."""
    found = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            taken = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            found[name] = min(found[name], taken.item())
    return found


def measure(rank: int, ranks: int, port: int, rounds: int, folder: str) -> None:
    """Run one rank; rank 0 writes what was found."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    group = dist.group.WORLD
    tensors = {size: torch.zeros(size // 4) for size in SIZES}
    sums = fastest({str(size): partial(dist.all_reduce, x) for size, x in tensors.items()}, rounds)
    torch.manual_seed(0)
    whole = HybridLM(CONFIG)
    counted = Counted(group)
    shared, silent = share_out_model(whole, counted), share_out_model(whole, Silent(group))
    bytes_of_weights = sum(x.nbytes for x in [*shared.parameters(), *shared.buffers()])
    found: dict[str, Any] = {}
    alone = calls_of(silent)
    for name, call in calls_of(shared).items():
        counted.received, counted.calls = 0, 0
        call()
        received, calls = counted.received, counted.calls
        seconds = fastest({"shared": call, "alone": alone[name]}, rounds)
        found[name] = {
            "received_bytes": received, "calls": calls, "alone_seconds": seconds["alone"], "seconds": seconds["shared"],
        }  # fmt: skip
    if rank == 0:
        made = {"ranks": ranks, "weights_bytes": bytes_of_weights, "sums_seconds": sums, "calls": found}
        Path(folder, "found.json").write_text(json.dumps(made))
    dist.barrier()
    dist.destroy_process_group()


def fit(sums: dict[int, float], ranks: int) -> tuple[float, float]:
    """Return the seconds of a call and the bytes a second that explain the sums, by their relative errors."""
    points = [(2 * (size - size // ranks), seconds) for size, seconds in sums.items()]
    weights = [1 / seconds**2 for _, seconds in points]
    s, sx, sy, sxx, sxy = (
        sum(w * f(x, y) for w, (x, y) in zip(weights, points, strict=True))
        for f in (lambda x, y: 1, lambda x, y: x, lambda x, y: y, lambda x, y: x * x, lambda x, y: x * y)
    )
    slope = (s * sxy - sx * sy) / (s * sxx - sx * sx)
    return max(0.0, (sy - slope * sx) / s), 1 / slope


def compare(found: dict[str, Any]) -> dict[str, Any]:
    """Return the measured numbers with those that are planned and simulated."""
    ranks = found["ranks"]
    sums = {int(size): seconds for size, seconds in found["sums_seconds"].items()}
    each, rate = fit(sums, ranks)
    wanted = planned(ranks)
    plan = plan_memory(split_model(Model("benched", CONFIG, torch.float32, "config"), tensor=ranks))
    rows = []
    for name, x in found["calls"].items():
        made = x["alone_seconds"] + x["calls"] * each + x["received_bytes"] / rate
        rows.append({
            "what": name, **x, "planned_bytes": wanted[name].total, "planned_calls": wanted[name].calls,
            "simulated_seconds": made, "simulated_over_measured": made / x["seconds"],
        })  # fmt: skip
    return {
        "ranks": ranks, "weights_bytes": found["weights_bytes"], "planned_weights_bytes": plan.weights,
        "sums_seconds": sums, "call_seconds": each, "bytes_per_second": rate, "rows": rows,
    }  # fmt: skip


def gloo_table(found: dict[str, Any]) -> list[str]:
    """Return the table of docs/scaling.md for the contents of a file."""
    lines = [
        "| ranks | a sum | rate | | bytes received | collectives | alone ms | simulated | measured | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for x in found["results"]:
        link = f"{x['ranks']} | {1e6 * x['call_seconds']:.0f} us | {x['bytes_per_second'] / 1e9:.2f} GB/s"
        for r in x["rows"]:
            times = " | ".join(f"{1e3 * r[key]:.1f}" for key in ("alone_seconds", "simulated_seconds", "seconds"))
            counted = f"{r['received_bytes']:,} | {r['calls']}"
            lines.append(f"| {link} | {r['what']} | {counted} | {times} | {r['simulated_over_measured']:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, default=Path("bench/out/scaling-ranks.json"))
    args = parser.parse_args()
    others, results = OtherProcesses(), []
    for ranks in map(int, args.ranks.split(",")):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(measure, (ranks, store.port, args.rounds, folder), nprocs=ranks, start_method="spawn")
            results.append(compare(json.loads(Path(folder, "found.json").read_text())))
    for x in results:
        title = f"{x['ranks']} ranks: {1e6 * x['call_seconds']:.0f} us a sum, {x['bytes_per_second'] / 1e9:.2f} GB/s"
        table = [
            [r["what"], f"{r['received_bytes']:,}", f"{r['planned_bytes']:,}", str(r["calls"]),
             f"{1e3 * r['alone_seconds']:.2f}", f"{1e3 * r['simulated_seconds']:.2f}", f"{1e3 * r['seconds']:.2f}",
             f"{r['simulated_over_measured']:.2f}"]
            for r in x["rows"]
        ]  # fmt: skip
        columns = ["", "bytes received", "planned", "sums", "alone ms", "simulated", "measured", "simulated / measured"]
        show(title, columns, table)
    head = {
        "date": datetime.now(UTC).date().isoformat(), "processor": cpu_model(), "cores": os.cpu_count(),
        "torch": torch.__version__, "threads_a_rank": 1, "cores_used_by_others": others.cores(),
        "rounds": args.rounds, "tokens": TOKENS, "rows": ROWS,
    }  # fmt: skip
    made = {"header": head, "results": results}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(made, indent=1) + "\n")
    print("\n".join(["", *gloo_table(made), "", f"wrote {args.json}"]))


if __name__ == "__main__":
    main()

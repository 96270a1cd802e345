"""Microseconds of the experts of a few tokens on a CPU: all in one call of C, compared with one after the other.

    python -m bench.models.experts_cpu [--json FILE] [--rows 1 4 16] [--forms float32 bfloat16 int8 int4 fp8]

The layer has the size of those of a model of 1B parameters: hidden 1024, 64 experts of 512 channels, 8 of them active.
Calls of both ways take turns, on several layers, so that weights are not in the caches. Both have the same bits.
"""

import argparse
import json
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.timing import OtherProcesses, cpu_model, interleave, show
from lineate.layers import MixtureOfExperts
from lineate.quantised import quantize
from lineate.quantised.weight import kept_nbytes

LAYERS = 3
FORMS = ("float32", "bfloat16", "int8", "int4", "fp8")


def layer_of(form: str, hidden: int, count: int, active: int, size: int) -> MixtureOfExperts:
    """Return a layer of random weights, of which those of the experts have a format."""
    layer = MixtureOfExperts(hidden, count, active, size).eval().requires_grad_(False)
    if form in ("float32", "bfloat16"):
        return layer.to(getattr(torch, form))
    for name in ("experts_gate_up", "experts_down"):
        setattr(layer, name, nn.Parameter(quantize(getattr(layer, name), form), requires_grad=False))
    return layer


@torch.inference_mode()
def measure(layers: list[MixtureOfExperts], form: str, rows: int, rounds: int, budget: float) -> dict[str, Any]:
    x = torch.randn(rows, layers[0].experts_down.shape[1], dtype=layers[0].router.weight.dtype)
    given = [(layer, layer.route(x)[1]) for layer in layers]
    turns = {"new": cycle(given), "old": cycle(given)}

    def run(way: str) -> Tensor | None:
        layer, chosen = next(turns[way])
        return layer.run_few(x, chosen) if way == "new" else layer.run_sorted(x, chosen, layer.one_by_one)

    layer, chosen = given[0]
    made = layer.run_few(x, chosen)
    assert made is not None and torch.equal(made, layer.run_sorted(x, chosen, layer.one_by_one))
    samples = interleave({way: partial(run, way) for way in turns}, rounds=rounds, budget=budget)
    each = (kept_nbytes(layer.experts_gate_up) + kept_nbytes(layer.experts_down)) / layer.count
    read = each * sum(len(own.unique()) for _, own in given) / len(given)
    found = {way: 1e6 * times.median for way, times in samples.items()}
    return {"form": form, "rows": rows, "bytes": read, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("bench/out/experts-cpu.json"))
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 4, 16))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--sizes", nargs=4, type=int, default=(1024, 64, 8, 512), help="hidden, experts, active, size")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--budget", type=float, default=5.0, help="seconds of each way")
    args = parser.parse_args()
    torch.manual_seed(0)
    others, found = OtherProcesses(), []
    for form in args.forms:
        layers = [layer_of(form, *args.sizes) for _ in range(LAYERS)]
        for rows in args.rows:
            found.append(measure(layers, form, rows, args.rounds, args.budget))
            print(found[-1], flush=True)
    table = [
        [r["form"], str(r["rows"]), f"{r['old']:.0f}", f"{r['new']:.0f}", f"{r['old'] / r['new']:.2f}x",
         f"{r['bytes'] / r['new'] / 1e3:.1f}"]
        for r in found
    ]  # fmt: skip
    show("experts of a few tokens", ["weights", "rows", "old us", "new us", "faster", "GB/s"], table)
    busy = others.cores()
    head = {"date": datetime.now(UTC).date().isoformat(), "cpu": cpu_model(), "threads": torch.get_num_threads()}
    print(f"other processes kept {busy or 0:.2f} cores busy")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"header": head | {"other_cores": busy}, "records": found}, indent=1) + "\n")
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

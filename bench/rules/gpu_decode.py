"""Time one layer of decoding on a GPU: as it is by default, with a ring, and a copy of its states.

    python -m bench.rules.gpu_decode --json bench/out/gpu-decode.json
    python -m bench.rules.gpu_decode --quick                     # one rule and the largest batch
    python -m bench.rules.gpu_decode --quick --tiles 64x2,128x4  # value columns and warps of a program of the ring

32 heads of 128, inputs in bfloat16, raw gates, q and k normalised. Times are microseconds a token, the median over
replays of a CUDA graph of n consecutive tokens, so that those with a ring include the write of the state. Small
batches take turns between several pools of states, so that these do not stay in the L2 cache. The counters of a ring
are advanced beforehand: in a model one small launch does so for all layers.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.rules.gpu_timing import back_to_back
from bench.timing import given_command
from lineate.call import Inputs, Options, RawGates, Slots
from lineate.decoding.capturing import captured
from lineate.kernels.portable.decode import decode
from lineate.kernels.portable.launch_ring import decode_ring
from lineate.ops.rings import ring_of
from lineate.rule import DELTA, GATED_DELTA, GATED_LINEAR, KIMI_DELTA, LINEAR, Rule

DEVICE, HEADS, SIZE = "cuda", 32, 128
ROWS = (256, 32, 1)
BUDGET = 0.65
"""The part of the time of a copy that a token with a ring may take, with 256 rows."""


class Layer(NamedTuple):
    """One rule, its decay, and the dtype of its states."""

    rule: Rule
    decay: str
    state: torch.dtype

    def __str__(self) -> str:
        return f"{self.rule.name}, {self.decay}, {str(self.state).removeprefix('torch.')} state"


LAYERS = [
    *(Layer(rule, decay, state) for state in (torch.bfloat16, torch.float32)
      for rule, decay in ((GATED_DELTA, "head"), (KIMI_DELTA, "channel"))),
    Layer(DELTA, "none", torch.bfloat16), Layer(GATED_LINEAR, "head", torch.bfloat16),
    Layer(LINEAR, "none", torch.bfloat16),
]  # fmt: skip
QUICK = LAYERS[:2]


def inputs_of(layer: Layer, rows: int) -> Inputs:
    """Draw a token of every row, without its state."""

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*size, device=DEVICE, dtype=dtype)

    wide = (SIZE,) if layer.decay == "channel" else ()
    decays = layer.decay != "none"
    return Inputs(
        q=normal(rows, 1, HEADS, SIZE), k=normal(rows, 1, HEADS, SIZE), v=normal(rows, 1, HEADS, SIZE),
        log_decay=normal(rows, 1, HEADS, *wide) if decays else None,
        beta=normal(rows, 1, HEADS) if layer.rule.corrects else None,
        A_log=normal(HEADS, dtype=torch.float32) if decays else None,
        dt_bias=normal(HEADS, *wide, dtype=torch.float32) if decays else None,
    )  # fmt: skip


def microseconds(step: Callable[[int, int], object], every: int, pools: int, replays: int) -> float:
    """Return the time of a token: step(i, pool) is run for each of `every` tokens, and all pools in turn."""
    for i in range(every):
        step(i, 0)  # compiles
    with captured(torch.device(DEVICE)) as graph:
        for i in range(every):
            for pool in range(pools):
                step(i, pool)
    graph.replay()
    return 1e3 * statistics.median(back_to_back([graph.replay], replays)) / (every * pools)


def measure(layer: Layer, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Time one layer with this number of rows."""
    size = rows * HEADS * SIZE * SIZE * layer.state.itemsize
    pools = max(1, min(32, -(-(256 << 20) // size)))
    inputs, every = inputs_of(layer, rows), args.every
    states = [torch.randn(rows, HEADS, SIZE, SIZE, device=DEVICE).to(layer.state) for _ in range(pools)]
    others = [torch.empty_like(x) for x in states]
    raw = layer.decay != "none"
    options = Options(layer.rule, SIZE**-0.5, True, raw_decay=raw, raw_beta=layer.rule.corrects)

    rings = [ring_of(inputs.replace(state=x), every, RawGates(raw, False), normalize_qk=True) for x in states]
    clocks = [torch.full((rows,), i, device=DEVICE) for i in range(every)]

    def with_ring(columns: int | None, warps: int | None) -> Callable[[int, int], object]:
        def step(i: int, pool: int) -> object:
            tensors = rings[pool].tensors._replace(tokens=clocks[i])
            return decode_ring(inputs.replace(state=states[pool]), Slots(), tensors, options, columns, warps)

        return step

    calls: dict[str, Callable[[int, int], object]] = {
        "copy": lambda i, pool: others[pool].copy_(states[pool]),
        "decode": lambda i, pool: decode(inputs.replace(state=states[pool]), Slots(), options),
        "ring": with_ring(None, None),
    }
    for columns, warps in args.tiles:
        calls[f"ring {columns}x{warps}"] = with_ring(columns, warps)
    times = {name: microseconds(call, every, pools, args.replays) for name, call in calls.items()}
    ratio = {name: x / times["copy"] for name, x in times.items() if name != "copy"}
    traffic = rings[0].traffic.ratio
    within = min(x for name, x in ratio.items() if name != "decode") <= BUDGET
    print(
        f"{layer!s:48} {rows:4} rows  " + "  ".join(f"{name} {x:8.2f}" for name, x in times.items())
        + "  of a copy: " + "  ".join(f"{name} {x:.3f}" for name, x in ratio.items())
        + ("" if rows < ROWS[0] else f"  within {BUDGET}" if within else f"  over {BUDGET}"),
        flush=True,
    )  # fmt: skip
    return {"layer": str(layer), "rows": rows, "every": every, "us": times, "of a copy": ratio, "bytes": traffic}


def tile(text: str) -> tuple[int, int]:
    columns, _, warps = text.partition("x")
    return int(columns), int(warps)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two layers, 256 rows alone")
    parser.add_argument("--every", type=int, default=8, help="the tokens after which a state is written (8)")
    parser.add_argument("--replays", type=int, default=30, help="replays of each graph (30)")
    parser.add_argument("--tiles", default="", help="more tilings of the kernel with a ring, such as 64x2,128x4")
    parser.add_argument("--json", type=Path, help="where the numbers go")
    args = parser.parse_args(arguments)
    args.tiles = [tile(text) for text in args.tiles.split(",") if text]
    return args


def main() -> None:
    args = parse()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device that torch can use")
    torch.manual_seed(0)
    results = [
        measure(layer, rows, args)
        for layer in (QUICK if args.quick else LAYERS)
        for rows in (ROWS[:1] if args.quick else ROWS)
    ]
    if args.json:
        found = {
            "header": {
                "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "command": given_command(),
                "date": datetime.now(UTC).date().isoformat(), "heads": HEADS, "size": SIZE,
            },
            "results": results,
        }  # fmt: skip
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
        print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

"""Attention of one layer over long caches on a GPU: Kimi Linear's latent attention, Qwen 3.5's gated attention.

    python -m bench.models.long_attention [--json FILE] [--quick] [--only decode|pieces] [--tune]

A layer's attention alone runs, without the projections around it; for latent attention that includes the products that
make keys and values, or absorb them. Times are of replays of a CUDA graph, over copies of the cache that together do
not fit the L2 cache. The bound is the larger one of the bytes at 4.8 TB/s and the operations at 790 TFLOP/s, counted
for causal pairs. "torch" is the same call with our kernels switched off, without a graph. Peak memory is that of one
call, beyond its inputs. --tune compares the tiles of the kernels instead.
"""

import argparse
import gc
import importlib.metadata
import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.timing import given_command, show
from lineate.decoding.capturing import capture_stream
from lineate.layers import GatedAttention, LatentAttention, TokenCache, latent, softmax
from lineate.layers.gpu import overlapping
from lineate.layers.softmax import attend

BYTES_PER_SECOND, FLOPS = 4.8e12, 790e12
ROWS = (1, 8, 64)
CONTEXTS = (4096, 32768, 131072, 1048576)
PIECES = (4096, 8192)
AFTER = (0, 4096, 32768, 131072)
COPIES = 2**28
"""Bytes of all copies of a cache together, several times the L2 cache."""
MOST_BYTES = 90e9
DEVICE = "cuda"
Calls = Sequence[Callable[[], Tensor]]


def kimi() -> LatentAttention:
    layer = LatentAttention(2304, 32, rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    return layer.to(DEVICE, torch.bfloat16)


def qwen() -> GatedAttention:
    layer = GatedAttention(2048, 16, kv_heads=2, head_dim=256, rotary_dim=64)
    return layer.to(DEVICE, torch.bfloat16)


LAYERS: dict[str, Callable[[], LatentAttention | GatedAttention]] = {"kimi": kimi, "qwen": qwen}


def make_calls(name: str, rows: int, n: int, t: int, decoding: bool, copies: int = 0) -> Calls:
    """Return one call for each copy of the cache: t tokens of every row, the last of n."""
    layer = LAYERS[name]()
    bytes_of_one = rows * n * sum(spec.nbytes(1) for spec in layer.state_spec)
    found: list[Callable[[], Tensor]] = []
    for _ in range(copies or max(1, min(8, COPIES // bytes_of_one))):
        tensors = {
            spec.name: torch.empty(rows, n, *spec.shape[1:], dtype=spec.dtype, device=DEVICE).normal_()  # type: ignore[arg-type]
            for spec in layer.state_spec
        }
        cache = TokenCache(tensors, torch.full((rows,), n, device=DEVICE) if decoding else n)
        if isinstance(layer, LatentAttention):
            q = torch.randn(rows, t, 32, 192, dtype=torch.bfloat16, device=DEVICE)
            found.append(partial(layer._read, q, cache, None))
        else:
            q = torch.randn(rows, t, 16, 256, dtype=torch.bfloat16, device=DEVICE)
            found.append(partial(attend, q, cache, "keys", "values", 256**-0.5, None))
    return found


def bound_us(name: str, rows: int, n: int, t: int) -> float:
    """Return the microseconds that bytes or operations need."""
    pairs = rows * (t * (n - t) + t * (t + 1) // 2)
    if name == "qwen":
        flops, moved = 4 * 16 * 256 * pairs, rows * (n * 2048 + 2 * t * 16 * 256 * 2)
    else:
        weights = 2 * 32 * 512 * (128 + 128)
        absorbed = weights * rows * t + 2 * 32 * (512 + 64 + 512) * pairs
        expanded = weights * rows * n + 2 * 32 * (128 + 64 + 128) * pairs
        flops, moved = min(absorbed, expanded), rows * (n * 1152 + t * 32 * (192 + 128) * 2) + weights
    return 1e6 * max(flops / FLOPS, moved / BYTES_PER_SECOND)


def graph_us(calls: Calls, rounds: int) -> float:
    """Return the median microseconds of one call in a graph of all of them."""
    stream, graph = capture_stream(torch.cuda.current_device()), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), overlapping():
        calls[0]()
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    times = []
    for _ in range(rounds + 1):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(1e3 * first.elapsed_time(last) / len(calls))
    return statistics.median(times[1:])


def eager_us(call: Callable[[], Tensor], rounds: int) -> float:
    """Return the median microseconds of a call without a graph, which torch may not be able to record."""
    times = []
    for _ in range(rounds):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(1e3 * first.elapsed_time(last))
    return statistics.median(times)


def without_kernels() -> AbstractContextManager[Any]:
    """Let torch's kernels run."""
    off = mock.Mock(return_value=False)
    return mock.patch.multiple(softmax, runs_kernels=off)


def measured(calls: Calls, rounds: int, ours: bool) -> tuple[float, float]:
    """Return the microseconds of a call, and its peak memory in MB; NaN where torch has too little memory."""
    try:
        with (
            nullcontext() if ours else without_kernels(),
            nullcontext() if ours else mock.patch.object(latent, "runs_kernels", mock.Mock(return_value=False)),
        ):
            calls[0]()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            calls[0]()
            peak = (torch.cuda.max_memory_allocated() - before) / 1e6
            return graph_us(calls, rounds) if ours else eager_us(calls[0], rounds), peak
    except (torch.OutOfMemoryError, RuntimeError) as error:
        print(f"torch: {str(error)[:120]}", flush=True)
        return float("nan"), float("nan")


@torch.inference_mode()
def measure(name: str, rows: int, n: int, t: int, decoding: bool, args: argparse.Namespace) -> dict[str, Any] | None:
    each = rows * n * (1152 if name == "kimi" else 2048)
    if each > MOST_BYTES:
        return None
    calls = make_calls(name, rows, n, t, decoding)
    us, peak = measured(calls, args.rounds, True)
    theirs, their_peak = float("nan"), float("nan")
    if not args.ours and rows * t * n < 2**30:
        theirs, their_peak = measured(calls, 2, False)
    bound = bound_us(name, rows, n, t)
    row = {
        "layer": name, "rows": rows, "tokens": t, "after": n - t, "us": us, "bound_us": bound, "peak_mb": peak,
        "torch_us": theirs, "torch_peak_mb": their_peak,
    }  # fmt: skip
    print({key: round(x, 1) if isinstance(x, float) else x for key, x in row.items()}, flush=True)
    del calls
    gc.collect()
    torch.cuda.empty_cache()
    return row


def cases(args: argparse.Namespace) -> list[tuple[str, int, int, int, bool]]:
    """Return layers, rows, n, t, and whether lengths are on the device, as when decoding."""
    found: list[tuple[str, int, int, int, bool]] = []
    contexts, after = (CONTEXTS[:2], AFTER[:3]) if args.quick else (CONTEXTS, AFTER)
    if args.only != "pieces":
        found += [(name, rows, n, 1, True) for name, rows, n in product(LAYERS, ROWS, contexts)]
        found += [("kimi", 8, n, t, True) for n, t in product(contexts[1:2], (3, 5, 17, 64, 65))]
    if args.only != "decode":
        found += [(name, 1, t + n, t, False) for name, t, n in product(LAYERS, PIECES, after)]
        found += [("kimi", 1, 32768 + t, t, False) for t in (64, 65, 256, 1024)]
    return found


def tune_latent(rounds: int) -> None:
    """Time the tiles of the kernel of decoding."""
    from lineate.kernels.launching import compile_only
    from lineate.kernels.layers import parts
    from lineate.kernels.layers.latent import Tiles, latent_attention

    shapes = [
        (32, 32, 4, 2), (32, 32, 4, 3), (32, 32, 4, 4), (32, 32, 8, 3), (32, 16, 4, 4), (32, 64, 4, 2), (32, 64, 8, 2),
        (32, 64, 8, 3), (64, 64, 8, 2), (64, 32, 8, 3),
    ]  # fmt: skip
    tiles = [Tiles(*shape) for shape in shapes]
    problems = [(1, 32768, 1), (64, 4096, 1), (8, 32768, 5), (8, 32768, 1)]
    made = {}
    for rows, n, t in problems:
        copies = max(1, min(8, COPIES // (rows * n * 1152)))
        q, r = (torch.randn(rows, t, 32, d, dtype=torch.bfloat16, device=DEVICE) for d in (512, 64))
        caches = [torch.randn(rows, n, 1, 576, dtype=torch.bfloat16, device=DEVICE) for _ in range(copies)]
        made[rows, n, t] = q, r, caches, torch.full((rows,), n, device=DEVICE)

    def run(problem: tuple[int, int, int], which: Any, parts: int | None, copy: int = 0) -> Tensor:
        q, r, caches, lengths = made[problem]
        return latent_attention(q, r, caches[copy], lengths, 0.1, which, parts)

    compile_only(partial(run_each, lambda which: run(problems[0], which, None), tiles))
    for problem in problems:
        times: dict[Any, float] = {}
        usual = parts.parts_of(torch.device(DEVICE, 0), problem[0] * problem[2], 2)  # two programs of 32 queries
        for which, count in product(tiles, (usual // 2, usual, 2 * usual)):
            calls = [partial(run, problem, which, count, i) for i in range(len(made[problem][2]))]
            try:
                times[which, count] = graph_us(calls, rounds)
            except Exception as error:  # too much shared memory
                print(f"{which}: {str(error)[:80]}", flush=True)
        print(f"latent rows, n, t {problem}: bound {bound_us('kimi', problem[0], problem[1], problem[2]):.1f} us")
        for which, count in sorted(times, key=lambda x: times[x])[:20]:
            print(f"  {times[which, count]:8.1f} us  parts {count}  {which}", flush=True)


def run_each(run: Callable[[Any], Tensor], tiles: Sequence[Any]) -> None:
    for x in tiles:
        run(x)


def tune_pieces(rounds: int) -> None:
    """Time the tiles of the kernel of pieces."""
    from lineate.kernels.launching import compile_only
    from lineate.kernels.layers.pieces import Block, Tiles, piece_attention

    wanted = {
        "kimi": [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (256, 64, 16, 2), (64, 64, 4, 2)],
        "qwen": [(128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 4), (64, 64, 4, 2)],
    }
    t = 4096
    for name, n in (("kimi", 8192), ("qwen", 8192), ("qwen", 36864)):
        heads, kv, key, value, shared = (32, 32, 128, 128, 64) if name == "kimi" else (16, 2, 256, 256, 0)
        q, k, v, p = (
            torch.randn(1, length, h, d, dtype=torch.bfloat16, device=DEVICE)
            for length, h, d in ((t, heads, key + shared), (n, kv, key), (n, kv, value), (n, 1, shared))
        )
        block = Block(k, v, p if shared else None)

        def run(tiles: Any, q: Tensor = q, block: Block = block, n: int = n) -> Tensor:
            return piece_attention(q, [block], n, n, 0.1, tiles=tiles)

        tiles = [Tiles(*x) for x in wanted[name]]
        compile_only(partial(run_each, run, tiles))
        flops = 2 * heads * (key + shared + value) * (t * (n - t) + t * (t + 1) // 2)
        for x in tiles:
            try:
                us = graph_us([partial(run, x)], rounds)
            except Exception as error:  # too much shared memory
                print(f"{x}: {str(error)[:80]}", flush=True)
                continue
            print(f"pieces {name} {t} after {n - t}: {us:8.1f} us  {flops / us / 1e6:5.0f} TFLOP/s  {x}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="short contexts alone")
    parser.add_argument("--only", choices=("decode", "pieces"))
    parser.add_argument("--ours", action="store_true", help="leave out torch's kernels")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    if args.tune:
        with torch.inference_mode():
            for name, tune in (("decode", tune_latent), ("pieces", tune_pieces)):
                if args.only in (None, name):
                    tune(args.rounds)
        return
    rows = [row for case in cases(args) if (row := measure(*case, args)) is not None]
    columns = ["layer", "rows", "tokens", "after", "us", "bound_us", "torch_us", "peak_mb", "torch_peak_mb"]
    show("attention of one layer", columns, [
        [f"{row[key]:.1f}" if isinstance(row[key], float) else str(row[key]) for key in columns] for row in rows
    ])  # fmt: skip
    if args.json:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        machine["triton"] = importlib.metadata.version("triton")
        found = {"command": given_command(), "date": datetime.now(UTC).isoformat(), "machine": machine, "rows": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

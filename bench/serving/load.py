"""Press a server with many clients for a time, and check afterwards that nothing of them is left.

    python -m bench.serving.load --seconds 60 --clients 32 --json load.json

The clients run in a process of their own. The server runs in this one, over a small random model or --model FOLDER, so
that slots, bytes of tensors, threads and open files can be counted before and after. The exit status is 1 if anything
is left, or if a client saw what it should not have seen.
"""

import argparse
import gc
import json
import multiprocessing
import os
import platform
import resource
import socket
import statistics
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import uvicorn

from bench.serving.clients import Tally, pressed
from bench.timing import given_command
from lineate.generation.loading import load_model
from lineate.models import HybridLM, preset
from lineate.serving.app import Settings, describe, make_app
from lineate.serving.cache.cache import StateCache
from lineate.serving.drafting import PromptLookup
from lineate.serving.draining import DrainingServer
from lineate.serving.engine.engine import Engine
from lineate.text.base import Tokenizer
from lineate.text.tokenizer import Bytes
from lineate.web.limits import Limits

CONTEXT, SPACING = 4096, 64


def main() -> None:
    """Read the options, press, print, and say whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--queue", type=int, default=24)
    parser.add_argument("--cache-mb", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--patience", type=float, default=120, help="seconds that a client waits for the next bytes")
    parser.add_argument("--model", help="folder of a model with its tokenizer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draft", action="store_true", help="guess tokens from the text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    asked = parser.parse_args()
    model, tokenizer = _load(asked.model, asked.device)
    report = run(model, tokenizer, asked)
    show(report)
    if asked.json is not None:
        asked.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(bool(report["leaks"] or report["faults"]))


def _load(folder: str | None, device: str) -> tuple[HybridLM, Tokenizer]:
    if folder is not None:
        return load_model(folder, None, device)
    torch.manual_seed(0)
    return HybridLM(preset("tiny", vocab_size=Bytes.vocab_size)).eval().to(device), Bytes()


def run(model: HybridLM, tokenizer: Tokenizer, asked: argparse.Namespace) -> dict[str, Any]:
    """Serve, press, drain, and return the numbers."""
    cache = StateCache(asked.cache_mb * 2**20, SPACING)
    engine = Engine(
        model, slots=asked.slots, context=CONTEXT, spacing=SPACING, queue=asked.queue, cache=cache,
        drafter=PromptLookup() if asked.draft else None,
    )  # fmt: skip
    engine.start()
    settings = Settings(limits=Limits(send_seconds=10, drain_seconds=20))
    app = make_app(engine, tokenizer, describe(model, tokenizer, "load", CONTEXT, asked.slots), settings)
    # Clients in this process would take the interpreter from the server.
    context = multiprocessing.get_context("spawn")
    with socket.socket() as listening, ProcessPoolExecutor(1, context) as elsewhere:
        listening.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = DrainingServer(app, uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        first = elsewhere.submit(pressed, url, 8, min(3.0, asked.seconds), asked.tokens, asked.seed + 1)
        first.result()  # all that is made once is made now
        _settle(engine)
        before = measure(engine, cache)
        began = time.perf_counter()
        options = asked.clients, asked.seconds, asked.tokens, asked.seed, asked.patience
        tallies = elsewhere.submit(pressed, url, *options).result()
        seconds = time.perf_counter() - began
        _settle(engine)
        after = measure(engine, cache)
        full = vars(cache.stats)
        over = cache.stats.bytes > cache.stats.budget_bytes
        cache.clear()
        leaks = find_leaks(before, after, engine, cache, app)
        if over:
            leaks.append(f"the cache has {full['bytes']} bytes, more than its budget")
        server.drain()
        thread.join(60)
        if thread.is_alive():
            leaks.append("the server did not end")
    engine.stop(drain=False)
    return {
        "command": " ".join(["python -m bench.serving.load", *given_command()]),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}, {model.device.type}",
        "seconds": round(seconds, 2),
        "kinds": {name: row(tally, seconds) for name, tally in tallies.items()},
        "tokens_per_second": round(sum(tally.tokens for tally in tallies.values()) / seconds, 1),
        "engine": vars(engine.stats),
        "cache": full,
        "before": before,
        "after": after,
        "leaks": leaks,
        "faults": [f"{name}: {what}" for name, tally in tallies.items() for what in tally.faults],
    }


def _settle(engine: Engine) -> None:
    """Wait until the engine has nothing to do."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        stats = engine.stats
        if not stats.waiting + stats.reading + stats.running + stats.waiting_answers:
            time.sleep(0.3)  # connections close
            return
        time.sleep(0.02)


def measure(engine: Engine, cache: StateCache) -> dict[str, int]:
    """Count what a leak would add to: tensors outside of the cache and the pool, threads, open files."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):  # compilers have kinds of tensors without memory
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    stats = engine.stats
    return {
        "waiting": stats.waiting,
        "reading": stats.reading,
        "running": stats.running,
        "rows": len(engine.pool),
        "tensor_bytes": sum(storages.values()),
        "pool_bytes": stats.pool_bytes,
        "cache_bytes": cache.stats.bytes,
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def find_leaks(
    before: dict[str, int], after: dict[str, int], engine: Engine, cache: StateCache, app: Any
) -> list[str]:  # fmt: skip
    """Return what is left of the clients, in words; the cache has been cleared."""
    found = [f"{after[name]} {name}" for name in ("waiting", "reading", "running", "rows") if after[name]]
    cleared = measure(engine, cache)
    if cleared["cache_bytes"]:
        found.append(f"{cleared['cache_bytes']} bytes in a cache that was cleared")
    own = {name: x["tensor_bytes"] - x["pool_bytes"] for name, x in (("before", before), ("cleared", cleared))}
    if own["cleared"] > own["before"]:  # before the cache was cleared there were its states too
        found.append(f"{own['cleared'] - own['before']} bytes of tensors")
    if after["threads"] > before["threads"]:
        found.append(f"{after['threads'] - before['threads']} threads")
    if after["files"] > before["files"] + 2:
        found.append(f"{after['files'] - before['files']} open files")
    if app.state.traffic.active:
        found.append(f"{app.state.traffic.active} requests that the server counts as active")
    return found


def row(tally: Tally, seconds: float) -> dict[str, Any]:
    """Return the numbers of one kind of client."""
    return {
        **{name: tally.outcomes[name] for name in ("answered", "left", "refused", "busy", "differing", "fault")},
        "first_token_ms": _quantiles(tally.first),
        "answer_ms": _quantiles(tally.seconds),
        "tokens": tally.tokens,
        "tokens_per_second": round(tally.tokens / seconds, 1),
        "cached": round(tally.cached / tally.prompt, 3) if tally.prompt else None,
    }


def _quantiles(values: list[float]) -> list[float] | None:
    """Return the median and the 95th percentile in milliseconds."""
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=20)
    return [round(1000 * statistics.median(values), 1), round(1000 * cuts[-1], 1)]


def show(report: dict[str, Any]) -> None:
    """Print the table, and what is wrong."""
    columns = ("answered", "left", "refused", "busy", "differing", "fault")
    heads = f"{'clients':<11}" + "".join(f"{name:>10}" for name in columns)
    print(heads + f"{'first ms (50, 95%)':>21}{'answer ms (50, 95%)':>21}{'tokens/s':>10}{'cached':>8}")
    for name, numbers in report["kinds"].items():
        line = f"{name:<11}" + "".join(f"{numbers[column]:>10}" for column in columns)
        for times in (numbers["first_token_ms"], numbers["answer_ms"]):
            line += f"{'' if times is None else f'{times[0]:.0f}, {times[1]:.0f}':>21}"
        cached = "" if numbers["cached"] is None else f"{numbers['cached']:.0%}"
        print(line + f"{numbers['tokens_per_second']:>10}{cached:>8}")
    print(f"{report['tokens_per_second']} tokens/s in {report['seconds']} s on {report['machine']}")
    for kind in ("leaks", "faults"):
        print(f"{kind}: {len(report[kind]) or 'none'}", *report[kind][:20], sep="\n  ")


if __name__ == "__main__":
    main()

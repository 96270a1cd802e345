"""`lineate serve` with a published model's shape and random weights: streams in parallel, or one very long prompt.

    python -m bench.serving.flagships [--preset kimi-linear-48b] [--clients 1,32,128] [--json FILE]
    python -m bench.serving.flagships --long 1048576 --new 64
    python -m bench.serving.flagships --published throughput

The server is a process of its own; each client streams one completion of a prompt of random ids, greedily and without
an end token. "first" and "between" are seconds until the first token and between two tokens, as clients see them;
"decode" is the rate while all clients decode. "step" is the time of a step of the engine: served, from the server's own
count of steps while all rows decode; alone, of an engine in this process without a server, after the server has ended.
The bound is that of `lineate plan` for a step: the least bytes or operations, experts chosen at random.

--long sends one prompt of many ids, and reports the seconds to read it, the progress that the stream and the log
showed, and the time of a token after it. Greedy texts of random weights may repeat themselves, and their tokens then
choose few experts: compare with --temperature 1.

--published runs a load for which others have published the figures of another engine on the same model and card, and
shows theirs next to ours. Their texts were real ones or random words, and their clients another program.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.serving.streams import Answer, Server, stream
from bench.timing import given_command, show
from lineate.generation.choice import Sampling
from lineate.models.presets import PRESETS
from lineate.models.random_weights import random_model
from lineate.planning import HARDWARE, MemoryPlan, plan_memory, read_model
from lineate.planning.hardware import decode_bound, prefill_bound
from lineate.quantised.which import name_of_bits
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.reading import default_spacing
from lineate.serving.engine.requests import Request
from lineate.serving.engine.warming import warm_up

ROOM = 64
"""Tokens of the context beyond a prompt and its continuation."""
PERIOD = 0.1
"""Seconds between two looks at the server's counts."""
STEPS = 40
"""Steps of the engine alone that are timed."""


class Published(NamedTuple):
    """A load with published figures; each is that of the engine's defaults, and of the best options that were found.

    Args:
        requests: How many requests.
        clients: The most that ran at a time.
        prompt: Tokens of a prompt.
        new: Tokens of an answer.
        seconds: Until the last answer ended, by the engine's defaults in bfloat16.
        best: The same, by the best options, with weights of 8 bits.
    """

    requests: int
    clients: int
    prompt: int
    new: int
    seconds: float
    best: float


PUBLISHED_PRESET = "qwen3-5-35b-a3b"
PUBLISHED_SOURCE = "vLLM 0.17.1 on one H200, by docs.gpustack.ai/2.1/performance-lab/qwen3.5-35b-a3b/h200"
PUBLISHED = {
    "throughput": Published(1000, 512, 1024, 128, 40.37, 33.09),
    "long": Published(100, 100, 32000, 100, 73.72, 59.32),
    "generation": Published(200, 200, 1000, 2000, 57.74, 49.34),
}


def body_of(asked: argparse.Namespace, ids: Sequence[int], new: int) -> dict[str, Any]:
    """Return the body of a request."""
    return {
        "prompt": list(ids), "max_tokens": new, "temperature": asked.temperature, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def options_of(asked: argparse.Namespace, slots: int, prompt: int) -> list[str]:
    """Return the options of the server for prompts of a length."""
    options = {
        "--dtype": asked.dtype, "--bits": asked.bits, "--device": asked.device, "--spacing": asked.spacing,
        "--slots": slots, "--queue": max(2 * slots, 16), "--context": prompt + asked.new + ROOM, "--cache": asked.cache,
        "--max-body": f"{16 * prompt // 2**20 + 8}MB", "--timeout": 3600,
    }  # fmt: skip
    words = [str(word) for pair in options.items() if pair[1] is not None for word in pair]
    return [asked.preset, "--random-weights", *words]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the value that a percentage of values do not exceed; None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else None


async def watch(server: Server, seen: list[dict[str, Any]]) -> None:
    """Add the server's counts and their time to a list until cancelled."""
    while True:
        counts = await asyncio.to_thread(server.get, "/lineate/stats")
        seen.append({"time": time.perf_counter(), **counts["engine"]})
        await asyncio.sleep(PERIOD)


def step_seconds(seen: Sequence[dict[str, Any]], rows: int) -> float | None:
    """Return the mean seconds of a step while a number of rows decoded and nothing else was done; None if never."""

    def decodes(counts: dict[str, Any]) -> bool:
        return counts["running"] == rows and not counts["reading"] and not counts["waiting"]

    pairs = [(a, b) for a, b in pairwise(seen) if decodes(a) and decodes(b)]
    steps = sum(b["steps"] - a["steps"] for a, b in pairs)
    return sum(b["time"] - a["time"] for a, b in pairs) / steps if steps else None


async def run_clients(
    server: Server, bodies: Sequence[bytes], clients: int
) -> tuple[list[Answer], list[dict[str, Any]]]:
    """Return the answers to requests, of which a number of clients send one after another, and the server's counts."""
    seen: list[dict[str, Any]] = []
    watching = asyncio.ensure_future(watch(server, seen))
    free = asyncio.Semaphore(clients)

    async def answered(body: bytes) -> Answer:
        async with free:
            return await stream(server.port, body)

    try:
        return await asyncio.gather(*map(answered, bodies)), seen
    finally:
        watching.cancel()


def summarise(answers: Sequence[Answer], seen: Sequence[dict[str, Any]], clients: int) -> dict[str, Any]:
    """Return the numbers of clients that ran together."""
    began, ended = min(x.began for x in answers), max(x.times[-1] for x in answers)
    tokens = sum(x.tokens for x in answers)
    all_since, all_until = max(x.times[0] for x in answers), min(x.times[-1] for x in answers)
    together = [t for x in answers for t in x.times if all_since < t <= all_until]
    firsts, gaps = [x.times[0] - x.began for x in answers], [gap for x in answers for gap in x.gaps]
    return {
        "clients": clients, "requests": len(answers), "tokens": tokens, "seconds": ended - began,
        "tokens_per_second": tokens / (ended - began),
        "decode_tokens_per_second": len(together) / (all_until - all_since) if all_until > all_since else None,
        "first_median": statistics.median(firsts), "first_p99": percentile(firsts, 99),
        "between_median": percentile(gaps, 50), "between_p99": percentile(gaps, 99),
        "served_step": step_seconds(seen, clients),
    }  # fmt: skip


def serve_clients(asked: argparse.Namespace, clients: Sequence[int]) -> list[dict[str, Any]]:
    """Return the numbers of each number of clients, of one server."""
    draw, found = random.Random(0), []
    with Server(options_of(asked, max(clients), asked.prompt)) as server:
        ready = server.wait(asked.patience)
        vocab = server.get("/lineate/info")["details"]["vocab_size"]
        print(f"ready after {ready:.1f} s", flush=True)

        def bodies(count: int, new: int) -> list[bytes]:
            prompts = [[draw.randrange(vocab) for _ in range(asked.prompt)] for _ in range(count)]
            return [json.dumps(body_of(asked, ids, new)).encode() for ids in prompts]

        asyncio.run(run_clients(server, bodies(1, 8), 1))  # whatever only the first request needs
        for count in clients:
            requests = bodies(asked.requests or count, asked.new)
            answers, seen = asyncio.run(run_clients(server, requests, count))
            found.append({"what": "clients", "prompt": asked.prompt, "new": asked.new, "ready_seconds": ready})
            found[-1] |= summarise(answers, seen, count)
            print({key: round(x, 4) if isinstance(x, float) else x for key, x in found[-1].items()}, flush=True)
    return found


def engine_steps(asked: argparse.Namespace, rows: Sequence[int]) -> dict[int, float]:
    """Return the median seconds of a step of an engine without a server, after the prompts were read."""
    device = asked.device if asked.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    model = random_model(asked.preset, asked.dtype, device, name_of_bits(asked.bits))
    spacing = asked.spacing or default_spacing(model.config, model.device.type == "cuda")
    pieces = -(-asked.prompt // spacing)  # one is read in each step, while the rows before it decode
    new = max(rows) * pieces + 2 * STEPS
    engine = Engine(model, slots=max(rows), context=asked.prompt + new + ROOM, spacing=spacing)
    warm_up(engine)
    draw, sampling, found = random.Random(1), Sampling(temperature=asked.temperature), {}
    for count in rows:
        handles = []
        for _ in range(count):
            ids = tuple(draw.randrange(model.config.vocab_size) for _ in range(asked.prompt))
            handles.append(engine.submit(Request(ids, sampling, max_new_tokens=new)))
        while engine.stats.running < count:
            engine.step()
        for _ in range(5):
            engine.step()
        seconds = []
        for _ in range(STEPS):
            begun = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - begun)
        found[count] = statistics.median(seconds)
        for handle in handles:
            handle.cancel()
        while engine.step():
            pass
    return found


def plan_of(asked: argparse.Namespace) -> MemoryPlan:
    """Return the plan of the model, for its bounds."""
    return plan_memory(read_model(asked.preset, asked.dtype, weights=name_of_bits(asked.bits)))


def measure_clients(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each number of clients, print a table and return its numbers."""
    found = serve_clients(asked, asked.clients)
    alone = engine_steps(asked, asked.clients) if asked.engine else {}
    card, plan, rows = HARDWARE[asked.hardware], plan_of(asked), []
    for x in found:
        count = x["clients"]
        routing = "expected" if count > 1 else "least"
        x["engine_step"] = alone.get(count)
        x["bound_step"] = decode_bound(plan, card, count, asked.prompt + asked.new // 2, routing).seconds
        decode = x["decode_tokens_per_second"]
        ms = [x[key] for key in ("between_median", "between_p99", "served_step", "engine_step", "bound_step")]
        rows.append([
            str(count), f"{x['tokens_per_second']:,.0f}", "" if decode is None else f"{decode:,.0f}",
            f"{x['first_median']:.2f}", f"{x['first_p99']:.2f}",
            *map(_milliseconds, ms),
        ])  # fmt: skip
    columns = [
        "clients", "tokens/s", "decode tokens/s", "first token s", "99%", "between ms", "99%", "step ms, served",
        "alone", "bound",
    ]  # fmt: skip
    show(f"{asked.preset}, prompts of {asked.prompt:,} ids, {asked.new} new tokens", columns, rows)
    return found


def measure_published(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a load with published figures, print a table and return its numbers."""
    load = PUBLISHED[asked.published]
    asked.preset, asked.clients, asked.engine = PUBLISHED_PRESET, [load.clients], False
    asked.prompt, asked.new, asked.requests = load.prompt, load.new, load.requests
    found = serve_clients(asked, asked.clients)[0]
    total = load.requests * (load.prompt + load.new)
    columns = ["", "seconds", "tokens/s, prompts included", "first token s", "99%"]
    ours = [f"{found[key]:.2f}" for key in ("first_median", "first_p99")]
    rows = [
        [f"lineate, {asked.bits or asked.dtype}", f"{found['seconds']:.1f}", f"{total / found['seconds']:,.0f}", *ours],
        ["theirs, defaults, bfloat16", f"{load.seconds:.1f}", f"{total / load.seconds:,.0f}", "", ""],
        ["theirs, best options, fp8", f"{load.best:.1f}", f"{total / load.best:,.0f}", "", ""],
    ]
    show(f"{asked.preset}, {load.requests} requests: {load.prompt:,} + {load.new:,} tokens", columns, rows)
    print(f"theirs: {PUBLISHED_SOURCE}")
    return [found | {"what": asked.published, "published_seconds": [load.seconds, load.best]}]


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.2f}"


def measure_long(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one long prompt, print a table and return its numbers."""
    with Server(options_of(asked, 1, asked.long)) as server:
        ready = server.wait(asked.patience)
        vocab = server.get("/lineate/info")["details"]["vocab_size"]
        print(f"ready after {ready:.1f} s", flush=True)
        draw = random.Random(0)
        ids = [draw.randrange(vocab) for _ in range(asked.long)]
        asyncio.run(stream(server.port, body_of(asked, ids[:100], 8)))
        body = json.dumps(body_of(asked, ids, asked.new)).encode()
        answer = asyncio.run(stream(server.port, body))
        logged = [line for line in server.lines if " tokens/s" in line]
    card, plan = HARDWARE[asked.hardware], plan_of(asked)
    first, read = answer.times[0] - answer.began, answer.own["first_token_seconds"]
    bounds = prefill_bound(plan, card, 1, asked.long), decode_bound(plan, card, 1, asked.long + asked.new // 2)
    progress = [x for x in answer.comments if x.startswith("reading")]
    found: dict[str, Any] = {
        "what": "long", "prompt": asked.long, "new": answer.tokens, "ready_seconds": ready, "body_bytes": len(body),
        "first_seconds": first, "read_seconds": read, "body_seconds": first - read,
        "read_tokens_per_second": asked.long / read, "progress_comments": len(progress), "progress_lines": len(logged),
        "comments": progress, "between_median": percentile(answer.gaps, 50), "between_p99": percentile(answer.gaps, 99),
        "bound_read": bounds[0].seconds, "bound_step": bounds[1].seconds,
    }  # fmt: skip
    columns = [
        "prompt", "body MB", "its JSON s", "read s", "bound", "tokens/s", "comments", "log lines", "between ms", "99%",
        "bound",
    ]  # fmt: skip
    row = [
        f"{asked.long:,}", f"{len(body) / 1e6:.1f}", f"{first - read:.2f}", f"{read:.1f}", f"{bounds[0].seconds:.1f}",
        f"{asked.long / read:,.0f}", str(len(progress)), str(len(logged)),
        *(_milliseconds(found[key]) for key in ("between_median", "between_p99", "bound_step")),
    ]  # fmt: skip
    show(f"{asked.preset}, one prompt", columns, [row])
    return [found]


def count_of(word: str) -> int:
    """Return a whole number of at least 1."""
    if not word.strip().isdecimal() or not int(word):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {word!r}")
    return int(word)


def counts_of(words: str) -> list[int]:
    """Return whole numbers with commas between."""
    return [count_of(word) for word in words.split(",")]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tuple(PRESETS), default="kimi-linear-48b")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights")
    parser.add_argument("--bits", choices=("16", "8", "4", "fp8"), help="of large weights; none: the dtype")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clients", type=counts_of, default="1,32,128", help="how many stream at once")
    parser.add_argument("--prompt", type=count_of, default=1024, help="ids of a prompt")
    parser.add_argument("--new", type=count_of, default=256, help="tokens of an answer")
    parser.add_argument("--requests", type=count_of, help="how many in all; one of each client if not given")
    parser.add_argument("--published", choices=tuple(PUBLISHED), help="run a load with published figures instead")
    parser.add_argument("--long", type=count_of, help="measure one prompt of this many ids instead")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--spacing", type=count_of, help="tokens of a piece of a prompt; none: the server's default")
    parser.add_argument("--cache", default="0", help="memory for kept states, such as 1GB")
    parser.add_argument("--engine", action=argparse.BooleanOptionalAction, default=True, help="also time it alone")
    parser.add_argument("--hardware", choices=tuple(HARDWARE), default="h200", help="whose bounds are shown")
    parser.add_argument("--patience", type=float, default=600, help="seconds until the server must be ready")
    parser.add_argument("--json", type=Path, default=Path("bench/out/serving-flagships.json"))
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and write the numbers."""
    asked = parse(words)
    if asked.published is not None:
        results = measure_published(asked)
    else:
        results = measure_clients(asked) if asked.long is None else measure_long(asked)
    head = {
        "command": " ".join(["python -m bench.serving.flagships", *(words or given_command())]),
        "date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }  # fmt: skip
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps({"about": head, "preset": asked.preset, "results": results}, indent=1) + "\n")
    print(f"wrote {asked.json}")


if __name__ == "__main__":
    main()

"""Serving on a GPU: decoding compared with the planner's bound, guesses, and a long prompt next to running streams.

    python -m bench.serving.gpu [--json FILE] [--parts decode,guesses,prompt] [--profile DIR]

The model has hidden 2048 and 24 layers ("GGGA", dense feed-forwards), bfloat16, with random weights. Its head reads
what the embedding wrote: token n is followed by the next of its cycle of 64 tokens, so that greedy text repeats.
"""

import argparse
import json
import statistics
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.timing import show
from lineate.generation.choice import Sampling
from lineate.models import AttentionConfig, FeedConfig, HybridConfig, HybridLM, LinearConfig
from lineate.planning.hardware import HARDWARE, time_bounds
from lineate.planning.models import Model
from lineate.serving.drafting import PromptLookup
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.requests import Handle, Request
from lineate.serving.engine.warming import warm_up

VOCAB, CYCLE = 248320, 64  # Qwen3.5's
GREEDY = Sampling(temperature=0)


def make_config() -> HybridConfig:
    return HybridConfig(
        vocab_size=VOCAB, hidden_size=2048, n_layers=24, pattern="GGGA", linear=LinearConfig(16, 16, 128, 128),
        attention=AttentionConfig(8, 2, 256, rotary_dim=64), feed=FeedConfig(6144), zero_centred_norm=True,
    )  # fmt: skip


def make_model() -> HybridLM:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = HybridLM(make_config()).to(torch.bfloat16).eval()
    assert model.head is not None
    following = torch.arange(VOCAB).view(-1, CYCLE).roll(1, 1).flatten()
    with torch.no_grad():
        model.embed.weight.normal_()
        model.head.weight.copy_(model.embed.weight[following.cuda()] / 2048**0.5)
    return model


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def running(engine: Engine, rows: int, length: int, new: int, listener: Any = lambda event: None) -> list[Handle]:
    """Submit requests, and return when all of them decode."""
    handles = []
    for n in range(rows):
        handles.append(engine.submit(Request(prompt(length, n), GREEDY, max_new_tokens=new), listener))
        engine.step()
    while engine.stats.running < rows:
        engine.step()
    return handles


def seconds_of(call: Any, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times


def measure_decode(model: HybridLM, rows: int, length: int, profile: Path | None) -> dict[str, Any]:
    began = time.perf_counter()
    engine = Engine(model, slots=rows, context=length + 512, spacing=1024)
    running(engine, rows, length, 500)
    print(f"{rows} rows run after {time.perf_counter() - began:.1f} s", flush=True)
    for _ in range(5):
        engine.step()
    steps = seconds_of(engine.step, 60)
    tokens = [0] * rows
    inside = seconds_of(lambda: engine.pool.step(tokens), 40)
    device = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        engine.pool.step(tokens)
        end.record()
        torch.cuda.synchronize()
        device.append(start.elapsed_time(end) / 1e3)
    if profile is not None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(5):
                engine.pool.step(tokens)
            torch.cuda.synchronize()
        table = found.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90)
        (profile / f"decode-{rows}.txt").write_text(table)
    bounds = {
        x.what: x
        for x in time_bounds(Model("bench", model.config, torch.bfloat16, "config"), HARDWARE["h200"], rows, length)
    }
    bound = bounds["decode"].seconds
    return {
        "what": "decode", "rows": rows, "length": length, "engine_seconds": steps, "pool_seconds": inside,
        "device_seconds": device, "bound_seconds": bound, "bound": bounds["decode"].detail,
        "over_bound": statistics.median(steps) / bound, "device_over_bound": statistics.median(device) / bound,
    }  # fmt: skip


def seconds_a_token(engine: Engine) -> tuple[float, float]:
    """Run all requests to their ends; return the seconds a token in all, and from the first guesses on."""

    def now() -> tuple[float, int]:
        torch.cuda.synchronize()
        return time.perf_counter(), engine.stats.new_tokens

    before, start = engine.stats.guesses, now()
    repeating = None
    while engine.step():
        if repeating is None and engine.stats.guesses > before:
            repeating = now()
    end = now()
    rates = [(end[0] - since[0]) / (end[1] - since[1]) for since in (start, repeating or start)]
    return rates[0], rates[1]


def measure_guesses(model: HybridLM, rows: int, new: int) -> dict[str, Any]:
    """Compare the seconds for requests of repetitive text with and without prompt lookup."""
    seconds, tokens = {}, {}
    result: dict[str, Any] = {"what": "guesses", "rows": rows, "new": new}
    for name in ("warm-up", "plain", "guesses"):
        drafter = None if name == "plain" else PromptLookup()
        engine = Engine(model, slots=rows, context=2048, drafter=drafter)
        for _ in range(2):
            handles = running(engine, rows, 256, new, None)
            seconds[name], seconds["repeating"] = seconds_a_token(engine)
            tokens[name] = [handle.result(0)[0].tokens for handle in handles]
        if name == "guesses":
            result |= {"guesses": engine.stats.guesses, "right": engine.stats.right_guesses}
    return result | {
        "seconds_a_token": seconds, "faster": seconds["plain"] / seconds["guesses"],
        "faster_where_it_repeats": seconds["plain"] / seconds["repeating"],
        "same_tokens": tokens["plain"] == tokens["guesses"],
    }  # fmt: skip


def measure_prompt(model: HybridLM, streams: int, length: int, spacing: int) -> dict[str, Any]:
    """Read a long prompt next to running streams; return the gaps between a stream's tokens."""
    times: dict[int, list[float]] = {}
    engine = Engine(model, slots=streams + 1, context=length + 4096, spacing=spacing)
    warm_up(engine)  # as `lineate serve` does before it listens

    def listener(number: int) -> Any:
        return lambda event: times.setdefault(number, []).append(time.perf_counter())

    def once() -> tuple[float, list[float], list[float]]:
        """Return the seconds to the first token of the long prompt, and a stream's gaps before and during it."""
        times.clear()
        handles = []
        for n in range(streams):
            request = Request(prompt(512, n), GREEDY, max_new_tokens=3000)
            handles.append(engine.submit(request, listener(n)))
            engine.step()
        while engine.stats.running < streams:
            engine.step()
        for _ in range(50):
            engine.step()
        alone, start, first = {n: len(own) for n, own in times.items()}, time.perf_counter(), []
        request = Request(prompt(length, 99), GREEDY, max_new_tokens=64)
        handles.append(engine.submit(request, lambda event: first.append(time.perf_counter())))
        while len(first) < 64:
            engine.step()
        gaps = [b - a for n, own in times.items() for a, b in pairwise(own[alone[n] - 1 :])]
        before = [b - a for n, own in times.items() for a, b in pairwise(own[alone[n] - 40 : alone[n]])]
        for handle in handles:
            handle.cancel()
        while engine.step():
            pass
        return first[0] - start, before, gaps

    cold = max(once()[2])
    first, before, gaps = once()
    return {
        "what": "prompt", "streams": streams, "length": length, "spacing": spacing,
        "first_token_seconds": first, "gap_most_cold": cold, "gap_alone": statistics.median(before),
        "gap_median": statistics.median(gaps), "gap_most": max(gaps), "gaps": sorted(gaps)[-40:],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("bench/out/serving-gpu.json"))
    parser.add_argument("--parts", default="decode,guesses,prompt")
    parser.add_argument("--profile", type=Path, help="write tables of kernels into this folder")
    args = parser.parse_args()
    parts = args.parts.split(",")
    model, results = make_model(), []
    print(f"{sum(x.numel() for x in model.parameters()) / 1e9:.2f}B parameters")
    if "decode" in parts:
        results += [measure_decode(model, rows, 1024, args.profile) for rows in (1, 32, 256)]
        table = [
            [str(r["rows"]), *(f"{1e3 * x:.3f}" for x in (
                statistics.median(r["engine_seconds"]), statistics.median(r["pool_seconds"]),
                statistics.median(r["device_seconds"]), r["bound_seconds"],
            )), f"{r['over_bound']:.2f}x", f"{r['device_over_bound']:.2f}x"]
            for r in results
        ]  # fmt: skip
        show(
            "a decoding step after 1,024 tokens, median ms",
            ["rows", "engine", "pool", "device", "bound", "engine", "device"], table,
        )  # fmt: skip
    if "guesses" in parts:
        found = [measure_guesses(model, rows, 400) for rows in (1, 8, 32)]
        results += found
        table = [
            [str(r["rows"]), *(f"{1e3 * r['seconds_a_token'][x]:.3f}" for x in ("plain", "guesses")),
             f"{r['right']} of {r['guesses']}", f"{r['faster']:.2f}x", f"{r['faster_where_it_repeats']:.2f}x",
             str(r["same_tokens"])]
            for r in found
        ]  # fmt: skip
        columns = ["rows", "plain", "guesses", "right", "faster", "where it repeats", "same tokens"]
        show("repetitive text, ms a token", columns, table)
    if "prompt" in parts:
        found = [measure_prompt(model, 32, 32768, spacing) for spacing in (256, 1024)]
        results += found
        table = [
            [str(r["spacing"]), *(f"{1e3 * r[x]:.1f}" for x in (
                "first_token_seconds", "gap_alone", "gap_median", "gap_most", "gap_most_cold"))]
            for r in found
        ]  # fmt: skip
        show(
            "a prompt of 32,768 tokens beside 32 streams, ms",
            ["spacing", "first token", "between tokens before", "during, median", "most", "most, first time"], table,
        )  # fmt: skip
    head = {
        "date": datetime.now(UTC).date().isoformat(), "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"header": head, "results": results}, indent=1) + "\n")
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

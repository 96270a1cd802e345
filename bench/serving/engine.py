"""The engine compared with a bare decoding loop, and many streams together with one after another, on a CPU.

    python -m bench.serving.engine [--json FILE] [--quick]

The model has hidden 1024 and 8 layers ("GGGA", dense feed-forwards), float32, with random weights. A step of the engine
schedules, reads one token of every row in the pool, chooses the next ones and delivers them; the bare loop calls the
model on a batch of as many rows and takes the likeliest tokens. "own" is the part of the engine's step that is spent
outside of the model. "server" is a token of all rows as clients in another process see it that stream completions over
HTTP: the time of longer answers less that of shorter ones, so that reading prompts is not in it.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from torch import Tensor

from bench.timing import OtherProcesses, cpu_model, interleave, show
from lineate.generation.choice import Sampling
from lineate.models import AttentionConfig, FeedConfig, HybridConfig, HybridLM, LinearConfig, ModelState
from lineate.serving.app import Settings, describe, make_app
from lineate.serving.draining import DrainingServer
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.requests import Request
from lineate.text.tokenizer import Bytes

HIDDEN, LAYERS, VOCAB = 1024, 8, 8192
PROMPT, CONTEXT = 64, 2048
SAMPLING = {"greedy": Sampling(temperature=0), "drawn": Sampling(temperature=0.8, top_p=0.95, seed=1)}


def make_model(vocab: int = VOCAB) -> HybridLM:
    config = HybridConfig(
        vocab_size=vocab, hidden_size=HIDDEN, n_layers=LAYERS, pattern="GGGA", linear=LinearConfig(8, 16, 128, 128),
        attention=AttentionConfig(8, 2, 128, rotary_dim=32), feed=FeedConfig(2816), zero_centred_norm=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = HybridLM(config).eval()
    assert model.head is not None
    with torch.no_grad():
        model.head.weight.mul_(8)  # as peaked as trained models are, which matters to top_p
    return model


def prompt(seed: int) -> list[int]:
    return torch.randint(Bytes.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()


def bare_loop(model: HybridLM, rows: int) -> Callable[[], Tensor]:
    """Return a call that decodes one token of every row."""
    with torch.no_grad():
        outs = [model(torch.tensor([prompt(n)]), last_only=True) for n in range(rows)]
        state = ModelState.join([out.state for out in outs])
        token = torch.cat([out.logits[:, -1].argmax(-1) for out in outs])

    @torch.no_grad()
    def step() -> Tensor:
        nonlocal state, token
        out = model(token[:, None], state=state)
        state, token = out.state, out.logits[:, -1].argmax(-1)
        return token.tolist()

    return step


class Timed:
    """Steps an engine, and counts the seconds that were spent in the model."""

    def __init__(self, model: HybridLM, rows: int, sampling: Sampling) -> None:
        self.engine = Engine(model, slots=rows, context=CONTEXT)
        for n in range(rows):
            self.engine.submit(Request(tuple(prompt(n)), sampling), listener=lambda event: None)
        while self.engine.stats.running < rows:
            self.engine.step()
        self.inside, self.own = 0.0, []
        step = self.engine.pool.step

        def timed(ids: list[int]) -> Tensor:
            start = time.perf_counter()
            logits = step(ids)
            self.inside = time.perf_counter() - start
            return logits

        self.engine.pool.step = timed  # type: ignore[method-assign, assignment]

    def __call__(self) -> None:
        start = time.perf_counter()
        self.engine.step()
        self.own.append(time.perf_counter() - start - self.inside)


def measure_steps(model: HybridLM, rows: int, rounds: int) -> list[dict[str, Any]]:
    calls: dict[str, Callable[[], Any]] = {"bare": bare_loop(model, rows)}
    calls |= {name: Timed(model, rows, sampling) for name, sampling in SAMPLING.items()}
    samples = interleave(calls, rounds=rounds, budget=60.0)
    bare = samples["bare"]
    results = []
    for name in SAMPLING:
        timed = calls[name]
        assert isinstance(timed, Timed)
        own = sorted(timed.own)
        results.append({
            "what": "step", "rows": rows, "sampling": name, "bare_seconds": bare.seconds,
            "engine_seconds": samples[name].seconds, "own_seconds": own,
            "slower_by_minimum": samples[name].minimum / bare.minimum - 1,
            "slower_by_median": samples[name].median / bare.median - 1,
            "own_share": own[len(own) // 2] / samples[name].median,
        })  # fmt: skip
    return results


def measure_streams(model: HybridLM, streams: int, tokens: int) -> dict[str, Any]:
    """Return the seconds for n requests together, and one after another."""
    requests = [Request(tuple(prompt(n)), SAMPLING["greedy"], max_new_tokens=tokens) for n in range(streams)]
    seconds: dict[str, float] = {}
    found: dict[str, list[list[int]]] = {}
    for how, slots in (("together", streams), ("one by one", 1)):
        engine = Engine(model, slots=slots, context=CONTEXT)
        start = time.perf_counter()
        handles = [engine.submit(request) for request in requests]
        while engine.step():
            pass
        seconds[how] = time.perf_counter() - start
        found[how] = [handle.result(0)[0].tokens for handle in handles]
    return {
        "what": "streams", "streams": streams, "tokens": tokens, "seconds": seconds,
        "same_tokens": found["together"] == found["one by one"],
        "faster": seconds["one by one"] / seconds["together"],
    }  # fmt: skip


def stream_answers(url: str, rows: int, tokens: int) -> float:
    """Stream n answers at once; return the seconds until all have ended."""
    body = {"max_tokens": tokens, "temperature": 0, "stream": True, "logit_bias": {"256": -100}}

    async def one(http: httpx.AsyncClient, n: int) -> None:
        prompt_text = "".join(chr(97 + (n + i) % 26) for i in range(PROMPT))
        async with http.stream("POST", "/v1/completions", json={**body, "prompt": prompt_text}) as answer:
            assert answer.status_code == 200
            async for _ in answer.aiter_bytes():
                pass

    async def every() -> float:
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:
            start = time.perf_counter()
            await asyncio.gather(*(one(http, n) for n in range(rows)))
            return time.perf_counter() - start

    return asyncio.run(every())


def measure_server(model: HybridLM, rows: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Compare a token through the server with a step of the bare loop."""
    tokenizer, engine = Bytes(), Engine(model, slots=rows, context=CONTEXT)
    engine.start()
    app = make_app(engine, tokenizer, describe(model, tokenizer, "bench", CONTEXT, rows), Settings())
    step, seconds = bare_loop(model, rows), {"bare": [], "server": []}
    with socket.socket() as listening, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as elsewhere:
        listening.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = DrainingServer(app, uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        for n in range(rounds + 1):  # the first one warms up
            start = time.perf_counter()
            for _ in range(tokens):
                step()
            bare = (time.perf_counter() - start) / tokens
            short, long = (elsewhere.submit(stream_answers, url, rows, k * tokens).result() for k in (1, 2))
            if n:
                seconds["bare"].append(bare)
                seconds["server"].append((long - short) / tokens)
        server.drain()
        thread.join()
    engine.stop(drain=False)
    return {
        "what": "server", "rows": rows, "tokens": tokens, **seconds,
        "slower": min(seconds["server"]) / min(seconds["bare"]) - 1,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("bench/out/serving-engine-cpu.json"))
    parser.add_argument("--quick", action="store_true", help="fewer rounds and tokens")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    others = OtherProcesses()
    model = make_model()
    rounds, tokens = (10, 16) if args.quick else (40, 64)
    steps = [x for rows in (1, 8) for x in measure_steps(model, rows, rounds)]
    streams = measure_streams(model, 8, tokens)
    model = make_model(Bytes.vocab_size)
    served = [measure_server(model, rows, tokens, 1 if args.quick else 4) for rows in (1, 8)]
    busy = others.cores()
    table = []
    for r in steps:
        ms = [f"{1e3 * min(r[name]):.2f}" for name in ("bare_seconds", "engine_seconds")]
        own = r["own_seconds"]
        table.append([
            f"{r['rows']} {r['sampling']}", *ms, f"{100 * r['slower_by_minimum']:+.1f}%",
            f"{1e3 * own[len(own) // 2]:.2f}", f"{100 * r['own_share']:.1f}%",
        ])  # fmt: skip
    columns = ["rows", "bare loop ms", "engine ms", "engine slower", "own ms", "own part"]
    show("a decoding step, fastest of the rounds; own: median", columns, table)
    each = [f"{seconds:.2f}" for seconds in streams["seconds"].values()]
    show(
        f"{streams['streams']} streams of {tokens} tokens", ["", "together s", "one by one s", "faster", "same tokens"],
        [["greedy", *each, f"{streams['faster']:.2f}x", str(streams["same_tokens"])]],
    )  # fmt: skip
    show(
        "a token of all rows, fastest of the rounds", ["rows", "bare loop ms", "server ms", "server slower"],
        [[str(r["rows"]), *(f"{1e3 * min(r[x]):.2f}" for x in ("bare", "server")), f"{100 * r['slower']:+.1f}%"]
         for r in served],
    )  # fmt: skip
    if busy is not None and busy > OtherProcesses.BUSY:
        print(f"other processes kept {busy:.1f} cores busy: the ratios cannot be trusted")
    head = {
        "date": datetime.now(UTC).date().isoformat(), "cpu": cpu_model(), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "other_cores": busy,
    }  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"header": head, "results": [*steps, streams, *served]}, indent=1) + "\n")
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

"""The published models at their real sizes on one GPU, with random weights, next to the bounds of `lineate plan`.

    python -m bench.models.flagships [--models NAMES] [--weights FORMATS] [--only PARTS] [--json FILE] [--profile]
    python -m bench.models.flagships --only prefill --piece 8192,16384,32768

Parts: decode (one row after 4,096, 32,768 and 131,072 tokens; 64 and 256 rows after 512), prefill (4,096, 32,768 and
131,072 tokens in one call, which the model reads in pieces of 32,768), pieces (131,072 tokens in calls of 8,192),
million (1,048,576 tokens in one call, without a warm-up, and decoding after them). A bound counts the least bytes at
the card's bandwidth, or the least operations at its matrix rate, whichever takes longer; where experts are chosen,
every token chooses at random.

Weights are random, so tokens choose experts evenly, as the bound of several rows assumes. The state before a decoding
step is made up: caches of random entries, not read from a prompt. Busy time and launches are those of one step in
torch's profiler. With --piece, prompts are read once for each of these sizes of a piece; where memory is short, the
model takes half of it or less, which the result names.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from bench.models.quantised_gpu import median_ms, state_of
from bench.timing import show
from lineate.decoding import Decoder
from lineate.models import hybrid, reading
from lineate.models.presets import PRESETS
from lineate.models.random_weights import random_model
from lineate.planning import HARDWARE, MemoryPlan, plan_memory, read_model
from lineate.planning.hardware import decode_bound, prefill_bound

MODELS = ("qwen3-5-35b-a3b", "kimi-linear-48b", "qwen3-next-80b", "qwen3-5-27b", "olmo-hybrid-7b")
PARTS = ("decode", "prefill", "pieces", "million")
WEIGHTS = ("bf16", "fp8", "int8", "int4")
CARD = HARDWARE["h200"]
LEFT = 12 * 2**30
"""Bytes of the card that a model's weights must leave for states and buffers."""


def profiled(call: Callable[[], Any]) -> tuple[float, int, list[tuple[str, float, int]]]:
    """Return the milliseconds that the device is busy in a call, its launches, and the kernels by their time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = [x for x in profile.key_averages() if x.self_device_time_total > 0]
    kernels = sorted(((x.key, x.self_device_time_total / 1e3, x.count) for x in found), key=lambda x: -x[1])
    return sum(x[1] for x in kernels), sum(x[2] for x in kernels), kernels


@contextmanager
def read_in_pieces(piece: int) -> Iterator[list[int]]:
    """Let models read prompts in pieces of at most `piece` tokens; yield the sizes that their calls choose."""
    sizes: list[int] = []

    def choose(ids: Tensor, blocks: nn.ModuleList, others: Sequence[nn.Module], *, alone: bool) -> int | None:
        size = reading.piece_of(ids, blocks, others, alone=alone)
        sizes.append(ids.numel() if size is None else size)
        return size

    with mock.patch.object(reading, "PIECE", piece), mock.patch.object(hybrid, "piece_of", choose):
        yield sizes


def parse_pieces(words: str) -> tuple[int, ...]:
    """Return the sizes of pieces that --piece names."""
    try:
        pieces = tuple(int(word) for word in words.split(","))
    except ValueError:
        pieces = ()
    if not pieces or any(n < reading.SMALLEST or n % reading.CHUNK for n in pieces):
        raise argparse.ArgumentTypeError(
            f"must be numbers of tokens from {reading.SMALLEST} on, multiples of {reading.CHUNK}, got {words!r}; pass "
            "for example 8192,16384,32768"
        )
    return pieces


class Bench:
    """The measurements of one model.

    Args:
        name: A preset.
        weights: Their format.
        profile: Whether kernels are printed.
        keep: Receives every measurement.
    """

    def __init__(self, name: str, weights: str, profile: bool, keep: Callable[[dict[str, Any]], None]) -> None:
        self.name, self.weights, self.profile = name, weights, profile
        self.plan: MemoryPlan = plan_memory(
            read_model(name, "bfloat16", weights=None if weights == "bf16" else weights)
        )
        start = time.perf_counter()
        self.model = random_model(name, "bfloat16", "cuda", None if weights == "bf16" else weights)
        torch.cuda.synchronize()
        self.made = time.perf_counter() - start
        self.own = torch.cuda.memory_allocated()
        self.keep = keep

    def note(self, what: str, ms: float, bound: float, call: Callable[[], Any] | None = None, **more: float) -> None:
        """Keep a measurement; call: what is profiled."""
        record: dict[str, Any] = {"model": self.name, "weights": self.weights, "what": what, "ms": ms, **more}
        record |= {"bound_ms": bound * 1e3, "ratio": ms / (bound * 1e3)}
        record["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        record["beyond_weights_gib"] = record["peak_gib"] - self.own / 2**30
        if call is not None:
            record["busy_ms"], record["launches"], kernels = profiled(call)
            record["kernels"] = kernels[:30]
            if self.profile:
                for name, time_ms, count in kernels[:30]:
                    print(f"    {time_ms:8.3f} ms {count:5d}  {name[:110]}")
        self.keep(record)
        shown = {key: round(x, 3) if isinstance(x, float) else x for key, x in record.items() if key != "kernels"}
        print(shown, flush=True)

    def reset(self) -> None:
        """Free what the last measurement held, and begin to count the peak of memory."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def decode(self, rows: int, tokens: int, rounds: int = 20) -> None:
        self.reset()
        ids = torch.randint(1000, (rows, 1), device="cuda")
        decoder = Decoder(self.model, state_of(self.model, rows, tokens), room=rounds + 64)
        for _ in range(3):
            decoder(ids)
        bound = decode_bound(self.plan, CARD, rows, tokens, "expected" if rows > 1 else "least").seconds
        self.note(
            f"decode {rows} after {tokens:,}",
            median_ms(lambda: decoder(ids), rounds, "cuda"),
            bound,
            lambda: decoder(ids),
        )

    def prefill(self, tokens: int, piece: int | None = None, rounds: int = 2) -> None:
        """Measure a prompt in one call; piece: the most tokens of a piece, None: the model's own number."""
        self.reset()
        ids = torch.randint(1000, (1, tokens), device="cuda")

        def read() -> Any:
            return self.model(ids, last_only=True).logits

        bound = prefill_bound(self.plan, CARD, 1, tokens).seconds
        with read_in_pieces(reading.PIECE if piece is None else piece) as sizes:
            ms = median_ms(read, rounds, "cuda", int(tokens <= 131072))
            what = f"prefill {tokens:,}" + ("" if piece is None else f" in pieces of {sizes[-1]:,}")
            self.note(what, ms, bound, read if tokens <= 32768 else None, piece=sizes[-1])

    def pieces(self, tokens: int, piece: int, rounds: int = 1) -> None:
        self.reset()
        ids = torch.randint(1000, (1, tokens), device="cuda")
        times: list[float] = []

        def read() -> None:
            state = None
            for own in ids.split(piece, 1):
                begun = time.perf_counter()
                out = self.model(own, state, last_only=True)
                state = out.state
                torch.cuda.synchronize()
                times.append(time.perf_counter() - begun)

        ms = median_ms(read, rounds, "cuda", int(tokens <= 131072))
        bound = prefill_bound(self.plan, CARD, 1, tokens).seconds
        self.note(f"read {tokens:,} in pieces of {piece:,}", ms, bound, last_piece_ms=times[-1] * 1e3)


@torch.inference_mode()
def measure(
    name: str,
    weights: str,
    parts: tuple[str, ...],
    profile: bool,
    keep: Callable[[dict[str, Any]], None],
    pieces: tuple[int | None, ...] = (None,),
    longest: int = 131072,
) -> None:
    """Measure a model; keep receives the results one by one.

    Args:
        name: A preset.
        weights: Their format.
        parts: What is measured.
        profile: Whether kernels are printed.
        keep: Receives every measurement.
        pieces: Sizes in which prompts are read; None: the model's own.
        longest: The most tokens of prompts and caches, except in the part "million".
    """
    lengths = [n for n in (4096, 32768, 131072) if n <= longest]
    if plan_memory(read_model(name, "bfloat16", weights=None if weights == "bf16" else weights)).weights > (
        torch.cuda.mem_get_info()[1] - LEFT
    ):
        print(f"{name} in {weights} does not fit")
        return
    bench = Bench(name, weights, profile, keep)
    print(f"{name} in {weights}: {bench.own / 2**30:.1f} GiB of weights, made in {bench.made:.0f} s", flush=True)
    calls: dict[str, list[Callable[[], None]]] = {
        "decode": [
            *(lambda n=n: bench.decode(1, n) for n in lengths),
            *(lambda b=b: bench.decode(b, 512) for b in (64, 256)),
        ],
        "prefill": [
            lambda n=n, piece=piece: bench.prefill(n, piece)
            for n in lengths
            for piece in (pieces if n > reading.SMALLEST else pieces[:1])  # a short prompt is read in one piece
        ],
        "pieces": [lambda: bench.pieces(131072, 8192)],
        "million": [lambda: bench.prefill(2**20, rounds=1), lambda: bench.decode(1, 2**20)],
    }
    for part in parts:
        for call in calls[part]:
            try:
                call()
            except torch.OutOfMemoryError as error:
                print(f"  {part}: out of memory: {str(error)[:120]}", flush=True)
                keep({"model": name, "weights": weights, "what": part, "out_of_memory": True})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS[:2]), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--weights", default="bf16", help=f"of {', '.join(WEIGHTS)}")
    parser.add_argument("--only", default=",".join(PARTS[:3]), help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--piece", type=parse_pieces, default=(None,), help="tokens of a piece of a prompt, one or more"
    )
    parser.add_argument("--longest", type=int, default=131072, help="the most tokens of prompts and caches")
    parser.add_argument("--json", type=Path, default=Path("bench/out/flagships.json"))
    parser.add_argument("--profile", action="store_true", help="print the kernels that take longest")
    args = parser.parse_args()
    chosen = (args.models, tuple(PRESETS)), (args.weights, WEIGHTS), (args.only, PARTS)
    for flag, (words, known) in zip(("--models", "--weights", "--only"), chosen, strict=True):
        if wrong := [word for word in words.split(",") if word not in known]:
            parser.error(f"{flag} must be of {', '.join(known)}, got {', '.join(map(repr, wrong))}")
    if not torch.cuda.is_available():
        parser.exit(1, "these measurements need a GPU\n")
    about = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
    }  # fmt: skip
    records: list[dict[str, Any]] = []
    args.json.parent.mkdir(parents=True, exist_ok=True)

    def keep(record: dict[str, Any]) -> None:
        records.append(record)
        args.json.write_text(json.dumps({"about": about, "records": records}, indent=1))

    for name in args.models.split(","):
        for weights in args.weights.split(","):
            measure(name, weights, tuple(args.only.split(",")), args.profile, keep, args.piece, args.longest)
            gc.collect()
            torch.cuda.empty_cache()
    columns = ["model", "weights", "what", "ms", "bound", "ratio", "busy", "launches", "GiB beyond weights"]
    rows = [
        [
            x["model"], x["weights"], x["what"], f"{x['ms']:.2f}", f"{x['bound_ms']:.2f}", f"{x['ratio']:.2f}",
            f"{x['busy_ms']:.2f}" if "busy_ms" in x else "", str(x.get("launches", "")),
            f"{x['beyond_weights_gib']:.2f}",
        ]
        for x in records if "ms" in x
    ]  # fmt: skip
    show("Published models at their real sizes", columns, rows)


if __name__ == "__main__":
    main()

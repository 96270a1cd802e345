"""Decoding with weights of 16, 8 and 4 bits and float8 on a GPU: a whole model in a CUDA graph, and its products.

    python -m bench.models.quantised_gpu [--json FILE] [--quick] [--forms bfloat16 int8 int4 fp8]

The model has 24 layers GGGA of 4096 channels with random weights, which are made on the GPU. Times of steps are between
events around replays of the graph that Decoder records. A product is measured in a graph of its own over copies
of the weight that do not fit the L2 cache together, next to cuBLAS with a weight in bfloat16. Products of many
rows, as a prompt has, are measured without a graph; "fp8, float8 rows" rounds the rows too (float8_activations).
"""

import argparse
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.timing import show
from lineate.decoding import Decoder
from lineate.layers import Memory, TokenCache
from lineate.models import AttentionConfig, FeedConfig, HybridConfig, HybridLM, LinearConfig, ModelState
from lineate.models.random_weights import random_quantised
from lineate.quantised import FORMATS, float8_activations
from lineate.quantised.weight import kept_nbytes

BATCHES = (1, 8, 32)
MANY = (128, 1024, 8192)
"""Rows of a prompt."""
ROUNDED = "fp8, float8 rows"
TOKENS = 1024
"""Tokens that attention has seen."""
CACHE = 2**28
"""Bytes of the copies of a weight, several times the L2 cache."""
SMALL = ("in_proj", "out_proj", "gate_up_proj", "down_proj", "head")


def config_of(hidden: int, layers: int) -> HybridConfig:
    heads = max(1, hidden // 128)
    return HybridConfig(
        32768, hidden, layers, "GGGA", linear=LinearConfig(max(1, heads // 2), heads, 128, 128),
        attention=AttentionConfig(heads, max(1, heads // 4), 128, rotary_dim=64),
        feed=FeedConfig(hidden * 43 // 512 * 32),
    )  # fmt: skip


def random_weight(shape: tuple[int, ...], form: str, device: str) -> Tensor:
    """Return a weight in this format with deviation .02, without rounding one of float32."""
    kept = FORMATS[form]
    if kept.dtype is not None:
        return torch.randn(shape, dtype=kept.dtype, device=device).mul_(0.02)
    return random_quantised(shape, kept, torch.bfloat16, device)


def model_of(config: HybridConfig, form: str, device: str) -> tuple[HybridLM, int]:
    """Return a model, and the bytes of the weights that a step reads."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = HybridLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in SMALL and form != "bfloat16":
            shape = tuple(module.weight.shape)
            module.weight = nn.Parameter(random_weight(shape, form, device), requires_grad=False)
    read = [x for name, x in model.named_parameters() if not name.startswith("embed")]
    return model, sum(map(kept_nbytes, read))


def state_of(model: HybridLM, rows: int, tokens: int) -> ModelState:
    """Return the state of rows that have read n tokens, with random contents."""
    layers: list[Memory | TokenCache] = []
    for specs in model.state_spec:
        made = {}
        for spec in specs:
            shape = (rows, *(tokens if size == "t" else int(size) for size in spec.shape))
            made[spec.name] = torch.randn(shape, device=model.device).mul_(0.1).to(spec.dtype)
        grows = any("t" in spec.shape for spec in specs)
        layers.append(TokenCache(made, tokens) if grows else Memory(made))
    return ModelState(tuple(layers), tokens)


def median_ms(call: Callable[[], Any], rounds: int, device: str, warm: int = 3) -> float:
    """Return the median over the rounds, after warm-up calls."""
    times = []
    for n in range(rounds + warm):
        if device == "cpu":
            start = time.perf_counter()
            call()
            took = 1e3 * (time.perf_counter() - start)
        else:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            call()
            last.record()
            torch.cuda.synchronize()
            took = first.elapsed_time(last)
        if n >= warm:
            times.append(took)
    return statistics.median(times)


@torch.no_grad()
def measure_steps(config: HybridConfig, form: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    start = time.perf_counter()
    model, weights = model_of(config, form, args.device)
    results = []
    for rows in args.batches:
        state = state_of(model, rows, args.tokens)
        decoder = Decoder(model, state, room=256)
        ids = torch.zeros(rows, 1, dtype=torch.int64, device=args.device)
        logits = decoder(ids)
        ms = median_ms(partial(decoder, ids), args.rounds, args.device)
        read = weights + state.nbytes
        row = {
            "form": form, "rows": rows, "ms": ms, "bytes": read, "tb_per_s": read / ms / 1e9,
            "finite": bool(logits.isfinite().all()), "graph": decoder.captured,
        }  # fmt: skip
        results.append(row)
        print(row, f"{time.perf_counter() - start:.0f} s", flush=True)
        del decoder, state
    return results


def products_of(config: HybridConfig) -> dict[str, tuple[int, int]]:
    """Return the products of a step, `n k` by name, from a model without memory."""
    with torch.device("meta"):
        model = HybridLM(config)
    found = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and last in SMALL:
            kind = "A" if ".3." in name else "G"
            shape = (module.weight.shape[0], module.weight.shape[1])
            found.setdefault(f"{kind} {last}" if last in ("in_proj", "out_proj") else last, shape)
    return found


@torch.no_grad()
def measure_product(
    name: str, shape: tuple[int, int], form: str, rows: int, args: argparse.Namespace
) -> dict[str, Any]:
    size = FORMATS[form].nbytes(shape)
    copies = max(1, min(16, CACHE // size if args.device != "cpu" else 1))
    weights = [random_weight(shape, form, args.device) for _ in range(copies)]
    x = torch.randn(rows, shape[1], device=args.device, dtype=torch.bfloat16)

    def run() -> None:
        for weight in weights:
            F.linear(x, weight)

    call: Callable[[], Any] = run
    if args.device != "cpu":
        from lineate.decoding.capturing import capture_stream, captured
        from lineate.layers.gpu import overlapping

        stream = capture_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), overlapping():
            run()
        torch.cuda.current_stream().wait_stream(stream)
        with captured(torch.device(args.device)) as graph, overlapping():
            run()
        call = graph.replay
    us = 1e3 * median_ms(call, args.rounds, args.device) / copies
    return {
        "product": name,
        "n": shape[0],
        "k": shape[1],
        "form": form,
        "rows": rows,
        "us": us,
        "tb_per_s": size / us / 1e6,
    }


@torch.no_grad()
def measure_many(
    name: str, shape: tuple[int, int], forms: Sequence[str], rows: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure a product of many rows in each form; with float8 rows too, where this GPU has them."""
    x, found = torch.randn(rows, shape[1], device=args.device, dtype=torch.bfloat16), []
    for form in forms:
        weight = random_weight(shape, form, args.device)
        ways: dict[str, AbstractContextManager[None]] = {form: nullcontext()}
        if form == "fp8" and args.device != "cpu":
            ways[ROUNDED] = float8_activations(args.device)
        for way, context in ways.items():
            try:
                with context:
                    us = 1e3 * median_ms(partial(F.linear, x, weight), args.rounds, args.device)
            except ValueError as error:  # this GPU or torch cannot
                print(f"{way}: {error}", flush=True)
                continue
            row = {"product": name, "n": shape[0], "k": shape[1], "form": way, "rows": rows, "us": us}
            found.append({**row, "tflops": 2 * rows * shape[0] * shape[1] / us / 1e6})
    return found


def show_products(title: str, records: list[dict[str, Any]], rate: str, unit: str) -> None:
    """Print products next to those of cuBLAS with the same rows."""
    plain = {(r["product"], r["rows"]): r["us"] for r in records if r["form"] == "bfloat16"}
    table = []
    for r in records:
        base = plain.get((r["product"], r["rows"]))
        faster = "-" if base is None else f"{base / r['us']:.2f}x"
        cells = [r["product"], f"{r['n']} x {r['k']}", r["form"], str(r["rows"])]
        table.append([*cells, f"{r['us']:.1f}", f"{r[rate]:.3g}", faster])
    show(title, ["product", "n x k", "weights", "rows", "us", unit, "against cuBLAS in bfloat16"], table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("bench/out/quantised-gpu.json"))
    parser.add_argument(
        "--forms", nargs="+", choices=("bfloat16", "int8", "int4", "fp8"), default=("bfloat16", "int8", "int4", "fp8")
    )
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--many", nargs="+", type=int, default=MANY)
    parts = ("steps", "products", "many")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cuda", help="cpu tries the script out")
    parser.add_argument("--quick", action="store_true", help="one row, fewer rounds")
    args = parser.parse_args()
    if args.quick:
        args.batches, args.many, args.rounds = (1,), (1024,), 10
    return args


def main() -> None:
    args = parse()
    config, steps, products, many = config_of(args.hidden, args.layers), [], [], []
    if "steps" in args.parts:
        for form in args.forms:
            steps += measure_steps(config, form, args)
            if args.device != "cpu":
                torch.cuda.empty_cache()
        plain = {r["rows"]: r["ms"] for r in steps if r["form"] == "bfloat16"}
        for r in steps:
            r["faster"] = plain[r["rows"]] / r["ms"] if r["rows"] in plain else None
        table = [
            [r["form"], str(r["rows"]), f"{r['ms']:.3f}", f"{r['bytes'] / 1e9:.2f}", f"{r['tb_per_s']:.2f}",
             "-" if r["faster"] is None else f"{r['faster']:.2f}x"]
            for r in steps
        ]  # fmt: skip
        show("a step in a graph", ["weights", "rows", "ms", "GB read", "TB/s", "against bfloat16"], table)
    if "products" in args.parts:
        for name, shape in products_of(config).items():
            for rows in args.batches:
                products += [measure_product(name, shape, form, rows, args) for form in args.forms]
        show_products("products", products, "tb_per_s", "TB/s")
    if "many" in args.parts:
        for name, shape in products_of(config).items():
            for rows in args.many:
                many += measure_many(name, shape, args.forms, rows, args)
        show_products("products of many rows", many, "tflops", "TFLOP/s")
    versions = {package: importlib.metadata.version(package) for package in ("torch", "triton")}
    where = torch.cuda.get_device_name() if args.device != "cpu" else "cpu"
    head = {"date": datetime.now(UTC).date().isoformat(), "gpu": where, "versions": versions}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(
        json.dumps({"header": head, "steps": steps, "products": products, "many": many}, indent=1) + "\n"
    )
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

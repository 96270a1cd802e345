"""The layers whose memory learns while reading, compared with titans-pytorch and LaCT's reference, on a GPU.

    python -m bench.memories.gpu [--peers DIR] [--json FILE] [--tokens 8192] [--hidden 1024] [--heads 16] [--only NAMES]

Each layer runs alone on one sequence: forward without gradients, and forward with backward (to the input too). Weights
are float32 under bfloat16 autocast, and our layers keep the memory itself in float32; a peer that cannot run so uses
the next dtype that it can. A layer that runs out of memory gets half the tokens, and its row says so. Times are between
events around whole calls from Python, as medians of rounds in which all layers take turns; MiB are those of a call
beyond the weights. DIR holds the packages titans_pytorch, lact_model (of LaCT's language model), fla, flash_attn, and
their dependencies.
"""

import argparse
import gc
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.memories.contestants import make_learning, make_linear
from lineate.layers import LaCT

AUTOCAST, BFLOAT16, FLOAT32 = "bf16 autocast", "bf16 weights", "float32"
FEW = 4  # heads; LaCT is meant for few, wide heads
PARTS = (1, 2, 4, 8)  # a layer that runs out of memory gets 1/2, 1/4, 1/8 of the tokens
HUNGRY = 32 * 1024  # MiB; a call that needs more runs once before it is timed, so that the timed call need not allocate


@dataclass
class LayerContestant:
    make: Callable[[], nn.Module]
    settings: str
    ours: str | None = None
    """Our layer that a peer is compared with."""
    dtypes: tuple[str, ...] = (AUTOCAST, FLOAT32)


def contestants(hidden: int, heads: int) -> dict[str, LayerContestant]:
    d = hidden // heads
    by_chunk = f"{heads} heads of {d}, chunk {{}}"
    learned = make_learning(hidden, heads)
    with torch.device("meta"):
        chunks = {name: make().chunk for name, make in learned.items()}
    result = {name: LayerContestant(make, by_chunk.format(chunks[name])) for name, make in learned.items()}
    wide = f"{FEW} heads of {hidden // FEW}, chunk {chunks['LaCT']}"
    result[f"LaCT {FEW} heads"] = LayerContestant(make_learning(hidden, FEW)["LaCT"], wide)
    plain = f"{heads} heads of {d}"
    linear = make_linear(hidden, heads)
    result |= {name: LayerContestant(linear[name], plain) for name in ("Gated DeltaNet", "KDA")}

    chunk = chunks["Titans MLP"]
    same, mlp, matrix = by_chunk.format(chunk), "2 matrices, expansion 2", "1 matrix"
    result |= {
        "titans-pytorch": LayerContestant(
            lambda: titans_peer(hidden, heads, chunk, chunk, depth=2),
            f"{same}, batch {chunk} (gradients at the chunk's start, as ours), {mlp}", "Titans MLP",
        ),
        "titans-pytorch one batch": LayerContestant(
            lambda: titans_peer(hidden, heads, chunk, None, depth=2),
            f"{same}, no batch (all gradients at the first weights), {mlp}", "Titans MLP",
        ),
        "titans-pytorch matrix": LayerContestant(
            lambda: titans_peer(hidden, heads, chunk, chunk, depth=1),
            f"{same}, batch {chunk}, {matrix}", "Titans",
        ),
        "titans-pytorch defaults": LayerContestant(
            lambda: titans_default(hidden, heads),
            f"{heads} heads of {d}, its defaults: chunk 1, no batch, 2 matrices, expansion 4", "Titans MLP",
        ),
    }  # fmt: skip
    for name, number, settings in (("", heads, by_chunk.format(chunks["LaCT"])), (f" {FEW} heads", FEW, wide)):
        result[f"LaCT reference{name}"] = LayerContestant(
            lambda number=number: lact_peer(hidden, number, fused=False), f"{settings}, torch.compile", f"LaCT{name}"
        )
    for name, number, settings in (("", heads, by_chunk.format(chunks["LaCT"])), (f" {FEW} heads", FEW, wide)):
        result[f"LaCT reference fused{name}"] = LayerContestant(
            lambda number=number: lact_peer(hidden, number, fused=True), f"{settings}, its Triton kernels",
            f"LaCT{name}", (BFLOAT16,),
        )  # fmt: skip
    return result


def titans_peer(hidden: int, heads: int, chunk: int, batch: int | None, *, depth: int) -> nn.Module:
    """Return a layer as close to our Titans as its options allow; it has no short convolution, and one gate a chunk."""
    torch._C._jit_set_texpr_fuser_enabled(False)  # this fuser cannot compile the package's scan in bfloat16
    from titans_pytorch import MemoryMLP, NeuralMemory

    d = hidden // heads
    forget = -8.0 if depth > 1 else -5.0
    return NeuralMemory(
        dim=hidden, heads=heads, dim_head=d, chunk_size=chunk, batch_size=batch,
        model=MemoryMLP(d, depth=depth, expansion_factor=2.0), mem_model_norm_add_residual=False, activation=nn.SiLU(),
        pre_rmsnorm=False, qk_rmsnorm=True, post_rmsnorm=True,
        init_adaptive_step_bias=-3.5, init_momentum_bias=0.0, init_decay_bias=forget,
    )  # fmt: skip


def titans_default(hidden: int, heads: int) -> nn.Module:
    torch._C._jit_set_texpr_fuser_enabled(False)
    from titans_pytorch import NeuralMemory

    return NeuralMemory(dim=hidden, heads=heads, dim_head=hidden // heads)


def lact_peer(hidden: int, heads: int, *, fused: bool) -> nn.Module:
    """Return a layer with the settings of our LaCT: those of its published configurations, but weights of full rank."""
    from lact_model.layer_lact_swiglu import LaCTSWIGLULayer

    torch._dynamo.config.automatic_dynamic_shapes = False  # compile each size separately
    with torch.device("meta"):
        ours = LaCT(hidden, heads)
    return LaCTSWIGLULayer(
        hidden_size=hidden, num_attn_heads=ours.attention_heads, num_lact_heads=heads, inter_multi=1,
        window_size=ours.window, lact_chunk_size=ours.chunk, attn_qk_norm=False, use_muon=True, use_momentum=True,
        learnable_ttt_scale=True, ttt_nope=True, rope_theta=ours.rope_theta, use_fused_kernel=fused, fp32_states=True,
    )  # fmt: skip


@dataclass
class TimedLayer:
    """A layer on the device, with its input."""

    module: nn.Module
    x: Tensor
    dtype: str
    row: dict[str, Any]
    times: dict[str, list[float]] = field(default_factory=lambda: {"forward": [], "train": []})

    def run(self, what: str) -> Tensor:
        with (
            torch.set_grad_enabled(what == "train"),
            torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.dtype == AUTOCAST),
        ):
            y: Tensor = self.module(self.x)[0]
        if what == "train":
            y.float().square().mean().backward()
        return y.detach()

    def clear(self) -> None:
        self.module.zero_grad(set_to_none=True)
        self.x.grad = None

    def first(self, what: str) -> None:
        """Make the first call and record its seconds, then another and record its memory."""
        self.clear()
        synchronize(self.x)
        begin = time.perf_counter()
        y = self.run(what)
        synchronize(self.x)
        self.row[f"{what}_first_s"] = time.perf_counter() - begin
        grads = [p.grad for p in (*self.module.parameters(), self.x) if p.grad is not None]
        if what == "train" and not grads:
            raise RuntimeError("no gradient came back")
        finite = all(bool(t.isfinite().all()) for t in (y, *grads))
        self.row["finite"] = finite and self.row.get("finite", True)
        del y, grads
        self.clear()
        if self.x.is_cuda:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.run(what)
            self.row[f"{what}_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            self.clear()

    def sample(self, what: str) -> None:
        """Return the milliseconds of one call."""
        self.clear()
        gc.collect()
        if self.row.get(f"{what}_mib", 0) > HUNGRY:
            torch.cuda.empty_cache()
            self.run(what)
            self.clear()
            gc.collect()
        synchronize(self.x)
        if self.x.is_cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self.run(what)
            end.record()
            torch.cuda.synchronize()
            self.times[what].append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            self.run(what)
            self.times[what].append(1e3 * (time.perf_counter() - begin))
        self.clear()


def synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()  # an error that broke the device ends the run here
        torch.cuda.empty_cache()


def in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def prepare(name: str, contestant: LayerContestant, tokens: int, hidden: int, device: str) -> TimedLayer | str:
    """Return a layer that is ready to be timed, or the reason why there is none.

    It uses the first of its dtypes that works, and fewer tokens if it runs out of memory.
    """
    reasons = []
    for dtype in contestant.dtypes:
        for t in (tokens // n for n in PARTS):
            release(device)
            row = {"name": name, "settings": contestant.settings, "dtype": dtype, "tokens": t}
            try:
                torch.manual_seed(0)
                weights = torch.bfloat16 if dtype == BFLOAT16 else torch.float32
                module = contestant.make().to(device, weights)
                x = torch.randn(1, t, hidden).to(device, weights).requires_grad_()
                case = TimedLayer(module, x, dtype, row)
                row["parameters"] = sum(p.numel() for p in module.parameters())
                for what in case.times:
                    case.first(what)
                return case
            except ImportError as error:
                print(f"{name}: {error}", flush=True)
                return str(error)
            except torch.OutOfMemoryError:
                reason, again = "out of memory", True
            except Exception as error:  # whatever a peer raises, the others go on
                reason, again = in_a_line(error), "out of memory" in str(error)
            module = x = case = None
            reasons.append(f"{dtype}, {t} tokens: {reason}")
            print(f"{name}: {reasons[-1]}", flush=True)
            if not again:
                break
        else:
            break  # it would not fit in any dtype
    return "; ".join(reasons)


def measure(cases: list[TimedLayer], rounds: int, budget: float) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Time all layers in turns; a call leaves the rounds once it has used `budget` seconds.

    Return the rows, and the reasons why layers failed.
    """
    left: dict[str, str] = {}
    gc.collect()
    gc.freeze()  # the garbage collector skips all objects that exist here
    gc.disable()
    for _ in range(rounds):
        for case in cases:
            try:
                for what, times in case.times.items():
                    if sum(times) < 1e3 * budget:
                        case.sample(what)
            except Exception as error:  # whatever a peer raises while it is timed, the others go on
                left[case.row["name"]] = in_a_line(error)
                print(f"{case.row['name']}: {left[case.row['name']]}", flush=True)
        cases = [case for case in cases if case.row["name"] not in left]
    gc.enable()
    for case in cases:
        for what, times in case.times.items():
            ms = statistics.median(times)
            case.row |= {f"{what}_ms": ms, f"{what}_us_a_token": 1e3 * ms / case.row["tokens"], f"{what}_all_ms": times}
    return [case.row for case in cases], left


def table(results: list[dict[str, Any]], every: dict[str, LayerContestant]) -> list[list[str]]:
    found = {r["name"]: r for r in results}
    lines = []
    for r in results:
        ours = found.get(every[r["name"]].ours or "")
        cells = [r["name"], r["dtype"], str(r["tokens"])]
        for what in ("forward", "train"):
            cells += [f"{r[f'{what}_ms']:.2f}", f"{r[f'{what}_us_a_token']:.2f}"]
            cells.append(f"{r[f'{what}_us_a_token'] / ours[f'{what}_us_a_token']:.1f}x" if ours is not None else "")
            cells.append(f"{r[f'{what}_mib']:.0f}" if f"{what}_mib" in r else "")
        cells += [f"{r['parameters'] / 1e6:.2f}", "yes" if r["finite"] else "NO"]
        lines.append(cells)
    return lines


def versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "triton", "titans-pytorch", "flash-linear-attention", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    attention = sys.modules.get("flash_attn")
    return found | {"flash_attn": getattr(attention, "__version__", "absent")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("bench/out/memory-gpu.json"))
    parser.add_argument("--peers", type=Path, help="a folder with the peers' packages, put on the path")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--only", help="these rows of the table, by name, with commas between them")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--budget", type=float, default=5.0, help="seconds for the rounds of one call")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peers is not None:
        sys.path.insert(0, str(args.peers))
    from bench.timing import show

    every = contestants(args.hidden, args.heads)
    names = list(every) if args.only is None else args.only.split(",")
    if unknown := [name for name in names if name not in every]:
        parser.error(f"--only has no {', '.join(unknown)}; there are {', '.join(every)}")
    cases, failed = [], {}
    for name in names:
        case = prepare(name, every[name], args.tokens, args.hidden, args.device)
        if isinstance(case, str):
            failed[name] = case
            continue
        cases.append(case)
        print(case.row, flush=True)
    results, left = measure(cases, args.rounds, args.budget)
    failed |= left
    columns = ["layer", "dtype", "tokens", "forward ms", "us a token", "of ours", "MiB"]
    columns += ["with backward ms", "us a token", "of ours", "MiB", "M parameters", "finite"]
    title = f"One layer, b 1, t {args.tokens}, hidden {args.hidden}, medians"
    show(title, columns, table(results, every))
    for row in results:
        print(f"{row['name']}: {row['settings']}")
    head = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "versions": versions(), "float32_products": torch.get_float32_matmul_precision(),
        "tokens": args.tokens, "hidden": args.hidden, "heads": args.heads,
    }  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"header": head, "results": results, "failed": failed}, indent=1) + "\n")
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

"""The rules of the general row on an NVIDIA GPU, compared with flash-linear-attention and with our five rules.

    python -m bench.rules.gpu_general [--peers DIR] [--rules NAMES] [--shapes 8x4096 1x32768] [--json FILE]

32 heads of 128, bfloat16, forward, and forward with backward; log_decay is float32, the final state is returned. Every
contestant of a rule has a process of its own. All processes first run their calls together, which compiles their
kernels; then one at a time chooses its configurations again (fla tunes itself) and is measured: the median of calls
between CUDA events, and of replays of a CUDA graph where a call can be captured. The table has the smaller of the two.
fla computes rwkv7 with its rule "dplr". Its backward of rules with a decay per head needs TileLang on Hopper GPUs with
triton before 3.7.1, where fla refuses its own kernel, whose gradients are wrong there; * marks the time of that kernel.
"""

import argparse
import gc
import json
import multiprocessing as mp
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.timing import show

HEADS, DIM, WRITES = 32, 128, 2
FORWARD, TRAIN = "forward", "forward+backward"
SHAPES = ("8x4096", "1x32768")
RULES = ("kda", "gdn", "gdn2", "gated deltaproduct", "deltaproduct", "rwkv7")
"""The first two are ours alone: what the others are compared with. Both products have two writes a token."""
REFUSED = "gated deltaproduct"
"""The rule whose backward fla refuses."""
SECONDS = 0.5
Run = Callable[[dict[str, Tensor]], tuple[Tensor, Any]]


def make_inputs(rule: str, b: int, t: int) -> dict[str, Tensor]:
    """Return random inputs: unit q and k, rates in (0, 1), log_decay with a median of about -0.14."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)

    several = (WRITES,) if "product" in rule else ()
    made = {"q": F.normalize(normal(b, t, HEADS, DIM), dim=-1)}
    made |= {"k": F.normalize(normal(b, t, *several, HEADS, DIM), dim=-1), "v": normal(b, t, *several, HEADS, DIM)}
    if rule != "deltaproduct":
        channels = () if rule == "gdn" or several else (DIM,)
        made["log_decay"] = normal(b, t, HEADS, *channels, dtype=torch.float32).sub_(2).exp_().neg_()
    if rule == "gdn2":
        made |= {name: normal(b, t, HEADS, DIM).sigmoid() for name in ("erase", "write")}
    elif rule == "rwkv7":  # erases what a unit vector reads before the decay
        unit = F.normalize(normal(b, t, HEADS, DIM, dtype=torch.float32), dim=-1)
        made |= {"before": unit.bfloat16(), "probe": (unit * made["log_decay"].neg().clamp(max=8).exp()).bfloat16()}
        made["direction"] = (unit * normal(b, t, HEADS, DIM).sigmoid()).bfloat16()
    else:
        made["beta"] = normal(b, t, *several, HEADS, dtype=torch.float32).sigmoid()
    return made


def ours(rule: str) -> Run:
    import lineate

    ops = {
        "kda": lineate.kimi_delta_attention, "gdn": lineate.gated_delta_rule, "gdn2": lineate.gated_delta_rule_2,
        "gated deltaproduct": lineate.gated_delta_product, "deltaproduct": lineate.gated_delta_product,
        "rwkv7": lineate.diagonal_plus_low_rank,
    }  # fmt: skip
    fixed: dict[str, Any] = {"log_decay": None} if rule == "deltaproduct" else {}
    return lambda x: ops[rule](**{k: y for k, y in x.items() if k != "before"}, **fixed, backend="triton")


def fla(rule: str) -> Run:
    if rule == "gdn2":
        from fla.ops.gdn2 import chunk_gdn2

        return lambda x: chunk_gdn2(
            x["q"], x["k"], x["v"], x["log_decay"], x["erase"], x["write"], output_final_state=True
        )
    if rule == "rwkv7":
        from fla.ops.generalized_delta_rule.dplr import chunk_dplr_delta_rule

        return lambda x: chunk_dplr_delta_rule(
            x["q"], x["k"], x["v"], -x["before"], x["direction"], x["log_decay"], output_final_state=True
        )
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_product import chunk_gated_delta_product

    chunk_o.IS_NVIDIA_HOPPER = False  # else it raises where the kernel is wrong

    return lambda x: chunk_gated_delta_product(
        x["q"], x["k"].flatten(1, 2), x["v"].flatten(1, 2), x.get("log_decay"), x["beta"].flatten(1, 2), WRITES,
        output_final_state=True,
    )  # fmt: skip


def call_of(run: Run, what: str, inputs: dict[str, Tensor]) -> Callable[[], Any]:
    """Return a call; forward+backward differentiates by all inputs."""
    if what == FORWARD:

        def forward() -> Any:
            with torch.no_grad():
                return run(inputs)

        return forward
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    gradient = torch.randn_like(inputs["q"])

    def train() -> Any:
        output = run(leaves)[0]
        used = [x for x in leaves.values() if x.requires_grad]
        return torch.autograd.grad(output, used, gradient, allow_unused=True)

    return train


def milliseconds(call: Callable[[], Any]) -> dict[str, Any]:
    """Return the medians between events and of replays, and the peak of memory beyond what was there."""
    from bench.rules.gpu_timing import between_events, extra_bytes, graph_replays

    found: dict[str, Any] = {"extra_bytes": extra_bytes(call), "graph_ms": None}
    found["event_ms"] = statistics.median(between_events([call], SECONDS))
    try:
        found["graph_ms"] = statistics.median(graph_replays([call], found["event_ms"], SECONDS))
    except Exception as error:  # whatever a peer raises while it is captured
        found["graph_error"] = str(error).splitlines()[0][:200]
    found["ms"] = min(x for x in (found["event_ms"], found["graph_ms"]) if x)
    return found


def forget_choices() -> None:
    """Let Triton's autotuners choose again, with kernels that are compiled already."""
    from triton.runtime.autotuner import Autotuner

    for x in gc.get_objects():
        if isinstance(x, Autotuner):
            x.cache.clear()


def compile_together() -> None:
    """Let Triton's autotuners compile all their configurations at once, in several threads, before they time them."""
    import triton
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs
    pool = ThreadPoolExecutor(8)

    def pruned(self: Any, kwargs: dict[str, Any]) -> Any:
        found = prune(self, kwargs)
        given = {name: x for name, x in kwargs.items() if name not in ("grid", "warmup")}
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            for config in found:
                self.fn.warmup(*self.nargs.values(), grid=(1,), **given, **config.all_kwargs())
        return found

    Autotuner.prune_configs = pruned


def contestant(name: str, rule: str, shapes: tuple[str, ...], pipe: Any) -> None:
    """Compile all calls, wait, then measure them; send a dictionary of results or messages."""
    if name == "fla":
        compile_together()
    run = {"ours": ours, "fla": fla}[name](rule)
    cases, found = [], {}
    for shape in shapes:
        b, t = map(int, shape.split("x"))
        cases += [(shape, what, (b, t)) for what in (FORWARD, TRAIN)]
    for number, (_, what, (b, t)) in enumerate(cases):
        try:
            call_of(run, what, make_inputs(rule, b, t))()
            torch.cuda.synchronize()
        except Exception as error:
            found[number] = {"error": f"{type(error).__name__}: {error}"[:300]}
    gc.collect()
    torch.cuda.empty_cache()
    pipe.send("compiled")
    pipe.recv()
    if name == "fla":
        forget_choices()
    for number, (shape, what, (b, t)) in enumerate(cases):
        record = {"contestant": name, "rule": rule, "shape": shape, "what": what}
        if number not in found:
            try:
                call = call_of(run, what, make_inputs(rule, b, t))
                call()
                found[number] = milliseconds(call)
                del call
            except Exception as error:
                found[number] = {"error": f"{type(error).__name__}: {error}"[:300]}
        gc.collect()
        torch.cuda.empty_cache()
        pipe.send(record | found[number])
    pipe.send(None)


def number(x: float | None, form: str = "{:.3f}") -> str:
    return "-" if x is None else form.format(x)


def table(records: list[dict[str, Any]]) -> None:
    """Print the times, and how they compare with fla and with our Kimi Delta Attention or Gated DeltaNet."""
    ms = {(r["contestant"], r["rule"], r["shape"], r["what"]): r.get("ms") for r in records}
    rows = []
    for _, rule, shape, what in [x for x in ms if x[0] == "ours"]:
        own, theirs = ms["ours", rule, shape, what], ms.get(("fla", rule, shape, what))
        like = "gdn" if "product" in rule else "kda"
        base = ms.get(("ours", like, shape, what))
        rows.append([
            rule, what, shape, number(own), number(theirs) + "*" * (rule == REFUSED and what == TRAIN and bool(theirs)),
            number(theirs / own if theirs and own else None, "{:.2f}x"),
            number(own / base if base and own else None, "{:.2f}x " + like),
        ])  # fmt: skip
    show("The general row on a GPU", ["rule", "what", "shape", "ms", "fla", "fla / ours", "ours / ours"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="a folder with fla, unpacked")
    parser.add_argument("--rules", nargs="+", default=RULES, choices=RULES)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="rows x tokens")
    parser.add_argument("--json", type=Path, default=Path("bench/out/general.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "these measurements need a GPU\n")
    if args.peers:
        sys.path.insert(0, str(args.peers))
        os.environ["PYTHONPATH"] = os.pathsep.join(x for x in (str(args.peers), os.environ.get("PYTHONPATH")) if x)
    os.environ["FLA_CACHE_RESULTS"] = "0"
    context = mp.get_context("spawn")
    pairs = [("ours", rule) for rule in args.rules]
    if args.peers:
        pairs += [("fla", rule) for rule in args.rules if rule not in ("kda", "gdn")]
    running = []
    for name, rule in pairs:
        here, there = context.Pipe()
        process = context.Process(target=contestant, args=(name, rule, tuple(args.shapes), there), daemon=True)
        process.start()
        running.append((process, here))
    for _, pipe in running:
        pipe.recv()
    records: list[dict[str, Any]] = []
    about = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "heads": HEADS, "dim": DIM, "writes": WRITES,
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
    }  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    for process, pipe in running:
        pipe.send("go")
        while (record := pipe.recv()) is not None:
            records.append(record)
            print(record, flush=True)
            args.json.write_text(json.dumps({"about": about, "records": records}, indent=1))
        process.join()
    table(records)


if __name__ == "__main__":
    main()

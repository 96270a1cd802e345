"""lineate on a CPU compared with transformers' fallbacks, a plain token loop and SDPA: time, memory, scaling.

    python -m bench.rules.cpu                              makes all tables, in several minutes
    python -m bench.rules.cpu --quick                      uses fewer rounds and shorter sequences
    python -m bench.rules.cpu --only gdn,kda,decode        measures some rules and makes some tables
    python -m bench.rules.cpu --plot bench/out/cpu.png     also plots time and memory against length

Contestants take turns in every round, and must agree before they are timed: a wrong result ends the run, exit code 1.
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch

import lineate
from bench import timing
from bench.rules import contestants as c
from bench.rules import general as g
from bench.rules import plot
from bench.rules.tables import Bench, Calls, Measured, pivot
from lineate.dispatch import RECURRENT_UP_TO

T, HEADS, HEAD_DIM = 2048, 16, 128  # the base shape, b = 1
BASE = f"b 1, t {T}, {HEADS} heads, {HEAD_DIM} dims, float32"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
PEERS_UP_TO = 16384  # SDPA is quadratic in time, and transformers' fallback holds many copies of its inputs
SHORT = (1, 2, 3, 4, 6, 8, 16, 32, 64)
TRAIN = "forward+backward"
RESETS = "float32, every 16th log_decay -50"
IMPORT = "import time, torch; s = time.perf_counter(); import lineate; print(time.perf_counter() - s)"


def contestants(rule: str, what: str) -> list[str]:
    """Return the contestants that can compute this rule."""
    if rule == "softmax":
        return ["lineate", "SDPA"]
    names = ["lineate", "lineate torch"]
    # For the backward, KDA's fallback and the loop over tokens would hold many gigabytes.
    if c.transformers_functions() and (rule in ("delta", "gdn") or (rule, what) == ("kda", "forward")):
        names.append("transformers")
    return [*names, "token loop"] if what == "forward" else names


def contestant(who: str, what: str, x: c.RuleInputs) -> timing.Call | None:
    make: Any = {
        "lineate": c.ours,
        "lineate torch": c.ours_in_torch,
        "transformers": c.theirs,
        "token loop": c.token_loop,
        "SDPA": c.sdpa,
    }[who]
    return c.forward_backward(make, x) if what == TRAIN else c.forward(make(x))


def prefill(bench: Bench) -> None:
    for rule in bench.rules:  # compare gradients with the loop's, where its memory allows
        x = c.make_inputs(rule, 160, dim=64)
        other = "SDPA" if rule == "softmax" else "token loop"
        got, want = (contestant(who, TRAIN, x) for who in ("lineate", other))
        assert got is not None and want is not None
        bench.compare("prefill", Measured(rule, "lineate", TRAIN, 160), got(), want())
    calls: Calls = {}
    for what in ("forward", TRAIN):
        for rule in bench.rules:
            x = c.make_inputs(rule, T)
            for who in contestants(rule, what):
                calls[Measured(rule, who, what, T)] = contestant(who, what, x)
    bench.time("prefill", calls)
    bench.show("prefill", f"Prefill, {BASE}", lambda key: f"{key.rule} {key.what}", lambda key: key.who, "lineate")


def decode(bench: Bench) -> None:
    calls: Calls = {}
    for rule in bench.rules:
        if rule != "softmax":
            x = c.make_inputs(rule, 1, with_state=True)
            calls[Measured(rule, "lineate", "step", 1)] = c.forward(c.ours(x))
            calls[Measured(rule, "lineate torch", "step", 1)] = c.forward(c.ours_in_torch(x))
            calls[Measured(rule, "transformers", "step", 1)] = c.forward(c.theirs(x, "recurrent"))
            calls[Measured(rule, "token loop", "step", 1)] = c.forward(c.token_loop(x))
    bench.time("decode", calls)
    bench.show("decode", "Decode, one token, b 1", lambda key: key.rule, lambda key: key.who, "lineate")


def memory(bench: Bench) -> None:
    """Measure each contestant in its own process; a quick run measures the forward of three rules."""
    cells: dict[tuple[str, str], str] = {}
    for what in ("forward", TRAIN):
        for rule in bench.rules:
            for who in contestants(rule, what):
                if bench.quick and (rule not in ("gdn", "kda", "softmax") or who == "token loop" or what == TRAIN):
                    continue
                case = ["-m", "bench.rules.cpu", "--threads", str(bench.threads), "--measure", f"{rule}/{who}/{what}"]
                found = timing.in_fresh_process(case, {**os.environ, **timing.EXACT_ALLOCATION})
                believed = found is not None and abs(found["meter"] - 1) <= timing.METER_WITHIN
                if believed:
                    bench.memory[Measured(rule, who, what, T)] = found
                elif found is not None:
                    print(f"memory of {rule} {who} {what}: a known block reads {found['meter']:.2f} of its size")
                cells[f"{rule} {what}", who] = f"{found['bytes'] / 1e6:.0f}" if believed else "?"
    pivot(f"Peak extra memory, {BASE}; MB, inputs excluded, outputs included, each in a fresh process", cells)


def measure(case: str) -> None:
    """Run as the child of `memory`: warm up on a few tokens, test the meter, then print the bytes of one call."""
    rule, who, what = case.split("/")
    few, many = (contestant(who, what, c.make_inputs(rule, t)) for t in (128, T))
    assert few is not None and many is not None
    few()
    meter = timing.meter(lambda size: torch.ones(size, dtype=torch.uint8))
    print(json.dumps({**timing.peak_extra_bytes(many), "meter": meter}))


def scaling(bench: Bench) -> None:
    lengths = [t for t in LENGTHS if not bench.quick or t <= 4096]
    longest = {rule: c.make_inputs(rule, lengths[-1]) for rule in ("gdn", "kda", "softmax") if rule in bench.rules}
    calls: Calls = {}
    oracles = {}
    for t in lengths:
        for rule, whole in longest.items():
            x = whole.first(t)
            if rule == "softmax":
                calls[Measured(rule, "SDPA", "forward", t)] = c.forward(c.sdpa(x)) if t <= PEERS_UP_TO else None
                cache, state = lineate.KeyValueCache(x.k, x.v), c.ours(c.make_inputs("gdn", 1))().state
                bench.state_bytes.append({"t": t, "cache": cache.nbytes, "state": state.nbytes})
                continue
            calls[Measured(rule, "lineate", "forward", t)] = c.forward(c.ours(x))
            oracles[rule, "forward", t] = c.forward(c.token_loop(x) if t <= 1024 else c.in_pieces(x, 1024))
            if rule == "gdn" and t <= PEERS_UP_TO:
                calls[Measured(rule, "transformers", "forward", t)] = c.forward(c.theirs(x))
    bench.time("scaling", calls, oracles=oracles)
    bench.show(
        "scaling", "Scaling with length, forward", lambda key: f"t {key.t}", lambda key: f"{key.rule} {key.who}",
        "gdn lineate",
    )  # fmt: skip


def general(bench: Bench) -> None:
    """Time the rules of the general row next to two of the five rules."""
    calls: Calls = {}
    for what, t in (("forward", T), (TRAIN, T), ("step", 1)):
        for rule in ("gdn", "kda"):
            x = c.make_inputs(rule, t, with_state=what == "step")
            calls[Measured(rule, "lineate", what, t)] = contestant("lineate", TRAIN if what == TRAIN else "forward", x)
        for rule in g.OPS:
            given = g.make_inputs(rule, t, with_state=what == "step")
            make = g.forward_backward if what == TRAIN else g.forward
            calls[Measured(rule, "lineate", what, t)] = make(rule, given, "auto")
            calls[Measured(rule, "lineate torch", what, t)] = make(rule, given, "torch")
    bench.time("general", calls)
    title = f"The general row, {BASE}; a step is one token"
    bench.show("general", title, lambda key: f"{key.rule} {key.what}", lambda key: key.who, "lineate")


def chunk(bench: Bench) -> None:
    calls: Calls = {}
    for rule in ("gdn", "kda"):
        if rule in bench.rules:
            x = c.make_inputs(rule, T)
            for size in (64, 16, 32, 128):
                calls[Measured(rule, "lineate", f"chunk {size}", T)] = c.forward(c.ours(x, chunk_size=size))
    bench.time("chunk", calls, alike=lambda key: key.rule)
    bench.show("chunk", f"Chunk size, forward, t {T}", lambda key: key.what, lambda key: key.rule)


def short(bench: Bench) -> None:
    calls: Calls = {}
    rules = [rule for rule in ("linear", "gdn", "kda") if rule in bench.rules]
    for rule in rules:
        for t in SHORT:
            x = c.make_inputs(rule, t, with_state=True)
            for form in ("recurrent", "chunkwise"):
                calls[Measured(rule, "lineate", form, t)] = c.forward(c.ours(x, form=form))
    bench.time("short", calls, alike=lambda key: (key.rule, key.t))
    bench.show("short", "Short sequences", lambda key: f"t {key.t}", lambda key: f"{key.rule} {key.what}")
    for rule in rules:
        recurrent, chunkwise = (
            [bench.minimum("short", rule, "lineate", form, t) for t in SHORT] for form in ("recurrent", "chunkwise")
        )
        slower = [t for t, r, w in zip(SHORT, recurrent, chunkwise, strict=True) if r and w and r > w]
        print(f"{rule}: recurrent is first slower at t = {slower[0] if slower else 'none of these'}", end="")
        print(f" (dispatch.RECURRENT_UP_TO = {RECURRENT_UP_TO})")


def dtype(bench: Bench) -> None:
    """Time the dtypes, without SDPA, whose bfloat16 takes minutes per call on a CPU without bfloat16 instructions."""
    calls: Calls = {}
    oracles = {}
    for rule in ("gdn", "kda"):
        if rule not in bench.rules:
            continue
        for name, kind in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            x = c.make_inputs(rule, T, dtype=kind)
            calls[Measured(rule, "lineate", name, T)] = c.forward(c.ours(x))
            if rule == "gdn":
                calls[Measured(rule, "transformers", name, T)] = c.forward(c.theirs(x))
        x = c.make_inputs(rule, T, resets=True)
        calls[Measured(rule, "lineate", RESETS, T)] = c.forward(c.ours(x))
        oracles[rule, True] = c.forward(c.token_loop(x))
    bench.time("dtype", calls, alike=lambda key: (key.rule, key.what == RESETS), oracles=oracles)
    title = f"Dtypes and resets, forward, t {T}, log_decay always float32"
    bench.show("dtype", title, lambda key: key.what, lambda key: f"{key.rule} {key.who}")


def shapes(bench: Bench) -> None:
    calls: Calls = {}
    oracles = {}
    for b, hv in ((1, 16), (1, 32), (4, 16)):
        name = f"b {b}, h {HEADS}, hv {hv}"
        for rule in ("gdn", "kda"):
            if rule in bench.rules:
                x = c.make_inputs(rule, T, b=b, hv=hv)
                calls[Measured(rule, "lineate", name, T)] = c.forward(c.ours(x))
                oracles[rule, name, T] = c.forward(c.one_by_one(x))
                if rule == "gdn":
                    calls[Measured(rule, "transformers", name, T)] = c.forward(c.theirs(x))
    bench.time("shapes", calls, oracles=oracles)
    title = f"Grouped heads and batch, forward, t {T}"
    bench.show("shapes", title, lambda key: key.what, lambda key: f"{key.rule} {key.who}")


def import_time(bench: Bench) -> None:
    seconds = [timing.in_fresh_process(["-c", IMPORT], os.environ) for _ in range(4 if bench.quick else 8)]
    bench.import_seconds = [s for s in seconds[1:] if s is not None]  # the first import may have compiled the files


def targets(bench: Bench) -> list[dict[str, Any]]:
    """Return the promises of the library on two threads at the base shape, judged by minimum times."""

    def ratio(table: str, over: tuple[Any, ...], under: tuple[Any, ...]) -> float | None:
        numerator, denominator = bench.minimum(table, *over), bench.minimum(table, *under)
        return None if numerator is None or denominator is None else numerator / denominator

    def gain(table: str, rule: str, what: str, t: int) -> float | None:
        return ratio(table, (rule, "transformers", what, t), (rule, "lineate", what, t))

    def over_sdpa(table: str, t: int) -> float | None:
        ours = ("gdn", "lineate", "forward", t)
        # Both names run torch's kernel, in two layouts; ours is compared with the faster one.
        found = [ratio(table, ("softmax", who, "forward", t), ours) for who in ("SDPA", "lineate")]
        return min((x for x in found if x is not None), default=None)

    def growth(table: str, rule: str, over: tuple[str, int], under: tuple[str, int]) -> float | None:
        return ratio(table, (rule, "lineate", *over), (rule, "lineate", *under))

    extra = bench.memory.get(Measured("kda", "lineate", "forward", T))
    imported = statistics.median(bench.import_seconds) if bench.import_seconds else None
    bf16, f32 = ("bfloat16", T), ("float32", T)  # "no slower" allows 2% for the noise between two equal times
    lines: list[tuple[str, str, float, float | None]] = [
        ("GDN prefill, times faster than transformers", ">=", 3, gain("prefill", "gdn", "forward", T)),
        ("GDN prefill, times faster than SDPA", ">=", 1.5, over_sdpa("prefill", T)),
        ("KDA prefill, times faster than transformers", ">=", 30, gain("prefill", "kda", "forward", T)),
        ("KDA prefill, extra memory in MB", "<=", 150, extra["bytes"] / 1e6 if extra else None),
        ("GDN decode, times faster than transformers", ">=", 3, gain("decode", "gdn", "step", 1)),
        ("KDA decode, times faster than transformers", ">=", 3, gain("decode", "kda", "step", 1)),
        ("GDN forward+backward, times faster than transformers", ">=", 3, gain("prefill", "gdn", TRAIN, T)),
        ("GDN at t 16384, times faster than SDPA", ">=", 12, over_sdpa("scaling", 16384)),
        ("GDN, time at t 32768 / at t 2048", "<=", 18, growth("scaling", "gdn", ("forward", 32768), ("forward", T))),
        ("GDN, time in bfloat16 / in float32", "<=", 1.02, growth("dtype", "gdn", bf16, f32)),
        ("KDA, time in bfloat16 / in float32", "<=", 1.02, growth("dtype", "kda", bf16, f32)),
        ("import lineate beyond torch, in seconds", "<=", 0.2, imported),
    ]
    results = []
    for name, sign, wanted, got in lines:
        reached = None if got is None else got >= wanted if sign == ">=" else got <= wanted
        verdict = {None: "not measured", True: "ok", False: "short"}[reached]
        results.append({"target": name, "wanted": f"{sign} {wanted:g}", "measured": got, "verdict": verdict})
    return results


TABLES = {
    "prefill": prefill, "decode": decode, "memory": memory, "scaling": scaling, "chunk": chunk, "short": short,
    "dtype": dtype, "shapes": shapes, "general": general, "import": import_time,
}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join((*TABLES, *c.RULE_WORDS))
    parser.add_argument("--quick", action="store_true", help="fewer rounds, shorter sequences")
    parser.add_argument("--only", default="", help=f"comma-separated tables and rules, of: {names}")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--rounds", type=int, help="rounds of every table (default 10, quick 4)")
    parser.add_argument("--budget", type=float, help="seconds after which a contestant leaves the rounds (3, quick 1)")
    parser.add_argument("--json", type=Path, default=Path("bench/out/cpu.json"), help="where the numbers go")
    parser.add_argument("--plot", type=Path, help="where a picture goes (needs matplotlib and the scaling table)")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rounds = args.rounds or (4 if args.quick else 10)
    args.budget = args.budget or (1.0 if args.quick else 3.0)
    args.only = [name.strip() for name in args.only.split(",") if name.strip()]
    if unknown := set(args.only) - {*TABLES, *c.RULE_WORDS}:
        parser.error(f"--only takes {names}; got {', '.join(sorted(unknown))}")
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    if args.measure:
        measure(args.measure)
        return
    rules = [name for name in c.RULE_WORDS if name in args.only] or list(c.RULE_WORDS)
    bench = Bench(rules=rules, threads=args.threads, rounds=args.rounds, budget=args.budget, quick=args.quick)
    print(f"{timing.cpu_model()}, {args.threads} threads, torch {torch.__version__}, lineate {lineate.__version__}")
    if not c.transformers_functions():
        print("transformers is not installed: its fallbacks are skipped")
    for t in (T, 1):
        x = c.make_inputs("gdn", t)
        bench.plans.append(str(lineate.explain(x.q, x.k, x.v, *x.gates)))
        print(bench.plans[-1])
    shape = {"b": 1, "t": T, "h": HEADS, "hv": HEADS, "k": HEAD_DIM, "v": HEAD_DIM, "dtype": "float32"}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    promises = []
    for name in [name for name in TABLES if name in args.only] or TABLES:
        TABLES[name](bench)
        promises = targets(bench)
        args.json.write_text(json.dumps(bench.report(shape, promises), indent=1) + "\n")  # save the results so far
    timing.show(
        f"Targets (meant for 2 threads, run on {args.threads}), {BASE}, minima",
        ["", "wanted", "measured", "verdict"],
        [[p["target"], p["wanted"], "-" if p["measured"] is None else f"{p['measured']:.3g}", p["verdict"]]
         for p in promises],
    )  # fmt: skip
    if (busy := bench.others.cores()) is not None and busy > bench.others.BUSY:
        print(f"Other processes kept {busy:.1f} cores busy: believe no time or ratio above (memory is unaffected).")
    print(f"\nwrote {args.json}")
    if args.plot:
        plot.draw(args.json, args.plot)
        print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()

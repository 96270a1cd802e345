"""Rules and memories side by side at equal state bytes: what each recalls, overwrites and forgets, and its cost.

    python -m bench.memories.recall                                       makes all tables, in several minutes
    python -m bench.memories.recall --quick                               uses fewer seeds and shorter streams
    python -m bench.memories.recall --only recall,exact                   makes some tables
    python -m bench.memories.recall --json bench/out/memory.json --plot docs/images

Keys are random with length 1, values are random normal, and nothing is trained. Rates and other settings are the best
of at most eight (bench/memories/recall_cases.py), chosen for each table and size on seeds that are not measured.
"""

import argparse
import importlib.metadata
import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lineate
from bench import timing
from bench.memories import cost as memory_cost
from bench.memories import recall_plot as memory_plot
from bench.memories.recall_cases import CONTESTANTS, MemoryContestant, Setting, State
from lineate.memory.least_squares import least_squares

BUDGET = 64 * 1024  # bytes of state
LAST = 64  # pairs whose values are asked for at the end of a stream
TUNED = 512  # tokens of the streams on which settings are chosen
TRIALS = 2  # seeds on which a setting is chosen

Row = dict[str, Any]


def pairs(seed: int, rows: int, n: int, d: int) -> tuple[Tensor, Tensor]:
    """Return keys of length 1 and normal values, `rows n d`."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, rows, n, d, generator=generator)
    return F.normalize(k, dim=-1), v


def accuracy(y: Tensor, values: Tensor, right: Tensor) -> float:
    """Return how often the value nearest by cosine, among all values, is the right one; y is `b n d`, right is `n`."""
    nearest = (F.normalize(y.nan_to_num(), dim=-1) @ F.normalize(values, dim=-1).mT).argmax(-1)
    return float((nearest == right).double().mean())


def error(y: Tensor, v: Tensor) -> float:
    """Return |y - v| / |v| over all pairs, or infinity if the memory has blown up."""
    found = float((y - v).norm() / v.norm())
    return found if found == found else float("inf")


def recall(who: MemoryContestant, s: Setting, d: int, n: int, seed: int, rows: int = TRIALS) -> Row:
    """Write n pairs once and ask for all of them."""
    k, v = pairs(seed, rows, n, d)
    y = who.read(who.write(k, v, s, None), k, s)
    return {"accuracy": accuracy(y, v, torch.arange(n)), "error": error(y, v)}


def overwrite(who: MemoryContestant, s: Setting, d: int, n: int, seed: int, rows: int = TRIALS) -> Row:
    """Write n pairs, then new values for the first half of the keys; old values stay among the candidates.

    Settings are judged by the worse half.
    """
    half = n // 2
    k, v = pairs(seed, rows, n + half, d)
    k = torch.cat((k[:, :n], k[:, :half]), 1)
    y = who.read(who.write(k, v, s, None), k[:, :n], s)
    right = torch.cat((torch.arange(n, n + half), torch.arange(half, n)))
    result = {}
    for name, own in (("new", slice(0, half)), ("kept", slice(half, n))):
        result[f"accuracy_{name}"] = accuracy(y[:, own], v, right[own])
        result[f"error_{name}"] = error(y[:, own], v[:, right[own]])
    result["accuracy"] = min(result["accuracy_new"], result["accuracy_kept"])
    result["error"] = max(result["error_new"], result["error_kept"])
    return result


def stream(who: MemoryContestant, s: Setting, d: int, n: int, seed: int, rows: int = TRIALS) -> Row:
    """Write n pairs and ask for the last ones; record the norm of the weights at each doubling of the length."""
    state: State | None = None
    points, done = [], 0
    for mark in (x for x in (256, 512, 1024, 2048, 4096, 8192, 16384) if x <= n):
        k, v = pairs(seed * 100_000 + mark, rows, mark - done, d)
        state, done = who.write(k, v, s, state), mark
        y = who.read(state, k[:, -LAST:], s)
        points.append({
            "t": mark, "accuracy": accuracy(y, v[:, -LAST:], torch.arange(LAST)), "error": error(y, v[:, -LAST:]),
            "norm": float(who.norm(state).mean()),
        })  # fmt: skip
    return {**points[-1], "points": points}


def best(who: MemoryContestant, d: int, n: int, measure: Any) -> Setting:
    """Return the setting of the highest accuracy and, among equals, of the lowest error."""

    def rank(s: Setting) -> tuple[float, float]:
        found = measure(who, s, d, n, seed=1)
        return round(found["accuracy"], 3), -found["error"]

    return max(who.settings, key=rank) if len(who.settings) > 1 else who.settings[0]


def measured(measure: Any, sizes: list[int], seeds: int, tuned: int | None = None) -> list[Row]:
    """Return one row for each contestant and size."""
    rows = []
    for who in CONTESTANTS:
        d = who.width(BUDGET)
        for n in sizes:
            s = best(who, d, n if tuned is None else tuned, measure)
            found = measure(who, s, d, n, seed=2, rows=seeds)
            rows.append({"name": who.name, "n": n, "d": d, "bytes": who.state_bytes(d), "setting": s, **found})
    return rows


def exact() -> list[Row]:
    """Compare least squares with DeltaNet on keys of the same size, by the largest relative error of any pair."""
    rows, d = [], 64
    for dtype, ridge in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        for n in (8, 16, 24, 32, 48, 64):
            k, v = (x.to(dtype).unsqueeze(2) for x in pairs(3, 8, n, d))
            fit = least_squares(k, k, v, ridge=ridge, chunk=16)[1]["S"]
            corrected = lineate.delta_rule(k, k, v, torch.ones(8, n, 1, dtype=dtype), scale=1.0).state
            worst = [float(((k[:, :, 0] @ S[:, 0] - v[:, :, 0]).norm(dim=-1) / v[:, :, 0].norm(dim=-1)).max())
                     for S in (fit, corrected)]  # fmt: skip
            rows.append({"dtype": str(dtype)[6:], "ridge": ridge, "n": n, "d": d, "least squares": worst[0],
                         "DeltaNet": worst[1]})  # fmt: skip
    return rows


def run_recall(quick: bool, data: dict[str, Any]) -> None:
    sizes = [16, 64, 256] if quick else [16, 32, 64, 128, 256, 512, 1024]
    data["recall"] = rows = measured(recall, sizes, 2 if quick else 6)
    shape = ["", "channels", "state bytes"]
    for what, form in (("accuracy", "{:.2f}"), ("error", "{:.3g}")):
        table = [
            [who.name, *(str(next(r[x] for r in rows if r["name"] == who.name)) for x in ("d", "bytes")),
             *("-" if what == "error" and not who.scaled else form.format(r[what])
               for r in rows if r["name"] == who.name)] for who in CONTESTANTS
        ]  # fmt: skip
        timing.show(f"Recall of pairs written once: {what} by pairs", [*shape, *map(str, sizes)], table)
    timing.show("Settings chosen", ["", *map(str, sizes)], [
        [who.name, *(_setting(r["setting"]) for r in rows if r["name"] == who.name)] for who in CONTESTANTS
    ])  # fmt: skip


def run_overwrite(quick: bool, data: dict[str, Any]) -> None:
    data["overwrite"] = rows = measured(overwrite, [64], 2 if quick else 6)
    scaled = {who.name: who.scaled for who in CONTESTANTS}
    names = ("accuracy_new", "accuracy_kept", "error_new", "error_kept")
    timing.show(
        "64 pairs, then new values for half of the keys", ["", *(x.replace("_", ", ") for x in names), "setting"],
        [[r["name"], *(f"{r[x]:.2f}" if scaled[r["name"]] or "acc" in x else "-" for x in names),
          _setting(r["setting"])] for r in rows],
    )  # fmt: skip


def run_length(quick: bool, data: dict[str, Any]) -> None:
    longest = 2048 if quick else 16384
    data["length"] = rows = measured(stream, [longest], 2, tuned=TUNED)
    marks = [p["t"] for p in rows[0]["points"]]
    for what in ("accuracy", "error", "norm"):
        table = [[r["name"], *(f"{p[what]:.3g}" for p in r["points"]), _setting(r["setting"])] for r in rows]
        title = f"A stream of random pairs, settings of {TUNED} tokens: {what} of " + (
            "the weights" if what == "norm" else f"the last {LAST}"
        )
        timing.show(title, ["", *map(str, marks), "setting"], table)


def run_exact(quick: bool, data: dict[str, Any]) -> None:
    data["exact"] = rows = exact()
    timing.show(
        "Largest error of any of n pairs, keys and values of 64 channels", ["n", "dtype", "least squares", "DeltaNet"],
        [[str(r["n"]), r["dtype"], f"{r['least squares']:.1e}", f"{r['DeltaNet']:.2f}"] for r in rows],
    )  # fmt: skip


def run_cost(quick: bool, data: dict[str, Any]) -> None:
    data["cost"] = memory_cost.layers(quick)
    data["forms"] = memory_cost.forms(quick)


TABLES = {"recall": run_recall, "exact": run_exact, "overwrite": run_overwrite, "length": run_length, "cost": run_cost}


def _setting(s: Setting) -> str:
    return " ".join(f"{name} {value:g}" for name, value in s.items()) or "-"


def _json(x: Any) -> Any:
    """Return x with None in place of infinity, which JSON lacks."""
    if isinstance(x, dict):
        return {name: _json(y) for name, y in x.items()}
    if isinstance(x, list):
        return [_json(y) for y in x]
    return None if isinstance(x, float) and abs(x) == float("inf") else x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer seeds, shorter streams")
    parser.add_argument("--only", default=",".join(TABLES), help=f"comma-separated, of: {', '.join(TABLES)}")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--json", type=Path, default=Path("bench/out/memory.json"), help="where the numbers go")
    parser.add_argument("--plot", type=Path, help="a folder for pictures (needs matplotlib)")
    args = parser.parse_args()
    chosen = [name.strip() for name in args.only.split(",") if name.strip()]
    if unknown := set(chosen) - set(TABLES):
        parser.error(f"--only takes {', '.join(TABLES)}; got {', '.join(sorted(unknown))}")
    torch.set_num_threads(args.threads)
    data: dict[str, Any] = {}
    if args.json.exists():
        data = json.loads(args.json.read_text())  # keep the tables of an earlier run
    others = timing.OtherProcesses()
    print(f"{timing.cpu_model()}, {args.threads} threads, torch {torch.__version__}, lineate {lineate.__version__}")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        with torch.no_grad():
            TABLES[name](args.quick, data)
        busy = others.cores()
        data.setdefault("headers", {})[name] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "cpu": timing.cpu_model(), "arch": platform.machine(), "threads": args.threads, "quick": args.quick,
            "cores busy with others": None if busy is None else round(busy, 2),
            "versions": {"python": platform.python_version(), "torch": torch.__version__,
                         "lineate": importlib.metadata.version("lineate")},
        }  # fmt: skip
        args.json.write_text(json.dumps(_json(data), indent=1) + "\n")
    if "cost" in chosen and busy is not None and busy > others.BUSY:
        print(
            f"Other processes kept {busy:.1f} cores busy: believe no time or ratio above; measure on a quiet machine."
        )
    print(f"\nwrote {args.json}")
    if args.plot:
        for path in memory_plot.draw(json.loads(args.json.read_text()), args.plot):
            print(f"wrote {path}")


if __name__ == "__main__":
    main()

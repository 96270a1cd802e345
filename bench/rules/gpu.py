"""lineate on an NVIDIA GPU compared with FlashInfer, fla, FlashQLA, FlashKDA and flash SDPA: time, memory, the floor.

    python -m bench.rules.gpu                                       runs every case with lineate and SDPA
    python -m bench.rules.gpu --peers DIR                           also runs the peers in DIR, or installed ones
    python -m bench.rules.gpu --only gdn,decode --contestants ours,fla --quick
    python -m bench.rules.gpu --keep --only kda                     measures these again, keeps the rest of the file
    python -m bench.rules.gpu --show                                shows tables and plot of the JSON file
    python -m bench.rules.gpu --only prefill --warm --quick --peers DIR     the rows beside FlashInfer
    python -m bench.rules.gpu --only prefill,prefill-variants --missing ... measures what the JSON file lacks
    python -m bench.rules.gpu --dry-run ...                         says what would run, without a GPU

Every contestant runs in processes of its own, one for each batch of cases, with empty compiler caches (--warm: all
cases in one process, with the compilers' own caches). A case that fails or takes too long is reported, and the others
go on. Times are medians: `graph` inside a replayed CUDA graph, `events` between CUDA events around calls from Python,
back to back, which gives the larger of the host's and the device's time; `host` is the time after which Python has
issued a call, without waiting for the device. Input sets are rotated so that none is found in the L2 cache. Extra
memory is the allocator's peak during a call minus what was allocated before, results included. The first call is that
of a fresh process after importing; it includes compiling and tuning.

The group prefill has sequences of served models, packed where there are several. FlashInfer runs both of its paths
(gpu_flashinfer.py says which packages it needs), and lineate also runs the kernels that it has for GPUs other than
Hopper's. prefill-variants has the same sequences as a batch, and from raw gates with the norms of q and k inside.
"""

import argparse
import importlib.machinery
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.rules.gpu_cases import CASES, CONTESTANTS, GROUPS, LENGTHS, Case, targets
from bench.rules.gpu_tables import show, times
from bench.timing import given_command

ROOT = Path(__file__).resolve().parents[2]
RESTARTS = 4  # processes that one batch may use
CHILD = "bench.rules.gpu_peers"


class Run:
    """Holds the results so far, and writes every change to the file at once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.deadline = time.monotonic() + 60 * args.minutes
        self.data: dict[str, Any] = {"header": {}, "ceilings": None, "results": [], "targets": []}
        if args.json.exists() and (args.keep or args.missing or args.show):
            self.data |= json.loads(args.json.read_text())

    def save(self) -> None:
        self.data["targets"] = targets(self.data["results"], self.data["ceilings"])
        self.args.json.parent.mkdir(parents=True, exist_ok=True)
        partial = self.args.json.with_suffix(".part")
        partial.write_text(json.dumps(self.data, indent=1) + "\n")
        partial.replace(self.args.json)

    def add(self, result: dict[str, Any], versions: dict[str, str]) -> None:
        key = ("group", "case", "who")
        others = [r for r in self.data["results"] if any(r[k] != result[k] for k in key)]
        self.data["results"] = [*others, {**result, "quick": self.args.quick}]
        self.data["header"].setdefault("versions", {}).update(versions)
        if "path" in result:
            name = f"{result['who']} {result['rule']} {result['what']}"
            self.data["header"].setdefault("paths", {})[name] = result["path"]
        self.save()

    def plan(self, who: str) -> list[list[int]]:
        """Return the cases of a contestant that are to be measured; those of one list share a process."""
        measured = {(r["group"], r["case"], r["who"]) for r in self.data["results"] if r["event_ms"] is not None}
        batches: dict[tuple[str, str] | None, list[int]] = {}
        for index, case in enumerate(CASES):
            skipped = self.args.quick and case.group == "length" and LENGTHS.index(case.t) % 2
            skipped = skipped or (self.args.missing and (case.group, case.name, who) in measured)
            if case.group in self.args.only and CONTESTANTS[who].can(case) and not skipped:
                batches.setdefault(None if self.args.warm else case.batch, []).append(index)
        return list(batches.values())

    def batch(self, who: str, cases: list[int]) -> None:
        """Measure cases in one process after another, until all are measured or given up."""
        with tempfile.TemporaryDirectory(prefix="lineate-bench-") as folder:
            for attempt in range(RESTARTS):
                if time.monotonic() > self.deadline:
                    break
                cases = self.process(who, cases, Path(folder), fresh=attempt == 0)
                if not cases:
                    break
        measured = {(r["group"], r["case"], r["who"]) for r in self.data["results"]}
        for case in (CASES[index] for index in cases):
            if (case.group, case.name, who) not in measured:  # a result from an earlier run may stay
                self.fail(who, case, "not measured: out of time")

    def process(self, who: str, cases: list[int], folder: Path, fresh: bool) -> list[int]:
        """Run one process; return the cases that it did not reach."""
        lines, errors = folder / "lines", folder / "stderr"
        lines.write_text("")
        job = {"who": who, "cases": cases, "seconds": 0.08 if self.args.quick else 0.25, "graph": True, "fresh": fresh,
               "file": str(lines), "peers": str(self.args.peers.resolve()) if self.args.peers else ""}  # fmt: skip
        environment = {**os.environ, **(CONTESTANTS[who].environment if who in CONTESTANTS else {})}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
        if not self.args.warm:
            for variable in ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
                environment[variable] = str(folder / variable.lower())
        with errors.open("w") as sink:
            child = subprocess.Popen(
                [sys.executable, "-m", CHILD, json.dumps(job)],
                env=environment, stdout=sink, stderr=sink, start_new_session=True,
            )  # fmt: skip
            seen, current, last, why = 0, None, time.monotonic(), ""
            left = list(cases)
            while True:
                ended = child.poll() is not None
                text = lines.read_text()
                for line in text[: text.rfind("\n") + 1].splitlines()[seen:]:
                    seen, last = seen + 1, time.monotonic()
                    current = self.take(who, json.loads(line), left)
                now = time.monotonic()
                if ended:
                    break
                if now - last > self.args.limit:
                    why = f"stopped after {self.args.limit:.0f} s"
                elif now > self.deadline:
                    why = f"stopped: the run's {self.args.minutes:g} minutes are over"
                if why:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
                    break
                time.sleep(0.2)
        if why or child.returncode != 0:
            tail = errors.read_text(errors="replace").strip().splitlines()[-1:] or [""]
            why = why or f"exit code {child.returncode}: {tail[0][:200]}"
            if current is None and left:  # it did not even begin: for example, its package cannot be imported
                gone = left if not seen else left[:1]
            else:
                gone = [] if current is None else [current]
            if not cases:
                print(f"{who}: {why}")
            for index in gone:
                self.fail(who, CASES[index], why)
            left = [index for index in left if index not in gone]
        return left

    def take(self, who: str, line: dict[str, Any], left: list[int]) -> int | None:
        """Record one line of a child; return the case that it is working on."""
        if "start" in line:
            return line["start"]
        if "ceilings" in line:
            self.data["ceilings"] = line["ceilings"]
            self.data["header"] |= {"gpu": line["gpu"], "cuda": line["cuda"]}
            self.data["header"].setdefault("versions", {}).update(line["versions"])
            self.save()
            return None
        index = line["done"] if "done" in line else line["failed"]
        left.remove(index)
        if "done" in line:
            self.add(line["result"], line["versions"])
            print(f"{CONTESTANTS[who].label:24} {CASES[index].name:48} {times(line['result'])}", flush=True)
        else:
            self.fail(who, CASES[index], line["why"])
        return None

    def fail(self, who: str, case: Case, why: str) -> None:
        print(f"{CONTESTANTS[who].label:24} {case.name:48} {why}", flush=True)
        self.add({**case.record(), "who": who, "failed": why, "event_ms": None, "graph_ms": None}, {})


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().splitlines()[0]
    except (OSError, IndexError):
        return "unknown"


def absent(who: str, peers: Path | None) -> str:
    """Return why a contestant cannot run here, or nothing if it can."""
    path = [*([str(peers)] if peers else []), str(ROOT), *sys.path]
    for package in (CONTESTANTS[who].package, *CONTESTANTS[who].also):
        if importlib.machinery.PathFinder.find_spec(package, path) is None:
            return f"no package {package}"
    return ""


def rehearse(run: Run) -> None:
    """Print what would be measured."""
    for who in run.args.contestants:
        why = absent(who, run.args.peers)
        for cases in [] if why else run.plan(who):
            for index in cases:
                print(f"{CONTESTANTS[who].label:28} {CASES[index].group:16} {CASES[index].name}")
        if why:
            print(f"{CONTESTANTS[who].label:28} not measured: {why}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"comma-separated groups of cases, of: {', '.join(GROUPS)}")
    parser.add_argument("--contestants", default="", help=f"comma-separated, of: {', '.join(CONTESTANTS)}")
    parser.add_argument("--quick", action="store_true", help="shorter measurements, only 4 of the lengths")
    parser.add_argument("--json", type=Path, default=Path("bench/out/gpu.json"), help="where the numbers go")
    parser.add_argument("--plot", type=Path, help="where a picture of time against length goes (needs matplotlib)")
    parser.add_argument(
        "--peers", type=Path, help="a folder with the peers' packages, put on the path of their processes"
    )
    parser.add_argument("--keep", action="store_true", help="keep what the JSON file holds and is not measured again")
    parser.add_argument("--missing", action="store_true", help="keep what the JSON file holds, measure only the rest")
    parser.add_argument("--dry-run", action="store_true", help="say what would be measured, and by whom")
    parser.add_argument("--warm", action="store_true", help="one process, the compilers' own caches")
    parser.add_argument("--show", action="store_true", help="measure nothing: show and draw the JSON file")
    parser.add_argument("--limit", type=float, default=150, help="seconds a case may take, compiling included (150)")
    parser.add_argument("--minutes", type=float, default=60, help="minutes after which nothing more is started (60)")
    args = parser.parse_args(arguments)
    for option, known in (("only", GROUPS), ("contestants", tuple(CONTESTANTS))):
        chosen = [name.strip() for name in getattr(args, option).split(",") if name.strip()]
        if unknown := set(chosen) - set(known):
            parser.error(f"--{option} takes {', '.join(known)}; got {', '.join(sorted(unknown))}")
        setattr(args, option, [name for name in known if name in chosen] or list(known))
    if args.peers and not args.peers.is_dir():
        parser.error(f"--peers must be a folder, got {args.peers}")
    return args


def main() -> None:
    args = parse()
    run = Run(args)
    if args.dry_run:
        rehearse(run)
        return
    if not args.show:
        head = run.data["header"]
        head |= {
            "date": datetime.now(UTC).date().isoformat(),
            "driver": driver(),
            "command": given_command(),
            "absent": {},
        }
        run.batch("ceilings", [])
        if "gpu" not in head:
            raise SystemExit("no CUDA device that torch can use")
        for who in args.contestants:
            batches = run.plan(who)
            if batches and (why := absent(who, args.peers)):
                head["absent"][CONTESTANTS[who].label] = why
                continue
            for cases in batches:
                run.batch(who, cases)
        run.save()
        print()
    show(run.data, args.only)
    if not args.show:
        print(f"\nwrote {args.json}")
    if args.plot:
        from bench.rules import plot

        plot.draw(args.json, args.plot)
        print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()

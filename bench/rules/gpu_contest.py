"""lineate in turns with FlashInfer, cuDNN, attention-gym, FlashQLA and fla on an NVIDIA GPU: two tables, one command.

    python -m bench.rules.gpu_contest --peers DIR                             both tables, all peers that are in DIR
    python -m bench.rules.gpu_contest --peers DIR --against flashinfer,cudnn  the strongest peer of each table
    python -m bench.rules.gpu_contest --peers DIR --tables kda --what forward --shapes 8192,24,1 32768,12,1
    python -m bench.rules.gpu_contest --peers DIR --tables kda --decay trained    with the decays of trained layers
    python -m bench.rules.gpu_contest --dry-run --peers DIR                   what would run, and for how long
    python -m bench.rules.gpu_contest --show --json FILE                      the tables of a file

gdn: 15 forwards of Gated DeltaNet as served models have them. kda: 13 shapes of Kimi Delta Attention, forward, and
forward with its backward, each with a first state that is not zero and log decays uniform between -5 and 0.

Each peer shares a process with lineate, and both are measured in turns (A B A B ...), so that the clocks are the same.
A process compiles everything and checks every result against the float32 torch form before it measures anything. The
processes of peers that do not tune their kernels by timing them prepare side by side; nothing else runs while something
is timed. A peer that cannot be imported is left out, with the reason. Every record is printed and saved at once.

Times are medians in ms: `graph` in replayed CUDA graphs, `Python` between CUDA events around calls from Python, `host`
until Python has issued a call. `bound` is the time to read and write the tensors once at the rate of a large copy.

DIR has the wheels that bench/rules/gpu_flashinfer.py names, and, unpacked next to them: nvidia-cudnn-frontend 1.32.0,
attn-gym 0.0.17, fla-core 0.6.0 with einops, flash-qla 0.1.3 with tilelang 0.1.12 and what that needs; some of them are
enough. cuDNN's and FlashQLA's kernels need CUDA's toolkit (CUDA_HOME, or nvcc on the PATH). bench/rules/gpu_adapters.py
has the calls and layouts.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import timing
from bench.rules.gpu import absent, driver
from bench.rules.gpu_cases import CONTESTANTS, FORWARD, TRAIN, TRAINED, UNIFORM, Case
from bench.rules.gpu_contest_cases import (
    COLUMNS,
    NOBODY,
    PEERS,
    TABLES,
    TITLES,
    bound_ms,
    choose,
    estimate,
    headings,
    row,
    shape_of,
    summary,
    unknown_shapes,
)

ROOT = Path(__file__).resolve().parents[2]
CHILD = "bench.rules.gpu_contest_child"
WHATS = {"forward": FORWARD, "train": TRAIN}
COPY = 4.28e12  # bytes per second that the largest copies of an H200 move; for --dry-run alone


@dataclass
class Process:
    """One process with lineate and a peer: what it has said so far."""

    who: str
    cases: list[tuple[str, Case]]
    folder: Path
    child: "subprocess.Popen[bytes] | None" = None
    seen: int = 0
    spoke: float = 0.0
    compiled: bool = False
    ready: bool = False
    now: int | None = None
    left: set[int] = field(default_factory=set)
    errors: dict[int, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return CONTESTANTS[self.who].label if self.who in CONTESTANTS else "lineate alone"

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def start(self, seconds: float, peers: str) -> None:
        job = {"who": self.who, "folder": str(self.folder), "seconds": seconds, "peers": peers,
               "cases": [(n, case.record()) for n, (_, case) in enumerate(self.cases)]}  # fmt: skip
        self.left, self.spoke = set(range(len(self.cases))), time.monotonic()
        switches = CONTESTANTS[self.who].environment if self.who in CONTESTANTS else {}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with (self.folder / "log").open("w") as sink:
            self.child = subprocess.Popen(
                [sys.executable, "-m", CHILD, json.dumps(job)],
                env={**os.environ, **switches, "PYTHONPATH": path}, stdout=sink, stderr=sink, start_new_session=True,
            )  # fmt: skip

    def allow(self, part: str) -> None:
        (self.folder / part).touch()
        self.spoke = time.monotonic()

    def lines(self) -> list[dict[str, Any]]:
        path = self.folder / "lines"
        text = path.read_text() if path.exists() else ""
        new = text[: text.rfind("\n") + 1].splitlines()[self.seen :]
        self.seen += len(new)
        if new:
            self.spoke = time.monotonic()
        return [json.loads(line) for line in new]

    def stop(self) -> None:
        if self.child is not None and self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()


class Contest:
    """Starts the processes, lets one after another measure, and saves and prints what they say."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.deadline = args, time.monotonic() + 60 * args.minutes
        self.data: dict[str, Any] = {"header": {"absent": {}}, "results": []}

    def save(self) -> None:
        self.args.json.parent.mkdir(parents=True, exist_ok=True)
        partial = self.args.json.with_suffix(".part")
        partial.write_text(json.dumps(self.data, indent=1) + "\n")
        partial.replace(self.args.json)

    def run(self, peers: list[str], cases: list[tuple[str, Case]]) -> None:
        with tempfile.TemporaryDirectory(prefix="lineate-contest-") as folder:
            processes = []
            for who in peers:
                own = [x for x in cases if who == NOBODY or PEERS[who].can(x[1])]
                if own:
                    processes.append(Process(who, own, Path(folder, who)))
                    processes[-1].folder.mkdir()
            try:
                for process in processes:
                    process.start(self.args.seconds, str(self.args.peers.resolve()) if self.args.peers else "")
                together = [x for x in processes if x.who == NOBODY or not PEERS[x.who].tunes]
                self.prepare(together)
                for process in together:
                    self.measure(process)
                for process in (x for x in processes if x not in together):
                    self.prepare([process])
                    self.measure(process)
            finally:
                for process in processes:
                    process.stop()
        self.save()

    def prepare(self, processes: list[Process]) -> None:
        """Let processes compile and check; the first compiles lineate's kernels, so that the others find them."""
        for process in processes:
            process.allow("prepare")
            while process.alive and not process.compiled and process is processes[0]:
                self.listen(processes)
        while any(x.alive and not x.ready for x in processes):
            self.listen(processes)
        self.listen(processes)

    def measure(self, process: Process) -> None:
        process.allow("measure")
        while process.alive:
            self.listen([process])
        self.listen([process])

    def listen(self, processes: list[Process]) -> None:
        """Take what processes have said; stop those that are silent for too long or past the deadline."""
        for process in processes:
            if process.child is None:
                continue
            ended = process.child.poll() is not None
            for line in process.lines():
                self.take(process, line)
            why = ""
            waiting = process.ready and process.now is None
            if ended:
                why = self.last_words(process) if process.left else ""
            elif time.monotonic() > self.deadline:
                why = f"stopped: the run's {self.args.minutes:g} minutes are over"
            elif not waiting and time.monotonic() - process.spoke > self.args.limit:
                why = f"stopped after {self.args.limit:g} s"
            if why:
                process.stop()
                for n in sorted(process.left):
                    self.fail(process, n, why)
        time.sleep(0.05)

    def last_words(self, process: Process) -> str:
        log = (process.folder / "log").read_text(errors="replace").strip().splitlines()[-1:] or [""]
        return f"exit code {process.child and process.child.returncode}: {log[0][:200]}"

    def take(self, process: Process, line: dict[str, Any]) -> None:
        head = self.data["header"]
        if "absent" in line:
            self.leave_out(process.who, line["absent"])
            process.left = set()
        if "loaded" in line:
            head |= {"gpu": line["gpu"], "cuda": line["cuda"]}
        versions = line.get("versions") or line.get("loaded")
        head.setdefault("versions", {}).update(versions or {})
        process.compiled = process.compiled or "compiled" in line
        if "ready" in line:
            process.ready, process.now = True, None
            print(f"{process.name}: compiled and checked in {line['ready']:.0f} s", flush=True)
        process.now = line.get("checks", line.get("measures", process.now))
        if "checked" in line:
            self.tell(process, line["checked"], checked(line["errors"]))
        if "failed" in line:
            self.fail(process, line["failed"], line["why"])
        if "done" in line:
            self.add(process, line["done"], line["record"])

    def add(self, process: Process, n: int, record: dict[str, Any]) -> None:
        table, case = process.cases[n]
        process.left.discard(n)
        self.data["results"].append({**case.record(), "table": table, "who": process.who, **record})
        self.save()
        if "failed" not in record:
            cells = row(self.data["results"][-1])
            self.tell(process, n, ", ".join(f"{a} {b}" for a, b in zip(COLUMNS[2:12], cells[2:12], strict=True)))

    def fail(self, process: Process, n: int, why: str) -> None:
        self.tell(process, n, why)
        self.add(process, n, {"failed": why})

    def tell(self, process: Process, n: int, text: str) -> None:
        table, case = process.cases[n]
        print(f"{process.name:16} {table} {case.what:16} {shape_of(case):18} {text}", flush=True)

    def leave_out(self, who: str, why: str) -> None:
        self.data["header"]["absent"][CONTESTANTS[who].label] = why
        print(f"{CONTESTANTS[who].label} is left out: {why}", flush=True)


def checked(found: dict[str, Any]) -> str:
    """Return the errors of a check in words."""

    def most(values: dict[str, float]) -> str:
        return f"{max(values.values()):.1e}" if values else "not compared"

    parts = [f"errors from float32: lineate {most(found['errors']['lineate'])}"]
    for path, known in found["paths"].items():
        away = f"{most(known['errors'])}, from lineate {most(known['differences'])}"
        parts.append(f"{path or 'the peer'} {away}")
    return "; ".join([*parts, *(f"{path} refused: {why}" for path, why in found.get("refused", {}).items())])


def show(data: dict[str, Any]) -> None:
    """Print the header and the tables."""
    head = data["header"]
    versions = ", ".join(f"{name} {version}" for name, version in head.get("versions", {}).items())
    print(f"\n{head.get('date', '?')}, {head.get('gpu', '?')}, driver {head.get('driver', '?')}; {versions}")
    for name, why in head["absent"].items():
        print(f"{name} is left out: {why}")
    for (table, what), records in headings(data["results"]).items():
        decays = ", ".join(sorted({r["decay"] for r in records}))
        timing.show(f"{TITLES[table]}; {what}, {decays} decays, ms", COLUMNS, [row(r) for r in records])
        for line in summary(records):
            print(line)


def rehearse(peers: list[str], cases: list[tuple[str, Case]]) -> None:
    for who in peers:
        for table, case in cases:
            if who == NOBODY or PEERS[who].can(case):
                name = CONTESTANTS[who].label if who in CONTESTANTS else "lineate alone"
                print(f"{name:16} {table} {case.what:16} {shape_of(case):18} bound {bound_ms(case, COPY):.3f} ms")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="a folder with the peers' packages, put on their processes' path")
    parser.add_argument("--against", default="", help=f"comma-separated peers, of: {', '.join(PEERS)}")
    parser.add_argument("--tables", default="", help=f"comma-separated, of: {', '.join(TABLES)}")
    parser.add_argument("--what", default="", help=f"comma-separated, of: {', '.join(WHATS)}")
    parser.add_argument("--shapes", nargs="+", default=[], metavar="SHAPE", help="such as 8192,12,4 or 8x4096,32/32")
    parser.add_argument("--decay", default=UNIFORM, choices=(UNIFORM, TRAINED), help="the log decays of kda")
    parser.add_argument("--seconds", type=float, default=0.12, help="of each measurement of a side (0.12)")
    parser.add_argument("--json", type=Path, default=Path("bench/out/contest.json"), help="where the numbers go")
    parser.add_argument("--limit", type=float, default=150, help="seconds of silence after which a process is stopped")
    parser.add_argument("--minutes", type=float, default=9, help="minutes after which everything is stopped (9)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be measured, without a GPU")
    parser.add_argument("--show", action="store_true", help="measure nothing: show the JSON file")
    args = parser.parse_args(arguments)
    for option, known in (("against", tuple(PEERS)), ("tables", TABLES), ("what", tuple(WHATS))):
        chosen = [name.strip() for name in getattr(args, option).split(",") if name.strip()]
        if unknown := set(chosen) - set(known):
            parser.error(f"--{option} takes {', '.join(known)}; got {', '.join(sorted(unknown))}")
        setattr(args, option, [name for name in known if name in chosen] or list(known))
    if unknown := unknown_shapes(args.shapes):
        parser.error(f"--shapes takes {', '.join(shape_of(c) for _, c in choose(TABLES, [FORWARD], []))}; "
                     f"got {', '.join(unknown)}")  # fmt: skip
    if args.peers and not args.peers.is_dir():
        parser.error(f"--peers must be a folder, got {args.peers}")
    return args


def main() -> None:
    args = parse()
    contest = Contest(args)
    if args.show:
        show(json.loads(args.json.read_text()))
        return
    cases = choose(args.tables, [WHATS[name] for name in args.what], args.shapes, args.decay)
    peers = []
    for who in (who for who in args.against if any(PEERS[who].can(case) for _, case in cases)):
        if why := absent(who, args.peers):
            contest.leave_out(who, why)
        else:
            peers.append(who)
    peers = peers or [NOBODY]
    pairs = sum(who == NOBODY or PEERS[who].can(case) for who in peers for _, case in cases)
    print(f"{pairs} measurements, about {estimate(peers, cases):.0f} s where nothing is compiled yet", flush=True)
    if args.dry_run:
        rehearse(peers, cases)
        return
    command = {"date": datetime.now(UTC).date().isoformat(), "driver": driver(), "command": timing.given_command()}
    contest.data["header"] |= command
    contest.run(peers, cases)
    show(contest.data)
    print(f"\nwrote {args.json}")
    if not any(r.get("lineate") for r in contest.data["results"]):
        raise SystemExit("nothing was measured")


if __name__ == "__main__":
    main()

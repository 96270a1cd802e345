"""Run the tests that need a GPU, in several processes, and say what failed and what was not reached.

    python tests/gpu.py --processes 12 --minutes 15 [--every] [--log FOLDER] [--seconds FILE] [arguments of pytest]

Of a function marked `slow(but=...)`, the cases run in which every two values of its parameters occur; --every runs all.
Every process collects all tests. It claims one group of them after another, those that compile the same kernels (see
conftest.py), so that none waits while others have work. Groups that take long come first: --seconds writes the mean
seconds of each function to a file, and tests/gpu_seconds.json, where it exists, has those of an earlier run. A process
ends after an error of CUDA's, after which nothing works in it, and another takes its place. Tests that were skipped
because the processes together left too little of the GPU's memory run again at the end, alone.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST = 24  # tests of one group
FEW = 8  # tests of one group of a function whose cases may compile kernels of their own
SECONDS = ROOT / "tests" / "gpu_seconds.json"
TOGETHER = " on_gpu"  # a group whose ranks start once, for all its tests
NO_MEMORY = "of free GPU memory"  # why a test is skipped that needs most of the GPU


class Claims:
    """A plugin of pytest: runs the groups of tests that no other process has claimed, and notes how each test ended."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.notes = (folder / f"notes-{number}").open("a")
        self.broken = False

    def note(self, **line: Any) -> None:
        print(json.dumps(line), file=self.notes, flush=True)

    def claim(self, group: int) -> bool:
        try:
            os.close(os.open(self.folder / f"claim-{group}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:  # such as a file that cannot be imported
            self.note(collected=[report.nodeid], began=report.nodeid)
            self.note(ended=report.nodeid, outcome="failed", seconds=0.0, why=str(report.longrepr)[-6000:])

    def pytest_runtestloop(self, session: Any) -> bool:
        if session.config.option.collectonly:
            return True
        self.note(collected=[item.nodeid for item in session.items])
        seconds = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
        for n, items in enumerate(arrange([(item, *group_of(item)) for item in session.items], seconds)):
            if self.broken or session.shouldfail or session.shouldstop or not self.claim(n):
                continue
            for item, after in zip(items, [*items[1:], None], strict=True):
                self.note(began=item.nodeid)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None if self.broken else after)
                if self.broken:
                    break
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        text = "" if report.passed else str(report.longrepr)
        self.broken = self.broken or "CUDA error" in text or "device-side assert" in text
        if report.when == "call" or report.outcome != "passed":
            line = {"ended": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            self.note(**line, why=text[-6000:])


def group_of(item: Any) -> tuple[str, int]:
    """Return the name of the group of a test, as conftest.py has it, and how many tests such a group has at most.

    Cases of one function that conftest.py leaves alone stand together, too: those next to each other often compile the
    same kernels, and processes that begin with them at the same time would all compile them.
    """
    conftest = next(p for p in item.config.pluginmanager.get_plugins() if hasattr(p, "_group"))
    name = conftest._group(item)
    if name == item.nodeid and hasattr(item, "callspec"):
        return function_of(item.nodeid), FEW
    return f"{item.path.name} {name}", MOST


def function_of(nodeid: str) -> str:
    return nodeid.split("[")[0]


def arrange(tests: list[tuple[Any, str, int]], seconds: dict[str, float]) -> list[list[Any]]:
    """Return the tests in groups, the longest first; `seconds` has the mean of some functions."""
    groups: dict[tuple[str, int], list[Any]] = {}
    seen: Counter[str] = Counter()
    for item, name, most in tests:
        part = 0 if name.endswith(TOGETHER) else seen[name] // most
        groups.setdefault((name, part), []).append(item)
        seen[name] += 1
    usual = sum(seconds.values()) / len(seconds) if seconds else 1.0
    return sorted(
        groups.values(), key=lambda items: sum(seconds.get(function_of(x.nodeid), usual) for x in items), reverse=True
    )


def start(folder: Path, number: int, arguments: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--claims", str(folder), "--number", str(number), *arguments]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # One thread each: the references run on the processor, and threads of many processes would wait for each other.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths}
    log = (folder / f"log-{number}").open("wb")
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)


def run(folder: Path, processes: int, deadline: float, arguments: list[str]) -> None:
    """Keep that many processes at work until none finds a test, or until the deadline."""
    running = {n: start(folder, n, arguments) for n in range(processes)}
    started = processes
    while running and time.monotonic() < deadline:
        for n, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[n]
            if process.returncode not in (0, 2, 4, 5) and started < 4 * processes and unfinished(folder, n):
                running[started] = start(folder, started, arguments)
                started += 1
        time.sleep(0.2)
    for process in running.values():  # and the ranks that a test has started
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # cut off when the process was killed
            continue
    return found


def unfinished(folder: Path, number: int) -> bool:
    """Whether a process broke off."""
    path = folder / f"notes-{number}"
    text = lines(path) if path.exists() else []
    began, ended = [x["began"] for x in text if "began" in x], [x for x in text if "ended" in x]
    return bool(began) and (began[-1] != (ended[-1]["ended"] if ended else "") or "CUDA" in ended[-1]["why"])


def without_memory(folder: Path) -> list[str]:
    """Return the tests that were skipped because the GPU's memory was not free."""
    notes = [line for path in sorted(folder.glob("notes-*")) for line in lines(path)]
    return [x["ended"] for x in notes if x.get("outcome") == "skipped" and NO_MEMORY in x["why"]]


def report(folder: Path, seconds: float, means: Path | None = None) -> int:
    """Print how all tests ended, and write the mean seconds of each function; return the exit code."""
    collected: dict[str, None] = {}
    ended: dict[str, dict[str, Any]] = {}
    began: set[str] = set()
    for path in (*sorted(folder.glob("notes-*")), *sorted(folder.glob("alone/notes-*"))):
        for line in lines(path):
            collected.update(dict.fromkeys(line.get("collected", ())))
            if "began" in line:
                began.add(line["began"])
            if "ended" in line and ended.get(line["ended"], {}).get("outcome") != "failed":
                ended[line["ended"]] = line
    if not collected and (folder / "log-0").exists():
        print((folder / "log-0").read_text(errors="replace")[-3000:])
    failed = [x for x in ended.values() if x["outcome"] == "failed"]
    for x in failed:
        print(f"\nFAILED {x['ended']}\n{x['why'][-1500:]}")
    broke = [x for x in began if x not in ended]
    missed = [x for x in collected if x not in began]
    for title, names in (("failed", [x["ended"] for x in failed]), ("broke off", broke), ("not reached", missed)):
        for name in names:
            print(f"{title}: {name}")
    for x in ended.values():
        if x["outcome"] == "skipped":
            print(f"skipped: {x['ended']}: {x['why'][-120:]}")
    for x in sorted(ended.values(), key=lambda x: -x["seconds"])[:12]:
        print(f"{x['seconds']:6.1f} s  {x['ended']}")
    if means is not None:
        taken: dict[str, list[float]] = {}
        for name, x in sorted(ended.items()):
            taken.setdefault(function_of(name), []).append(x["seconds"])
        rounded = {name: round(sum(x) / len(x), 1) for name, x in taken.items()}
        means.write_text(json.dumps(rounded, indent=0) + "\n")
    counts = Counter(x["outcome"] for x in ended.values())
    print(
        f"{len(collected)} tests: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped, "
        f"{len(broke)} broke off, {len(missed)} not reached, in {seconds / 60:.1f} minutes"
    )
    return 0 if collected and counts["passed"] + counts["skipped"] == len(collected) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=max(1, min(16, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--log", type=Path, help="a folder for the logs of the processes")
    parser.add_argument("--every", action="store_true", help="run every case, not only those with every two values")
    parser.add_argument("--seconds", type=Path, help="where the mean seconds of each function go")
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    own, arguments = parser.parse_known_args()
    if own.claims is not None:
        plain = ["-p", "no:xdist", "-p", "no:cacheprovider", "-m", "gpu", "-q", "--tb=short"]
        return int(pytest.main([*plain, *arguments], plugins=[Claims(own.claims, own.number)]))
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lineate-gpu-") as temporary:
        folder = Path(temporary) if own.log is None else own.log / f"run-{os.getpid()}"
        folder.mkdir(parents=True, exist_ok=True)
        deadline = begun + 60 * own.minutes
        if not own.every and not any("[" in x for x in arguments):  # a case that is named runs in any event
            arguments = ["--pairs", *arguments]
        run(folder, own.processes, deadline, arguments)
        alone = without_memory(folder)
        if alone:
            (folder / "alone").mkdir()
            run(folder / "alone", 1, deadline, alone)
        return report(folder, time.monotonic() - begun, own.seconds)


if __name__ == "__main__":
    sys.exit(main())

"""Interleaved timing, peak memory in a fresh process, and a description of the machine."""

import gc
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)
Call = Callable[[], Any]

SAMPLE_SECONDS = 0.01  # a shorter call is repeated inside one sample until it takes this long


@dataclass
class Samples:
    """Seconds per call, one entry for each round."""

    seconds: list[float] = field(default_factory=list)

    @property
    def minimum(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def interleave(
    calls: Mapping[Key, Call],
    *,
    rounds: int,
    budget: float,
    at_least: int = 2,
    inspect: Callable[[Key, Any], None] | None = None,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[Key, Samples]:
    """Time A, B, C, A, B, C, ..., so that whatever disturbs the machine disturbs all of them alike.

    Each is called once to warm up, and `inspect` receives that result. A call leaves the rounds once it has used
    `budget` seconds, but not before `at_least` samples; if its warm-up alone exceeds the budget, that is its first
    sample. `synchronize` waits for a device that works asynchronously.
    """

    def seconds(call: Call, repeats: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        synchronize()
        return (time.perf_counter() - start) / repeats

    samples = {key: Samples() for key in calls}
    repeats, spent = {}, {}
    for key, call in calls.items():
        start = time.perf_counter()
        result = call()
        synchronize()
        first = time.perf_counter() - start
        if inspect is not None:
            inspect(key, result)
        del result
        if first > budget:
            samples[key].seconds.append(first)
        again = first if first > 10 * SAMPLE_SECONDS else min(seconds(call), seconds(call))
        repeats[key] = min(1000, max(1, round(SAMPLE_SECONDS / again)))
        spent[key] = 0.0  # a disturbed warm-up costs no rounds

    gc.collect()
    gc.disable()
    try:
        for _ in range(max(rounds, at_least)):
            for key, call in calls.items():
                if spent[key] < budget or len(samples[key].seconds) < at_least:
                    sample = seconds(call, repeats[key])
                    samples[key].seconds.append(sample)
                    spent[key] += sample * repeats[key]
    finally:
        gc.enable()
    return samples


# With these, glibc's malloc and mimalloc (which some builds of torch carry) return freed memory to the system at once,
# and allocated memory counts as new. Without them, a block that is reused would count as nothing.
EXACT_ALLOCATION = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MIMALLOC_PURGE_DELAY": "0",
    "MIMALLOC_PURGE_DECOMMITS": "1",
    "MIMALLOC_ARENA_EAGER_COMMIT": "0",
}
METER_WITHIN = 0.05  # how far from 1 `meter` may be for a measurement to be trusted


def peak_extra_bytes(call: Call) -> dict[str, float | str]:
    """Return the resident bytes at the peak of `call`, beyond those before it.

    Run it in a fresh process with EXACT_ALLOCATION.
    """
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak restarts from the current memory
        how = "peak reset before the call"
    except OSError:
        how = "peak of the process"  # an upper bound where VmRSS can be read, else a lower bound
    before = _status_bytes("VmRSS") or _peak_bytes()
    result = call()
    peak = _status_bytes("VmHWM") or _peak_bytes()
    del result
    return {"bytes": max(0, peak - before), "how": how}


def meter(allocate: Callable[[int], Any], size: int = 2**26) -> float:
    """Return what peak_extra_bytes finds for a known allocation, relative to its size: 1 if it can be trusted.

    The block is allocated and freed once before: an allocator that keeps it would hand it out again unseen, giving 0.
    """
    allocate(size)
    return float(peak_extra_bytes(lambda: allocate(size))["bytes"]) / size


def given_command() -> list[str]:
    """Return the arguments of this process for a file of results: of a path from the root, its last part alone."""
    return [Path(x).name if x.startswith("/") else x for x in sys.argv[1:]]


def resident_bytes(process: int | str = "self") -> dict[str, int]:
    """Return the resident bytes of a process: all, those of its own, and those that files back; 0 without /proc."""
    names = {"all": "VmRSS", "own": "RssAnon", "files": "RssFile"}
    return {key: _status_bytes(name, process) for key, name in names.items()}


def _status_bytes(name: str, process: int | str = "self") -> int:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def in_fresh_process(arguments: list[str], environment: Mapping[str, str]) -> Any:
    """Run `python *arguments`; return the JSON of the last line it prints, or None if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments], env=dict(environment), capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    print(f"exit code {done.returncode} of {arguments[-1]}: {done.stderr.strip()[-200:]}", file=sys.stderr)
    return None


class OtherProcesses:
    """Says how many cores other processes have kept busy on average since this was made; None without /proc/stat.

    Contention is not fair to contestants, even if they take turns: threads that wait for each other at the end of every
    operation suffer most, so code with many small parallel operations looks far slower than it is.
    """

    BUSY = 0.1  # cores; above this, ratios cannot be trusted

    def __init__(self) -> None:
        self.start = self._read()

    def cores(self) -> float | None:
        now = self._read()
        if self.start is None or now is None:
            return None
        wall, everyone, own = (b - a for a, b in zip(self.start, now, strict=True))
        return max(0.0, everyone - own) / max(wall, 1e-9)

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Return the seconds on the clock, of all processes, and of this one with its finished children."""
        try:
            fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        except OSError:
            return None
        ticks = sum(fields[:3]) + sum(fields[5:8])  # user, nice, system; interrupts, stolen by other guests
        return time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


def cpu_model() -> str:
    """Return the processor's name as the system gives it."""
    try:
        text = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    except OSError:
        text = ""
    if not re.search(r"^Model name:", text, re.MULTILINE) and Path("/proc/cpuinfo").exists():
        text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE | re.IGNORECASE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table, with rich if it is installed, else as plain text."""
    print(f"\n{title}")
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        for row in [columns, ["-" * width for width in widths], *rows]:
            cells = [row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True))]
            print("  ".join(cells).rstrip())
        return
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = 220  # a file or a pipe has no width, and cells must not be cut
    console.print(table)

"""Functions that time contestants that agree, keep the measurements, show them as tables and write them as JSON."""

import importlib.metadata
import platform
import sys
from collections.abc import Callable, Hashable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch

import lineate
from bench import timing
from bench.rules.contestants import difference, transformers_functions

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # relative to the largest entry of the same tensor


class Measured(NamedTuple):
    """The key of a measurement: the rule, whose code, what it did, on how many tokens."""

    rule: str
    who: str
    what: str
    t: int

    def __str__(self) -> str:
        return f"{self.rule} {self.who}, {self.what}, t {self.t}"


Calls = dict[Measured, timing.Call | None]
Label = Callable[[Measured], str]


class Bench:
    """The settings of a run, and all its measurements."""

    def __init__(self, *, rules: list[str], threads: int, rounds: int, budget: float, quick: bool) -> None:
        self.rules, self.threads, self.quick = rules, threads, quick
        self.rounds, self.budget = rounds, budget
        self.others = timing.OtherProcesses()
        self.plans: list[str] = []  # which code lineate says it runs
        self.times: dict[str, dict[Measured, timing.Samples]] = {}
        self.differences: dict[str, dict[Measured, tuple[float, float]]] = {}
        self.memory: dict[Measured, dict[str, Any]] = {}
        self.import_seconds: list[float] = []
        self.state_bytes: list[dict[str, int]] = []

    def time(
        self,
        table: str,
        calls: Calls,
        alike: Callable[[Measured], Hashable] = lambda key: (key.rule, key.what, key.t),
        oracles: Mapping[Any, timing.Call | None] | None = None,
    ) -> None:
        """Compare each result with the first that is `alike` or with the oracle of that group, then time all calls."""
        reference: tuple[Hashable, Any] = (None, None)
        oracles = oracles or {}

        def inspect(key: Measured, result: Any) -> None:
            nonlocal reference
            group = alike(key)
            if reference[0] != group:
                oracle = oracles.get(group)
                reference = (group, result if oracle is None else oracle())
                if oracle is None:
                    return
            self.compare(table, key, result, reference[1])

        present = {key: call for key, call in calls.items() if call is not None}
        self.times[table] = timing.interleave(present, rounds=self.rounds, budget=self.budget, inspect=inspect)

    def compare(self, table: str, key: Measured, got: Any, want: Any) -> None:
        """Record the difference of two results; a wrong one ends the run."""
        absolute, relative = difference(got, want)
        self.differences.setdefault(table, {})[key] = (absolute, relative)
        if not relative <= TOLERANCE["bfloat16" if "bfloat16" in key.what else "float32"]:
            print(f"wrong result in table {table}: {key} and its reference differ by {absolute:.2g}", file=sys.stderr)
            raise SystemExit(1)

    def minimum(self, table: str, *key: Any) -> float | None:
        """Return the minimum seconds, or None if this was not measured."""
        samples = self.times.get(table, {}).get(Measured(*key))
        return None if samples is None else samples.minimum

    def show(self, table: str, title: str, row: Label, column: Label, versus: str | None = None) -> None:
        """Print minimum / median in ms; with `versus`, each minimum also as a multiple of that column's."""
        cells = {(row(key), column(key)): samples for key, samples in self.times[table].items()}

        def text(r: str, name: str) -> str:
            own, base = cells[r, name], cells.get((r, versus or ""))
            multiple = "" if base in (None, own) else f"  {own.minimum / base.minimum:5.2f}x"
            return f"{milliseconds(own.minimum)} / {milliseconds(own.median)}{multiple}"

        pivot(
            f"{title}; min / median ms" + (f", min as a multiple of {versus}" if versus else ""),
            {key: text(*key) for key in cells},
        )
        if found := self.differences.get(table):
            worst = max(found, key=lambda key: found[key][1])
            print(f"{len(found)} results compared; max abs difference {found[worst][0]:.1e} = ", end="")
            print(f"{found[worst][1]:.1e} of the largest entry ({worst})")

    def report(self, shape: dict[str, Any], targets: list[dict[str, Any]]) -> dict[str, Any]:
        """Return all measurements, ready for JSON."""
        versions = {"python": platform.python_version(), "torch": torch.__version__, "lineate": lineate.__version__}
        if transformers_functions():
            versions["transformers"] = importlib.metadata.version("transformers")
        return {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": {"system": platform.system(), "arch": platform.machine(), "cpu": timing.cpu_model()},
            "versions": versions,
            "settings": {"threads": self.threads, "rounds": self.rounds, "budget": self.budget, "quick": self.quick},
            "cores_used_by_others": self.others.cores(),
            "plans": self.plans,
            "shape": shape,
            "targets": targets,
            "times": {
                table: [
                    {**key._asdict(), "min": s.minimum, "median": s.median, "seconds": s.seconds}
                    for key, s in rows.items()
                ]
                for table, rows in self.times.items()
            },
            "differences": {
                table: [{**key._asdict(), "absolute": a, "relative": r} for key, (a, r) in rows.items()]
                for table, rows in self.differences.items()
            },
            "memory": [{**key._asdict(), **value} for key, value in self.memory.items()],
            "import_seconds": self.import_seconds,
            "state_bytes": self.state_bytes,
        }


def pivot(title: str, cells: Mapping[tuple[str, str], str]) -> None:
    """Show cells by (row, column), both in order of appearance."""
    rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in range(2))
    timing.show(title, ["", *columns], [[r, *(cells.get((r, name), "-") for name in columns)] for r in rows])


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"

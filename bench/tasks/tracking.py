"""Trains the rules of the general row to track a state: word problems of groups, streams that only erase or only add.

    python -m bench.tasks.tracking                               S3, all variants and seeds at once, in --budget seconds
    python -m bench.tasks.tracking --tasks s4,a5,s5              other comparisons, which share the budget
    python -m bench.tasks.tracking --device cpu --jobs 1 --budget 0 --width 64        one run after the other, no budget
    python -m bench.tasks.tracking --json FOLDER                 writes one file a task, in the format of lineate tasks

A model has one layer, heads of 16 channels and no convolution, so that one token is n writes and nothing else; Gated
DeltaProduct has no decay. Rows of 32 tokens are learnt, rows of 64 and 128 tested. A run stops when it is right at 128,
or when its share of the budget is spent. Runs are processes that share the device.
"""

import argparse
import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lineate.tasks.model import ModelOptions
from lineate.tasks.registry import TASKS
from lineate.tasks.report import by_rule, print_table, save_numbers
from lineate.tasks.runner import Cell, CellResult, TrainOptions, plan_cells, run_cells

LENGTH = 32  # of the rows that are learnt
TIMES = 4  # a task is solved at rows of this many times the length
SOLVED = 0.99  # of the second half of these rows
STARTING = 40.0  # seconds of the budget for starting processes, compiling and the last tests
HEAD = 16  # channels of a head
MODEL = ModelOptions(layers=1, conv=0, decay=False)
TRAIN = TrainOptions(
    steps=1000, rows=32, lr=6e-3, eval_every=50, test_rows=128, stop_at=0.999, stop_lengths=(TIMES * LENGTH,),
    test_lengths=(LENGTH, 2 * LENGTH, TIMES * LENGTH),
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """The rules that one task compares."""

    rules: str
    """Rules as `lineate tasks` takes them."""
    solvers: frozenset[str]
    """Those with enough writes and negative eigenvalues to hold the state (docs/derivation.md, section 10)."""
    train: dict[str, Any] = field(default_factory=dict)
    """Options of TRAIN that differ."""


COMPARISONS = {
    "parity": Comparison("product1-2,product1", frozenset({"product1-2"})),
    "s3": Comparison("product2-2,product1-2,product2", frozenset({"product2-2"})),
    "s4": Comparison("product3-2,product2-2,product1-2", frozenset({"product3-2", "product2-2"})),
    "a5": Comparison("product3-2,product2-2,product1-2", frozenset({"product3-2", "product2-2"})),
    "s5": Comparison("product4-2,product3-2,product2-2", frozenset({"product4-2"})),
    "erasing": Comparison("linear,deltanet,gdn,kda,gdn2,rwkv7", frozenset()),
    "adding": Comparison("linear,deltanet,gdn,kda,gdn2,rwkv7", frozenset()),
}


class Log:
    """Prints the lines of the runs with the seconds since the start."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def say(self, line: str) -> None:
        print(f"{time.monotonic() - self.began:6.0f} s  {line}", flush=True)

    def step(self, cell: Cell, steps: int) -> None:
        pass

    def finish(self, cell: Cell) -> None:
        self.say(f"[{cell}] done")


def plan(name: str, rules: Sequence[str], seeds: int, width: int, train: TrainOptions) -> list[Cell]:
    """Return the runs of a task; seeds come last, so that every rule has a result early."""
    task = TASKS[name]
    options = replace(train, **COMPARISONS[name].train)
    model = replace(MODEL, width=width, heads=width // HEAD)
    cells = plan_cells(task, rules, replace(task.default, length=LENGTH), model, options, seeds)
    return sorted(cells, key=lambda cell: cell.seed)


def limited(cells: Sequence[Cell], jobs: int, budget: float) -> list[Cell]:
    """Return the runs with a limit of minutes, so that all of them end within the budget; 0 is no limit."""
    minutes = max(budget - STARTING, 1.0) / -(-len(cells) // jobs) / 60 if budget else math.inf
    return [replace(cell, train=replace(cell.train, minutes=minutes)) for cell in cells]


def verdict(task: str, results: Sequence[CellResult]) -> list[str]:
    """Return one line a rule: how many of its seeds solve the task at TIMES the length, and whether the rule can."""
    comparison, lines = COMPARISONS[task], []
    for rule, runs in by_rule(results).items():
        solved = sum(run.by_length[TIMES * LENGTH] >= SOLVED for run in runs)
        known = comparison.solvers and rule in comparison.rules.split(",")
        able = f" ({'can' if rule in comparison.solvers else 'cannot'})" if known else ""
        lines.append(f"{task} at {TIMES} times the length, {rule}{able}: {solved} of {len(runs)} seeds")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="s3", help=f"with commas between: {', '.join(COMPARISONS)}")
    parser.add_argument("--rules", help="rules in place of those of the comparison, with commas between")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=128, help=f"channels, a multiple of {HEAD}")
    parser.add_argument("--steps", type=int, default=TRAIN.steps)
    parser.add_argument("--rows", type=int, default=TRAIN.rows)
    parser.add_argument("--jobs", type=int, default=12, help="processes at a time")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds of the whole command; 0: no limit")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="write TASK.json for each task")
    given = parser.parse_args()
    tasks = given.tasks.split(",")
    if unknown := [name for name in tasks if name not in COMPARISONS]:
        parser.error(f"--tasks must be of {', '.join(COMPARISONS)}, got {','.join(unknown)}")
    train = replace(TRAIN, steps=given.steps, rows=given.rows, device=given.device)
    command = shlex.join(["python", "-m", "bench.tasks.tracking", *sys.argv[1:]])
    if given.json is not None:
        given.json.mkdir(parents=True, exist_ok=True)
    if given.jobs == 1:
        torch.set_num_threads(1)
    log = Log()
    for name in tasks:
        rules = (given.rules or COMPARISONS[name].rules).split(",")
        cells = limited(plan(name, rules, given.seeds, given.width, train), given.jobs, given.budget / len(tasks))

        def keep(results: list[CellResult], first: Cell = cells[0]) -> None:
            """Write the results after every run, so that a command that is cut short loses none."""
            if given.json is not None:
                save_numbers(first, results, given.json, command)

        results = run_cells(cells, given.jobs, log, keep)
        results.sort(key=lambda result: rules.index(result.rule))
        print_table(cells[0], results)
        print("\n".join(verdict(name, results)), flush=True)


if __name__ == "__main__":
    main()

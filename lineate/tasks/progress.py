"""Estimates the time of the runs: from a few steps of every model, then from the time spent so far."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from lineate.tasks.registry import TASKS
from lineate.tasks.runner import Cell, measure, precision, start, train_step
from lineate.torch_ops.tracing import cpu_by_default

if TYPE_CHECKING:
    from rich.console import Console

LONG = 300.0
"""Seconds from which an estimate suggests how to shorten the runs."""
PART = 8
"""A step is first timed with the rows divided by this; one that is slow is not timed whole."""
SLOW = 0.5
"""Seconds from which a whole step is not timed."""
TRUST = 10.0
"""Seconds of work during which the time left follows the estimate more than the measured pace."""


@dataclass(frozen=True)
class RunCost:
    """Seconds of the parts of a run."""

    step: float
    """Seconds of one step, with its share of the tests."""
    last: float
    """Seconds of the tests at other sizes, after training."""
    steps: int
    """Steps that fit into the run: all of them, or fewer with --minutes."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole run, if it does not learn the task early."""
        return self.steps * self.step + self.last


@cpu_by_default
def estimate(cells: Sequence[Cell]) -> dict[Cell, RunCost]:
    """Return the cost of each cell, measured on a few steps of one cell per rule."""
    of_rule = {cell.rule: _time(cell) for cell in reversed(cells)}
    return {cell: of_rule[cell.rule] for cell in cells}


def _time(cell: Cell) -> RunCost:
    train, sizes = cell.train, cell.sizes
    few = replace(cell, train=replace(train, rows=max(1, train.rows // PART)))
    with precision(train):
        model, optimizer = start(cell)

        def seconds(work: Callable[[], object]) -> float:
            began = time.perf_counter()
            work()
            if torch.device(train.device).type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - began

        last = train.steps - 1  # past the curriculum: its stages have other rows, and as many tokens
        seconds(lambda: train_step(few, model, optimizer, last))  # compiles, allocates
        step = seconds(lambda: train_step(few, model, optimizer, last)) * train.rows / few.train.rows
        tested = min(train.test_rows, few.train.rows)
        if step < SLOW:
            tested = max(1, train.test_rows // PART)
            step = median(seconds(lambda: train_step(cell, model, optimizer, last)) for _ in range(3))
        part = replace(train, test_rows=tested)
        test = seconds(lambda: measure(model, TASKS[cell.task], sizes, cell.seed, part)) * train.test_rows / tested
    step += test * -(-train.steps // train.eval_every) / train.steps
    ends = test * (len(train.test_pairs) + sum(n / sizes.length for n in train.test_lengths))
    return RunCost(step, ends, int(min(train.steps, 60 * train.minutes / step + 1)))


def lanes(cells: Sequence[Cell], jobs: int) -> int:
    """Return how many runs execute in parallel without slowing each other: one on a GPU, which they share."""
    if torch.device(cells[0].train.device).type != "cpu":
        return 1
    return max(1, min(jobs, len(cells), os.cpu_count() or 1))


def whole(costs: Mapping[Cell, RunCost], side_by_side: int) -> float:
    """Return the seconds of all cells."""
    each = [cost.seconds for cost in costs.values()]
    return max(sum(each) / side_by_side, max(each))


def duration(seconds: float) -> str:
    """Return a readable time: 40 s, 3 min, 2 h 10 min, 3 days 4 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 60 * 48:
        minutes = round(minutes, -1) if minutes > 600 else minutes
        return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")
    hours = round(minutes / 60)
    return f"{hours // 24} days" + (f" {hours % 24} h" if hours % 24 else "")


class Progress:
    """Shows lines and the progress of all runs: a bar below them in a terminal, else the time left in every line."""

    def __init__(
        self,
        costs: Mapping[Cell, RunCost],
        side_by_side: int,
        console: "Console",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._costs, self._lanes, self._console, self._clock = costs, side_by_side, console, clock
        self._expected = {cell: cost.seconds for cell, cost in costs.items()}
        self._done = dict.fromkeys(costs, 0.0)
        self._began = clock()
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        self._began = self._clock()
        if self._console.is_terminal:
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                BarColumn(None), TextColumn("{task.percentage:.0f}%, {task.fields[left]} left; {task.description}"),
                console=self._console, transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=1.0, left="")
            self._draw("")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def left(self) -> float:
        """Return the seconds left: the work left, at the pace so far (at first, at the estimated one)."""
        done, expected = sum(self._done.values()), sum(self._expected.values())
        pace = (self._clock() - self._began + TRUST) / (done + TRUST * self._lanes)
        return (expected - done) * pace

    def say(self, line: str) -> None:
        """Show a line."""
        if self._bar is None:
            line = f"{line}; {duration(self.left())} left"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def step(self, cell: Cell, steps: int) -> None:
        """Record the number of steps that a cell has taken."""
        if self._done[cell] >= self._expected[cell]:  # finished already: a process' last message may come late
            return
        self._done[cell] = min(steps * self._costs[cell].step, self._expected[cell])
        self._draw(f"{cell.rule}, seed {cell.seed}, step {steps} of {cell.train.steps}")

    def finish(self, cell: Cell) -> None:
        """Record that a cell is trained and tested; its unused steps are no longer expected."""
        self._done[cell] += self._costs[cell].last
        self._expected[cell] = self._done[cell]
        self._draw(f"{cell.rule}, seed {cell.seed} done")

    def _draw(self, what: str) -> None:
        if self._bar is not None:
            done, expected = sum(self._done.values()), sum(self._expected.values())
            self._bar.update(
                self._task, completed=done / expected if expected else 1.0, description=what, left=duration(self.left())
            )

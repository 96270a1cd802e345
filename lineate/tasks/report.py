"""The results: a table, a figure and a JSON file."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from lineate.tasks import DEFAULT_RULES
from lineate.tasks.model import kinds_by_word, label
from lineate.tasks.runner import Cell, CellResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MORE_COLORS = ("#0072B2", "#882255", "#117733", "#999933", "#AA4499", "#332288")
"""Looks of patterns and of rules that are not compared by default, in the order in which they appear."""


def by_rule(results: Sequence[CellResult]) -> dict[str, list[CellResult]]:
    """Return the seeds of every rule, in the order of the rules."""
    rules: dict[str, list[CellResult]] = {}
    for result in results:
        rules.setdefault(result.rule, []).append(result)
    return rules


def table_rows(results: Sequence[CellResult]) -> tuple[list[str], list[list[str]]]:
    """Return headings, and a row a rule: mean accuracy, every seed, steps taken, and the mean at other lengths."""
    lengths = list(results[0].by_length)
    head = ["rule", "accuracy", "each seed", "steps", *(f"at {n}" for n in lengths)]
    rows = []
    for rule, cells in by_rule(results).items():
        rows.append([
            label(rule),
            percent(mean(cell.accuracy for cell in cells)),
            " ".join(percent(cell.accuracy) for cell in cells),
            " ".join(f"{cell.steps}{'' if cell.stopped in ('accuracy', 'steps') else '!'}" for cell in cells),
            *(percent(mean(cell.by_length[n] for cell in cells)) for n in lengths),
        ])  # fmt: skip
    return head, rows


def percent(x: float) -> str:
    """Return a percentage rounded down to a tenth, so that 99.95% is not 100%.

    0.57 * 1000 is 569.99.., hence the inner rounding.
    """
    return f"{int(round(x * 1000, 6)) / 10:.1f}"


def markdown(results: Sequence[CellResult]) -> str:
    """Return the table in Markdown, as in the documentation."""
    head, rows = table_rows(results)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def notes(results: Sequence[CellResult]) -> list[str]:
    """Return the runs that ended early, for a note to the reader."""
    return [
        f"{label(x.rule)}, seed {x.seed}: stopped at step {x.steps} ({x.stopped})"
        for x in results
        if x.stopped in ("minutes", "not finite")
    ]


def print_table(cell: Cell, results: Sequence[CellResult]) -> None:
    """Print the table to the terminal."""
    from rich.console import Console
    from rich.table import Column, Table

    head, rows = table_rows(results)
    table = Table(Column(head[0], no_wrap=True), *head[1:], title=f"{title(cell)}: held-out accuracy, %")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    for note in notes(results):
        console.print(note)


def title(cell: Cell) -> str:
    """Return the task and its sizes."""
    from lineate.tasks.registry import TASKS

    parts = [f"length {cell.sizes.length}"]
    parts += [f"{name} {getattr(cell.sizes, name)}" for name in TASKS[cell.task].uses if name != "noise"]
    parts += ["noise"] * cell.sizes.noise
    return f"{cell.task}{' --quick' if cell.quick else ''} ({', '.join(parts)})"


def save_numbers(cell: Cell, results: Sequence[CellResult], out: Path, command: str) -> Path:
    """Write STEM.json: the settings, which all cells share, and every result."""
    content = {
        "command": command, "task": cell.task, "quick": cell.quick, "sizes": asdict(cell.sizes),
        "model": asdict(cell.model), "train": asdict(cell.train), "cells": [asdict(result) for result in results],
    }  # fmt: skip
    path = out / f"{cell.stem}.json"
    strict = json.loads(json.dumps(content), parse_constant=lambda number: None)  # JSON has no infinity and no NaN
    path.write_text(json.dumps(strict, indent=1) + "\n", encoding="utf-8")
    return path


def save(cell: Cell, results: Sequence[CellResult], out: Path, command: str) -> list[Path]:
    """Write STEM.json, STEM.md and STEM.png into the folder, STEM as the cell has it; return their paths."""
    table, figure = out / f"{cell.stem}.md", out / f"{cell.stem}.png"
    text = f"{title(cell)}: held-out accuracy, %\n\n    {command}\n\n{markdown(results)}"
    table.write_text(text + "".join(f"\n{note}\n" for note in notes(results)), encoding="utf-8")
    draw(cell, results, figure)
    return [save_numbers(cell, results, out, command), table, figure]


def draw(cell: Cell, results: Sequence[CellResult], path: Path) -> None:
    """Draw accuracy against pairs (if there are several numbers of them) and against length; dots are seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [("by_pairs", "pairs", cell.sizes.pairs), ("by_length", "length of a row", cell.sizes.length)]
    panels = [panel for panel in panels if len(getattr(results[0], panel[0])) > 1] or panels[1:]
    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 4.4), squeeze=False, layout="constrained")
    for panel, (name, what, trained) in zip(axes[0], panels, strict=True):
        _lines(panel, {rule: [getattr(x, name) for x in group] for rule, group in by_rule(results).items()})
        panel.axvline(trained, color="gray", linewidth=1, linestyle=":", label="trained here")
        panel.set(xlabel=what, ylabel="held-out accuracy, %", ylim=(-3, 103))
    axes[0][0].legend(fontsize=9)
    figure.suptitle(title(cell), x=0.01, ha="left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _lines(axes: "Axes", accuracy: dict[str, list[dict[int, float]]]) -> None:
    """Draw one line a rule through the means, and one dot a seed."""
    more = iter(MORE_COLORS * len(accuracy))
    ticks: list[int] = []
    for rule, seeds in accuracy.items():
        color = kinds_by_word()[rule].look.color if rule in DEFAULT_RULES.split(",") else next(more)
        ticks = sorted(seeds[0])
        axes.plot(ticks, [100 * mean(s[n] for s in seeds) for n in ticks], color=color, label=label(rule), marker="o")
        for seed in seeds:
            axes.plot(ticks, [100 * seed[n] for n in ticks], color=color, marker=".", linestyle="", alpha=0.5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)

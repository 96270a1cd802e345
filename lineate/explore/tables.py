"""The demo's numbers as terminal tables; the best of the fixed-size memories is bold, with a star."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lineate.explore.cost import MeasuredCost
from lineate.explore.findings import Results, size
from lineate.explore.memories import DEMO_RULES, FIXED_SIZE
from lineate.explore.recall import Frame, Interference, Overwrite, ScratchPad, Topics
from lineate.figures import label_of, narrow_label_of

SHADES = ((0.25, "█", "#", "green"), (0.5, "▓", "+", "green"), (0.75, "▒", "-", "yellow"), (1.0, "░", ".", "yellow"))
"""For errors below a bound: the block, the same in ASCII, and its colour."""
WORTHLESS = ("x", "red")
"""The cell of an error of 1 or more, which is worse than no answer."""


class Column(NamedTuple):
    """One number per memory."""

    header: str
    values: Mapping[str, float | None]
    show: Callable[[float], str]
    marked: bool = True
    """Whether the lowest number is the best one."""


def interference_table(result: Interference) -> Table:
    """Return recall errors against the number of pairs, and against the number of repetitions."""
    shown = [index for index, count in enumerate(result.pairs) if count >= 8][::2]
    columns = [
        Column(f"{result.pairs[i]}\npairs", {rule: error[i] for rule, error in result.error.items()}, _number)
        for i in shown
    ]
    again = {rule: error[-1] for rule, error in result.error_by_told.items()}
    columns.append(Column(f"{result.repeated_pairs} pairs\n{result.told[-1]} times", again, _number))
    return _table("recall error", columns)


def overwrite_table(result: Overwrite) -> Table:
    """Return recall errors of the three groups, and the remainder of the old value."""
    return _table(
        "recall error",
        [
            Column("old", result.old, _number),
            Column("kept", result.kept, _number),
            Column("overwritten", result.overwritten, _number),
            Column("old value left", {rule: abs(share) for rule, share in result.ghost.items()}, _percent),
        ],
    )


def topics_table(result: Topics) -> Table:
    """Return the state after many writes, and the last topic."""
    middle, many = (result.writes.index(result.switches[i]) for i in (len(result.switches) // 2, -1))
    columns = [
        Column(
            f"state norm,\n{result.writes[i]} writes",
            {rule: norm[i] for rule, norm in result.norm.items()},
            _norm,
            marked=False,
        )
        for i in (middle, many)
    ]
    columns += [
        Column("error on\nnew topic", result.new, _number),
        Column("answer to\nunseen key", result.unseen, _number),
    ]
    return _table("", columns)


def scratch_pad_table(result: ScratchPad) -> Table:
    """Return errors on the facts and the cleared pad, and its clutter."""
    return _table(
        "",
        [
            Column("error on\nfacts to keep", result.facts, _number),
            Column("error on new\nscratch pairs", result.new, _number),
            Column("answer to unseen\nscratch key", result.unseen, _number),
        ],
    )


def cost_table(result: MeasuredCost) -> Table:
    """Return bytes and times at the shortest and the longest text."""
    columns: list[Column] = []
    measures = (
        ("state", result.bytes, size),
        ("decode us", result.decode_microseconds, _whole),
        ("prefill us", result.prefill_microseconds, _whole),
    )
    for name, numbers, show in measures:
        for index in (0, -1):
            values = {rule: float(series[index]) for rule, series in numbers.items()}
            columns.append(Column(f"{name}\nat {result.lengths[index]}", values, show, marked=False))
    return _table("", columns)


def summary_table(results: Results) -> Table:
    """Return one row per memory: recall, forgetting, cost."""
    rows = results.summary
    columns = [
        Column("kept", {rule: row.kept for rule, row in rows.items()}, _number),
        Column("over-\nwritten", {rule: row.overwritten for rule, row in rows.items()}, _number),
        Column("old", {rule: row.old for rule, row in rows.items()}, _number),
        Column("new\ntopic", {rule: row.new_topic for rule, row in rows.items()}, _number),
        Column("unseen\nkey", {rule: row.unseen for rule, row in rows.items()}, _number),
        Column("facts", {rule: row.facts for rule, row in rows.items()}, _number),
        Column("state\nnorm", {rule: row.norm for rule, row in rows.items()}, _norm, marked=False),
        Column("bytes", {rule: float(row.bytes) for rule, row in rows.items()}, size),
    ]
    return _table("", columns)


def reasons_table(results: Results) -> Table:
    """Return why each rule was invented, as a problem and two numbers."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for reason in results.reasons:
        show = size if reason.measure.startswith("bytes") else _number
        gained = reason.value < reason.value_before
        table.add_row(
            label_of(reason.rule),
            Text.assemble(
                f"{label_of(reason.before)}: {reason.problem}\n  {reason.measure}: {show(reason.value_before)} -> ",
                (show(reason.value), "bold green" if gained else "bold red"),
                "" if gained else " (no gain in this run)",
            ),
        )
    return table


def board(frame: Frame, group: int, ascii_only: bool) -> Group:
    """Return every memory as a row of cells, one per key, shaded by how well the key is recalled now."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("old", "kept", "overwritten"):
        table.add_column(name, min_width=group)
    for rule in DEMO_RULES:
        cells = [_cell(error, ascii_only) for error in frame.error[rule]]
        table.add_row(
            label_of(rule), *(Text.assemble(*cells[start : start + group]) for start in range(0, 3 * group, group))
        )
    legend = Text.assemble("error below  ", *_legend(ascii_only), "1 or more ", WORTHLESS)
    return Group(table, legend)


def _legend(ascii_only: bool) -> list[tuple[str, str]]:
    return [
        part
        for below, block, letter, color in SHADES
        for part in ((f"{below:g} ", "default"), (letter if ascii_only else block, color), ("  ", "default"))
    ]


def _cell(error: float | None, ascii_only: bool) -> tuple[str, str]:
    if error is None:
        return " ", "default"
    for below, block, letter, color in SHADES:
        if error < below:
            return (letter if ascii_only else block), color
    return WORTHLESS


def _table(corner: str, columns: Sequence[Column]) -> Table:
    """Return one row per memory; the lowest number of the fixed-size memories is marked, unless all have it."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column(corner, no_wrap=True)
    best: list[str | None] = []
    for column in columns:
        table.add_column(column.header, justify="right", no_wrap=True)
        numbers = [number for rule in FIXED_SIZE if (number := column.values.get(rule)) is not None]
        lowest, highest = column.show(min(numbers)), column.show(max(numbers))
        best.append(lowest if column.marked and lowest != highest else None)
    for rule in DEMO_RULES:
        cells = []
        for column, lowest_shown in zip(columns, best, strict=True):
            value = column.values.get(rule)
            text = "-" if value is None else column.show(value)
            marked = rule in FIXED_SIZE and text == lowest_shown
            space = " " if lowest_shown is not None else ""
            cells.append(Text(f"{text}*", style="bold green") if marked else Text(text + space))
        table.add_row(narrow_label_of(rule), *cells, style="" if rule in FIXED_SIZE else "dim")
    return table


def _number(value: float) -> str:
    return f"{value:.2f}"


def _norm(value: float) -> str:
    return f"{value:.1f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _whole(value: float) -> str:
    return f"{value:.0f}"

"""A plan as a figure: state, batch, operations and least times against the length, for each mix of layers."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineate.layers import kind_of
from lineate.planning.report import PlanNumbers
from lineate.planning.tables import sequences
from lineate.planning.units import show_bytes, show_flops, show_rate, show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

HYBRID_LOOK: dict[str, Any] = {"color": "#0072B2", "marker": "s", "linestyle": "-"}
OWN_LOOK: dict[str, Any] = {"color": "#E69F00", "marker": "o", "linestyle": "--"}
SOFTMAX_ONLY, LINEAR_ONLY, MIXED_3_TO_1 = "softmax only", "linear only", "3:1 hybrid"
DPI = 150
METADATA: dict[str, dict[str, None]] = {
    ".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}
}  # fmt: skip
"""Metadata to omit from files, so that the same numbers give the same bytes."""


def save(figure: "Figure", path: Path) -> None:
    """Write the figure in the format of the file's ending, then close it."""
    from matplotlib import pyplot as plt

    figure.savefig(path, dpi=DPI, metadata=METADATA[path.suffix.lower()])
    plt.close(figure)


def draw_report(report: PlanNumbers, panels: Sequence[str], linear: tuple[bool, bool] = (False, False)) -> "Figure":
    """Draw the panels, two in a row, with one legend for all; call it inside figures.styled().

    `linear` says whether the axes x and y are linear.
    """
    from matplotlib import pyplot as plt

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(8.0 if columns == 2 else 5.5, 3.3 * rows + 0.7), squeeze=False)
    for axes, name in zip(grid.flat, panels, strict=False):
        with plt.rc_context({"axes.titlesize": 9.5}):
            _DRAW[name](axes, report)
        _lengths(axes, report["contexts_tokens"])
        _even(axes, report["contexts_tokens"], linear, *_UNITS[name])
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(report["variants"]))
    figure.suptitle(_subject(report), fontsize=10, color="0.35")
    return figure


def draw_teaching(report: PlanNumbers, linear: tuple[bool, bool] = (False, False)) -> "Figure":
    """Draw the simplified formulas, and dashed the exact bytes of the same three models."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.8))
    tokens = report["contexts_tokens"]
    for name, x in report["teaching"].items():
        look = _look(name, x["letters"])
        axes.plot(tokens, [n / 1e9 for n in x["formula_bytes"]], **look | {"linestyle": "-"}, label=x["formula"])
        exact = [n / 1e9 for n in x["exact_bytes"]]
        axes.plot(tokens, exact, color=look["color"], linestyle="--", label=f"{name}, exact")
    last = {x["formula"]: x["formula_bytes"][-1] / x["exact_bytes"][-1] for x in report["teaching"].values()}
    axes.set_title(
        f"At {tokens[-1]:,} tokens the formulas give\n"
        + ", ".join(f"{100 * ratio:.3g}% ({name})" for name, ratio in last.items())
        + "\nof the exact bytes"
    )
    axes.set(yscale="log", ylabel="state, GB (10^9 bytes)")
    axes.yaxis.set_major_formatter("{x:g}")
    _lengths(axes, tokens)
    _even(axes, tokens, linear, lambda tick: f"{tick:g}", 1000)
    axes.legend()
    figure.suptitle(_subject(report), fontsize=10, color="0.35")
    return figure


def _subject(report: PlanNumbers) -> str:
    m, batch = report["model"], report["batch"]
    return f"{m['name']}, {m['dtype']}" + (f", {sequences(batch)}" if batch > 1 else "")


def _memory(axes: "Axes", report: PlanNumbers) -> None:
    """Draw bytes of state, and mark the length from which a layer's state is smaller than a cache."""
    numbers = {name: x["state_bytes"] for name, x in report["variants"].items()}
    _lines(axes, report, numbers)
    _powers(axes, show_bytes, 2)
    axes.set_title(_found(f"State at {_longest(report)} tokens", numbers, show_bytes))
    axes.set_ylabel("bytes of state")
    crossover = report["crossover"]["tokens"]
    if report["contexts_tokens"][0] < crossover < report["contexts_tokens"][-1]:
        axes.axvline(crossover, color="0.5", linewidth=1, linestyle=":", zorder=0)
        axes.annotate(
            f"{crossover:,} tokens:\nstate = cache", (crossover, 1), xytext=(4, -2), va="top",
            xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=9, color="0.35",
        )  # fmt: skip


def _batch(axes: "Axes", report: PlanNumbers) -> None:
    """Draw how many sequences fit; a length at which none does has no point."""
    fits = {x["of"]: x for x in report["fits"]}
    numbers = {name: [n or math.nan for n in x["largest_batch"]] for name, x in fits.items()}
    _lines(axes, report, numbers)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    room = show_rate(next(iter(fits.values()))["memory_bytes"], "B")
    counts = {name: x["largest_batch"] for name, x in fits.items()}
    softmax, mixed, linear = (counts[_named(counts, name)][-1] for name in (SOFTMAX_ONLY, MIXED_3_TO_1, LINEAR_ONLY))
    axes.set_title(
        f"Sequences of {_longest(report)} tokens in {room}\nlinear {linear:,}, 3:1 {mixed:,}, softmax {softmax:,}"
    )
    axes.set_ylabel("sequences that fit")
    if not any(x["weights_fit"] for x in fits.values()):
        axes.text(0.5, 0.5, "the weights alone\ndo not fit", transform=axes.transAxes, ha="center", color="0.35")


def _flops(axes: "Axes", report: PlanNumbers) -> None:
    numbers = {name: x["decode_flops"] for name, x in report["variants"].items()}
    _lines(axes, report, numbers)
    _powers(axes, show_flops, 10)
    axes.set_title(_found(f"One token after {_longest(report)} tokens", numbers, show_flops))
    axes.set_ylabel("operations of a token")


def _decode(axes: "Axes", report: PlanNumbers) -> None:
    _times(axes, report, "decode", "One token after")
    axes.set_ylabel("least time of a token")


def _prefill(axes: "Axes", report: PlanNumbers) -> None:
    _times(axes, report, "prefill", "Reading")
    axes.set_ylabel("least time of reading")


_DRAW: dict[str, Callable[["Axes", PlanNumbers], None]] = {
    "memory": _memory, "batch": _batch, "flops": _flops, "decode": _decode, "prefill": _prefill
}  # fmt: skip


_UNITS: dict[str, tuple[Callable[[float], str], int]] = {
    "memory": (show_bytes, 1024), "batch": (lambda count: f"{count:,.0f}", 1000), "flops": (show_flops, 1000),
    "decode": (show_seconds, 1000), "prefill": (show_seconds, 1000),
}  # fmt: skip
"""The format of a panel's numbers, and the factor between their units."""


def _times(axes: "Axes", report: PlanNumbers, what: str, title: str) -> None:
    """Draw least times on the first machine."""
    machine = report["times"][0]["hardware"]
    times = [x for x in report["times"] if x["what"] == what and x["hardware"] == machine]
    numbers = {name: [x["least_seconds"] for x in times if x["of"] == name] for name in report["variants"]}
    _lines(axes, report, numbers)
    _powers(axes, show_seconds, 10)
    axes.set_title(_found(f"{title} {_longest(report)} tokens, {machine}", numbers, show_seconds))


def _lines(axes: "Axes", report: PlanNumbers, numbers: Mapping[str, Sequence[float]]) -> None:
    for name, values in numbers.items():
        look = _look(name, report["variants"][name]["letters"])
        axes.plot(report["contexts_tokens"], values, **look, label=name, markersize=4.5)


def _look(name: str, letters: str) -> dict[str, Any]:
    """Return colour, marker and line of a mix of layers; those of its rule if it has only one."""
    if name == "this model":
        return OWN_LOOK
    if "hybrid" in name:
        return HYBRID_LOOK
    look = kind_of(letters[0]).look
    return {"color": look.color, "marker": look.marker, "linestyle": ":" if name.startswith(SOFTMAX_ONLY) else "-."}


def _named(numbers: Mapping[str, Any], name: str) -> str:
    """Return the key of a mix, marked if it is this model."""
    return next(key for key in numbers if key.startswith(name))


def _found(what: str, numbers: Mapping[str, Sequence[float]], show: Callable[[float], str]) -> str:
    """Return a title with the last numbers: linear layers' in units, the others' as multiples of them."""
    softmax, mixed, linear = (numbers[_named(numbers, name)][-1] for name in (SOFTMAX_ONLY, MIXED_3_TO_1, LINEAR_ONLY))
    ratios = f"3:1 {_times_as(mixed / linear)}, softmax {_times_as(softmax / linear)}"
    return f"{what}\nlinear {show(linear)}, {ratios}"


def _times_as(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.2g}x"


def _longest(report: PlanNumbers) -> str:
    return _tokens(report["contexts_tokens"][-1])


def _powers(axes: "Axes", show: Callable[[float], str], base: int) -> None:
    """Make the axis logarithmic with ticks in words; there are several within a decade if decades are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log", base=base)
    low, high = axes.get_ylim()
    span = math.log10(high / low)
    if base == 2:
        axes.yaxis.set_major_locator(LogLocator(base=2.0 ** max(1, round(span / 1.5))))
    else:
        axes.yaxis.set_major_locator(
            LogLocator(base=10, subs=(1, 1.5, 2, 3, 5, 7) if span < 1 else (1, 2, 5) if span < 3 else (1,))
        )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: show(tick)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _lengths(axes: "Axes", contexts: Sequence[int]) -> None:
    """Put tokens on the x axis, written as powers of two: 4k, 1M."""
    axes.set_xscale("log", base=2)
    if len(contexts) > 1:  # also in a panel where nothing is drawn
        axes.set_xlim(contexts[0] / 1.5, contexts[-1] * 1.5)
    powers = [n for n in contexts if n & (n - 1) == 0]
    step = max(1, -(-len(powers) // 6))
    ticks = powers[::-1][::step][::-1] or list(contexts)
    axes.set_xticks(ticks, [_tokens(n) for n in ticks])
    axes.minorticks_off()
    axes.set_xlabel("tokens of text")


def _even(
    axes: "Axes", contexts: Sequence[int], linear: tuple[bool, bool], show: Callable[[float], str], factor: int
) -> None:  # fmt: skip
    """Make the axes x and y linear, as asked, from 0, with ticks at whole numbers of the units they are written in."""
    lines = [
        line for line in axes.lines if not str(line.get_label()).startswith("_")
    ]  # without the mark of the crossover
    if linear[1]:
        _even_numbers(axes, lines, show, factor)
    if linear[0]:
        last = contexts[-1]
        step = max(1, 2 ** math.ceil(math.log2(last / 5)))
        lengths = range(0, last + 1, step)
        axes.set_xscale("linear")
        axes.set_xlim(0, 1.02 * last)
        axes.set_xticks(lengths, [_tokens(n) for n in lengths])
        for line in lines:
            line.set_markevery(max(1, len(contexts) // 8))
        axes.xaxis.minorticks_off()


def _even_numbers(axes: "Axes", lines: Sequence["Line2D"], show: Callable[[float], str], factor: int) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator
    from numpy import asarray

    values = (y for line in lines for y in asarray(line.get_ydata(), dtype=float).tolist())
    highest: float = max((y for y in values if not math.isnan(y)), default=1.0)
    unit = float(factor) ** math.floor(math.log(highest, factor))
    axes.set_yscale("linear")
    axes.set_ylim(0, 1.05 * highest)
    ticks = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(0, highest / unit)
    axes.set_yticks([unit * tick for tick in ticks if unit * tick <= highest])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: "0" if tick == 0 else show(tick)))
    axes.yaxis.minorticks_off()


def _tokens(n: int) -> str:
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if n >= size and n % size == 0:
            return f"{n // size}{unit}"
    return f"{n:,}"

"""The demo's numbers as pictures: titles state the results; one colour per rule, safe for colour-blind readers."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from lineate.explore import lengths
from lineate.explore.findings import Results
from lineate.explore.memories import DEMO_RULES, OnProgress, silent
from lineate.explore.recall import Interference, Overwrite, ScratchPad, Topics
from lineate.figures import FIGURE_STYLE, kind_named, label_of


def save_plots(results: Results, out: Path, report: OnProgress = silent) -> list[Path]:
    """Draw all figures into the folder `out`; return their paths."""
    figures = {
        "1_interference.png": lambda: plot_interference(results.interference),
        "2_overwrite.png": lambda: plot_overwrite(results.overwrite),
        "3_topics.png": lambda: plot_topics(results.topics),
        "4_compromises.png": lambda: plot_compromises(results.overwrite, results.scratch_pad),
        "5_cost.png": lambda: lengths.draw(asdict(results.cost) | {"machine": platform.machine()}),
    }
    paths: list[Path] = []
    with plt.rc_context(FIGURE_STYLE):
        for name, draw in figures.items():
            figure = draw()
            figure.savefig(out / name)
            plt.close(figure)
            paths.append(out / name)
            report(len(paths) / len(figures))
    return paths


def plot_interference(result: Interference) -> Figure:
    """Draw the error against the number of pairs, and against how often they were told."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    linear, delta = result.error["linear_attention"][-1], result.error["delta_rule"][-1]
    _lines(left, result.pairs, result.error)
    left.axvline(result.key_dim, color="gray", linewidth=1, linestyle=":", label="one pair per key channel")
    left.set(xlabel="pairs written into one memory, once each", ylabel="recall error of all pairs")
    left.set_title(
        f"Pairs interfere: at {result.pairs[-1]} pairs the error is\n{linear:.1f} when adding, {delta:.1f} when "
        "correcting"
    )
    linear, delta = result.error_by_told["linear_attention"][-1], result.error_by_told["delta_rule"][-1]
    _lines(right, result.told, result.error_by_told)
    right.set(xlabel=f"times the same {result.repeated_pairs} pairs were told", ylabel="recall error of all pairs")
    right.set_title(
        f"Repetition: told {result.told[-1]} times, the error is\n{linear:.1f} when adding, {delta:.2f} when correcting"
    )
    for axes, ticks in ((left, result.pairs), (right, result.told)):
        axes.axhline(1, color="gray", linewidth=1, linestyle="--", label="error of no answer at all")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.legend(loc="upper left")
    return figure


def plot_overwrite(result: Overwrite) -> Figure:
    """Draw the error of every key after every write.

    Each memory has a panel; memories with the same numbers share one.
    """
    # keys, writes; a key that is not written yet is NaN
    history = {rule: np.array(steps, dtype=float).T for rule, steps in result.history.items()}
    groups = _same({rule: np.nan_to_num(values) for rule, values in history.items()})
    columns = (len(groups) + 1) // 2
    figure, panels = plt.subplots(2, columns, figsize=(5.5 * columns, 7), sharex=True, sharey=True, squeeze=False)
    group = result.group
    for axes, rules in zip(panels.flat, groups, strict=False):
        rule = rules[0]
        writes = history[rule].shape[1]
        image = axes.imshow(
            history[rule], aspect="auto", cmap="cividis_r", vmin=0, vmax=1.4, interpolation="nearest",
            extent=(0.5, writes + 0.5, 3 * group - 0.5, -0.5),
        )  # fmt: skip
        for edge in (group, 2 * group):
            axes.axhline(edge - 0.5, color="white", linewidth=3)
        axes.axvline(3 * group + 0.5, color="black", linewidth=1, linestyle=":")
        axes.grid(False)
        axes.set_yticks([group * (part + 0.5) - 0.5 for part in range(3)], ["old", "kept", "over-\nwritten"])
        axes.tick_params(axis="y", length=0)
        errors = [f"{errors[rule]:.2f}" for errors in (result.old, result.kept, result.overwritten)]
        axes.set_title(
            ", ".join(label_of(name) for name in rules)
            + f"\nin the end: old {errors[0]}, kept {errors[1]}, overwritten {errors[2]}"
        )
    for axes in panels.flat[len(groups) :]:
        axes.set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("writes (dotted line: overwriting begins)")
    bar = figure.colorbar(image, ax=panels, shrink=0.8)
    bar.set_label("recall error against the newest value (0 perfect, 1 like no answer)")
    linear, gated, delta = (
        result.overwritten[rule] for rule in ("linear_attention", "gated_linear_attention", "delta_rule")
    )
    figure.suptitle(
        f"Error on overwritten keys: {linear:.2f} when adding, {gated:.2f} when fading, {delta:.2f} when correcting\n"
        "(a row is a key, a column is a moment; white: not written yet)"
    )
    return figure


def plot_topics(result: Topics) -> Figure:
    """Draw the norm of the state over a stream of topics, and the error on the last topic afterwards."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.8), width_ratios=(1.3, 1))
    _lines(left, result.writes, result.norm, marker=False)
    for switch in result.switches:
        left.axvline(switch, color="black", linewidth=0.7, linestyle=":", zorder=0)
    many = result.writes.index(result.switches[-1])
    linear, delta, gated = (result.norm[rule][many] for rule in ("linear_attention", "delta_rule", "gated_delta_rule"))
    left.set(xlabel="writes (dotted lines: the topic changes)", ylabel="norm of the state (Frobenius)", ylim=(0, None))
    left.set_title(
        f"After {result.switches[-1]} writes the state has norm {linear:.0f} when adding,\n"
        f"{delta:.0f} when correcting, {gated:.0f} when also forgetting"
    )
    left.legend(loc="upper left")
    _bars(right, {"error on the new topic": result.new, "answer to a key never written": result.unseen})
    right.set(xlabel="error, or length of the answer (0 is best)")
    right.set_title(
        f"A key never written is answered with length\n{result.unseen['delta_rule']:.2f} by DeltaNet, "
        f"{result.unseen['gated_delta_rule']:.2f} by Gated DeltaNet"
    )
    return figure


def plot_compromises(overwrite: Overwrite, pad: ScratchPad) -> Figure:
    """Draw the best results of one gate for everything, against correcting and against a gate per channel."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5))
    _curve(
        left,
        "gated_linear_attention",
        overwrite.kept_by_decay,
        overwrite.overwritten_by_decay,
        "decay",
        overwrite.decays,
    )
    for rule in ("linear_attention", "delta_rule"):
        _point(left, rule, overwrite.kept[rule], overwrite.overwritten[rule])
    left.set(xlabel="error on kept pairs", ylabel="error on overwritten pairs")
    both = min(map(max, overwrite.kept_by_decay, overwrite.overwritten_by_decay))
    left.set_title(
        f"Overwriting: fading brings both errors to {both:.2f} at best,\ncorrecting reaches "
        f"{overwrite.kept['delta_rule']:.2f} and {overwrite.overwritten['delta_rule']:.2f}"
    )
    gated = "gated_delta_rule"
    _curve(right, gated, pad.facts_by_gate[gated], pad.unseen_by_gate[gated], "gate", pad.gates)
    for rule in ("delta_rule", "kimi_delta_attention"):
        _point(right, rule, pad.facts[rule], pad.unseen[rule])
    right.set(xlabel="error on the facts to keep", ylabel="clutter: answer to an unseen scratch key")
    both = min(map(max, pad.facts_by_gate[gated], pad.unseen_by_gate[gated]))
    right.set_title(
        f"Clearing a part: one gate brings both to {both:.2f} at best,\none gate per channel reaches "
        f"{pad.facts['kimi_delta_attention']:.2f} and {pad.unseen['kimi_delta_attention']:.2f}"
    )
    for axes in (left, right):
        axes.plot(0, 0, marker="o", color="gray", markersize=8, clip_on=False)
        axes.annotate("best", (0, 0), xytext=(12, 8), textcoords="offset points", color="gray")
        axes.set(xlim=(0, 1.2), ylim=(0, 1.15 * axes.get_ylim()[1]))
    left.legend(loc="lower right")
    right.legend(loc="upper right")
    return figure


def _same(numbers: Mapping[str, ArrayLike]) -> list[list[str]]:
    """Return the rules in groups, those with the same numbers together."""
    groups: list[list[str]] = []
    for rule, values in numbers.items():
        for group in groups:
            if np.allclose(numbers[group[0]], values, rtol=1e-3, atol=1e-3):
                group.append(rule)
                break
        else:
            groups.append([rule])
    return groups


def _lines(axes: Axes, x: Sequence[float], y: Mapping[str, Sequence[float]], marker: bool = True) -> None:
    """Draw one line per rule; rules with the same numbers share one."""
    for rules in _same(y):
        rule, label = rules[0], ",\n".join(label_of(name) for name in rules)
        look = kind_named(rule).look
        axes.plot(x, y[rule], color=look.color, marker=look.marker if marker else None, label=label)


def _bars(axes: Axes, measures: Mapping[str, Mapping[str, float]]) -> None:
    """Draw one row per rule and one bar per measure."""
    height = 0.8 / len(measures)
    positions = np.arange(len(DEMO_RULES))
    colors = [kind_named(rule).look.color for rule in DEMO_RULES]
    for index, (name, values) in enumerate(measures.items()):
        y = positions + (index - (len(measures) - 1) / 2) * height
        bars = axes.barh(y, [values[rule] for rule in DEMO_RULES], height=height * 0.92, label=name,
                         color=colors, alpha=1.0 if index == 0 else 0.45)  # fmt: skip
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
    axes.set_yticks(positions, [label_of(rule) for rule in DEMO_RULES])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.grid(axis="y", visible=False)
    legend = axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.12))
    for handle, alpha in zip(legend.legend_handles, (1.0, 0.45), strict=False):
        if handle is not None:
            handle.set(color="black", alpha=alpha)


def _curve(axes: Axes, rule: str, x: Sequence[float], y: Sequence[float], knob: str, settings: Sequence[float]) -> None:
    """Draw all settings of one knob; name the first and the last."""
    look = kind_named(rule).look
    axes.plot(x, y, color=look.color, marker=look.marker, markersize=4, label=f"{label_of(rule)}, all {knob}s tried")
    for index, offset in ((0, (10, 6)), (-1, (4, 10))):
        axes.annotate(f"{knob} {settings[index]:g}", (x[index], y[index]), xytext=offset, textcoords="offset points")


def _point(axes: Axes, rule: str, x: float, y: float) -> None:
    look = kind_named(rule).look
    axes.plot(x, y, linestyle="none", color=look.color, marker=look.marker, markersize=12, label=label_of(rule))

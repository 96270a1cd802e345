"""Draw the results of bench.memories.recall.

python -m bench.memories.recall_plot bench/out/memory.json docs/images
"""

import json
import sys
from pathlib import Path
from typing import Any

from bench.memories.contestants import name_of
from lineate.layers import kinds

LOOKS = {name_of(kind): (kind.look.color, kind.look.marker) for kind in kinds() if kind.section == "linear"} | {
    "least squares": ("#000000", "X"),
    "TTT-Linear": ("#0072B2", "o"),
    "TTT-MLP": ("#56B4E9", "s"),
    "Titans": ("#D55E00", "^"),
    "Titans MLP": ("#E69F00", "v"),
    "LaCT": ("#CC79A7", "P"),
}
"""Colour and marker by name. Rules have those of their registry entries; memories that learn share a panel only with
DeltaNet."""
PANELS = (
    ("linear attention", "gated linear attention", "DeltaNet", "Gated DeltaNet", "KDA", "least squares"),
    ("DeltaNet", "TTT-Linear", "TTT-MLP", "Titans", "Titans MLP", "LaCT"),
)
UNSCALED = "LaCT"  # its answers do not have the size of a value
FONT: dict[str, Any] = {
    "figure.dpi": 120, "savefig.dpi": 120, "font.size": 10.5, "axes.titlesize": 11, "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "legend.frameon": False, "legend.fontsize": 9.5, "figure.constrained_layout.use": True,
}  # fmt: skip


def draw(data: dict[str, Any], folder: Path) -> list[Path]:
    """Draw one picture for every table in the data; return their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with plt.rc_context(FONT):
        for name, make in (("recall", recall), ("overwrite", overwrite), ("length", length), ("cost", cost)):
            if name in data:
                figure = make(plt, data)
                figure.supxlabel(_caption(data["headers"][name], name), fontsize=8, color="#555555", x=0.01, ha="left")
                paths.append(folder / f"memory-{name}.png")
                figure.savefig(paths[-1])
                plt.close(figure)
    return paths


def recall(plt: Any, data: dict[str, Any]) -> Any:
    """Draw accuracy against pairs: matrices above, other models below."""
    figure, panels = plt.subplots(2, 1, figsize=(7, 7.4), sharex=True)
    for axis, names, title in zip(panels, PANELS, ("a matrix", "other models and optimisers"), strict=True):
        for name in names:
            own = [r for r in data["recall"] if r["name"] == name]
            label = f"{name} ({own[0]['d']} channels)"
            _line(axis, name, [r["n"] for r in own], [r["accuracy"] for r in own], label)
        axis.set_title(f"Recall at 64 KiB of state: {title}")
        axis.set(ylabel="share of pairs recalled", ylim=(-0.03, 1.05))
        axis.legend(loc="lower left")
    ticks = sorted({r["n"] for r in data["recall"]})
    _powers(panels[1], ticks)
    panels[1].set_xlabel("pairs written once")
    return figure


def overwrite(plt: Any, data: dict[str, Any]) -> Any:
    """Draw the share recalled and the error, for keys with new values and for keys left alone, one row per memory."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 5.8), sharey=True)
    rows = data["overwrite"]
    for axis, what, title in zip(
        panels, ("accuracy", "error"), ("Share answered with the newest value", "Relative error"), strict=True
    ):
        for i, (which, label, alpha) in enumerate((("new", "keys with a new value", 1.0), ("kept", "others", 0.45))):
            own = [(j, r) for j, r in enumerate(rows) if what == "accuracy" or r["name"] != UNSCALED]
            bars = axis.barh(
                [j + 0.4 * (i - 0.5) for j, _ in own], [r[f"{what}_{which}"] for _, r in own],
                height=0.37, color="#0072B2", alpha=alpha, label=label,
            )  # fmt: skip
            axis.bar_label(bars, fmt="%.2f", padding=3, fontsize=8.5)
        axis.set_title(title)
        axis.set_axisbelow(True)
        axis.grid(axis="y", visible=False)
        axis.margins(x=0.17)
    for j in (j for j, r in enumerate(rows) if r["name"] == UNSCALED):
        panels[1].text(0.03, j, "has no scale", va="center", fontsize=8.5, color="#555555")
    panels[0].set_yticks(range(len(rows)), [r["name"] for r in rows])
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def length(plt: Any, data: dict[str, Any]) -> Any:
    """Draw the error of the last pairs, and the growth of the weights: matrices left, other models right."""
    figure, panels = plt.subplots(2, 2, figsize=(8, 7), sharex=True, sharey="row")
    by_name = {r["name"]: r for r in data["length"]}
    for (above, below), names, title in zip(panels.T, PANELS, ("A matrix", "Other models"), strict=True):
        for name in names:
            points = [p for p in by_name[name]["points"] if p["error"] is not None]
            marks = [p["t"] for p in points]
            if name != UNSCALED:
                _line(above, name, marks, [p["error"] for p in points], name)
            _line(below, name, marks, [p["norm"] / points[0]["norm"] for p in points], name)
        above.set_title(title)
        below.set_xlabel("random pairs written")
        below.legend(loc="upper left", fontsize=9, frameon=True, facecolor="white", edgecolor="none", framealpha=1)
        ticks = [p["t"] for p in data["length"][0]["points"]]
        _powers(below, ticks[::2])
        for axis in (above, below):
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
            axis.axvline(512, color="gray", linestyle=":", linewidth=1)
    panels[0, 0].set_ylabel("error of the last 64 pairs")
    panels[1, 0].set_ylabel("norm of the weights, of that at 256")
    low, high = panels[1, 0].get_ylim()
    panels[1, 0].set_ylim(low, high**2.2)  # room for the legend
    return figure


def cost(plt: Any, data: dict[str, Any]) -> Any:
    """Draw the time of a whole sequence and of one token, and the bytes of the state, one row per layer."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 5.2), sharey=True, width_ratios=(1.4, 1))
    rows = data["cost"]
    y = range(len(rows))
    for what, label, marker, colour in (
        ("forward_us", "whole text", "o", "#0072B2"), ("train_us", "and its backward", "s", "#E69F00"),
        ("step_us", "one token at a time", "^", "#009E73"),
    ):  # fmt: skip
        panels[0].plot([r[what] for r in rows], y, marker, color=colour, label=label, markersize=7)
    panels[0].set_xscale("log")
    panels[0].xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    panels[0].set(xlabel="microseconds a token")
    panels[0].set_title("Time of a layer, 2048 tokens")
    bars = panels[1].barh(y, [r["memory"] / 1024 for r in rows], color="#0072B2", height=0.6)
    panels[1].bar_label(bars, fmt="%.0f", padding=3, fontsize=9)
    panels[1].set(xlabel="KiB")
    panels[1].margins(x=0.2)
    panels[1].set_axisbelow(True)
    panels[1].set_title("State of the memory")
    panels[1].grid(axis="y", visible=False)
    panels[0].set_yticks(list(y), [r["name"] for r in rows])
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def _line(axis: Any, name: str, x: list[float], y: list[float], label: str) -> None:
    colour, marker = LOOKS[name]
    axis.plot(x, y, color=colour, marker=marker, markersize=6, label=label)


def _powers(axis: Any, ticks: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(t) for t in ticks])
    axis.minorticks_off()


def _caption(header: dict[str, Any], name: str) -> str:
    text = f"bench/memories/recall.py, {header['date'][:10]}, torch {header['versions']['torch']}"
    if name != "cost":
        return text + ", float32"
    busy = header["cores busy with others"]
    text += f"; {header['cpu']}, {header['threads']} thread, hidden 256, 4 heads, b 1, float32"
    return text + (
        f"\nothers kept {busy:g} cores busy: times to be measured again on a quiet machine"
        if busy and busy > 0.1
        else ""
    )


if __name__ == "__main__":
    for path in draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])):
        print(f"wrote {path}")

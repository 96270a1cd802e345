"""Functions that the lessons' pictures share: small panels, matrices in colours, lines in each mixer's style."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lineate.figures import label_of, line_of, signed_map

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 7.0, 2.7
"""Inches of a picture with one row of panels."""


def panels(count: int, **options: Any) -> tuple["Figure", list["Axes"]]:
    """Return a figure with panels side by side."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(WIDTH, HEIGHT), squeeze=False, **options)
    return figure, list(axes[0])


def matrices(shown: Mapping[str, Tensor], ticks: Sequence[str] = ()) -> "Figure":
    """Draw matrices side by side, 0 white, positive blue, negative orange, in one scale; the titles are the keys."""
    figure, axes = panels(len(shown))
    most = max(float(x.abs().max()) for x in shown.values())
    for each, (title, x) in zip(axes, shown.items(), strict=True):
        each.imshow(x.numpy(), cmap=signed_map(), vmin=-most, vmax=most, interpolation="nearest")
        each.set_title(title, fontsize=10)
        each.grid(visible=False)
        each.set_xticks(range(len(ticks)), ticks)
        each.set_yticks(range(len(ticks)), ticks)
    return figure


def rule_lines(axes: "Axes", x: Sequence[float], lines: Mapping[str, Sequence[float]]) -> None:
    """Draw a line for each mixer, by its name, in its own colour and style."""
    for name, y in lines.items():
        axes.plot(x, y, label=label_of(name), **{**line_of(name), "marker": ""})

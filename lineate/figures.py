"""The style of all figures, and the name, colour and marker of each mixer in them, from the registry."""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineate.layers import MixerKind, kinds

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
"""What a figure can be saved as."""

FIGURE_STYLE: dict[Any, Any] = {
    "figure.dpi": 110,
    "savefig.dpi": 110,
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.framealpha": 0.9,
    "legend.edgecolor": "none",
    "legend.fontsize": 9.5,
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "lineate",
}


def kind_named(name: str) -> MixerKind:
    """Return the row of a mixer by its name in numbers and files, such as "gated_delta_rule"."""
    for kind in kinds():
        if kind.name == name:
            return kind
    raise ValueError(f"rule must be one of {', '.join(kind.name for kind in kinds())}, got {name!r}")


def label_of(name: str) -> str:
    """Return a mixer's name for people."""
    return kind_named(name).label


def narrow_label_of(name: str) -> str:
    """Return a mixer's name for a narrow column or title, without the word attention."""
    kind = kind_named(name)
    return (kind.short_label or kind.label).removesuffix(" attention")


def line_of(name: str) -> dict[str, Any]:
    """Return how matplotlib plots a mixer's line: its colour, marker and line style."""
    look = kind_named(name).look
    return {"color": look.color, "marker": look.marker, "linestyle": look.line}


@contextmanager
def styled() -> Iterator[None]:
    """Draw, without a screen, in the style of all figures: at most 8 inches wide, which are 1200 dots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({**FIGURE_STYLE, "figure.dpi": 150, "savefig.dpi": 150}):
        yield


def wrapped(title: str, width: int = 42) -> str:
    """Return a title in lines that fit above a panel of half the width of a figure, at 11.5 points."""
    return textwrap.fill(title, width)


def signed_map() -> "Colormap":
    """Return colours for numbers of both signs that differ in grey as well.

    0 is white, positive numbers go to dark blue, negative ones to a light orange.
    """
    from matplotlib.colors import LinearSegmentedColormap

    stops = ((0.0, "#C75B00"), (0.25, "#F5A742"), (0.5, "#FFFFFF"), (0.75, "#4A83BF"), (1.0, "#04204F"))
    return LinearSegmentedColormap.from_list("signed", stops)


def save_figure(figure: "Figure", out: Path, name: str, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write NAME.png and NAME.svg (or those asked for) into the folder, then close the figure."""
    from io import BytesIO

    from matplotlib import pyplot as plt
    from PIL import Image  # matplotlib needs it too

    paths = []
    for kind in formats:
        paths.append(out / f"{name}.{kind}")
        if kind == "svg":
            figure.savefig(paths[-1], metadata={"Date": None})
        else:
            drawn = BytesIO()
            figure.savefig(drawn, format="png")
            Image.open(drawn).convert("RGB").quantize(256).save(paths[-1], optimize=True)  # a third of the bytes
        figure.set_layout_engine("none")  # the layout computed for one format also fits the next
    plt.close(figure)
    return paths

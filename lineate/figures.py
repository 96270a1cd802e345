"""How all figures look: one colour, marker and line per rule, safe for colour-blind readers and told apart in grey."""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
"""What a figure can be saved as."""

COLORS = {
    "linear_attention": "#E69F00",
    "gated_linear_attention": "#56B4E9",
    "delta_rule": "#009E73",
    "gated_delta_rule": "#CC79A7",
    "kimi_delta_attention": "#D55E00",
    "softmax_attention": "#444444",
    "ttt_linear": "#0072B2",
    "ttt_mlp": "#882255",
    "titans": "#999933",
    "lact": "#AA4499",
    "least_squares": "#332288",
}
MARKERS = {
    "linear_attention": "o",
    "gated_linear_attention": "s",
    "delta_rule": "^",
    "gated_delta_rule": "D",
    "kimi_delta_attention": "*",
    "softmax_attention": "x",
    "ttt_linear": "v",
    "ttt_mlp": "P",
    "titans": "<",
    "lact": ">",
    "least_squares": "h",
}
LINES: dict[str, Any] = {
    "linear_attention": "-",
    "gated_linear_attention": "--",
    "delta_rule": "-.",
    "gated_delta_rule": ":",
    "kimi_delta_attention": (0, (6, 1, 1, 1, 1, 1)),
    "softmax_attention": (0, (1, 1)),
    "ttt_linear": (0, (5, 3)),
    "ttt_mlp": (0, (3, 3)),
    "titans": (0, (8, 2)),
    "lact": (0, (3, 1, 1, 3)),
    "least_squares": (0, (2, 4)),
}
LETTER_RULES = {
    "L": "linear_attention",
    "R": "gated_linear_attention",
    "D": "delta_rule",
    "G": "gated_delta_rule",
    "K": "kimi_delta_attention",
    "A": "softmax_attention",
    "M": "softmax_attention",
    "T": "ttt_linear",
    "P": "ttt_mlp",
    "N": "titans",
    "C": "lact",
    "E": "least_squares",
}
"""The rule of a pattern's letter, as COLORS and MARKERS name it."""

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
    """Return colours for numbers of both signs, told apart in grey.

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
        figure.set_layout_engine("none")  # what was found for one format is right for the next
    plt.close(figure)
    return paths

"""Half-lives of a model in tokens, ln 2 / -log_decay, of every head or channel, layer by layer.

A decay is computed from every token, so a head has many half-lives on a text; their median and quartiles are kept.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lineate.explore.pictures import Numbers, Picture, PictureOptions, rounded
from lineate.explore.subject import Subject, Trace, open_subject, trace
from lineate.layers import MixerKind, kinds
from lineate.rule import rule_named
from lineate.torch_ops.tracing import cpu_by_default

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOKENS_READ = 512
LONGEST_HALF_LIFE = 1e9
"""The largest half-life: a decay of 1 never forgets, and JSON has no infinity."""


@cpu_by_default
def compute(options: PictureOptions) -> Numbers:
    """Return quartiles over the tokens of a text, for every layer that forgets."""
    if options.tokens is not None and options.tokens < 2:
        raise ValueError(f"--tokens must be at least 2 for forgetting, got {options.tokens}")
    subject = open_subject(options)
    letters = subject.config.letters
    _check(subject, any(_may_forget(kind) for kind in subject.config.mixer_kinds()))
    ids, _ = subject.read(options, TOKENS_READ)
    layers = [_layer(found) for found in trace(subject.model, ids) if found.log_decay is not None]
    _check(subject, bool(layers))
    return {
        "units": {"half_life": "tokens", "layer": "counted from 0"},
        "model": subject.name, "letters": "".join(letters), "tokens": ids.shape[1], "layers": layers,
    }  # fmt: skip


def _may_forget(kind: MixerKind) -> bool:
    """Whether a mixer can be traced, and its rule, if it is one of the equation's, has a decay."""
    rule = rule_named(kind.rule or kind.name)
    return kind.trace is not None and (rule is None or rule.decays != ("none",))


def _check(subject: Subject, forgets: bool) -> None:
    if not forgets:
        *most, last = (kind.letter for kind in kinds() if _may_forget(kind))
        found = "".join(dict.fromkeys(subject.config.letters))
        raise ValueError(
            f"forgetting needs a layer of {', '.join(most)} or {last}, and {subject.name} has only {found}; "
            "choose another model or pattern"
        )


def _layer(found: Trace) -> dict[str, Any]:
    """Return the half-lives `heads channels` of one layer; a decay per head has one channel."""
    assert found.log_decay is not None
    decay = found.log_decay.float()
    decay = decay.unsqueeze(-1) if decay.dim() == 2 else decay  # t hv k
    points = torch.tensor((0.25, 0.5, 0.75), device=decay.device)
    quarter, median, three_quarters = rounded(half_life(decay.quantile(points, dim=0)))
    return {
        "layer": found.layer, "letter": found.letter, "rule": found.rule,
        "decay": "per head" if found.log_decay.dim() == 2 else "per channel",
        "half_life_quarter": quarter, "half_life_median": median, "half_life_three_quarters": three_quarters,
    }  # fmt: skip


def half_life(log_decay: Tensor) -> Tensor:
    """Return the tokens after which half is left.

    It grows with log_decay, so that quantiles of one are quantiles of the other.
    """
    return (math.log(2) / -log_decay).clamp(max=LONGEST_HALF_LIFE).where(log_decay < 0, LONGEST_HALF_LIFE)


def draw(numbers: Numbers) -> "Figure":
    """Draw heads over depth above; below, where decay is per channel, the channels of every head from short to long."""
    from matplotlib import pyplot as plt

    layers = numbers["layers"]
    channels = [layer for layer in layers if layer["decay"] == "per channel"]
    ratios = (1.25, 1) if channels else (1,)
    figure, panels = plt.subplots(
        len(ratios), 1, figsize=(8, 8 if channels else 4.6), height_ratios=ratios, squeeze=False
    )  # fmt: skip
    _draw_heads(panels[0, 0], numbers)
    if channels:
        _draw_channels(figure, panels[1, 0], channels)
    return figure


def _draw_heads(axes: "Axes", numbers: Numbers) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    from lineate.figures import kind_named, label_of

    legend: dict[str, Any] = {}
    medians = {}
    for layer in numbers["layers"]:
        rule, heads, count = layer["rule"], layer["half_life_median"], len(layer["half_life_median"])
        look = kind_named(rule).look
        size = 6 if len(numbers["letters"]) * count <= 64 else 4 - 2 * (count > 8)
        x = [layer["layer"] + 0.7 * ((head + 0.5) / count - 0.5) for head in range(count)]
        if layer["decay"] == "per head":
            names = ("half_life_quarter", "half_life_median", "half_life_three_quarters")
            low, middle, high = (tuple(own[0] for own in layer[name]) for name in names)
        else:
            low, middle, high = zip(*map(_quartiles, heads), strict=True)
            axes.vlines(x, list(map(min, heads)), list(map(max, heads)), look.color, linewidth=1, zorder=1)
        axes.vlines(x, low, high, look.color, linewidth=size, alpha=0.45, zorder=2)
        (legend[rule],) = axes.plot(
            x, middle, color=look.color, marker=look.marker, markersize=size, linestyle="none",
            markeredgecolor="black", markeredgewidth=0.5, zorder=3,
        )  # fmt: skip
        medians[layer["layer"]] = _quartiles([x for own in heads for x in own])[1]
    axes.axhline(numbers["tokens"], color="gray", linewidth=1, linestyle="--", zorder=0)
    axes.annotate(
        f"length of the text: {numbers['tokens']}", (0.995, numbers["tokens"]), xycoords=("axes fraction", "data"),
        xytext=(0, 3), textcoords="offset points", ha="right", fontsize="small", color="#555555",
    )  # fmt: skip
    axes.set_yscale("log")
    bottom, top = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if top < 100 * bottom else (1,)))
    axes.yaxis.set_major_formatter(lambda tick, _: number(tick))
    axes.yaxis.set_minor_formatter(NullFormatter())
    letters = numbers["letters"]
    every = -(-len(letters) // 16)
    axes.set_xticks(range(0, len(letters), every), [f"{n}\n{letters[n]}" for n in range(0, len(letters), every)])
    axes.grid(axis="x", visible=False)
    axes.set(xlim=(-0.6, len(letters) - 0.4), xlabel="layer and its letter", ylabel="half-life, tokens")
    shortest, longest = min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)
    said = f"median {number(medians[shortest])} tokens in layer {shortest}"
    if shortest != longest:
        said += f", {number(medians[longest])} in layer {longest}"
    axes.set_title(f"Half-lives, {numbers['model']}:\n{said}", parse_math=False)
    words = {
        "per head": "a decay per head: median, quartiles over the text",
        "per channel": "per channel: median, quartiles and range over the channels",
    }
    decays = {layer["rule"]: layer["decay"] for layer in numbers["layers"]}
    labels = [f"{label_of(rule)}, {words[decays[rule]]}" for rule in legend]
    axes.legend(legend.values(), labels, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=1)


def _draw_channels(figure: "Figure", axes: "Axes", layers: list[dict[str, Any]]) -> None:
    from matplotlib.colors import LogNorm

    rows = [sorted(own) for layer in layers for own in layer["half_life_median"]]
    lowest, highest = min(map(min, rows)), max(map(max, rows))
    image = axes.imshow(
        rows, aspect="auto", cmap="cividis", interpolation="nearest",
        norm=LogNorm(lowest, max(highest, 1.01 * lowest)), extent=(0, 100, len(rows), 0),
    )  # fmt: skip
    edges = [0]
    for layer in layers:
        edges.append(edges[-1] + len(layer["half_life_median"]))
    for edge in edges[1:-1]:
        axes.axhline(edge, color="white", linewidth=2)
    every = -(-len(layers) // 12)
    shown = range(0, len(layers), every)
    axes.set_yticks([(edges[n] + edges[n + 1]) / 2 for n in shown], [f"layer {layers[n]['layer']}" for n in shown])
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    axes.set_xlabel("channels of a head, shortest half-life first, %")
    spread = max(rows, key=lambda row: row[-1] / row[0])
    axes.set_title(f"One row a head: the channels of one head differ\nby up to {number(spread[-1] / spread[0])} times")
    bar = figure.colorbar(image, ax=axes)
    bar.set_label("half-life, tokens")
    bar.ax.yaxis.set_major_formatter(lambda tick, _: number(tick))
    bar.ax.minorticks_off()


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    quarter, median, three_quarters = torch.tensor(values).quantile(torch.tensor((0.25, 0.5, 0.75))).tolist()
    return quarter, median, three_quarters


def number(value: float) -> str:
    """Return a number with two significant digits."""
    return "1e9 or more" if value >= LONGEST_HALF_LIFE else f"{float(f'{value:.2g}'):g}"


PICTURE = Picture(
    "forgetting",
    "Half-lives over depth",
    "Half-lives in tokens of every head, and of every channel, over the model's layers.",
    compute,
    draw,
    uses=("model", "pattern", "text", "tokens", "seed"),
)

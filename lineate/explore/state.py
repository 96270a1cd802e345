"""The picture "state": the matrix S of every rule as pairs are written, corrected and forgotten, and a model's S."""

from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lineate.call import Options
from lineate.explore.memories import FIXED_SIZE, HAND_MADE_CHANNELS, write
from lineate.explore.pictures import Numbers, Picture, PictureOptions, rounded
from lineate.explore.subject import Trace, choose_head, choose_layer, open_subject, shown, trace, wants_model
from lineate.explore.words import label_tokens
from lineate.figures import label_of, signed_map
from lineate.forms.general import general_row
from lineate.rule import rule_named
from lineate.torch_ops.tracing import cpu_by_default

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

EVENTS = ("write A", "write B", "A again,\nnew value", "forget A,\nwrite C")
CHANNEL = {"A": 1, "B": 5, "C": 3}
"""The key channel of each key; the first half is what Kimi Delta Attention forgets."""
FADE_TO_REPLACE = 0.5
"""The decay with which gated linear attention makes room for A's new value."""
TOKENS_READ, MOST_TOKENS_READ = 192, 2048
"""The default and the largest number of tokens that the model reads."""
LABELLED, LINE = 64, 460.0
"""Up to how many tokens are labelled below the norms, and the points that all of their labels share."""
STEADY = 1.15
"""A norm that changes by less than this factor has levelled off."""


@cpu_by_default
def compute(options: PictureOptions) -> Numbers:
    """Return the hand-made memories (without --model) and a model's layer along a text (unless --quick alone)."""
    numbers: Numbers = {}
    if options.model is None:
        numbers["rules"] = write_four()
    if wants_model(options):
        numbers["model"] = watch_model(options)
    return numbers


def write_four() -> Numbers:
    """Return S after each of the four events, for every rule and as it should be."""
    values = {name: torch.zeros(HAND_MADE_CHANNELS) for name in ("A", "A new", "B", "C")}
    for name, channels in {"A": (0, 1, 2), "A new": (4, 5), "B": (2, 3, 6), "C": (1, 7)}.items():
        values[name][list(channels)] = 1.0
    tokens = [("A", "A"), ("B", "B"), ("A", "A new"), ("C", "C")]
    wanted, frames = torch.zeros(HAND_MADE_CHANNELS, HAND_MADE_CHANNELS), []
    for index, (key, value) in enumerate(tokens):
        wanted = wanted.clone()
        wanted[CHANNEL[key]] = values[value]
        if index == 3:
            wanted[CHANNEL["A"]] = 0
        frames.append(wanted)
    states: dict[str, list[Tensor]] = {}
    for rule in FIXED_SIZE:
        memory: Any = None
        states[rule] = []
        for index, (key, value) in enumerate(tokens):
            decay = 0.0 if index == 3 else FADE_TO_REPLACE if index == 2 and rule == "gated_linear_attention" else 1.0
            k = torch.eye(HAND_MADE_CHANNELS)[CHANNEL[key]].view(1, 1, 1, HAND_MADE_CHANNELS)
            memory = write(
                rule,
                memory,
                k,
                values[value].view(1, 1, 1, HAND_MADE_CHANNELS),
                torch.tensor([decay]),
                slice(0, HAND_MADE_CHANNELS // 2),
            )
            states[rule].append(memory[0, 0])
    return {
        "units": {"off": "Frobenius norm of S - wanted"},
        "events": list(EVENTS),
        "keys": CHANNEL,
        "wanted": [frame.tolist() for frame in frames],
        "states": {rule: [rounded(frame) for frame in each] for rule, each in states.items()},
        "off": {
            rule: [round(float((x - y).norm()), 4) for x, y in zip(each, frames, strict=True)]
            for rule, each in states.items()
        },
    }


def watch_model(options: PictureOptions) -> Numbers:
    """Return S of one head along a text, and the write, correction and forgetting of every token."""
    subject = open_subject(options)
    layer = choose_layer(subject, options)
    head = choose_head(subject, layer, options)
    ids, words = subject.read(options, 96 if options.quick else TOKENS_READ, MOST_TOKENS_READ)
    found = trace(subject.model, ids, [layer])[0].head(head)
    states, written, corrected, forgotten = steps(found)
    count = len(words)
    places = sorted({max(1, round(count ** (n / 4))) for n in range(5)})
    order = list(range(states.shape[1]))
    if found.log_decay is not None and found.log_decay.dim() == 3:
        order = found.log_decay[:, 0].mean(0).argsort(descending=True).tolist()
    return {
        "units": {"written, corrected, forgotten, norm": "Frobenius norm; written and corrected: of each write"},
        "name": subject.name,
        "trained": subject.trained,
        "layer": layer,
        "letter": found.letter,
        "rule": found.rule,
        "head": head,
        "tokens": count,
        "writes": found.writes,
        "words": words if subject.encode is not None else None,
        "channel_order": order,
        "frames": [
            {"after_tokens": n, "text": shown("".join(words[:n])), "state": rounded(states[n - 1][order])}
            for n in places
        ],
        "norm": rounded(states.norm(dim=(1, 2))),
        "written": rounded(written),
        "corrected": rounded(corrected) if found.row.corrects else None,
        "forgotten": rounded(forgotten) if found.log_decay is not None else None,
    }


def steps(found: Trace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the states `t k v` of one head, norms of its n t writes, of their erases, and of what tokens forget `t`.

    A write is k u^T and its erase d (S'^T e)^T in the letters of the general row, beta k v^T and beta k (S'^T k)^T in
    the rules of one key. S - S' is forgotten before the first write of a token.
    """
    n, row = found.writes, general_row(found.inputs, Options(found.row, 1.0))
    k, u, e, d = (x[0, :, 0] for x in (row.k, row.u, row.e, row.d))  # m k|v
    if not found.row.corrects:
        d = torch.zeros_like(d)
    decay = None if row.log_decay is None else row.log_decay[0, :, 0].exp()  # m 1|k
    state = torch.zeros(k.shape[1], u.shape[1], dtype=u.dtype)
    states, written, erased, forgotten = [], [], [], []
    for i in range(len(k)):
        if i % n == 0:
            kept = state if decay is None else decay[i][:, None] * state
            forgotten.append((state - kept).norm())
            state = kept
        known = state.T @ e[i]
        written.append(k[i].norm() * u[i].norm())
        erased.append(d[i].norm() * known.norm())
        state = state - torch.outer(d[i], known) + torch.outer(k[i], u[i])
        if (i + 1) % n == 0:
            states.append(state)
    return torch.stack(states), torch.stack(written), torch.stack(erased), torch.stack(forgotten)


def draw(numbers: Numbers) -> "Figure":
    """Draw the hand-made memories above and the model below, or the one that there is."""
    from matplotlib import pyplot as plt

    parts = [part for part in ("rules", "model") if part in numbers]
    heights = {"rules": 8.6, "model": 5.2}
    figure = plt.figure(figsize=(8, sum(heights[part] for part in parts)))
    places = figure.subfigures(len(parts), 1, height_ratios=[heights[part] for part in parts], squeeze=False)[:, 0]
    for part, place in zip(parts, places, strict=True):
        (_draw_rules if part == "rules" else _draw_model)(place, numbers[part])
    return figure


def _draw_rules(figure: "SubFigure", found: Numbers) -> None:
    rows: dict[str, Any] = {"wanted": found["wanted"], **found["states"]}
    panels = figure.subplots(len(rows), len(EVENTS) + 1, width_ratios=(1.75, *[1] * len(EVENTS)))
    for row, (rule, frames) in zip(panels, rows.items(), strict=True):
        row[0].axis("off")
        label = "what is wanted" if rule == "wanted" else label_of(rule)
        row[0].text(0, 0.66, label, fontsize=12, fontweight="bold", va="center", transform=row[0].transAxes)
        text = "the newest value of every\nkey; A gone in the end" if rule == "wanted" else formula(rule)
        row[0].text(0, 0.54, text, fontsize=11, va="top", linespacing=1.4, transform=row[0].transAxes)
        for index, (axes, frame) in enumerate(zip(row[1:], frames, strict=True)):
            _cells(axes, frame, 1.0)
            keys = dict(list(found["keys"].items())[: 3 if index == 3 else 2 if index else 1])
            axes.set_yticks(list(keys.values()), list(keys), fontsize=10)
            axes.set_xticks([])
            axes.tick_params(length=0)
            if rule == "wanted":
                axes.set_title(f"{index + 1}. {EVENTS[index]}", fontsize=11.5, loc="center")
                axes.set_xlabel(" ", fontsize=10.5)
                continue
            off = found["off"][rule][index]
            axes.set_xlabel("as wanted" if off < 0.005 else f"off by {off:.1f}", fontsize=10.5, labelpad=3)
            if off >= 0.005:
                axes.xaxis.label.set_fontweight("bold")
    exact = [label_of(rule) for rule, off in found["off"].items() if off[-1] < 0.005]
    if exact:
        title = f"After four tokens only {' and '.join(exact)} holds what is wanted"
    else:
        title = "After four tokens no rule holds exactly what is wanted"
    figure.suptitle(
        f"{title}\nS after each token. Rows: key channels, columns: value channels. Dark: 1. a: forget gate",
        fontsize=12.5,
    )


def formula(name: str) -> str:
    """Return the formula of a token's effect on S under a rule, with beta = 1."""
    rule = rule_named(name)
    assert rule is not None
    kept = {"none": "S", "head": r"a\,S", "channel": r"\mathrm{Diag}(a)\,S"}[rule.decays[0]]
    if not rule.corrects:
        return rf"${kept} + k v^\top$"
    if kept == "S":
        return r"$S + k\,(v - S^\top k)^\top$"
    return rf"$S' = {kept}$" + "\n" + r"$S' + k\,(v - S'^\top k)^\top$"


def _cells(axes: "Axes", frame: list[list[float]], most: float) -> None:
    """Draw one matrix, with lines between the cells if they are few."""
    axes.imshow(frame, cmap=signed_map(), vmin=-most, vmax=most, interpolation="nearest", aspect="equal")
    axes.grid(False)
    axes.spines[["top", "right"]].set_visible(True)
    if len(frame) <= 16:
        for edge in range(1, len(frame)):
            axes.axhline(edge - 0.5, color="#DDDDDD", linewidth=0.5)
            axes.axvline(edge - 0.5, color="#DDDDDD", linewidth=0.5)


def _draw_model(figure: "SubFigure", found: Numbers) -> None:
    frames = found["frames"]
    grid = figure.add_gridspec(2, len(frames), height_ratios=(1, 1.05))
    most = max(max(map(abs, row)) for frame in frames for row in frame["state"]) or 1.0
    order = ",\nslow to forget on top" if found["channel_order"] != sorted(found["channel_order"]) else ""
    for index, frame in enumerate(frames):
        axes = figure.add_subplot(grid[0, index])
        _cells(axes, frame["state"], most)
        axes.set_xticks([])
        axes.set_yticks([])
        plural = "s" if frame["after_tokens"] > 1 else ""
        if index == len(frames) - 1:
            axes.annotate(f"from -{most:.2g} (orange)\nto {most:.2g} (blue)", (1.04, 0.5), xycoords="axes fraction",
                          rotation=90, va="center", fontsize=9)  # fmt: skip
        axes.set_title(f"after {frame['after_tokens']} token{plural}", fontsize=10.5, loc="center")
        axes.set_xlabel(frame["text"], fontsize=9.5, family="monospace", parse_math=False)
        if index == 0:
            axes.set_ylabel(f"key channels{order}", fontsize=9)
    axes = figure.add_subplot(grid[1, :])
    n = found.get("writes", 1)  # files of earlier versions do not have it
    each = "each write of the token" if n > 1 else "the token"
    for name, label, color, line in (
        ("norm", "S itself", "#000000", "-"),
        ("written", f"written by {each}", "#0072B2", "-"),
        ("corrected", "taken back of what its key held", "#D55E00", "--"),
        ("forgotten", "forgotten before it", "#CC79A7", ":"),
    ):
        if found[name] is not None:
            width = 2.4 if name in ("norm", "forgotten") else 1.4
            every = n if name in ("written", "corrected") else 1
            places = [(i + 1) / every for i in range(len(found[name]))]  # the last write of a token is at the token
            axes.plot(places, found[name], color=color, linestyle=line, linewidth=width, label=label,
                      marker="o" if len(places) == 1 else None)  # fmt: skip
    axes.set_yscale("log")
    axes.set(xlabel="tokens read", ylabel="Frobenius norm", xlim=(1 / n, max(2, found["tokens"])))
    if 1 < found["tokens"] <= LABELLED and found.get("words"):
        label_tokens(axes, found["words"], LINE)
    axes.set_ylim(max(found["norm"]) / 1000 or 1e-3, None)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(ncols=2, loc="lower right")
    figure.suptitle(
        f"{found['name']}: the state of layer {found['layer']}, head {found['head']} ({label_of(found['rule'])})\n"
        f"{how_it_goes(found['norm'])}",
        fontsize=12.5, parse_math=False,
    )  # fmt: skip


def how_it_goes(norm: list[float]) -> str:
    """Describe whether the norm grows, falls or stays from the second quarter of a text to its last quarter."""
    quarter = len(norm) // 4
    if not quarter:
        return f"norm {norm[-1]:.3g} after {len(norm)} token{'s' if len(norm) > 1 else ''}"
    before, last = median(norm[quarter : 2 * quarter]), median(norm[-quarter:])
    how = "still grows" if last > STEADY * before else "falls" if before > STEADY * last else "has levelled off"
    return f"{how}: norm {before:.3g} in the second quarter, {last:.3g} in the last of {len(norm)} tokens"


PICTURE = Picture(
    "state",
    "The state as tokens are written, corrected and forgotten",
    "S of every rule after the same four tokens, and of a model's head along a text.",
    compute,
    draw,
    uses=("model", "pattern", "text", "layer", "head", "tokens", "seed", "quick"),
)

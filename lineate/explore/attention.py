"""The picture "attention": the weight of each value in each token's output, for every rule and softmax attention."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lineate
from lineate.explore.memories import DEMO_RULES, HAND_MADE_CHANNELS
from lineate.explore.pictures import Numbers, Picture, PictureOptions, rounded
from lineate.explore.subject import Trace, choose_head, choose_layer, open_subject, shown, trace, wants_model
from lineate.explore.words import label_tokens
from lineate.figures import label_of, signed_map
from lineate.rule import ONE_KEY_RULES, rule_named
from lineate.torch_ops.tracing import cpu_by_default

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

SHARPNESS = 8.0
"""Sharpness of softmax attention on keys of length 1."""
FADE_A_TOKEN = 0.8
"""The share of its memory that gated linear attention keeps at each token; so it prefers new tokens."""
WRITES = ("A", "B", "C", "A'", "D")
READS = ("?A", "?B", "?C", "?D")
TOKENS_READ, MOST_TOKENS_READ = 32, 256
"""The default and the largest number of tokens that the model reads."""
PANEL = 215.0
"""The least length in points of the sides of a model's panel whose tokens have labels."""


@cpu_by_default
def compute(options: PictureOptions) -> Numbers:
    """Return the numbers of the hand-made tokens (without --model) and of a model's layer (unless --quick alone)."""
    numbers: Numbers = {}
    if options.model is None:
        numbers["rules"] = read_all()
    if wants_model(options):
        numbers["model"] = read_model(options)
    return numbers


def read_all() -> Numbers:
    """Return the attention matrices of five writes and four reads under every rule.

    C's key is like B's (cosine 0.6), A' has A's key, and the gates close at D.
    """
    axes = torch.eye(HAND_MADE_CHANNELS)
    keys = {"A": axes[0], "B": axes[4], "C": 0.6 * axes[4] + 0.8 * axes[5], "A'": axes[0], "D": axes[6]}
    keys |= {read: keys[read[1]] for read in READS}
    names = (*WRITES, *READS)
    q = torch.stack([keys[name] for name in names])[:, None]  # t 1 k
    writes = torch.tensor([name in WRITES for name in names])
    at = names.index("D")
    per_channel = torch.zeros(len(names), 1, HAND_MADE_CHANNELS)
    per_channel[at, :, : HAND_MADE_CHANNELS // 2] = -torch.inf
    per_head = torch.zeros(len(names), 1)
    per_head[at] = -torch.inf
    fading = torch.full((len(names), 1), FADE_A_TOKEN).log()
    beta = writes.float()[:, None]
    k = q * writes[:, None, None]  # tokens that only read write nothing
    matrices = {}
    for rule in ONE_KEY_RULES:
        closing = {"none": None, "head": per_head, "channel": per_channel}[rule.decays[0]]
        decay = closing if rule.corrects or closing is None else fading
        matrices[rule.name] = _matrix(q, k, decay, beta if rule.corrects else None, scale=1.0)
    matrices["softmax_attention"] = _softmax(q, q, SHARPNESS, writes)
    return {
        "units": {"matrices": "weight of a value in what is read"},
        "tokens": list(names),
        "writes": len(WRITES),
        "matrices": {rule: rounded(matrix) for rule, matrix in matrices.items()},
    }


def read_model(options: PictureOptions) -> Numbers:
    """Return the matrices of every rule on one head's q, k and gates; a gate that the layer lacks stays open."""
    subject = open_subject(options)
    layer = choose_layer(subject, options)
    head = choose_head(subject, layer, options)
    ids, words = subject.read(options, 24 if options.quick else TOKENS_READ, MOST_TOKENS_READ)
    found = trace(subject.model, ids, [layer])[0].head(head)
    matrices, same = _all_rules(found)
    return {
        "units": {"matrices": "weight of a value in what is read"},
        "name": subject.name,
        "layer": layer,
        "letter": found.letter,
        "rule": found.name,
        "writes": found.writes,
        "head": head,
        "words": words,
        "words_are_text": subject.encode is not None,
        "text": shown("".join(words), 60),
        "same": same,
        "matrices": {rule: rounded(matrix) for rule, matrix in matrices.items()},
        "mean_distance_tokens": {rule: round(_distance(matrix), 2) for rule, matrix in matrices.items()},
    }


def _all_rules(found: Trace) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return every rule's matrix on the same q and k, and which matrix equals another because a gate is missing."""
    decay = found.log_decay
    per_channel = decay if decay is not None and decay.dim() == 3 else None
    same: dict[str, str] = {}
    if decay is None:
        plain = {rule.corrects: rule.name for rule in ONE_KEY_RULES if rule.decays == ("none",)}
        same = {rule.name: plain[rule.corrects] for rule in ONE_KEY_RULES if "head" in rule.decays}
    if per_channel is None:
        same["kimi_delta_attention"] = "gated_delta_rule" if decay is not None else "delta_rule"
    own = {} if found.name in DEMO_RULES else {found.name: rule_matrix(found, found.op)}
    return own | {rule: rule_matrix(found, rule) for rule in DEMO_RULES}, same


def rule_matrix(found: Trace, rule: str) -> Tensor:
    """Return the matrix `t m` of one head under a rule, on the head's own q, k and gates (see Trace.under).

    m is t, or n t for n writes a token. In gated_delta_rule_2 what is read are values times `write`.
    """
    channels, n = found.k.shape[-1], found.writes
    if rule == "softmax_attention":
        q, k = (F.normalize(x, dim=-1) for x in (found.q, found.keys))
        return _softmax(q, k, channels**0.5, None)
    one = found.under(rule)
    call: dict[str, Any] = {name: x for name, x in one.inputs.given().items() if name not in ("v", "write")}
    matrix = lineate.attention_matrix(**call, scale=channels**-0.5)[0, 0].flatten(1)
    if one.one_by_one:
        matrix = matrix[n - 1 :: n]
    if found.rule == "linear_attention" and not one.row.corrects:  # the layer divides by q . sum of keys, a row's sum
        return matrix / matrix.sum(-1, keepdim=True)
    return matrix


def _note(name: str) -> str:
    """Return the notes on the panel of hand-made tokens."""
    rule = rule_named(name)
    if rule is None:
        return "shares its weight among all"
    if not rule.corrects:
        return "reads all that matches" if rule.decays == ("none",) else "fades with distance"
    forgotten = {"none": None, "head": "all", "channel": "A alone"}[rule.decays[0]]
    return "a new value replaces the old" if forgotten is None else f"... and at D forgets {forgotten}"


def _matrix(q: Tensor, k: Tensor, log_decay: Tensor | None, beta: Tensor | None, scale: float) -> Tensor:
    """Return the matrix `t t` of one head from tensors `t 1 ...`."""
    decay, rate = (None if x is None else x[None] for x in (log_decay, beta))
    return lineate.attention_matrix(q[None], k[None], decay, rate, scale=scale)[0, 0]


def _softmax(q: Tensor, k: Tensor, scale: float, writes: Tensor | None) -> Tensor:
    """Return the causal softmax over the keys that are written, `t m`; m is a multiple of t."""
    count = len(q)
    seen = torch.ones(count, count, dtype=torch.bool).tril().repeat_interleave(len(k) // count, 1)
    seen = seen if writes is None else seen & writes
    return (scale * q[:, 0] @ k[:, 0].T).masked_fill(~seen, -torch.inf).softmax(-1)


def _distance(matrix: Tensor) -> float:
    """Return how many tokens back the reads go on average, weighted by the size of their weights."""
    count, writes = matrix.shape
    back = torch.arange(count)[:, None] - torch.arange(writes) // (writes // count)
    return float((matrix.abs() * back).sum() / matrix.abs().sum().clamp(min=1e-12))


def draw(numbers: Numbers) -> "Figure":
    """Draw the hand-made tokens above and the model below, or the one that there is."""
    from matplotlib import pyplot as plt

    parts = [part for part in ("rules", "model") if part in numbers]
    heights = {"rules": 6.4, "model": _height(numbers["model"]) if "model" in numbers else 0.0}
    figure = plt.figure(figsize=(8, sum(heights[part] for part in parts)))
    places = figure.subfigures(len(parts), 1, height_ratios=[heights[part] for part in parts], squeeze=False)[:, 0]
    for part, place in zip(parts, places, strict=True):
        (_draw_rules if part == "rules" else _draw_model)(place, numbers[part])
    return figure


def _height(found: Numbers) -> float:
    """Return the inches of a model's part: two panels a row with labels, three without."""
    columns, inches = (2, 4.2) if _labelled(found) else (3, 3.2)
    rows = -(-len(found["matrices"]) // columns)
    return float(rows * inches)


def _labelled(found: Numbers) -> bool:
    """Whether the texts of the tokens are known; files of earlier versions do not have them."""
    return bool(found.get("words_are_text"))


def _panels(figure: "SubFigure", names: Sequence[str] = DEMO_RULES, columns: int = 3) -> dict[str, "Axes"]:
    panels = list(figure.subplots(-(-len(names) // columns), columns).flat)
    for unused in panels[len(names) :]:
        unused.set_visible(False)
    return dict(zip(names, panels, strict=False))


def _draw_rules(figure: "SubFigure", found: Numbers) -> None:
    names, writes = found["tokens"], found["writes"]
    for rule, axes in _panels(figure).items():
        matrix = [row[:writes] for row in found["matrices"][rule]]
        axes.imshow(matrix, cmap=signed_map(), vmin=-1, vmax=1, interpolation="nearest", aspect="auto")
        axes.grid(False)
        axes.spines[["top", "right"]].set_visible(True)
        axes.set_xticks(range(writes), names[:writes], fontsize=10.5)
        axes.set_yticks(range(len(names)), names, fontsize=10.5)
        axes.tick_params(length=0)
        axes.axhline(writes - 0.5, color="black", linewidth=1.2)
        axes.axvline(writes - 1.5, color="gray", linewidth=1, linestyle=":")
        for i, row in enumerate(matrix):
            for j, weight in enumerate(row):
                if j <= i and abs(weight) >= 0.05:
                    color = "white" if weight > 0.45 else "black"
                    text = "1" if f"{weight:.1f}" == "1.0" else f"{weight:.1f}".removeprefix("0")
                    axes.text(j, i, text, ha="center", va="center", fontsize=9.5, color=color)
        axes.set_title(label_of(rule), fontsize=12, fontweight="bold", pad=20)
        axes.text(0, 1.03, _note(rule), transform=axes.transAxes, fontsize=10)
    row, old, new = names.index("?A"), names.index("A"), names.index("A'")
    old_weights = {rule: found["matrices"][rule][row][old] for rule in ("linear_attention", "delta_rule")}
    new_weight = found["matrices"]["delta_rule"][row][new]
    figure.suptitle(
        f"Asked for A, linear attention still reads {old_weights['linear_attention']:.2g} of A's old value, DeltaNet "
        f"{old_weights['delta_rule']:.2g} of it\nand {new_weight:.2g} of the new one, A'. C's key is like B's (cosine "
        "0.6). At D gates close.",
        fontsize=12.5,
    )
    figure.supxlabel("whose value is read", fontsize=11.5)
    figure.supylabel("reading token (below the line: queries)", fontsize=11.5)


def _draw_model(figure: "SubFigure", found: Numbers) -> None:
    count, labelled, n = len(found["words"]), _labelled(found), found.get("writes", 1)
    for rule, axes in _panels(figure, list(found["matrices"]), 2 if labelled else 3).items():
        matrix: Any = torch.tensor(found["matrices"][rule])
        most = max(float(matrix.abs().flatten().quantile(0.995)), 1e-6)
        axes.imshow(matrix.tolist(), cmap=signed_map(), vmin=-most, vmax=most, interpolation="nearest", aspect="equal",
                    extent=(0.5, count + 0.5, count + 0.5, 0.5))  # fmt: skip
        at, value = (matrix < -0.2 * most).nonzero().T
        places = ((value + 0.5) / n + 0.5).tolist()
        axes.scatter(places, (at + 1).tolist(), s=(70 / count) ** 2, marker=".", color="black", linewidths=0)
        axes.grid(False)
        if labelled:
            label_tokens(axes, found["words"], PANEL, both=True)
        else:
            ticks = [1, *range(max(8, count // 4 // 8 * 8), count + 1, max(8, count // 4 // 8 * 8))]
            axes.set_xticks(ticks)
            axes.set_yticks(ticks)
        axes.set_title(label_of(rule), fontsize=12, fontweight="bold", pad=20)
        who = "its own rule; " if rule == found["rule"] else ""
        if rule == "gated_delta_rule" and "kimi_delta_attention" not in found["same"]:  # the decay is per channel
            who = "mean gate; "
        note = f"{who}looks back {found['mean_distance_tokens'][rule]:.1f} tokens"
        if rule in found["same"]:
            note = f"no gate here: as {label_of(found['same'][rule])}"
        axes.text(0, 1.03, note, transform=axes.transAxes, fontsize=10)
        axes.text(0.97, 0.95, f"dark: {most:.2g}", transform=axes.transAxes, fontsize=10, ha="right", va="top")
    distance = found["mean_distance_tokens"]
    figure.suptitle(
        f"{found['name']}, layer {found['layer']}, head {found['head']}: the same q, k and gates under every rule\n"
        f"its own rule looks back {distance[found['rule']]:.1f} tokens in the mean, softmax "
        f"{distance['softmax_attention']:.1f}",
        fontsize=12.5, parse_math=False,
    )  # fmt: skip
    several = "" if n == 1 else f", {n} writes each"
    how = f"token whose value is read{several} (blue: positive, dotted: negative; every panel has its own scale)"
    figure.supxlabel(f"{how}\n{found['text']}", fontsize=10.5, parse_math=False)
    figure.supylabel("token that reads", fontsize=11.5)


PICTURE = Picture(
    "attention",
    "What each token reads of each value",
    "The effective attention matrix of every rule and of softmax, on hand-made tokens and on a model's q, k, gates.",
    compute,
    draw,
    uses=("model", "pattern", "text", "layer", "head", "tokens", "seed", "quick"),
)

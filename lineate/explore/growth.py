"""The picture "growth": the size of the state over a long text, and the recall of the newest pairs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import linear_regression
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.explore.memories import FIXED_SIZE, RecallSetting
from lineate.explore.pictures import Numbers, Picture, PictureOptions
from lineate.explore.subject import Subject, Trace, choose_layer, open_subject, run_rule
from lineate.figures import kind_named, label_of, line_of, narrow_label_of, wrapped
from lineate.layers import kind_of
from lineate.rule import rule_named
from lineate.system.threads import one_thread
from lineate.torch_ops.tracing import cpu_by_default

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOKENS_WRITTEN, QUICK_TOKENS_WRITTEN = 100_000, 5_000
TOKENS_READ, QUICK_TOKENS_READ = 4096, 512
HALF_LIFE = 256.0
"""The half-life, in tokens, of the rules with one gate per head."""
HALF_LIVES = (16.0, 4096.0)
"""The half-lives of Kimi Delta Attention's fastest and slowest channel; the others are even in the logarithm."""
NEWEST = 16
"""How many of the newest pairs are recalled."""
PIECE = 4096
"""How many tokens are in memory at a time."""
SETTING = RecallSetting(key_dim=64, trials=4)
FLAT = 0.1
"""A state whose norm grows slower than t to this power, over the last decade, has levelled off."""


@cpu_by_default
def compute(options: PictureOptions) -> Numbers:
    """Return random pairs under every rule (without a model), or the linear layers of a model along a text."""
    if options.model is None:
        for name in ("pattern", "text", "layer"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name} needs a model that reads it; add --model, or leave it out")
        with one_thread():
            return grow_rules(options)
    return grow_model(options)


def grow_rules(options: PictureOptions) -> Numbers:
    """Return norms of S and recall errors of the newest pairs, at places that are even in the logarithm."""
    count = options.tokens or (QUICK_TOKENS_WRITTEN if options.quick else TOKENS_WRITTEN)
    if count < 10:
        raise ValueError(f"--tokens must be at least 10 to see growth, got {count}")
    setting = replace(SETTING, seed=options.seed)
    places = _places(count)
    states: dict[str, Tensor | None] = dict.fromkeys(FIXED_SIZE)
    norm: dict[str, list[float]] = {rule: [] for rule in FIXED_SIZE}
    error: dict[str, list[float]] = {rule: [] for rule in FIXED_SIZE}
    newest_k = newest_v = torch.zeros(0, setting.trials, setting.key_dim)
    for k, v, ends in stream_pairs(setting, places):
        newest_k, newest_v = (torch.cat((old, new))[-NEWEST:] for old, new in ((newest_k, k), (newest_v, v)))
        for rule in FIXED_SIZE:
            _, state = run_rule(add_gates(rule, k, v), states[rule])
            states[rule] = state
            if ends:
                norm[rule].append(float(state.norm(dim=(1, 2)).mean()))
                answers = torch.einsum("thk,hkv->thv", newest_k, state)
                error[rule].append(float((answers - newest_v).square().sum(-1).mean().sqrt()))
    return {
        "units": {"places": "tokens", "norm": "Frobenius norm", "error": "0 perfect, 1 like no answer"},
        "key_dim": setting.key_dim,
        "key_cosine": setting.similarity,
        "memories": setting.trials,
        "newest": NEWEST,
        "half_life_tokens": HALF_LIFE,
        "half_lives_tokens_per_channel": list(HALF_LIVES),
        "places": places,
        "norm": {rule: [float(f"{x:.4g}") for x in each] for rule, each in norm.items()},
        "error": {rule: [float(f"{x:.4g}") for x in each] for rule, each in error.items()},
    }


def _places(count: int) -> list[int]:
    """Return places from 1 to count, eight a decade."""
    steps = math.ceil(8 * math.log10(count))
    return sorted({round(count ** (n / steps)) for n in range(steps + 1)})


def stream_pairs(setting: RecallSetting, places: list[int]) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield keys and values `t memories dim` of length 1 in pieces, and whether a piece ends at a place.

    Two keys have a mean cosine of setting.similarity, as in memories.pairs, which cannot make one topic in pieces.
    """
    generator = setting.generator()
    heads, dim, share = setting.trials, setting.key_dim, setting.similarity
    shared = F.normalize(torch.randn(heads, dim, generator=generator), dim=-1)
    for start, end in pairwise([0, *sorted({*places, *range(PIECE, places[-1], PIECE)})]):
        own, values = (F.normalize(torch.randn(end - start, heads, dim, generator=generator), dim=-1) for _ in range(2))
        yield F.normalize(share**0.5 * shared + (1 - share) ** 0.5 * own, dim=-1), values, end in places


def add_gates(rule: str, k: Tensor, v: Tensor) -> Trace:
    """Return these pairs with the gates of a rule; beta is 1."""
    count, heads, dim = k.shape
    row = rule_named(rule)
    assert row is not None
    decay: Tensor | None = None
    if "head" in row.decays:
        decay = torch.full((count, heads), -math.log(2) / HALF_LIFE)
    elif "channel" in row.decays:
        fast, slow = (math.log10(x) for x in HALF_LIVES)
        half_lives = torch.logspace(fast, slow, dim)
        decay = (-math.log(2) / half_lives).expand(count, heads, dim)
    beta = torch.ones(count, heads) if "beta" in row.gates else None
    return Trace(0, "", rule, k, k, v, decay, beta, row)


@torch.no_grad()
def grow_model(options: PictureOptions) -> Numbers:
    """Return the norm of S, mean over heads, of every linear layer along a text, or of one layer."""
    subject = open_subject(options)
    letters = subject.config.letters
    layers = [choose_layer(subject, options)]
    if options.layer is None:
        layers = subject.pictured
    ids = _long_text(subject, options)
    places = _places(ids.shape[1])
    state = None
    mixers: dict[int, Any] = {n: subject.model.layers[n].mixer for n in layers}
    layers = [n for n, mixer in mixers.items() if any(spec.name == "memory" for spec in mixer.state_spec)]
    if not layers:
        raise ValueError(f"growth needs a layer whose state has a tensor 'memory', and {subject.name} has none")
    norm: dict[int, list[float]] = {n: [] for n in layers}
    for start, end in pairwise([0, *sorted({*places, *range(PIECE, places[-1], PIECE)})]):
        state = subject.model(ids[:, start:end], state=state, last_only=True).state
        if end in places:
            for n in layers:
                columns = getattr(mixers[n], "value_dim", None)  # without the column of key sums
                memory = state.layers[n]["memory"][0, ..., :columns]
                norm[n].append(float(f"{memory.norm(dim=(1, 2)).mean():.4g}"))
    return {
        "units": {"places": "tokens", "norm": "Frobenius norm, mean over heads"},
        "name": subject.name,
        "places": places,
        "layers": [{"layer": n, "rule": kind_of(letters[n]).name, "norm": norm[n]} for n in layers],
    }


def _long_text(subject: Subject, options: PictureOptions) -> Tensor:
    """Return the ids of the user's text, of the standard library's, or of random tokens."""
    tokens = options.tokens or (QUICK_TOKENS_READ if options.quick else TOKENS_READ)
    if options.text is None and subject.encode is not None:
        from lineate.training.sources import documents

        text = ""
        for document in documents(("stdlib",), lambda warning: None):
            text += document
            if len(text) > 8 * tokens:
                break
        options = replace(options, text=text[: 8 * tokens])
    ids, _ = subject.read(options, tokens)
    if ids.shape[1] < 10:
        raise ValueError(f"--text and --tokens must give at least 10 tokens to see growth, got {ids.shape[1]}")
    return ids


def draw(numbers: Numbers) -> "Figure":
    """Draw lines against tokens; both axes are logarithmic."""
    return _draw_model(numbers) if "layers" in numbers else _draw_rules(numbers)


def exponent(places: Sequence[int], norm: Sequence[float]) -> float:
    """Return the power of t with which the norm grows over the last decade, by least squares in the logarithms."""
    points = [(math.log(x), math.log(y)) for x, y in zip(places, norm, strict=True) if x >= places[-1] / 10 and y > 0]
    return linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else 0.0


def _draw_rules(numbers: Numbers) -> "Figure":
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 5))
    places, norm = numbers["places"], numbers["norm"]
    powers = {rule: exponent(places, each) for rule, each in norm.items()}
    known = next(n for n, place in enumerate(places) if place >= numbers["newest"] or n == len(places) - 1)
    for rule, each in norm.items():
        look = line_of(rule) | {"linewidth": 2}
        how = f"{'grows' if powers[rule] > 0 else 'falls'} like t^{powers[rule]:.2f}"
        how = f"levels off at {each[-1]:.1f}" if abs(powers[rule]) < FLAT else how
        left.plot(places, each, **look, markersize=7, markevery=(4, 8), label=f"{label_of(rule)}: {how}")
        right.plot(places[known:], numbers["error"][rule][known:], **look, markersize=7, markevery=(3, 8))
    right.axhline(1, color="gray", linewidth=1, linestyle="--")
    right.text(places[-1], 1.04, "as bad as no answer", fontsize=10, color="#555555", ha="right", va="bottom")
    for axes in (left, right):
        _axes(axes)
    left.set_ylabel("norm of S (Frobenius)", fontsize=11.5)
    right.set_ylabel(f"error on the newest {numbers['newest']} pairs", fontsize=11.5)
    growing = [label_of(rule) for rule, power in powers.items() if power >= FLAT]
    if len(growing) == 1:
        title = f"After {places[-1]:,} tokens only {growing[0]}'s state still grows"
    else:
        title = f"After {places[-1]:,} tokens {len(growing) or 'none'} of {len(powers)} states still grow"
    left.set_title(wrapped(title), fontsize=11.5)
    errors = {rule: each[-1] for rule, each in numbers["error"].items()}
    best, worst = (choose(errors, key=lambda rule: errors[rule]) for choose in (min, max))
    low, high = (f"{errors[rule]:.2g} with {narrow_label_of(rule)}" for rule in (best, worst))
    title = f"The newest pairs: error {low}, {high}"
    right.set_title(wrapped(title), fontsize=11.5)
    figure.legend(loc="outside lower center", ncols=2, fontsize=10)
    fast, slow = numbers["half_lives_tokens_per_channel"]
    figure.suptitle(
        f"random pairs, {numbers['key_dim']} key channels, keys of mean cosine {numbers['key_cosine']:g}, beta 1; "
        f"gates: half-life {numbers['half_life_tokens']:g} tokens (Kimi Delta: {fast:g} to {slow:g})",
        fontsize=9.5, color="#555555",
    )  # fmt: skip
    return figure


def _axes(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens written", fontsize=11.5)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.grid(which="minor", alpha=0.12)


def _draw_model(numbers: Numbers) -> "Figure":
    from matplotlib import colormaps
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    places, layers = numbers["places"], numbers["layers"]
    labelled = layers if len(layers) <= 8 else layers[:: -(-len(layers) // 8)]
    for index, layer in enumerate(layers):
        rule = layer["rule"]
        shade = colormaps["viridis"](0.92 * index / max(1, len(layers) - 1))
        label = f"layer {layer['layer']}, {label_of(rule)}" if layer in labelled else None
        marker = "os^Dv<>P"[index % 8]
        axes.plot(places, layer["norm"], color=shade, linestyle=kind_named(rule).look.line, marker=marker,
                  markevery=(index % 4, 4), linewidth=2, label=label)  # fmt: skip
    _axes(axes)
    axes.set_xlabel("tokens read", fontsize=11.5)
    axes.set_ylabel("norm of S (Frobenius), mean over heads", fontsize=11.5)
    growing = sum(exponent(places, layer["norm"]) >= FLAT for layer in layers)
    axes.set_title(
        f"{numbers['name']}: after {places[-1]:,} tokens {growing} of {len(layers)} states still grow\n"
        f"(faster than t^{FLAT:g} over the last decade)",
        fontsize=12.5, parse_math=False,
    )  # fmt: skip
    axes.legend(fontsize=10)
    return figure


PICTURE = Picture(
    "growth",
    "The size of the state over a long text",
    "Norm of S over 100,000 tokens for every rule, bounded or not, and the recall of the newest pairs.",
    compute,
    draw,
    uses=("model", "pattern", "text", "layer", "tokens", "seed", "quick"),
)

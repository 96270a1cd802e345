"""Kernel times that were measured on one H200 (bench/results), from which bench.models.scaling makes times of ranks.

products       operations over the rate of a large matrix product
attention      causal operations over the rate of torch's flash attention
rules          seconds a token and head of the measured case whose number of heads is the nearest
memory         bytes over the rate of a copy
launches       what is left of the measured decoding steps, a layer
"""

import json
import math
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lineate.layers import kind_of
from lineate.models.config import AttentionConfig, FeedConfig, HybridConfig, LinearConfig
from lineate.models.presets import preset
from lineate.planning import Model, decode_bytes, plan_flops, plan_memory, plan_training, read_model

RESULTS = Path(__file__).parents[1] / "results"
UPDATE_BYTES = 28
"""Bytes that AdamW reads and writes of a parameter."""
HEAD_DIM = 128
"""Channels of keys and of values in the measured cases."""
SERVED = HybridConfig(
    vocab_size=248320, hidden_size=2048, n_layers=24, pattern="GGGA", linear=LinearConfig(16, 16, 128, 128),
    attention=AttentionConfig(8, 2, 256, rotary_dim=64), feed=FeedConfig(6144), zero_centred_norm=True,
)  # fmt: skip
"""The model of bench.serving.gpu."""


@dataclass(frozen=True)
class RuleTime:
    """The measured time of a rule."""

    rule: str
    what: str
    """"forward" or "forward+backward"."""
    heads: int
    """Value heads of all rows."""
    seconds: float
    """Seconds a token and value head."""


@dataclass(frozen=True)
class Kernels:
    """The measurements of one device."""

    products: float
    """Operations a second of a matrix product in bfloat16."""
    attention: float
    """Causal operations a second of softmax attention."""
    copies: float
    """Bytes a second of a copy."""
    launches: float
    """Seconds a layer that a decoding step takes beyond its bytes and operations."""
    rules: tuple[RuleTime, ...]

    def rule(self, letter: str, linear: LinearConfig, tokens: int, what: str = "forward") -> float:
        """Return the seconds of a rule on n tokens of one sequence."""
        name, heads = kind_of(letter).word, linear.value_heads
        cases = [x for x in self.rules if (x.rule, x.what) == (name, what)]
        nearest = min(cases, key=lambda x: abs(math.log(x.heads / heads)))
        size = linear.key_dim * linear.value_dim / HEAD_DIM**2
        return tokens * heads * size * nearest.seconds

    def step(self, flops: float, moved: float, layers: int) -> float:
        """Return the seconds of a decoding step."""
        return moved / self.copies + flops / self.products + layers * self.launches


@cache
def measured() -> Kernels:
    """Return the kernel times in bench/results."""
    found = json.loads((RESULTS / "gpu-h200.json").read_text())
    rules = tuple(
        RuleTime(x["rule"], x["what"], x["b"] * x["hv"], x["graph_ms"] / 1e3 / (x["b"] * x["t"] * x["hv"]))
        for x in found["results"]
        if x["who"] == "ours" and x["what"] != "decode" and not x["raw"]
    )
    copies, products = (found["ceilings"][f"{x}_per_second"] for x in ("copy_bytes", "matrix_flop"))
    longest = max((x for x in found["results"] if x["who"] == "sdpa"), key=lambda x: x["b"] * x["t"] ** 2 * x["hv"])
    flops = 2 * longest["b"] * longest["hv"] * longest["t"] ** 2 * HEAD_DIM  # causal pairs, scores and values
    bare = Kernels(products, flops / (longest["graph_ms"] / 1e3), copies, 0.0, rules)
    left = [x["device_seconds"] - predicted_step(bare, x) for x in served_steps()]
    return Kernels(products, bare.attention, copies, statistics.mean(left) / SERVED.n_layers, rules)


def served_steps() -> list[dict[str, Any]]:
    """Return the measured decoding steps of bench.serving.gpu."""
    found = json.loads((RESULTS / "serving-gpu-h200.json").read_text())["results"]
    return [x for x in found if x["what"] == "decode"]


def predicted_step(kernels: Kernels, row: dict[str, Any]) -> float:
    """Return the seconds that a measured decoding step should take."""
    model = Model("served", SERVED, torch.bfloat16, "config")
    flops = row["rows"] * plan_flops(model).decode(row["length"], "least")
    moved = decode_bytes(plan_memory(model), row["rows"], row["length"]).total
    return kernels.step(flops, moved, SERVED.n_layers)


TRAINED = ("G", "K", "GGGA", "KKKM", "A")
"""Patterns of bench.models.train whose parts were measured."""


def arithmetic(kernels: Kernels, model: Model, tokens: int, length: int, forwards: int = 3) -> dict[str, float]:
    """Return the seconds of a training step's arithmetic by what they go to, on tokens in sequences of this length.

    Args:
        kernels: What was measured.
        model: The model.
        tokens: Tokens of the step.
        length: Tokens of a sequence.
        forwards: 3, as a backward counts as two; 4 if blocks run again.
    """
    flops, config = plan_flops(model), model.config
    products = sum(forwards * tokens * (x.projections + x.feed) for x in flops.layers) + 3 * tokens * flops.head
    attention = rules = 0.0
    for layer in flops.layers:
        kind = kind_of(layer.letter)
        if kind.grows:
            attention += forwards * tokens / length * layer.mixing(length, "least")
        else:
            part = config.part(kind)
            rules += kernels.rule(layer.letter, part, tokens, "forward+backward")
            rules += (forwards - 3) * kernels.rule(layer.letter, part, tokens)
    # A forward writes what a block keeps; the backward reads it, and writes as many gradients.
    kept = sum(plan_training(model, tokens).by_layer)
    return {
        "products": products / kernels.products,
        "attention": attention / kernels.attention,
        "rules": rules,
        "memory": forwards * kept / kernels.copies,
    }


def trained_steps() -> list[dict[str, Any]]:
    """Return the measured training steps of bench.models.train, with the seconds that they should take."""
    found = json.loads((RESULTS / "train-h200.json").read_text())
    tokens, length, kernels = found["header"]["tokens"], found["header"]["length"], measured()
    rows = []
    for x in found["results"]:
        if x["pattern"] in TRAINED:
            model = read_model(preset("compact", pattern=x["pattern"]))
            update = UPDATE_BYTES * x["parameters"] / kernels.copies
            made = sum(arithmetic(kernels, model, tokens, length).values()) + update
            rows.append({"pattern": x["pattern"], "seconds": x["ms"] / 1e3, "predicted": made})
    return rows


@cache
def slower() -> float:
    """Return how many times longer the measured training steps take than the sum of their parts, on average."""
    return statistics.mean(x["seconds"] / x["predicted"] for x in trained_steps())

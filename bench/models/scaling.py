"""Simulated training and serving on 1 to 1,024 ranks, from measured kernel times and the rates of links.

    python -m bench.models.scaling          prints the tables of docs/scaling.md

A rank's bytes, operations and what it receives are those of `lineate plan`; its times are made of kernel times that
were measured on one H200 (scaling_kernels.py). No cluster was measured: the rates of links are their vendors', and the
seconds of a collective besides its bytes are assumed. bench.models.scaling_ranks measures 2 and 4 ranks over gloo and
compares them with the same way of counting.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property

from bench.models.scaling_kernels import (
    UPDATE_BYTES,
    Kernels,
    arithmetic,
    measured,
    predicted_step,
    served_steps,
    slower,
    trained_steps,
)
from lineate.layers import kind_of
from lineate.models.sharding import tensor_sizes
from lineate.parallel.context.balance import ENOUGH
from lineate.planning import (
    HARDWARE,
    Hardware,
    MemoryPlan,
    Model,
    Received,
    Split,
    TrainingMemory,
    decode_bytes,
    decode_received,
    largest_batch,
    plan_flops,
    plan_memory,
    plan_training,
    read_model,
    split_model,
    training_received,
)
from lineate.planning.memory import empty_of

FILLED = 0.9
"""The part of a device's memory that may be used; the rest is for buffers that are not counted."""
STATE_BYTES = 16
"""Bytes of a parameter, its gradient and AdamW's two averages, in float32."""
UNEVEN = 1 + 1 / ENOUGH
"""How much more than the mean a context rank attends to at most (lineate/parallel/context/balance.py)."""
MOST_ROWS = 256
"""The most sequences that a replica serves at a time."""
TENSOR, CONTEXT = (1, 2, 4, 8), tuple(2**n for n in range(11))
"""Numbers of ranks that are tried."""
RANKS, SERVING_RANKS = (1, 2, 4, 8, 16, 64, 256, 1024), (1, 2, 4, 8, 64, 1024)
STEP_TOKENS = 2**22
"""Tokens of a training step."""
SERVED = (("qwen3-next-80b", 2**16), ("kimi-linear-48b", 2**16))
TRAINED = (("large", 2**15), ("kimi-linear-48b", 2**15), ("kimi-linear-48b", 2**20))
"""Models and tokens of a sequence."""


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind, and what a collective costs besides its bytes."""

    device: Hardware = field(default_factory=lambda: HARDWARE["h200"])
    kernels: Kernels = field(default_factory=measured)
    slower: float = field(default_factory=slower)
    """How many times longer arithmetic takes in a training step than its kernels alone."""
    near: float = 5e-6
    """Seconds of each of the log2(ranks) rounds of a collective within a node; assumed."""
    far: float = 10e-6
    """The same between nodes; assumed."""

    @property
    def room(self) -> int:
        """Bytes of a device that may be used."""
        return int(FILLED * self.device.memory_bytes)

    def seconds(self, nbytes: float, calls: int, ranks: int, stride: int = 1) -> float:
        """Return the seconds of collectives in which a rank receives n bytes; every stride-th rank takes part."""
        if ranks == 1:
            return 0.0
        each = self.near if ranks * stride <= self.device.node else self.far
        return nbytes / self.device.link_rate(ranks, stride) + calls * math.log2(ranks) * each


@dataclass(frozen=True)
class Rank:
    """The work of one rank for one sequence, whatever the number of replicas."""

    plan: MemoryPlan
    training: TrainingMemory
    received: Received
    blocks: tuple[int, ...]
    """Parameters of each block."""
    arithmetic: dict[str, float]
    """Seconds of its kernels by what they go to, without the update of the weights."""


@cache
def rank_of(model: Model, tensor: int, context: int, tokens: int, kernels: Kernels) -> Rank:
    """Return what one of tensor x context ranks has to do for a sequence; blocks run again in the backward."""
    rank = split_model(model, tensor, context)
    own, plan = -(-tokens // context), plan_memory(rank)
    found = arithmetic(kernels, rank, own, tokens, forwards=4)
    if context > 1:
        found["attention"] *= UNEVEN
        for layer in plan_flops(rank).layers:
            kind, part = kind_of(layer.letter), rank.config.part(kind_of(layer.letter))
            if kind.cache == "latent":  # every rank expands the latents of all others too
                expanded = 2 * part.rank * part.heads * (part.nope_dim + part.value_dim)
                found["products"] += 4 * (tokens - own) * expanded / kernels.products
            elif not kind.grows:  # a segment's map and what it leaves, in both forwards
                found["rules"] += 4 * kernels.rule(layer.letter, part, own)
    blocks = tuple(sum(x.numel() for x in block.parameters()) for block in empty_of(rank.config).layers)
    received = training_received(plan, own, tokens, recompute=True)
    return Rank(plan, plan_training(rank, own), received, blocks, found)


@dataclass(frozen=True)
class TrainingStep:
    """One step on n sequences by data x context x tensor ranks, with weights sharded (FSDP2).

    The sequences of a place in data run one after another. Blocks run again in the backward, and products are in
    bfloat16. Gathering weights overlaps with arithmetic; what tensor and context ranks exchange does not.
    """

    model: Model
    split: Split
    """Its replicas are the places in data."""
    tokens: int
    """Tokens of a sequence."""
    sequences: int = 1
    """Sequences of a step, at least one for each place in data."""
    cluster: Cluster = field(default_factory=Cluster)

    @property
    def rank(self) -> Rank:
        return rank_of(self.model, self.split.tensor, self.split.context, self.tokens, self.cluster.kernels)

    @property
    def readers(self) -> int:
        """Ranks with other tokens, over which weights are sharded."""
        return self.split.context * self.split.replicas

    @property
    def shard_bytes(self) -> int:
        """Bytes of weights and gradients for one sequence: blocks twice, other weights once, all gradients once."""
        blocks = sum(self.rank.blocks)
        whole = 12 * blocks + 8 * (self.rank.plan.parameters - blocks)
        return whole - whole // self.readers

    @property
    def received_bytes(self) -> int:
        """Bytes that a rank receives in a step."""
        crossing = self.rank.received.total - self.rank.received.gradients
        return self.sequences // self.split.replicas * (crossing + self.shard_bytes)

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes of a rank: what is always held, and the larger of the two peaks above it."""
        rank, model = self.rank, self.rank.plan.model
        block = 3 * 4 * max(rank.blocks)  # this block, the next one, and this block's gradient
        if self.split.context > 1:  # keys and values of all tokens of one layer with their gradients, in bfloat16
            block += 2 * 2 * self.tokens * max(_keys(model, letter) for letter in model.config.letters)
        found = {
            "state": STATE_BYTES * rank.plan.parameters / self.readers,
            "kept": float(rank.training.activations_recomputed),
            "logits": float(rank.training.logits),
            "block": float(block),
        }
        found["total"] = found["state"] + found["kept"] + max(found["logits"], found["block"])
        return found

    @property
    def fits(self) -> bool:
        return self.memory["total"] <= self.cluster.room

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by what they go to."""
        cluster, split, rank = self.cluster, self.split, self.rank
        each = {name: cluster.slower * seconds for name, seconds in rank.arithmetic.items()}
        got, layers = rank.received, rank.plan.model.config.n_layers
        each["sums"] = cluster.seconds(got.sums + got.logits + got.shared, 6 * layers + 5, split.tensor)
        each["segments"] = cluster.seconds(got.context, 6 * layers, split.context, split.tensor)
        each["shards"] = cluster.seconds(self.shard_bytes, 3 * layers + 2, self.readers, split.tensor)
        found = {name: self.sequences / split.replicas * seconds for name, seconds in each.items()}
        found["memory"] += UPDATE_BYTES * rank.plan.parameters / self.readers / cluster.kernels.copies
        return found

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        exchanged, shards = self.parts["sums"] + self.parts["segments"], self.parts["shards"]
        return max(sum(self.parts.values()) - exchanged - shards, shards) + exchanged

    @property
    def binds(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda x: self.parts[x])

    @property
    def rate(self) -> float:
        """Tokens a second of all ranks."""
        return self.sequences * self.tokens / self.seconds


def _keys(model: Model, letter: str) -> int:
    """Return the numbers that a token has of keys and values, made from latents, the values as wide as the keys."""
    kind = kind_of(letter)
    part = model.config.part(kind)
    if kind.cache == "latent":
        return int(2 * part.heads * (part.nope_dim + part.rope_dim))
    return int(2 * part.kv_heads * part.head_dim) if kind.grows else 0


@dataclass(frozen=True)
class ServingStep:
    """A decoding step of tensor x replicas ranks: every replica has sequences of its own."""

    model: Model
    split: Split
    tokens: int
    """Tokens of a sequence."""
    cluster: Cluster = field(default_factory=Cluster)
    most: int = MOST_ROWS
    """The most sequences of a replica."""

    @cached_property
    def plan(self) -> MemoryPlan:
        return plan_memory(split_model(self.model, self.split.tensor, 1, self.split.replicas))

    @cached_property
    def rows(self) -> int:
        """Sequences of a replica."""
        return min(self.most, largest_batch(self.plan, self.cluster.room, self.tokens))

    @property
    def fits(self) -> bool:
        return self.rows > 0

    @cached_property
    def received(self) -> Received:
        return decode_received(self.plan, self.rows)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of a rank by what they go to; experts are chosen at random."""
        kernels, config, tensor = self.cluster.kernels, self.plan.model.config, self.split.tensor
        moved = decode_bytes(self.plan, self.rows, self.tokens, "expected")
        calls = self.cluster.seconds(0, self.received.calls, tensor)
        return {
            "weights": moved.weights / kernels.copies,
            "states": (moved.state + moved.cache) / kernels.copies,
            "products": self.rows * plan_flops(self.plan.model).decode(self.tokens, "least") / kernels.products,
            "launches": config.n_layers * kernels.launches,
            "link": self.cluster.seconds(self.received.total, 0, tensor),
            "collectives": calls,
        }

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def binds(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda x: self.parts[x])

    @property
    def rate(self) -> float:
        """Tokens a second of all replicas."""
        return self.split.replicas * self.rows / self.seconds


def splits(model: Model, ranks: int, contexts: tuple[int, ...] = (1,)) -> Iterator[Split]:
    """Yield the ways to use the given number of ranks."""
    for tensor in (x for x in tensor_sizes(model.config, max(TENSOR)) if x in TENSOR):
        for context in contexts:
            if ranks % (tensor * context) == 0:
                yield Split(tensor, context, ranks // (tensor * context))


def best_serving(model: Model, ranks: int, tokens: int) -> ServingStep | None:
    """Return the fastest way to serve a model on the given number of ranks; None if it does not fit."""
    steps = [x for split in splits(model, ranks) if (x := ServingStep(model, split, tokens)).fits]
    return max(steps, key=lambda x: x.rate, default=None)


def best_training(model: Model, ranks: int, tokens: int, sequences: int) -> TrainingStep | None:
    """Return the fastest way to train a model on the given number of ranks; None if it does not fit."""
    ways = (split for split in splits(model, ranks, CONTEXT) if split.replicas <= sequences)
    steps = [x for split in ways if (x := TrainingStep(model, split, tokens, sequences)).fits]
    return max(steps, key=lambda x: x.rate, default=None)


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def head(*names: str) -> list[str]:
    return [row(*names), "|---" * len(names) + "|"]


def check_table() -> list[str]:
    """Return how the simulation compares with what was measured on one H200."""
    lines = head("measured on one H200", "ms", "simulated", "simulated / measured")
    for x in served_steps():
        ms, made = 1e3 * x["device_seconds"], 1e3 * predicted_step(measured(), x)
        name = "sequence" if x["rows"] == 1 else "sequences"
        lines.append(row(f"a decoding step of {x['rows']} {name}", f"{ms:.2f}", f"{made:.2f}", f"{made / ms:.2f}"))
    for x in trained_steps():
        ms, made = 1e3 * x["seconds"], 1e3 * slower() * x["predicted"]
        lines.append(row(f"a training step, {x['pattern']}", f"{ms:.1f}", f"{made:.1f}", f"{made / ms:.2f}"))
    return lines


def _share(x: ServingStep | TrainingStep) -> float:
    """Return the percentage of what takes longest."""
    return 100 * x.parts[x.binds] / sum(x.parts.values())


def serving_table(name: str, tokens: int) -> list[str]:
    lines = [f"`{name}`, bfloat16, sequences of {tokens:,} tokens:", ""]
    lines += head("H200s", "replicas x tensor", "sequences", "GB a rank", "ms a step", "tokens/s", "most of the time")
    for ranks in SERVING_RANKS:
        x = best_serving(read_model(name), ranks, tokens)
        if x is None:
            lines.append(row(ranks, "does not fit", "", "", "", "", ""))
            continue
        gigabytes = x.plan.total(x.rows, tokens) / 1e9
        lines.append(
            row(ranks, f"{x.split.replicas} x {x.split.tensor}", f"{x.split.replicas * x.rows:,}", f"{gigabytes:.0f}",
                f"{1e3 * x.seconds:.1f}", f"{x.rate:,.0f}", f"{x.binds} {_share(x):.0f}%")
        )  # fmt: skip
    return lines


def stream_table(tokens: int) -> list[str]:
    """Return how fast one sequence is decoded if more and more ranks share the model."""
    lines = head("tensor ranks", *(f"`{name}`: ms a token, most of the time" for name, _ in SERVED))
    for tensor in TENSOR:
        cells = []
        for name, _ in SERVED:
            x = ServingStep(read_model(name), Split(tensor), tokens, most=1)
            cells.append(f"{1e3 * x.seconds:.2f}, {x.binds} {_share(x):.0f}%" if x.fits else "does not fit")
        lines.append(row(tensor, *cells))
    return lines


def training_table(name: str, tokens: int) -> list[str]:
    sequences = STEP_TOKENS // tokens
    lines = [f"`{name}`, {sequences} sequences of {tokens:,} tokens a step:", ""]
    lines += head(
        "H200s", "data x context x tensor", "GB a rank", "s a step", "GB received", "tokens/s", "most of the time"
    )
    for ranks in RANKS:
        x = best_training(read_model(name), ranks, tokens, sequences)
        if x is None:
            lines.append(row(ranks, "does not fit", "", "", "", "", ""))
            continue
        layout = f"{x.split.replicas} x {x.split.context} x {x.split.tensor}"
        lines.append(
            row(ranks, layout, f"{x.memory['total'] / 1e9:.0f}", f"{x.seconds:.2f}", f"{x.received_bytes / 1e9:,.0f}",
                f"{x.rate:,.0f}", f"{x.binds} {_share(x):.0f}%")
        )  # fmt: skip
    return lines


def tables() -> dict[str, str]:
    """Return the tables of docs/scaling.md."""
    serving = [serving_table(*x) for x in SERVED]
    training = [training_table(*x) for x in TRAINED]
    return {
        "checks": "\n".join(check_table()),
        "serving": "\n\n".join("\n".join(x) for x in serving),
        "streams": "\n".join(stream_table(2**16)),
        "training": "\n\n".join("\n".join(x) for x in training),
    }


if __name__ == "__main__":
    for table in tables().values():
        print(table, end="\n\n")

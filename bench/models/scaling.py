"""The plan of docs/scaling.md: memory, bytes moved and lower bounds of the time of one step, all from formulas.

    python -m bench.models.scaling            prints the tables of the document

Nothing here was measured. The formulas follow the code in lineate/training and lineate/layers/carry.py: float32
parameters under autocast (4 bytes per parameter gathered and reduced), blocks recomputed in the backward pass, keys and
values of a sequence gathered by every rank that shares it, contiguous segments (so the last rank attends to all).
"""

import math
from dataclasses import dataclass

import torch

from lineate.layers import kind_of
from lineate.models import HybridLM
from lineate.models.config import HybridConfig
from lineate.models.loss import most_bytes
from lineate.models.presets import preset

RULE_CHUNK = 64
STATE_BYTES = 16
"""Bytes of a parameter, its gradient and AdamW's two averages, in float32."""
FORWARDS = 4
"""A step's cost in forward passes: forward, recomputed forward, and backward, which counts as two."""


@dataclass(frozen=True)
class Machine:
    """H200s in nodes of 8."""

    flops: float = 989e12
    """Peak rate of dense bfloat16 products."""
    utilisation: float = 0.4
    memory: float = 141e9
    hbm: float = 4.8e12
    nvlink: float = 450e9
    """Bytes per second in each direction."""
    network: float = 50e9
    """Bytes per second of a GPU's own 400 Gb/s."""
    node: int = 8
    latency: float = 10e-6
    """Seconds of one of the log2(ranks) rounds of a collective."""

    def seconds(self, nbytes: float, calls: float, ranks: int) -> float:
        """Return the seconds of collectives in which every rank receives this many bytes.

        Between nodes, all 8 networks carry the bytes.
        """
        if ranks == 1:
            return 0.0
        bandwidth = self.nvlink if ranks <= self.node else min(self.nvlink, self.node * self.network)
        return nbytes / bandwidth + calls * self.latency * math.log2(ranks)


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that the formulas use."""

    config: HybridConfig
    parameters: int
    active: int
    """Parameters by which one token is multiplied."""
    block: int
    """Parameters of the largest block."""
    root: int
    """Parameters outside of the blocks."""

    @classmethod
    def of(cls, config: HybridConfig) -> "ModelShape":
        with torch.device("meta"):
            model = HybridLM(config)
        blocks = [sum(x.numel() for x in block.parameters()) for block in model.layers]
        total = sum(x.numel() for x in model.parameters())
        idle = 0 if config.tie_embeddings else model.embed.weight.numel()  # looked up, not multiplied
        if (experts := config.experts) is not None:
            layers = sum(config.has_experts(layer) for layer in range(config.n_layers))
            idle += layers * (experts.count - experts.active) * 3 * experts.size * config.hidden_size
        return cls(config, total, total - idle, max(blocks), total - sum(blocks))

    @property
    def linear_layers(self) -> int:
        return sum(kind_of(letter).section == "linear" for letter in self.config.letters)

    @property
    def attention_layers(self) -> int:
        return self.config.n_layers - self.linear_layers

    @property
    def has_latents(self) -> bool:
        """Whether a layer caches latent vectors instead of keys and values."""
        return any(kind.cache == "latent" for kind in self.config.mixer_kinds())

    @property
    def attention(self) -> tuple[int, int, int, int]:
        """Return heads, channels of a key and of a value, and the numbers that a token sends to later ranks."""
        if self.has_latents:
            x = self.config.latent
            return x.heads, x.nope_dim + x.rope_dim, x.value_dim, x.rank + x.rope_dim
        x = self.config.attention
        return x.heads, x.head_dim, x.head_dim, 2 * x.kv_heads * x.head_dim

    def forward_flops(self, tokens: int, context: int = 1) -> tuple[float, float, float]:
        """Return the operations for a token: products with weights, linear rules, and attention on the last rank."""
        linear, (heads, key, value, _) = self.config.linear, self.attention
        rule = 4 * RULE_CHUNK * (linear.key_dim + linear.value_dim) + 6 * linear.key_dim * linear.value_dim
        runs = 1 if context == 1 else 3  # the segment's map, the state that leaves it, and the output
        seen = tokens * (1 - 1 / (2 * context))  # tokens that a token of the last rank sees, on average
        attended = 2 * heads * (key + value) * seen
        if self.has_latents:  # every rank expands the latents of all ranks
            latent = self.config.latent
            attended += (context - 1) * 2 * latent.rank * heads * (latent.nope_dim + latent.value_dim)
        return (
            2 * self.active,
            runs * self.linear_layers * linear.value_heads * rule,
            self.attention_layers * attended,
        )


@dataclass(frozen=True)
class TrainingStep:
    """One step of data x context ranks, with a sequence of `tokens` for each data rank, and FSDP2 over all ranks."""

    shape: ModelShape
    data: int
    context: int
    tokens: int = 2**20
    machine: Machine = Machine()

    @property
    def gpus(self) -> int:
        return self.data * self.context

    @property
    def own_tokens(self) -> int:
        return self.tokens // self.context

    @property
    def memory(self) -> dict[str, float]:
        """Return the bytes of a GPU: what is always held, and the larger of the two peaks above it."""
        c, shape = self.shape.config, self.shape
        heads, key, _, _ = shape.attention
        gathered = 3 * 4 * shape.block  # this block, the next one, and this block's gradient
        keys = 2 * 2 * 2 * self.tokens * heads * key  # keys and values (padded) in bfloat16, with their gradients
        found = {
            "state": STATE_BYTES * shape.parameters / self.gpus,
            "kept": 4 * self.own_tokens * c.hidden_size * c.n_layers + 2 * 4 * shape.root,
            "logits": float(most_bytes(self.own_tokens, c.vocab_size, c.hidden_size)),
            "block": float(gathered + keys),
        }
        found["total"] = found["state"] + found["kept"] + max(found["logits"], found["block"])
        return found

    @property
    def compute_seconds(self) -> float:
        """Return the seconds of the slowest rank."""
        flops = FORWARDS * sum(self.shape.forward_flops(self.tokens, self.context)) * self.own_tokens
        return flops / (self.machine.flops * self.machine.utilisation)

    @property
    def shard_bytes(self) -> float:
        """Return the bytes that a GPU receives: blocks gathered twice, other parameters once, all gradients reduced."""
        blocks = self.shape.parameters - self.shape.root
        return (12 * blocks + 8 * self.shape.root) * (1 - 1 / self.gpus)

    @property
    def shard_seconds(self) -> float:
        return self.machine.seconds(self.shard_bytes, 3 * self.shape.config.n_layers + 2, self.gpus)

    @property
    def context_bytes(self) -> float:
        """Return the bytes that a GPU receives of maps, halos, keys and values, in both forwards and the backward."""
        linear, others = self.shape.config.linear, self.context - 1
        maps = 4 * linear.value_heads * linear.key_dim * (linear.key_dim + linear.value_dim)
        channels = 2 * linear.heads * linear.key_dim + linear.value_heads * linear.value_dim
        halo = 2 * (linear.conv_size - 1) * channels
        keys = 2 * self.own_tokens * self.shape.attention[3]
        return 3 * others * (self.shape.linear_layers * (maps + halo) + self.shape.attention_layers * keys)

    @property
    def context_seconds(self) -> float:
        calls = 3 * (2 * self.shape.linear_layers + self.shape.attention_layers)
        return self.machine.seconds(self.context_bytes, calls, self.context)

    @property
    def optimizer_seconds(self) -> float:
        """Return AdamW's seconds; it reads 16 bytes per parameter and writes 12."""
        return 28 * self.shape.parameters / self.gpus / self.machine.hbm

    @property
    def seconds(self) -> float:
        """Return a lower bound of the seconds of a step.

        Gathers and reductions are hidden behind compute; the transfers between segments are not.
        """
        return max(self.compute_seconds, self.shard_seconds) + self.context_seconds + self.optimizer_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.data * self.tokens / self.seconds


MODELS = ("large", "kimi-linear-48b")
LAYOUTS = ((1, 8), (8, 8), (1, 64), (16, 64))


def tables() -> str:
    """Return the tables of docs/scaling.md."""
    shapes = {name: ModelShape.of(preset(name)) for name in MODELS}
    lines = [
        "| model | parameters | active | linear / attention layers | weights | rules | attention at 1M |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, shape in shapes.items():
        dense, rules, attention = (f"{x / 1e9:.3g}" for x in shape.forward_flops(2**20))
        counts = f"{shape.linear_layers} / {shape.attention_layers}"
        sizes = f"{shape.parameters / 1e9:.3g} B | {shape.active / 1e9:.3g} B"
        lines.append(f"| {name} | {sizes} | {counts} | {dense} | {rules} | {attention} |")
    for name, shape in shapes.items():
        steps = [TrainingStep(shape, *layout) for layout in LAYOUTS]
        lines += [
            "",
            f"`{name}`, sequences of 2^20 tokens:",
            "",
            "| GPUs | data x context | tokens a GPU | state GB | kept GB | logits GB | block GB | peak GB | fits |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for step in steps:
            gigabytes = {key: f"{value / 1e9:.1f}" for key, value in step.memory.items()}
            fits = "yes" if step.memory["total"] < 0.9 * step.machine.memory else "no"
            cells = " | ".join(gigabytes[key] for key in ("state", "kept", "logits", "block", "total"))
            lines.append(f"| {step.gpus} | {step.data} x {step.context} | {step.own_tokens} | {cells} | {fits} |")
        lines += [
            "",
            "| GPUs | data x context | compute s | shards GB | shards s | context GB | context s | step s, at least "
            "| tokens/s, at most |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for step in steps:
            moved = f"{step.shard_bytes / 1e9:.1f} | {step.shard_seconds:.3f}"
            crossed = f"{step.context_bytes / 1e9:.2f} | {step.context_seconds:.3f}"
            lines.append(
                f"| {step.gpus} | {step.data} x {step.context} | {step.compute_seconds:.2f} | {moved} | {crossed} "
                f"| {step.seconds:.2f} | {step.tokens_per_second:,.0f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())

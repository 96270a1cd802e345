"""Operations and bytes moved: per token for prefill, decoding and training, by layer and in total.

A multiply-add counts as 2. Two conventions:

    executed   the matrix products that plain torch runs here, as torch.utils.flop_counter counts them (flops.py
               registers lineate's ops): attention over all pairs, causal or not, chunks of 64 with their square
               scores. Not counted, as there: triangular solves, convolutions of 4 taps, the recurrent write, norms
               and other elementwise work.
    least      a lower bound for any implementation: causal pairs alone, the recurrence itself, no padding.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from lineate.layers import MixerKind, Operations, kind_of
from lineate.layers.costs.measuring import operations_of
from lineate.models.config import ExpertsConfig, HybridConfig, LinearConfig
from lineate.models.nbytes import tensor_bytes
from lineate.planning.memory import MemoryPlan
from lineate.planning.models import Model, check_size

CONVENTIONS = ("executed", "least")


@dataclass(frozen=True)
class LayerFlops:
    """Operations of one layer; those of its mixer come from its row in the registry, or are measured."""

    config: HybridConfig
    """The model's configuration."""
    index: int
    """Which layer it is, from 0."""
    projections: int
    """Operations of the mixer's projections, per token; latent attention makes keys and values as it mixes."""
    feed: int
    """Operations of the feed-forward, per token."""

    @property
    def letter(self) -> str:
        return self.config.letters[self.index]

    def forward(self, tokens: int, convention: str = "executed") -> int:
        """Return the operations of a whole sequence of `tokens` tokens."""
        _check(convention, tokens=tokens)
        return tokens * (self.projections + self.feed) + self.mixing(tokens, convention)

    def decode(self, context: int, convention: str = "executed") -> int:
        """Return the operations of one token after `tokens` others."""
        _check(convention)
        return self.projections + self.feed + self.mixing_one(context, convention)

    def mixing(self, tokens: int, convention: str = "executed") -> int:
        """Return the operations between tokens, of the rule or the attention, on a whole sequence."""
        return self._operations.mixing(self.config.part_of(self.index), tokens, convention)

    def mixing_one(self, context: int, convention: str = "executed") -> int:
        """Return the same for one token after `tokens` others."""
        return self._operations.mixing_one(self.config.part_of(self.index), context, convention)

    @property
    def _kind(self) -> MixerKind:
        return kind_of(self.letter)

    @property
    def _operations(self) -> Operations:
        return operations_of(self._kind, self.config)


@dataclass(frozen=True)
class FlopsPlan:
    """Operations of a model. Every method takes a convention, "executed" or "least"."""

    model: Model
    """The model that is planned."""
    layers: tuple[LayerFlops, ...]
    """Operations of each layer."""
    head: int
    """Operations per token with logits."""

    def forward(self, tokens: int, logits: int, convention: str = "executed") -> int:
        """Return the operations of a whole sequence, with the logits of a number of its tokens."""
        return sum(layer.forward(tokens, convention) for layer in self.layers) + logits * self.head

    def prefill(self, tokens: int, convention: str = "executed") -> float:
        """Return the mean per token of a sequence of `tokens` tokens, of which only the last has logits."""
        return self.forward(tokens, 1, convention) / tokens

    def decode(self, context: int, convention: str = "executed") -> int:
        """Return the operations of one token after `tokens` others."""
        return sum(layer.decode(context, convention) for layer in self.layers) + self.head

    def training(self, length: int, recompute: bool = False, convention: str = "executed") -> float:
        """Return the operations per token of sequences of this length.

        They are 3 forwards, as a backward is two, or 4 if blocks are recomputed.

        Scores that kernels always recompute in their backward (of a chunk, of flash attention) are not counted.
        """
        blocks = sum(layer.forward(length, convention) for layer in self.layers)
        return (4 if recompute else 3) * blocks / length + 3 * self.head


def plan_flops(model: Model) -> FlopsPlan:
    """Return the operations of a model's layers and head.

    Args:
        model: The model to plan.
    """
    c = model.config
    layers = tuple(LayerFlops(c, i, _projections(c, i), _feed(c, i)) for i in range(c.n_layers))
    return FlopsPlan(model, layers, 2 * c.hidden_size * c.vocab_size)


def rule_flops(letter: str, linear: LinearConfig) -> int:
    """Return the operations of the recurrence on a token: read with q, write, and compare if the rule corrects."""
    operations = kind_of(letter).operations
    assert operations is not None
    return operations.mixing_one(linear, 0, "least")


@dataclass(frozen=True)
class Moved:
    """The least bytes that must be read from or written to memory."""

    weights: int
    """Weights that the tokens are multiplied with, each read once."""
    state: int
    """Recurrent states are read and written when decoding, convolution states read; both are written by a prefill."""
    cache: int
    """Keys and values, or latents: read when decoding, written after a prefill."""

    @property
    def total(self) -> int:
        return self.weights + self.state + self.cache


def decode_bytes(plan: MemoryPlan, batch: int, context: int, routing: str = "least") -> Moved:
    """Return the bytes of a step of one token in each of batch rows after context tokens.

    Args:
        plan: The memory of the model.
        batch: Sequences at a time.
        context: Tokens before this one.
        routing: The experts that a batch touches. "least": all rows go to the same; "expected": each chooses at random.
    """
    weights = touched_weights(plan, batch, routing) + batch * _embedding_row(plan)
    state = batch * sum((1 if kind_of(x.letter).learns else 2) * x.memory + x.conv for x in plan.layers)
    return Moved(weights, state, plan.cache(batch, context + 1))


def prefill_bytes(plan: MemoryPlan, batch: int, tokens: int, routing: str = "least") -> Moved:
    """Return the bytes of `batch` sequences of `tokens` tokens: weights once, and the final state.

    Args:
        plan: The memory of the model.
        batch: Sequences at a time.
        tokens: Tokens of each sequence.
        routing: The experts that the tokens touch, as for decode_bytes.
    """
    _check(CONVENTIONS[0], tokens=tokens)
    weights = touched_weights(plan, batch * tokens, routing)
    return Moved(weights, batch * (plan.memory + plan.conv), plan.cache(batch, tokens))


def touched_weights(plan: MemoryPlan, tokens: int, routing: str = "least") -> int:
    """Return the bytes of the weights that a number of tokens use; of experts, those they are routed to."""
    if routing not in ("least", "expected"):
        raise ValueError(f"routing must be 'least' or 'expected', got {routing!r}")
    c = plan.model.config
    total = sum(layer.weights for layer in plan.layers) + plan.norm + (plan.head or plan.embedding)
    if c.experts is None:
        return total
    x = c.experts
    missed = (1 - x.active / x.count) ** tokens if routing == "expected" else 1 - x.active / x.count
    return total - round(x.count * missed) * _one_expert_a_layer(plan.model)


@lru_cache(64)
def _one_expert_a_layer(model: Model) -> int:
    """Return the bytes of one expert of every layer."""
    return sum(_expert_bytes(model, i) for i in range(model.config.n_layers))


def _expert_bytes(model: Model, layer: int) -> int:
    """Return the bytes of one expert of a layer; 0 if it has none."""
    c, x = model.config, model.config.experts
    if x is None or not c.has_experts(layer):
        return 0
    shapes = {"gate_up": ((_matrices(x.kind) - 1) * x.size, c.hidden_size), "down": (c.hidden_size, x.size)}
    with torch.device("meta"):
        likes = {f"layers.{layer}.feed.experts_{name}": torch.empty(1, *shape) for name, shape in shapes.items()}
    return sum(tensor_bytes(name, like, model.dtype, model.formats) for name, like in likes.items())


def _embedding_row(plan: MemoryPlan) -> int:
    return plan.embedding // plan.model.config.vocab_size


def _projections(c: HybridConfig, layer: int) -> int:
    """Return the operations per token of the products with weights in a layer's mixer."""
    return operations_of(kind_of(c.letters[layer]), c).projections(c, c.part_of(layer))


def _feed(c: HybridConfig, layer: int) -> int:
    """Return the operations per token."""
    if layer in c.mixer_only:
        return 0
    if not c.has_experts(layer):
        assert c.feed is not None
        return 2 * _matrices(c.feed.kind) * c.hidden_size * c.feed.size
    x = c.experts
    assert isinstance(x, ExpertsConfig)
    inner = 2 * _matrices(x.kind) * (x.active * x.size + x.shared_size) + 2 * x.count + 2 * x.shared_gate
    return c.hidden_size * inner


def _matrices(kind: str) -> int:
    """Return how many matrices a feed-forward has: gate, up and down, or up and down."""
    return 3 if kind == "swiglu" else 2


def _check(convention: str, tokens: int = 1) -> None:
    if convention not in CONVENTIONS:
        raise ValueError(f"convention must be one of {', '.join(CONVENTIONS)}, got {convention!r}")
    check_size("tokens", tokens)

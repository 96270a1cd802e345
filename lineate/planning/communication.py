"""Bytes that a rank receives from the others, counted as the code sends them.

    a sum over n ranks (all-reduce) of B bytes     2 B (n - 1) / n: a rank receives its summands, then the other sums
    a gather of B bytes of each of n ranks         B (n - 1)

Tensor ranks sum the output of every mixer and every feed-forward, and the embedding, and gather the logits. A backward
sums the gradients of the inputs of mixers, feed-forwards and the head. Context ranks gather the exchanges between
segments (docs/scaling.md). Ranks with different tokens sum the gradients of parameters, and tensor ranks those of
parameters that several of them hold. Single numbers are left out: counts of tokens, the norm of the gradient.
"""

from dataclasses import dataclass
from math import prod

from torch import Tensor

from lineate.layers import kind_of
from lineate.layers.configs import AttentionConfig, LatentConfig, LinearConfig, MambaConfig
from lineate.layers.mamba2 import GroupedGatedNorm
from lineate.layers.ttt import TTTMixer
from lineate.models.config import HybridConfig
from lineate.models.sharding import model_cuts
from lineate.parallel.context.balance import even_parts, plan_moves
from lineate.planning.memory import LayerMemory, MemoryPlan, empty_of
from lineate.planning.models import Model, check_size
from lineate.rule import rule_named

TOLD_BYTES = 40
"""Bytes of the description that a rank of context parallelism sends to all others at the start of a call."""
FLOAT = 4
"""Bytes of a float32, the dtype of gradients of parameters, norms, losses and maps of memories."""


@dataclass(frozen=True)
class Received:
    """Bytes that one rank receives, by purpose."""

    sums: int = 0
    """Outputs of mixers, of feed-forwards and of the embedding, summed over tensor ranks; gradients of their inputs."""
    logits: int = 0
    """Logits, gathered from tensor ranks; in training, sums of their exponentials."""
    context: int = 0
    """Exchanges between the segments of a sequence: maps of memories, inputs of convolutions, keys and values, queries.

    Ranks receive different numbers of queries; this is the rank that receives most.
    """
    gradients: int = 0
    """Gradients of parameters, summed over the ranks that have different tokens."""
    shared: int = 0
    """Gradients of parameters that several tensor ranks hold, summed over tensor ranks."""
    calls: int = 0
    """Collectives, each of which all ranks of a group wait for."""

    @property
    def total(self) -> int:
        return self.sums + self.logits + self.context + self.gradients + self.shared


def decode_received(plan: MemoryPlan, batch: int = 1) -> Received:
    """Return the bytes of a decoding step of one token in each of batch sequences.

    Args:
        plan: The memory of a rank's model (split_model).
        batch: Sequences at a time.
    """
    check_size("batch", batch)
    return _forward(plan.model, batch, batch)


def prefill_received(plan: MemoryPlan, batch: int, tokens: int) -> Received:
    """Return the bytes of reading `batch` sequences of `tokens` tokens, with logits of the last one.

    Args:
        plan: The memory of a rank's model (split_model).
        batch: Sequences at a time.
        tokens: Tokens of each sequence.
    """
    check_size("batch", batch)
    check_size("tokens", tokens)
    own, number = -(-tokens // plan.model.split.context), _number(plan.model)
    read = _forward(plan.model, batch * own, batch)
    crossing, calls = _crossing(plan, batch, own, number)
    moves = _moved_queries(plan, batch, tokens, number)
    crossing += max((forward for forward, _ in moves), default=0)
    calls += 2 * len(_attention(plan.model)) * bool(moves)
    told = TOLD_BYTES * (plan.model.split.context - 1)
    return Received(read.sums, read.logits, crossing + told, calls=read.calls + calls + bool(told))


def training_received(
    plan: MemoryPlan, tokens: int, length: int, half: bool = True, recompute: bool = False
) -> Received:  # fmt: skip
    """Return the bytes of a training step of one micro-batch.

    Args:
        plan: The memory of a rank's model (split_model).
        tokens: Tokens of the step that this rank has.
        length: Tokens of a sequence, of which context ranks have equal parts.
        half: Whether products are in bfloat16 under autocast.
        recompute: Whether blocks run again in the backward.
    """
    check_size("tokens", tokens)
    check_size("length", length)
    model, split = plan.model, plan.model.split
    n, hidden, number = split.tensor, model.config.hidden_size, 2 if half else FLOAT
    runs, readers = 2 if recompute else 1, split.context * split.replicas
    sums = logits = shared = calls = 0
    if n > 1:
        parts, norms = _shared_parts(model.config), _norms(model.config)
        blocks = parts * _summed(number * tokens * hidden, n) + norms * _summed(FLOAT * tokens, n)
        whole = _parts_of_residual(model.config)  # they read the residual stream, which is float32
        entered = (parts - whole) * _summed(number * tokens * hidden, n) + whole * _summed(FLOAT * tokens * hidden, n)
        ends = _summed(FLOAT * tokens * hidden, n) + _summed(number * tokens * hidden, n)  # embedding; the head's input
        sums = runs * blocks + entered + norms * _summed(FLOAT * tokens, n) + ends
        logits = _summed(FLOAT * tokens, n) + _summed(
            2 * FLOAT * tokens, n
        )  # the largest; exponentials and the target's
        shared = _summed(FLOAT * _held_by_several(model), n)
        calls = (runs + 1) * (parts + norms) + 5
    own = -(-length // split.context)
    rows = max(1, tokens // own)
    crossing, handed = _crossing(plan, rows, min(own, tokens), number)
    moves = _moved_queries(plan, rows, length, number)
    moved = max((runs * forward + backward for forward, backward in moves), default=0)
    handed += 2 * len(_attention(model)) * bool(moves)
    told = TOLD_BYTES * (split.context - 1)  # once, also with recomputation
    gradients = _summed(FLOAT * plan.parameters, readers)
    calls += (runs + 1) * handed + bool(told) + (readers > 1)
    return Received(sums, logits, (runs + 1) * crossing + moved + told, gradients, shared, calls)


def _forward(model: Model, tokens: int, logits: int) -> Received:
    """Return the bytes that tensor ranks receive in a forward of `tokens` tokens, with the logits of some."""
    n, config, number = model.split.tensor, model.config, _number(model)
    if n == 1:
        return Received()
    parts, norms = _shared_parts(config), _norms(config)
    sums = (parts + 1) * _summed(number * tokens * config.hidden_size, n) + norms * _summed(FLOAT * tokens, n)
    return Received(sums, (n - 1) * number * logits * config.vocab_size, calls=parts + norms + 2)


def _shared_parts(config: HybridConfig) -> int:
    """Return how many mixers and feed-forwards there are."""
    return 2 * config.n_layers - len(set(config.mixer_only))


def _parts_of_residual(config: HybridConfig) -> int:
    """Return how many mixers and feed-forwards read the residual stream itself, and are normalised afterwards."""
    return sum(2 - (i in config.mixer_only) for i, x in enumerate(config.letters) if x in config.norm_after)


def _norms(config: HybridConfig) -> int:
    """Return how many sums norms over the channels of all tensor ranks need; each is of one number a token."""
    found = 0
    for block in empty_of(config).layers:
        mixer, norm = block.mixer, getattr(block.mixer, "norm", None)
        if getattr(mixer, "qk_norm", None) == "full":
            found += 2
        elif isinstance(norm, GroupedGatedNorm):
            found += int(norm.groups == 0)
        elif isinstance(mixer, TTTMixer):
            found += 2  # mean and variance
    return found


def _held_by_several(model: Model) -> int:
    """Return how many numbers tensor ranks sum for the gradients of parameters that several of them hold."""
    whole = empty_of(model.config if model.whole is None else model.whole)
    cuts, found = model_cuts(whole), 0
    for name, x in whole.named_parameters():
        if ".mixer." not in name and ".feed." not in name:
            continue
        if name not in cuts:
            found += x.numel()
            continue
        others = _without(x, cuts[name].dim)
        found += others * sum(x.width for x in cuts[name].parts if x.held_by_several(model.split.tensor))
    return found


def _without(x: Tensor, dim: int) -> int:
    return prod(size for i, size in enumerate(x.shape) if i != dim)


def _crossing(plan: MemoryPlan, rows: int, own: int, number: int) -> tuple[int, int]:
    """Return the bytes that cross segments of `own` tokens in one forward, or one backward, and the collectives."""
    others = plan.model.split.context - 1
    if not others:
        return 0, 0
    found = calls = 0
    for layer in plan.layers:
        if layer.cache:
            found += rows * own * number * (layer.cache_per_token // plan.cache_dtype.itemsize)
            calls += 1
            continue
        found += rows * (_map_bytes(plan, layer) + number * (layer.conv // plan.conv_dtype.itemsize))
        calls += 2 + bool(layer.conv)
    return others * found, calls


def _moved_queries(plan: MemoryPlan, rows: int, tokens: int, number: int) -> list[tuple[int, int]]:
    """Return the bytes that each context rank receives in a forward and in a backward of queries that move.

    A rank that takes queries receives them, and the rank that gives them receives their outputs.
    """
    ranks, attention = plan.model.split.context, _attention(plan.model)
    if ranks == 1 or not attention:
        return []
    moves = plan_moves(even_parts(tokens, ranks), rows)
    keys, values = (number * rows * sum(sizes) for sizes in zip(*attention, strict=True))
    found = []
    for rank in range(ranks if moves else 0):
        taken = sum(move.queries for move in moves if move.worker == rank)
        given = sum(move.queries for move in moves if move.owner == rank)
        found.append((taken * keys + given * values, taken * values + given * keys))
    return found


def _attention(model: Model) -> list[tuple[int, int]]:
    """Return the channels of the queries and of the outputs of each layer with attention."""
    found = []
    for letter in model.config.letters:
        part = model.config.part(kind_of(letter))
        if isinstance(part, AttentionConfig):
            found.append((part.heads * part.head_dim, part.heads * part.head_dim))
        elif isinstance(part, LatentConfig):
            found.append((part.heads * (part.nope_dim + part.rope_dim), part.heads * part.value_dim))
    return found


def _map_bytes(plan: MemoryPlan, layer: LayerMemory) -> int:
    """Return the bytes of the map of a segment, S -> A S + B."""
    kind, config = kind_of(layer.letter), plan.model.config
    part, rule = config.part(kind), rule_named(kind.rule or kind.name)
    left = layer.computed
    if isinstance(part, LinearConfig):
        heads, keys = part.value_heads, part.key_dim
    elif isinstance(part, MambaConfig):
        heads, keys = part.heads, part.state_dim
    else:
        return left
    return left + FLOAT * heads * keys * (keys if rule is not None and rule.corrects else 1)


def _number(model: Model) -> int:
    """Return the bytes of a number between layers, which has at least 16 bits."""
    return max(2, model.dtype.itemsize)


def _summed(nbytes: int, ranks: int) -> int:
    """Return the bytes that a rank receives for a sum of `nbytes` bytes over ranks."""
    return 2 * (nbytes - nbytes // ranks)

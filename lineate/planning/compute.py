"""Operations and bytes moved: per token for prefill, decoding and training, by layer and in total.

A multiply-add counts as 2. Two conventions:

    executed   the matrix products that plain torch runs here, as torch.utils.flop_counter counts them (lineate.flops
               tells it of our ops): attention over all pairs, causal or not, chunks of 64 with their square scores. Not
               counted, as there: triangular solves, convolutions of 4 taps, the recurrent write, norms and other
               elementwise work.
    least      what no implementation avoids: causal pairs alone, the recurrence itself, no padding. For time bounds.
"""

from dataclasses import dataclass

from lineate.dispatch import RECURRENT_UP_TO
from lineate.flops import Heads
from lineate.models.config import LINEAR_LETTERS, ExpertsConfig, HybridConfig, LinearConfig
from lineate.planning.learning import learned, learned_one
from lineate.planning.memory import MemoryPlan
from lineate.planning.models import Model, check_size

CONVENTIONS = ("executed", "least")
_CORRECTS, _PER_CHANNEL = "DGK", "RK"


@dataclass(frozen=True)
class LayerFlops:
    """Operations of one layer."""

    config: HybridConfig
    index: int
    projections: int
    """Of the mixer, per token; of latent attention without making keys and values."""
    feed: int
    """Of the feed-forward, per token."""

    @property
    def letter(self) -> str:
        return self.config.letters[self.index]

    def forward(self, tokens: int, convention: str = "executed") -> int:
        """Of a whole text of so many tokens."""
        _check(convention, tokens=tokens)
        return tokens * (self.projections + self.feed) + self.mixing(tokens, convention)

    def decode(self, context: int, convention: str = "executed") -> int:
        """Of one token after so many."""
        _check(convention)
        return self.projections + self.feed + self.mixing_one(context, convention)

    def mixing(self, tokens: int, convention: str = "executed") -> int:
        """Between tokens: the rule or the attention, of a whole text."""
        pairs = tokens * tokens if convention == "executed" else tokens * (tokens + 1) // 2
        c = self.config
        if self.letter == "A":
            assert c.attention is not None
            return 4 * c.attention.heads * c.attention.head_dim * pairs
        if self.letter == "M":
            assert c.latent is not None
            x = c.latent
            keys, values = x.nope_dim + x.rope_dim, x.value_dim
            wide = max(keys, values) if convention == "executed" else values  # the kernels want one width
            made = 2 * tokens * x.rank * x.heads * (x.nope_dim + values)
            return made + 2 * x.heads * (keys + wide) * pairs
        if self.letter in LINEAR_LETTERS:
            assert c.linear is not None
            if convention == "least":
                return tokens * rule_flops(self.letter, c.linear) - _spared(self.letter, c.linear, tokens)
            if tokens <= (1 if self.letter in "GK" else RECURRENT_UP_TO):  # the recurrent form
                return tokens * self.mixing_one(0, convention)
            return _heads(self.letter, c.linear).chunkwise(tokens)
        return learned(c, self.letter, tokens, convention)

    def mixing_one(self, context: int, convention: str = "executed") -> int:
        """The same of one token after so many."""
        c, seen = self.config, context + 1
        if self.letter == "A":
            assert c.attention is not None
            return 4 * c.attention.heads * c.attention.head_dim * seen
        if self.letter == "M":
            assert c.latent is not None
            x = c.latent
            key = x.rank + x.rope_dim
            wide = key if convention == "executed" else x.rank
            absorbed = 2 * x.heads * (x.rank * (x.nope_dim + x.value_dim) + seen * (key + wide))
            if convention == "executed":
                return absorbed
            made = x.rank * (x.nope_dim + x.value_dim) + x.nope_dim + x.rope_dim + x.value_dim
            return min(absorbed, 2 * x.heads * seen * made)
        if self.letter in LINEAR_LETTERS:
            assert c.linear is not None
            if convention == "least":
                return rule_flops(self.letter, c.linear)
            return _heads(self.letter, c.linear).recurrent(1)
        return learned_one(c, self.letter, context, convention)


@dataclass(frozen=True)
class FlopsPlan:
    """Operations of a model. Every method takes a convention, "executed" or "least"."""

    model: Model
    layers: tuple[LayerFlops, ...]
    head: int
    """Per token whose logits are wanted."""

    def forward(self, tokens: int, logits: int, convention: str = "executed") -> int:
        """Of a whole text, with the logits of so many of its tokens."""
        return sum(layer.forward(tokens, convention) for layer in self.layers) + logits * self.head

    def prefill(self, tokens: int, convention: str = "executed") -> float:
        """Per token, the mean over a text of so many, of which only the last has logits."""
        return self.forward(tokens, 1, convention) / tokens

    def decode(self, context: int, convention: str = "executed") -> int:
        """Of one token after so many."""
        return sum(layer.decode(context, convention) for layer in self.layers) + self.head

    def training(self, length: int, recompute: bool = False, convention: str = "executed") -> float:
        """Per token of texts of this length: 3 forwards, as a backward is two; 4 if blocks are computed again.

        What kernels compute again in their backward anyway (a chunk's scores, flash attention's) is not in it.
        """
        blocks = sum(layer.forward(length, convention) for layer in self.layers)
        return (4 if recompute else 3) * blocks / length + 3 * self.head


def plan_flops(model: Model) -> FlopsPlan:
    """Operations of a model's layers and head."""
    c = model.config
    layers = tuple(LayerFlops(c, i, _projections(c, c.letters[i]), _feed(c, i)) for i in range(c.n_layers))
    return FlopsPlan(model, layers, 2 * c.hidden_size * c.vocab_size)


def rule_flops(letter: str, linear: LinearConfig) -> int:
    """Of a token of the recurrence: read with q, write, and compare first if the rule corrects."""
    times = 3 if letter in _CORRECTS else 2
    return 2 * times * linear.value_heads * linear.key_dim * _columns(letter, linear)


@dataclass(frozen=True)
class Moved:
    """Bytes that must come from or go to memory at least."""

    weights: int
    state: int
    """Recurrent states are read and written when decoding, convolution states read; both are written by a prefill."""
    cache: int
    """Keys and values, or latents: read when decoding, written after a prefill."""

    @property
    def total(self) -> int:
        return self.weights + self.state + self.cache


def decode_bytes(plan: MemoryPlan, batch: int, context: int, routing: str = "least") -> Moved:
    """Of a step of one token in each of batch rows after context tokens.

    routing: the experts that a batch touches. "least": all rows go to the same; "expected": each chooses at random.
    """
    weights = touched_weights(plan, batch, routing) + batch * _embedding_row(plan)
    state = batch * sum((2 if x.letter in LINEAR_LETTERS else 1) * x.memory + x.conv for x in plan.layers)
    return Moved(weights, state, plan.cache(batch, context + 1))


def prefill_bytes(plan: MemoryPlan, batch: int, tokens: int, routing: str = "least") -> Moved:
    """Of batch texts of so many tokens: weights once, and the state they leave."""
    _check(CONVENTIONS[0], tokens=tokens)
    weights = touched_weights(plan, batch * tokens, routing)
    return Moved(weights, batch * (plan.memory + plan.conv), plan.cache(batch, tokens))


def touched_weights(plan: MemoryPlan, tokens: int, routing: str = "least") -> int:
    """Bytes of the weights that so many tokens are multiplied with; of the experts, those that they go to."""
    if routing not in ("least", "expected"):
        raise ValueError(f"routing must be 'least' or 'expected', got {routing!r}")
    c = plan.model.config
    total = sum(layer.weights for layer in plan.layers) + plan.norm + (plan.head or plan.embedding)
    if c.experts is None:
        return total
    x = c.experts
    missed = (1 - x.active / x.count) ** tokens if routing == "expected" else 1 - x.active / x.count
    idle = round(x.count * missed) * 3 * c.hidden_size * x.size * plan.model.dtype.itemsize
    return total - idle * sum(c.has_experts(i) for i in range(c.n_layers))


def _embedding_row(plan: MemoryPlan) -> int:
    return plan.embedding // plan.model.config.vocab_size


def _columns(letter: str, linear: LinearConfig) -> int:
    """Of the memory: linear attention (L) also sums its keys."""
    return linear.value_dim + (letter == "L")


def _spared(letter: str, linear: LinearConfig, tokens: int) -> int:
    """At most, of the recurrence: the state is empty at first, and few tokens can be compared with each other."""
    near, reads = min(tokens, linear.key_dim), 2 if letter in _CORRECTS else 1
    pairs = near * (near + 1) // 2
    return 2 * reads * linear.value_heads * _columns(letter, linear) * (near * linear.key_dim - pairs)


def _heads(letter: str, linear: LinearConfig) -> Heads:
    columns, corrects, per_channel = _columns(letter, linear), letter in _CORRECTS, letter in _PER_CHANNEL
    return Heads(linear.heads, linear.value_heads, linear.key_dim, columns, corrects, per_channel)


def _projections(c: HybridConfig, letter: str) -> int:
    """Per token: what is multiplied with weights in a mixer."""
    if letter == "A":
        assert c.attention is not None
        a = c.attention
        wide, narrow = a.heads * a.head_dim, a.kv_heads * a.head_dim
        return 2 * c.hidden_size * (wide * (3 if a.gated else 2) + 2 * narrow)
    if letter == "M":
        assert c.latent is not None
        m = c.latent
        return 2 * c.hidden_size * (m.heads * (m.nope_dim + m.rope_dim + m.value_dim) + m.rank + m.rope_dim)
    if letter in LINEAR_LETTERS:
        assert c.linear is not None
        x = c.linear
        keys, values = x.heads * x.key_dim, x.value_heads * x.value_dim
        decay, gate = (x.value_dim if n is None else n for n in (x.decay_rank, x.gate_rank))
        widths = {
            "L": values, "R": decay + values, "D": values + x.value_heads, "G": values + 2 * x.value_heads,
            "K": decay + gate + x.value_heads,
        }  # fmt: skip
        inner = {"R": decay * x.value_heads * x.key_dim}
        inner["K"] = inner["R"] + gate * values
        return 2 * (c.hidden_size * (2 * keys + 2 * values + widths[letter]) + inner.get(letter, 0))
    assert c.memory is not None
    heads, width = c.memory.heads, c.memory.heads * c.memory.head_dim
    gates = {"T": width + heads, "P": width + heads, "N": width + 3 * heads, "C": 5 * heads, "E": width + 2 * heads}
    return 2 * c.hidden_size * (4 * width + gates[letter])


def _feed(c: HybridConfig, layer: int) -> int:
    """Per token."""
    if not c.has_experts(layer):
        assert c.feed is not None
        return 6 * c.hidden_size * c.feed.size
    x = c.experts
    assert isinstance(x, ExpertsConfig)
    inner = 6 * (x.active * x.size + x.shared_size) + 2 * x.count + 2 * x.shared_gate
    return c.hidden_size * inner


def _check(convention: str, tokens: int = 1) -> None:
    if convention not in CONVENTIONS:
        raise ValueError(f"convention must be one of {', '.join(CONVENTIONS)}, got {convention!r}")
    check_size("tokens", tokens)

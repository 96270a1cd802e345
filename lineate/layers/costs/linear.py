"""The costs of mixers with a fixed-size memory: operations, and bytes that the backward keeps.

lineate/planning/compute.py and lineate/planning/activations.py say what is counted. k and v are the channels of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lineate.dispatch import CHUNK_SIZES, RECURRENT_UP_TO
from lineate.layers.configs import LinearConfig
from lineate.layers.registry import ModelSizes, Operations
from lineate.layers.variants.features import features_of, layers_of
from lineate.rule import DELTA, GATED_DELTA, GATED_LINEAR, KIMI_DELTA, LINEAR, Rule
from lineate.torch_ops.flops import Heads

RATE_BYTES = {"exact": 117, "kaczmarz": 8}
"""The bytes a token and value head that rates of writing keep, besides normalised queries; gates are float32 then."""


@dataclass(frozen=True)
class LinearCosts:
    """How the costs of one rule differ from those of the others."""

    gates: Callable[[LinearConfig], int]
    """Columns of in_proj behind q | k | v."""
    kept: Callable[[LinearConfig, bool], float]
    """(config, half) -> bytes a token that the gates and feature maps keep."""
    inner: Callable[[LinearConfig], int] = lambda config: 0
    """Elements of the low-rank projections behind in_proj."""
    rule: Rule = LINEAR
    """The row of the rule."""
    per_channel: bool = False
    """Whether the decay is one per key channel."""
    fused: bool = False
    """Whether the rule takes the raw gates; the recurrence then serves only calls of one token."""
    maps: bool = False
    """Whether q and k go through the feature map of the configuration, and the output may be divided by their sums."""

    def operations(self) -> Operations:
        """Return the counts of the rule."""
        return Operations(self.projections, self.mixing, self.mixing_one)

    def projections(self, model: ModelSizes, x: LinearConfig) -> int:
        """Return the products with weights, per token."""
        keys, values = x.heads * x.key_dim, x.value_heads * x.value_dim
        return 2 * (model.hidden_size * (2 * keys + 2 * values + self.gates(x)) + self.inner(x))

    def mixing(self, x: LinearConfig, tokens: int, convention: str) -> int:
        """Return the operations of the rule on a whole sequence."""
        if convention == "least":
            return tokens * self.recurrence(x) - self._spared(x, tokens)
        if tokens <= (1 if self.fused else RECURRENT_UP_TO):
            return tokens * self._heads(x).recurrent(1)
        return self._heads(x).chunkwise(tokens)

    def mixing_one(self, x: LinearConfig, context: int, convention: str) -> int:
        """Return the operations of the rule on one token, whatever came before."""
        return self.recurrence(x) if convention == "least" else self._heads(x).recurrent(1)

    def recurrence(self, x: LinearConfig) -> int:
        """Return the operations of the recurrence on a token: read with q, write, and compare if the rule corrects."""
        return 2 * (3 if self.rule.corrects else 2) * x.value_heads * self.rows(x) * self.columns(x)

    def rows(self, x: LinearConfig) -> int:
        """Return the rows of a head's memory: the channels of a key, or its features."""
        return x.key_dim * (features_of(x.feature_map) if self.maps else 1)

    def columns(self, x: LinearConfig) -> int:
        """Return the columns of a head's memory; the last may be the sum of the keys."""
        return x.value_dim + (self.maps and x.normalize)

    def kept_bytes(self, x: LinearConfig, half: bool) -> float:
        """Return the bytes a token that the backward keeps.

        These are in_proj's output, that of the convolution, the gates, states between chunks, the rule's output and
        the norm's.
        """
        e = 2 if half else 4
        values = x.value_heads * x.value_dim
        width = 2 * x.heads * x.key_dim + values
        states = e * x.value_heads * self.rows(x) * self.columns(x) / CHUNK_SIZES["triton" if half else "native"]
        convolved = width if x.conv_size else 0
        kept = e * (width + self.gates(x) + convolved + 2 * values) + states
        if x.rate == "beta" or not self.rule.corrects:
            return kept + self.kept(x, half)
        return kept + self.kept(x, False) + 4 * x.heads * (x.key_dim + 1) + RATE_BYTES[x.rate] * x.value_heads

    def _spared(self, x: LinearConfig, tokens: int) -> int:
        """Return the most operations that a sequence from an empty state can save on its first k tokens.

        Token i may sum what tokens 1 .. i wrote, i vectors of v numbers, instead of reading the k x v state.
        """
        near, reads = min(tokens, self.rows(x)), 2 if self.rule.corrects else 1
        pairs = near * (near + 1) // 2
        return 2 * reads * x.value_heads * self.columns(x) * (near * self.rows(x) - pairs)

    def _heads(self, x: LinearConfig) -> Heads:
        return Heads(x.heads, x.value_heads, self.rows(x), self.columns(x), self.rule.corrects, self.per_channel)


def values_of(x: LinearConfig) -> int:
    """Return the channels of all value heads."""
    return x.value_heads * x.value_dim


def gate_columns(x: LinearConfig) -> int:
    """Return the columns of in_proj that make the output gate of full rank; 0 if there is no gate."""
    return 0 if x.gate_activation == "none" else values_of(x)


def decay_rank(x: LinearConfig) -> int:
    """Return the width of the low-rank projection to the decay."""
    return x.value_dim if x.decay_rank is None else x.decay_rank


def gate_rank(x: LinearConfig) -> int:
    """Return the width of the low-rank projection to the output gate."""
    return x.value_dim if x.gate_rank is None else x.gate_rank


def _features_kept(x: LinearConfig, half: bool) -> float:
    e, columns = 2 if half else 4, x.value_dim + 1
    return e * (2 * x.heads * x.key_dim + 2 * x.value_heads * columns) + 9 * x.value_heads


def _kimi_columns(x: LinearConfig) -> int:
    """Return the columns of in_proj behind q | k | v: the decay and the output gate, of low or full rank, and beta."""
    decay, gate = decay_rank(x) or x.value_heads * x.key_dim, gate_rank(x) or values_of(x)
    return decay + gate + x.value_heads


def _channels_kept(x: LinearConfig, half: bool) -> float:
    """Return the bytes of KDA's gates, which its Triton kernels read in raw form."""
    e, channels = 2 if half else 4, x.value_heads * x.key_dim
    gate = values_of(x) if gate_rank(x) else 0  # of full rank: a part of in_proj's output, which is counted there
    return e * (gate + (channels if half else 3 * channels)) + (0 if half else 8 * x.value_heads)


# Gates are float32 whatever the products are; the Triton kernels of the fused rules read them as they were projected.
LINEAR_COSTS = LinearCosts(
    gate_columns,
    _features_kept,
    inner=lambda x: 2 * layers_of(x.feature_map) * x.heads * x.key_dim**2,
    maps=True,
)
GATED_LINEAR_COSTS = LinearCosts(
    lambda x: decay_rank(x) + gate_columns(x),
    lambda x, half: 4 * x.value_heads * x.key_dim * (2 if half else 3),
    inner=lambda x: decay_rank(x) * x.value_heads * x.key_dim,
    rule=GATED_LINEAR,
    per_channel=True,
)
DELTA_COSTS = LinearCosts(lambda x: gate_columns(x) + x.value_heads, lambda x, half: 8 * x.value_heads, rule=DELTA)
GATED_DELTA_COSTS = LinearCosts(
    lambda x: gate_columns(x) + 2 * x.value_heads,
    lambda x, half: 0 if half else 20 * x.value_heads,
    rule=GATED_DELTA,
    fused=True,
)
KIMI_DELTA_COSTS = LinearCosts(
    _kimi_columns,
    _channels_kept,
    inner=lambda x: decay_rank(x) * x.value_heads * x.key_dim + gate_rank(x) * values_of(x),
    rule=KIMI_DELTA,
    per_channel=True,
    fused=True,
)

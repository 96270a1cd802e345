"""Count the bytes of the tensors that autograd saves for the backward, each storage once.

The paths that training takes are counted: in float32 the C kernels on a CPU, under bfloat16 autocast the Triton kernels
on a GPU. A block keeps what its norms, products, convolution, rule or attention, and feed-forward read; a part of a
larger tensor keeps all of it. The row of a mixer has what the mixer keeps; without it, that is measured. The residual
stream is float32. Not counted: temporary memory of kernels, tables of rotary positions, and the one or two
tensors of gradients that are alive at a time.
"""

from dataclasses import dataclass

from lineate.layers import kind_of
from lineate.layers.costs.measuring import kept_bytes
from lineate.models.config import HybridConfig


@dataclass(frozen=True)
class Saved:
    """Bytes a token that one block keeps."""

    mixer: float
    feed: float
    residual: int
    """Bytes of its input; recomputation keeps only this."""

    @property
    def total(self) -> float:
        return self.mixer + self.feed + self.residual


def saved_by(config: HybridConfig, layer: int, half: bool) -> Saved:
    """Return the kept bytes of one layer; half: under bfloat16 autocast."""
    kind, hidden, e = kind_of(config.letters[layer]), config.hidden_size, 2 if half else 4
    part = config.part_of(layer)
    mixer = kept_bytes(kind, config, part, half) if kind.kept_bytes is None else kind.kept_bytes(part, half)
    # before the mixer: the residual, which the norm reads, and the norm's output; likewise before the feed-forward
    norm = _statistics(config)
    feed = 0 if layer in config.mixer_only else _feed(config, layer, e) + (4 + e) * hidden + norm
    return Saved(mixer + e * hidden + norm, feed, 4 * hidden)


def _statistics(config: HybridConfig) -> int:
    """Return the bytes of the mean and the deviation that a LayerNorm keeps; RMSNorm computes its own again."""
    return 8 if config.norm == "layer" else 0


def ends(config: HybridConfig, half: bool) -> int:
    """Return the bytes per token outside the blocks: its id, and the inputs of the last norm and the head."""
    normed = 4 * config.hidden_size + _statistics(config) if config.embedding_norm else 0  # what its norm reads
    return 8 + (4 + (2 if half else 4)) * config.hidden_size + _statistics(config) + normed


def _feed(config: HybridConfig, layer: int, e: int) -> int:
    """Return the bytes of gate and up and their product, or of relu and its square; for each expert of a token."""
    if not config.has_experts(layer):
        assert config.feed is not None
        change = e if config.norm == "rms" else 4  # of the difference of tokens that a token shift keeps
        shifted = change * config.hidden_size if config.feed.kind == "channel_mix" else 0
        return e * (3 if config.feed.kind == "swiglu" else 2) * config.feed.size + shifted
    x = config.experts
    assert x is not None
    inner = 3 if x.kind == "swiglu" else 2
    routed = x.active * (2 * config.hidden_size + inner * x.size)  # gathered, made, and mixed
    shared = inner * x.shared_size + (config.hidden_size + 1 if x.shared_gate else 0)
    return e * (routed + shared) + 4 * x.count + 24 * x.active

"""What the backward needs of a forward: bytes of the tensors that autograd saves, each storage once.

Counted are the paths that training takes: in float32 the C kernels on a CPU, under bfloat16 autocast the Triton kernels
on a GPU. Of a block these are what its norms, products, convolution, rule or attention, and feed-forward read; a part
of a larger tensor keeps all of it. The residual stream is float32. Not counted: what a kernel needs only while it runs,
tables of rotary positions, and the one or two tensors of gradients that are alive at a time.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from lineate.dispatch import CHUNK_SIZES
from lineate.models.config import LINEAR_LETTERS, FeedConfig, HybridConfig, LinearConfig, MemoryConfig
from lineate.models.hybrid import make_memory
from lineate.tracing import cpu_by_default


@dataclass(frozen=True)
class Saved:
    """Bytes a token of one block."""

    mixer: float
    feed: float
    residual: int
    """Its input, which is all that recomputation keeps."""

    @property
    def total(self) -> float:
        return self.mixer + self.feed + self.residual


def saved_by(config: HybridConfig, layer: int, half: bool) -> Saved:
    """Of one layer; half: under bfloat16 autocast."""
    letter, hidden, e = config.letters[layer], config.hidden_size, 2 if half else 4
    mixer: float
    if letter == "A":
        mixer = _attention(config, e)
    elif letter == "M":
        mixer = _latent(config, e)
    elif letter in LINEAR_LETTERS:
        assert config.linear is not None
        mixer = _linear(config.linear, letter, half)
    else:
        assert config.memory is not None
        # most of it is computed in float32 in any case
        mixer = config.memory.heads * learning_bytes(letter, replace(config.memory, heads=1))
    # in front of the mixer: the residual, which the norm reads, and the norm's output; likewise of the feed-forward
    return Saved(mixer + e * hidden, _feed(config, layer, e) + (4 + e) * hidden, 4 * hidden)


def ends(config: HybridConfig, half: bool) -> int:
    """Bytes a token around the blocks: its number, and what the last norm and the head read."""
    return 8 + (4 + (2 if half else 4)) * config.hidden_size


def _attention(config: HybridConfig, e: int) -> int:
    """in_proj's output; q and k if norm or rotation made new ones; output; its gate and the product with it.

    In 16 bit, for the kernel of packed texts, q, k and v without gaps (and repeated for grouped queries by a torch that
    cannot share them: not counted).
    """
    a = config.attention
    assert a is not None
    wide, narrow = a.heads * a.head_dim, a.kv_heads * a.head_dim
    projected = wide * (2 if a.gated else 1) + 2 * narrow
    made = wide + narrow if a.rotary_dim or a.qk_norm else 0
    if e == 2:
        made = wide + 2 * narrow
    return e * (projected + made + wide * (3 if a.gated else 1)) + 4 * a.heads


def _latent(config: HybridConfig, e: int) -> int:
    """in_proj's output, the cached vector, keys and values of all heads, the output."""
    m = config.latent
    assert m is not None
    keys, values = m.heads * (m.nope_dim + m.rope_dim), m.heads * m.value_dim
    padded = keys > values  # values are widened to the keys, and the output cut
    made = 2 * keys + values if padded else m.heads * m.nope_dim + 2 * values
    turned = keys if m.rope_theta is not None else 0
    return e * (keys + 2 * (m.rank + m.rope_dim) + keys + made + turned) + 4 * m.heads


def _linear(x: LinearConfig, letter: str, half: bool) -> float:
    """in_proj's output, that of the convolution, the gates, states between chunks, the rule's output, the norm's."""
    e = 2 if half else 4
    keys, values, per_channel = x.heads * x.key_dim, x.value_heads * x.value_dim, x.value_heads * x.key_dim
    width = 2 * keys + values
    decay, gate = (x.value_dim if n is None else n for n in (x.decay_rank, x.gate_rank))
    columns = x.value_dim + (letter == "L")
    projected = {
        "L": values, "R": decay + values, "D": values + x.value_heads, "G": values + 2 * x.value_heads,
        "K": decay + gate + x.value_heads,
    }  # fmt: skip
    # float32 whatever the products are; the Triton kernels of G and K read the gates as they were projected
    gates = {
        "L": e * (2 * keys + 2 * x.value_heads * columns) + 9 * x.value_heads,
        "R": 4 * per_channel * (2 if half else 3),
        "D": 8 * x.value_heads,
        "G": 0 if half else 20 * x.value_heads,
        "K": e * (values + (per_channel if half else 3 * per_channel)) + (0 if half else 8 * x.value_heads),
    }
    states = e * x.value_heads * x.key_dim * columns / CHUNK_SIZES["triton" if half else "native"]
    convolved = width if x.conv_size else 0
    return e * (width + projected[letter] + convolved + 2 * values) + gates[letter] + states


def _feed(config: HybridConfig, layer: int, e: int) -> int:
    """What goes in, gate and up, and their product; of experts for each one that a token goes to."""
    if not config.has_experts(layer):
        assert config.feed is not None
        return e * 3 * config.feed.size
    x = config.experts
    assert x is not None
    routed = x.active * (2 * config.hidden_size + 3 * x.size)  # gathered, made, and mixed
    shared = 3 * x.shared_size + (config.hidden_size + 1 if x.shared_gate else 0)
    return e * (routed + shared) + 4 * x.count + 24 * x.active


@lru_cache
@cpu_by_default
def learning_bytes(letter: str, memory: MemoryConfig) -> float:
    """Bytes a token that a memory with one head saves: measured, not modelled, from one chunk to the next."""
    hidden = 8
    config = HybridConfig(1, hidden, 1, letter, memory=memory, feed=FeedConfig(1))
    mixer = make_memory(config, letter)
    chunk = getattr(mixer, "chunk", 16)
    assert isinstance(chunk, int)
    one, two = (saved_bytes(mixer, torch.randn(1, n * chunk, hidden)) for n in (2, 4))
    return (two - one) / (2 * chunk) - 4 * hidden  # the input is the block's


def saved_bytes(module: torch.nn.Module, x: Tensor) -> int:
    """Of the tensors that a call's backward would need, without parameters."""
    own = {y.untyped_storage().data_ptr() for y in [*module.parameters(), *module.buffers()]}
    found: dict[int, tuple[int, Tensor]] = {}

    def keep(y: Tensor) -> Tensor:
        storage = y.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes(), y  # the tensor, so that its address is not used again
        return y

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda y: y):
        kept = module(x)
    total = sum(nbytes for nbytes, _ in found.values())
    del kept
    return total

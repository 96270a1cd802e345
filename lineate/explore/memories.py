"""The six memories of the demo: written through the public ops, read without changing them.

A memory is queried by reading its state, S^T k; softmax attention by attending to its cache. Keys and values have
length 1, so an error of 0 is perfect recall and an error of 1 is that of an empty memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import lineate
from lineate import rule as equation

FIXED_SIZE = tuple(rule.name for rule in equation.ONE_KEY_RULES)
"""The public ops whose memory has a fixed size."""
DEMO_RULES = (*FIXED_SIZE, "softmax_attention")
"""The public ops of the demo; the rows of the mixers have their labels and colours."""
HAND_MADE_CHANNELS = 8
"""Channels of a key and of a value where a picture writes tokens by hand."""

FORGETTING = tuple(rule.name for rule in equation.ONE_KEY_RULES if rule.decays != ("none",))
"""Those that can forget."""

WrittenMemory = Tensor | lineate.KeyValueCache
OnProgress = Callable[[float], None]
"""A callback with the progress of an experiment, from 0 to 1."""


def silent(done: float) -> None:
    """Ignore the progress of an experiment."""


@dataclass(frozen=True)
class RecallSetting:
    """The size of the recall experiments."""

    key_dim: int = 128
    """Channels of a key and of a value; a memory is key_dim x key_dim."""
    trials: int = 16
    """Independent memories, averaged."""
    similarity: float = 0.1
    """Mean cosine between two keys of one topic: real keys are never exactly orthogonal."""
    group: int = 8
    """Pairs in each group (old, kept, overwritten) of the overwriting experiment."""
    softmax_scale: float = 32.0
    """Sharpness of softmax attention; the default 1/sqrt(k) suits keys of length sqrt(k); these have length 1."""
    seed: int = 0
    """Seed of all keys and values."""

    def generator(self) -> torch.Generator:
        """Return a new generator, so that every experiment starts from the same seed."""
        return torch.Generator().manual_seed(self.seed)


def pairs(
    setting: RecallSetting, count: int, generator: torch.Generator, channels: slice = slice(None)
) -> tuple[Tensor, Tensor]:
    """Return keys and values `trials count 1 key_dim` of one topic; keys use `channels` and are zero elsewhere."""
    trials, dim = setting.trials, setting.key_dim
    width = len(range(dim)[channels])
    shared = _unit(torch.randn(trials, 1, 1, width, generator=generator))
    own = _unit(torch.randn(trials, count, 1, width, generator=generator))
    keys = torch.zeros(trials, count, 1, dim)
    keys[..., channels] = _unit(setting.similarity**0.5 * shared + (1 - setting.similarity) ** 0.5 * own)
    return keys, _unit(torch.randn(trials, count, 1, dim, generator=generator))


def write(
    rule: str,
    memory: WrittenMemory | None,
    keys: Tensor,
    values: Tensor,
    decay: Tensor | None = None,
    channels: slice = slice(None),
) -> WrittenMemory:
    """Return the memory after these pairs, in order.

    `decay` (one number in [0, 1] a token) is for the rules that can forget. A rule with one gate per head forgets
    everywhere; Kimi Delta Attention forgets in `channels` only. beta is 1.
    """
    trials, tokens, heads, dim = keys.shape
    per_token = torch.zeros(tokens) if decay is None else decay.log()
    per_head = per_token[None, :, None].expand(trials, tokens, heads)
    beta = torch.ones(trials, tokens, heads)
    if isinstance(memory, lineate.KeyValueCache) or rule == "softmax_attention":
        cache = memory if isinstance(memory, lineate.KeyValueCache) else None
        return lineate.softmax_attention(keys, keys, values, state=cache).state
    if rule not in FIXED_SIZE:
        raise ValueError(f"rule must be one of {', '.join(DEMO_RULES)}, got {rule!r}")
    per_channel = torch.zeros(trials, tokens, heads, dim)
    per_channel[..., channels] = per_head.unsqueeze(-1)
    return attend(rule, (keys, keys, values), per_head, per_channel, beta, memory)


def attend(
    rule: str, qkv: tuple[Tensor, Tensor, Tensor], per_head: Tensor, per_channel: Tensor, beta: Tensor,
    state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the state of a rule after these tokens; the output is computed too, as in a model.

    Args:
        rule: the name of a rule of the equation, which is also that of its public op.
        qkv: q, k and v.
        per_head: log_decay `b t hv`, for a rule that takes one.
        per_channel: log_decay `b t hv k`, for a rule that takes no other.
        beta: for a rule that corrects.
        state: the state to continue from.
    """
    row = equation.rule_named(rule)
    if row is None:
        raise ValueError(f"rule must be one of {', '.join(FIXED_SIZE)}, got {rule!r}")
    gates = [per_head if "head" in row.decays else per_channel] if row.decays != ("none",) else []
    gates += [beta] if row.corrects else []
    memory: Tensor = getattr(lineate, row.name)(*qkv, *gates, state=state).state
    return memory


def read(memory: WrittenMemory, keys: Tensor, setting: RecallSetting) -> Tensor:
    """Return the memory's answers to keys `b t h k`, without writing."""
    if isinstance(memory, lineate.KeyValueCache):
        queries, cached_keys, cached_values = (x.transpose(1, 2) for x in (keys, memory.keys, memory.values))
        scale = setting.softmax_scale
        return F.scaled_dot_product_attention(queries, cached_keys, cached_values, scale=scale).transpose(1, 2)
    return equation.read(memory.unsqueeze(1), keys)


def recall_error(memory: WrittenMemory, keys: Tensor, values: Tensor, setting: RecallSetting) -> float:
    """Return the root mean square distance between answers and values: 0 is perfect, 1 no better than no answer."""
    return _root_mean_square(read(memory, keys, setting) - values)


def answer_size(memory: WrittenMemory, keys: Tensor, setting: RecallSetting) -> float:
    """Return the root mean square length of the answers; a stored value has length 1."""
    return _root_mean_square(read(memory, keys, setting))


def state_norm(memory: WrittenMemory) -> float | None:
    """Return the Frobenius norm of the state, averaged over trials; a cache has none to compare."""
    if isinstance(memory, lineate.KeyValueCache):
        return None
    return memory.norm(dim=(-2, -1)).mean().item()


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def _root_mean_square(x: Tensor) -> float:
    return x.square().sum(dim=-1).mean().sqrt().item()

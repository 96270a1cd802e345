"""Counts the operations of the rules, for lineate.planning and for torch.utils.flop_counter.

A multiply-add counts as 2. Only the matrix products of plain torch count, whichever backend runs: those of a chunk
(forms/chunk.py: scores, reads, output, write), or of a token (its reads; the write is no product). The native and the
triton backend count as torch in its chunks of 64. A backward counts as two forwards; recomputation does not count.
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lineate.rule import row_of
from lineate.torch_ops.tracing import WHEN_MODES_RECORD

CHUNK = 64
"""Tokens a chunk of plain torch, unless a call says otherwise."""
_BLOCK = 16  # rows of a chunk that share a reference point of the decay per channel


class Heads(NamedTuple):
    """The sizes that the operations of a token or a chunk depend on."""

    keys: int
    values: int
    key_dim: int
    value_dim: int
    corrects: bool
    per_channel: bool

    def chunk(self, c: int) -> int:
        """Return the operations of one chunk of c tokens."""
        s, k, v = 2 if self.corrects else 1, self.key_dim, self.value_dim
        if self.per_channel:
            m = ceil(c / _BLOCK)
            scores = self.values * s * _BLOCK * _BLOCK * k * m * (m + 1)
        else:
            scores = self.keys * 2 * s * c * c * k
        return scores + self.values * 2 * (s * c * k * v + c * c * v + c * k * v)

    def chunkwise(self, tokens: int, size: int = CHUNK) -> int:
        """Return the operations of a sequence in chunks of `size`."""
        whole, rest = divmod(tokens, size)
        return whole * self.chunk(size) + (self.chunk(rest) if rest else 0)

    def recurrent(self, tokens: int) -> int:
        """Return the operations of a sequence token by token."""
        return tokens * 2 * (2 if self.corrects else 1) * self.values * self.key_dim * self.value_dim


class GeneralHeads(NamedTuple):
    """The sizes that the operations of a chunk of the general row depend on (forms/general_chunk.py)."""

    values: int
    key_dim: int
    value_dim: int
    writes: int
    per_channel: bool
    two_writers: bool
    """Whether what is erased is not the key, so that it has scores of its own."""

    def chunk(self, c: int) -> int:
        """Return the operations of one chunk of c tokens."""
        m, k, v, sides = self.writes * c, self.key_dim, self.value_dim, 1 + self.two_writers
        blocks = ceil(c / _BLOCK)
        scores = 2 * _BLOCK * _BLOCK * k * blocks * (blocks + 1) if self.per_channel else 2 * (c + m) * m * k
        written = 2 * m * m * v if self.two_writers else 0  # M U
        return self.values * (2 * (c + m) * k * v + sides * (scores + 2 * c * m * v + 2 * m * k * v) + written)

    def chunkwise(self, tokens: int, size: int = CHUNK) -> int:
        """Return the operations of a sequence in chunks of `size`."""
        whole, rest = divmod(tokens, size)
        return whole * self.chunk(size) + (self.chunk(rest) if rest else 0)


def announce() -> None:
    """Register these formulas with torch's FLOP counters, both active ones and later ones.

    Importing torch's counter takes longer than importing lineate, so this does nothing unless another module has
    imported it. `recorded` calls it whenever a dispatch mode, which may be a counter, is active.
    """
    counters = sys.modules.get("torch.utils.flop_counter")
    if counters is None:
        return
    at_work = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, counters._FlopCounterMode)]
    registries = [counters.flop_registry, *(mode.counter.flop_registry for mode in at_work)]
    for name, count in _COUNTS.items():
        packet = getattr(torch.ops.lineate, name, None)  # the kernels may not be importable
        if packet is not None and any(packet not in registry for registry in registries):
            formula = _formula(packet, count)
            for registry in registries:
                registry.setdefault(packet, formula)


def _formula(packet: Any, count: Callable[[dict[str, Any]], int]) -> Callable[..., int]:
    names = [argument.name for argument in packet.default._schema.arguments]

    def formula(*args: Any, out_val: Any = None, **named: Any) -> int:
        return count(dict(zip(names, args, strict=False)) | named)

    return formula


def _heads(given: dict[str, Any]) -> Heads:
    q, v, log_decay = (given[name] for name in ("q", "v", "log_decay"))
    per_channel = log_decay is not None and log_decay.dim() == 4
    return Heads(q.shape[2], v.shape[2], q.shape[3], v.shape[3], row_of(given["rule"]).corrects, per_channel)


def _lengths(given: dict[str, Any]) -> list[int]:
    """Return the tokens of each sequence; if the bounds have no values, all tokens count as one sequence."""
    (b, t), bounds = given["q"].shape[:2], given["cu_seqlens"]
    if bounds is None:
        return [t] * b
    if bounds.is_meta or type(bounds).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return [t]
    return [end - start for start, end in pairwise(bounds.tolist())]


def _chunkwise(given: dict[str, Any]) -> int:
    return sum(_heads(given).chunkwise(n, given.get("chunk_size", CHUNK)) for n in _lengths(given))


def _general(given: dict[str, Any]) -> int:
    q, k, v, log_decay = (given[name] for name in ("q", "k", "v", "log_decay"))
    heads = GeneralHeads(
        v.shape[-2], q.shape[3], v.shape[-1], k.shape[2] if row_of(given["rule"]).writes else 1,
        log_decay is not None and log_decay.dim() == 4, given["direction"] is not None,
    )  # fmt: skip
    return sum(heads.chunkwise(n, given.get("chunk_size", CHUNK)) for n in _lengths(given))


def _general_in_torch_chunks(given: dict[str, Any]) -> int:
    return _general({**given, "chunk_size": CHUNK})


def _in_torch_chunks(given: dict[str, Any]) -> int:
    return _chunkwise({**given, "chunk_size": CHUNK})


def _recurrent(given: dict[str, Any]) -> int:
    row, k, v = row_of(given["rule"]), given["k"], given["v"]
    if row.general:  # one comparison a write, and one read a token
        writes = k.shape[2] if row.writes else 1
        return sum(_lengths(given)) * 2 * (1 + writes) * v.shape[-2] * k.shape[-1] * v.shape[-1]
    return _heads(given).recurrent(sum(_lengths(given)))


def _twice(count: Callable[[dict[str, Any]], int]) -> Callable[[dict[str, Any]], int]:
    return lambda given: 2 * count(given)


_COUNTS: dict[str, Callable[[dict[str, Any]], int]] = {
    "chunkwise": _chunkwise,
    "chunkwise_backward": _twice(_chunkwise),
    "chunkwise_general": _general,
    "chunkwise_general_backward": _twice(_general),
    "chunkwise_general_native": _general_in_torch_chunks,
    "chunkwise_general_native_backward": _twice(_general_in_torch_chunks),
    "chunkwise_general_triton": _general_in_torch_chunks,
    "chunkwise_general_triton_backward": _twice(_general_in_torch_chunks),
    "recurrent_general_native": _recurrent,
    "chunkwise_native": _in_torch_chunks,
    "chunkwise_native_backward": _twice(_in_torch_chunks),
    "chunkwise_triton": _in_torch_chunks,
    "chunkwise_triton_backward": _twice(_in_torch_chunks),
    "recurrent_native": _recurrent,
    "recurrent_triton": _recurrent,
    "recurrent_general_triton": _recurrent,
    "decode": _recurrent,
}
"""The operations of each op, by its name."""

WHEN_MODES_RECORD.append(announce)

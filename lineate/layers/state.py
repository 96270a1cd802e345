"""What layers remember between calls: named tensors of fixed size (Memory), or of one entry a token (TokenCache).

A state has rows: the b rows of a batch, or the texts of a packed one; a call on packed texts may be continued by a call
on a batch of as many rows, and the other way round. States are values: a call returns a new one and leaves the old one
as it was, so that a text can be continued in several ways.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layer's state: its shape for one row, without the row itself."""

    name: str
    shape: tuple[int | str, ...]
    """"t" stands for the tokens seen so far."""
    dtype: torch.dtype

    def nbytes(self, tokens: int = 0) -> int:
        """Bytes of one row after so many tokens."""
        return prod(tokens if size == "t" else int(size) for size in self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Memory:
    """Tensors `rows ...` whose size does not depend on the tokens seen."""

    tensors: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def rows(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())

    def select(self, rows: Tensor) -> "Memory":
        """These rows, in this order."""
        return Memory({name: x.index_select(0, rows.to(x.device)) for name, x in self.tensors.items()})

    def detach(self) -> "Memory":
        return Memory({name: x.detach() for name, x in self.tensors.items()})

    def to(self, device: torch.device | str) -> "Memory":
        return Memory({name: x.to(device) for name, x in self.tensors.items()})


class _Buffer:
    """Memory with room for more tokens, and how many are taken by whoever went farthest."""

    def __init__(self, tensors: dict[str, Tensor], taken: int) -> None:
        self.tensors = tensors
        self.taken = taken


class TokenCache:
    """Tensors `rows n ...` with one entry a token: row r has the first `lengths[r]`; what follows these is not read.

    lengths is an int if all rows have as many.
    """

    def __init__(self, tensors: dict[str, Tensor], lengths: int | Tensor) -> None:
        n = next(iter(tensors.values())).shape[1]
        self._buffer = _Buffer(tensors, n)
        self.n = n
        self.lengths = lengths

    def __getitem__(self, name: str) -> Tensor:
        return self._buffer.tensors[name][:, : self.n]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._buffer.tensors)

    @property
    def rows(self) -> int:
        return next(iter(self._buffer.tensors.values())).shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of what is cached, without the room for more."""
        return sum(self[name].numel() * self[name].element_size() for name in self.names)

    @property
    def positions(self) -> int | Tensor:
        """Where the next token of each row stands."""
        return self.lengths

    def select(self, rows: Tensor) -> "TokenCache":
        """These rows, in this order."""
        tensors = {name: self[name].index_select(0, rows.to(self[name].device)) for name in self.names}
        lengths = self.lengths if isinstance(self.lengths, int) else self.lengths[rows.to(self.lengths.device)]
        return TokenCache(tensors, lengths)

    def detach(self) -> "TokenCache":
        return TokenCache({name: self[name].detach() for name in self.names}, self.lengths)

    def to(self, device: torch.device | str) -> "TokenCache":
        lengths = self.lengths if isinstance(self.lengths, int) else self.lengths.to(device)
        return TokenCache({name: self[name].to(device) for name in self.names}, lengths)

    def append(self, new: dict[str, Tensor]) -> "TokenCache":
        """With t more tokens in every row: new `rows t ...`."""
        t = next(iter(new.values())).shape[1]
        if isinstance(self.lengths, int):
            return self._append_all(new, t)
        at = self.lengths[:, None] + torch.arange(t, device=self.lengths.device)  # rows t
        rows = torch.arange(self.rows, device=at.device)[:, None].expand_as(at)
        return self._scatter({name: x.flatten(0, 1) for name, x in new.items()}, rows.flatten(), at.flatten(), t, t)

    def append_packed(self, new: dict[str, Tensor], cu_seqlens: Tensor) -> "TokenCache":
        """With the tokens of packed texts, one text a row: new `1 t ...`."""
        rows, offsets = locate(cu_seqlens)
        lengths = cu_seqlens.diff()
        base = self.lengths if isinstance(self.lengths, Tensor) else torch.full_like(lengths, self.lengths)
        return self._scatter(
            {name: x[0] for name, x in new.items()}, rows, base[rows] + offsets, lengths, int(lengths.max())
        )

    def _append_all(self, new: dict[str, Tensor], t: int) -> "TokenCache":
        """Into the room behind the last token, unless another continuation took it or gradients are wanted."""
        buffer, n = self._buffer, self.n
        first = next(iter(buffer.tensors.values()))
        if not n:
            return TokenCache(new, t)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*new.values(), *buffer.tensors.values())):
            old = {name: x[:, :n] for name, x in buffer.tensors.items()}
            return TokenCache({name: torch.cat((old[name], x), 1) for name, x in new.items()}, n + t)
        if buffer.taken != n or first.shape[1] < n + t:
            buffer = self._grown(n + t)
        for name, x in new.items():
            buffer.tensors[name][:, n : n + t] = x
        buffer.taken = n + t
        return self._over(buffer, n + t, n + t)

    def _grown(self, least: int) -> _Buffer:
        """A copy with room for half as many tokens again."""
        capacity = least + max(least // 2, 64)
        tensors = {}
        for name, x in self._buffer.tensors.items():
            tensors[name] = x.new_empty(x.shape[0], capacity, *x.shape[2:])
            tensors[name][:, : self.n] = x[:, : self.n]
        return _Buffer(tensors, self.n)

    def _scatter(
        self, new: dict[str, Tensor], rows: Tensor, at: Tensor, more: int | Tensor, most: int
    ) -> "TokenCache":  # fmt: skip
        """new `tokens ...` to [rows, at], in a copy (other rows may have room that is this row's)."""
        lengths = self.lengths + more
        n = self.n + most if isinstance(lengths, int) else int(lengths.max())
        tensors = {}
        for name, x in new.items():
            old = self[name]
            padded = torch.cat((old, old.new_zeros(old.shape[0], max(n - self.n, 0), *old.shape[2:])), 1)
            tensors[name] = padded.index_put((rows, at), x)
        return TokenCache(tensors, lengths)

    @staticmethod
    def _over(buffer: _Buffer, n: int, lengths: int) -> "TokenCache":
        cache = TokenCache.__new__(TokenCache)
        cache._buffer, cache.n, cache.lengths = buffer, n, lengths
        return cache


LayerState = Memory | TokenCache


def empty_cache(new: dict[str, Tensor], rows: int) -> TokenCache:
    """No tokens yet, in the shapes and dtypes of new `b t ...`."""
    return TokenCache({name: x.new_empty(rows, 0, *x.shape[2:]) for name, x in new.items()}, 0)


def locate(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """For every token of packed texts: which text, and where in it."""
    lengths = cu_seqlens.diff()
    rows = torch.repeat_interleave(torch.arange(lengths.shape[0], device=cu_seqlens.device), lengths)
    return rows, torch.arange(rows.shape[0], device=cu_seqlens.device) - cu_seqlens[:-1][rows]


def token_positions(past: int | Tensor, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Where the tokens of x `b t ...` stand in their texts: `b t`, or `t` if all rows agree."""
    if cu_seqlens is None:
        steps = torch.arange(x.shape[1], device=x.device)
        return steps + past if isinstance(past, int) else past[:, None] + steps
    rows, offsets = locate(cu_seqlens)
    return offsets + (past if isinstance(past, int) else past[rows])


def bounds(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """Start and end of every text."""
    return list(pairwise(cu_seqlens.tolist()))

"""The states of layers between calls: named tensors of fixed size (Memory), or with one entry a token (TokenCache).

A state has rows: the b rows of a batch, or the sequences of a packed one; a call on packed sequences may be continued
by a call on a batch of as many rows, and the other way round. States are values: a call returns a new one and leaves
the old one unchanged, so that a sequence can be continued in several ways.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lineate.forms.sequences import locate
from lineate.ops.rings import Ring

Made = TypeVar("Made")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layer's state.

    Args:
        name: its name in the state.
        shape: its shape for one row, without the row itself; "t" stands for the tokens seen so far.
        dtype: its dtype.
        dtypes: other dtypes in which it may be kept between tokens; a call returns it in the dtype of the given state.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    dtypes: tuple[torch.dtype, ...] = ()

    def kept_in(self, dtype: torch.dtype) -> "TensorSpec":
        """Return the spec with this dtype, or the spec itself if the tensor cannot be kept in it."""
        return replace(self, dtype=dtype) if dtype in self.dtypes else self

    def nbytes(self, tokens: int = 0) -> int:
        """Return the bytes of one row after `tokens` tokens."""
        return prod(tokens if size == "t" else int(size) for size in self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Memory:
    """Tensors `rows ...` whose size does not depend on the tokens seen.

    Args:
        tensors: by name.
        owned: whether only the caller has them, so that a call may overwrite and return them where that saves a copy.
        into: tensors of the same shapes that only the caller has; a call may fill and return them instead of new ones.
        seeds: `rows`, int: the next token rounds a bfloat16 memory stochastically, as in lineate.decode; None: to the
            nearest.
        ring: the tokens that "memory" does not have yet; the next call, of one token, reads and extends it.
    """

    tensors: Mapping[str, Tensor]
    owned: bool = False
    into: Mapping[str, Tensor] | None = None
    seeds: Tensor | None = None
    ring: Ring | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __repr__(self) -> str:
        return f"Memory({_shown(self.tensors)}, nbytes={self.nbytes}{', owned' if self.owned else ''})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    @property
    def rows(self) -> int:
        """The rows of its tensors; 0 if it has none."""
        return next((x.shape[0] for x in self.tensors.values()), 0)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())

    def select(self, rows: Tensor) -> "Memory":
        """Return these rows, in this order."""
        return Memory({name: x.index_select(0, rows.to(x.device)) for name, x in self.tensors.items()})

    @staticmethod
    def join(states: Sequence["Memory"]) -> "Memory":
        """Return the rows of all of them, one after another."""
        _check_alike(states)
        return Memory({name: torch.cat([state[name] for state in states]) for name in states[0].names})

    def detach(self) -> "Memory":
        return Memory({name: x.detach() for name, x in self.tensors.items()})

    def to(self, device: torch.device | str) -> "Memory":
        return Memory({name: x.to(device) for name, x in self.tensors.items()})


_CLAIMING = Lock()
"""Held while room is claimed, because two threads may continue one state; global, as a graph cannot create one."""


class _Buffer:
    """Memory with room for more tokens, and the number of tokens that the longest continuation has claimed."""

    def __init__(self, tensors: dict[str, Tensor], taken: int) -> None:
        self.tensors = tensors
        self.taken = taken

    def claim(self, n: int, t: int) -> bool:
        """Claim the room for tokens n .. n + t, if there is any and no other continuation has claimed it."""
        first = next(iter(self.tensors.values()))
        if first.is_inference() and not torch.is_inference_mode_enabled():  # torch forbids writing to it
            return False
        with _CLAIMING:
            if self.taken != n or first.shape[1] < n + t:
                return False
            self.taken = n + t
            return True


@dataclass
class Carried:
    """Tensors that the layers of one call hand on to later layers in addition to the residual stream.

    A model makes one for each call, which its layers fill and read; it is not a part of the state.

    Args:
        first_value: `b t width`, the values of the first layer of RWKV-7; None before that layer has run.
    """

    first_value: Tensor | None = None


class TokenCache:
    """Tensors `rows n ...` with one entry a token: row r has the first `lengths[r]` entries; the rest is never read.

    Args:
        tensors: by name.
        lengths: tokens of each row; an int if all rows have as many.
    """

    shared: dict[Hashable, Any] | None = None
    """Values that are equal for all layers of one call, if they share them."""

    def __init__(self, tensors: dict[str, Tensor], lengths: int | Tensor) -> None:
        self.n = next(iter(tensors.values())).shape[1]
        self.rows = next(iter(tensors.values())).shape[0]
        self.lengths = lengths
        self._filled: _Buffer | None = _Buffer(tensors, self.n)
        self._packed: tuple[dict[str, Tensor], Tensor] | None = None

    @classmethod
    def of(cls, new: dict[str, Tensor], cu_seqlens: Tensor | None) -> "TokenCache":
        """Make a cache of the first tokens of all rows: new `b t ...`, or `1 t ...` with the bounds of packed ones."""
        new = {name: x.contiguous() for name, x in new.items()}  # a view would keep the larger tensor alive
        if cu_seqlens is None:
            return cls(new, next(iter(new.values())).shape[1])
        cache = cls.__new__(cls)  # padded only when it is continued
        cache.lengths, cache.rows, cache.n = cu_seqlens.diff(), cu_seqlens.shape[0] - 1, -1
        cache._filled, cache._packed = None, (new, cu_seqlens)
        return cache

    def __repr__(self) -> str:
        lengths = self.lengths if isinstance(self.lengths, int) else "of each row"
        if self._packed is not None:
            tensors, kept = self._packed[0], "packed "
        else:  # the part of the buffers that is read
            tensors, kept = {name: self[name] for name in self.names}, ""
        return f"TokenCache({kept}{_shown(tensors)}, rows={self.rows}, lengths={lengths}, nbytes={self.nbytes})"

    @property
    def _buffer(self) -> _Buffer:
        if self._filled is None:
            assert self._packed is not None and isinstance(self.lengths, Tensor)
            new, cu_seqlens = self._packed
            # A graph cannot wait for the longest length; a bound suffices, as rows are masked after their length.
            tokens = next(iter(new.values())).shape[1]
            self.n = tokens if torch.compiler.is_compiling() else int(self.lengths.max())
            rows, at = locate(cu_seqlens, tokens)
            padded = {name: x.new_zeros(self.rows, self.n, *x.shape[2:]) for name, x in new.items()}
            tensors = {name: padded[name].index_put((rows, at), x[0]) for name, x in new.items()}
            self._filled, self._packed = _Buffer(tensors, self.n), None
        return self._filled

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._buffer.tensors[name]
        return tensor[:, : self.n]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors as they are kept, with room for more: `rows n ...`, or packed `1 t ...`."""
        return self._packed[0] if self._packed is not None else self._buffer.tensors

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    @property
    def nbytes(self) -> int:
        """The bytes of the cached tokens, without the room for more."""
        if self._packed is not None:
            return sum(x.nbytes for x in self._packed[0].values())
        return sum(self[name].numel() * self[name].element_size() for name in self.names)

    def once(self, what: Hashable, make: Callable[[], Made]) -> Made:
        """Return the result of make, which is the same for all layers of a call; computed once if it is shared."""
        if self.shared is None:
            return make()
        if what not in self.shared:
            self.shared[what] = make()
        made: Made = self.shared[what]
        return made

    def select(self, rows: Tensor) -> "TokenCache":
        """Return these rows, in this order."""
        tensors = {name: self[name].index_select(0, rows.to(self[name].device)) for name in self.names}
        lengths = self.lengths if isinstance(self.lengths, int) else self.lengths[rows.to(self.lengths.device)]
        return TokenCache(tensors, lengths)

    @staticmethod
    def join(states: Sequence["TokenCache"]) -> "TokenCache":
        """Return the rows of all of them, one after another, each at its own length."""
        _check_alike(states)
        n = max(state[name].shape[1] for state in states for name in state.names)
        parts = [state._grown(n, 0).tensors for state in states]
        joined = {name: torch.cat([part[name] for part in parts]) for name in states[0].names}
        lengths = [(state.rows, state.lengths) for state in states]
        return TokenCache(joined, join_lengths(lengths, next(iter(joined.values())).device))

    def detach(self) -> "TokenCache":
        return TokenCache({name: self[name].detach() for name in self.names}, self.lengths)

    def to(self, device: torch.device | str) -> "TokenCache":
        lengths = self.lengths if isinstance(self.lengths, int) else self.lengths.to(device)
        return TokenCache({name: self[name].to(device) for name in self.names}, lengths)

    def reserve(self, n: int) -> "TokenCache":
        """Return a copy with room for n tokens a row in all, so that append copies nothing before they are used up."""
        return self._over(_Buffer(self._grown(max(n, self.n), 0).tensors, self.n), self.n, self.lengths)

    def append(self, new: dict[str, Tensor]) -> "TokenCache":
        """Return the cache with t more tokens in every row, new `rows t ...`.

        They are written into the room after the last token. All tokens are copied instead if another continuation has
        claimed that room, if gradients may be needed, or if the call is compiled (a graph cannot hold the lock).
        """
        t = next(iter(new.values())).shape[1]
        buffer, n = self._buffer, self.n
        for name, x in new.items():
            if x.dtype != buffer.tensors[name].dtype:
                raise ValueError(
                    f"the state's {name} must have the dtype of the new ones, {x.dtype}, got "
                    f"{buffer.tensors[name].dtype}; continue under the same autocast and model dtype"
                )
        copied = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if copied and isinstance(self.lengths, int):
            joined = {name: torch.cat((self[name], x), 1) for name, x in new.items()}
            return self._over(_Buffer(joined, n + t), n + t, self.lengths + t)
        if copied or not buffer.claim(n, t):
            buffer = self._grown(n + t, 0 if copied else max((n + t) // 2, 64))
        if isinstance(self.lengths, int):
            for name, x in new.items():
                buffer.tensors[name][:, n : n + t] = x
        else:
            at = self.lengths[:, None] + torch.arange(t, device=self.lengths.device)  # rows t
            where = torch.arange(self.rows, device=at.device)[:, None].expand_as(at), at
            for name, x in new.items():
                if copied:
                    buffer.tensors[name] = buffer.tensors[name].index_put(where, x)
                else:
                    buffer.tensors[name].index_put_(where, x)
        return self._over(buffer, n + t, self.lengths + t)

    def extended(self, t: int) -> "TokenCache | None":
        """Return the cache with t more tokens in every row, which the caller writes; None where only append can."""
        if not isinstance(self.lengths, int) or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        buffer, n = self._buffer, self.n
        if not buffer.claim(n, t):
            buffer = self._grown(n + t, max((n + t) // 2, 64))
        return self._over(buffer, n + t, self.lengths + t)

    def copy(self, room: int) -> "TokenCache":
        """Return a copy with `room` more entries of 0 in every row; they are not counted as tokens."""
        return self._over(self._grown(self.n + room, 0), self.n + room, self.lengths)

    @property
    def writable(self) -> bool:
        """Whether entries may be overwritten here: torch forbids it for what was made in inference mode, outside it."""
        first = next(iter(self._buffer.tensors.values()))
        return not first.is_inference() or torch.is_inference_mode_enabled()

    def cut(self, n: int, lengths: int | Tensor) -> "TokenCache":
        """Return the first n entries in the same memory, and free the room after them; this cache must not be used on.

        Args:
            n: entries that are kept, at least the longest row's.
            lengths: tokens of each row that are kept; an int if all rows have as many.
        """
        buffer = self._buffer
        with _CLAIMING:
            if buffer.taken == self.n:
                buffer.taken = n
        return self._over(buffer, n, lengths)

    def append_packed(self, new: dict[str, Tensor], cu_seqlens: Tensor) -> "TokenCache":
        """Return a copy with the tokens of packed sequences, one sequence a row: new `1 t ...`.

        A compiled call makes room for all new tokens in every row, because a graph does not know the longest sequence;
        the next call that is not compiled removes the unused room.
        """
        t = next(iter(new.values())).shape[1]
        rows, offsets = locate(cu_seqlens, t)
        more = cu_seqlens.diff()
        lengths = self.lengths + more
        base = self.lengths if isinstance(self.lengths, Tensor) else torch.full_like(more, self.lengths)
        where = rows, base[rows] + offsets
        old = self[self.names[0]].shape[1]
        n = old + t if torch.compiler.is_compiling() else int(lengths.max())  # a bound, as in _buffer
        grown = self._grown(max(old, n), 0).tensors
        return TokenCache({name: grown[name].index_put(where, x[0])[:, :n] for name, x in new.items()}, lengths)

    def _grown(self, taken: int, room: int) -> _Buffer:
        """Return a copy with room for `taken` tokens and more, filled with 0 after the last token."""
        tensors = {}
        for name in self.names:
            old = self[name]
            more = old.new_zeros(old.shape[0], taken + room - self.n, *old.shape[2:])
            tensors[name] = torch.cat((old, more), 1)
        return _Buffer(tensors, taken)

    @staticmethod
    def _over(buffer: _Buffer, n: int, lengths: int | Tensor) -> "TokenCache":
        cache = TokenCache.__new__(TokenCache)
        cache._filled, cache._packed, cache.n, cache.lengths = buffer, None, n, lengths
        cache.rows = next(iter(buffer.tensors.values())).shape[0]
        return cache


class CacheInPlace(TokenCache):
    """The first n entries of larger tensors; append writes after the last token of every row, in place.

    Args:
        tensors: `rows capacity ...` by name.
        n: How many entries attention reads; at least the longest row with its new tokens.
        t: How many new tokens each row gets.
        lengths: The tokens of each row, `rows`, before the new ones and with them.
        shared: Values that the layers of the next call share.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        n: int,
        t: int,
        lengths: tuple[Tensor, Tensor],
        shared: dict[Hashable, Any],
    ) -> None:
        super().__init__({name: x[:, :n] for name, x in tensors.items()}, lengths[0])
        self.t, self.after, self.shared = t, lengths[1], shared

    def append(self, new: dict[str, Tensor]) -> TokenCache:
        """Return a cache with the new tokens, `rows t ...`, in every row."""
        for name, x in new.items():
            tensor = self[name]
            if x.dtype != tensor.dtype:
                raise ValueError(
                    f"state's {name} must have the dtype of the new ones, {x.dtype}, got {tensor.dtype}; "
                    "make the decoder under the autocast and model dtype that made the state"
                )
            tensor.index_put_(self.once("where", self._where), x)
        return self.appended()

    def _where(self) -> tuple[Tensor, Tensor]:
        """Return the rows and positions of the new tokens, `rows t` each."""
        assert isinstance(self.lengths, Tensor)
        at = self.lengths[:, None] + torch.arange(self.t, device=self.lengths.device)
        return torch.arange(len(at), device=at.device)[:, None].expand_as(at), at

    def appended(self) -> TokenCache:
        """Return a cache with the new tokens, which the caller has written."""
        return TokenCache({name: self[name] for name in self.names}, self.after)


def _shown(tensors: Mapping[str, Tensor]) -> str:
    """Return names, shapes and dtypes; values are not read, since that would wait for a GPU."""
    each = [f"{name} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for name, x in tensors.items()]
    devices = dict.fromkeys(str(x.device) for x in tensors.values())
    return f"{', '.join(each)} on {' and '.join(devices)}" if each else "no tensors"


def _check_alike(states: Sequence["Memory"] | Sequence["TokenCache"]) -> None:
    """Raise unless the rows can be joined: they need the same names, sizes of a row (and token), dtypes and device."""
    if not states:
        raise ValueError("states must be one or more, got none")
    first = states[0]
    own = 1 if isinstance(first, Memory) else 2
    for state in states[1:]:
        if type(state) is not type(first) or state.names != first.names:
            raise ValueError(
                f"states must be of one layer, got a {type(first).__name__} of {', '.join(first.names)} and a "
                f"{type(state).__name__} of {', '.join(state.names)}"
            )
        for name in first.names:
            x, y = first[name], state[name]
            if (x.shape[own:], x.dtype, x.device) != (y.shape[own:], y.dtype, y.device):
                raise ValueError(
                    f"states must agree in {name} but for their rows and tokens, got {tuple(x.shape)} {x.dtype} on "
                    f"{x.device} and {tuple(y.shape)} {y.dtype} on {y.device}; convert or move one"
                )


def join_lengths(parts: Sequence[tuple[int, int | Tensor]], device: torch.device) -> int | Tensor:
    """Return the lengths of all rows of the joined parts; an int if all rows have the same length."""
    first = parts[0][1]
    if isinstance(first, int) and all(isinstance(n, int) and n == first for _, n in parts):
        return first
    lengths = (torch.full((rows,), n, device=device) if isinstance(n, int) else n for rows, n in parts)
    return torch.cat([x.to(device) for x in lengths])


def _memory_leaves(state: Memory) -> tuple[list[Any], tuple[str, ...]]:
    """Return the tensors of a state and their names; what a call may overwrite is left out, which costs only copies."""
    return [*state.tensors.values(), state.seeds], state.names


def _memory_of(leaves: Iterable[Any], names: tuple[str, ...]) -> Memory:
    *tensors, seeds = leaves
    return Memory(dict(zip(names, tensors, strict=True)), seeds=seeds)


def _cache_leaves(state: TokenCache) -> tuple[list[Any], tuple[tuple[str, ...], bool]]:
    """Return the tensors of a state and its lengths, None if all rows are full; and the names, and whether it is."""
    lengths = None if isinstance(state.lengths, int | torch.SymInt) and state.lengths == state.n else state.lengths
    return [*(state[name] for name in state.names), lengths], (state.names, lengths is None)


def _cache_of(leaves: Iterable[Any], context: tuple[tuple[str, ...], bool]) -> TokenCache:
    *tensors, lengths = leaves
    return TokenCache(dict(zip(context[0], tensors, strict=True)), tensors[0].shape[1] if context[1] else lengths)


def register_tree(
    kind: type[Any],
    leaves: Callable[[Any], tuple[list[Any], Any]],
    made: Callable[[Iterable[Any], Any], Any],
    keys: Callable[[Any], tuple[str, ...]],
) -> None:
    """Let torch.export and torch.func take states of a kind, and return them.

    Args:
        kind: the class.
        leaves: returns a state's parts, and what else there is to say.
        made: returns a state of them.
        keys: returns the names of the parts, for messages of torch.
    """

    def named(state: Any) -> tuple[list[tuple[Any, Any]], Any]:
        parts, context = leaves(state)
        return [(pytree.MappingKey(key), x) for key, x in zip(keys(state), parts, strict=True)], context

    name = f"{kind.__module__}.{kind.__name__}"
    pytree.register_pytree_node(kind, leaves, made, serialized_type_name=name, flatten_with_keys_fn=named)


register_tree(Memory, _memory_leaves, _memory_of, lambda state: (*state.names, "seeds"))
register_tree(TokenCache, _cache_leaves, _cache_of, lambda state: (*state.names, "lengths"))

LayerState = Memory | TokenCache
INPUTS = ("conv", "shift", "feed_shift")
"""Names of tensors that are the last inputs of a short convolution or of a token shift."""
torch.serialization.add_safe_globals([Memory, TokenCache, _Buffer])  # so that torch.load accepts a saved state


def token_positions(past: int | Tensor, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the positions of the tokens of x `b t ...` in their sequences: `b t`, or `t` if all rows agree."""
    if cu_seqlens is None:
        steps = torch.arange(x.shape[1], device=x.device)
        return steps + past if isinstance(past, int) else past[:, None] + steps
    rows, offsets = locate(cu_seqlens, x.shape[1])
    return offsets + (past if isinstance(past, int) else past[rows])

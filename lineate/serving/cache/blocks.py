"""Key/value and latent caches as shared blocks: each block has the entries of some tokens, and follows another block.

    chain of a state = block [0, a), block [a, b), ..., block [y, length)       each names the block before it

States of prompts with the same beginning share the blocks of it. Invariants:

- a block is held by the states that end with it and by the blocks that follow it; it is freed with its last holder, and
  then releases the block before it;
- the entries of a chain are, bit for bit, those of every state that shares it. Two states of the same tokens may differ
  in bits (one was read, the other was written token by token), so a chain is compared before it is shared;
- all tensors of the cache are made and freed by one `Tensors`, which knows their exact bytes.
"""

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lineate.layers import TokenCache

Named = dict[str, Tensor]


class Tensors:
    """Copies that the cache owns, and their bytes.

    Args:
        poison: whether freed tensors are overwritten (with NaN, or the lowest integer), for tests.
    """

    def __init__(self, poison: bool = False) -> None:
        self.bytes = 0
        self.poison = poison

    def copy(self, x: Tensor) -> Tensor:
        """Return a contiguous copy, on the same device."""
        made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        made.copy_(x)
        self.bytes += made.nbytes
        return made

    def free(self, x: Tensor) -> None:
        """Free a copy, which must not be read afterwards."""
        self.bytes -= x.nbytes
        if self.poison:
            x.fill_(_nonsense(x.dtype))


def _nonsense(dtype: torch.dtype) -> float | int | bool:
    """Return a number that no state should contain."""
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


class Block:
    """The entries start .. stop of every layer that has one entry a token, `1 n ...` each.

    Args:
        before: the block with the entries before start; None where start is 0.
        layers: the tensors of each such layer, by name.
        source: the tensors that the entries 0 .. stop were copied from.
    """

    def __init__(self, before: "Block | None", layers: Sequence[Named], source: Sequence[Tensor]) -> None:
        self.before, self.layers = before, tuple(layers)
        self.start = 0 if before is None else before.stop
        self.stop: int = self.start + next(self.tensors).shape[1]
        self.holders = 0
        self.file: str | None = None
        """The name of its file, if it is known (spill.py)."""
        self.nbytes = sum(x.nbytes for x in self.tensors)
        self.chain_nbytes: int = self.nbytes + (0 if before is None else before.chain_nbytes)
        """The bytes from token 0 on."""
        self._source = tuple(weakref.ref(x) for x in source)

    @property
    def tensors(self) -> Iterator[Tensor]:
        """Its own tensors, without those of the blocks before it."""
        return (x for layer in self.layers for x in layer.values())

    @property
    def chain(self) -> "list[Block]":
        """The blocks from token 0 to this one."""
        found, block = [], self
        while block is not None:
            found.append(block)
            block = block.before  # type: ignore[assignment]
        return found[::-1]

    def comes_from(self, caches: Sequence[TokenCache]) -> bool:
        """Whether its chain was copied from the buffers of these same caches, whose entries are never overwritten."""
        buffers = _buffers(caches)
        return len(self._source) == len(buffers) and all(
            own() is x for own, x in zip(self._source, buffers, strict=True)
        )

    def equals(self, caches: Sequence[TokenCache]) -> bool:
        """Whether its own entries are those of the caches, bit for bit."""
        for layer, cache in zip(self.layers, caches, strict=True):
            if tuple(layer) != cache.names:
                return False
            for name, x in layer.items():
                if not _same_bits(x, cache[name][:, self.start : self.stop]):
                    return False
        return True


def token_caches(layers: Sequence[object]) -> list[TokenCache]:
    """Return the layers that have one entry a token."""
    return [layer for layer in layers if isinstance(layer, TokenCache)]


def shared_chain(near: Block | None, caches: Sequence[TokenCache]) -> Block | None:
    """Return the last block of the longest prefix of a chain whose bits equal these caches; None: no block.

    Only blocks after the last one that was copied from the caches' own buffers are compared.

    Args:
        near: the last block of a chain for a prefix of the caches' tokens.
        caches: the layers with one entry a token.
    """
    unsure: list[Block] = []
    block = near
    while block is not None and not block.comes_from(caches):
        unsure.append(block)
        block = block.before
    for after in reversed(unsure):
        if not after.equals(caches):
            return block
        block = after
    return block


def new_bytes(before: Block | None, caches: Sequence[TokenCache], length: int) -> int:
    """Return the bytes of the entries from the end of a chain to `length`."""
    start = 0 if before is None else before.stop
    entries = (cache[name][:, start:length] for cache in caches for name in cache.names)
    return sum(x.numel() * x.element_size() for x in entries)


def extend(before: Block | None, caches: Sequence[TokenCache], stops: Sequence[int], tensors: Tensors) -> Block | None:
    """Extend a chain by copies of the caches' entries; return its last block, which is not yet held.

    Args:
        before: the last block that is shared; None: there is none.
        caches: the layers with one entry a token.
        stops: where the new blocks end, in ascending order; those within the shared chain are passed over.
        tensors: makes the copies.
    """
    start = 0 if before is None else before.stop
    made = []
    for stop in stops:
        if stop > start:  # all copies are made before a block is held, because a device may run out of memory
            made.append([{name: tensors.copy(cache[name][:, start:stop]) for name in cache.names} for cache in caches])
            start = stop
    last = before
    for layers in made:
        if last is not None:
            last.holders += 1
        last = Block(last, layers, _buffers(caches))
    return last


def release(block: Block | None, tensors: Tensors) -> list[Block]:
    """Release a block; return the blocks without a holder, which are freed."""
    freed = []
    while block is not None:
        block.holders -= 1
        if block.holders:
            break
        for x in block.tensors:
            tensors.free(x)
        freed.append(block)
        block = block.before
    return freed


def assemble(last: Block) -> list[TokenCache]:
    """Return the caches of a chain, in tensors of their own."""
    chain = last.chain
    return [
        TokenCache({name: torch.cat([block.layers[n][name] for block in chain], 1) for name in layer}, last.stop)
        for n, layer in enumerate(last.layers)
    ]


def _buffers(caches: Sequence[TokenCache]) -> list[Tensor]:
    return [x for cache in caches for x in cache.tensors.values()]


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors agree in every bit: NaN equals NaN, and 0 differs from -0."""
    if x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
        return False
    return torch.equal(x.flatten().view(torch.uint8), y.flatten().view(torch.uint8))

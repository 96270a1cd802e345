"""A cache of model states by the tokens that they have read, so that only the new tokens of a prompt are read.

    cache = StateCache(budget_bytes=8 * 2**30, spacing=256)
    found = cache.find(ids)                             # the longest prefix that is kept, or None
    cache.keep(ids[:512], state, cost=seconds)          # the state after 512 tokens

A fixed-size memory cannot be truncated to fewer tokens, so states are kept at chosen lengths: every multiple of a
spacing, from which any longer prompt continues, and the ends of prompts, which serve the same prompt again. An edit in
the middle of a prompt costs the tokens from the last multiple before it. Invariants:

- every state was made by reading its tokens in pieces of the spacing, counted from the first token (reading.py), so it
  has the same bits whichever request made it;
- find returns exactly the bits that were kept for that prefix, in tensors of its own, or nothing;
- `stats.bytes` is the exact sum over all tensors that are held, shared blocks counted once, and never above the budget.
  Token ids are not counted: 8 bytes for each token of the paths to kept states;
- freed tensors are never read: with poison=True they are overwritten, which tests rely on;
- a lookup takes time proportional to the prompt's tokens, for any number of states.

The states lie in a radix tree (radix.py), caches with one entry a token in shared blocks (blocks.py), and aging.py has
the order of eviction. An evicted state frees its memories; its blocks stay while longer states need them. With a
folder, it is written there first (spill.py), and can be found later, also after a restart. Several processes may share
a folder: each finds the states of all (neighbours.py).
"""

import logging
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

import torch
from torch import Tensor

from lineate.layers import Memory
from lineate.models.state import ModelState
from lineate.serving.cache.aging import Aging
from lineate.serving.cache.blocks import Block, Tensors, extend, new_bytes, release, shared_chain, token_caches
from lineate.serving.cache.kept import CacheStats, Found, Kept, own_nbytes
from lineate.serving.cache.neighbours import Far, Neighbours, open_share
from lineate.serving.cache.peers import Alone, Peers
from lineate.serving.cache.radix import Node, RadixTree, as_ids
from lineate.serving.cache.spill import SpillFolder, StateFile

__all__ = ["CacheStats", "Found", "StateCache"]

SECONDS_A_TOKEN = 1e-6
"""The least assumed cost of recomputing a state, in seconds for each token after its nearest kept ancestor."""
COUNTED = ("hits", "misses", "hit_tokens", "kept", "refused", "evictions", "spilled", "restored")

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Place:
    """The value of a node of the tree."""

    kept: Kept | None = None
    block: Block | None = None
    """The last block of a chain for this prefix, if a state here or below needs it."""
    file: StateFile | None = None
    """The state on disk, with the bits of `kept` if both exist."""

    @property
    def has_logits(self) -> bool | None:
        """Whether its state, in memory or on disk, has logits; None if there is no state."""
        if self.kept is not None:
            return self.kept.logits is not None
        return None if self.file is None else self.file.has_logits


_Node = Node[_Place]


class StateCache:
    """The cached states of one model by the tokens they have read, in pieces of a spacing; thread-safe.

    Args:
        budget_bytes: the most bytes that its tensors may take.
        spacing: the tokens of a piece; states at its multiples serve longer prompts.
        folder: where states are written when they are evicted or the cache is closed; None: nowhere.
        identity: which model makes the states, as identity_of returns it; a folder serves only states of this one.
        folder_bytes: the most bytes that the files of this identity may take, in its share if the folder is shared.
        shared: whether other processes may have the folder open too.
        poison: whether tensors are overwritten when they are freed, for tests.
        peers: the caches of other ranks, which keep other parts of the same states; None: there are none.
    """

    def __init__(
        self,
        budget_bytes: int,
        spacing: int,
        folder: str | Path | None = None,
        identity: str = "",
        *,
        folder_bytes: int = 64 * 2**30,
        shared: bool = False,
        poison: bool = False,
        peers: Peers | None = None,
    ) -> None:
        for name, value, least in (("budget_bytes", budget_bytes, 0), ("spacing", spacing, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
        if folder is not None and not identity:
            raise ValueError("identity must be given with a folder, got ''; pass identity_of(model)")
        self.budget_bytes, self.spacing = budget_bytes, spacing
        self._lock = RLock()
        self._tensors = Tensors(poison)
        self._tree: RadixTree[_Place] = RadixTree()
        self._aging: Aging[_Node] = Aging()
        self._owners: dict[Block | StateFile, _Node] = {}
        """The node of each block or file."""
        self._counts: Counter[str] = Counter()
        self._closed = False
        self._peers = peers or Alone()
        self._folder: SpillFolder | None = None
        self._neighbours: Neighbours | None = None
        if folder is not None:  # another spacing means other pieces, which may give other bits
            root, which, session = Path(folder), f"pieces of {spacing} {identity}", self._peers.session
            if shared:
                self._folder = open_share(
                    root, lambda share: SpillFolder(share, which, folder_bytes, self._forget, session)
                )
                self._neighbours = Neighbours(root, self._folder)
            else:
                self._folder = SpillFolder(root, which, folder_bytes, self._forget, session)
            for ids, file in self._folder.open():
                self._name_file(self._tree.insert(ids), file)
            for file in self._folder.restrict(self._peers.common([file.mark for file in self._folder.files.values()])):
                self._forget(file)

    @property
    def stats(self) -> CacheStats:
        """Its current contents, and counts since its creation."""
        with self._lock:
            disk = self._folder
            files = (0, 0, 0) if disk is None else (len(disk.files), disk.bytes, len(disk.ignored))
            held = len(self._aging), self._tree.nodes, self._tensors.bytes, self.budget_bytes
            return CacheStats(*held, *files, *(self._counts[name] for name in COUNTED))

    def find(self, ids: Sequence[int] | Tensor) -> Found | None:
        """Return the longest kept prefix of a prompt from which continuing gives the bits of reading all of it.

        This is the whole prompt if its logits were kept too, or else a prefix of a multiple of the spacing.

        Args:
            ids: the tokens of the prompt.
        """
        ids = as_ids(ids)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._take_from_neighbours(ids)
            nodes, _ = self._tree.walk(ids)
            for node in reversed(nodes):
                if self._serves(node, len(ids)) and (found := self._take(node)) is not None:
                    self._counts.update(hits=1, hit_tokens=found.length)
                    return found
            self._counts["misses"] += 1
            return None

    def keep(
        self,
        ids: Sequence[int] | Tensor,
        state: ModelState,
        logits: Tensor | None = None,
        cost: float = 0.0,
    ) -> bool:
        """Keep a copy of a state, and evict others if necessary; return whether the prefix now has a state.

        An existing state of the prefix, in memory or on disk, stays, unless only the new one has logits.

        Args:
            ids: the tokens that the state has read, in pieces of the spacing.
            state: one row.
            logits: `vocab`, for the token that follows; needed unless ids are a multiple of the spacing.
            cost: seconds to recompute the state from its nearest kept ancestor.
        """
        ids = as_ids(ids)
        self._check(ids, state, logits, cost)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._closed:
                return False
            done = self._keep(ids, state, logits, cost)
            self._counts["kept" if done else "refused"] += 1
            return done

    def clear(self) -> None:
        """Remove all states, also on disk."""
        with self._lock:
            for node in list(self._aging.ordered()):
                self._aging.remove(node)
                self._drop(node)
            if self._folder is not None:
                for file in list(self._folder.files.values()):
                    self._folder.remove(file)
                    self._forget(file)

    def close(self) -> None:
        """Write all states to the folder, if there is one, and free them; afterwards nothing is found or kept."""
        with self._lock:
            if self._closed:
                return
            for node in list(self._aging.ordered()):
                self._spill(node)
                self._aging.remove(node)
                self._drop(node)
            if self._folder is not None:
                self._folder.close()
                for file in list(self._folder.files.values()):
                    self._forget(file)
            self._closed = True

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that is held, once, by walking the tree and the chains of blocks; for tests."""
        with self._lock:
            seen: set[Block] = set()
            for node in self._tree:
                kept = None if node.value is None else node.value.kept
                if kept is None:
                    continue
                yield from kept.tensors
                for block in [] if kept.block is None else kept.block.chain:
                    if block not in seen:
                        seen.add(block)
                        yield from block.tensors

    def _serves(self, node: _Node, asked: int) -> bool:
        """Whether a node has a state for a prompt of `asked` tokens."""
        has_logits = None if node.value is None else node.value.has_logits
        return has_logits is not None and self._fits(has_logits, node.length, asked)

    def _fits(self, has_logits: bool, length: int, asked: int) -> bool:
        """Whether a state that has read `length` tokens serves a prompt of `asked` tokens."""
        return has_logits if length == asked else length % self.spacing == 0

    def _take_from_neighbours(self, ids: "array[int]") -> None:
        """Keep the state of another process that has read more of a prompt than any state here, if there is one."""
        if self._neighbours is None or self._closed:
            return
        here = (node.length for node in reversed(self._tree.walk(ids)[0]) if self._serves(node, len(ids)))
        most = next(here, 0)

        def serves(far: Far) -> bool:
            return far.length > most and self._fits(far.file.has_logits, far.length, len(ids))

        far = self._neighbours.longest(ids, serves)
        if far is not None and (spilled := self._neighbours.read(far)) is not None:
            self._counts["restored"] += 1
            self._keep(ids[: far.length], spilled.state, spilled.logits, far.file.cost)

    def _take(self, node: _Node) -> Found | None:
        """Return a node's state; None if it is on disk and cannot be read."""
        place = node.value
        assert place is not None
        if place.kept is not None:
            self._aging.use(node, place.kept.worth)
            return self._copy(place.kept, node.length)
        assert place.file is not None and self._folder is not None
        file, ids = place.file, node.ids
        before = list(self._folder.files)
        spilled = self._folder.read(file)
        if not self._peers.all(spilled is not None):
            gone = [x for x in before if x not in self._folder.files]
            self._remove_files(gone if spilled is None else [*gone, file.name])
        if spilled is None or file.name not in self._folder.files:
            return None
        self._counts["restored"] += 1
        self._take_in(ids, spilled.state, spilled.logits, file.cost, spilled.stops)
        return Found(len(ids), spilled.state, spilled.logits)

    def _copy(self, kept: Kept, length: int) -> Found | None:
        """Return a state in tensors of its own; None if memory is too short for it, on some rank."""
        found = None
        try:
            found = kept.copy(length)
        except (RuntimeError, MemoryError) as error:  # a CPU's allocator raises RuntimeError
            logger.warning("a state of %d tokens was not copied: %s", length, error)
        return found if self._peers.all(found is not None) else None

    def _remove_files(self, names: Sequence[str]) -> None:
        """Remove the files that some rank names, if they are still there."""
        assert self._folder is not None
        for name in self._peers.any_of(names):
            if (file := self._folder.files.get(name)) is not None:
                self._folder.remove(file)
                self._forget(file)

    def _keep(self, ids: "array[int]", state: ModelState, logits: Tensor | None, cost: float) -> bool:
        """Keep a state unless an equivalent one exists; return whether there is one now."""
        node = self._tree.walk(ids)[0][-1]
        old = node.value.has_logits if node.value is not None and node.length == len(ids) else None
        if old is not None and (old or logits is None):
            assert node.value is not None
            if node.value.kept is not None:
                self._aging.use(node, node.value.kept.worth)
            return True
        if not self._take_in(ids, state, logits, cost):
            return False
        node = self._tree.insert(ids)
        if node.value is not None and node.value.file is not None and self._folder is not None:
            self._folder.remove(node.value.file)  # it has no logits
            self._forget(node.value.file)
        return True

    def _take_in(
        self,
        ids: "array[int]",
        state: ModelState,
        logits: Tensor | None,
        cost: float,
        stops: Sequence[int] = (),
    ) -> bool:
        """Copy a state into memory, replacing that of its prefix; return False if it does not fit.

        stops: where blocks end, so that those of a state from disk keep the names of their files.
        """
        nodes = self._tree.walk(ids)[0]
        caches = token_caches(state.layers)
        near = (node.value.block for node in reversed(nodes) if node.value is not None)
        base = shared_chain(next((block for block in near if block is not None), None), caches)
        needed = own_nbytes(state, logits) + new_bytes(base, caches, len(ids))
        if needed + (0 if base is None else base.chain_nbytes) > self.budget_bytes:
            return False
        if base is not None:
            base.holders += 1  # so that eviction does not free it
        if nodes[-1].length == len(ids) and nodes[-1].value is not None and nodes[-1].value.kept is not None:
            self._aging.remove(nodes[-1])
            self._drop(nodes[-1])
        while self._tensors.bytes + needed > self.budget_bytes:
            self._evict()
        before, kept = self._tensors.bytes, None
        try:
            kept = self._copied(state, logits, base, [*stops, len(ids)])
        except BaseException as error:
            self._tensors.bytes = before
            if not isinstance(error, (RuntimeError, MemoryError)):  # a CPU's allocator raises RuntimeError
                raise
            logger.warning("a state of %d tokens was not kept: %s", len(ids), error)
        finally:
            self._release(base)
        if self._peers.all(kept is not None) and kept is not None:
            self._place(ids, kept, cost)
            return True
        if kept is not None:
            self._free(kept)
        return False

    def _copied(self, state: ModelState, logits: Tensor | None, base: Block | None, stops: Sequence[int]) -> Kept:
        """Return copies of a state's tensors, and of the entries after a chain of blocks."""
        before = self._tensors.bytes
        layers = tuple(
            {name: self._tensors.copy(x) for name, x in layer.tensors.items()} if isinstance(layer, Memory) else None
            for layer in state.layers
        )
        own = None if logits is None else self._tensors.copy(logits)
        caches = token_caches(state.layers)
        block = extend(base, caches, stops, self._tensors) if caches else None
        if block is not None:
            block.holders += 1
        return Kept(layers, own, block, self._tensors.bytes - before)

    def _place(self, ids: "array[int]", kept: Kept, cost: float) -> None:
        """Put a state into the tree; its descendants become cheaper to recompute."""
        node = self._tree.insert(ids)
        place = node.value = node.value or _Place()
        above = node.parent
        while above is not None and above.parent is not None and (above.value is None or above.value.kept is None):
            above = above.parent
        kept.cost = max(cost, SECONDS_A_TOKEN * (node.length - (0 if above is None else above.length)))
        self._add_cost(node, -kept.cost)
        place.kept = kept
        if kept.block is not None:
            if place.block is not None:
                del self._owners[place.block]  # it has other bits; a longer state needs it
            place.block = kept.block
            self._owners[kept.block] = node
        self._aging.use(node, kept.worth)

    def _evict(self) -> None:
        """Evict the state with the lowest priority, after writing it to disk if there is a folder."""
        node = self._aging.pop()
        self._counts["evictions"] += 1
        self._spill(node)
        self._drop(node)

    def _spill(self, node: _Node) -> None:
        """Write a state to disk unless it is there already."""
        place = node.value
        assert place is not None and place.kept is not None
        if self._folder is not None and place.file is None:
            file = self._folder.write(node.ids, place.kept)
            if self._peers.all(file is not None) and file is not None:
                self._counts["spilled"] += 1
                self._name_file(node, file)
            elif file is not None:  # another rank could not write its part
                self._folder.remove(file)

    def _name_file(self, node: _Node, file: StateFile) -> None:
        node.value = node.value or _Place()
        node.value.file = file
        self._owners[file] = node

    def _forget(self, file: StateFile) -> None:
        """Record that a file was removed."""
        node = self._owners.pop(file)
        assert node.value is not None
        node.value.file = None
        self._tidy(node)

    def _drop(self, node: _Node) -> None:
        """Free a state's own tensors, and the blocks that only it needed; it must have left the order of eviction."""
        assert node.value is not None and node.value.kept is not None
        kept, node.value.kept = node.value.kept, None
        self._add_cost(node, kept.cost)
        self._free(kept)
        self._tidy(node)

    def _free(self, kept: Kept) -> None:
        """Free the tensors of a state that is not in the tree."""
        for x in kept.tensors:
            self._tensors.free(x)
        self._release(kept.block)

    def _add_cost(self, node: _Node, more: float) -> None:
        """Change the recomputation cost of the nearest kept descendants of a node."""
        ahead = list(node.children.values())
        while ahead:
            below = ahead.pop()
            kept = None if below.value is None else below.value.kept
            if kept is None:
                ahead.extend(below.children.values())
                continue
            cost = max(kept.cost + more, SECONDS_A_TOKEN)
            self._aging.change(below, (cost - kept.cost) / max(kept.nbytes, 1))
            kept.cost = cost

    def _release(self, block: Block | None) -> None:
        for freed in release(block, self._tensors):
            if (owner := self._owners.pop(freed, None)) is not None:
                assert owner.value is not None
                owner.value.block = None
                self._tidy(owner)

    def _tidy(self, node: _Node) -> None:
        """Remove a node that holds nothing."""
        if node.value is not None and node.value.has_logits is None and node.value.block is None:
            node.value = None
        self._tree.prune(node)

    def _check(self, ids: Sequence[int], state: ModelState, logits: Tensor | None, cost: float) -> None:
        if not isinstance(state, ModelState) or state.rows != 1:
            got = f"{state.rows} rows" if isinstance(state, ModelState) else type(state).__name__
            raise ValueError(f"state must be a ModelState of one row, got {got}; take a row with select")
        lengths = {int(x) for x in (state.lengths, *(cache.lengths for cache in token_caches(state.layers)))}
        if lengths != {len(ids)} or not len(ids):
            got = " and ".join(map(str, sorted(lengths)))
            raise ValueError(f"ids must be the tokens that the state has read, {got}, at least one, got {len(ids)}")
        if logits is None and len(ids) % self.spacing:
            raise ValueError(
                f"ids must be a multiple of spacing = {self.spacing} tokens without logits, got {len(ids)}; other "
                "states serve no longer prompt"
            )
        if not 0 <= cost < float("inf"):
            raise ValueError(f"cost must be a number of seconds, at least 0, got {cost!r}")

"""States on disk: a folder of safetensors that survives a restart.

    FOLDER/IDENTITY/state-HASH.safetensors    ids, the tensors of every Memory, logits; HASH is that of the ids
    FOLDER/IDENTITY/block-HASH.safetensors    entries of some tokens; HASH is that of its contents and chain

Every file is sealed (sealed.py). A state's file has its cost, the names and devices of its tensors, and the names of
its blocks. Invariants:

- a file is complete or absent. Blocks are written before the state that names them, and removed after it, so that a
  kill at any moment loses no finished state;
- finished files never take more bytes than the budget; the state that was used longest ago goes first;
- a file that is damaged, of another model or of another version is ignored with a logged message: found when the
  folder is opened, it stays until room is needed; found later, it is removed. Other files are never touched.

One process at a time has the folder of an identity; it holds a lock on the file `lock`.
"""

import hashlib
import logging
import os
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lineate.layers import LayerState, Memory, TokenCache
from lineate.models.files.safetensors import CheckpointError
from lineate.models.state import ModelState
from lineate.serving.cache.blocks import Block, Named
from lineate.serving.cache.kept import Kept
from lineate.serving.cache.sealed import FORMAT, PART, checksum, most_bytes, peek, seal, unseal

OURS = re.compile(r"(state|block)-[0-9a-f]{32}\.safetensors")
UNUSABLE = (OSError, ValueError, RuntimeError, MemoryError, AssertionError, KeyError, TypeError, IndexError)
"""The exceptions of reading a file that is damaged or missing, or for which memory is short."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StateFile:
    """The index entry of a state on disk.

    Args:
        name: of the file.
        has_logits: whether its logits were kept too.
        cost: seconds it took to make.
        blocks: names of its blocks, the first tokens first.
        nbytes: bytes of the file, without its blocks.
        written: identifies the write of the job, if ranks have their parts of it in several folders.
    """

    name: str
    has_logits: bool
    cost: float
    blocks: tuple[str, ...]
    nbytes: int
    written: str = ""

    @property
    def mark(self) -> str:
        """The identifier shared by the per-rank files of one state."""
        return f"{self.name} {self.has_logits} {self.cost!r} {self.written}"


@dataclass
class _BlockFile:
    nbytes: int
    holders: int = 0


@dataclass(frozen=True)
class Spilled:
    """The contents of a state on disk.

    Args:
        state: one row, on the devices that it came from.
        logits: `vocab`, or None.
        stops: where its blocks end.
    """

    state: ModelState
    logits: Tensor | None
    stops: tuple[int, ...]


class SpillFolder:
    """The states of one model on disk.

    Args:
        root: the folder that was named by the user.
        identity: which model made the states.
        budget_bytes: the most bytes that the files of this identity may take.
        forget: called with each state that is removed to make room or because it is damaged.
        session: a word for this start of a job with several ranks; "" if there is one.
    """

    def __init__(
        self, root: Path, identity: str, budget_bytes: int, forget: Callable[[StateFile], None], session: str = ""
    ) -> None:
        self.identity = hashlib.sha256(identity.encode()).hexdigest()
        self.folder = root / hashlib.sha256(f"{FORMAT} {identity}".encode()).hexdigest()[:32]
        self.budget_bytes, self.forget = budget_bytes, forget
        self._session, self._writes = session, 0
        self.bytes = 0
        self.files: dict[str, StateFile] = {}
        """States by name, the least recently used first."""
        self.ignored: dict[str, int] = {}
        """Bytes of files that cannot be used, by name."""
        self._blocks: dict[str, _BlockFile] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _take_lock(self.folder / "lock")

    def open(self) -> Iterator[tuple["array[int]", StateFile]]:
        """Read the headers of all files; yield the usable states with their tokens, the least recently used first."""
        for left in self.folder.glob(f"*{PART}"):  # by a process that was killed
            left.unlink(missing_ok=True)
        ours = [x for x in self.folder.iterdir() if OURS.fullmatch(x.name) and x.is_file() and not x.is_symlink()]
        found = {x.name: (x.stat().st_mtime_ns, x.stat().st_size) for x in ours}
        self.bytes = sum(size for _, size in found.values())
        self._blocks = {name: _BlockFile(size) for name, (_, size) in found.items() if name.startswith("block-")}
        for name in sorted((name for name in found if name.startswith("state-")), key=found.__getitem__):
            size = found[name][1]
            try:
                ids, file = self._index(name, size)
            except (CheckpointError, OSError) as error:
                self.ignored[name] = size
                logger.warning("ignored a state on disk: %s", error)
                continue
            self.files[name] = file
            for block in file.blocks:
                self._blocks[block].holders += 1
            yield ids, file
        for name in [name for name, block in self._blocks.items() if not block.holders]:
            self.ignored[name] = self._blocks.pop(name).nbytes  # its state was never finished, or is ignored
        self._make_room(0)

    def restrict(self, marks: Sequence[str]) -> list[StateFile]:
        """Keep only the states with these marks, the one used longest ago first; remove and return the others.

        Args:
            marks: of the states to keep.
        """
        found = {file.mark: file for file in self.files.values()}
        wanted = set(marks)
        removed = [file for mark, file in found.items() if mark not in wanted]
        for file in removed:
            self.remove(file)
        self.files = {found[mark].name: found[mark] for mark in marks}
        return removed

    def close(self) -> None:
        """Let another process have the folder."""
        os.close(self._lock)

    def write(self, ids: "array[int]", kept: Kept) -> StateFile | None:
        """Write a state and those of its blocks that are missing; None if it does not fit or cannot be written.

        Args:
            ids: the tokens that the state has read.
            kept: the state.
        """
        chain = [] if kept.block is None else kept.block.chain
        names = _names_of(chain)
        held = [name for name in names if name in self._blocks]
        for name in held:
            self._blocks[name].holders += 1  # so that making room does not remove them
        try:
            return self._write(ids, kept, dict(zip(names, chain, strict=True)), held)
        except OSError as error:
            logger.warning("a state of %d tokens was not written to %s: %s", len(ids), self.folder, error)
            return None
        finally:
            self._release(held)

    def read(self, file: StateFile) -> Spilled | None:
        """Return the contents of a state; None, with a logged message, if a file is damaged or memory is short.

        Args:
            file: from `open` or `write`.
        """
        name = file.name
        try:
            about, own = unseal(self.folder / name, self.identity)
            blocks = []
            for name in file.blocks:
                blocks.append(unseal(self.folder / name, self.identity)[1])
            spilled = assemble_state(about, own, blocks)
        # The contents of a file are not trusted.
        except UNUSABLE as error:
            if _may_pass(error):
                logger.warning("%s was not read: %s", self.folder / file.name, error)
            else:
                self._give_up(file, name, error)
            return None
        self.files[file.name] = self.files.pop(file.name)
        try:
            os.utime(self.folder / file.name)  # so that a later process knows that it was used
        except OSError as error:
            logger.warning("%s could not be touched: %s", self.folder / file.name, error)
        return spilled

    def _give_up(self, file: StateFile, name: str, error: Exception) -> None:
        """Remove a state whose file `name` cannot be used, and all other states that need this file."""
        logger.warning("removed %s, which cannot be used: %s", self.folder / name, error)
        for other in [x for x in self.files.values() if x is file or name in x.blocks]:
            self.remove(other)
            self.forget(other)

    def remove(self, file: StateFile) -> None:
        """Remove a state, then the blocks that no other state names.

        Args:
            file: from `open` or `write`.
        """
        del self.files[file.name]
        self._unlink(file.name, file.nbytes)
        self._release(file.blocks)

    def _write(self, ids: "array[int]", kept: Kept, chain: dict[str, Block], held: list[str]) -> StateFile | None:
        """Write what is missing; blocks that are written are held once more, and appended to `held`."""
        missing = {name: _flat(enumerate(block.layers)) for name, block in chain.items() if name not in self._blocks}
        own = _flat((n, layer) for n, layer in enumerate(kept.layers) if layer is not None)
        own["ids"] = torch.tensor(ids, dtype=torch.int64)
        if kept.logits is not None:
            own["logits"] = kept.logits
        about: dict[str, Any] = {"cost": kept.cost, "blocks": list(chain)}
        about["layers"] = _described(kept)
        if written := self._next_writing():
            about["written"] = written
        needed = most_bytes(about, own) + sum(most_bytes({}, entries) for entries in missing.values())
        if not self._make_room(needed):
            return None
        for name, entries in missing.items():
            self._blocks[name] = _BlockFile(self._save(name, {}, entries), holders=1)
            held.append(name)
        name = _name_of(ids)
        nbytes = self._save(name, about, own)
        for block in chain:
            self._blocks[block].holders += 1
        file = self.files[name] = StateFile(name, "logits" in own, kept.cost, tuple(chain), nbytes, written)
        return file

    def _next_writing(self) -> str:
        """Return an identifier for the next written state, the same on all ranks; "" if there is one rank."""
        self._writes += 1
        return f"{self._session}-{self._writes}" if self._session else ""

    def _save(self, name: str, about: dict[str, Any], tensors: Named) -> int:
        nbytes = seal(self.folder / name, self.identity, about, tensors)
        self.bytes += nbytes - self.ignored.pop(name, 0)  # it may replace a file that could not be used
        return nbytes

    def _index(self, name: str, nbytes: int) -> tuple["array[int]", StateFile]:
        """Return the tokens of a state on disk and its row of the index; its other tensors are not read."""
        tokens, file = index_file(self.folder / name, self.identity, nbytes)
        if lost := [block for block in file.blocks if block not in self._blocks]:
            expected = f"expected {len(file.blocks)} blocks, but {len(lost)} of them are missing"
            raise CheckpointError(f"{self.folder / name}: {expected}")
        return tokens, file

    def _make_room(self, needed: int) -> bool:
        """Remove files until the given bytes fit; return whether they fit, and remove nothing if they cannot."""
        if needed > self.budget_bytes:
            return False
        while self.bytes + needed > self.budget_bytes:
            if self.ignored:
                self._unlink(*self.ignored.popitem())
            elif self.files:
                oldest = next(iter(self.files.values()))
                self.remove(oldest)
                self.forget(oldest)
            else:
                return False
        return True

    def _release(self, names: Sequence[str]) -> None:
        for name in names:
            block = self._blocks[name]
            block.holders -= 1
            if not block.holders:
                self._unlink(name, self._blocks.pop(name).nbytes)

    def _unlink(self, name: str, nbytes: int) -> None:
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s could not be removed: %s", self.folder / name, error)
        self.bytes -= nbytes


def index_file(path: Path, identity: str, nbytes: int) -> tuple["array[int]", StateFile]:
    """Return the tokens of a state on disk and its row of the index; its other tensors are not read.

    Args:
        path: The file of the state.
        identity: The digest of the model's identity.
        nbytes: The bytes of the file.
    """
    about, ids, names = peek(path, identity, "ids")
    blocks, cost = about.get("blocks"), about.get("cost")
    if not isinstance(blocks, list) or not isinstance(cost, int | float):
        raise CheckpointError(f"{path}: expected blocks and cost, got {about!r:.200}")
    if ids.dtype != torch.int64 or ids.dim() != 1 or not len(ids):
        raise CheckpointError(f"{path}: expected ids of int64, got {ids.dtype} of shape {tuple(ids.shape)}")
    if wrong := [block for block in blocks if not isinstance(block, str)]:
        raise CheckpointError(f"{path}: expected names of blocks, got {wrong[0]!r:.80}")
    tokens = array("q", ids.tolist())
    if path.name != _name_of(tokens):  # otherwise it would be searched under other tokens and never be found
        raise CheckpointError(f"{path}: expected the name {_name_of(tokens)} for its ids; the file is damaged")
    written = str(about.get("written", ""))
    return tokens, StateFile(path.name, "logits" in names, float(cost), tuple(blocks), nbytes, written)


def _take_lock(path: Path) -> int:
    """Return an open file with an exclusive lock, which ends with the process; raise OSError if another has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows has no such locks
        pass
    except OSError:
        os.close(handle)
        raise BlockingIOError(f"{path} is locked by another process") from None
    return handle


def _name_of(ids: "array[int]") -> str:
    """Return the name of the file of a state that has read these tokens."""
    return f"state-{hashlib.sha256(ids.tobytes()).hexdigest()[:32]}.safetensors"


def _names_of(chain: Sequence[Block]) -> list[str]:
    """Return the names of the files of a chain; each depends on the contents of all blocks up to it."""
    names = [""]
    for block in chain:
        if block.file is None:
            entries = {key: x.cpu() for key, x in _flat(enumerate(block.layers)).items()}
            block.file = f"block-{checksum({'before': names[-1]}, entries)[:32]}.safetensors"
        names.append(block.file)
    return names[1:]


def _flat(layers: Iterator[tuple[int, Named]]) -> Named:
    return {f"{n}.{name}": x for n, layer in layers for name, x in layer.items()}


def _described(kept: Kept) -> list[dict[str, Any]]:
    """Return for each layer whether it has one entry a token, its names in their order, and its device."""
    caches = iter(() if kept.block is None else kept.block.layers)
    described = []
    for layer in kept.layers:
        tensors = next(caches) if layer is None else layer
        device = str(next(iter(tensors.values())).device)  # padded, so that files of all ranks have the same size
        described.append({"cache": layer is None, "names": list(tensors), "device": f"{device:<8}"})
    return described


def assemble_state(about: dict[str, Any], own: Named, blocks: Sequence[Named]) -> Spilled:
    """Return a state from the tensors of its files.

    Args:
        about: The description in the state's file.
        own: The other tensors of that file.
        blocks: The tensors of each block, the first tokens first.
    """
    layers: list[LayerState] = []
    caches, length = 0, len(own["ids"])
    for n, layer in enumerate(about["layers"]):
        device = torch.device(str(layer["device"]).rstrip())
        if layer["cache"]:
            entries = {x: torch.cat([block[f"{caches}.{x}"] for block in blocks], 1) for x in layer["names"]}
            layers.append(TokenCache({name: x.to(device) for name, x in entries.items()}, length))
            caches += 1
        else:
            layers.append(Memory({name: own[f"{n}.{name}"].to(device) for name in layer["names"]}))
    stops = tuple(accumulate(next(iter(block.values())).shape[1] for block in blocks))
    if stops and stops[-1] != length:
        raise ValueError(f"expected blocks of {length} tokens, got {stops[-1]}")
    logits = own.get("logits")
    return Spilled(ModelState(tuple(layers), length), None if logits is None else logits.to(device), stops)


def _may_pass(error: BaseException) -> bool:
    """Whether a failed read may succeed later: too many open files, no memory or a disk fault."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    lasting = isinstance(cause, (FileNotFoundError, IsADirectoryError, NotADirectoryError))
    return isinstance(error, (RuntimeError, MemoryError)) or (cause is not None and not lasting)

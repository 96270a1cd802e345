"""States that other processes wrote to a shared folder: each process writes to a share of its own and reads all.

    FOLDER/share-0/IDENTITY/...    the SpillFolder of one process; only this process writes and removes files there
    FOLDER/share-1/IDENTITY/...    that of another
    FOLDER/IDENTITY/...            that of a process that did not share the folder

A file is complete or absent and never changes (spill.py), so reading needs no lock. If its owner removes it meanwhile,
it is not found, and the prompt is read instead. The next process that needs a share takes over one whose process has
ended, with its files.
"""

import logging
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lineate.models.files.safetensors import CheckpointError
from lineate.serving.cache.radix import Node, RadixTree
from lineate.serving.cache.sealed import unseal
from lineate.serving.cache.spill import OURS, UNUSABLE, Spilled, SpillFolder, StateFile, assemble_state, index_file

SHARE = "share-"
MOST_SHARES = 4096
SECONDS = 1.0
"""Seconds between two scans of the folders of others."""
SAME_TIME = 2.0
"""Seconds within which two changes of a folder may have the same time."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Far:
    """A state of another process on disk.

    Args:
        folder: Where its files are.
        length: The number of tokens it has read.
        file: The entry of its file.
    """

    folder: Path
    length: int
    file: StateFile


_Node = Node[list[Far]]


def open_share(root: Path, make: Callable[[Path], SpillFolder]) -> SpillFolder:
    """Return the first share of a folder that no running process has.

    Args:
        root: The folder that all processes share.
        make: Takes a share for this process; raises BlockingIOError if another process has it.
    """
    for number in range(MOST_SHARES):
        try:
            return make(root / f"{SHARE}{number}")
        except BlockingIOError:
            continue
    raise ValueError(f"{root} must have a share for this process, but {MOST_SHARES} processes have it open")


class Neighbours:
    """The states of other processes in a shared folder.

    Args:
        root: The folder that all processes share.
        own: The share of this process.
        clock: Returns seconds.
    """

    def __init__(self, root: Path, own: SpillFolder, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._own, self._clock = root, own, clock
        self._tree: RadixTree[list[Far]] = RadixTree()
        self._changed: dict[Path, int] = {}
        """The modification time of each folder when it was read."""
        self._nodes: dict[Path, _Node | None] = {}
        """The node of each file; None if it cannot be used."""
        self._next = self._clock()

    def longest(self, ids: "array[int]", serves: Callable[[Far], bool]) -> Far | None:
        """Return the state that has read most of a prompt, if there is one.

        Args:
            ids: The prompt.
            serves: Whether a state may be used for it.
        """
        if self._clock() >= self._next:
            self._look()
            self._next = self._clock() + SECONDS
        for node in reversed(self._tree.walk(ids)[0]):
            for far in node.value or ():
                if serves(far):
                    return far
        return None

    def read(self, far: Far) -> Spilled | None:
        """Return the contents of a state; None, with a logged message, if a file is gone or damaged.

        Args:
            far: From `longest`.
        """
        identity = self._own.identity
        try:
            about, own = unseal(far.folder / far.file.name, identity)
            if not all(OURS.fullmatch(name) for name in far.file.blocks):
                raise CheckpointError(
                    f"{far.folder / far.file.name}: expected names of blocks, got {far.file.blocks!r:.80}"
                )
            blocks = [unseal(far.folder / name, identity)[1] for name in far.file.blocks]
            return assemble_state(about, own, blocks)
        except UNUSABLE as error:  # the contents of a file are not trusted
            logger.warning("%s was not read: %s", far.folder / far.file.name, error)
            self._forget(far.folder / far.file.name)
            self._nodes[far.folder / far.file.name] = None
            return None

    def _look(self) -> None:
        """Update the index with the files that others have written and removed."""
        for folder in self._folders():
            try:
                changed = folder.stat().st_mtime_ns
                recent = time.time() - changed / 1e9 < SAME_TIME
                if changed == self._changed.get(folder) and not recent:
                    continue
                self._list(folder)
            except OSError as error:
                logger.warning("%s was not listed: %s", folder, error)
                continue
            self._changed[folder] = changed

    def _folders(self) -> Iterator[Path]:
        name = self._own.folder.name
        for share in (self._root, *sorted(self._root.glob(f"{SHARE}*"))):
            folder = share / name
            if folder != self._own.folder and folder.is_dir():
                yield folder

    def _list(self, folder: Path) -> None:
        found = {x for x in folder.iterdir() if x.name.startswith("state-") and OURS.fullmatch(x.name)}
        for path in [x for x in self._nodes if x.parent == folder and x not in found]:
            self._forget(path)
        for path in found - self._nodes.keys():
            self._nodes[path] = None
            try:
                ids, file = index_file(path, self._own.identity, path.stat().st_size)
            except (CheckpointError, OSError) as error:
                logger.warning("ignored a state of another process: %s", error)
                continue
            node = self._nodes[path] = self._tree.insert(ids)
            node.value = [*(node.value or ()), Far(folder, node.length, file)]

    def _forget(self, path: Path) -> None:
        node = self._nodes.pop(path)
        if node is not None:
            node.value = [x for x in node.value or () if x.folder / x.file.name != path] or None
            self._tree.prune(node)

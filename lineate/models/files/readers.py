"""The readers of threads that load a model: one keeps its files open, the other copies to a GPU while it reads on.

To a GPU, a thread has two pinned buffers and a stream. It reads into one buffer while the other is copied; an event
tells when a buffer may be used again. Dtypes and layouts change on the GPU.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from lineate.models.files.safetensors import Entry, Reader

CHANGED_BYTES = 2**21
"""The size of a thread's buffer for tensors whose dtype or layout changes on a CPU."""
PINNED_BYTES = 2**24
"""The size of each pinned buffer of a thread."""
PINNED = 2
"""The number of pinned buffers of a thread."""
OPEN_FILES = 4
"""The most files that a thread keeps open."""


def pinned_memory(nbytes: int) -> Tensor:
    """Return bytes that a GPU copies asynchronously; memory of the usual kind where none can be pinned."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class ThreadReader(Reader):
    """The reader of one thread, in a `with` block; it keeps files open.

    Args:
        check: called before every read; it raises if the thread has to stop.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check, self._files = check, dict[Path, FileIO]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._files:
            self._files.popitem()[1].close()

    @property
    def buffer_bytes(self) -> int:
        return CHANGED_BYTES

    @contextmanager
    def open(self, file: Path) -> Iterator[FileIO]:
        if file not in self._files:
            if len(self._files) >= OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            self._files[file] = handle = file.open("rb", buffering=0)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)  # doubles what is read ahead
        yield self._files[file]

    def read(self, handle: FileIO, name: str, entry: Entry, target: Tensor) -> None:
        self._check()
        super().read(handle, name, entry, target)


class StagedReader(ThreadReader):
    """The reader of one thread that loads to a GPU; its `with` block ends when all copies have ended.

    Args:
        check: called before every read; it raises if the thread has to stop.
        device: of the tensors.
        after: a stream whose work so far has to end before anything is copied.
    """

    def __init__(self, check: Callable[[], None], device: torch.device, after: "torch.cuda.Stream") -> None:
        super().__init__(check)
        self._device, self._after, self._next = device, after, 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self._device))
            self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(self._after)
            stack.enter_context(torch.cuda.stream(self._stream))
            self._pinned = [pinned_memory(PINNED_BYTES) for _ in range(PINNED)]
            self._copied = [torch.cuda.Event(blocking=True) for _ in range(PINNED)]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        with self._stack:
            self._stream.synchronize()

    @property
    def buffer_bytes(self) -> int:
        return PINNED_BYTES

    def copy(self, handle: FileIO, name: str, entry: Entry, part: Tensor) -> None:
        if part.device.type != self._device.type:
            super().copy(handle, name, entry, part)
            return
        slot, self._next = self._next, (self._next + 1) % PINNED
        self._copied[slot].synchronize()
        read = self._pinned[slot][: part.numel() * entry.dtype.itemsize].view(entry.dtype).view(part.shape)
        self.read(handle, name, entry, read)
        self.send(read, part)
        self._copied[slot].record()

    def send(self, read: Tensor, part: Tensor) -> None:
        """Copy pinned memory to a tensor of the GPU, which changes dtype and layout itself."""
        if part.dtype == read.dtype and part.is_contiguous():
            part.copy_(read, non_blocking=True)
        else:
            part.copy_(read.to(self._device, non_blocking=True))

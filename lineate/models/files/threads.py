"""Runs units of work in several threads, in the order of the files.

A thread takes the next unit when it has finished one, so the files are read almost sequentially. If a unit fails, the
earlier ones, which have been taken before, still end; so the error of the first failing unit is raised whatever the
number of threads. The threads share the cores that torch computes on.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from lineate.models.files.checkpoint import Checkpoint
from lineate.models.files.encodings import MOST_KEPT, Encoded
from lineate.models.files.readers import StagedReader, ThreadReader
from lineate.models.files.units import PART_BYTES, Unit

DEVICES = ("cpu", "cuda")
"""The types of devices that several threads fill."""
MOST_THREADS = 16
"""The most threads that read a checkpoint."""
LEAST_THREADS = 4
"""The number of threads on fewer cores, since they also wait for the disk."""
THREADS_BY_COLUMNS = 2
"""The most threads that read a checkpoint with tensors that are read by columns: each keeps some of them in memory."""
THREAD_BYTES = PART_BYTES
"""The bytes of a checkpoint for each of which there is a thread."""
INTERRUPTED_SECONDS = 1.0
"""How long a thread whose start was interrupted is waited for, because it may begin later than that."""
HELD_BYTES = 2**27
"""The most bytes besides the model that the units of all threads have in memory, unless one unit alone has more."""
HELD_BYTES_GPU = 2**30
"""The same of a GPU; no more than a quarter of what is free there."""


def run_units(
    units: Sequence[Unit], checkpoint: Checkpoint, device: torch.device, advance: Callable[[int], None]
) -> None:
    """Run units of work and raise the error of the first that fails; when this returns, no thread is left.

    Args:
        units: of tensors on `device`, in the order in which they are taken.
        checkpoint: that they read.
        device: a CPU or a GPU.
        advance: called with the bytes that each unit has read, by one thread at a time.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    count = thread_count(units, checkpoint, device)
    if count <= 1:
        for unit in units:
            unit.run(checkpoint)
            advance(unit.nbytes)
        return
    queue = UnitQueue(units, _most_held(device), advance)
    after = torch.cuda.current_stream(device) if device.type == "cuda" else None
    inference, kept = torch.is_inference_mode_enabled(), MOST_KEPT // count
    started, computing = threading.Semaphore(0), torch.get_num_threads()

    def work() -> None:
        with queue.ending():
            try:
                torch.get_num_threads()  # a thread's first call sets the number of all
                torch.set_num_threads(max(1, computing // count))
            finally:
                started.release()
            with (
                torch.inference_mode(inference),
                ThreadReader(queue.check) if after is None else StagedReader(queue.check, device, after) as reader,
            ):
                queue.work(checkpoint.read_by(reader, kept))

    threads = [threading.Thread(target=work, name=f"lineate-loading-{i}", daemon=True) for i in range(count)]
    begun = 0
    try:
        try:
            for thread in threads:
                begun += 1
                thread.start()
            for _ in threads:
                started.acquire()
        finally:
            torch.set_num_threads(computing)  # that of this thread, and of threads that start later
        queue.wait(count)
    finally:
        queue.stop()
        alive = _started(threads[:begun])
        queue.wait(len(alive))  # an interrupt amid Thread.join would count a thread as ended (bpo-45274)
        for thread in alive:
            thread.join()
        torch.set_num_threads(computing)  # a thread may have started after an interrupt
        if after is not None:
            _release_buffers()
    queue.raise_first()


def _started(threads: Sequence[threading.Thread]) -> list[threading.Thread]:
    """Return those of these threads that run or have run; `start` of the last one may have been interrupted."""
    until = time.monotonic() + INTERRUPTED_SECONDS
    while threads and threads[-1].ident is None and time.monotonic() < until:
        time.sleep(0.001)  # it may have been begun, and not know its number yet
    return [thread for thread in threads if thread.ident is not None]


def thread_count(units: Sequence[Unit], checkpoint: Checkpoint, device: torch.device) -> int:
    """Return the number of threads for units of a checkpoint: about the cores, and one for a small model."""
    if device.type not in DEVICES:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = min(MOST_THREADS, max(LEAST_THREADS, cores))
    if any(isinstance(entry, Encoded) and not entry.by_rows for entry in checkpoint.entries.values()):
        most = min(most, THREADS_BY_COLUMNS)
    return max(1, min(most, sum(unit.nbytes for unit in units) // THREAD_BYTES))


def _most_held(device: torch.device) -> int:
    if device.type != "cuda":
        return HELD_BYTES
    return min(HELD_BYTES_GPU, torch.cuda.mem_get_info(device)[0] // 4)


def _release_buffers() -> None:
    """Give back the pinned memory and the GPU's memory that the threads' streams have left in torch's caches."""
    torch.cuda.empty_cache()
    empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
    if empty_host_cache is not None:
        empty_host_cache()


class _StoppedError(Exception):
    """Ends a unit whose result is not needed any more."""


class UnitQueue:
    """The units that are left, and the first error.

    Args:
        units: in the order in which they are taken.
        most: bytes that they may hold together.
        advance: called with the bytes of each finished unit.
    """

    def __init__(self, units: Sequence[Unit], most: int, advance: Callable[[int], None]) -> None:
        self._units, self._most, self._advance = units, most, advance
        self._changed = threading.Condition()
        self._next = self._held = self._ended = 0
        self._failed: tuple[int, BaseException] | None = None
        self._stopped = False
        self._own = threading.local()

    def work(self, checkpoint: Checkpoint) -> None:
        """Run units until none is left or needed."""
        while (unit := self._take()) is not None:
            try:
                unit.run(checkpoint)
                with self._changed:
                    self._advance(unit.nbytes)
            finally:
                with self._changed:
                    self._held -= unit.held
                    self._changed.notify_all()

    def check(self) -> None:
        """Raise if the unit of this thread is not needed any more."""
        if self._stopped or (self._failed is not None and self._failed[0] < self._own.index):
            raise _StoppedError

    def stop(self) -> None:
        """Let the threads end as soon as possible."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Keep an error of this thread, if no earlier unit has one."""
        self._own.index = -1
        try:
            yield
        except _StoppedError:
            pass
        except BaseException as error:
            with self._changed:
                if self._failed is None or self._own.index < self._failed[0]:
                    self._failed = self._own.index, error
        finally:
            with self._changed:
                self._ended += 1
                self._changed.notify_all()

    def wait(self, count: int) -> None:
        """Wait until this number of threads have ended."""
        with self._changed:
            while self._ended < count:
                self._changed.wait(1)  # some systems interrupt no longer wait

    def raise_first(self) -> None:
        """Raise the error of the first unit that has failed."""
        failed, self._failed = self._failed, None  # its traceback refers to this queue, and to the tensors
        if failed is not None:
            try:
                raise failed[1]
            finally:
                del failed

    def _take(self) -> Unit | None:
        """Return the next unit once there is room for what it holds; None if none is left or needed."""
        with self._changed:
            while not self._stopped and self._failed is None and self._next < len(self._units):
                unit = self._units[self._next]
                if not self._held or self._held + unit.held <= self._most:
                    self._own.index, self._next = self._next, self._next + 1
                    self._held += unit.held
                    return unit
                self._changed.wait()
            return None

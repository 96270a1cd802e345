"""Runs the C compiler: the files of a library in parallel, in one process at a time."""

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import BoundedSemaphore
from typing import NamedTuple

_FLAGS = (
    "-O3", "-std=c11", "-D_GNU_SOURCE", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    # Tuned for some processors (Sapphire Rapids), gcc fuses products into the sums of some loops and not of others, so
    # that one row would have other bits than the same row among eight.
    "--param=avoid-fma-max-bits=0",
)  # fmt: skip
_LINK = ("-fPIC", "-shared", "-pthread")
_LONGEST = 300
"""Seconds after which a compiler is stopped."""
_BUILDING = "building-"
"""The prefix of temporary folders and locks."""
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
RUNNING = BoundedSemaphore(CORES)  # compilers of this process, whatever they compile


def _begin_child() -> None:
    """Give a forked process a new semaphore: no thread there would release those that the parent's threads hold."""
    global RUNNING
    RUNNING = BoundedSemaphore(CORES)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)


class Code(NamedTuple):
    """C files that make one library."""

    name: str
    """How the names of its libraries begin."""
    sources: tuple[Path, ...]
    headers: tuple[Path, ...] = ()


class NativeUnavailable(RuntimeError):
    """Raised if the C code cannot be built or loaded here; the message says why and names the remedy."""


def find_compiler() -> str:
    """Return the C compiler, and options of the user's behind it; raise NativeUnavailable if there is none."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NativeUnavailable("no C compiler was found; install gcc or clang, or set CC")
    return compiler


def compiler_command(compiler: str) -> list[str]:
    """Return the command that compiles for this machine, without the names of files.

    Args:
        compiler: the compiler, and options of the user's behind it.
    """
    machine = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return [*compiler.split(), *_FLAGS, machine, *_LINK]


@contextmanager
def alone(folder: Path, start: str) -> Iterator[None]:
    """Let one process, or thread, at a time build the library whose name begins so; the others wait for it.

    A folder that cannot be written, or without locks, is no obstacle here. The lock of a process that ends is released.

    Args:
        folder: the cache folder.
        start: how the library's name begins.
    """
    import fcntl

    file = folder / f"{_BUILDING}{start}lock"
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield
        return
    try:
        end = time.monotonic() + _LONGEST
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        remove(file)
        os.close(descriptor)


def clean(folder: Path) -> None:
    """Remove what killed compilers left; keep younger folders, which a running compiler may use."""
    for left in (*folder.glob(_BUILDING + "*"), *folder.glob("tmp*.so")):
        try:
            if time.time() - left.lstat().st_mtime > 2 * _LONGEST:
                remove(left)
        except OSError:  # another process was quicker
            continue


def remove(path: Path) -> None:
    """Remove a file or folder, as far as we are allowed to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def compile_library(command: list[str], folder: Path, start: str, code: Code) -> Path:
    """Build in a temporary folder, write the result to the disk and rename it, so that no process sees half a file.

    On a terminal, a line on stderr says that it takes a while.

    Args:
        command: the compiler's, of compiler_command.
        folder: the cache folder.
        start: how the library's name begins.
        code: what is compiled.
    """
    try:
        work = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=folder))
    except OSError as error:
        raise NativeUnavailable(
            f"the cache folder is not writable: {error}; set LINEATE_CACHE to one that is"
        ) from error
    try:
        if sys.stderr is not None and sys.stderr.isatty():
            files = ", ".join(source.name for source in code.sources)
            print(f"lineate: compiling {files} for this processor, once", file=sys.stderr, flush=True)
        built = _build(command, work, code)
        with built.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
            os.fchmod(content.fileno(), stat.S_IMODE(os.fstat(content.fileno()).st_mode) & 0o755)
            os.fsync(content.fileno())
        file = folder / f"{start}{digest}.so"
        os.replace(built, file)
        _sync(folder)
        return file
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} could not run: {error}; install gcc or clang, or set CC") from error
    finally:
        remove(work)


def _build(command: list[str], work: Path, code: Code) -> Path:
    """Compile the files in parallel, the longest first, and link them."""
    built = work / "native.so"
    if len(code.sources) == 1:
        _run([*command, str(code.sources[0]), "-o", str(built), "-lm"], work)
        return built
    objects = {source: work / f"{source.stem}.o" for source in code.sources}
    longest_first = sorted(code.sources, key=lambda source: -source.stat().st_size)
    with ThreadPoolExecutor(min(CORES, len(longest_first))) as pool:
        jobs = [pool.submit(_run, [*command, "-c", str(x), "-o", str(objects[x])], work) for x in longest_first]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    _run([*command, *map(str, objects.values()), "-o", str(built), "-lm"], work)
    return built


def _run(command: list[str], work: Path) -> None:
    """Run the compiler; raise NativeUnavailable with its message if it fails."""
    with RUNNING:
        environment = {**os.environ, "TMPDIR": str(work)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST, env=environment)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-600:]
        lines = said.splitlines() or ["it said nothing"]
        line = next((x for x in lines if "error" in x.lower()), lines[-1]).strip()
        remedy = "install gcc or clang with the C library's headers, or set CC"
        raise NativeUnavailable(f"{command[0]} failed: {line}; {remedy}" + (f"\n{said}" if len(lines) > 1 else ""))


def _sync(folder: Path) -> None:
    """Write a folder's names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Compiles the C files for this machine once, keeps the result, and loads it."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lineate import folders


class Code(NamedTuple):
    """C files that make one library."""

    name: str
    """How the names of its libraries begin."""
    sources: tuple[Path, ...]
    headers: tuple[Path, ...] = ()


_FOLDER = Path(__file__).parent
NATIVE = Code(
    "native",
    tuple(
        _FOLDER / f"{name}.c"
        for name in ("choice", "chunkwise", "float8", "halves", "layers", "rounding", "small", "step", "threads")
    ),
    tuple(
        _FOLDER / f"{name}.h"
        for name in ("product_avx512", "product_neon", "products", "small_neon", "threads", "vectors")
    ),
)
"""The native backend."""
_FLAGS = (
    "-O3", "-std=c11", "-D_GNU_SOURCE", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    # Tuned for some processors (Sapphire Rapids), gcc fuses products into the sums of some loops and not of others, so
    # that one row would have other bits than the same row among eight.
    "--param=avoid-fma-max-bits=0",
)  # fmt: skip
_LINK = ("-fPIC", "-shared", "-pthread")


class NativeUnavailable(RuntimeError):
    """Raised if the C code cannot be built or loaded here; the message says why."""


def available() -> bool:
    """Whether the native backend can run here (this compiles it the first time)."""
    return why_not() is None


@functools.cache
def why_not() -> str | None:
    """Return why the native backend cannot run here, or None if it can."""
    try:
        library()
    except NativeUnavailable as reason:
        return str(reason)
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled C code of the native backend, or raise NativeUnavailable."""
    if os.environ.get("LINEATE_NATIVE", "1") == "0":
        raise NativeUnavailable("it is switched off by LINEATE_NATIVE=0")
    return load(NATIVE)


def load(code: Code) -> ctypes.CDLL:
    """Return compiled C code, or raise NativeUnavailable."""
    if os.name != "posix":
        raise NativeUnavailable(f"it needs a POSIX system, got {platform.system()}")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NativeUnavailable("no C compiler was found; install gcc or clang, or set CC")
    return load_or_build(compiler_command(compiler), _cache_folder(), code)


@functools.cache
def c_function(name: str) -> Callable[[bytes], int]:
    """Return the C function lineate_<name>, which takes the packed words of its struct.

    Args:
        name: of the function, without its prefix.
    """
    function = library()[f"lineate_{name}"]
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
    return function


def compiler_command(compiler: str) -> list[str]:
    """Return the command that compiles for this machine, without the names of files.

    Args:
        compiler: the compiler, and options of the user's behind it.
    """
    machine = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return [*compiler.split(), *_FLAGS, machine, *_LINK]


def load_or_build(command: list[str], folder: Path, code: Code = NATIVE) -> ctypes.CDLL:
    """Return the library that this compiler command makes; compile it unless the folder has a complete copy.

    A kept file is named native-<fingerprint of what it is made of>-<sha256 of the file>.so (native: the code's name),
    so that a file cut short does not match its name, and one rename puts the file and its checksum in place.
    """
    start = _prefix(command, code)
    _clean(folder)
    unfit = []
    for file in sorted(folder.glob(start + "*.so")):
        try:
            return _load(file)
        except _Unfit as reason:
            warnings.warn(f"{file} is not loaded: {reason}; it is compiled anew", RuntimeWarning, stacklevel=2)
            unfit.append(file)
    try:
        built = compile_library(command, folder, start, code)
        for file in unfit:
            if file != built:
                _remove(file)
        return _load(built)
    except _Unfit as reason:  # another program has changed the folder
        raise NativeUnavailable(f"the compiled code in {folder} is not loaded: {reason}") from None


class _Unfit(Exception):
    """A file of the cache that must not be loaded; the message says why."""


def _load(file: Path) -> ctypes.CDLL:
    """Load a library whose content has the checksum of its name, and which nobody but us and root can write.

    Where /proc exists the loader opens the descriptor's path, so it loads the very file that was checked. The
    descriptor stays open, because the loader knows a library by its path: no other file must get its number.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise _Unfit("it is a link" if file.is_symlink() else f"it cannot be read ({error.strerror})") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _Unfit("it is not a file")
        others = _writers(found)
        if others:
            raise _Unfit(others)
        with open(descriptor, "rb", closefd=False) as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != file.stem.rpartition("-")[2]:
            raise _Unfit(f"it is damaged ({found.st_size} bytes, whose checksum is not that of its name)")
        same = Path(f"/proc/self/fd/{descriptor}")
        return ctypes.CDLL(str(same if same.exists() else file))
    except OSError as error:
        os.close(descriptor)
        raise NativeUnavailable(f"the compiled code does not load: {error}") from error
    except _Unfit:
        os.close(descriptor)
        raise


def _writers(found: os.stat_result) -> str:
    """Return a clause that says who besides us and root can write a file or folder; empty if nobody can."""
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {found.st_uid}, who can put any code there"
    if found.st_mode & stat.S_IWOTH:
        return f"every user can write it (mode {stat.S_IMODE(found.st_mode):o})"
    if found.st_mode & stat.S_IWGRP and not _alone_in(found.st_gid):
        return f"its group can write it (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _alone_in(group: int) -> bool:
    """Whether this is the private group that many systems give each user; it may write what the user may."""
    import grp
    import pwd

    try:
        own, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == own and set(found.gr_mem) <= {own}


def _prefix(command: list[str], code: Code) -> str:
    """Return how the names of the libraries begin that this command makes."""
    return f"{code.name}-{_fingerprint(command, code)}-"


def _fingerprint(command: list[str], code: Code) -> str:
    """Return a digest of the sources, the compiler and the processor: several machines may share a home folder."""
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in (*code.sources, *code.headers)))
    digest.update("\0".join(command).encode())
    try:
        digest.update(subprocess.run([*command, "--version"], capture_output=True, timeout=30).stdout)
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        digest.update(
            "\n".join(x for x in lines if x.startswith(("flags", "Features", "CPU part", "model name"))).encode()
        )
    except (OSError, subprocess.TimeoutExpired):
        digest.update(platform.processor().encode())
    return digest.hexdigest()[:20]


def _cache_folder() -> Path:
    try:
        folder = folders.cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = _writers(folder.stat())
    except OSError as error:
        raise NativeUnavailable(
            f"the cache folder cannot be made: {error}; set LINEATE_CACHE to one that can"
        ) from error
    if others:
        message = (
            f"code is not loaded from the cache folder {folder}: {others}; set LINEATE_CACHE to a folder that only you "
            "can write (chmod go-w)"
        )
        warnings.warn(f"{message}; until then plain torch runs, which is slower", RuntimeWarning, stacklevel=2)
        raise NativeUnavailable(message)
    return folder


_LONGEST = 300
"""Seconds after which a compiler is stopped."""
_BUILDING = "building-"
"""The prefix of the temporary folders in which a compiler works."""


def _clean(folder: Path) -> None:
    """Remove what killed compilers left; keep younger folders, which a running compiler may use."""
    for left in (*folder.glob(_BUILDING + "*"), *folder.glob("tmp*.so")):
        try:
            if time.time() - left.lstat().st_mtime > 2 * _LONGEST:
                _remove(left)
        except OSError:  # another process was quicker
            continue


def _remove(path: Path) -> None:
    """Remove a file or folder, as far as we are allowed to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def compile_library(command: list[str], folder: Path, start: str | None = None, code: Code = NATIVE) -> Path:
    """Build in a temporary folder, write the result to the disk and rename it, so that no process sees half a file.

    Several processes may do so at a time; each has its own folder, and the last one's file stays.

    Args:
        command: the compiler's, of compiler_command.
        folder: the cache folder.
        start: how the library's name begins; None: as load_or_build looks for it.
        code: what is compiled.
    """
    start = _prefix(command, code) if start is None else start
    try:
        work = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=folder))
    except OSError as error:
        raise NativeUnavailable(
            f"the cache folder is not writable: {error}; set LINEATE_CACHE to one that is"
        ) from error
    built = work / "native.so"
    try:
        done = subprocess.run(
            [*command, *map(str, code.sources), "-o", str(built), "-lm"],
            capture_output=True,
            text=True,
            timeout=_LONGEST,
            env={**os.environ, "TMPDIR": str(work)},
        )
        if done.returncode:
            raise NativeUnavailable(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-600:]}")
        with built.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
            os.fchmod(content.fileno(), stat.S_IMODE(os.fstat(content.fileno()).st_mode) & 0o755)
            os.fsync(content.fileno())
        file = folder / f"{start}{digest}.so"
        os.replace(built, file)
        _sync(folder)
        return file
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} could not run: {error}") from error
    finally:
        _remove(work)


def _sync(folder: Path) -> None:
    """Write a folder's names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Compile the C files for this machine once, keep the result, and load it."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = [Path(__file__).with_name(name) for name in ("chunkwise.c", "layers.c")]
_FLAGS = ("-O3", "-std=c11", "-D_GNU_SOURCE", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
_LINK = ("-fPIC", "-shared", "-pthread")


class NativeUnavailable(RuntimeError):
    """The C code cannot be built or loaded here; the message says why."""


def available() -> bool:
    """Whether the native backend can run here (this compiles it the first time)."""
    return why_not() is None


@functools.cache
def why_not() -> str | None:
    """None if the native backend can run here, else the reason."""
    try:
        library()
    except NativeUnavailable as reason:
        return str(reason)
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled C code; raises NativeUnavailable."""
    if os.environ.get("LINEATE_NATIVE", "1") == "0":
        raise NativeUnavailable("it is switched off by LINEATE_NATIVE=0")
    if os.name != "posix":
        raise NativeUnavailable(f"it needs a POSIX system, got {platform.system()}")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NativeUnavailable("no C compiler was found; install gcc or clang, or set CC")
    command = [*compiler.split(), *_FLAGS, _machine_flag(), *_LINK]
    built = _cache_folder() / f"native-{_fingerprint(command)}.so"
    if not built.exists():
        _compile(command, built)
    try:
        return ctypes.CDLL(str(built))
    except OSError as error:
        raise NativeUnavailable(f"the compiled code does not load: {error}") from error


def _machine_flag() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _fingerprint(command: list[str]) -> str:
    """Changes with the sources, the compiler and the processor: a home folder may be shared by several machines."""
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in _SOURCES))
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


def default_cache_folder() -> Path:
    """Of all that is made once and kept; it may not be there yet."""
    chosen = os.environ.get("LINEATE_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lineate"


def _cache_folder() -> Path:
    folder = default_cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise NativeUnavailable(
            f"the cache folder cannot be made: {error}; set LINEATE_CACHE to one that can"
        ) from error
    return folder


def _compile(command: list[str], built: Path) -> None:
    """Build beside the target and rename, so that no other process ever sees half a file."""
    try:
        handle, partial = tempfile.mkstemp(suffix=".so", dir=built.parent)
    except OSError as error:
        raise NativeUnavailable(
            f"the cache folder is not writable: {error}; set LINEATE_CACHE to one that is"
        ) from error
    os.close(handle)
    try:
        done = subprocess.run(
            [*command, *map(str, _SOURCES), "-o", partial, "-lm"], capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            raise NativeUnavailable(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-600:]}")
        os.replace(partial, built)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} could not run: {error}") from error
    finally:
        Path(partial).unlink(missing_ok=True)

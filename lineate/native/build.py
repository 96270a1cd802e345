"""Keeps the compiled C files of this machine, one library a subject, and loads them; compiles what is missing."""

import ctypes
import functools
import hashlib
import os
import platform
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lineate.native.compiler import (
    Code,
    NativeUnavailable,
    alone,
    clean,
    compile_library,
    compiler_command,
    find_compiler,
    remove,
)
from lineate.system import folders

_FOLDER = Path(__file__).parent


def _code(subject: str, sources: str, headers: str) -> Code:
    files = (tuple(_FOLDER / name for name in names.split()) for names in (sources, headers))
    return Code(f"native-{subject}", *files)


SUBJECTS = {
    "rules": _code("rules", "chunkwise.c", "rules.h"),
    "general": _code("general", "general.c", "rules.h"),
    "layers": _code("layers", "convolution.c layers.c threads.c", "threads.h vectors.h"),
    "products": _code(
        "products",
        "choice.c experts.c float8.c halves.c product.c quantised.c rounding.c step.c threads.c",
        "product_avx512.h product_neon.h products.h quantised_neon.h step.h step_rule.h threads.h vectors.h",
    ),
}
"""The libraries of the native backend; each is compiled when it is first needed: the forms of the rules with one key;
those of the general row; what is around them in a layer; products of few rows and with quantised weights, decoding
steps and the choice of tokens."""
_FUNCTIONS = {
    **dict.fromkeys(("forward", "backward", "recurrent"), "rules"),
    **dict.fromkeys(("general_forward", "general_backward", "general_recurrent"), "general"),
    **dict.fromkeys(("convolution", "convolution_backward", "norm", "norm_backward", "glu", "glu_backward"), "layers"),
    **dict.fromkeys(("product", "combine", "quantised", "quantised_rows", "experts"), "products"),
    **dict.fromkeys(("round", "step", "choose"), "products"),
}
_SWITCHED_OFF = "it is switched off by LINEATE_NATIVE=0"


def available(*subjects: str) -> bool:
    """Whether these libraries, or all, can run here; this compiles them the first time."""
    return why_not(*subjects) is None


@functools.cache
def why_not(*subjects: str) -> str | None:
    """Return why these libraries, or all, cannot run here, or None if they can; several are compiled in parallel.

    Args:
        subjects: names of SUBJECTS.
    """
    wanted = subjects or tuple(SUBJECTS)
    with ThreadPoolExecutor(len(wanted)) as pool:
        reasons = [x for x in pool.map(_obstacle, wanted) if x is not None]
    reason = reasons[0] if reasons else None
    if reason is not None and reason != _SWITCHED_OFF:
        _command.say(reason)
    return reason


def _obstacle(subject: str) -> str | None:
    try:
        library(subject)
    except NativeUnavailable as reason:
        return str(reason)
    return None


class _Command:
    """The line that a command prints once on stderr; a program that imports lineate asks lineate.explain instead."""

    def __init__(self) -> None:
        self.speaks = False

    def say(self, reason: str) -> None:
        """Print in one line that plain torch runs, and why, at the first call."""
        if self.speaks:
            self.speaks = False
            slower = "ops on this CPU run in plain torch, which is several times slower (8 and 4 bits: in float32)"
            print(f"lineate: {slower}: {reason.splitlines()[0]}", file=sys.stderr, flush=True)


_command = _Command()


def speak_once() -> None:
    """Let this process, which runs a command, say in one line on stderr if the C code is needed and cannot run."""
    _command.speaks = os.environ.get("RANK", "0") == "0"


@functools.cache
def library(subject: str) -> ctypes.CDLL:
    """Return a compiled library of SUBJECTS, or raise NativeUnavailable."""
    if os.environ.get("LINEATE_NATIVE", "1") == "0":
        raise NativeUnavailable(_SWITCHED_OFF)
    return load(SUBJECTS[subject])


def load(code: Code) -> ctypes.CDLL:
    """Return compiled C code, or raise NativeUnavailable."""
    if os.name != "posix":
        raise NativeUnavailable(f"it needs a POSIX system, got {platform.system()}")
    return load_or_build(compiler_command(find_compiler()), _cache_folder(), code)


@functools.cache
def c_function(name: str) -> Callable[[bytes], int]:
    """Return the C function lineate_<name>, which takes the packed words of its struct.

    Args:
        name: of the function, without its prefix.
    """
    function = library(_FUNCTIONS[name])[f"lineate_{name}"]
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
    return function


def load_or_build(command: list[str], folder: Path, code: Code) -> ctypes.CDLL:
    """Return the library that this compiler command makes; compile it unless the folder has a complete copy.

    A kept file is named <code's name>-<fingerprint of what it is made of>-<sha256 of the file>.so, so that a file cut
    short does not match its name, and one rename puts the file and its checksum in place.
    """
    start = prefix(command, code)
    clean(folder)
    found = _kept(folder, start, warn=True)
    if isinstance(found, ctypes.CDLL):
        return found
    with alone(folder, start):
        again = _kept(folder, start, warn=False)  # another process may have compiled it meanwhile
        if isinstance(again, ctypes.CDLL):
            return again
        try:
            built = compile_library(command, folder, start, code)
            for file in found:
                if file != built:
                    remove(file)
            return _load(built)
        except _Unfit as reason:  # another program has changed the folder
            raise NativeUnavailable(f"the compiled code in {folder} is not loaded: {reason}") from None


def _kept(folder: Path, start: str, warn: bool) -> ctypes.CDLL | list[Path]:
    """Return the library of the folder, or the files that have its name and must not be loaded."""
    unfit = []
    for file in sorted(folder.glob(start + "*.so")):
        try:
            return _load(file)
        except _Unfit as reason:
            if warn:
                message = f"{file} is not loaded: {reason}; it is compiled anew"
                warnings.warn(message, RuntimeWarning, stacklevel=3)
            unfit.append(file)
    return unfit


class _Unfit(Exception):
    """A file of the cache that must not be loaded; the message says why."""


def _load(file: Path) -> ctypes.CDLL:
    """Load a library whose content has the checksum in its name, and which only this user and root can write.

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
    """Return a clause that says who can write a file or folder besides this user and root; empty if no one else can."""
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


def prefix(command: list[str], code: Code) -> str:
    """Return how the names of the libraries begin that this command makes."""
    return f"{code.name}-{_fingerprint(command, code)}-"


def _fingerprint(command: list[str], code: Code) -> str:
    """Return a digest of the sources, the compiler and the processor: several machines may share a home folder."""
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in (*code.sources, *code.headers)))
    digest.update("\0".join(command).encode())
    digest.update(_machine(tuple(command)))
    return digest.hexdigest()[:20]


@functools.cache
def _machine(command: tuple[str, ...]) -> bytes:
    """Return a digest that identifies the compiler and the processor."""
    digest = hashlib.sha256()
    try:
        digest.update(subprocess.run([*command, "--version"], capture_output=True, timeout=30).stdout)
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        digest.update(
            "\n".join(x for x in lines if x.startswith(("flags", "Features", "CPU part", "model name"))).encode()
        )
    except (OSError, subprocess.TimeoutExpired):
        digest.update(platform.processor().encode())
    return digest.digest()


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

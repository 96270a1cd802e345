"""The cache of compiled C code: damaged, planted, left by a killed compiler, read-only, and made by many at once.

Each start is a separate process that loads only build.py, with a compiler that takes no time: it makes a library of one
function and writes a line into a log, so that starts can be counted.
"""

import grp
import hashlib
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lineate.native import build
from lineate.native.compiler import NativeUnavailable

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(os.name != "posix" or COMPILER is None, reason="needs a POSIX system and a C compiler")

START = f"""
import importlib.util, sys, types
sys.modules["lineate"] = types.ModuleType("lineate")  # the package itself would import torch
sys.modules["lineate"].__path__ = [{str(Path(build.__file__).parents[1])!r}]
spec = importlib.util.spec_from_file_location("build", {build.__file__!r})
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
print(build.why_not("rules"))
"""
OTHER_USER = 12345


@pytest.fixture
def folder():
    """Make a folder that another user can read, unlike pytest's own folders."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def compiler(folder: Path) -> Path:
    """Return a compiler that compiles one small file, whatever it is given."""
    (folder / "quantised.c").write_text("int lineate_answer(void) { return 42; }\n")
    return script(folder / "compiler", f'{COMPILER} -shared -fPIC {folder}/quantised.c -o "$out"')


def script(file: Path, command: str) -> Path:
    """Return a compiler that prints its version, and otherwise runs this command; its last argument but one is -o's."""
    file.write_text(
        "#!/bin/sh\n"
        'for last; do if [ "$last" = --version ]; then echo small 1; exit; fi; done\n'
        'while [ "$1" != -o ]; do shift; done\nout="$2"\n'
        f"echo compiled >> {file.parent}/log\n{command}\n"
    )
    file.chmod(0o755)
    return file


def environment(compiler: Path, cache: Path) -> dict[str, str]:
    return {**os.environ, "CC": str(compiler), "LINEATE_CACHE": str(cache)}


def begin(compiler: Path, cache: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run one start; return what why_not says, and the warnings."""
    command = [sys.executable, "-c", START]
    return subprocess.run(command, env=environment(compiler, cache), capture_output=True, text=True, **options)


def compiled(compiler: Path) -> int:
    """Return how often a compiler ran."""
    log = compiler.parent / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def filled(compiler: Path, cache: Path) -> Path:
    """Fill a cache, and return its library."""
    done = begin(compiler, cache)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")
    (library,) = cache.iterdir()
    return library


def assert_served_again(compiler: Path, cache: Path) -> None:
    """Check that the library loads again without a warning and without a compiler."""
    before = compiled(compiler)
    done = begin(compiler, cache)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")
    assert compiled(compiler) == before


DAMAGE = {
    **{f"cut to {n}": (lambda content, n=n: content[:n]) for n in (0, 1, 63, 64, 100, 1000, 4096, 8192)},
    "cut in half": lambda content: content[: len(content) // 2],
    "without its last byte": lambda content: content[:-1],
    "one byte changed": lambda content: content[:500] + bytes([content[500] ^ 1]) + content[501:],
    "one byte more": lambda content: content + b"\0",
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.cover
def test_damaged_libraries_are_compiled_anew(compiler, folder):
    """This holds for each start of the table, and for the one after it."""
    library = filled(compiler, folder / "cache")
    whole = library.read_bytes()
    for name, damage in DAMAGE.items():
        library.write_bytes(damage(whole))
        done = begin(compiler, library.parent)
        assert (done.returncode, done.stdout) == (0, "None\n"), (name, done.stderr)
        assert "RuntimeWarning" in done.stderr and "it is damaged" in done.stderr, name
        assert library.read_bytes() == whole, name
        assert_served_again(compiler, library.parent)
    assert compiled(compiler) == 1 + len(DAMAGE)


@pytest.mark.cover
def test_unlike_compilers_leave_one_library(compiler, folder):
    """A damaged library that would not be overwritten is removed, as the compiler never makes the same file twice."""
    library = filled(compiler, folder / "cache")
    library.write_bytes(library.read_bytes()[:100])
    (folder / "quantised.c").write_text("int lineate_answer(void) { return 43; }\n")
    assert begin(compiler, library.parent).stdout == "None\n"
    assert [x.name == library.name for x in library.parent.iterdir()] == [False]
    assert_served_again(compiler, library.parent)


def planted(compiler: Path, cache: Path) -> Path:
    """Return a library with the name and checksum that belong there, which leaves a file when it is loaded."""
    library = filled(compiler, cache)
    source = compiler.parent / "planted.c"
    source.write_text(
        "#include <stdio.h>\n__attribute__((constructor)) static void run(void) "
        f'{{ FILE *file = fopen("{compiler.parent}/ran", "w"); if (file) fclose(file); }}\n'
    )
    made = compiler.parent / "planted.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
    content = made.read_bytes()
    name = f"{library.stem.rpartition('-')[0]}-{hashlib.sha256(content).hexdigest()}.so"
    library.unlink()
    (cache / name).write_bytes(content)
    (cache / name).chmod(0o755)
    return cache / name


def link(library: Path) -> None:
    shutil.move(library, library.parent.parent / "elsewhere.so")
    library.symlink_to(library.parent.parent / "elsewhere.so")


needs_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")
PLANTED = {  # what is done to a cache -> whether the folder is refused, and the message
    "a folder that all can write": (lambda x: x.parent.chmod(0o777), True, "every user can write it (mode 777)"),
    "a sticky folder": (lambda x: x.parent.chmod(0o1777), True, "every user can write it (mode 1777)"),
    "a file that all can write": (lambda x: x.chmod(0o666), False, "every user can write it (mode 666)"),
    "a link": (link, False, "it is a link"),
}
FOREIGN = {
    "a folder that a group can write": (
        lambda x: (os.chown(x.parent, 0, OTHER_USER), x.parent.chmod(0o775)),
        True,
        "its group can write it (mode 775)",
    ),
    "another user's folder": (lambda x: os.chown(x.parent, OTHER_USER, 0), True, f"belongs to user {OTHER_USER}"),
    "another user's file": (lambda x: os.chown(x, OTHER_USER, 0), False, f"belongs to user {OTHER_USER}"),
    "a file that a group can write": (
        lambda x: (os.chown(x, 0, OTHER_USER), x.chmod(0o664)),
        False,
        "its group can write it (mode 664)",
    ),
}


@pytest.mark.cover
@pytest.mark.parametrize("name", [*PLANTED, *(pytest.param(name, marks=needs_root) for name in FOREIGN)])
def test_planted_libraries_are_not_loaded(name, compiler, folder):
    """A folder that others can write is refused with a message; a file that they can write is replaced."""
    change, whole_folder, words = (PLANTED | FOREIGN)[name]
    library = planted(compiler, folder / "cache")
    change(library)
    done = begin(compiler, library.parent)
    assert done.returncode == 0 and not (folder / "ran").exists()
    assert "RuntimeWarning" in done.stderr and words in done.stderr
    if whole_folder:
        assert words in done.stdout and "set LINEATE_CACHE to a folder that only you can write" in done.stdout
        assert compiled(compiler) == 1
    else:
        assert done.stdout == "None\n"
        assert_served_again(compiler, library.parent)


def test_a_library_of_ours_is_loaded(compiler, folder):
    """The plant of the test above would work if it were ours, so the table can fail."""
    library = planted(compiler, folder / "cache")
    done = begin(compiler, library.parent)
    assert done.stdout == "None\n" and (folder / "ran").exists()


@pytest.mark.cover
def test_a_folder_through_a_link_is_judged_by_what_it_is(compiler, folder):
    library = planted(compiler, folder / "cache")
    library.parent.chmod(0o777)
    (folder / "link").symlink_to(library.parent)
    done = begin(compiler, folder / "link")
    assert "every user can write it" in done.stdout and not (folder / "ran").exists()


def test_a_private_group_may_write(compiler, folder):
    """With a umask of 002 every new folder can be written by its group, which many systems give each user alone."""
    cache = folder / "cache"
    assert begin(compiler, cache, umask=0o002).stdout == "None\n"
    (library,) = cache.iterdir()
    assert stat.S_IMODE(library.stat().st_mode) & 0o022 == 0
    own, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(cache.stat().st_gid)
    cache.chmod(0o775)
    if group.gr_name == own and set(group.gr_mem) <= {own}:
        assert_served_again(compiler, cache)
    else:
        assert "its group can write it (mode 775)" in begin(compiler, cache).stdout


def test_a_killed_compiler_leaves_nothing_for_ever(compiler, folder):
    """Its leftovers disturb no other process, and are removed once they are too old to belong to a running one."""
    cache = folder / "cache"
    slow = script(folder / "slow", 'echo half > "$out"; sleep 60')
    process = subprocess.Popen([sys.executable, "-c", START], env=environment(slow, cache), start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not list(cache.glob("building-*/native.so")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    left = list(cache.iterdir())  # its folder and its lock
    (cache / "tmpold.so").write_bytes(b"half")  # the name that earlier versions used
    assert begin(compiler, cache).stdout == "None\n"
    assert all(path.exists() for path in left)  # its compiler could still be running
    for path in (*left, cache / "tmpold.so"):
        os.utime(path, (0, 0))
    assert_served_again(compiler, cache)
    assert [x.suffix for x in cache.iterdir()] == [".so"]


@pytest.mark.cover
def test_many_first_starts_at_once(compiler, folder):
    cache = folder / "cache"
    command = [sys.executable, "-c", START]
    started = [
        subprocess.Popen(command, env=environment(compiler, cache), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(6)
    ]
    assert [x.communicate() for x in started] == [(b"None\n", b"")] * 6
    assert len(list(cache.iterdir())) == 1
    assert compiled(compiler) == 1  # the others waited for it
    assert_served_again(compiler, cache)


def begin_without_writing(compiler: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run one start that cannot write into the cache: by another user if we are root, who can write everywhere."""
    if os.geteuid() != 0:
        cache.chmod(0o500)
        done = begin(compiler, cache)
        cache.chmod(0o700)
        return done
    cache.chmod(0o755)
    needed = "import hashlib; hashlib.file_digest"
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            subprocess.run([python, "-c", needed], user=OTHER_USER, check=True, capture_output=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return begin(compiler, cache, user=OTHER_USER, executable=python)
    pytest.skip("another user can run no Python of 3.11 or later")


def test_a_read_only_cache_serves(compiler, folder):
    cache = folder / "cache"
    filled(compiler, cache)
    done = begin_without_writing(compiler, cache)
    assert (done.stdout, done.stderr) == ("None\n", "")
    assert compiled(compiler) == 1


def test_a_damaged_read_only_cache_says_so(compiler, folder):
    library = filled(compiler, folder / "cache")
    library.write_bytes(b"")
    done = begin_without_writing(compiler, library.parent)
    assert "the cache folder is not writable" in done.stdout and "it is damaged" in done.stderr


def test_a_user_without_a_home_is_told(monkeypatch):
    """A user without a home, as in some containers, gets a message, and torch runs."""

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("LINEATE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(NativeUnavailable, match="no home folder is known for a cache; set LINEATE_CACHE"):
        build.library.__wrapped__("rules")  # not what an earlier call found

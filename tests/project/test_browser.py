"""A browser for the tests of pages is found or installed, and tests without one are reported at the very end."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import browser_install

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "tests" / "support" / "browser_install.py"
BROWSER = '#!/bin/sh\necho "Chromium 156.0"\n'
STAND_IN = "#!/bin/sh\necho 'Command chromium-browser requires the snap to be installed' >&2\nexit 1\n"
TEST = """
import pytest
from tests.support.browser import started

@pytest.fixture(scope="module")
def browser():
    with started() as own:
        yield own

@pytest.mark.parametrize("page", ["one", "two"])
def test_page(page, browser): pass
def test_other(): pass
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that adds a program to the PATH of a machine with nothing else, not even a network."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "downloads"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))

    def add(name, text):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
        return file

    # In the place of playwright's command, which would reach for a network.
    add("packages/playwright/__init__.py", "")
    add("packages/playwright/__main__.py", "import sys\nsys.exit('no network')\n")
    return add


def install():
    """Run the command that `make browser` runs; return its exit status and what it writes."""
    done = subprocess.run([sys.executable, INSTALL], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def user(machine, number):
    """Let the command believe that a user with this number runs it."""
    machine("packages/sitecustomize.py", f"import os\nos.geteuid = lambda: {number}\n")


def apt(machine, tmp_path, browser):
    """Add an apt-get that notes its calls and installs a browser."""
    (tmp_path / "chromium").write_text(browser)
    return machine(
        "bin/apt-get",
        f"""#!/bin/sh
        echo "$DEBIAN_FRONTEND $*" >> {tmp_path}/calls
        case "$*" in *"--no-download install"*"chromium"*)
            /bin/cp {tmp_path}/chromium {tmp_path}/bin/chromium; /bin/chmod +x {tmp_path}/bin/chromium;;
        esac
        """,
    )


def test_a_browser_that_is_there_is_used(machine):
    machine("bin/chromium-browser", STAND_IN)  # Ubuntu's package without the browser behind it
    machine("bin/google-chrome", BROWSER)
    assert install() == (0, "")


def test_what_playwright_has_downloaded_is_used(machine):
    machine("downloads/chromium_headless_shell-1254/chrome-headless-shell-linux64/chrome-headless-shell", BROWSER)
    assert install() == (0, "")


@pytest.mark.parametrize("browser", [BROWSER, STAND_IN], ids=["browser", "stand-in"])
def test_root_installs_the_package(browser, machine, tmp_path):
    user(machine, 0)
    apt(machine, tmp_path, browser)
    status, said = install()
    assert status == (browser is STAND_IN) and said.count("trying: apt-get") == 3
    assert ("-m playwright install" in said) == (browser is STAND_IN)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 3 and all(call.startswith("noninteractive -qq ") for call in calls)
    assert "update" in calls[0] and "--download-only install --yes" in calls[1]


def test_others_download_and_are_told_what_to_do(machine, tmp_path):
    user(machine, 1000)
    machine("bin/apt-get", "#!/bin/sh\nexit 100\n")
    status, said = install()
    assert status == 1 and "apt-get -qq" not in said
    assert "-m playwright install --only-shell chromium" in said and "no network" in said
    assert said.splitlines()[-1].startswith("WARNING: no browser is installed") and "`make browser`" in said

    folder = tmp_path / "downloads" / "chromium_headless_shell-9" / "chrome-linux"
    machine("packages/playwright/__main__.py", f"""import pathlib
folder = pathlib.Path({str(folder)!r})
folder.mkdir(parents=True)
(folder / "headless_shell").write_text({BROWSER!r})
(folder / "headless_shell").chmod(0o755)
""")  # fmt: skip
    assert install()[0] == 0


def test_an_attempt_that_takes_long_ends_with_its_children(machine, monkeypatch, tmp_path):
    """The processes that a download has started must not outlive it."""
    lock = tmp_path / "lock"
    child = (
        f"import fcntl, time; fcntl.flock(open({str(lock)!r}, 'w'), fcntl.LOCK_EX); print(flush=True); time.sleep(600)"
    )
    machine("packages/playwright/__main__.py", f"""import subprocess, sys
own = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
own.stdout.readline()
open({str(tmp_path / "begun")!r}, "w").close()
own.wait()
""")  # fmt: skip
    wait = subprocess.Popen.wait

    def limited(process, timeout=None):
        if timeout is None:
            return wait(process)
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", limited)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert browser_install.install() is None
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the child holds it


@pytest.mark.slow
def test_a_skip_is_loud(machine, tmp_path):
    file = machine("test_pages.py", TEST)
    options = ["-q", "-p", "no:cacheprovider", "--confcutdir", ROOT, "-c", ROOT / "pyproject.toml", "-n1"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "tests.conftest", file],
        capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    section, warning, counts = done.stdout.splitlines()[-3:]
    assert "THE PAGES WERE NOT TESTED" in section and "1 passed, 2 skipped" in counts
    assert warning.startswith("WARNING: 2 tests of the pages did not run") and "`make browser`" in warning

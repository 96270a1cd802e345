"""Find a browser for the tests of pages, or install one; `make browser` runs this file.

As root where apt-get is, it is the system's Chromium; elsewhere it is the one that playwright downloads for the user.
The exit status is 1 if there is none in the end. Each attempt has a limit, so that `make test` never waits for long.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
APT = ("apt-get", "-qq", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20", "-o", "DPkg::Lock::Timeout=60")
PACKAGES = ("chromium", "fonts-liberation")  # without a font no text has a width
MISSING = "no browser is installed"
REMEDY = "`make browser` installs one: as root with apt-get, otherwise by playwright's download"


def installed() -> str | None:
    """Return the path of a browser that can be started, or None."""
    return next((path for path in map(shutil.which, NAMES) if path and _starts(path)), None) or downloaded()


def downloaded() -> str | None:
    """Return the path of the newest browser that playwright has downloaded for this user, or None."""
    told = os.environ.get("PLAYWRIGHT_BROWSERS_PATH")
    home = "Library/Caches" if sys.platform == "darwin" else ".cache"
    folder = Path(told) if told else Path.home() / home / "ms-playwright"
    found = [
        x for x in folder.glob("chromium*-*/*/*") if x.name in ("chrome", "headless_shell", "chrome-headless-shell")
    ]
    return next((str(x) for x in sorted(found, key=_revision, reverse=True) if _starts(str(x))), None)


def install() -> str | None:
    """Install a browser unless there is one; return its path, or None if no way led to one."""
    if path := installed():
        return path
    if shutil.which("apt-get") and os.geteuid() == 0:
        chosen = ("install", "--yes", "--no-install-recommends", *PACKAGES)
        _attempt([*APT, "update"], 120)
        # A limit that ends a download does no harm; one that ends an installation leaves half a package.
        there = _attempt([*APT, "--download-only", *chosen], 240) and _attempt([*APT, "--no-download", *chosen], 600)
        if there and (path := installed()):
            return path
    _attempt([sys.executable, "-m", "playwright", "install", "--only-shell", "chromium"], 240)
    return installed()


def _revision(path: Path) -> int:
    number = path.parents[1].name.rsplit("-", 1)[1]
    return int(number) if number.isdigit() else 0


def _starts(path: str) -> bool:
    """Whether a browser has all its libraries, and is no stand-in that only names another package."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, timeout=30, text=True)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return said.returncode == 0 and "chrom" in said.stdout.lower()


def _attempt(command: list[str], limit: float) -> bool:
    """Run a command, and end it with all its children after a number of seconds; return whether it succeeded."""
    print(f"{MISSING}; trying: {' '.join(command)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "PLAYWRIGHT_DOWNLOAD_CONNECTION_TIMEOUT": "5000"}
    own = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        status = own.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"it took more than {limit:.0f} s", flush=True)
        return False
    finally:
        if own.returncode is None:
            os.killpg(own.pid, signal.SIGKILL)
            own.wait()
    if status:
        print(f"it ended with status {status}", flush=True)
    return status == 0


if __name__ == "__main__":
    if install() is None:
        sys.exit(f"WARNING: {MISSING}, so the tests of the pages will be skipped; {REMEDY}")

"""A browser for tests of pages: one process for a module, and for each test a window that tolerates nothing."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support import browser_install

ARGUMENTS = (
    "--no-sandbox",  # root has none
    "--disable-gpu",
    # What it would ask other machines for by itself, unseen by `Window`:
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
    "--no-default-browser-check", "--disable-quic",
)  # fmt: skip


@contextmanager
def started() -> Iterator[Any]:
    """Yield a browser of playwright's; skip the test if this machine has none, which conftest.py reports."""
    playwright = pytest.importorskip("playwright.sync_api", reason=f"{browser_install.MISSING}: playwright is missing")
    path = browser_install.installed()
    if path is None:
        pytest.skip(f"{browser_install.MISSING}; {browser_install.REMEDY}")
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()


class Window:
    """A context of the browser that may reach one server only; `check` fails on errors, on strangers and on dialogs."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.address = address
        self.expected = ""
        """A part of those errors in the console that a test brings about."""
        self.problems: list[str] = []
        self.context = browser.new_context(**{"locale": "en-US", "reduced_motion": "reduce", **options})
        self.context.set_default_timeout(8000)
        self.context.route(re.compile(f"^(?!{re.escape(address)}/)"), self._refuse)
        self.context.on("console", self._console)
        self.context.on("weberror", lambda error: self.problems.append(f"exception: {error.error}"))
        self.context.on("dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def _refuse(self, route: Any) -> None:
        self.problems.append(f"request to another machine: {route.request.url}")
        route.abort()

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and not (self.expected and self.expected in message.text):
            self.problems.append(f"console: {message.text}")

    def open(self) -> Any:
        """Return a new tab with the page of the server."""
        page = self.context.new_page()
        page.goto(self.address)
        return page

    def check(self) -> None:
        assert not self.problems, "\n".join(self.problems)

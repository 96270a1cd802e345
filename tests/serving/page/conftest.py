"""A browser and a scripted server for the tests of the page.

Every test also fails on an error in the console (a violation of the content security policy is one), on an exception,
and on a request that leaves the machine.
"""

import pytest

from tests.support.browser import Window, started


@pytest.fixture(scope="module")  # two of them cannot run at the same time
def browser():
    with started() as own:
        yield own


@pytest.fixture(scope="package")
def running():
    from tests.support.scripted_server import (
        ScriptedServer,  # here, so that tests are skipped where its packages are missing
    )

    with ScriptedServer() as own:
        yield own


@pytest.fixture
def server(running):
    running.forget()
    return running


@pytest.fixture
def window(browser, server):
    own = Window(browser, server.address)
    yield own
    own.context.close()
    own.check()


@pytest.fixture
def page(window):
    return window.open()

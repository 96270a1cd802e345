"""A browser and a scripted server for the tests of the page.

Every test also fails on an error in the console (a violation of the content security policy is one), on an exception,
and on a request that leaves the machine.
"""

from importlib.util import find_spec

import pytest
from browser import Window, started

if find_spec("uvicorn") is None:  # as on a machine that only runs the tests of kernels
    collect_ignore_glob = ["test_*"]
else:
    from scripted_server import ScriptedServer


@pytest.fixture(scope="module")  # two of them cannot run at the same time
def browser():
    with started() as own:
        yield own


@pytest.fixture(scope="package")
def running():
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

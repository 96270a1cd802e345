"""The application of `lineate explore`, and a browser.

Every test of the page also fails on an error in the console (a violation of the content security policy is one), on an
exception, and on a request that leaves the machine.
"""

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from lineate.explore.live.app import make_app
from tests.support.browser import Window, started
from tests.support.explore_page import HOSTS, SIZES, asked, exploring, some_models


@pytest.fixture(scope="package")
def client():
    """Calls the application without a network."""
    testing = pytest.importorskip("starlette.testclient")
    with testing.TestClient(make_app(HOSTS, some_models()), base_url="http://127.0.0.1") as own:
        yield own


@pytest.fixture(scope="package")
def address():
    with exploring() as own:
        yield own


@pytest.fixture(scope="module")  # two of them cannot run at the same time
def browser():
    with started() as own:
        yield own


@pytest.fixture
def window(browser, address):
    own = Window(browser, address, **SIZES["wide"])
    yield own
    own.context.close()
    own.check()


@pytest.fixture
def page(window):
    own = window.open()
    asked(own, "after step 3")
    return own


@pytest.fixture
def sized(size, browser, address):
    """Return the page on a wide screen or on a phone."""
    own = Window(browser, address, **SIZES[size])
    page = own.open()
    asked(page, "after step 3")
    yield page
    own.context.close()
    own.check()

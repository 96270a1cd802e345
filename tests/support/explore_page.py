"""The application of `lineate explore` in a thread on a free port, and steps on its page that tests share."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn

from lineate.explore.live.app import make_app
from lineate.explore.live.models import GIVEN, Models, OpenModel
from lineate.explore.pictures import PictureOptions
from lineate.explore.subject import open_subject

NO_NUMBER = "\u2013"
"""What the table of answers shows where there is no number."""
HOSTS = frozenset({"127.0.0.1", "localhost"})
SIZES = {
    "wide": {"viewport": {"width": 1440, "height": 900}},
    "phone": {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True},
}
"""How a browser shows the page on a wide screen and on a phone."""


def untrained(pattern: str, name: str = GIVEN) -> OpenModel:
    """Return a small model with random weights that reads bytes; it has four layers."""
    return OpenModel(name, open_subject(PictureOptions(model="tiny", pattern=pattern)))


def some_models(folders: bool = True) -> Models:
    """Return models of which the first has a layer of each kind of picture, and nothing is trained."""
    return Models(untrained("KGAT"), folders)


@contextlib.contextmanager
def exploring() -> Iterator[str]:
    """Yield the address of a running application."""
    with socket.socket(proto=socket.IPPROTO_TCP) as listening:  # only then asyncio sends without delay
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(make_app(HOSTS, some_models()), log_level="critical", access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = server.force_exit = True
        thread.join(60)


def write(page, key: str, value: str) -> None:
    """Click a cell of the grid and wait until the picture has the step."""
    page.get_by_role("button", name=f"Write {key} = {value}").click()


def asked(page, caption: str) -> None:
    """Wait until the table of answers is about this."""
    page.locator("#answers caption", has_text=caption).wait_for()


def answers(page) -> dict[str, list[str]]:
    """Return the table of answers: for each rule its answer, error and norm."""
    rows = page.locator("#answers tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


def steps(page) -> list[str]:
    """Return the steps that are listed."""
    return page.locator("#steps .go").all_inner_texts()


def clear(page) -> None:
    page.click("#clear")
    asked(page, "after step 0")


def tiny_texts(page) -> list[str]:
    """Return the texts of pictures that are shown smaller than 10.5 pixels."""
    return page.evaluate("""() => [...document.querySelectorAll("svg text")].filter((x) => x.checkVisibility()
        && parseFloat(x.getAttribute("font-size")) * x.ownerSVGElement.getBoundingClientRect().width
        / x.ownerSVGElement.viewBox.baseVal.width < 10.5).map((x) => x.textContent)""")

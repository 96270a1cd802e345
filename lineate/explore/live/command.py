"""The command `lineate explore`."""

import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lineate.options import option, parameters, sign
from lineate.serving.command import NEEDED, allowed_hosts, is_local, listen
from lineate.terminal import fail, printable

if TYPE_CHECKING:
    import typer
    import uvicorn


@dataclass(frozen=True)
class ExploreArguments:
    """The options of `lineate explore`."""

    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0: every address of this machine.")
    port: int = option(8100, "Port to listen at; 0: a free one.", least=0, most=65535)
    browser: bool = option(True, "Open the page in a browser.", "--browser/--no-browser")
    allow_host: str | None = option(None, "More names by which the page may be called, with commas between.")


def add_commands(app: "typer.Typer") -> None:
    """Add `lineate explore` to the command line."""

    def explore(**given: Any) -> None:
        """Open a page: write, correct and forget in every rule's memory by hand; plan a model with sliders."""
        run_explore(ExploreArguments(**given))

    sign(explore, parameters(ExploreArguments))
    app.command()(explore)


def run_explore(asked: ExploreArguments) -> None:
    """Serve the page until Ctrl+C or SIGTERM; a wrong option ends the program.

    Args:
        asked: The options.
    """
    try:
        listening = listen(asked.host, asked.port)
        server = _prepare(asked)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in NEEDED:
            raise
        fail(f"lineate explore needs {module}, which is not installed; run pip install 'lineate[serve]'", 1)
    except (ValueError, OSError) as error:
        fail(error, 2)
    listening.listen()  # a browser that comes before the server runs waits
    _announce(asked, listening)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again when it has ended
        server.run([listening])


def _prepare(asked: ExploreArguments) -> "uvicorn.Server":
    """Return the server; nothing runs yet."""
    import uvicorn

    from lineate.explore.live.app import LIMITS, make_app
    from lineate.serving.connections import connections

    more = tuple(name.strip() for name in (asked.allow_host or "").split(",") if name.strip())
    config = uvicorn.Config(
        make_app(allowed_hosts(asked.host, more)), lifespan="off", log_level="warning", access_log=False,
        server_header=False, timeout_graceful_shutdown=2, http=connections(LIMITS.head_seconds),
    )  # fmt: skip
    return uvicorn.Server(config)


def _announce(asked: ExploreArguments, listening: socket.socket) -> None:
    """Say where the page is, and open it."""
    host = f"[{asked.host}]" if ":" in asked.host else asked.host
    address = f"http://{host}:{listening.getsockname()[1]}/"
    print(f"lineate: {printable(address)} has the page; Ctrl+C ends it", file=sys.stderr, flush=True)
    if not is_local(asked.host):
        print("lineate: other machines can open this page; it keeps nothing", file=sys.stderr, flush=True)
    if asked.browser:
        import webbrowser

        webbrowser.open(address)

"""The command `lineate explore`."""

import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineate.console.extras import missing_module, not_installed
from lineate.console.names import named_path, user_path
from lineate.console.options import add_command, argument, option, parameters, sign
from lineate.console.terminal import fail, printable
from lineate.web.listening import allowed_hosts, is_local, listen

if TYPE_CHECKING:
    import typer
    import uvicorn

    from lineate.explore.live.models import Models


@dataclass(frozen=True)
class ExploreArguments:
    """The options of `lineate explore`."""

    model: str | None = argument(
        "Model to show: folder of a checkpoint or a run, hub name or preset; none: built-in ones.", "[MODEL]", None
    )
    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0: every address of this machine.")
    port: int = option(8100, "Port to listen at; 0: a free one.", least=0, most=65535)
    browser: bool = option(True, "Open the page in a browser.", "--browser/--no-browser")
    allow_host: str | None = option(None, "More host names of the page, with commas between.")
    export: Path | None = option(  # noqa: RUF009  # it is a field
        None, "Write the page with its first answers here, for any file server, and stop.", parser=named_path,
        metavar="FOLDER",
    )  # fmt: skip


def add_commands(app: "typer.Typer") -> None:
    """Add `lineate explore` to the command line."""

    def explore(**given: Any) -> None:
        """Open a page: memories written by hand, a model token by token, memories that learn, a planner, lessons."""
        run_explore(ExploreArguments(**given))

    sign(explore, parameters(ExploreArguments))
    add_command(app, explore, "lineate explore", "lineate explore out/train --no-browser --port 8101")


def run_explore(asked: ExploreArguments) -> None:
    """Serve the page until Ctrl+C or SIGTERM; a wrong option ends the program.

    Args:
        asked: The options.
    """
    try:
        if asked.export is not None:
            _export(asked, user_path(asked.export))
            return
        listening = listen(asked.host, asked.port)
        server = _prepare(asked)
    except ModuleNotFoundError as error:
        if (module := missing_module(error)) is None:
            raise
        fail(not_installed("lineate explore", module), 1)
    except (ValueError, OSError, ImportError) as error:
        fail(error, 2)
    listening.listen()  # a browser that connects before the server runs waits
    _announce(asked, listening)
    with suppress(KeyboardInterrupt):  # uvicorn re-raises it at its end
        server.run([listening])


def _prepare(asked: ExploreArguments) -> "uvicorn.Server":
    """Return the server; nothing runs yet."""
    import uvicorn

    from lineate.explore.live.app import LIMITS, make_app
    from lineate.web.connections import connections

    models = _models(asked, is_local(asked.host))
    more = tuple(name.strip() for name in (asked.allow_host or "").split(",") if name.strip())
    config = uvicorn.Config(
        make_app(allowed_hosts(asked.host, more), models), lifespan="off", log_level="warning", access_log=False,
        server_header=False, timeout_graceful_shutdown=2, http=connections(LIMITS.head_seconds),
    )  # fmt: skip
    return uvicorn.Server(config)


def _models(asked: ExploreArguments, folders: bool) -> "Models":
    """Return the models of the page; clients on other machines may not name folders of this one."""
    from lineate.explore.live.models import Models, open_given

    return Models(None if asked.model is None else open_given(asked.model), folders)


def _export(asked: ExploreArguments, folder: Path) -> None:
    """Write the page and its first answers into a folder."""
    from lineate.explore.live.export import export

    files, size = export(folder, _models(asked, folders=False))
    print(f"lineate: {printable(str(folder))} has the page: {files} files, {size / 2**20:.1f} MiB", file=sys.stderr)
    print(f"lineate: view it with python -m http.server --directory {printable(str(folder))}", file=sys.stderr)


def _announce(asked: ExploreArguments, listening: socket.socket) -> None:
    """Print the address of the page, and open it."""
    host = f"[{asked.host}]" if ":" in asked.host else asked.host
    address = f"http://{host}:{listening.getsockname()[1]}/"
    print(f"lineate: {printable(address)} has the page; Ctrl+C ends it", file=sys.stderr, flush=True)
    if not is_local(asked.host):
        print("lineate: other machines can open this page; it keeps nothing of theirs", file=sys.stderr, flush=True)
    if asked.browser:
        import webbrowser

        webbrowser.open(address)

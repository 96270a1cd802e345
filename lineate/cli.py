"""The commands lineate demo, inspect, train, generate, chat, quantize, serve, tasks, plan, explore and others."""

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lineate.console.extras import missing_module, not_installed
from lineate.console.options import add_command

if TYPE_CHECKING:
    import typer


def main() -> None:
    """Run the command line; say in one line, without a traceback, which optional dependency is missing."""
    try:
        build_app()()
    except ModuleNotFoundError as error:
        if (module := missing_module(error)) is None:
            raise
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        sys.exit(f"lineate: {not_installed(f'lineate {command}'.strip(), module)}")


def build_app() -> "typer.Typer":
    """Return the commands; typer is imported here so that its absence can be explained."""
    import typer

    from lineate.console.names import hyphenated, named_path

    app = typer.Typer(
        help="Attention with a fixed-size memory: what each rule remembers, and what a checkpoint is made of.",
        no_args_is_help=True,
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"token_normalize_func": hyphenated},  # --emb_dim is --emb-dim, of every command
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            from lineate import __version__

            typer.echo(f"lineate {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version and stop.", callback=show_version, is_eager=True)
        ] = False,
        modules: Annotated[
            list[str] | None,
            typer.Option(
                "--import", metavar="MODULE", help="Import this first: it registers a mixer of yours. May be repeated."
            ),
        ] = None,
    ) -> None:
        from lineate.native.build import speak_once

        speak_once()
        _import_modules(modules or [])

    def demo(
        out: Annotated[
            Path, typer.Option(parser=named_path, metavar="FOLDER", help="Folder for the plots and the numbers.")
        ] = Path("out/demo"),
        seed: Annotated[int, typer.Option(help="Seed of all keys and values.", min=0, max=2**63 - 1)] = 0,
        quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes: seconds, and rougher numbers.")] = False,
    ) -> None:
        """Write pairs into each memory, overwrite some, read all back: see why each rule was invented."""
        import matplotlib  # noqa: F401  # say now, not after all scenes, that it is missing

        _make_folder(out)
        from lineate.explore.demo import run_demo

        run_demo(out, seed=seed, quick=quick)

    def inspect(
        name: Annotated[
            str, typer.Argument(metavar="MODEL", help="Folder of a checkpoint or run, or a name on the hub.")
        ],
    ) -> None:
        """Say what a checkpoint is: layers, rules, heads, parameters, state bytes. No weight is read."""
        from lineate.console.names import user_path
        from lineate.console.terminal import fail
        from lineate.generation.loading import model_folder
        from lineate.models.files.hub import is_hub_name
        from lineate.models.inspect import print_description

        try:
            print_description(name if is_hub_name(name) else model_folder(user_path(named_path(name))))
        except (ValueError, OSError) as error:
            fail(error, 2)

    from lineate.explore.command import add_commands as add_pictures
    from lineate.explore.live.command import add_commands as add_explore
    from lineate.generation.command import add_commands as add_generation
    from lineate.generation.quantizing import add_commands as add_quantizing
    from lineate.learn.command import add_commands as add_lessons
    from lineate.planning.command import add_commands as add_planning
    from lineate.recognise.command import add_commands as add_recognition
    from lineate.serving.command import add_commands as add_serving
    from lineate.tasks.command import add_commands as add_tasks
    from lineate.training.command import add_commands as add_training

    add_command(app, demo, "lineate demo --quick", "lineate demo --out pictures --seed 1")
    add_command(app, inspect, "lineate inspect Qwen/Qwen3.5-4B", "lineate inspect out/train")
    add_training(app)
    add_generation(app)
    add_quantizing(app)
    add_serving(app)
    add_tasks(app)
    add_lessons(app)
    add_planning(app)
    add_pictures(app)
    add_explore(app)
    add_recognition(app)
    return app


def _import_modules(names: list[str]) -> None:
    """Import the user's modules, also from the current folder; a module that cannot be imported ends the program."""
    from lineate.console.terminal import fail

    for name in names:
        if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
            remedy = f"; write --import {Path(name).stem} in its folder" if name.endswith(".py") else ""
            fail(f"--import must be the name of a module, as in an import statement, got {name!r}{remedy}", 2)
        if (here := os.getcwd()) not in sys.path:
            sys.path.insert(0, here)  # as python -m does
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                fail(_why_not_imported(name, error), 2)
            fail(f"--import {name}: there is no module {error.name!r}; run lineate in its folder, or set PYTHONPATH", 2)
        except Exception as error:  # a module may raise anything
            fail(_why_not_imported(name, error), 2)


def _why_not_imported(name: str, error: Exception) -> str:
    """Return the error of an import, and where it was raised."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    file, line = where.filename, where.lineno
    if isinstance(error, SyntaxError):
        file, line = error.filename or file, error.lineno or line
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"--import {name} failed in line {line} of {file}: {type(error).__name__}: {text}"


def _make_folder(out: Path) -> None:
    """Create the folder and prove that a file can be written there, before anything is computed."""
    import typer

    from lineate.console.terminal import printable
    from lineate.system.folders import why_not_writable

    if (why := why_not_writable(out)) is not None:
        raise typer.BadParameter(
            f"expected a folder that can be written, got '{printable(str(out))}' ({why}); choose another folder",
            param_hint="--out",
        )


if __name__ == "__main__":
    main()

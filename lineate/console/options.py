"""The options of a command as a frozen dataclass: a field is an option, with its type, its default and a line of help.

@dataclass(frozen=True)
class Arguments:
    name: str = argument("What to draw.", "NAME")
    seed: int = option(0, "Seed of the random numbers.", least=0)

def draw(**given: Any) -> None:
    run(Arguments(**given))

sign(draw, parameters(Arguments))
add_command(app, draw, "lineate draw memory", "lineate draw memory --seed 1")
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from typing import Annotated, Any


def option(
    default: Any,
    help: str,
    *flags: str,
    least: float | None = None,
    most: float | None = None,
    metavar: str | None = None,
    parser: Callable[[str], Any] | None = None,
) -> Any:
    """Return a field that is an option; without `flags` it is named as the field is, with hyphens."""
    settings = {"help": help, "min": least, "max": most, "metavar": metavar, "parser": parser}
    return field(default=default, metadata={"flags": flags, "settings": settings})


def argument(help: str, metavar: str, default: Any = MISSING) -> Any:
    """Return a field that is an argument without a flag; without a default it must be given."""
    return field(default=default, metadata={"settings": {"help": help, "metavar": metavar}})


def parameters(options: type[Any]) -> dict[str, tuple[Any, Any]]:
    """Return the annotation and the default of every field, as typer reads them; typer is imported now."""
    import typer

    result: dict[str, tuple[Any, Any]] = {}
    for f in fields(options):
        settings = f.metadata["settings"]
        if "flags" in f.metadata:
            made = typer.Option(*f.metadata["flags"], **settings)
        else:
            made = typer.Argument(**settings)
        result[f.name] = Annotated[f.type, made], inspect.Parameter.empty if f.default is MISSING else f.default
    return result


def add_command(app: Any, command: Callable[..., None], *examples: str) -> None:
    """Add a command to an application of typer; its help ends in the examples.

    Args:
        app: The application.
        command: The command; the first paragraph of its docstring is shown in the list of commands.
        examples: Lines to type, of at most 74 characters, which are shown verbatim.
    """
    lines = "\n".join(f"  {line}" for line in examples)
    summary = " ".join((command.__doc__ or "").partition("\n\n")[0].split())
    app.command(short_help=summary, epilog=f"\b\nExamples:\n{lines}")(command)


def sign(command: Any, signature: Mapping[str, tuple[Any, Any]]) -> None:
    """Give a command these keyword parameters, each with an annotation and a default, for typer to read."""
    command.__annotations__ = {name: kind for name, (kind, _) in signature.items()} | {"return": None}
    command.__signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in signature.items()
        ]
    )

"""`lineate check`: which row of the table an update rule is."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lineate.console.options import add_command, argument, option, parameters, sign

if TYPE_CHECKING:
    import typer


@dataclass(frozen=True)
class CheckArguments:
    """The options of `lineate check`: a field is an option of the command line."""

    expression: str = argument('The update, such as "S = a * S; S = S + b * outer(k, v - S.T @ k)".', "EXPRESSION")
    per_key: str = option("", "Gates, with commas between, that have one number per key channel.", metavar="NAMES")
    per_value: str = option("", "Gates, with commas between, that have one number per value channel.", metavar="NAMES")
    json: bool = option(False, "Print JSON.", "--json")


def add_commands(app: "typer.Typer") -> None:
    """Add `lineate check` to the command line."""

    def check(**given: Any) -> None:
        """Say which rule an update of a fixed-size memory is; exit status 0: a row, 1: none, 2: refused."""
        run_check(CheckArguments(**given))

    sign(check, parameters(CheckArguments))
    add_command(
        app,
        check,
        'lineate check "S = a*S + b*outer(k, v - S.T@k)"',
        'lineate check "S = g*S + outer(k, v)" --per-key g',
    )


def run_check(asked: CheckArguments) -> None:
    """Print the result for the expression and end the program with its exit status."""
    import typer

    from lineate.console.terminal import console, fail, printable
    from lineate.recognise.compare import check
    from lineate.recognise.report import as_json, print_finding
    from lineate.recognise.symbols import Refused

    try:
        found = check(asked.expression, _names(asked.per_key), _names(asked.per_value))
    except Refused as error:
        fail(error, 2)
    if asked.json:
        typer.echo(printable(json.dumps(as_json(found), indent=1)))
    else:
        print_finding(found, console())
    raise typer.Exit(0 if found.recognised else 1)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())

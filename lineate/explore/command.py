"""`lineate picture`: compute a picture's numbers, draw them, save both."""

import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lineate.names import named_path, user_path

if TYPE_CHECKING:
    import typer

    from lineate.explore.pictures import Options, Picture

FILE_SUFFIXES = (".txt", ".md", ".rst", ".py", ".json", ".jsonl", ".csv", ".html")
"""A word of --text that ends so is the name of a file."""
LONGEST_TEXT = 2**24
"""Bytes that are read of a text file."""


def add_commands(app: "typer.Typer") -> None:
    """Add `lineate picture` to the command line."""
    import typer

    @app.command()
    def picture(
        name: Annotated[
            str,
            typer.Argument(
                metavar="NAME", help="state, attention, growth, forgetting, recall, cost; all of them; or list."
            ),
        ],
        model: Annotated[
            str | None,
            typer.Option(help="Folder or hub name of a checkpoint, a run, a preset (untrained); else a built-in one."),
        ] = None,
        pattern: Annotated[str | None, typer.Option(help="Mixers of a preset's layers, such as GGGA.")] = None,
        text: Annotated[str | None, typer.Option(help="What the model reads: a text, or a file.")] = None,
        layer: Annotated[int | None, typer.Option(help="Layer of the model, from 0.")] = None,
        head: Annotated[int | None, typer.Option(help="Head of the layer, from 0.")] = None,
        tokens: Annotated[int | None, typer.Option(help="How many tokens.")] = None,
        seed: Annotated[int | None, typer.Option(help="Of all random numbers; 0 if not given.")] = None,
        quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes: seconds, and rougher numbers.")] = False,
        source: Annotated[
            Path | None,
            typer.Option(
                "--from", parser=named_path, metavar="FILE", help="Draw these numbers again: a picture's JSON."
            ),
        ] = None,
        out: Annotated[
            Path, typer.Option(parser=named_path, metavar="FOLDER", help="Folder for the figures and the numbers.")
        ] = Path("out/pictures"),
        formats: Annotated[str, typer.Option("--format", help="png, svg, or both with a comma.")] = "png,svg",
    ) -> None:
        """Draw what a memory does: its state, what it reads, how it grows, forgets, recalls and what it costs."""
        import matplotlib  # noqa: F401  # say now, not after computing, that it is missing

        from lineate.explore.pictures import MODULES, find
        from lineate.folders import check_out
        from lineate.models.presets import PRESETS
        from lineate.names import spelled
        from lineate.terminal import fail, printable

        model = model if model is None else spelled(model, PRESETS)
        given = {
            "model": model, "pattern": pattern, "text": text, "layer": layer, "head": head, "tokens": tokens,
            "seed": seed, "quick": quick or None,
        }  # fmt: skip
        given = {key: value for key, value in given.items() if value is not None}
        try:
            if name == "list":
                for each in MODULES:
                    typer.echo(f"{each:12}{find(each).help}")
                return
            chosen = [find(each) for each in MODULES] if name == "all" else [find(name)]
            kinds = _formats(formats)
            if name == "all" and "tokens" in given:
                raise ValueError("--tokens has another range in every picture; name one picture, or leave it out")
            options = [_options(each, given, name == "all") for each in chosen]
            if source is not None and (given or name == "all"):
                wrong = "name one picture, not all" if name == "all" else f"leave out --{next(iter(given))}"
                raise ValueError(f"--from has the numbers of one picture: {wrong}")
            check_out(out)
            for one, option in zip(chosen, options, strict=True):
                for path in make(one, option, out, kinds, source):
                    typer.echo(printable(str(path)))
        except (ValueError, OSError) as error:
            fail(_one_line(error), 2)


def make(
    picture: "Picture", options: "Options", out: Path, formats: tuple[str, ...], source: Path | None = None
) -> list[Path]:
    """NAME.png, NAME.svg and NAME.json in the folder `out`, which must exist; their paths."""
    from lineate.explore.pictures import load_numbers, save_numbers
    from lineate.explore.style import save_figure, styled

    numbers_path = out / f"{picture.name}.json"
    if source is None:
        began = time.perf_counter()
        numbers = picture.compute(options)
        numbers["seconds_to_compute"] = round(time.perf_counter() - began, 2)
        save_numbers(picture.name, numbers, numbers_path)
        numbers = load_numbers(picture.name, numbers_path)  # drawn from what a file can hold, always
    else:
        numbers = load_numbers(picture.name, source)
    with styled():
        try:
            figure = picture.draw(numbers)
        except (LookupError, ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            if source is None:
                raise
            raise ValueError(
                f"--from '{source}' is damaged or of another version ({type(error).__name__}: {error}); make it again: "
                f"lineate picture {picture.name}"
            ) from None
        paths = save_figure(figure, out, picture.name, formats)
    return paths if source is not None else [*paths, numbers_path]


def _options(picture: "Picture", given: dict[str, Any], several: bool) -> "Options":
    """What the picture uses of what was given; all of it must be of use, unless there are several pictures."""
    from lineate.explore.pictures import Options

    unknown = set(picture.uses) - {f.name for f in fields(Options)}
    assert not unknown, f"{picture.name} uses options that do not exist: {unknown}"
    for name in given:
        if name not in picture.uses and not several:
            uses = ", ".join(f"--{use}" for use in picture.uses) or "none"
            raise ValueError(f"--{name} has no meaning for {picture.name}, whose options are {uses}; leave it out")
    chosen = {name: value for name, value in given.items() if name in picture.uses}
    if several and picture.name == "growth" and "model" not in given:  # of the rules: these are for other pictures
        chosen = {name: value for name, value in chosen.items() if name not in ("text", "layer")}
    for name, least in (("layer", 0), ("head", 0), ("tokens", 1), ("seed", 0)):
        if name in chosen and not least <= chosen[name] < 2**63:
            raise ValueError(f"--{name} must be at least {least}, got {chosen[name]}")
    if "text" in chosen:
        chosen["text"] = read_text(chosen["text"])
    return Options(**chosen)


def read_text(given: str) -> str:
    """The text itself, or what the file of that name holds."""
    wanted = "--text must be a text or a file of text"
    if not given.strip():
        raise ValueError(f"{wanted}, got an empty one")
    path = user_path(given)
    one_word = not any(letter.isspace() for letter in given)
    try:
        there = path.exists()
    except (OSError, ValueError):  # too long for a name, or with a NUL
        there = False
    if not there:
        if one_word and (path.suffix.lower() in FILE_SUFFIXES or "/" in given):
            raise ValueError(f"{wanted}, got '{given}', which looks like a file's name and does not exist")
        return given
    if not path.is_file():
        raise ValueError(f"{wanted}, got '{given}', which is a folder or a device")
    try:
        with path.open("rb") as file:
            text = file.read(LONGEST_TEXT).decode("utf-8")
    except OSError as error:
        raise ValueError(f"{wanted}, got '{given}' ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{wanted}, got '{given}', which is not UTF-8") from None
    if not text.strip():
        raise ValueError(f"{wanted}, got '{given}', which is empty")
    return text


def _formats(text: str) -> tuple[str, ...]:
    from lineate.explore.style import FORMATS

    kinds = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for kind in kinds:
        if kind not in FORMATS:
            raise ValueError(f"--format must be of {', '.join(FORMATS)}, with commas between, got {text!r}")
    return kinds


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

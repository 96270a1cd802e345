"""`lineate picture`: compute a picture's numbers, draw them, save both."""

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineate.console.names import named_path, user_path
from lineate.console.options import add_command, argument, option, parameters, sign

if TYPE_CHECKING:
    import typer

    from lineate.explore.pictures import Picture, PictureOptions

TEXT_FILE_ENDINGS = (".txt", ".md", ".rst", ".py", ".json", ".jsonl", ".csv", ".html")
"""A --text of one word with this ending is treated as a file name."""
MOST_TEXT_BYTES = 2**24
"""How many bytes of a text file are read at most."""


@dataclass(frozen=True)
class PictureArguments:
    """The options of `lineate picture`: a field is an option of the command line."""

    name: str = argument("state, attention, growth, forgetting, recall, cost; all of them; or list.", "NAME")
    model: str | None = option(
        None, "Folder or hub name of a checkpoint, a run, a preset (untrained); else a built-in one."
    )
    pattern: str | None = option(None, "Mixers of a preset's layers, such as GGGA.")
    text: str | None = option(None, "What the model reads: a text, or a file.")
    layer: int | None = option(None, "Layer of the model, from 0.")
    head: int | None = option(None, "Head of the layer, from 0.")
    tokens: int | None = option(None, "How many tokens.")
    seed: int | None = option(None, "Of all random numbers; 0 if not given.")
    quick: bool = option(False, "Smaller sizes: seconds, and rougher numbers.", "--quick")
    source: Path | None = option(  # noqa: RUF009  # it is a field
        None, "Draw these numbers again: a picture's JSON.", "--from", parser=named_path, metavar="FILE"
    )
    out: Path = option(  # noqa: RUF009  # it is a field
        Path("out/pictures"), "Folder for the figures and the numbers.", parser=named_path, metavar="FOLDER"
    )
    formats: str = option("png,svg", "png, svg, or both with a comma.", "--format")

    @property
    def given(self) -> dict[str, Any]:
        """The options of the picture itself that the user gave."""
        named = {name: getattr(self, name) for name in ("pattern", "text", "layer", "head", "tokens", "seed")}
        return {
            name: value
            for name, value in {"model": self.known_model, **named, "quick": self.quick or None}.items()
            if value is not None
        }

    @property
    def known_model(self) -> str | None:
        """The model's name; a preset's is spelled as the preset is."""
        from lineate.console.names import spelled
        from lineate.models.presets import PRESETS

        return None if self.model is None else spelled(self.model, PRESETS)


def add_commands(app: "typer.Typer") -> None:
    """Add `lineate picture` to the command line."""

    def picture(**given: Any) -> None:
        """Draw what a memory does: its state, what it reads, how it grows, forgets, recalls and what it costs."""
        run_picture(PictureArguments(**given))

    sign(picture, parameters(PictureArguments))
    add_command(app, picture, "lineate picture all --quick", "lineate picture state --model out/train --text 'a b a b'")


def run_picture(asked: PictureArguments) -> None:
    """Draw the requested pictures, or list all; a wrong option ends the program."""
    import matplotlib  # noqa: F401  # say now, not after computing, that it is missing
    import typer

    from lineate.console.terminal import fail, printable
    from lineate.explore.pictures import MODULES, find
    from lineate.system.folders import check_out

    try:
        if asked.name == "list":
            for each in MODULES:
                typer.echo(f"{each:12}{find(each).help}")
            return
        given, several = asked.given, asked.name == "all"
        chosen = [find(each) for each in MODULES] if several else [find(asked.name)]
        formats = _formats(asked.formats)
        if several and "tokens" in given:
            raise ValueError("--tokens has another range in every picture; name one picture, or leave it out")
        options = [options_for(each, given, several) for each in chosen]
        if asked.source is not None and (given or several):
            wrong = "name one picture, not all" if several else f"leave out --{next(iter(given))}"
            raise ValueError(f"--from has the numbers of one picture: {wrong}")
        check_out(asked.out)
        for one, own in zip(chosen, options, strict=True):
            for path in make(one, own, asked.out, formats, asked.source):
                typer.echo(printable(str(path)))
    except (ValueError, OSError) as error:
        fail(_one_line(error), 2)


def make(
    picture: "Picture", options: "PictureOptions", out: Path, formats: tuple[str, ...], source: Path | None = None
) -> list[Path]:
    """Write NAME.png, NAME.svg and NAME.json into the folder `out`, which must exist; return their paths."""
    from lineate.explore.pictures import load_numbers, save_numbers
    from lineate.figures import save_figure, styled

    numbers_path = out / f"{picture.name}.json"
    if source is None:
        began = time.perf_counter()
        numbers = picture.compute(options)
        numbers["seconds_to_compute"] = round(time.perf_counter() - began, 2)
        save_numbers(picture.name, numbers, numbers_path)
        numbers = load_numbers(picture.name, numbers_path)  # draw exactly the numbers that the file holds
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


def options_for(picture: "Picture", given: dict[str, Any], several: bool) -> "PictureOptions":
    """Return the given options that the picture uses; a single picture must use all of them."""
    from lineate.explore.pictures import PictureOptions

    unknown = set(picture.uses) - {f.name for f in fields(PictureOptions)}
    assert not unknown, f"{picture.name} uses options that do not exist: {unknown}"
    for name in given:
        if name not in picture.uses and not several:
            uses = ", ".join(f"--{use}" for use in picture.uses) or "none"
            raise ValueError(f"--{name} has no meaning for {picture.name}, whose options are {uses}; leave it out")
    chosen = {name: value for name, value in given.items() if name in picture.uses}
    if several and picture.name == "growth" and "model" not in given:  # the rules read no text
        chosen = {name: value for name, value in chosen.items() if name not in ("text", "layer")}
    for name, least in (("layer", 0), ("head", 0), ("tokens", 1), ("seed", 0)):
        if name in chosen and not least <= chosen[name] < 2**63:
            raise ValueError(f"--{name} must be at least {least}, got {chosen[name]}")
    if "text" in chosen:
        chosen["text"] = read_text(chosen["text"])
    return PictureOptions(**chosen)


def read_text(given: str) -> str:
    """Return the text itself, or the contents of the file of that name."""
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
        if one_word and (path.suffix.lower() in TEXT_FILE_ENDINGS or "/" in given):
            raise ValueError(f"{wanted}, got '{given}', which looks like a file's name and does not exist")
        return given
    if not path.is_file():
        raise ValueError(f"{wanted}, got '{given}', which is a folder or a device")
    try:
        with path.open("rb") as file:
            text = file.read(MOST_TEXT_BYTES).decode("utf-8")
    except OSError as error:
        raise ValueError(f"{wanted}, got '{given}' ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{wanted}, got '{given}', which is not UTF-8") from None
    if not text.strip():
        raise ValueError(f"{wanted}, got '{given}', which is empty")
    return text


def _formats(text: str) -> tuple[str, ...]:
    from lineate.figures import FORMATS

    kinds = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for kind in kinds:
        if kind not in FORMATS:
            raise ValueError(f"--format must be of {', '.join(FORMATS)}, with commas between, got {text!r}")
    return kinds


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

"""`lineate learn`: list the lessons, or run some of them in the terminal."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineate.console.names import named_path
from lineate.console.options import add_command, argument, option, parameters, sign

if TYPE_CHECKING:
    import typer

DISAGREE = "disagreements"
"""The word for the page of questions that write-ups answer differently."""


@dataclass(frozen=True)
class LearnArguments:
    """The options of `lineate learn`: a field is an option of the command line."""

    lesson: str | None = argument(
        f"A lesson's number or name, all, or {DISAGREE}; without it, the lessons are listed.", "LESSON", None
    )
    answer: bool = option(False, "Show the answer of the exercise too.", "--answer")
    out: Path | None = option(  # noqa: RUF009  # it is a field
        None, "Draw the lesson's picture into this folder.", parser=named_path, metavar="FOLDER"
    )


def add_commands(app: "typer.Typer") -> None:
    """Add `lineate learn` to the command line."""

    def learn(**given: Any) -> None:
        """Learn the rules in twelve short lessons, from softmax attention to Kimi Delta Attention."""
        run_learn(LearnArguments(**given))

    sign(learn, parameters(LearnArguments))
    add_command(app, learn, "lineate learn", "lineate learn 8 --out lesson")


def run_learn(asked: LearnArguments) -> None:
    """Show the requested lessons; a wrong name ends the program with code 2, a claim that does not hold with code 1."""
    from lineate.console.terminal import console, fail
    from lineate.learn.lessons import lesson_at
    from lineate.learn.show import show_disagreements, show_lesson, show_list
    from lineate.system.folders import check_out

    screen = console()
    try:
        if asked.lesson is None:
            show_list(screen)
            return
        numbers = chosen(asked.lesson)
        if asked.out is not None:
            import matplotlib  # noqa: F401  # say now, not after the first lesson, that it is missing

            check_out(asked.out)
    except (ValueError, OSError) as error:
        fail(error, 2)
    holds = [show_lesson(screen, number, lesson_at(number), asked.answer, asked.out) for number in numbers]
    if asked.lesson == DISAGREE:
        holds.append(show_disagreements(screen))
    if not all(holds):
        fail("a claim of these lessons does not hold on this machine", 1)


def chosen(word: str) -> list[int]:
    """Return the numbers of the lessons that a word names; none for the page of disagreements."""
    from lineate.console.names import nearest, spelled
    from lineate.learn.lessons import MODULES, all_lessons

    numbers = list(range(1, len(MODULES) + 1))
    if word in ("all", DISAGREE):
        return numbers if word == "all" else []
    if word.isdecimal() and int(word) in numbers:
        return [int(word)]
    by_name = {lesson.name: number for number, lesson in all_lessons().items()}
    if (name := spelled(word, by_name)) in by_name:
        return [by_name[name]]
    hint = "" if word.isdecimal() else nearest(word, (*by_name, "all", DISAGREE))
    raise ValueError(
        f"lesson must be a number from 1 to {len(MODULES)}, a name, all or {DISAGREE}, got {word!r}"
        f"{hint or '; lineate learn lists them'}"
    )

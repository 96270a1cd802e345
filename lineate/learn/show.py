"""Lessons in the terminal."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lineate.learn.lesson import Finding, Lesson, run, save_picture
from lineate.learn.lessons import all_lessons
from lineate.learn.references import cited

if TYPE_CHECKING:
    from rich.console import Console


def show_list(screen: "Console") -> None:
    """List the lessons."""
    screen.print("Lessons from softmax attention to Kimi Delta Attention", style="bold")
    for number, lesson in all_lessons().items():
        screen.print(f"{number:3}  {lesson.name:12} {lesson.title}")
    screen.print("     disagreements  where write-ups disagree, with a program for each question")
    screen.print("\nlineate learn 5            run a lesson, by its number or name")
    screen.print("lineate learn 5 --answer   with the answer of its exercise; --out FOLDER draws its picture")
    screen.print("lineate learn all          run all of them")


def show_lesson(screen: "Console", number: int, lesson: Lesson, answer: bool, out: Path | None) -> bool:
    """Show and run a lesson; return whether all its claims hold."""
    screen.print()
    screen.rule(f"{number}. {lesson.title}", align="left")
    _block(screen, lesson.equation)
    _markdown(screen, lesson.text)
    screen.print()
    _python(screen, lesson.code)
    outcome = run(lesson, answer)
    _head(screen, "What it prints")
    screen.print(outcome.printed.rstrip(), soft_wrap=True)
    _findings(screen, "What is checked", outcome.findings)
    if out is not None:
        path = out / f"{file_name(number, lesson)}.png"
        save_picture(lesson.picture, lesson.code, outcome.names, path)
        screen.print(f"\nPicture: {path}\n  {lesson.picture.caption}")
    _head(screen, "Exercise")
    _markdown(screen, lesson.exercise.question)
    if answer:
        _head(screen, "Answer")
        _markdown(screen, lesson.exercise.answer)
        if lesson.exercise.code:
            screen.print()
            _python(screen, lesson.exercise.code)
        _findings(screen, "What is checked of the answer", outcome.answers)
    else:
        screen.print(f"(lineate learn {number} --answer shows the answer)", style="dim")
    _head(screen, "What breaks next")
    _markdown(screen, lesson.next)
    _references(screen, citing(lesson))
    return outcome.holds


def show_disagreements(screen: "Console") -> bool:
    """Show and run the questions that write-ups answer differently; return whether all claims hold."""
    from lineate.learn.disagreements import DISAGREEMENTS, SETUP, run_disagreement

    screen.print()
    screen.rule("Where write-ups disagree", align="left")
    screen.print("\nEvery program below begins with this one:\n")
    _python(screen, SETUP)
    holds = True
    for number, each in enumerate(DISAGREEMENTS, 1):
        _head(screen, f"{number}. {each.question}")
        _markdown(screen, f"Found: {each.found}\n\nHere: {each.here}")
        screen.print()
        _python(screen, each.code)
        findings = run_disagreement(each)
        _findings(screen, "What is checked", findings)
        holds = holds and all(finding.holds for finding in findings)
    _references(screen, "".join(each.found + each.here for each in DISAGREEMENTS))
    return holds


def file_name(number: int, lesson: Lesson) -> str:
    """Return the name of a lesson's page and picture, without the ending."""
    return f"{number:02}-{lesson.name}"


def citing(lesson: Lesson) -> str:
    """Return those texts of a lesson that cite references."""
    return lesson.text + lesson.exercise.answer


def without_pages(text: str) -> str:
    """Return Markdown in which links to pages of the documentation are their texts, for readers who have no pages."""
    return re.sub(r"\[([^\]]+)\]\([^)]*\.md[^)]*\)", r"\1", text)


def _head(screen: "Console", title: str) -> None:
    screen.print(f"\n{title}", style="bold")


def _block(screen: "Console", text: str) -> None:
    screen.print()
    for line in text.rstrip().splitlines():
        screen.print(f"    {line}", style="cyan", soft_wrap=True)
    screen.print()


def _markdown(screen: "Console", text: str) -> None:
    from rich.markdown import Markdown

    from lineate.console.terminal import printable

    screen.print(Markdown(printable(without_pages(text)), hyperlinks=False))


def _python(screen: "Console", code: str) -> None:
    from rich.syntax import Syntax

    shown = Syntax("", "python", theme="ansi_dark", background_color="default").highlight(code.rstrip())
    shown.rstrip()
    screen.print(shown, soft_wrap=True)  # a line that is too long is wrapped by the terminal, so that it can be copied


def _findings(screen: "Console", title: str, findings: Sequence[Finding]) -> None:
    """Print every claim with its figure, and whether it holds."""
    _head(screen, title)
    for finding in findings:
        mark, style = ("holds", "green") if finding.holds else ("FAILS", "bold red")
        screen.print(f"{mark}  {finding.claim.says}: {finding.told}", style=style)
        screen.print(f"       {finding.claim.shown}", style="dim", soft_wrap=True)


def _references(screen: "Console", text: str) -> None:
    if found := cited(text):
        _head(screen, "References")
        for reference in found:
            screen.print(f"[{reference.key}] {reference.line}", style="dim")

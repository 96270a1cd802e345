"""Renders the pages of docs/learn and docs/references.md: python -m lineate.learn.render docs/learn."""

import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from lineate.learn.disagreements import DISAGREEMENTS, SETUP, run_disagreement
from lineate.learn.lesson import Equality, Finding, Lesson, Outcome, run, save_picture
from lineate.learn.lessons import all_lessons
from lineate.learn.references import GROUPS, cited, group_of
from lineate.learn.show import file_name

NOTE = (
    "<!-- Made by python -m lineate.learn.render docs/learn from lineate/learn; change the modules, not this page. -->"
)

WIDTH = 120
"""Characters of a line of the pages."""
COMMANDS = """\
    lineate learn                        the list
    lineate learn 5                      run a lesson in the terminal
    lineate learn 5 --answer             with the answer of its exercise
    lineate learn all --out out/learn    all of them, with their pictures
    lineate explore                      a page whose view Lessons runs them"""


def render_pages(outcomes: Mapping[int, Outcome]) -> dict[str, str]:
    """Return the pages by their paths from the folder of the lessons, given the outcome of each lesson."""
    lessons = all_lessons()
    pages = {f"{file_name(n, lesson)}.md": _lesson_page(n, lessons, outcomes[n]) for n, lesson in lessons.items()}
    pages["index.md"] = _index_page(lessons)
    pages["disagreements.md"] = _disagreements_page()
    pages["../references.md"] = _references_page()
    return {name: f"{text}\n\n{_targets(text)}{NOTE}\n" for name, text in pages.items()}


def write(folder: Path) -> None:
    """Run all lessons; write the pages, and the pictures into the folder images next to them."""
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    outcomes = {number: run(lesson) for number, lesson in all_lessons().items()}
    for name, text in render_pages(outcomes).items():
        (folder / name).write_text(text, encoding="utf-8")
    for number, lesson in all_lessons().items():
        path = images / f"{file_name(number, lesson)}.png"
        save_picture(lesson.picture, lesson.code, outcomes[number].names, path)


def _lesson_page(number: int, lessons: dict[int, Lesson], outcome: Outcome) -> str:
    lesson = lessons[number]
    name = file_name(number, lesson)
    answer = [_filled(lesson.exercise.answer)]
    if lesson.exercise.code:
        answer.append(_program(lesson.exercise.code))
    if outcome.answers:
        answer.append(_findings(outcome.answers))
    parts = [
        f"# {number}. {lesson.title}",
        _way(number, lessons),
        _indented(lesson.equation),
        lesson.text.strip(),
        "## The program",
        _program(lesson.code),
        "It prints:",
        _indented(outcome.printed),
        "## What is checked",
        f"    lineate learn {number}",
        _findings(outcome.findings),
        f"![{lesson.picture.caption}](images/{name}.png)",
        _filled(lesson.picture.caption),
        "## Exercise",
        _filled(lesson.exercise.question),
        "## Answer",
        *answer,
        "## What breaks next",
        _filled(lesson.next),
    ]
    if number < len(lessons):
        parts.append(
            f"Next: [{number + 1}. {lessons[number + 1].title}]({file_name(number + 1, lessons[number + 1])}.md)"
        )
    return "\n\n".join(parts)


def _index_page(lessons: dict[int, Lesson]) -> str:
    rows = [f"| {n} | [{x.title}]({file_name(n, x)}.md) | `lineate learn {x.name}` |" for n, x in lessons.items()]
    parts = [
        "# Lessons",
        _filled(
            "Twelve short lessons lead from softmax attention to Kimi Delta Attention. You need to know softmax "
            "attention; the rest is built up. Each has an equation, a program of some lines that runs exactly as "
            "shown, equalities that are checked in float64, a picture, an exercise with its answer, and what breaks "
            "next."
        ),
        COMMANDS,
        "\n".join(["| | lesson | in the terminal |", "|---|---|---|", *rows]),
        _filled(
            "[Where write-ups disagree](disagreements.md) has the questions that are answered differently in "
            "public, each with a program that shows the difference: `lineate learn disagreements`. Keys such as "
            "[Kimi2025] are those of [references.md](../references.md)."
        ),
        _filled(
            "The symbols are those of [derivation.md](../derivation.md): q, k and v are the query, key and value of "
            "a token, S is the memory `[k, v]`, and the tensors of the ops are `b t h k` (batch, tokens, heads, "
            "channels)."
        ),
    ]
    return "\n\n".join(parts)


def _disagreements_page() -> str:
    parts = [
        "# Where write-ups disagree",
        _filled(
            "Papers, blogs and code present these rules in different ways. Some differences are names; some are other "
            "rules. Each program shows which, and its claims are checked in float64:"
        ),
        "    lineate learn disagreements",
        _filled(
            "[derivation.md](../derivation.md#9-where-write-ups-disagree) has a longer table, with conventions that "
            "change no result."
        ),
        "Contents: "
        + " ·\n".join(f"[{n} {x.question}](#{_anchor(f'{n}. {x.question}')})" for n, x in enumerate(DISAGREEMENTS, 1)),
        "Every program continues this one:",
        _program(SETUP),
    ]
    for number, each in enumerate(DISAGREEMENTS, 1):
        parts += [
            f"## {number}. {each.question}",
            _filled(f"**Found:** {each.found}"),
            _filled(f"**Here:** {each.here}"),
            _program(each.code),
            _findings(run_disagreement(each)),
        ]
    return "\n\n".join(parts)


def _references_page() -> str:
    parts = [
        "# References",
        "The pages cite papers, books, models and programs by these keys. An arXiv identifier stands where there is "
        "one.",
    ]
    for name, group in GROUPS.items():
        lines = []
        for reference in group:
            line = reference.line
            if reference.arxiv:
                at = f"arXiv {reference.arxiv}"
                line = line.replace(at, f"[{at}](https://arxiv.org/abs/{reference.arxiv})")
            lines.append(_filled(f"- **{reference.key}**: {line}", "  "))
        parts += [f"## {name}", "\n".join(lines)]
    return "\n\n".join(parts)


def _findings(findings: Sequence[Finding]) -> str:
    """Return tables of equalities and measures, without the rounding errors, which differ between machines."""
    equal = [
        f"| {x.claim.says} | `{x.claim.left}` | `{x.claim.right}` | {x.claim.tolerance:g} |"
        for x in findings
        if isinstance(x.claim, Equality)
    ]
    measured = [
        f"| {x.claim.says} | `{x.claim.shown}` | {x.figure} |" for x in findings if not isinstance(x.claim, Equality)
    ]
    parts = []
    if equal:
        parts.append("\n".join(["| equal | left | right | within |", "|---|---|---|---|", *equal]))
    if measured:
        parts.append("\n".join(["| measured | as | value |", "|---|---|---|", *measured]))
    return "\n\n".join(parts)


def _way(number: int, lessons: dict[int, Lesson]) -> str:
    """Return the links to the list and to the previous and next lessons."""
    beside = [(n, lessons[n]) for n in (number - 1, number + 1) if n in lessons]
    links = [f"[{n}. {lesson.title}]({file_name(n, lesson)}.md)" for n, lesson in beside]
    return " ·\n".join(["[Lessons](index.md)", *links])


def _targets(text: str) -> str:
    """Return the targets of the citations in a page, which make links of them; none for the list itself."""
    keys = [] if text.startswith("# References") else [reference.key for reference in cited(text)]
    lines = [f"[{key}]: ../references.md#{_anchor(group_of(key))}\n" for key in keys]
    return "".join(lines) + "\n" * bool(lines)


def _filled(text: str, indent: str = "") -> str:
    """Return a paragraph in lines; none begins with an operator, which Markdown would take for an item of a list.

    The lines after the first begin with `indent`.
    """
    bound = re.sub(r"(?<!^) ([-+*]) ", "\x01\\1\x01", " ".join(text.split()))
    lines = textwrap.fill(bound, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return lines.replace("\x01", " ")


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())


def _program(code: str) -> str:
    return f"```python\n{code.rstrip()}\n```"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m lineate.learn.render docs/learn")
    write(Path(sys.argv[1]))

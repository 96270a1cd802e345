"""The view "Lessons": those of `lineate learn`, run on the server.

The page sends only the number of a lesson. The lesson's own program runs, through `lineate.learn`.
"""

import base64
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lineate.explore.live.examples import AGAIN, ALIKE, FORGET, OVERWRITE, memory_link
from lineate.learn.lesson import Finding, Lesson, Outcome, run, save_picture
from lineate.learn.lessons import MODULES, all_lessons, lesson_at
from lineate.learn.references import cited
from lineate.learn.show import citing, file_name, without_pages
from lineate.torch_ops.tracing import cpu_by_default
from lineate.web.fields import Fields

NUMBERS = tuple(range(1, len(MODULES) + 1))
"""The numbers of all lessons."""


@dataclass(frozen=True)
class Opening:
    """A view in a state that shows what a lesson is about."""

    href: str
    """The address within the page."""
    label: str
    see: str
    """What to see or to do."""


OPENS = (
    Opening("#plan", "Plan: a model of its sizes", "Drag Context: the cache of pure attention grows with every token."),
    Opening(
        memory_link(OVERWRITE), "Memory: overwrite A",
        "Linear attention adds, so that it answers w and y together. Its S is the sum of two outer products.",
    ),
    Opening(
        "#model?layer=0", "Model: layer 0",
        "The attention matrix is the parallel form of a head, and S after the token its recurrent form.",
    ),
    Opening(
        memory_link(ALIKE), "Memory: four keys that are alike",
        "Linear attention answers every value, each in proportion to the likeness of its key: the crosstalk.",
    ),
    Opening(
        memory_link(AGAIN), "Memory: A, B, then A again, with decay",
        "Drag Decay: gated linear attention lets the older value fade, and the one that is needed with it.",
    ),
    Opening(
        memory_link(OVERWRITE), "Memory: overwrite A",
        "DeltaNet answers y alone. Drag Beta to 0.5: half of the old value stays.",
    ),
    Opening(
        "#learning?task=map", "Learning: new keys, values of one linear map",
        "DeltaNet is the rule of Widrow and Hoff; least squares finds the map as soon as there are enough pairs.",
    ),
    Opening(
        memory_link(AGAIN), "Memory: A, B, then A again, with decay",
        "Gated DeltaNet replaces A and lets B fade; DeltaNet keeps B, and gated linear attention mixes A.",
    ),
    Opening(
        memory_link(FORGET), "Memory: write A and B, forget A",
        "Asked for B, Gated DeltaNet has lost it with A. Kimi Delta Attention closed the channel of A alone.",
    ),
    Opening(
        "#learning?task=pairs", "Learning: a few pairs, repeated",
        "Every line is a memory that takes gradient steps. Exchange the optimiser of one of them.",
    ),
    Opening(
        "#plan", "Plan: a model of its sizes",
        "Change the pattern from GGGA to A or G: the few softmax layers set the bytes of the cache.",
    ),
    Opening(
        "#plan?preset=qwen3-next-80b", "Plan: Qwen3-Next 80B",
        "The same numbers as in the program, on other machines, with other lengths and batches.",
    ),
)  # fmt: skip
"""The view that each lesson opens, in order."""


def read_request(body: Fields) -> int:
    """Return the lesson number of a body; raise ApiError with the name of the field that is wrong.

    Args:
        body: The fields of the body.
    """
    expected = f"a number from 1 to {len(NUMBERS)}"
    body.needed("lesson", expected)
    found = body.whole("lesson", NUMBERS[0], NUMBERS[-1])
    body.finish()
    assert found is not None  # it was needed
    return found


def describe() -> list[dict[str, Any]]:
    """Return the list of the lessons."""
    return [{"number": n, "name": each.name, "title": each.title} for n, each in all_lessons().items()]


def show_lesson(number: int) -> dict[str, Any]:
    """Return a lesson as the page shows it before it is run; texts are Markdown.

    Args:
        number: The lesson.
    """
    lesson = lesson_at(number)
    opening = OPENS[number - 1]
    return {
        "lesson": number, "title": lesson.title, "equation": lesson.equation.rstrip(),
        "text": without_pages(lesson.text), "code": lesson.code.rstrip(), "caption": lesson.picture.caption,
        "question": without_pages(lesson.exercise.question),
        "answer": without_pages(lesson.exercise.answer), "answer_code": lesson.exercise.code.rstrip(),
        "next": without_pages(lesson.next), "file": f"{file_name(number, lesson)}.png",
        "opens": {"href": opening.href, "label": opening.label, "see": opening.see},
        "references": [f"[{x.key}] {x.line}" for x in cited(citing(lesson))],
    }  # fmt: skip


@torch.enable_grad()
@cpu_by_default
def run_lesson(number: int) -> dict[str, Any]:
    """Run a lesson and its exercise; return the output, the checks, and the picture as a PNG in base64.

    The picture is None where matplotlib is not installed.

    Args:
        number: The lesson.
    """
    lesson = lesson_at(number)
    outcome = run(lesson)
    return {
        "lesson": number, "printed": outcome.printed.rstrip(), "holds": outcome.holds,
        "findings": [_told(x) for x in outcome.findings], "answers": [_told(x) for x in outcome.answers],
        "picture": _picture(lesson, outcome) if find_spec("matplotlib") else None,
    }  # fmt: skip


def _told(finding: Finding) -> dict[str, Any]:
    claim = finding.claim
    return {"says": claim.says, "shown": claim.shown, "told": finding.told, "holds": finding.holds}


def _picture(lesson: Lesson, outcome: Outcome) -> str:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        save_picture(lesson.picture, lesson.code, outcome.names, path)
        return base64.b64encode(path.read_bytes()).decode("ascii")

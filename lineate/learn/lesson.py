"""The parts of a lesson, and its execution.

The program of a lesson is a text. The command and the pages show this text, and `run` executes the same text. Claims
are expressions that are evaluated with the program's names afterwards, so they too are shown exactly as they run.
"""

import hashlib
import inspect
import io
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lineate.system.seeding import own_random_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Names = dict[str, Any]
"""The names that a program has defined."""


@dataclass(frozen=True)
class Equality:
    """Two expressions whose values agree; numbers with a fraction are compared in float64."""

    says: str
    """The equality in words."""
    left: str
    """An expression over the names of the program."""
    right: str
    """The expression that it must equal."""
    tolerance: float = 1e-12
    """The largest difference of two elements that still counts as equal; 0 is for whole numbers."""

    def check(self, names: Names) -> "Finding":
        """Evaluate both sides and return their largest difference; NaN never holds."""
        left, right = _tensor(self.left, names), _tensor(self.right, names)
        if left.shape != right.shape:
            shapes = f"{tuple(left.shape)} and {tuple(right.shape)}"
            raise ValueError(f"{self.left} and {self.right} must have one shape, got {shapes}")
        difference = (left - right).abs().max().item()
        return Finding(self, difference, difference <= self.tolerance)

    @property
    def shown(self) -> str:
        """The equality as a line of Python."""
        return f"{self.left} == {self.right}"


@dataclass(frozen=True)
class Measure:
    """A number that the text states, and the bounds that it must keep."""

    says: str
    """The measure in words."""
    value: str
    """An expression over the names of the program."""
    least: float
    """The smallest value that agrees with the text."""
    most: float
    """The largest value that agrees with the text."""

    def check(self, names: Names) -> "Finding":
        """Evaluate the expression and return the number."""
        value = float(torch.as_tensor(eval(self.value, names)).detach())
        return Finding(self, value, self.least <= value <= self.most)

    @property
    def shown(self) -> str:
        """The measure as a line of Python."""
        return self.value


@dataclass(frozen=True)
class Finding:
    """The value of a claim, and whether it holds."""

    claim: Equality | Measure
    value: float
    """The largest difference of an equality, or the measured number."""
    holds: bool

    @property
    def figure(self) -> str:
        """The value with three digits."""
        return f"{self.value:.3g}"

    @property
    def told(self) -> str:
        """The figure in words: the difference between the sides of an equality, or the measured number."""
        if isinstance(self.claim, Equality):
            return f"off by {self.figure}, at most {self.claim.tolerance:g}"
        return self.figure


Claim = Equality | Measure


@dataclass(frozen=True)
class Exercise:
    """A question and its answer, whose claims are checked with the lesson's."""

    question: str
    answer: str
    code: str = ""
    """A program that continues the lesson's; it may be empty."""
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True)
class Picture:
    """The picture of a lesson, drawn from the names of its program."""

    caption: str
    draw: Callable[[Names], "Figure"]

    def digest(self, code: str) -> str:
        """Return a short checksum of the program and of the function that draws; files carry it."""
        return hashlib.sha256((code + inspect.getsource(self.draw)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Lesson:
    """One lesson."""

    name: str
    """A word for the command line and for file names."""
    title: str
    equation: str
    text: str
    """The explanation of the equation, as Markdown; [Key] cites lineate.learn.references."""
    code: str
    """About ten lines of Python."""
    claims: tuple[Claim, ...]
    picture: Picture
    exercise: Exercise
    next: str
    """The remaining problem, which is the subject of the next lesson."""


@dataclass(frozen=True)
class Outcome:
    """The results of a program and its claims."""

    names: Names
    printed: str
    """The output of the lesson's program."""
    findings: tuple[Finding, ...]
    answers: tuple[Finding, ...] = ()
    """The findings of the exercise's answer."""

    @property
    def holds(self) -> bool:
        """Whether every claim holds."""
        return all(finding.holds for finding in (*self.findings, *self.answers))


def run(lesson: Lesson, answer: bool = True) -> Outcome:
    """Run a lesson's program and check its claims; then, if `answer`, those of the exercise's answer.

    The states of random generators are unchanged. The claims of the lesson are evaluated before the answer's program,
    which may change names.
    """
    said = io.StringIO()  # only the output of this program, not of other threads
    with own_random_numbers():
        names = execute(lesson.code, lesson.name, {**_EMPTY, "print": partial(print, file=said)})
        printed, findings = said.getvalue(), check(lesson.claims, names)
        if not answer:
            return Outcome(names, printed, findings)
        answered = execute(lesson.exercise.code, f"{lesson.name} answer", dict(names))
        return Outcome(names, printed, findings, check(lesson.exercise.claims, answered))


_EMPTY: Names = {"__name__": "lineate_lesson"}
"""The names defined before a program runs."""


def execute(code: str, name: str, names: Names | None = None) -> Names:
    """Execute a program and return its names; a traceback shows its lines."""
    file = f"<lineate learn: {name}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    names = dict(_EMPTY) if names is None else names
    exec(compile(code, file, "exec"), names)
    return names


def check(claims: Sequence[Claim], names: Names) -> tuple[Finding, ...]:
    """Return the finding of every claim."""
    return tuple(claim.check(names) for claim in claims)


def save_picture(picture: Picture, code: str, names: Names, path: Path) -> None:
    """Draw the picture into a PNG file, which also contains the checksum of its source."""
    from PIL import Image  # matplotlib needs it too
    from PIL.PngImagePlugin import PngInfo

    from lineate.figures import save_figure, styled

    with own_random_numbers(seed=0), styled():
        save_figure(picture.draw(names), path.parent, path.stem, ("png",))
    about = PngInfo()
    about.add_text("Source", picture.digest(code))
    with Image.open(path) as image:
        image.load()
        image.save(path, pnginfo=about, optimize=True)


def picture_source(path: Path) -> str | None:
    """Return the checksum that a picture's file holds."""
    from PIL import Image

    with Image.open(path) as image:
        found = image.info.get("Source")
        return None if found is None else str(found)


def _tensor(expression: str, names: Names) -> Tensor:
    """Evaluate an expression to a tensor of float64; float32 results are refused, as they could hide a difference."""
    value = eval(expression, names)
    if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{expression} must be float64, got {value.dtype}")
    return torch.as_tensor(value, dtype=torch.float64)

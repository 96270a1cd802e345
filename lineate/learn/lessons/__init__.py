"""The lessons in their order; each module here holds one as LESSON."""

from importlib import import_module

from lineate.learn.lesson import Lesson

MODULES = (
    "l01_softmax", "l02_linear", "l03_forms", "l04_capacity", "l05_decay", "l06_delta", "l07_ancestors",
    "l08_gated_delta", "l09_kimi", "l10_learning", "l11_hybrids", "l12_costs",
)  # fmt: skip
"""The module of every lesson; the first is lesson 1."""


def lesson_at(number: int) -> Lesson:
    """Return a lesson by its number, from 1."""
    found: Lesson = import_module(f"lineate.learn.lessons.{MODULES[number - 1]}").LESSON
    return found


def all_lessons() -> dict[int, Lesson]:
    """Return every lesson by its number."""
    return {number: lesson_at(number) for number in range(1, len(MODULES) + 1)}

"""Prose is standard technical English: no idioms that only we use, and pages that are wrapped at 120 columns."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SOURCES = sorted((ROOT / "lineate").rglob("*.py"))
OTHERS = sorted(path for folder in ("tests", "bench", "examples") for path in (ROOT / folder).rglob("*.py"))
COLUMNS = 120

# Each idiom, and in the comment what to write instead.
IDIOMS = {
    "so many": r"\bso (?:many|much)\b(?! (?:\w+ )?(?:that|as)\b)",  # "n rows", "the given number of ranks"
    "beside": r"\bbeside\b(?!:)",  # "next to", "compared with", "besides", "in parallel with"
    "looked at": r"\b(?:looks|looked|looking) at\b|\b(?:not|to|never) look at\b",  # "checked", "read", "inspected"
    "made again": r"\b(?:made|said|asked|done) again\b",  # "repeated", "replayed", "recomputed"
    "as it is": r"\bas (?:it is|they are|it was|they were)(?=[.,;:)]|$| and\b| or\b)",  # "unchanged", "by default"
    "nobody": r"\bnobody\b|\bwho (?:asks|calls|remembers)\b",  # the caller or the component
    "mended": r"\bmend(?:s|ed|ing)?\b",  # "fixed"
    "apart": r"\bapart\b(?! from\b|:)",  # "separately", "separate"
}
WHAT = "docstring that begins with What"  # name the thing: "Return the ...", "The ..."


def plain(text: str) -> str:
    """Return a text without inline code and without lines that are tables or equations (two spaces inside)."""
    lines = [line for line in text.split("\n") if not re.search(r"\S {2,}\S", line.strip())]
    return re.sub(r"(`+).*?\1", " ", " ".join(" ".join(lines).split()))


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
TEXTS = re.compile(
    r"""#[^\n]*|[rbfu]{0,2}(?:'''(?:[^\\]|\\.)*?'''|\"""(?:[^\\]|\\.)*?\"""|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")""",
    re.DOTALL | re.IGNORECASE,
)
"""A comment or a string; tokenize finds the same ones, more slowly."""


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the statements in it, without their expressions."""
    yield node
    for part in ("body", "handlers", "cases", "orelse", "finalbody"):
        for inner in getattr(node, part, ()):
            yield from statements(inner)


def prose_of_source(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the kind and the text of docstrings, blocks of comments, and strings of several words."""
    nodes = [x for x in statements(ast.parse(source)) if isinstance(x, DOCUMENTED) and ast.get_docstring(x)]
    first = {x.body[0].lineno for x in nodes}
    comment: list[tuple[int, str]] = []
    line, end = 1, 0
    for token in TEXTS.finditer(source):
        line, end = line + source.count("\n", end, token.start()), token.start()
        text = token[0]
        if text.startswith("#"):
            if comment and line > comment[-1][0] + 1:
                yield comment[0][0], "comment", "\n".join(x for _, x in comment)
                comment = []
            comment.append((line, text.lstrip("#: ")))
        elif " " in text:
            yield line, "docstring" if line in first else "string", text.strip("rbfRBF").strip("\"'")
    if comment:
        yield comment[0][0], "comment", "\n".join(x for _, x in comment)


def idioms_of(text: str, kind: str = "text") -> Iterator[str]:
    """Yield the idioms of a text, each as often as it occurs."""
    found = plain(text)
    for name, pattern in IDIOMS.items():
        yield from [name] * len(re.findall(pattern, found, re.IGNORECASE))
    if kind == "docstring" and re.match(r"What\b", text):
        yield WHAT


def paragraphs(page: str) -> Iterator[str]:
    """Yield the paragraphs of a page outside of its code."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.split("\n") if not re.match(r" {4}(?! *[-*] )", line)]
    yield from "\n".join(lines).split("\n\n")


def test_pages_have_no_idioms():
    found = [
        f"{path.relative_to(ROOT)}: {name}: {plain(text)[:80]}"
        for path in PAGES
        for text in paragraphs(path.read_text())
        for name in idioms_of(text)
    ]
    assert not found, "\n".join(found)


def test_sources_have_no_idioms():
    """Docstrings, comments and messages."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        for line, kind, text in prose_of_source(path.read_text())
        for name in idioms_of(text, kind)
    ]
    assert not found, "\n".join(found)


def test_tests_and_benches_have_no_idioms():
    """Docstrings and comments; strings are data of the tests."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in OTHERS
        for line, kind, text in prose_of_source(path.read_text())
        if kind != "string"
        for name in idioms_of(text, kind)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_are_wrapped(path):
    """Prose has at most 120 columns without the targets of links; tables, code and images may be wider."""
    text = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), path.read_text(), flags=re.M | re.S)
    lines = [re.sub(r"\]\([^)]*\)", "]", line) for line in text.split("\n")]
    wide = [n for n, line in enumerate(lines, 1) if len(line) > COLUMNS and not re.match(r"\||    |!\[|<!--", line)]
    assert not wide, f"lines {wide}"


@pytest.mark.parametrize(
    ("text", "kind", "found"),
    [
        ("Return so many rows.", "docstring", ["so many"]),
        ("There are so many rows that it is slow.", "docstring", []),
        ("The codes are taken as they are.", "comment", ["as it is"]),
        ("It is refused, as it is too large.", "string", []),
        ("Scores beside a walk; `changes.beside`; beside: a flag.", "text", ["beside"]),
        ("Calls that are made again are not looked at.", "text", ["looked at", "made again"]),
        ("Look at the plot: apart from one point, the lines are 2 apart.", "text", ["apart"]),
        ("What a rank holds.", "docstring", [WHAT]),
        ("What a rank holds.", "comment", []),
    ],
)
def test_idioms_are_found(text, kind, found):
    assert Counter(idioms_of(text, kind)) == Counter(found)

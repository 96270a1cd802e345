"""Tests go through public names: none imports, reads, sets or overrides a name of lineate that begins with `_`.

Everything is read from the source. A name counts as lineate's if lineate's own files bind it, in a module, in a class
or on an object; private names of torch, triton or pytest do not, nor does what hangs on an import from elsewhere, such
as `torch._dynamo`. Names in texts count too: those that getattr and setattr are given, paths such as
"lineate.rule._name", and programs that a test runs in another process.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parents[2]
BY_NAME = ("getattr", "setattr", "delattr", "hasattr")
"""Functions, and methods such as monkeypatch.setattr, that are given a name as a text."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.alias):
        yield node.asname or node.name


@cache
def private_names() -> frozenset[str]:
    """Return the private names that lineate's files bind."""
    trees = (ast.parse(file.read_text()) for file in (ROOT / "lineate").rglob("*.py"))
    return frozenset(name for tree in trees for node in ast.walk(tree) for name in bound(node) if is_private(name))


def is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "lineate"


def imported(nodes: list[ast.AST], ours: bool) -> set[str]:
    """Return the names that are imported from lineate, or those from elsewhere."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {x.asname or x.name.partition(".")[0] for x in node.names if is_ours(x.name) == ours}
        elif isinstance(node, ast.ImportFrom) and is_ours(node.module) == ours:
            found |= {x.asname or x.name for x in node.names}
    return found


def root(node: ast.AST) -> str:
    """Return the name that an expression such as a.b(c).d begins with."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def derives(node: ast.AST, names: set[str]) -> bool:
    """Whether a class derives from one of these, or from what hangs on them."""
    return isinstance(node, ast.ClassDef) and not names.isdisjoint(root(base) for base in node.bases)


def of_self(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the attributes that the methods of a class have on its own object."""
    if isinstance(node, ast.ClassDef):
        yield from (x for x in ast.walk(node) if isinstance(x, ast.Attribute) and root(x) in ("self", "cls"))


def is_by_name(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether a call has the name of an attribute among its arguments."""
    return isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in BY_NAME


def text_of(node: ast.AST) -> str:
    """Return a text, or an f-string with a name in the place of each value; empty for all else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(x) or "value" for x in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def parsed(text: str) -> ast.AST | None:
    """Return the tree of a text that is a program with lineate in it."""
    if "lineate" not in text or "import" not in text:
        return None
    try:
        return ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return None


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every use of a private name of lineate."""
    nodes = list(ast.walk(tree))
    ours, others = imported(nodes, True), imported(nodes, False)
    own = {x for node in nodes for x in of_self(node) if not derives(node, ours)}
    for node in nodes:
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            yield from ((line, x.name) for x in node.names if is_ours(x.name) and "._" in x.name)
        elif isinstance(node, ast.ImportFrom) and is_ours(node.module):
            names = [*str(node.module).split("."), *(x.name for x in node.names)]
            yield from ((line, name) for name in names if is_private(name))
        elif isinstance(node, ast.Attribute) and node.attr in private_names():
            if root(node) not in others and node not in own:
                yield line, ast.unparse(node)
        elif isinstance(node, ast.ClassDef) and derives(node, ours):
            names = [name for part in node.body for x in (part, *getattr(part, "targets", ())) for name in bound(x)]
            yield from ((line, f"{node.name}.{name}") for name in names if name in private_names())
        elif is_by_name(node) and root(node.args[0]) not in others:
            yield from ((line, text_of(x)) for x in node.args[1:2] if text_of(x) in private_names())
        if text := text_of(node):
            is_path = re.fullmatch(r"\w+(\.\w+)+", text) is not None
            yield from ((line, text) for part in text.split(".") if is_path and part in private_names())
            if (program := parsed(text)) is not None:
                yield from ((line + inner - 1, use) for inner, use in private_uses(program))


def may_use(text: str) -> bool:
    """Whether a file has a word that is a private name of lineate: only such files are worth parsing."""
    words = set(re.findall(r"(?<![A-Za-z0-9])_\w+", text))
    return not words.isdisjoint(private_names()) or re.search(r"lineate[\w.]*\._", text) is not None


@pytest.mark.cover
def test_tests_use_no_private_names():
    files = [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
    found = {
        f"{file.relative_to(ROOT)}:{line}: {use}"
        for file in files
        if may_use(text := file.read_text())
        for line, use in private_uses(ast.parse(text))
    }
    print(*sorted(found), sep="\n")
    assert sorted(found) == []


PRIVATE, METHOD = "_multiplies", "_mix"  # in lineate/processor.py, and of MixtureOfExperts


@pytest.mark.cover
@pytest.mark.parametrize(
    ("program", "uses"),
    [
        (f"from lineate.system.processor import {PRIVATE}", 1),
        ("from lineate._hidden import name", 1),
        ("import lineate._hidden", 1),
        (f"from lineate import processor\nprocessor.{PRIVATE}.cache_clear()", 1),
        (f"from lineate import processor\nprocessor.{PRIVATE} = None", 1),
        (f"layer = make()\nlayer.to(device).{METHOD}(1)", 1),
        (f"from lineate import processor\nmonkeypatch.setattr(processor, '{PRIVATE}', 1)", 1),
        (f"monkeypatch.setattr('lineate.system.processor.{PRIVATE}', 1)", 1),
        (f"getattr(layer, '{METHOD}')", 1),
        (f"run('''\nfrom lineate import processor\nprocessor.{PRIVATE}\n''')", 1),
        (f"run(f'''\nfrom lineate import processor\nprint({{3}}, processor.{PRIVATE})\n''')", 1),
        (f"from lineate.layers import MixtureOfExperts\nclass Own(MixtureOfExperts):\n  def {METHOD}(self): ...", 1),
        ("import torch\ntorch._dynamo.reset()\ntorch.utils._pytree.tree_map", 0),
        (f"import torch\ntorch.{PRIVATE}", 0),  # of another library, under the same name
        ("from torch.utils._python_dispatch import TorchDispatchMode", 0),
        ("shape._replace(t=3), x._version, cls.__init__, x.__wrapped__", 0),
        (f"def {PRIVATE}(): ...\n{PRIVATE}()", 0),  # the test's own
        (f"class Own:\n  def {METHOD}(self): self.{METHOD}()", 0),
        (f"from lineate.layers import MixtureOfExperts as M\nclass Own(M):\n  def run(self): self.{METHOD}()", 1),
        (f"name.endswith('{METHOD}')", 0),
        ("from lineate import processor\nprocessor.multiplies(1)", 0),
    ],
)
def test_what_counts_as_a_use(program, uses):
    assert {PRIVATE, METHOD} <= private_names()
    assert may_use(program) or not uses
    found = set(private_uses(ast.parse(program)))
    assert len(found) == uses, found

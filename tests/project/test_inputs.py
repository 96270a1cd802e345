"""Inputs is used by name: nothing in lineate unpacks, slices, indexes, iterates or builds one by position."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from lineate.call import Inputs

ROOT = Path(__file__).parents[2]
RETURN_INPUTS = {"Inputs", "in_one_dtype", "spread_decay", "rule_inputs", "trace", "activated", "empty_gradients"}
"""The functions and methods whose result is Inputs."""
SAME = {"replace", "map", "at"}
"""The methods of Inputs that return another one."""


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_annotated(node: ast.expr | None) -> bool:
    """Whether an annotation is Inputs, or Inputs | None."""
    return (
        node is not None
        and any(last_name(x) == "Inputs" for x in ast.walk(node) if isinstance(x, ast.expr))
        and (not isinstance(node, ast.Subscript))
    )


def names_of_inputs(function: ast.AST) -> set[str]:
    """Return the names of parameters and variables that hold Inputs."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.arg) and is_annotated(node.annotation):
            found.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and is_annotated(node.annotation):
            found.add(last_name(node.target))
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and makes_inputs(node.value, found):
            found.add(node.targets[0].id)
    return found


def makes_inputs(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression is Inputs."""
    if isinstance(node, ast.Name):
        return node.id in names
    if not isinstance(node, ast.Call):
        return False
    name = last_name(node.func)
    of_inputs = isinstance(node.func, ast.Attribute) and makes_inputs(node.func.value, names)
    return name in RETURN_INPUTS or (name in SAME and of_inputs)


def is_order(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression is Inputs, or its tensors in their order."""
    if isinstance(node, ast.Call) and last_name(node.func) == "tensors" and isinstance(node.func, ast.Attribute):
        return makes_inputs(node.func.value, names)
    return makes_inputs(node, names)


def positional(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that use Inputs by position."""
    outer = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for function in [*outer, tree]:
        names = names_of_inputs(function) if function is not tree else set()
        for node in ast.walk(function):
            if isinstance(node, ast.Subscript | ast.Starred) and is_order(node.value, names):
                if isinstance(node, ast.Subscript) or makes_inputs(node.value, names):
                    yield node.lineno
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                if is_order(node.value, names):
                    yield node.lineno
            elif isinstance(node, ast.For | ast.comprehension) and makes_inputs(node.iter, names):
                yield node.iter.lineno
            elif (isinstance(node, ast.Call) and last_name(node.func) == "Inputs" and node.args) or (
                isinstance(node, ast.Attribute) and node.attr == "_replace" and makes_inputs(node.value, names)
            ):
                yield node.lineno


def test_no_use_by_position():
    found = {
        f"{file.relative_to(ROOT)}:{line}"
        for file in (ROOT / "lineate").rglob("*.py")
        if "Inputs" in (text := file.read_text())
        for line in positional(ast.parse(text))
    }
    assert sorted(found) == []


USES = (
    "q, k = inputs",
    "q = inputs[0]",
    "rest = inputs[:5]",
    "run(*inputs)",
    "for x in inputs: run(x)",
    "found = [x for x in inputs]",
    "other = Inputs(q, k, v, gate)",
    "other = inputs._replace(q=q)",
    "q, k = inputs.replace(q=k).tensors()",
    "other = inputs.map(run)\n    q = other.tensors()[0]",
)


@pytest.mark.parametrize("line", USES)
def test_what_counts_as_by_position(line):
    source = f"def attend(inputs: Inputs) -> None:\n    {line}\n"
    assert list(positional(ast.parse(source)))


def test_a_value_has_no_positions():
    x = object()
    inputs = Inputs(x, x, x, beta=x)
    for use in (lambda: inputs[0], lambda: inputs[:2], lambda: list(inputs), lambda: Inputs(x, x, x, x)):
        with pytest.raises(TypeError):
            use()
    with pytest.raises(AttributeError):
        inputs.q = x
    with pytest.raises(TypeError, match="'gate' must be a field of Inputs, one of q, k, v, log_decay"):
        inputs.replace(gate=x)
    assert list(inputs.given()) == ["q", "k", "v", "beta"] and inputs.gates() == ("beta",)
    assert inputs.tensors() == tuple(getattr(inputs, name) for name in Inputs.NAMES)

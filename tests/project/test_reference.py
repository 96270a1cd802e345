"""The reference has every public name, and every public name documents its arguments.

A public name is one that a page of docs/reference shows: a function or a class, or all names of a module's `__all__`,
or all that it defines without an underscore.
Its arguments are documented in a Google-style `Args:` section; those of a dataclass or NamedTuple may be documented by
a string below each field instead.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "lineate", "lineate.layers", "lineate.models", "lineate.memory", "lineate.generation", "lineate.planning",
    "lineate.text",
)  # fmt: skip
PAGES = sorted((ROOT / "docs/reference").glob("*.md"))
SHOWN = [name for page in PAGES for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)]

SAME_FIELDS = {"lineate.integrations.auto.LineateConfig": "lineate.models.HybridConfig"}
"""Classes whose docstring refers to the fields of another one."""


def find(name: str) -> Any:
    """Return the module or object of a dotted name."""
    if importlib.util.find_spec(name.split(".")[0]) is None:
        raise ImportError(name)
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def public(name: str) -> dict[str, Any]:
    """Return the functions and classes that a directive shows, by their dotted names."""
    found = find(name)
    if not inspect.ismodule(found):
        return {name: found}
    own = [x for x, y in vars(found).items() if x[0] != "_" and getattr(y, "__module__", "") == name]
    made = {f"{name}.{x}": getattr(found, x) for x in getattr(found, "__all__", own)}
    return {x: y for x, y in made.items() if inspect.isfunction(y) or inspect.isclass(y)}


def section(docstring: str | None) -> set[str]:
    """Return the names in the `Args:` sections of a docstring."""
    names: set[str] = set()
    for body in re.findall(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", inspect.cleandoc(docstring or "") + "\n", re.MULTILINE):
        names |= set(re.findall(r"^\*{0,2}(\w+)(?: \([^)]*\))?:", textwrap.dedent(body), re.MULTILINE))
    return names


@cache
def tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text())


def described(kind: type) -> set[str]:
    """Return the fields of a class that have a string below them."""
    names: set[str] = set()
    for node in ast.walk(tree(inspect.getfile(kind))):
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
            for field, below in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    text = below.value if isinstance(below, ast.Expr) else None
                    if isinstance(text, ast.Constant) and isinstance(text.value, str):
                        names.add(field.target.id)
    return names


def ours(thing: Any) -> bool:
    return thing.__module__.split(".")[0] == "lineate"


def arguments(thing: Any) -> tuple[set[str], set[str]]:
    """Return the arguments that a function or a class takes, and those that are documented."""
    if not inspect.isclass(thing):
        return set(inspect.signature(thing).parameters), section(thing.__doc__)
    fields = getattr(thing, "__dataclass_fields__", None) or getattr(thing, "_fields", None)
    own = [base for base in thing.__mro__ if ours(base)]
    if fields is not None:
        named = set().union(*(inspect.get_annotations(base) for base in own))
        taken = {x for x in fields if x in inspect.signature(thing).parameters and x in named}
        # options of a command line carry their help text
        helped = {x for x, field in fields.items() if "help" in field.metadata} if isinstance(fields, dict) else set()
        return taken, helped.union(*(described(base) | section(base.__doc__) for base in own))
    maker = next((base for base in thing.__mro__ if "__init__" in vars(base)), object)
    if not ours(maker) or getattr(thing, "_is_protocol", False):
        return set(), set()
    taken = set(inspect.signature(vars(maker)["__init__"]).parameters) - {"self"}
    documented = section(vars(maker)["__init__"].__doc__)
    for base in own[: own.index(maker) + 1]:  # a class may leave it to the one whose constructor it inherits
        documented |= section(base.__doc__)
    return taken, documented


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_shown(package):
    assert package in SHOWN
    assert find(package).__all__


@pytest.mark.parametrize("shown", sorted(SHOWN))
def test_arguments_are_documented(shown):
    if shown.startswith("lineate.integrations"):
        pytest.importorskip("transformers")
    for name, thing in public(shown).items():
        assert (thing.__doc__ or "").strip(), f"{name} has no docstring"
        taken, documented = arguments(thing)
        if name in SAME_FIELDS:
            documented |= arguments(find(SAME_FIELDS[name]))[1]
        assert sorted(taken - documented) == [], f"{name}: arguments without a word in Args:"
        if not inspect.isclass(thing):
            assert sorted(documented - taken) == [], f"{name}: words about arguments that it does not take"


@pytest.mark.parametrize("file", sorted((ROOT / "docs").rglob("*.md")), ids=lambda file: file.name)
def test_every_page_is_in_the_contents(file):
    """`mkdocs.yml` lists it; unlike mkdocs' own check for missing pages, this one does not need mkdocs."""
    assert f"- {file.relative_to(ROOT / 'docs').as_posix()}\n" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is missing; pip install '.[docs]'")
def test_the_site_is_built_and_asks_no_other_server(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT)
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        fetched = re.findall(r"<(?:script|img|iframe)[^>]*src=\"?(https?:[^\s\">]*)", page.read_text())
        fetched += re.findall(r"<link[^>]*href=\"?(https?:[^\s\">]*)", page.read_text())
        assert fetched == [], page.name

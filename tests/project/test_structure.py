"""The tree of lineate follows DESIGN section 5: imports go one way, files and signatures stay small.

Everything is read from the source, lazy imports included; only the letters and names of mixers come from lineate.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from lineate.layers import kinds

ROOT = Path(__file__).parents[2]
MOST_LINES = 500
MOST_TEST_LINES = 600
MOST_PARAMETERS = 10

# From the top; a folder or file imports from its own level and from those below. Modules that are not named here, such
# as rule.py or checks.py, are at the bottom, with the backends.
LEVELS = (
    ("cli",),
    ("serving",),
    ("explore", "tasks", "planning", "training", "learn", "recognise"),
    ("web", "integrations", "generation", "figures"),
    ("text",),
    ("decoding",),
    ("models",),
    ("layers",),
    ("parallel", "memory", "quantised"),
    ("__init__", "ops"),
    ("dispatch",),
)
# Neighbours that do not import each other: (importer, imported).
# HybridLM.generate is the function of the level above, which it imports when it is called.
UPWARDS = {"lineate.models.hybrid": {"lineate.generation.sampling", "lineate.generation.generated"}}
STRANGERS = {("forms", "kernels"), ("kernels", "forms"), ("planning", "explore"), ("tasks", "explore")}


@cache
def sources() -> dict[str, Path]:
    """Return the files of lineate by the names of their modules."""
    files = sorted((ROOT / "lineate").rglob("*.py"))
    return {".".join(x.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): x for x in files}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(sources()[module].read_text())


@cache
def nodes_of(module: str) -> list[ast.AST]:
    return list(ast.walk(tree(module)))


def last_name(node: ast.expr) -> str:
    """Return the last name of an expression such as a.b.c; "" if it does not end in a name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def imported(module: str) -> Iterator[str]:
    """Yield the modules of lineate that a module imports anywhere in its text, by statements or by import_module."""
    for node in nodes_of(module):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            submodules = [name for name in names[1:] if name in sources()]
            yield from submodules
            if len(submodules) < len(node.names) and names[0] in sources():
                yield names[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in sources())
        elif isinstance(node, ast.Call) and last_name(node.func) == "import_module":
            first = node.args[0]
            if isinstance(first, ast.Constant) and first.value in sources():
                yield str(first.value)


@cache
def imports() -> dict[str, set[str]]:
    return {module: set(imported(module)) - {module} - UPWARDS.get(module, set()) for module in sources()}


def circles() -> set[str]:
    """Return each group of modules that import each other in a circle, as their names in order."""
    reach: dict[str, set[str]] = {}
    for module in sources():
        found: set[str] = set()
        ahead = [module]
        while ahead:
            for other in imports()[ahead.pop()] - found:
                found.add(other)
                if other in reach:
                    found |= reach[other]
                else:
                    ahead.append(other)
        reach[module] = found
    groups = ({other for other in found if module in reach[other]} for module, found in reach.items())
    return {" ".join(sorted(group)) for group in groups if group}


def unit(module: str) -> str:
    """Return the folder of a module, or its file at the top of the tree."""
    return [*module.split("."), "__init__"][1]


def level(module: str) -> int:
    """Return the level of a module, 0 at the bottom."""
    return next((len(LEVELS) - i for i, units in enumerate(LEVELS) if unit(module) in units), 0)


def wrong_directions() -> set[str]:
    return {
        f"{module} -> {other}"
        for module, others in imports().items()
        for other in others
        if level(other) > level(module) or (unit(module), unit(other)) in STRANGERS
    }


def long_files() -> set[str]:
    return {module for module, file in sources().items() if len(file.read_text().splitlines()) > MOST_LINES}


@cache
def public_names() -> set[str]:
    """Return the names that the packages of lineate list in __all__."""
    found: set[str] = set()
    for module, file in sources().items():
        for node in tree(module).body if file.name == "__init__.py" else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found |= set(ast.literal_eval(node.value))
    return found


@cache
def registered(module: str) -> set[str]:
    """Return the functions that are handed to torch.library, or to a function of ours that does so."""
    calls = (node for node in nodes_of(module) if isinstance(node, ast.Call))
    calls = (node for node in calls if last_name(node.func).startswith(REGISTRARS))
    given = (x for node in calls for x in (*node.args, *(keyword.value for keyword in node.keywords)))
    return {x.id for x in given if isinstance(x, ast.Name)}


REGISTRARS = ("custom_op", "register")


def is_free(node: ast.FunctionDef, module: str) -> bool:
    """Whether a function may have any number of parameters: public ops, constructors, kernels, what torch calls."""
    decorators = [ast.unparse(x) for x in node.decorator_list]
    return (
        node.name == "__init__"
        or (node.name == module.split(".")[-1] and unit(module) == "memory")  # lineate.memory.ttt.ttt, ...
        # Methods of torch.autograd.Function.
        or (node.name in ("forward", "backward") and decorators == ["staticmethod"])
        or node.name in public_names()
        or node.name in registered(module)
        or any(word in x for x in decorators for word in ("jit", "command", "overload", *REGISTRARS))
    )


def long_signatures() -> set[str]:
    found = set()
    for module in sources():
        for node in nodes_of(module):
            if isinstance(node, ast.FunctionDef) and not is_free(node, module):
                names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if len([x for x in names if x.arg not in ("self", "cls", "ctx")]) > MOST_PARAMETERS:
                    found.add(f"{module}.{node.name}")
    return found


def docstrings_without_a_verb() -> set[str]:
    """Return modules, classes and functions whose docstrings begin with "Of"."""
    found = set()
    for module in sources():
        for node in nodes_of(module):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            if documented and (ast.get_docstring(node) or "").startswith("Of "):
                found.add(f"{module}.{getattr(node, 'name', '')}")
    return found


def mixer_tables() -> set[str]:
    """Find dictionaries and match statements with letters or names of mixers as keys; the registry has these facts.

    If keys are letters, all must be, as K, M and G are also units; two names are enough. A checkpoint family may say
    which mixers it has.
    """
    own = [kind for kind in kinds() if kind.built_in]  # not those that other tests register
    letters = {kind.letter for kind in own}
    names = {name for kind in own for name in (kind.name, kind.short, kind.label, kind.short_label) if name}
    found = set()
    for module in sources():
        if module.startswith("lineate.models.families"):
            continue
        for node in nodes_of(module):
            if isinstance(node, ast.Dict):
                nodes = [x for x in node.keys if x is not None]
            elif isinstance(node, ast.Match):
                nodes = [x.pattern.value for x in node.cases if isinstance(x.pattern, ast.MatchValue)]
            else:
                continue
            keys = [x.value if isinstance(x, ast.Constant) else None for x in nodes]
            if (len(keys) > 1 and set(keys) <= letters) or len(names & set(keys)) > 1:
                found.add(f"{module}:{node.lineno}")
    return found


def long_tests() -> set[str]:
    files = (ROOT / "tests").rglob("*.py")
    return {x.name for x in files if len(x.read_text().splitlines()) > MOST_TEST_LINES}


def imports_between_tests() -> set[str]:
    """Return test files that import another one; what they share belongs in tests/support."""
    found = set()
    for file in (ROOT / "tests").rglob("*.py"):
        text = file.read_text()
        if not re.search(r"from\s+(tests\.)?(test_|conftest)", text):  # parsing all of them takes seconds
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and re.match(r"(tests\.)?(test_|conftest)", node.module or ""):
                found.add(f"{file.name}: {node.module}")
    return found


def is_typed(node: ast.FunctionDef) -> bool:
    """Whether a function names the types of its result and of all parameters but self and cls, or takes torch's ctx."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    given = [x for x in arguments if x is not None and x.arg not in ("self", "cls")]
    typed = node.returns is not None and all(x.annotation is not None for x in given)
    return typed or any(x.arg == "ctx" for x in given)  # whose lines tell mypy to ignore them


def untyped_launches() -> set[str]:
    """Return the functions next to kernels that name no types; mypy demands none there (pyproject.toml)."""
    return {
        f"{module}.{node.name}"
        for module in sources()
        if module.startswith("lineate.kernels.")
        for node in nodes_of(module)
        if isinstance(node, ast.FunctionDef) and not is_typed(node)
        if not any("jit" in ast.unparse(x) for x in node.decorator_list)
    }


def private_helpers() -> set[str]:
    """Return the names with a leading underscore that a module of the kernels imports from another one."""
    return {
        f"{module} imports {alias.name} of {node.module}"
        for module in sources()
        if module.startswith("lineate.kernels.")
        for node in nodes_of(module)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lineate.kernels.")
        for alias in node.names
        if alias.name.startswith("_")
    }


CHECKS = {
    "circles": circles,
    "direction": wrong_directions,
    "lines": long_files,
    "parameters": long_signatures,
    "docstrings": docstrings_without_a_verb,
    "letters": mixer_tables,
    "types": untyped_launches,
    "private helpers": private_helpers,
    "tests": long_tests,
    "test imports": imports_between_tests,
}


@pytest.mark.cover
@pytest.mark.parametrize("what", CHECKS)
def test_structure(what):
    found = CHECKS[what]()
    print(what, *sorted(found), sep="\n")  # shown with -s, and where the test fails
    assert sorted(found) == []

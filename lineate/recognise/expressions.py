"""Reads an update rule: Python's grammar, of which a short list of forms is allowed, is converted to a small tree.

Nothing is ever run as Python. `ast.parse` only parses; every node that is not on the list is refused, and the message
lists the allowed forms. The tree has three kinds of nodes: numbers, names, and functions of `functions.py` applied to
nodes.
"""

import ast
import re
import textwrap
import warnings
from dataclasses import dataclass
from typing import NoReturn

from lineate.console.names import nearest
from lineate.recognise.functions import FUNCTIONS, METHODS, Option
from lineate.recognise.symbols import (
    CELL,
    MODULES,
    SIZES,
    STATE_ENDINGS,
    Part,
    Refused,
    known_names,
    numbered_alike,
    part_of,
    plain,
)

MOST_CHARACTERS, MOST_STATEMENTS, MOST_NODES, MOST_DEPTH, MOST_GATES = 1000, 12, 160, 40, 4
LARGEST_NUMBER, LARGEST_POWER, LONGEST_NAME = 1e6, 8, 32
ALLOWED = (
    "allowed are S, k, v, q, gates such as a and b, I, numbers, + - * / @ **, .T, outer, dot, diag, exp, [:, None]"
)
EINSUM = re.compile(r"[a-z]{1,2}(,[a-z]{1,2}){0,2}->[a-z]{0,2}")


@dataclass(frozen=True)
class Number:
    """A number in the expression."""

    value: float


@dataclass(frozen=True)
class Symbol:
    """A name: a free one, or one that an earlier statement defined."""

    name: str


@dataclass(frozen=True)
class Apply:
    """A function of `functions.FUNCTIONS` with its arguments, and constants such as an axis."""

    function: str
    arguments: tuple["Node", ...]
    options: tuple[Option, ...] = ()


Node = Number | Symbol | Apply


@dataclass(frozen=True)
class Statement:
    """`target = value`; the target is None for an expression that stands alone."""

    target: str | None
    value: Node


@dataclass(frozen=True)
class Program:
    """A parsed update rule."""

    text: str
    """The expression in ASCII."""
    statements: tuple[Statement, ...]
    free: dict[str, str]
    """Names that no statement defined before their use, and their parts ("state", "key", ..., "gate")."""
    inside_exp: frozenset[str]
    """Gates that occur in the argument of exp alone: they may be negative."""
    cell: bool = False
    """Whether C is the memory, as in mLSTM's notation."""

    @property
    def memory(self) -> str:
        """Return the name of the memory, without an ending; S if it has none."""
        part = self.part(self.names("state")[0]) if self.names("state") else None
        return part.base if part is not None else "S"

    def part(self, name: str) -> Part | None:
        """Return the part of a name in this program."""
        return part_in(name, self.cell)

    def names(self, kind: str) -> list[str]:
        """Return the free names that have a role, in order of appearance."""
        return [name for name, part in self.free.items() if part == kind]

    def feeding(self) -> set[str]:
        """Return the names that the new memory is computed from; all if no statement assigns it."""
        wanted: set[str] = set()
        found = False
        for statement in reversed(self.statements):
            part = self.part(statement.target) if statement.target is not None else None
            is_memory = part is not None and part == Part("state", self.memory)
            found = found or is_memory
            if is_memory or statement.target in wanted:
                wanted |= {x.name for x in walk(statement.value) if isinstance(x, Symbol)}
        return wanted if found else set(self.free)

    def uses(self, function: str) -> bool:
        """Whether a function occurs anywhere."""
        return any(x.function == function for s in self.statements for x in walk(s.value) if isinstance(x, Apply))


def part_in(name: str, cell: bool) -> Part | None:
    """Return the part of a name; with `cell`, C is the memory."""
    base = name
    for ending in STATE_ENDINGS:
        base = base.removesuffix(ending)
    return Part("state", CELL) if cell and base == CELL else part_of(name)


def _is_cell(tree: ast.Module) -> bool:
    """Whether C is the memory: it is assigned, and no other memory is assigned and read."""
    targets = [x for statement in tree.body for x in _targets(statement)]
    read = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
    kinds = [part.kind for x in targets if (part := part_in(x, True)) is not None]
    bases = {part.base for x in read if (part := part_of(x)) is not None and part.kind == "state"}
    others = [part for x in targets if (part := part_of(x)) is not None and part.kind == "state"]
    return "state" in kinds and not any(part.base in bases for part in others)


def _targets(statement: ast.stmt) -> list[str]:
    """Return the names that a statement assigns."""
    found = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [x.id for x in found if isinstance(x, ast.Name)]


def walk(node: Node) -> list[Node]:
    """Return a node and all nodes below it."""
    below = [x for y in node.arguments for x in walk(y)] if isinstance(node, Apply) else []
    return [node, *below]


def read_expression(text: str) -> Program:
    """Return the program of a text; raise Refused if anything in it is not allowed."""
    if len(text) > MOST_CHARACTERS:
        raise Refused(f"expected at most {MOST_CHARACTERS} characters, got {len(text)}; paste the update alone")
    text = textwrap.dedent(plain(text)).strip().strip(";")
    if not text:
        raise Refused("expected an update such as S = a * S + outer(k, v), got nothing")
    _check_brackets(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the spelling of numbers
            tree = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        where = f" near {_near(text, error)!r}" if isinstance(error, SyntaxError) and error.offset else ""
        why = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise Refused(
            f"expected statements such as S = a * S; S = S + b * outer(k, v - S.T @ k), got {why}{where}; "
            "write every product with *, @ or outer, and put ; or a new line between statements"
        ) from None
    if len(tree.body) > MOST_STATEMENTS:
        raise Refused(f"expected at most {MOST_STATEMENTS} statements, got {len(tree.body)}")
    return _Reader(text).program(tree)


def _check_brackets(text: str) -> None:
    depth = 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if depth > MOST_DEPTH:
            raise Refused(f"expected at most {MOST_DEPTH} brackets inside each other, got more; simplify")


def _near(text: str, error: SyntaxError) -> str:
    line = text.splitlines()[(error.lineno or 1) - 1 : error.lineno or 1]
    at = (error.offset or 1) - 1
    return "".join(line)[max(0, at - 8) : at + 8]


class _Reader:
    """Converts Python's tree and records the names; one reader reads one text."""

    def __init__(self, text: str) -> None:
        self.text, self.nodes = text, 0
        self.defined: set[str] = set()
        self.free: dict[str, str] = {}
        self.bases: dict[str, str] = {}
        self.exposed: set[str] = set()  # gates that occur outside of exp
        self.cell = False

    def program(self, tree: ast.Module) -> Program:
        """Return the whole program."""
        self.cell = _is_cell(tree)
        statements = [self.statement(x, i == len(tree.body) - 1) for i, x in enumerate(tree.body)]
        gates = [name for name, kind in self.free.items() if kind == "gate"]
        if len(gates) > MOST_GATES:
            raise Refused(f"expected at most {MOST_GATES} gates, got {', '.join(gates)}")
        return Program(self.text, tuple(statements), self.free, frozenset(gates) - self.exposed, self.cell)

    def statement(self, node: ast.stmt, last: bool) -> Statement:
        """Return an assignment, or the expression that stands at the end."""
        target: ast.expr
        if isinstance(node, ast.Expr):
            if not last:
                self.refuse(node, "name = value in every statement but the last")
            return Statement(None, self.read(node.value, 0, False))
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            value = self.read(node.value, 0, self.carries(target))
        elif isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
            target = node.target
            if not isinstance(target, ast.Name):
                self.refuse(target, "a name to the left of =")
            before = self.name(target.id, False)
            value = Apply(OPERATORS[type(node.op)], (before, self.read(node.value, 0, False)))
        else:
            self.refuse(node, "an expression or an assignment")
        if not isinstance(target, ast.Name):
            self.refuse(target, "a name to the left of =")
        name = self.check_name(target.id)
        if name in FUNCTIONS or name in MODULES or name == "I":
            raise Refused(f"expected a name of your own to the left of =, got {name!r}, which has a meaning")
        self.defined.add(name)
        return Statement(name, value)

    def carries(self, target: ast.expr) -> bool:
        """Whether a statement computes a second state: max(f + m, i) says nothing about the signs of f and i."""
        part = part_in(target.id, self.cell) if isinstance(target, ast.Name) else None
        return part is not None and part.kind == "second state"

    def read(self, node: ast.expr, depth: int, in_exp: bool) -> Node:
        """Return one expression; depth counts the nodes above it, in_exp says whether exp is one of them."""
        self.nodes += 1
        if depth > MOST_DEPTH or self.nodes > MOST_NODES:
            raise Refused(f"expected at most {MOST_NODES} terms and {MOST_DEPTH} levels, got more; simplify")
        match node:
            case ast.Constant():
                return Number(self.number(node))
            case ast.Name():
                return Apply("eye", ()) if node.id == "I" else self.name(node.id, in_exp)
            case ast.UnaryOp(op=ast.USub()):
                return Apply("neg", (self.read(node.operand, depth + 1, in_exp),))
            case ast.UnaryOp(op=ast.UAdd()):
                return self.read(node.operand, depth + 1, in_exp)
            case ast.BinOp(op=ast.Pow()):
                return Apply("power", (self.read(node.left, depth + 1, in_exp),), (self.power(node.right),))
            case ast.BinOp() if type(node.op) in OPERATORS:
                left, right = self.read(node.left, depth + 1, in_exp), self.read(node.right, depth + 1, in_exp)
                return Apply(OPERATORS[type(node.op)], (left, right))
            case ast.Attribute(attr="T" | "mT"):
                return Apply("transpose", (self.read(node.value, depth + 1, in_exp),))
            case ast.Subscript():
                return Apply(self.axis_added(node), (self.read(node.value, depth + 1, in_exp),))
            case ast.Call():
                return self.call(node, depth, in_exp)
        self.refuse(node, "one of the forms of the list")

    def call(self, node: ast.Call, depth: int, in_exp: bool) -> Node:
        """Return a function, or a method such as k.unsqueeze(-1), applied to its arguments."""
        function, arguments = self.function(node.func), list(node.args)
        if function is None and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            function, arguments = METHODS[node.func.attr], [node.func.value, *node.args]
        if function is None:
            name = self.source(node.func)
            known = nearest(name, FUNCTIONS)
            raise Refused(f"expected a function such as outer, dot, diag, exp or sigmoid, got {name!r}{known}")
        if function == "eye":
            if len(arguments) > 2 or not all(SIZE.fullmatch(self.source(x)) for x in arguments) or node.keywords:
                self.refuse(node, "eye(d), eye(len(k)) or I")
            return Apply("eye", ())
        spec, options = FUNCTIONS[function], list[Option]()
        if function == "einsum":
            first = arguments.pop(0) if arguments else node
            if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
                self.refuse(node, "einsum('i,j->ij', x, y)")
            options.append(first.value.replace(" ", ""))
            if not EINSUM.fullmatch(options[0]):
                raise Refused(f"expected einsum of one or two letters a value, as 'i,j->ij', got {first.value[:24]!r}")
        (least, most), extra = spec.arguments, arguments[spec.arguments[1] :]
        arguments = arguments[:most]
        if len(arguments) < least or len(extra) > spec.options:
            self.refuse(node, spec.usage)
        options += [self.option(x) for x in extra]
        for keyword in node.keywords:
            if keyword.arg not in spec.keywords:
                self.refuse(node, spec.usage)
            options.append(self.keep(keyword.value) if keyword.arg.startswith("keep") else self.option(keyword.value))
        within = in_exp or function == "exp"
        return Apply(function, tuple(self.read(x, depth + 1, within) for x in arguments), tuple(options))

    def function(self, node: ast.expr) -> str | None:
        """Return the name of a function, also behind modules as in np.linalg.norm; None if it is no known one."""
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        path.insert(0, node.id)
        known = all(x in MODULES for x in path[:-1]) and path[0] not in self.defined
        name = ALIASES.get(path[-1], path[-1])
        return name if known and name in FUNCTIONS and FUNCTIONS[name].usage else None

    def name(self, name: str, in_exp: bool) -> Symbol:
        """Return a name that was defined, or a free one with a part to play."""
        self.check_name(name)
        if name not in self.defined:
            part = part_in(name, self.cell)
            if part is None:
                known = nearest(name, known_names())
                raise Refused(f"expected a name with a meaning, got {name!r}{known}; {ALLOWED}")
            other = next((x for x, base in self.bases.items() if self.free[x] == part.kind and base != part.base), None)
            kind = "second state" if other is not None and part.kind == "state" else part.kind
            if other is not None and kind in ("key", "value") and numbered_alike(name, self.bases[other]):
                kind, other = f"other {kind}", None
            if other is not None and kind in ("key", "value", "query"):
                raise Refused(f"expected one {kind}, got {other!r} and {name!r}; use one name")
            self.free.setdefault(name, kind)
            self.bases.setdefault(name, part.base)
            if not in_exp:
                self.exposed.add(name)
        return Symbol(name)

    def check_name(self, name: str) -> str:
        """Return a name that is short and begins with a letter."""
        if name.startswith("_") or "__" in name or len(name) > LONGEST_NAME:
            raise Refused(f"expected a short name that begins with a letter, got {name[:LONGEST_NAME]!r}")
        return name

    def number(self, node: ast.Constant) -> float:
        """Return a number; texts, truth values, complex and huge numbers are refused."""
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_NUMBER:
            raise Refused(f"expected numbers from 0 to {LARGEST_NUMBER:.0f}, got {self.source(node)!r}")
        return float(value)

    def power(self, node: ast.expr) -> float:
        """Return an exponent, which must be a small number."""
        sign = -1.0 if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else 1.0
        node = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
        if not isinstance(node, ast.Constant) or not abs(value := self.number(node)) <= LARGEST_POWER:
            raise Refused(f"expected a number of at most {LARGEST_POWER} after **, got {self.source(node)!r}")
        return sign * value

    def option(self, node: ast.expr) -> Option:
        """Return an axis: a whole number from -2 to 1, or a pair of them."""
        if isinstance(node, ast.Tuple) and 1 <= len(node.elts) <= 2:
            return tuple(self.option(x) for x in node.elts)
        if (found := AXIS.get(self.source(node))) is None:
            raise Refused(f"expected an axis such as 0, 1 or -1, got {self.source(node)!r}")
        return found

    def keep(self, node: ast.expr) -> Option:
        """Return the option of keepdim=True."""
        if not isinstance(node, ast.Constant) or node.value is not True:
            self.refuse(node, "keepdim=True")
        return ("keep",)

    def axis_added(self, node: ast.Subscript) -> str:
        """Return which axis x[:, None] or x[None, :] adds; other subscripts are refused."""
        index = self.source(node.slice).strip("()").replace(" ", "")
        index = re.sub(r"\b(np|numpy|jnp)\.newaxis\b", "None", index)
        if index in (":,None", "...,None"):
            return "column"
        if index in ("None,:", "None", "None,..."):
            return "row"
        self.refuse(node, "x[:, None] or x[None, :]")

    def refuse(self, node: ast.AST, expected: str) -> NoReturn:
        """Raise Refused with the unexpected text."""
        raise Refused(f"expected {expected}, got {type(node).__name__} {self.source(node)!r}; {ALLOWED}")

    def source(self, node: ast.AST) -> str:
        """Return the beginning of a node's text, for comparisons and messages; deep trees cost nothing."""
        return (ast.get_source_segment(self.text, node) or "")[:LONGEST_NAME]


SIZE = re.compile(rf"\d{{1,4}}|{'|'.join(SIZES)}|len\(\w{{1,8}}\)|\w{{1,8}}\.shape\[-?[012]\]")
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.MatMult: "matmul", ast.Mod: "outer",
    ast.FloorDiv: "dot",
}  # fmt: skip
AXIS = {str(x): x for x in (-2, -1, 0, 1)}
ALIASES = {
    "Diag": "diag", "identity": "eye", "inner": "dot", "vdot": "dot", "expit": "sigmoid", "l2norm": "normalize",
    "max": "maximum", "min": "minimum", "log_sigmoid": "logsigmoid",
}  # fmt: skip

"""Runs untrusted Jinja templates: they can only access their variables, and their work is bounded.

jinja2's sandbox keeps templates from attributes that lead to Python's internals, and from changing their inputs.
It does not bound time or memory. Here every loop, call, filter, operator, comparison and joined text is charged to an
allowance before it is carried out, and only functions, filters and methods whose cost is known can be used. When the
allowance is spent, the template is refused.
"""

import datetime
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import TemplateError, Undefined, nodes, pass_context, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import sync_do_sum as do_sum
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

LONGEST_SOURCE = 2**18
"""The most characters of a template; the longest that are published have some ten thousand."""
STEPS, STEPS_PER_VALUE = 200_000, 400
"""The steps that a template may take: a constant, and more for each value of its variables."""
CHARACTERS, CHARACTERS_PER_CHARACTER = 2**23, 64
"""The characters that a template may handle: a constant, and more for each character of its variables."""
LONGEST_NUMBER = 4096
"""The most bits of a number."""
LONGEST_INDENT = 16
DEEPEST_VALUE = 200
"""How deep lists, tuples and dictionaries may be nested in values that are compared, written or looked up."""

METHODS: dict[type, frozenset[str]] = {
    str: frozenset((
        "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "startswith", "endswith", "replace", "join",
        "lower", "upper", "title", "capitalize", "find", "rfind", "index", "rindex", "count", "isdigit", "isalpha",
        "isalnum", "isspace", "isupper", "islower", "isnumeric", "isdecimal", "removeprefix", "removesuffix",
        "partition", "rpartition", "casefold", "swapcase",
    )),
    list: frozenset(("index", "count", "copy")),
    tuple: frozenset(("index", "count")),
    dict: frozenset(("get", "items", "keys", "values", "copy")),
}  # fmt: skip
"""The methods that a template may call."""
CHEAP_FILTERS = ("length", "count", "first", "last", "default", "d", "items")
"""Filters whose time is constant, or bounded by that of later operations."""
FILTERS = (
    *CHEAP_FILTERS, "list", "string", "join", "trim", "upper", "lower", "title", "capitalize", "replace", "reverse",
    "sort", "unique", "map", "select", "reject", "selectattr", "rejectattr", "min", "max", "sum", "int", "float", "abs",
    "round", "dictsort", "groupby", "batch", "slice", "safe", "escape", "e", "indent", "wordcount",
)  # fmt: skip
TESTS = (
    "defined", "undefined", "none", "string", "number", "integer", "float", "boolean", "true", "false", "mapping",
    "sequence", "iterable", "callable", "sameas", "divisibleby", "odd", "even", "in", "filter", "test",
    "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">=",
)  # fmt: skip
_WIDE = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\*|\d{4}|\d*\.(?:\*|\d{4}))")
_DATE = re.compile(r"(?:[^%]|%[-_0^#]?[A-Za-z%])*")


class Refused(TemplateError):
    """The template does something forbidden, or too much work."""


class _Allowance(threading.local):
    """The remaining allowance of the template that runs in this thread."""

    steps = 0
    characters = 0


class Environment(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox in which all work is charged; like transformers, it trims blocks and has `tojson`."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", Generation],
            optimized=False,  # constants would be computed before there is an allowance
            finalize=_finalize,
        )
        self._left = _Allowance()
        self.filters = {name: self._guarded(self.filters[name], name in CHEAP_FILTERS) for name in FILTERS}
        self.filters["sum"] = self._guarded(_sum, False)
        self.filters["tojson"] = self._guarded(self._to_json, False)
        self.tests = {name: self._guarded(self.tests[name], False) for name in TESTS}
        self._functions: dict[str, Callable[..., Any]] = {
            "range": _limited_range,
            "dict": _make_dict,
            "namespace": _Values,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise,
            "strftime_now": _now,
        }
        self.globals = dict(self._functions)

    def allow(self, *values: Any) -> None:
        """Start a new allowance, which suits these variables."""
        self._left.steps, self._left.characters = 2**62, 2**62
        self.weigh(values)
        steps, characters = 2**62 - self._left.steps, 2**62 - self._left.characters
        self._left.steps = STEPS + STEPS_PER_VALUE * steps
        self._left.characters = CHARACTERS + CHARACTERS_PER_CHARACTER * characters

    def charge(self, characters: int, steps: int = 1) -> None:
        """Take work from the allowance; raise if it is spent."""
        left = self._left
        left.steps -= steps
        left.characters -= characters
        if left.steps < 0 or left.characters < 0:
            what = "steps" if left.steps < 0 else "characters"
            raise Refused(f"it takes more {what} than a template may")

    def tick(self) -> bool:
        """Charge one turn of a loop."""
        self.charge(0)
        return True

    def weigh(self, value: Any, printed: bool = False) -> Any:
        """Charge a value with its contents, and return it; printed: raise if it is not a plain value."""
        level, depth = [value], 0
        while level:
            if depth > DEEPEST_VALUE:
                raise Refused(f"it uses a value that is nested more than {DEEPEST_VALUE} deep")
            level, depth = self._weigh_level(level, printed), depth + 1
        return value

    def _weigh_level(self, level: list[Any], printed: bool) -> list[Any]:
        """Charge values without their contents, and return their contents; a shared value counts once for each use."""
        held: list[Any] = []
        for x in level:
            if isinstance(x, str | bytes):
                self.charge(len(x))
            elif isinstance(x, int):
                self.charge(x.bit_length() // 8)
            elif isinstance(x, dict):
                self.charge(0, 1 + len(x) // 8)
                held += x.keys()
                held += x.values()
            elif isinstance(x, list | tuple | type({}.keys()) | type({}.values()) | type({}.items())):
                self.charge(0, 1 + len(x) // 8)
                held += x
            else:
                self.charge(0, 1 + (len(x) if isinstance(x, range) else 0))
                if printed and not isinstance(x, float | Undefined | None.__class__ | range):
                    raise Refused(f"it writes a {type(x).__name__}, which is no text, number, list or dictionary")
        return held

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up a key or an attribute, charged: a tuple's hash takes time for all its contents."""
        found = super().getitem(obj, self.weigh(argument))
        if not isinstance(obj, str | list | tuple | dict):
            self.weigh(found)  # filters that read attributes have not charged the contents of a namespace or a loop
        return found

    def weigh_slice(self, value: Any) -> Any:
        """Charge a slice, which is a copy, and return it."""
        self.charge(_size(value))
        return value

    def concat(self, parts: Iterable[str]) -> str:
        """Join the parts of a template's text, charged."""
        found = []
        for part in parts:
            self.charge(len(part))
            found.append(part)
        return "".join(found)

    def joined(self, *parts: Any) -> str:
        """Join values with ~."""
        return self.concat(str(self.weigh(part, True)) for part in parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_number(left)
        _check_number(right)
        if operator == "*" and not (_is_number(left) and _is_number(right)):
            many, few = (left, right) if _is_number(right) else (right, left)
            size = _size(many) * max(0, int(few) if _is_number(few) else 1)
            self.charge(size, 1 + size // 64)
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * max(1, right)
            if bits > LONGEST_NUMBER:
                raise Refused(f"it computes a number of more than {LONGEST_NUMBER} bits")
            self.charge(bits // 8)
        elif operator == "%" and isinstance(left, str):
            if _WIDE.search(left):
                raise Refused("it formats with a width of more than three digits")
            self.charge(1000 * left.count("%") + len(left))
            self.weigh(right, True)
        else:
            size = _size(left) + _size(right)
            self.charge(size, 1 + (size // 64 if isinstance(left, list | tuple) else 0))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __function: Any, *args: Any, **options: Any) -> Any:
        """Call a template's callee if it is a function of this module, a macro, or a method whose cost is known."""
        owner = getattr(__function, "__self__", None)
        if owner is __self:
            return __function(*args)
        __self.charge(0)
        if isinstance(__function, BuiltinMethodType) and owner is not None:
            given = {name: x for name, x in options.items() if name not in ("_loop_vars", "_block_vars")}  # jinja2's
            return __self._call_method(__function, owner, args, given)
        known = isinstance(__function, Macro | BlockReference | LoopContext | Joiner)
        known |= isinstance(__function, MethodType) and isinstance(owner, LoopContext | Cycler)
        known |= any(__function is each for each in __self._functions.values())
        if isinstance(__function, Undefined):
            return __function()  # raises with its name
        if __function is _make_dict or __function is _Values:
            __self.weigh(args)  # their keys are hashed
        if not known:
            name = getattr(__function, "__name__", type(__function).__name__)
            raise Refused(f"it calls {name}, which no template may")
        return super().call(__context, __function, *args, **options)

    def _call_method(self, method: Any, owner: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        kind = next((kind for kind in METHODS if isinstance(owner, kind)), None)
        if kind is None or method.__name__ not in METHODS[kind]:
            raise Refused(f"it calls {type(owner).__name__}.{method.__name__}, which no template may")
        if kind is str:
            args = tuple(x if isinstance(x, str | int | tuple | None.__class__) else list(x) for x in args)
            for value in (owner, *args, *options.values()):
                self.weigh(value)
            if method.__name__ == "replace" and len(args) >= 2 and all(isinstance(x, str) for x in args[:2]):
                self.charge(owner.count(args[0]) * len(args[1]))
            elif method.__name__ == "join" and args:
                self.charge(len(owner) * len(args[0]))
        elif method.__name__ in ("index", "count"):
            self.weigh(owner)
            self.weigh(args)
        else:
            self.charge(0, 1 + (_size(owner) // 8 if method.__name__ == "copy" else 0))
            self.weigh(args)  # the key is hashed
        found = method(*args, **options)
        if isinstance(found, str | list):
            self.charge(_size(found), 1 + len(found) // 8 if isinstance(found, list) else 1)
        return found

    def _guarded(self, function: Any, cheap: bool) -> Callable[..., Any]:
        """Return a filter or test that charges its arguments and its result."""

        @wraps(function)  # also copies the mark that says whether jinja2 passes the context
        def charged(*args: Any, **options: Any) -> Any:
            self.charge(0)
            given = args[1:] if hasattr(function, "jinja_pass_arg") else args
            values = (*given, *options.values())
            if not cheap:
                for value in values:
                    self.weigh(value)
                for value in values[1:]:
                    if isinstance(value, int) and abs(value) > MAX_RANGE:
                        raise Refused(f"it gives a filter the number {value}, more than {MAX_RANGE}")
                if len(values) > 1:  # join, replace, indent, batch: each argument may come once for every item
                    self.charge(_count(values[0]) * max(_width(value) for value in values[1:]))
            found = function(*args, **options)
            _check_number(found)
            if isinstance(found, str | list | tuple):
                self.charge(_size(found), 1 + (0 if isinstance(found, str) else len(found) // 8))
            return self._counted(found) if isinstance(found, Iterator) else found

        return charged

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            yield self.weigh(item)

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        width = indent if isinstance(indent, int) else len(indent or "")
        if width > LONGEST_INDENT:
            raise Refused(f"it indents by {width}, more than {LONGEST_INDENT}")
        self.weigh(value, True)
        for text in separators or ():
            self.charge(len(text) * _nodes(value))
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return encoder.encode(value) if indent is None else self.concat(encoder.iterencode(value))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Charging().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree


class Generation(Extension):
    """The tag {% generation %}, which marks the text of an assistant; its contents are rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


class _Charging(NodeTransformer):
    """Adds a charge to constructs that jinja2 compiles to plain Python: loops, comparisons, slices and joined texts."""

    def _call(self, name: str, line: int, *args: nodes.Expr) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)
        call.set_lineno(line)
        return call

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._call("tick", node.lineno)).set_lineno(node.lineno))
        if node.test is not None:
            node.test = nodes.And(self._call("tick", node.lineno), node.test)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = self._call("weigh", node.lineno, node.expr)
        for operand in node.ops:
            operand.expr = self._call("weigh", node.lineno, operand.expr)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Dict:
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = self._call("weigh", node.lineno, pair.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return self._call("weigh_slice", node.lineno, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return self._call("joined", node.lineno, *node.nodes)


class _Values(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:
        found = dict(*args[1:], **values)
        for name in found:
            _check_name(name)
        Namespace.__init__(args[0], found)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace must have names that do not begin with _, got {name!r:.80}")


@pass_context
def _finalize(context: Any, value: Any) -> Any:
    """Charge the value that {{ }} writes, before it becomes text."""
    environment: Environment = context.environment
    return environment.weigh(value, True)


def _limited_range(*bounds: int) -> range:
    found = range(*bounds)
    if max(map(abs, bounds)) > 2**62 or len(found) > MAX_RANGE:
        raise Refused(f"it counts further than {MAX_RANGE}")
    return found


def _make_dict(*args: Any, **values: Any) -> dict[Any, Any]:
    return dict(*args, **values)


@pass_environment
def _sum(environment: Environment, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    """Add numbers; lists are refused, because each addition would copy all previous items."""
    if not _is_number(start):
        raise Refused(f"it sums from a {type(start).__name__}, which is no number")
    return do_sum(environment, iterable, attribute, start)


def _raise(message: Any) -> None:
    raise TemplateError(str(message)[:2000] if isinstance(message, str) else "the template raised an exception")


def _now(form: str) -> str:
    if len(form) > 200 or not _DATE.fullmatch(form):
        raise Refused(f"it asks for the date as {form!r:.80}; widths are not possible")
    return datetime.datetime.now().strftime(form)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _check_number(value: Any) -> None:
    """Raise if this is a number whose arithmetic takes long."""
    if isinstance(value, int) and value.bit_length() > LONGEST_NUMBER:
        raise Refused(f"it computes with a number of more than {LONGEST_NUMBER} bits")


def _size(value: Any) -> int:
    """Return how long a text, list or number is."""
    if isinstance(value, int):
        return value.bit_length() // 8
    return len(value) if isinstance(value, str | bytes | list | tuple | dict | range) else 0


def _count(value: Any) -> int:
    """Return how many items or characters a value has."""
    return len(value) if isinstance(value, str | list | tuple | dict | range) else 1


def _width(value: Any) -> int:
    """Return how many characters an argument can add for each item."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value)
    return len(value) if isinstance(value, str) else 1


def _nodes(value: Any) -> int:
    """Return how many values a value holds."""
    count, ahead = 0, [value]
    while ahead:
        x = ahead.pop()
        count += 1
        ahead += x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ()
    return count

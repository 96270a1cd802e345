"""A text that is not an update rule is refused with a message, and nothing of it is ever run."""

import ast
import builtins
from pathlib import Path

import pytest

from lineate.recognise import compare
from lineate.recognise.compare import check
from lineate.recognise.expressions import MOST_CHARACTERS, MOST_NODES, read_expression
from lineate.recognise.symbols import Refused

HOSTILE = {
    "import": "import os",
    "import as a function": "__import__('os').system('touch ran')",
    "open": "open('ran', 'w')",
    "exec": "exec('S = 1')",
    "eval": "S = eval('S')",
    "a path": "S = S + Path('ran').touch()",
    "classes": "S.__class__.__bases__[0].__subclasses__()",
    "a dunder of a key": "S = S + k.__class__",
    "globals of a function": "S = outer.__globals__['os']",
    "a module's function": "S = np.load('ran')",
    "torch.load": "S = torch.load('ran')",
    "torch.save": "S = torch.save(S, 'ran')",
    "a module below a module": "S = np.os.system('touch ran')",
    "a method that writes": "S = S.tofile('ran')",
    "a private name": "_S = S",
    "a dunder name": "S = __builtins__",
    "a lambda": "S = (lambda: S)()",
    "a comprehension": "S = [S for S in k]",
    "a generator": "S = sum(x for x in k)",
    "a string": "S = 'S' * 10",
    "an f-string": "S = f'{S}'",
    "a text for a number": "S = S * b'1'",
    "a walrus": "S = (k := v)",
    "a loop": "while True: S = S",
    "a function": "def f(): return f()",
    "a class": "class S: pass",
    "an assertion": "assert S",
    "del": "del S",
    "a decision": "S = S if k else v",
    "a comparison": "S = S < k",
    "an index": "S = S[0]",
    "a slice": "S = S[::-1]",
    "an index that is a call": "S = S[exit()]",
    "unpacking": "S, k = k, S",
    "a starred argument": "S = outer(*k)",
    "keywords in a dictionary": "S = sum(S, **k)",
    "an option that is a call": "S = S + outer(k, v).sum(axis=exit())",
    "an option that keeps a call": "S = S.sum(0, keepdim=exit())",
    "assigning an attribute": "S.T = k",
    "assigning an element": "S[0] = k",
    "an annotation": "S: exit() = k",
    "a new meaning of outer": "outer = k; S = S + outer",
    "a huge power": "S = S ** 9999999",
    "a tower of powers": "S = 9**9**9**9 * S",
    "a power that is computed": "S = S ** k",
    "a huge number": "S = " + "9" * 900 + " * S",
    "a huge hexadecimal number": "S = 0x" + "f" * 900 + " * S",
    "a large number": "S = 1e300 * S",
    "infinity": "S = 1e999 * S",
    "a complex number": "S = 1j * S",
    "a truth value": "S = True * S",
    "deep brackets": "S = " + "(" * 400 + "S" + ")" * 400,
    "deep minus signs": "S = " + "-" * 900 + "S",
    "deep attributes": "S = S" + ".T" * 400,
    "deep calls of nothing": "S = a" + ".b" * 400 + "()",
    "deep subscripts": "S = k" + "[None]" * 150,
    "many terms": "S = S" + " + k" * 220,
    "many statements": "S=S;" * 200,
    "a giant text": "S = S + k * v " * 100_000,
    "a giant name": "S = S + " + "k" * 900,
    "a size that is computed": "S = S @ eye(10**9)",
    "a large einsum": "S = einsum('abcdefgh,ijklmnop->abcdefghijklmnop', S, S)",
    "an einsum that is computed": "S = einsum(k, S)",
    "too many gates": "S = a * b * g * w * beta * S",
    "an unknown name": "S = S + foo",
    "an unknown function": "S = S + oter(k, v)",
    "two keys": "S = S + outer(k, v - S.T @ key)",
    "bold letters": "S = \U0001d5f2\U0001d605\U0001d5f6\U0001d601()",  # Python would read them as exit()
    "a direction mark": "S = S \u202e+ k",
    "a wide underscore": "S = \uff3f\uff3fimport\uff3f\uff3f('os')",
    "a control character": "S = S\x1b[31m + k",
    "a null": "S = S\x00",
    "a half of a surrogate pair": "S = \ud800",
    "a continued line": "S = S + \\\n k",
    "a remainder": "S = S % k",
    "nothing": "  \n ; ",
    "only a comment": "# S = S",
    "no product sign": "S = a S + k v",
    "an unfinished bracket": "S = outer(k, v",
    "no memory": "outer(k, v)",
    "shapes that never fit": "S = S + outer(k, S)",
    "a sum where a memory belongs": "S = k @ k + k @ S @ v",
}  # fmt: skip


@pytest.fixture
def nothing_runs(monkeypatch, tmp_path):
    """Fail if anything is run, and if a file appears."""

    def refuse(*_):
        raise AssertionError("something ran")

    monkeypatch.chdir(tmp_path)
    for name in ("eval", "exec", "exit", "open"):
        monkeypatch.setattr(builtins, name, refuse)
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", HOSTILE)
def test_refused(case, nothing_runs):
    with pytest.raises(Refused) as error:
        check(HOSTILE[case])
    message = str(error.value)
    assert message.startswith("expected ") and ", got " in message
    assert len(message) < 500  # a long text is not repeated


MESSAGES = {
    "S = S + foo": "expected a name with a meaning, got 'foo'",
    "S = S + oter(k, v)": "got 'oter'; did you mean 'outer'?",
    "S = a S + k v": "write every product with *, @ or outer",
    "S = S ** 99": "expected a number of at most 8 after **, got '99'",
    "S = S[0]": "expected x[:, None] or x[None, :], got Subscript 'S[0]'",
    "S.__class__": "expected one of the forms of the list, got Attribute 'S.__class__'",
    "S = S % k": "got '%'; write outer(x, y)",
    "S = S + outer(k)": "expected outer(x, y), got Call 'outer(k)'",
    "S = S \u202e+ k": "got U+202E (RIGHT-TO-LEFT OVERRIDE)",
    "outer(k, v)": "expected an update that uses the memory S",
}


@pytest.mark.parametrize("text", MESSAGES)
def test_messages(text):
    with pytest.raises(Refused) as error:
        check(text)
    assert MESSAGES[text] in str(error.value)


def test_the_parser_calls_nothing_that_runs_code():
    """No file of the package calls eval, exec, compile or __import__, by name or through a module."""
    for file in (Path(compare.__file__).parent).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                of_re = isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "re.compile"
                assert of_re or name not in ("eval", "exec", "compile", "__import__", "literal_eval"), file.name


def largest():
    """Return an expression at every limit: as many nodes as are allowed, four gates, all of them inside exp."""
    start = "S = exp(a) * S + exp(b) * outer(k, exp(g) * v) + exp(beta) * tanh(S)"
    text = start
    while len(text) < MOST_CHARACTERS - 8:
        longer = text + " + S"
        try:
            read_expression(longer)
        except Refused:
            break
        text = longer
    return text


@pytest.mark.cover
def test_the_work_is_bounded(monkeypatch):
    """However an expression is written, it is evaluated at most a few thousand times, on arrays of a few numbers."""
    calls, sizes = [0], set()
    updated = compare.updated

    def counted(program, reading, token, S):
        calls[0] += 1
        sizes.add(S.numel())
        return updated(program, reading, token, S)

    monkeypatch.setattr(compare, "updated", counted)
    assert not check(largest()).recognised
    assert calls[0] < 5000 and max(sizes) <= 16


def test_limits_leave_room_for_real_rules():
    assert MOST_NODES > 100 and MOST_CHARACTERS >= 1000
    assert read_expression(largest()).names("gate") == ["a", "b", "g", "beta"]


def test_gates_that_are_no_gates():
    for names in (["k"], ["c"], ["__class__"]):
        with pytest.raises(Refused, match="expected gates of the expression"):
            check("S = a * S + outer(k, v)", per_key=names)


def test_a_gate_is_a_vector_of_one_kind():
    with pytest.raises(Refused, match="got 'a' as both"):
        check("S = a * S + outer(k, v)", per_key=["a"], per_value=["a"])

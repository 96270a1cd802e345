"""`lineate check`: what it prints, its JSON and its exit status."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("typer")

from typer.testing import CliRunner

from lineate.cli import build_app

GDN = "S = a * S; S = S + b * outer(k, v - S.T @ k)"
WRONG = "S = a * S + b * outer(k, v - S.T @ k)"


def lineate(*words):
    return CliRunner().invoke(build_app(), ["check", *words])


def said(done):
    return " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ([GDN], 0),
        ([WRONG], 1),
        (["S = tanh(S) + outer(k, v)"], 1),
        (["softmax(q @ k) * v"], 1),
        (["m = mu * m + outer(k, v); S = S + m"], 1),
        (["__import__('os')"], 2),
        ([""], 2),
        ([GDN, "--per-key", "x"], 2),
        (["S = S * a + outer(v, k)", "--per-key", "a"], 0),
        (["S = a * S + outer(k, v)", "--per-value", "a"], 1),
        (["--", "-b * outer(k, S.T @ k - v) + S"], 0),
    ],
)
def test_exit_status(words, status):
    done = lineate(*words)
    assert done.exit_code == status, said(done)
    assert ("lineate: expected" in done.stderr) == (status == 2) and bool(done.stdout) == (status != 2)


def test_a_row():
    text = said(lineate(GDN))
    for words in (
        "Gated DeltaNet", "S is key x value", "a decay", "b write strength", "decay in [0, 1]", "0 <= beta |k|^2 <= 2",
        "lineate.gated_delta_rule(q, k, v, log_decay, beta) with log_decay = log(a), beta = b", "of any length",
        "One decay per head commutes with the erase", "at most, relative, from one token of lineate's op",
    ):  # fmt: skip
        assert words in text, words
    assert "relative distance" not in text and "What to change" not in text


def test_a_wrong_rule():
    text = said(lineate(WRONG))
    for words in (
        "Not one of the five rows: the read is not decayed", "after 1 token", "after 100 tokens", "Gated DeltaNet 0.",
        "What to change: decay S before reading it. Gated DeltaNet in these names:", GDN,
    ):  # fmt: skip
        assert words in text, words


def test_what_grows_is_said_to_grow():
    assert "it grows without bound" in said(lineate("S = 2 * S + outer(k, v)"))


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("S = exp(g) * S; S = S + b * outer(k, v - S.T @ k)", "log_decay = g, beta = b"),
        ("S = S + b * outer(k, v)", "v = b * v"),
        ("S = S + mu / (key @ key) * outer(key, v - S.T @ key)", "beta = mu / (key @ key)"),
        ("k = k / norm(k); S = S + b * outer(k, v - S.T @ k)", "beta = b, normalize_qk=True"),
        ("S = S + outer(v - S @ k, k)", "beta = 1, its state is the transpose of S"),
    ],
)
def test_the_call_has_the_gates_of_the_expression(text, call):
    assert json.loads(lineate(text, "--json").stdout)["call"].endswith(f" with {call}")


@pytest.mark.cover
def test_json():
    found = json.loads(lineate(WRONG, "--json").stdout)
    assert found["recognised"] is False and found["rule"] is None and found["relative"] == "undecayed-read"
    assert found["layout"] == "key x value" and found["decay"] == "a" and found["write"] == "b"
    assert found["roles"] == {"S": "memory", "a": "decay", "b": "write strength", "k": "key", "v": "value"}
    assert set(found["distances"]["gated_delta_rule"]) == {"1", "100"} and found["remedy"] == GDN
    found = json.loads(lineate(GDN, "--json").stdout)
    assert found["recognised"] is True and found["rule"] == "gated_delta_rule" and found["distances"] == {}
    assert found["largest_difference"] < 1e-12 and found["keys"] == "any" and found["stable"]


def test_json_has_no_number_that_json_lacks():
    found = lineate("S = S * S * S * S + outer(k, v)", "--json").stdout
    assert "Infinity" not in found and "NaN" not in found
    assert json.loads(found)["distances"]["gated_delta_rule"]["100"] is None


def page():
    return (Path(__file__).parents[2] / "docs/check.md").read_text()


def test_the_output_on_the_page_is_real():
    """All but the difference, whose rounding is the machine's."""
    block = re.search(r"^    Not one of the five rows.*?(?=\n\nThe exit status)", page(), re.MULTILINE | re.DOTALL)[0]
    shown, real = (re.sub(r"difference +\S+", "", x).split() for x in (block, lineate(WRONG).stdout))
    assert shown == real


@pytest.mark.cover
def test_the_commands_on_the_page_say_what_stands_beside_them():
    found = re.findall(r'^    lineate check "(S|M)( = .*?)" +# (.*?)(?:;.*)?$', page(), re.MULTILINE)
    assert len(found) == 3
    for name, update, expected in found:
        first = lineate(name + update).stdout.splitlines()[0]
        assert first == expected


@pytest.mark.cover
def test_the_rules_on_the_page_are_what_it_says():
    rows = re.findall(r"^\| `(.*)` \| (.*) \|$", page()[page().index("## Rules that are") :], re.MULTILINE)
    assert len(rows) == 13
    for update, words in rows:
        done = lineate(update)
        assert done.exit_code == 1
        assert words.startswith(done.stdout.splitlines()[0].partition("rows: ")[2])


def test_nothing_is_obeyed_by_the_terminal():
    done = lineate("S = S + \x1b[31mfoo\u202e")
    assert done.exit_code == 2 and "\x1b" not in done.stderr and "\u202e" not in done.stderr

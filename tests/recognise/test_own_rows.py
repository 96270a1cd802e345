"""A rule with new tensors, added as CONTRIBUTING.md says ("A rule that the ops cannot compute"), is a row of `check`.

The recipe is applied to a copy of the library: a row of RULES, the fields of Inputs, the step and the recurrent form.
Nothing of lineate/recognise is touched.
"""

import json
import shutil
from pathlib import Path

import pytest

from lineate import rule
from lineate.recognise.compare import check
from lineate.recognise.measuring import TOLERANCE
from lineate.recognise.report import call
from lineate.rule import Rule
from tests.support import fresh

ROOT = Path(__file__).parents[2]

# file: text of the library, text of the recipe
RECIPE = {
    "rule.py": {
        "RULES = (LINEAR,": 'ERASE_WRITE = Rule(\n    "erase_write", corrects=True, decays=("head", "channel"), '
        'gates=("log_decay", "erase", "write")\n)\nRULES = (ERASE_WRITE, LINEAR,',
        "beta: Tensor | None, corrects: bool\n": "beta: Tensor | None, corrects: bool,\n    "
        "erase: Tensor | None = None, write: Tensor | None = None\n",
        "error = v - read(forgotten, k) if corrects else v": "error = v if write is None else write * v\n"
        "    if corrects:\n        error = error - read(forgotten, k if erase is None else erase * k)",
    },
    "call.py": {
        "    state: Tensor | None = field(": '    erase: Tensor | None = field(default=None, metadata=_is("gate", '
        '"b t hv k"))\n    write: Tensor | None = field(default=None, metadata=_is("gate", "b t hv v"))\n'
        "    state: Tensor | None = field(",
        "        beta: Tensor | None = None,\n": "        beta: Tensor | None = None,\n"
        "        erase: Tensor | None = None,\n        write: Tensor | None = None,\n",
        '"beta": beta, "state"': '"beta": beta, "erase": erase, "write": write, "state"',
    },
    "forms/recurrent.py": {
        'READS = ("q", "k", "v",': 'READS = ("q", "k", "v", "erase", "write",',
        "beta_i, options.corrects)": "beta_i, options.corrects, *more(i))",
        "    outputs = []\n": "    def more(i):\n"
        "        return [None if x is None else x[:, i].to(dtype) for x in (inputs.erase, inputs.write)]\n\n"
        "    outputs = []\n",
    },
}

# expression, gates per key channel, gates per value channel: row, formulas of its gates
FOUND = {
    ("S = a * S; S = S + outer(k, w * v - S.T @ (b * k))", "b", "w"): (
        "erase_write", {"log_decay": "log(a)", "erase": "b", "write": "w"},
    ),
    ("M = exp(g) * M; M = M + outer(sigmoid(w) * v - M @ (2 * b * k), k)", "b", "w"): (
        "erase_write", {"log_decay": "g", "erase": "2 * b", "write": "sigmoid(w)"},
    ),
    ("S = diag(a) @ S; S = S + outer(k, w * v - b * (S.T @ k))", "", ""): (
        "erase_write", {"log_decay": "log(a)", "erase": "b", "write": "w"},
    ),
    ("S = S + outer(k, v - S.T @ (b * k))", "b", ""): ("erase_write", {"log_decay": "0", "erase": "b", "write": "1"}),
    ("S = a * S; S = S + b * outer(k, v - S.T @ k)", "", ""): ("gated_delta_rule", {}),
    ("S = a * S + outer(k, w * v - S.T @ (b * k))", "b", "w"): (  # the read is not decayed, so the erase is larger
        "erase_write", {"log_decay": "log(a)", "erase": "b / a", "write": "w"},
    ),
    ("S = a * S; S = S + outer(b * k, w * v - S.T @ k)", "b", "w"): (None, {}),  # the strength is on the other side
}  # fmt: skip

PROGRAM = """
import json, os, sys
sys.path.insert(0, os.environ["CHANGED"])
import torch
torch.set_num_threads(1)
from lineate.recognise.compare import check
from lineate.recognise.report import as_json, call, closing, facts, headline

for text, keys, values in json.loads(os.environ["ASKED"]):
    found = check(text, tuple(keys), tuple(values))
    facts(found), headline(found), closing(found)
    print(json.dumps(as_json(found)))
"""


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """Return the folder of a copy of the library to which the recipe has been applied."""
    folder = tmp_path_factory.mktemp("library")
    shutil.copytree(ROOT / "lineate", folder / "lineate", ignore=shutil.ignore_patterns("__pycache__", "page"))
    for name, changes in RECIPE.items():
        file = folder / "lineate" / name
        text = file.read_text()
        for before, after in changes.items():
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, after)
        file.write_text(text)
    return folder


@pytest.mark.cover
def test_a_rule_that_the_recipe_adds_is_found(changed):
    done = fresh.run(PROGRAM, CHANGED=str(changed), ASKED=json.dumps([*FOUND]))
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for (asked, (row, gates)), answer in zip(FOUND.items(), answers, strict=True):
        assert (answer["rule"], answer["row_gates"]) == (row, gates), asked
        if row == "erase_write":
            assert answer["name"] == "erase write" and answer["largest_difference"] < TOLERANCE
            assert answer["call"].startswith("lineate.erase_write(q, k, v, log_decay, erase, write) with log_decay = ")


def test_a_row_whose_gates_the_recurrent_form_does_not_read_is_left_out(monkeypatch):
    unread = Rule("unread", corrects=True, decays=("head",), gates=("log_decay", "odd"))
    monkeypatch.setattr(rule, "RULES", (*rule.RULES, unread))
    assert check("S = a * S + b * outer(k, v - S.T @ k)").match.relative == "undecayed-read"


def test_a_row_with_gates_that_there_are(monkeypatch):
    """The first of these is a relative of the five rows; with a row of its own it is that row."""
    text = "M = M + outer(b * (v - M @ k), k)"
    assert check(text, per_value=("b",)).match.relative == "beta-per-value-channel"
    monkeypatch.setattr(rule, "RULES", (*rule.RULES, Rule("value_rates", True, ("none",), ("beta",))))
    found = check(text, per_value=("b",))
    assert found.match.row.rule.name == "value_rates" and found.match.gates == (("beta", "b", "value"),)
    assert call(found, found.match, found.match.row) == (
        "lineate.value_rates(q, k, v, beta) with beta = b, its state is the transpose of S"
    )
    assert not check("M = M + outer(M @ k - b * v, k)", per_value=("b",)).recognised

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
        "RULES = (*ONE_KEY_RULES,": 'KEEP_WRITE = Rule(\n    "keep_write", corrects=True, decays=("head", "channel"), '
        'gates=("log_decay", "keep", "put")\n)\nRULES = (KEEP_WRITE, *ONE_KEY_RULES,',
        "beta: Tensor | None, corrects: bool\n": "beta: Tensor | None, corrects: bool,\n    "
        "keep: Tensor | None = None, put: Tensor | None = None\n",
        "error = v - read(forgotten, k) if corrects else v": "error = v if put is None else put * v\n"
        "    if corrects:\n        error = error - (1 if keep is None else 1 - keep) * read(forgotten, k)",
    },
    "call.py": {
        "    state: Tensor | None = field(": '    keep: Tensor | None = field(default=None, metadata=_is("gate", '
        '"b t hv v"))\n    put: Tensor | None = field(default=None, metadata=_is("gate", "b t hv v"))\n'
        "    state: Tensor | None = field(",
        "        direction: Tensor | None = None,\n": "        direction: Tensor | None = None,\n"
        "        keep: Tensor | None = None,\n        put: Tensor | None = None,\n",
        '"direction": direction, "state"': '"direction": direction, "keep": keep, "put": put, "state"',
    },
    "forms/recurrent.py": {
        'READS = ("q", "k", "v",': 'READS = ("q", "k", "v", "keep", "put",',
        "beta_i, options.corrects)": "beta_i, options.corrects, *more(i))",
        "    outputs = []\n": "    def more(i):\n"
        "        return [None if x is None else x[:, i].to(dtype) for x in (inputs.keep, inputs.put)]\n\n"
        "    outputs = []\n",
    },
}

# expression, gates per key channel, gates per value channel: row, formulas of its gates
FOUND = {
    ("S = a * S; S = S + outer(k, w * v - (1 - b) * (S.T @ k))", "", "bw"): (
        "keep_write", {"log_decay": "log(a)", "keep": "b", "put": "w"},
    ),
    ("M = exp(g) * M; M = M + outer(sigmoid(w) * v - b * (M @ k), k)", "", "bw"): (
        "keep_write", {"log_decay": "g", "keep": "1 - b", "put": "sigmoid(w)"},
    ),
    ("S = diag(a) @ S; S = S + outer(k, v - b * (S.T @ k))", "", "b"): (
        "keep_write", {"log_decay": "log(a)", "keep": "1 - b", "put": "1"},
    ),
    ("S = a * S; S = S + b * outer(k, v - S.T @ k)", "", ""): ("gated_delta_rule", {}),
    ("S = a * S; S = S + outer(k, w * v - S.T @ (b * k))", "b", "w"): (  # a row that has no need of the new one
        "gated_delta_rule_2", {"log_decay": "log(a)", "erase": "b", "write": "w"},
    ),
    ("S = a * S; S = S + outer(b * k, w * v) - outer(k, w * (S.T @ k))", "b", "w"): (None, {}),  # two directions
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
        if row == "keep_write":
            assert answer["name"] == "keep write" and answer["largest_difference"] < TOLERANCE
            assert answer["call"].startswith("lineate.keep_write(q, k, v, log_decay, keep, put) with log_decay = ")


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

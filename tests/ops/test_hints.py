"""A keyword that an op or a preset does not have is answered with the one that it has."""

import inspect
from dataclasses import replace

import pytest
import torch

import lineate
from lineate.console.hints import OF_OPS
from lineate.models import preset

Q = torch.ones(1, 4, 1, 2)
GATE = torch.zeros(1, 4, 1)
OPS = ("linear_attention", "gated_linear_attention", "delta_rule", "gated_delta_rule", "kimi_delta_attention")

CASES = {
    "g": (lambda: lineate.gated_delta_rule(Q, Q, Q, g=GATE, beta=GATE), "'g'; write log_decay, the logarithm of the"),
    "g, in kimi's": (lambda: lineate.kimi_delta_attention(Q, Q, Q, g=GATE, beta=GATE), "'g'; write log_decay, the"),
    "a state": (lambda: lineate.linear_attention(Q, Q, Q, initial_state=None), "'initial_state'; write state"),
    "a slip": (lambda: lineate.delta_rule(Q, Q, Q, beta=GATE, normalise_qk=True), "did you mean 'normalize_qk'?"),
    "what nothing is like": (lambda: lineate.gated_linear_attention(Q, Q, Q, GATE, xyzzy=1), "no argument 'xyzzy'"),
    "the layers of a preset": (lambda: preset("tiny", n_layers=2), "replace(preset(...), n_layers=...)"),
    "the width of a preset": (lambda: preset("tiny", hidden_size=64), "it is a field of HybridConfig"),
    "a slip in a preset": (lambda: preset("tiny", vocabsize=64), "did you mean 'vocab_size'?"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_unknown_keyword_is_answered_with_a_hint(case):
    call, expected = CASES[case]
    with pytest.raises(TypeError) as error:
        call()
    assert expected in str(error.value) and error.value.__cause__ is None


def test_the_advice_works():
    assert replace(preset("tiny"), n_layers=2).n_layers == 2
    for name in OPS:
        parameters = inspect.signature(getattr(lineate, name)).parameters
        assert not parameters.keys() & OF_OPS.keys()  # no hint hides an argument
        assert all(x.kind is not inspect.Parameter.VAR_KEYWORD for x in parameters.values())
        assert {"state", "normalize_qk", "form"} <= parameters.keys()


def test_other_type_errors_are_left_as_they_are():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'beta'"):
        lineate.gated_delta_rule(Q, Q, Q, GATE)
    with pytest.raises(TypeError, match=r"q must be a torch\.Tensor"):
        lineate.gated_delta_rule("q", Q, Q, GATE, GATE)


def test_compiled_in_one_graph():
    """Also with names that lineate imports at their first use."""
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q: lineate.gated_delta_rule(q, q, q, GATE, GATE + 0.5), fullgraph=True, backend="eager"
    )
    made, expected = compiled(Q), lineate.gated_delta_rule(Q, Q, Q, GATE, GATE + 0.5)
    assert torch.equal(made.output, expected.output) and torch.equal(made.state, expected.state)

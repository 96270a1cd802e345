"""Mixers that override a method of LinearMixer are run as they say, in every way that their rule is run."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lineate.call import Inputs, Request
from lineate.layers import GatedDeltaNet
from lineate.layers.mixer import LinearMixer
from lineate.layers.trail import trail
from lineate.ops import Attended
from lineate.ops.rules import attend
from lineate.quantised import quantize, register_format
from lineate.quantised.format import INT8, Format, temporary_formats
from lineate.rule import GATED_DELTA, Rule


class Widened(GatedDeltaNet):
    """Runs the rule with other queries."""

    def run_rule(self, inputs: Inputs, owned: bool = False) -> Attended[Tensor]:
        return super().run_rule(inputs.replace(q=inputs.q + 1), owned)


@torch.no_grad()
@pytest.mark.parametrize("keep", ["auto", "states", "inputs"])
def test_a_speculative_pass_runs_an_overridden_rule(keep: str) -> None:
    torch.manual_seed(0)
    mixer = Widened(32, heads=2, key_dim=8, value_dim=8)
    x = torch.randn(1, 9, 32)
    _, state = mixer(x[:, :4])
    wanted, _ = mixer(x[:, 4:], state)
    found, _ = trail(mixer, x[:, 4:], state, keep)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_the_old_name_of_the_method_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Old must override run_rule\(inputs, owned\) in place of rule_op"):
        type("Old", (LinearMixer,), {"rule_op": lambda self, inputs, owned: None})


def drawn() -> dict[str, Any]:
    q, k, v = torch.randn(3, 1, 5, 2, 8).unbind(0)
    return {"q": q, "k": torch.nn.functional.normalize(k, dim=-1), "v": v, "log_decay": -torch.rand(1, 5, 2)}


def test_parameters_of_gates_that_are_given_are_refused() -> None:
    inputs = Inputs(**drawn(), beta=torch.rand(1, 5, 2))
    for name in ("A_log", "dt_bias"):
        with pytest.raises(ValueError, match="A_log and dt_bias must be None for gated_delta_rule"):
            attend(GATED_DELTA, inputs.replace(**{name: torch.zeros(2)}), Request())


def test_a_row_with_the_name_of_another_is_refused() -> None:
    inputs = Inputs(**drawn(), beta=torch.rand(1, 5, 2))
    mine = Rule("gated_delta_rule", corrects=False, decays=("head",), gates=("log_decay", "beta"))
    request = Request(form="recurrent", backend="torch")
    wanted = attend(GATED_DELTA, inputs, request)
    with pytest.raises(ValueError, match="rule must have a name of its own, got another row named 'gated_delta_rule'"):
        attend(mine, inputs, request)
    assert torch.equal(attend(GATED_DELTA, inputs, request).output, wanted.output)


def test_formats_are_registered_before_they_are_used() -> None:
    own = Format("int8-own", 8, round=INT8.round, numbers=INT8.numbers, zero=INT8.zero)
    with pytest.raises(ValueError, match="form must be a registered format, got 'int8-own'; call register_format"):
        quantize(torch.ones(16, 32), own)
    with temporary_formats():
        register_format(own)
        assert quantize(torch.ones(16, 32), own).format is own
    for wrong, message in (
        ({"name": "a/b"}, "name must have lower-case letters"), ({"flag": True}, "flag must be a number"),
        ({"flag": "Q8"}, "flag must be a number"), ({"group": 0}, "group of format"), ({"bits": 8.0}, "bits of format"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Format(**{"name": "x", "bits": 8, "round": INT8.round, "numbers": INT8.numbers, **wrong})
    with temporary_formats(), pytest.raises(ValueError, match="a flag of its own, got 8"):
        register_format(Format("x", 8, round=INT8.round, numbers=INT8.numbers, flag="8"))

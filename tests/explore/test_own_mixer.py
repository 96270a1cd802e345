"""A mixer that a user registers is pictured like the library's own."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lineate.call import Inputs
from lineate.explore import attention, forgetting, growth, state, subject
from lineate.explore.pictures import PictureOptions
from lineate.layers import GatedDeltaNet, Look, MixerKind, ModelSizes, register, registry
from lineate.models import HybridLM, preset

pytest.importorskip("matplotlib", reason="pictures are drawn with it")

from matplotlib import pyplot as plt

from lineate.figures import label_of, styled

PICTURES = {"state": state, "attention": attention, "growth": growth, "forgetting": forgetting}


@dataclass(frozen=True)
class OwnConfig:
    heads: int = 2


class OwnMixer(GatedDeltaNet):
    """A user's mixer whose memory forgets twice as fast as its gates say."""

    def trace_own(self, x: Tensor) -> Inputs:
        found = self.trace(x)
        assert found.log_decay is not None
        return found.replace(log_decay=2 * found.log_decay)


def make_own(model: ModelSizes, config: OwnConfig) -> nn.Module:
    return OwnMixer(model.hidden_size, config.heads)


ROW = MixerKind(
    letter="Z", name="own_rule", label="my own rule", config=OwnConfig, make=make_own,
    trace=OwnMixer.trace_own, look=Look("#123456", "o", "-"),
)  # fmt: skip


@pytest.fixture
def own_row() -> Iterator[None]:
    """The mixer's row, until a test ends."""
    with registry.temporary_rows():
        register(ROW)
        yield


@pytest.fixture(autouse=True)
def own(own_row: None, monkeypatch: pytest.MonkeyPatch) -> HybridLM:
    """A model with the mixer in every second layer, which the pictures open."""
    config = replace(preset("tiny"), pattern="ZA", mixers={"own_rule": OwnConfig()})
    torch.manual_seed(0)
    model = HybridLM(config).eval()
    opened = subject.Subject(config, lambda: model, "own", True, None, None)
    for module in PICTURES.values():
        monkeypatch.setattr(module, "open_subject", lambda options: opened)
    return model


def test_its_trace_is_what_its_row_says(own: HybridLM) -> None:
    ids = torch.arange(11)[None]
    found = subject.trace(own, ids)
    assert [(x.layer, x.letter, x.rule, x.op) for x in found] == [
        (n, "Z", "own_rule", "gated_delta_rule") for n in (0, 2)
    ]
    with torch.no_grad():
        mixer: Any = own.layers[0].mixer
        expected = mixer.trace_own(own.layers[0].mixer_norm(own.embed(ids)))
    assert torch.equal(found[0].k, expected.k[0]) and torch.equal(found[0].log_decay, expected.log_decay[0])


def interleaved(mixer: Any, x: Tensor) -> Inputs:
    """Two writes a token, one after the other."""
    return mixer.trace(x.repeat_interleave(2, 1))


def stacked(mixer: Any, x: Tensor) -> Inputs:
    """Two writes a token, in a dimension of their own."""
    found = mixer.trace(x)
    twice = {name: torch.stack((getattr(found, name),) * 2, 2) for name in ("k", "v", "beta")}
    return found.replace(**twice)


def test_writes_that_are_more_tokens_are_refused(own: HybridLM) -> None:
    """Pictures need the tokens of a text; growth, which reads only the model's own state, is drawn."""
    plain = growth.compute(PictureOptions(model="own", tokens=24))
    register(replace(registry.kind_of("Z"), trace=interleaved))
    options = PictureOptions(model="own", tokens=24)
    for name in ("state", "attention", "forgetting"):
        with pytest.raises(ValueError, match=(
            r"trace of my own rule \(Z\) must return Inputs with the keys of each token, k of shape \(1, t, h, k\) or "
            r"\(1, t, n, h, k\) with t = 24, got k of shape \(1, 48, .*; give n writes a token a dimension of their own"
        )):  # fmt: skip
            PICTURES[name].compute(options)
    assert growth.compute(options) == plain


def test_several_writes_a_token(own: HybridLM) -> None:
    """The rows are those of gated_delta_product, and a picture of two writes a token has two norms and two weights."""
    register(replace(registry.kind_of("Z"), trace=stacked))
    options = PictureOptions(model="own", tokens=24)
    (found, *_) = subject.trace(own, torch.arange(11)[None])
    assert found.op == "gated_delta_product" and found.writes == 2 and found.name == "own_rule"
    numbers = state.compute(options)["model"]
    assert numbers["writes"] == 2 and len(numbers["written"]) == len(numbers["corrected"]) == 48
    assert len(numbers["forgotten"]) == len(numbers["norm"]) == 24
    weights = attention.compute(options)["model"]["matrices"]
    assert next(iter(weights)) == "own_rule" and len(weights) == 7
    assert all(len(rows) == 24 and len(rows[0]) == 48 for rows in weights.values())


@pytest.mark.parametrize(("changes", "message"), [
    ({"v": lambda found: found.v[:, :5]}, "must return what gated_delta_rule can be called with: v must have"),
    ({"log_decay": lambda found: found.log_decay[..., :1]}, "gated_delta_rule can be called with: log_decay must have"),
    ({"beta": lambda found: found.beta.unsqueeze(2)}, "gated_delta_rule can be called with: beta must have"),
    ({"beta": lambda found: found.beta.unsqueeze(-1).expand_as(found.v)}, "can be called with: beta must have shape"),
    ({"A_log": lambda found: torch.zeros(2)}, "must return log_decay and beta themselves, got raw gates with A_log"),
])  # fmt: skip
def test_a_trace_is_what_an_op_can_be_called_with(own: HybridLM, changes: dict[str, Any], message: str) -> None:
    def wrong(mixer: Any, x: Tensor) -> Inputs:
        found = mixer.trace(x)
        return found.replace(**{name: change(found) for name, change in changes.items()})

    register(replace(registry.kind_of("Z"), trace=wrong))
    with pytest.raises(ValueError, match=rf"trace of my own rule \(Z\) .*{message}"):
        subject.trace(own, torch.arange(11)[None])


@pytest.mark.parametrize("name", PICTURES)
def test_it_is_drawn(name: str) -> None:
    options = PictureOptions(model="own", tokens=24)
    numbers = PICTURES[name].compute(options)
    with styled():
        figure = PICTURES[name].draw(numbers)
    texts = [text.get_text() for part in (figure, *figure.subfigs) for text in (part._suptitle,) if text is not None]
    legends = [text.get_text() for axes in figure.axes if axes.get_legend() for text in axes.get_legend().get_texts()]
    plt.close(figure)
    if name != "attention":  # its panels are the public ops
        assert any(label_of("own_rule") in text for text in texts + legends)

"""A mixer that a user registers is pictured as the library's own are."""

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
    """A mixer of the user's whose memory forgets twice as fast as its gates say."""

    def trace_own(self, x: Tensor) -> Inputs:
        found = self.trace(x)
        assert found.log_decay is not None
        return found._replace(log_decay=2 * found.log_decay)


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


def test_a_trace_has_one_key_a_token(own: HybridLM) -> None:
    def twice(mixer: Any, x: Tensor) -> Inputs:
        return mixer.trace(x.repeat_interleave(2, 1))

    register(replace(registry.kind_of("Z"), trace=twice))
    message = r"trace of my own rule \(Z\) must return Inputs with one key a token, .* t = 11, got k of shape \(1, 22, "
    with pytest.raises(ValueError, match=message):
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
    if name != "attention":  # whose panels are the public ops
        assert any(label_of("own_rule") in text for text in texts + legends)

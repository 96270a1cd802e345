"""Properties that all mixers whose memory learns share (lineate/layers/learning.py)."""

import pytest
import torch

from lineate.layers import TTTMLP, LaCT, LeastSquares, Titans, TTTLinear
from lineate.layers.learning import LearningMixer

MIXERS = [TTTLinear, TTTMLP, Titans, LaCT, LeastSquares]
mixers = pytest.mark.parametrize("mixer", MIXERS)


@mixers
def test_without_a_convolution_the_projections_are_read_as_they_are(mixer, monkeypatch):
    """No mixer then keeps inputs of a convolution, and none applies a silu in its place."""
    torch.manual_seed(0)
    layer, x, seen = mixer(16, 2, chunk=4, conv_size=0), torch.randn(2, 6, 16), []
    learn = layer.learn
    monkeypatch.setattr(layer, "learn", lambda x, mixed, *rest: seen.append(mixed) or learn(x, mixed, *rest))
    _, state = layer(x)
    assert layer.conv is None and "conv" not in state.names
    assert seen[0].equal(layer.in_proj(x)[..., : layer.splits[0]])


@mixers
def test_the_state_has_the_names_of_its_spec(mixer):
    layer = mixer(16, 2, chunk=4, conv_size=3)
    assert isinstance(layer, LearningMixer)
    _, state = layer(torch.randn(2, 6, 16))
    assert set(state.names) == {spec.name for spec in layer.state_spec} and state.names[0] == "conv"
    memory = layer.memory_of(state)
    assert "conv" not in memory and "position" in memory and "keys" not in memory


@mixers
@pytest.mark.parametrize(("chunk", "error"), [(0, ValueError), (1.5, TypeError)])
def test_a_wrong_chunk_is_refused_when_the_layer_is_made(mixer, chunk, error):
    with pytest.raises(error, match="chunk must be"):
        mixer(16, 2, chunk=chunk)


def test_what_a_subclass_lacks_is_named():
    class Begun(LearningMixer):
        def __init__(self) -> None:
            super().__init__(16, 2, splits=(24, 8), chunk=4, conv_size=0, norm_eps=1e-6)

    mixer = Begun()
    with pytest.raises(NotImplementedError, match="Begun must have learn, as every LearningMixer"):
        mixer(torch.randn(1, 4, 16))
    with pytest.raises(NotImplementedError, match="Begun must have memory_spec"):
        mixer.state_spec  # noqa: B018
    with pytest.raises(NotImplementedError, match="Begun must have reset_parameters"):
        mixer.finish(8)


def test_hidden_channels_have_one_name():
    found = [layer.expansion for layer in (TTTLinear(16, 2), TTTMLP(16, 2, expand=3), Titans(16, 2))]
    assert found == [0, 3, 0]
    assert [Titans(16, 2, memory="mlp").expansion, LaCT(16, 2, expansion=1.5).expansion] == [2, 1.5]


def test_what_has_no_chunked_form_is_refused():
    with pytest.raises(ValueError, match=r"'linear', 'mlp', which have a chunked form, .* MemoryRule"):
        Titans(16, 2, memory=lambda weights, x: x)
    with pytest.raises(ValueError, match="memory must be one of 'linear', 'mlp', got 'deep'"):
        Titans(16, 2, memory="deep")
    with pytest.raises(ValueError, match="window must be at least 0, got -1; 0 leaves the attention out"):
        LaCT(16, 2, window=-1)

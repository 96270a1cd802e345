"""torch.export of every mixer, and of a model: the program computes what the layer computes, and keeps its state."""

import io
from dataclasses import replace

import pytest
import torch
from torch.utils import _pytree as pytree

from lineate.layers import Memory, TokenCache, kinds
from lineate.models import HybridLM, ModelState, preset
from lineate.models.hybrid import drawn_mixer

KINDS = {kind.letter: kind for kind in kinds() if kind.built_in}
STATIC = "TPNCE"
"""Memories that learn run a loop over chunks in Python, so that their programs have one length."""


def mixer(letter):
    torch.manual_seed(0)
    return drawn_mixer(replace(preset("tiny", letter), hidden_size=32), letter).eval()


def tokens(t, seed=1):
    return torch.randn(2, t, 32, generator=torch.Generator().manual_seed(seed))


def check(program, layer, *inputs):
    """Compare outputs and states; the bits are the same but for LaCT, whose program has other products."""
    made, expected = program(*inputs), layer(*inputs)
    torch.testing.assert_close(made[0], expected[0], rtol=1e-5, atol=1e-5)
    assert type(made[1]) is type(expected[1]) and made[1].names == expected[1].names
    for name in made[1].names:
        torch.testing.assert_close(made[1][name], expected[1][name], rtol=1e-4, atol=1e-5)
    return made[1]


@pytest.mark.cover
@pytest.mark.parametrize("letter", [pytest.param(x, marks=[pytest.mark.slow] if x in "LPN" else []) for x in KINDS])
def test_every_mixer_is_exported(letter):
    layer, x = mixer(letter), tokens(80)
    least = 65 if letter == "V" else 64  # one chunk of the general row is another program than several
    shapes = None if letter in STATIC else {"x": {1: torch.export.Dim("t", min=least, max=4096)}}
    program = torch.export.export(layer, (x,), dynamic_shapes=shapes).module()
    check(program, layer, x)
    check(program, layer, tokens(80, seed=2))
    if shapes is not None:
        check(program, layer, tokens(333))
    program(x)[0].square().mean().backward()  # parameters have gradients, whatever they are


@pytest.mark.parametrize("letter", "GKSAM")
def test_a_step_is_exported_with_its_state(letter):
    layer = mixer(letter)
    with torch.no_grad():
        _, state = layer(tokens(20))
        program = torch.export.export(layer, (tokens(1), state)).module()
        check(program, layer, tokens(1, seed=3), state)


def test_a_program_is_saved_and_loaded():
    layer, x, file = mixer("G"), tokens(80), io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,)), file)
    file.seek(0)
    check(torch.export.load(file).module(), layer, x)


def test_a_model_is_exported():
    torch.manual_seed(0)
    model = HybridLM(replace(preset("tiny", "GA", vocab_size=40), n_layers=2)).eval()
    ids = torch.randint(40, (1, 70), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        made, expected = torch.export.export(model, (ids,)).module()(ids), model(ids)
    torch.testing.assert_close(made.logits, expected.logits, rtol=1e-5, atol=1e-5)
    assert isinstance(made.state, ModelState) and made.state.lengths == expected.state.lengths == 70


def test_states_are_trees_of_their_tensors():
    x = torch.arange(12.0).view(2, 3, 2)
    for state in (
        Memory({"a": x, "b": -x}),
        Memory({"a": x}, seeds=torch.tensor([1, 2])),
        TokenCache({"k": x, "v": -x}, 3),
        TokenCache({"k": x}, torch.tensor([1, 3])),
        TokenCache({"k": x}, 2),
        TokenCache.of({"k": x[:1]}, torch.tensor([0, 1, 3])),
    ):
        other = pytree.tree_map(
            lambda leaf: leaf + 1 if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 else leaf, state
        )
        assert type(other) is type(state) and other.names == state.names
        for name in state.names:
            assert torch.equal(other[name], state[name] + 1)
        if isinstance(state, TokenCache):
            lengths = [torch.as_tensor(s.lengths).tolist() for s in (state, other)]
            assert lengths[0] == lengths[1]
        elif state.seeds is not None:
            assert torch.equal(other.seeds, state.seeds)
    whole = ModelState((Memory({"a": x}), TokenCache({"k": x}, 3)), 3)
    assert pytree.tree_unflatten(*reversed(pytree.tree_flatten(whole))).lengths == 3

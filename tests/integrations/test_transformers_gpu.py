"""transformers' own models on a GPU, with and without lineate."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from lineate.integrations.transformers import enable, enabled
from tests.support.transformers_models import NAMES, build, call, gradients, restarting, separate, split, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("disabled")]


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.fixture(params=NAMES)
def model(request):
    return build(request.param).cuda()


def test_logits_and_gradients_on_a_gpu(model):
    """Logits equal transformers'; gradients are within 1e-3 of float64's, or as near as its own, or as float32 rounds.

    A gate with a strong decay has a gradient of 1e-5 of the others, the difference of numbers of their size.
    """
    ids = tokens(2, 150).cuda()
    logits = []

    def differentiate(each):
        def loss():
            logits.append(each(ids, use_cache=False).logits)
            return torch.nn.functional.cross_entropy(logits[-1].flatten(0, 1), ids.flatten())

        return gradients(each, loss)

    wide = copy.deepcopy(model).double()
    wide.set_experts_implementation("eager")  # torch's grouped product takes no float64
    exact = differentiate(wide)
    theirs = differentiate(model)
    with enabled():
        ours = differentiate(model)
    assert relative(logits[2], logits[1]) < 1e-4
    rounding = torch.finfo(torch.float32).eps * torch.stack([x.norm() for x in exact.values()]).norm()
    for name, want in exact.items():
        allowed = torch.stack([1e-3 * want.norm(), 2 * (theirs[name] - want).norm(), rounding]).max()
        assert (ours[name] - want).norm() < allowed, name


@torch.no_grad()
def test_decoding_and_packed_rows_on_a_gpu(model):
    ids, lengths, cuts = tokens(1, 75).cuda(), (5, 1, 40, 2, 27), (70, 1, 1, 1, 2)
    found = []
    for _ in range(2):
        found.append((split(model, ids, cuts), separate(model, ids, lengths)))
        enable()
    assert relative(found[1][0], found[0][0]) < 1e-4
    packed, _ = call(model, ids, position_ids=restarting(lengths).cuda(), use_cache=False)
    assert relative(packed, found[0][1]) < 1e-4

"""transformers' own models on a GPU, with and without lineate."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers_models import NAMES, build, call, gradients, restarting, separate, split, tokens

from lineate.integrations.transformers import enable, enabled

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("disabled")]


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.fixture(params=NAMES)
def on_gpu(request):
    return build(request.param).cuda()


def test_logits_and_gradients_on_a_gpu(on_gpu):
    ids = tokens(2, 150).cuda()
    logits = []

    def loss():
        logits.append(on_gpu(ids, use_cache=False).logits)
        return torch.nn.functional.cross_entropy(logits[-1].flatten(0, 1), ids.flatten())

    wanted = gradients(on_gpu, loss)
    with enabled():
        got = gradients(on_gpu, loss)
    assert relative(logits[1], logits[0]) < 1e-4
    for name, want in wanted.items():
        if want.norm() > 1e-6:  # the rest is rounding
            assert relative(got[name], want) < 1e-3, name


@torch.no_grad()
def test_decoding_and_packed_rows_on_a_gpu(on_gpu):
    ids, lengths, cuts = tokens(1, 75).cuda(), (5, 1, 40, 2, 27), (70, 1, 1, 1, 2)
    found = []
    for _ in range(2):
        found.append((split(on_gpu, ids, cuts), separate(on_gpu, ids, lengths)))
        enable()
    assert relative(found[1][0], found[0][0]) < 1e-4
    packed, _ = call(on_gpu, ids, position_ids=restarting(lengths).cuda(), use_cache=False)
    assert relative(packed, found[0][1]) < 1e-4

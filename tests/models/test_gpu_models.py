"""Whole models on a GPU: HybridLM against itself on the CPU, and transformers' models with lineate on the GPU."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.models import (
    AttentionConfig,
    FeedConfig,
    HybridConfig,
    HybridLM,
    LatentConfig,
    LinearConfig,
)
from tests.support.families import FAMILIES, build
from tests.support.small_models import random_model, variants

pytestmark = pytest.mark.gpu

VOCAB = 96
CONFIG = HybridConfig(
    vocab_size=VOCAB, hidden_size=128, n_layers=4, pattern="GGGA",
    linear=LinearConfig(2, 4, 64, 64),
    attention=AttentionConfig(4, 2, 64, rotary_dim=32),
    latent=LatentConfig(4, rank=48, nope_dim=32, rope_dim=16, value_dim=32),
    feed=FeedConfig(256), zero_centred_norm=True,
)  # fmt: skip
CASES = variants(CONFIG)
cases = pytest.mark.parametrize("case", CASES)


def make(case: str) -> HybridLM:
    return random_model(CASES[case])


def draw(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(0))


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.cpu().double() - expected.double()).norm() / expected.double().norm()).item()


@cases
@pytest.mark.parametrize("bounds", [None, (0, 5, 5, 6, 150)])
def test_logits_and_gradients_equal_those_of_the_cpu(case, bounds):
    """The model is float32, and the loss goes through every layer, forward and backward."""
    found = {}
    for device in ("cpu", "cuda"):
        model = make(case).to(device)
        ids = draw(2, 150)[: 2 if bounds is None else 1].to(device)
        cu_seqlens = None if bounds is None else torch.tensor(bounds, device=device)
        out = model(ids, cu_seqlens=cu_seqlens, labels=ids)
        out.loss.backward()
        found[device] = out, {name: x.grad for name, x in model.named_parameters()}
    (ours, grads), (expected, expected_grads) = found["cuda"], found["cpu"]
    assert relative(ours.logits.detach(), expected.logits.detach()) < 1e-5
    assert ours.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    for name, x in expected_grads.items():
        assert relative(grads[name], x) < 1e-4, name


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_prefill_then_token_by_token_equals_the_full_pass(case, dtype):
    model, ids = make(case).cuda().to(dtype), draw(2, 90).cuda()
    full = model(ids).logits.float()
    out = model(ids[:, :70])
    logits = [out.logits]
    for t in range(70, 90):
        kept = copy.deepcopy(out.state) if t == 80 else None
        before, out = out.state, model(ids[:, t : t + 1], state=out.state)
        if kept is not None:  # a state is a value: using it does not change it
            again = model(ids[:, t : t + 1], state=before).logits
            assert torch.equal(again, out.logits)
        logits.append(out.logits)
    assert relative(torch.cat(logits, 1).float(), full.cpu()) < (1e-5 if dtype == torch.float32 else 3e-2)
    assert out.state.nbytes == model.state_nbytes(rows=2, tokens=90)


@cases
@torch.no_grad()
def test_bfloat16_is_as_near_as_its_precision(case):
    model, ids = make(case), draw(2, 200)
    expected = model(ids).logits
    found = model.cuda().bfloat16()(ids.cuda()).logits.float()
    assert relative(found, expected) < 8e-2  # a token with nearly equal scores may go to another expert


@cases
@torch.no_grad()
def test_packed_texts_in_bfloat16_equal_separate_runs(case):
    model, ids, bounds = make(case).cuda().bfloat16(), draw(1, 300).cuda(), (0, 5, 5, 6, 170, 300)
    packed = model(ids, cu_seqlens=torch.tensor(bounds, device="cuda")).logits.float()
    for start, end in itertools.pairwise(bounds):
        if end > start:
            alone = model(ids[:, start:end]).logits.float()
            assert relative(packed[:, start:end], alone.cpu()) < 5e-2, (start, end)


@cases
def test_packed_gradients_in_bfloat16(case):
    """Gradients of the loss under autocast are compared with float32 on the CPU."""
    ids, bounds = draw(1, 300), torch.tensor((0, 5, 5, 6, 170, 300))
    model = make(case)
    model(ids, cu_seqlens=bounds, labels=ids).loss.backward()
    expected = {name: x.grad for name, x in model.named_parameters()}
    model = make(case).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        model(ids.cuda(), cu_seqlens=bounds.cuda(), labels=ids.cuda()).loss.backward()
    for name, x in model.named_parameters():
        # Routers get more, because tokens with nearly equal scores go to another expert.
        assert relative(x.grad, expected[name]) < (0.4 if "router" in name else 0.2), name


@cases
def test_padding_changes_nothing(case):
    model, ids = make(case).cuda(), draw(2, 60).cuda()
    mask = torch.ones(2, 60, dtype=torch.bool, device="cuda")
    mask[0, :25] = False
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).logits
        alone = model(ids[:1, 25:]).logits
    assert relative(padded[:1, 25:], alone.cpu()) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_on_lineate(family):
    """Logits and gradients of transformers' models on a GPU with enable() agree with transformers alone on the CPU."""
    transformers = pytest.importorskip("transformers")
    from lineate.integrations.transformers import enabled

    if not hasattr(transformers, FAMILIES[family].config):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    theirs = build(family).train(False)
    ids = torch.randint(theirs.config.get_text_config().vocab_size, (2, 75), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids).logits
    expected_grads = torch.autograd.grad(loss(expected, ids), list(theirs.parameters()), allow_unused=True)
    steps = continued(theirs, ids)
    theirs = theirs.cuda()
    with enabled():
        found = theirs(ids.cuda()).logits
        grads = torch.autograd.grad(loss(found, ids.cuda()), list(theirs.parameters()), allow_unused=True)
        found_steps = continued(theirs, ids.cuda())
    assert relative(found.detach(), expected.detach()) < 1e-4
    assert relative(found_steps, steps) < 1e-4
    for (name, _), a, b in zip(theirs.named_parameters(), grads, expected_grads, strict=True):
        if b is not None and b.norm() > 1e-6:
            assert relative(a, b) < 1e-3, name


@torch.no_grad()
def continued(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Return the logits of the last six tokens, five of them token by token."""
    out = model(ids[:, :-5], use_cache=True)
    steps = [out.logits[:, -1:]]
    cache = "cache_params" if "cache_params" in out else "past_key_values"
    for token in ids[:, -5:].split(1, 1):
        out = model(token, **{cache: out[cache]}, use_cache=True)
        steps.append(out.logits)
    return torch.cat(steps, 1)


def loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

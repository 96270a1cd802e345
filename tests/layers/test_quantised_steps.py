"""Decoding steps of models whose weights have 16, 8 or 4 bits, or are float8: on a GPU as on a CPU, and in a graph."""

import copy

import pytest
import torch
from torch import nn

from lineate.decoding import Decoder
from lineate.layers import MixtureOfExperts
from lineate.models import AttentionConfig, ExpertsConfig, FeedConfig, HybridConfig, HybridLM, LinearConfig
from lineate.quantised import QuantisedWeight, quantize

pytestmark = pytest.mark.gpu
VOCAB = 97
SMALL = ("in_proj", "out_proj", "gate_up_proj", "down_proj", "head", "embed")
CASES = {
    "dense": HybridConfig(
        VOCAB, 256, 4, "GKA", linear=LinearConfig(2, 4, 64, 64), attention=AttentionConfig(4, 2, 64, rotary_dim=32),
        feed=FeedConfig(384), zero_centred_norm=True,
    ),
    "a gate of half a tile": HybridConfig(
        VOCAB, 96, 2, "GA", linear=LinearConfig(1, 2, 32, 32), attention=AttentionConfig(3, 3, 32, rotary_dim=0),
        feed=FeedConfig(104), tie_embeddings=True,
    ),
    "experts": HybridConfig(
        VOCAB, 128, 2, "GA", linear=LinearConfig(1, 2, 32, 64), attention=AttentionConfig(2, 1, 64, rotary_dim=64),
        experts=ExpertsConfig(8, 2, 64, shared_size=64),
    ),
}  # fmt: skip


@torch.no_grad()
def make_small(model: nn.Module, form: str) -> nn.Module:
    """Make the large weights of a model quantised, where their columns allow it."""
    for name, module in model.named_modules():
        own = ["weight"] if name.rpartition(".")[2] in SMALL else []
        own += ["experts_gate_up", "experts_down"] if isinstance(module, MixtureOfExperts) else []
        for each in own:
            x = getattr(module, each)
            if x.shape[-1] % 32 == 0:
                setattr(module, each, nn.Parameter(quantize(x, form), requires_grad=False))
    assert sum(isinstance(x, QuantisedWeight) for x in model.parameters()) >= 6
    return model


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.double().cpu(), wanted.double().cpu()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("rows", [1, 3, 20, 70])
@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_steps_in_a_graph_equal_those_on_a_cpu(case, form, rows):
    torch.manual_seed(rows)
    wide = make_small(HybridLM(CASES[case]).eval(), form)
    model = copy.deepcopy(wide).to("cuda", torch.bfloat16)
    ids = torch.randint(VOCAB, (rows, 9))
    decoder = Decoder(model, model(ids.cuda(), last_only=True).state, room=64)
    plain = Decoder(model, model(ids.cuda(), last_only=True).state, room=64, graph=False)
    assert decoder.captured
    state = wide(ids).state
    # In a graph every pair of a token and an expert is a product of its own; outside, many are joined by their expert.
    nearly = 1e-2 if case != "experts" or 2 * rows <= 16 else 3e-2
    for _ in range(4):
        token = torch.randint(VOCAB, (rows, 1))
        found = decoder(token.cuda())
        assert relative(found, plain(token.cuda())) < nearly
        out = wide(token, state=state)
        state = out.state
        assert relative(found, out.logits) < 6e-2


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@torch.no_grad()
def test_a_step_has_the_same_bits_every_time(form):
    torch.manual_seed(0)
    model = make_small(HybridLM(CASES["dense"]).eval(), form).to("cuda", torch.bfloat16)
    ids = torch.randint(VOCAB, (5, 9), device="cuda")
    state, token = model(ids, last_only=True).state, ids[:, -1:]
    first = [Decoder(model, state, room=64)(token) for _ in range(3)]
    assert torch.equal(first[0], first[1]) and torch.equal(first[0], first[2])


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
@pytest.mark.parametrize("tokens", [1, 7, 40, 300])
@torch.no_grad()
def test_experts_of_a_token(form, kind, tokens):
    torch.manual_seed(tokens)
    wide = make_experts(kind, form)
    x = torch.randn(tokens, 128)
    found = copy.deepcopy(wide).to("cuda", torch.bfloat16)(x.to("cuda", torch.bfloat16))
    wanted = wide(x)
    agree = (found.float().cpu() - wanted).norm(dim=-1) < 0.05 * wanted.norm(dim=-1)
    assert agree.float().mean() > 0.95  # in bfloat16 a token may go to another expert


def make_experts(kind: str, form: str) -> nn.Module:
    layer = MixtureOfExperts(128, 8, 2, 96, kind=kind).eval()
    for name in ("experts_gate_up", "experts_down"):
        setattr(layer, name, nn.Parameter(quantize(getattr(layer, name), form), requires_grad=False))
    return layer

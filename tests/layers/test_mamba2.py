"""Mamba-2: the layer of transformers, its equation token by token, its forms, and its row in the registry."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lineate
from lineate.layers import Mamba2, kind_of
from lineate.layers.configs import MambaConfig
from lineate.layers.costs.measuring import kept_bytes, operations_of
from lineate.layers.mamba2 import GroupedGatedNorm
from lineate.layers.registry import Sizes
from lineate.models import FeedConfig, HybridConfig

KIND = kind_of("S")
SIZES = dict(head_dim=5, state_dim=7, groups=2)
HIDDEN, HEADS = 24, 6


def make(dtype: torch.dtype = torch.float64, **changes: object) -> Mamba2:
    """Return a layer whose every parameter is random."""
    torch.manual_seed(0)
    layer = Mamba2(HIDDEN, HEADS, **(SIZES | changes)).to(dtype)  # type: ignore[arg-type]
    with torch.no_grad():
        for x in layer.parameters():
            x.add_(0.3 * torch.randn_like(x))
    return layer


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def by_hand(layer: Mamba2, x: Tensor) -> Tensor:
    """Return the layer's output on x `t hidden`, one token after another in plain steps."""
    g, n, h, p = layer.heads, layer.key_dim, layer.value_heads, layer.value_dim
    mixed, z, dt = layer.in_proj(x).split((2 * g * n + h * p, h * p, h), -1)
    if layer.conv is not None:
        weight, bias = layer.conv.weight[:, None], layer.conv.bias
        size = layer.conv.weight.shape[1]
        mixed = F.silu(F.conv1d(F.pad(mixed.T[None], (size - 1, 0)), weight, bias, groups=len(weight)))[0].T
    C, B, v = mixed.split((g * n, g * n, h * p), -1)
    C, B = (y.view(-1, g, n).repeat_interleave(h // g, 1) for y in (C, B))
    v = v.view(-1, h, p)
    dt = F.softplus(dt + layer.dt_bias).clamp(layer.step_least, layer.step_most)
    S, outputs = torch.zeros(h, n, p, dtype=x.dtype), []
    for t in range(len(x)):
        S = (-layer.A_log.exp() * dt[t]).exp()[:, None, None] * S
        S = S + dt[t][:, None, None] * B[t][:, :, None] * v[t][:, None, :]
        outputs.append(torch.einsum("hnp,hn->hp", S, C[t]) + layer.D[:, None] * v[t])
    y, norm, gate = torch.stack(outputs).flatten(1), layer.norm, F.silu(z)
    y = y * gate if norm.gate_first else y
    y = y.view(len(x), norm.groups, -1)
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm.eps)).flatten(1) * norm.weight
    return layer.out_proj(y if norm.gate_first else y * gate)


OPTIONS = {
    "plain": {},
    "biases": {"bias": True},
    "no bias in the convolution": {"conv_bias": False},
    "no convolution": {"conv_size": 0},
    "one group": {"groups": 1, "norm_groups": 3},
    "as many groups as heads": {"groups": 6, "norm_groups": 6, "gate_first": False},
    "bounded steps": {"step_least": 0.3, "step_most": 0.9, "gate_first": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_its_equation(name):
    layer, x = make(**OPTIONS[name]), tokens(1, 75)
    torch.testing.assert_close(layer(x)[0][0], by_hand(layer, x[0]), rtol=1e-9, atol=1e-10)


def test_bounds_change_the_steps():
    raw = torch.linspace(-6, 6, 40, dtype=torch.float64)[:, None].expand(1, 40, HEADS)
    steps = make(step_least=0.3, step_most=0.9).steps(raw)
    assert steps.min() == 0.3 and steps.max() == 0.9
    assert make().steps(raw).min() < 0.3 and make().steps(raw).max() > 0.9


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_the_equation(name):
    layer, x = make(**OPTIONS[name]), tokens(1, 40).requires_grad_()
    weight = tokens(1, 40).cos()
    wanted = torch.autograd.grad((by_hand(layer, x[0]) * weight[0]).sum(), [x, *layer.parameters()])
    found = torch.autograd.grad((layer(x)[0] * weight).sum(), [x, *layer.parameters()])
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9)


@torch.no_grad()
def test_forms_and_backends_agree():
    """The inputs of the rule give one result in every form."""
    found = make(torch.float32).trace(tokens(1, 70, dtype=torch.float32))
    wanted, state = lineate.gated_linear_attention(**found.given(), form="recurrent", backend="torch")
    for form, backend in product(("recurrent", "chunkwise"), ("torch", "native")):
        output, last = lineate.gated_linear_attention(**found.given(), form=form, backend=backend)
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last, state, rtol=1e-4, atol=1e-5)


def test_a_trace_gives_the_output_of_the_rule():
    layer, x = make(), tokens(1, 21)
    found = layer.trace(x)
    output, memory = lineate.gated_linear_attention(**found.given())
    caught = []
    layer.norm.register_forward_pre_hook(lambda norm, inputs: caught.append(inputs[0]))
    _, state = layer(x)
    C, B, v = layer.split_heads(layer.conv(layer.project(x)[0])[0])
    torch.testing.assert_close(output + layer.D[:, None] * v, caught[0], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(memory, state["memory"], rtol=1e-9, atol=1e-10)


CONFIGS = [
    MambaConfig(4, 8, 16, groups=2),
    MambaConfig(6, 8, 16, groups=3, conv_bias=False, norm_groups=2),
    MambaConfig(4, 8, 16, conv_size=0, gate_first=False, step_most=0.1),
    MambaConfig(4, 16, 8, groups=4, bias=True, step_least=0.01),
]


@pytest.mark.cover
@pytest.mark.parametrize("config", CONFIGS)
def test_measured_costs_are_the_counted_ones(config):
    model = Sizes(32)
    measured, counted = operations_of(replace(KIND, operations=None), model), KIND.operations
    assert measured.projections(model, config) == counted.projections(model, config)
    for count in (64, 100, 1536, 5000, 2**18):
        assert measured.mixing(config, count, "executed") == counted.mixing(config, count, "executed")
    for context in (63, 2**18):
        assert measured.mixing_one(config, context, "executed") == counted.mixing_one(config, context, "executed")
    kept = kept_bytes(replace(KIND, kept_bytes=None), model, config, half=False)
    assert KIND.kept_bytes(config, False) == pytest.approx(kept, rel=0.01)


WRONG = [
    ({"groups": 4}, "heads must be a multiple of groups = 4, got 6"),
    ({"norm_groups": 7}, "norm_groups must divide heads x head_dim = 30, got 7"),
    ({"step_least": 0.2, "step_most": 0.1}, "step_most must be at least step_least = 0.2, got 0.1"),
    ({"step_least": -1.0}, "step_least must be finite and at least 0, got -1.0"),
    ({"step_least": float("nan")}, "step_least must be finite and at least 0, got nan"),
    ({"step_most": float("nan")}, "step_most must be .*, got nan"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    given = {"heads": 6, "head_dim": 5, "state_dim": 7} | changes
    with pytest.raises(ValueError, match=message):
        Mamba2(HIDDEN, **given)
    with pytest.raises(ValueError, match=message):
        HybridConfig(9, HIDDEN, 1, "S", mamba=MambaConfig(**given), feed=FeedConfig(8))


def test_a_model_without_the_sizes_is_refused():
    with pytest.raises(ValueError, match=r"mamba must be given for the letter 'S' of pattern 'S', got None"):
        HybridConfig(9, HIDDEN, 1, "S")


def test_what_it_says_of_itself():
    layer = make(norm_groups=3)
    assert "bias=True" in repr(layer.conv) and "groups=3" in repr(layer.norm)
    assert "6 heads of 5, states of 7 in 2 groups" in MambaConfig(6, 5, 7, 2).describe()
    assert isinstance(layer.norm, GroupedGatedNorm) and not layer.A_log.isnan().any()


def copied(theirs: nn.Module, sizes: tuple[int, int, int, int], **options: object) -> Mamba2:
    """Return our layer with the weights of a layer of transformers: heads, channels of each, groups, states."""
    h, p, g, n = sizes
    inner, keys = h * p, g * n
    own = Mamba2(theirs.in_proj.in_features, h, head_dim=p, groups=g, state_dim=n, **options)
    with torch.no_grad():
        for kind in ("weight", "bias"):
            if getattr(theirs.in_proj, kind) is not None:
                z, x, B, C, dt = getattr(theirs.in_proj, kind).split((inner, inner, keys, keys, h))
                getattr(own.in_proj, kind).copy_(torch.cat((C, B, x, z, dt)))
                getattr(own.out_proj, kind).copy_(getattr(theirs.out_proj, kind))
            if getattr(theirs.conv1d, kind) is not None:
                x, B, C = getattr(theirs.conv1d, kind).split((inner, keys, keys))
                ours = getattr(own.conv, kind)
                ours.copy_(torch.cat((C, B, x)).view_as(ours))
        for name in ("A_log", "dt_bias", "D", "norm.weight"):
            own.get_parameter(name).copy_(theirs.get_parameter(name))
    return own


@pytest.mark.parametrize("t", [1, 75, 300])
@pytest.mark.parametrize("options", [{}, {"use_bias": True}, {"use_conv_bias": False}, {"limit": (0.05, 0.4)}], ids=str)
def test_it_equals_the_layer_of_transformers(t, options):
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    limit = options.get("limit", (0.0, float("inf")))
    config = transformers.Mamba2Config(
        num_heads=6, head_dim=8, hidden_size=24, state_size=10, n_groups=2, num_hidden_layers=1, vocab_size=50,
        time_step_limit=limit, chunk_size=16, **{key: value for key, value in options.items() if key != "limit"},
    )  # fmt: skip
    theirs = Mamba2Mixer(config, 0).eval()
    with torch.no_grad():
        for x in theirs.parameters():
            x.add_(0.2 * torch.randn_like(x))
    bounds = {} if "limit" not in options else {"step_least": limit[0], "step_most": limit[1]}
    own = copied(theirs, (6, 8, 2, 10), bias="use_bias" in options, conv_bias="use_conv_bias" not in options, **bounds)
    x = tokens(2, t, dtype=torch.float32).requires_grad_()
    found, wanted = own(x)[0], theirs(x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    grads = (torch.autograd.grad(y.square().sum(), x)[0] for y in (found, wanted))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-3)

"""HGRN2, retention, Comba and feature maps of linear attention: extreme gates, gradients, positions, and refusals."""

import math
from dataclasses import replace

import pytest
import torch

import lineate
from lineate.forms import stability
from lineate.layers import HGRN2, Comba, LinearAttention, Retention, RotaryRetention, kind_of
from lineate.layers.configs import FEATURE_MAPS, LinearConfig
from lineate.layers.costs.measuring import kept_bytes, operations_of
from lineate.layers.registry import Sizes
from lineate.layers.trail import trail
from lineate.layers.variants.retention import lightning_decays, retnet_decays
from lineate.rule import normalize

CONFIG = LinearConfig(2, 4, 8, 6, conv_size=0)
CASES = {
    "H": ("H", CONFIG),
    "H, no bound": ("H", replace(CONFIG, learned_bound=False, gate_activation="sigmoid")),
    "O": ("O", replace(CONFIG, decay="lightning", qk_activation="silu", value_activation="silu", norm="all")),
    "O, rotary": ("O", replace(CONFIG, rope_theta=100.0, qk_activation="relu", conv_size=3)),
    "Q": ("Q", CONFIG),
    "Q, scaled": ("Q", replace(CONFIG, probe="scaled", conv_size=3)),
    **{f"L, {name}": ("L", replace(CONFIG, feature_map=name, normalize=False)) for name in FEATURE_MAPS},
    "L, sums": ("L", replace(CONFIG, sum_to_one="qk")),
}


def make(name, hidden=16):
    torch.manual_seed(0)
    letter, config = CASES[name]
    return kind_of(letter).make(Sizes(hidden), config)


def test_decays():
    torch.testing.assert_close(retnet_decays(3).exp(), 1 - torch.tensor([1 / 32, 1 / 64, 1 / 128]).double())
    torch.testing.assert_close(-lightning_decays(8), 2.0 ** -torch.arange(1.0, 9.0).double())
    six = [2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0, 2**-1.0, 2**-3.0]  # four slopes, then every second one of eight
    torch.testing.assert_close(-lightning_decays(6), torch.tensor(six).double())


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    """Those of the input, the state and all parameters, and those of parameters are there for a constant decay, too."""
    mixer = make(name, 4).double().requires_grad_()
    x = torch.randn(1, 4, 4, dtype=torch.float64, requires_grad=True)
    _, state = mixer(torch.randn(1, 2, 4, dtype=torch.float64))
    memory = state["memory"].detach().requires_grad_()
    given = {key: y.detach() for key, y in state.tensors.items()}
    parameters = dict(mixer.named_parameters())

    def run(x, memory, *values):
        named = dict(zip(parameters, values, strict=True))
        after = type(state)(given | {"memory": memory})
        y, last = torch.func.functional_call(mixer, named, (x, after))
        return y, last["memory"]

    assert torch.autograd.gradcheck(run, (x, memory, *parameters.values()), fast_mode=True)


@pytest.mark.parametrize("bound", [-torch.inf, -3.0, 20.0])
def test_extreme_gates_of_hgrn2(bound):
    """The decay is l + (1 - l) sigmoid(f) and the key 1 - decay, with finite gradients, for gates of any size."""
    mixer = HGRN2(8, 1, key_dim=5, value_dim=4)
    with torch.no_grad():
        mixer.lower_bound.fill_(bound)
    f = torch.tensor([-300.0, -30.0, 0.0, 30.0, 300.0], requires_grad=True)
    inputs = mixer.rule_inputs(torch.ones(1, 1, 1, 5), f.view(1, 1, 1, 5), torch.ones(1, 1, 1, 4), [])
    low = torch.tensor(bound).double().sigmoid()
    wanted = low + (1 - low) * f.detach().double().sigmoid()
    torch.testing.assert_close(inputs.log_decay.flatten().exp().double(), wanted, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(inputs.k.flatten().double(), 1 - wanted, atol=1e-7, rtol=1e-5)
    assert (inputs.log_decay <= 0).all()
    inputs.log_decay.sum().backward()
    assert f.grad.isfinite().all() and mixer.lower_bound.grad.isfinite().all()


@torch.no_grad()
def test_positions_are_relative():
    """The outputs after many tokens are those of attention with absolute positions, whatever the calls were."""
    torch.manual_seed(0)
    mixer = RotaryRetention(16, 2, key_dim=6, value_dim=5, rope_theta=50.0).double()
    x = torch.randn(1, 60, 16, dtype=torch.float64)
    caught = []
    mixer.norm.register_forward_pre_hook(lambda norm, inputs: caught.append(inputs[0]))
    state = None
    for part in x.split([1, 1, 20, 3, 35], 1):
        _, state = mixer(part, state)
    q, k, v, *_ = mixer.in_proj(x)[0].split((12, 12, 10, 10), -1)
    q, k, v = (y.unflatten(-1, (2, -1)) for y in (q, k, v))
    angles = torch.arange(60.0).double()[:, None] * 50.0 ** -(torch.arange(3).double() / 3)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    q, k = (torch.complex(y[..., :3], y[..., 3:]) * turn for y in (q, k))
    apart = torch.arange(60)[:, None] - torch.arange(60)
    weights = torch.einsum("thc,shc->hts", q, k.conj()).real * 6**-0.5
    gamma = -mixer.A_log.double().exp()[:, None, None]
    weights = (weights * (gamma * apart.clamp(min=0)).exp()).tril()
    torch.testing.assert_close(torch.cat(caught, 1)[0], torch.einsum("hts,shv->thv", weights, v))


@pytest.mark.parametrize("name", ["H", "O", "O, rotary", "Q", "L, product", "L, sums"])
@torch.no_grad()
def test_a_trail_takes_tokens_back(name):
    mixer = make(name)
    x = torch.randn(2, 12, 16)
    _, state = mixer(x[:, :7])
    y, trailed = trail(mixer, x[:, 7:], state)
    torch.testing.assert_close(y, mixer(x[:, 7:], state)[0], atol=1e-5, rtol=1e-4)
    after = trailed.after(torch.tensor([0, 3]))
    for row, count in ((0, 0), (1, 3)):
        _, wanted = mixer(x[row : row + 1, : 7 + count])
        torch.testing.assert_close(after["memory"][row], wanted["memory"][0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", [x for x in CASES if x.startswith("L")])
def test_counted_operations_are_the_measured_ones(name):
    letter, config = CASES[name]
    kind = kind_of(letter)
    measured = operations_of(replace(kind, operations=None), Sizes(16))
    assert measured.projections(Sizes(16), config) == (kind.operations.projections(Sizes(16), config)) - (
        measured_once(config)
    )
    assert kept_bytes(replace(kind, kept_bytes=None), Sizes(16), config, half=False) > 0


def measured_once(config):
    """Return the operations that the measure does not count: a feature map runs once a head, but is one projection."""
    maps = {"product": 2, "t2r": 1, "hedgehog": 1}.get(config.feature_map, 0)
    return 4 * maps * (config.heads - 1) * config.key_dim**2


REFUSED = [
    (LinearAttention, {"feature_map": "dpfp"}, r"feature_map must be one of 'identity', .* got 'dpfp'"),
    (LinearAttention, {"sum_to_one": "kq"}, "sum_to_one must be one of '', 'q', 'k', 'qk', got 'kq'"),
    (Retention, {"decay": "alibi"}, "decay must be one of 'retnet', 'lightning', got 'alibi'"),
    (Retention, {"norm": "group"}, "norm must be one of 'head', 'all', got 'group'"),
    (Retention, {"qk_activation": "elu"}, "qk_activation must be one of 'none', 'silu', 'relu', got 'elu'"),
    (Retention, {"value_activation": "relu"}, "value_activation must be one of 'none', 'silu', got 'relu'"),
    (RotaryRetention, {"key_dim": 7}, "key_dim must be even to be rotated, got 7"),
    (Comba, {"probe": "long"}, "probe must be one of 'unit', 'scaled', got 'long'"),
    (HGRN2, {"value_heads": 3}, "value_heads must be a multiple of heads = 2, got 3"),
]


@pytest.mark.parametrize(("mixer", "options", "message"), REFUSED)
def test_unknown_options_are_refused(mixer, options, message):
    with pytest.raises(ValueError, match=message):
        mixer(16, 2, **options)


def test_a_rotated_key_dim_is_even():
    with pytest.raises(ValueError, match=r"LinearConfig\.key_dim must be even to be rotated, got 7"):
        replace(CONFIG, key_dim=7, rope_theta=100.0).check_sizes()


def test_hedgehog_features_are_positive_and_sum_to_one():
    mixer = make("L, hedgehog")
    q, k = mixer.enter(torch.randn(1, 5, 16))[:2]
    assert q.shape[-1] == 16 and (k > 0).all()
    torch.testing.assert_close(q.sum(-1), torch.ones(1, 5, 2))


@pytest.mark.parametrize("probe", ["unit", "scaled"])
@pytest.mark.parametrize("speed", [1.0, 60.0, 1e6], ids=str)
@torch.no_grad()
def test_comba_is_its_equation(probe, speed, recwarn):
    """The error precedes the decay, for decays down to e^-60 and 0, without a warning about the memory."""
    stability.forget()
    torch.manual_seed(0)
    mixer = Comba(16, 2, value_heads=4, key_dim=8, value_dim=6, probe=probe)
    for x in (mixer.probe_logit, mixer.correction):
        torch.nn.init.normal_(x)
    torch.nn.init.constant_(mixer.A_log, math.log(speed))
    torch.nn.init.constant_(mixer.dt_bias, 0.5)
    x = torch.randn(1, 150, 16)
    exact = mixer.double()
    mixed, z, b, a = exact.in_proj(x.double()).split(exact.splits, -1)
    q, k, v = (y[0] for y in exact.split_heads(exact.conv(mixed)[0]))
    s, D = mixer.probe_logit.sigmoid()[:, None], mixer.correction[:, None]
    if probe == "unit":
        q, p, k = normalize(q - D * s * k), normalize(s * k), normalize(k)
    else:
        q, k = normalize(q), normalize(k)
        q, p = q - D * s * k, s * k
    q, k, p = (y.repeat_interleave(2, 1) for y in (q, k, p))
    decay = torch.exp(-speed * torch.nn.functional.softplus(a[0] + mixer.dt_bias))
    S, outputs = torch.zeros(4, 8, 6).double(), []
    for t in range(150):
        error = b[0, t].sigmoid()[:, None] * (v[t] - torch.einsum("hkv,hk->hv", S, p[t]))
        S = decay[t][:, None, None] * S + torch.einsum("hk,hv->hkv", k[t], error)
        outputs.append(torch.einsum("hkv,hk->hv", S, q[t]) * 8**-0.5)
    wanted = exact.leave(torch.stack(outputs)[None], z)
    torch.testing.assert_close(exact(x.double())[0], wanted, rtol=1e-9, atol=1e-11)
    narrow = mixer.float()
    found, state = narrow(x)
    assert (found.double() - wanted).norm() <= 2e-6 * wanted.norm()
    assert (state["memory"].double() - S).norm() <= 2e-6 * S.norm()
    state, outputs = None, []
    for token in x.split(1, 1):
        y, state = narrow(token, state)
        outputs.append(y)
    assert (torch.cat(outputs, 1).double() - wanted).norm() <= 2e-6 * wanted.norm()
    assert not [y for y in recwarn if y.category is lineate.UnstableMemoryWarning]


def test_gradients_of_comba_through_fast_decays():
    mixer = Comba(16, 2, key_dim=8)
    torch.nn.init.constant_(mixer.A_log, math.log(60.0))
    mixer(torch.randn(1, 150, 16, requires_grad=True))[0].square().sum().backward()
    assert all(x.grad.isfinite().all() for x in mixer.parameters())

"""Preconditioned delta rules: the layers against their recurrence written out in float64, its gradients, refusals."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lineate.layers import PreconditionedGatedDeltaNet, PreconditionedKimiDeltaAttention, kind_of
from lineate.layers.configs import LinearConfig
from lineate.layers.registry import Sizes
from lineate.models import FeedConfig, HybridConfig, HybridLM
from tests.support.marks import slow_but

HIDDEN, HEADS, VALUE_HEADS, KEY, VALUE = 12, 2, 4, 5, 3
SIZES = {"value_heads": VALUE_HEADS, "key_dim": KEY, "value_dim": VALUE, "conv_size": 0}
LAYERS = {
    "I": lambda: PreconditionedGatedDeltaNet(HIDDEN, HEADS, **SIZES),
    "I, other bounds": lambda: PreconditionedGatedDeltaNet(
        HIDDEN, HEADS, **SIZES, beta_scale=1.2, precondition=1.6, gate_lower_bound=-3.0
    ),
    "F": lambda: PreconditionedKimiDeltaAttention(HIDDEN, HEADS, **SIZES, decay_rank=4, gate_rank=6),
    "F, full rank": lambda: PreconditionedKimiDeltaAttention(HIDDEN, HEADS, **SIZES, decay_rank=0, gate_rank=0),
}
names = pytest.mark.parametrize("name", LAYERS)
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def make(name: str):
    """Return a layer whose parameters are all random, in float64."""
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    with torch.no_grad():
        for x in layer.parameters():
            x.add_(0.3 * torch.randn_like(x))
    return layer


def tokens(t: int) -> torch.Tensor:
    return torch.randn(t, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def norm_1(x):
    return x * (x.square().sum() + 1e-6).rsqrt()


def written_out(m, x):
    """Return the output `t hidden`, S `hv k v`, c `h k` and the factors `t h k` of one sequence x `t hidden`."""
    kimi, width = isinstance(m, PreconditionedKimiDeltaAttention), 2 * HEADS * KEY + VALUE_HEADS * VALUE
    S = [torch.zeros(KEY, VALUE, dtype=x.dtype)] * VALUE_HEADS
    c = [torch.zeros(KEY, dtype=x.dtype)] * HEADS
    outputs, factors = [], []
    for y in x:
        mixed, *gates, rate, past = (m.in_proj.weight @ y).split((width, *m.splits[1:]))
        q, k, v = mixed.split((HEADS * KEY, HEADS * KEY, VALUE_HEADS * VALUE))
        if kimi:
            f, z, b = gates
            raw = f if m.decay_proj is None else m.decay_proj.weight @ f
            gate = (z if m.gate_proj is None else m.gate_proj.weight @ z).view(VALUE_HEADS, VALUE).sigmoid()
        else:
            z, b, raw = gates
            gate = F.silu(z.view(VALUE_HEADS, VALUE))
        raw = raw.view(VALUE_HEADS, -1)
        M = []
        for h in range(HEADS):
            unit = norm_1(k[h * KEY : (h + 1) * KEY])
            decay = torch.exp(-m.past_A_log[h].exp() * F.softplus(past[h] + m.past_dt_bias[h]))
            c[h] = decay * c[h] + rate[h].sigmoid() * unit**2
            s = torch.log(c[h] + 1e-6) - m.center[h]
            M.append(m.precondition ** -(s / (1 + s.abs())))
        heads = []
        for i in range(VALUE_HEADS):
            h = i // (VALUE_HEADS // HEADS)
            unit, query = (norm_1(y[h * KEY : (h + 1) * KEY]) for y in (k, q))
            speed = m.A_log[i].exp()
            a = -speed * F.softplus(raw[i] + m.dt_bias[i])
            if m.gate_lower_bound is not None:
                a = m.gate_lower_bound * torch.sigmoid(speed * (raw[i] + m.dt_bias[i]))
            kept = a.exp().unsqueeze(-1) * S[i]
            error = v[i * VALUE : (i + 1) * VALUE] - kept.T @ unit
            S[i] = kept + m.beta_scale * b[i].sigmoid() * torch.outer(M[h] * unit, error)
            o = S[i].T @ query / math.sqrt(KEY)
            heads.append(o / (o.square().mean() + m.norm.eps).sqrt() * m.norm.weight * gate[i])
        outputs.append(m.out_proj.weight @ torch.cat(heads))
        factors.append(torch.stack(M))
    return torch.stack(outputs), torch.stack(S), torch.stack(c), torch.stack(factors)


@names
@torch.no_grad()
def test_layers_compute_the_equation(name):
    layer, x = make(name), tokens(70)
    y, state = layer(x[None])
    wanted, S, c, factors = written_out(layer, x)
    torch.testing.assert_close(y[0], wanted, **CLOSE)
    torch.testing.assert_close(state["memory"][0], S, **CLOSE)
    torch.testing.assert_close(state["curvature"][0], c, **CLOSE)
    assert factors.min() > 1 / layer.precondition and factors.max() < layer.precondition
    assert factors.max() > 1.05 and factors.min() < 0.98  # some keys are lengthened, others shortened
    state, steps = None, []
    for token in x.split(1):
        z, state = layer(token[None], state)
        steps.append(z[0])
    torch.testing.assert_close(torch.cat(steps), y[0], **CLOSE)


@names
def test_gradients_are_those_of_the_recurrence(name):
    layer, x = make(name), tokens(11).requires_grad_()
    weight = tokens(11).cos()
    inputs = [x, *layer.parameters()]
    y, state = layer(x[None])
    found = torch.autograd.grad((y[0] * weight).sum() + state["memory"].sum() + state["curvature"].sum(), inputs)
    y, S, c, _ = written_out(layer, x)
    wanted = torch.autograd.grad((y * weight).sum() + S.sum() + c.sum(), inputs)
    for (key, _), got, expected in zip([("x", x), *layer.named_parameters()], found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9 * float(expected.abs().max()), msg=key)


@torch.no_grad()
def test_equal_curvature_leaves_the_plain_rule():
    """Where all factors are 1, I is Gated DeltaNet with the same weights."""
    torch.manual_seed(0)
    layer = PreconditionedGatedDeltaNet(HIDDEN, HEADS, **SIZES, precondition=1 + 1e-12).double()
    plain = kind_of("G").make(Sizes(HIDDEN), LinearConfig(HEADS, VALUE_HEADS, KEY, VALUE, 0)).double()
    own = dict(layer.state_dict())
    own["in_proj.weight"] = own["in_proj.weight"][: sum(plain.splits)]
    plain.load_state_dict({key: own[key] for key in plain.state_dict()})
    x = tokens(30)[None]
    torch.testing.assert_close(layer(x)[0], plain(x)[0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("letter", "IF")
def test_the_bound_must_be_above_1(letter):
    with pytest.raises(ValueError, match=r"precondition must be finite and above 1, the bound of m, got 1\.0; the au"):
        kind_of(letter).make(Sizes(8), replace(LinearConfig(2, 2, 4, 4), precondition=1.0))
    for bound in (1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"LinearConfig\.precondition must be finite and above 1, got {bound}"):
            replace(LinearConfig(2, 2, 4, 4), precondition=bound).check_sizes()


def test_decays_stay_in_float32_in_a_model_of_bfloat16(tmp_path):
    """The rounded past_A_log would be exponentiated, as A_log would."""
    config = HybridConfig(9, 8, 2, "IF", linear=LinearConfig(2, 2, 4, 4), feed=FeedConfig(8))
    HybridLM(config).save_pretrained(tmp_path)
    model = HybridLM.from_pretrained(tmp_path, dtype="bfloat16", progress=False)
    kept = {name.rpartition(".")[2] for name, x in model.state_dict().items() if x.dtype == torch.float32}
    assert kept == {"A_log", "dt_bias", "past_A_log", "past_dt_bias"}


@pytest.mark.cover
@pytest.mark.parametrize("name", slow_but(("I", "F"), ("I",)))
@torch.no_grad()
def test_a_compiled_layer_continues_a_state(name):
    """Its state_spec is read in the graph."""
    layer, x = make(name), tokens(9)[None]
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    _, state = compiled(x[:, :6])
    y, after = compiled(x[:, 6:], state)
    torch.testing.assert_close(y, layer(x)[0][:, 6:], **CLOSE)
    torch.testing.assert_close(after["curvature"], layer(x)[1]["curvature"], **CLOSE)

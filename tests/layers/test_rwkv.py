"""RWKV-7's parts: the token shift, the mixer against its equation, what its layers hand on, and its first weights."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import lineate
from lineate.layers import RWKV7, Carried, ChannelMix, LayerNorm, kind_of
from lineate.layers.configs import RwkvConfig
from lineate.layers.costs.measuring import kept_bytes, operations_of
from lineate.layers.registry import MixerKind, Sizes, temporary_rows
from lineate.layers.rwkv.shift import previous_tokens
from lineate.quantised import shrink
from lineate.quantised.which import quantised_parameters

HIDDEN, HEADS, KEY, VALUE = 12, 2, 5, 3
RANKS = {"decay_rank": 4, "rate_rank": 6, "gate_rank": 7}


def make(value_rank: int, seed: int = 0) -> RWKV7:
    """Return a mixer whose parameters are all random, in float64."""
    torch.manual_seed(seed)
    mixer = RWKV7(HIDDEN, HEADS, KEY, value_dim=VALUE, value_rank=value_rank, **RANKS).double()
    with torch.no_grad():
        for x in mixer.parameters():
            x.add_(0.4 * torch.randn_like(x))
    return mixer


def tokens(b: int, t: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(b, t, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def written_out(
    m: RWKV7, x: torch.Tensor, first: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, the values and the memory of one sequence x `t hidden`, by the equation of the file."""
    S, before, outputs, values = torch.zeros(HEADS, KEY, VALUE, dtype=x.dtype), torch.zeros_like(x[0]), [], []

    def low(part, y, act):
        return act(y @ part.down.weight.T) @ part.up.weight.T + (0 if part.offset is None else part.offset)

    for t, y in enumerate(x):
        at = {n: y + (before - y) * getattr(m, f"shift_{n}") for n in ("q", "decay", "k", "v", "rate", "gate")}
        before = y
        q, k, v = m.q_proj.weight @ at["q"], m.k_proj.weight @ at["k"], m.v_proj.weight @ at["v"]
        w = torch.exp(-torch.exp(torch.tensor(-0.5).double()) * low(m.decay, at["decay"], torch.tanh).sigmoid())
        a, g = low(m.rate, at["rate"], lambda z: z).sigmoid(), low(m.gate, at["gate"], torch.sigmoid)
        if first is not None:
            v = v + (first[t] - v) * low(m.value_mix, at["v"], lambda z: z).sigmoid()
        values.append(v)
        e = F.normalize((k * m.erase_scale).view(HEADS, KEY), dim=-1)
        k = (k * (1 + (a - 1) * m.rate_scale)).view(HEADS, KEY)
        q, a, w, v = q.view(HEADS, KEY), a.view(HEADS, KEY), w.view(HEADS, KEY), v.view(HEADS, VALUE)
        heads = []
        for h in range(HEADS):
            S[h] = torch.diag(w[h]) @ S[h] - torch.outer(a[h] * e[h], e[h] @ S[h]) + torch.outer(k[h], v[h])
            o = S[h].T @ q[h]
            o = (o - o.mean()) / (o.var(correction=0) + m.norm.eps).sqrt()
            o = o * m.norm.weight.view(HEADS, VALUE)[h] + m.norm.bias.view(HEADS, VALUE)[h]
            heads.append(o + (q[h] @ (m.bonus.view(HEADS, KEY)[h] * k[h])) * v[h])
        outputs.append(m.out_proj.weight @ (torch.cat(heads) * g))
    return torch.stack(outputs), torch.stack(values), S


@torch.no_grad()
@pytest.mark.parametrize("t", [1, 7, 70])
def test_layers_compute_the_equation(t):
    first, later, x = make(0), make(8, seed=3), tokens(1, t)
    carried = Carried()
    y, state = first(x, None, None, carried)
    expected, values, memory = written_out(first, x[0], None)
    torch.testing.assert_close(y[0], expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(carried.first_value[0], values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state["memory"][0], memory, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state["shift"], x[:, -1])
    y, state = later(y, None, None, carried)
    expected, _, memory = written_out(later, expected, values)
    torch.testing.assert_close(y[0], expected, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(state["memory"][0], memory, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(carried.first_value[0], values, rtol=1e-12, atol=1e-12)  # later layers do not write it


@torch.no_grad()
def test_the_rule_is_diagonal_plus_low_rank():
    mixer, x = make(0), tokens(2, 9)
    inputs = mixer.enter(x).inputs
    given = inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.probe, inputs.direction
    output, memory = lineate.diagonal_plus_low_rank(*given, scale=1.0)
    y, state = mixer(x)
    assert torch.equal(memory, state["memory"]) and torch.equal(mixer.leave(output, mixer.enter(x)), y)
    assert inputs.log_decay.max() < 0 and inputs.log_decay.min() > -0.6066
    unit = inputs.probe * inputs.log_decay.exp()
    torch.testing.assert_close(unit.norm(dim=-1), torch.ones(2, 9, HEADS, dtype=torch.float64))


@torch.no_grad()
def test_the_past_that_is_erased_is_replaced():
    """With a rate of 1, no decay and k = e, what a key has stored is read back as the last value written to it."""
    mixer = make(0)
    for part, offset in ((mixer.rate, 40.0), (mixer.decay, -60.0)):
        part.up.weight.zero_()
        part.offset.fill_(offset)
    mixer.rate_scale.zero_()
    mixer.erase_scale.fill_(1.0)
    inputs = mixer.enter(tokens(1, 6)).inputs
    k = inputs.probe.clone()  # the same unit key everywhere, so that each token overwrites the one before
    k[:] = k[:, :1]
    _, state = lineate.diagonal_plus_low_rank(inputs.q, k, inputs.v, inputs.log_decay, k, k, scale=1.0)
    torch.testing.assert_close((k[0, 0][..., None] * state[0]).sum(-2), inputs.v[0, -1])


def test_a_layer_that_needs_the_first_values_says_so():
    later, x = make(8), tokens(2, 3)
    for carried in (None, Carried()):
        with pytest.raises(ValueError, match=r"carried must have the values of the first layer, of shape \(2, 3, 6\)"):
            later(x, None, None, carried)
    with pytest.raises(ValueError, match=r"got values of shape \(2, 4, 6\); pass one Carried\(\) to the first layer"):
        later(x, None, None, Carried(torch.zeros(2, 4, 6)))


def test_shifts_stay_within_packed_sequences():
    x, before = tokens(1, 6), tokens(4, 1, seed=2)[:, 0]
    bounds = torch.tensor([0, 2, 2, 3, 6])
    previous, last = previous_tokens(x, before, bounds)
    expected = torch.stack((before[0], x[0, 0], before[2], before[3], x[0, 3], x[0, 4]))
    assert torch.equal(previous[0], expected)
    assert torch.equal(last, torch.stack((x[0, 1], before[1], x[0, 2], x[0, 5])))
    with pytest.raises(ValueError, match=r"token shift must have the dtype of the new tokens, torch\.float64, got"):
        previous_tokens(x, before.float(), bounds)


@torch.no_grad()
def test_the_channel_mix_is_squared_relu_of_shifted_tokens():
    torch.manual_seed(0)
    feed, x = ChannelMix(HIDDEN, 20).double(), tokens(2, 5)
    feed.shift.uniform_(-1, 2)
    y, state = feed(x)
    before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
    inner = (x + (before - x) * feed.shift) @ feed.up_proj.weight.T
    torch.testing.assert_close(y, inner.clamp(min=0) ** 2 @ feed.down_proj.weight.T)
    again, _ = feed(x[:, 2:], feed(x[:, :2])[1])
    torch.testing.assert_close(again, y[:, 2:])
    assert torch.equal(state["feed_shift"], x[:, -1]) and feed.state_spec[0].shape == (HIDDEN,)


@torch.no_grad()
def test_layer_norm_is_torchs():
    torch.manual_seed(0)
    norm, x = LayerNorm(HIDDEN, 1e-3), tokens(2, 5)
    norm.weight.uniform_(0.5, 1.5)
    norm.bias.uniform_(-1, 1)
    expected = F.layer_norm(x.float(), (HIDDEN,), norm.weight, norm.bias, 1e-3)
    torch.testing.assert_close(norm(x.float()), expected)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_first_weights_are_the_authors_for_a_layer_in_the_middle():
    mixer = RWKV7(64, 2, 32)
    n = torch.arange(64) / 63
    torch.testing.assert_close(mixer.erase_scale, 0.71 - 0.1 * (n - 0.5))
    torch.testing.assert_close(mixer.shift_k, 1 - (torch.arange(64) / 64) ** 0.35)
    zigzag = (torch.arange(64) % 32 - 15.5) / 15.5
    torch.testing.assert_close(mixer.decay.offset, -6 + 6 * n**1.8 + 0.5 + 2.5 * zigzag * zigzag.abs())
    torch.testing.assert_close(mixer.rate.offset, -0.19 + 0.3 * zigzag * zigzag.abs() + 0.4 * (n - 0.5))
    torch.testing.assert_close(mixer.value_mix.offset, 0.73 - 0.4 * (n - 0.5))


def test_costs_are_measured_for_later_layers_too():
    kind, model, config = kind_of("V"), Sizes(HIDDEN), RwkvConfig(HEADS, KEY, VALUE, 4, 6, 8, 7)
    first = kind.first(config)
    counts = operations_of(kind, model)
    widths = {"keys": HEADS * KEY, "values": HEADS * VALUE}
    each = HIDDEN * (2 * widths["keys"] + 2 * widths["values"] + 4 + 6 + 7)
    each += (4 + 6) * widths["keys"] + 7 * widths["values"]
    assert counts.projections(model, first) == 2 * each
    assert counts.projections(model, config) == 2 * (each + 8 * (HIDDEN + widths["values"]))
    assert counts.mixing(first, 100, "executed") == counts.mixing(config, 100, "executed") > 0
    assert kept_bytes(kind, model, config, False) > kept_bytes(kind, model, first, False) > 0


def test_large_weights_are_quantised_and_low_ranks_are_not():
    torch.manual_seed(0)
    config = lineate.models.preset("tiny", pattern="V")
    model = lineate.models.HybridLM(config).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = model(ids).logits
        names = {name.split(".", 2)[2] for name in quantised_parameters(shrink(model, "int8")) if "mixer" in name}
        assert names == {f"mixer.{x}_proj.weight" for x in ("q", "k", "v", "out")}
        assert (model(ids).logits - expected).norm() < 0.03 * expected.norm()


def test_how_steps_are_read_by_hand_must_be_declared():
    with pytest.raises(TypeError, match=r"by_hand must be ByHand\(inputs, note\) or None, got 3; None: it is not"):
        lineate.layers.register(MixerKind("Z", "z", "Z", RwkvConfig, lambda m, c: None, section="rwkv", by_hand=3))


def test_the_configuration_of_a_first_layer_must_be_a_function():
    with pytest.raises(TypeError, match=r"first must be a function of \(config\) or None, got 3"):
        lineate.layers.register(MixerKind("Z", "z", "Z", RwkvConfig, lambda m, c: None, section="rwkv", first=3))


def test_the_trace_of_a_mixer_with_a_first_layer_takes_what_is_handed_on():
    kind = MixerKind("Z", "z", "Z", RwkvConfig, lambda m, c: None, section="rwkv", first=lambda c: c)
    with pytest.raises(TypeError, match=r"trace must be a function of \(mixer, x, carried\), got <function"):
        lineate.layers.register(replace(kind, trace=lambda mixer, x: None))
    with temporary_rows():
        assert lineate.layers.register(replace(kind, trace=lambda mixer, x, carried: None)).letter == "Z"
    with pytest.raises(TypeError, match=r"trace must be a function of \(mixer, x\), got <function"):
        lineate.layers.register(replace(kind, first=None, trace=lambda mixer, x, carried: None))

"""The layers: they agree with their equations written out, and every mixer keeps its promises about its state."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.forms import sequences
from lineate.layers import (
    RWKV7,
    Comba,
    DeltaNet,
    GatedAttention,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedLinearAttention,
    GatedRMSNorm,
    KimiDeltaAttention,
    LatentAttention,
    LeastSquares,
    LinearAttention,
    Mamba2,
    Memory,
    MixtureOfExperts,
    PreconditionedGatedDeltaNet,
    PreconditionedKimiDeltaAttention,
    RMSNorm,
    ShortConvolution,
    SquaredReLU,
    SwiGLU,
    TokenCache,
    TTTLinear,
)

HIDDEN = 24
SIZES = {"value_heads": 4, "key_dim": 8, "value_dim": 6}
MIXERS = {
    "linear": lambda: LinearAttention(HIDDEN, 2, **SIZES),
    "gated linear": lambda: GatedLinearAttention(HIDDEN, 2, **SIZES, decay_rank=5),
    "delta": lambda: DeltaNet(HIDDEN, 2, **SIZES, beta_scale=2.0),
    "gated delta": lambda: GatedDeltaNet(HIDDEN, 2, **SIZES),
    "gated delta, no convolution": lambda: GatedDeltaNet(HIDDEN, 2, **SIZES, conv_size=0),
    "kimi": lambda: KimiDeltaAttention(HIDDEN, 2, **SIZES, decay_rank=5, gate_rank=7),
    "mamba": lambda: Mamba2(HIDDEN, 6, head_dim=5, state_dim=7, groups=2, norm_groups=3, bias=True),
    "mamba, norm first": lambda: Mamba2(
        HIDDEN, 4, head_dim=6, state_dim=8, conv_bias=False, gate_first=False, step_least=0.05, step_most=0.3
    ),
    "gdn2": lambda: GatedDeltaNet2(HIDDEN, 2, **SIZES, decay_rank=5, gate_rank=7, beta_scale=2.0),
    "product": lambda: GatedDeltaProduct(HIDDEN, 2, **SIZES, writes=3, beta_scale=2.0),
    "product, a norm a group": lambda: GatedDeltaProduct(HIDDEN, 2, **SIZES, writes=2, group_norm=True),
    "product, no decay": lambda: GatedDeltaProduct(HIDDEN, 2, **SIZES, writes=2, forgets=False),
    "delta, exact rate": lambda: DeltaNet(HIDDEN, 2, **SIZES, rate="exact"),
    "gated delta, kaczmarz rate": lambda: GatedDeltaNet(HIDDEN, 2, **SIZES, rate="kaczmarz", beta_scale=2.0),
    "kimi, exact rate": lambda: KimiDeltaAttention(HIDDEN, 2, **SIZES, decay_rank=5, gate_rank=7, rate="exact"),
    "product, kaczmarz rate": lambda: GatedDeltaProduct(HIDDEN, 2, **SIZES, writes=2, rate="kaczmarz"),
    "comba": lambda: Comba(HIDDEN, 2, **SIZES),
    "comba, scaled probe": lambda: Comba(HIDDEN, 2, **SIZES, probe="scaled", gate_activation="none"),
    "preconditioned": lambda: PreconditionedGatedDeltaNet(HIDDEN, 2, **SIZES),
    "preconditioned kimi": lambda: PreconditionedKimiDeltaAttention(HIDDEN, 2, **SIZES, decay_rank=5, gate_rank=7),
    "rwkv": lambda: RWKV7(HIDDEN, 3, 8, value_dim=5, decay_rank=5, rate_rank=7, value_rank=0, gate_rank=4),
    "gated delta, bounded": lambda: GatedDeltaNet(HIDDEN, 2, **SIZES, gate_lower_bound=-5.0),
    "kimi, full rank": lambda: KimiDeltaAttention(HIDDEN, 2, **SIZES, decay_rank=0, gate_rank=0),
    "kimi, a bias in the gate": lambda: KimiDeltaAttention(HIDDEN, 2, **SIZES, gate_bias=True),
    "linear, no gate": lambda: LinearAttention(HIDDEN, 2, **SIZES, gate_activation="none"),
    "delta, no gate": lambda: DeltaNet(HIDDEN, 2, **SIZES, gate_activation="none"),
    "gated delta, no gate": lambda: GatedDeltaNet(HIDDEN, 2, **SIZES, gate_activation="none"),
    "kimi, bounded": lambda: KimiDeltaAttention(HIDDEN, 2, **SIZES, gate_lower_bound=-0.5),
    "attention": lambda: GatedAttention(HIDDEN, 4, kv_heads=2, head_dim=10, rotary_dim=6),
    "attention, full norm": lambda: GatedAttention(
        HIDDEN, 4, kv_heads=2, head_dim=10, rotary_dim=10, gated=False, qk_norm="full", zero_centred_norm=True
    ),
    "attention, plain": lambda: GatedAttention(HIDDEN, 4, qk_norm=None, bias=True),
    "latent": lambda: LatentAttention(HIDDEN, 3, rank=9, nope_dim=6, rope_dim=4, value_dim=5),
    "latent, positions": lambda: LatentAttention(
        HIDDEN, 3, rank=9, nope_dim=6, rope_dim=4, value_dim=5, rope_theta=100.0
    ),
    "latent, a gate a head": lambda: LatentAttention(
        HIDDEN, 3, rank=9, nope_dim=6, rope_dim=4, value_dim=5, rope_theta=100.0, gate="head"
    ),
    "latent, a gate a channel": lambda: LatentAttention(
        HIDDEN, 3, rank=9, nope_dim=6, rope_dim=4, value_dim=5, gate="channel"
    ),
}
mixers = pytest.mark.parametrize("name", MIXERS)
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def make(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a layer with random parameters, including those of norms."""
    torch.manual_seed(0)
    layer = MIXERS[name]()
    for key, x in layer.named_parameters():
        if "norm" in key:
            nn.init.uniform_(x, 0.5, 1.5)
    return layer.to(dtype)


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def same_state(a: Memory | TokenCache, b: Memory | TokenCache) -> bool:
    names = a.names if isinstance(a, TokenCache) else tuple(a.tensors)
    return all(torch.allclose(a[name], b[name], **CLOSE) for name in names)


@mixers
def test_split_anywhere_equals_whole(name):
    layer, x = make(name), tokens(2, 90)
    with torch.no_grad():
        whole, final = layer(x)
        for cuts in ([1], [89], [64], [3, 4, 5, 70]):
            state, parts = None, []
            for start, end in zip([0, *cuts], [*cuts, 90], strict=True):
                y, state = layer(x[:, start:end], state)
                parts.append(y)
            torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)
            assert same_state(state, final)


@mixers
def test_packed_texts_equal_separate_ones(name):
    layer, x = make(name), tokens(1, 90)
    lengths = (3, 0, 1, 66, 20)
    bounds = torch.tensor((0, *lengths)).cumsum(0)
    with torch.no_grad():
        packed, state = layer(x, cu_seqlens=bounds)
        more = tokens(len(lengths), 2)
        continued, _ = layer(more, state)
        again, _ = layer(more.flatten(0, 1)[None], state, cu_seqlens=torch.arange(0, 11, 2))
        torch.testing.assert_close(again.view_as(continued), continued, **CLOSE)
        for row, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
            alone = torch.cat((x[:, start:end], more[row : row + 1]), 1)
            expected, _ = layer(alone)
            torch.testing.assert_close(packed[:, start:end], expected[:, :-2], **CLOSE)
            torch.testing.assert_close(continued[row : row + 1], expected[:, -2:], **CLOSE)


@mixers
def test_packed_gradients(name):
    """They are the sum of those of separate runs, and none crosses a border."""
    layer, x = make(name), tokens(1, 20).requires_grad_()
    packed, _ = layer(x, cu_seqlens=torch.tensor([0, 7, 20]))
    weight = tokens(1, 20).cos()
    grads = torch.autograd.grad((packed * weight).sum(), [x, *layer.parameters()])
    first, second = layer(x[:, :7])[0], layer(x[:, 7:])[0]
    expected = torch.autograd.grad((torch.cat((first, second), 1) * weight).sum(), [x, *layer.parameters()])
    for got, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-9)
    (crossed,) = torch.autograd.grad(layer(x, cu_seqlens=torch.tensor([0, 7, 20]))[0][:, 7:].sum(), x)
    assert crossed[:, :7].eq(0).all()


@mixers
def test_the_future_never_changes_the_past(name):
    layer, x = make(name), tokens(1, 70)
    other = x.clone()
    other[:, 40:] = tokens(1, 30).flip(1) * 3
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[0][:, :40], layer(other)[0][:, :40], rtol=0, atol=1e-14)


@mixers
def test_state_spec_is_what_is_there(name):
    layer = make(name, torch.float32)
    with torch.no_grad():
        _, state = layer(tokens(3, 11, dtype=torch.float32))
    names = state.names if isinstance(state, TokenCache) else tuple(state.tensors)
    assert names == tuple(spec.name for spec in layer.state_spec)
    for spec in layer.state_spec:
        assert state[spec.name].dtype == spec.dtype
        assert state[spec.name].shape == (3, *(11 if size == "t" else size for size in spec.shape))
    assert state.nbytes == 3 * sum(spec.nbytes(11) for spec in layer.state_spec)


@mixers
def test_states_are_values(name):
    """A sequence is continued in two ways, and then again in the first."""
    layer, x = make(name), tokens(2, 30)
    with torch.no_grad():
        _, state = layer(x[:, :10])
        first, after = layer(x[:, 10:11], state)
        second, _ = layer(x[:, 20:21], state)
        third, _ = layer(x[:, 11:12], after)
        assert torch.equal(layer(x[:, 10:11], state)[0], first)
        assert not torch.equal(first, second)
        torch.testing.assert_close(third, layer(x[:, :12])[0][:, 11:], **CLOSE)


@mixers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_states_keep_no_more_than_they_say(name, dtype):
    layer, x = make(name, dtype), tokens(2, 50, dtype=dtype)
    with torch.no_grad():
        _, state = layer(x)
        assert sum(state[n].untyped_storage().nbytes() for n in state.names) == state.nbytes
        _, packed = layer(x.view(1, 100, -1), cu_seqlens=torch.tensor([0, 1, 2, 3, 4, 100]))
        if isinstance(packed, TokenCache):  # not 5 rows of 96
            assert packed.nbytes == 100 * sum(spec.nbytes(1) for spec in layer.state_spec)


@pytest.mark.parametrize("name", ["attention", "latent"])
def test_caches_grow_in_place_and_stay_values(name):
    """This holds in threads, across inference mode, with gradients of q alone, and in rows of different lengths."""
    layer, x = make(name), tokens(2, 400)
    with torch.inference_mode():
        _, state = layer(x[:, :10])
        _, state = layer(x[:, 10:11], state)
    with torch.no_grad():
        later, _ = layer(x[:, 11:12], state)
        torch.testing.assert_close(later, layer(x[:, :12])[0][:, 11:], **CLOSE)
        _, start = layer(x[:, :100])
        _, start = layer(x[:, 100:101], start)
        with ThreadPoolExecutor(4) as pool:
            parts = [x[:, 101 + 10 * i : 111 + 10 * i] for i in range(8)]
            got = list(pool.map(lambda part: layer(part, start)[0], parts))
        for part, y in zip(parts, got, strict=True):
            torch.testing.assert_close(y, layer(torch.cat((x[:, :101], part), 1))[0][:, 101:], **CLOSE)
        _, ragged = layer(x[:1, :90], cu_seqlens=torch.tensor([0, 20, 90]))
        outs = []
        for t in range(100):
            y, ragged = layer(x[:, 200 + t : 201 + t], ragged)
            outs.append(y)
        for row, part in enumerate((x[:1, :20], x[:1, 20:90])):
            whole, _ = layer(torch.cat((part, x[row : row + 1, 200:300]), 1))
            torch.testing.assert_close(torch.cat(outs, 1)[row : row + 1], whole[:, -100:], **CLOSE)
    for key, parameter in layer.named_parameters():
        parameter.requires_grad_(key in ("q_norm.weight", "up_proj.weight"))
    y, after = layer(x[:, 101:103], start)
    with torch.no_grad():
        layer(x[:, 103:104], after)
    y.sum().backward()


@mixers
def test_rows_can_be_selected(name):
    layer, x = make(name), tokens(3, 9)
    with torch.no_grad():
        _, state = layer(x)
        chosen = torch.tensor([2, 0, 2])
        got, _ = layer(x[:, :1], state.select(chosen))
        for i, row in enumerate(chosen.tolist()):
            expected, _ = layer(torch.cat((x[row : row + 1], x[i : i + 1, :1]), 1))
            torch.testing.assert_close(got[i : i + 1], expected[:, -1:], **CLOSE)
        assert state.to("cpu").detach().nbytes == state.nbytes


@mixers
def test_gradients_reach_everything(name):
    layer = make(name)
    x = tokens(2, 7).requires_grad_()
    _, state = layer(x)
    y, state = layer(tokens(2, 3), state)
    y.square().sum().backward()
    assert x.grad is not None and x.grad.ne(0).any()
    for key, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.ne(0).any(), key


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@mixers
def test_lower_precision(name):
    layer, x = make(name), tokens(1, 40)
    with torch.no_grad():
        exact, _ = layer(x)
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
            got, state = make(name, dtype)(x.to(dtype))
            assert got.dtype == dtype
            assert (got.double() - exact).norm() <= bound * exact.norm()
            if isinstance(state, Memory):
                assert state["memory"].dtype == torch.float32


# Against the equations


def test_short_convolution_is_a_convolution():
    torch.manual_seed(0)
    layer, x = ShortConvolution(10, 4).double(), torch.randn(2, 9, 10, dtype=torch.float64)
    y, state = layer(x)
    expected = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), layer.weight[:, None], groups=10)
    torch.testing.assert_close(y, F.silu(expected).transpose(1, 2))
    assert torch.equal(state, x[:, -3:].transpose(1, 2))
    _, state = layer(x[:, :1])
    assert torch.equal(state, F.pad(x[:, :1], (0, 0, 2, 0)).transpose(1, 2))


@pytest.mark.parametrize(
    "name",
    [
        "gated delta, no convolution", "gated delta, bounded", "kimi", "kimi, bounded", "gated delta, kaczmarz rate",
        "kimi, exact rate",
    ],
)  # fmt: skip
def test_delta_mixers_are_their_equation(name):
    """The equation is written in plain steps: projections, convolution, gates, the rule token by token, gated norm."""
    layer, x = make(name), tokens(1, 12)
    mixed, *gates = layer.in_proj(x).split(layer.splits, -1)
    if layer.conv is not None:
        mixed, _ = layer.conv(mixed)
    q, k, v = mixed[0].split((16, 16, 24), -1)
    q, k = (y.view(12, 2, 8) for y in (q, k))
    q, k = (y.repeat_interleave(2, 1) for y in (q, k))  # t hv k
    square = k.square().sum(-1)
    q = q * torch.rsqrt(q.square().sum(-1, True) + 1e-6)
    k = k if "rate" in name else k * torch.rsqrt(square[..., None] + 1e-6)
    v = v.view(12, 4, 6)
    if name.startswith("kimi"):
        f, z, b = gates
        z, a = layer.gate_proj(z), layer.decay_proj(f).view(12, 4, 8)
        raw, speed = a + layer.dt_bias, layer.A_log.exp()[:, None]  # t hv k
    else:
        z, b, a = gates
        raw, speed = (a[0] + layer.dt_bias)[..., None].expand(-1, -1, 8), layer.A_log.exp()[:, None]
    decay = torch.exp(-speed * F.softplus(raw))
    if "bounded" in name:
        assert layer.gate_lower_bound in (-5.0, -0.5)
        decay = torch.exp(layer.gate_lower_bound * torch.sigmoid(speed * raw))
    beta, S, outputs = layer.beta_scale * b[0].sigmoid(), torch.zeros(4, 8, 6, dtype=torch.float64), []
    if "kaczmarz" in name:
        beta = beta / (square + 1e-6)
    elif "exact" in name:
        beta = (1 - torch.exp(-beta * square)) / square
    for t in range(12):
        S = decay[t][..., None] * S
        error = v[t] - torch.einsum("hkv,hk->hv", S, k[t])
        S = S + beta[t][:, None, None] * torch.einsum("hk,hv->hkv", k[t], error)
        outputs.append(torch.einsum("hkv,hk->hv", S, q[t]) * 8**-0.5)
    o = torch.stack(outputs)
    z = z[0].view(12, 4, 6)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + layer.norm.eps) * layer.norm.weight
    o = o * (z.sigmoid() if name.startswith("kimi") else F.silu(z))
    torch.testing.assert_close(layer(x)[0][0], layer.out_proj(o.flatten(1)), **CLOSE)


def test_lengths_of_texts_are_looked_for_once_but_a_change_is_seen(monkeypatch):
    looked = []
    monkeypatch.setattr(Tensor, "diff", lambda x, diff=Tensor.diff: looked.append(x) or diff(x))
    bounds = torch.tensor([0, 3, 10])
    assert [sequences.sequence_lengths(bounds) for _ in range(3)] == [(3, 7)] * 3 and len(looked) == 3
    monkeypatch.setattr(sequences, "may_be_kept", lambda x: True)  # as on a GPU
    assert [sequences.sequence_lengths(bounds) for _ in range(3)] == [(3, 7)] * 3 and len(looked) == 4
    bounds[1] = 8
    assert sequences.sequence_lengths(bounds) == (8, 2)
    looked.clear()
    copied = sequences.copied_bounds(torch.tensor([0, 4, 6]), "meta")  # whose numbers cannot be read
    assert len(looked) == 1 and looked[0].device.type == "cpu"
    assert sequences.sequence_lengths(copied) == (4, 2) and len(looked) == 1


def test_gated_attention_is_its_equation():
    layer, x = make("attention"), tokens(1, 7)
    q, gate, k, v = layer.in_proj(x)[0].split((40, 40, 20, 20), -1)
    q, k, v = q.view(7, 4, 10), k.view(7, 2, 10), v.view(7, 2, 10)

    def turned(y: Tensor, norm: RMSNorm) -> Tensor:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * norm.weight
        out = y.clone()
        for t in range(7):
            for i in range(3):
                angle = torch.tensor(t / 10000 ** (2 * i / 6), dtype=torch.float64)
                a, b = y[t, :, i], y[t, :, i + 3]
                out[t, :, i], out[t, :, i + 3] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        return out

    q, k = turned(q, layer.q_norm), turned(k, layer.k_norm)
    o = torch.zeros(7, 4, 10, dtype=torch.float64)
    for t in range(7):
        for head in range(4):
            weights = (k[: t + 1, head // 2] @ q[t, head] * 10**-0.5).softmax(0)
            o[t, head] = weights @ v[: t + 1, head // 2]
    torch.testing.assert_close(layer(x)[0][0], layer.out_proj(o.flatten(1) * gate.sigmoid()), **CLOSE)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_the_gate_of_latent_attention_multiplies_its_output(gate):
    layer, x = make(f"latent, a gate a {gate}"), tokens(2, 9)
    options = {"rope_theta": 100.0 if gate == "head" else None}
    plain = LatentAttention(HIDDEN, 3, rank=9, nope_dim=6, rope_dim=4, value_dim=5, **options).double()
    rows = plain.in_proj.weight.shape[0]
    weights = layer.state_dict() | {"in_proj.weight": layer.in_proj.weight[:rows]}
    plain.load_state_dict(weights)
    caught = []
    for each in (layer, plain):
        each.out_proj.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
        _, state = each(x[:, :4])
        each(x[:, 4:5], state)
        each(x)
    opened = F.linear(x, layer.in_proj.weight[rows:]).sigmoid()
    if gate == "head":
        opened = opened.repeat_interleave(5, -1)
    for gated, output, seen in zip(caught[:3], caught[3:], (slice(4), slice(4, 5), slice(9)), strict=True):
        torch.testing.assert_close(gated, output * opened[:, seen], **CLOSE)


@pytest.mark.parametrize("name", ["latent", "latent, positions"])
def test_latent_attention_expanded_equals_absorbed(name):
    """A cache is read as it is by one token, or by few after many; by more it is expanded into keys and values."""
    layer, x = make(name), tokens(2, 9)
    whole, state = layer(x)
    for rest in ((1,) * 5, (2, 1, 2), (5,)):  # the last one expands
        outputs, now = [], layer(x[:, :4])[1]
        for part in x[:, 4:].split(rest, 1):
            output, now = layer(part, now)
            outputs.append(output)
        torch.testing.assert_close(torch.cat(outputs, 1), whole[:, 4:], **CLOSE)
    many, after = tokens(2, 12), layer(x)[1]
    torch.testing.assert_close(layer(many[:, :2], after)[0], layer(many, after)[0][:, :2], **CLOSE)  # 4 * 2 < 11
    q, latent, shared, _ = layer.in_proj(x).split(layer.splits, -1)
    q = q.unflatten(-1, (3, -1))
    if name == "latent":  # else q is rotated first
        keys, values = layer.up_proj(layer.latent_norm(latent)).unflatten(-1, (3, -1)).split((6, 5), -1)
        keys = torch.cat((keys, shared[:, :, None].expand(-1, -1, 3, -1)), -1)
        scores = torch.einsum("bthd,bshd->bhts", q, keys) * 10**-0.5
        weights = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1)
        expected = layer.out_proj(torch.einsum("bhts,bshd->bthd", weights, values).flatten(2))
        torch.testing.assert_close(layer(x)[0], expected, **CLOSE)
    assert state["latent"].shape == (2, 9, 1, 13)


def test_norms():
    x, gate = torch.randn(5, 8, dtype=torch.float64) * 3, torch.randn(5, 8, dtype=torch.float64)
    unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    plain, centred = RMSNorm(8).double(), RMSNorm(8, zero_centred=True).double()
    nn.init.normal_(plain.weight), nn.init.normal_(centred.weight)
    torch.testing.assert_close(plain(x), unit * plain.weight, **CLOSE)
    torch.testing.assert_close(centred(x), unit * (1 + centred.weight), **CLOSE)
    for activation, function in (("silu", F.silu), ("sigmoid", torch.sigmoid)):
        gated = GatedRMSNorm(8, activation=activation).double()
        nn.init.normal_(gated.weight)
        torch.testing.assert_close(gated(x, gate), unit * gated.weight * function(gate), **CLOSE)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
@pytest.mark.parametrize("n", [1, 40])
def test_mixture_of_experts_is_its_sum(scores, kind, n):
    torch.manual_seed(0)
    groups = {"groups": 4, "active_groups": 2, "scale": 2.5} if scores == "sigmoid" else {}
    options = {"shared_size": 6, "shared_gate": True, "scores": scores, "kind": kind, **groups}
    layer = MixtureOfExperts(12, 8, 3, 10, **options).double()
    if layer.router_bias is not None:
        layer.router_bias.normal_()
    x = torch.randn(1, n, 12, dtype=torch.float64)
    logits = layer.router(x[0])
    expected = layer.shared_gate(x[0]).sigmoid() * layer.shared(x[0])
    for t in range(n):
        weights = logits[t].softmax(0) if scores == "softmax" else logits[t].sigmoid()
        wanted = weights if layer.router_bias is None else weights + layer.router_bias
        if groups:
            sums = wanted.view(4, 2).sum(1)
            wanted = wanted.masked_fill(~torch.isin(torch.arange(8) // 2, sums.topk(2)[1]), -torch.inf)
        best = wanted.topk(3)[1]
        total = weights[best].sum()
        for e in best.tolist():
            made = layer.experts_gate_up[e] @ x[0, t]
            if kind == "swiglu":
                gate, up = made.chunk(2)
                made = F.silu(gate) * up
            else:
                made = made.relu() ** 2
            expected[t] += layer.scale * weights[e] / total * (layer.experts_down[e] @ made)
    torch.testing.assert_close(layer(x)[0], expected, **CLOSE)
    ways = (layer.run_gathered, layer.run_all, lambda *given: layer.run_sorted(*given, layer.one_by_one))
    weights, chosen = layer.route(x[0])
    first, *others = (run(x[0], chosen) for run in ways)
    assert all(torch.allclose(first, other, **CLOSE) for other in others)


def test_experts_in_one_product_equal_one_by_one():
    """The path that a GPU takes in bfloat16 is tested on a CPU in float32."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(16, 8, 3, 24)
    x = torch.randn(1, 50, 16)
    expected = layer(x)
    wanted = torch.autograd.grad(expected.square().sum(), list(layer.parameters()))
    layer.one_by_one = layer.grouped
    got = layer(x)
    torch.testing.assert_close(got, expected)
    for a, b in zip(torch.autograd.grad(got.square().sum(), list(layer.parameters())), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_swiglu():
    layer, x = SwiGLU(6, 9).double(), torch.randn(3, 6, dtype=torch.float64)
    gate, up = layer.gate_up_proj(x).chunk(2, -1)
    torch.testing.assert_close(layer(x), layer.down_proj(gate * gate.sigmoid() * up))


def test_squared_relu():
    layer, x = SquaredReLU(6, 9).double(), torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer.down_proj(layer.up_proj(x).clamp(min=0) ** 2))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GatedDeltaNet(24, 3, value_heads=4), "value_heads must be a multiple of heads = 3, got 4"),
        (lambda: GatedAttention(24, 3, kv_heads=2), "heads must be a multiple of kv_heads = 2, got 3"),
        (lambda: GatedAttention(24, 3, qk_norm="layer"), "qk_norm must be one of"),
        (lambda: KimiDeltaAttention(24, 3, gate_activation="relu"), "gate_activation must be one of"),
        (lambda: GatedDeltaNet(24, 3, gate_lower_bound=5), "gate_lower_bound must be finite and below 0, got 5; -5 is"),
        (lambda: KimiDeltaAttention(24, 3, gate_lower_bound=0.0), "gate_lower_bound must be finite and below 0, got 0"),
        (lambda: MixtureOfExperts(24, 4, 2, 8, scores="tanh"), "scores must be one of"),
        (lambda: MixtureOfExperts(24, 4, 2, 8, kind="gelu"), "kind must be one of"),
    ],
)
def test_errors(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("kind", [GatedDeltaNet, GatedAttention, LeastSquares, TTTLinear])
@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 4, 10], "must be a torch.Tensor"),
        (torch.tensor([0, 4, 9]), "end at t = 10"),
        (torch.tensor([0, 7, 4, 10]), "must not decrease"),
    ],
)
def test_wrong_bounds_are_named(kind, bounds, message):
    with pytest.raises((TypeError, ValueError), match=f"cu_seqlens {message}|cu_seqlens must start at 0 and {message}"):
        kind(32, 2)(torch.randn(1, 10, 32), None, bounds)

"""TTT-Linear and TTT-MLP: the dual form against "take the gradient, take the step" by autograd; the layers."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.layers import Memory
from lineate.layers.rope import rotate, turns
from lineate.layers.ttt import TTTMLP, TTTLinear, TTTMixer
from lineate.memory import MEMORY_RULES, run_reference
from tests.support.ttt_cases import CHUNK, DIM, HEADS, draw, dual

DEPTHS = {"linear": 1, "mlp": 2}
models = pytest.mark.parametrize("model", DEPTHS)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def sequential(named: dict[str, Tensor], lengths: list[int] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Run row by row, head by head, token by token, with autograd's gradient of the loss as it is written down."""
    depth = 1 + ("weight2" in named)
    names = [f"{kind}{i + 1}" for i in range(depth) for kind in ("weight", "bias")]
    b, t, heads, dim = named["q"].shape
    factor, chunk = named["factor"], named["factor"].shape[0]
    spans = [(row, 0, t) for row in range(b)]
    if lengths is not None:
        ends = torch.tensor(lengths).cumsum(0).tolist()
        spans = [(0, end - length, end) for end, length in zip(ends, lengths, strict=True)]
    by_row = named["bias1"].dim() == 3

    def z(w: dict[str, Tensor], x: Tensor) -> Tensor:
        for i in range(depth):
            x = F.gelu(x, approximate="tanh") if i else x
            x = x @ w[f"weight{i + 1}"] + w[f"bias{i + 1}"]
        return x

    def norm(w: dict[str, Tensor], x: Tensor, head: int) -> Tensor:
        return F.layer_norm(z(w, x), (dim,), named["norm_weight"][head], named["norm_bias"][head], 1e-6)

    def loss(w: dict[str, Tensor], k: Tensor, v: Tensor, head: int) -> Tensor:
        return 0.5 * (norm(w, k, head) - (v - k)).square().sum()

    outputs: dict[tuple[int, int, int], Tensor] = {}
    final: dict[str, list[Tensor]] = {}
    for row, (at, start, end) in enumerate(spans):
        for head in range(heads):
            own = {x: named[x][row, head] if by_row else named[x][head] for x in names}
            sums = {x: torch.zeros_like(y) for x, y in own.items()}
            for token in range(start, end):
                q, k, v = (named[x][at, token, head] for x in "qkv")
                grads = torch.func.grad(loss)(own, k, v, head)
                sums = {x: sums[x] + named["rate"][at, token, head] * grads[x] for x in names}
                place = (token - start) % chunk
                now = {x: own[x] - factor[place] * sums[x] for x in names}
                outputs[at, token, head] = q + norm(now, q, head)
                if place == chunk - 1:
                    own, sums = now, {x: torch.zeros_like(y) for x, y in own.items()}
            for x in names:
                final.setdefault(x, []).append(own[x])
                final.setdefault(f"{x}_sum", []).append(sums[x])
    state = {x: torch.stack(parts).unflatten(0, (-1, heads)) for x, parts in final.items()}
    state["position"] = torch.tensor([(end - start) % chunk for _, start, end in spans])
    return torch.stack([outputs[i] for i in sorted(outputs)]).view(b, t, heads, dim), state


def everything(result: tuple[Tensor, dict[str, Tensor]], named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return output, final state, and the gradients of a sum over both with fixed weights."""
    output, state = result
    results = {"output": output, **state}
    floating = [x for name, x in results.items() if name != "position"]
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).cos().view_as(x) for x in floating]
    total = sum((weight * x * (1 + 3 * x.sin())).sum() for x, weight in zip(floating, weights, strict=True))
    grads = torch.autograd.grad(total, list(named.values()))
    return {**results, **{f"d{name}": g for name, g in zip(named, grads, strict=True)}}


def compare(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        torch.testing.assert_close(got[name], x, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


def learnable(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.requires_grad_() for name, x in named.items()}


CASES = [(1, None), (CHUNK - 1, 2), (CHUNK, 2), (CHUNK + 1, None), (3 * CHUNK + 2, 2)]


@models
@pytest.mark.parametrize(("t", "rows"), CASES)
def test_dual_equals_autograd(model, t, rows):
    named = learnable(draw(model, 2, t, rows=rows))
    compare(everything(dual(named), named), everything(sequential(named), named))


@models
def test_packed_equals_autograd(model):
    lengths = [3, 0, 9, 1, CHUNK]
    named = learnable(draw(model, 1, sum(lengths), rows=len(lengths)))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    compare(everything(dual(named, cu_seqlens=bounds), named), everything(sequential(named, lengths), named))


@models
@pytest.mark.parametrize("packed", [False, True])
def test_dual_equals_the_reference_of_all_memories(model, packed):
    """It agrees with lineate.memory.run_reference, whose factors max(0, 1/i + learned_i) are sometimes 0 here."""
    rule = replace(MEMORY_RULES["TTT-Linear" if model == "linear" else "TTT-MLP"], chunk=CHUNK)
    bounds = torch.tensor([0, 5, 11]) if packed else None
    named = draw(model, 1 if packed else 2, 11, rows=2)
    learned = torch.tensor([0.1, -0.2, -0.5, 0.3], dtype=torch.float64)
    named = learnable({**named, "factor": learned})
    theirs = {"weight1": "W", "bias1": "b"} if model == "linear" else {
        "weight1": "W1", "bias1": "b1", "weight2": "W2", "bias2": "b2"
    }  # fmt: skip
    factor = (1 / torch.arange(1, CHUNK + 1) + learned).clamp(min=0)
    got = dual({**named, "factor": factor}, cu_seqlens=bounds)
    weights = {theirs[x]: named[x] for x in theirs} | {"gamma": named["norm_weight"], "beta": named["norm_bias"]}
    gates = {"rate": named["rate"], "position": learned}
    output, after = run_reference(rule, *(named[x] for x in "qkv"), gates, weights, cu_seqlens=bounds)
    state = {x: after.start[theirs[x]] for x in theirs} | {f"{x}_sum": after.sums[theirs[x]] for x in theirs}
    assert isinstance(after.position, Tensor)
    state["position"] = after.position
    compare(everything(got, named), everything((output, state), named))


def cut(named: dict[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    return {name: x[:, start:end] if name in ("q", "k", "v", "rate") else x for name, x in named.items()}


def only_inputs(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in named.items() if not name.startswith(("weight", "bias"))}


@models
@pytest.mark.parametrize("cuts", [[1], [1, 3], [CHUNK], [14], [2, 3, 5, 12], list(range(1, 15))])
def test_split_anywhere_equals_whole(model, cuts):
    """Gradients agree too, through the states between; the last case is one token at a time."""
    named = learnable(draw(model, 2, 15, rows=2))
    parts, state = [], {x: named[x] for x in named if x.startswith(("weight", "bias"))}
    for start, end in pairwise([0, *cuts, 15]):
        output, state = dual(cut(only_inputs(named), start, end) | state)
        parts.append(output)
    compare(everything((torch.cat(parts, 1), state), named), everything(dual(named), named))


@models
def test_rows_at_different_places(model):
    """After packed sequences, rows are anywhere in their chunks.

    They continue together by a few tokens, one, and packed.
    """
    lengths, more = [3, 8, 1, 6], 2 * CHUNK + 1
    named = draw(model, 1, sum(lengths), rows=4)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    before, state = dual(named, cu_seqlens=bounds)
    later = only_inputs(draw(model, 4, more)) | {x: named[x] for x in ("norm_weight", "norm_bias", "factor")}
    together, final = dual(later | state)
    steps, stepped = [], state
    for i in range(more):
        output, stepped = dual(cut(later, i, i + 1) | stepped)
        steps.append(output)
    flat = {x: y.flatten(0, 1)[None] if x in ("q", "k", "v", "rate") else y for x, y in later.items()}
    packed, packed_final = dual(flat | state, cu_seqlens=torch.arange(5) * more)
    compare({"o": torch.cat(steps, 1), **stepped}, {"o": together, **final})
    compare({"o": packed.view_as(together), **packed_final}, {"o": together, **final})
    for row, (start, end) in enumerate(pairwise(bounds.tolist())):
        alone = {
            x: torch.cat((named[x][:, start:end], later[x][row : row + 1]), 1) if x in ("q", "k", "v", "rate")
            else named[x][row : row + 1] if x.startswith(("weight", "bias")) else named[x]
            for x in named
        }  # fmt: skip
        output, own = dual(alone)
        compare({"o": output, **own}, {
            "o": torch.cat((before[:, start:end], together[row : row + 1]), 1),
            **{x: y[row : row + 1] for x, y in final.items()},
        })  # fmt: skip


@models
def test_recomputed_gradients_are_the_same(model):
    named = learnable(draw(model, 2, 30, rows=2))
    compare(everything(dual(named, recompute_chunks=3), named), everything(dual(named), named))


@models
def test_writing_lowers_the_loss(model):
    """A pair that is written repeatedly is learned: LN(z(k)) goes to v - k, for a target a layer norm can reach."""
    named = draw(model, 1, 400, rows=1)
    for x in "qkv":
        named[x] = named[x][:, :1].expand(-1, 400, -1, -1)
    named |= {"q": named["k"], "norm_weight": torch.ones(HEADS, DIM), "norm_bias": torch.zeros(HEADS, DIM)}
    named = {x: y.double() for x, y in named.items()}
    named["v"] = named["k"] + F.layer_norm(named["v"], (DIM,))
    output, _ = dual(named)
    error = (output - named["v"]).square().sum(-1)[0].amax(-1)
    assert error[-1] < 1e-3 * error[0]


def test_errors_name_what_is_wrong():
    named = draw("linear", 2, 5, rows=2)
    _, state = dual(named)
    for changed, message in (
        ({"rate": named["rate"][:, :4]}, r"rate must have shape \(b, t, h\) = \(2, 5, 2\), got \(2, 4, 2\)"),
        ({"factor": torch.ones(3)}, r"factor must have shape \(chunk,\) = \(4,\), got \(3,\)"),
        ({"weight1": named["weight1"][:1]}, r"state\['weight1'\] must have shape .*\(2, 2, 6, 6\)"),
        ({"bias1_sum": named["bias1"]}, "state must have weight1, bias1"),
        (
            state | {"position": torch.tensor([0, 7])},
            r"must be at least 0 and below chunk = 4, got",
        ),
        (state | {"position": torch.zeros(2)}, r"state\['position'\] must be int64"),
        ({"v": named["v"][..., :3]}, "v must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            dual(named | changed)


HIDDEN = 12
LAYERS = {
    "linear": lambda: TTTLinear(HIDDEN, HEADS, chunk=CHUNK),
    "linear, plain": lambda: TTTLinear(HIDDEN, HEADS, head_dim=5, chunk=3, conv_size=0, rope_theta=None),
    "mlp": lambda: TTTMLP(HIDDEN, HEADS, chunk=CHUNK, expand=2),
}
layers = pytest.mark.parametrize("name", LAYERS)


def make(name: str) -> TTTMixer:
    """Return a layer with random parameters, so that each matters."""
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    with torch.no_grad():
        for key, x in layer.named_parameters():
            if "start" in key:
                x.normal_(0, 0.5)
            elif "proj" not in key and "conv" not in key:
                x.add_(0.2 * torch.randn_like(x))
    return layer


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@layers
def test_the_layer_is_its_equations(name):
    layer, x = make(name), tokens(2, 11)
    h, d, c = layer.heads, layer.head_dim, layer.chunk
    q, k, v, z, r = (x @ layer.in_proj.weight.T).split((h * d, h * d, h * d, h * d, h), -1)
    mixed = torch.cat((q, k, v), -1)
    if layer.conv is not None:
        padded = F.pad(mixed, (0, 0, 3, 0))
        mixed = F.silu(sum(padded[:, i : i + 11] * layer.conv.weight[:, i] for i in range(4)))
    q, k, v = (y.unflatten(-1, (h, d)) for y in mixed.chunk(3, -1))
    if layer.rope_theta is not None:
        turn = turns(torch.arange(11) % c, d, 10000.0, q.dtype)
        q, k = rotate(q, turn), rotate(k, turn)
    named = {
        "q": q, "k": k, "v": v, "norm_weight": layer.norm_weight, "norm_bias": layer.norm_bias, **layer.start,
        "rate": layer.base_rate * (r + layer.rate_bias).sigmoid() / d,
        "factor": (1 / torch.arange(1, c + 1, dtype=torch.float64) + layer.factor_offset).clamp(min=0),
    }  # fmt: skip
    output, final = sequential(named)
    output = F.layer_norm(output.flatten(2), (h * d,), layer.post_norm.weight, layer.post_norm.bias, 1e-6)
    expected = (output * F.gelu(z, approximate="tanh")) @ layer.out_proj.weight.T
    got, state = layer(x)
    torch.testing.assert_close(got, expected, **CLOSE)
    compare({x: state[x] for x in final}, final)
    grads, wanted = (torch.autograd.grad(y.sin().sum(), list(layer.parameters())) for y in (got, expected))
    for (key, _), a, b in zip(layer.named_parameters(), grads, wanted, strict=True):
        assert b.abs().max() > 1e-6, key
        torch.testing.assert_close(a, b, **CLOSE)


@layers
@torch.no_grad()
def test_the_layer_streams(name):
    """It may be cut anywhere, run token by token or packed, and continued; the state is as large as its spec says."""
    layer, x = make(name), tokens(3, 14)
    whole, final = layer(x)
    for cuts in ([1], [5, 6], range(1, 14)):
        state, parts = None, []
        for start, end in pairwise([0, *cuts, 14]):
            y, state = layer(x[:, start:end], state)
            parts.append(y)
        compare({"y": torch.cat(parts, 1), **state.tensors}, {"y": whole, **final.tensors})
    flat = torch.cat((x[0, :5], x[1, :9], x[2, :1]))[None]
    packed, state = layer(flat, cu_seqlens=torch.tensor([0, 5, 14, 15]))
    torch.testing.assert_close(packed[0], torch.cat((whole[0, :5], whole[1, :9], whole[2, :1])), **CLOSE)
    then, _ = layer(torch.stack((x[0, 5:10], x[1, 9:], x[2, 1:6])), state)
    torch.testing.assert_close(then, torch.stack((whole[0, 5:10], whole[1, 9:], whole[2, 1:6])), **CLOSE)
    assert final.names == tuple(spec.name for spec in layer.state_spec)
    for spec in layer.state_spec:
        assert final[spec.name].shape == (3, *spec.shape) and final[spec.name].dtype == spec.dtype
    assert final.nbytes == 3 * sum(spec.nbytes() for spec in layer.state_spec)


@layers
@torch.no_grad()
def test_the_future_never_changes_the_past(name):
    layer, x = make(name), tokens(1, 14)
    changed = torch.cat((x[:, :6], 3 * x[:, 6:].flip(1)), 1)
    torch.testing.assert_close(layer(x)[0][:, :6], layer(changed)[0][:, :6], rtol=0, atol=1e-14)


@layers
def test_states_are_values(name):
    layer, x = make(name), tokens(2, 9)
    with torch.no_grad():
        _, state = layer(x[:, :5])
        kept = {name: y.clone() for name, y in state.tensors.items()}
        first, _ = layer(x[:, 5:6], state)
        again, _ = layer(x[:, 5:6], state)
    assert first.equal(again) and all(y.equal(kept[name]) for name, y in state.tensors.items())


@layers
def test_dtypes(name):
    """The memory stays float32 in a bfloat16 layer and under autocast."""
    layer, x = make(name).bfloat16(), tokens(1, 9).bfloat16()
    y, state = layer(x)
    assert y.dtype == torch.bfloat16 and state["weight1"].dtype == state["bias1_sum"].dtype == torch.float32
    layer, x = layer.float(), x.float()
    exact, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
    assert y.dtype == torch.bfloat16 and state["weight1"].dtype == torch.float32
    torch.testing.assert_close(y.float(), exact, rtol=0.1, atol=0.1 * exact.abs().max().item())


@pytest.mark.cover
@models
@torch.no_grad()
def test_bytes_do_not_grow(model):
    layer = {"linear": TTTLinear, "mlp": TTTMLP}[model](8, 1)
    _, state = layer(torch.randn(1, 20_000, 8))
    expected = sum(spec.nbytes() for spec in layer.state_spec)
    for _ in range(50):
        assert state.nbytes == expected
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in state.tensors.values())
        _, state = layer(torch.randn(1, 1, 8), state)


@pytest.mark.slow
@models
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_long_texts_stay_finite(model, dtype):
    """At defaults, 16,384 tokens stay finite: random ones, then one token repeated, then large ones."""
    torch.manual_seed(0)
    layer = {"linear": TTTLinear, "mlp": TTTMLP}[model](32, 2).to(dtype)
    x = torch.randn(3, 16_384, 32)
    x[1], x[2] = x[1, :1].clone(), 30 * x[2]
    y, state = layer(x.to(dtype))
    assert y.isfinite().all()
    assert all(x.isfinite().all() for x in state.tensors.values())


class Recaller(nn.Module):
    """A model that reads pairs (key, value), then keys, whose values it must recall."""

    def __init__(self, mixer: TTTMixer) -> None:
        super().__init__()
        self.embed, self.norm, self.mixer = nn.Embedding(32, 32), nn.RMSNorm(32), mixer
        self.last, self.head = nn.RMSNorm(32), nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.last(x + self.mixer(self.norm(x))[0]))


RECALLS = {
    "linear": (lambda: TTTLinear(32, 1), 0.5),
    "mlp": (lambda: TTTMLP(32, 1), 0.5),
}
"""A layer and the loss that it must reach. log 16 = 2.77 is a guess without memory; log 8 = 2.08 knows which values
occurred, but not for which keys."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RECALLS)
def test_recall_is_learnt(name):
    layer, bound = RECALLS[name]
    torch.manual_seed(0)
    net = Recaller(layer())
    optimiser = torch.optim.AdamW(net.parameters(), 5e-3)
    losses = []
    for _ in range(200):
        keys, values = (torch.rand(32, 16).argsort(1)[:, :8] + shift for shift in (0, 16))
        asked = torch.rand(32, 8).argsort(1)
        ids = torch.cat((torch.stack((keys, values), 2).flatten(1), keys.gather(1, asked)), 1)
        loss = F.cross_entropy(net(ids)[:, 16:].flatten(0, 1), values.gather(1, asked).flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
    last = sum(losses[-10:]) / 10
    print(f"{name}: {losses[0]:.3f} -> {last:.3f}")
    assert last < bound, losses[::20]


@pytest.mark.gpu
@models
def test_on_a_gpu(model):
    named = learnable({x: y.cuda() for x, y in draw(model, 3, 70, rows=3, chunk=16, dim=64).items()})
    bounds = torch.tensor([0, 33, 70, 210], device="cuda")
    flat = {x: y.detach().flatten(0, 1)[None] if x in ("q", "k", "v", "rate") else y for x, y in named.items()}
    for inputs, options in ((named, {}), (learnable(flat), {"cu_seqlens": bounds})):
        exact = everything(dual(inputs, chunk=16, **options), inputs)
        single = learnable({x: y.detach().float() for x, y in inputs.items()})
        got = everything(dual(single, chunk=16, **options), single)
        for x, y in exact.items():
            scale = y.double().abs().max().item()
            torch.testing.assert_close(got[x].double(), y.double(), rtol=0, atol=2e-3 * scale, msg=x)
    with torch.no_grad():
        layer = LAYERS[model]().cuda().bfloat16()
        x = torch.randn(2, 40, HIDDEN, device="cuda", dtype=torch.bfloat16)
        whole, _ = layer(x)
        y, state = layer(x[:, :33])
        for i in range(33, 40):
            y, state = layer(x[:, i : i + 1], state)
            torch.testing.assert_close(y, whole[:, i : i + 1], rtol=0.05, atol=0.05)
        assert isinstance(state, Memory)

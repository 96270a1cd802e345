"""Least squares against the normal equations and the reference, chunked against token by token, and as a layer."""

import math
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F

import lineate
from lineate.layers.least_squares import LeastSquares
from lineate.memory import MEMORY_RULES, run_reference
from lineate.memory.least_squares import empty_state, least_squares

B, H, K, V = 2, 2, 5, 3


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def inputs(t, b=B, *, decay=True, beta=True, seed=0):
    """Return q, k, v, log_decay, beta as leaves."""
    q, k, v = (
        draw(b, t, H, K, seed=seed),
        F.normalize(draw(b, t, H, K, seed=seed + 1), dim=-1),
        draw(b, t, H, V, seed=seed + 2),
    )
    gates = [draw(b, t, H, seed=seed + 3 + i).sigmoid() for i in range(2)]
    log_decay = gates[0].log() / 8 if decay else None
    beta = 2 * gates[1] if beta else None
    return [None if x is None else x.requires_grad_() for x in (q, k, v, log_decay, beta)]


def some_state(rows, position):
    """Return a state as earlier tokens leave it: P is positive, and rows are at different positions in their chunks."""
    A = draw(rows, H, K, K, seed=11)
    P = A @ A.mT + torch.eye(K, dtype=torch.float64)
    return {
        "P": P.requires_grad_(),
        "S": draw(rows, H, K, V, seed=12).requires_grad_(),
        "ridge": (0.01 + draw(rows, H, seed=13).abs() / 9).requires_grad_(),
        "position": torch.tensor(position),
    }


def error(a, b):
    return max(float((x - y).detach().abs().max()) for x, y in zip(a, b, strict=True))


def gradients(result, leaves):
    """Return the gradients of one number that depends on the output and the whole state."""
    y, state = result
    parts = [y, *(state[name] for name in ("P", "S", "ridge"))]
    total = sum((x * torch.sin(torch.arange(x.numel(), dtype=x.dtype)).view_as(x)).sum() for x in parts)
    grads = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    grads = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads, strict=True)]
    # P is symmetric, so only the symmetric part of its gradient has a meaning.
    return [x + x.mT if x.dim() == 4 and x.shape[-2:] == (K, K) else x for x in grads]


def compare(got, expected, leaves, limit=1e-10):
    names = ("P", "S", "ridge")
    assert error([got[0], *(got[1][n] for n in names)], [expected[0], *(expected[1][n] for n in names)]) < limit
    assert torch.equal(got[1]["position"], expected[1]["position"])
    own, right = gradients(got, leaves), gradients(expected, leaves)
    scale = max(1.0, max(float(x.abs().max()) for x in right))
    assert error(own, right) < limit * scale


@pytest.mark.parametrize("form", ["recurrent", "chunkwise"])
@pytest.mark.parametrize("restore", [False, True])
def test_minimum(form, restore):
    """Every output is read from the solution of the normal equations of the tokens so far."""
    t, c, ridge = 11, 4, 0.2
    q, k, v, log_decay, beta = inputs(t)
    y, state = least_squares(q, k, v, log_decay, beta, ridge=ridge, chunk=c, restore=restore, form=form)
    for b in range(B):
        for h in range(H):
            A, M, r = ridge * torch.eye(K, dtype=torch.float64), torch.zeros(K, V, dtype=torch.float64), ridge
            for i in range(t):
                kept = log_decay[b, i, h].exp()
                A = kept * A + beta[b, i, h] * k[b, i, h, :, None] * k[b, i, h]
                M, r = kept * M + beta[b, i, h] * k[b, i, h, :, None] * v[b, i, h], kept * r
                assert error([y[b, i, h]], [q[b, i, h] @ torch.linalg.solve(A, M)]) < 1e-10
                if restore and i % c == c - 1:
                    A, r = A + (ridge - r) * torch.eye(K, dtype=torch.float64), ridge
            assert error([state["S"][b, h], state["P"][b, h]], [torch.linalg.solve(A, M), torch.linalg.inv(A)]) < 1e-10
            assert error([state["ridge"][b, h]], [r]) < 1e-12


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("beta", [False, True])
def test_is_a_row_of_the_table(decay, beta):
    """It agrees with the autograd reference, Newton's step on the squared error: outputs, state, all gradients."""
    q, k, v, log_decay, weight = inputs(9, decay=decay, beta=beta)
    gates = {name: x for name, x in (("log_decay", log_decay), ("rate", weight)) if x is not None}
    leaves = [x for x in (q, k, v, log_decay, weight) if x is not None]
    y, after = run_reference(
        MEMORY_RULES["least squares"], q, k, v, gates, {"S": torch.zeros(H, K, V, dtype=torch.float64)}, ridge=0.3
    )
    for form in ("recurrent", "chunkwise"):
        got, state = least_squares(q, k, v, log_decay, weight, ridge=0.3, restore=False, chunk=4, form=form)
        results = [(got, state["S"], torch.linalg.inv(state["P"])), (y, after.weights["S"], after.hessian)]
        assert error(*results) < 1e-10
        grads = [
            torch.autograd.grad(sum((x * x).sum() for x in result), leaves, retain_graph=True) for result in results
        ]
        assert error(*grads) < 1e-9


@pytest.mark.parametrize("t", [1, 7, 8, 9, 29])
@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize("start", [None, [0, 3], [8 - 1, 5]])
def test_chunks(t, restore, start):
    """The chunked form equals the recurrent one in outputs, state and gradients, wherever rows are in their chunks."""
    given = inputs(t)
    state = None if start is None else some_state(B, start)
    leaves = [*given, *([] if state is None else [state[n] for n in ("P", "S", "ridge")])]
    options = {"ridge": 0.2, "state": state, "chunk": 8, "restore": restore}
    compare(
        least_squares(*given, **options, form="chunkwise"), least_squares(*given, **options, form="recurrent"), leaves
    )


@pytest.mark.parametrize("gates", [(False, False), (True, False), (False, True)])
def test_chunks_without_gates(gates):
    given = inputs(21, decay=gates[0], beta=gates[1])
    leaves = [x for x in given if x is not None]
    compare(*(least_squares(*given, chunk=8, ridge=0.2, form=form) for form in ("chunkwise", "recurrent")), leaves)


@pytest.mark.parametrize("form", ["recurrent", "chunkwise"])
@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("bounds", [(0, 1, 1, 13, 21, 25), (0, 0, 9, 9, 25, 25)], ids=["one chunk beside", "none"])
def test_packed(form, continued, bounds):
    """Sequences packed into one row equal these sequences alone, with empty ones between any others."""
    given = inputs(25, b=1)
    state = some_state(5, [0, 2, 7, 0, 5]) if continued else None
    leaves = [*given, *([] if state is None else [state[n] for n in ("P", "S", "ridge")])]
    got = least_squares(*given, ridge=0.2, chunk=8, state=state, cu_seqlens=torch.tensor(bounds), form=form)
    outputs, states = [], []
    for row in range(5):
        part = slice(bounds[row], bounds[row + 1])
        if state is None:
            own = empty_state(1, H, K, V, 0.2, torch.float64, torch.device("cpu"))
        else:
            own = {name: x[row : row + 1] for name, x in state.items()}
        if bounds[row] < bounds[row + 1]:
            y, own = least_squares(*(x[:, part] for x in given), ridge=0.2, chunk=8, state=own, form="recurrent")
            outputs.append(y)
        states.append(own)
    expected = torch.cat(outputs, 1), {name: torch.cat([own[name] for own in states]) for name in states[0]}
    compare(got, expected, leaves)


@pytest.mark.parametrize("restore", [False, True])
def test_split_anywhere(restore):
    given = inputs(21)
    options = {"ridge": 0.2, "chunk": 8, "restore": restore}
    whole = least_squares(*given, **options)
    for at in (1, 8, 13, 20):
        first, state = least_squares(*(x[:, :at] for x in given), **options)
        second, state = least_squares(*(x[:, at:] for x in given), **options, state=state)
        compare((torch.cat((first, second), 1), state), whole, given)
    outputs, state = [], None
    for i in range(21):
        y, state = least_squares(*(x[:, i : i + 1] for x in given), **options, state=state)
        outputs.append(y)
    compare((torch.cat(outputs, 1), state), whole, given)


def test_gradcheck():
    given = inputs(6, b=1)

    def run(*given):
        y, state = least_squares(*given, ridge=0.2, chunk=4, form="chunkwise")
        return y, state["P"], state["S"], state["ridge"]

    assert torch.autograd.gradcheck(run, given, fast_mode=True)


def pairs(n, size, dtype):
    generator = torch.Generator().manual_seed(n)
    k, v = (torch.randn(2, n, 2, size, generator=generator, dtype=torch.float64) for _ in range(2))
    return F.normalize(k, dim=-1).to(dtype), v.to(dtype)


def recalled(k, v, S):
    return float((k.transpose(1, 2) @ S - v.transpose(1, 2)).abs().max())


@pytest.mark.parametrize(
    "n, dtype, ridge",
    [(8, torch.float32, 1e-8), (32, torch.float32, 1e-8), (64, torch.float64, 1e-13), (58, torch.float64, 1e-11)],
)
@pytest.mark.parametrize("form", ["recurrent", "chunkwise"])
def test_recalls_all_pairs(n, dtype, ridge, form):
    """It recalls n <= k random pairs exactly, where DeltaNet has lost the first ones.

    Keys that form a square matrix need float64.
    """
    k, v = pairs(n, 64, dtype)
    assert recalled(k, v, least_squares(k, k, v, ridge=ridge, chunk=16, form=form)[1]["S"]) < 1e-5
    assert recalled(k, v, lineate.delta_rule(k, k, v, torch.ones(2, n, 2, dtype=dtype)).state) > 0.1


def test_float32_and_bfloat16():
    """float32 is close to float64; bfloat16 inputs are computed in float32."""
    q, k, v, log_decay, beta = (x.detach() for x in inputs(200))
    given = q, k, v, log_decay / 8, beta
    exact, _ = least_squares(*given, ridge=0.05)
    single = [x.float() for x in given]
    y, state = least_squares(*single, ridge=0.05)
    assert y.dtype == state["P"].dtype == torch.float32 and error([y.double()], [exact]) < 1e-3
    half = [x.bfloat16() for x in given[:3]]
    y, state = least_squares(*half, *single[3:], ridge=0.05)
    again, _ = least_squares(*(x.float() for x in half), *single[3:], ridge=0.05)
    assert y.dtype == torch.bfloat16 and state["S"].dtype == torch.float32
    assert torch.equal(y, again.bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "few directions", "one direction", "positive"])
@pytest.mark.parametrize("kept", [1.0, 0.999, 0.95])
def test_stays_near_float64(kind, kept):
    """16,384 tokens in float32 stay close, also with keys that leave out most directions."""
    t, size = 16384, 32
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, t, 2, size, generator=generator, dtype=torch.float64) for _ in range(2))
    if kind == "few directions":
        k = k[..., :4] @ torch.randn(4, size, generator=generator, dtype=torch.float64)
    if kind == "one direction":
        k = k[:, :1].expand_as(k)
    if kind == "positive":
        k = F.silu(k + 1)
    k = F.normalize(k, dim=-1)
    q = k.roll(5, 1)
    log_decay = torch.full((1, t, 2), kept, dtype=torch.float64).log()
    exact, _ = least_squares(q, k, v, log_decay)
    y, state = least_squares(q.float(), k.float(), v.float(), log_decay.float())
    assert error([y.double()], [exact]) < 0.05
    assert float((y.double() - exact).square().mean().sqrt()) < 1e-2
    assert float(torch.linalg.eigvalsh(state["P"].double()).min()) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("start", [None, [3, 7]])
def test_gpu(start):
    """A GPU gives what a CPU gives: for chunks, then one token, and for all gradients."""
    given = inputs(29)
    state = None if start is None else some_state(B, start)
    moved = [x.detach().cuda().requires_grad_() for x in given]
    there = None if state is None else {name: x.detach().cuda() for name, x in state.items()}
    results = []
    for own, before in ((given, state), (moved, there)):
        y, after = least_squares(*(x[:, :28] for x in own), ridge=0.2, chunk=8, state=before)
        z, after = least_squares(*(x[:, 28:] for x in own), ridge=0.2, chunk=8, state=after)
        y = torch.cat((y, z), 1)
        grads = torch.autograd.grad(y.square().sum() + after["P"].square().sum(), own)
        results.append([x.cpu() for x in (y, after["P"], after["S"], *grads)])
    assert error(*results) < 1e-9


def test_errors_say_what_to_do():
    q, k, v, log_decay, beta = inputs(3)
    with pytest.raises(ValueError, match=r"log_decay must have shape \(b, t, h\) = \(2, 3, 2\), got \(2, 3\)"):
        least_squares(q, k, v, log_decay[..., 0], beta)
    with pytest.raises(ValueError, match="ridge must be finite and above 0, got 0"):
        least_squares(q, k, v, ridge=0)
    with pytest.raises(ValueError, match="v must have h = 2 heads like q and k, got 4; repeat"):
        least_squares(q, k, v.repeat(1, 1, 2, 1))
    with pytest.raises(ValueError, match=r"state\['S'\] must have shape"):
        _, state = least_squares(q, k, v)
        least_squares(q, k, torch.cat((v, v), -1), state=state)
    with pytest.raises(ValueError, match="form must be one of"):
        least_squares(q, k, v, form="parallel")


def layer(**options):
    torch.manual_seed(0)
    return LeastSquares(24, 2, key_dim=6, value_dim=5, chunk=8, **options).double()


@pytest.mark.parametrize("options", [{}, {"conv_size": 0}, {"decay_floor": 1.0}])
def test_layer(options):
    """One token at a time, split and packed equal the whole; the state is as state_spec says."""
    mixer, x = layer(**options), draw(2, 21, 24).requires_grad_()
    whole, after = mixer(x)
    outputs, state = [], None
    for i in range(21):
        y, state = mixer(x[:, i : i + 1], state)
        outputs.append(y)
    assert error([torch.cat(outputs, 1), state["P"], state["S"]], [whole, after["P"], after["S"]]) < 1e-10
    for spec in mixer.state_spec:
        assert (tuple(after[spec.name].shape[1:]), after[spec.name].dtype) == (spec.shape, spec.dtype)
    assert set(after.names) == {spec.name for spec in mixer.state_spec}
    first, state = mixer(x[:, :13])
    second, state = mixer(x[:, 13:], state)
    assert error([torch.cat((first, second), 1), state["P"]], [whole, after["P"]]) < 1e-10
    packed, state = mixer(x.flatten(0, 1)[None], cu_seqlens=torch.tensor([0, 21, 42]))
    assert error([packed.view(2, 21, 24), state["P"]], [whole, after["P"]]) < 1e-10
    grads = torch.autograd.grad(whole.square().sum(), [x, *mixer.parameters()])
    assert all(bool(grad.isfinite().all()) and float(grad.abs().max()) > 0 for grad in grads)


def test_layer_rows_at_different_places():
    """Sequences of different lengths continue as one batch."""
    mixer, x = layer(), draw(2, 30, 24)
    _, state = mixer(torch.cat((x[:1, :5], x[1:, :11]), 1), cu_seqlens=torch.tensor([0, 5, 16]))
    together, _ = mixer(torch.cat((x[:1, 5:15], x[1:, 11:21])), state)
    assert error(together, [mixer(x[:1, :15])[0][0, 5:], mixer(x[1:, :21])[0][0, 11:]]) < 1e-10


def test_layer_state_does_not_grow():
    """After 20,000 tokens, the last ones one by one, the state and the memory behind it have state_spec's bytes."""
    mixer = LeastSquares(24, 2, key_dim=6)
    x = draw(1, 20000, 24).float()
    with torch.no_grad():
        _, state = mixer(x[:, :3])
        size = state.nbytes
        _, state = mixer(x[:, 3:19900], state)
        for i in range(19900, 20000):
            _, state = mixer(x[:, i : i + 1], state)
    assert state.nbytes == size == sum(spec.nbytes() for spec in mixer.state_spec)
    assert sum(state[name].untyped_storage().nbytes() for name in state.names) == size


def test_layer_forgets_slowly_at_first():
    mixer = LeastSquares(64, 4)
    rate = -torch.tensor(0.95).log() * mixer.decay_bias.detach().sigmoid()
    assert float(rate.min()) > 0.9e-4 and float(rate.max()) < 1.1e-2


def test_layer_errors():
    with pytest.raises(ValueError, match=r"decay_floor must be in \(0, 1\], got 1.5"):
        LeastSquares(24, 2, decay_floor=1.5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("repeated", [False, True])
def test_layer_over_16384_tokens(dtype, repeated):
    """There is no NaN, forward or backward, with varied tokens or one repeated token."""
    torch.manual_seed(0)
    mixer = LeastSquares(64, 2).to(dtype)
    x = torch.randn(1, 16384, 64, dtype=dtype)
    x = x[:, :1].repeat(1, 16384, 1) if repeated else x
    x.requires_grad_()
    y, state = mixer(x)
    y.float().square().mean().backward()
    assert all(bool(z.isfinite().all()) for z in (y, x.grad, *(p.grad for p in mixer.parameters())))
    assert (
        all(bool(state[name].isfinite().all()) for name in state.names) and float(state["P"].detach().abs().max()) < 1e4
    )


@pytest.mark.slow
def test_layer_learns_recall():
    """In 200 steps on pairs of tokens, key then value, that are asked for again, the loss falls below guessing."""
    torch.manual_seed(0)
    n, words = 8, 16

    def batch():
        keys = torch.stack([torch.randperm(words)[:n] for _ in range(32)])
        values = torch.randint(words, (32, n)) + words
        order = torch.stack([torch.randperm(n) for _ in range(32)])
        seen = torch.stack((keys, values), -1).flatten(1)
        return torch.cat((seen, keys.gather(1, order)), 1), values.gather(1, order)

    embed, head = torch.nn.Embedding(2 * words, 32), torch.nn.Linear(32, 2 * words)
    layers = torch.nn.ModuleList([LeastSquares(32, 2), LeastSquares(32, 2)])
    parameters = [*embed.parameters(), *head.parameters(), *layers.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=5e-3)
    losses = []
    for _ in range(200):
        tokens, answers = batch()
        x = embed(tokens)
        for mixer in layers:
            x = x + mixer(F.rms_norm(x, x.shape[-1:]))[0]
        loss = F.cross_entropy(head(F.rms_norm(x, x.shape[-1:])[:, 2 * n :]).flatten(0, 1), answers.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) / 10 < 0.5 < 2.5 < losses[0]


def test_packed_texts_of_very_different_lengths():
    """They run in groups, with the outputs, states and gradients of one by one, from states anywhere in a chunk."""
    lengths = (1, 40, 0, 3, 17, 1, 9, 0)
    q, k, v, log_decay, beta = inputs(sum(lengths), b=1)
    bounds = torch.tensor([0, *accumulate(lengths)])
    for state in (None, some_state(len(lengths), [0, 3, 7, 1, 2, 6, 0, 5])):
        leaves = [q, k, v, log_decay, beta, *([] if state is None else [state[n] for n in ("P", "S", "ridge")])]
        options = {"ridge": 0.2, "state": state, "chunk": 8, "cu_seqlens": bounds}
        results = [least_squares(q, k, v, log_decay, beta, **options, form=form) for form in ("chunkwise", "recurrent")]
        compare(*results, leaves)


def test_the_future_cannot_spoil_the_past():
    q, k, v, log_decay, beta = (x.detach() for x in inputs(64))
    wanted = least_squares(q, k, v, log_decay, beta, chunk=8)[0]
    v[:, 41] = torch.nan
    y = least_squares(q, k, v, log_decay, beta, chunk=8)[0]
    assert torch.equal(y[:, :40], wanted[:, :40]) and y[:, 48:].isnan().all()


def test_a_rounded_state_does_not_explode():
    """With keys of 8 kinds and a small ridge, P in float32 has directions of no certainty, and is not definite."""
    g = torch.Generator().manual_seed(0)
    kinds = F.normalize(torch.randn(8, 64, generator=g), dim=-1) * 8
    k = kinds[torch.randint(8, (1, 2048, 1), generator=g)]
    v = torch.randn(1, 2048, 1, 64, generator=g)
    state, outputs = None, []
    for own_k, own_v in zip(k.split(512, 1), v.split(512, 1), strict=True):
        y, state = least_squares(own_k, own_k, own_v, ridge=1e-4, state=state)
        outputs.append(y)
    assert torch.cat(outputs, 1).abs().max() < 10


@pytest.mark.cover
def test_too_fast_forgetting_and_wrong_positions_are_errors():
    given = [x.detach() for x in inputs(20)]
    with pytest.raises(ValueError, match="log_decay must sum to at least -25 over chunk = 8"):
        least_squares(*given[:3], torch.full_like(given[3], -4.0), given[4], chunk=8)
    fast = torch.where(torch.arange(20)[:, None] < 8, given[3], -4.0)  # changed only in the second chunk
    compiled = torch.compile(lambda *x: least_squares(*x, chunk=8), backend="aot_eager", fullgraph=True)
    y, _ = compiled(*given[:3], fast, given[4])  # compiled code cannot check the values
    assert y[:, 8:].isnan().all()
    assert error([y[:, :8]], [least_squares(*given, chunk=8)[0][:, :8]]) < 1e-13
    state = some_state(B, [0, 9])
    with pytest.raises(ValueError, match=r"state\['position'\] must be at least 0 and below chunk = 8, got \[0, 9\]"):
        least_squares(*given, state=state, chunk=8)


@pytest.mark.parametrize(("floor", "chunk"), [(0.5, 64), (0.95, 1024), (1e-30, 1)])
def test_the_layer_never_forgets_too_fast(floor, chunk):
    """Outputs are finite whatever its gates are; the limit leaves the default floor unchanged."""
    torch.manual_seed(0)
    layer = LeastSquares(8, 2, decay_floor=floor, chunk=chunk)
    with torch.no_grad():
        layer.decay_bias.fill_(100.0)
        assert layer(torch.randn(1, 1100, 8))[0].isfinite().all()
    assert LeastSquares(8, 2).log_floor == math.log(0.95)


@pytest.mark.cover
def test_compiles_whole():
    given = [x.detach() for x in inputs(20)]
    compiled = torch.compile(lambda *x: least_squares(*x, chunk=8)[0], backend="aot_eager", fullgraph=True)
    assert error([compiled(*given)], [least_squares(*given, chunk=8)[0]]) < 1e-13

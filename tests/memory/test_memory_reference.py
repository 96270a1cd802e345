"""The table of memories: the sequential reference against lineate's ops, and against equations written out by hand."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import lineate
from lineate.memory import AFFINE, MATRIX, MEMORY_RULES, SWIGLU, TTT_MLP, normed, run_head, run_reference
from lineate.memory.parts import clip, layer_norm, orthogonalise

B, T, H, HV, K, V = 2, 9, 1, 2, 4, 3


def draw(*shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).requires_grad_()


def unit(x):
    return F.normalize(x.detach(), dim=-1).requires_grad_()


def error(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


# name, op, shape of log_decay, whether it takes beta
OPS = [
    ("linear attention", lineate.linear_attention, None, False),
    ("gated linear attention", lineate.gated_linear_attention, (B, T, HV), False),
    ("gated linear attention", lineate.gated_linear_attention, (B, T, HV, K), False),
    ("DeltaNet", lineate.delta_rule, None, True),
    ("Gated DeltaNet", lineate.gated_delta_rule, (B, T, HV), True),
    ("KDA", lineate.kimi_delta_attention, (B, T, HV, K), True),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name, op, decay, corrects", OPS)
def test_five_rules_are_rows(name, op, decay, corrects, packed):
    """Outputs, state and all gradients equal those of lineate's ops, from an initial state, with rates up to 2."""
    q, k, v = draw(B, T, H, K), unit(draw(B, T, H, K, seed=1)), draw(B, T, HV, V, seed=2)
    inputs = {"q": q, "k": k, "v": v}
    gates = {}
    if decay is not None:
        gates["log_decay"] = F.logsigmoid(draw(*decay, seed=3).detach()).requires_grad_()
    if corrects:
        gates["rate"] = (2 * draw(B, T, HV, seed=4).detach().sigmoid()).requires_grad_()
    bounds = None
    if packed:
        inputs = {n: x.detach().reshape(1, B * T, *x.shape[2:]).requires_grad_() for n, x in inputs.items()}
        gates = {n: x.detach().reshape(1, B * T, *x.shape[2:]).requires_grad_() for n, x in gates.items()}
        bounds = torch.tensor([0, 1, 12, 12, B * T])
    q, k, v = inputs.values()
    state = draw(4 if packed else B, HV, K, V, seed=5)
    leaves = [*inputs.values(), *gates.values(), state]

    expected = op(q, k, v, *gates.values(), state=state, cu_seqlens=bounds, form="recurrent")
    output, after = run_reference(MEMORY_RULES[name], q * K**-0.5, k, v, gates, {"S": state}, cu_seqlens=bounds)
    got = output, after.weights["S"]
    assert error(got, expected) < 1e-12
    weights = [torch.randn_like(x) for x in expected]
    grads = [
        torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, r, strict=True)), leaves)
        for r in (got, expected)
    ]
    assert all(float(x.abs().max()) > 0 for x in grads[0])
    assert error(*grads) < 1e-12


def test_kda_decays_before_it_compares():
    """With explicit matrices, the step is (I - beta k k^T) Diag(a) S + beta k v^T."""
    k, v, S = unit(draw(1, K)), draw(1, V, seed=1), draw(K, V, seed=2)
    a, beta = torch.rand(1, K, dtype=torch.float64), torch.tensor([0.7], dtype=torch.float64)
    _, after = run_head(MEMORY_RULES["KDA"], k, k, v, {"log_decay": a.log(), "rate": beta}, {"S": S})
    eye = torch.eye(K, dtype=torch.float64)
    outer = k.T @ k
    assert error([after.weights["S"]], [(eye - beta * outer) @ torch.diag(a[0]) @ S + beta * k.T @ v]) < 1e-14
    assert error([after.weights["S"]], [torch.diag(a[0]) @ (eye - beta * outer) @ S + beta * k.T @ v]) > 1e-3


@pytest.mark.parametrize("decay", [False, True])
def test_least_squares_is_the_minimum(decay):
    """S_t solves the normal equations of all tokens so far, weighted, with the decayed ridge."""
    q, k, v, S0 = draw(T, K), draw(T, K, seed=1), draw(T, V, seed=2), draw(K, V, seed=3)
    gates = {"rate": torch.rand(T, dtype=torch.float64) + 0.1}
    if decay:
        gates["log_decay"] = torch.rand(T, dtype=torch.float64).log() / 4
    y, after = run_head(MEMORY_RULES["least squares"], q, k, v, gates, {"S": S0}, ridge=0.3)
    decays = gates.get("log_decay", torch.zeros(T, dtype=torch.float64)).cumsum(0)
    for t in range(T):
        w = gates["rate"][: t + 1] * (decays[t] - decays[: t + 1]).exp()
        ridge = 0.3 * decays[t].exp()
        K_, V_ = k[: t + 1], v[: t + 1]
        A = K_.T @ (w[:, None] * K_) + ridge * torch.eye(K, dtype=torch.float64)
        S = torch.linalg.solve(A, K_.T @ (w[:, None] * V_) + ridge * S0)
        assert error([y[t]], [q[t] @ S]) < 1e-11
    assert error([after.weights["S"], after.hessian], [S, A]) < 1e-11


def test_ttt_linear_is_the_dual_form():
    """The specification's closed form holds over two chunks: G by hand, eta[t, s] with 1/t + learned_t."""
    c, d = 4, 5
    q, k, v = draw(2 * c, d), draw(2 * c, d, seed=1), draw(2 * c, d, seed=2)
    W, b, gamma, beta = draw(d, d, seed=3), draw(d, seed=4), draw(d, seed=5), draw(d, seed=6)
    rate, learned = torch.rand(2 * c, dtype=torch.float64), draw(c, seed=7, scale=0.6)
    rule = replace(MEMORY_RULES["TTT-Linear"], chunk=c)
    weights = {"W": W, "b": b, "gamma": gamma, "beta": beta}
    y, after = run_head(rule, q, k, v, {"rate": rate, "position": learned}, weights)
    factor = (1 / torch.arange(1, c + 1, dtype=torch.float64) + learned).clamp(min=0)
    assert float(factor.min()) == 0  # some factors are clamped to 0, so the test covers the clamp
    expected = []
    for i in (0, c):
        x, target = k[i : i + c], (v - k)[i : i + c]
        z = x @ W + b
        sigma = (z.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
        hat = (z - z.mean(-1, keepdim=True)) / sigma
        gx = (gamma * hat + beta - target) * gamma
        G = (gx - gx.mean(-1, keepdim=True) - hat * (gx * hat).mean(-1, keepdim=True)) / sigma
        eta = (factor[:, None] * rate[i : i + c]).tril()
        z = q[i : i + c] @ W + b - (eta * (q[i : i + c] @ x.T)) @ G - eta @ G
        expected.append(q[i : i + c] + layer_norm(z, gamma, beta))
        W, b = W - (eta[-1][:, None] * x).T @ G, b - eta[-1] @ G
    assert error([y, after.weights["W"], after.weights["b"]], [torch.cat(expected), W, b]) < 1e-12
    assert after.position == 0


def test_ttt_mlp_takes_the_gradient_of_both_layers():
    c, d, e = 3, 4, 6
    q, k, v = draw(c, d), draw(c, d, seed=1), draw(c, d, seed=2)
    weights = {
        "W1": draw(d, e),
        "b1": draw(e),
        "W2": draw(e, d),
        "b2": draw(d),
        "gamma": draw(d),
        "beta": draw(d, seed=8),
    }
    rate = torch.rand(c, dtype=torch.float64)
    y, after = run_head(replace(MEMORY_RULES["TTT-MLP"], chunk=c), q, k, v, {"rate": rate}, weights)

    def total(W1, b1, W2, b2):
        f = F.gelu(k @ W1 + b1, approximate="tanh") @ W2 + b2
        return (rate * (layer_norm(f, weights["gamma"], weights["beta"]) - (v - k)).square().sum(-1) / 2).sum()

    learned = [weights[name] for name in TTT_MLP.learned]
    grads = torch.autograd.grad(total(*learned), learned)
    assert (
        error([after.weights[n] for n in TTT_MLP.learned], [w - g / c for w, g in zip(learned, grads, strict=True)])
        < 1e-12
    )
    assert error([y[-1]], [normed(TTT_MLP)(after.weights, q[-1])]) < 1e-14


def test_titans_linear_is_the_closed_form():
    """The specification's products hold over one chunk from M0 and S0, continued from the first chunk."""
    c, d = 5, 4
    q, k, v, M = draw(2 * c, d), draw(2 * c, d, seed=1), draw(2 * c, V, seed=2), draw(d, V, seed=3)
    alpha, eta, theta = (torch.rand(2 * c, dtype=torch.float64) for _ in range(3))
    gates = {"log_decay": torch.log1p(-alpha), "momentum": eta, "rate": theta}
    y, after = run_head(replace(MEMORY_RULES["Titans"], chunk=c), q, k, v, gates, {"S": M})
    S, expected = torch.zeros_like(M), []
    for i in (0, c):
        own = slice(i, i + c)
        A, E = torch.eye(c, dtype=torch.float64), torch.eye(c, dtype=torch.float64)
        for r in range(c):
            for s in range(r):
                A[r, s], E[r, s] = (1 - alpha[own])[s + 1 : r + 1].prod(), eta[own][s + 1 : r + 1].prod()
        b, m = (1 - alpha[own]).cumprod(0)[:, None], eta[own].cumprod(0)[:, None]
        R, W, f = k[own] @ M - v[own], A @ (E * theta[own]), A @ m
        expected.append(b * (q[own] @ M) + f * (q[own] @ S) - ((q[own] @ k[own].T).tril() * W) @ R)
        M, S = (
            b[-1] * M + f[-1] * S - (W[-1][:, None] * k[own]).T @ R,
            m[-1] * S - ((E[-1] * theta[own])[:, None] * k[own]).T @ R,
        )
    assert error([y, after.weights["S"], after.momentum["S"]], [torch.cat(expected), M, S]) < 1e-12


def test_lact_is_the_closed_form():
    """There are two full chunks and a part of a third, which is read but not written."""
    c, d, e, t = 3, 4, 6, 8
    q, k, v = draw(t, d), draw(t, d, seed=1), draw(t, d, seed=2)
    weights = {"W0": draw(e, d), "W1": draw(d, e, seed=1), "W2": draw(e, d, seed=2)}
    rates = {f"rate.{name}": torch.rand(t, dtype=torch.float64) for name in weights}
    momentum = torch.rand(t, dtype=torch.float64)
    rule = replace(MEMORY_RULES["LaCT"], chunk=c)
    y, after = run_head(rule, q, k, v, {**rates, "momentum": momentum}, weights)
    norms = {name: x.norm(dim=1, keepdim=True) for name, x in weights.items()}
    new, last, expected = dict(weights), {name: torch.zeros_like(x) for name, x in weights.items()}, []
    for i in (0, c, 2 * c):
        own = slice(i, min(i + c, t))
        expected.append(SWIGLU(new, q[own]))
        if i == 2 * c:
            break
        a, u = k[own] @ new["W0"].T, k[own] @ new["W2"].T
        slope = a.sigmoid() * (1 + a * (1 - a.sigmoid()))
        back = v[own] @ new["W1"]
        r = {name: rates[f"rate.{name}"][own][:, None] for name in weights}
        change = {
            "W1": (r["W1"] * v[own]).T @ (F.silu(a) * u),
            "W0": (r["W0"] * back * u * slope).T @ k[own],
            "W2": (r["W2"] * back * F.silu(a)).T @ k[own],
        }
        last = {name: x + momentum[own].mean() * last[name] for name, x in change.items()}
        new = {name: new[name] + orthogonalise(last[name]) for name in new}
        new = {name: x / (x.norm(dim=1, keepdim=True) + 1e-5) * norms[name] for name, x in new.items()}
    assert (
        error(
            [y, *(after.start[n] for n in new), *(after.momentum[n] for n in new)],
            [torch.cat(expected), *new.values(), *(last[n] for n in new)],
        )
        < 1e-12
    )
    assert after.position == t % c


CASES = {
    "DeltaNet": 1, "Gated DeltaNet": 1, "least squares": 1, "TTT-Linear": 4, "TTT-MLP": 4,
    "Titans": 4, "Titans MLP": 4, "LaCT": 4,
}  # fmt: skip


def inputs_of(name, rows=1, t=T, d=4, e=6):
    """Return q, k, v, gates, weights for any row of the table."""
    q, k, v = (draw(rows, t, 2, d, seed=i) for i in range(3))
    shapes = {
        "S": (d, d), "W": (d, d), "b": (d,), "gamma": (d,), "beta": (d,),
        "W1": (d, e), "b1": (e,), "W2": (e, d), "b2": (d,), "W0": (e, d),
    }  # fmt: skip
    rule = MEMORY_RULES[name]
    names = (*rule.model.learned, *(("gamma", "beta") if name.startswith("TTT") else ()))
    weights = {
        n: draw(2, *((e, d) if name == "LaCT" and n == "W2" else (d, e) if n == "W1" else shapes[n]), seed=9)
        for n in names
    }
    gates = {"rate": torch.rand(rows, t, 2, dtype=torch.float64, requires_grad=True)}
    if rule.forgetting != ("none",):
        gates["log_decay"] = (-torch.rand(rows, t, 2, dtype=torch.float64)).requires_grad_()
    if rule.optimiser in ("momentum", "muon"):
        gates["momentum"] = torch.rand(rows, t, 2, dtype=torch.float64, requires_grad=True)
    if rule.optimiser == "positioned sgd":
        gates["position"] = (0.1 * torch.rand(CASES[name], dtype=torch.float64)).requires_grad_()
    return replace(rule, chunk=CASES[name]), q, k, v, gates, weights


def cut(gates, part):
    return {name: x if name == "position" else x[:, part] for name, x in gates.items()}


@pytest.mark.parametrize("name", CASES)
def test_split_equals_whole_and_packed(name):
    rule, q, k, v, gates, weights = inputs_of(name)
    whole, after = run_reference(rule, q, k, v, gates, weights)
    for at in (1, 4, 6):
        first, second = slice(None, at), slice(at, None)
        y1, state = run_reference(rule, q[:, first], k[:, first], v[:, first], cut(gates, first), weights)
        y2, end = run_reference(rule, q[:, second], k[:, second], v[:, second], cut(gates, second), weights, state)
        assert error([torch.cat((y1, y2), 1), *end.weights.values()], [whole, *after.weights.values()]) < 1e-12
        assert torch.equal(end.position, after.position)
        y, _ = run_reference(rule, q, k, v, gates, weights, cu_seqlens=torch.tensor([0, at, T]))
        alone, _ = run_reference(rule, q[:, second], k[:, second], v[:, second], cut(gates, second), weights)
        assert error([y], [torch.cat((y1, alone), 1)]) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_outer_training_sees_the_inner_learning(name):
    """gradcheck compares finite differences of the whole reading with autograd through every inner gradient."""
    rule, q, k, v, gates, weights = inputs_of(name, t=5, d=3, e=4)
    names = [*gates, *weights]
    leaves = [
        x[:, :, :1] if x.dim() > 2 and i < 3 + len(gates) else x for i, x in enumerate([q, k, v, *gates.values()])
    ]
    leaves = [x.detach().requires_grad_() for x in [*leaves, *(w[:1] for w in weights.values())]]

    def run(q, k, v, *rest):
        rest = dict(zip(names, rest, strict=True))
        y, after = run_reference(rule, q, k, v, {n: rest[n] for n in gates}, {n: rest[n] for n in weights})
        return (y, *after.weights.values())

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_muon_and_clipping():
    """Singular values are near 1 over a wide range; a gradient over the limit is scaled to it, others are unchanged."""
    values = torch.linalg.svdvals(orthogonalise(torch.randn(64, 32, dtype=torch.float64)))
    assert float(values.min()) > 0.9 and float(values.max()) < 1.1
    small, large = {"a": draw(3), "b": draw(4)}, {"a": 100 * draw(3), "b": 100 * draw(4)}
    assert error(clip(small, 1e3).values(), small.values()) < 1e-12
    assert abs(float(torch.cat([*clip(large, 2.0).values()]).norm()) - 2) < 1e-6
    zero = {"a": torch.zeros(3, requires_grad=True)}
    (back,) = torch.autograd.grad(clip(zero, 1.0)["a"].sum(), zero["a"])
    assert bool(back.isfinite().all())


def test_clipped_titans_stays_finite():
    rule, q, k, v, gates, weights = inputs_of("Titans")
    far, _ = run_reference(rule, q, 1e3 * k, v, gates, weights)
    near, _ = run_reference(replace(rule, clip=1.0), q, 1e3 * k, v, gates, weights)
    assert float(far.abs().max()) > 1e4 > 1e2 > float(near.abs().max())


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="needs chunk=1, got 4; use gradient_at='start'"):
        replace(MEMORY_RULES["KDA"], chunk=4)
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        replace(MEMORY_RULES["Titans"], chunk=0)
    assert (MATRIX.learned, AFFINE.learned) == (("S",), ("W", "b"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"name": 3}, TypeError, "name must be a str, got int"),
        ({"model": "S^T x"}, TypeError, r"must be a lineate\.memory\.MemoryModel \(MATRIX, .*deep\(n\).*, got str"),
        ({"model": None}, TypeError, r"model must be a lineate\.memory\.MemoryModel .*, got NoneType"),
        ({"loss": "huber"}, TypeError, "loss must be a function .*: correlation, squared_error, .* got 'huber'"),
        ({"loss": None}, TypeError, "loss must be a function .*got None"),
        ({"optimiser": "adam"}, ValueError, r"optimiser must be one of 'sgd', .*'least squares', .* got 'adam'"),
        ({"optimiser": "moun"}, ValueError, r"a function of \(gradients, .* got 'moun'; did you mean 'muon'\?"),
        ({"optimiser": None}, ValueError, "optimiser must be one of 'sgd', .* got None"),
        ({"optimiser": ["sgd"]}, ValueError, r"optimiser must be one of 'sgd', .* got \['sgd'\]"),
        ({"forgetting": "head"}, TypeError, r"forgetting must be a tuple .*'none', 'head', 'channel', got 'head'"),
        ({"forgetting": ()}, TypeError, r"forgetting must be a tuple .*got \(\)"),
        ({"forgetting": ("head", "row")}, ValueError, "forgetting must be one of 'none', 'head', 'channel', got 'row'"),
        ({"chunk": "4"}, TypeError, "chunk must be an int, got str"),
        ({"chunk": 1.5}, TypeError, "chunk must be an int, got float"),
        ({"chunk": True}, TypeError, "chunk must be an int, got bool"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        ({"gradient_at": "end"}, ValueError, "gradient_at must be one of 'decayed', 'start', got 'end'"),
        ({"clip": "1"}, TypeError, "clip must be a number or None, got str"),
        ({"clip": True}, TypeError, "clip must be a number or None, got bool"),
        ({"clip": 0.0}, ValueError, "clip must be above 0, got 0.0; None clips nothing"),
        ({"clip": float("nan")}, ValueError, "clip must be above 0, got nan"),
        ({"renormalises": "yes"}, TypeError, "renormalises must be a bool, got str"),
    ],
)  # fmt: skip
def test_wrong_fields_of_a_rule(change, error, message):
    """The error is raised when the rule is made, not when it runs."""
    with pytest.raises(error, match=message):
        replace(MEMORY_RULES["DeltaNet"], **change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"name": None}, TypeError, "name must be a str, got NoneType"),
        ({"learned": "S"}, TypeError, r"learned must be a tuple of names of weights, got 'S'"),
        ({"learned": ()}, TypeError, r"learned must be a tuple of names of weights, got \(\)"),
        ({"learned": (1,)}, TypeError, r"learned must be a tuple of names of weights, got \(1,\)"),
        ({"apply": "linear"}, TypeError, r"apply must be a function of \(weights, x\), got 'linear'"),
    ],
)
def test_wrong_fields_of_a_model(change, error, message):
    with pytest.raises(error, match=message):
        replace(MATRIX, **change)


def test_wrong_gates_and_weights():
    rule, q, k, v, gates, weights = inputs_of("Titans")
    for changed, name, message in (
        ({"ratee": gates["rate"]}, "Titans", r"gates must be among rate, rate\.S, log_decay, momentum for Titans, got"),
        ({"position": gates["rate"]}, "Titans", "for Titans, got 'position'"),
        ({"momentum": gates["rate"]}, "DeltaNet", r"gates must be among rate, rate\.S for DeltaNet, got 'momentum'"),
        ({"log_decay": gates["rate"]}, "DeltaNet", r"gates must be among rate, rate\.S for DeltaNet, got 'log_decay'"),
    ):  # fmt: skip
        given = changed if name == "DeltaNet" else gates | changed
        with pytest.raises(ValueError, match=message):
            run_reference(MEMORY_RULES[name], q, k, v, given, weights)
    without = {name: x for name, x in gates.items() if name != "momentum"}
    with pytest.raises(ValueError, match="gates must have 'momentum' for Titans, got log_decay, rate"):
        run_reference(rule, q, k, v, without, weights)
    with pytest.raises(ValueError, match=r"weights must have S, which S\^T x learns, got W"):
        run_reference(rule, q, k, v, gates, {"W": weights["S"]})
    with pytest.raises(ValueError, match=r"gates\['rate'\] must have shape \(b, t, hv, \.\.\.\) = .*, got"):
        run_reference(rule, q, k, v, gates | {"rate": gates["rate"][..., 0]}, weights)
    with pytest.raises(TypeError, match=r"gates\['rate'\] must be a tensor .*, got float"):
        run_reference(rule, q, k, v, gates | {"rate": 0.5}, weights)
    with pytest.raises(TypeError, match=r"rule must be a MemoryRule, such as MEMORY_RULES\['DeltaNet'\], got str"):
        run_reference("DeltaNet", q, k, v, gates, weights)


def momentum_step(gradients, carried, gates):
    """Take the step of the optimiser "momentum"."""
    steps = {name: gates["momentum"] * carried[name] - gates["rate"] * x for name, x in gradients.items()}
    return steps, steps


@pytest.mark.parametrize("name", ["Titans", "Titans MLP"])
def test_an_optimiser_and_a_loss_can_be_functions(name):
    """A function that does what a named optimiser does has the same bits and gradients, over two calls too."""
    rule, q, k, v, gates, weights = inputs_of(name)

    def half_squared(model, weights, k, v):
        return (model(weights, k) - v).square().sum() / 2

    own = replace(rule, optimiser=momentum_step, loss=half_squared)
    results = []
    for each in (rule, own):
        y, state = run_reference(each, q, k, v, gates, weights)
        cut = q.shape[1] // 2
        parts, after = [], None
        for part in (slice(0, cut), slice(cut, None)):
            tokens = (x[:, part] for x in (q, k, v))
            some, after = run_reference(each, *tokens, {n: x[:, part] for n, x in gates.items()}, weights, after)
            parts.append(some)
        assert torch.cat(parts, 1).equal(y)
        grads = torch.autograd.grad(y.square().sum(), list(gates.values()))
        results.append([y, *state.weights.values(), *state.momentum.values(), *grads])
    assert all(x.equal(z) for x, z in zip(*results, strict=True))


def test_an_optimiser_that_is_a_function_reads_gates_of_any_name():
    rule, q, k, v, gates, weights = inputs_of("Titans")

    def signs(gradients, carried, gates):
        return {name: -gates["size"] * x.sign() for name, x in gradients.items()}, {}

    y, _ = run_reference(replace(rule, optimiser=signs, chunk=1), q, k, v, {"size": gates["rate"]}, weights)
    assert y.isfinite().all()
    with pytest.raises(ValueError, match=r"optimiser must return steps for S, got W; it is called as \(gradients"):
        run_reference(replace(rule, optimiser=lambda *given: ({"W": 0}, {})), q, k, v, gates, weights)
    with pytest.raises(TypeError, match=r"optimiser must return a pair, got dict; it is called as \(gradients"):
        run_reference(replace(rule, optimiser=lambda gradients, *rest: gradients), q, k, v, gates, weights)


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda model, weights, k, v: model(weights, k) - v, ValueError, "must return one number, got shape"),
        (lambda model, weights, k, v: v.sum().detach(), ValueError, r"must depend on S, which S\^T x learns; it is"),
        (lambda model, weights, k, v: 0.0, TypeError, "loss of Titans must return a tensor, got float"),
    ],
)
def test_a_loss_returns_one_number_of_the_weights(loss, error, message):
    rule, q, k, v, gates, weights = inputs_of("Titans")
    with pytest.raises(error, match=message):
        run_reference(replace(rule, loss=loss), q, k, v, gates, weights)


@pytest.mark.parametrize("former, name", [("RULES", "MEMORY_RULES"), ("LINEAR", "MATRIX"), ("Model", "MemoryModel")])
def test_former_names_still_stand(former, name):
    with pytest.warns(DeprecationWarning, match=f"lineate.memory.{former} is now {name}"):
        assert getattr(lineate.memory, former) is getattr(lineate.memory, name)

"""The rules of the general row: their forms agree, and agree with recurrences that are written out here."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lineate
from lineate.rule import DIAGONAL_PLUS_LOW_RANK, GATED_DELTA_2, GATED_DELTA_PRODUCT, Rule
from tests.support.cases import needs_native
from tests.support.general_cases import CASES, F64, HV, IDS, B, H, K, T, V, call, drawn

FORMS = ("recurrent", "chunkwise", "parallel")


def published(rule: Rule, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Run the recurrences of the papers with explicit transition matrices, for one value head at a time."""
    x, group = inputs, HV // inputs["q"].shape[2]
    t = x["q"].shape[1]
    outputs, states = torch.zeros(B, t, HV, V, dtype=F64), []
    eye = torch.eye(K, dtype=F64)
    for b, h in itertools.product(range(B), range(HV)):
        S = x["state"][b, h]
        for i in range(t):
            if "log_decay" in x:
                S = torch.diag(x["log_decay"][b, i, h].exp().expand(K)) @ S
            if rule is GATED_DELTA_PRODUCT:
                for j in range(x["k"].shape[2]):
                    k, beta = x["k"][b, i, j, h // group], x["beta"][b, i, j, h]
                    S = (eye - beta * torch.outer(k, k)) @ S + beta * torch.outer(k, x["v"][b, i, j, h])
            elif rule is GATED_DELTA_2:
                k, erase, write = x["k"][b, i, h // group], x["erase"][b, i, h], x["write"][b, i, h]
                S = (eye - torch.outer(k, erase * k)) @ S + torch.outer(k, write * x["v"][b, i, h])
            else:
                erased = torch.outer(x["direction"][b, i, h], x["probe"][b, i, h]) @ S
                S = S - erased + torch.outer(x["k"][b, i, h // group], x["v"][b, i, h])
            outputs[b, i, h] = S.mT @ x["q"][b, i, h // group] * K**-0.5
        states.append(S)
    return outputs, torch.stack(states).view(B, HV, K, V)


def gradients(rule: Rule, inputs: dict[str, Tensor], form: str, **keywords: object) -> dict[str, Tensor]:
    """Return the output, the state and the gradients of a weighted sum of both, by name."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    output, state = call(rule, leaves, form, **keywords)
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=F64)).sum() for x in (output, state))
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"output": output, "final": state} | dict(zip(leaves, grads, strict=True))


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, x in expected.items():
        limit = 1e-12 if name in ("output", "final") else 1e-10
        assert got[name].isfinite().all(), name
        assert (got[name] - x).abs().max() <= limit * max(1.0, x.abs().max()), name


@pytest.mark.parametrize(("rule", "decay", "n"), CASES, ids=IDS)
def test_the_published_recurrence(rule, decay, n):
    inputs = drawn(rule, decay, n, t=19)
    output, state = call(rule, inputs, "recurrent")
    expected, final = published(rule, inputs)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=0, atol=1e-12)


@pytest.mark.parametrize("normalize_qk", [False, True])
@pytest.mark.parametrize(("rule", "decay", "n"), CASES, ids=IDS)
def test_forms_agree(rule, decay, n, normalize_qk):
    inputs = drawn(rule, decay, n)
    expected = gradients(rule, inputs, "recurrent", normalize_qk=normalize_qk)
    for form in ("chunkwise", "parallel"):
        assert_close(gradients(rule, inputs, form, chunk_size=16, normalize_qk=normalize_qk), expected)


@pytest.mark.parametrize(("rule", "decay", "n"), CASES, ids=IDS)
def test_gradcheck(rule, decay, n):
    inputs = {
        name: x[:1, ..., :3] if x.shape[-1] in (K, V) else x[:1] for name, x in drawn(rule, decay, n, t=3, hv=2).items()
    }
    inputs["state"] = inputs["state"][:, :, :3]
    if "log_decay" in inputs:
        inputs["log_decay"] = inputs["log_decay"].clamp(-2, -0.01)
    names = list(inputs)
    leaves = [x.clone().requires_grad_() for x in inputs.values()]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(call(rule, dict(zip(names, tensors, strict=True)), "chunkwise", chunk_size=3))

    assert torch.autograd.gradcheck(run, leaves)


def test_special_cases_are_the_five_rules():
    inputs = drawn(GATED_DELTA_2, "channel")
    beta = 2 * torch.rand(B, T, HV, generator=torch.Generator().manual_seed(2), dtype=F64)
    q, k, v, log_decay, state = (inputs[name] for name in ("q", "k", "v", "log_decay", "state"))
    wide, values = beta.unsqueeze(-1).expand(B, T, HV, K), beta.unsqueeze(-1).expand(B, T, HV, V)
    expected = lineate.kimi_delta_attention(q, k, v, log_decay, beta, state=state, form="recurrent")
    keys = k.repeat_interleave(HV // H, dim=2)
    found = [
        lineate.gated_delta_rule_2(q, k, v, log_decay, wide, values, state=state),
        lineate.diagonal_plus_low_rank(
            q.repeat_interleave(HV // H, dim=2), keys, values * v, log_decay, keys, wide * keys, state=state
        ),
    ]
    heads = log_decay.mean(-1)
    expected_heads = lineate.gated_delta_rule(q, k, v, heads, beta, state=state, form="recurrent")
    one = [x.unsqueeze(2) for x in (k, v, beta)]
    found_heads = [
        lineate.gated_delta_rule_2(q, k, v, heads, wide, values, state=state),
        lineate.gated_delta_product(q, one[0], one[1], heads, one[2], state=state),
    ]
    plain = lineate.delta_rule(q, k, v, beta, state=state, form="recurrent")
    found_plain = [lineate.gated_delta_product(q, one[0], one[1], None, one[2], state=state)]
    no_erasing = lineate.gated_delta_rule_2(q, k, v, log_decay, 0 * wide, 0 * values + 1, state=state)
    accumulated = lineate.gated_linear_attention(q, k, v, log_decay, state=state, form="recurrent")
    pairs = [
        *((x, expected) for x in found),
        *((x, expected_heads) for x in found_heads),
        *((x, plain) for x in found_plain),
        (no_erasing, accumulated),
    ]
    for got, right in pairs:
        torch.testing.assert_close(got.output, right.output, rtol=0, atol=1e-12)
        torch.testing.assert_close(got.state, right.state, rtol=0, atol=1e-12)


def test_interleaved_writes_are_the_specification():
    """n writes are Gated DeltaNet on n t tokens: the first of a token's writes forgets, the last is read."""
    n = 3
    x = drawn(GATED_DELTA_PRODUCT, "head", n)
    q = F.pad(x["q"].unsqueeze(2), (0, 0, 0, 0, n - 1, 0)).flatten(1, 2)
    log_decay = F.pad(x["log_decay"].unsqueeze(2), (0, 0, 0, n - 1)).flatten(1, 2)
    k, v, beta = (x[name].flatten(1, 2) for name in ("k", "v", "beta"))
    output, state = lineate.gated_delta_rule(q, k, v, log_decay, beta, state=x["state"], form="recurrent")
    found = call(GATED_DELTA_PRODUCT, x, "chunkwise")
    torch.testing.assert_close(found.output, output[:, n - 1 :: n], rtol=0, atol=1e-12)
    torch.testing.assert_close(found.state, state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rule", "decay", "n"), CASES, ids=IDS)
def test_split_anywhere_and_packed(rule, decay, n, form):
    """A call that continues is the whole call; packed sequences never see each other."""
    inputs = drawn(rule, decay, n, t=40)
    whole = call(rule, inputs, form)
    for split in (1, 17, 39):
        first = call(rule, {name: x if name == "state" else x[:, :split] for name, x in inputs.items()}, form)
        rest = {name: first.state if name == "state" else x[:, split:] for name, x in inputs.items()}
        second = call(rule, rest, form)
        both = torch.cat((first.output, second.output), 1)
        torch.testing.assert_close(both, whole.output, rtol=0, atol=1e-12)
        torch.testing.assert_close(second.state, whole.state, rtol=0, atol=1e-12)
    lengths = (0, 7, 1, 32, 0)
    one = {name: x[:1] for name, x in inputs.items() if name != "state"}
    states = torch.randn(len(lengths), HV, K, V, dtype=F64)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    packed = call(rule, one | {"state": states, "cu_seqlens": bounds}, form)
    start = 0
    for i, length in enumerate(lengths):
        if not length:
            assert torch.equal(packed.state[i], states[i])
            continue
        text = {name: x[:, start : start + length] for name, x in one.items()}
        alone = call(rule, text | {"state": states[i : i + 1]}, form)
        torch.testing.assert_close(packed.output[:, start : start + length], alone.output, rtol=0, atol=1e-13)
        torch.testing.assert_close(packed.state[i : i + 1], alone.state, rtol=0, atol=1e-13)
        start += length


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize(("rule", "decay", "n"), CASES, ids=IDS)
def test_the_future_and_the_company_change_no_bit(rule, decay, n, backend):
    inputs = {name: x.float() for name, x in drawn(rule, decay, n).items()}
    output, state = call(rule, inputs, "chunkwise", backend=backend)
    changed = {name: x.clone() for name, x in inputs.items()}
    for name, x in changed.items():
        if name != "state":
            x[:, 30:] = x[:, 30:].roll(1, 0)
    assert torch.equal(call(rule, changed, "chunkwise", backend=backend).output[:, :30], output[:, :30])
    again = call(rule, inputs, "chunkwise", backend=backend)
    assert torch.equal(again.output, output) and torch.equal(again.state, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rule", "decay", "n"), CASES, ids=IDS)
def test_low_precision(rule, decay, n, dtype):
    """float32 and half-precision inputs agree with float64 of the same numbers, up to what rounding the output does."""
    inputs = {name: x.to(torch.float32 if name == "state" else dtype) for name, x in drawn(rule, decay, n).items()}
    expected = call(rule, {name: x.double() for name, x in inputs.items()}, "recurrent")
    found = call(rule, inputs, "chunkwise")
    assert found.output.dtype == dtype and found.state.dtype == torch.float32
    size = expected.output.abs().max()
    assert (found.output - expected.output).abs().max() <= size * max(2e-5, 2 * torch.finfo(dtype).eps)
    assert (found.state - expected.state).abs().max() <= 2e-5 * expected.state.abs().max()


@pytest.mark.parametrize(("rule", "decay", "n"), CASES, ids=IDS)
def test_decode_in_place(rule, decay, n):
    inputs = drawn(rule, decay, n, t=6)
    expected = call(rule, inputs, "recurrent")
    keywords = {name: x for name, x in inputs.items() if name != "state"}
    state = inputs["state"].clone()
    assert torch.allclose(lineate.decode(**keywords, state=state), expected.output, rtol=0, atol=1e-13)
    assert torch.allclose(state, expected.state, rtol=0, atol=1e-13)
    pool = torch.zeros(5, HV, K, V, dtype=F64)
    pool[[3, 1]] = inputs["state"]
    output = lineate.decode(**keywords, state=pool, slots=torch.tensor([0, 4]), start_slots=torch.tensor([3, 1]))
    assert torch.allclose(output, expected.output, rtol=0, atol=1e-13)
    assert torch.allclose(pool[[0, 4]], expected.state, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("rule", "decay", "n"), CASES, ids=IDS)
def test_attention_matrix(rule, decay, n):
    inputs = drawn(rule, decay, n, t=20)
    given = {name: x for name, x in inputs.items() if name not in ("v", "state", "write")}
    A = lineate.attention_matrix(**given)
    values = inputs["v"] if rule is not GATED_DELTA_2 else inputs["write"] * inputs["v"]
    expected = call(rule, {name: x for name, x in inputs.items() if name != "state"}, "recurrent").output
    output = torch.einsum("bhijn,bjnhv->bihv", A if A.dim() == 5 else A[..., None], values.view(B, 20, -1, HV, V))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rule", "decay", "n"), CASES, ids=IDS)
def test_kept_states(rule, decay, n):
    inputs = drawn(rule, decay, n, t=20)
    kept = lineate.attend_keeping_states(**inputs, keep_states_every=8)
    for i, end in enumerate((8, 16)):
        part = {name: x if name == "state" else x[:, :end] for name, x in inputs.items()}
        torch.testing.assert_close(kept.states[:, i], call(rule, part, "recurrent").state, rtol=0, atol=1e-12)
    torch.testing.assert_close(kept.state, call(rule, inputs, "recurrent").state, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rule", "decay", "n"), CASES, ids=IDS)
def test_transforms_and_forward_mode(rule, decay, n):
    inputs = drawn(rule, decay, n, t=20)
    tangents = {name: torch.ones_like(x) for name, x in inputs.items()}
    if "log_decay" in inputs:
        inputs["log_decay"] = inputs["log_decay"].clamp(-3, -0.01)
        tangents["log_decay"] = -tangents["log_decay"]

    def run(given: dict[str, Tensor]) -> Tensor:
        return call(rule, given, "chunkwise", chunk_size=8).output

    _, found = torch.func.jvp(run, (inputs,), (tangents,))
    step = 1e-6
    ahead, behind = ({name: x + sign * step * tangents[name] for name, x in inputs.items()} for sign in (1, -1))
    expected = (run(ahead) - run(behind)) / (2 * step)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.cover
@pytest.mark.parametrize(("rule", "decay", "n"), [CASES[1], CASES[4], CASES[-2]], ids=[IDS[1], IDS[4], IDS[-2]])
def test_compiled_in_one_graph(rule, decay, n):
    inputs = drawn(rule, decay, n)
    run = torch.compile(lambda given: call(rule, given, "chunkwise"), fullgraph=True, backend="aot_eager")
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    output, _ = run(leaves)
    expected = gradients(rule, inputs, "chunkwise")
    torch.testing.assert_close(output, expected["output"], rtol=0, atol=1e-13)
    output.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves.values())


@pytest.mark.parametrize("decay", ["weak", "reset", "strong"])
@pytest.mark.parametrize("rule", [GATED_DELTA_2, DIAGONAL_PLUS_LOW_RANK], ids=lambda rule: rule.name)
def test_extreme_decays_stay_exact(rule, decay):
    """Decays of e^-1e-12, 0 and e^-30 a token, erasing near 2: finite and as exact as float32 allows."""
    inputs = drawn(rule, "channel", t=130)
    inputs["log_decay"] = {
        "weak": torch.full((B, 130, HV, K), -1e-12, dtype=F64),
        "reset": inputs["log_decay"].masked_fill(torch.rand(B, 130, HV, K) < 0.2, -torch.inf),
        "strong": 30 * inputs["log_decay"],
    }[decay]
    if rule is GATED_DELTA_2:
        inputs["erase"] = torch.full_like(inputs["erase"], 1.999)
    else:
        inputs["direction"] = 1.999 * inputs["probe"]
    expected = gradients(rule, inputs, "recurrent")
    assert_close(gradients(rule, inputs, "chunkwise", chunk_size=64), expected)
    narrow = call(rule, {name: x.float() for name, x in inputs.items()}, "chunkwise")
    assert narrow.output.isfinite().all()
    assert (narrow.output - expected["output"]).abs().max() <= 2e-4 * expected["output"].abs().max()


WRONG = [
    ({"erase": torch.zeros(B, T, HV, V)}, GATED_DELTA_2, "erase must have shape (b, t, hv, k) = (2, 53, 4, 6)"),
    ({"write": None}, GATED_DELTA_2, "write must be a torch.Tensor, got NoneType"),
    ({"log_decay": None}, GATED_DELTA_2,
     "log_decay must be a torch.Tensor, got NoneType; without decay pass torch.zeros(2, 53, 4)"),
    ({"beta": torch.zeros(B, T, HV)}, GATED_DELTA_2, "beta must be None for gated_delta_rule_2"),
    ({"probe": torch.zeros(B, T, HV, K)}, GATED_DELTA_2, "probe must be None for gated_delta_rule_2"),
    ({"k": torch.zeros(B, T, H, K, dtype=F64)}, GATED_DELTA_PRODUCT, "k must have 5 dimensions (b, t, n, h, k)"),
    ({"v": torch.zeros(B, T, 3, HV, V, dtype=F64)}, GATED_DELTA_PRODUCT, "v must have as many writes a token as k"),
    ({"beta": torch.zeros(B, T, HV)}, GATED_DELTA_PRODUCT, "beta must have shape (b, t, n, hv) = (2, 53, 2, 4)"),
    ({"log_decay": torch.zeros(B, T, HV, K)}, GATED_DELTA_PRODUCT, "log_decay must have shape (b, t, hv) = (2, 53, 4)"),
    ({"direction": torch.zeros(B, T, H, K)}, DIAGONAL_PLUS_LOW_RANK, "direction must have shape (b, t, hv, k)"),
    ({"log_decay": torch.ones(B, T, HV)}, DIAGONAL_PLUS_LOW_RANK, "log_decay must be <= 0"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "rule", "message"), WRONG, ids=[message[:40] for *_, message in WRONG])
def test_wrong_arguments_are_named(changes, rule, message):
    inputs = {**drawn(rule, "head", 2), **changes}
    with pytest.raises((TypeError, ValueError)) as caught:
        call(rule, inputs)
    assert str(caught.value).startswith(message)


@needs_native
@pytest.mark.parametrize(("rule", "decay", "n"), CASES, ids=IDS)
def test_explain_names_the_rule(rule, decay, n):
    inputs = drawn(rule, decay, n)
    plan = lineate.explain(**inputs)
    assert (plan.rule, plan.form, plan.backend) == (rule.name, "chunkwise", "torch")
    assert "because the native backend computes in float32, got float64 inputs" in plan.reason
    inputs = {name: x.float() for name, x in inputs.items()}
    plan = lineate.explain(**inputs)
    assert (plan.form, plan.backend, plan.chunk_size) == ("chunkwise", "native", 32 // n)  # 32 writes
    token = {name: x if name == "state" else x[:, :1] for name, x in inputs.items()}
    plan = lineate.explain(**token)
    assert (plan.rule, plan.form, plan.backend) == (rule.name, "recurrent", "native")

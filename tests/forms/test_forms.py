"""Three forms of one computation agree in float64, have correct derivatives, and special cases reduce to each other."""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import lineate
from tests.support.cases import (
    DELTA,
    FORMS,
    GATED_DELTA,
    GATED_LINEAR,
    GATED_LINEAR_CHANNEL,
    KIMI_DELTA,
    LINEAR,
    PACKED,
    ROWS,
    SHAPES,
    SMALL,
    SPECIAL_ROWS,
    TEXTS,
    Inputs,
    Result,
    Row,
    Shape,
    assert_float64_agrees,
    assert_within,
    bounds,
    convert,
    draw,
    errors,
    oracle,
    relative_error,
    run,
    unit,
    weights,
)
from tests.support.marks import cover_but


def every_form(row: Row, inputs: Inputs, **options: object):
    """Yield chunks of 1, 16, 64 and t, and the parallel form.

    A chunk of 64 is a chunk of t if there are no more tokens.
    """
    t = inputs["q"].shape[1]
    for chunk_size in sorted({1, 16, 64 if t > 64 else t, t}):
        yield f"chunks of {chunk_size}", run(row, inputs, "chunkwise", chunk_size=chunk_size, **options)
    yield "parallel", run(row, inputs, "parallel", **options)


class Case(NamedTuple):
    """A row, the shape of a call and its special inputs."""

    row: Row
    special: str = "ordinary"
    shape: Shape = SMALL

    def __str__(self) -> str:
        return f"{self.row}-{self.special}-{self.shape}"


SPECIAL_CASES = [Case(row, special) for row, special in SPECIAL_ROWS]
RESETS = [case for case in SPECIAL_CASES if case.special == "reset -inf"]
SHAPE_CASES = [*(Case(row, shape=shape) for row in ROWS for shape in SHAPES), *RESETS]
PACKED_CASES = [case._replace(shape=PACKED) for case in (*map(Case, ROWS), *RESETS)]
# With --quick, too, every agreement is that of a correcting rule that forgets everything at times.
HEAD, CHANNEL = Case(GATED_DELTA, "reset -inf"), Case(KIMI_DELTA, "reset -inf")


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("case", cover_but(SHAPE_CASES, [HEAD]), ids=str)
def test_forms_agree(case):
    row, special, shape = case
    inputs = draw(row, shape, special)
    expected = oracle(row, inputs)
    for form, got in every_form(row, inputs):
        assert_float64_agrees(got, expected, form)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("case", cover_but(SPECIAL_CASES, [CHANNEL]), ids=str)
def test_forms_agree_on_special_inputs(case):
    row, special, shape = case
    inputs = draw(row, shape, special, seed=1)
    expected = oracle(row, inputs)
    for form, got in every_form(row, inputs):
        assert_float64_agrees(got, expected, form)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("normalize_qk", cover_but([False, True], [True]), ids=["as is", "normalize_qk"])
@pytest.mark.parametrize("case", cover_but(PACKED_CASES, [HEAD._replace(shape=PACKED)]), ids=str)
def test_forms_agree_on_packed_texts(case, normalize_qk):
    row, special, shape = case
    inputs = draw(row, shape, special, texts=len(TEXTS))
    options = {"cu_seqlens": bounds(), "normalize_qk": normalize_qk, "scale": 0.7}
    expected = oracle(row, inputs, **options)
    for form, got in every_form(row, inputs, **options):
        assert_float64_agrees(got, expected, form)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_auto_agrees_for_every_short_length(row):
    for t in (1, 2, 3, 4, 5):
        inputs = draw(row, SMALL._replace(t=t), seed=t)
        assert_float64_agrees(run(row, inputs, "auto"), oracle(row, inputs), t)


@pytest.mark.cover
@pytest.mark.slow
def test_five_thousand_tokens():
    """79 chunks agree in float64, and in float32 by every backend."""
    inputs = draw(KIMI_DELTA, Shape(1, 5000, 1, 1, 5, 3))
    expected = oracle(KIMI_DELTA, inputs)
    assert_float64_agrees(run(KIMI_DELTA, inputs), expected)
    for backend in ("torch", "auto"):
        found = errors(run(KIMI_DELTA, convert(inputs, torch.float32), backend=backend), expected)
        assert_within(found, 1e-5, backend)  # most of this is the rounding of the inputs


def gradchecks() -> Iterator[object]:
    """Yield cases; fast are those of the form with its own backward, and those of one rule for each other form."""
    for row, form, texts in itertools.product(ROWS, FORMS, (None, (1, 0, 3))):
        fast = form == "chunkwise" or row is KIMI_DELTA
        name = f"{row}-{form}-" + ("whole" if texts is None else "packed and normalize_qk")
        yield pytest.param(row, form, texts, id=name, marks=[] if fast else [pytest.mark.slow])


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize(("row", "form", "texts"), list(gradchecks()))
def test_gradcheck(row, form, texts):
    """Numerical derivatives of output and state with respect to everything agree, across chunks of 2."""
    inputs = draw(row, Shape(1, 4, 1, 2, 3, 2), texts=texts and len(texts))
    options: dict[str, object] = {"form": form, "chunk_size": 2}
    if texts:
        options |= {"cu_seqlens": bounds(texts), "normalize_qk": True}

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(row.op(**dict(zip(inputs, tensors, strict=True)), **options))

    assert torch.autograd.gradcheck(function, [x.clone().requires_grad_() for x in inputs.values()])


@pytest.mark.cover
def test_second_derivatives():
    """The recurrent and parallel forms differentiate twice; the chunkwise one refuses instead of dropping terms."""
    inputs = draw(KIMI_DELTA, Shape(1, 3, 1, 1, 2, 2))
    tensors = [x.clone().requires_grad_() for x in inputs.values()]
    for form in ("recurrent", "parallel"):
        assert torch.autograd.gradgradcheck(
            lambda *x, form=form: KIMI_DELTA.op(**dict(zip(inputs, x, strict=True)), form=form).output, tensors
        )
    output = KIMI_DELTA.op(*tensors[:5], form="chunkwise").output
    with pytest.raises(RuntimeError, match=r"lineate::chunkwise has no second derivative.*form='recurrent'"):
        torch.autograd.grad(torch.autograd.grad(output.sum(), tensors[0], create_graph=True)[0].sum(), tensors[1])


def explicit(row: Row, inputs: Inputs, decay_first: bool = True) -> tuple[Tensor, Tensor]:
    """Return S_t = (I - beta k k^T) Diag(a) S_{t-1} + beta k v^T with the matrices written out, head by head."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    b, t, hv, _ = v.shape
    key_dim, group = q.shape[-1], hv // q.shape[2]
    output, final = torch.empty_like(v), torch.empty_like(inputs["state"])
    for i in range(b):
        for head in range(hv):
            S = inputs["state"][i, head]
            for token in range(t):
                key, value = k[i, token, head // group], v[i, token, head]
                log_decay = inputs["log_decay"][i, token, head] if "log_decay" in inputs else torch.zeros(())
                beta = inputs["beta"][i, token, head] if "beta" in inputs else 1.0
                forget = torch.diag(log_decay.double().exp().expand(key_dim))
                erase = torch.eye(key_dim) - (beta if row.corrects else 0.0) * torch.outer(key, key)
                S = (erase @ forget if decay_first else forget @ erase) @ S + beta * torch.outer(key, value)
                output[i, token, head] = S.T @ q[i, token, head // group] / math.sqrt(key_dim)
            final[i, head] = S
    return output, final


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_forms_are_the_explicit_matrices(row):
    inputs = draw(row, Shape(2, 19, 2, 4, 3, 5))
    output, state = explicit(row, inputs)
    for form in FORMS:
        got = row.op(**inputs, form=form, chunk_size=16)
        assert relative_error(got.output, output) < 1e-14
        assert relative_error(got.state, state) < 1e-14


def test_decay_comes_before_the_erasure():
    """Per channel the two do not commute, so the order matters; per head it does not."""
    for row, differs in ((KIMI_DELTA, True), (GATED_DELTA, False)):
        inputs = draw(row, Shape(1, 6, 1, 1, 3, 2))
        erased_first, _ = explicit(row, inputs, decay_first=False)
        for form in FORMS:
            error = relative_error(row.op(**inputs, form=form, chunk_size=4).output, erased_first)
            assert error > 1e-2 if differs else error < 1e-14


def test_kimi_with_equal_channels_is_gated_delta():
    inputs = draw(GATED_DELTA, SMALL, "reset -50")
    spread = {**inputs, "log_decay": inputs["log_decay"].unsqueeze(-1).expand(*inputs["log_decay"].shape, SMALL.k)}
    for form in FORMS:
        got, expected = run(KIMI_DELTA, spread, form), run(GATED_DELTA, inputs, form)
        got.grads["log_decay"] = got.grads["log_decay"].sum(-1)
        assert_float64_agrees(got, expected, form)


def test_gated_linear_with_equal_channels_is_per_head():
    inputs = draw(GATED_LINEAR, SMALL, "reset -inf")
    spread = {**inputs, "log_decay": inputs["log_decay"].unsqueeze(-1).expand(*inputs["log_decay"].shape, SMALL.k)}
    for form in FORMS:
        got, expected = run(GATED_LINEAR_CHANNEL, spread, form), run(GATED_LINEAR, inputs, form)
        got.grads["log_decay"] = got.grads["log_decay"].sum(-1)
        assert_float64_agrees(got, expected, form)


@pytest.mark.parametrize(
    ("gated", "plain"),
    [(GATED_DELTA, DELTA), (KIMI_DELTA, DELTA), (GATED_LINEAR, LINEAR), (GATED_LINEAR_CHANNEL, LINEAR)],
    ids=str,
)
def test_zero_decay_is_the_rule_without(gated, plain):
    inputs = draw(gated, SMALL, "zero decay")
    without = {name: x for name, x in inputs.items() if name != "log_decay"}
    for form in FORMS:
        got = run(gated, inputs, form)
        del got.grads["log_decay"]
        assert_float64_agrees(got, run(plain, without, form), form)


@pytest.mark.parametrize("form", FORMS)
def test_orthonormal_keys_store_exactly(form):
    """With beta 1 and orthonormal keys nothing interferes: reading with the keys gives the values, from any memory."""
    basis, _ = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    k = basis.reshape(1, 8, 1, 8)
    inputs = draw(DELTA, Shape(1, 8, 1, 1, 8, 5), "beta 1")
    inputs["k"] = k
    state = DELTA.op(**inputs, form=form, chunk_size=4).state
    assert relative_error(torch.einsum("tk,kv->tv", k[0, :, 0], state[0, 0]), inputs["v"][0, :, 0]) < 1e-14
    # A second value under the same key replaces the first one; linear attention would add them.
    inputs["k"] = k[:, :1].expand_as(k)
    state = DELTA.op(**inputs, form=form, chunk_size=4).state
    assert relative_error(k[0, 0, 0] @ state[0, 0], inputs["v"][0, -1, 0]) < 1e-14


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_one_chunk_is_the_parallel_form(row):
    inputs = draw(row, SMALL, seed=2)
    for chunk_size in (SMALL.t, SMALL.t + 1, 1000):
        assert_float64_agrees(run(row, inputs, chunk_size=chunk_size), run(row, inputs, "parallel"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_grouped_value_heads_are_repeated_keys(row, form):
    """If hv > h, value heads i * hv/h ... (i + 1) * hv/h - 1 read key head i, and its gradient is their sum."""
    h, hv = 2, 6
    inputs = draw(row, Shape(2, 21, h, hv, 6, 5))
    repeated = {**inputs, **{name: inputs[name].repeat_interleave(hv // h, dim=2) for name in ("q", "k")}}
    got, expected = run(row, inputs, form, chunk_size=16), run(row, repeated, form, chunk_size=16)
    for name in ("q", "k"):
        expected.grads[name] = expected.grads[name].unflatten(2, (h, hv // h)).sum(3)
    assert_float64_agrees(got, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_normalize_qk_is_normalising_outside(row, form):
    inputs = draw(row, SMALL)
    for name in ("q", "k"):
        inputs[name] = inputs[name] * 5
    got = run(row, inputs, form, normalize_qk=True)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    outside = {
        name: leaves[name] * torch.rsqrt(leaves[name].square().sum(-1, keepdim=True) + 1e-6) for name in ("q", "k")
    }
    output, state = row.op(**{**leaves, **outside}, form=form)
    loss = (output * weights(output, 1)).sum() + (state * weights(state, 2)).sum()
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    assert_float64_agrees(got, Result(output.detach(), state.detach(), grads))
    assert relative_error(outside["q"], unit(inputs["q"])) < 1e-6


@pytest.mark.parametrize("scale", [None, 1.0, 1, 0.3, 0, -2.0])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_scale_multiplies_the_output_alone(row, scale):
    inputs = draw(row, SMALL)
    reference = row.op(**inputs, form="recurrent", scale=1.0)
    factor = SMALL.k**-0.5 if scale is None else scale
    for form in FORMS:
        got = row.op(**inputs, form=form, scale=scale)
        assert torch.allclose(got.output, factor * reference.output, rtol=0, atol=1e-13)
        assert relative_error(got.state, reference.state) < 1e-13


@pytest.mark.parametrize("row", [DELTA, GATED_DELTA, KIMI_DELTA], ids=str)
def test_beta_per_value_channel(row):
    """Each value channel is a separate memory, so its column equals a run of that channel with its own beta."""
    inputs = draw(row, SMALL)
    rates = torch.sigmoid(torch.randn(*inputs["v"].shape, generator=torch.Generator().manual_seed(9)).double())
    got = run(row, {**inputs, "beta": rates}, "recurrent")
    assert_float64_agrees(run(row, {**inputs, "beta": rates}, "auto"), got)
    grads = {name: torch.zeros_like(x) for name, x in got.grads.items()}
    for channel in range(SMALL.v):
        only = slice(channel, channel + 1)
        leaves = {name: x.clone().requires_grad_() for name, x in {**inputs, "beta": rates}.items()}
        own = {**leaves, "v": leaves["v"][..., only], "beta": leaves["beta"][..., channel]}
        own["state"] = leaves["state"][..., only]
        output, state = row.op(**own, form="parallel")
        assert relative_error(got.output[..., only], output) < 1e-12
        assert relative_error(got.state[..., only], state) < 1e-12
        loss = (output * weights(got.output, 1)[..., only]).sum() + (state * weights(got.state, 2)[..., only]).sum()
        for name, x in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            grads[name] += x
    assert_within(errors(got, Result(got.output, got.state, grads)), 1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_equal_columns_of_beta_are_one_beta(form):
    inputs = draw(GATED_DELTA, SMALL)
    columns = {**inputs, "beta": inputs["beta"].unsqueeze(-1).expand_as(inputs["v"])}
    got, expected = run(GATED_DELTA, columns, form), run(GATED_DELTA, inputs, "recurrent")
    got.grads["beta"] = got.grads["beta"].sum(-1)
    assert_float64_agrees(got, expected)


@pytest.mark.parametrize("row", [DELTA, GATED_DELTA, KIMI_DELTA], ids=str)
@pytest.mark.parametrize("form", ["chunkwise", "parallel"])
def test_beta_per_value_channel_in_all_forms(row, form):
    inputs = draw(row, SMALL)
    inputs["beta"] = inputs["beta"].unsqueeze(-1) * torch.linspace(0.2, 1, SMALL.v, dtype=torch.float64)
    assert_float64_agrees(run(row, inputs, form), run(row, inputs, "recurrent"))


@pytest.mark.parametrize("form", ["recurrent", "chunkwise"])
def test_beta_per_value_channel_in_packed_texts(form):
    inputs = draw(DELTA, PACKED, texts=len(TEXTS))
    inputs["beta"] = inputs["beta"].unsqueeze(-1) * torch.linspace(0.2, 1, PACKED.v, dtype=torch.float64)
    packed = DELTA.op(**inputs, cu_seqlens=bounds(), form=form)
    start = 0
    for i, length in enumerate(TEXTS):
        if not length:
            assert torch.equal(packed.state[i], inputs["state"][i])
            continue
        text = {name: x[:, start : start + length] for name, x in inputs.items() if name != "state"}
        alone = DELTA.op(**text, state=inputs["state"][i : i + 1], form=form)
        assert torch.equal(packed.output[:, start : start + length], alone.output)
        assert torch.equal(packed.state[i : i + 1], alone.state)
        start += length


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_attention_matrix(row):
    """A V is the output from an empty memory, A is lower triangular, and it differentiates like the op."""
    inputs = draw(row, SMALL, "empty memory")
    if row.decay != "none":
        inputs["log_decay"][:, 20] = -torch.inf
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    gates = {name: x for name, x in leaves.items() if name not in ("q", "k", "v")}
    matrix = lineate.attention_matrix(leaves["q"], leaves["k"], **gates, scale=0.4)
    heads = SMALL.hv if gates else SMALL.h
    assert matrix.shape == (SMALL.b, heads, SMALL.t, SMALL.t)
    assert torch.equal(matrix, matrix.tril())
    spread = matrix.repeat_interleave(SMALL.hv // heads, dim=1)  # without gates, A has one matrix per head of q
    output = (spread @ leaves["v"].transpose(1, 2)).transpose(1, 2)
    grads = torch.autograd.grad((output * weights(output, 1)).sum(), list(leaves.values()))
    got = Result(output.detach(), torch.zeros(1), dict(zip(leaves, grads, strict=True)))

    expected_leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    expected = row.op(**expected_leaves, scale=0.4, form="recurrent").output
    grads = torch.autograd.grad((expected * weights(expected, 1)).sum(), list(expected_leaves.values()))
    assert_float64_agrees(
        got, Result(expected.detach(), torch.zeros(1), dict(zip(expected_leaves, grads, strict=True)))
    )


@pytest.mark.parametrize("beta", [0.5, 1.0, 1.99, 2.0])
@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.95, 0.999])
def test_inverse_entries_are_at_most_2(beta, cosine):
    """An entry of (I + beta M)^{-1} is -beta_i k_i^T (product of I - beta k k^T) k_j, whose factors have norms <= 1.

    With q = k and scale = 1 the attention matrix is A = P (I + beta M)^{-1} beta, P = I + M; so the inverse is
    P^-1 A / beta.
    """
    t = 64
    normal = torch.randn(1, t, 1, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    common = unit(torch.ones_like(normal))
    k = unit(cosine**0.5 * common + (1 - cosine) ** 0.5 * unit(normal))
    rates = torch.full((1, t, 1), beta, dtype=torch.float64)
    P = lineate.attention_matrix(k, k, scale=1.0)[0, 0]
    A = lineate.attention_matrix(k, k, beta=rates, scale=1.0)[0, 0]
    inverse = torch.linalg.solve_triangular(P, A, upper=False) / beta
    assert inverse.isfinite().all()
    assert inverse.abs().max() <= 2 + 1e-9
    assert relative_error(inverse @ (torch.eye(t) + beta * P.tril(-1)), torch.eye(t)) < 1e-9

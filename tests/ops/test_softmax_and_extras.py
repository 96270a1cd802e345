"""Softmax attention, compared with the memories; feature maps and the normaliser of linear attention."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lineate
from tests.support.cases import (
    FORMS,
    LINEAR,
    PACKED,
    PATHS,
    SMALL,
    TEXTS,
    Inputs,
    Shape,
    bounds,
    convert,
    draw,
    relative_error,
    weights,
)


def qkv(shape: Shape = SMALL, seed: int = 0) -> Inputs:
    inputs = draw(LINEAR, shape, "empty memory", seed=seed)
    return {name: 2 * x for name, x in inputs.items()}


def gradients(output: Tensor, leaves: Inputs) -> list[Tensor]:
    return list(torch.autograd.grad((output * weights(output, 1)).sum(), list(leaves.values())))


def leaves_of(inputs: Inputs) -> Inputs:
    return {name: x.clone().requires_grad_() for name, x in inputs.items()}


# Softmax attention


def explicit_softmax(q: Tensor, k: Tensor, v: Tensor, scale: float, past: int = 0) -> Tensor:
    """Return o_t = sum_j softmax_j(scale q_t . k_j) v_j, j <= past + t, with key heads repeated."""
    group = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2)
    scores = scale * torch.einsum("bihk,bjhk->bhij", q, k)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(past + 1)
    return torch.einsum("bhij,bjhv->bihv", scores.masked_fill(future, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("scale", [None, 1.3])
@pytest.mark.parametrize("normalize_qk", [False, True], ids=["as is", "normalize_qk"])
def test_softmax_is_the_explicit_softmax(scale, normalize_qk):
    leaves = leaves_of(qkv())
    output, cache = lineate.softmax_attention(**leaves, scale=scale, normalize_qk=normalize_qk)
    q, k = leaves["q"], leaves["k"]
    if normalize_qk:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    expected = explicit_softmax(q, k, leaves["v"], SMALL.k**-0.5 if scale is None else scale)
    assert relative_error(output.detach(), expected.detach()) < 1e-14
    assert relative_error(cache.keys.detach(), k.detach()) < 1e-15
    assert torch.equal(cache.values, leaves["v"])
    for got, wanted in zip(gradients(output, leaves), gradients(expected, leaves), strict=True):
        assert relative_error(got, wanted) < 1e-13


@pytest.mark.parametrize("splits", [(1,), (20,), (52,), (1, 2, 3), (16, 32, 48, 52)], ids=str)
def test_softmax_continues_from_its_cache(splits):
    """Outputs and gradients agree through the cache: prefill, more prefill, single tokens."""
    leaves = leaves_of(qkv())
    expected, whole = lineate.softmax_attention(**leaves)
    outputs, cache = [], None
    for start, end in zip((0, *splits), (*splits, SMALL.t), strict=True):
        part = {name: x[:, start:end] for name, x in leaves.items()}
        output, cache = lineate.softmax_attention(**part, state=cache)
        outputs.append(output)
        assert cache.keys.shape[1] == cache.values.shape[1] == end
    output = torch.cat(outputs, dim=1)
    assert relative_error(output.detach(), expected.detach()) < 1e-14
    assert torch.equal(cache.keys, whole.keys)
    assert torch.equal(cache.values, whole.values)
    for got, wanted in zip(gradients(output, leaves), gradients(expected, leaves), strict=True):
        assert relative_error(got, wanted) < 1e-13


def test_packed_softmax_equals_separate_runs():
    inputs = qkv(PACKED)
    output, cache = lineate.softmax_attention(**inputs, cu_seqlens=bounds())
    assert torch.equal(cache.cu_seqlens, bounds())
    start = 0
    for length in filter(None, TEXTS):
        text = {name: x[:, start : start + length] for name, x in inputs.items()}
        assert relative_error(output[:, start : start + length], lineate.softmax_attention(**text).output) < 1e-15
        start += length
    changed = {name: x.clone() for name, x in inputs.items()}
    for x in changed.values():
        x[:, 1:17] = torch.nan  # all of the second non-empty sequence
    others = [*range(1), *range(17, PACKED.t)]
    assert torch.equal(lineate.softmax_attention(**changed, cu_seqlens=bounds()).output[:, others], output[:, others])


def test_packed_softmax_continues_from_its_cache():
    """Two sequences and an empty one grow by different lengths; the cache keeps each sequence in one piece."""
    first, second, third = (3, 0, 5), (2, 4, 0), (0, 1, 1)
    inputs = [qkv(Shape(1, sum(n), 2, 4, 6, 5), seed=i) for i, n in enumerate((first, second, third))]
    cache, outputs = None, []
    for lengths, call in zip((first, second, third), inputs, strict=True):
        output, cache = lineate.softmax_attention(**call, state=cache, cu_seqlens=bounds(lengths))
        outputs.append(output)
    assert cache.cu_seqlens.tolist() == [0, 5, 10, 16]
    for i in range(3):
        parts = []
        for lengths, call in zip((first, second, third), inputs, strict=True):
            start = sum(lengths[:i])
            parts.append({name: x[:, start : start + lengths[i]] for name, x in call.items()})
        whole = {name: torch.cat([x[name] for x in parts], dim=1) for name in "qkv"}
        expected = lineate.softmax_attention(**whole).output
        own = [
            output[:, sum(lengths[:i]) : sum(lengths[: i + 1])]
            for lengths, output in zip((first, second, third), outputs, strict=True)
        ]
        assert relative_error(torch.cat(own, dim=1), expected) < 1e-14
        assert torch.equal(cache.keys[:, cache.cu_seqlens[i] : cache.cu_seqlens[i + 1]], whole["k"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_softmax_dtypes_and_bytes(dtype):
    inputs = convert(qkv(), dtype)
    output, cache = lineate.softmax_attention(**inputs, normalize_qk=True)
    assert output.dtype == cache.keys.dtype == cache.values.dtype == dtype
    b, t, h, hv, k, v = SMALL
    assert cache.nbytes == (b * t * h * k + b * t * hv * v) * dtype.itemsize
    assert isinstance(cache, lineate.KeyValueCache)
    exact = lineate.softmax_attention(**convert(inputs, torch.float64), normalize_qk=True).output
    # The unit keys, the weights and the output are rounded: three roundings of half an eps each.
    assert relative_error(output, exact) < max(1.5 * torch.finfo(dtype).eps, 1e-6 if dtype == torch.float32 else 0)


def test_softmax_never_modifies_its_cache():
    inputs = qkv()
    cache = lineate.softmax_attention(**inputs).state
    kept = [x.clone() for x in cache[:2]]
    continued = lineate.softmax_attention(**inputs, state=cache)
    continued.output.fill_(7.0)
    continued.state.keys.fill_(7.0)
    assert torch.equal(cache.keys, kept[0])
    assert torch.equal(cache.values, kept[1])


def test_softmax_is_causal():
    inputs = qkv()
    expected = lineate.softmax_attention(**inputs).output
    for position in (1, 20, 52):
        changed = {name: torch.cat((x[:, :position], 3 * x[:, position:] + 1), dim=1) for name, x in inputs.items()}
        assert relative_error(lineate.softmax_attention(**changed).output[:, :position], expected[:, :position]) < 1e-15


# Linear attention: feature maps and the normaliser


def features(x: Tensor) -> Tensor:
    return torch.cat((x.relu(), (-x).relu(), x.square()), dim=-1)  # 3 k features, none negative


MAPS = {"identity": None, "elu+1": lambda x: F.elu(x) + 1, "own": features}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("normalize", [False, True], ids=["sum", "normalize"])
@pytest.mark.parametrize("feature_map", MAPS)
def test_feature_maps_are_the_explicit_quadratic_form(feature_map, normalize, form):
    """o_i = sum_{j <= i} (phi(q_i) . phi(k_j)) v_j, divided by the sum of the same weights if normalize."""
    inputs = qkv()
    if feature_map == "identity":  # a normaliser needs weights that do not cancel
        inputs = {**inputs, "q": inputs["q"].abs(), "k": inputs["k"].abs()}
    leaves = leaves_of(inputs)
    phi = MAPS[feature_map] or (lambda x: x)
    given = features if feature_map == "own" else feature_map
    output, state = lineate.linear_attention(
        **leaves, feature_map=given, normalize=normalize, form=form, chunk_size=16, scale=0.8
    )
    group = SMALL.hv // SMALL.h
    q, k = (phi(leaves[name]).repeat_interleave(group, dim=2) for name in ("q", "k"))
    scores = torch.einsum("bihk,bjhk->bhij", q, k).tril()
    expected = 0.8 * torch.einsum("bhij,bjhv->bihv", scores, leaves["v"])
    if normalize:
        expected = expected / (0.8 * scores.sum(-1).transpose(1, 2).unsqueeze(-1))
    assert relative_error(output.detach(), expected.detach()) < 1e-13
    assert state.shape == (SMALL.b, SMALL.hv, q.shape[-1], SMALL.v + normalize)
    if normalize:  # the last column of the memory is the sum of the keys
        assert relative_error(state[..., -1].detach(), k.sum(1).detach()) < 1e-14
    for got, wanted in zip(gradients(output, leaves), gradients(expected, leaves), strict=True):
        assert relative_error(got, wanted) < 1e-12


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("split", [1, 20, 52])
def test_normalised_attention_continues(split, form):
    leaves = leaves_of(qkv())
    options = {"feature_map": "elu+1", "normalize": True, "form": form, "chunk_size": 16}
    expected, final = lineate.linear_attention(**leaves, **options)
    first = lineate.linear_attention(**{name: x[:, :split] for name, x in leaves.items()}, **options)
    second = lineate.linear_attention(
        **{name: x[:, split:] for name, x in leaves.items()}, state=first.state, **options
    )
    output = torch.cat((first.output, second.output), dim=1)
    assert relative_error(output.detach(), expected.detach()) < 1e-13
    assert relative_error(second.state.detach(), final.detach()) < 1e-13
    for got, wanted in zip(gradients(output, leaves), gradients(expected, leaves), strict=True):
        assert relative_error(got, wanted) < 1e-12


def test_normalised_attention_of_packed_texts():
    inputs = qkv(PACKED)
    options = {"feature_map": "elu+1", "normalize": True, "chunk_size": 16}
    output, state = lineate.linear_attention(**inputs, cu_seqlens=bounds(), **options)
    assert state.shape == (len(TEXTS), PACKED.hv, PACKED.k, PACKED.v + 1)
    start = 0
    for i, length in enumerate(TEXTS):
        if length:
            text = {name: x[:, start : start + length] for name, x in inputs.items()}
            alone = lineate.linear_attention(**text, **options)
            assert relative_error(output[:, start : start + length], alone.output) < 1e-14
            assert relative_error(state[i : i + 1], alone.state) < 1e-14
        start += length


def test_normalised_weights_sum_to_1():
    """Constant values come back unchanged, and outputs stay between the smallest and the largest value so far."""
    inputs = qkv()
    inputs["v"] = torch.full_like(inputs["v"], 3.5)
    output = lineate.linear_attention(**inputs, feature_map="elu+1", normalize=True).output
    assert torch.allclose(output, inputs["v"], rtol=1e-13, atol=0)


def test_a_normaliser_of_zero_does_not_divide_by_zero():
    inputs = convert(qkv(Shape(1, 12, 1, 1, 3, 2)), torch.float32)
    inputs["q"] = torch.zeros_like(inputs["q"])
    leaves = leaves_of(inputs)
    output = lineate.linear_attention(**leaves, normalize=True).output
    assert output.isfinite().all()
    assert all(x.isfinite().all() for x in gradients(output, leaves))


@pytest.mark.parametrize("form", FORMS)
def test_features_of_unit_vectors(form):
    """normalize_qk comes before the feature map: phi(q / |q|), not phi(q) / |phi(q)|."""
    inputs = qkv()
    units = {
        name: inputs[name] * torch.rsqrt(inputs[name].square().sum(-1, keepdim=True) + 1e-6) for name in ("q", "k")
    }
    got = lineate.linear_attention(**inputs, feature_map="elu+1", normalize_qk=True, form=form)
    expected = lineate.linear_attention(**{**inputs, **units}, feature_map="elu+1", form=form)
    assert relative_error(got.output, expected.output) < 1e-14
    assert relative_error(got.state, expected.state) < 1e-14


@pytest.mark.parametrize("normalize", [False, True], ids=["sum", "normalize"])
def test_linear_attention_in_bfloat16(normalize):
    """The features are rounded to bfloat16, the sums are not; the division rounds once more for each operand."""
    inputs = convert(qkv(), torch.bfloat16)
    options = {"feature_map": "elu+1", "normalize": normalize}
    output, state = lineate.linear_attention(**inputs, **options)
    assert output.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    q, k = ((F.elu(inputs[name]) + 1).double() for name in ("q", "k"))
    exact = lineate.linear_attention(q, k, inputs["v"].double(), normalize=normalize, form="recurrent").output
    assert relative_error(output, exact) < (3 if normalize else 1) * torch.finfo(torch.bfloat16).eps / 2 + 1e-6


@pytest.mark.parametrize("path", PATHS)
def test_sums_of_normalised_attention_may_exceed_float16(path):
    """q . sum of the keys is about 2^18 here, beyond float16's 2^16; only the result is rounded to float16."""
    inputs = convert(qkv(Shape(1, 40, 1, 2, 6, 5)), torch.float16)
    inputs |= {name: 100 * inputs[name] for name in ("q", "k")}
    q, k = ((F.elu(inputs[name]) + 1).double() for name in ("q", "k"))
    assert (q[0, -1, 0] @ k.sum(1)[0, 0]).item() > 2**17
    rounded = torch.finfo(torch.float16).eps / 2
    options = {"feature_map": "elu+1", "normalize": True, **path}
    state = exact_state = None
    for _ in range(2):  # the second time from the sums of the first call
        output, state = lineate.linear_attention(**inputs, **options, state=state)
        exact, exact_state = lineate.linear_attention(
            q, k, inputs["v"].double(), normalize=True, form="recurrent", state=exact_state
        )
        assert output.dtype == torch.float16 and state.dtype == torch.float32
        assert relative_error(output, exact) < rounded + 1e-6
        assert relative_error(state, exact_state) < 1e-6
    leaves, doubles = leaves_of(inputs), leaves_of(convert(inputs, torch.float64))
    expected = lineate.linear_attention(**doubles, feature_map="elu+1", normalize=True, form="recurrent").output
    found = gradients(lineate.linear_attention(**leaves, **options).output, leaves)
    for dx, exact in zip(found, gradients(expected, doubles), strict=True):
        assert relative_error(dx, exact) < 3 * rounded + 1e-6  # two roundings of the features, one of the gradient

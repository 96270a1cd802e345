"""The kernels around the rules, and what all of them promise.

`path` is ("cpu", float32), Triton's interpreter, or ("cuda", a dtype). Uninitialised memory is full of NaN, and in the
interpreter every access must lie inside a tensor of the launch.
"""

import pytest
import torch
from torch import Tensor

from tests.support.cases import assert_same_bits, assert_within, errors, same_bits
from tests.support.layer_kernels import PLAIN, differentiate, draw, draw_norm, draw_of_norm, kernel, run, small
from tests.support.paths import ONE_EACH, PATHS

pytestmark = pytest.mark.usefixtures("guarded_memory")


def strange_layouts(x: Tensor) -> dict[str, Tensor]:
    """Return the same numbers in memory that is not contiguous, or not aligned."""
    if x.dim() < 2:
        return {}
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 40), torch.nan)
    wide[..., 8:-32] = x
    every = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
    every[..., ::2] = x
    behind = x.new_full((x.shape[0], x.shape[1] + 3, *x.shape[2:]), torch.nan)
    behind[:, 2:-1] = x
    shifted = x.new_full((x.numel() + 1,), torch.nan)
    shifted[1:] = x.flatten()
    return {
        "part of a projection": wide[..., 8:-32],
        "every other element": every[..., ::2],
        "a slice of tokens": behind[:, 2:-1],
        "rows inside": x.new_empty(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1).copy_(x),
        "channels first": x.movedim(-1, 1).contiguous().movedim(1, -1),
        "not aligned": shifted[1:].view(x.shape),
    }


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("name", PLAIN)
def test_memory_layout_does_not_matter(name, path):
    inputs = small(name, path)
    expected = run(name, inputs, path)
    inputs = {n: x.to(path.device) for n, x in inputs.items()}
    for layout in strange_layouts(inputs["x"]):
        leaves = {n: strange_layouts(x).get(layout, x).detach().requires_grad_() for n, x in inputs.items()}
        found = differentiate(kernel(name), leaves)
        if "norm" in name and path.device == "cuda":  # threads share rows differently, and sums differ in order
            assert_within(errors(found, expected), torch.finfo(path.dtype).eps, layout)
        else:
            assert_same_bits(found, expected, layout)


@pytest.mark.parametrize("path", ONE_EACH)
def test_gate_of_all_heads_in_one_projection(path):
    """v | z | more are one tensor: z of a head is a row of the gate, and the heads of one token lie together."""
    inputs = draw_norm(path, 2, 3, 4, 24)
    expected = run("gated_rms_norm", inputs, path)
    wide = torch.randn(2, 3, 8 + 4 * 24 + 16).to(path.dtype)
    wide[..., 8:-16] = inputs["gate"].flatten(2)
    leaves = {n: x.to(path.device).requires_grad_() for n, x in {**inputs, "gate": wide}.items()}

    def norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return kernel("gated_rms_norm")(x, gate[..., 8:-16].unflatten(-1, (4, 24)), weight)

    found = differentiate(norm, leaves)
    found.grads["gate"] = found.grads["gate"][..., 8:-16].unflatten(-1, (4, 24))
    assert_same_bits(found, expected)


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("name", PLAIN)
def test_expanded_gradients(name, path):
    """The gradient of a sum is one number with stride 0 in all dimensions; that of a mean over tokens, in one."""
    inputs = {n: x.to(path.device).requires_grad_() for n, x in small(name, path).items()}
    results = kernel(name)(**inputs)
    y = results[0] if isinstance(results, tuple) else results
    d = torch.randn_like(y[:, :1]).expand_as(y)
    for given in (torch.ones((), dtype=y.dtype, device=y.device).expand_as(y), d):
        found = torch.autograd.grad(y, list(inputs.values()), given, retain_graph=True)
        dense = torch.autograd.grad(y, list(inputs.values()), given.contiguous(), retain_graph=True)
        assert all(same_bits(a, b) for a, b in zip(found, dense, strict=True))


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("name", PLAIN)
def test_nothing_to_do(name, path):
    """Without rows or tokens, results are empty, the state is unchanged, and dweight is 0."""
    inputs = small(name, path)
    for cut in (lambda x: x[:0], lambda x: x[:, :0]):
        few = {n: cut(x) if n in ("x", "gate") else x for n, x in inputs.items()}
        if "state" in few:
            few["state"] = few["state"][: few["x"].shape[0]]
        found = run(name, few, path)
        width = few["x"].shape[-1] // (2 if name == "glu" else 1)
        assert found.output.shape == (*few["x"].shape[:-1], width)
        assert "weight" not in found.grads or found.grads["weight"].eq(0).all()
        if "state" in few:
            assert same_bits(found.state, few["state"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", PLAIN)
def test_same_bits_twice_and_inputs_untouched(name, path):
    inputs = small(name, path)
    if path.device == "cuda":
        inputs = draw(path, 3000, 1100) if name == "short_convolution" else inputs
        inputs = draw_of_norm(name, path, 2, 3000, 3, 100) if "norm" in name else inputs
    copies = {n: x.clone() for n, x in inputs.items()}
    leaves = {n: x.to(path.device).requires_grad_() for n, x in inputs.items()}
    assert_same_bits(differentiate(kernel(name), leaves), differentiate(kernel(name), leaves))
    assert all(same_bits(x.detach().cpu(), copies[n]) for n, x in leaves.items())


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("name", PLAIN)
def test_without_gradients(name, path):
    """Bits are the same with autograd, without it, and if no input requires a gradient."""
    inputs = {n: x.to(path.device) for n, x in small(name, path).items()}
    expected = run(name, inputs, path)
    with torch.no_grad():
        found = [kernel(name)(**inputs), kernel(name)(**{n: x.requires_grad_() for n, x in inputs.items()})]
    for x in found:
        x = x[0] if isinstance(x, tuple) else x
        assert not x.requires_grad and same_bits(x.cpu(), expected.output)


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("name", PLAIN)
def test_second_derivatives_are_refused(name, path):
    """They raise, because treating the first derivatives as constants would be wrong."""
    inputs = {n: x.to(path.device).requires_grad_() for n, x in small(name, path).items()}
    results = kernel(name)(**inputs)
    y = results[0] if isinstance(results, tuple) else results
    (dx,) = torch.autograd.grad(y.square().sum(), inputs["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        (dx.square().sum() + inputs["x"].sum()).backward()


@pytest.mark.parametrize("path", ONE_EACH)
def test_errors(path):
    inputs = {n: x.to(path.device) for n, x in draw(path, 2, 8).items()}
    with pytest.raises(ValueError, match="x must be bfloat16, float16 or float32"):
        kernel("short_convolution")(inputs["x"].double(), inputs["weight"])
    with pytest.raises(ValueError, match=r"size in \(2, 3, 4\), got \(8, 5\)"):
        kernel("short_convolution")(inputs["x"], inputs["weight"].new_zeros(8, 5))
    x = inputs["x"]
    with pytest.raises(ValueError, match="activation must be 'silu' or 'sigmoid', got 'gelu'"):
        kernel("gated_rms_norm")(x, x, x[0, 0], 1e-6, "gelu")
    with pytest.raises(ValueError, match=r"gate must have the shape of x = \(1, 2, 8\), got \(1, 1, 8\)"):
        kernel("gated_rms_norm")(x, x[:, :1], x[0, 0])
    wide = x.new_zeros(2, 8193)
    with pytest.raises(ValueError, match="at most 8192 channels for the kernels, got 8193"):
        kernel("gated_rms_norm")(wide, wide, wide[0])

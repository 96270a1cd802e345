"""The kernel of the short convolution: shapes, packed sequences, states, wrong bounds."""

import itertools
from typing import NamedTuple

import pytest
import torch

from tests.support.cases import assert_same_bits, bounds, relative_error, same_bits, weights
from tests.support.layer_kernels import check, draw, kernel, run
from tests.support.paths import GPU, INTERPRETER, ONE_EACH, PATHS, param

pytestmark = pytest.mark.usefixtures("guarded_memory")


class Shape(NamedTuple):
    b: int
    t: int
    channels: int
    size: int
    state: bool

    def __str__(self) -> str:
        return f"b{self.b}t{self.t}c{self.channels}s{self.size}" + "+state" * self.state


def shapes() -> list[object]:
    cpu = [Shape(2, t, 20, 4, state) for t in (1, 2, 3, 5) for state in (False, True)]
    cpu += [Shape(1, 5, 130, 2, True), Shape(1, 5, 130, 3, True), Shape(1, 1, 130, 3, False), Shape(3, 1, 20, 2, True)]
    cpu += [
        Shape(1, 70, 20, 4, True),
        Shape(1, 70, 130, 4, False),
        Shape(1, 3, 600, 4, True),
        Shape(1, 17, 20, 3, True),
    ]
    sizes = [(b, t, c) for b, t in ((3, 1), (2, 2), (2, 3), (1, 5), (2, 70), (1, 300)) for c in (20, 130)]
    sizes += [(2, 70, 1024), (1, 2000, 1536), (256, 1, 1024)]
    gpu = [Shape(*x, 4, state) for x in sizes for state in (False, True)]
    gpu += [Shape(2, t, 130, size, True) for t in (1, 2, 3, 70) for size in (2, 3)]
    return [param(INTERPRETER, x) for x in cpu] + [param(path, x) for path in GPU for x in gpu]


@pytest.mark.slow(but="values")
@pytest.mark.parametrize(("path", "shape"), shapes())
def test_convolution(path, shape):
    b, t, channels, size, state = shape
    found = check("short_convolution", draw(path, t, channels, size, b=b, state=state), path)
    assert found.output.dtype == found.state.dtype == path.dtype


TEXTS = (0, 1, 0, 0, 2, 3, 21, 0, 1, 4, 0)


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("size", "state"), [(4, True), (4, False), (3, True), (2, True)])
def test_packed_texts(size, state, path):
    """Sequences have no token (first, inside, twice, last), one, fewer than the state holds, or two walks' worth."""
    channels = 20 if path.device == "cpu" else 1032
    inputs = draw(path, sum(TEXTS), channels, size, rows=len(TEXTS), state=state)
    found = check("short_convolution", inputs, path, cu_seqlens=bounds(TEXTS))
    empty = [i for i, length in enumerate(TEXTS) if not length]
    if state:
        assert same_bits(found.state[empty], inputs["state"][empty])
        assert same_bits(found.grads["state"][empty], weights(found.state, 2)[empty].to(path.dtype))


@pytest.mark.parametrize("path", [param(path) for path in GPU])
def test_many_packed_texts(path):
    """There are more bounds than are read at once, and sequences much longer than a walk."""
    lengths = (*[1, 0, 2] * 60, 700, *[3] * 200, 1500, 0)
    inputs = draw(path, sum(lengths), 640, rows=len(lengths))
    check("short_convolution", inputs, path, cu_seqlens=bounds(lengths).int())


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
def test_texts_do_not_see_each_other(path):
    """A sequence has the same bits alone and among others; one full of NaN, with its state, changes only dweight."""
    lengths = (2, 1, 15, 3)
    inputs = draw(path, sum(lengths), 20, rows=len(lengths))
    whole = run("short_convolution", inputs, path, cu_seqlens=bounds(lengths))
    inputs["x"][:, 2:3] = torch.nan
    inputs["state"][1] = torch.nan
    found = run("short_convolution", inputs, path, cu_seqlens=bounds(lengths))
    assert found.output[:, 2:3].isnan().all() and found.grads["x"][:, 2:3].isnan().all()
    for i, (start, end) in enumerate(itertools.pairwise(bounds(lengths).tolist())):
        if i == 1:
            continue
        assert same_bits(found.output[:, start:end], whole.output[:, start:end])
        assert same_bits(found.grads["x"][:, start:end], whole.grads["x"][:, start:end])
        assert same_bits(found.state[i], whole.state[i]) and same_bits(found.grads["state"][i], whole.grads["state"][i])
        own = {"x": inputs["x"][:, start:end], "weight": inputs["weight"], "state": inputs["state"][i : i + 1]}
        y, final = kernel("short_convolution")(**{n: x.to(path.device) for n, x in own.items()})
        assert same_bits(y.cpu(), whole.output[:, start:end]) and same_bits(final.cpu(), whole.state[i : i + 1])


@pytest.mark.parametrize("path", PATHS)
def test_a_step_has_the_bits_of_the_walk(path):
    """One token per row gives the bits of the same tokens as packed sequences of length one."""
    inputs = draw(path, 1, 130, b=3)
    step = run("short_convolution", inputs, path)
    packed = {**inputs, "x": inputs["x"].transpose(0, 1)}
    walked = run("short_convolution", packed, path, cu_seqlens=torch.arange(4))
    walked.grads["x"] = walked.grads["x"].transpose(0, 1)
    dweight = step.grads.pop("weight"), walked.grads.pop("weight")  # sums over rows and over tokens differ in order
    assert relative_error(*dweight) < torch.finfo(path.dtype).eps
    assert_same_bits(step, walked._replace(output=walked.output.transpose(0, 1)))


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("cut", [1, 2, 18])
def test_split_equals_whole(cut, path):
    inputs = {n: x.to(path.device) for n, x in draw(path, 19, 20).items()}
    convolve, x, weight = kernel("short_convolution"), inputs["x"], inputs["weight"]
    y, final = convolve(x, weight, inputs["state"])
    first, between = convolve(x[:, :cut], weight, inputs["state"])
    second, last = convolve(x[:, cut:], weight, between)
    assert same_bits(torch.cat((first, second), 1), y) and same_bits(last, final)


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("wrong", [(0, 9, 25), (3, 9, 20), (0, 18, 6, 20), (0, -5, 20), (0, 1000, 0, 20), (0, 0, 0)])
def test_wrong_bounds_touch_nothing_outside(wrong, path):
    """Bounds are not checked. Tokens outside every sequence are not used, and give 0."""
    inputs = draw(path, 20, 20, rows=len(wrong) - 1)
    inputs["x"][:, : wrong[0] if any(wrong) else None] = torch.nan
    guards = {n: torch.full((3, *x.shape), 7.0, dtype=x.dtype, device=path.device) for n, x in inputs.items()}
    for name, x in guards.items():
        x[1] = inputs[name]
    leaves = {n: x[1].detach().requires_grad_() for n, x in guards.items()}
    y, final = kernel("short_convolution")(**leaves, cu_seqlens=torch.tensor(wrong, device=path.device))
    grads = torch.autograd.grad(y.sum() + final.sum(), list(leaves.values()))
    assert all(x.isfinite().all() for x in (y, final, *grads))
    for x in guards.values():
        assert x[0].eq(7).all() and x[2].eq(7).all()
    if wrong[0] > 0:
        assert y[:, : wrong[0]].eq(0).all() and grads[0][:, : wrong[0]].eq(0).all()
    if wrong[-1] == 0:
        assert y.eq(0).all() and same_bits(final, leaves["state"]) and grads[0].eq(0).all()


@pytest.mark.parametrize("path", ONE_EACH)
def test_one_of_two_gradients(path):
    """The loss depends on the output alone, or on the state alone."""
    inputs = {n: x.to(path.device).requires_grad_() for n, x in draw(path, 5, 20).items()}
    results = kernel("short_convolution")(**inputs)
    both = torch.autograd.grad(results, list(inputs.values()), [torch.ones_like(x) for x in results], retain_graph=True)
    y, final = (torch.autograd.grad(x.sum(), list(inputs.values()), retain_graph=True) for x in results)
    assert final[1].eq(0).all() and final[2].eq(0).all()
    assert final[0][:, -3:].eq(1).all() and final[0][:, :-3].eq(0).all()
    assert all(same_bits(a, b) for a, b in zip(y[1:], both[1:], strict=True))
    assert same_bits(y[0][:, :-3], both[0][:, :-3])


@pytest.mark.parametrize("path", ONE_EACH)
def test_dtypes_of_state_and_weight(path):
    """As in torch, the state is read in the dtype of x, and the output has the wider dtype of x and weight."""
    inputs = draw(path, 5, 20)
    single = {**inputs, "weight": inputs["weight"].float(), "state": inputs["state"].float()}
    found = run("short_convolution", single, path)
    assert found.output.dtype == torch.float32 and found.state.dtype == path.dtype
    assert found.grads["state"].dtype == found.grads["weight"].dtype == torch.float32
    assert same_bits(found.output.to(path.dtype), run("short_convolution", inputs, path).output)

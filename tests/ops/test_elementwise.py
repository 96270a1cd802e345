"""Elementwise functions of a decoding step: an element's bits do not depend on its place; nothing else changes."""

import pytest
import torch
import torch.nn.functional as F

from lineate.torch_ops.elementwise import MOST, elementwise

FUNCTIONS = {"sigmoid": torch.sigmoid, "softplus": F.softplus, "cos": torch.cos, "sin": torch.sin}
functions = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@functions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_bits_do_not_depend_on_the_place(function, dtype):
    x = (20 * torch.randn(512)).to(dtype)
    whole = function(x)
    for n in range(1, 201):
        for first in (0, 1, 7, 512 - n):
            assert torch.equal(elementwise(function, x[first : first + n]), whole[first : first + n])


@functions
@torch.no_grad()
def test_any_layout(function):
    """Rows of a matrix, also where they are columns in memory, repeated or backwards; the shape stays."""
    x = 20 * torch.randn(7, 37)
    whole = function(F.pad(x.flatten(), (0, 61)))[:259].view(7, 37)
    assert torch.equal(elementwise(function, x), whole)
    assert torch.equal(elementwise(function, x.T), whole.T)
    assert torch.equal(elementwise(function, x.T.contiguous().T), whole)
    assert torch.equal(elementwise(function, x[:, None, ::2]), whole[:, None, ::2])
    assert torch.equal(elementwise(function, x[:1].expand(5, -1)), whole[:1].expand(5, -1))
    assert torch.equal(elementwise(function, x[3, 5]), whole[3, 5])
    assert elementwise(function, x[:0]).shape == (0, 37)
    large = torch.randn(MOST + 3)
    assert torch.equal(elementwise(function, large), function(large))
    assert elementwise(function, x.to("meta")).shape == x.shape


@functions
def test_gradients_are_those_of_the_function(function):
    x = torch.randn(5, 13)
    grads = []
    for call in (lambda x: elementwise(function, x), function):
        own = x.clone().requires_grad_()
        y = call(own)
        y.square().sum().backward()
        grads.append((y.detach(), own.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])
    y, tangent = torch.func.jvp(lambda x: elementwise(function, x), (x,), (torch.ones_like(x),))
    torch.testing.assert_close((y, tangent), torch.func.jvp(function, (x,), (torch.ones_like(x),)))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
@functions
def test_transforms_and_graphs_see_the_function_alone(function):
    x, seen = torch.randn(5, 13), []

    def backend(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    with torch.no_grad():
        compiled = torch.compile(lambda x: elementwise(function, x), fullgraph=True, backend=backend)
        assert torch.equal(compiled(x), function(x)) and len(seen) == 1
        torch.testing.assert_close(torch.func.vmap(lambda row: elementwise(function, row))(x), function(x))
        traced = torch.jit.trace(lambda x: elementwise(function, x), x)
        more = torch.randn(3, 13)
        torch.testing.assert_close(traced(more), function(more))


@functions
@pytest.mark.parametrize("threads", [1, 3, 4])
@torch.no_grad()
def test_bits_do_not_depend_on_how_threads_share_them_out(function, threads):
    """Sixteen rows are shared out among threads; one is not."""
    x = 20 * torch.randn(16, 4864)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([elementwise(function, row) for row in x.split(1)])
        assert torch.equal(elementwise(function, x), alone)
        assert torch.equal(elementwise(function, x.T.contiguous().T), alone)
    finally:
        torch.set_num_threads(before)

"""Views, strides and expanded tensors give the same bits as contiguous tensors."""

import pytest
import torch
from torch import Tensor

from tests.support.cases import (
    GATED_DELTA,
    GATED_LINEAR_CHANNEL,
    KIMI_DELTA,
    LINEAR,
    Inputs,
    Result,
    assert_same_bits,
    convert,
    draw,
    weights,
)
from tests.support.marks import slow_but
from tests.support.paths import ONE_EACH
from tests.support.rule_kernels import MODEL, SHORT, loss_of, run, sized


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("by_head", [False, True], ids=["q, k, v", "head by head"])
@pytest.mark.parametrize("row", [LINEAR, GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_views_of_one_projection(row, by_head, path):
    """q, k and v stay where a fused projection left them; its gradient is their gradients next to each other."""
    shape = sized(path, SHORT._replace(b=2, hv=1, k=16, v=24), MODEL._replace(b=2))
    if by_head:
        shape = shape._replace(h=2, hv=2)
    inputs = convert(draw(row, shape), path.dtype)
    plain = run(row, inputs, path)

    def side_by_side(x: Tensor) -> Tensor:
        return x if by_head else x.flatten(2)

    def take_apart(x: Tensor) -> Inputs:
        parts = x.split([side_by_side(inputs[name]).shape[-1] for name in "qkv"], dim=-1)
        return {name: part.view(inputs[name].shape) for name, part in zip("qkv", parts, strict=True)}

    projection = torch.cat([side_by_side(inputs[name]) for name in "qkv"], dim=-1).to(path.device).requires_grad_()
    views = take_apart(projection)
    rest = {n: x.to(path.device).requires_grad_() for n, x in inputs.items() if n not in views}
    output, state = row.op(**views, **rest, form="chunkwise", backend="triton")
    dprojection, *grads = torch.autograd.grad(loss_of(output, state), [projection, *rest.values()])
    grads = {n: x.cpu() for n, x in zip(rest, grads, strict=True)} | take_apart(dprojection.cpu())
    assert_same_bits(Result(output.detach().cpu(), state.detach().cpu(), grads), plain)


def strange_layouts(x: Tensor) -> dict[str, Tensor]:
    """Return the same numbers in memory that is not contiguous, or not aligned."""
    padded = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
    padded[..., ::2] = x
    behind = x.new_full((x.shape[0], x.shape[1] + 3, *x.shape[2:]), torch.nan)
    behind[:, 2:-1] = x
    shifted = x.new_full((x.numel() + 1,), torch.nan)
    shifted[1:] = x.flatten()
    return {
        "rows inside": x.new_empty(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1).copy_(x),
        "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "tokens last": x.movedim(1, -1).contiguous().movedim(-1, 1),
        "every other element": padded[..., ::2],
        "a slice of tokens": behind[:, 2:-1],
        "not aligned": shifted[1:].view(x.shape),
    }


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("one_token", [False, True], ids=["many tokens", "one token"])
@pytest.mark.parametrize("row", slow_but([GATED_DELTA, KIMI_DELTA], (GATED_DELTA,)), ids=str)
def test_memory_layout_does_not_matter(row, one_token, path):
    """Non-contiguous inputs and transposed gradients give the same bits; with one token, strides are arbitrary."""
    shape = sized(path, SHORT._replace(b=2, hv=1), MODEL._replace(b=2))
    shape = shape._replace(t=1, h=2, hv=2) if one_token else shape
    inputs = convert(draw(row, shape), path.dtype)
    plain = run(row, inputs, path)
    layouts = {name: strange_layouts(x.to(path.device)) for name, x in inputs.items()}
    for layout in layouts["q"]:
        leaves = {name: x[layout].requires_grad_() for name, x in layouts.items()}
        output, state = row.op(**leaves, form="chunkwise", backend="triton")
        loss = (output.double().transpose(1, 3) * weights(output, 1).to(path.device).transpose(1, 3)).sum()
        loss = loss + (state.double().mT * weights(state, 2).to(path.device).mT).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        got = Result(output.detach().cpu(), state.detach().cpu(), {})
        got = got._replace(grads={n: x.cpu() for n, x in zip(leaves, grads, strict=True)})
        assert_same_bits(got, plain, layout)


@pytest.mark.cover
@pytest.mark.parametrize("path", ONE_EACH)
def test_expanded_inputs_and_gradients(path):
    """One token is expanded to all and one state to all rows, with stride 0; so is the gradient of a sum."""
    inputs = convert(draw(GATED_DELTA, sized(path, SHORT._replace(b=2), MODEL._replace(b=2))), path.dtype)
    expanded = {name: x[:1] if name == "state" else x[:1, :1] for name, x in inputs.items()}
    results = []
    for copy in (False, True):
        leaves = {name: x.to(path.device).expand_as(inputs[name]) for name, x in expanded.items()}
        leaves = {name: (x.contiguous() if copy else x).detach().requires_grad_() for name, x in leaves.items()}
        output, state = GATED_DELTA.op(**leaves, form="chunkwise", backend="triton")
        grads = torch.autograd.grad(output.sum() + state.sum(), list(leaves.values()))
        results.append(Result(output.detach(), state.detach(), dict(zip(leaves, grads, strict=True))))
    assert_same_bits(*results)

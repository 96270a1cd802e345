"""Packed sequences: they agree with the oracle, do not affect each other, and wrong bounds are harmless."""

import importlib

import pytest
import torch
from torch import Tensor

import lineate
from tests.support.cases import (
    GATED_DELTA,
    GATED_LINEAR_CHANNEL,
    KIMI_DELTA,
    ROWS,
    Inputs,
    Result,
    assert_same_bits,
    bounds,
    convert,
    draw,
    same_bits,
    weights,
)
from tests.support.marks import slow_but
from tests.support.paths import ONE_EACH, PATHS
from tests.support.rule_kernels import FEWER_TEXTS, LEAN, MODEL, TEXTS, check, packed_inputs


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", slow_but(ROWS, (GATED_LINEAR_CHANNEL, KIMI_DELTA)), ids=str)
def test_packed_texts(row, path):
    """Sequences have no token (first, inside, last), one, one chunk, two or more; an empty one keeps its state."""
    texts = FEWER_TEXTS if path.device == "cpu" else TEXTS
    inputs = packed_inputs(row, path, texts, LEAN)
    got = check(row, inputs, path, cu_seqlens=bounds(texts))
    empty = [i for i, length in enumerate(texts) if not length]
    assert same_bits(got.state[empty], inputs["state"][empty])
    assert same_bits(got.grads["state"][empty], weights(got.state, 2)[empty].float())


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", slow_but([GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], (GATED_DELTA,)), ids=str)
def test_packed_texts_do_not_see_each_other(row, path):
    """A sequence has the same bits alone and among others; one full of NaN, with its state, changes no other."""
    lengths = (1, 66, 0, 5) if path.device == "cpu" else (1, 70, 0, 20)
    inputs = packed_inputs(row, path, lengths, LEAN)

    def part(result: Result | Inputs, which: int):
        """Return the part of a result that belongs to one sequence."""
        start, end = bounds(lengths)[which : which + 2].tolist()
        own = slice(which, which + 1)

        def cut(name: str, x: Tensor) -> Tensor:
            return x[own] if name == "state" else x[:, start:end]

        if isinstance(result, dict):
            return {name: cut(name, x) for name, x in result.items()}
        grads = {name: cut(name, x) for name, x in result.grads.items()}
        return Result(cut("output", result.output), cut("state", result.state), grads)

    def separate_losses(inputs: Inputs, lengths: tuple[int, ...]) -> Result:
        """Run with all weights 1, so that the loss of a sequence does not depend on its place."""
        leaves = {name: x.clone().to(path.device).requires_grad_() for name, x in inputs.items()}
        ends = bounds(lengths).to(path.device)
        output, state = row.op(**leaves, cu_seqlens=ends, backend="triton", form="chunkwise")
        grads = torch.autograd.grad(output.double().sum() + state.double().sum(), list(leaves.values()))
        grads = {name: x.cpu() for name, x in zip(leaves, grads, strict=True)}
        return Result(output.detach().cpu(), state.detach().cpu(), grads)

    together = separate_losses(inputs, lengths)
    for which in (1, 3):
        alone = separate_losses(part(inputs, which), (lengths[which],))
        assert_same_bits(part(together, which), alone, which)
    broken = {name: x.clone() for name, x in inputs.items()}
    for x in part(broken, 1).values():
        x.fill_(torch.nan)
    got = separate_losses(broken, lengths)
    assert part(got, 1).output.isnan().all()
    for which in (0, 2, 3):
        assert_same_bits(part(got, which), part(together, which), which)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "wrong", [(0, 20, 140), (3, 20, 130), (0, 120, 60, 130), (0, -5, 130), (0, 1000, 0, 130), (0, 0, 0)], ids=str
)
def test_wrong_bounds_touch_nothing_outside(wrong):
    """Bounds are not checked on a GPU either; memory around the tensors is unchanged."""
    shape = MODEL._replace(h=1, hv=2) if not any(wrong) else MODEL
    inputs = convert(draw(GATED_DELTA, shape, "empty memory"), torch.bfloat16)
    guarded = {}
    for name, x in inputs.items():
        guarded[name] = torch.full((3, *x.shape), 7.0, dtype=x.dtype, device="cuda")
        guarded[name][1] = x
    leaves = {name: x[1].detach().requires_grad_() for name, x in guarded.items()}
    output, state = GATED_DELTA.op(**leaves, cu_seqlens=torch.tensor(wrong, device="cuda"), form="chunkwise")
    torch.autograd.grad(output.nan_to_num().sum() + state.nan_to_num().sum(), list(leaves.values()))
    torch.cuda.synchronize()
    for x in guarded.values():
        assert x[0].eq(7).all() and x[2].eq(7).all()


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("wrong", [(3, 20, 130), (0, 100, 70), (5, 5), (0, 0, 0), (0, 140)], ids=str)
def test_only_tokens_outside_of_every_sequence_are_cleared(wrong, path):
    kernels = importlib.import_module("lineate.kernels.call")
    sizes = (1, 3), (300,), (2, 128), (), (4,)
    drawn = [torch.full((1, 140, *size), 7.0, dtype=path.dtype, device=path.device) for size in sizes]
    bounds, output = torch.tensor(wrong, device=path.device), drawn[1].clone()
    sequences = kernels.find_sequences(drawn[0][..., None], bounds, output=output)
    kernels.clear(sequences, 140, *drawn)
    low, high = wrong[0], max(wrong)
    for x in (*drawn, output):
        assert x[:, low:high].eq(7).all()
        assert x[:, :low].eq(0).all() and x[:, high:].eq(0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("raw", [False, True])
def test_outputs_and_gradients_outside_of_every_sequence_are_0(raw):
    shape, bounds = (1, 130), torch.tensor([3, 70, 110], device="cuda")
    q, k = (torch.randn(*shape, 2, 64, device="cuda").bfloat16().requires_grad_() for _ in range(2))
    v = torch.randn(*shape, 4, 64, device="cuda").bfloat16().requires_grad_()
    gates = [torch.randn(*shape, 4, device="cuda").requires_grad_() for _ in range(2)]
    if raw:
        speed = torch.zeros(4, device="cuda", requires_grad=True)
        output, _ = lineate.fused_delta_rule(q, k, v, *gates, speed, cu_seqlens=bounds)
        gates.append(speed)
    else:
        log_decay, beta = -gates[0].detach().abs(), gates[1].detach().sigmoid()
        gates = [log_decay.requires_grad_(), beta.requires_grad_()]
        output, _ = lineate.gated_delta_rule(q, k, v, *gates, cu_seqlens=bounds, normalize_qk=True)
    found = torch.autograd.grad(output.float().sum(), [q, k, v, *gates])
    assert all(x.isfinite().all() for x in found)
    for x in (output, *found[:5]):
        assert x[:, :3].eq(0).all() and x[:, 110:].eq(0).all() and x[:, 3:110].ne(0).any()

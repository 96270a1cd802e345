"""The kernels around the rules, run and differentiated; the same in plain torch; and a budget for their difference.

The oracle is plain torch in float64, written here sequence by sequence; a budget is twice the error of the same lines
in the tested dtype, plus rounding.
"""

import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.cases import Inputs, Result, assert_within, errors, weights
from tests.support.paths import Path

pytest.importorskip("triton")
layer_ops = importlib.import_module("lineate.kernels.layers.ops")


# Plain torch


def convolution(
    x: Tensor, weight: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the convolution sequence by sequence and tap by tap, as the layer does in plain torch."""
    size = weight.shape[1]
    texts = list(x) if cu_seqlens is None else [x[0, i:j] for i, j in itertools.pairwise(cu_seqlens.tolist())]
    ys, finals = [], []
    for i, text in enumerate(texts):
        before = x.new_zeros(size - 1, x.shape[2]) if state is None else state[i].mT.to(x.dtype)
        padded = torch.cat((before, text))
        u = padded[: len(text)] * weight[:, 0]
        for a in range(1, size):
            u = torch.addcmul(u, padded[a : a + len(text)], weight[:, a])
        ys.append(F.silu(u))
        finals.append(padded[len(padded) - size + 1 :].mT)
    return torch.stack(ys) if cu_seqlens is None else torch.cat(ys)[None], torch.stack(finals)


def norm(x: Tensor, weight: Tensor, eps: float = 1e-6, zero_centred: bool = False) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight if zero_centred else weight)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6, activation: str = "silu") -> Tensor:
    return norm(x, weight, eps) * (F.silu(gate) if activation == "silu" else gate.sigmoid())


def gated_unit(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def tables(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return angles that rotate half of the channels, rounded to an even number."""
    n = x.shape[-1] // 4
    angles = torch.arange(x.shape[1] * n, device=x.device).view(x.shape[1], n).float().sqrt()
    return angles.cos(), angles.sin()


def turned(x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
    cos, sin = (y.to(x.dtype)[..., None, :] for y in (tables(x) if cos is None else (cos, sin)))
    n = cos.shape[-1]
    first, second, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


PLAIN = {
    "short_convolution": convolution, "rms_norm": norm, "gated_rms_norm": gated_norm, "glu": gated_unit,
    "rotate": turned,
}  # fmt: skip


def kernel(name: str):
    if name == "rotate":
        return lambda x, cos=None, sin=None: layer_ops.rotate(x, *(tables(x) if cos is None else (cos, sin)))
    return getattr(layer_ops, name)


def differentiate(function: object, leaves: Inputs, **options: object) -> Result:
    """Return output, state if there is one, and the gradients of the loss of cases.run by all inputs, on the CPU."""
    results = function(**leaves, **options)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum((x.double() * weights(x, i).to(x.device)).sum() for i, x in enumerate(results, 1))
    grads = torch.autograd.grad(loss, list(leaves.values()))
    output, state = (*results, torch.zeros(0))[:2]
    grads = {name: x.cpu() for name, x in zip(leaves, grads, strict=True)}
    return Result(output.detach().cpu(), state.detach().cpu(), grads)


def run(name: str, inputs: Inputs, path: Path, **options: object) -> Result:
    leaves = {n: x.detach().to(path.device).clone().requires_grad_() for n, x in inputs.items()}
    options = {n: x.to(path.device) if isinstance(x, Tensor) else x for n, x in options.items()}
    return differentiate(kernel(name), leaves, **options)


def plain(name: str, inputs: Inputs, dtype: torch.dtype | None = None, **options: object) -> Result:
    leaves = {n: x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for n, x in inputs.items()}
    return differentiate(PLAIN[name], leaves, **options)


def check(name: str, inputs: Inputs, path: Path, what: object = "", **options: object) -> Result:
    """Compare all results with float64 on the same numbers, within 2 x torch's error in this dtype plus rounding.

    Rounding is half an eps of the result's dtype (float32: its sums of at most n terms round like sqrt(n)), and
    natively 2^-20, the error of a sigmoid by ex2.approx (2^-22, and |x| 2^-24 from its argument, |x| < 8) and
    rcp.approx (2^-23).
    """
    expected = plain(name, inputs, torch.float64, **options)
    found = run(name, inputs, path, **options)
    n = max(next(iter(inputs.values())).shape[:-1].numel(), 16)
    rounding = torch.finfo(path.dtype).eps / 2 + 2**-24 * n**0.5 + (2**-20 if path.device == "cuda" else 0)
    allowed = {key: 2 * x + rounding for key, x in errors(plain(name, inputs, **options), expected).items()}
    assert_within(errors(found, expected), allowed, what)
    for key, x in inputs.items():
        assert (found.grads[key].dtype, found.grads[key].shape) == (x.dtype, x.shape), key
    return found


# The convolution


def draw(
    path: Path, t: int, channels: int, size: int = 4, *, b: int = 1, rows: int | None = None, state: bool = True
) -> Inputs:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "x": torch.randn(b, t, channels, generator=generator),
        "weight": torch.randn(channels, size, generator=generator) / size**0.5,
        "state": torch.randn(b if rows is None else rows, channels, size - 1, generator=generator),
    }
    if not state:
        del inputs["state"]
    return {name: x.to(path.dtype) for name, x in inputs.items()}


# The norms


def draw_norm(path: Path, *shape: int) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    x, gate, weight = (torch.randn(n, generator=generator) for n in (shape, shape, shape[-1:]))
    return {"x": (2 * x).to(path.dtype), "gate": (2 * gate).to(path.dtype), "weight": weight.to(path.dtype) + 1}


# All of them


def small(name: str, path: Path) -> Inputs:
    t = 3 if path.device == "cpu" else 6
    if name == "short_convolution":
        return draw(path, t, 24, b=2)
    if name == "glu":
        return {"x": draw(path, t, 48, b=2)["x"]}
    if name == "rotate":
        return {"x": draw_norm(path, 2, t, 2, 24)["x"]}
    return draw_of_norm(name, path, 2, t, 2, 24)


def draw_of_norm(name: str, path: Path, *shape: int) -> Inputs:
    return {n: x for n, x in draw_norm(path, *shape).items() if n != "gate" or name == "gated_rms_norm"}

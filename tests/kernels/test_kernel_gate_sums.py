"""Gradients that are sums over all tokens, A_log's and dt_bias's, from raw gates of Kimi Delta Attention.

What a reader and a writer of one pair add to the gradient of the decays before both cancels in exact arithmetic. It
must cancel in bfloat16 too, because what is left of each pair adds up over all tokens.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import lineate
from tests.support.cases import KIMI_DELTA, Inputs, Shape, weights
from tests.support.paths import BF16, INTERPRETER, Path, param

SUMS = ("A_log", "dt_bias")
# Keys of 64 channels run in Triton on every GPU; those of 128 run in Gluon on Hopper.
PLACES = [
    param(INTERPRETER, Shape(1, 130, 1, 2, 16, 8)),
    param(BF16, Shape(2, 512, 2, 8, 64, 64)),
    param(BF16, Shape(2, 512, 2, 4, 128, 128)),
]
NORMALIZE = pytest.mark.parametrize("normalize", [False, True], ids=["long keys", "unit keys"])
BOUND = pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])


def draw_raw(shape: Shape, path: Path, normalize: bool, seed: int) -> Inputs:
    """Draw grouped heads and raw gates; if keys keep their length, about sqrt(k), beta is divided by its square."""
    b, t, h, hv, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    inputs = {
        "q": normal(b, t, h, key_dim),
        "k": normal(b, t, h, key_dim),
        "v": normal(b, t, hv, value_dim),
        "gate": normal(b, t, hv, key_dim),
        "beta": normal(b, t, hv).sigmoid() / (1 if normalize else key_dim),
    }
    parameters = {"A_log": normal(hv) - 1, "dt_bias": normal(hv, key_dim)}
    return {**{name: x.to(path.dtype) for name, x in inputs.items()}, **parameters}


def half_square(output: Tensor) -> Tensor:
    """Return |output|^2 / 2: forgetting makes outputs small, so the parts of the tokens in dA_log have one sign."""
    return output.double().square().sum() / 2


def weighted(output: Tensor) -> Tensor:
    """Return sum(w output) with random w, so that the parts of the tokens have random signs."""
    return (output.double() * weights(output, 1).to(output.device)).sum()


def sums_over_tokens(
    inputs: Inputs, path: Path, loss: Callable[[Tensor], Tensor], lower_bound: float | None, normalize: bool
) -> dict[str, Tensor]:
    """Return the kernels' gradients of A_log and dt_bias."""
    leaves = {name: x.detach().clone().to(path.device).requires_grad_() for name, x in inputs.items()}
    options = {"lower_bound": lower_bound, "normalize_qk": normalize}
    output, _ = lineate.fused_delta_rule(**leaves, **options, backend="triton")
    grads = torch.autograd.grad(loss(output), [leaves[name] for name in SUMS])
    return {name: x.cpu().double() for name, x in zip(SUMS, grads, strict=True)}


def expected_sums(
    inputs: Inputs, loss: Callable[[Tensor], Tensor], lower_bound: float | None, normalize: bool
) -> dict[str, Tensor]:
    """Return them from the gate and the recurrent form in float64."""
    leaves = {name: x.double().requires_grad_() for name, x in inputs.items()}
    log_decay = lineate.decay_gate(leaves["gate"], leaves["A_log"], leaves["dt_bias"], lower_bound=lower_bound)
    given = {name: leaves[name] for name in ("q", "k", "v", "beta")}
    output, _ = KIMI_DELTA.op(**given, log_decay=log_decay, form="recurrent", backend="torch", normalize_qk=normalize)
    grads = torch.autograd.grad(loss(output), [leaves[name] for name in SUMS])
    return dict(zip(SUMS, grads, strict=True))


def check(
    shape: Shape, path: Path, loss: Callable[[Tensor], Tensor], allowed: float, draws: int, **options: object
) -> None:
    """Check |error| <= allowed |gradient|, 2-norms over all draws and elements; float32 may lose one eps a token."""
    if path is INTERPRETER:
        allowed = shape.t * torch.finfo(torch.float32).eps
    pairs = []
    for seed in range(draws):
        inputs = draw_raw(shape, path, options["normalize"], seed)
        pairs.append((sums_over_tokens(inputs, path, loss, **options), expected_sums(inputs, loss, **options)))
    for name in SUMS:
        got, expected = (torch.stack([x[name] for x in side]) for side in zip(*pairs, strict=True))
        error = ((got - expected).norm() / expected.norm()).item()
        assert error <= allowed, f"{name}: {error:.2e}"


@pytest.mark.slow(but="values")
@BOUND
@NORMALIZE
@pytest.mark.parametrize(("path", "shape"), PLACES)
def test_gate_sums_of_one_sign(path, shape, normalize, lower_bound):
    """They are within .3% of float64."""
    draws = 1 if path is INTERPRETER else 2
    check(shape, path, half_square, 0.003, draws, normalize=normalize, lower_bound=lower_bound)


@pytest.mark.slow(but="values")
@BOUND
@NORMALIZE
@pytest.mark.parametrize(("path", "shape"), PLACES)
def test_gate_sums_of_random_signs(path, shape, normalize, lower_bound):
    """Over several draws they are within an eps of bfloat16, .8%: errors of the parts cancel no more than the parts."""
    draws = 1 if path is INTERPRETER else 4
    check(shape, path, weighted, torch.finfo(torch.bfloat16).eps, draws, normalize=normalize, lower_bound=lower_bound)

"""The kernels of RMSNorm with and without a gate, of the gated linear unit, and of rotary positions."""

import pytest
import torch

from lineate import layers
from tests.support.cases import same_bits
from tests.support.layer_kernels import check, draw_norm, layer_ops
from tests.support.paths import GPU, INTERPRETER, PATHS, param

pytestmark = pytest.mark.usefixtures("guarded_memory")


def norm_shapes() -> list[object]:
    cpu = [(2, 5, 3, 20), (70, 130), (2, 3, 128), (1, 3, 2, 512), (1, 3), (2, 1, 2, 2, 5)]
    gpu = [*cpu, (2, 70, 8, 128), (1, 1000, 4, 256), (40_000, 64), (3, 333, 3, 80), (5, 300, 500)]
    return [param(INTERPRETER, x) for x in cpu] + [param(path, x) for path in GPU for x in gpu]


@pytest.mark.parametrize(("path", "shape"), norm_shapes())
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norm(activation, path, shape):
    found = check("gated_rms_norm", draw_norm(path, *shape), path, eps=1e-5, activation=activation)
    assert found.output.dtype == path.dtype


def wide_norm_shapes() -> list[object]:
    cpu = [(2, 3, 20), (5, 1030), (2, 2, 3, 130)]
    gpu = [*cpu, (3, 700, 1024), (1, 1, 2048), (2, 33, 2304), (70, 5120), (9, 8192), (1, 300, 7, 256)]
    return [param(INTERPRETER, x) for x in cpu] + [param(path, x) for path in GPU for x in gpu]


@pytest.mark.parametrize(("path", "shape"), wide_norm_shapes())
@pytest.mark.parametrize("zero_centred", [False, True])
def test_norm(zero_centred, path, shape):
    inputs = draw_norm(path, *shape)
    del inputs["gate"]
    assert check("rms_norm", inputs, path, eps=1e-5, zero_centred=zero_centred).output.dtype == path.dtype


@pytest.mark.parametrize("path", [param(GPU[0])])
def test_norm_under_autocast_is_in_its_dtype(path):
    """Forward and backward equal rounding afterwards, except for the order of sums."""
    norm, x = layers.RMSNorm(384).cuda(), torch.randn(5, 70, 384, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        low = norm(x)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low, norm(x).bfloat16(), rtol=2**-8, atol=0)
    d = torch.randn_like(low)
    found = torch.autograd.grad(low, (x, norm.weight), d)
    expected = torch.autograd.grad(norm(x), (x, norm.weight), d.float())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", [param(GPU[0])])
@pytest.mark.parametrize("kind", [layers.DeltaNet, layers.GatedDeltaNet, layers.KimiDeltaAttention])
def test_under_autocast_the_rule_is_in_its_dtype(path, kind):
    """Weights stay float32; if the convolution's product were float32, the rule would run several times slower."""
    mixer, seen = kind(256, 2).cuda(), []
    hook = mixer.conv.register_forward_hook(lambda module, inputs, output: seen.append(output[0].dtype))
    with torch.autocast("cuda", torch.bfloat16):
        y, _ = mixer(torch.randn(1, 70, 256, device="cuda"))
    hook.remove()
    assert seen == [torch.bfloat16] and y.dtype == torch.bfloat16
    y.sum().backward()
    assert mixer.conv.weight.grad.dtype == torch.float32 and mixer.conv.weight.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from numpy: the interpreter also divides in idle rows
@pytest.mark.parametrize("path", PATHS)
def test_gated_norm_of_zeros_and_without_eps(path):
    inputs = draw_norm(path, 3, 20)
    check("gated_rms_norm", inputs, path, eps=0.0)
    inputs["x"][1] = 0
    check("gated_rms_norm", inputs, path, eps=1e-6)


# The gated linear unit


def unit_shapes() -> list[object]:
    cpu = [(2, 3, 40), (1, 2), (5, 260), (2, 2060)]
    gpu = [*cpu, (2, 70, 1536), (1000, 10_240), (3, 1, 4, 6)]
    return [param(INTERPRETER, x) for x in cpu] + [param(path, x) for path in GPU for x in gpu]


@pytest.mark.parametrize(("path", "shape"), unit_shapes())
def test_gated_unit(path, shape):
    x = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    check("glu", {"x": x.to(path.dtype)}, path)


# Rotary positions


def turn_shapes() -> list[object]:
    cpu = [(1, 1, 1, 2, 2), (2, 3, 2, 24, 24), (1, 9, 3, 10, 6), (2, 2, 1, 130, 66)]
    gpu = [*cpu, (2, 300, 4, 128, 32), (1, 3000, 16, 256, 64), (64, 1, 8, 64, 64)]
    return [param(INTERPRETER, x) for x in cpu] + [param(path, x) for path in GPU for x in gpu]


@pytest.mark.parametrize(("path", "shape"), turn_shapes())
@pytest.mark.parametrize("shared", [True, False], ids=["one table", "a table a row"])
def test_rotate(path, shape, shared):
    b, t, heads, size, dim = shape
    g = torch.Generator().manual_seed(0)
    x = torch.randn(b, t, heads, size, generator=g).to(path.dtype)
    angles = 100 * torch.rand(*([] if shared else [b]), t, dim // 2, generator=g)
    found = check("rotate", {"x": x}, path, cos=angles.cos(), sin=angles.sin())
    assert same_bits(found.output[..., dim:], x[..., dim:])


def test_rotate_says_what_is_wrong():
    x, table = torch.zeros(2, 3, 1, 8), torch.zeros(3, 4)
    for wrong in (torch.zeros(3, 5), torch.zeros(1, 3, 4), torch.zeros(3, 4).double(), torch.zeros(4, 4)):
        with pytest.raises(ValueError, match="cos must be float32 of shape"):
            layer_ops.rotate(x, wrong, table)

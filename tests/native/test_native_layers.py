"""The parts of a layer in C against the plain torch code that specifies them, in float64.

Budgets are derived: for each result, 2x the error of the torch code in float32 against float64, plus a few roundings of
the largest number.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lineate.layers.convolution import short_convolution
from lineate.layers.feed import glu
from lineate.layers.norm import GatedRMSNorm, RMSNorm
from lineate.native import layers as native
from tests.support import fresh
from tests.support.cases import needs_native
from tests.support.marks import slow_but

pytestmark = needs_native

LANES = 16  # at most
ROUNDINGS = 8 * 2.0**-24
"""exp, a division and a few products, one after another."""

Inputs = dict[str, Tensor | None]


def convolution(x: Tensor, weight: Tensor, state: Tensor | None = None, cu: Tensor | None = None) -> list[Tensor]:
    return list(short_convolution(x, weight, state, cu))


def norm(x: Tensor, weight: Tensor, *, zero_centred: bool = False) -> list[Tensor]:
    module = RMSNorm(x.shape[-1], 1e-5, zero_centred=zero_centred)
    return [torch.func.functional_call(module, {"weight": weight}, (x,))]


def gated(x: Tensor, weight: Tensor, gate: Tensor, *, activation: str = "silu") -> list[Tensor]:
    module = GatedRMSNorm(x.shape[-1], 1e-5, activation=activation)
    return [torch.func.functional_call(module, {"weight": weight}, (x, gate))]


def gated_linear(x: Tensor) -> list[Tensor]:
    return [glu(x)]


def results(
    function: Callable[..., list[Tensor]], inputs: Inputs, dtype: torch.dtype, **options: object
) -> list[Tensor]:
    """Return outputs, then the gradients of all inputs, for a fixed random projection of all outputs."""
    leaves = {}
    for name, x in inputs.items():
        leaf = x if x is None or not x.is_floating_point() else x.detach().to(dtype)
        leaves[name] = leaf.requires_grad_() if leaf is not None and leaf.is_floating_point() else leaf
    outputs = function(**leaves, **options)
    generator = torch.Generator().manual_seed(1)
    along = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(dtype) for y in outputs]
    wanted = [x for x in leaves.values() if x is not None and x.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, wanted, along)]


def plainly(function: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Run a function as if there were no native backend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "serves", lambda *tensors: False)
        return function()


def compare(function: Callable[..., list[Tensor]], inputs: Inputs, **options: object) -> None:
    got = results(function, inputs, torch.float32, **options)
    again = results(function, inputs, torch.float32, **options)
    expected = plainly(lambda: results(function, inputs, torch.float64, **options))
    rounded = plainly(lambda: results(function, inputs, torch.float32, **options))
    for i, (x, same, y, z) in enumerate(zip(got, again, expected, rounded, strict=True)):
        assert x.dtype == torch.float32
        assert x.shape == y.shape
        assert torch.equal(x, same), f"result {i} differs from run to run"
        if x.numel():
            budget = 2 * (z - y).abs().max() + ROUNDINGS * y.abs().max()
            assert (x - y).abs().max() <= budget, f"result {i}: {(x - y).abs().max():.2e} over {budget:.2e}"


def wide(*shape: int, left: int = 3, right: int = 5) -> Tensor:
    """Return part of a wider tensor, as split gives it."""
    *rest, size = shape
    return torch.randn(*rest, left + size + right)[..., left : left + size]


def draw_convolution(
    b: int, t: int, channels: int, size: int, *, cu: list[int] | None = None, state: str = "none"
) -> Inputs:  # fmt: skip
    torch.manual_seed(b * 1000 + t * 10 + channels + size)
    rows = b if cu is None else len(cu) - 1
    states = {
        "none": lambda: None,
        "dense": lambda: torch.randn(rows, channels, size - 1),
        "transposed": lambda: torch.randn(rows, size - 1, channels).transpose(1, 2),  # as a call returns it
        "odd": lambda: torch.randn(size - 1, 2 * channels, rows)[:, ::2].permute(2, 1, 0),
    }
    return {
        "x": wide(b, t, channels),
        "weight": torch.randn(channels, size),
        "state": states[state](),
        "cu": None if cu is None else torch.tensor(cu),
    }


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("t", [1, 2, 3, 5, 200])
def test_convolution(t, size):
    for channels, state in ((1, "none"), (LANES + 3, "dense"), (5 * LANES - 1, "transposed"), (2 * LANES, "odd")):
        compare(convolution, draw_convolution(2, t, channels, size, state=state))


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("state", ["none", "dense", "transposed", "odd"])
@pytest.mark.parametrize("cu", [[0, 40], [0, 0, 1, 2, 5, 5, 40, 40], [0, 3, 7, 12, 18, 25, 40]], ids=str)
def test_packed_convolution(cu, state, size):
    compare(convolution, draw_convolution(1, 40, LANES + 3, size, cu=cu, state=state))
    inputs = draw_convolution(1, 40, LANES + 3, size, cu=cu, state=state)
    assert torch.equal(short_convolution(*inputs.values())[0], convolution(**inputs | {"cu": inputs["cu"].int()})[0])


def test_more_taps_than_the_native_code_has_are_left_to_torch():
    compare(convolution, draw_convolution(1, 9, 5, 6, state="dense"))


def test_more_channels_than_a_slab_has():
    compare(convolution, draw_convolution(1, 7, 1100, 4, state="dense"))


@pytest.mark.parametrize(
    "shape", [(7, 1), (1, 3, 5), (2, 70, 3, LANES), (2, 3, 2, 4, 4 * LANES + 3), (300, 129), (33,)]
)
@pytest.mark.parametrize("dense", [True, False])
def test_norms(shape, dense):
    torch.manual_seed(0)
    make = torch.randn if dense else wide
    inputs = {"x": make(*shape), "weight": torch.randn(shape[-1])}
    for zero_centred in (False, True):
        compare(norm, inputs, zero_centred=zero_centred)
    for activation in ("silu", "sigmoid"):
        compare(gated, {**inputs, "gate": 4 * wide(*shape)}, activation=activation)
    compare(gated_linear, {"x": 4 * make(*shape[:-1], 2 * shape[-1])})


def test_transposed_inputs():
    torch.manual_seed(0)
    x, gate = torch.randn(8, 6, 20).transpose(0, 2), torch.randn(6, 20, 8).transpose(0, 1)
    compare(gated, {"x": x, "weight": torch.randn(8), "gate": gate})
    compare(norm, {"x": x, "weight": torch.randn(8)})
    compare(gated_linear, {"x": x})
    compare(convolution, {"x": x, "weight": torch.randn(8, 4), "state": None, "cu": None})


def test_a_gate_that_broadcasts_is_left_to_torch():
    compare(gated, {"x": torch.randn(2, 5, 8), "weight": torch.randn(8), "gate": torch.randn(5, 1)})


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8), (2, 5, 0)])
def test_nothing(shape):
    x = torch.randn(shape)
    compare(gated_linear, {"x": x})
    if shape[-1]:
        compare(norm, {"x": x, "weight": torch.randn(shape[-1])})
    compare(convolution, {"x": x, "weight": torch.randn(shape[-1], 4), "state": None, "cu": None})
    compare(convolution, draw_convolution(*shape, 4, state="dense"))


def test_silu_over_its_whole_range():
    """The relative errors of silu and of its slope are small element by element, away from where they are 0."""
    x = torch.cat((torch.linspace(-86, 86, 100_001), torch.linspace(-2, 2, 100_001)))
    got = results(gated_linear, {"x": torch.stack((x, torch.ones_like(x)), -1)}, torch.float32)
    exact = x.double().requires_grad_()
    y = torch.nn.functional.silu(exact)
    (slope,) = torch.autograd.grad(y.sum(), exact)
    error = ((got[0][:, 0] - y).abs() / y.abs().clamp(min=1e-30)).max().item()
    assert error < ROUNDINGS
    along = torch.randn(x.shape[0], 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    error = got[1][:, 0] / along[:, 0].double() - slope
    terms = exact.sigmoid() * (1 + (exact * (-exact).sigmoid()).abs())  # the terms cancel at x = -1.28
    assert (error.abs() / terms).max() < ROUNDINGS


def test_long_sums_keep_their_digits():
    """The error of dweight over many tokens must not grow with them as that of one sum in float32 does."""
    torch.manual_seed(0)
    t = 20_000
    x = torch.rand(1, t, 4) + 1
    for function, inputs in (
        (convolution, {"x": x, "weight": torch.rand(4, 4), "state": None, "cu": None}),
        (norm, {"x": x, "weight": torch.rand(4)}),
    ):
        leaves = {name: y if y is None else y.clone().requires_grad_() for name, y in inputs.items()}
        exact = {name: y if y is None else y.double().requires_grad_() for name, y in inputs.items()}
        (dweight,) = torch.autograd.grad(function(**leaves)[0].sum(), leaves["weight"])
        (expected,) = torch.autograd.grad(function(**exact)[0].sum(), exact["weight"])
        assert ((dweight - expected).abs() / expected.abs()).max() < ROUNDINGS


def cases() -> list[tuple[Callable[..., list[Tensor]], Inputs]]:
    """Return cases large enough for several threads."""
    torch.manual_seed(0)
    return [
        (convolution, draw_convolution(2, 300, 517, 4, state="dense")),
        (convolution, draw_convolution(1, 300, 517, 4, cu=[0, 17, 17, 299, 300], state="dense")),
        (gated, {"x": torch.randn(700, 3, 130), "weight": torch.randn(130), "gate": wide(700, 3, 130)}),
        (norm, {"x": torch.randn(700, 390), "weight": torch.randn(390)}),
        (gated_linear, {"x": torch.randn(700, 780)}),
    ]


@pytest.mark.parametrize("which", range(5))
def test_same_bits_for_any_number_of_threads(which):
    function, inputs = cases()[which]
    before = torch.get_num_threads()
    try:
        made = []
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            made.append(results(function, inputs, torch.float32))
    finally:
        torch.set_num_threads(before)
    for other in made[1:]:
        assert all(torch.equal(x, y) for x, y in zip(made[0], other, strict=True))


@pytest.mark.parametrize("which", range(5))
def test_same_bits_in_any_company(which):
    """A row, a sequence or a token alone gives what it gives among others."""
    function, inputs = cases()[which]
    outputs = function(**inputs)
    if function is convolution:
        for i in range(2):
            cu = inputs["cu"]
            row, start, end = (i, 0, 300) if cu is None else (0, *cu[i : i + 2].tolist())
            y, final = short_convolution(
                inputs["x"][row : row + 1, start:end], inputs["weight"], inputs["state"][i : i + 1]
            )
            assert torch.equal(y, outputs[0][row : row + 1, start:end])
            assert torch.equal(final, outputs[1][i : i + 1])
    else:
        own = {name: x if name == "weight" else x[333:336] for name, x in inputs.items()}
        assert torch.equal(function(**own)[0], outputs[0][333:336])


def test_token_by_token_is_the_whole():
    inputs = draw_convolution(2, 11, LANES + 3, 4, state="dense")
    y, final = convolution(**inputs)
    state, parts = inputs["state"], []
    for i in range(11):
        part, state = short_convolution(inputs["x"][:, i : i + 1], inputs["weight"], state)
        parts.append(part)
    assert torch.equal(torch.cat(parts, 1), y)
    assert torch.equal(state, final)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, LANES + 2])  # within a vector, and in the remainder
def test_what_is_not_finite_spreads_as_in_torch(value, at):
    size = LANES + 3
    for function, inputs in (
        (convolution, draw_convolution(2, 9, size, 4, state="dense")),
        (norm, {"x": torch.randn(6, size), "weight": torch.randn(size)}),
        (gated, {"x": torch.randn(6, size), "weight": torch.randn(size), "gate": torch.randn(6, size)}),
        (gated_linear, {"x": torch.randn(6, 2 * size)}),
    ):
        for name in inputs.keys() - {"cu"}:
            changed = {other: None if x is None else x.clone() for other, x in inputs.items()}
            changed[name].view(-1, changed[name].shape[-1])[-1, at % changed[name].shape[-1]] = value
            got = function(**changed)
            expected = plainly(lambda f=function, i=changed: f(**i))
            for x, y in zip(got, expected, strict=True):
                assert torch.equal(x.isfinite(), y.isfinite())
                if value != value:
                    assert torch.equal(x.isnan(), y.isnan())


def test_nan_with_a_payload():
    bits = torch.arange(0x7F800001, 0x7F800001 + 1023 * 4099, 4099, dtype=torch.int32)
    odd = torch.cat((bits, bits | -(2**31))).view(torch.float32)[None]
    assert odd.isnan().all()
    ones = torch.ones_like(odd)
    assert gated(ones, ones[0], odd, activation="sigmoid")[0].isnan().all()
    assert gated_linear(torch.cat((odd, ones), -1))[0].isnan().all()


def test_gradients_of_some_outputs_and_some_inputs():
    inputs = draw_convolution(2, 5, 7, 4, state="dense")
    x, weight, state = (inputs[name].clone() for name in ("x", "weight", "state"))
    for part in (0, 1):
        leaf = state.clone().requires_grad_()
        (got,) = torch.autograd.grad(short_convolution(x, weight, leaf)[part].square().sum(), leaf)
        (expected,) = plainly(
            lambda p=part, s=leaf: list(torch.autograd.grad(short_convolution(x, weight, s)[p].square().sum(), s))
        )
        torch.testing.assert_close(got, expected)


def test_second_derivatives_are_refused():
    x = torch.randn(3, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(glu(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="lineate::glu_native has no second derivative"):
        torch.autograd.grad(dx.sum(), x)


def test_transforms_and_tangents_are_left_to_torch():
    x = torch.randn(3, 8)
    expected = plainly(lambda: gated_linear(x))[0]
    torch.testing.assert_close(torch.func.vmap(glu)(x), expected)
    _, tangent = torch.func.jvp(glu, (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = glu(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent)


ERRORS = [
    (lambda x: short_convolution(x, torch.ones(7, 4)), r"weight must have shape .* = \(8, 4\), got \(7, 4\)"),
    (lambda x: short_convolution(x, torch.ones(8, 4), torch.ones(1, 8, 3)), r"state must have shape .* = \(2, 8, 3\)"),
    (lambda x: short_convolution(x[:1], torch.ones(8, 4), None, torch.tensor([0, 9])), "end at t = 5"),
    (lambda x: short_convolution(x[:1], torch.ones(8, 4), None, torch.tensor([0, 4, 3, 5])), "not decrease"),
    (lambda x: short_convolution(x, torch.ones(8, 4), None, torch.tensor([0, 5])), "b = 1"),
    (lambda x: RMSNorm(7)(x), r"weight must have shape \(size,\) = \(8,\), got \(7,\)"),
    (lambda x: glu(x[..., :7]), "even last dimension"),
]  # fmt: skip


@pytest.mark.parametrize("which", range(len(ERRORS)))
def test_errors(which):
    call, message = ERRORS[which]
    with pytest.raises(ValueError, match=message):
        call(torch.randn(2, 5, 8))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 4))
        self.norm, self.gated = RMSNorm(20), GatedRMSNorm(5, activation="sigmoid")

    def forward(self, x: Tensor, state: Tensor | None, cu: Tensor | None) -> tuple[Tensor, Tensor]:
        y, state = short_convolution(self.norm(x), self.weight, state, cu)
        y = self.gated(y.unflatten(-1, (4, 5)), x.unflatten(-1, (4, 5))).flatten(-2)
        return glu(y), state


@pytest.mark.cover
@pytest.mark.parametrize("packed", slow_but([False, True], [True]))
def test_compile(packed):
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer, cu = Layer(), torch.tensor([0, 3, 3, 9]) if packed else None
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for state in (None, torch.randn(3 if packed else 1, 20, 3)):
        made = []
        for module in (layer, compiled):
            x = torch.randn(1, 9, 25, generator=torch.Generator().manual_seed(2))[..., :20].requires_grad_()
            outputs = module(x, state, cu)
            gradients = torch.autograd.grad(sum(y.square().sum() for y in outputs), [x, *layer.parameters()])
            with torch.no_grad():
                made.append([*outputs, *gradients, *module(x, state, cu)])
        assert all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(*made, strict=True))


def test_ops():
    ops = torch.ops.lineate
    x, weight, state, cu = draw_convolution(1, 9, 8, 4, cu=[0, 2, 9], state="dense").values()
    y, final = short_convolution(x, weight, state, cu)
    calls = [
        (ops.short_convolution_native, (x, weight, None, None)),
        (ops.short_convolution_native, (x, weight, state, cu)),
        (ops.short_convolution_native_backward, (y, final, x, weight, state, cu)),
        (ops.short_convolution_native_backward, (y, None, x, weight, None, cu)),
        (ops.rms_norm_native, (x, weight[:, 0], None, 1e-6, True, "")),
        (ops.rms_norm_native, (x, weight[:, 0], y, 1e-6, False, "silu")),
        (ops.rms_norm_native_backward, (y, x, weight[:, 0], y, 1e-6, False, "silu")),
        (ops.glu_native, (x,)),
        (ops.glu_native_backward, (y[..., :4], x)),
    ]
    for op, args in calls:
        checks = ["test_schema", "test_faketensor", "test_autograd_registration"]
        torch.library.opcheck(op, args, test_utils=checks)


@pytest.mark.cover
def test_switched_off():
    """With LINEATE_NATIVE=0, the torch code runs and gives the same numbers."""
    code = (
        "import torch; from lineate.native import layers; from lineate.layers.feed import glu\n"
        "x = torch.linspace(-4, 4, 512).view(4, 128)\n"
        "assert not layers.serves(x)\n"
        "gate, up = x.chunk(2, -1)\n"
        "assert torch.equal(glu(x), torch.nn.functional.silu(gate) * up)\n"
    )
    fresh.run(code, LINEATE_NATIVE="0").check_returncode()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(dtype):
    x = torch.randn(1, 5, 8, dtype=dtype)
    assert not native.serves(x)
    assert glu(x).dtype == RMSNorm(8)(x).dtype == dtype

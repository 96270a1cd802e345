"""The gate of the decay by itself, and together with the rules."""

import pytest
import torch
import torch.nn.functional as F
from torch import zeros

import lineate
from tests.support.cases import GATED_DELTA, KIMI_DELTA, Shape, draw

SHAPE = Shape(2, 6, 2, 4, 3, 5)
GATES = [(bound, per_channel) for bound in (None, -5.0, -0.1) for per_channel in (False, True)]


def parameters(per_channel: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": (2, 6, 4, *[3] * per_channel), "A_log": (4,), "dt_bias": (4, *[3] * per_channel)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


@pytest.mark.parametrize(("bound", "per_channel"), GATES)
def test_the_gate_is_its_equation(bound, per_channel):
    given = parameters(per_channel)
    speed = given["A_log"].exp().view(4, *[1] * per_channel)
    raw = given["gate"] + given["dt_bias"]
    expected = -speed * F.softplus(raw) if bound is None else bound * torch.sigmoid(speed * raw)
    got = lineate.decay_gate(**given, lower_bound=bound)
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=0)
    assert (got < 0).all() and (bound is None or (got > bound).all())
    flat = {**given, "dt_bias": given["dt_bias"].flatten()}
    assert torch.equal(lineate.decay_gate(**flat, lower_bound=bound), got)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rounded = {name: x.to(dtype) for name, x in given.items()}
        narrow = lineate.decay_gate(**rounded, lower_bound=bound)
        assert narrow.dtype == torch.float32  # as the rules need it
        exact = lineate.decay_gate(**{name: x.double() for name, x in rounded.items()}, lower_bound=bound)
        # A relative error of 2^-24 in speed * raw, at most 64 here, is one of 64 * 2^-24 in its exponential.
        assert (speed * raw).abs().max() < 64
        torch.testing.assert_close(narrow.double(), exact, rtol=2 * 64 * 2**-24, atol=0)


@pytest.mark.parametrize(("bound", "per_channel"), GATES)
def test_gradients(bound, per_channel):
    given = [x.requires_grad_() for x in parameters(per_channel).values()]
    assert torch.autograd.gradcheck(lambda *x: lineate.decay_gate(*x, lower_bound=bound), given)
    assert torch.autograd.gradgradcheck(lambda *x: lineate.decay_gate(*x, lower_bound=bound), given)


@pytest.mark.parametrize("shape", [(4,), (4, 3), (12,)], ids=str)
def test_biases_of_a_gate_per_channel(shape):
    """One number a head, one a channel, and flat, wherever raw gates are taken, with gradients in their own shape."""
    q, k, v = (x.float() for x in list(draw(KIMI_DELTA, SHAPE).values())[:3])
    given = {name: x.float() for name, x in parameters(True).items()}
    gate, A_log, bias = given["gate"], given["A_log"], torch.linspace(-1, 1, 12)[: zeros(shape).numel()].view(shape)
    full = (bias[:, None].expand(4, 3) if shape == (4,) else bias.view(4, 3)).contiguous()
    write = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(lineate.decay_gate(gate, A_log, bias), lineate.decay_gate(gate, A_log, full))
    found, wanted = (
        lineate.fused_delta_rule(q, k, v, gate, write, A_log, x.requires_grad_()).output for x in (bias, full)
    )
    assert torch.equal(found, wanted)
    (gradient,), (expected,) = torch.autograd.grad(found.sum(), bias), torch.autograd.grad(wanted.sum(), full)
    torch.testing.assert_close(gradient, expected.sum(1) if shape == (4,) else expected.view(shape))
    with torch.no_grad():
        for _ in range(2):  # the second call is a known one
            steps = lineate.decode(
                q, k, v, gate, write, state=zeros(2, 4, 3, 5), raw_gates=True, A_log=A_log, dt_bias=bias,
                normalize_qk=True,
            )  # fmt: skip
            torch.testing.assert_close(steps, wanted, rtol=1e-5, atol=1e-6)


def test_without_parameters():
    """With a bound, A_log None is exp(A_log) = 1, and no bias adds nothing."""
    gate = parameters(True)["gate"]
    assert torch.equal(lineate.decay_gate(gate, lower_bound=-5), -5 * gate.sigmoid())
    assert torch.equal(lineate.decay_gate(gate, zeros(4), lower_bound=-5), -5 * gate.sigmoid())


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
def test_every_form_from_the_gate_equals_the_fused_op(row, bound):
    """In float64, decay_gate followed by the op in each form is fused_delta_rule, forward and backward."""
    given = parameters(row is KIMI_DELTA)
    call = draw(row, SHAPE)
    del call["log_decay"]
    write = call.pop("beta")
    leaves = {name: x.clone().requires_grad_() for name, x in {**call, **given, "write": write}.items()}
    fused = lineate.fused_delta_rule(**leaves, lower_bound=bound)
    expected = [*fused, *torch.autograd.grad(fused.output.sum() + fused.state.sum(), list(leaves.values()))]
    for form in ("recurrent", "chunkwise", "parallel"):
        log_decay = lineate.decay_gate(leaves["gate"], leaves["A_log"], leaves["dt_bias"], lower_bound=bound)
        rest = {name: leaves[name] for name in call}
        found = row.op(**rest, log_decay=log_decay, beta=leaves["write"].sigmoid(), form=form, normalize_qk=True)
        got = [*found, *torch.autograd.grad(found.output.sum() + found.state.sum(), list(leaves.values()))]
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


WRONG = [
    ({"gate": None}, TypeError, "gate must be a torch.Tensor, got NoneType"),
    ({"gate": zeros(4)}, ValueError, "gate must have shape (b, t, hv) or (b, t, hv, k), got (4,)"),
    ({"gate": zeros(2, 6, 4, dtype=torch.int64)}, ValueError,
     "gate must be float64, float32, bfloat16 or float16, got int64; convert it with .float()"),
    ({"A_log": None}, TypeError, "A_log must be a torch.Tensor, got NoneType"),
    ({"A_log": zeros(2)}, ValueError, "A_log must have shape (hv,) = (4,), got (2,)"),
    ({"dt_bias": zeros(4, 3)}, ValueError, "dt_bias must have shape (hv,) = (4,), got (4, 3)"),
    ({"gate": zeros(2, 6, 4, 3), "dt_bias": zeros(3)}, ValueError,
     "dt_bias must have shape (hv,) = (4,) or (hv, k) = (4, 3) or (hv * k,) = (12,), got (3,)"),
    ({"lower_bound": 1.0}, ValueError, "lower_bound must be finite and below 0, got 1.0; -5 is usual"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "message"), WRONG)
def test_wrong_gates(changes, kind, message):
    with pytest.raises(kind) as raised:
        lineate.decay_gate(**{"gate": zeros(2, 6, 4), "A_log": zeros(4), "dt_bias": zeros(4), **changes})
    assert str(raised.value) == message


def test_missing_gates_name_what_can_be_given_instead():
    q, k, v = (torch.zeros(SHAPE.b, SHAPE.t, h, n) for h, n in ((2, 3), (2, 3), (4, 5)))
    gate = zeros(2, 6, 4)
    instead = "log_decay= can be given instead of gate, and beta= instead of write"
    calls = [
        ("gate", {}),
        ("gate", {"write": gate, "A_log": zeros(4)}),
        ("gate", {"beta": gate}),
        ("write", {"gate": gate, "A_log": zeros(4)}),
        ("write", {"log_decay": gate}),
    ]
    for name, given in calls:
        with pytest.raises(TypeError, match=f"^{name} must be a torch.Tensor, got NoneType; {instead}$"):
            lineate.fused_delta_rule(q, k, v, **given)

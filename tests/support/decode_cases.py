"""Helpers that the tests of `lineate.decode` share: where it runs, its inputs, and the comparison with the oracle."""

import pytest
import torch
from torch import Tensor, zeros

from lineate import call
from lineate.dispatch import select_rule
from lineate.ops.decoding import decode
from tests.support.cases import (
    Inputs,
    Result,
    Row,
    Shape,
    assert_within,
    budget,
    convert,
    draw,
    errors,
    interpreted,
    oracle,
)

# (device, backend)
TORCH = pytest.param(("cpu", "torch"), id="torch")
INTERPRETER = pytest.param(("cpu", "triton"), id="interpreter", marks=interpreted)
NATIVE = pytest.param(("cuda", "triton"), id="gpu", marks=pytest.mark.gpu)
KERNEL = [INTERPRETER, NATIVE]
PATHS = [TORCH, *KERNEL]
Path = tuple[str, str]

SHAPE = Shape(2, 5, 2, 4, 6, 5)
SMALL = Shape(1, 10, 1, 2, 6, 5)


def run(inputs: Inputs, path: Path, **options: object) -> Result:
    """Run decode on copies of the inputs, and return the result on the CPU."""
    device, backend = path
    given = {name: x.to(device).clone() for name, x in inputs.items()}
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    place = given["state"].data_ptr()
    output = decode(**given, **options, backend=backend)
    assert given["state"].data_ptr() == place
    return Result(output.cpu(), given["state"].cpu(), {})


def inputs_of(row: Row, shape: Shape, special: str = "ordinary", *, texts: int | None = None) -> Inputs:
    """Draw float32 inputs as cases.draw does, with a state of zeros if the special case has none."""
    inputs = convert(draw(row, shape, special, texts=texts), torch.float32)
    inputs.setdefault("state", zeros(shape.b, shape.hv, shape.k, shape.v))
    return inputs


def check(
    row: Row, inputs: Inputs, path: Path, what: object = "", *, worst_case: bool = False, **options: object
) -> Result:
    """Compare with the oracle, within cases.budget for chunks of one token.

    The GPU's exp and rsqrt are approximations to about 2^-22, and each token's errors stay in the memory.
    """
    expected = oracle(row, inputs, only=(), **options)
    got = run(inputs, path, **options)
    allowed = budget(row, inputs, expected, 1, worst_case=worst_case, **options)
    if path[0] == "cuda":
        allowed = {name: x + inputs["q"].shape[1] * 2**-22 for name, x in allowed.items()}
    assert got.output.dtype == inputs["v"].dtype
    assert_within(errors(got, expected), allowed, what or row)
    return got


def check_op(inputs: Inputs, **places: Tensor | None) -> None:
    """Check what torch demands of custom ops on a call of lineate::decode."""
    op = torch.ops.lineate.decode.default
    rule = select_rule(call.Inputs(**inputs))
    given = {**inputs, **places, **call.Options(rule, 1.0)._asdict(), "rule": rule.name, "backend": "torch"}
    torch.library.opcheck(op, tuple(given.get(argument.name) for argument in op._schema.arguments))

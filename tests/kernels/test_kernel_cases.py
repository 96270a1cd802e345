"""The kernels of the rules on the case table of the torch forms: shapes, special inputs, scales, dtypes of gates."""

import pytest
import torch

from tests.support.cases import (
    GATED_DELTA,
    GATED_LINEAR_CHANNEL,
    KIMI_DELTA,
    LINEAR,
    ROWS,
    SPECIAL_ROWS,
    Result,
    Shape,
    assert_same_bits,
    assert_within,
    bounds,
    budget,
    convert,
    draw,
    errors,
    oracle,
)
from tests.support.marks import slow_but
from tests.support.paths import BF16, GPU, INTERPRETER, PATHS, param
from tests.support.rule_kernels import LEAN, LENGTHS, MODEL, ONE_HEAD, SMALL, check, native_term, run, sized

# Shapes


def shapes() -> list[object]:
    cpu = [SMALL._replace(b=2 if t == 1 else 1, t=t, hv=1 if t > 65 else 2) for t in LENGTHS]
    cpu += [Shape(1, 20, 2, 2, 33, 66), Shape(2, 20, 1, 3, 5, 1)]
    gpu = [Shape(2, t, 1, 2, 48, 40) for t in LENGTHS] + [MODEL, Shape(1, 65, 2, 2, 33, 66)]
    return [param(INTERPRETER, x) for x in cpu] + [param(path, x) for path in GPU for x in gpu]


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize(("path", "shape"), shapes())
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_shapes(row, path, shape):
    check(row, convert(draw(row, shape), path.dtype), path)


def wide_shapes() -> list[object]:
    sizes = [(160, 96), (96, 160), (256, 256), (16, 256), (256, 16)]
    cpu = [param(INTERPRETER, Shape(1, 65, 1, 1, *size), slow=True) for size in sizes]
    return cpu + [param(path, Shape(1, 65, 1, 1, *size)) for path in GPU[:2] for size in sizes[:3]]


@pytest.mark.parametrize(("path", "shape"), wide_shapes())
@pytest.mark.parametrize("row", [GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_wide_heads(row, path, shape):
    check(row, convert(draw(row, shape), path.dtype), path)


def tiled_shapes() -> list[object]:
    """Return shapes for the Gluon kernels: one, two and four value heads per key head; k and v of 64, 128 and 192."""
    sizes = [(1, 4, 128, 128), (2, 2, 128, 128), (2, 2, 64, 64), (1, 2, 64, 128), (2, 2, 128, 64), (1, 2, 128, 192)]
    return [param(BF16, Shape(2, 130, *size)) for size in sizes] + [param(GPU[2], Shape(2, 130, *sizes[2]))]


@pytest.mark.parametrize(("path", "shape"), tiled_shapes())
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_whole_tiles(row, path, shape):
    check(row, convert(draw(row, shape), path.dtype), path)


@pytest.mark.parametrize("path", [param(BF16)])
@pytest.mark.parametrize("heads", [24, 48])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_more_chunks_than_programs(row, packed, heads, path):
    """Each program takes several chunks, one after another, and the walk holds whole states, not halves of them."""
    shape = Shape(3, 200, heads, 48, 128, 128)
    if packed:
        texts = (200, 1, 0, 330, 69)
        inputs = convert(draw(row, shape._replace(b=1, t=sum(texts)), texts=len(texts)), path.dtype)
        check(row, inputs, path, cu_seqlens=bounds(texts))
    else:
        check(row, convert(draw(row, shape), path.dtype), path)


# Special inputs


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("row", "special"), SPECIAL_ROWS, ids=str)
def test_special_inputs(row, special, path):
    """The cases: resets of -50 and -inf, no decay, decay -200, beta 0, 1 and 1.99, parallel keys, an empty memory."""
    check(row, convert(draw(row, sized(path, LEAN), special), path.dtype), path, special)


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", slow_but(ROWS, (GATED_LINEAR_CHANNEL, GATED_DELTA)), ids=str)
def test_normalize_qk(row, path):
    """q and k have any length, and one key is zero: it has no direction, but it has a gradient."""
    inputs = convert(draw(row, sized(path, LEAN)), path.dtype)
    inputs["q"], inputs["k"] = inputs["q"] * 4, inputs["k"] * 4
    inputs["k"][:, 7] = 0
    check(row, inputs, path, normalize_qk=True)


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "row", slow_but([LINEAR, GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], (LINEAR, GATED_DELTA)), ids=str
)
def test_scale(row, path):
    inputs = convert(draw(row, sized(path, ONE_HEAD)), path.dtype)
    check(row, inputs, path, scale=-1.5)
    check(row, inputs, path, scale=0.25, normalize_qk=True)


GATED_ROWS = [row for row in ROWS if row is not LINEAR]


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", slow_but(GATED_ROWS, (GATED_LINEAR_CHANNEL, GATED_DELTA)), ids=str)
def test_gates_of_another_dtype(row, path):
    """Gates and their gradients may have another dtype than q (the interpreter truncates to bfloat16, a GPU rounds)."""
    for gates in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        if gates != path.dtype and not (path.device == "cpu" and gates == torch.bfloat16):
            check(row, convert(draw(row, sized(path, ONE_HEAD)), path.dtype, gates), path, gates)


@pytest.mark.cover
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", slow_but(ROWS, (LINEAR, KIMI_DELTA)), ids=str)
def test_no_state_is_a_state_of_zeros(row, path):
    inputs = convert(draw(row, sized(path, ONE_HEAD), "empty memory"), path.dtype)
    shape = sized(path, ONE_HEAD)
    zeros = {**inputs, "state": torch.zeros(shape.b, shape.hv, shape.k, shape.v)}
    assert_same_bits(run(row, inputs, path), run(row, zeros, path))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_recurrent_form(row, path):
    """The kernel of decoding serves as a form of the op: no gradients, an unchanged input state, and packing."""
    for lengths in (None, (1, 0, 4)):
        shape = sized(path)._replace(b=2 if lengths is None else 1, t=5)
        inputs = convert(draw(row, shape, texts=lengths and len(lengths)), path.dtype)
        options = {"cu_seqlens": bounds(lengths)} if lengths else {}
        expected = oracle(row, inputs, only=(), **options)
        call = {name: x.to(path.device) for name, x in {**inputs, **options}.items()}
        output, state = row.op(**call, form="recurrent", backend="triton")
        assert torch.equal(call["state"].cpu(), inputs["state"])
        allowed = {n: x + 5 * native_term(path, 1) for n, x in budget(row, inputs, expected, 1, **options).items()}
        assert_within(errors(Result(output.cpu(), state.cpu(), {}), expected), allowed, lengths)

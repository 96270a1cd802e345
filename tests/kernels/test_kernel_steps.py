"""The kernels of a decoding step, with what each does around its product or its memory, compared with float64."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.call import Inputs
from lineate.ops.rounding import round_memory
from lineate.rule import activate, normalize, step
from tests.support.paths import GPU, PATHS, Path, param

pytest.importorskip("triton")
products = importlib.import_module("lineate.kernels.layers.products")
token = importlib.import_module("lineate.kernels.layers.token")
layer_ops = importlib.import_module("lineate.kernels.layers.ops")
pytestmark = pytest.mark.usefixtures("guarded_memory")


def drawer(path: Path, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, scale=1.0: (scale * torch.randn(shape, generator=generator)).to(path.dtype).to(path.device)


def assert_near(found: Tensor, expected: Tensor, path: Path) -> None:
    bound = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[path.dtype]
    found, expected = found.double().cpu(), expected.double().cpu()
    assert found.shape == expected.shape and float((found - expected).norm() / expected.norm()) < bound


def rms(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight.double() + shift)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("n", "k"), [(7, 20), (70, 130), (33, 2048), (5, 2304), (5, 6000)])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_norm_product_and_residual(path, n, k, zero_centred):
    draw = drawer(path, n)
    x, weight, norm, bias, residual = draw(1, k), draw(n, k, scale=k**-0.5), draw(k), draw(n), draw(1, n)
    assert products.serves_one(x, weight)
    found = products.product_one(x, weight, bias, norm=(norm, 1e-5, zero_centred), residual=residual)
    expected = rms(x, norm, 1e-5, float(zero_centred)) @ weight.double().T + bias.double() + residual.double()
    assert_near(found, expected, path)
    assert_near(products.product_one(x, weight), x.double() @ weight.double().T, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("n", "k"), [(7, 20), (70, 128), (300, 64)])
def test_two_products_in_one_launch(path, n, k):
    draw = drawer(path, n)
    both = draw(1, 2 * k + 3)  # as columns of one projection
    x, _, other = both.split((k, 3, k), -1)
    weight, second = (draw(n, k, scale=k**-0.5) for _ in range(2))
    assert products.serves_pair(x, weight, other, second)
    for found, given, own in zip(
        products.product_pair(x, weight, other, second), (x, other), (weight, second), strict=True
    ):
        assert_near(found, given.double() @ own.double().T, path)
    assert not products.serves_pair(x, weight, other, second[:-1])
    assert not products.serves_pair(draw(2, k), weight, draw(2, k), second)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("n", "k"), [(7, 20), (70, 130), (33, 2048), (9, 270)])
def test_gated_product(path, n, k):
    draw = drawer(path, n)
    x, weight, norm = draw(1, k), draw(2 * n, k, scale=k**-0.5), draw(k)
    gate, up = (rms(x, norm, 1e-5) @ weight.double().T).chunk(2, -1)
    assert_near(products.product_one(x, weight, norm=(norm, 1e-5, False), gated=True), F.silu(gate) * up, path)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 3])
def test_convolution_moves_on_in_place(path, size, rows):
    """One row inside of the product; more in a launch of their own."""
    draw = drawer(path, size)
    n, k, width = 45, 30, 37
    weight, taps, past = draw(n, k, scale=k**-0.5), draw(width, size), draw(rows, width, size - 1)
    kept = past.double()
    for _ in range(size + 1):
        x = draw(rows, k)
        y = (x.double() @ weight.double().T).to(path.dtype)
        if rows == 1:
            found = products.product_one(x, weight, convolution=(taps, past))
            assert_near(found[:, width:], y[:, width:], path)
            found = found[:, :width]
        else:
            found = layer_ops.convolve_in_place(y[:, :width], taps, past)
        window = torch.cat((kept, y[:, :width, None].double()), -1)
        assert_near(found, F.silu((window * taps.double()).sum(-1)), path)
        kept = window[..., 1:]
        assert_near(past, kept, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("parts", "rows", "n"), [(1, 3, 20), (4, 2, 130), (6, 5, 2048)])
def test_parts_are_added_and_normed(path, parts, rows, n):
    draw = drawer(path, n)
    x, norm, added = draw(rows, n), draw(n), draw(parts, rows, n).float()
    total, normed = products.add_and_norm(x, added, (norm, 1e-5, True))
    expected = x.double() + added.double().sum(0)
    assert_near(total, expected, path)
    assert_near(normed, rms(total, norm, 1e-5, 1.0), path)
    again, nothing = products.add_and_norm(x, added, None)
    assert nothing is None and torch.equal(again, total)


@pytest.mark.parametrize("path", [param(path) for path in GPU[1:]])
@pytest.mark.parametrize("rows", [2, 17, 64])
@pytest.mark.parametrize(("n", "k", "parts"), [(64, 128, 1), (100, 256, 2), (130, 1536, 6), (2048, 2048, 1)])
def test_few_rows_on_the_tensor_cores(path, rows, n, k, parts):
    draw = drawer(path, n)
    x, weight = draw(rows, k), draw(2 * n, k, scale=k**-0.5)
    if not products.serves_few(x, weight):
        pytest.skip("only on Hopper")
    assert parts <= products.parts_of(n, k)
    plain = x.double() @ weight.double().T
    found = products.product_few(x, weight[:n], parts=parts)
    assert_near(found if parts == 1 else found.sum(0), plain[:, :n], path)
    assert_near(products.product_few(x, weight, gated=True), F.silu(plain[:, :n]) * plain[:, n:], path)
    taps, past = draw(n - 9, 4), draw(rows, n - 9, 3)
    kept = past.double()
    found = products.product_few(x, weight[:n], convolution=(taps, past))
    rounded = plain[:, :n].to(path.dtype).double()
    window = torch.cat((kept, rounded[:, : n - 9, None]), -1)
    assert_near(found[:, : n - 9], F.silu((window * taps.double()).sum(-1)), path)
    assert_near(found[:, n - 9 :], rounded[:, n - 9 :], path)
    assert_near(past, window[..., 1:], path)


MIXES = {
    "one head": (1, 1, 1, 16, 16, False),
    "grouped heads": (3, 2, 4, 16, 32, False),
    "odd widths": (2, 1, 3, 20, 12, False),
    "decay per channel": (2, 2, 2, 32, 16, True),
    "as published": (2, 2, 4, 128, 128, False),
}


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", MIXES)
@pytest.mark.parametrize(("silu", "bound"), [(True, None), (False, None), (True, -5.0)])
def test_a_token_of_the_delta_rule(path, case, silu, bound):
    rows, h, hv, key_dim, value_dim, per_channel = MIXES[case]
    draw = drawer(path, rows)
    state = draw(rows, hv, key_dim, value_dim).float()
    A_log, dt_bias = draw(hv).float(), draw(*((hv, key_dim) if per_channel else (hv,))).float()
    weight, z = draw(value_dim), draw(rows, 1, hv * value_dim)
    mixed = draw(rows, 1, 2 * h * key_dim + hv * value_dim + 3)  # heads are views of one projection
    q, k, v, _ = mixed.split((h * key_dim, h * key_dim, hv * value_dim, 3), -1)
    q, k, v = (x.unflatten(-1, (heads, -1)) for x, heads in ((q, h), (k, h), (v, hv)))
    gate, write = draw(rows, 1, hv, *([key_dim] if per_channel else [])), draw(rows, 1, hv)
    wide = [x.double().cpu() for x in (q, k, v, gate, write, A_log, dt_bias, state, weight, z)]
    assert token.serves_memory(state)
    inputs = Inputs(q, k, v, log_decay=gate, beta=write, state=state, A_log=A_log, dt_bias=dt_bias)
    found = token.mix(inputs, token.Token(True, "speed", 0.3, 2.0, bound), (z, weight, 1e-5, silu))

    q, k, v, gate, write, A_log, dt_bias, kept, weight, z = wide
    log_decay, beta = activate(gate, write, A_log, dt_bias, 2.0, torch.float64, bound)
    q, k = (normalize(x).repeat_interleave(hv // h, 2)[:, 0] for x in (q, k))
    decay = log_decay.exp()[:, 0]
    output, kept = step(
        kept, 0.3 * q, k, v[:, 0], decay if per_channel else decay[..., None], beta[:, 0, :, None], corrects=True
    )
    expected = rms(output, weight, 1e-5) * (F.silu if silu else torch.sigmoid)(z.view(rows, hv, value_dim))
    assert_near(found, expected.reshape(rows, 1, -1), path)
    assert float((state.double().cpu() - kept).norm() / kept.norm()) < 1e-5


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("heads", "kv", "size", "half"), [(4, 2, 16, 4), (3, 3, 20, 0), (2, 1, 256, 32)])
@pytest.mark.parametrize("normed", [True, False])
def test_a_token_is_placed_into_the_caches(path, heads, kv, size, half, normed):
    draw, rows, n = drawer(path, heads), 3, 7
    y = draw(rows, 1, (heads + 2 * kv) * size + 5)
    q, k, v, _ = y.split((heads * size, kv * size, kv * size, 5), -1)
    q, k, v = (x.unflatten(-1, (-1, size)) for x in (q, k, v))
    room_k, room_v = draw(rows, n + 2, kv, size), draw(rows, n + 2, kv, size)
    keys, values = room_k[:, :n], room_v[:, :n]
    before = room_k.clone(), room_v.clone()
    lengths = torch.tensor([0, 5, n], device=path.device)  # the last row has no room: nothing is written
    norms = (draw(size), draw(size), 1e-5, True) if normed else None
    frequencies = torch.rand(half)
    assert token.serves_caches(keys, values)
    turning = frequencies.to(path.device) if half else None
    found = token.place(q, k, v, norms, turning, lengths, keys, values)
    angles = (lengths.cpu()[:, None] * frequencies)[:, None]

    def expected(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x.double().cpu() if weight is None else rms(x, weight, 1e-5, 1.0).cpu()
        first, second, rest = x.split((half, half, size - 2 * half), -1)
        cos, sin = angles.double().cos()[:, :, None], angles.double().sin()[:, :, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    assert_near(found, expected(q, norms and norms[0]), path)
    new = expected(k, norms and norms[1])
    for room, old, written in ((room_k, before[0], new), (room_v, before[1], v)):
        for row, length in enumerate(lengths.tolist()):
            if length < n:
                assert_near(room[row, length], written[row, 0], path)
                old[row, length] = room[row, length]
        assert torch.equal(room, old)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", MIXES)
@pytest.mark.parametrize("seeds", [None, (3, 2**36, -1)], ids=["nearest", "stochastic"])
def test_a_token_of_the_delta_rule_in_bfloat16(path, case, seeds):
    """A bfloat16 memory has the output of the same memory in float32, and is that one's, rounded."""
    rows, h, hv, key_dim, value_dim, per_channel = MIXES[case]
    draw = drawer(path, rows)
    state = draw(rows, hv, key_dim, value_dim).bfloat16()
    A_log, dt_bias = draw(hv).float(), draw(*((hv, key_dim) if per_channel else (hv,))).float()
    weight, z = draw(value_dim), draw(rows, 1, hv * value_dim)
    q, k, v = draw(rows, 1, h, key_dim), draw(rows, 1, h, key_dim), draw(rows, 1, hv, value_dim)
    gate, write = draw(rows, 1, hv, *([key_dim] if per_channel else [])), draw(rows, 1, hv)
    wide = state.float()
    drawn = None if seeds is None else torch.tensor(seeds[:rows], device=path.device)
    assert token.serves_memory(state) and not token.serves_memory(state.half())
    found, expected = (
        token.mix(
            Inputs(q, k, v, log_decay=gate, beta=write, state=memory, A_log=A_log, dt_bias=dt_bias),
            token.Token(True, "speed", 0.3, 2.0),
            (z, weight, 1e-5, True), seeds=drawn if memory is state else None,
        )
        for memory in (state, wide)
    )  # fmt: skip
    assert_near(found, expected, path)
    rounded = round_memory(wide.cpu(), None if drawn is None else drawn.cpu()).bfloat16()
    if path.device == "cpu":
        assert torch.equal(state, rounded)
    else:  # sums over keys may be in another order
        assert (state.cpu() != rounded).float().mean() < 0.02

"""A mixture of experts by kernels: routing, grouping, products in place and their sum, compared with plain torch."""

import importlib
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lineate.layers import MixtureOfExperts, RMSNorm
from lineate.layers.step.launches import feed_step
from lineate.quantised import quantize
from tests.support.experts import ACTIVE, COUNT, assert_near, chosen_by, draw, layer_of, parts_of, plain
from tests.support.paths import BF16, GPU, INTERPRETER, ONE_EACH, PATHS, param

pytest.importorskip("triton")
mixture = importlib.import_module("lineate.kernels.layers.mixture")
grouping = importlib.import_module("lineate.kernels.layers.grouping")
routing = importlib.import_module("lineate.kernels.layers.routing")
experts = importlib.import_module("lineate.kernels.layers.experts")
quantised_products = importlib.import_module("lineate.kernels.layers.quantised_products")
pytestmark = pytest.mark.usefixtures("guarded_memory")
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, not renormalised": {"renormalize": False},
    "sigmoid": {"scores": "sigmoid", "scale": 2.446},
    "groups": {"scores": "sigmoid", "groups": 4, "active_groups": 2, "scale": 2.5},
    "odd groups": {"scores": "sigmoid", "groups": 3, "active_groups": 2},
}


# ---- routing


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("rows", [1, 7])
def test_routing_is_that_of_the_layer(path, name, rows):
    layer = layer_of(path, **ROUTERS[name])
    x = draw(path, rows, 72)
    weights, chosen = chosen_by(layer, x)
    expected, theirs = layer.route(x)
    close = {"rtol": 1e-5, "atol": 1e-6} if path.dtype is torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
    torch.testing.assert_close(weights, expected.float(), **close)
    if path.dtype is torch.float32:  # bfloat16 has equal scores, of which torch chooses any
        assert torch.equal(chosen.long(), theirs)
    assert chosen.dtype is torch.int32 and weights.dtype is torch.float32


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("sigmoid", [False, True])
def test_of_equal_scores_the_lowest_index_is_first(path, sigmoid):
    logits = torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0, -3.0], [5.0] * 6, [-torch.inf] * 5 + [0.0], [0.0] * 6])
    logits[3, 2] = torch.nan
    how = routing.Routing(4, sigmoid, renormalize=False)
    bias = torch.zeros(6, device=path.device) if sigmoid else None
    given = logits[None].to(path.device)
    _, chosen = routing.choose(given, bias, how, experts=6, rounded=torch.float32)
    assert chosen.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3], [5, 0, 1, 2], [2, 0, 1, 3]]


@pytest.mark.parametrize("path", ONE_EACH)
def test_a_shared_expert_is_the_last_column(path):
    layer = layer_of(path, shared_size=20, shared_gate=True)
    router, _ = parts_of(layer)
    x = draw(path, 3, 72)
    how = {"experts": COUNT, "rounded": x.dtype}
    for named, gate in itertools.product((False, True), (None, router.gate)):
        logits = routing.score(x, router.weight, gate)
        weights, chosen = routing.choose(logits, None, router.routing, shared=True, named=named, **how)
        alone, theirs = routing.choose(logits, None, router.routing, **how)
        assert torch.equal(weights[:, :-1], alone) and torch.equal(chosen[:, :ACTIVE], theirs)
        assert chosen.shape[1] == ACTIVE + named and (not named or chosen[:, -1].eq(COUNT).all())
        opened = torch.ones(3, 1) if gate is None else (x.float() @ gate.float().T).sigmoid().cpu()
        torch.testing.assert_close(weights[:, -1:].cpu(), opened, rtol=1e-5, atol=1e-6)


def test_what_routing_supports():
    assert routing.fits(routing.Routing(8, True, groups=8, active_groups=4), 256)
    for how, count in (
        (routing.Routing(3, False), 2),
        (routing.Routing(1, True, groups=3), 8),
        (routing.Routing(1, True, groups=4), 4),
        (routing.Routing(5, True, groups=4, active_groups=1), 16),
        (routing.Routing(1, False), 5000),
    ):
        assert not routing.fits(how, count)


# ---- products


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_mixture_is_its_sum(path, kind, rows):
    """With odd sizes, a shared expert inside and outside of the products, and experts without tokens."""
    layer = layer_of(path, 72, 20, kind=kind, shared_size=20, shared_gate=kind == "swiglu")
    x = draw(path, rows, 72)
    expected = plain(layer, x, *chosen_by(layer, x))
    for shared in (True, False) if rows < 70 else (True,):
        router, made = parts_of(layer, shared)
        if path.dtype is torch.float32 and x.is_cuda and rows > routing.FEW:
            assert not mixture.serves(x, router, made), "cuBLAS takes less time"
            continue
        assert mixture.serves(x, router, made)
        outside = None if shared else layer.shared(x)
        found = mixture.mix(x, router, made, outside)
        assert found.dtype is x.dtype
        assert_near(found, expected, path.dtype)
        assert torch.equal(mixture.mix(x, router, made, outside, 2 * x), 2 * x + found), "the sum is rounded before"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("hidden", [72, 400])
def test_a_norm_before_one_row(path, zero_centred, hidden):
    """It is part of the router's launch, and has the bits of a norm by itself."""
    layer = layer_of(path, hidden, 20, shared_size=20, shared_gate=True)
    x, weight = draw(path, 1, hidden), draw(path, hidden, seed=1)
    router, made = parts_of(layer)
    around = weight, 1e-5, zero_centred
    scores, normed = routing.score(x, router.weight, router.gate, norm=around, normed=(y := torch.empty_like(x))), y
    wide = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)
    assert_near(normed, wide * (weight.double() + zero_centred), path.dtype)
    assert torch.equal(scores, routing.score(normed, router.weight, router.gate))
    assert torch.equal(mixture.mix(x, router, made, norm=around), mixture.mix(normed, router, made))


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_tiles_that_do_not_divide_the_sizes(path, swap, alone):
    layer = layer_of(path, 72, 20, shared_size=20)
    _, made = parts_of(layer)
    x = draw(path, 3, 72)
    chosen = torch.tensor([[0, 5, 12], [5, 11, 12], [5, 0, 12]], dtype=torch.int32, device=path.device)
    tile = mixture.tile(16, 32, 32, 4, 3, swap=swap)
    groups = grouping.Groups(chosen.flatten(), None, 1) if alone else grouping.group(chosen, 13, 16)
    enter, leave = (
        experts.Weights(weight, own, kind)
        for weight, own, kind in zip((made.gate_up, made.down), made.shared, ("swiglu", None), strict=True)
    )
    hidden, found = x.new_empty(9, 20), x.new_empty(9, 72, dtype=torch.float32)
    experts.multiply(x, enter, groups, hidden, every=3, tile=tile)
    experts.multiply(hidden, leave, groups, found, every=1, tile=tile)
    expected = []
    for t, e in ((i // 3, e) for i, e in enumerate(chosen.flatten().tolist())):
        first, second = made.shared if e == 12 else (made.gate_up[e], made.down[e])
        gate, up = (first.double() @ x[t].double()).chunk(2)
        expected.append(second.double() @ (F.silu(gate) * up))
    assert_near(found, torch.stack(expected), path.dtype)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
@pytest.mark.parametrize(("hidden", "size"), [(72, 20), (64, 128)])
def test_pairs_beyond_a_tile(path, kind, hidden, size):
    """Blocks of 16 pairs and up to 16 others, which the same tiles of weights multiply; experts with 0 to 60 pairs."""
    layer = layer_of(path, hidden, size, kind=kind)
    _, made = parts_of(layer)
    x = draw(path, 70, hidden)
    counts = torch.tensor([0, 1, 15, 16, 17, 31, 32, 33, 5, 60, 0, 0])
    chosen = torch.repeat_interleave(torch.arange(COUNT), counts)[torch.randperm(210)].view(70, 3).int().to(path.device)
    first, second = (mixture.tile(16, bn, 32, 4, 3, rest=16) for bn in (16, 32))
    for placed in (False, True):
        groups = grouping.group(chosen, COUNT, 32, placed)
        rows = groups.blocks.numel() * 32 if placed else 210
        inner, found = x.new_full((rows, size), torch.nan), x.new_full((rows, hidden), torch.nan, dtype=torch.float32)
        weights = experts.Weights(made.gate_up, None, kind)
        experts.multiply(x, weights, groups, inner, every=3, tile=first, placed=placed)
        if placed:
            assert groups.places is not None
            inner = inner[groups.places.long()]
        experts.multiply(inner, experts.Weights(made.down, None, None), groups, found, every=1, tile=second)
        expected = []
        for t, e in ((i // 3, e) for i, e in enumerate(chosen.flatten().tolist())):
            up = made.gate_up[e].double() @ x[t].double()
            up = F.silu(up.chunk(2)[0]) * up.chunk(2)[1] if kind == "swiglu" else up.relu().square()
            expected.append(made.down[e].double() @ up)
        assert_near(found[:210], torch.stack(expected), path.dtype)


@pytest.mark.parametrize("path", [param(INTERPRETER)])
@pytest.mark.parametrize("rest", [0, 16])
def test_blocks_by_descriptors(path, rest, monkeypatch):
    """The results of the first product are in the order of the blocks; the experts come in two slices."""
    monkeypatch.setattr(experts, "LEAVE", {"BN": 16, "BK": 16, "STAGES": 2})
    layer = layer_of(path, 48, 32)
    _, made = parts_of(layer)
    x, generator = draw(path, 30, 48), torch.Generator().manual_seed(1)
    chosen = torch.rand(30, COUNT, generator=generator).topk(3).indices.int()
    chosen[chosen == 4] = 5
    groups = grouping.group(chosen, COUNT, 16 + rest, placed=True)
    assert torch.equal(groups.members.flatten()[groups.places], torch.arange(90, dtype=torch.int32))
    tile = mixture.tile(16, 32, 32, 4, 3, rest=rest)
    plainly = x.new_empty(90, 32), x.new_empty(90, 48)
    experts.multiply(x, experts.Weights(made.gate_up, None, "swiglu"), groups, plainly[0], every=3, tile=tile)
    experts.multiply(plainly[0], experts.Weights(made.down, None, None), groups, plainly[1], every=1, tile=tile)
    count = groups.blocks.numel() * (16 + rest)
    hidden, found = x.new_full((count, 32), torch.nan), x.new_full((count, 48), torch.nan)
    weights = experts.Weights(made.gate_up, None, "swiglu")
    experts.multiply(x, weights, groups, hidden, every=3, tile=tile, placed=True)
    for begin in (0, 6):
        experts.leave(hidden, made.down[begin : begin + 6], groups, found, begin, rest=rest)
    places = groups.places.long()
    assert torch.equal(hidden[places], plainly[0])
    assert_near(found[places], plainly[1].double(), path.dtype)


@pytest.mark.parametrize("path", [param(INTERPRETER)])
@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
def test_mixture_by_descriptors(path, kind, monkeypatch):
    monkeypatch.setattr(experts, "LEAVE", {"BN": 16, "BK": 16, "STAGES": 2})
    layer = layer_of(path, 48, 32, kind=kind)
    x = draw(path, 70, 48)
    expected, (router, made) = mixture.mix(x, *parts_of(layer)), parts_of(layer)
    monkeypatch.setattr(experts, "leaves_by_descriptors", lambda *_: True)
    places = mixture.products(x, chosen_by(layer, x)[1], made)[1]
    assert places is not None and places.numel() == 70 * ACTIVE
    assert_near(mixture.mix(x, router, made, residual=x), expected + x, path.dtype)


@pytest.mark.parametrize("path", ONE_EACH)
def test_no_row_changes_the_bits_of_another(path):
    layer = layer_of(path, 72, 20, shared_size=20, shared_gate=True)
    router, made = parts_of(layer)
    x = draw(path, 21, 72)
    found = mixture.mix(x, router, made)
    assert torch.equal(found, mixture.mix(x, router, made)), "the bits changed"
    for rows in ((0, 20), (3, 4), tuple(range(20, 2, -1))):
        assert torch.equal(mixture.mix(x[list(rows)], router, made), found[list(rows)]), rows
    for row in (0, 20):  # one row has a product of its own
        assert_near(mixture.mix(x[row, None], router, made), found[row, None], path.dtype)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
@pytest.mark.parametrize(("hidden", "size"), [(72, 20), (600, 24), (64, 70)])
def test_the_second_product_of_one_row(path, kind, hidden, size, monkeypatch):
    """It is one launch with the weighted sum and the residual; without room in the registers, there are two."""
    monkeypatch.setattr(experts, "LOADED", 2**14)  # as many channels of a program as the device has work for
    layer = layer_of(path, hidden, size, kind=kind, shared_size=size, shared_gate=True, scores="sigmoid")
    router, made = parts_of(layer)
    x = draw(path, 1, hidden)
    expected = plain(layer, x, *chosen_by(layer, x))
    assert mixture.takes_row(x, made, ACTIVE)
    found = mixture.mix(x, router, made)
    assert_near(found, expected, path.dtype)
    assert torch.equal(mixture.mix(x, router, made, residual=2 * x), 2 * x + found), "the sum is rounded before"
    assert_near(mixture.mix(x, router, made._replace(shared=None), layer.shared(x)), expected, path.dtype)
    monkeypatch.setattr(experts, "LOADED", 0)
    assert not mixture.takes_row(x, made, ACTIVE)
    assert_near(mixture.mix(x, router, made, residual=2 * x), expected + 2 * x, path.dtype)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["softmax", "groups"])
def test_one_row_without_a_shared_expert(path, name):
    layer, x, weight = layer_of(path, **ROUTERS[name]), draw(path, 1, 72), draw(path, 72, seed=1)
    router, made = parts_of(layer)
    assert mixture.takes_row(x, made, ACTIVE)
    found = mixture.mix(x, router, made)
    assert_near(found, plain(layer, x, *chosen_by(layer, x)), path.dtype)
    around = weight, 1e-5, True
    for residual in (x, 2 * x):
        alone = mixture.mix(x, router, made, norm=around)
        assert torch.equal(mixture.mix(x, router, made, residual=residual, norm=around), residual + alone)


@pytest.mark.parametrize("path", ONE_EACH)
@pytest.mark.parametrize("room", [True, False])
def test_a_row_that_is_its_own_residual_is_recorded_by_one_address(path, room, monkeypatch):
    """A call is replayed for other addresses, so those of its tensors must differ (tape.py)."""
    made_calls: list[tuple[Any, ...]] = []
    launch = mixture.launch
    monkeypatch.setattr(mixture, "launch", lambda *call: (made_calls.append(call), launch(*call))[1])
    if not room:
        monkeypatch.setattr(experts, "LOADED", 0)
    (router, made), x = parts_of(layer_of(path)), draw(path, 1, 72)
    around = draw(path, 72, seed=1), 1e-5, False
    expected = x + mixture.mix(x, router, made, norm=around)
    for residual in (x, x.clone()):
        assert torch.equal(mixture.mix(x, router, made, residual=residual, norm=around), expected)
    for _, given, written, _, _ in made_calls:
        addresses = [y.data_ptr() for y in (*given, *written) if y is not None]
        assert len(set(addresses)) == len(addresses)
    options = {call[3] for call in made_calls}
    assert len(options) == (2 if room else 1), "the same launches have the same signature, others another"


def test_how_many_channels_a_program_of_one_row_has():
    for n, k, pairs, wanted in ((2048, 512, 9, 8), (2304, 1024, 9, 0), (2048, 512, 11, 0), (72, 20, 4, 1)):
        weight = torch.empty(2, n, k, dtype=torch.bfloat16, device="meta")
        assert experts.rows_of_leave(weight, pairs) == wanted
    assert experts.rows_of_leave(torch.empty(2, 64, 32768, device="meta"), 9) == 0


@pytest.mark.parametrize("path", [param(path) for path in GPU[1:]])
@pytest.mark.parametrize("rows", [400, 520, 1500])
def test_the_place_of_a_pair_does_not_change_its_bits(path, rows):
    """Whether it is in the first places of a block or in the others depends on the other rows."""
    layer = layer_of(path, 256, 128)
    tiles = mixture.tiles_of(draw(path, rows, 256), COUNT, 128, ACTIVE)
    assert (tiles.enter["REST"] > 0) == (rows < 1500)
    router, made = parts_of(layer)
    x = draw(path, rows, 256)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(3)).to(path.device)
    assert torch.equal(mixture.mix(x[order], router, made), mixture.mix(x, router, made)[order])


def test_stages_fit_into_the_shared_memory_of_other_gpus():
    layer = layer_of(INTERPRETER, 512, 256)
    for rows, dtype in itertools.product((1, 64, 300, 2000, 9000), (torch.bfloat16, torch.float32)):
        tiles = mixture.tiles_of(torch.empty(rows, 512, dtype=dtype), COUNT, 256, layer.active)
        for tile, wide in ((tiles.enter, 2), (tiles.leave, 1)):
            stage = (tile["BM"] + wide * tile["BN"]) * tile["BK"] * dtype.itemsize
            assert tile["num_stages"] >= 2 and tile["num_stages"] * stage <= 99 * 1024
        assert tiles.enter["BM"] == tiles.leave["BM"]


def test_what_is_not_served():
    layer = layer_of(INTERPRETER, 72, 20)
    router, made = parts_of(layer)
    x = draw(INTERPRETER, 2, 72)
    assert mixture.serves(x, router, made)
    assert not mixture.serves(x[:0], router, made)
    assert not mixture.serves(x.bfloat16(), router, made), "autocast leaves weights in float32"
    assert not mixture.serves(x, router, made._replace(down=made.down.mT.contiguous().mT))


# ---- the layer on a GPU


def spy(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of rows of every call by torch."""
    calls: list[int] = []
    run = MixtureOfExperts.run_in_torch
    monkeypatch.setattr(MixtureOfExperts, "run_in_torch", lambda layer, x: (calls.append(len(x)), run(layer, x))[1])
    return calls


@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("path", [param(path) for path in GPU])
@pytest.mark.parametrize("rows", [1, 2, 17, 64, 65, 300, 400, 520, 1500])
@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_layer(path, rows, name, monkeypatch):
    layer = layer_of(path, 256, 128, shared_size=128, shared_gate=True, **ROUTERS[name])
    calls = spy(monkeypatch)
    x = draw(path, rows, 256)
    found = layer(x[None])[0]
    assert calls == ([rows] if path.dtype is torch.float32 and rows > 64 else [])
    if not calls:
        for _ in range(3):  # the launches are recorded, and then replayed
            assert torch.equal(found, layer(x))
    calls.clear()
    assert_near(found, plain(layer, x, *chosen_by(layer, x)), path.dtype)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        layer(x)
    layer.requires_grad_(True)
    layer(x).sum().backward()
    assert calls == [rows, rows], "torch runs under autocast, and where gradients are wanted"


@pytest.mark.parametrize("path", [param(path) for path in GPU])
@torch.no_grad()
def test_a_step_of_one_row(path):
    """x + layer(norm(x)), the norm in the router's launch; a shared expert of another size is not part of it."""
    norm = RMSNorm(256, zero_centred=True).to(path.dtype).to(path.device)
    norm.weight.copy_(draw(path, 256, seed=1))
    x = draw(path, 1, 1, 256)
    for size, inside in ((128, True), (96, False)):
        layer = layer_of(path, 256, 128, shared_size=size)
        found = feed_step(norm, layer, x)
        assert (found is not None) == inside
        if found is not None:
            assert_near(found, x + layer(norm(x)), path.dtype)
            for _ in range(3):  # the launches are recorded, and then replayed
                assert torch.equal(found, feed_step(norm, layer, x.clone()))


@pytest.mark.parametrize("path", [param(BF16)])
@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("rows", [1, 40, 128])
def test_a_graph_follows_the_routing(path, form, rows):
    layer = layer_of(path, 256, 128, shared_size=128, shared_gate=True)
    if form != "bfloat16":
        for name in ("experts_gate_up", "experts_down"):
            setattr(layer, name, nn.Parameter(quantize(getattr(layer, name), form), requires_grad=False))
    given = draw(path, rows, 256)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer(given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = layer(given)
    for seed in range(1, 5):
        x = draw(path, rows, 256, seed=seed) * (1 if seed < 4 else 0)  # of zeros, all tokens have the same experts
        given.copy_(x)
        made.fill_(torch.nan)
        graph.replay()
        assert torch.equal(made, layer(x))


@pytest.mark.parametrize("path", [param(BF16)])
@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("rows", [1, 2, 64, 200, 700])
@pytest.mark.parametrize("shared", [False, True])
def test_layer_in_codes(path, form, rows, shared, monkeypatch):
    """shared: whether the shared expert is in codes too, and so one of the experts."""
    layer = layer_of(path, 256, 128, shared_size=128, shared_gate=True)
    owners = [(layer, "experts_gate_up"), (layer, "experts_down")]
    if shared:
        owners += [(layer.shared.gate_up_proj, "weight"), (layer.shared.down_proj, "weight")]
    for owner, name in owners:
        setattr(owner, name, nn.Parameter(quantize(getattr(owner, name), form), requires_grad=False))
    calls = spy(monkeypatch)
    x = draw(path, rows, 256)
    weights, chosen = chosen_by(layer, x)
    found = layer(x)
    for _ in range(3):  # the launches are recorded, and then replayed
        assert not calls and torch.equal(found, layer(x))
    for owner, name in owners:
        setattr(owner, name, nn.Parameter(getattr(owner, name).decoded(), requires_grad=False))
    assert_near(found, plain(layer, x, weights, chosen), path.dtype)

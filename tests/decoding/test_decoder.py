"""Decoder: the steps of model(ids, state=...) in place; on a CPU without the graph, on a GPU with it."""

import copy
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lineate.decoding import Decoder, in_place, native, placed
from lineate.decoding.native import NativeDecoding
from lineate.decoding.rows import RowSteps
from lineate.layers import Memory, MixtureOfExperts, TokenCache
from lineate.models import (
    AttentionConfig,
    ExpertsConfig,
    FeedConfig,
    HybridConfig,
    HybridLM,
    LatentConfig,
    LinearConfig,
    ModelState,
    RwkvConfig,
)
from tests.support.small_models import random_model, variants

VOCAB = 96
CONFIG = HybridConfig(
    vocab_size=VOCAB, hidden_size=64, n_layers=4, pattern="GGGA",
    linear=LinearConfig(2, 4, 32, 32),
    attention=AttentionConfig(4, 2, 32, rotary_dim=16),
    latent=LatentConfig(4, rank=48, nope_dim=32, rope_dim=16, value_dim=32, rope_theta=10000.0),
    feed=FeedConfig(128), zero_centred_norm=True,
)  # fmt: skip
SIGMOID = ExpertsConfig(8, 6, 64, scores="sigmoid", groups=4, active_groups=3, scale=2.5)
CASES = variants(CONFIG) | {
    "GA, more experts": replace(CONFIG, pattern="GA", n_layers=2, experts=SIGMOID),
    "no attention": replace(CONFIG, pattern="G", n_layers=2),
    "attention alone": replace(CONFIG, pattern="A", n_layers=1),
    "general row": replace(CONFIG, pattern="JUJA"),
    "RWKV-7": replace(CONFIG, pattern="VVA", n_layers=3, rwkv=RwkvConfig(2, 32, 24, 8, 8, 8, 16)),
}
LENGTHS = {"one row": (20,), "three rows": (20, 20, 20), "ragged": (3, 41, 1)}
cases = pytest.mark.parametrize("case", CASES)
prompts = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


def make(case: str) -> HybridLM:
    return random_model(CASES[case])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def read(model: HybridLM, lengths: tuple[int, ...]) -> ModelState:
    """Return the state after one prompt per row."""
    if len(set(lengths)) == 1:
        return model(draw(len(lengths), lengths[0]).to(model.device)).state
    bounds = torch.tensor((0, *lengths)).cumsum(0).to(model.device)
    return model(draw(1, sum(lengths)).to(model.device), cu_seqlens=bounds).state


def continue_eagerly(model: HybridLM, state: ModelState, ids: Tensor) -> tuple[Tensor, ModelState]:
    logits = []
    for t in range(ids.shape[1]):
        out = model(ids[:, t : t + 1], state=state)
        logits.append(out.logits)
        state = out.state
    return torch.cat(logits, 1), state


def continue_with(decoder: Decoder, ids: Tensor) -> Tensor:
    return torch.cat([decoder(ids[:, t : t + 1]) for t in range(ids.shape[1])], 1)


def tensors_of(state: ModelState) -> list[Tensor]:
    return [layer[name] for layer in state.layers for name in layer.names]


def same_state(got: ModelState, expected: ModelState, tolerance: float) -> None:
    """Check that states agree; entries after a row's length do not count."""
    assert torch.equal(torch.as_tensor(got.lengths).cpu(), torch.as_tensor(expected.lengths).cpu())
    assert isinstance(got.lengths, int) == isinstance(expected.lengths, int)
    lengths = torch.as_tensor(expected.lengths).expand(expected.rows).tolist()
    for mine, theirs in zip(got.layers, expected.layers, strict=True):
        assert mine.names == theirs.names
        for name in mine.names:
            a, b = mine[name], theirs[name]
            assert a.dtype == b.dtype
            for row, n in enumerate(lengths):
                cut = slice(n) if hasattr(mine, "lengths") else slice(None)
                torch.testing.assert_close(a[row, cut], b[row, cut], rtol=tolerance, atol=tolerance)


@pytest.mark.cover
@pytest.mark.slow(but="values")
@cases
@prompts
@torch.no_grad()
def test_equals_eager_decoding(case, lengths, monkeypatch):
    """This holds over several widths of what attention reads, and for more tokens than there was room for."""
    monkeypatch.setattr(in_place, "WINDOW_STEP", 8)
    model = make(case)
    state, ids = read(model, lengths), draw(len(lengths), 40, seed=1)
    decoder = Decoder(model, state, room=5)
    expected, final = continue_eagerly(model, state, ids)
    torch.testing.assert_close(continue_with(decoder, ids), expected, rtol=1e-5, atol=1e-5)
    same_state(decoder.state, final, 1e-4)


@pytest.mark.cover
@prompts
@torch.no_grad()
def test_equals_eager_decoding_in_float64(lengths):
    model = make("LRDGKAM").double()
    state, ids = read(model, lengths), draw(len(lengths), 20, seed=1)
    expected, final = continue_eagerly(model, state, ids)
    decoder = Decoder(model, state, room=5)
    torch.testing.assert_close(continue_with(decoder, ids), expected, rtol=1e-9, atol=1e-10)
    same_state(decoder.state, final, 1e-8)


@cases
@torch.no_grad()
def test_states_are_values(case):
    """The given state and the returned ones do not change, and either way can continue them."""
    model, ids = make(case), draw(3, 12, seed=1)
    state = read(model, (3, 41, 1))
    before = copy.deepcopy(state)
    decoder = Decoder(model, state, room=64)
    same_state(decoder.state, state, 0)
    expected = continue_with(decoder, ids[:, :6])
    half = decoder.state
    kept = copy.deepcopy(half)
    rest = continue_with(decoder, ids[:, 6:])
    for a, b in zip(tensors_of(half) + tensors_of(state), tensors_of(kept) + tensors_of(before), strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(continue_eagerly(model, half, ids[:, 6:])[0], rest, rtol=1e-5, atol=1e-5)
    again = Decoder(model, half, room=64)
    assert torch.equal(continue_with(again, ids[:, 6:]), rest)
    assert torch.equal(continue_with(Decoder(model, state, room=64), ids[:, :6]), expected)


@torch.no_grad()
def test_trying_out_changes_nothing():
    """A trial run before a capture leaves memories, lengths and the tokens in the caches unchanged."""
    model, ids, room = make("LRDGKAM"), draw(3, 1, seed=1), 64
    state = read(model, (3, 41, 1))
    memories, caches = {}, {}
    for n, layer in enumerate(state.layers):
        own = {name: layer[name].clone() for name in layer.names}
        if isinstance(layer, TokenCache):
            caches[n] = {
                name: torch.cat((x, x.new_zeros(3, room - x.shape[1], *x.shape[2:])), 1) for name, x in own.items()
            }
        else:
            memories[n] = own
    lengths = state.lengths.clone()

    def step() -> Tensor:
        placed = in_place.state_in_place(memories, caches, room, lengths)
        read = in_place.read_in_place(model, ids, placed, (False, torch.float32))
        in_place.write_back(memories, read.state)
        lengths.add_(1)
        return read.logits

    changing = [lengths, *(x for own in memories.values() for x in own.values())]
    in_place.try_out(step, changing)
    layers = {n: Memory(own) for n, own in memories.items()} | {
        n: TokenCache(own, lengths) for n, own in caches.items()
    }
    same_state(ModelState(tuple(layers[n] for n in range(len(layers))), lengths), state, 0)
    torch.testing.assert_close(step(), model(ids, state=state).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_two_decoders_of_one_model():
    model, ids = make("LRDGKAM"), draw(2, 10, seed=1)
    states = [read(model, (20,)), read(model, (7,))]
    decoders = [Decoder(model, state, room=16) for state in states]
    found = [[decoder(ids[n : n + 1, t : t + 1]) for n, decoder in enumerate(decoders)] for t in range(10)]
    for n, state in enumerate(states):
        expected, _ = continue_eagerly(model, state, ids[n : n + 1])
        torch.testing.assert_close(torch.cat([row[n] for row in found], 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["GGGA", "LRDGKAM", "KKKM, experts"])
@pytest.mark.parametrize("lengths", [(20, 20, 20), (3, 41, 1)], ids=["even", "ragged"])
@torch.no_grad()
def test_rows_are_read_and_kept(case, lengths):
    """A row is that of the state, and rows that are kept go on as they would have."""
    model, ids = make(case), draw(3, 12, seed=1)
    decoder = Decoder(model, read(model, lengths), room=64)
    expected = continue_with(decoder, ids[:, :6])
    whole, rows = decoder.state, [decoder.row(n) for n in range(3)]
    for n, row in enumerate(rows):
        same_state(row, whole.select(torch.tensor([n])), 0) if isinstance(whole.lengths, int) else None
        assert row.rows == 1 and row.lengths == lengths[n] + 6
    before = Decoder(model, read(model, lengths), room=64)
    assert torch.equal(continue_with(before, ids[:, :6]), expected)
    before.keep([2, 0])
    assert before.rows == 2 and before.reads == 6
    rest = continue_with(before, ids[[2, 0], 6:])
    torch.testing.assert_close(rest, continue_with(decoder, ids[:, 6:])[[2, 0]], rtol=1e-5, atol=1e-5)
    for n, place in ((2, 0), (0, 1)):
        alone = continue_eagerly(model, rows[n], ids[n : n + 1, 6:])[0]
        torch.testing.assert_close(rest[place : place + 1], alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_earlier_states_are_refused():
    """Only C keeps the state before the last call; a state after other calls is refused."""
    model = make("GGGA")
    decoder = Decoder(model, read(model, (5, 5)), room=4)
    assert [n for n in range(-1, 2) if decoder.rewinds(n)] == [0]
    continue_with(decoder, draw(2, 3))
    earliest = 2 if decoder.computes_all else 3
    assert [n for n in range(6) if decoder.rewinds(n)] == list(range(earliest, 4))
    for call in (decoder.state_before, lambda n: decoder.row(0, n), lambda n: decoder.keep([0], n)):
        with pytest.raises(ValueError, match="reads must be 3, the number of calls"):
            call(earliest - 1)
    for row in (2, -1, True, 0.5):
        with pytest.raises(ValueError, match=r"row must be one of 0 .. 1, got"):
            decoder.row(row)
    for rows in ([], [2], [0, -1]):
        with pytest.raises(ValueError, match=r"rows must be at least one of 0 .. 1, got"):
            decoder.keep(rows)
    assert decoder.rows == 2 and decoder.reads == 3
    last = decoder.repeat(2)
    decoder.refresh()
    assert [n for n in range(6) if decoder.rewinds(n)] == [3]
    assert torch.equal(decoder.repeat(2), last)  # it is not read twice
    for rows in ([True], [1.0]):
        with pytest.raises(ValueError, match=r"rows must be at least one of 0 .. 1, got"):
            decoder.keep(rows)


@pytest.mark.parametrize("rows", [2, 70])
def test_steps_record_no_gradients(rows):
    """70 rows are more than C reads."""
    model, ids = make("GGGA"), draw(rows, 4)
    decoder = Decoder(model, read(model, (5,) * rows), room=64)
    logits = continue_with(decoder, ids)
    with torch.inference_mode():
        inside = decoder(ids[:, :1])
    for x in (logits, inside, *tensors_of(decoder.state)):
        assert not x.requires_grad and not x.is_inference()


@pytest.mark.parametrize("rows", [2, 70])
@torch.no_grad()
def test_what_fails_changes_nothing(rows, monkeypatch):
    """Memory may be short when the caches grow, or when some rows go on alone."""
    model, ids = make("GGGA"), draw(rows, 80, seed=1)
    state = read(model, (5,) * rows)
    expected = continue_with(Decoder(model, state, room=500), ids)
    decoder, failures = Decoder(model, state, room=2), []

    def fail(*args):
        failures.append(True)
        raise torch.OutOfMemoryError("no memory")

    logits = []
    for t in range(80):
        if t == 30:
            with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                patch.setattr(NativeDecoding, "kept", fail)
                patch.setattr(placed, "copied", fail)
                decoder.keep([1])
        if t in (59, 60):  # the caches are full: one of these reads makes them grow
            with monkeypatch.context() as patch:
                patch.setattr(native, "caches_in_place", fail)
                patch.setattr(placed, "RowTensors", fail)
                with suppress(torch.OutOfMemoryError):
                    logits.append(decoder(ids[:, t : t + 1]))
                    continue
        logits.append(decoder(ids[:, t : t + 1]))
    assert len(failures) == 2 and decoder.rows == rows
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_half_a_step_is_refused(monkeypatch):
    """Where launches are made one by one, an interrupt may leave the memories of half a step."""
    model, ids = make("GGGA"), draw(70, 1)
    decoder = Decoder(model, read(model, (5,) * 70), room=64)
    own_step = RowSteps.step

    def step(*args):
        own_step(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RowSteps, "step", step)
        decoder(ids)
    for call in (lambda: decoder(ids), lambda: decoder.state, lambda: decoder.row(0), lambda: decoder.keep([0])):
        with pytest.raises(RuntimeError, match=r"a step of this decoder was interrupted.*; make a Decoder"):
            call()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_in_and_out_of_inference_mode():
    """A state from inference mode is continued outside of it, and the reverse; autocast is remembered."""
    model, ids = make("LRDGKAM"), draw(1, 4, seed=1)
    with torch.no_grad():
        expected, _ = continue_eagerly(model, read(model, (20,)), ids)
    with torch.inference_mode():
        decoder = Decoder(model, read(model, (20,)), room=2)
        first = decoder(ids[:, :1])
    second = decoder(ids[:, 1:2])
    with torch.inference_mode():
        third = decoder(ids[:, 2:3])
    found = torch.cat((first, second, third, decoder(ids[:, 3:])), 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        state = read(model, (20,))
        decoder = Decoder(model, state, room=2)
        expected = model(ids[:, :1], state=state).logits
    torch.testing.assert_close(decoder(ids[:, :1]), expected, rtol=5e-2, atol=5e-2)


def test_errors_come_before_any_work():
    model = make("GGGA")
    state = read(model, (5, 5))
    with pytest.raises(TypeError, match="state must be a ModelState, got NoneType; pass LMOutput"):
        Decoder(model, None, room=4)
    for room in (0, True, 2.5):
        with pytest.raises(ValueError, match="room must be an int of at least 1"):
            Decoder(model, state, room=room)
    with pytest.raises(ValueError, match="it is another model's"):
        Decoder(make("LRDGKAM"), state, room=4)
    decoder = Decoder(model, state, room=4)
    for ids, message in (
        (draw(2, 3), r"ids must have shape \(b, 1\) = \(2, 1\), got \(2, 3\)"),
        (draw(1, 1), r"ids must have shape \(b, 1\) = \(2, 1\), got \(1, 1\)"),
        (torch.full((2, 1), VOCAB), "input_ids must lie in 0 .. 95"),
        (torch.zeros(2, 1), "input_ids must be int32 or int64"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder(ids)
    same_state(decoder.state, state, 0)
    model = make("attention alone")
    state = read(model, (5, 5))
    with pytest.raises(ValueError, match=r"state\['keys'\] must be float64, got float32"):
        Decoder(model.double(), state, room=4)(draw(2, 1))


@pytest.mark.parametrize("n", [1, 5])
def test_experts_without_counts_equal_one_by_one(n):
    """The path that a GPU takes for few tokens is tested on a CPU, with gradients."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(16, 8, 3, 24, scores="sigmoid").double()
    tokens = torch.randn(n, 16, dtype=torch.float64)
    _, chosen = layer.route(tokens)
    expected = layer.run_sorted(tokens, chosen, layer.one_by_one)
    weights = (layer.experts_gate_up, layer.experts_down)
    wanted = torch.autograd.grad(expected.square().sum(), weights)
    for run in (layer.run_gathered, layer.run_all):
        got = run(tokens, chosen)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
        for a, b in zip(torch.autograd.grad(got.square().sum(), weights), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


# On a GPU


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.gpu
@pytest.mark.slow(but="pairs")
@cases
@prompts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_graph_equals_eager_decoding(case, lengths, dtype, monkeypatch):
    """The graph is captured again when a window or the room is full."""
    monkeypatch.setattr(in_place, "WINDOW_STEP", 32)
    model = make(case).cuda().to(dtype)
    state, ids = read(model, lengths), draw(len(lengths), 40, seed=1).cuda()
    before = copy.deepcopy(state)
    decoder = Decoder(model, state, room=24)
    assert decoder.captured
    expected, final = continue_eagerly(model, state, ids)
    found = continue_with(decoder, ids)
    for a, b in zip(tensors_of(state), tensors_of(before), strict=True):
        assert torch.equal(a, b)
    if dtype == torch.float32:
        assert relative(found, expected) < 1e-5
        same_state(decoder.state, final, 1e-4)
        return
    assert found.isfinite().all()
    if "experts" not in case:
        assert relative(found, expected) < 5e-2
    else:  # a token with nearly equal scores may go to another expert
        each = [relative(*both) for both in zip(found.flatten(0, 1), expected.flatten(0, 1), strict=True)]
        assert sorted(each)[len(each) * 9 // 10] < 5e-2 and max(each) < 1


@pytest.mark.gpu
@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_capture_changes_no_bits(case, dtype):
    """The steps equal the same steps launched one by one."""
    model = make(case).cuda().to(dtype)
    state, ids = read(model, (3, 41, 1)), draw(3, 40, seed=1).cuda()
    decoder, plain = (Decoder(model, state, room=64, graph=graph) for graph in (True, False))
    assert decoder.captured and not plain.captured
    assert torch.equal(continue_with(decoder, ids), continue_with(plain, ids))
    for a, b in zip(tensors_of(decoder.state), tensors_of(plain.state), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@torch.no_grad()
def test_memory_does_not_grow():
    model, ids = make("LRDGKAM").cuda(), draw(2, 1).cuda()
    decoder = Decoder(model, read(model, (20, 20)), room=128)
    decoder(ids)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        decoder(ids)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
@torch.no_grad()
def test_steps_do_not_wait_for_the_device():
    model, ids = make("KKKM, experts").cuda(), draw(3, 1).cuda()
    decoder = Decoder(model, read(model, (3, 41, 1)), room=64)
    plain = Decoder(model, read(model, (3, 41, 1)), room=64, graph=False)
    plain(ids)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            decoder(ids)
            plain(ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@torch.no_grad()
def test_two_graphs_of_one_model():
    model, ids = make("LRDGKAM").cuda(), draw(2, 40, seed=1).cuda()
    states = [read(model, (20,)), read(model, (7,))]
    decoders = [Decoder(model, state, room=64) for state in states]
    found = [[decoder(ids[n : n + 1, t : t + 1]) for n, decoder in enumerate(decoders)] for t in range(40)]
    for n, state in enumerate(states):
        expected, _ = continue_eagerly(model, state, ids[n : n + 1])
        assert relative(torch.cat([row[n] for row in found], 1), expected) < 1e-5


@pytest.mark.gpu
def test_graph_in_inference_mode_and_autocast():
    model, ids = make("GGGA").cuda(), draw(1, 5, seed=1).cuda()
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        state = read(model, (20,))
        expected, _ = continue_eagerly(model, state, ids)
        decoder = Decoder(model, state, room=8)
    torch.empty(2**24, device="cuda").fill_(torch.nan)  # overwrites memory that autocast's cache has freed
    assert relative(continue_with(decoder, ids), expected) < 5e-2

"""Decoding steps in C on a CPU: logits and states of the layers' own forward, in any batch, after any change."""

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lineate.decoding.decoder import Decoder
from lineate.layers import Memory
from lineate.layers.linear import GatedDeltaNet
from lineate.layers.norm import GatedRMSNorm, RMSNorm
from lineate.models import HybridLM
from lineate.models.state import ModelState
from lineate.models.stepping import Ends, NativeSteps
from lineate.native import product
from lineate.native.build import why_not
from lineate.native.product import MOST_ROWS
from lineate.quantised import FORMATS, quantize
from tests.support.step_models import MODELS, VOCAB, make

pytestmark = pytest.mark.skipif(why_not() is not None, reason="no C compiler")


@contextmanager
def in_torch() -> Iterator[None]:
    """Run steps as the layers' own forward: a global hook must be called, so no module may be gone around."""
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


def step(blocks: Any, x: Tensor, states: Any) -> Any:
    """Run one token through blocks whose model is not needed."""
    return NativeSteps().read(Ends(nn.Identity(), nn.Identity(), None), blocks, x, states)


@torch.no_grad()
def decode(model: HybridLM, state: ModelState, ids: Tensor) -> tuple[Tensor, ModelState]:
    logits = []
    for token in ids.unbind(1):
        out = model(token[:, None], state=state)
        state = out.state
        logits.append(out.logits)
    return torch.cat(logits, 1), state


@torch.no_grad()
def read(model: HybridLM, rows: int, ragged: bool = False) -> ModelState:
    torch.manual_seed(1)
    mask = torch.ones(rows, 9, dtype=torch.long)
    mask[0, :4] = int(not ragged)
    return model(torch.randint(0, VOCAB, (rows, 9)), attention_mask=mask).state


def tokens(rows: int, n: int = 20) -> Tensor:
    return torch.randint(0, VOCAB, (rows, n), generator=torch.Generator().manual_seed(2))


def close(x: Tensor, y: Tensor, within: float = 1e-5) -> bool:
    return bool((x - y).abs().max() <= within * y.abs().max())


def same_states(one: ModelState, other: ModelState) -> bool:
    pairs = [(x[name], y[name]) for x, y in zip(one.layers, other.layers, strict=True) for name in x.names]
    return all(close(x, y, 2e-5) for x, y in pairs)


@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("rows", "ragged"), [(1, False), (3, False), (3, True)])
def test_steps_are_those_of_the_layers(name: str, rows: int, ragged: bool) -> None:
    model = make(name)
    state, ids = read(model, rows, ragged), tokens(rows, 70 if name == "gated delta rule" else 8)
    made, after = decode(model, state, ids)
    with in_torch():
        wanted, then = decode(model, state, ids)
    assert close(made, wanted) and same_states(after, then)
    assert not torch.equal(made, wanted)  # the two ways round differently: C has run


@pytest.mark.parametrize("name", ["delta rule", "gated linear", "Mamba-2", "Mamba-2, odd sizes"])
def test_memories_in_bfloat16(name: str) -> None:
    model = make(name)
    given, ids = read(model, 3), tokens(3, 6)
    narrow = [
        Memory({key: y.bfloat16() if key == "memory" else y for key, y in x.tensors.items()})
        if "memory" in x.names
        else x
        for x in given.layers
    ]
    state = ModelState(tuple(narrow), given.lengths)
    made, after = decode(model, state, ids)
    with in_torch():
        wanted, _ = decode(model, state, ids)
    assert after.layers[0]["memory"].dtype is torch.bfloat16
    assert close(made, wanted, 2e-2) and not torch.equal(made, wanted)  # a memory may be rounded the other way


def test_a_memory_of_sums_is_never_kept_in_bfloat16() -> None:
    model = make("linear")
    given = read(model, 1)
    first = Memory({key: y.bfloat16() if key == "memory" else y for key, y in given.layers[0].tensors.items()})
    with pytest.raises(ValueError, match="must be float32, got bfloat16"):
        decode(model, ModelState((first, *given.layers[1:]), given.lengths), tokens(1, 1))


@pytest.mark.parametrize("name", ["linear", "gated linear", "Mamba-2, groups"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(name: str, value: float) -> None:
    model = make(name)
    state, ids = read(model, 3), tokens(3, 2)
    clean, _ = decode(model, state, ids)
    memory = state.layers[0]["memory"]
    memory[1, :, 3, 2] = value
    made, _ = decode(model, state, ids)
    with in_torch():
        wanted, _ = decode(model, state, ids)
    assert torch.equal(made.isfinite(), wanted.isfinite()) and not made[1].isfinite().any()
    assert torch.equal(made[::2], clean[::2])


@pytest.mark.parametrize("name", ["gated delta rule", "Kimi", "all"])
@pytest.mark.parametrize("form", ["bfloat16", "float16", "int8", "int4", "fp8"])
def test_quantised_weights(name: str, form: str) -> None:
    model = make(name)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and FORMATS[form].fits(module.weight.shape):
            module.weight = nn.Parameter(quantize(module.weight, form), requires_grad=False)
    state, ids = read(model, 2), tokens(2, 20)
    made, after = decode(model, state, ids)
    with in_torch():
        wanted, then = decode(model, state, ids)
    loose = 0.03 if form in ("int8", "int4") else 1e-5  # a rounded activation may go the other way
    assert close(made, wanted, loose)
    assert form in ("int8", "int4") or same_states(after, then)


@pytest.mark.parametrize("rows", [5, min(43, MOST_ROWS)])
@pytest.mark.parametrize("name", ["gated delta rule", "all", "Mamba-2, groups", "Mamba-2, gate last"])
def test_a_row_has_the_same_bits_in_any_company_and_threads(name: str, rows: int) -> None:
    model = make(name)
    state, ids = read(model, rows), tokens(rows, 12)
    whole, _ = decode(model, state, ids)
    for row in range(0, rows, 1 + rows // 8):
        alone, _ = decode(model, state.select(torch.tensor([row])), ids[row : row + 1])
        assert torch.equal(alone[0], whole[row])
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            assert torch.equal(decode(model, state, ids)[0], whole)
            alone, _ = decode(model, state.select(torch.tensor([0])), ids[:1])
            assert torch.equal(alone[0], whole[0])
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
@pytest.mark.parametrize("gain", [1.0, 1e-42, 1e7])
def test_float16_of_any_size_has_the_same_bits_alone_and_in_company(gain: float) -> None:
    model = make("gated delta rule")
    for module in (*model.layers[0].modules(), model.head):
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(quantize(module.weight, "float16"), requires_grad=False)
    assert model.head is not None
    codes = model.head.weight.codes
    codes[3], codes[10:30], codes[40], codes[41] = 1e-7, 3.0, 65504.0, -2.0
    codes[50, ::5], codes[61, 37], codes[62, 33] = torch.inf, torch.nan, -torch.inf
    model.norm.weight.mul_(gain)
    state, ids = read(model, 9), tokens(9, 4)
    whole, _ = decode(model, state, ids)
    for row in range(9):
        alone, _ = decode(model, state.select(torch.tensor([row])), ids[row : row + 1])
        assert torch.equal(alone[0].nan_to_num(), whole[row].nan_to_num())
        assert torch.equal(alone[0].isnan(), whole[row].isnan())
    with in_torch():
        wanted, _ = decode(model, state, ids)
    assert torch.equal(wanted.isfinite(), whole.isfinite()) and wanted[..., 61].isnan().all()
    assert close(whole[wanted.isfinite()], wanted[wanted.isfinite()])


def test_a_state_is_not_changed_and_forks() -> None:
    model = make("gated delta rule")
    state, ids = read(model, 2), tokens(2, 10)
    before = copy.deepcopy(state)
    first, _ = decode(model, state, ids)
    other, _ = decode(model, state, (ids + 1) % VOCAB)
    again, _ = decode(model, state, ids)
    assert torch.equal(first, again) and not torch.equal(first, other)
    for one, kept in zip(state.layers, before.layers, strict=True):
        assert all(torch.equal(one[name], kept[name]) for name in one.names)


@pytest.mark.parametrize("name", ["gated delta rule", "all"])
@pytest.mark.parametrize("rows", [1, 3])
def test_steps_between_two_states_and_tensors_that_move(rows: int, name: str) -> None:
    model = make(name)
    state, ids = read(model, rows), tokens(rows, 12)
    made, _ = decode(model, state, ids)
    spare, logits = None, []
    with torch.no_grad():
        for n, token in enumerate(ids.unbind(1)):
            layers = state.layers if spare is None else [
                Memory(x.tensors, into=y.tensors) if isinstance(x, Memory) else x
                for x, y in zip(state.layers, spare.layers, strict=True)
            ]  # fmt: skip
            out = model(token[:, None], state=ModelState(tuple(layers), state.lengths))
            spare, state = (None if n == 0 else state), out.state
            logits.append(out.logits)
            for layer in state.layers if n in (4, 5) else ():
                for x in layer.tensors.values():
                    old, x.data = x.data, x.data.clone(memory_format=torch.preserve_format)
                    old.fill_(torch.nan)
    assert torch.equal(torch.cat(logits, 1), made)


@pytest.mark.parametrize("name", ["gated delta rule", "all", "Mamba-2, no feed-forward"])
def test_a_decoder_in_place_has_the_same_bits(name: str) -> None:
    model = make(name)
    state, ids = read(model, 3, ragged=True), tokens(3, 80)
    wanted, after = decode(model, state, ids)
    decoder = Decoder(model, state, room=8)
    made = torch.cat([decoder(token[:, None]) for token in ids.unbind(1)], 1)
    assert torch.equal(made, wanted)
    last = decoder.state
    memories = [(x, y) for x, y in zip(last.layers, after.layers, strict=True) if "memory" in x.names]
    assert memories and all(torch.equal(x["memory"], y["memory"]) for x, y in memories)


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def doubled_projection(model: HybridLM) -> None:
    model.layers[1].mixer.out_proj = Doubled(model.layers[1].mixer.out_proj)  # type: ignore[union-attr]


def hooked(model: HybridLM) -> None:
    model.layers[2].feed.register_forward_hook(lambda module, args, y: 2 * y)  # type: ignore[union-attr]


def other_weights(model: HybridLM) -> None:
    model.layers[0].feed.down_proj.weight = nn.Parameter(torch.randn(64, 96))  # type: ignore[union-attr]


def changed_in_place(model: HybridLM) -> None:
    with torch.no_grad():
        model.layers[3].mixer.in_proj.weight.mul_(1.5)  # type: ignore[union-attr]


def other_forward(model: HybridLM) -> None:
    norm = model.layers[1].feed_norm
    norm.forward = lambda x: 2 * x  # type: ignore[union-attr]


def other_setting(model: HybridLM) -> None:
    model.layers[0].mixer_norm.eps = 1.0  # type: ignore[union-attr]


def turned_in_place(model: HybridLM) -> None:
    model.layers[3].mixer.q_norm.weight.data *= 2  # type: ignore[union-attr]
    weight = model.layers[1].mixer.out_proj.weight  # type: ignore[union-attr]
    square = torch.randn(64, 192)
    weight.data = square
    model(torch.tensor([[1]]))
    weight.data = square.T.contiguous().T


def fewer_layers(model: HybridLM) -> None:
    del model.layers[3]


def hooked_block(model: HybridLM) -> None:
    model.layers[1].register_forward_hook(lambda module, args, result: (2 * result[0], result[1]))


def other_embedding(model: HybridLM) -> None:
    model.embed = nn.Embedding(VOCAB, 64)


def other_embeddings(model: HybridLM) -> None:
    model.embed.weight.data = torch.randn(VOCAB, 64)


def hooked_embedding(model: HybridLM) -> None:
    model.embed.register_forward_pre_hook(lambda module, args: ((args[0] + 1) % VOCAB,))


def other_last_norm(model: HybridLM) -> None:
    model.norm.eps = 1.0


def wrapped_head(model: HybridLM) -> None:
    assert model.head is not None
    model.head = Doubled(model.head)  # type: ignore[assignment]


def head_with_bias(model: HybridLM) -> None:
    assert model.head is not None
    model.head.bias = nn.Parameter(torch.randn(VOCAB))


def tied_head(model: HybridLM) -> None:
    model.head = None


def other_logits(model: HybridLM) -> None:
    model.logits = lambda x: model.head(x) + 1  # type: ignore[method-assign, misc]


@pytest.mark.parametrize(
    "change",
    [
        doubled_projection, hooked, other_weights, changed_in_place, other_forward, other_setting, turned_in_place,
        fewer_layers, hooked_block, other_embedding, other_embeddings, hooked_embedding, other_last_norm, wrapped_head,
        head_with_bias, tied_head, other_logits,
    ],
)  # fmt: skip
def test_what_is_changed_after_a_step_counts(change: Any) -> None:
    model = make("gated delta rule")
    ids = tokens(1, 5)
    before, _ = decode(model, read(model, 1), ids)
    change(model)
    state = read(model, 1)
    made, _ = decode(model, state, ids)
    with in_torch():
        wanted, _ = decode(model, state, ids)
    assert close(made, wanted) and not close(made, before, 1e-3)


@torch.no_grad()
@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("rows", [1, 3])
def test_embeddings_and_logits_of_a_step(form: str, rows: int) -> None:
    model = make("gated delta rule")
    for module in (model.embed, model.head) if form != "float32" else ():
        assert module is not None
        module.weight = nn.Parameter(quantize(module.weight, form), requires_grad=False)
    state, ids = read(model, rows), tokens(rows, 1)
    made = model(ids, state=state)
    x, after = model.hidden(model.embed(ids), state)
    assert torch.equal(made.logits, model.logits(x)) and same_states(made.state, after)


@torch.no_grad()
@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**40])
def test_tokens_that_are_not_in_the_vocabulary_are_refused_before_a_step(wrong: int) -> None:
    model = make("gated delta rule")
    state, ids = read(model, 2), tokens(2, 4)
    wanted, after = decode(model, state, ids)
    with pytest.raises(ValueError, match="input_ids must lie in"):
        model(torch.tensor([[1], [wrong]]), state=state)
    made, then = decode(model, state, ids)
    assert torch.equal(made, wanted) and same_states(after, then)


def test_a_model_that_is_deleted_is_freed() -> None:
    model = make("gated delta rule")
    decode(model, read(model, 1), tokens(1, 3))
    kept = [weakref.ref(model.layers[0]), weakref.ref(model.embed), weakref.ref(model.layers[1].feed)]
    del model
    gc.collect()
    assert all(x() is None for x in kept)


@pytest.mark.parametrize("kind", [GatedDeltaNet, RMSNorm, nn.Linear, nn.Embedding])
def test_the_forward_of_a_class_that_somebody_has_set(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gated delta rule")
    state, ids = read(model, 1), tokens(1, 3)
    before, _ = decode(model, state, ids)
    calls, own = [], kind.forward

    def counted(self: nn.Module, *args: Any) -> Any:
        calls.append(self)
        return own(self, *args)

    monkeypatch.setattr(kind, "forward", counted)
    made, _ = decode(model, state, ids)
    assert close(made, before) and (calls or kind is nn.Linear)


@torch.no_grad()
def test_a_processor_that_does_not_widen_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    own = product.product
    monkeypatch.setattr(product, "product", lambda x, w: None if w.dtype is torch.float16 else own(x, w))
    for form, runs in (("float16", False), ("bfloat16", True)):
        model = make("gated delta rule")
        for module in model.layers.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(quantize(module.weight, form), requires_grad=False)
        found = step(model.layers, torch.randn(1, 1, 64), read(model, 1).layers)
        assert (found is not None) == runs


def test_scales_that_somebody_has_replaced() -> None:
    model = make("gated delta rule")
    weight = quantize(model.layers[0].feed.down_proj.weight, "int8")  # type: ignore[union-attr]
    model.layers[0].feed.down_proj.weight = nn.Parameter(weight, requires_grad=False)  # type: ignore[union-attr]
    state, ids = read(model, 1), tokens(1, 3)
    before, _ = decode(model, state, ids)
    kept = model.layers[0].feed.down_proj.weight  # type: ignore[union-attr]
    kept.scales = 2 * kept.scales
    made, _ = decode(model, state, ids)
    with in_torch():
        wanted, _ = decode(model, state, ids)
    assert close(made, wanted, 1e-3) and not close(made, before, 1e-3)


WRONG_SIZES = {
    "norm": lambda block: setattr(block, "mixer_norm", RMSNorm(32)),
    "norm of the feed-forward": lambda block: setattr(block, "feed_norm", RMSNorm(32)),
    "projection": lambda block: setattr(block.mixer, "in_proj", nn.Linear(64, 100, bias=False)),
    "narrow projection": lambda block: setattr(block.mixer, "in_proj", nn.Linear(32, 580, bias=False)),
    "output": lambda block: setattr(block.mixer, "out_proj", nn.Linear(192, 32, bias=False)),
    "decays": lambda block: setattr(block.mixer, "A_log", nn.Parameter(torch.zeros(3))),
    "biases": lambda block: setattr(block.mixer, "dt_bias", nn.Parameter(torch.zeros(3))),
    "taps": lambda block: setattr(block.mixer.conv, "weight", nn.Parameter(torch.zeros(64, 4))),
    "gated norm": lambda block: setattr(block.mixer, "norm", GatedRMSNorm(16)),
    "feed-forward": lambda block: setattr(block.feed, "down_proj", nn.Linear(90, 64, bias=False)),
    "quantised weight without memory": lambda block: setattr(
        block.feed.down_proj, "weight", nn.Parameter(quantize(torch.ones(64, 96), "int8").to("meta"), False)
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("case", WRONG_SIZES)
def test_parts_of_wrong_sizes_are_never_read_in_c(case: str) -> None:
    """C sees addresses alone; torch refuses such a part, or does what it does with it."""
    model = make("gated delta rule")
    state, x = read(model, 1), torch.randn(1, 1, 64)
    WRONG_SIZES[case](model.layers[0])
    blocks = [model.layers[0]]
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        found = step(blocks, x, state.layers[:1])
        if found is None:
            blocks[0](x, state.layers[0])


@torch.no_grad()
def test_inputs_of_any_layout() -> None:
    model = make("gated delta rule")
    state, x = read(model, 3), torch.randn(3, 1, 64)
    wanted = step(model.layers, x, state.layers)
    turned = step(model.layers, x[:, 0].T.contiguous().T[:, None], state.layers)
    assert wanted is not None and turned is not None and torch.equal(wanted[0], turned[0])
    assert step(model.layers, torch.randn(3, 1, 32), state.layers) is None


def test_a_hook_of_a_block_that_c_does_not_compute_is_called() -> None:
    model = make("latent attention")
    model.layers[1].feed = nn.Sequential(model.layers[1].feed)  # type: ignore[union-attr]
    state, ids = read(model, 1), tokens(1, 3)
    wanted, _ = decode(model, state, ids)
    model.layers[1].register_forward_hook(lambda module, args, result: (result[0] + 1, result[1]))
    made, _ = decode(model, state, ids)
    with in_torch():
        then, _ = decode(model, state, ids)
    assert close(made, then) and not close(made, wanted, 1e-3)


def test_copies_of_a_model_have_their_own_steps() -> None:
    model = make("gated delta rule")
    state, ids = read(model, 1), tokens(1, 5)
    wanted, _ = decode(model, state, ids)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for x in model.parameters():
            x.zero_()
    del model
    assert torch.equal(decode(twin, state, ids)[0], wanted)


def test_where_c_does_not_run() -> None:
    model = make("gated delta rule")
    state = read(model, 1)
    x = torch.randn(1, 1, 64)
    assert step(model.layers, x, state.layers) is None  # gradients may be wanted
    with torch.no_grad():
        assert step(model.layers, x, state.layers) is not None
        assert step(model.layers, x.double(), state.layers) is None
        assert step(model.layers, torch.randn(1, 2, 64), state.layers) is None
        many = MOST_ROWS + 1
        assert step(model.layers, torch.randn(many, 1, 64), read(model, many).layers) is None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert step(model.layers, x, state.layers) is None
        narrow = copy.deepcopy(model).to(torch.bfloat16)
        assert step(narrow.layers, x, state.layers) is None


@torch.no_grad()
def test_a_state_of_another_model_is_refused_as_ever() -> None:
    model, other = make("gated delta rule"), make("sigmoid, odd sizes")
    with pytest.raises(ValueError, match="state"):
        model(torch.tensor([[1]]), state=read(other, 1))


@torch.no_grad()
@pytest.mark.parametrize("name", ["gated delta rule", "experts", "latent attention"])
def test_a_decoder_takes_ids_of_other_dtypes_in_between(name: str) -> None:
    model = make(name)
    state, ids = read(model, 2), tokens(2, 8)
    plain, mixed = (Decoder(model, state, room=16) for _ in range(2))
    for n, token in enumerate(ids.unbind(1)):
        wanted = plain(token[:, None])
        assert close(mixed(token[:, None].to(torch.int32 if n in (2, 3) else torch.int64)), wanted)


@torch.no_grad()
def test_a_decoder_that_checks_the_model_takes_hooks_that_were_there() -> None:
    model = make("experts")
    model.layers[0].register_forward_hook(lambda *_: None)
    decoder = Decoder(model, read(model, 1), room=8, debug=True)
    decoder(tokens(1, 1))
    model.head.weight.data = torch.randn(VOCAB, 64)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"changed after the decoder was prepared.*refresh"):
        decoder(tokens(1, 1))
    decoder.refresh()
    decoder(tokens(1, 1))


def test_a_model_that_was_pickled_without_steps(tmp_path: Any) -> None:
    model = make("gated delta rule")
    vars(model).pop("_steps")
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    state, ids = read(again, 1), tokens(1, 4)
    assert decode(again, state, ids)[0].isfinite().all()

"""With batch_invariant=True a row's logits have the same bits alone and among any other rows, at any index."""

from dataclasses import replace
from functools import cache
from itertools import cycle

import pytest
import torch
from torch import Tensor

from lineate.decoding import Decoder
from lineate.decoding import rows as rows_module
from lineate.decoding.invariant import read_in_groups
from lineate.decoding.rows import RowSteps, RowTensors
from lineate.generation.choice import Sampling
from lineate.models import HybridConfig, HybridLM, ModelState
from lineate.native.build import available
from lineate.quantised.which import shrink
from lineate.serving.drafting import PromptLookup
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.pool import Pool
from lineate.serving.engine.requests import Request
from lineate.torch_ops.invariance import NotInvariant, batch_invariant, is_batch_invariant
from tests.support.serving_models import CONFIG, EXPERTS, SPACING, VOCAB, prompt
from tests.support.small_models import random_model

ROWS, STEPS, CAPACITY = 33, 3, 128
BATCHES = (2, 3, 7, 16, 33)


def many(pattern: str, **changes) -> HybridConfig:
    return replace(CONFIG, hidden_size=64, pattern=pattern, n_layers=len(pattern), **changes)


CASES = {
    "attention, latent, experts": many("GAKM", experts=replace(EXPERTS, size=32, shared_size=32), dense_layers=(0,)),
    "rules": many("RDGKSJU"),
    "rules with a forward alone": many("LQIF"),
    "others": many("VHO", linear=replace(CONFIG.linear, rope_theta=100.0)),
    "memories that learn": many("TPNCE"),
    "norms after, tied": many("GA", norm_after="G", tie_embeddings=True),
    "squared ReLU": many("GA", feed=replace(CONFIG.feed, kind="relu2"), residual_scale=0.5),
    "full norm": many("AG", attention=replace(CONFIG.attention, qk_norm="full", bias=True)),
}
TOGETHER = ("attention, latent, experts", "rules")
"""The models whose rows run together on a GPU; those of the others run one by one there."""
FORMS = ("float32", "bfloat16", "int8", "int4")


def places() -> list[object]:
    """Return devices, models and formats: all models in float32 on a CPU, and two in all formats on both devices."""
    found: list[object] = []
    turns = cycle(FORMS[1:])
    for case in CASES:
        for form in FORMS if case in TOGETHER else ("float32", next(turns)):
            slow = [pytest.mark.slow] if (case, form) not in ((TOGETHER[0], "bfloat16"), ("others", "float32")) else []
            found.append(pytest.param("cpu", case, form, id=f"cpu-{case}-{form}", marks=[pytest.mark.cover, *slow]))
    for case in CASES:
        for form in (*FORMS, "fp8") if case in TOGETHER else ("bfloat16",):
            found.append(pytest.param("cuda", case, form, id=f"gpu-{case}-{form}", marks=pytest.mark.gpu))
    return found


@cache
def model(device: str, case: str, form: str) -> HybridLM:
    lm = random_model(CASES[case])
    if device == "cuda":
        lm = lm.cuda().bfloat16() if form != "float32" else lm.cuda()
    if form in ("int8", "int4", "fp8"):
        shrink(lm, form)
    return lm.bfloat16() if form == "bfloat16" else lm


@cache
def states(device: str, case: str, form: str) -> tuple[ModelState, ...]:
    """Return the states of rows of 1 to 97 tokens, each of which was read by itself."""
    lm = model(device, case, form)
    ids = (torch.tensor([prompt(1 + 3 * row, seed=row)], device=device) for row in range(ROWS))
    with torch.no_grad():
        return tuple(lm(own, last_only=True).state for own in ids)


def tokens(rows: list[int], device: str) -> list[Tensor]:
    drawn = torch.randint(VOCAB, (STEPS, ROWS), generator=torch.Generator().manual_seed(7)).to(device)
    return [own[rows, None] for own in drawn]


@torch.no_grad()
def decoded(place: tuple[str, str, str], rows: list[int], together: list[int] | None = None) -> Tensor:
    """Return the logits of these rows in all steps, `rows step vocab`."""
    state = ModelState.join([states(*place)[row] for row in rows])
    decoder = Decoder(model(*place), state, STEPS, batch_invariant=True)
    found = torch.cat([decoder(ids) for ids in tokens(rows, place[0])], 1)
    if together is not None:
        together.append(decoder.rows_together)
    return found


def drawn_rows(rows: int, known: int) -> list[int]:
    """Return this number of rows in a random order, one of which is known."""
    drawn = torch.randperm(ROWS, generator=torch.Generator().manual_seed(rows))[:rows].tolist()
    if known not in drawn:
        drawn[rows // 2] = known
    return drawn


@pytest.mark.skipif(not available(), reason="no C compiler")
@pytest.mark.parametrize(("device", "case", "form"), places())
def test_a_row_has_the_same_bits_among_any_rows(device, case, form):
    place, together = (device, case, form), []
    single = range(ROWS) if device == "cpu" else (0, 7, 16, 32)  # to record a graph takes a while
    alone = {row: decoded(place, [row])[0] for row in single}
    assert alone[0].isfinite().all() and not torch.equal(alone[0], alone[7])
    for i, count in enumerate(BATCHES):
        rows = drawn_rows(count, single[i % len(single)])
        found = decoded(place, rows, together)
        different = [row for n, row in enumerate(rows) if row in alone and not torch.equal(found[n], alone[row])]
        assert not different, f"of {count} rows, these have other bits: {different}"
    if device == "cuda":
        assert together == [count if case in TOGETHER else 1 for count in BATCHES]


@pytest.mark.skipif(not available(), reason="no C compiler")
@pytest.mark.parametrize(
    ("device", "form"),
    [
        *(pytest.param("cpu", form, marks=[pytest.mark.cover] * (form != "float32")) for form in ("float32", "int4")),
        *(pytest.param("cuda", form, marks=pytest.mark.gpu) for form in ("bfloat16", "int8")),
    ],
)
def test_log_probabilities_do_not_depend_on_other_requests(device, form):
    """Rows join and leave an engine in which up to 20 of them run."""
    lm = model(device, TOGETHER[0], form)

    def run(engine: Engine, count: int, most: int) -> dict[int, list[float]]:
        requests = {
            n: Request(prompt(1 + 7 * n, seed=n), Sampling(seed=n), max_new_tokens=3 + n % most, logprobs=0)
            for n in range(count)
        }
        handles = {}
        for n, request in requests.items():
            handles[n] = engine.submit(request)
            engine.step()
        while engine.step():
            pass
        return {n: [x.logprob for x in handle.result()[0].logprobs] for n, handle in handles.items()}

    options = {"context": 256, "spacing": SPACING, "batch_invariant": True}
    found = run(Engine(lm, slots=20, **options), 24, 22)
    for n in (0, 5, 11, 23):
        engine = Engine(lm, slots=1, **options)
        request = Request(prompt(1 + 7 * n, seed=n), Sampling(seed=n), max_new_tokens=3 + n % 22, logprobs=0)
        handle = engine.submit(request)
        while engine.step():
            pass
        assert [x.logprob for x in handle.result()[0].logprobs] == found[n], n


@pytest.mark.gpu
def test_without_the_option_the_bits_depend_on_the_batch():
    place = ("cuda", TOGETHER[1], "bfloat16")

    def plain(rows: list[int]) -> Tensor:
        state = ModelState.join([states(*place)[row] for row in rows])
        with torch.no_grad():
            return Decoder(model(*place), state, STEPS)(tokens(rows, "cuda")[0])

    assert not torch.equal(plain(list(range(ROWS)))[:1], plain([0]))


@pytest.mark.gpu
@torch.no_grad()
def test_a_graph_has_the_bits_of_its_launches():
    place = ("cuda", TOGETHER[0], "bfloat16")
    state = ModelState.join(list(states(*place)[:5]))
    for graph in (False, True):
        decoder = Decoder(model(*place), state, STEPS, graph=graph, batch_invariant=True)
        found = torch.cat([decoder(ids) for ids in tokens(list(range(5)), "cuda")], 1)
        assert torch.equal(found, decoded(place, list(range(5))))


@pytest.mark.skipif(not available(), reason="no C compiler")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_generated_tokens_and_states(device):
    """Prompts of several lengths, one of them a single token, with rows that stop."""
    lm = model(device, TOGETHER[0], "bfloat16")
    prompts = [prompt(length, seed=length) for length in (1, 9, 30, 70, *range(2, 20))]
    made = lm.generate(prompts, 9, temperature=0, stop=[3, 5], batch_invariant=True)
    rows = made.run()
    for n in (0, 3, 21):
        alone = lm.generate([prompts[n]], 9, temperature=0, stop=[3, 5], batch_invariant=True)
        assert alone.run() == [rows[n]]
        own = made.state.select(torch.tensor([n]))
        for layer, expected in zip(own.layers, alone.state.layers, strict=True):
            for name in expected.names:
                entries = expected[name].shape[1] if "memory" not in name and name != "conv" else None
                assert torch.equal(layer[name][:, :entries], expected[name]), name


def test_wrong_uses_are_refused():
    lm = random_model(CONFIG)
    state = lm(torch.tensor([[1, 2]])).state
    with pytest.raises(TypeError, match=r"batch_invariant must be (a )?bool"):
        Decoder(lm, state, 1, batch_invariant=1)
    with pytest.raises(TypeError, match="batch_invariant"):
        lm.generate([[1]], 1, batch_invariant="yes")
    with pytest.raises(ValueError, match="does not cover speculative passes"):
        Engine(lm, batch_invariant=True, drafter=PromptLookup())
    pool = Pool(lm, 1, 64, batch_invariant=True)
    pool.join(state)
    with pytest.raises(RuntimeError, match="reads one token of each row"):
        pool.trail([[1, 2]])
    with torch.autocast("cpu"), pytest.raises(ValueError, match="does not support autocast"):
        Decoder(lm, state, 1, batch_invariant=True)
    with pytest.raises(ValueError, match="on a CPU or a CUDA GPU, got meta"):
        Pool(HybridLM(CONFIG).to("meta"), 1, 64, batch_invariant=True)


def test_rows_of_a_model_with_hooks_run_one_by_one():
    lm = random_model(replace(CONFIG, pattern="GA", n_layers=2))
    seen = []
    lm.layers[1].mixer.in_proj.register_forward_hook(lambda module, given, out: seen.append(out.shape[0]))
    state = ModelState.join([lm(torch.tensor([[1, 2]])).state] * 3)
    seen.clear()
    decoder = Decoder(lm, state, 4, batch_invariant=True)
    decoder(torch.tensor([[1], [2], [3]]))
    assert decoder.rows_together == 1 and seen == [1, 1, 1]


def test_the_setting_ends_with_its_block():
    assert not is_batch_invariant()
    with batch_invariant():
        assert is_batch_invariant()
        with batch_invariant(False):
            assert not is_batch_invariant()
    assert not is_batch_invariant()


@torch.no_grad()
def test_a_trial_that_fails_is_undone_and_rows_run_one_by_one(monkeypatch, caplog):
    """As on a GPU, where the second layer has no invariant kernels; the first has then changed its memory."""
    lm = random_model(replace(CONFIG, pattern="GA", n_layers=2))
    groups = []

    def read(model, ids, states, window, format, together):
        groups.append(together)
        if together is None:
            for own in states[0].values():
                for x in own.values():
                    x.fill_(torch.nan)
            raise NotInvariant("a mixer without kernels")
        return read_in_groups(model, ids, states, window, format, together)

    monkeypatch.setattr(rows_module, "read_in_groups", read)
    monkeypatch.setattr(rows_module, "rows_together", lambda model: None)
    state = ModelState.join([lm(torch.tensor([[1, 2, row]])).state for row in range(3)])
    memories = {0: {name: state.layers[0][name].clone() for name in state.layers[0].names}}
    caches = {1: {name: torch.zeros(3, 64, *state.layers[1][name].shape[2:]) for name in state.layers[1].names}}
    for name, x in caches[1].items():
        x[:, :3] = state.layers[1][name]
    steps = RowSteps(lm, RowTensors(memories, caches, torch.full((3,), 3), 64), invariant=True)
    steps.tried = False  # as on a GPU
    steps.runs.fill_(1)
    ids = torch.tensor([[4], [5], [6]])
    logits, _ = steps.step(ids, 3)
    assert torch.equal(logits, Decoder(lm, state, 4, batch_invariant=True)(ids))
    assert groups == [None, 1, 1, 1] and steps.together == 1 and steps.tried
    assert "decode one by one" in caplog.text and "a mixer without kernels" in caplog.text

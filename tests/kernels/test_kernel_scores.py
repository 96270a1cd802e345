"""The stages that prepare a chunk: scores and inverses in Gluon, wild rows by portable kernels, scores in the walk."""

import importlib
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.cases import (
    GATED_DELTA,
    KIMI_DELTA,
    ROWS,
    Inputs,
    Shape,
    assert_same_bits,
    bounds,
    convert,
    draw,
    same_bits,
)
from tests.support.marks import slow_but
from tests.support.paths import BF16, INTERPRETER, PATHS, param
from tests.support.rule_kernels import CHANNEL_ROWS, CHUNK, LEAN, check, run, sized


@pytest.mark.gpu
@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("normalize", [False, True], ids=["", "normalize"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("gates", [torch.bfloat16, torch.float32], ids=["bf16 gates", "fp32 gates"])
@pytest.mark.parametrize("wild", [None, -50.0, -300.0, -torch.inf], ids=str)
@pytest.mark.parametrize("row", CHANNEL_ROWS, ids=str)
def test_decay_per_channel_in_gluon(row, wild, gates, packed, normalize, monkeypatch):
    """The Gluon kernels take both rules; portable kernels redo wild parts (a few tokens; all channels or three)."""
    taken = []
    for file, name in (("launch_scores", "fill_channel_scores"), ("launch_gradients", "fill_channel_gradients")):
        module = importlib.import_module(f"lineate.kernels.hopper.{file}")

        def note(*given: object, name: str = name, launch: object = getattr(module, name), **options: object) -> None:
            taken.append(name)
            launch(*given, **options)

        monkeypatch.setattr(module, name, note)
    texts = (100, 1, 0, 64, 130)
    shape = Shape(1 if packed else 2, sum(texts), 1, 2, 128, 128)
    inputs = convert(draw(row, shape, texts=len(texts) if packed else None), BF16.dtype, gates)
    if wild is not None:
        inputs["log_decay"][:, 10:200:37] = wild
        inputs["log_decay"][:, 28:250:41, 1, 5:80:30] = wild
    if normalize:
        inputs["q"], inputs["k"] = inputs["q"] * 3, inputs["k"] * 3
    check(row, inputs, BF16, normalize_qk=normalize, **({"cu_seqlens": bounds(texts)} if packed else {}))
    if torch.cuda.get_device_capability() == (9, 0):
        assert set(taken) == {"fill_channel_scores", "fill_channel_gradients"}


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("row", [row for row in ROWS if row.decay != "channel"], ids=str)
def test_scores_made_in_the_walk(row, packed, training, monkeypatch):
    """Their bits equal those of scores made before the walk; the number of sequences decides which of the two runs."""
    from lineate.kernels.architectures import architecture_of

    asked = []
    architecture = architecture_of(torch.device("cuda", torch.cuda.current_device()))
    choose, nothing = architecture.made_in_walk, importlib.import_module("lineate.kernels.stages").InWalk.NOTHING
    texts = (200, 1, 0, 64, 129, 50)
    shape = Shape(1 if packed else len(texts), sum(texts), 24, 24, 128, 128)
    inputs = convert(draw(row, shape, texts=len(texts)), BF16.dtype)
    if "log_decay" in inputs:
        inputs["log_decay"][:, 10:90:7] = -torch.inf
        inputs["log_decay"][:, 91:150:9] = -60
    options = {}
    if packed:  # the last sequence must not affect the others
        options["cu_seqlens"] = bounds(texts)
        for name in ("q", "k", "v"):
            inputs[name][:, -50:] = torch.nan
    results = []
    for allowed in (True, False):

        def decide(*arguments: object, allowed: bool = allowed) -> object:
            asked.append(choose(*arguments))
            return asked[-1] if allowed else nothing

        monkeypatch.setattr(architecture, "made_in_walk", decide)
        results.append(run(row, inputs, BF16, None if training else (), **options))
        assert not results[-1].output[:, : sum(texts[:-1])].isnan().any()
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert {x is not nothing for x in asked} == {on_hopper and not (row.corrects and training)}
    assert_same_bits(*results)


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
@pytest.mark.parametrize("how", ["negative beta", "long keys"])
def test_wild_systems(how, row, path):
    """If the memory grows by a fifth per token, entries of the inverse exceed float16; they must be right too."""
    inputs = draw(row, sized(path))
    inputs["log_decay"] = inputs["log_decay"] * 0.1
    if how == "negative beta":
        inputs["beta"] = -0.2 * torch.ones_like(inputs["beta"])
        inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).clone()
    else:
        inputs["beta"] = torch.full_like(inputs["beta"], 1.2)
        inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]) * 1.4
    check(row, convert(inputs, path.dtype), path, how)


def call_of(inputs: Inputs, corrects: bool, normalize: bool = False, beta_scale: float = 1.0) -> object:
    """Return the call that the stages get for these inputs."""
    calls, kernels = importlib.import_module("lineate.call"), importlib.import_module("lineate.kernels.call")
    raw = inputs.get("A_log") is not None
    given = calls.Inputs(**{name: x for name, x in inputs.items() if name != "state"})
    rule = importlib.import_module("lineate.dispatch").select_rule(given)
    assert rule.corrects == corrects
    options = calls.Options(rule, 1.0, normalize, beta_scale=beta_scale, raw_decay=raw, raw_beta=raw)
    return kernels.make_call(given, options)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("normalize", [False, True], ids=["", "normalize"])
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
@pytest.mark.parametrize("path", [param(INTERPRETER)])
def test_wild_rows_are_made_anew(row, path, normalize, monkeypatch):
    """As with bfloat16 inputs, products are in float16 up to the first wild row and in float32 from there on."""
    stages = importlib.import_module("lineate.kernels.portable.stages").PortableStages
    inputs = convert(draw(row, LEAN._replace(t=150)), path.dtype)
    inputs["k"][:, 100:] *= 1.7
    inputs["beta"][:, 100:] = 1.0
    inputs["beta"][:, 30] = -0.5
    call = call_of(inputs, True, normalize)
    expected = stages(call).prepare().T
    monkeypatch.setattr(stages, "choose_products", lambda _: ("fp16", "tf32x3"))
    got = stages(call).prepare().T
    for slot, first in ((0, 30), (1, CHUNK if normalize else 36), (2, CHUNK if normalize else 0)):
        assert (got - expected)[slot].abs().max() < 1e-3
        assert same_bits(got[slot, :, first:], expected[slot, :, first:])
        assert first == 0 or not same_bits(got[slot, :, :first], expected[slot, :, :first])


@pytest.fixture
def as_on_hopper(monkeypatch):
    """Return a function that makes calls use the stages of Hopper with these functions as their Gluon launches."""
    hopper = pytest.importorskip("lineate.kernels.hopper.stages")

    class Stages(hopper.HopperStages):
        def __init__(self, call: object) -> None:
            super().__init__(call)
            self.takes_channel, self.products = True, ("fp16", "tf32x3")

    def replace_launches(scores: object, gradients: object = None) -> type:
        monkeypatch.setattr(hopper.launch_scores, "fill_channel_scores", scores)
        monkeypatch.setattr(hopper.launch_gradients, "fill_channel_gradients", gradients)
        monkeypatch.setattr(importlib.import_module("lineate.kernels.pipeline"), "stages_for", Stages)
        for launches in ("launch_scores", "launch_gradients"):  # several chunks a program, as in longer calls
            module = importlib.import_module(f"lineate.kernels.portable.{launches}")
            monkeypatch.setattr(module, "chunks_to_check", lambda call, blocks=1: 2)
        return Stages

    return replace_launches


@pytest.mark.parametrize("path", [param(INTERPRETER)])
@pytest.mark.parametrize("row", CHANNEL_ROWS, ids=str)
def test_scores_that_gluon_leaves_are_made_anew(row, path, as_on_hopper):
    """The portable kernel recomputes a chunk from its first wild row on, and all values that depend on later rows."""
    portable = importlib.import_module("lineate.kernels.portable.stages").PortableStages
    call = call_of(convert(draw(row, LEAN._replace(t=150), "reset -50"), path.dtype), row.corrects)
    expected = portable(call).prepare(for_backward=True)
    first_wild = (30, CHUNK, 0)

    def leave(_: object, ready: NamedTuple, late: bool) -> None:
        ready.wild[:, 0] = torch.tensor(first_wild)
        for slot, first in enumerate(first_wild):
            tokens = slice(slot * CHUNK, slot * CHUNK + first)
            for x, y in ((ready.q, expected.q), (ready.k, expected.k)):
                x[:, tokens] = y[:, tokens]
            for x, y in ((ready.P, expected.P), (ready.M, expected.M), (ready.T, expected.T)):
                if x is not None:
                    x[slot, :, :first] = y[slot, :, :first]
            if first == CHUNK:
                ready.w[:, tokens], ready.factors[slot] = expected.w[:, tokens], expected.factors[slot]

    got = as_on_hopper(leave)(call).prepare(for_backward=True)
    assert (got.T is None) == (got.M is None) == (not row.corrects)
    for name in ("q", "k", "w", "P", "M", "T", "factors"):
        x, y = getattr(got, name), getattr(expected, name)
        assert (x is None and y is None) or same_bits(x, y), name


@pytest.mark.cover
@pytest.mark.parametrize("path", [param(INTERPRETER)])
@pytest.mark.parametrize("row", slow_but(CHANNEL_ROWS, CHANNEL_ROWS[:1]), ids=str)
def test_gradients_that_gluon_leaves_are_made_anew(row, path, as_on_hopper):
    """64 channels of a chunk get the portable kernels' results if they are wild, and are left unchanged if not."""
    inputs = convert(draw(row, Shape(1, 70, 1, 1, 128, 128), "reset -50"), path.dtype)
    expected = run(row, inputs, path)
    wild_units = torch.tensor([[[1, 0]], [[0, 1]]])

    def all_wild(_: object, ready: NamedTuple, late: bool) -> None:
        ready.wild.zero_()

    def leave(call: object, ready: NamedTuple, around: NamedTuple, work: NamedTuple, grads: NamedTuple) -> None:
        work.wild.copy_(wild_units)
        for slot, _, x in (wild_units == 0).nonzero().tolist():
            part = slice(None), slice(slot * CHUNK, (slot + 1) * CHUNK), slice(None), slice(x * 64, x * 64 + 64)
            for x, name in ((work.dq, "q"), (work.dk, "k"), (grads.log_decay, "log_decay")):
                x[part] = expected.grads[name][part] + 1

    as_on_hopper(all_wild, leave)
    got = run(row, inputs, path)
    for name in ("q", "k", "log_decay"):
        tame = (wild_units == 0).repeat_interleave(64, 2).repeat_interleave(CHUNK, 0)[None, :70]
        expected.grads[name] += tame
    assert_same_bits(got, expected)


def test_wild_rows_are_looked_for_unless_there_can_be_none():
    """With unit keys and beta = 2 sigmoid(logit) at most, there is no second launch; decay per channel can be wild."""
    stages = pytest.importorskip("lineate.kernels.portable.stages").PortableStages
    x = torch.zeros(1, 5, 2, 16, dtype=torch.bfloat16)

    def launches(log_decay: Tensor, normalize: bool, A_log: Tensor | None = None, beta_scale: float = 1.0) -> int:
        inputs = {"q": x, "k": x, "v": x, "log_decay": log_decay, "beta": x[..., 0], "A_log": A_log}
        return len(stages(call_of(inputs, True, normalize, beta_scale)).products)

    assert launches(x[..., 0], True, A_log=x[0, 0, :, 0], beta_scale=2.0) == 1
    assert launches(x[..., 0], True, A_log=x[0, 0, :, 0], beta_scale=2.1) == 2
    assert launches(x[..., 0], False, A_log=x[0, 0, :, 0]) == 2
    assert launches(x[..., 0], True) == 2
    assert launches(x, True, A_log=x[0, 0, :, 0]) == 2

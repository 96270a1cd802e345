"""The interface between the pipeline and an architecture: which stages run, in which order, and with whose kernels."""

import importlib

import pytest
import torch
from torch import Tensor

from lineate.rule import DIAGONAL_PLUS_LOW_RANK, GATED_DELTA_2, GATED_DELTA_PRODUCT
from tests.support.cases import (
    GATED_DELTA,
    GATED_LINEAR,
    GATED_LINEAR_CHANNEL,
    KIMI_DELTA,
    LINEAR,
    Row,
    Shape,
    convert,
    draw,
    interpreted,
)
from tests.support.general_cases import drawn, narrow

pytest.importorskip("triton")
architectures = importlib.import_module("lineate.kernels.architectures")
launching = importlib.import_module("lineate.kernels.launching")
pipeline = importlib.import_module("lineate.kernels.pipeline")
segments = importlib.import_module("lineate.kernels.segments")
hopper = importlib.import_module("lineate.kernels.hopper.stages")
portable = importlib.import_module("lineate.kernels.portable.stages")

CPU = torch.device("cpu")
FORWARD = {
    2: {1: 1, 2: 1, 4: 1, 6: 12, 8: 16, 16: 32, 32: 32, 64: 32, 128: 32},
    4: {1: 1, 2: 1, 4: 1, 6: 12, 8: 16, 16: 16, 32: 16, 64: 16, 128: 16},
    8: {1: 1, 2: 1, 3: 1, 4: 1, 6: 8, 8: 8, 16: 8, 32: 8, 64: 8, 128: 8},
    16: {1: 1, 2: 1, 4: 1, 6: 3, 8: 4, 16: 4, 32: 4, 64: 4, 128: 4},
    20: {8: 1, 16: 3, 128: 3},
    24: {8: 1, 64: 1, 128: 2},
    32: {8: 1, 64: 1, 128: 2},
    48: {1: 1, 2: 1, 4: 1, 8: 1, 16: 1, 32: 1, 64: 1, 128: 1},
}
"""The segments of a sequence on an H200, by its value heads of 128 and its thousands of tokens."""


@pytest.fixture
def add_architecture(monkeypatch):
    """Return a function that puts an architecture before all others."""

    def add(stages: type) -> None:
        monkeypatch.setattr(architectures, "ARCHITECTURES", (stages, *architectures.ARCHITECTURES))
        architectures.architecture_of.cache_clear()

    yield add
    monkeypatch.undo()
    architectures.architecture_of.cache_clear()


def test_a_cpu_gets_the_portable_stages():
    assert architectures.architecture_of(CPU) is portable.PortableStages


def test_decisions_in_the_interpreter_are_those_of_an_h200():
    assert launching.multiprocessors(CPU) == 132
    backward = segments.cut_backward(44, 132)
    assert backward.count_segments(256) == 3 and backward.count_segments(255) == 1
    assert segments.cut_backward(1, 132).count_segments(256) == 8 and segments.cut_backward(45, 132) == segments.WHOLE


@pytest.mark.parametrize("heads", FORWARD)
def test_where_a_forward_walk_is_cut(heads):
    """The segments of a lone sequence on an H200, by its value heads of 128 and its thousands of tokens."""
    cutting = segments.cut_forward(2 * heads, 132)
    found = {t: cutting.count_segments(16 * t) for t in FORWARD[heads]}
    assert found == FORWARD[heads]
    assert cutting.count_segments(cutting.shortest - 1) == 1
    beside = segments.cut_forward(2 * heads, 132, beside=True)
    assert beside == (segments.WHOLE if heads in (24, 32) else cutting)  # two segments do not help there


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 16, 33])
def test_more_chunks_never_mean_fewer_segments(heads):
    """Slices of a sequence that is not cut are not cut either."""
    for cutting in (segments.cut_forward(2 * heads, 132), segments.cut_backward(2 * heads, 132)):
        counts = [cutting.count_segments(chunks) for chunks in range(1, 3000)]
        assert counts == sorted(counts)
        assert all(count == 1 or chunks // count >= cutting.least for chunks, count in enumerate(counts, 1))
        assert all(count == 1 or count - 1 >= cutting.least_cuts for count in counts)


@interpreted
def test_a_new_architecture_is_one_class_and_one_line(add_architecture):
    """Its stages run in the order that stages.py names; a stage that it does not replace is the portable one."""
    seen = []

    class Noted(portable.PortableStages):
        def prepare(self, *given: object, **options: object) -> object:
            seen.append("prepare")
            return super().prepare(*given, **options)

        def walk_forward(self, *given: object) -> None:
            seen.append("walk_forward")
            super().walk_forward(*given)

        def walk_backward(self, *given: object) -> None:
            seen.append("walk_backward")
            super().walk_backward(*given)

        def gradients(self, *given: object) -> None:
            seen.append("gradients")
            super().gradients(*given)

    add_architecture(Noted)
    inputs = convert(draw(GATED_DELTA, Shape(1, 70, 1, 1, 16, 16)), torch.float32)
    inputs["v"].requires_grad_()
    output, _ = GATED_DELTA.op(**inputs, form="chunkwise", backend="triton")
    assert seen == ["prepare", "walk_forward"]
    output.sum().backward()
    assert seen[2:] == ["prepare", "walk_backward", "gradients"]


class Launches(list[tuple[str, str]]):
    """Records launches in place of a GPU: the last folder of a kernel's module, and its name."""

    def start(self, kernel: object, grid: tuple[int, ...]) -> object:
        self.append((kernel.fn.__module__.split(".")[-2], kernel.fn.__name__))
        assert all(n > 0 for n in grid)
        return lambda *arguments, **options: None


@pytest.fixture
def launches(monkeypatch, add_architecture):
    """Make calls on a CPU take the stages of Hopper, and record what would be launched."""

    class Everywhere(hopper.HopperStages):
        @staticmethod
        def runs_on(device: torch.device) -> bool:
            return True

    add_architecture(Everywhere)
    found = Launches()
    for folder in ("hopper", "portable"):
        for name in ("launch_scores", "launch_walks", "launch_gradients", "launch_second"):
            if (folder, name) == ("hopper", "launch_second"):
                continue
            module = importlib.import_module(f"lineate.kernels.{folder}.{name}")
            monkeypatch.setattr(module, "start", found.start)
    return found


GLUON = {
    LINEAR: [["forward_state"], ["head_scores", "backward_state", "added_gradients"]],
    GATED_LINEAR: [["forward_state"], ["head_scores", "backward_state", "added_gradients"]],
    GATED_LINEAR_CHANNEL: [
        ["channel_scores", "forward_state"],
        ["channel_scores", "backward_state", "channel_gradients"],
    ],
    GATED_DELTA: [
        ["head_scores", "forward_state"],
        ["head_scores", "backward_state", "head_gradients"],
    ],
    KIMI_DELTA: [["channel_scores", "forward_state"], ["channel_scores", "backward_state", "channel_gradients"]],
}


def launch_all(
    row: Row, inputs: dict[str, Tensor], found: Launches, cutting: object = segments.WHOLE
) -> list[list[tuple[str, str]]]:
    """Return the launches of a call and its backward."""
    calls, kernels = importlib.import_module("lineate.call"), importlib.import_module("lineate.kernels.call")
    given = calls.Inputs(**inputs)
    rule = importlib.import_module("lineate.dispatch").select_rule(given)
    call = kernels.make_call(given, calls.Options(rule, 1.0), cutting)
    state, (output, final) = inputs["state"], (torch.empty_like(inputs[name]) for name in ("v", "state"))
    states = call.v.new_empty(call.sequences.slots, *call.v.shape[2:], call.q.shape[3])
    grads = pipeline.empty_gradients(call, final)
    pipeline.forward(call, state, output, final, states)
    count = len(found)
    pipeline.backward(call, output, final, states, grads)
    return [found[:count], found[count:]]


@pytest.mark.parametrize("row", GLUON, ids=str)
def test_hopper_launches_its_own_kernels(row, launches):
    """Without a GPU, every launch of a call that the Gluon kernels support can be prepared, and is as expected."""
    inputs = convert(draw(row, Shape(12, 10, 12, 12, 128, 128)), torch.bfloat16)
    made = [[name for folder, name in part if folder == "hopper"] for part in launch_all(row, inputs, launches)]
    assert made == GLUON[row]


GENERAL = {
    GATED_DELTA_2: [["channel_scores", "forward_state"], ["channel_scores", "backward_state", "channel_gradients"]],
    DIAGONAL_PLUS_LOW_RANK: [
        ["channel_scores", "channel_scores", "forward_state"],
        ["channel_scores", "channel_scores", "backward_state", "channel_gradients", "channel_gradients"],
    ],
    GATED_DELTA_PRODUCT: [["head_scores", "forward_state"], ["head_scores", "backward_state", "head_gradients"]],
}


@pytest.mark.parametrize("rule", GENERAL, ids=lambda rule: rule.name)
def test_hopper_runs_the_general_row_in_kernels_of_the_five_rules(rule, launches, monkeypatch):
    """With a direction of its own, scores and gradients have a second launch, for the key that is written."""
    calls, general = importlib.import_module("lineate.call"), importlib.import_module("lineate.kernels.general")
    monkeypatch.setattr(general, "start", launches.start)
    options = calls.Options(rule, 1.0)
    inputs = narrow(drawn(rule, "head", 2, shape=Shape(12, 10, 12, 12, 128, 128)), torch.bfloat16)
    given = calls.Inputs.of({name: inputs.get(name) for name in calls.Inputs.NAMES})
    given = general.in_rows_of_writes(given, options)
    grads = given.map(torch.empty_like)
    output, final = given.q.new_empty(12, 10, 12, 128), torch.empty_like(inputs["state"])
    states = output.new_empty(12, 12, 128, 128)
    general.forward(given.replace(state=None), options, inputs["state"], output, final, states)
    count = len(launches)
    general.backward(given, options, states, output, final, grads)
    made = [[name for folder, name in part if folder == "hopper"] for part in (launches[:count], launches[count:])]
    assert made == GENERAL[rule]


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
def test_hopper_launches_a_walk_for_maps_and_a_chain_before_the_walk_of_segments(row, packed, launches):
    inputs = convert(draw(row, Shape(1, 400, 2, 2, 128, 128), texts=2 if packed else None), torch.bfloat16)
    inputs["cu_seqlens"] = torch.tensor([0, 330, 400]) if packed else None
    forward, backward = launch_all(row, inputs, launches, segments.Cutting(4, 3, 1))
    assert forward[-3:] == [("hopper", "forward_state"), ("hopper", "chain"), ("hopper", "forward_state")]
    walks = [("hopper", "backward_state"), ("hopper", "chain"), ("hopper", "backward_state")]
    assert [x for x in backward if x[1] in ("backward_state", "chain")] == walks


@pytest.mark.parametrize("row", GLUON, ids=str)
@pytest.mark.parametrize(("dtype", "k"), [(torch.float32, 128), (torch.bfloat16, 60)], ids=["float32", "k=60"])
def test_hopper_leaves_to_the_portable_stages_what_its_kernels_do_not_take(row, dtype, k, launches):
    inputs = convert(draw(row, Shape(1, 70, 1, 2, k, 64)), dtype)
    launch_all(row, inputs, launches)
    assert launches and {folder for folder, _ in launches} == {"portable"}

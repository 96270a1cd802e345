"""Every kernel gets through the first stages of Triton's compiler, for two GPUs, on a machine that has none.

The interpreter runs kernels in float32 and compiles nothing, so a kernel may be right there and yet not compile. Here
the launches of whole calls are lowered with the types and constants that they have on a GPU (support/fake_gpu.py): from
Python to Triton's IR, where types are checked; in slow tests also through Triton's passes, to the IR with layouts.
"""

import re
from collections.abc import Iterator
from itertools import chain, cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import lineate
from lineate.kernels import GENERAL_RULES
from tests.support.lowering import Lowering, lowering

pytest.importorskip("triton")

GPUS = [(90, "bfloat16"), (90, "float16"), (80, "bfloat16"), (80, "float32"), (80, "float16"), (90, "float32")]
"""A capability (90: Gluon where it serves, 80: Triton alone) and a dtype; the first four are fast."""
GIVEN = ("given",)
RAW = ("raw", "bounded", "normed", "given")
GATES = {
    "linear": GIVEN, "gated_linear": GIVEN, "gated_linear_channel": GIVEN, "delta": ("given", "normed"),
    "gated_delta": RAW, "kimi_delta": RAW,
}  # fmt: skip
"""The rules, and how their gates can be given."""
GENERAL_STEPS = [
    *(("gated_delta_rule_2", decay, 1) for decay in ("head", "channel")),
    *(("diagonal_plus_low_rank", decay, 1) for decay in ("none", "head", "channel")),
    *(("gated_delta_product", decay, n) for n, decay in ((1, "head"), (2, "none"), (2, "head"), (3, "head"))),
]
"""Rules of the general row, decays, and writes a token."""
SIZES = ("128", "60", "cut", "grouped", "64", "many heads", "wide")


class Case(NamedTuple):
    """A call on a GPU."""

    capability: int
    call: str
    options: dict[str, Any]
    passes: bool = False

    def __str__(self) -> str:
        words = (x if isinstance(x, str) else f"{name}={x}" for name, x in self.options.items())
        return "-".join((f"sm_{self.capability}", *words, *["passes"] * self.passes))


def rules() -> Iterator[Case]:
    """Yield every rule on every fast GPU with its backward; gates, sizes and packed sequences take turns.

    Without a backward, the walks of Hopper make more themselves, and those of Triton keep no states. In float16 on
    Hopper the walks alone are in Gluon, and they are the same without decay.
    """
    sizes, packed = cycle(SIZES), cycle((False, True, True))
    for (i, gpu), row in product(enumerate(GPUS[:4]), GATES):
        if gpu == (90, "float16") and row in ("linear", "delta", "gated_linear_channel"):
            continue
        yield rule(gpu, row, GATES[row][i % len(GATES[row])], next(sizes), backward=True, packed=next(packed))
    for row in GATES:
        yield rule(GPUS[0], row, "given", "many heads", backward=False, packed=next(packed))
        yield rule(GPUS[2], row, GATES[row][0], "60", backward=False, packed=next(packed))
    for row, gates in (("delta", "given"), ("gated_delta", "raw")):  # scores in parallel with the walk
        yield rule(GPUS[0], row, gates, "grouped", backward=True, packed=next(packed))


def more_rules() -> Iterator[Case]:
    """Yield every rule on every GPU with all its gates, through Triton's passes; sizes take turns."""
    sizes, packed = cycle(SIZES), cycle((False, True, True))
    for gpu, row in product(GPUS, GATES):
        for gates in GATES[row]:
            yield rule(gpu, row, gates, next(sizes), backward=True, packed=next(packed))._replace(passes=True)
        yield rule(gpu, row, GATES[row][0], next(sizes), backward=False, packed=next(packed))._replace(passes=True)


def rule(gpu: tuple[int, str], row: str, gates: str, size: str, backward: bool, packed: bool) -> Case:
    options = {"dtype": gpu[1], "row": row, "gates": gates, "size": size, "backward": backward, "packed": packed}
    return Case(gpu[0], "rule", options)


def general_rules(passes: bool) -> Iterator[Case]:
    """Yield the rules of the general row on every GPU, with their decays, sizes and packed sequences in turns."""
    sizes, packed, normed = (
        cycle(("128", "60", "grouped", "64", "wide")),
        cycle((False, True)),
        cycle((True, True, False)),
    )
    for (capability, dtype), rule in product(GPUS if passes else GPUS[:4], GENERAL_RULES):
        for decay in rule.decays:
            options = dict(row=rule.name, dtype=dtype, decay=decay, size=next(sizes), normed=next(normed))
            yield Case(capability, "general", options | dict(packed=next(packed), backward=True), passes)


def steps() -> Iterator[Case]:
    """Yield the rules token by token, and the other kernels of a decoding step."""
    turns = cycle(product(("raw", "given"), ("float32", "bfloat16"), ("rows", "tokens", "none")))
    for (_, dtype), row in product(GPUS[1:4], GATES):
        gates, state, slots = next(turns)
        gates = gates if "raw" in GATES[row] else "given"
        yield Case(90, "decode", dict(dtype=dtype, row=row, gates=gates, state=state, slots=slots, t=2))
    rings = cycle(
        product(("bfloat16", "float32"), ("raw", "given", "bounded"), (True, False), ("128", "60", "64"), (8, 1, 16))
    )
    for i, ((_, dtype), row) in enumerate(product(GPUS[1:4], GATES)):
        state, gates, slots, size, every = next(rings)
        for _ in range(i % 7 + 30):  # through the product in large steps
            next(rings)
        gates = gates if "raw" in GATES[row] else "given"
        options = dict(dtype=dtype, row=row, gates=gates, state=state, slots=slots, every=every, size=size)
        yield Case(90, "decode_ring", options | dict(overlap=i % 2 > 0))
    for i, (row, decay, writes) in enumerate(GENERAL_STEPS):
        state, slots = ("float32", "bfloat16")[i % 2], ("rows", "tokens", "none")[i % 3]
        options = dict(row=row, decay=decay, writes=writes, raw=i % 4 > 1, size=("grouped", "60")[i % 2])
        dtype = ("bfloat16", "float32", "float16")[i % 3]
        yield Case(90, "decode_general", dict(dtype=dtype, state=state, slots=slots) | options)
    overlap = cycle((True, True, False))
    for name, rows in product(
        ("convolution", "product", "norm", "cached", "latent", "piece", "square", "place", "mix"), (1, 3)
    ):
        yield Case(90, "step", dict(dtype="bfloat16", name=name, rows=rows, overlap=next(overlap)))
    yield Case(90, "step", dict(dtype="float32", name="latent", rows=3, overlap=False))
    for gpu, pattern, dtype, rows in ((90, "MGJ", "bfloat16", 3), (80, "MA", "float16", 1), (80, "GM", "float32", 70)):
        options = dict(dtype=dtype, pattern=pattern, rows=rows, hidden=224, invariant=True, overlap=gpu == 90)
        yield Case(gpu, "whole_step", options)
    for name, dtype in (("latent", "float16"), ("piece", "bfloat16"), ("square", "bfloat16")):
        yield Case(80, "step", dict(dtype=dtype, name=name, rows=2, overlap=False))
    for form, rows in (("int8", 1), ("int4", 3), ("fp8", 20)):
        yield Case(90, "quantised", dict(dtype="bfloat16", form=form, rows=rows, overlap=next(overlap)))
        yield Case(80, "quantised", dict(dtype="float16", form=form, rows=2, overlap=False))


def experts() -> Iterator[Case]:
    """Yield mixtures of experts; rows alone, grouped, and in larger blocks."""
    overlap = cycle((True, False))
    for dtype, rows, scores in (
        *(("bfloat16", 1, "softmax"), ("float16", 9, "sigmoid"), ("bfloat16", 300, "softmax")),
        ("bfloat16", 700, "sigmoid"),
    ):
        yield Case(90, "experts", dict(dtype=dtype, rows=rows, scores=scores, overlap=next(overlap)))
    yield Case(80, "experts", dict(dtype="float32", rows=9, scores="softmax", overlap=False))
    for form, rows, scores in (("int8", 1, "softmax"), ("int4", 20, "sigmoid"), ("fp8", 560, "softmax")):
        case = dict(dtype="bfloat16", rows=rows, scores=scores, overlap=next(overlap), form=form)
        yield Case(90, "experts", case)
    yield Case(80, "experts", dict(dtype="float16", rows=20, scores="softmax", overlap=False, form="int4"))


def layers() -> Iterator[Case]:
    """Yield the ops around the rules, and the memories that learn."""
    dtypes = cycle(("bfloat16", "float32", "float16"))
    convolutions = ("short_convolution", "packed_convolution", "one_convolution")
    for name, odd in product((*convolutions, "glu", "rotate", "features", "rms_norm", "gated_rms_norm"), (False, True)):
        yield Case(90, "layer", dict(dtype=next(dtypes), name=name, odd=odd))
    for name, d in product(("ttt_linear", "ttt_mlp", "titans_linear", "titans_mlp", "lact"), (64,)):
        yield Case(80, "memory", dict(name=name, backward=True, d=d))


FAST = [*rules(), *general_rules(passes=False), *steps(), *experts(), *layers()]
SLOW = [
    *more_rules(),
    *general_rules(passes=True),
    *(case._replace(passes=True) for case in chain(steps(), experts(), layers())),
]


@pytest.fixture(scope="module")
def process() -> Iterator[Lowering]:
    with lowering() as started:
        yield started


@pytest.mark.cover
@pytest.mark.parametrize("case", [*FAST, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)], ids=str)
def test_a_call_is_lowered(case, process):
    found = process.run(*case)
    assert not found.failures, "\n\n".join(found.failures)


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("size", ["cut", "many heads", "grouped"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("row", GATES)
def test_launches_of_a_forward_are_linked_but_the_last_lets_nothing_begin(row, packed, size, process):
    """Every kernel waits for the launch before it (1, 2); all but the last let the next one begin to wait (1)."""
    options = dict(row=row, dtype="bfloat16", backward=False, packed=packed, gates="given", size=size)
    found = process.run(90, "rule", options)
    assert not found.failures and len(found.links) > 1
    assert found.links == [1] * (len(found.links) - 1) + [2], list(zip(found.launched, found.links, strict=True))
    assert not any(process.run(80, "rule", options).links)


BESIDE = {"grouped": True, "32 heads": True, "short": False, "48 heads": False, "packed": False, "cut": False}


@pytest.mark.cover
@pytest.mark.parametrize("size", BESIDE)
def test_where_scores_are_made_beside_a_walk(size, process):
    """One sequence, long enough, with few heads, forwards and backwards; the gates clear the marks of both."""
    options = dict(dtype="bfloat16", backward=True, packed=size == "packed", gates="given")
    options["size"] = "grouped" if size == "packed" else size
    found = process.run(90, "rule", options | {"row": "gated_delta"}, lowers=False)
    assert not found.failures
    names = [name.split(".")[-1] for name in found.beside]
    forward, backward = (["head_gates", "head_scores", walk] for walk in ("forward_state", "backward_state"))
    slices = {"grouped": 1, "32 heads": 2}  # of the backward
    assert names == (forward + backward * slices[size] if BESIDE[size] else [])
    for row, dtype in (("kimi_delta", "bfloat16"), ("gated_linear", "bfloat16"), ("gated_delta", "float16")):
        assert not process.run(90, "rule", options | {"row": row, "dtype": dtype}, lowers=False).beside


@pytest.mark.cover
@pytest.mark.parametrize("size", ["32 heads", "two rows", "48 heads"])
def test_which_calls_with_decay_per_channel_are_in_pieces(size, process):
    """One long sequence with few heads; all launches are linked, and the last lets nothing begin."""
    options = dict(row="kimi_delta", dtype="bfloat16", backward=False, packed=False, gates="given", size=size)
    found = process.run(90, "rule", options, lowers=False)
    piece = ["hopper.channel.channel_scores", "portable.channel.channel_scores", "hopper.walk.forward_state"]
    pieces = 3 if size == "32 heads" else 1
    assert [name.removeprefix("lineate.kernels.") for name in found.launched] == piece * pieces
    assert found.links == [1] * (3 * pieces - 1) + [2]


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("size", ["grouped", "32 heads", "two rows", "cut", "many heads", "128"])
@pytest.mark.parametrize("row", GATES)
def test_what_is_compiled_ahead_is_what_is_launched(row, size, process):
    for capability, packed, backward in ((90, False, True), (90, True, True), (90, True, False), (80, True, True)):
        options = dict(row=row, dtype="bfloat16", backward=backward, packed=packed, gates=GATES[row][0], size=size)
        found = process.run(capability, "ahead", options, lowers=False)
        assert not found.failures, (capability, packed, backward, "\n".join(found.failures))
        assert len(found.launched) > 1


@pytest.mark.cover
@pytest.mark.parametrize("size", ["grouped", "cut", "many heads"])
@pytest.mark.parametrize("rule", GENERAL_RULES, ids=lambda rule: rule.name)
def test_what_is_compiled_ahead_of_the_general_row(rule, size, process):
    for (capability, packed, backward), decay in product(((90, True, True), (80, False, True)), rule.decays):
        options = dict(row=rule.name, dtype="bfloat16", decay=decay, size=size, packed=packed, backward=backward)
        found = process.run(capability, "ahead", options, lowers=False)
        assert not found.failures, (capability, decay, "\n".join(found.failures))


@pytest.mark.cover
def test_no_kernel_is_left_out(process):
    """Each kernel that lineate launches is launched, so lowered, by one of the fast cases of test_a_call_is_lowered."""
    launched = set()
    for path in Path(lineate.__file__).with_name("kernels").rglob("*.py"):
        launched |= set(re.findall(r"\bstart\((?:\w+\.)?(\w+), ", path.read_text())) - {"kernel"}
    assert len(launched) > 30
    lowered = {kernel for case in FAST for kernel in process.run(*case, lowers=False).launched}
    assert launched <= {name.split(".")[-1] for name in lowered}
    assert {name.split(".")[2] for name in lowered} == {"hopper", "layers", "memories", "portable"}


@pytest.mark.cover
def test_a_kernel_that_does_not_compile_is_noticed(process):
    found = process.run(90, "broken", {})
    assert "move_pointer on sm_90" in found.failures[0] and "x += tl.program_id(0)" in found.failures[0]

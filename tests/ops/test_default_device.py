"""Calls on CPU tensors while torch's default device is another one, which only functions that make new weights use.

The default is meta, whose tensors have no memory: a buffer made there by mistake has no numbers, or ends the process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lineate
from lineate.explore.pictures import MODULES, PictureOptions, find
from lineate.generation import generate
from lineate.layers.convolution import short_convolution
from lineate.layers.costs.learning import learning_bytes
from lineate.layers.registry import kind_of
from lineate.layers.registry import letters as all_letters
from lineate.models import ExpertsConfig, HybridLM
from lineate.models.presets import tiny
from lineate.tasks.registry import TASKS
from lineate.training.prepare import train
from tests.support.cases import (
    FORWARD_PATHS,
    GATED_DELTA,
    KIMI_DELTA,
    Row,
    Shape,
    bounds,
    convert,
    draw,
    interpreted,
    same_bits,
)
from tests.support.runs import assert_same_bits, everything, make_config, short_samples

LETTERS = all_letters()


@contextmanager
def by_setting() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


ELSEWHERE = {"set_default_device": by_setting, "with torch.device": lambda: torch.device("meta")}


@pytest.fixture(params=ELSEWHERE)
def elsewhere(request) -> Callable[[], object]:
    return ELSEWHERE[request.param]


def assert_unmoved(run: Callable[[], list[Tensor]], elsewhere: Callable[[], object]) -> None:
    """Check that run() gives the same bits, on the CPU, when the default device is another one."""
    wanted = run()
    with elsewhere():
        found = run()
    assert [x.device.type for x in found] == ["cpu"] * len(wanted)
    assert [same_bits(x, y) for x, y in zip(found, wanted, strict=True)] == [True] * len(wanted)


def differentiate(outputs: list[Tensor], by: list[Tensor]) -> list[Tensor]:
    return [*outputs, *torch.autograd.grad(sum((x * x.detach().cos()).sum() for x in outputs), by)]


TEXTS = (3, 0, 17, 1)


TRITON = pytest.param({"form": "chunkwise", "backend": "triton"}, id="triton", marks=[interpreted, pytest.mark.slow])


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", [*FORWARD_PATHS, TRITON])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("row", (GATED_DELTA, KIMI_DELTA), ids=str)
def test_ops(row: Row, packed: bool, path: dict[str, str], elsewhere):
    texts = len(TEXTS) if packed else None
    given = convert(draw(row, Shape(1 if packed else 2, sum(TEXTS), 2, 4, 6, 5), texts=texts), torch.float32)
    bound = {"cu_seqlens": bounds(TEXTS)} if packed else {}
    trains = (path["form"], path["backend"]) != ("recurrent", "native")

    def run() -> list[Tensor]:
        leaves = {name: x.detach().clone().requires_grad_(trains) for name, x in given.items()}
        found = list(row.op(**leaves, **bound, **path))
        del leaves["state"]
        empty = list(row.op(**leaves, **bound, **path))
        return differentiate([*found, *empty], list(leaves.values())) if trains else [*found, *empty]

    assert_unmoved(run, elsewhere)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=interpreted)])
def test_decode(backend, elsewhere):
    given = convert(draw(GATED_DELTA, Shape(2, 2, 2, 4, 6, 5)), torch.float32)

    def run() -> list[Tensor]:
        state = given["state"].clone()
        return [lineate.decode(**(given | {"state": state}), backend=backend), state]

    assert_unmoved(run, elsewhere)


def test_convolution(elsewhere):
    x, weight = torch.randn(1, sum(TEXTS), 8), torch.randn(8, 4)
    for cu in (None, bounds(TEXTS)):
        assert_unmoved(lambda cu=cu: list(short_convolution(x, weight, None, cu)), elsewhere)


def make_model(pattern: str) -> HybridLM:
    """Return a model with one layer for each letter."""
    config = tiny(pattern, 64)
    torch.manual_seed(0)
    return HybridLM(replace(config, n_layers=len(pattern)))


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("letter", LETTERS)
def test_models_of_every_mixer(letter, elsewhere):
    """Forward, backward and two more tokens work, with rows and with packed sequences."""
    model = make_model(letter)
    ids, packed = torch.randint(0, 64, (2, 21)), torch.randint(0, 64, (1, sum(TEXTS)))

    def run() -> list[Tensor]:
        first = model(ids)
        second = model(packed, cu_seqlens=bounds_of)
        with torch.no_grad():
            third = model(ids[:, :1], state=first.state)
            fourth = model(ids[:, 1:2], state=third.state)
        learned = [x for x in model.parameters() if x.requires_grad]
        return [*differentiate([first.logits, second.logits], learned), third.logits, fourth.logits]

    bounds_of = bounds(TEXTS)
    assert_unmoved(run, elsewhere)


def test_experts(elsewhere):
    torch.manual_seed(0)
    model = HybridLM(replace(tiny("G", 64), n_layers=2, experts=ExpertsConfig(4, 2, 16, shared_size=16)))
    ids = torch.randint(0, 64, (2, 9))
    assert_unmoved(lambda: differentiate([model(ids).logits], list(model.parameters())), elsewhere)


def test_generate(elsewhere):
    model = make_model("GKA")
    ids = torch.randint(0, 64, (1, 5))
    assert_unmoved(lambda: [torch.stack(list(generate(model, ids, 6, temperature=1.0, top_p=0.9, seed=3)))], elsewhere)


def test_save_and_load(elsewhere, tmp_path):
    model = make_model("GA")

    def run() -> list[Tensor]:
        model.save_pretrained(tmp_path / "model")
        found = [HybridLM.from_pretrained(tmp_path / "model", dtype=dtype) for dtype in (None, torch.bfloat16)]
        return [x.detach() for again in found for x in again.state_dict().values()]

    assert_unmoved(run, elsewhere)


def train_and_resume(folder: Path, out: Path) -> dict[str, Tensor]:
    """Return the end of a run that goes on from its checkpoint; folder has its data."""
    changes = {"steps": 2, "warmup": 1, "save_every": 1, "sample_every": 2, "eval_every": 2}
    config = make_config(folder, out=str(out), **changes)
    with short_samples():
        train(config)
        return everything(train(replace(config, steps=3), resume=True))


@pytest.fixture(scope="module")
def trained_here(tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    """A folder with data, and the end of a run with the default device."""
    folder = tmp_path_factory.mktemp("here")
    return folder, train_and_resume(folder, folder / "run")


@pytest.mark.cover
def test_training(elsewhere, trained_here, tmp_path):
    """A run, and one that goes on from its checkpoint."""
    folder, wanted = trained_here
    with elsewhere():
        found = train_and_resume(folder, tmp_path / "run")
    assert_same_bits(found, wanted)


def test_tasks_and_plans(elsewhere):
    def run() -> list[Tensor]:
        made = [x for task in TASKS.values() for x in task.batch(2, task.default, seed=0, step=0)]
        learning_bytes.cache_clear()
        return [*made, torch.tensor(learning_bytes(kind_of("T").make, tiny("T").memory), device="cpu")]

    assert_unmoved(run, elsewhere)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_pictures(name, elsewhere):
    """Every picture computes its numbers, and those of a model if it can show one."""
    with elsewhere():
        assert find(name).compute(PictureOptions(quick=True))


def test_new_models_are_made_where_asked(elsewhere):
    """Models of every mixer have their weights on meta."""
    with elsewhere():
        for letter in LETTERS:
            assert {x.device.type for x in make_model(letter).state_dict().values()} == {"meta"}

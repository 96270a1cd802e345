"""Whole steps as CUDA graphs on a GPU: the bits of the same steps launch by launch, in loops and in runs."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.layers import MixtureOfExperts
from lineate.models import ExpertsConfig, HybridConfig, HybridLM, preset
from lineate.training.batches import Batch
from lineate.training.graphed import GraphedStep
from lineate.training.loop import Trainer
from lineate.training.optim import make_optimizer
from lineate.training.prepare import prepare
from lineate.training.report import read_metrics
from tests.support.runs import assert_same_bits, everything, make_config

pytestmark = pytest.mark.gpu

VOCAB, TOKENS, SEQUENCES = 97, 320, 8
CUDA = torch.device("cuda")
Batches = list[tuple[Tensor, Tensor, Tensor, float, Tensor]]


def config_of(pattern: str, experts: bool = False) -> HybridConfig:
    config = replace(preset("tiny", pattern, vocab_size=VOCAB), n_layers=len(pattern))
    return replace(config, experts=ExpertsConfig(8, 2, 64)) if experts else config


def batches(step: int, parts: int = 2, tokens: int = TOKENS) -> Batches:
    """Return micro-batches whose sequences have other lengths in every step; the last ones are empty."""
    draw, found = torch.Generator().manual_seed(step), []
    for _ in range(parts):
        ids = torch.randint(VOCAB, (1, tokens + 1), generator=draw)
        cuts = torch.randint(1, tokens, (1 + step % 4,), generator=draw).unique()
        bounds = F.pad(torch.cat([torch.tensor([0]), cuts]), (0, SEQUENCES - len(cuts)), value=tokens)
        tensors = [x.pin_memory() for x in (ids[:, :-1], ids[:, 1:], bounds)]
        found.append((*tensors, float(parts * tokens), torch.ones(())))
    return found


class Run:
    """A model and its steps.

    Args:
        config: Of the model.
        graph: Whether its steps are graphs.
        optimizer: The kind.
        dtype: Of the weights; float32 weights compute under autocast.
        halts: Whether a step that is not finite halts the next ones.
        wrap: Changes the loss.
        tokens: Those of a micro-batch.
    """

    def __init__(
        self,
        config: HybridConfig,
        graph: bool,
        optimizer: str = "adamw",
        dtype: torch.dtype = torch.float32,
        autocast: bool = True,
        halts: bool = False,
        wrap: Callable[[Tensor], Tensor] = lambda loss: loss,
        tokens: int = TOKENS,
    ) -> None:
        torch.manual_seed(0)
        self.model = HybridLM(config).to(CUDA, dtype)
        self.optimizer = make_optimizer(self.model, optimizer, 3e-3, 0.1, (0.9, 0.95))
        self.before = {name: x.clone() for name, x in self.model.state_dict().items()}

        def loss(ids: Tensor, targets: Tensor, bounds: Tensor, count: Tensor, factor: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                total = self.model.loss_sum(ids, targets, bounds)
            return wrap(total * factor / count)

        self.random = torch.cuda.get_rng_state()
        self.tokens, given = tokens, batches(0, tokens=tokens)
        self.step = GraphedStep(self.model, self.optimizer, loss, given, clip=0.5, halts=halts, graph=graph)
        self.found: list[list[float]] = []

    def go(self, steps: int, poisoned: range = range(0)) -> "Run":
        for n in range(steps):
            given = batches(n, tokens=self.tokens)
            if n in poisoned:
                given[0][4].fill_(math.nan)
            self.found.append(self.step(given, 3e-3 / (1 + n)).numbers.tolist())
        return self

    @property
    def state(self) -> dict[str, Tensor]:
        return everything(self)


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("pattern", "optimizer"), [("L", "adamw"), ("R", "adamw"), ("D", "adamw"), ("GK", "adamw"), ("GK", "muon")]
)
def test_bits_of_every_rule(pattern: str, optimizer: str) -> None:
    """Losses, norms, weights and the optimiser's state; the fourth step is not finite and is skipped."""
    plain, graphed = (Run(config_of(pattern), graph, optimizer) for graph in (False, True))
    assert graphed.step.why is None, graphed.step.why
    assert_same_bits(dict(graphed.model.state_dict()), graphed.before)
    assert torch.equal(torch.cuda.get_rng_state(), graphed.random)
    for run in (plain, graphed):
        run.go(6, range(3, 4))
    assert str(graphed.found) == str(plain.found) and math.isnan(graphed.found[3][0])
    assert_same_bits(graphed.state, plain.state)
    assert graphed.step.missed == 0


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bfloat16"])
def test_bits_of_experts(autocast: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    plain, graphed = (Run(config_of("G", True), graph, dtype=dtype, autocast=autocast) for graph in (False, True))
    assert graphed.step.why is None, graphed.step.why
    assert_same_bits({**graphed.go(4).state}, {**plain.go(4).state})
    assert graphed.found == plain.found


def test_experts_under_autocast_are_those_one_by_one() -> None:
    """The gradients of grouped products are near those of one product an expert."""
    found = []
    for grouped in (True, False):
        torch.manual_seed(0)
        layer = HybridLM(config_of("G", True)).to(CUDA).layers[0].feed
        assert isinstance(layer, MixtureOfExperts)
        if not grouped:
            layer.grouped = layer.one_by_one  # type: ignore[assignment]
        x = torch.randn(1, 300, 128, device=CUDA, generator=torch.Generator(CUDA).manual_seed(1), requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            y = layer(x)
        y.float().square().sum().backward()
        found.append([y.float(), x.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None
        assert (a - b).norm() <= 0.02 * b.norm()


@pytest.mark.parametrize("pattern", ["GA", "KM"])
def test_hybrids_with_attention(pattern: str) -> None:
    """Its backward adds in any order, so two runs without graphs differ; a graph differs as much, within 4 times."""
    plain, again, graphed = (Run(config_of(pattern), graph) for graph in (False, False, True))
    assert graphed.step.why is None, graphed.step.why
    for run in (plain, again, graphed):
        run.go(3)
    states = [run.state for run in (plain, again, graphed)]
    for name, start in plain.before.items():
        moved = (states[0][name] - start).norm() + 1e-6
        errors = [((other[name] - states[0][name]).norm() / moved).item() for other in states[1:]]
        assert errors[1] <= 4 * errors[0] + 0.02, (name, errors)
    for (a, _), (b, _) in zip(graphed.found, plain.found, strict=True):
        assert a == pytest.approx(b, rel=2e-3)


def test_random_numbers_are_those_of_steps_without_a_graph() -> None:
    found = []
    for graph in (False, True):
        run = Run(config_of("G"), graph, wrap=lambda loss: loss * F.dropout(torch.ones(64, device=CUDA)).mean())
        torch.cuda.manual_seed(5)
        run.go(4)
        found.append((run.found, torch.randn(3, device=CUDA).tolist(), run.state))
        assert (run.step.why is None) == graph
    assert found[0][:2] == found[1][:2] and len({x[0] for x in found[0][0]}) == 4
    assert_same_bits(found[0][2], found[1][2])


def test_a_bad_step_halts_and_many_tokens() -> None:
    """More than 3,072 tokens have another kernel for the gradient of the embedding."""
    plain, graphed = (Run(config_of("G"), graph, halts=True, tokens=4096) for graph in (False, True))
    for run in (plain, graphed):
        before = run.go(2).state
        run.found.clear()
        run.go(4, range(2, 3))  # steps 3 and 4 halt
        stopped = run.state
        run.go(2)
        assert_same_bits(run.state, stopped)
        run.step.resume()
        run.go(2)
        assert not torch.equal(before["embed.weight"], run.state["embed.weight"])
    assert graphed.step.why is None
    for (a, *_), (b, *_) in zip(graphed.found, plain.found, strict=True):  # (with 4,096 tokens, bits may differ)
        assert a == pytest.approx(b, rel=1e-3, nan_ok=True)


def test_other_shapes_between_replays() -> None:
    plain, graphed = (Run(config_of("G"), graph) for graph in (False, True))
    for run in (plain, graphed):
        run.go(2)
        run.step(batches(7, parts=1), 1e-3)
        run.go(2)
    assert graphed.step.missed == 1
    assert_same_bits(graphed.state, plain.state)


def test_autograd_sees_that_a_replay_changes_weights() -> None:
    run = Run(config_of("G"), True)
    loss = run.model.embed.weight.square().sum()
    run.go(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_refused_capture_leaves_steps_as_they_were() -> None:
    def read(loss: Tensor) -> Tensor:
        loss.item()
        return loss

    plain, refused = Run(config_of("G"), False), Run(config_of("G"), True, wrap=read)
    assert refused.step.why is not None and "cannot be captured" in refused.step.why
    assert_same_bits(refused.go(3).state, plain.go(3).state)
    after = Run(config_of("G"), True)
    assert after.step.why is None
    assert_same_bits(after.go(3).state, plain.state)


def test_random_numbers_after_a_refused_capture_that_drew() -> None:
    def draw(loss: Tensor) -> Tensor:
        loss = loss * F.dropout(torch.ones(64, device=CUDA)).mean()
        loss.item()
        return loss

    found = []
    for graph in (False, True):
        run = Run(config_of("G"), graph, wrap=draw)
        assert run.step.why is not None
        torch.cuda.manual_seed(5)
        found.append((run.go(2).found, torch.randn(3, device=CUDA).tolist()))
    assert found[0] == found[1]


# Runs


def make_run(folder: Path, name: str, resume: bool = False, **changes: Any) -> Trainer:
    values = {
        "out": str(folder / name), "model": "tiny", "pattern": "GK", "device": "cuda", "dtype": "bfloat16",
        "accumulate": 2, "clip": 0.5, "on_bad_loss": "skip",
    }  # fmt: skip
    return prepare(make_config(folder, **(values | changes)), resume=resume)


def poison(trainer: Trainer, step: int) -> None:
    """Make the loss of a step NaN, by a number on the device."""
    factor = torch.ones((), device=CUDA)
    trainer.model.embed.register_forward_hook(lambda module, ids, x: x * factor)
    fetch = trainer.next_pieces

    def next_pieces() -> list[Batch]:
        factor.fill_(math.nan if trainer.step == step else 1.0)
        return fetch()

    trainer.next_pieces = next_pieces  # type: ignore[method-assign]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_runs(tmp_path: Path, optimizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples (which capture graphs of their own), validation, checkpoints, a bad step, and a resumed run."""
    found, said = {}, {}
    for kind in ("off", "auto", "resumed"):
        options = {"graph": "off" if kind == "off" else "on", "optimizer": optimizer, "sample_every": 5}
        trainer = make_run(tmp_path, kind, **options)
        poison(trainer, 7)
        if kind == "resumed":
            for _ in range(6):
                trainer.train_step()
            trainer.save()
            trainer.close()
            trainer = make_run(tmp_path, kind, resume=True, **options)
            poison(trainer, 7)
        trainer.run()
        trainer.close()
        assert trainer.graphed is not None and (trainer.graphed.why is None) == (kind != "off")
        found[kind] = everything(trainer)
        lines = read_metrics(tmp_path / kind)
        said[kind] = [
            {key: x for key, x in line.items() if key != "tokens_per_second"}
            for line in lines
            if kind != "resumed" or "validation_loss" not in line
        ]
    assert_same_bits(found["auto"], found["off"])
    assert said["auto"] == said["off"]
    assert [line["step"] for line in said["off"] if line.get("skipped")] == [8]
    assert_same_bits(found["resumed"], found["off"])
    assert said["resumed"] == [line for line in said["off"] if "validation_loss" not in line]
    assert "each step is one CUDA graph" in capsys.readouterr().out


def test_no_step_of_a_run_waits_for_the_gpu(tmp_path: Path) -> None:
    trainer = make_run(tmp_path, "run", save_every=0, eval_every=0, graph="on")
    for _ in range(3):
        trainer.train_step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            trainer.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    trainer.settle()
    trainer.close()
    assert len(read_metrics(tmp_path / "run")) == 7


def test_a_run_that_cannot_be_captured_goes_on_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In float32, attention to packed sequences reads their lengths on the host."""
    options = {"pattern": "GA", "dtype": "float32", "steps": 4, "save_every": 0, "eval_every": 0}
    for graph in ("auto", "off"):
        trainer = make_run(tmp_path, graph, graph=graph, **options)
        trainer.run()
        trainer.close()
        assert trainer.graphed is not None and trainer.graphed.why is not None
    text = capsys.readouterr().out
    assert text.count("no CUDA graph: the step cannot be captured") == 1
    losses = [[line["loss"] for line in read_metrics(tmp_path / graph) if "loss" in line] for graph in ("auto", "off")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    trainer = make_run(tmp_path, "memory", pattern="GT")
    assert not trainer.whole_steps and "the host computes where the memory" in str(trainer.no_graph)
    trainer.close()

"""GraphedStep where it is used wrongly or in other ways than `lineate train` does, on a CPU with fakes of graphs."""

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lineate.training.batches import Batch
from lineate.training.graphed import GraphedStep
from lineate.training.loop import Trainer, TrainingStopped
from lineate.training.prepare import prepare
from tests.support.graphed import FakeGraphs
from tests.support.runs import everything, make_config

EXAMPLE = [(torch.linspace(-1, 1, 12).view(4, 3),)]


class Case:
    """A layer with an optimiser, and a loss whose gradient the step's number `lr` multiplies."""

    def __init__(self, lr: float | Tensor = 0.1, others: tuple[nn.Parameter, ...] = ()) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW([*self.net.parameters(), *others], lr=lr, fused=True, weight_decay=0.0)

    def loss(self, x: Tensor) -> Tensor:
        return self.net(x).square().sum()

    def step(self, **options: Any) -> GraphedStep:
        return GraphedStep(self.net, self.optimizer, self.loss, EXAMPLE, **options)

    @property
    def rate(self) -> Tensor:
        found: Tensor = self.optimizer.param_groups[0]["lr"]
        return found


def test_an_optimiser_of_other_parameters_is_refused() -> None:
    """No step would clear the gradients of those, which would add up from step to step."""
    case = Case(others=(nn.Parameter(torch.ones(())),))
    with pytest.raises(ValueError, match=r"^optimizer must train parameters of model alone, got 1 that model does not"):
        case.step()
    assert case.rate == 0.1 and not isinstance(case.rate, Tensor)
    frozen = nn.Parameter(torch.ones(()), requires_grad=False)
    assert Case(others=(frozen,)).step(graph=False).why == "graph=False"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], ValueError, "must have at least one micro-batch, got none"),
        (EXAMPLE[0], TypeError, "must be a list of micro-batches, .*, got a Tensor among them; write"),
        (EXAMPLE[0][0], TypeError, "must be a list of micro-batches, .*, got a Tensor; write"),
        (iter(EXAMPLE), TypeError, "must be a list of micro-batches, .*, got a list_iterator; write"),
    ],
)
def test_wrong_micro_batches(given: Any, error: type[Exception], message: str) -> None:
    case = Case()
    with pytest.raises(error, match=f"^example {message}" if error is TypeError else f"^example {message}$"):
        GraphedStep(case.net, case.optimizer, case.loss, given)
    step, before = case.step(), case.net.weight.detach().clone()
    with pytest.raises(error, match=f"^batches {message}"):
        step(given)
    assert torch.equal(before, case.net.weight)


@pytest.mark.parametrize("value", [3.0, None])
def test_a_loss_that_is_no_tensor(value: Any) -> None:
    case = Case()
    step = GraphedStep(case.net, case.optimizer, lambda x: value, EXAMPLE)
    with pytest.raises(ValueError, match=f"^loss must return a tensor without dimensions, got {value}$"):
        step(EXAMPLE)


def test_release_without_a_graph() -> None:
    step = Case().step(graph=False)
    step.release("no reason")
    assert step.why == "graph=False"


def test_a_tensor_for_the_learning_rate_is_kept() -> None:
    """Its owner may go on filling it."""
    lr = torch.tensor(0.1)
    case = Case(lr)
    case.step()
    assert case.rate is lr
    wide = Case(torch.tensor(0.1, dtype=torch.float64))
    wide.step()
    assert wide.rate.dtype is torch.float32 and wide.rate.item() == pytest.approx(0.1)


@pytest.mark.parametrize("given", [0.25, torch.tensor(0.25, dtype=torch.float64)])
def test_a_learning_rate_put_in_place_of_the_tensor_reaches_the_graph(given: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fake = FakeGraphs(patch)
        case = Case()
        step, own = case.step(), case.rate
        case.optimizer.param_groups[0]["lr"] = given
        step(EXAMPLE)
        assert fake.replays == 1 and case.rate is own and own.item() == 0.25
        case.optimizer.param_groups[0]["lr"] = given
        step(EXAMPLE, 0.5)
        assert case.rate is own and own.item() == 0.5


def test_loading_the_optimisers_state_releases_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would go on with the old state, whose memory others may have by then."""
    fake, found = FakeGraphs(monkeypatch), []
    for graph in (False, True):
        case = Case()
        step = case.step(graph=graph)
        step(EXAMPLE)
        saved = case.optimizer.state_dict()
        saved = {**saved, "state": {n: {k: x.clone() for k, x in s.items()} for n, s in saved["state"].items()}}
        step(EXAMPLE)
        assert (step.why is None) == graph
        case.optimizer.load_state_dict(saved)
        step(EXAMPLE)
        found.append(case.net.weight.detach())
        assert step.why == ("the optimiser's state was loaded after the graph was made" if graph else "graph=False")
    assert fake.replays == 2 and torch.equal(*found)


def test_an_optimiser_keeps_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGraphs(monkeypatch)
    case = Case()
    step = case.step()
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None
    case.optimizer.load_state_dict(case.optimizer.state_dict())


def test_an_error_in_a_trial_leaves_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGraphs(monkeypatch)
    case, calls = Case(), []

    def loss(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) == 2:
            raise KeyError("the second micro-batch")
        return case.loss(x)

    with pytest.raises(KeyError, match="the second"):
        GraphedStep(case.net, case.optimizer, loss, EXAMPLE * 2)
    assert len(calls) == 2 and all(x.grad is None for x in case.net.parameters())


# Runs


def make(folder: Path, whole: bool) -> tuple[Trainer, Tensor]:
    """Return a trainer that runs ahead, and a factor of its embedding that a graph reads."""
    trainer = prepare(make_config(folder, out=str(folder / str(whole)), save_every=0, eval_every=0))
    for group in trainer.optimizer.param_groups:
        group["fused"] = True
    trainer.runs_ahead, trainer.whole_steps = True, whole
    factor = torch.ones(())
    trainer.model.embed.register_forward_hook(lambda module, ids, x: x * factor)
    return trainer, factor


def test_a_trainer_goes_on_after_it_was_stopped_by_a_bad_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook, for instance: steps change the weights again once the loss is finite."""
    FakeGraphs(monkeypatch)
    found = []
    for whole in (False, True):
        trainer, factor = make(tmp_path, whole)
        for _ in range(3):
            trainer.train_step()
        trainer.settle()
        factor.fill_(math.nan)
        with pytest.raises(TrainingStopped):
            for _ in range(2):
                trainer.train_step()
        assert trainer.step == 3
        stopped = everything(trainer)
        factor.fill_(1.0)
        for _ in range(3):
            trainer.train_step()
        trainer.settle()
        trainer.close()
        assert trainer.step == 6 and not torch.equal(stopped["embed.weight"], everything(trainer)["embed.weight"])
        found.append(everything(trainer))
    for name, x in found[0].items():
        torch.testing.assert_close(found[1][name], x, rtol=1e-4, atol=1e-6)


def test_a_first_step_with_many_sequences_does_not_decide_about_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeGraphs(monkeypatch)
    trainer, _ = make(tmp_path, True)
    counts = [len(trainer.batches.batch(n).cu_seqlens) - 1 for n in range(6)]
    many = trainer.batches.batch(0)
    half = Batch(many.ids, many.targets, torch.arange(0, many.ids.shape[1] + 1, 8))
    fetch = trainer.next_pieces
    monkeypatch.setattr(trainer, "next_pieces", lambda: fetch() if trainer.step else [half])
    trainer.sequences = max(counts)
    for _ in range(6):
        trainer.train_step()
    trainer.settle()
    trainer.close()
    assert trainer.graphed is not None and (trainer.graphed.missed, fake.replays) == (1, 5)
    expected = f"step 1 runs without the CUDA graph: a micro-batch has 16 sequences, the graph is for {max(counts)};"
    assert expected in capsys.readouterr().out and max(counts) < 16


def test_joined_sequences() -> None:
    batch = Batch(torch.arange(6)[None], torch.arange(6)[None], torch.tensor([0, 2, 3, 6]))
    assert batch.joined(2).cu_seqlens.tolist() == [0, 2, 6] and batch.joined(1).cu_seqlens.tolist() == [0, 6]
    assert batch.joined(3) is batch and batch.joined(4) is batch

"""Whole steps as CUDA graphs, on a CPU: what they compute, when they are refused, and how a run uses them.

A fake takes the place of the graph (tests/support/graphed.py); test_graphed_gpu.py has the real ones.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.layers import MixtureOfExperts
from lineate.models import HybridLM, preset
from lineate.parallel.tensor.ranks import Ranks
from lineate.training.batches import Batch
from lineate.training.config import TrainConfig
from lineate.training.graphed import GraphedStep, obstacle
from lineate.training.loop import Trainer, TrainingStopped
from lineate.training.optim import Muon, make_optimizer
from lineate.training.order import ShuffledBatches
from lineate.training.prepare import prepare
from lineate.training.report import read_metrics
from lineate.training.tokens import TokenView
from tests.support.graphed import FakeGraphs
from tests.support.runs import assert_same_bits, everything, make_config, make_model


class Net(nn.Module):
    """Two layers, with a buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 3)])
        self.register_buffer("calls", torch.zeros(()))
        self.draw = ""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.draw == "cpu":
            x = x + torch.randn(())
        y: Tensor = self.layers[1](self.layers[0](x).tanh())
        return y


def make(kind: str = "adamw", fused: bool = True) -> tuple[Net, torch.optim.Optimizer, Callable[..., Tensor]]:
    torch.manual_seed(0)
    net = Net()
    optimizer = make_optimizer(net, kind, 0.05, 0.1, (0.9, 0.95))
    for group in optimizer.param_groups:
        group["fused"] = fused or None

    def loss(x: Tensor, wanted: Tensor, count: Tensor) -> Tensor:
        return F.mse_loss(net(x), wanted, reduction="sum") / count

    return net, optimizer, loss


def batches(step: int, parts: int = 2, rows: int = 5) -> list[tuple[Tensor, Tensor, float]]:
    draw = torch.Generator().manual_seed(step)
    each = [torch.randn(2, rows, 4, generator=draw) for _ in range(parts)]
    return [(x[0], x[1, :, :3], float(parts * rows)) for x in each]


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    class Both:
        model = net

    both = Both()
    both.optimizer = optimizer  # type: ignore[attr-defined]
    return everything(both)


def rate(step: int) -> float:
    return 0.05 / (1 + step)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_steps_are_those_of_a_loop(kind: str) -> None:
    """Losses, norms and weights of a loop with a float learning rate; loss and norm as float64 tensors."""
    net, optimizer, loss = make(kind)
    step, numbers = GraphedStep(net, optimizer, loss, batches(0), clip=0.7), []
    assert step.why == "a graph needs all weights on one GPU, they are on cpu"
    for n in range(5):
        taken = step(batches(n), rate(n))
        numbers.append((taken.loss.item(), taken.norm.item()))
    assert step.missed == 0  # there is no graph
    other, optimizer, loss = make(kind)
    for n in range(5):
        for group in optimizer.param_groups:
            group["lr"] = rate(n)
        optimizer.zero_grad()
        total = 0.0
        for x, wanted, count in batches(n):
            part = F.mse_loss(other(x), wanted, reduction="sum") / count
            part.backward()
            total += part.item()
        norm = nn.utils.clip_grad_norm_(other.parameters(), 0.7).item()
        optimizer.step()
        assert numbers[n] == pytest.approx((total, norm), rel=1e-5)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def trained(kind: str, monkeypatch: pytest.MonkeyPatch | None, halts: bool = False) -> tuple[Any, list[Any]]:
    """Return the state after steps of which the third is not finite, and the numbers of each."""
    net, optimizer, loss = make(kind)
    with pytest.MonkeyPatch.context() as patch:
        fake = FakeGraphs(patch) if monkeypatch is not None else None
        step, found = GraphedStep(net, optimizer, loss, batches(99), clip=0.7, halts=halts), []
        for n in range(6):
            given = batches(n)
            if n == 2:
                given[1][0][0, 0] = math.nan
            if n == 4:
                step.resume()
            taken = step(given, rate(n))
            found.append(taken.numbers.tolist())
        assert fake is None or (step.why is None and fake.replays == 6 and fake.draws == [False])
    return state_of(net, optimizer), found


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("halts", [False, True])
def test_a_graph_has_the_bits_of_steps_without_one(kind: str, halts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs and learning rates are copied to where the graph reads them, and trials leave nothing behind."""
    (state, numbers), (wanted, expected) = trained(kind, monkeypatch, halts), trained(kind, None, halts)
    assert_same_bits(state, wanted)
    assert str(numbers) == str(expected) and math.isnan(numbers[2][0])  # NaN equals nothing


def test_trials_change_nothing() -> None:
    for kind in ("adamw", "muon"):
        net, optimizer, loss = make(kind)
        before = {name: x.clone() for name, x in net.state_dict().items()}
        random = torch.get_rng_state()
        with pytest.MonkeyPatch.context() as patch:
            fake = FakeGraphs(patch)
            drawn = fake.gpu.get_state()
            step = GraphedStep(net, optimizer, loss, batches(0))
        assert step.why is None and fake.replays == 0
        assert_same_bits(dict(net.state_dict()), before)
        assert torch.equal(torch.get_rng_state(), random) and torch.equal(fake.gpu.get_state(), drawn)
        assert optimizer.state and not any(x.any() for state in optimizer.state.values() for x in state.values())


def test_trials_after_steps_keep_the_optimisers_state() -> None:
    net, optimizer, loss = make("muon")
    step = GraphedStep(net, optimizer, loss, batches(0))
    for n in range(3):
        step(batches(n))
    before = state_of(net, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        FakeGraphs(patch)
        assert GraphedStep(net, optimizer, loss, batches(0)).why is None
    assert_same_bits(state_of(net, optimizer), before)


def test_a_bad_step_halts_until_resume() -> None:
    net, optimizer, loss = make()
    step = GraphedStep(net, optimizer, loss, batches(0), halts=True)
    step(batches(0))
    before = state_of(net, optimizer)
    bad = batches(1)
    bad[0][0].fill_(math.inf)
    for given in (bad, batches(2), batches(3)):
        step(given)
        assert_same_bits({**state_of(net, optimizer), "calls": net.calls}, {**before, "calls": net.calls})
    step.resume()
    step(batches(2))
    assert not torch.equal(state_of(net, optimizer)["layers.0.weight"], before["layers.0.weight"])


def test_other_shapes_run_without_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGraphs(monkeypatch)
    net, optimizer, loss = make()
    step = GraphedStep(net, optimizer, loss, batches(0))
    gradients = [x.grad for x in net.parameters()]
    for given in (batches(1, rows=6), batches(1, parts=1), [(*batches(1)[0][:2], None), batches(1)[1]]):
        assert not step.fits(given)
    step(batches(1, rows=6))
    assert (step.missed, fake.replays) == (1, 0)
    assert all(x.grad is own for x, own in zip(net.parameters(), gradients, strict=True))
    as_tensor = [(x, wanted, torch.tensor(count)) for x, wanted, count in batches(1)]
    assert step.fits(as_tensor) and not step.fits([(x.double(), *rest) for x, *rest in as_tensor])
    step(as_tensor)
    assert (step.missed, fake.replays) == (1, 1)


@pytest.mark.parametrize("updating", [False, True])
def test_a_step_without_the_graph_gets_its_memory(updating: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the GPU has none for both; not where the update has begun, which must not be made twice."""
    fake = FakeGraphs(monkeypatch)
    net, optimizer, loss = make()
    step = GraphedStep(net, optimizer, loss, batches(0))
    before = net.layers[0].weight.detach().clone()
    left = ["no memory"]

    def refuse(*_: object) -> None:
        if left:
            raise torch.OutOfMemoryError(left.pop())

    if updating:
        optimizer.register_step_pre_hook(refuse)
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            step(batches(1, rows=6))
        assert step.why is None and torch.equal(before, net.layers[0].weight)
        return
    net.layers[1].register_forward_pre_hook(refuse)
    step(batches(1, rows=6))
    assert step.why == "the GPU has no memory for the graph and for a step without it"
    assert not torch.equal(before, net.layers[0].weight)
    step(batches(2))
    assert (fake.replays, step.missed) == (0, 1)


def test_a_refused_capture_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for error, message in (
        (
            RuntimeError("CUDA error: not permitted\nmore"),
            r"cannot be captured \(CUDA error: not permitted\); the host",
        ),
        (torch.OutOfMemoryError("no"), "no memory for the graph"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            fake = FakeGraphs(patch, error)
            net, optimizer, loss = make()
            step = GraphedStep(net, optimizer, loss, batches(0))
            assert step.why is not None and re.search(message, step.why) and step.why in caplog.text
            assert all(x.grad is None for x in net.parameters())
            assert not any(group.get("capturable") for group in optimizer.param_groups)
            before = net.layers[0].weight.detach().clone()
            step(batches(0))
            assert fake.replays == 0 and not torch.equal(before, net.layers[0].weight)


def test_an_error_of_the_loss_is_not_taken_for_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGraphs(monkeypatch)
    net, optimizer, loss = make()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        GraphedStep(net, optimizer, loss, [(torch.randn(5, 7), torch.randn(5, 3), 1.0)])


def test_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the GPU's generator are drawn in the graph; those of the CPU's would be repeated."""
    fake = FakeGraphs(monkeypatch)
    net, optimizer, loss = make()
    random = torch.get_rng_state()
    net.draw = "cpu"
    step = GraphedStep(net, optimizer, loss, batches(0))
    assert step.why == "the loss draws random numbers on the CPU, which a graph would repeat"
    assert torch.equal(torch.get_rng_state(), random)
    net.draw = ""

    def draws(*given: Tensor) -> Tensor:
        return loss(*given) * (1 + 0 * torch.rand((), generator=fake.gpu))

    assert GraphedStep(net, optimizer, draws, batches(0)).why is None
    assert fake.draws == [True]


class _Wrapped(nn.Module):
    def __init__(self, **parts: Any) -> None:
        super().__init__()
        self.inner = Net()
        for name, part in parts.items():
            setattr(self.inner.layers[0], name, part)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: _Wrapped(), None),
        (lambda: _Wrapped(_orig_mod=0), "Linear is compiled by torch.compile"),
        (lambda: _Wrapped(ranks=Ranks.__new__(Ranks)), "ranks exchange numbers in Linear"),
        (lambda: _Wrapped(context=3), None),
        (lambda: HybridLM(preset("tiny", "GT", vocab_size=9)), "the host computes where the memory of TTT"),
        (lambda: HybridLM(preset("tiny", "GA", vocab_size=9)), None),
    ],
)  # fmt: skip
def test_obstacles(build: Callable[[], nn.Module], message: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGraphs(monkeypatch)
    model = build()
    why = obstacle(model, torch.optim.AdamW(model.parameters(), fused=True))
    assert why is None if message is None else why is not None and message in why


def test_more_obstacles(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer, _ = make()
    assert obstacle(net, optimizer) == "a graph needs all weights on one GPU, they are on cpu"
    FakeGraphs(monkeypatch)
    assert obstacle(net, torch.optim.SGD(net.parameters())) == (
        "the optimiser must be Muon or torch's AdamW with fused=True, it is SGD"
    )
    assert "it is AdamW" in str(obstacle(net, torch.optim.AdamW(net.parameters())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
        assert "autocast is on around the step" in str(obstacle(net, optimizer))
    compiled, made = Net(), make()[1]
    compiled.layers[0].compile()
    assert obstacle(compiled, made) == "Linear is compiled by torch.compile"
    model = HybridLM(preset("tiny", "G", vocab_size=9))
    model.layers[1].recompute = True  # type: ignore[assignment]
    assert "recomputed blocks" in str(obstacle(model, torch.optim.AdamW(model.parameters(), fused=True)))


@pytest.mark.parametrize("made", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimiser_that_cannot_leave_an_update_out(made: Any) -> None:
    net, _, loss = make()
    optimizer = made(net.parameters(), lr=0.1)
    step = GraphedStep(net, optimizer, loss, batches(0))
    assert step.why is not None
    before = net.layers[0].weight.detach().clone()
    bad = batches(0)
    bad[0][0].fill_(math.nan)
    step(bad, 0.2)
    assert torch.equal(before, net.layers[0].weight) and optimizer.param_groups[0]["lr"] == 0.2
    step(batches(0))
    assert not torch.equal(before, net.layers[0].weight)


def test_wrong_arguments() -> None:
    net, optimizer, loss = make()
    with pytest.raises(ValueError, match=r"^example must have at least one micro-batch"):
        GraphedStep(net, optimizer, loss, [])
    with pytest.raises(ValueError, match=r"^clip must be above 0, got -1"):
        GraphedStep(net, optimizer, loss, batches(0), clip=-1)
    with pytest.raises(ValueError, match=r"^model must have parameters"):
        GraphedStep(nn.Identity(), optimizer, loss, batches(0))
    step = GraphedStep(net, optimizer, lambda x, *_: net(x), batches(0))
    with pytest.raises(ValueError, match=r"^loss must return a tensor without dimensions, got shape \(5, 3\)"):
        step(batches(0))


def test_schedulers_of_torch_fill_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGraphs(monkeypatch)
    net, optimizer, loss = make()
    step = GraphedStep(net, optimizer, loss, batches(0))
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step(batches(0))
    schedule.step()
    assert all(x is group["lr"] for x, group in zip(rates, optimizer.param_groups, strict=True))
    assert [x.item() for x in rates] == [pytest.approx(0.025)] * len(rates)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_muon_with_a_tensor_for_the_learning_rate(tmp_path: Path, dtype: torch.dtype) -> None:
    found = []
    for lr in (0.0625, torch.tensor(0.0625)):
        model = HybridLM.from_pretrained(make_model(tmp_path / "model")).to(dtype)
        made = make_optimizer(model, "muon", 0.0625, 0.1, (0.9, 0.95))
        assert isinstance(made, Muon)
        for group in made.param_groups:
            group["lr"] = lr
        for step in range(3):
            for x in model.parameters():
                x.grad = torch.linspace(-1, 1 + step, x.numel(), dtype=dtype).view(x.shape)
            made.step()
        found.append([x.detach() for x in model.parameters()])
    rtol, atol = (2e-2, 2e-3) if dtype is torch.bfloat16 else (1e-6, 1e-7)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


# Runs


def make_run(folder: Path, resume: bool = False, name: str = "run", **changes: Any) -> Trainer:
    """Return a run on a CPU that makes whole steps and runs ahead, as runs on a GPU do."""
    trainer = prepare(make_config(folder, out=str(folder / name), **changes), resume=resume)
    for group in trainer.optimizer.param_groups:
        group["fused"] = True
    trainer.runs_ahead = trainer.whole_steps = True
    trainer.sequences = 16
    return trainer


def lines(folder: Path) -> list[dict[str, Any]]:
    return [{key: x for key, x in line.items() if key != "tokens_per_second"} for line in read_metrics(folder)]


def poison(trainer: Trainer, steps: range) -> Tensor:
    """Make the loss of these steps NaN by a number on the device, as the graph of a step calls no Python."""
    factor = torch.ones((), device=trainer.world.device)
    trainer.model.embed.register_forward_hook(lambda module, ids, x: x * factor)
    fetch = trainer.next_pieces

    def next_pieces() -> list[Batch]:
        factor.fill_(math.nan if trainer.step in steps else 1.0)
        return fetch()

    trainer.next_pieces = next_pieces  # type: ignore[method-assign]
    return factor


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_of_graphs_is_a_run_without_them(tmp_path: Path, optimizer: str) -> None:
    """Its checkpoints, its losses and its samples, with a resumed run and a skipped step."""
    found, said = {}, {}
    for kind in ("off", "auto", "resumed"):
        with pytest.MonkeyPatch.context() as patch:
            fake = None if kind == "off" else FakeGraphs(patch)
            options = {"optimizer": optimizer, "graph": "off" if kind == "off" else "auto", "accumulate": 2}
            options |= {"on_bad_loss": "skip"}
            trainer = make_run(tmp_path, name=kind, **options)
            poison(trainer, range(7, 8))
            if kind == "resumed":
                for _ in range(6):
                    trainer.train_step()
                trainer.save()
                trainer.close()
                trainer = make_run(tmp_path, name=kind, resume=True, **options)
                poison(trainer, range(7, 8))
            trainer.run()
            trainer.close()
            assert fake is None or fake.replays == 13  # 12 steps, and the one that a bad one had halted
        found[kind] = everything(trainer)
        said[kind] = [line for line in lines(tmp_path / kind) if "validation_loss" not in line]
    assert_same_bits(found["auto"], found["off"])
    assert_same_bits(found["resumed"], found["off"])
    assert said["auto"] == said["off"] == said["resumed"]
    assert [line["step"] for line in said["off"] if line.get("skipped")] == [8]


def test_a_run_of_whole_steps_is_that_of_steps_in_parts(tmp_path: Path) -> None:
    """Within the rounding of learning rates to float32, and with empty sequences after the others."""
    found = {}
    for whole in (False, True):
        trainer = make_run(tmp_path, name=str(whole), accumulate=2)
        trainer.whole_steps = whole
        trainer.run()
        trainer.close()
        found[whole] = lines(tmp_path / str(whole))
    assert [line.keys() for line in found[True]] == [line.keys() for line in found[False]]
    for a, b in zip(found[True], found[False], strict=True):
        assert a == {key: pytest.approx(x, rel=1e-4) for key, x in b.items()}


def test_a_bad_step_stops_a_run_of_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, found = {}, {}
    FakeGraphs(monkeypatch)
    for whole in (False, True):
        trainer = make_run(tmp_path, name=str(whole))
        trainer.whole_steps = whole
        trainer.sequences = 0
        poison(trainer, range(4, 5))
        with pytest.raises(TrainingStopped) as stopped:
            trainer.run()
        trainer.close()
        assert trainer.step == 4
        said[whole], found[whole] = str(stopped.value), everything(trainer)
    assert said[True] == said[False] and "the loss (nan) is not finite at step 5" in said[True]
    for name, x in found[False].items():  # the step after the bad one has changed nothing
        torch.testing.assert_close(found[True][name], x, rtol=1e-4, atol=1e-6)


def test_a_run_names_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeGraphs(monkeypatch)
    trainer = make_run(tmp_path)
    trainer.sequences = 1  # fewer than some batches have
    for _ in range(12):
        trainer.train_step()
    trainer.settle()
    trainer.close()
    text = capsys.readouterr().out
    assert "each step is one CUDA graph" in text
    assert trainer.graphed is not None and text.count("runs without the CUDA graph") == (trainer.graphed.missed > 0)
    assert "the graph is for 1" in text or not trainer.graphed.missed
    monkeypatch.undo()
    for graph, expected in (("auto", "no CUDA graph: a graph needs all weights on one GPU"), ("off", None)):
        trainer = make_run(tmp_path, name=graph, graph=graph)
        trainer.train_step()
        trainer.settle()
        trainer.close()
        text = capsys.readouterr().out
        assert "CUDA graph" not in text if expected is None else expected in text
    trainer = make_run(tmp_path, name="on", graph="auto")
    object.__setattr__(trainer.config, "graph", "on")
    with pytest.raises(TrainingStopped, match=r"graph = on is not possible: a graph needs .*; use --graph auto"):
        trainer.train_step()
    trainer.close()


def test_a_look_between_steps_gets_the_memory_of_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeGraphs(monkeypatch)
    trainer = make_run(tmp_path, save_every=0)
    evaluate, left = trainer.evaluate, ["no memory"]

    def fail_once() -> float:
        if left:
            raise torch.OutOfMemoryError(left.pop())
        return evaluate()

    trainer.evaluate = fail_once  # type: ignore[method-assign]
    trainer.run()
    trainer.close()
    assert fake.replays == 5 and len([line for line in lines(tmp_path / "run") if "loss" in line]) == 12
    assert capsys.readouterr().out.count("no CUDA graph from now on: the GPU has no memory for the graph and for") == 1
    trainer = make_run(tmp_path, name="other", graph="off", save_every=0)
    left.append("no memory")
    trainer.evaluate = fail_once  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        trainer.run()
    trainer.close()


def test_a_cpu_has_no_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = prepare(make_config(tmp_path))
    assert not trainer.whole_steps and trainer.sequences == 0 and trainer.config.graph == "auto"
    trainer.close()
    assert "CUDA graph" not in capsys.readouterr().out
    message = "^graph = on is not possible: there are graphs on a GPU alone; use --graph auto$"
    with pytest.raises(ValueError, match=message):
        prepare(make_config(tmp_path, out=str(tmp_path / "other"), graph="on"))
    with pytest.raises(ValueError, match=r"^graph must be one of auto, on, off, got 'yes'"):
        TrainConfig(graph="yes").check()
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved.pop("graph") == "auto" and TrainConfig.from_dict(saved).graph == "auto"


def test_empty_sequences_follow_the_others() -> None:
    batch = Batch(torch.arange(6)[None], torch.arange(6)[None], torch.tensor([0, 2, 6]))
    assert batch.padded(4).cu_seqlens.tolist() == [0, 2, 6, 6, 6]
    assert batch.padded(2) is batch and batch.padded(1) is batch
    assert batch.padded(4).ids is batch.ids


def test_how_many_sequences_parts_have(tmp_path: Path) -> None:
    sizes = np.random.default_rng(0).integers(2, 40, 300)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    view = TokenView("training", np.zeros(sizes.sum(), np.uint16), starts, sizes)
    for rows, parts, length in ((4, 1, 32), (4, 2, 32), (6, 3, 100), (64, 1, 128)):
        order = ShuffledBatches(view, length, rows, 0)
        steps = -(-order.epoch_rows // rows)
        found = [len(order.batch(n, part, parts).cu_seqlens) - 1 for n in range(steps) for part in range(parts)]
        most = order.most_sequences(parts)
        assert np.mean(np.array(found) > most) <= 0.01 + 1 / len(found)
        assert most <= max(found) or rows > order.epoch_rows


def test_experts_in_half_precision_need_no_counts() -> None:
    """Under autocast of a GPU they are computed as on one, where nothing reads how many tokens each expert has."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(16, 8, 3, 24)
    x = torch.randn(100, 16)
    weights, chosen = layer.route(x)
    wanted = layer.run_sorted(x, chosen, layer.one_by_one)
    found = layer.run_sorted(x.bfloat16(), chosen, layer.grouped)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=0.1, atol=0.02)

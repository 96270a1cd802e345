"""The training loop and its parts: config, loss, optimisers, rows in random order, and messages when it goes wrong."""

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lineate.generation import choose, generate, stream_text
from lineate.generation.command import run_generate
from lineate.generation.defaults import SamplingFlags
from lineate.models import HybridLM, loss
from lineate.models.config import ExpertsConfig
from lineate.models.loss import head_loss, loss_sum
from lineate.models.presets import tiny
from lineate.text.tokenizer import make_tokenizer
from lineate.training.batches import Batches
from lineate.training.command import run_train
from lineate.training.compiling import verdict
from lineate.training.config import TrainConfig
from lineate.training.loop import MAX_SKIPPED_STEPS, Trainer, TrainingStopped
from lineate.training.optim import hidden_matrices, make_optimizer, orthogonalize
from lineate.training.order import ShuffledBatches
from lineate.training.prepare import prepare, train
from lineate.training.report import read_metrics, smooth
from lineate.training.tokens import TokenStore
from tests.support.marks import slow_but
from tests.support.runs import assert_same_bits, everything, make_config, make_model, make_texts


def closed(trainer: Trainer) -> Trainer:
    trainer.close()
    return trainer


def command(*arguments: str) -> tuple[int, str]:
    """Return the exit code and everything that `lineate ...` printed."""
    from typer.testing import CliRunner

    from lineate.cli import build_app

    result = CliRunner().invoke(build_app(), list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


# config


def test_config_survives_json_and_names_the_nearest_key() -> None:
    config = TrainConfig(steps=7, data=("a", "b"), betas=(0.8, 0.9), warmup=1)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match="unknown key 'lenght'; did you mean 'length'"):
        TrainConfig.from_dict({"lenght": 3})
    with pytest.raises(ValueError, match="unknown key 'zzz'; known are out, model"):
        TrainConfig.from_dict({"zzz": 3})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 1}, "length must be at least 2, got 1"),
        ({"steps": "9"}, "steps must be of type int, got '9'"),
        ({"steps": True}, "steps must be of type int, got True"),
        ({"lr": 0}, "lr must be above 0, got 0"),
        ({"lr": math.nan}, "lr must be finite, got nan"),
        ({"lr": 10**400}, "lr must be finite, got 1000"),
        ({"out": ""}, "out must be a name, got ''; leave it out, or write . for the current folder"),
        ({"model": ""}, "model must be a name, got ''"),
        ({"cache": ""}, "cache must be a name, got ''"),
        ({"data": ("stdlib", "")}, "data must name at least one source, got ''; use stdlib"),
        ({"optimizer": "sgd"}, "optimizer must be one of adamw, muon, got 'sgd'"),
        ({"betas": (0.9,)}, "betas must be 2 values"),
        ({"betas": (0.9, 1.0)}, "betas must lie in"),
        ({"rows": 6, "accumulate": 4}, "rows must be a multiple of accumulate = 4, got 6"),
        ({"warmup": 100}, "warmup must be at least 0 and less than steps = 100, got 100; or leave it out"),
        ({"warmup": -1}, "warmup must be at least 0 and less than steps = 100, got -1"),
        ({"warmup": 2.0}, "warmup must be of type int or none, got 2.0"),
        ({"min_lr": 2.0}, "min_lr must lie in 0 .. 1, got 2.0"),
        ({"data": ()}, "data must name at least one source"),
        ({"validation_fraction": 0.0}, "validation_fraction must be above 0"),
        ({"validation_fraction": 0.7}, "validation_fraction must be above 0 and at most 0.5, got 0.7"),
        ({"seed": 2**63}, "seed must lie in 0"),
    ],
)
def test_a_wrong_config_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict({"steps": 100, "warmup": 0} | changes)


def test_schedules() -> None:
    few = [TrainConfig.from_dict({"steps": steps}) for steps in (1, 10, 100, 1000)]
    assert [config.warmup_steps for config in few] == [0, 2, 20, 20]
    assert few[1].learning_rate(0) == few[1].lr / 2 and few[1].learning_rate(1) == few[1].lr
    cosine = TrainConfig(steps=110, warmup=10, lr=1.0, min_lr=0.1)
    assert [cosine.learning_rate(n) for n in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert cosine.learning_rate(60) == pytest.approx(0.55) and cosine.learning_rate(110) == pytest.approx(0.1)
    stable = replace(cosine, schedule="wsd", steps=100, decay=0.2)
    assert [stable.learning_rate(n) for n in (10, 50, 79, 80)] == [1.0] * 4
    assert stable.learning_rate(90) == pytest.approx(0.55) and stable.learning_rate(100) == pytest.approx(0.1)


# loss and data


def test_parts_of_a_loss_add_up() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 9, 5, dtype=torch.bfloat16), torch.randint(0, 5, (2, 9))
    targets[0, 3:6] = -100
    total, count = loss_sum(logits, targets)
    parts = [loss_sum(logits[:, s], targets[:, s]) for s in (slice(0, 4), slice(4, 9))]
    assert total.dtype == torch.float32 and count == 15 == sum(part[1] for part in parts)
    torch.testing.assert_close(total, sum(part[0] for part in parts))
    chosen = logits.float().log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(total, -chosen[targets != -100].sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", ["both", "x", "weight", "neither"])
def test_loss_in_pieces_is_the_loss(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, wanted: str) -> None:
    """Products run in bfloat16 under autocast, in pieces of 3 rows, the last one shorter, some without a target."""
    torch.manual_seed(0)
    autocast = dtype == torch.bfloat16
    x, weight = torch.randn(2, 5, 8, dtype=dtype), torch.randn(11, 8, dtype=torch.float32 if autocast else dtype)
    targets = torch.randint(0, 11, (2, 5))
    targets[0, 1:4] = -100
    x.requires_grad_(wanted in ("both", "x")), weight.requires_grad_(wanted in ("both", "weight"))
    inputs = [y for y in (x, weight) if y.requires_grad]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        whole = head_loss(x, weight, targets)
        monkeypatch.setattr(loss, "AT_ONCE", 35)
        pieces = head_loss(x, weight, targets)
    rtol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(pieces, whole, rtol=1e-5 if autocast else rtol, atol=0)
    assert pieces.dtype == whole.dtype and pieces.requires_grad == bool(inputs)
    if inputs:
        found, expected = (torch.autograd.grad(y / 7, inputs) for y in (pieces, whole))
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(b.abs().max()))
    assert not head_loss(x, weight, torch.full_like(targets, -100)).detach()
    with pytest.raises(ValueError, match=r"targets must have shape \(b, t\) = \(2, 5\), got \(2, 4\)"):
        head_loss(x, weight, targets[:, :4])


@pytest.mark.cover
def test_training_in_pieces_is_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(make_config(tmp_path, out=str(tmp_path / "whole"), steps=3))
    monkeypatch.setattr(loss, "AT_ONCE", 257 * 5)
    pieces = train(make_config(tmp_path, out=str(tmp_path / "pieces"), steps=3))
    for a, b in zip(pieces.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_shuffled_rows_are_those_of_the_stream_each_once_an_epoch(tmp_path: Path) -> None:
    store = TokenStore.open_or_make([str(make_texts(tmp_path / "t"))], make_tokenizer("bytes", ()), tmp_path / "c")
    view, _ = store.split(0.1, 0)
    plain, mixed = Batches(view, 32, 1, seed=3), ShuffledBatches(view, 32, 4, seed=3)
    epoch = view.n_tokens // 32
    seen = [mixed.row(step, row) for step in range(2 * epoch // 4 + 1) for row in range(4)]
    assert sorted(seen[:epoch]) == list(range(epoch)) and seen[:epoch] != sorted(seen[:epoch])
    assert sorted(seen[epoch : 2 * epoch]) == list(range(epoch, 2 * epoch))
    whole = mixed.batch(5)
    for row in range(4):
        one = plain.batch(mixed.row(5, row))
        assert torch.equal(whole.ids[:, 32 * row : 32 * row + 32], one.ids)
        assert torch.equal(whole.targets[:, 32 * row : 32 * row + 32], one.targets)
        inside = whole.cu_seqlens[(whole.cu_seqlens >= 32 * row) & (whole.cu_seqlens <= 32 * row + 32)]
        assert torch.equal(inside - 32 * row, one.cu_seqlens)
        for number in mixed.documents(5, row):
            text = "".join(map(chr, view.document(number)[1:-1].astype(int)))
            assert any(piece in text for piece in "".join(map(chr, one.ids[0].tolist())).split(chr(256)) if piece)
    halves = [mixed.batch(5, part, 2) for part in (0, 1)]
    assert torch.equal(torch.cat([half.ids for half in halves], 1), whole.ids)
    assert torch.equal(torch.cat([halves[0].cu_seqlens, halves[1].cu_seqlens[1:] + 64]), whole.cu_seqlens)
    assert all(np.array_equal(mixed.batch(n).ids, ShuffledBatches(view, 32, 4, 3).batch(n).ids) for n in (0, 99))


# optimisers


def test_orthogonalize_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 20, 50), (3, 50, 20)):
        x = torch.randn(shape)
        y = orthogonalize(x)
        values = torch.linalg.svdvals(y)
        assert y.shape == x.shape and values.min() > 0.5 and values.max() < 1.3
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        cosine = torch.cosine_similarity(y.flatten(1), (u @ v).flatten(1))
        assert cosine.min() > 0.95
        torch.testing.assert_close(orthogonalize(x[1:2])[0], y[1])  # whatever it is batched with
    assert not orthogonalize(torch.zeros(1, 4, 4)).any()


def test_muon_is_for_hidden_matrices_only() -> None:
    experts = ExpertsConfig(4, 2, 32, shared_size=32, shared_gate=True)
    config = replace(tiny("KGRA", 64), experts=experts, dense_layers=(0, 1), tie_embeddings=False)
    model = HybridLM(config)
    names = set(hidden_matrices(model))
    for wanted in ("0.mixer.in_proj.weight", "0.mixer.decay_proj.weight", "1.feed.down_proj.weight",
                   "2.feed.experts_gate_up", "2.feed.router.weight", "3.mixer.out_proj.weight"):  # fmt: skip
        assert f"layers.{wanted}" in names
    for left_out in ("embed", "head", "conv", "norm", "bias", "A_log", "shared_gate"):
        assert not any(left_out in name for name in names), left_out
    optimizer = make_optimizer(model, "muon", 1e-3, 0.1, (0.9, 0.95))
    groups = optimizer.param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert [(group["muon"], group["weight_decay"]) for group in groups] == [(True, 0.1), (False, 0.1), (False, 0.0)]
    assert len(groups[0]["params"]) == len(names) and len(groups[1]["params"]) == 2


def test_a_step_of_muon_is_its_equation_and_the_rest_is_adamw() -> None:
    torch.manual_seed(1)
    model = HybridLM(tiny("G", 64))
    matrices = hidden_matrices(model)
    optimizer = make_optimizer(model, "muon", 1e-2, 0.1, (0.9, 0.95))
    others = [x.detach().clone().requires_grad_() for group in optimizer.param_groups[1:] for x in group["params"]]
    decay = [group["weight_decay"] for group in optimizer.param_groups[1:] for _ in group["params"]]
    adamw = torch.optim.AdamW(
        [{"params": [x], "weight_decay": w} for x, w in zip(others, decay, strict=True)], lr=1e-2, betas=(0.9, 0.95)
    )
    weights = {name: x.detach().clone() for name, x in matrices.items()}
    momenta = {name: torch.zeros_like(x) for name, x in weights.items()}
    for _ in range(3):
        for x in model.parameters():
            x.grad = torch.randn_like(x)
        for copy, x in zip(others, (x for g in optimizer.param_groups[1:] for x in g["params"]), strict=True):
            copy.grad = x.grad.clone()  # type: ignore[union-attr]
        for name, x in matrices.items():
            assert x.grad is not None
            momenta[name] = 0.95 * momenta[name] + 0.05 * x.grad
            update = orthogonalize((0.05 * x.grad + 0.95 * momenta[name])[None])[0]
            weights[name] = weights[name] * (1 - 1e-3) - 1e-2 * 0.2 * max(x.shape) ** 0.5 * update
        optimizer.step()
        adamw.step()
    for name, x in matrices.items():
        torch.testing.assert_close(x.detach(), weights[name], rtol=1e-4, atol=1e-5)
    for copy, x in zip(others, (x for g in optimizer.param_groups[1:] for x in g["params"]), strict=True):
        assert torch.equal(copy, x)


# the loop


@pytest.mark.cover
@pytest.mark.parametrize("optimizer", slow_but(["adamw", "muon"], ["muon"]))
def test_training_lowers_the_loss_and_leaves_what_it_promised(tmp_path: Path, optimizer: str) -> None:
    config = make_config(tmp_path, steps=40, save_every=0, optimizer=optimizer, lr=1e-2, sample_every=40, prompt="the ")
    trainer = train(config)
    out = Path(config.out)
    lines = read_metrics(out)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 40 and losses[0] == pytest.approx(math.log(257), rel=0.05) and losses[-1] < 2.5
    assert min(line["validation_loss"] for line in lines if "validation_loss" in line) == trainer.best
    assert TrainConfig.load(out / "config.json") == config
    assert {path.name for path in out.iterdir()} == {
        "config.json", "metrics.jsonl", "loss.png", "tokenizer", "checkpoints", "model",
    }  # fmt: skip
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000040"]
    for folder in (out, out / "checkpoints/step-000040"):
        code, text = command("generate", str(folder), "--prompt", "the ", "--tokens", "20", "--temperature", "0")
        assert code == 0 and text.startswith("the ") and len(text) > 10


@pytest.mark.parametrize("changes", [{"accumulate": 4}, {"recompute": True}])
def test_gradients_do_not_depend_on_how_they_are_computed(tmp_path: Path, changes: dict[str, Any]) -> None:
    found = []
    for out, change in (("a", {}), ("b", changes)):
        trainer = closed(prepare(make_config(tmp_path, out=str(tmp_path / out), **change)))
        loss, count = trainer.gradients()
        found.append(({"loss": loss, "count": count}, {n: x.grad for n, x in trainer.model.named_parameters()}))
    assert found[0][0]["count"] == found[1][0]["count"]
    torch.testing.assert_close(found[0][0]["loss"], found[1][0]["loss"])
    for name, x in found[0][1].items():
        torch.testing.assert_close(x, found[1][1][name], rtol=1e-4, atol=1e-6)


def test_recomputation_keeps_less() -> None:
    kept = []
    for recompute in (False, True):
        model = HybridLM(tiny("GA", 64))
        for block in model.layers:
            block.recompute = recompute
        total = 0

        def keep(x: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = model(torch.arange(64)[None])
        kept.append(total)
        del out
    assert kept[1] < kept[0] / 3


@pytest.mark.cover
def test_bfloat16_keeps_float32_weights_and_learns(tmp_path: Path) -> None:
    config = make_config(tmp_path, dtype="bfloat16", steps=6, lr=1e-2, sample_every=0)
    trainer = train(config)
    assert {x.dtype for x in trainer.model.parameters()} == {torch.float32}
    losses = [line["loss"] for line in read_metrics(Path(config.out)) if "loss" in line]
    assert losses[-1] < losses[0] - 0.3


def test_the_average_of_the_plot_keeps_up_with_the_loss() -> None:
    for n in (1, 12, 80, 3000):
        falling = [3 - 2 * i / n for i in range(n)]
        assert max(abs(a - b) for a, b in zip(smooth(falling), falling, strict=True)) < 0.06
    noisy = smooth([2.0 + (-1) ** i for i in range(3000)])
    assert max(abs(x - 2) for x in noisy[200:]) < 0.05


@pytest.mark.cover
def test_two_runs_are_the_same_to_the_bit_and_seeds_differ(tmp_path: Path) -> None:
    def run(name: str, seed: int) -> Trainer:
        return train(make_config(tmp_path, out=str(tmp_path / name), steps=3, model="tiny", pattern="GA", seed=seed))

    runs = [run("a", 0), run("b", 0), run("c", 1)]
    assert_same_bits(everything(runs[0]), everything(runs[1]))
    assert not torch.equal(runs[0].model.embed.weight, runs[2].model.embed.weight)


def test_whether_compiling_pays_is_said() -> None:
    assert verdict(0.110, 0.096, 12.0) == (
        "--compile does not pay here: the gradients of a step take 110 ms compiled, 96 ms without; leave it out"
    )
    assert verdict(1.5, 2.0, 30.0) == (
        "--compile pays after 60 steps: the gradients of a step take 1.5 s compiled, 2.0 s without; "
        "compiling took 30.0 s"
    )


@pytest.mark.slow
def test_compiled_blocks_give_the_same_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for compiled in (False, True):
        out = str(tmp_path / str(compiled))
        config = make_config(tmp_path, out=out, model="tiny", pattern="GA", compile=compiled, steps=3, sample_every=3)
        train(config)
        assert ("--compile " in capsys.readouterr().out) is compiled
        losses.append([line["loss"] for line in read_metrics(Path(config.out)) if "loss" in line])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_the_validation_loss_is_that_of_every_text_alone(tmp_path: Path) -> None:
    trainer = closed(prepare(make_config(tmp_path)))
    total, count = 0.0, 0
    for step in range(2):  # eval_batches
        batch = trainer.validation.batch(step)
        for first, last in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            targets = batch.targets[0, first:last]
            with torch.no_grad():
                logs = trainer.model(batch.ids[:, first:last]).logits[0].log_softmax(-1)
            total -= float(logs.gather(1, targets.clamp(min=0)[:, None])[targets >= 0].sum())
            count += int((targets >= 0).sum())
    assert trainer.evaluate() == pytest.approx(total / count, rel=1e-5)


# what is not finite


def poisoned(trainer: Trainer, steps: range, row: int = 2) -> Trainer:
    """Return the trainer, with a NaN in the embedding of one of a row's tokens in these steps."""
    length = trainer.config.length

    def poison(module: torch.nn.Module, ids: tuple[torch.Tensor], x: torch.Tensor) -> torch.Tensor | None:
        if trainer.step not in steps:
            return None
        mask = torch.ones(x.shape[1], 1)
        mask[row * length + 5] = math.nan
        return x * mask

    trainer.model.embed.register_forward_hook(poison)
    return trainer


@pytest.mark.cover
def test_a_bad_loss_stops_and_says_step_parameter_and_rows(tmp_path: Path) -> None:
    trainer = poisoned(prepare(make_config(tmp_path)), range(4, 5))
    with pytest.raises(TrainingStopped) as stopped:
        trainer.run()
    trainer.close()
    text = str(stopped.value)
    numbers = ", ".join(map(str, trainer.batches.documents(4, 2)))
    assert "the loss (nan) is not finite at step 5" in text
    assert "the first parameter whose gradient is not: embed.weight" in text
    assert f"1 of 4 (row 2: training documents {numbers}" in text
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]
    again = closed(train(make_config(tmp_path), resume=True))  # from step 3, because nothing bad was saved
    assert again.step == 12 and all(x.isfinite().all() for x in again.model.parameters())


@pytest.mark.cover
def test_a_bad_loss_can_be_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = poisoned(prepare(make_config(tmp_path, on_bad_loss="skip", accumulate=2)), range(4, 6), row=1)
    before = {}
    step = trainer.train_step

    def remember() -> None:
        before[trainer.step] = trainer.model.embed.weight.detach().clone()
        step()

    trainer.train_step = remember  # type: ignore[method-assign]
    for _ in range(7):
        trainer.train_step()
    trainer.close()
    assert torch.equal(before[4], before[5]) and torch.equal(before[5], before[6]) and trainer.step == 7
    assert "at step 5" in (said := capsys.readouterr().err) and "at step 6" in said and "the step is skipped" in said
    skipped = [line["step"] for line in read_metrics(tmp_path / "run") if line.get("skipped")]
    assert skipped == [5, 6]


@pytest.mark.cover
def test_skipping_ends_when_it_cannot_help(tmp_path: Path) -> None:
    trainer = poisoned(prepare(make_config(tmp_path, on_bad_loss="skip", steps=40, save_every=0)), range(2, 40), row=1)
    with pytest.raises(TrainingStopped, match=f"{MAX_SKIPPED_STEPS} bad steps in a row"):
        trainer.run()
    trainer.close()
    trainer = prepare(make_config(tmp_path, out=str(tmp_path / "other"), on_bad_loss="skip"))
    with torch.no_grad():
        trainer.model.layers[1].feed.down_proj.weight[0, 0] = math.inf
    with pytest.raises(TrainingStopped, match=r"whose value is not: layers.1.feed.down_proj.weight \(1 of"):
        trainer.run()
    trainer.close()


# the command


@pytest.mark.cover
def test_flags_come_before_the_config_file(tmp_path: Path) -> None:
    config = make_config(tmp_path, steps=9)
    (tmp_path / "c.json").write_text(json.dumps(config.to_dict()))
    code, text = command("train", "--config", str(tmp_path / "c.json"), "--steps", "3", "--betas", "0.8", "0.9")
    assert code == 0, text
    saved = TrainConfig.load(tmp_path / "run/config.json")
    assert saved == replace(config, steps=3, betas=(0.8, 0.9))
    assert "step 3/3  loss" in text and "validation loss" in text and "lineate generate" in text
    code, text = command("train", "--resume", config.out, "--steps", "4")
    assert code == 0 and "going on from" in text and "step 4/4" in text, text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--model", "huge"], "model must be one of tiny, small"),
        (["--pattern", "GX", "--model", "tiny"], "pattern must be made of the letters"),
        (["--pattern", "GA"], "pattern is for presets"),
        (["--data", "nowhere"], "nowhere does not exist"),
        (["--data", "EMPTY"], "empty"),
        (["--length", "100000"], "length = 100000 is longer than the train data"),
        (["--tokenizer", "letters"], "tokenizer must be 'bytes' or 'bpe:SIZE'"),
        (["--device", "tpu"], "device"),
        (["--out", "FILE/x"], "out must be a folder that can be written, got"),
        (["--out", "TAKEN"], "has a run; go on with --resume"),
        (["--resume", "nowhere"], "resume must be the folder of a run, got"),
        (["--prompt", "\udcff"], "prompt must be text, got"),
        (["--context", "2"], "context must divide the number of processes = 1, got 2"),
    ],
)
def test_what_is_wrong_is_one_line_before_any_training(tmp_path: Path, arguments: list[str], message: str) -> None:
    config = make_config(tmp_path)
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "TAKEN").mkdir()
    (tmp_path / "TAKEN/config.json").write_text("{}")
    arguments = [str(tmp_path / x) if x in ("EMPTY", "TAKEN", "nowhere") else x for x in arguments]
    arguments = [str(tmp_path / "EMPTY/x") if x == "FILE/x" else x for x in arguments]
    if "--resume" not in arguments:
        (tmp_path / "c.json").write_text(json.dumps(config.to_dict()))
        arguments = ["--config", str(tmp_path / "c.json"), *arguments]
    code, text = command("train", *arguments)
    assert code == 2 and not (tmp_path / "run/metrics.jsonl").exists()
    assert (last := text.strip().split("\n")[-1]).startswith("lineate: ") and message in last and "Trace" not in text


@pytest.mark.cover
def test_a_terminal_without_unicode_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, steps=1, warmup=0, sample_every=1, prompt="\u00e9")
    (tmp_path / "c.json").write_text(json.dumps(config.to_dict()))
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    run_train({"config": tmp_path / "c.json"})
    run_generate(tmp_path / "run", "\u00e9", SamplingFlags({"temperature": 0.0}), 3)
    sys.stdout.seek(0)
    assert "| ?" in (text := sys.stdout.read()) and "\n?" in text


def test_wrong_arguments_of_generate_are_one_line(tmp_path: Path) -> None:
    make_model(tmp_path)
    make_tokenizer("bytes", ()).save(tmp_path)
    for arguments, message in (
        (["--device", "tpu"], "device must be auto, cpu or cuda, got 'tpu'"),
        (["--top-p", "2"], "top_p must be above 0 and at most 1, got 2.0"),
        (["--prompt", "\udcff"], "text must be Unicode"),
    ):
        code, text = command("generate", str(tmp_path), *arguments)
        assert code == 2 and text.startswith("lineate: ") and message in text, text
    assert command("generate", str(tmp_path / "none"))[1].startswith("lineate: expected the folder of a run")


@pytest.mark.cover
def test_a_run_is_planned_and_inspected(tmp_path: Path) -> None:
    """A run's folder stands for its model: the finished one, or else that of the newest checkpoint."""
    closed(train(make_config(tmp_path, steps=3)))
    run = tmp_path / "run"
    code, text = command("plan", str(run), "--json", "-")
    assert code == 0 and json.loads(text)["model"]["name"] == "run"
    found = [command("inspect", str(run))]
    (run / "model").rename(tmp_path / "model")
    found.append(command("inspect", str(run)))
    assert all(code == 0 and "Gated DeltaNet" in text for code, text in found)
    code, text = command("inspect", str(tmp_path / "texts"))
    assert code == 2 and text.startswith("lineate: ") and "config.json" in text


def test_a_model_with_a_smaller_vocabulary_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=r"'bpe:280' has a vocabulary of 280, the model of .* one of 257"):
        prepare(make_config(tmp_path, tokenizer="bpe:280"))


@pytest.mark.cover
def test_bpe_and_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("tensorboard")
    config = make_config(
        tmp_path, model="tiny", pattern="G", tokenizer="bpe:280", steps=3, tensorboard=True, sample_every=3
    )
    assert train(config).model.config.vocab_size == 280
    assert list((tmp_path / "run/tensorboard").iterdir())
    code, text = command("generate", config.out, "--prompt", "the memory", "--tokens", "5")
    assert code == 0 and text.startswith("the memory")


# generation


def test_choose() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, -1.0], [5.0, 0.0, 0.0, 4.9]])
    assert choose(logits, temperature=0).tolist() == [1, 0]
    generator = torch.Generator().manual_seed(0)
    many = choose(logits.repeat_interleave(4000, 0), generator=generator).view(2, 4000)
    shares = torch.stack([(many == token).float().mean(1) for token in range(4)], 1)
    torch.testing.assert_close(shares, logits.softmax(-1), atol=0.03, rtol=0)
    drawn = [choose(logits, top_k=2, generator=generator) for _ in range(300)]
    assert {int(x[0]) for x in drawn} == {1, 2} and {int(x[1]) for x in drawn} == {0, 3}
    drawn = [choose(logits, top_p=0.6, generator=generator) for _ in range(300)]
    assert {int(x[0]) for x in drawn} == {1} and {int(x[1]) for x in drawn} == {0, 3}
    for wrong, message in (({"temperature": -1}, "temperature"), ({"top_k": -1}, "top_k"), ({"top_p": 0}, "top_p")):
        with pytest.raises(ValueError, match=message):
            choose(logits, **wrong)  # type: ignore[arg-type]


def test_generation_continues_as_whole_forwards_would(tmp_path: Path) -> None:
    model = HybridLM.from_pretrained(make_model(tmp_path / "m"), progress=False)
    ids = torch.randint(0, 257, (2, 7))
    made = torch.stack(list(generate(model, ids, 12, temperature=0)), 1)
    for n in range(12):
        logits = model(torch.cat((ids, made[:, :n]), 1)).logits[:, -1]
        assert torch.equal(logits.argmax(-1), made[:, n])
    a, b, c = (torch.stack(list(generate(model, ids, 12, seed=seed)), 1) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
    stops = list(generate(model, ids, 12, temperature=0, stop={int(made[0, 3]), int(made[1, 5])}))
    first = [next(n for n in range(12) if int(row[n]) in (int(made[0, 3]), int(made[1, 5]))) for row in made]
    assert len(stops) == max(first) + 1
    for row, n in enumerate(first):  # as without stop up to it, then the stop token repeated
        assert [int(x[row]) for x in stops] == [int(made[row, min(i, n)]) for i in range(len(stops))]
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(model, ids, -1)
    for wrong, message in (
        (ids[:, :0], r"ids must have shape \(b, t\) with at least one token, got \(2, 0\)"),
        (ids[0], r"ids must have shape \(b, t\) with at least one token, got \(7,\)"),
        (ids + 257, r"ids must lie in 0 \.\. 256"),
        (ids.double(), "ids must be int32 or int64, got float64"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, wrong)
    assert torch.equal(torch.stack(list(generate(model, ids.tolist(), 12, temperature=0)), 1), made)
    with pytest.raises(TypeError, match=r"ids must be a torch\.Tensor or a sequence of prompts, got str"):
        generate(model, "text")  # type: ignore[arg-type]


def test_text_streams_in_whole_characters() -> None:
    tokenizer = make_tokenizer("bytes", ())
    text = "aé\n\U0001f600 b\nc"
    parts = list(stream_text(tokenizer, [*tokenizer.encode(text), tokenizer.end]))
    assert "".join(parts) == text and "é" in parts and "\U0001f600" in parts
    assert "".join(stream_text(tokenizer, [97, 0xC3])) == "a\ufffd"

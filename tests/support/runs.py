"""Runs that take a second: a model of 30 thousand parameters, and a few documents."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from lineate.models import HybridLM
from lineate.models.presets import tiny
from lineate.training.config import TrainConfig
from lineate.training.learner import Learner

WORDS = ("the memory", "forgets", "compares", "writes", "reads", "a key", "its value", "each token")


def make_texts(folder: Path, texts: int = 24) -> Path:
    """Write documents of few different words to files."""
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(texts):
        lines = [" ".join(WORDS[(n * 5 + i * (i + j)) % len(WORDS)] for j in range(4)) + "." for i in range(12)]
        (folder / f"{n:02}.txt").write_text("\n".join(lines))
    return folder


def make_model(folder: Path) -> Path:
    """Return a byte-level model with two layers, one of each kind, 32 wide."""
    torch.manual_seed(7)
    config = tiny("GA", vocab_size=257)
    assert config.linear is not None and config.attention is not None and config.feed is not None
    HybridLM(
        replace(
            config,
            hidden_size=32,
            n_layers=2,
            linear=replace(config.linear, heads=1, value_heads=1, key_dim=16, value_dim=16),
            attention=replace(config.attention, heads=1, kv_heads=1, head_dim=16, rotary_dim=8),
            feed=replace(config.feed, size=48),
        )
    ).save_pretrained(folder)
    return folder


def make_config(folder: Path, **changes: Any) -> TrainConfig:
    """Return the config of a run in folder/run that saves every third of its 12 steps."""
    data, model = folder / "texts", folder / "start"
    if not data.exists():
        make_texts(data)
        make_model(model)
    values: dict[str, Any] = {
        "out": str(folder / "run"), "model": str(model), "data": (str(data),), "cache": str(folder / "cache"),
        "length": 32, "rows": 4, "steps": 12, "warmup": 2, "lr": 3e-3, "validation_fraction": 0.1, "eval_every": 5,
        "eval_batches": 2, "sample_every": 0, "save_every": 3, "device": "cpu",
    }  # fmt: skip
    return TrainConfig(**(values | changes))


@contextmanager
def short_samples() -> Iterator[None]:
    """Let the samples of runs have 12 tokens, because those of full length take longer than all steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "sample", partialmethod(Learner.sample, 12))
        yield


def everything(trainer: Any) -> dict[str, torch.Tensor]:
    """Return a run's weights and its optimiser's state, by name."""
    found = {name: x.detach().clone() for name, x in trainer.model.state_dict().items()}
    names = {x: name for name, x in trainer.model.named_parameters()}
    for x, state in trainer.optimizer.state.items():
        found |= {f"{names[x]}/{key}": value.clone() for key, value in state.items()}
    return found


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, different

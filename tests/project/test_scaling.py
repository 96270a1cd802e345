"""docs/scaling.md has the tables of bench/models/scaling.py, which agree with numbers worked by hand."""

from pathlib import Path

import pytest

from bench.models.scaling import Machine, ModelShape, TrainingStep, tables
from lineate.models.presets import preset

ROOT = Path(__file__).parents[2]


def test_the_document_has_these_tables():
    assert tables() in (ROOT / "docs" / "scaling.md").read_text()


def test_numbers_worked_by_hand():
    kimi = ModelShape.of(preset("kimi-linear-48b"))
    step = TrainingStep(kimi, data=16, context=64)
    assert 48.5e9 < kimi.parameters < 49.5e9 and 3e9 < kimi.active + 163840 * 2304 < 3.6e9
    assert kimi.root == 2 * 163840 * 2304 + 2304
    assert step.gpus == 1024 and step.own_tokens == 16384
    assert step.memory["state"] == 16 * kimi.parameters / 1024
    assert step.memory["logits"] == 12 * 2**26 + 4 * 2304 * (16384 + 163840)  # in pieces of 2^26 logits
    # 20 layers: maps of 32 heads, 128 x 256 in float32, 3 inputs of 3 * 4096 channels in bfloat16; 7: 512 + 64 channels
    maps, halo, keys = 4 * 32 * 128 * 256, 2 * 3 * 3 * 4096, 2 * 16384 * 576
    assert step.context_bytes == 3 * 63 * (20 * (maps + halo) + 7 * keys)
    assert step.shard_bytes == pytest.approx((12 * (kimi.parameters - kimi.root) + 8 * kimi.root) * 1023 / 1024)
    # 7 layers of 32 heads, 192 + 128 channels, all of 2^20 tokens but half of the last segment; latents of 63 others
    attention = 7 * (2 * 32 * 320 * (2**20 - 2**13) + 63 * 2 * 512 * 32 * 256)
    assert kimi.forward_flops(2**20, 64)[2] == pytest.approx(attention)
    assert kimi.forward_flops(2**20)[2] == 7 * 32 * 320 * 2**20


def test_machine():
    machine = Machine(latency=1e-6)
    assert machine.seconds(9e11, 100, 8) == pytest.approx(2 + 3e-4)
    assert machine.seconds(8e11, 0, 64) == 2  # 8 networks of 50 GB/s
    assert machine.seconds(8e11, 100, 1) == 0

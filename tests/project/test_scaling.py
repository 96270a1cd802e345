"""docs/scaling.md has the tables of bench.models.scaling, which agree with numbers worked by hand and with results."""

import json
import math
import re
from dataclasses import fields
from pathlib import Path

import pytest

from bench.models.scaling import Cluster, ServingStep, TrainingStep, best_serving, best_training, tables
from bench.models.scaling_kernels import Kernels, RuleTime, arithmetic, measured, served_steps, slower, trained_steps
from bench.models.scaling_ranks import CONFIG, compare, fit, gloo_table, planned
from lineate.models.presets import PRESETS, preset
from lineate.models.sharding import rank_config, tensor_sizes
from lineate.planning import HARDWARE, Split, plan_flops, plan_memory, plan_training, read_model, split_model
from lineate.training.config import TrainConfig

ROOT = Path(__file__).parents[2]
KERNELS = Kernels(1e15, 5e14, 4e12, 1e-5, (RuleTime("kda", "forward", 4, 1e-9), RuleTime("kda", "forward", 100, 2e-9),
                                          RuleTime("kda", "forward+backward", 32, 5e-9)))  # fmt: skip


def page() -> str:
    return (ROOT / "docs" / "scaling.md").read_text()


@pytest.mark.slow
def test_the_document_has_these_tables() -> None:
    assert [name for name, table in tables().items() if table not in page()] == []


def test_the_document_has_the_measured_table() -> None:
    found = json.loads((ROOT / "bench/results/scaling-cpu-xeon.json").read_text())
    assert "\n".join(gloo_table(found)) in page()
    for x in found["results"]:
        assert x["weights_bytes"] == x["planned_weights_bytes"]
        wanted = planned(x["ranks"])
        for r in x["rows"]:
            assert (r["received_bytes"], r["calls"]) == (r["planned_bytes"], r["planned_calls"])
            assert (wanted[r["what"]].total, wanted[r["what"]].calls) == (r["planned_bytes"], r["planned_calls"])


def test_the_document_has_the_numbers_of_ranks_that_can_share_the_presets() -> None:
    sharing: dict[str, list[str]] = {}
    for name in PRESETS:
        sharing.setdefault(", ".join(map(str, tensor_sizes(preset(name), 256))), []).append(f"`{name}`")
    rows = [f"| {sizes} | {', '.join(names)} |" for sizes, names in sorted(sharing.items())]
    assert "\n".join(["| tensor ranks | presets |", "|---|---|", *rows]) in page()


def test_the_commands_that_train_on_many_ranks_are_accepted() -> None:
    found = re.findall(r"^torchrun (.*) -m lineate.cli train (.*?)(?:#.*)?$", page().replace("\\\n", ""), re.MULTILINE)
    assert len(found) >= 6
    for started, trained in found:
        launch, options = (dict(zip(x[::2], x[1::2], strict=True)) for x in (started.split(), trained.split()))
        types = {f"--{x.name}": type(x.default) for x in fields(TrainConfig)}
        given = {flag[2:]: types[flag](value) for flag, value in options.items()}
        config = TrainConfig(**given)
        ranks, shared = int(launch["--nproc-per-node"]) * int(launch.get("--nnodes", 1)), config.tensor * config.context
        assert ranks % shared == 0 and config.rows % (ranks // shared * config.accumulate) == 0, trained
        assert rank_config(preset(config.model), config.tensor)
        assert config.tensor == 1 or config.optimizer == "adamw"


def test_kernel_times_are_those_of_the_results() -> None:
    kernels = measured()
    text = " ".join(page().split())
    for shown in (f"{kernels.products / 1e12:.0f} TFLOP/s", f"{kernels.attention / 1e12:.0f} TFLOP/s", "4.24 TB/s"):
        assert shown in text
    assert f"{1e6 * kernels.launches:.0f} us of launches" in text and f"{slower():.2f} times as long" in text
    assert len(served_steps()) == 3 and [x["pattern"] for x in trained_steps()] == ["G", "K", "GGGA", "KKKM", "A"]
    linear = preset("kimi-linear-48b").linear
    assert linear is not None
    # 32 heads of 128 x 128: 100 are nearer than 4 in proportion
    assert KERNELS.rule("K", linear, 1000) == pytest.approx(1000 * 32 * 2e-9)
    assert KERNELS.rule("K", linear, 1000, "forward+backward") == pytest.approx(1000 * 32 * 5e-9)


def test_arithmetic_by_hand() -> None:
    """Kimi Linear: 20 layers of the rule, 7 of attention; a step of 8192 tokens in sequences of 4096."""
    model = read_model("kimi-linear-48b")
    got, flops = arithmetic(KERNELS, model, 8192, 4096, forwards=4), plan_flops(model)
    assert got["rules"] == pytest.approx(20 * 8192 * 32 * (5e-9 + 2e-9))
    attention = [x for x in flops.layers if x.letter == "M"]
    assert got["attention"] == pytest.approx(4 * 2 * sum(x.mixing(4096, "least") for x in attention) / 5e14)
    weights = sum(x.projections + x.feed for x in flops.layers)
    assert got["products"] == pytest.approx(8192 * (4 * weights + 3 * flops.head) / 1e15)
    assert got["memory"] == pytest.approx(4 * sum(plan_training(model, 8192).by_layer) / 4e12)


def test_a_training_step_by_hand() -> None:
    kimi = read_model("kimi-linear-48b")
    cluster = Cluster(HARDWARE["h200"], KERNELS, 2.0, 1e-6, 3e-6)
    step = TrainingStep(kimi, Split(2, 4, 8), 2**15, 16, cluster)
    rank = plan_memory(split_model(kimi, 2, 4))
    root = rank.embedding // 2 + rank.head // 2 + rank.norm // 2
    assert step.readers == 32 and step.memory["state"] == 16 * rank.parameters / 32
    assert step.shard_bytes == pytest.approx((12 * (rank.parameters - root) + 8 * root) * 31 / 32)
    assert step.rank.received.context > 3 * 3 * 20 * 4 * 16 * 128 * 256  # maps of 16 heads, three times
    # 16 sequences in 8 places: two one after another; tensor ranks are neighbours, context ranks every second
    sums = step.rank.received.sums + step.rank.received.logits + step.rank.received.shared
    assert step.parts["sums"] == pytest.approx(2 * (sums / 450e9 + (6 * 27 + 5) * 1e-6))
    assert step.parts["segments"] == pytest.approx(2 * (step.rank.received.context / 450e9 + 6 * 27 * 2 * 1e-6))
    shards = step.shard_bytes / (4 * 50e9) + (3 * 27 + 2) * 5 * 3e-6  # 4 of 8 GPUs of a node gather the same weights
    assert step.parts["shards"] == pytest.approx(2 * shards)
    assert step.rate == 16 * 2**15 / step.seconds
    hidden = sum(step.parts[x] for x in ("products", "attention", "rules", "memory"))
    expected = max(hidden, step.parts["shards"]) + step.parts["sums"] + step.parts["segments"]
    assert step.seconds == pytest.approx(expected)
    assert step.parts["rules"] == pytest.approx(
        2 * 2.0 * 20 * 2**13 * 16 * (5e-9 + 5 * 1e-9)
    )  # 16 heads: 4 are nearest


def test_a_serving_step_by_hand() -> None:
    cluster = Cluster(HARDWARE["h200"], KERNELS, 1.0, 1e-6, 3e-6)
    step = ServingStep(read_model("kimi-linear-48b"), Split(8, 1, 3), 2**16, cluster, 5)
    assert step.rows == 5 and step.rate == 3 * 5 / step.seconds
    assert step.parts["collectives"] == pytest.approx((2 * 27 + 2) * 3 * 1e-6)
    assert step.parts["link"] == pytest.approx(step.received.total / 450e9)
    assert step.parts["launches"] == pytest.approx(27 * 1e-5)
    assert step.parts["states"] == pytest.approx(
        5 * (2 * step.plan.memory + step.plan.conv + (2**16 + 1) * step.plan.cache_per_token) / 4e12
    )


@pytest.mark.cover
def test_what_does_not_fit_is_left_out() -> None:
    assert best_serving(read_model("qwen3-next-80b"), 1, 2**16) is None
    assert best_training(read_model("kimi-linear-48b"), 4, 2**15, 128) is None
    found = best_training(read_model("large"), 256, 2**15, 4)
    assert found is not None and found.split.replicas <= 4 and found.split.ranks == 256


def test_collectives() -> None:
    cluster = Cluster(near=1e-6, far=2e-6)
    assert cluster.seconds(9e11, 100, 8) == pytest.approx(2 + 3e-4)
    assert cluster.seconds(8e11, 0, 64) == 2  # 8 networks of 50 GB/s
    assert cluster.seconds(1e11, 10, 16, stride=8) == pytest.approx(2 + 10 * 4 * 2e-6)
    assert cluster.seconds(8e11, 100, 1) == 0


def test_the_fit_finds_time_and_rate() -> None:
    sums = {2**n: 1e-4 + 2 * (2**n - 2**n // 4) / 1e9 for n in range(10, 25, 2)}
    each, rate = fit(sums, 4)
    assert each == pytest.approx(1e-4, rel=1e-3) and rate == pytest.approx(1e9, rel=1e-3)
    rows = {
        name: {"received_bytes": 10**6, "calls": 10, "alone_seconds": 0.5, "seconds": 1.0}
        for name in ("prefill", "decode", "training")
    }
    got = compare({"ranks": 4, "weights_bytes": 0, "sums_seconds": sums, "calls": rows})
    assert math.isclose(got["rows"][0]["simulated_seconds"], 0.5 + 10 * 1e-4 + 1e-3, rel_tol=1e-3)
    assert got["planned_weights_bytes"] == plan_memory(split_model(read_model(CONFIG), tensor=4)).weights

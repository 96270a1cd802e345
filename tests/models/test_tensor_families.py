"""Checkpoints of all families shared out among ranks: each reads its slices, and together they equal one process."""

import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lineate.generation import generate
from lineate.models import HybridLM
from lineate.models.sharding import model_ranges, sum_shared_gradients
from lineate.parallel.tensor.ranks import Ranks
from lineate.quantised import FORMATS, QuantisedWeight
from tests.support.families import FAMILIES, LAYOUTS, VOCAB, build, rewrite
from tests.support.ranks import run_ranks

CHANGES: dict[str, dict[str, Any]] = {
    "kimi_linear": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "bailing_hybrid": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "mamba2": {"n_groups": 2},
    "granitemoehybrid": {"mamba_n_groups": 2},
    "bamba": {"mamba_n_groups": 2},
    "nemotron_h": {"n_groups": 2},
}
"""Sizes of tiny models that two ranks could not share otherwise."""


class Place(Ranks):
    """A rank that only loads."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        build(name, **CHANGES.get(name, {})).save_pretrained(path)
        return path

    return folder


@pytest.fixture(scope="module")
def wholes(folders: Callable[[str], Path]) -> Callable[[str], HybridLM]:
    return cache(lambda name: HybridLM.from_pretrained(folders(name), progress=False))


def check_shares(folder: Path, whole: HybridLM, rank: int, size: int) -> None:
    share = HybridLM.from_pretrained(folder, progress=False, ranks=Place(rank, size))
    ranges, found = model_ranges(whole, rank, size), share.state_dict()
    assert len(ranges) > 4
    for name, x in whole.state_dict().items():
        assert torch.equal(found[name], ranges[name].of(x) if name in ranges else x), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_reads_its_slices(
    family: str, folders: Callable[[str], Path], wholes: Callable[[str], HybridLM]
) -> None:
    for rank in range(2):
        check_shares(folders(family), wholes(family), rank, 2)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param(f, c, id=f"{f}-{n}", marks=() if "transposed" in n or "convolution" in n else pytest.mark.slow)
        for n, families, c in LAYOUTS
        for f in families
    ],
)
def test_of_every_layout(
    folders: Callable[[str], Path],
    wholes: Callable[[str], HybridLM],
    tmp_path: Path,
    name: str,
    change: Callable[[dict[str, Tensor], str], None],
) -> None:
    rewrite(folders(name), tmp_path, lambda tensors: change(tensors, name))
    check_shares(tmp_path, wholes(name), 1, 2)


@pytest.mark.parametrize("bits", ["int8", "int4", "bfloat16", "fp8"])
@pytest.mark.parametrize("stored", [False, True], ids=["rounded while loading", "stored"])
def test_quantised_weights(tmp_path: Path, bits: str, stored: bool) -> None:
    """A rank's quantised weights decode to slices of the whole model's; columns are whole groups."""
    group = FORMATS[bits].group
    sizes = {"hidden_size": 2 * group, "head_dim": group}
    linear = {"linear_key_head_dim": group, "linear_value_head_dim": group, "linear_num_value_heads": 4}
    experts = {"moe_intermediate_size": 2 * group, "shared_expert_intermediate_size": 2 * group}
    build("qwen3_5_moe", **sizes, **linear, **experts).save_pretrained(tmp_path / "plain")
    whole = HybridLM.from_pretrained(tmp_path / "plain", progress=False, weights=bits)
    folder, options = tmp_path / "plain", {"weights": bits}
    if stored:
        whole.save_pretrained(tmp_path / "quantised")
        folder, options = tmp_path / "quantised", {}
    for rank in range(2):
        share = HybridLM.from_pretrained(folder, progress=False, ranks=Place(rank, 2), **options)
        ranges, found, quantised = model_ranges(whole, rank, 2), share.state_dict(), 0
        for name, x in whole.state_dict().items():
            decoded = x.decoded() if isinstance(x, QuantisedWeight) else x
            own = found[name].decoded() if isinstance(found[name], QuantisedWeight) else found[name]
            quantised += isinstance(found[name], QuantisedWeight)
            wanted = ranges[name].of(decoded) if name in ranges else decoded
            assert torch.equal(own.float(), wanted.float()), name
        assert quantised > 10


# on ranks


def compare(folder: str) -> str:
    """Compare a rank's share with the whole model: logits, steps, greedy tokens, gradients; return what failed."""
    try:
        ranks = Ranks(dist.group.WORLD)  # type: ignore[arg-type]
        whole, share = (HybridLM.from_pretrained(folder, progress=False, ranks=x) for x in (None, ranks))
        ids = torch.randint(3, VOCAB, (2, 75), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            one, own = whole(ids), share(ids)
            close(own.logits, one.logits, "logits")
            for n in range(2):
                one, own = whole(ids[:, n : n + 1], one.state), share(ids[:, n : n + 1], own.state)
                close(own.logits, one.logits, "logits of a step")
            drawn = [torch.stack(list(generate(x, ids[:, :9], 32, stop=(), temperature=0.0))) for x in (whole, share)]
            assert torch.equal(*drawn), "greedy tokens"
        for model in (whole, share):
            model.train()
            (model.loss_sum(ids, ids) / ids.numel()).backward()
        sum_shared_gradients(share)
        ranges = model_ranges(whole, ranks.rank, ranks.size)
        gradients = {name: x.grad for name, x in share.named_parameters()}
        for name, x in whole.named_parameters():
            if x.grad is not None:
                got = gradients[name]
                assert got is not None, name
                close(got, ranges[name].of(x.grad) if name in ranges else x.grad, f"gradient of {name}")
    except Exception:
        return traceback.format_exc()
    return ""


def close(got: Tensor, wanted: Tensor, what: str) -> None:
    error = float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1))
    assert error <= 1e-5, f"{what}: {error:.1e}"


def work(names: list[str], folders: list[str]) -> dict[str, str]:
    dist.init_process_group("gloo")
    found: dict[str, str] = {}
    for name, folder in zip(names, folders, strict=True):
        if failed := compare(folder):
            found[name] = failed
            break  # the other rank may wait in the middle of it
    return found


QUICK = ("qwen3_next", "kimi_linear", "nemotron_h")
"""Families that have all that differs on ranks; the others are slow."""


@pytest.mark.cover
@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param([x for x in FAMILIES if x not in QUICK], marks=pytest.mark.slow)],
    ids=["some", "rest"],
)
def test_families_on_two_ranks_equal_one_process(folders: Callable[[str], Path], names: Sequence[str]) -> None:
    for found in run_ranks(2, work, list(names), [str(folders(name)) for name in names]):
        assert not found, "\n".join(f"{name}: {text}" for name, text in found.items())


QWEN = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
FOUR: dict[str, dict[str, Any]] = {
    **CHANGES,
    "qwen3_next": QWEN,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "olmo_hybrid": {"linear_num_key_heads": 4, "num_key_value_heads": 4},
    "mamba2": {"n_groups": 2, "num_heads": 8, "head_dim": 12},
    "granitemoehybrid": {"mamba_n_groups": 2, "mamba_n_heads": 8, "mamba_d_head": 12},
    "bamba": {"mamba_n_groups": 4, "mamba_n_heads": 8, "mamba_d_head": 12},
    "nemotron_h": {"n_groups": 4, "mamba_num_heads": 8},
}
"""Sizes that four ranks can share."""


@pytest.mark.slow
def test_families_on_four_ranks_equal_one_process(tmp_path: Path) -> None:
    names = list(FAMILIES)
    for name in names:
        build(name, **FOUR.get(name, {})).save_pretrained(tmp_path / name)
    for found in run_ranks(4, work, names, [str(tmp_path / name) for name in names]):
        assert not found, "\n".join(f"{name}: {text}" for name, text in found.items())

"""lineate.planning of models that ranks share: bytes are those that ranks allocate and receive; what fits where."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lineate.models import (
    AttentionConfig,
    ExpertsConfig,
    FeedConfig,
    HybridConfig,
    HybridLM,
    LatentConfig,
    LinearConfig,
    MambaConfig,
    MemoryConfig,
)
from lineate.models.nbytes import weight_bytes
from lineate.models.sharding import rank_config, share_out_model, sum_shared_gradients
from lineate.parallel.context import balance
from lineate.parallel.context.balance import even_parts, plan_moves
from lineate.parallel.tensor.ranks import Ranks
from lineate.planning import (
    HARDWARE,
    Model,
    Split,
    decode_received,
    make_hardware,
    plan_flops,
    plan_memory,
    plan_training,
    prefill_received,
    read_model,
    split_model,
    time_bounds,
    tokens_per_second,
    training_received,
    variants,
)
from lineate.quantised.which import quantised_parameters
from lineate.training.context import context_parallel
from lineate.training.optim import make_optimizer
from tests.support.marks import slow_but
from tests.support.ranks import run_ranks
from tests.support.segments import received_bytes

RANKS = 2
TOKENS = 12
BASE = HybridConfig(
    vocab_size=64, hidden_size=24, n_layers=2, pattern="GA",
    linear=LinearConfig(2, 4, 8, 6, decay_rank=5, gate_rank=7),
    mamba=MambaConfig(4, 5, 7),
    memory=MemoryConfig(2, 16, chunk=4, window=5),
    attention=AttentionConfig(4, 1, 10, rotary_dim=4),
    latent=LatentConfig(4, rank=9, nope_dim=6, rope_dim=4, value_dim=5, rope_theta=100.0),
    feed=FeedConfig(20),
)  # fmt: skip
EXPERTS = ExpertsConfig(4, 2, 8, shared_size=12)
ATTENTION = AttentionConfig(4, 2, 10, rotary_dim=4, qk_norm="full")
CONFIGS = {
    "every rule": replace(BASE, n_layers=8, pattern="LRDGKSAM", tie_embeddings=True),
    "memories that learn": replace(BASE, n_layers=5, pattern="TPNCE"),
    "experts": replace(BASE, n_layers=3, pattern="KGA", experts=EXPERTS, dense_layers=(0,)),
    "norms of all heads": replace(BASE, norm_after="A", attention=ATTENTION),
    "mixers alone": replace(BASE, pattern="SA", mixer_only=(0,)),
    "a vocabulary that does not divide": replace(BASE, vocab_size=61),
}  # fmt: skip


def model_of(config: HybridConfig, dtype: torch.dtype = torch.float32) -> Model:
    return Model("planned", config, dtype, "config")


@contextmanager
def counting() -> Iterator[list[int]]:
    """Add up the bytes that this rank receives: a sum comes in two halves, each without the rank's own part."""
    received: list[int] = []

    def size(group: Any) -> int:
        return dist.get_world_size(group)

    def reduced(run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(x: Tensor, *args: Any, group: Any = None, **options: Any) -> Any:
            received.append(2 * (x.nbytes - x.nbytes // size(group)))
            return run(x, *args, group=group, **options)

        return counted

    def gathered(run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(parts: list[Tensor], x: Tensor, group: Any = None, **options: Any) -> Any:
            received.append(x.nbytes * (size(group) - 1))
            return run(parts, x, group=group, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", reduced(dist.all_reduce))
        patch.setattr(dist, "all_gather", gathered(dist.all_gather))
        with received_bytes(received):
            yield received


def start() -> None:
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def tensor_rank(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return what this rank allocates and receives, for each of the configurations."""
    start()
    ranks, found = Ranks(dist.group.WORLD), {}
    for name in names:
        torch.manual_seed(0)
        config = CONFIGS[name]
        model = share_out_model(HybridLM(config), ranks)
        ids = torch.randint(config.vocab_size, (3, TOKENS), generator=torch.Generator().manual_seed(1))
        one: dict[str, Any] = {"weights": sum(x.nbytes for x in [*model.parameters(), *model.buffers()])}
        with torch.no_grad(), counting() as received:
            state = model(ids, last_only=True).state
            one["prefill"], one["prefill calls"] = sum(received), len(received)
            one["state"] = sum(layer[key].nbytes for layer in state.layers for key in layer.names)
            received.clear()
            model(ids[:, :1], state=state)
            one["decode"], one["decode calls"] = sum(received), len(received)
        for half in (False, True):
            with counting() as received, torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = model.loss_sum(ids, ids)
            with counting() as more:
                loss.backward()
                sum_shared_gradients(model)
            one[f"training, {'half' if half else 'single'}"] = sum(received) + sum(more)
            one["training calls"] = len(received) + len(more)
        optimizer = make_optimizer(model, "adamw", 1e-3, 0.1, (0.9, 0.95))
        optimizer.step()
        states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        one["optimizer"] = sum(x.nbytes for x in states)
        one["gradients"] = sum(x.grad.nbytes for x in model.parameters() if x.grad is not None)
        found[name] = one
    return found


@pytest.fixture(scope="module")
def allocated() -> list[dict[str, dict[str, Any]]]:
    """The bytes that two ranks allocate and receive."""
    return run_ranks(RANKS, tensor_rank, list(CONFIGS))


@pytest.mark.cover
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_of_a_rank_are_those_allocated(name: str, allocated: list[dict[str, dict[str, Any]]]) -> None:
    model = split_model(model_of(CONFIGS[name]), tensor=RANKS)
    plan, training, got = plan_memory(model), plan_training(model, 3 * TOKENS, "float32"), allocated[0][name]
    assert got["weights"] == plan.weights == training.parameters
    assert got["state"] == plan.state(3, TOKENS)
    assert (got["gradients"], got["optimizer"]) == (training.gradients, training.optimizer)
    assert max(x[name]["weights"] for x in allocated) == plan.weights  # no rank has more
    assert all(x[name]["state"] == plan.state(3, TOKENS) for x in allocated)


@pytest.mark.cover
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_that_a_rank_receives_are_those_sent(name: str, allocated: list[dict[str, dict[str, Any]]]) -> None:
    config = CONFIGS[name]
    plan = plan_memory(split_model(model_of(config), tensor=RANKS))
    for got in (x[name] for x in allocated):
        prefill, decode = prefill_received(plan, 3, TOKENS), decode_received(plan, 3)
        assert (got["prefill"], got["prefill calls"]) == (prefill.total, prefill.calls)
        assert (got["decode"], got["decode calls"]) == (decode.total, decode.calls)
        step = training_received(plan, 3 * TOKENS, TOKENS, half=False)
        assert (got["training, single"], got["training calls"]) == (step.total, step.calls)
        half = training_received(plan, 3 * TOKENS, TOKENS, half=True).total
        # On a CPU norms and experts give float32 under autocast too, so that more sums have 4 bytes a number.
        entered = sum(
            (2 - (i in config.mixer_only)) * (x not in config.norm_after) for i, x in enumerate(config.letters)
        )
        wider = 1 + entered + sum(map(config.has_experts, range(config.n_layers)))
        assert got["training, half"] == half + wider * 2 * 3 * TOKENS * config.hidden_size


SPLIT = {"rules": replace(BASE, n_layers=6, pattern="LRDGKS"), "attention": replace(BASE, pattern="AM")}


def context_rank(names: list[str], least: int) -> dict[str, list[int]]:
    """Return the bytes and the collectives of this rank in the forward and the backward of its part of 3 sequences."""
    start()
    balance.LEAST_PAIRS = least
    found = {}
    for name in names:
        torch.manual_seed(0)
        model = HybridLM(SPLIT[name])
        context_parallel(model, dist.group.WORLD)
        ids = torch.randint(BASE.vocab_size, (3, TOKENS // RANKS))
        with counting() as received:
            out = model(ids).logits
            forward, calls = sum(received), len(received)
            out.sum().backward()
            found[name] = [forward, sum(received) - forward, calls]
    return found


@pytest.mark.cover
@pytest.mark.parametrize("least", [0, balance.LEAST_PAIRS], ids=["queries move", "queries stay"])
def test_bytes_that_cross_segments_are_those_sent(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "LEAST_PAIRS", least)
    ranks = run_ranks(RANKS, context_rank, list(SPLIT), least)
    for name, config in SPLIT.items():
        plan = plan_memory(split_model(model_of(config), context=RANKS))
        prefill, step = (
            prefill_received(plan, 3, TOKENS),
            training_received(plan, 3 * TOKENS // RANKS, TOKENS, half=False),
        )
        got = [x[name] for x in ranks]
        assert max(forward for forward, _, _ in got) == prefill.total  # one rank takes queries, the other gives them
        assert max(forward + backward for forward, backward, _ in got) == step.context
        assert {calls for _, _, calls in got} == {prefill.calls}
        assert step.gradients == 2 * (4 * plan.parameters - 4 * plan.parameters // RANKS)


SMALL = replace(
    BASE, hidden_size=64, n_layers=3, pattern="KGA", linear=LinearConfig(4, 4, 32, 32),
    attention=AttentionConfig(4, 1, 32), feed=FeedConfig(128), experts=ExpertsConfig(4, 2, 64, shared_size=64),
    dense_layers=(0,),
)  # fmt: skip


def small_rank(folder: str) -> dict[str, int]:
    """Return the bytes of this rank's weights, read from a folder in each format."""
    start()
    ranks = Ranks(dist.group.WORLD)
    made = {
        form: HybridLM.from_pretrained(folder, dtype=torch.float32, progress=False, weights=form, ranks=ranks)
        for form in ("bfloat16", "int8", "int4", "fp8")
    }
    found = {}
    for form, model in made.items():
        small = quantised_parameters(model)
        plain = sum(x.nbytes for name, x in model.state_dict().items() if name not in small)
        found[form] = plain + sum(x.nbytes_kept for x in small.values())
    return found


@pytest.mark.cover
def test_bytes_of_quantised_weights_are_those_allocated(tmp_path: Path) -> None:
    HybridLM(SMALL).save_pretrained(tmp_path)
    for got in run_ranks(RANKS, small_rank, str(tmp_path)):
        for form, nbytes in got.items():
            whole = read_model(tmp_path, "float32", weights=form)
            assert nbytes == plan_memory(split_model(whole, tensor=RANKS)).weights < plan_memory(whole).weights


# ---- published models


HELD = {"qwen3-next-80b": 8, "kimi-linear-48b": 8, "qwen3-5-27b": 4, "olmo-hybrid-7b": 2, "medium": 2}


@pytest.mark.cover
@pytest.mark.parametrize("name", slow_but(list(HELD), list(HELD)[:2]))
@pytest.mark.parametrize("weights", [None, "int8", "int4", "fp8"])
def test_bytes_of_a_published_model(name: str, weights: str | None) -> None:
    """A rank's bytes are those of HybridLM of its configuration, and all ranks' are the model's and their copies."""
    model, ranks = read_model(name, "bf16"), HELD[name]
    model = model if weights is None else replace(model, weights=weights)
    rank, whole = plan_memory(split_model(model, tensor=ranks)), plan_memory(model)
    config = rank_config(model.config, ranks)
    with torch.device("meta"):
        empty = HybridLM(config)
    assert rank.parameters == sum(x.numel() for x in empty.parameters())
    assert rank.state(3, 1000) == plan_memory(replace(model, config=config)).state(3, 1000)
    assert rank.weights == weight_bytes(empty, torch.bfloat16, model.form)
    assert whole.weights <= ranks * rank.weights < 1.02 * whole.weights
    # Heads of keys and values that there are too few of, and latents, are on several ranks; memories never are.
    assert ranks * rank.memory == whole.memory
    assert whole.cache_per_token <= ranks * rank.cache_per_token <= ranks * whole.cache_per_token


def test_a_rank_by_hand() -> None:
    """Qwen3-Next on 8 ranks: 2 key and 4 value heads of 128, 2 query heads and 1 of keys and values of 256."""
    plan = plan_memory(split_model(read_model("qwen3-next-80b"), tensor=8))
    assert plan.memory == 36 * 4 * 128 * 128 * 4
    assert plan.conv == 36 * (2 * 2 * 128 + 4 * 128) * 3 * 2
    assert plan.cache_per_token == 12 * 2 * 1 * 256 * 2  # a quarter of the ranks have each of the 2 heads
    assert plan.embedding == plan.head == 151936 // 8 * 2048 * 2
    received, sent = decode_received(plan, batch=5), 5 * 2048 * 2
    assert received.sums == (2 * 48 + 1) * 2 * sent * 7 // 8 and received.logits == 7 * 5 * 151936 // 8 * 2
    assert received.calls == 2 * 48 + 2 and received.total == received.sums + received.logits
    assert prefill_received(plan, 5, 100).sums == 100 * received.sums
    assert prefill_received(plan, 5, 100).logits == received.logits
    whole = plan_memory(read_model("qwen3-next-80b"))
    assert (
        decode_received(whole).total == prefill_received(whole, 2, 9).total == training_received(whole, 9, 9).total == 0
    )


def test_context_ranks_by_hand() -> None:
    """Kimi Linear on 4 context ranks: the formulas of docs/scaling.md."""
    plan = plan_memory(split_model(read_model("kimi-linear-48b"), context=4))
    maps, halo = 4 * 32 * 128 * (128 + 128), 2 * 3 * 3 * 32 * 128
    latents = 7 * 2 * (512 + 64) * 2**16 // 4
    queries = max(move.queries for move in plan_moves(even_parts(2**16, 4)))  # a rank takes those of another
    assert queries == pytest.approx(2**16 / 4 * (4 - 13**0.5), rel=0.05)
    moved = 7 * 2 * 32 * (128 + 64) * queries
    assert prefill_received(plan, 1, 2**16).total == 3 * (20 * (maps + halo) + latents + 40) + moved
    both = plan_memory(split_model(read_model("kimi-linear-48b"), tensor=2, context=4))
    divided = 3 * (20 * (maps + halo) // 2 + latents + 40) + moved // 2  # latents are whole on both
    assert prefill_received(both, 1, 2**16).context == divided
    assert decode_received(plan).total == 0


# ---- times


def test_the_slowest_of_three_limits_a_rank() -> None:
    model = split_model(read_model("qwen3-next-80b"), tensor=8)
    plan = plan_memory(model)
    steps = {}
    for name, numbers in {
        "memory bandwidth": (1e9, 1e18, 1e18), "matrix rate": (1e18, 1e9, 1e18), "link": (1e18, 1e18, 1e6)
    }.items():  # fmt: skip
        machine = make_hardware(10**12, numbers[0], numbers[1], link=numbers[2])
        steps[name] = {x.what: x for x in time_bounds(plan, machine, 2, 4096)}
        assert {x.limit for x in steps[name].values()} == {name}
        assert tokens_per_second(plan, machine, 2, 4096) == 2 / steps[name]["decode"].seconds
    assert steps["link"]["decode"].seconds == decode_received(plan, 2).total / 1e6
    assert steps["link"]["prefill"].seconds == prefill_received(plan, 2, 4096).total / 1e6
    assert steps["matrix rate"]["decode"].seconds == 2 * plan_flops(model).decode(4096, "least") / 1e9
    quick = make_hardware(10**12, 1e9, 1e18)  # without a rate, what is received takes no time
    assert [x.seconds for x in time_bounds(plan, quick, 2, 4096)] == [
        x.seconds for x in steps["memory bandwidth"].values()
    ]


def test_links_within_and_between_nodes() -> None:
    h200 = HARDWARE["h200"]
    assert h200.link_rate(8) == h200.link_rate(2, 4) == 450e9
    assert h200.link_rate(64) == 400e9  # all 8 networks of a node bring what its ranks need
    assert h200.link_rate(16, 8) == 50e9  # one rank of a node
    assert h200.link_rate(4, 4) == 100e9
    assert HARDWARE["cpu"].link_rate(2) == 1.25e9


def test_context_ranks_share_a_prefill_and_not_a_step() -> None:
    model, machine = read_model("qwen3-5-27b"), make_hardware(10**12, 1e18, 1e12)
    one, four = (plan_memory(split_model(model, context=c)) for c in (1, 4))
    alone, shared = ({x.what: x for x in time_bounds(x, machine, 1, 2**16)} for x in (one, four))
    assert shared["prefill"].flops == -(-alone["prefill"].flops // 4)
    assert shared["decode"] == alone["decode"] and four.total(1, 2**16) == one.total(1, 2**16)


# ---- what does not divide


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"tensor": 3}, r"tensor must be one of 1, 2, 4, 8, 16 for this model, got 3: .*key heads = 16, got 3$"),
        ({"tensor": 0}, "tensor must be a whole number of at least 1, got 0"),
        ({"replicas": 2**21}, "replicas must be at most 1,048,576, got 2,097,152"),
        ({"context": True}, "context must be a whole number of at least 1, got True"),
    ],
)
def test_sizes_that_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_model(read_model("qwen3-next-80b"), **sizes)


def test_memories_that_learn_have_whole_sequences() -> None:
    with pytest.raises(ValueError, match=r"context must be 1 for this model, got 2: .*TTTLinear"):
        split_model(read_model("small", pattern="TA"), context=2)
    with pytest.raises(ValueError, match="model must be whole, got small, one of 2 tensor ranks"):
        split_model(split_model(read_model("small"), tensor=2), tensor=2)


def test_other_mixers_of_a_rank() -> None:
    """The variants of a rank have a rank's heads."""
    rank = split_model(read_model("kimi-linear-48b"), tensor=8)
    for model in variants(rank).values():
        assert model.split == Split(8) and model.config.linear.value_heads == 4
        assert plan_memory(model).weights < plan_memory(read_model("kimi-linear-48b")).weights / 7

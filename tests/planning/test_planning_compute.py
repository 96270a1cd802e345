"""lineate.planning: operations equal torch's count, bounds are below measured times, and the memory of training."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lineate.forms.chunkwise import READS, run_forward
from lineate.layers import lact, least_squares, titans, ttt
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
    preset,
)
from lineate.models.hybrid import make_mixer
from lineate.planning import (
    DTYPES,
    HARDWARE,
    Model,
    decode_bytes,
    find_hardware,
    from_numbers,
    make_hardware,
    plan_flops,
    plan_memory,
    plan_training,
    read_model,
    several,
    time_bounds,
    tokens_per_second,
)
from lineate.planning.compute import rule_flops
from lineate.planning.hardware import bound, training_bound
from lineate.torch_ops.chunk_op import OPTIONS, empty_outputs
from lineate.torch_ops.schema import Flat
from lineate.training.optim import make_optimizer
from tests.support.odd_models import EXPERTS, odd

RESULTS = Path(__file__).parents[2] / "bench" / "results"

# ---- operations


def inside(*arguments: Any, out_val: Any) -> int:
    """Return torch's count of the operations that the chunkwise op runs."""
    inputs, options = Flat(READS, OPTIONS).restore(arguments)
    outputs = empty_outputs(inputs, options, arguments[-1])
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        run_forward(inputs, options, outputs)
    return counter.get_total_flops()


def in_place_flop(_: Any, left: torch.Size, right: torch.Size, **options: Any) -> int:
    return 2 * math.prod(left) * right[-1]


inside._get_raw = True  # type: ignore[attr-defined]  # it takes tensors, not their shapes
IN_PLACE = {torch.ops.aten.baddbmm_: in_place_flop}  # the counter only knows baddbmm


def counted(call: Any) -> tuple[int, Any]:
    mapping = {torch.ops.lineate.chunkwise: inside, **IN_PLACE}
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=mapping) as found:
        out = call()
    return found.get_total_flops(), out


FULL = dict(
    vocab_size=50, hidden_size=96, linear=LinearConfig(2, 4, 48, 64), memory=MemoryConfig(3, 32, chunk=16),
    mamba=MambaConfig(6, 40, 24, groups=2),
    attention=AttentionConfig(6, 2, 40, rotary_dim=16), feed=FeedConfig(200),
    latent=LatentConfig(4, rank=64, nope_dim=32, rope_dim=16, value_dim=24),
)  # fmt: skip


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("experts", [None, EXPERTS, replace(EXPERTS, kind="relu2")], ids=["dense", "experts", "relu2"])
@pytest.mark.parametrize("letter", "LRDGKSAM")
def test_flops_are_those_that_torch_counts(letter: str, experts: Any) -> None:
    """They run in float64, which plain torch computes in chunks of 64, and the counter sees everything."""
    config = HybridConfig(**FULL, n_layers=1, pattern=letter, experts=experts)  # type: ignore[arg-type]
    model, plan = HybridLM(config).double().eval(), plan_flops(Model(letter, config, torch.float32, "config"))
    for tokens in (1, 3, 65, 150):
        ids = torch.randint(50, (1, tokens))
        found, out = counted(lambda ids=ids: model(ids))
        assert plan.forward(tokens, tokens) == pytest.approx(found, rel=0.005)
        found, _ = counted(lambda ids=ids, out=out: model(ids[:, :1], state=out.state))
        assert plan.decode(tokens) == pytest.approx(found, rel=0.005)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("letter", "AM")
def test_flops_of_a_training_step(letter: str, recompute: bool) -> None:
    config = HybridConfig(**FULL, n_layers=2, pattern=letter)  # type: ignore[arg-type]
    model, ids = HybridLM(config).double(), torch.randint(50, (1, 100))
    for block in model.layers:
        block.recompute = recompute
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as found:
        model(ids, labels=ids).loss.backward()
    plan = plan_flops(Model(letter, config, torch.float32, "config"))
    again = 2 * 100 * 2 * 96 * 200 if recompute else 0  # a block's last product is not computed again
    assert 100 * plan.training(100, recompute) - again == found.get_total_flops()


def test_flops_of_a_model_add_up() -> None:
    square = 32 * 128 * 128
    assert [rule_flops(x, LinearConfig(16, 32, 128, 128)) // square for x in "RDGK"] == [4, 6, 6, 6]
    plan = plan_flops(read_model("qwen3-next-80b"))
    active = plan_memory(plan.model).active_parameters - 151936 * 2048  # without the embedding, which is looked up
    assert plan.decode(1, "least") == pytest.approx(2 * active, rel=0.02)  # 2 per parameter, and a little for the state
    assert plan.prefill(4096) == plan.forward(4096, 1) / 4096
    blocks = sum(layer.forward(4096) for layer in plan.layers) / 4096
    assert plan.training(4096) == 3 * (blocks + plan.head)
    assert plan.training(4096, recompute=True) == 4 * blocks + 3 * plan.head
    for tokens in (64, 1000, 100_000):
        assert plan.forward(tokens, 1, "least") < plan.forward(tokens, 1)
    grown = [layer.decode(10**6) - layer.decode(0) for layer in plan.layers]
    assert [bool(n) for n in grown] == [letter == "A" for letter in plan.model.config.letters]
    with pytest.raises(ValueError, match="convention must be one of executed, least, got 'most'"):
        plan.prefill(10, "most")
    with pytest.raises(ValueError, match="tokens must be a whole number of at least 1, got 0"):
        plan.prefill(0)


MEMORIES = {
    "T": MemoryConfig(3, 32), "P": MemoryConfig(3, 16, chunk=8), "N": MemoryConfig(3, 32), "E": MemoryConfig(3, 24),
    "N, mlp": MemoryConfig(3, 16, titans="mlp"), "C": MemoryConfig(3, 32, chunk=64, window=40),
    "C, no window": MemoryConfig(3, 32, chunk=16, window=0),
}  # fmt: skip


@pytest.mark.parametrize("name", MEMORIES)
def test_flops_of_memories_that_learn(name: str) -> None:
    config = HybridConfig(**(FULL | {"memory": MEMORIES[name]}), n_layers=1, pattern=name[0])  # type: ignore[arg-type]
    model, plan = HybridLM(config).double().eval(), plan_flops(Model(name, config, torch.float32, "config"))
    for tokens in (1, 3, 64, 70, *([600] if name == "C" else [])):
        ids = torch.randint(50, (1, tokens))
        found, out = counted(lambda ids=ids: model(ids))
        assert plan.forward(tokens, tokens) == pytest.approx(found, rel=0.005)
        found, _ = counted(lambda ids=ids, out=out: model(ids[:, :1], state=out.state))
        assert plan.decode(tokens) == pytest.approx(found, rel=0.005)
        assert plan.forward(tokens, tokens, "least") < 1.2 * plan.forward(tokens, tokens)


def test_chunks_are_the_mixers_own() -> None:
    config = odd("TPNCE", memory=MemoryConfig(3, 10))
    costs = ttt.TTT_LINEAR_COSTS, ttt.TTT_MLP_COSTS, titans.COSTS, lact.COSTS, least_squares.COSTS
    for letter, each in zip("TPNCE", costs, strict=True):
        assert make_mixer(config, letter).chunk == each.chunk, letter


# ---- times: no bound is above what was measured on an H200


def measured(file: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / file).read_text())["results"]


SCALED = dict(vocab_size=8192, hidden_size=1024, n_layers=8)  # bench/models/cpu.py
BENCHED = {
    "GGGA": HybridConfig(
        **SCALED, pattern="GGGA", linear=LinearConfig(8, 16, 128, 128), attention=AttentionConfig(8, 2, 128),
        experts=ExpertsConfig(32, 4, 256, shared_size=256, shared_gate=True),
    ),
    "KKKM": HybridConfig(
        **SCALED, pattern="KKKM", linear=LinearConfig(16, 16, 128, 128), feed=FeedConfig(2816), dense_layers=(0,),
        latent=LatentConfig(16, rank=256, nope_dim=64, rope_dim=32, value_dim=64),
        experts=ExpertsConfig(32, 4, 256, shared_size=256, scores="sigmoid"),
    ),
}  # fmt: skip


def test_no_bound_of_a_model_is_above_a_measured_time() -> None:
    seen = set()
    for row in measured("models-gpu-h200.json"):
        what, *numbers = row["what"].replace(" x ", " ").replace("rows after ", "").split()
        batch, tokens = map(int, numbers)
        model = Model(row["model"], BENCHED[row["model"]], torch.bfloat16, "config")
        limits = {x.what: x for x in time_bounds(model, HARDWARE["h200"], batch, tokens)}
        times = [row[who] / 1e3 for who in ("lineate", "transformers", "graph") if who in row]
        assert 0 < limits[what].seconds <= min(times)
        seen.add((row["model"], what, limits[what].limit))
    assert {x[1:] for x in seen} == {("prefill", "matrix rate"), ("decode", "memory bandwidth")}


def test_no_bound_of_a_rule_is_above_a_measured_time() -> None:
    letters, checked = {"linear": "L", "delta": "D", "gdn": "G", "kda": "K"}, 0
    for row in measured("gpu-h200.json"):
        b, t, h, hv, d = row["b"], row["t"], row["h"], row["hv"], 128
        flops = b * t * rule_flops(letters[row["rule"]], LinearConfig(h, hv, d, d)) * (3 if "+" in row["what"] else 1)
        moved = b * t * 2 * (2 * h * d + 2 * hv * d)  # q, k, v, o in 16 bit
        if row["what"] == "decode":
            moved += 2 * b * hv * d * d * 4
        if row["who"] == "sdpa":
            config = HybridConfig(1, 1, 1, "A", attention=AttentionConfig(hv, hv, d), feed=FeedConfig(1))
            flops = b * plan_flops(Model("x", config, torch.bfloat16, "config")).layers[0].mixing(t, "least")
        least = bound(row["what"], flops, moved, HARDWARE["h200"], torch.bfloat16)
        assert least.seconds <= min(row["event_ms"], row["graph_ms"]) / 1e3, row["case"]
        checked += 1
    assert checked > 20


@pytest.mark.cover
def test_a_step_of_training_is_bounded_and_takes_the_planned_memory() -> None:
    """Packed sequences of 4096 run under bfloat16 autocast with AdamW. Kernels need a little more than what is kept."""
    header = json.loads((RESULTS / "train-h200.json").read_text())["header"]
    for row in measured("train-h200.json"):
        model = read_model(preset("compact", pattern=row["pattern"]))
        least = training_bound(plan_memory(model), HARDWARE["h200"], header["tokens"], header["length"])
        assert 0.2 * row["ms"] / 1e3 < least.seconds < row["ms"] / 1e3
        part = plan_training(model, header["tokens"]).total() / 2**20 / row["peak_mib"]
        assert (0.92 if "A" in row["pattern"] else 0.975) < part <= 1, (row["pattern"], part)


def test_which_limit_binds() -> None:
    hardware = make_hardware(10**9, bandwidth=1e9, flops=1e12)
    one = bound("x", 10**12, 10**9 + 1, hardware, torch.bfloat16)
    assert (one.limit, one.seconds) == ("memory bandwidth", 1.000000001)
    assert bound("x", 10**12, 10**9 - 1, hardware, torch.float32).limit == "matrix rate"
    cached = replace(hardware, cache_bytes=10**9)
    assert bound("x", 1, 10**9 + 5, cached, torch.float32).moved == 5
    assert [x.what for x in time_bounds(read_model("tiny"), HARDWARE["cpu"])] == ["prefill", "decode", "training step"]
    for short, found in HARDWARE.items():
        assert find_hardware(short.upper()) is find_hardware(found.name) is found
        assert all(found.rate(dtype) > 0 for dtype in DTYPES.values())
        for x in time_bounds(read_model("qwen3-next-80b"), found, 4, 1000):
            assert x.seconds > 0 and x.limit in ("memory bandwidth", "matrix rate") and "GFLOP" in x.detail
    with pytest.raises(ValueError, match=r"hardware must be one of h100, .* got 'tpu'"):
        find_hardware("tpu")
    with pytest.raises(ValueError, match="bandwidth must be above 0, got 0"):
        make_hardware(1, 0, 1)


def test_a_step_on_many_short_texts_is_no_long_text() -> None:
    plan, machine = plan_memory(read_model("tiny", pattern="A")), HARDWARE["h200"]
    assert training_bound(plan, machine, 8192, 8192) == time_bounds(plan, machine, 1, 8192)[-1]
    assert training_bound(plan, machine, 2**20, 1024).flops == time_bounds(plan, machine, 1024, 1024)[-1].flops
    assert training_bound(plan, machine, 2**20, 1024).flops < time_bounds(plan, machine, 1, 2**20)[-1].flops / 20
    usual, again = (training_bound(plan, machine, 2**20, 1024, recompute=x).flops for x in (False, True))
    assert usual < again < 4 / 3 * usual  # the head is not run again
    full = training_bound(plan, machine, 2**20, 1024, precision="float32")
    assert full.seconds == pytest.approx(2 * training_bound(plan, machine, 2**20, 1024).seconds, rel=0.01)


@pytest.mark.parametrize("letter", "DGK")
def test_no_program_needs_fewer_operations_than_the_least(letter: str) -> None:
    plan = plan_flops(read_model("tiny", pattern=letter))
    x = plan.model.config.linear
    assert x is not None
    k, v, heads = x.key_dim, x.value_dim, x.value_heads
    for tokens in (1, 2, k // 2, k, 3 * k):
        write, pairs = 2 * tokens * k * v, tokens * (tokens + 1) // 2
        least = plan.layers[0].mixing(tokens, "least")
        assert heads * write < least <= heads * (write + 4 * pairs * (k + v))  # all tokens as one chunk
        assert plan.layers[0].mixing(tokens + 1, "least") > least
    long = plan.layers[0].mixing(10**6, "least")
    assert long == pytest.approx(10**6 * heads * 6 * k * v, rel=1e-4)
    assert plan.prefill(1, "least") < plan.prefill(1)


def test_more_rows_touch_more_experts() -> None:
    plan = plan_memory(read_model("qwen3-next-80b"))
    expected = [decode_bytes(plan, rows, 10, "expected").weights for rows in (1, 2, 64, 4096)]
    assert expected == sorted(expected)
    row = 2048 * 2
    assert expected[0] - row == decode_bytes(plan, 64, 10).weights - 64 * row  # at least the weights of one row
    assert expected[-1] - 4096 * row == plan.weights - plan.embedding  # in the end, all weights


# ---- training


def saved(model: HybridLM, batch: int, tokens: int) -> tuple[int, int]:
    """Return the bytes that the backward of a loss keeps: all except the logits, and the logits."""
    own = {x.untyped_storage().data_ptr() for x in [*model.parameters(), *model.buffers()]}
    found: dict[int, tuple[int, bool, Tensor]] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            logits = x.shape[-1:] == (model.config.vocab_size,) and x.is_floating_point()
            found[storage.data_ptr()] = storage.nbytes(), logits, x
        return x

    ids = torch.randint(model.config.vocab_size, (batch, tokens))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(ids, labels=ids).loss
    sums = tuple(sum(n for n, logits, _ in found.values() if logits is which) for which in (False, True))
    del loss
    return sums[0], sums[1]


TRAINED = [
    *[("tiny", pattern) for pattern in ("G", "K", "A", "L", "R", "D", "M", "GGGA", "KKKM")],
    ("small", "GGGA"),
]


@pytest.mark.parametrize(("size", "pattern"), TRAINED)
def test_activations_are_what_autograd_saves(size: str, pattern: str) -> None:
    """They are float32 on a CPU, whose kernels save what the GPU's do."""
    config = preset(size, pattern=pattern, vocab_size=251)
    plan = plan_training(Model(size, config, torch.float32, "config"), 2 * 192, "float32")
    blocks, logits = saved(HybridLM(config), 2, 192)
    assert plan.activations == pytest.approx(blocks, rel=0.02)
    assert plan.logits == pytest.approx(3 * logits, rel=0.02)  # two gradients are as large
    assert plan.activations == sum(plan.by_layer) + 2 * 192 * (8 + 8 * config.hidden_size)


SPARSE = (
    odd("SAG", mixer_only=(0, 2), feed=FeedConfig(90, "relu2"), residual_scale=0.5),
    odd("GS", experts=replace(EXPERTS, kind="relu2"), feed=None, mixer_only=(1,)),
)
"""Models with layers without a feed-forward, or feed-forwards without a gate."""


@pytest.mark.parametrize("config", SPARSE)
def test_flops_without_feed_forwards_and_gates(config: HybridConfig) -> None:
    model, plan = HybridLM(config).double().eval(), plan_flops(Model("", config, torch.float32, "config"))
    ids = torch.randint(50, (1, 65))
    found, out = counted(lambda: model(ids))
    assert plan.forward(65, 65) == pytest.approx(found, rel=0.005)
    found, _ = counted(lambda: model(ids[:, :1], state=out.state))
    assert plan.decode(65) == pytest.approx(found, rel=0.005)


@pytest.mark.parametrize(
    "config", [odd("T"), odd("P"), odd("N"), odd("C"), odd("E"), odd("GA", experts=EXPERTS), *SPARSE]
)
def test_activations_of_other_layers(config: HybridConfig) -> None:
    plan = plan_training(Model("x", config, torch.float32, "config"), 2 * 192, "float32")
    assert plan.activations == pytest.approx(saved(HybridLM(config), 2, 192)[0], rel=0.15)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizer_bytes_are_those_allocated(kind: str) -> None:
    config = odd("GAKM", experts=EXPERTS, dense_layers=(1,))
    model = HybridLM(config)
    plan = plan_training(Model("x", config, torch.bfloat16, "config"), 10, optimizer=kind)
    optimizer = make_optimizer(model, kind, 1e-3, 0.1, (0.9, 0.95))
    for x in model.parameters():
        x.grad = torch.zeros_like(x)
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    assert plan.optimizer == sum(x.nbytes for x in states)
    assert plan.gradients == sum(x.grad.nbytes for x in model.parameters() if x.grad is not None)
    assert plan.parameters == sum(x.nbytes for x in [*model.parameters(), *model.buffers()])


def test_training_memory_adds_up() -> None:
    model = read_model("medium")
    whole, half = (plan_training(model, 32768, dtype) for dtype in ("float32", "bfloat16"))
    assert half.activations < whole.activations and whole.casts == 0 < half.casts < half.parameters
    for plan in (whole, half):
        assert plan.activations_recomputed < plan.activations / 6
        kept = plan.parameters + plan.gradients + plan.optimizer + plan.casts + plan.logits
        assert plan.total() == kept + plan.activations
        assert plan.total(recompute=True) == kept + plan.activations_recomputed
    assert math.isclose(plan_training(model, 65536).activations, 2 * half.activations, rel_tol=1e-6)
    for arguments, message in (
        ((0,), "tokens_per_step must be a whole number of at least 1, got 0"),
        ((1, "fp8"), "dtype must be 'float32' or 'bfloat16'"),
        ((1, "float32", "sgd"), "optimizer must be 'adamw' or 'muon', got 'sgd'"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_training(model, *arguments)  # type: ignore[arg-type]


def test_several_devices() -> None:
    """n devices count as one n times as large and fast; their caches lower bounds by memory bandwidth a little more."""
    h200, model = HARDWARE["h200"], read_model("qwen3-5-27b")
    eight = several(h200, 8)
    assert several(h200, 1) is h200 and eight.name == "8 x H200 SXM" and eight.memory_bytes == 8 * 141 * 10**9
    for one, other in zip(time_bounds(model, h200, 1, 4096), time_bounds(model, eight, 1, 4096), strict=True):
        saved = 7 * h200.cache_bytes if other.limit == "memory bandwidth" else 0
        assert other.seconds == pytest.approx(one.seconds / 8 - saved / eight.bandwidth, rel=1e-6)
    with pytest.raises(ValueError, match="devices must be a whole number of at least 1, got 0"):
        several(h200, 0)


def test_tokens_a_second_are_a_batch_over_its_step() -> None:
    """The bound of a model with one layer, written out."""
    model = from_numbers(256, 4, 1, "bf16", vocab_size=1000, feed_size=512, pattern="A")
    plan, machine = plan_memory(model), make_hardware(2**30, 1e9, 1e12)
    batch, context = 5, 700
    weights = 2 * (plan.parameters - 1000 * 256)  # all but the embedding, of which each sequence reads a row
    cached = batch * 2 * 256 * 2 * (context + 1)
    moving = (weights + batch * 256 * 2 + cached) / 1e9
    assert tokens_per_second(plan, machine, batch, context) == pytest.approx(batch / moving, rel=1e-12)
    quick = make_hardware(2**30, 1e15, 1e9)  # where operations are the limit, a batch gains nothing
    one, many = (tokens_per_second(plan, quick, n, context) for n in (1, batch))
    assert one == pytest.approx(many) == pytest.approx(1e9 / plan_flops(model).decode(context, "least"))


def test_experts_that_are_chosen_at_random_slow_a_batch() -> None:
    model = read_model("qwen3-next-80b")
    plan, machine = plan_memory(model), HARDWARE["b200"]
    for batch in (1, 12):
        steps = {x.what: x.seconds for x in time_bounds(plan, machine, batch, 65536)}
        assert tokens_per_second(plan, machine, batch, 65536) == batch / steps["decode"]
        random = tokens_per_second(plan, machine, batch, 65536, "expected")
        assert random == batch / steps["decode, experts at random"]
    assert random < tokens_per_second(plan, machine, 12, 65536)


@pytest.mark.parametrize(
    "batch, tokens, routing, message",
    [
        (0, 8, "least", "batch must be a whole number of at least 1, got 0"),
        (1, 0, "least", "tokens must be a whole number of at least 1, got 0"),
        (1, 8, "lucky", "routing must be 'least' or 'expected', got 'lucky'"),
    ],
)
def test_tokens_a_second_of_nothing(batch: int, tokens: int, routing: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokens_per_second(plan_memory(read_model("tiny")), HARDWARE["cpu"], batch, tokens, routing)

"""torch's FlopCounterMode around ops, layers and models counts what lineate.planning counts."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import lineate
from lineate.models import AttentionConfig, FeedConfig, HybridConfig, HybridLM, LatentConfig, LinearConfig
from lineate.planning import Model, plan_flops
from lineate.torch_ops.flops import Heads
from tests.support import fresh
from tests.support.cases import BACKENDS, KIMI_DELTA, ROWS, SMALL, Row, bounds, convert, draw, interpreted

B, T, H, HV, K, V = SMALL


def heads(row: Row) -> Heads:
    return Heads(H, HV, K, V, row.corrects, row.decay == "channel")


def count(call: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def call(row: Row, **options: Any) -> Any:
    return row.op(**convert(draw(row, SMALL), torch.float32), **options)


@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param("triton", marks=[interpreted, pytest.mark.slow])])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_an_op_forward_and_backward(row: Row, backend: str) -> None:
    options = {"form": "chunkwise", "backend": backend}
    expected = B * heads(row).chunkwise(T)
    assert count(lambda: call(row, **options)) == expected
    inputs = {name: x.requires_grad_() for name, x in convert(draw(row, SMALL), torch.float32).items()}
    assert count(lambda: row.op(**inputs, **options).output.sum().backward()) == 3 * expected
    out = row.op(**inputs, **options).output.sum()
    assert count(out.backward) == 2 * expected  # the forward ran outside the counter


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_token_by_token(row: Row, backend: str) -> None:
    expected = B * heads(row).recurrent(T)
    assert count(lambda: call(row, form="recurrent", backend=backend)) == expected
    inputs = convert(draw(row, SMALL), torch.float32)
    assert count(lambda: lineate.decode(**inputs)) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_and_texts(backend: str) -> None:
    """Each sequence has its own chunks; torch counts the chunks it is asked for."""
    inputs = {name: x[:1] for name, x in convert(draw(KIMI_DELTA, SMALL), torch.float32).items() if name != "state"}
    lengths = [20, 0, 33]
    packed = {"cu_seqlens": bounds(lengths), "form": "chunkwise", "backend": backend}
    own = heads(KIMI_DELTA)
    assert count(lambda: KIMI_DELTA.op(**inputs, **packed)) == sum(map(own.chunkwise, lengths))
    if backend == "torch":
        found = count(lambda: KIMI_DELTA.op(**inputs, form="chunkwise", backend=backend, chunk_size=16))
        assert found == own.chunkwise(T, 16)


def test_tensors_without_values() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter:
        inputs = {name: torch.empty_like(x) for name, x in convert(draw(KIMI_DELTA, SMALL), torch.float32).items()}
        KIMI_DELTA.op(**inputs, form="chunkwise")
    assert counter.get_total_flops() == B * heads(KIMI_DELTA).chunkwise(T)
    inputs = {name: x.to("meta") for name, x in convert(draw(KIMI_DELTA, SMALL), torch.float32).items()}
    assert count(lambda: KIMI_DELTA.op(**inputs, form="chunkwise")) == B * heads(KIMI_DELTA).chunkwise(T)


def test_a_user_may_count_otherwise() -> None:
    mapping = {torch.ops.lineate.chunkwise: lambda *shapes, **_: 7}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        call(KIMI_DELTA, form="chunkwise", backend="torch")
    assert counter.get_total_flops() == 7


SIZES: dict[str, Any] = dict(
    vocab_size=50, hidden_size=96, linear=LinearConfig(2, 4, 48, 64), feed=FeedConfig(200),
    attention=AttentionConfig(6, 2, 40, rotary_dim=16),
    latent=LatentConfig(4, rank=64, nope_dim=32, rope_dim=16, value_dim=24),
)  # fmt: skip


@pytest.mark.parametrize("pattern", [*"LRDGK", "GGA", "KM"])
def test_a_model(pattern: str) -> None:
    """It runs in float32: a prefill, a token after it, and a training step."""
    config = HybridConfig(**SIZES, n_layers=len(pattern), pattern=pattern)
    model, plan = HybridLM(config), plan_flops(Model(pattern, config, torch.float32, "config"))
    with sdpa_kernel(SDPBackend.MATH):
        for tokens in (1, 3, 150):
            ids = torch.randint(50, (1, tokens))
            with torch.no_grad():
                assert count(lambda ids=ids: model(ids)) == plan.forward(tokens, tokens)
                state = model(ids).state
                assert count(lambda ids=ids, state=state: model(ids[:, :1], state=state)) == plan.decode(tokens)
        ids = torch.randint(50, (2, 100))
        found = count(lambda: model(ids, labels=ids).loss.backward())
        assert found == pytest.approx(200 * plan.training(100), rel=1e-12)


def test_a_layer() -> None:
    config = HybridConfig(**SIZES, n_layers=1, pattern="G")
    mixer = HybridLM(config).layers[0].mixer
    plan = plan_flops(Model("G", config, torch.float32, "config")).layers[0]
    with torch.no_grad():
        assert count(lambda: mixer(torch.randn(1, 150, 96))) == 150 * plan.projections + plan.mixing(150)


LATE = """
import sys, torch, lineate
q = torch.randn(1, 70, 2, 4)
lineate.linear_attention(q, q, q)
assert "torch.utils.flop_counter" not in sys.modules  # its import takes longer than lineate's
from torch.utils.flop_counter import FlopCounterMode
for _ in range(2):
    with FlopCounterMode(display=False) as counter:
        lineate.linear_attention(q, q, q)
    print(counter.get_total_flops())
"""


@pytest.mark.cover
def test_a_counter_imported_after_lineate() -> None:
    done = fresh.run(LATE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(Heads(2, 2, 4, 4, False, False).chunkwise(70))] * 2


GENERAL = {
    "one writer, a decay a head": ("gated_delta_rule_2", False),
    "one writer, a decay a channel": ("gated_delta_rule_2", True),
    "two writers, a decay a head": ("diagonal_plus_low_rank", False),
    "two writers, a decay a channel": ("diagonal_plus_low_rank", True),
    "several writes": ("gated_delta_product", False),
}


@pytest.mark.parametrize("case", GENERAL)
def test_the_general_row_is_counted_as_its_products(case: str) -> None:
    """The op is counted as the products that its chunks run, which the counter sees without the op."""
    from lineate.call import Inputs, Options
    from lineate.forms import general_chunkwise
    from lineate.rule import row_of
    from lineate.torch_ops.chunk_op import empty_outputs

    name, per_channel = GENERAL[case]
    rule, n = row_of(name), 3 if name == "gated_delta_product" else 1
    writes = (n,) if rule.writes else ()
    tensors = {
        "q": torch.randn(2, 70, 1, 8), "k": 0.3 * torch.randn(2, 70, *writes, 1, 8),
        "v": torch.randn(2, 70, *writes, 2, 6),
        "log_decay": -torch.rand(2, 70, 2, *((8,) if per_channel else ())), "state": torch.randn(2, 2, 8, 6),
    }  # fmt: skip
    if rule.writes:
        tensors["beta"] = torch.rand(2, 70, n, 2)
    elif name == "gated_delta_rule_2":
        tensors |= {"erase": torch.rand(2, 70, 2, 8), "write": torch.rand(2, 70, 2, 6)}
    else:
        tensors |= {x: 0.3 * torch.randn(2, 70, 2, 8) for x in ("probe", "direction")}
    given = {x: y for x, y in tensors.items() if x != "state"}
    found = count(
        lambda: getattr(lineate, name)(
            **given, state=tensors["state"], form="chunkwise", chunk_size=32, backend="torch"
        )
    )
    inputs = Inputs(**tensors)
    options = Options(rule, 1.0, chunk_size=32)
    one = inputs.replace(v=inputs.v[:, :, 0]) if rule.writes else inputs
    outputs = empty_outputs(one, options, False)
    in_place = {torch.ops.aten.baddbmm_: lambda total, x, y, **_: 2 * x[0] * x[1] * x[2] * y[2]}  # torch leaves it out
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        general_chunkwise.run_forward(inputs, options, outputs)
    assert found == counter.get_total_flops() > 0

"""Memories that are kept in bfloat16: mixers and models compute in float32 and round what they return."""

import pytest
import torch
from torch import Tensor

from lineate.decoding.decoder import Decoder
from lineate.layers import (
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    LinearAttention,
    Mamba2,
    Memory,
    TensorSpec,
    TTTLinear,
)
from lineate.layers.formats import StateFormat
from lineate.layers.trail import trail
from lineate.models import HybridLM, ModelState
from lineate.ops.rounding import round_memory
from lineate.planning import plan_memory, read_model
from tests.support.serving_models import CONFIG, VOCAB, model, prompt
from tests.support.small_models import random_model

SIZES = {"heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 12}
MIXERS = {
    "gated linear": lambda: GatedLinearAttention(24, **SIZES),
    "delta": lambda: DeltaNet(24, **SIZES),
    "gated delta": lambda: GatedDeltaNet(24, **SIZES),
    "kimi delta": lambda: KimiDeltaAttention(24, **SIZES),
    "mamba2": lambda: Mamba2(24, 4, head_dim=12, state_dim=16, groups=2),
}
mixers = pytest.mark.parametrize("name", MIXERS)
SEEDS = torch.tensor([4, 2**34])


def narrow(state: Memory, **options: object) -> Memory:
    tensors = {name: x.bfloat16() if name == "memory" else x for name, x in state.tensors.items()}
    return Memory(tensors, **options)


def begun(name: str, t: int) -> tuple[torch.nn.Module, Memory, Tensor]:
    """Return a mixer, its state after nine tokens, and t more tokens of two rows."""
    torch.manual_seed(0)
    mixer = MIXERS[name]()
    x = torch.randn(2, 9 + t, 24)
    return mixer, mixer(x[:, :9])[1], x[:, 9:]


@mixers
@torch.no_grad()
def test_a_token_rounds_what_float32_would_have(name):
    """One token has the output of the same memory in float32; its memory is that one, rounded, and so are several."""
    for t in (1, 5):
        mixer, state, x = begun(name, t)
        kept = narrow(state)
        y, new = mixer(x, kept)
        same, wide = mixer(x, Memory({key: z.float() for key, z in kept.tensors.items()}))
        assert torch.equal(y, same) and torch.equal(new["memory"], wide["memory"].bfloat16())
        drawn = mixer(x, narrow(state, seeds=SEEDS))[1]["memory"]
        assert torch.equal(drawn.float(), round_memory(wide["memory"], SEEDS + t - 1))
        assert kept["memory"].dtype == new["memory"].dtype == drawn.dtype == torch.bfloat16
        assert new["conv"].dtype == torch.float32


@mixers
@pytest.mark.parametrize("seeds", [None, SEEDS], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("keep", ["states", "inputs"])
@torch.no_grad()
def test_trails_have_the_memories_of_single_tokens(name, seeds, keep):
    """A trail rounds after every token, as single steps do, within what float32 sums in another order."""
    mixer, state, x = begun(name, 4)
    y, trailed = trail(mixer, x, narrow(state, seeds=seeds), keep)
    now, steps = narrow(state), [narrow(state)]
    for i in range(4):
        out, now = mixer(x[:, i : i + 1], Memory(now.tensors, seeds=None if seeds is None else seeds + i))
        torch.testing.assert_close(y[:, i : i + 1], out, rtol=1e-2, atol=1e-3)
        steps.append(now)
    for counts in ([0, 0], [4, 4], [1, 3]):
        got = trailed.after(torch.tensor(counts))
        assert got["memory"].dtype == torch.bfloat16
        for row, n in enumerate(counts):
            for key in got.names:
                expected = steps[n][key][row].float()
                wrong = (got[key][row].float() - expected).norm() / expected.norm()
                assert wrong < (2e-3 if key == "memory" else 1e-5), (key, float(wrong))  # few numbers round elsewhere


def test_what_may_be_kept_in_bfloat16():
    for make in MIXERS.values():
        spec = make().state_spec[-1]
        assert (spec.dtype, spec.dtypes) == (torch.float32, (torch.bfloat16,))
        assert spec.kept_in(torch.bfloat16) == TensorSpec("memory", spec.shape, torch.bfloat16, spec.dtypes)
        assert make().double().state_spec[-1].dtypes == ()
    for mixer in (LinearAttention(24, 2), TTTLinear(24, heads=2, head_dim=12)):
        assert all(spec.dtypes == () and spec.kept_in(torch.bfloat16) is spec for spec in mixer.state_spec)


class OwnForward(GatedDeltaNet):
    """A mixer whose forward may read the memory in any way."""

    def forward(self, x, state=None, cu_seqlens=None):
        return super().forward(x, state, cu_seqlens)


@torch.no_grad()
def test_other_memories_and_dtypes_are_refused():
    mixer, state, x = begun("gated delta", 1)
    message = r"^state\['memory'\] must be float32, got float16; continue under the same autocast and model dtype$"
    with pytest.raises(ValueError, match=message):
        mixer(x, Memory({**state.tensors, "memory": state["memory"].half()}))
    own = OwnForward(24, **SIZES)
    assert own.state_spec[-1].dtypes == ()
    with pytest.raises(ValueError, match=r"^state\['memory'\] must be float32, got bfloat16"):
        own(x, narrow(own(x)[1]))
    linear = LinearAttention(24, 2)
    with pytest.raises(ValueError, match=r"^state\['memory'\] must be float32, got bfloat16"):
        linear(x, narrow(linear(x)[1]))
    for given in ("float16", torch.float16, "fp8", torch.float64):
        with pytest.raises(ValueError, match=r"^state_dtype must be one of fp32, float32, bf16, bfloat16, got '"):
            StateFormat.of(given)
    with pytest.raises(ValueError, match=r"^state_rounding must be one of 'nearest', 'stochastic', got 'up'$"):
        StateFormat.of("bfloat16", "up")
    for given in (None, "float32"):
        message = r"^state_rounding='stochastic' needs state_dtype='bfloat16', got float32; leave it 'nearest'$"
        with pytest.raises(ValueError, match=message):
            StateFormat.of(given, "stochastic")
    for lm in (model("TPNC"), model("attention alone"), random_model(CONFIG).double()):
        with pytest.raises(
            ValueError, match=r"^state_dtype='bfloat16' needs a layer with a memory that can be kept so"
        ):
            lm.state_nbytes(1, 0, "bfloat16")


@torch.no_grad()
def read(lm: HybridLM, rows: int = 2, t: int = 20) -> ModelState:
    return lm(torch.tensor([prompt(t, seed=n) for n in range(rows)]), last_only=True).state


@pytest.mark.parametrize("pattern", ["GGGA", "KKKM, experts", "LRDG", "SSA"])
@torch.no_grad()
def test_models_convert_and_continue_states(pattern):
    """Memories of rules are narrow, and all else stays; steps in C and in torch round to nearly the same numbers."""
    lm = model(pattern)
    wide = read(lm)
    state = lm.convert_state(wide, "bfloat16")
    assert state.nbytes == lm.state_nbytes(2, 20, torch.bfloat16) < wide.nbytes == lm.state_nbytes(2, 20)
    again = lm.convert_state(state)
    for layer, specs, old in zip(again.layers, lm.state_spec, wide.layers, strict=True):
        for spec in specs:
            kept = old[spec.name].bfloat16().float() if spec.dtypes else old[spec.name]
            assert torch.equal(layer[spec.name], kept)
    assert lm.convert_state(wide) is not wide and lm.convert_state(wide).layers == wide.layers
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        ids = torch.randint(VOCAB, (2, 1), generator=generator)
        out, expected = lm(ids, state), lm(ids, lm.convert_state(state))
        torch.testing.assert_close(out.logits, expected.logits, rtol=1e-4, atol=1e-4)
        rounded = lm.convert_state(expected.state, "bfloat16")
        for got, other in zip(out.state.layers, rounded.layers, strict=True):
            for name in got.names:
                assert got[name].dtype == other[name].dtype
                torch.testing.assert_close(got[name], other[name], rtol=1e-2, atol=1e-5)
                assert (got[name] != other[name]).float().mean() < (0.01 if name == "memory" else 1)
        state = out.state


@pytest.mark.cover
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("pattern", ["GGGA", "SSA"])
@torch.no_grad()
def test_the_decoder_continues_in_bfloat16(pattern, rounding):
    """The decoder's steps are those of the model; positions are the seeds."""
    lm = model(pattern)
    wide = read(lm)
    decoder = Decoder(lm, wide, room=8, state_dtype="bfloat16", state_rounding=rounding)
    state = lm.convert_state(wide, "bfloat16")
    generator = torch.Generator().manual_seed(2)
    for i in range(6):
        ids = torch.randint(VOCAB, (2, 1), generator=generator)
        if rounding == "stochastic":
            seeds = torch.full((2,), 20 + i)
            layers = (Memory(x.tensors, seeds=seeds) if isinstance(x, Memory) else x for x in state.layers)
            state = ModelState(tuple(layers), state.lengths)
        out = lm(ids, state)
        torch.testing.assert_close(decoder(ids), out.logits, rtol=1e-3, atol=1e-3)
        state = out.state
    for got, expected in zip(decoder.state.layers, state.layers, strict=True):
        for name in got.names:
            assert got[name].dtype == expected[name].dtype
            torch.testing.assert_close(got[name], expected[name], rtol=2e-2, atol=1e-3)
    with pytest.raises(ValueError, match=r"^state_rounding='stochastic' needs state_dtype='bfloat16'"):
        Decoder(lm, wide, room=8, state_rounding="stochastic")


@pytest.mark.parametrize("pattern", ["GGGA", "LRDG", "SSA"])
def test_planned_bytes_are_those_of_the_state(pattern):
    """`lineate plan --state-dtype bfloat16` counts the bytes of a state that is kept so."""
    lm = model(pattern)
    plan = plan_memory(read_model(lm.config, "float32"), "bfloat16")
    state = lm.convert_state(read(lm, 1), "bfloat16")
    assert plan.state(1, 20) == state.nbytes == lm.state_nbytes(1, 20, "bfloat16")

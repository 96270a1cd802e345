"""Which modules a fused decoding step computes by itself: those of lineate and torch, as they were made."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lineate.layers import (
    DeltaNet,
    GatedAttention,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedLinearAttention,
    KimiDeltaAttention,
    LatentAttention,
    LinearAttention,
    Mamba2,
    Memory,
    MixtureOfExperts,
    RMSNorm,
    SwiGLU,
)
from lineate.layers.state import CacheInPlace, TokenCache
from lineate.layers.step.launches import feed_step, mix_step
from tests.support.cases import interpreted

pytest.importorskip("triton")
pytestmark = interpreted
HIDDEN = 32


class Adapter(nn.Module):
    """A low-rank adapter that shows the weight and the bias of what it wraps, as adapters of others do."""

    def __init__(self, wrapped: nn.Linear) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.down = nn.Parameter(torch.randn(2, wrapped.in_features))
        self.up = nn.Parameter(torch.randn(wrapped.out_features, 2))

    @property
    def weight(self) -> Tensor:
        return self.wrapped.weight

    @property
    def bias(self) -> Tensor | None:
        return self.wrapped.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.wrapped(x) + x @ self.down.T @ self.up.T


class Quantised(Tensor):
    """A tensor whose memory does not hold its values."""


class DoubledNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def wrap(module: nn.Linear) -> nn.Module:
    return Adapter(module)


def quantise(module: nn.Linear) -> nn.Module:
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Quantised), requires_grad=False)
    return module


def hook(module: nn.Linear) -> nn.Module:
    module.register_forward_hook(lambda module, x, y: 2 * y)
    return module


def replace_forward(module: nn.Linear) -> nn.Module:
    own = module.forward
    module.forward = lambda x: 2 * own(x)
    return module


CHANGES = (wrap, quantise, hook, replace_forward)


def changed(*names: str, by: tuple[Callable[[nn.Linear], nn.Module], ...] = CHANGES) -> list[tuple[str, Any]]:
    """Return each of these modules with each change, and one case without any."""
    return [("none", None), *product(names, by)]


@pytest.mark.parametrize(("name", "change"), changed("gate_up_proj", "down_proj"))
@torch.no_grad()
def test_feed_forward(name, change):
    torch.manual_seed(0)
    norm, feed, x = RMSNorm(HIDDEN), SwiGLU(HIDDEN, 48), torch.randn(1, 1, HIDDEN)
    if change is not None:
        setattr(feed, name, change(getattr(feed, name)))
        assert feed_step(norm, feed, x) is None
    else:
        torch.testing.assert_close(feed_step(norm, feed, x), x + feed(norm(x)))


@torch.no_grad()
def test_a_forward_that_is_set_on_a_class_is_called(monkeypatch):
    """As a program does that watches all layers of a class."""
    norm, x = RMSNorm(HIDDEN), torch.randn(1, 1, HIDDEN)
    mixer, state = make(GatedDeltaNet)
    for kind, feed in ((SwiGLU, SwiGLU(HIDDEN, 48)), (MixtureOfExperts, MixtureOfExperts(HIDDEN, 3, 2, 16))):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", lambda self, x: 2 * x)
            assert feed_step(norm, feed, x) is None
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * x)
    assert mix_step(norm, mixer, x, state, None) is None


@torch.no_grad()
def test_norms_of_others():
    feed, x = SwiGLU(HIDDEN, 48), torch.randn(1, 1, HIDDEN)
    assert feed_step(DoubledNorm(HIDDEN), feed, x) is None
    assert feed_step(nn.RMSNorm(HIDDEN), feed, x) is None


def latent(theta: float | None = 100.0, gate: str | None = None) -> LatentAttention:
    return LatentAttention(
        HIDDEN, 2, rank=12, nope_dim=7, rope_dim=6, value_dim=10, rope_theta=theta, norm_eps=1e-5, gate=gate
    )


def make(kind: type) -> tuple[nn.Module, Memory | CacheInPlace]:
    """Return a mixer and its state, which may be overwritten, of one row with 3 tokens."""
    mixer = latent() if kind is LatentAttention else kind(HIDDEN, 2)
    _, state = mixer(torch.randn(1, 3, HIDDEN))
    if kind not in (GatedAttention, LatentAttention):
        return mixer, Memory(
            {name: x.clone(memory_format=torch.contiguous_format) for name, x in state.tensors.items()}, owned=True
        )
    caches = {name: torch.cat((state[name], torch.zeros(1, 5, *state[name].shape[2:])), 1) for name in state.names}
    lengths = torch.tensor([3])
    return mixer, CacheInPlace(caches, 8, 1, (lengths, lengths + 1), {})


@pytest.mark.parametrize(("name", "change"), changed("in_proj", "out_proj"))
@pytest.mark.parametrize(
    "kind",
    [
        GatedDeltaNet,
        KimiDeltaAttention,
        DeltaNet,
        GatedLinearAttention,
        Mamba2,
        GatedDeltaNet2,
        GatedDeltaProduct,
        GatedAttention,
        LatentAttention,
    ],
)
@torch.no_grad()
def test_mixers(kind, name, change):
    torch.manual_seed(0)
    norm, then, x = RMSNorm(HIDDEN), RMSNorm(HIDDEN), torch.randn(1, 1, HIDDEN)
    mixer, state = make(kind)
    if change is not None:
        setattr(mixer, name, change(getattr(mixer, name)))
        assert mix_step(norm, mixer, x, state, then) is None
        return
    torch.manual_seed(0)
    norm, then, x = RMSNorm(HIDDEN), RMSNorm(HIDDEN), torch.randn(1, 1, HIDDEN)
    again, other = make(kind)
    again.load_state_dict(mixer.state_dict())
    expected, _ = again(norm(x), other)
    found = mix_step(norm, mixer, x, state, then)
    torch.testing.assert_close(found.x, x + expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("then", [nn.LayerNorm(HIDDEN), DoubledNorm(HIDDEN)])
@torch.no_grad()
def test_what_follows_may_have_another_norm(then):
    """The norm after a mixer belongs to what follows, which then calls it."""
    mixer, state = make(GatedDeltaNet)
    found = mix_step(RMSNorm(HIDDEN), mixer, torch.randn(1, 1, HIDDEN), state, then)
    assert found is not None and found.normed is None


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("kind", [GatedDeltaNet, KimiDeltaAttention])
@torch.no_grad()
def test_gates_with_a_lower_bound(kind, rows):
    """Steps of few rows run another kernel than steps of many; both give what the mixer gives."""
    torch.manual_seed(0)
    norm, x = RMSNorm(HIDDEN), torch.randn(rows, 1, HIDDEN)
    mixer = kind(HIDDEN, 2, gate_lower_bound=-5.0)
    mixer.A_log.fill_(0.3)
    mixer.dt_bias.normal_()
    _, state = mixer(torch.randn(rows, 3, HIDDEN))
    tensors = {name: x.clone(memory_format=torch.contiguous_format) for name, x in state.tensors.items()}
    expected, after = mixer(norm(x), state)
    found = mix_step(norm, mixer, x, Memory(tensors, owned=True), RMSNorm(HIDDEN))
    torch.testing.assert_close(found.x, x + expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.state["memory"], after["memory"], rtol=1e-4, atol=1e-5)


SIZES = {"value_heads": 4, "key_dim": 12, "value_dim": 20}
STEPS = {
    "delta rule": lambda: DeltaNet(HIDDEN, 2, **SIZES, beta_scale=2.0),
    "delta rule, no convolution": lambda: DeltaNet(HIDDEN, 2, **SIZES, conv_size=0, gate_activation="sigmoid"),
    "gated linear": lambda: GatedLinearAttention(HIDDEN, 2, **SIZES, decay_rank=5),
    "Gated DeltaNet-2": lambda: GatedDeltaNet2(HIDDEN, 2, **SIZES, beta_scale=2.0),
    "Gated DeltaNet-2, full rank": lambda: GatedDeltaNet2(
        HIDDEN, 2, **SIZES, decay_rank=0, gate_rank=0, gate_lower_bound=-5.0, conv_size=0
    ),
    "Gated DeltaProduct": lambda: GatedDeltaProduct(HIDDEN, 2, **SIZES, beta_scale=2.0),
    "Gated DeltaProduct, 3 writes": lambda: GatedDeltaProduct(
        HIDDEN, 2, **SIZES, writes=3, gate_activation="sigmoid", conv_size=0
    ),
    "Gated DeltaProduct, group norm": lambda: GatedDeltaProduct(HIDDEN, 2, **SIZES, writes=3, group_norm=True),
    "Mamba-2": lambda: Mamba2(HIDDEN, 4, state_dim=24),
    "Mamba-2, groups": lambda: Mamba2(HIDDEN, 4, head_dim=10, state_dim=9, groups=2, norm_groups=4),
    "Mamba-2, gate last": lambda: Mamba2(HIDDEN, 4, state_dim=16, gate_first=False, conv_bias=False),
    "Mamba-2, bounded steps": lambda: Mamba2(HIDDEN, 4, state_dim=16, step_least=0.02, step_most=0.05, conv_size=3),
}


@pytest.mark.slow(but="pairs")
@pytest.mark.parametrize("rows", [1, 3, 6])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("case", STEPS)
@torch.no_grad()
def test_steps_of_other_rules(case, rows, narrow):
    """One launch has what the mixer computes in many, for memories in float32 and in bfloat16.

    A norm that follows the rule is part of its launch for 1 and 3 rows.
    """
    torch.manual_seed(0)
    norm, x, mixer = RMSNorm(HIDDEN), torch.randn(rows, 1, HIDDEN), STEPS[case]()
    for weight in mixer.parameters():
        weight.add_(0.1 * torch.randn_like(weight))
    _, state = mixer(torch.randn(rows, 3, HIDDEN))
    given = {name: y.bfloat16() if narrow and name == "memory" else y for name, y in state.tensors.items()}
    tensors = {name: y.clone(memory_format=torch.contiguous_format) for name, y in given.items()}
    expected, after = mixer(norm(x), Memory(given))
    found = mix_step(norm, mixer, x, Memory(tensors, owned=True), None)
    assert found is not None
    torch.testing.assert_close(found.x, x + expected, rtol=1e-4, atol=1e-5)
    for name, wanted in after.tensors.items():
        within = {"rtol": 1e-2, "atol": 1e-2} if narrow and name == "memory" else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found.state[name], wanted, **within)
        assert found.state[name].data_ptr() == tensors[name].data_ptr()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("theta", "gate"), [(None, None), (100.0, None), (None, "head"), (100.0, "channel")])
@torch.no_grad()
def test_latent_attention(theta, gate, rows):
    """The entry of every row is written at its own length, and read by its query."""
    torch.manual_seed(0)
    norm, x, mixer = RMSNorm(HIDDEN), torch.randn(rows, 1, HIDDEN), latent(theta, gate)
    mixer.latent_norm.weight.normal_()
    seen = torch.tensor([3, 1, 5])[:rows]
    _, state = mixer(torch.randn(rows, 5, HIDDEN))
    before = TokenCache({"latent": state["latent"]}, seen)
    expected, after = mixer(norm(x), before)
    room = torch.cat((state["latent"], torch.zeros(rows, 4, 1, 18)), 1)
    found = mix_step(norm, mixer, x, CacheInPlace({"latent": room}, 9, 1, (seen, seen + 1), {}), RMSNorm(HIDDEN))
    assert found is not None and torch.equal(found.state.lengths, seen + 1)
    torch.testing.assert_close(found.x, x + expected, rtol=1e-4, atol=1e-5)
    for row, n in enumerate(seen.tolist()):
        torch.testing.assert_close(room[row, : n + 1], after["latent"][row, : n + 1], rtol=1e-4, atol=1e-5)
        assert torch.equal(room[row, :n], state["latent"][row, :n])


def add_bias(module: nn.Linear) -> nn.Module:
    module.bias = nn.Parameter(torch.randn(module.out_features))
    return module


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("up_proj", change) for change in (wrap, hook, replace_forward, add_bias)),
        *(("latent_norm", change) for change in (hook, replace_forward)),
    ],
)
@torch.no_grad()
def test_latent_attention_calls_what_was_changed(name, change):
    """A step multiplies by the weight of up_proj without calling it, but not where a call does more."""
    torch.manual_seed(0)
    mixer, x = latent(), torch.randn(1, 9, HIDDEN)
    setattr(mixer, name, change(getattr(mixer, name)))
    expected, _ = mixer(x)
    _, state = mixer(x[:, :8])
    for first in (8, 7):
        found, _ = mixer(x[:, first:], mixer(x[:, :first])[1])
        torch.testing.assert_close(found, expected[:, first:], rtol=1e-4, atol=1e-4)
    room = {"latent": torch.cat((state["latent"], torch.zeros(1, 4, 1, 18)), 1)}
    lengths = torch.tensor([8])
    cache = CacheInPlace(room, 12, 1, (lengths, lengths + 1), {})
    assert mix_step(RMSNorm(HIDDEN), mixer, x[:, 8:], cache, None) is None


@pytest.mark.parametrize(("name", "change"), changed("decay_proj", "gate_proj", by=(wrap, hook, replace_forward)))
@torch.no_grad()
def test_low_rank_gates_that_were_changed(name, change):
    """Two of them are one launch; one that does more than multiply is called."""
    torch.manual_seed(0)
    norm, x, mixer = RMSNorm(HIDDEN), torch.randn(1, 1, HIDDEN), KimiDeltaAttention(HIDDEN, 2)
    if change is not None:
        setattr(mixer, name, change(getattr(mixer, name)))
    _, state = mixer(torch.randn(1, 3, HIDDEN))
    tensors = {key: y.clone(memory_format=torch.contiguous_format) for key, y in state.tensors.items()}
    expected, _ = mixer(norm(x), state)
    found = mix_step(norm, mixer, x, Memory(tensors, owned=True), None)
    assert found is not None
    torch.testing.assert_close(found.x, x + expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_the_kernels_do_not_compute_is_called():
    norm, x = RMSNorm(HIDDEN), torch.randn(1, 1, HIDDEN)
    for mixer in (
        LinearAttention(HIDDEN, 2), Mamba2(HIDDEN, 4, bias=True), DeltaNet(HIDDEN, 2, gate_activation="none"),
        GatedDeltaProduct(HIDDEN, 2, forgets=False), GatedDeltaProduct(HIDDEN, 2, writes=9),
        GatedDeltaProduct(HIDDEN, 2, rate="exact"),
    ):  # fmt: skip
        _, state = mixer(torch.randn(1, 3, HIDDEN))
        tensors = {name: y.contiguous() for name, y in state.tensors.items()}
        assert mix_step(norm, mixer, x, Memory(tensors, owned=True), None) is None

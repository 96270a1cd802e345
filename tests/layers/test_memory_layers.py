"""The layers whose memory learns: the promises of mixers about states, and sequences far longer than in training."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.layers import TTTMLP, LaCT, LeastSquares, Titans, TTTLinear
from tests.support.memories import CLOSE, check_close

DEFAULTS = {
    "TTTLinear": lambda: TTTLinear(64, 2),
    "TTTMLP": lambda: TTTMLP(64, 2),
    "Titans": lambda: Titans(64, 2),
    "Titans, mlp": lambda: Titans(64, 2, memory="mlp"),
    "LaCT": lambda: LaCT(64, 2),  # 12 tokens are no chunk of 2048, so only its attention learns here, and slowly
    "LeastSquares": lambda: LeastSquares(64, 2),
}


class Recaller(nn.Module):
    """A model that reads four pairs of a key (0 .. 7) and a value (8 .. 15), then recalls the values for the keys."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.embed, self.norm, self.mixer = nn.Embedding(16, 64), nn.RMSNorm(64), mixer
        self.last, self.head = nn.RMSNorm(64), nn.Linear(64, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.last(x + self.mixer(self.norm(x))[0]))

    def learn(self, steps: int) -> list[float]:
        optimizer, losses = torch.optim.AdamW(self.parameters(), 5e-3), []
        for _ in range(steps):
            keys, values = (torch.rand(16, 8).argsort(1)[:, :4] + first for first in (0, 8))
            asked = torch.rand(16, 4).argsort(1)
            ids = torch.cat((torch.stack((keys, values), 2).flatten(1), keys.gather(1, asked)), 1)
            loss = F.cross_entropy(self(ids)[:, 8:].flatten(0, 1), values.gather(1, asked).flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFAULTS)
def test_recall_is_learnt_and_long_texts_stay_finite(name):
    """16,384 tokens in float32 and bfloat16, half of the second row one word, are finite; 2,000 more add no bytes."""
    torch.manual_seed(0)
    net = Recaller(DEFAULTS[name]())
    losses = net.learn(200)
    assert sum(losses[:10]) / 10 > 2.2
    assert sum(losses[-10:]) / 10 < (1.8 if name == "LaCT" else 0.5)
    ids = torch.randint(16, (2, 16_384))
    ids[1, 8192:] = 3
    with torch.no_grad():
        x = net.norm(net.embed(ids))
        for dtype in (torch.float32, torch.bfloat16):
            y, state = copy.deepcopy(net.mixer).to(dtype)(x.to(dtype))
            assert y.isfinite().all() and all(s.isfinite().all() for s in state.tensors.values()), dtype
        state, sizes = None, set()
        for t in range(2000):
            _, state = net.mixer(x[:1, t : t + 1], state)
            sizes.add(state.nbytes)
    assert len(sizes) == 1


# Titans and LaCT at small sizes, in float64


LAYERS = {
    "Titans: linear": lambda: Titans(24, 2, chunk=8),
    "Titans: linear, not clipped, no convolution": lambda: Titans(24, 2, head_dim=6, clip=None, chunk=5, conv_size=0),
    "Titans: mlp": lambda: Titans(24, 2, head_dim=6, memory="mlp", chunk=8),
    "Titans: mlp, residual, norm": lambda: Titans(
        24, 2, head_dim=6, memory="mlp", residual=True, memory_norm=True, chunk=1
    ),
    "LaCT: window is the chunk": lambda: LaCT(24, 2, chunk=8),
    "LaCT: small window": lambda: LaCT(24, 2, chunk=8, window=3, attention_heads=4, expansion=2.0),
    "LaCT: large window, convolution": lambda: LaCT(24, 2, chunk=5, window=19, conv_size=4, muon=False),
    "LaCT: no window": lambda: LaCT(24, 2, head_dim=6, chunk=4, window=0),
}
layers = pytest.mark.parametrize("name", LAYERS)


def make_layer(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a layer with random parameters."""
    torch.manual_seed(0)
    layer = LAYERS[name]()
    for key, x in layer.named_parameters():
        if x.dim() < 3 and "proj" not in key and "conv" not in key:
            torch.nn.init.uniform_(x, -0.5, 1.5)
        elif "initial" in key:
            torch.nn.init.normal_(x, std=0.4)
    return layer.to(dtype)


def hidden(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@layers
def test_layer_split_anywhere_and_one_by_one_equals_whole(name):
    layer, x = make_layer(name), hidden(2, 30)
    with torch.no_grad():
        whole, final = layer(x)
        for cuts in ([1], [29], [8], [3, 4, 5, 20], list(range(1, 30))):
            state, parts = None, []
            for start, end in pairwise([0, *cuts, 30]):
                y, state = layer(x[:, start:end], state)
                parts.append(y)
            check_close((torch.cat(parts, 1), state.tensors), (whole, final.tensors), **CLOSE)


@layers
def test_layer_packed_texts_equal_separate_ones(name):
    """So are their gradients; rows are then at different positions of their chunks, and continue as a batch."""
    layer, x = make_layer(name), hidden(1, 48).requires_grad_()
    lengths = (3, 0, 1, 24, 20)
    bounds = torch.tensor((0, *lengths)).cumsum(0)
    more = hidden(len(lengths), 6)
    packed, state = layer(x, cu_seqlens=bounds)
    continued, _ = layer(more, state)
    again, _ = layer(more.flatten(0, 1)[None], state, cu_seqlens=torch.arange(0, 31, 6))
    torch.testing.assert_close(again.view_as(continued), continued, **CLOSE)
    alone = [
        layer(torch.cat((x[:, start:end], more[row : row + 1]), 1))[0]
        for row, (start, end) in enumerate(pairwise(bounds.tolist()))
    ]
    wanted = torch.cat([y[:, :-6] for y in alone], 1), torch.cat([y[:, -6:] for y in alone])
    torch.testing.assert_close(packed, wanted[0], **CLOSE)
    torch.testing.assert_close(continued, wanted[1], **CLOSE)
    leaves = [x, *layer.parameters()]
    grads, expected = (
        torch.autograd.grad((y * y.detach().cos()).sum() + z.sin().sum(), leaves)
        for y, z in ((packed, continued), wanted)
    )
    for got, own in zip(grads, expected, strict=True):
        assert own.abs().max() > 0  # every parameter matters
        # With a deep memory and a normalised output, one rounding of an input moves the gradients by up to 6e-9.
        torch.testing.assert_close(got, own, rtol=1e-8, atol=1e-8)


@layers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_state_is_what_its_spec_says_and_does_not_grow(name, dtype):
    layer = make_layer(name, dtype)
    with torch.no_grad():
        _, state = layer(hidden(3, 11, dtype=dtype))
        for _ in range(2):
            assert state.names == tuple(spec.name for spec in layer.state_spec)
            for spec in layer.state_spec:
                assert state[spec.name].dtype == spec.dtype
                assert state[spec.name].shape == (3, *spec.shape)
            assert state.nbytes == 3 * sum(spec.nbytes() for spec in layer.state_spec)
            assert sum(state[n].untyped_storage().nbytes() for n in state.names) == state.nbytes
            _, state = layer(hidden(3, 1, dtype=dtype), state)
        _, selected = layer(hidden(1, 1, dtype=dtype), state.select(torch.tensor([1])))
        assert selected.rows == 1


@layers
def test_layer_states_are_values(name):
    layer, x = make_layer(name), hidden(2, 30)
    with torch.no_grad():
        _, state = layer(x[:, :7])
        kept = {n: y.clone() for n, y in state.tensors.items()}
        first, after = layer(x[:, 7:8], state)
        layer(x[:, 20:28], state)
        layer.initial[0].mul_(2)  # the initial weights of a sequence are not read again
        assert torch.equal(layer(x[:, 7:8], state)[0], first)
    assert all(torch.equal(kept[n], state[n]) for n in kept)


@layers
def test_layer_future_never_changes_the_past(name):
    layer, x = make_layer(name), hidden(1, 30)
    other = torch.cat((x[:, :21], hidden(1, 9).flip(1) * 3), 1)
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[0][:, :21], layer(other)[0][:, :21], rtol=0, atol=1e-14)


@layers
def test_layer_refuses_context_parallelism(name):
    layer = make_layer(name)
    with pytest.raises(TypeError, match=r"cu_seqlens must be a torch\.Tensor"):
        layer(hidden(1, 4), cu_seqlens=object())


LONG = {
    "Titans, linear": lambda: Titans(64, 2, memory="linear"),
    "Titans, mlp": lambda: Titans(64, 2, memory="mlp"),
    "LaCT": lambda: LaCT(64, 2),
    "LaCT, no window": lambda: LaCT(64, 2, window=0),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LONG)
def test_layer_is_finite_over_16384_tokens(name, dtype):
    """This holds at default settings, backward too, for random tokens, and for few words and then one word alone."""
    torch.manual_seed(0)
    layer = LONG[name]().to(dtype)
    words = torch.randn(4, 64)
    hard = torch.cat((words[torch.randint(4, (8192,))], words[:1].expand(8192, 64)))
    x = torch.stack((torch.randn(16384, 64), hard)).to(dtype).requires_grad_()
    y, state = layer(x)
    assert y.isfinite().all() and all(s.isfinite().all() for s in state.tensors.values())
    y.float().square().mean().backward()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in layer.parameters())


def recall_loss(layer: torch.nn.Module, steps: int, pairs: int = 4, words: int = 8) -> tuple[float, float]:
    """Train on "k1 v1 k2 v2 ... k3 ?"; return the mean loss of the first and of the last 10 steps."""
    torch.manual_seed(0)
    embed, head = torch.nn.Embedding(2 * words, 64), torch.nn.Linear(64, words)
    norm = torch.nn.RMSNorm(64)
    parts = torch.nn.ModuleList([layer, embed, head, norm])
    optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        keys = torch.rand(16, words).argsort(-1)[:, :pairs]
        values = torch.randint(words, (16, pairs))
        order = torch.rand(16, pairs).argsort(-1)
        told = torch.stack((keys, values + words), -1).flatten(1)
        ids = torch.cat((told, keys.gather(1, order)), 1)
        x = embed(ids)
        logits = head(norm(x + layer(x)[0]))[:, 2 * pairs :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), values.gather(1, order).flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[:10]) / 10, sum(losses[-10:]) / 10


RECALLING = {
    "Titans, linear": lambda: Titans(64, 2, memory="linear"),
    "Titans, mlp": lambda: Titans(64, 2, memory="mlp"),
    # The answers were given in earlier chunks, out of the window's reach.
    "LaCT": lambda: LaCT(64, 2, chunk=8, window=8, conv_size=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECALLING)
def test_layer_learns_recall(name):
    torch.manual_seed(1)
    first, last = recall_loss(RECALLING[name](), 200)
    assert last < 0.5 * first

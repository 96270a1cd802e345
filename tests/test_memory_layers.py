"""The layers whose memory learns, at their default settings: trained on recall, then on texts far longer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.layers import TTTMLP, LaCT, LeastSquares, Titans, TTTLinear

pytestmark = pytest.mark.slow

LAYERS = {
    "TTTLinear": lambda: TTTLinear(64, 2),
    "TTTMLP": lambda: TTTMLP(64, 2),
    "Titans": lambda: Titans(64, 2),
    "Titans, mlp": lambda: Titans(64, 2, memory="mlp"),
    "LaCT": lambda: LaCT(64, 2),  # 12 tokens are no chunk of 2048: its attention alone learns here, and slowly
    "LeastSquares": lambda: LeastSquares(64, 2),
}


class Recaller(nn.Module):
    """Four pairs of a key (0 .. 7) and a value (8 .. 15), then the keys in another order: their values are asked."""

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


@pytest.mark.parametrize("name", LAYERS)
def test_recall_is_learnt_and_long_texts_stay_finite(name):
    """16,384 tokens, in float32 and bfloat16; half of the second row is one word. 2,000 single tokens add no bytes."""
    torch.manual_seed(0)
    net = Recaller(LAYERS[name]())
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

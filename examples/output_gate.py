"""Multi-head softmax attention with an output gate: o = attention(q, k, v) * sigmoid(gate), then the projection.

Softmax weights sum to 1, so a head always reads something. The gate, computed from the token itself, allows an output
of 0. attention_sink.py measures the effect.
"""

import torch
from torch import Tensor, nn

from lineate.layers import GatedAttention


class OutputGatedAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.gate, self.k, self.v, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        b, t, hidden = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))  # b h t d
        scores = q @ k.mT / q.shape[-1] ** 0.5  # b h t t
        future = torch.ones(t, t, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        o = (weights @ v).transpose(1, 2).reshape(b, t, hidden)  # heads concatenated
        return self.out(o * self.gate(x).sigmoid())


torch.manual_seed(0)
layer, x = OutputGatedAttention(64, heads=4), torch.randn(2, 50, 64)
y = layer(x)

# lineate's layer has one projection for q | gate | k | v, and returns keys and values as its state.
fast = GatedAttention(64, heads=4, qk_norm=None)
with torch.no_grad():
    fast.in_proj.weight.copy_(torch.cat([f.weight for f in (layer.q, layer.gate, layer.k, layer.v)]))
    fast.out_proj.weight.copy_(layer.out.weight)
whole, _ = fast(x)
first, state = fast(x[:, :30])
rest, state = fast(x[:, 30:], state)
print(f"difference from lineate.layers.GatedAttention: {(whole - y).abs().max():.1e}")
print(f"the same in two parts, 30 tokens and 20:       {(torch.cat((first, rest), 1) - y).abs().max():.1e}")

with torch.no_grad():
    layer.gate.weight.mul_(100)  # saturate the gates
    shut = (layer.gate(x).sigmoid() < 0.01).float().mean()
print(f"with 100 times the gate's weights {100 * shut:.0f}% of the channels are shut; softmax alone could shut none")

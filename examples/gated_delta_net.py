"""Gated DeltaNet without convolution, token by token: a layer that remembers in one k x v matrix a head.

    S'  = alpha_t S                            forget: alpha in (0, 1)
    S   = S' + beta_t k_t (v_t - S'^T k_t)^T   correct the value stored under k_t, by beta in (0, 1)
    o_t = S^T q_t / sqrt(k)                    read

Then RMSNorm, an output gate and a projection. The layer has no growing cache.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.layers import GatedDeltaNet as FastGatedDeltaNet


class GatedDeltaNet(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.gate, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(5))
        self.beta, self.decay = (nn.Linear(hidden, heads, bias=False) for _ in range(2))
        self.A_log, self.dt_bias = nn.Parameter(torch.rand(heads)), nn.Parameter(-2 * torch.rand(heads))
        self.norm = nn.RMSNorm(hidden // heads, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, gate = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v, self.gate))  # b t h d
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        beta = self.beta(x).sigmoid()  # b t h
        alpha = torch.exp(-self.A_log.exp() * F.softplus(self.decay(x) + self.dt_bias))
        S = x.new_zeros(x.shape[0], self.heads, q.shape[-1], v.shape[-1])  # b h k v
        outputs = []
        for t in range(x.shape[1]):
            S = alpha[:, t, :, None, None] * S
            answer = torch.einsum("bhkv,bhk->bhv", S, k[:, t])
            error = beta[:, t, :, None] * (v[:, t] - answer)
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], error)
            outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) / q.shape[-1] ** 0.5)
        o = self.norm(torch.stack(outputs, 1)) * F.silu(gate)  # b t h v
        return self.out(o.flatten(2))


torch.manual_seed(0)
layer, x = GatedDeltaNet(64, heads=4), torch.randn(2, 200, 64)
fast = FastGatedDeltaNet(64, heads=4, conv_size=0)  # in chunks; one projection for q | k | v | gate | beta | decay
parts = (layer.q, layer.k, layer.v, layer.gate, layer.beta, layer.decay)
with torch.no_grad():
    fast.in_proj.weight.copy_(torch.cat([f.weight for f in parts]))
    for mine, other in ((fast.out_proj, layer.out), (fast.norm, layer.norm)):
        mine.weight.copy_(other.weight)
    fast.A_log.copy_(layer.A_log), fast.dt_bias.copy_(layer.dt_bias)

y, (z, state) = layer(x), fast(x)
print(f"difference from lineate.layers.GatedDeltaNet: {(z - y).abs().max():.1e}")
y.square().mean().backward(), z.square().mean().backward()
expected = torch.cat([f.weight.grad for f in parts])
error = (fast.in_proj.weight.grad - expected).norm() / expected.norm()
print(f"of the gradients, relative:                   {error:.1e}")
print(f"the memory of a row, after 200 tokens or any number: {state.nbytes // 2} bytes")

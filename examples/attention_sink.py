"""Where softmax attention looks when there is nothing to read, with an output gate and without, on a toy task.

One head is trained to give the content of a marked token at tokens that ask for it, and 0 at all others. Its weights
sum to 1, so at those others it needs a token without content to look at (a sink), or a gate that shuts. Measured: 99%
of the weight goes to the first token if that is empty; if it is not, a head without a gate is wrong by .56, one with a
gate by .007. A head that has both still uses the sink: the gate makes it unnecessary here, it does not forbid it. This
is one task and one seed; it does not show what large models do.
"""

import torch
from torch import Tensor, nn

CONTENT, HIDDEN, TOKENS = 16, 32, 24
EMPTY, MARKED, ASKS, ALWAYS = range(CONTENT, CONTENT + 4)  # channels that say what a token is


def texts(n: int, sink: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, the target of each, and which of them ask: a fifth of those after the eighth."""
    x = torch.zeros(n, TOKENS, HIDDEN)
    x[..., :CONTENT], x[..., ALWAYS] = torch.randn(n, TOKENS, CONTENT), 3
    if sink:
        x[:, 0, :CONTENT], x[:, 0, EMPTY] = 0, 3
    every, place = torch.arange(n), torch.randint(1, 8, (n,))
    asks = (torch.rand(n, TOKENS) < 0.2) & (torch.arange(TOKENS) >= 8)
    x[every, place, MARKED], x[..., ASKS] = 3, 3.0 * asks
    wanted = torch.zeros_like(x)
    wanted[..., :CONTENT] = x[every, place, None, :CONTENT] * asks[..., None]
    return x, wanted, asks


def attend(layer: nn.ModuleDict, x: Tensor, gated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the weights `b t t`, and the gate."""
    scores = layer["q"](x) @ layer["k"](x).mT / HIDDEN**0.5
    future = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    gate = layer["gate"](x).sigmoid() if gated else torch.ones_like(x)
    return layer["out"](gate * (weights @ layer["v"](x))), weights, gate


print("gate  empty first token  error  at tokens that do not ask: weight on the first token, mean gate")
for gated, sink in ((False, True), (False, False), (True, True), (True, False)):
    torch.manual_seed(0)
    layer = nn.ModuleDict({name: nn.Linear(HIDDEN, HIDDEN, bias=False) for name in ("q", "k", "v", "gate", "out")})
    optimizer = torch.optim.Adam(layer.parameters(), lr=2e-2)
    for _ in range(120):
        x, wanted, _ = texts(32, sink)
        optimizer.zero_grad()
        (attend(layer, x, gated)[0] - wanted).square().sum(-1).mean().backward()
        optimizer.step()
    with torch.no_grad():
        x, wanted, asks = texts(512, sink)
        y, weights, gate = attend(layer, x, gated)
        error = (y - wanted).square().sum() / wanted.square().sum()
        idle = ~asks & (torch.arange(TOKENS) >= 8)
        values = error, weights[..., 0][idle].mean(), gate.mean(-1)[idle].mean()
    print("{:4}  {:17}  {:.3f}  {:.2f}  {:.2f}".format("yes" if gated else "no", "yes" if sink else "no", *values))

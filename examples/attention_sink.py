"""Measure attention sinks on a toy task: the weights of tokens that need no content, with and without an output gate.

One head is trained to return the content of a marked token at tokens that query it, and 0 at all others. Its weights
sum to 1, so at the others it needs a token without content to attend to (a sink), or a gate that closes. Measured: 99%
of the weight goes to the first token if that is empty. If it is not, the relative error is .56 without a gate and .007
with one. A head that has both still uses the sink: the gate makes it unnecessary but does not prevent it. This is one
task and one seed; it says nothing about large models.
"""

import torch
from torch import Tensor, nn

CONTENT, HIDDEN, TOKENS = 16, 32, 24
EMPTY, MARKED, ASKS, ALWAYS = range(CONTENT, CONTENT + 4)  # channels that mark the kind of a token


def texts(n: int, sink: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, the target of each, and a mask of the tokens that query: a fifth of those after the eighth."""
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

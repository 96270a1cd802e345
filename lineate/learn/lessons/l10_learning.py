"""Attention as learning at test time: loss, optimiser, model."""

from typing import TYPE_CHECKING

import torch

from lineate.learn.drawing import panels
from lineate.learn.lesson import Equality, Exercise, Lesson, Measure, Names, Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EQUATION = """\
read     y = f(W; q)                                  a memory is a small model f with weights W
write    W <- decay W - rate * dLoss(f; k, v)/dW      one step of an optimiser on the newest pair
"""

TEXT = """\
A memory is a model that is trained while it reads, and five choices make it: the model, the loss, the optimiser,
what is forgotten, and how many tokens share the weights at which the gradient is taken (the chunk).

| known as | model | loss | optimiser |
|---|---|---|---|
| linear attention | S^T x | -(S^T k) . v | SGD, rate 1 |
| DeltaNet | S^T x | 1/2 squared error | SGD, rate beta |
| Gated DeltaNet, KDA | S^T x | the same | SGD with weight decay |
| Gated DeltaProduct [Siems2025] | S^T x | the same, of n pairs a token | n steps of SGD, decay before the first |
| GDN-2 [Hatamizadeh2026] | S^T x | the same, at the probe erase * k | a step along k, not along the probe |
| RWKV-7 [Peng2025] | S^T x | (S^T kk) . (S^T kk) / 2, then -(S^T k) . v | SGD, a rate and a decay a channel |
| least squares (Mesa) [Oswald2023] | S^T x | the same, of all pairs so far | the exact minimum |
| TTT [Sun2024] | x + LN(W x + b), or an MLP | squared error of LN | SGD, 16 tokens a step |
| Titans [Behrouz2025] | matrix or MLP | squared error | SGD with momentum and weight decay |
| LaCT [Zhang2025] | SwiGLU | -f(k) . v | Muon, 2048 tokens a step |

The first loss has a gradient that does not depend on S: it is cheap, and nothing is corrected. **Momentum** carries a
part of the last step into the next. **Muon** [Jordan2024] replaces a gradient by the nearest matrix whose singular
values are all 1, so that weak directions of a chunk are written as strongly as its strong ones.

From another point of view it is **compression**: the weights represent the text in a fixed number of bytes, and the
loss determines what the compression keeps. The state of a head of 128 channels has 16,384 numbers; the keys and values
of 4096 tokens have 1,048,576. `run_reference` below takes every gradient by autograd, so a rule of your own is one line
([memory.md](../memory.md)).
"""

CODE = """\
import torch, lineate
from dataclasses import replace
from lineate.memory import MEMORY_RULES, run_reference
from lineate.memory.parts import orthogonalise

torch.manual_seed(0)
t, d = 24, 8
q, k, v = torch.randn(3, 1, t, 1, d, dtype=torch.float64)
k = torch.nn.functional.normalize(k, dim=-1)
log_decay, rate = -torch.rand(1, t, 1, d, dtype=torch.float64), torch.rand(1, t, 1, dtype=torch.float64)
empty = {"S": torch.zeros(1, d, d, dtype=torch.float64)}
learn = lambda rule, **gates: run_reference(rule, q, k, v, gates, empty)[0]

correlated = learn(MEMORY_RULES["linear attention"])               # the gradient of -(S^T k) . v, by autograd
squared = learn(MEMORY_RULES["DeltaNet"], rate=rate)
decayed = learn(MEMORY_RULES["KDA"], rate=rate, log_decay=log_decay)
titans = replace(MEMORY_RULES["Titans"], chunk=1)                  # momentum
still, moving = (learn(titans, rate=rate, momentum=m + 0 * rate) for m in (0.0, 0.5))
gradient = torch.randn(d, 2 * d, dtype=torch.float64)
muon = torch.linalg.svdvals(orthogonalise(gradient))
print(f"singular values of a gradient after Muon: {muon.min():.2f} to {muon.max():.2f}")

keys, values = torch.randn(2, 1, t, 2, 1, d, dtype=torch.float64)  # two pairs a token
keys, rates = torch.nn.functional.normalize(keys, dim=-1), torch.rand(1, t, 2, 1, dtype=torch.float64)
flat = lambda x: x.flatten(1, 2)
two_steps = run_reference(MEMORY_RULES["DeltaNet"], q.repeat_interleave(2, 1), flat(keys), flat(values),
                          {"rate": flat(rates)}, empty)[0][:, 1::2]
"""


def draw(names: Names) -> "Figure":
    """Draw the error of the newest pairs for some rules, and singular values before and after Muon."""
    from dataclasses import replace

    from lineate.memory import MEMORY_RULES, run_reference

    figure, (left, right) = panels(2)
    t, d = 96, 16
    K = torch.nn.functional.normalize(torch.randn(1, t, 1, d, dtype=torch.float64), dim=-1)
    V = torch.einsum("btk,kv->btv", K[:, :, 0], torch.randn(d, d, dtype=torch.float64))[:, :, None]
    one, empty = torch.ones(1, t, 1, dtype=torch.float64), {"S": torch.zeros(1, d, d, dtype=torch.float64)}
    titans = replace(MEMORY_RULES["Titans"], chunk=1)
    runs = {
        "correlation": (MEMORY_RULES["linear attention"], {}, "#444444", ":"),
        "squared error, SGD": (MEMORY_RULES["DeltaNet"], {"rate": 0.5 * one}, "#D55E00", "-"),
        "with momentum 0.5": (titans, {"rate": 0.5 * one, "momentum": 0.5 * one}, "#CC79A7", "--"),
        "exact minimum": (MEMORY_RULES["least squares"], {"rate": one}, "#0072B2", "-"),
    }
    ahead = torch.cat((K[:, 1:], K[:, -1:]), 1)  # token i asks for the key of token i + 1
    for label, (rule, gates, colour, style) in runs.items():
        y = run_reference(rule, ahead, K, V, gates, empty, ridge=0.01)[0][0, :-1, 0]
        errors = (y - V[0, 1:, 0]).norm(dim=-1) / V[0, 1:, 0].norm(dim=-1)
        smooth = torch.nn.functional.avg_pool1d(errors[None], 9, 1, 4, count_include_pad=False)[0]
        left.plot(smooth.tolist(), style, color=colour, label=label)
    left.set(yscale="log", xlabel="tokens", ylim=(1e-4, 20))
    left.set_title("error of the next value")
    left.legend(fontsize=7, loc="lower left")
    right.plot(torch.linalg.svdvals(names["gradient"]).tolist(), "o-", color="#444444", label="gradient")
    right.plot(names["muon"].tolist(), "s-", color="#009E73", label="after Muon")
    right.set(xlabel="singular value, by size", ylim=(0, None))
    right.set_title("Muon makes directions equal")
    right.legend(fontsize=8)
    return figure


LESSON = Lesson(
    name="learning",
    title="Attention as learning at test time",
    equation=EQUATION,
    text=TEXT,
    code=CODE,
    claims=(
        Equality(
            "descending -(S^T k) . v is linear attention",
            "lineate.linear_attention(q, k, v, scale=1.0).output",
            "correlated",
        ),
        Equality(
            "descending the squared error is DeltaNet", "lineate.delta_rule(q, k, v, rate, scale=1.0).output", "squared"
        ),
        Equality(
            "with a weight decay a channel it is KDA",
            "lineate.kimi_delta_attention(q, k, v, log_decay, rate, scale=1.0).output",
            "decayed",
        ),
        Equality(
            "two steps a token, read after the second, are DeltaProduct",
            "lineate.gated_delta_product(q, keys, values, None, rates, scale=1.0).output",
            "two_steps",
        ),
        Equality("Titans without momentum and decay, a token a step, is DeltaNet", "still", "squared"),
        Measure("relative change by a momentum of 0.5", "(moving - still).norm() / still.norm()", 0.1, 3),
        Measure("smallest singular value after Muon", "muon.min()", 0.9, 1.1),
        Measure("largest singular value after Muon", "muon.max()", 0.9, 1.1),
    ),
    picture=Picture(
        "Left: the loss and the optimiser decide how fast a linear truth is learnt. Right: what Muon does.", draw
    ),
    exercise=Exercise(
        question=(
            "Add (lambda / 2) ||S||^2 to the squared error and take one plain step with rate beta. Which transition "
            "does S get? Is it Gated DeltaNet's?"
        ),
        answer=(
            "S_new = (a I - beta k k^T) S + beta k v^T with a = 1 - beta lambda. Gated DeltaNet has a (I - beta k "
            "k^T): it decays first, and compares with what is left. [Where write-ups disagree](disagreements.md) "
            "shows how the two are renamed into each other."
        ),
        code="""\
from lineate.memory import MATRIX, MemoryRule, squared_error
penalty = lambda model, w, x, y: squared_error(model, w, x, y) + 0.2 / 2 * w["S"].square().sum()
penalised, S, rows = learn(MemoryRule("ridge step", MATRIX, penalty), rate=rate), empty["S"][0], []
for x, y, b, z in zip(k[0, :, 0], v[0, :, 0], rate[0, :, 0], q[0, :, 0]):
    S = ((1 - 0.2 * b) * torch.eye(d, dtype=torch.float64) - b * torch.outer(x, x)) @ S + b * torch.outer(x, y)
    rows.append(S.T @ z)
gated = lineate.gated_delta_rule(q, k, v, (1 - 0.2 * rate).log(), rate, scale=1.0).output
""",
        claims=(
            Equality("the step has this transition", "penalised[0, :, 0]", "torch.stack(rows)"),
            Measure(
                "relative difference to Gated DeltaNet", "(gated - penalised).norm() / penalised.norm()", 0.01, 0.5
            ),
        ),
    ),
    next=(
        "However well it learns, a fixed memory forgets, and softmax attention does not. Models mix the two kinds "
        "of layer: how many of each, and what the few softmax layers then look like, is the next question."
    ),
)

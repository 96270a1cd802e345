"""The delta rule, written four ways."""

from typing import TYPE_CHECKING

import torch

from lineate.learn.drawing import panels, rule_lines
from lineate.learn.lesson import Equality, Exercise, Lesson, Measure, Names, Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EQUATION = """\
compare and correct     S + beta k (v - S^T k)^T
gradient descent        S - beta dL/dS,   L = 1/2 ||S^T k - v||^2
Householder             (I - beta k k^T) S + beta k v^T
least change            argmin_Z ||Z - S||^2 + eta ||Z^T k - v||^2,   beta = eta / (1 + eta), unit k
"""

TEXT = """\
Before writing, ask the memory what it holds for this key, and write only the difference, or a part of it: beta, a
number for each token that the model computes, says how large a part. This is DeltaNet [Schlag2021], [Yang2024b].
The four lines above are one rule:

1. The error v - S^T k is written along the key.
2. The gradient of the squared error is k (S^T k - v)^T: one step of descent with rate beta, on the newest pair
   alone.
3. The old state is multiplied by I - beta k k^T. At beta = 2 and a unit key this is a Householder reflection, at
   beta = 1 a projection that removes what is stored at k. A chunk of tokens is a product of such matrices, which
   has a short form known from numerical linear algebra ([Schreiber1989]; `lineate` uses it in every chunk).
4. Among all memories that answer v for k, at beta = 1, it is the one nearest to the old memory. Below 1 it weighs two
   goals, to change little and to answer v; the second has eta times the weight of the first.

Reading k afterwards gives (1 - g) v_old + g v with g = beta ||k||^2, and a key that is orthogonal to k reads the
same as before. So unit keys matter: then beta itself is the part that is replaced, and the memory is stable for 0
<= beta <= 2.
"""

CODE = """\
import torch, lineate

torch.manual_seed(0)
d, beta = 16, 0.7
S = torch.randn(d, d, dtype=torch.float64, requires_grad=True)
k = torch.nn.functional.normalize(torch.randn(d, dtype=torch.float64), dim=0)
v, I = torch.randn(d, dtype=torch.float64), torch.eye(d, dtype=torch.float64)
row = lambda x: x[None, None, None]                                # b t h k of one token
rate = lambda beta: torch.full((1, 1, 1), beta, dtype=torch.float64)
op = lambda beta: lineate.delta_rule(row(k), row(k), row(v), rate(beta), state=S.detach()[None, None])

correct = S + beta * torch.outer(k, v - S.T @ k)
descend = S - beta * torch.autograd.grad((S.T @ k - v).square().sum() / 2, S)[0]
reflect = (I - beta * torch.outer(k, k)) @ S + beta * torch.outer(k, v)
eta = beta / (1 - beta)
nearest = torch.linalg.solve(I + eta * torch.outer(k, k), S + eta * torch.outer(k, v))
fits = S + torch.linalg.pinv(k[None]) @ (v - S.T @ k)[None]        # the least change with S^T k = v
print(f"error of the answer: {(S.T @ k - v).norm():.2f}, and {(correct.T @ k - v).norm():.2f} after the write")
"""


def draw(names: Names) -> "Figure":
    """Draw where the answer moves for each beta, and the error of all pairs while they are written."""
    import lineate

    figure, (left, right) = panels(2)
    old, new = torch.tensor([-1.0, -0.5]), torch.tensor([1.0, 0.6])
    left.plot(*zip(old, new + (new - old), strict=True), color="lightgray", zorder=0)
    for beta in (0.0, 0.25, 0.5, 1.0, 1.5, 2.0):
        x, y = ((1 - beta) * old + beta * new).tolist()
        left.plot(x, y, "o", color="#0072B2")
        left.annotate(f"{beta:g}", (x, y), xytext=(3, -12), textcoords="offset points", fontsize=8)
    for label, (x, y), away in (("old", old.tolist(), -4), ("new", new.tolist(), -12)):
        left.annotate(label, (x, y), xytext=(away, 8), textcoords="offset points")
    left.set(xlim=(-1.6, 3.6), ylim=(-1, 2.2))
    left.set_title("the answer for k, by beta")
    n, d = 64, 64
    K = torch.nn.functional.normalize(torch.randn(1, n, 1, d, dtype=torch.float64), dim=-1).repeat(1, 4, 1, 1)
    V = torch.randn(1, n, 1, d, dtype=torch.float64).repeat(1, 4, 1, 1)
    rates, writes = torch.ones(1, 4 * n, 1, dtype=torch.float64), range(n // 4, 4 * n + 1, n // 4)
    for name in ("linear_attention", "delta_rule"):
        errors = []
        for told in writes:
            pairs, seen = (K[:, :told], K[:, :told], V[:, :told]), min(told, n)
            adds = name == "linear_attention"
            made = lineate.linear_attention(*pairs) if adds else lineate.delta_rule(*pairs, rates[:, :told])
            wrong = K[0, :seen, 0] @ made.state[0, 0] - V[0, :seen, 0]
            errors.append(float(wrong.norm() / V[0, :seen, 0].norm()))
        rule_lines(right, writes, {name: errors})
    right.axvline(n, color="gray", linewidth=1, linestyle=":")
    right.set(xlabel="writes; 64 pairs, then the same again")
    right.set_title("error of all pairs so far")
    right.legend(fontsize=8)
    return figure


LESSON = Lesson(
    name="delta",
    title="The delta rule, four ways",
    equation=EQUATION,
    text=TEXT,
    code=CODE,
    claims=(
        Equality("lineate's op compares and corrects", "op(beta).state[0, 0]", "correct.detach()"),
        Equality("which is a step of gradient descent", "op(beta).state[0, 0]", "descend.detach()"),
        Equality("which is a Householder-like product", "op(beta).state[0, 0]", "reflect.detach()"),
        Equality("which is the least change, with a penalty", "op(beta).state[0, 0]", "nearest.detach()"),
        Equality("and at beta = 1 the least change that fits", "op(1.0).state[0, 0]", "fits.detach()"),
        Equality(
            "what is read moves by beta", "op(beta).state[0, 0].T @ k", "((1 - beta) * S.T @ k + beta * v).detach()"
        ),
        Measure(
            "largest eigenvalue of I - beta k k^T",
            "torch.linalg.eigvalsh(I - beta * torch.outer(k, k)).abs().max()",
            1 - 1e-12,
            1 + 1e-12,
        ),
    ),
    picture=Picture(
        "Left: the answer moves along the line from the old value to the new one. Right: on repetition, the delta rule "
        "gets better, and the sum gets worse.",
        draw,
    ),
    exercise=Exercise(
        question=(
            "Let all keys be one unit vector. Write v = 1 with beta = 1. Then, for each bit of 1 0 1 1 0 1, write v "
            "= 0 with beta = 2 times the bit. What does the memory answer at the end of each step? Why can beta <= "
            "1 not do this?"
        ),
        answer=(
            "It answers (-1)^(number of ones so far): -1 -1 1 -1 -1 1, the parity. Each one is a reflection, with "
            "eigenvalue 1 - beta = -1. With beta <= 1 the eigenvalue is not negative, and on a run of ones the "
            "answer can only move one way ([Grazzi2025])."
        ),
        code="""\
bits = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.float64)
keys = torch.ones(1, 7, 1, 1, dtype=torch.float64)
values = torch.tensor([1.0, 0, 0, 0, 0, 0, 0], dtype=torch.float64).view(1, 7, 1, 1)
rates = torch.cat((torch.ones(1, dtype=torch.float64), 2 * bits)).view(1, 7, 1)
parity = lineate.delta_rule(keys, keys, values, rates, scale=1.0).output.flatten()[1:]
""",
        claims=(Equality("the answers are the parity", "parity", "(-1) ** bits.cumsum(0)"),),
    ),
    next=(
        "One step on the newest pair is not the best that can be done with all pairs so far. Engineers and "
        "psychologists met this rule and its better relatives long before attention; they are worth knowing by name."
    ),
)

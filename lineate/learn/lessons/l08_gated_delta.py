"""Gated DeltaNet: decay per head, then the delta rule."""

from typing import TYPE_CHECKING

import torch

from lineate.learn.drawing import matrices
from lineate.learn.lesson import Equality, Exercise, Lesson, Measure, Names, Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EQUATION = """\
S'  = a_t S_{t-1}                                     forget: one number a head and token
r   = v_t - S'^T k_t                                  compare, with the memory that is left
S_t = S' + beta_t k_t r^T                             write
    = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
"""

TEXT = """\
Gated DeltaNet [Yang2025] takes both gates. beta_t says how much of one key's value is replaced; a_t says how much
of everything is kept. A token that begins a new topic can clear the memory in one step (a_t near 0), which the
delta rule alone would have to do key by key; and a token that corrects a fact can do so without fading the rest
(a_t = 1).

As learning, it is weight decay followed by one step of gradient descent, the gradient taken at the decayed weights.
The order matters for what is compared: the error is measured against the memory after the decay, so a full
write (beta = 1, unit key) stores exactly v. With one number for the whole head, decay and erase commute, so the
product a (I - beta k k^T) can be read in either order.

The matrix that multiplies the old state, the **transition** of the token, never increases a norm: for unit keys, 0 <=
beta <= 2 and a <= 1 its norm is at most 1. Qwen3-Next [QwenNext2025], Qwen3.5 [Qwen2026] and OLMo-Hybrid
[OlmoHybrid2026] use this rule in three of four layers.
"""

CODE = """\
import torch, lineate

torch.manual_seed(0)
t, d = 96, 16
q, k, v = torch.randn(3, 1, t, 1, d, dtype=torch.float64)
k = torch.nn.functional.normalize(k, dim=-1)
log_decay, beta = -torch.rand(1, t, 1, dtype=torch.float64), torch.rand(1, t, 1, dtype=torch.float64)
log_decay[:, 40] = -torch.inf                                      # a reset: everything before is forgotten
op = lambda form="auto": lineate.gated_delta_rule(q, k, v, log_decay, beta, scale=1.0, form=form)

I, S, norms = torch.eye(d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64), []
for i in range(t):
    x, y, a, b = k[0, i, 0], v[0, i, 0], log_decay[0, i, 0].exp(), beta[0, i, 0]
    F = a * (I - b * torch.outer(x, x))
    S = F @ S + b * torch.outer(x, y)
    norms.append(torch.linalg.matrix_norm(F, 2))

kept = (a * S).requires_grad_()                                    # once more, as learning: decay, then descend
step = kept - b * torch.autograd.grad((kept.T @ x - y).square().sum() / 2, kept)[0]
last = [z[:, -1:] for z in (q, k, v, log_decay, beta)]
print(f"norm of a transition: {max(norms):.3f} at most, {min(norms):.3f} at the reset")
"""


def draw(names: Names) -> "Figure":
    """Draw what each token reads of each value, for three rules."""
    import lineate

    keys = torch.eye(4, dtype=torch.float64)[[0, 1, 2, 0, 1, 3, 3, 0, 1, 2]][None, :, None]
    log_decay, beta = torch.zeros(1, 10, 1, dtype=torch.float64), torch.ones(1, 10, 1, dtype=torch.float64)
    log_decay[:, 5] = torch.tensor(0.15).log()
    beta[:, 7:] = 0  # the last three tokens only ask
    return matrices(
        {
            "gated linear": lineate.attention_matrix(keys, keys, log_decay, scale=1.0)[0, 0] * (beta[0, :, 0] > 0),
            "delta rule": lineate.attention_matrix(keys, keys, None, beta, scale=1.0)[0, 0],
            "gated delta rule": lineate.attention_matrix(keys, keys, log_decay, beta, scale=1.0)[0, 0],
        },
        list("ABCABDDabc"),
    )


LESSON = Lesson(
    name="gated-delta",
    title="Gated DeltaNet: forget, then correct",
    equation=EQUATION,
    text=TEXT,
    code=CODE,
    claims=(
        Equality("the op is the product of the transitions", "op().state[0, 0]", "S"),
        Equality(
            "chunks give what single tokens give, across a reset", "op('chunkwise').output", "op('recurrent').output"
        ),
        Equality(
            "without decay it is the delta rule",
            "lineate.gated_delta_rule(q, k, v, 0 * beta, beta).output",
            "lineate.delta_rule(q, k, v, beta).output",
        ),
        Equality(
            "a token is weight decay and a step of descent",
            "lineate.gated_delta_rule(*last, state=S[None, None]).state[0, 0]",
            "step.detach()",
        ),
        Measure("largest norm of a transition", "max(norms)", 0, 1 + 1e-12),
    ),
    picture=Picture(
        "What each token (row) reads of each value (column). A and B are written twice, then the first D decays all "
        "by 0.15, and a, b, c only ask. Only the last panel both replaces and lets go.",
        draw,
    ),
    exercise=Exercise(
        question="What is read at k_t right after its write with beta_t = 1 and a unit key? Does it depend on a_t?",
        answer=(
            "Exactly v_t, for every a_t: S_t^T k = S'^T k + (v - S'^T k) = v. The decay acts on the content from "
            "before, and that part is replaced."
        ),
        code="""\
after = [
    lineate.gated_delta_rule(k[:, :1], k[:, :1], v[:, :1], torch.full((1, 1, 1), g).double(), 0 * beta[:, :1] + 1,
                             scale=1.0, state=S[None, None]).output[0, 0, 0]
    for g in (0.0, -0.5, -5.0, -torch.inf)
]
""",
        claims=(Equality("every decay gives v", "torch.stack(after)", "v[0, :1, 0].repeat(4, 1)"),),
    ),
    next=(
        "One number forgets the whole head. A name that was mentioned once and the topic of the page fade together. "
        "Give every key channel a rate of its own."
    ),
)

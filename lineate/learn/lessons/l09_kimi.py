"""Kimi Delta Attention: decay per key channel, then the delta rule."""

from typing import TYPE_CHECKING

import torch

from lineate.learn.drawing import matrices
from lineate.learn.lesson import Equality, Exercise, Lesson, Measure, Names, Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EQUATION = """\
S'  = Diag(a_t) S_{t-1}                               forget: one number a key channel, head and token
r   = v_t - S'^T k_t                                  compare
S_t = S' + beta_t k_t r^T                             write
    = (I - beta_t k_t k_t^T) Diag(a_t) S_{t-1} + beta_t k_t v_t^T
"""

TEXT = """\
Kimi Delta Attention [Kimi2025] makes one change: the decay is a vector. Row x of S holds the content written through
key channel x, and Diag(a) on the left of S gives every row its own factor. So a head can hold some directions for a
whole text and others for a few tokens, and a token can drop one of them and leave the rest.

A diagonal matrix does not commute with k k^T. The order is now part of the rule: **decay first, then compare and
write**. In the other order, Diag(a) (I - beta k k^T), a full write would leave a residue that was never a value.

In a chunk, the decay sits inside the sum over channels, sum_x q_ix k_jx exp(G_ix - G_jx), and can no longer be
multiplied onto finished scores. Splitting the exponential, exp(G_i) exp(-G_j), overflows: with a log_decay of -5 a
token, float32 overflows at the 18th token. `lineate` evaluates only exponents that are at most 0, so that a reset
(-inf) is exact.

Kimi Linear has three such layers for one of latent attention (lesson 11), without position encodings anywhere.
"""

CODE = """\
import torch, lineate

torch.manual_seed(0)
t, d = 96, 16
q, k, v, raw = torch.randn(4, 1, t, 1, d, dtype=torch.float64)
k = torch.nn.functional.normalize(k, dim=-1)
log_decay, beta = -raw.abs(), torch.rand(1, t, 1, dtype=torch.float64)      # b t h k: one decay a key channel
log_decay[:, 30, :, 3] = -torch.inf                                # channel 3 is reset, the others are not
op = lambda form="auto": lineate.kimi_delta_attention(q, k, v, log_decay, beta, scale=1.0, form=form)

I, S, other = torch.eye(d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64), 0
for x, y, g, b in zip(k[0, :, 0], v[0, :, 0], log_decay[0, :, 0], beta[0, :, 0]):
    erase, decay, write = I - b * torch.outer(x, x), g.exp().diag(), b * torch.outer(x, y)
    S, other = erase @ decay @ S + write, decay @ erase @ S + write         # and one step in the other order

same = log_decay[..., :1].clamp(min=-5.0)                          # equal channels
print(f"relative difference of one step in the other order: {(other - S).norm() / S.norm():.3f}")
"""


def draw(names: Names) -> "Figure":
    """Draw a state before and after a token that forgets, per head and per channel."""
    import lineate

    state, none = torch.randn(1, 1, 8, 8, dtype=torch.float64).abs(), torch.zeros(1, 1, 1, 8, dtype=torch.float64)
    still, half = none[..., 0], torch.full((1, 1, 1), 0.5, dtype=torch.float64).log()
    channels = none.clone()
    channels[..., [2, 5]] = -torch.inf
    per_head = lineate.gated_delta_rule(none, none, none, half, still, state=state).state
    per_channel = lineate.kimi_delta_attention(none, none, none, channels, still, state=state).state
    return matrices(
        {
            "before": state[0, 0],
            "one decay a head, 0.5": per_head[0, 0],
            "one a channel: 2 and 5 are 0": per_channel[0, 0],
        }
    )


LESSON = Lesson(
    name="kimi",
    title="Kimi Delta Attention: one decay a channel",
    equation=EQUATION,
    text=TEXT,
    code=CODE,
    claims=(
        Equality("the op is the product of the transitions, decay first", "op().state[0, 0]", "S"),
        Equality(
            "chunks give what single tokens give, across a reset", "op('chunkwise').output", "op('recurrent').output"
        ),
        Equality(
            "with equal channels it is Gated DeltaNet",
            "lineate.kimi_delta_attention(q, k, v, same.expand(-1, -1, -1, d), beta).output",
            "lineate.gated_delta_rule(q, k, v, same[..., 0], beta).output",
        ),
        Measure(
            "relative difference of one step in the other order",
            "(other - S).norm() / S.norm()",
            0.01,
            1,
        ),
    ),
    picture=Picture(
        "A row is a key channel. A gate per head fades all rows; a gate per channel drops two and keeps six.", draw
    ),
    exercise=Exercise(
        question=(
            "By hand: k = (.6, .8), a = (1, .5), beta = 1, S = I, v = (0, 0). What is S_new, and what does it "
            "return for k? Do the same with the decay after the erase."
        ),
        answer=(
            "(I - k k^T) Diag(a) = [[.64, -.24], [-.48, .18]], which returns (0, 0): forgotten, as intended. Diag(a) "
            "(I - k k^T) = [[.64, -.48], [-.24, .18]] returns (.192, -.144), which was never a value."
        ),
        code="""\
x, g = torch.tensor([0.6, 0.8], dtype=torch.float64), torch.tensor([1.0, 0.5], dtype=torch.float64).log()
one, eye = x.view(1, 1, 1, 2), torch.eye(2, dtype=torch.float64)
full = torch.ones(1, 1, 1, dtype=torch.float64)
new = lineate.kimi_delta_attention(one, one, 0 * one, g.view(1, 1, 1, 2), full, state=eye[None, None]).state[0, 0]
swapped = g.exp().diag() @ (eye - torch.outer(x, x))
""",
        claims=(
            Equality("the op's state", "new", "torch.tensor([[0.64, -0.24], [-0.48, 0.18]], dtype=torch.float64)"),
            Equality("it returns nothing", "new.T @ x", "torch.zeros(2, dtype=torch.float64)"),
            Equality("the other order", "swapped.T @ x", "torch.tensor([0.192, -0.144], dtype=torch.float64)"),
        ),
    ),
    next=(
        "Each of these rules is a gradient step on some loss. If the memory is a model that learns while it reads, "
        "then the loss, the optimiser and the model itself can be chosen."
    ),
)

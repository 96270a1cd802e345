"""Decay: forgetting as a factor a token, and how a gate relates to rotary positions."""

from typing import TYPE_CHECKING

from lineate.learn.drawing import panels
from lineate.learn.lesson import Equality, Exercise, Lesson, Measure, Names, Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EQUATION = """\
S_t = a_t S_{t-1} + k_t v_t^T,   a_t = exp(log_decay_t)           0 <= a_t <= 1
o_i = sum_{j<=i} exp(G_i - G_j) (q_i . k_j) v_j                   G_i = log_decay_1 + ... + log_decay_i
rotary positions:   q_i^T R^{i-j} k_j    with R orthogonal        turns, and never forgets
"""

TEXT = """\
Multiply the state by a number below 1 before each write. A pair that was written at j counts exp(G_i - G_j) at
token i: the product of the decays in between. With a constant a (RetNet, [Sun2023]) the weight falls by a fixed
half-life of ln 2 / -log_decay tokens. With a gate a_t that is made from the token (Mamba-2 [Dao2024], GLA
[Yang2024a]) the model decides when to forget; log_decay = -inf is a reset. The state is now bounded: for a constant
a by the largest write, divided by 1 - a.

**A gate and rotary positions (RoPE) are of one kind.** Both put a product of matrices between query and key, with one
matrix for each token from j + 1 to i. For a gate each is a_t I. For rotary positions [Su2021], with which many softmax
layers receive the distance of two tokens, each is a rotation R by fixed angles. Rotating queries and keys by their
positions and then running linear attention is the same as turning the state by R at every token. A rotation keeps all
lengths, so written content never decays; it only rotates relative to the query. A decay shrinks and does not turn, so
the weight tells the distance too: this is why layers with a gate can do without other positions. ALiBi [Press2021],
which subtracts a multiple of i - j from the scores of a softmax, is such a decay too: it multiplies the weights by
powers of one number before they are divided by their sum.
"""

CODE = """\
import torch, lineate
from lineate.layers.rope import rotate, turns

torch.manual_seed(0)
t, d = 64, 16
q, k, v = torch.randn(3, 1, t, 1, d, dtype=torch.float64)
log_decay = -torch.rand(1, t, 1, dtype=torch.float64)              # b t h: one number a token and head
G = log_decay[0, :, 0].cumsum(0)
gated = (q[0, :, 0] @ k[0, :, 0].T).tril() * (G[:, None] - G).tril().exp()
output = lineate.gated_linear_attention(q, k, v, log_decay, scale=1.0).output

turn = turns(torch.arange(t), d, 10000.0, torch.float64)           # cos and sin of every position
turned = lineate.linear_attention(rotate(q, turn), rotate(k, turn), v, scale=1.0).output
basis, one = torch.eye(d, dtype=torch.float64)[None, :, None], turns(torch.ones(d), d, 10000.0, torch.float64)
R = rotate(basis, one)[0, :, 0]                                    # the turn of one token, as a matrix
S, rows = torch.zeros(d, d, dtype=torch.float64), []
for i in range(t):                                                 # the rotation as a transition of the state
    S = R @ S + k[0, i, 0, :, None] * v[0, i, 0]
    rows.append(q[0, i, 0] @ S)
print(f"left of the first pair after {t} tokens: {(G[-1] - G[0]).exp():.1e}; a turn takes nothing")
"""


def draw(names: Names) -> "Figure":
    """Draw the weight of a pair against its age, with a gate and with rotary positions."""
    import torch

    from lineate.layers.rope import rotate, turns

    figure, (left, right) = panels(2, sharey=True)
    ages, d = torch.arange(0, 257), 16
    for a, style in ((0.9, ":"), (0.98, "--"), (0.999, "-")):
        left.plot(ages, a**ages, style, color="#009E73", label=f"a = {a}")
    left.set(xlabel="age of a pair, tokens")
    left.set_title("a gate fades")
    ones = torch.ones(1, len(ages), 1, d, dtype=torch.float64) / d**0.5
    weights = rotate(ones, turns(ages, d, 10000.0, torch.float64))[0, :, 0] @ ones[0, 0, 0]
    right.plot(ages, weights, color="#444444", label="q . R^age k, q = k")
    right.plot(ages, torch.ones(len(ages)), "--", color="#444444", label="length of R^age k")
    right.set(xlabel="age of a pair, tokens", ylim=(-0.45, 1.1))
    right.set_title("a rotation turns")
    left.legend(fontsize=8, loc="lower right", ncols=3, columnspacing=0.8, handlelength=1.5)
    right.legend(fontsize=8, loc="lower right")
    return figure


LESSON = Lesson(
    name="decay",
    title="Decay, and what a gate has to do with positions",
    equation=EQUATION,
    text=TEXT,
    code=CODE,
    claims=(
        Equality("a pair counts the product of the decays after it", "output[0, :, 0]", "gated @ v[0, :, 0]"),
        Equality(
            "lineate's attention matrix is the same",
            "lineate.attention_matrix(q, k, log_decay, scale=1.0)[0, 0]",
            "gated",
        ),
        Equality("rotary positions turn the state", "turned[0, :, 0]", "torch.stack(rows)"),
        Equality("the turn is orthogonal", "R.T @ R", "torch.eye(d, dtype=torch.float64)"),
        Measure(
            "length of what is left of a key after 64 rotations, of 1",
            "(torch.linalg.matrix_power(R, t) @ k[0, 0, 0]).norm() / k[0, 0, 0].norm()",
            1 - 1e-12,
            1 + 1e-12,
        ),
        Measure("length after the 64 decays", "G[-1].exp()", 0, 1e-10),
    ),
    picture=Picture("What a pair of a given age still weighs, under three decays and under rotary positions.", draw),
    exercise=Exercise(
        question="Which log_decay has a half-life of 1000 tokens? What is its a?",
        answer=(
            "-ln 2 / 1000 = -0.000693, so a = 0.99931. In bfloat16, whose numbers near 1 have steps of 0.0039, that "
            "a is 1: nothing is ever forgotten. Decays are kept as logarithms, in float32."
        ),
        code="""\
half = -torch.ones(1, 1001, 1, dtype=torch.float64) * torch.tensor(2.0, dtype=torch.float64).log() / 1000
pulse = torch.zeros(1, 1001, 1, 1, dtype=torch.float64)
pulse[:, 0] = 1                                                    # one write, then only decay
left = lineate.gated_linear_attention(torch.ones_like(pulse), pulse, pulse, half, scale=1.0).output[0, -1, 0, 0]
""",
        claims=(
            Equality("one half is left after 1000 tokens", "left", "0.5"),
            Equality("in bfloat16 that a is 1", "half[0, 0, 0].exp().bfloat16().double()", "1.0", 0),
        ),
    ),
    next=(
        "Decay forgets by age, the newest pair included in the end, and it forgets what is needed as fast as what "
        "is not. A key with a new value still returns a mixture. To replace, the memory must first read what it "
        "holds."
    ),
)

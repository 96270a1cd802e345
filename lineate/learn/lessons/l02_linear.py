"""Attention without the softmax: products may be regrouped, until the mask comes between."""

from typing import TYPE_CHECKING

from lineate.learn.drawing import matrices
from lineate.learn.lesson import Equality, Exercise, Lesson, Measure, Names, Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EQUATION = """\
(Q K^T) V = Q (K^T V)                                 no mask: t x t, or k x v, by where the brackets are
(mask * (Q K^T)) V  !=  Q (K^T V)                     the mask stands between Q K^T and V
o_t = S_t^T q_t,    S_t = S_{t-1} + k_t v_t^T         causal: a running sum takes its place
"""

TEXT = """\
Without the softmax, attention is a product of three matrices, and brackets may be moved. The left side makes a t x
t matrix and takes 2 t^2 (k + v) operations or so; the right side makes a k x v matrix and takes about 4 t k v. The
second is linear in t. (An addition and a multiplication are two operations.)

A causal mask is multiplied element by element, between the two products. So the brackets cannot be moved: `Q (K^T
V)` lets every token read the future. What can be done is to sum only the past. Row t of the masked product is q_t
times the sum of k_j v_j^T over j <= t, and that sum is a matrix S of fixed size, to which every token adds one
outer product. This is linear attention [Katharopoulos2020]. S is the **memory**, or state: a token **writes** its
pair of key and value, and a query **reads**. The ops of `lineate` multiply what is read by `scale`, which is 1 /
sqrt(k) unless another is given; the programs here give 1.

With the softmax, the mask has its place too: scores of the future become -inf **before** the softmax. Multiplying
the scores by the mask first, softmax(mask * (Q K^T)), sets them to 0, and exp(0) = 1 is a full vote for the future.
"""

CODE = """\
import torch, lineate

torch.manual_seed(0)
t, d = 48, 16
q, k, v = torch.randn(3, 1, t, 1, d, dtype=torch.float64)
Q, K, V = q[0, :, 0], k[0, :, 0], v[0, :, 0]

unmasked = Q @ (K.T @ V)                                           # k v in the middle
causal = (Q @ K.T).tril() @ V                                      # t t in the middle
S = (K[:, :, None] * V[:, None, :]).cumsum(0)                      # t k v: the running sum after every token
output, state = lineate.linear_attention(q, k, v, scale=1.0)

right = (Q @ K.T / 4).masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf).softmax(-1)
wrong = (Q @ K.T / 4).tril().softmax(-1)                           # softmax of a masked product
print(f"weight of the future: {right.triu(1).sum(-1).mean():.2f}, wrongly masked {wrong.triu(1).sum(-1).mean():.2f}")
"""


def draw(names: Names) -> "Figure":
    """Draw the weights of the causal softmax, of the wrong one, and of linear attention."""
    scores = (names["Q"] @ names["K"].T / 4).tril()[:24, :24]
    return matrices(
        {
            "softmax, masked before": names["right"][:24, :24] / names["right"][:24, :24].amax(),
            "softmax of a masked product": names["wrong"][:24, :24] / names["wrong"][:24, :24].amax(),
            "no softmax: mask * (Q K^T)": scores / scores.abs().amax(),
        }
    )


LESSON = Lesson(
    name="linear",
    title="Linear attention, and what the mask breaks",
    equation=EQUATION,
    text=TEXT,
    code=CODE,
    claims=(
        Equality("without a mask the brackets may be moved", "(Q @ K.T) @ V", "unmasked"),
        Equality("the running sum gives the causal rows", "torch.einsum('tk,tkv->tv', Q, S)", "causal"),
        Equality("lineate's op is that running sum", "output[0, :, 0]", "causal"),
        Equality("its state is the sum after the last token", "state[0, 0]", "K.T @ V"),
        Measure(
            "relative difference of the regrouped product and the causal one",
            "(unmasked - causal).norm() / causal.norm()",
            0.5,
            2,
        ),
        Measure(
            "weight that softmax of a masked product gives to the future, of 1, in the mean",
            "wrong.triu(1).sum(-1).mean()",
            0.3,
            0.6,
        ),
        Measure(
            "relative error of its output",
            "(wrong @ V - right @ V).norm() / (right @ V).norm()",
            0.4,
            1.2,
        ),
    ),
    picture=Picture("Above the diagonal is the future. Only the panel in the middle reads it.", draw),
    exercise=Exercise(
        question=(
            "Let phi be a function after which no channel of a query or key is negative (their features). With "
            "phi(q) . phi(k) in place of exp(q . k), the weights can be divided by their sum, as a softmax does. What "
            "must the memory keep for that, besides S?"
        ),
        answer=(
            "The sum of the keys' features, k numbers: the sum of the weights of token t is phi(q_t) . sum_{j<=t} "
            "phi(k_j). It is the memory of a value that is always 1. `normalize=True` keeps it as one more column "
            "of the state."
        ),
        code="""\
phi = lambda x: torch.nn.functional.elu(x) + 1
weights = (phi(Q) @ phi(K).T).tril()
divided = weights @ V / weights.sum(-1, keepdim=True)
normalized = lineate.linear_attention(q, k, v, feature_map="elu+1", normalize=True)
""",
        claims=(
            Equality("dividing by the key sum divides by the sum of weights", "normalized.output[0, :, 0]", "divided"),
            Equality("the last column is the key sum", "normalized.state[0, 0, :, -1]", "phi(K).sum(0)"),
        ),
    ),
    next=(
        "The masked product is quadratic, and the running sum is t small steps, one after another, which keep no "
        "processor busy. There is a form between the two."
    ),
)

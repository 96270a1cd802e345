"""Capacity and interference: what a sum of outer products returns."""

from typing import TYPE_CHECKING

import torch

from lineate.learn.drawing import panels
from lineate.learn.lesson import Equality, Exercise, Lesson, Measure, Names, Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EQUATION = """\
S^T k_j = ||k_j||^2 v_j + sum_{i != j} (k_i . k_j) v_i          own value, and crosstalk
relative error of n pairs under random unit keys                 about sqrt((n - 1) / k)
"""

TEXT = """\
Write n pairs into the memory and ask for each value with its own key. The answer is the value plus every other
value, weighted by how similar its key is: the **crosstalk**. If the keys are orthonormal the crosstalk is zero and
recall is exact. A space of k channels has at most k orthogonal directions, so this ends at n = k: the **capacity**
for exact recall is k pairs, though the state has k v numbers.

Keys of a model are not orthogonal. Two random unit keys have a squared cosine of 1/k in the mean, so n - 1 other
values add an error of sqrt((n - 1) / k), as a part of a value's length. At n = k + 1 the error is as large as the
value itself: as wrong as no answer at all. Old pairs are never removed, so with the length of the text the error
only grows.

There is a second failure, which more channels do not fix. Write v_1 and then v_2 under one key: the memory returns
v_1 + v_2. It cannot replace.
"""

CODE = """\
import torch, lineate

torch.manual_seed(0)
n, d = 64, 64
def memory(K, V):                                                  # S after the pairs of all rows are written
    k, v = K[None, :, None], V[None, :, None]                      # b t h k: one sequence, one head
    return lineate.linear_attention(k, k, v).state[0, 0]

K = torch.nn.functional.normalize(torch.randn(n, d, dtype=torch.float64), dim=-1)    # random unit keys
V = torch.randn(n, d, dtype=torch.float64)
read = K @ memory(K, V)                                            # row j is S^T k_j
crosstalk = (K @ K.T - torch.eye(n, dtype=torch.float64)) @ V      # k_i . k_j for all other i

U = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64)).Q      # orthonormal keys
twice = memory(K[:1].repeat(2, 1), V[:2]).T @ K[0]                 # one key, two values
print(f"relative error of {n} pairs under random keys: {(read - V).norm() / V.norm():.2f}")
"""


def draw(names: Names) -> "Figure":
    """Draw the error against the number of pairs, and a key that is given new values."""
    figure, (left, right) = panels(2)
    d, counts, errors = 64, [2**i for i in range(1, 10)], []
    for n in counts:
        K = torch.nn.functional.normalize(torch.randn(8, n, d, dtype=torch.float64), dim=-1)
        V = torch.randn(8, n, d, dtype=torch.float64)
        errors.append(float((K @ (K.mT @ V) - V).norm() / V.norm()))
    left.plot(counts, errors, "o", color="#0072B2", label="measured")
    left.plot(counts, [((n - 1) / d) ** 0.5 for n in counts], color="gray", label="sqrt((n - 1) / k)")
    left.axhline(1, color="gray", linewidth=1, linestyle="--", label="no answer at all")
    left.set(xscale="log", yscale="log", xlabel="pairs n, keys of 64 channels")
    left.set_title("error of what is read")
    left.legend(fontsize=8)
    values = torch.randn(8, d, dtype=torch.float64)
    sums = values.cumsum(0)
    right.plot(range(1, 9), ((sums - values).norm(dim=-1) / values.norm(dim=-1)).tolist(), "o-", color="#0072B2")
    right.axhline(0, color="gray", linewidth=1)
    right.set(xlabel="values written under one key")
    right.set_title("error of the newest value")
    return figure


LESSON = Lesson(
    name="capacity",
    title="Capacity and interference",
    equation=EQUATION,
    text=TEXT,
    code=CODE,
    claims=(
        Equality("what is read is the value and the crosstalk", "read", "V + crosstalk"),
        Equality("orthonormal keys recall exactly", "U @ memory(U, V)", "V"),
        Equality("one key with two values returns their sum", "twice", "V[0] + V[1]"),
        Measure(
            "relative error of 64 pairs under random keys of 64 channels", "(read - V).norm() / V.norm()", 0.85, 1.15
        ),
    ),
    picture=Picture("Left: the error grows as the root of the number of pairs. Right: a sum never replaces.", draw),
    exercise=Exercise(
        question=(
            "How many pairs can be stored under random keys of 128 channels before the error passes one half of a "
            "value's length? And what error have 4096 pairs?"
        ),
        answer=(
            "sqrt((n - 1) / 128) = 1/2 gives n = 33 pairs, a quarter of the channels. With 4096 pairs the error is "
            "sqrt(4095 / 128) = 5.7 times the value: the answer is lost among the others."
        ),
        code="""\
K = torch.nn.functional.normalize(torch.randn(4096, 128, dtype=torch.float64), dim=-1)
V = torch.randn(4096, 128, dtype=torch.float64)
few, many = ((K[:m] @ memory(K[:m], V[:m]) - V[:m]).norm() / V[:m].norm() for m in (33, 4096))
""",
        claims=(
            Measure("error of 33 pairs", "few", 0.45, 0.55),
            Measure("error of 4096 pairs", "many", 5.5, 5.9),
        ),
    ),
    next=(
        "A memory that only adds must overflow. There are two ways out: let old content decay, or remove what is "
        "wrong. The first is decay."
    ),
)

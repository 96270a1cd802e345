"""Softmax attention, its quadratic cost, and what FlashAttention changes."""

from typing import TYPE_CHECKING

from lineate.learn.drawing import panels
from lineate.learn.lesson import Equality, Exercise, Lesson, Measure, Names, Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EQUATION = """\
w_tj = exp(q_t . k_j / sqrt(k)) / sum_{m<=t} exp(q_t . k_m / sqrt(k))        weights, for j <= t
o_t  = sum_{j<=t} w_tj v_j                                                   read
"""

TEXT = """\
q_t, k_t and v_t are the query, the key and the value of token t, as vectors of one head. The same letters without
an index are sizes, here and in all lessons: t tokens, k channels of a query or key, v channels of a value. In
programs a shape such as `b t h k` reads: batch, tokens, heads, channels; d stands for k = v.

Softmax attention [Vaswani2017] keeps every key and every value. A token compares its query with all keys so far and
reads a weighted mean of the values. Nothing is merged, so nothing is lost, and nothing gets cheaper: token t reads t
pairs, and t tokens read t (t + 1) / 2. The cache of keys and values grows by k + v numbers a token, for every head of
every layer.

FlashAttention [Dao2022] does not change this. It goes through the keys in blocks and carries a running maximum
`top`, a running sum of weights `total` and a running sum of weighted values (the online softmax, [Milakov2018]). So
the t x t matrix never has to be stored or moved. The result is the same, the number of products is the same, and
the cache is the same: only the memory traffic shrinks.
"""

CODE = """\
import torch, lineate

torch.manual_seed(0)
t, d, block = 64, 16, 16
q, k, v = torch.randn(3, 1, t, 1, d, dtype=torch.float64)         # b t h k: one sequence, one head
Q, K, V = q[0, :, 0], k[0, :, 0], v[0, :, 0]                      # t k
future = torch.ones(t, t, dtype=torch.bool).triu(1)

weights = (Q @ K.T / d**0.5).masked_fill(future, -torch.inf).softmax(-1)    # t t: the square
whole = weights @ V

top, total, read = torch.full((t, 1), -torch.inf).double(), 0, 0            # the same, block by block
for j in range(0, t, block):
    scores = (Q @ K[j : j + block].T / d**0.5).masked_fill(future[:, j : j + block], -torch.inf)
    new = torch.maximum(top, scores.amax(-1, keepdim=True))
    part, keep = (scores - new).exp(), (top - new).exp()
    total, read, top = keep * total + part.sum(-1, keepdim=True), keep * read + part @ V[j : j + block], new

output, cache = lineate.softmax_attention(q, k, v)
print(f"{t} tokens: {(weights > 0).sum()} weights, {cache.nbytes} bytes of cache")
"""


def draw(names: Names) -> "Figure":
    """Draw the weights, and pairs and bytes against the length."""
    figure, (left, right) = panels(2)
    left.imshow(names["weights"].numpy(), cmap="Blues", vmin=0, vmax=0.4)
    left.set(xlabel="key", ylabel="query")
    left.set_title("weights: half of t x t")
    left.grid(visible=False)
    lengths = [2**i for i in range(6, 18)]
    right.plot(lengths, [n * (n + 1) / 2 for n in lengths], color="#444444", label="pairs that are compared")
    right.plot(lengths, [2 * 128 * n for n in lengths], "--", color="#444444", label="numbers in the cache")
    right.plot(lengths, [128 * 128 for _ in lengths], color="#0072B2", label="numbers in a 128 x 128 state")
    right.set(xscale="log", yscale="log", xlabel="tokens")
    right.set_title("one head of 128 channels")
    right.legend(fontsize=8)
    return figure


LESSON = Lesson(
    name="softmax",
    title="Softmax attention and its quadratic cost",
    equation=EQUATION,
    text=TEXT,
    code=CODE,
    claims=(
        Equality("the op is the weighted mean of the values", "output[0, :, 0]", "whole"),
        Equality("block by block, without the square, it is the same", "read / total", "whole"),
        Equality("the cache has every key and value, 8 bytes a number", "cache.nbytes", "2 * t * d * 8", 0),
        Equality("t (t + 1) / 2 pairs have a weight", "(weights > 0).sum()", "t * (t + 1) // 2", 0),
    ),
    picture=Picture("The weights of 64 tokens, and what grows with the length of a sequence.", draw),
    exercise=Exercise(
        question=(
            "Take the running maximum out of the loop: `part, keep = scores.exp(), 1`. Here the result stays the same. "
            "Which scores break it?"
        ),
        answer=(
            "Scores above 709, where exp overflows float64 (88 in float32, 11 in float16): inf / inf is NaN. With the "
            "maximum subtracted every exponent is at most 0, and a sum of weights is at least 1. Scores that are all "
            "below -745 break it too: every weight rounds to 0, and 0 / 0 is NaN."
        ),
        code="""\
large = 1000 * torch.rand(8, dtype=torch.float64) + 710
plain, shifted = large.exp() / large.exp().sum(), (large - large.max()).exp()
low = torch.full((8,), -800.0, dtype=torch.float64)
lost = low.exp() / low.exp().sum()
""",
        claims=(
            Measure("weights that are NaN without the maximum", "plain.isnan().sum()", 8, 8),
            Measure("and where all scores are far below 0", "lost.isnan().sum()", 8, 8),
            Equality("with it they are the softmax", "shifted / shifted.sum()", "large.softmax(0)"),
        ),
    ),
    next=(
        "Each new token reads the whole past, and the past is kept for ever. A memory of fixed size needs the sum "
        "over j to be taken before the query is known. The exponential of q . k stands in the way: leave it out, "
        "and see."
    ),
)

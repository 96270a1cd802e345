"""Recurrent, parallel and chunkwise: three forms of one computation."""

from typing import TYPE_CHECKING

from lineate.learn.drawing import panels
from lineate.learn.lesson import Equality, Exercise, Lesson, Names, Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EQUATION = """\
recurrent     S_t = S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t                       t steps
parallel      O = tril(Q K^T) V                                                  one step, t x t
chunkwise     O = Q S + tril(Q K^T) V,   S <- S + K^T V                          t / c steps, Q, K, V of c tokens
"""

TEXT = """\
Cut the sequence into chunks of c tokens. Inside a chunk, use the masked product; between chunks, carry the state.
What a token reads is then the sum of two parts: `Q S` from all earlier chunks, and the masked product of its own
chunk.

The three forms compute the same numbers, so the chunk length affects speed only, not the model. At c = 1
the chunkwise form is the recurrent one, and at c = t it is the parallel one. A chunk takes 4 k v + 2 c (k + v)
operations a token: the first part is the state's, the second the square's. So longer chunks cost more operations,
in fewer and larger matrix products, and with fewer steps that wait for each other. Decoding is recurrent, because
the next token is not known yet. Prefill (reading a prompt) and training are chunkwise; 64 is usual.

`lineate.explain` says which form a call would take. All rules of the next lessons have the same three forms; only the
computation inside a chunk differs ([derivation.md](../derivation.md#5-three-forms-of-one-computation)).
"""

CODE = """\
import torch, lineate

torch.manual_seed(0)
t, d, c = 128, 16, 32
q, k, v = torch.randn(3, 1, t, 1, d, dtype=torch.float64)

S, rows = torch.zeros(d, d, dtype=torch.float64), []
for i in range(0, t, c):
    Q, K, V = (x[0, i : i + c, 0] for x in (q, k, v))              # c k: one chunk
    rows.append(Q @ S + (Q @ K.T).tril() @ V)                      # earlier chunks, and this one
    S = S + K.T @ V

op = lambda form, size=None: lineate.linear_attention(q, k, v, scale=1.0, form=form, chunk_size=size)
forms = {form: op(form) for form in ("recurrent", "chunkwise", "parallel")}
sizes = [op("chunkwise", n).output for n in (1, 5, 16, 64, 128)]
print("the last output, in three forms:", *(f"{x.output[0, -1, 0, 0]:.4f}" for x in forms.values()))
"""


def draw(names: Names) -> "Figure":
    """Draw operations and dependent steps against the chunk length."""
    figure, (left, right) = panels(2)
    lengths, d, t = [2**i for i in range(13)], 128, 4096
    left.plot(lengths, [4 * d * d + 2 * c * 2 * d for c in lengths], color="#0072B2", label="all")
    left.plot(lengths, [4 * d * d for _ in lengths], "--", color="#0072B2", label="with the state")
    left.plot(lengths, [2 * c * 2 * d for c in lengths], ":", color="#0072B2", label="inside the chunk")
    left.set(xscale="log", yscale="log", xlabel="chunk length c")
    left.set_title("operations of a token")
    left.legend(fontsize=8)
    right.plot(lengths, [t / c for c in lengths], color="#444444")
    right.set(xscale="log", yscale="log", xlabel="chunk length c")
    right.set_title("steps that wait for each other")
    for axes in (left, right):
        axes.axvline(64, color="gray", linewidth=1, linestyle=":")
    return figure


LESSON = Lesson(
    name="forms",
    title="Three forms of one computation, and the chunk as a knob",
    equation=EQUATION,
    text=TEXT,
    code=CODE,
    claims=(
        Equality("chunks by hand equal the recurrence", "torch.cat(rows)", "forms['recurrent'].output[0, :, 0]"),
        Equality("so does the chunkwise form", "forms['chunkwise'].output", "forms['recurrent'].output"),
        Equality("so does the parallel form", "forms['parallel'].output", "forms['recurrent'].output"),
        Equality("every chunk length gives the same", "torch.stack(sizes)", "torch.stack(5 * [sizes[0]])"),
        Equality("the state that is carried is the same", "S", "forms['parallel'].state[0, 0]"),
    ),
    picture=Picture("4096 tokens, heads of 128 channels. The dotted line is a chunk of 64.", draw),
    exercise=Exercise(
        question=(
            "For k = v = 128, at which chunk length do both parts of the work, the state's and the square's, take "
            "the same?"
        ),
        answer=(
            "4 k v = 2 c (k + v) gives c = 2 k v / (k + v) = 128. At the usual 64 the square is half of the state's "
            "part."
        ),
        code="""\
from torch.utils.flop_counter import FlopCounterMode
Q, K, V, S = torch.randn(4, 128, 128, dtype=torch.float64)         # a chunk of 128 tokens, and a state
with FlopCounterMode(display=False) as of_state:
    Q @ S, K.T @ V
with FlopCounterMode(display=False) as of_square:
    (Q @ K.T).tril() @ V
""",
        claims=(
            Equality(
                "both parts take the same at c = 128", "of_state.get_total_flops()", "of_square.get_total_flops()", 0
            ),
            Equality("the state's part is 4 k v a token", "of_state.get_total_flops()", "128 * 4 * 128 * 128", 0),
        ),
    ),
    next=(
        "Time is linear and the state is fixed. But softmax attention kept everything, and this memory keeps k v "
        "numbers. What is lost?"
    ),
)

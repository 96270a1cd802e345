"""The delta rule's ancestors, run on one stream of pairs."""

from typing import TYPE_CHECKING

import torch

from lineate.learn.drawing import WIDTH
from lineate.learn.lesson import Equality, Exercise, Lesson, Measure, Names, Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EQUATION = """\
Hebb, 1949                 S += k v^T                                             what fires together
Widrow-Hoff (LMS), 1960    S += beta k (v - S^T k)^T                              a fixed rate
Plackett (RLS), 1950       S += g (v - S^T k)^T,   g = P k / (1 + k^T P k)        P -= g k^T P
Kalman, 1960               as RLS; P += W before it, s in place of 1              the truth drifts, values are noisy
Hopfield, 1982             x -> sign(S^T x),  S = Hebb's sum without its diagonal read until it settles
modern Hopfield, 2020      x -> X^T softmax(scale X x)                            one step of retrieval is attention
"""

TEXT = """\
| year | who | what became of it here |
|---|---|---|
| 1937 | Kaczmarz [Kaczmarz1937] | the least change that fits, one equation after another |
| 1949 | Hebb [Hebb1949] | the write of linear attention |
| 1950 | Plackett [Plackett1950] | least squares that takes in one pair at a time |
| 1960 | Widrow and Hoff [Widrow1960] | the delta rule: DeltaNet with a fixed rate |
| 1960 | Kalman [Kalman1960] | decay, compare, write, with a gain that knows what is uncertain |
| 1972 | Rescorla and Wagner [Rescorla1972] | the delta rule as a model of learning in animals |
| 1982 | Hopfield [Hopfield1982] | Hebb's sum as a memory of patterns, read until it settles |
| 1992 | Schmidhuber [Schmidhuber1992] | one network writes the weights of another, token by token |
| 2020 | Ramsauer and others [Ramsauer2020] | a Hopfield network whose step is softmax attention |
| 2021 | Schlag, Irie and Schmidhuber [Schlag2021] | linear attention is such a writer; the delta rule makes DeltaNet |

Hebb's rule writes the value itself; the next three lines write an error and differ only in the gain in front of it. LMS
(least mean squares) moves along the key, independently of earlier tokens. Recursive least squares (RLS) keeps P, the
inverse of the sum of k k^T, and moves only along what is new in a key: after every token it holds the best fit to all
pairs so far. P says how uncertain the memory is in each direction, so it starts large (I / 0.01 in the program). A
Kalman filter also knows that the truth may have moved since, and lets P grow by W at every token; s is the assumed
noise of the values.

A Hopfield network stores patterns of signs, each as its own key and value, in Hebb's sum. To complete a pattern x that
is partly wrong, it reads with x, takes the signs, and reads again until nothing changes. The modern one keeps the
patterns separately, as the rows of X, and weighs them by a softmax of their similarity to x: softmax attention with the
query x, and the patterns as keys and values.
"""

CODE = """\
import torch, lineate
from lineate.memory import least_squares

torch.manual_seed(0)
t, d, randn = 200, 16, lambda *shape: torch.randn(*shape, dtype=torch.float64)
K = torch.nn.functional.normalize(randn(t, d), dim=-1)
truth = torch.where(torch.arange(t)[:, None, None] < t // 2, randn(d, d), randn(d, d))    # it changes in the middle
V = torch.einsum("tk,tkv->tv", K, truth) + 0.1 * randn(t, d)
I, k, v = torch.eye(d, dtype=torch.float64), K[None, :, None], V[None, :, None]

def run(gain, drift=lambda P: 0):
    S, P, errors = torch.zeros(d, d, dtype=torch.float64), I / 0.01, []
    for x, y in zip(K, V):
        P = P + drift(P)
        g, error = gain(P, x), y - S.T @ x
        S, P = S + torch.outer(g, error), P - torch.outer(g, P @ x)
        errors.append(error.norm() / y.norm())
    return S, torch.stack(errors)

best = lambda P, x, s=1.0: P @ x / (s + x @ P @ x)                 # the gain that least squares takes
lms, lms_errors = run(lambda P, x: 0.5 * x)
rls, rls_errors = run(best)
kalman, kalman_errors = run(lambda P, x: best(P, x, s=0.04), drift=lambda P: 0.02 * I)
fading, _ = run(best, drift=lambda P: (1 / 0.95 - 1) * P)          # the uncertainty grows everywhere alike
log_fade = torch.full((1, t, 1), 0.95, dtype=torch.float64).log()

patterns = randn(4, 64).sign()                                     # Hopfield: patterns of signs, v = k
noisy = patterns[0].clone()
noisy[:8] *= -1                                                    # eight signs are wrong
hebb = lineate.linear_attention(*3 * [patterns[None, :, None]]).state[0, 0]
settled = ((hebb - hebb.diag().diag()) @ noisy).sign()

cues, told = torch.ones(1, 60, 1, 2, dtype=torch.float64), torch.ones(1, 60, 1, 1, dtype=torch.float64)
cues[:, :40, :, 1] = 0                                             # Rescorla-Wagner: a light; then light and tone
strength = lineate.delta_rule(cues, cues, told, 0.3 * told[..., 0]).state[0, 0, :, 0]
for name, x in {"LMS": lms_errors, "least squares": rls_errors, "Kalman": kalman_errors}.items():
    print(f"error of {name} in the last 50 tokens: {x[-50:].mean():.2f}")
"""


def draw(names: Names) -> "Figure":
    """Draw the error of each rule on the stream, and the timeline."""
    from matplotlib import pyplot as plt

    K, V = names["K"], names["V"]
    heard = names["lineate"].linear_attention(names["k"], names["k"], names["v"], scale=1.0).output[0, :, 0] - V
    hebb = (V - heard).norm(dim=-1) / V.norm(dim=-1)  # heard: what the sum before each token answers, for unit keys
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(WIDTH, 3.9), height_ratios=(3, 1.1))
    lines = {
        "Hebb (linear attention)": (hebb, "#444444", ":"),
        "LMS (delta rule, beta = 0.5)": (names["lms_errors"], "#D55E00", "-"),
        "recursive least squares": (names["rls_errors"], "#0072B2", "--"),
        "Kalman, W = 0.02": (names["kalman_errors"], "#009E73", "-"),
    }
    for label, (errors, colour, style) in lines.items():
        smooth = torch.nn.functional.avg_pool1d(errors[None], 9, 1, 4, count_include_pad=False)[0]
        top.plot(smooth.tolist(), style, color=colour, label=label)
    top.axvline(len(K) // 2, color="gray", linewidth=1, linestyle=":")
    top.set(
        yscale="log",
        ylim=(0.02, None),
        xlabel="tokens; at the dotted line the truth changes",
        ylabel="error of the next value",
    )
    top.legend(fontsize=8, ncols=2, loc="lower right")
    events = {
        1937: "Kaczmarz", 1949: "Hebb", 1960: "Widrow-Hoff,\nKalman", 1972: "Rescorla-\nWagner", 1982: "Hopfield",
        1992: "Schmidhuber", 2020: "Katharopoulos,\nRamsauer",
    }  # fmt: skip
    for year, who in events.items():
        bottom.plot(year, 0, "o", color="#444444")
        bottom.annotate(f"{year}\n{who}", (year, 0), xytext=(0, 5), textcoords="offset points", fontsize=7, ha="center")
    bottom.axhline(0, color="#444444", linewidth=1, zorder=0)
    bottom.set(xlim=(1932, 2028), ylim=(-0.2, 1.6), yticks=[], xticks=[])
    for side in bottom.spines.values():
        side.set_visible(False)
    bottom.grid(visible=False)
    return figure


LESSON = Lesson(
    name="ancestors",
    title="The ancestors of the delta rule, on one stream",
    equation=EQUATION,
    text=TEXT,
    code=CODE,
    claims=(
        Equality("Hebb's sum is linear attention", "lineate.linear_attention(k, k, v).state[0, 0]", "K.T @ V"),
        Equality(
            "LMS is the delta rule with a fixed rate",
            "lineate.delta_rule(k, k, v, torch.full((1, t, 1), 0.5, dtype=torch.float64)).state[0, 0]",
            "lms",
        ),
        Equality(
            "recursive least squares is lineate's op", "least_squares(k, k, v, ridge=0.01)[1]['S'][0, 0]", "rls", 1e-9
        ),
        Equality("and the best fit to all pairs", "torch.linalg.solve(K.T @ K + 0.01 * I, K.T @ V)", "rls", 1e-9),
        Equality(
            "a Kalman filter whose uncertainty grows by 1 / 0.95 is least squares that forgets by 0.95",
            "least_squares(k, k, v, log_fade, ridge=0.01, restore=False)[1]['S'][0, 0]",
            "fading",
            1e-9,
        ),
        Equality("Hopfield's network, with Hebb's sum, restores a pattern", "settled", "patterns[0]", 0),
        Equality(
            "a modern Hopfield step is softmax attention",
            "(K @ K[-1] / d**0.5).softmax(0) @ K",
            "lineate.softmax_attention(k, k, k).output[0, -1, 0]",
        ),
        Equality("blocking: the light holds all of the prediction", "strength[0]", "1.0", 1e-5),
        Equality("so the tone learns nothing", "strength[1]", "0.0", 1e-5),
        Measure("error of LMS in the last 50 tokens", "lms_errors[-50:].mean()", 0.1, 0.7),
        Measure("error of least squares, which averages both truths", "rls_errors[-50:].mean()", 0.5, 1.5),
        Measure("error of the Kalman filter", "kalman_errors[-50:].mean()", 0.05, 0.3),
    ),
    picture=Picture("Above: error of the next value on one stream. Below: when each idea appeared.", draw),
    exercise=Exercise(
        question=(
            "Blocking: an animal learns that a light predicts food; then light and tone together predict food. Why "
            "does the delta rule learn nothing about the tone, and what would Hebb's rule learn?"
        ),
        answer=(
            "After the first phase the light alone predicts the food, so the error of the compound is 0 and nothing "
            "is written. Hebb's rule has no error: the tone gets one unit for each of the 20 times it was there. "
            "Animals block, which is why [Rescorla1972] needed an error."
        ),
        code="added = lineate.linear_attention(cues, cues, told).state[0, 0, :, 0]\n",
        claims=(Equality("Hebb's rule gives the tone 20", "added[1]", "20.0"),),
    ),
    next=(
        "The delta rule replaces, but it never lets go of a key that does not come again; decay lets go, but cannot "
        "replace. They do different things, so take both."
    ),
)

"""Hybrids: a few softmax layers among fixed memories, and what they look like."""

from typing import TYPE_CHECKING

from lineate.learn.drawing import panels
from lineate.learn.lesson import Equality, Exercise, Lesson, Measure, Names, Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EQUATION = """\
pattern           KKKM: three layers of Kimi Delta Attention, one of latent attention (A is softmax attention)
latent            key of head h = W_kh c,  value = W_vh c;   q . (W_kh c) = (W_kh^T q) . c       only c is cached
no positions      softmax attention without them cannot tell in which order the past came
sink              softmax with one more score s and the value 0  =  sigmoid(logsumexp(scores) - s) * softmax
"""

TEXT = """\
A fixed memory is cheap and loses details; softmax attention is exact and grows. A hybrid has mostly the first and a few
of the second, usually three to one. The few softmax layers set the bytes of a long sequence, so their caches are
reduced too.

**Latent attention** (MLA, [DeepSeek2024]) caches one short vector c a token, from which every head makes its key and
value. When decoding, the matrices go to the query and to the output instead, so that the cache is read directly. A few
more channels (`rope_dim`) are cached in addition to c: a part of the key that all heads share, and that carries the
rotary positions in models that have them.

**No positions** (NoPE). Softmax attention sums over a set: shuffle the earlier tokens and the last one reads the
same. In a hybrid the recurrent layers know the order, through their decays and writes, so Kimi Linear gives its
attention layers no rotary positions [Kimi2025].

**Sinks and output gates.** Weights of a softmax sum to 1: a head without relevant tokens must still attend to some, and
models learn to attend to the first token (attention sinks, [Xiao2024]). One more score with the value 0 gives the head
a place for this weight. This equals a gate on the output that closes when all scores are low, so an output gate, as in
Qwen3-Next, replaces the sink ([Qiu2025]).
"""

CODE = """\
import torch, lineate
from lineate.layers import LatentAttention
from lineate.models import HybridLM, preset

torch.manual_seed(0)
t, d, sink = 48, 16, 2.0
q, k, v, raw = torch.randn(4, 1, t, 1, d, dtype=torch.float64)
shuffle = lambda x: torch.cat((x[:, torch.randperm(t - 1, generator=torch.Generator().manual_seed(1))], x[:, -1:]), 1)
softmax = lambda q, k, v: lineate.softmax_attention(q, k, v).output[0, -1, 0]
kimi = lambda *tokens: lineate.kimi_delta_attention(*tokens, normalize_qk=True).output[0, -1, 0]
tokens = q, k, v, -raw.abs(), raw[..., 0].sigmoid()                # with their gates

wider = lambda x, last: torch.cat((x, torch.full_like(x[..., :1], last)), -1)    # one more channel: the sink's score
first = lambda x, y: torch.cat((x, y), 1)                                        # the sink comes before all tokens
none = torch.zeros(1, 1, 1, d, dtype=torch.float64)
sunk = lineate.softmax_attention(
    wider(first(none, q), sink * d**0.5), first(wider(none, 1.0), wider(k, 0.0)), first(none, v), scale=d**-0.5
).output[0, 1:, 0]
scores = (q[0, :, 0] @ k[0, :, 0].T / d**0.5).masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf)
gate = (scores.logsumexp(-1, keepdim=True) - sink).sigmoid()

latent = LatentAttention(64, 4, rank=24, nope_dim=16, rope_dim=8, value_dim=16).double()
x, state, rows = torch.randn(1, t, 64, dtype=torch.float64), None, []
for i in range(t):
    y, state = latent(x[:, i : i + 1], state)                      # decoding: the cached vectors are keys and values
    rows.append(y)
kept = {p: HybridLM(preset("tiny", pattern=p)).state_nbytes(rows=1, tokens=65536) for p in ("KKKK", "KKKM", "AAAA")}
print("MiB of state after 65,536 tokens:", {pattern: round(n / 2**20, 2) for pattern, n in kept.items()})
"""


def draw(names: Names) -> "Figure":
    """Draw bytes of state against the length for some patterns, and the gate that a sink is."""
    from lineate.planning import plan_memory, read_model

    figure, (left, right) = panels(2)
    lengths = [2**i for i in range(8, 21)]
    for pattern, style in (("AAAA", ":"), ("MMMM", "-."), ("KKKM", "--"), ("KKKK", "-")):
        plan = plan_memory(read_model("tiny", "float32", pattern))
        left.plot(lengths, [plan.state(1, n) for n in lengths], style, color="#0072B2", label=pattern)
    left.set(xscale="log", yscale="log", xlabel="tokens")
    left.set_title("bytes of state, preset tiny")
    left.legend(fontsize=8)
    sums = names["scores"].logsumexp(-1)
    for sink, style in ((0.0, "-"), (2.0, "--"), (4.0, ":")):
        right.plot((sums - sink).sigmoid().tolist(), style, color="#D55E00", label=f"sink {sink:g}")
    right.set(xlabel="token", ylim=(0, 1))
    right.set_title("the gate that a sink is")
    right.legend(fontsize=8)
    return figure


LESSON = Lesson(
    name="hybrids",
    title="Hybrids: latent attention, no positions, gates and sinks",
    equation=EQUATION,
    text=TEXT,
    code=CODE,
    claims=(
        Equality(
            "softmax attention without positions reads a set", "softmax(*map(shuffle, (q, k, v)))", "softmax(q, k, v)"
        ),
        Equality("a sink is an output gate", "sunk", "gate * lineate.softmax_attention(q, k, v).output[0, :, 0]"),
        Equality(
            "reading the latent cache equals expanding it", "torch.cat(rows, 1).detach()", "latent(x)[0].detach()"
        ),
        Equality("a token adds one latent vector", "latent.state_spec[0].shape[-1]", "24 + 8", 0),
        Measure(
            "relative change of Kimi Delta Attention when the past is shuffled",
            "(kimi(*map(shuffle, tokens)) - kimi(*tokens)).norm() / kimi(*tokens).norm()",
            0.1,
            10,
        ),
        Measure("part of the output that the sink lets through, in the mean", "gate.mean()", 0.5, 0.95),
        Measure("bytes at 65,536 tokens: AAAA divided by KKKM", "kept['AAAA'] / kept['KKKM']", 4, 8),
        Measure("AAAA divided by KKKK", "kept['AAAA'] / kept['KKKK']", 500, 5000),
    ),
    picture=Picture(
        "Left: a hybrid grows with its few softmax layers. Right: the gate opens as more keys match.", draw
    ),
    exercise=Exercise(
        question=(
            "A causal softmax layer without positions is not quite blind to order: its later outputs are means over "
            "more tokens. Let all values be 0 but the first, which is 1, and all scores be equal. What does token t "
            "read?"
        ),
        answer=(
            "1 / t: the position itself. The mask leaks it, which is one reason why layers without positions work "
            "at all ([Kazemnejad2023])."
        ),
        code="""\
marked = torch.zeros(1, t, 1, 1, dtype=torch.float64)
marked[:, 0] = 1
read = lineate.softmax_attention(0 * marked, 0 * marked, marked).output.flatten()
""",
        claims=(Equality("token t reads 1 / t", "read", "1 / torch.arange(1, t + 1, dtype=torch.float64)"),),
    ),
    next="Patterns, heads and caches decide whether a model fits and how fast it can be. The last lesson counts them.",
)

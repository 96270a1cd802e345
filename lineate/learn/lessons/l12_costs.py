"""The costs of a model, and what fits: the planner."""

from typing import TYPE_CHECKING

from lineate.learn.drawing import panels
from lineate.learn.lesson import Equality, Exercise, Lesson, Measure, Names, Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EQUATION = """\
state of a sequence   = softmax layers * 2 * kv heads * head dim * bytes * tokens         grows
                      + linear layers * value heads * k * v * 4                           fixed, float32
                      + linear layers * (2 heads * k + value heads * v) * (conv - 1) * bytes
time of a token      >= (weights that it reads + cache + 2 * state) / bandwidth
"""

TEXT = """\
Everything of the last lessons can be counted before a weight is loaded. The program below does it by hand for
Qwen3-Next (48 layers: 36 of Gated DeltaNet, 12 of softmax attention), and compares with `lineate.planning`, which
makes the model on torch's meta device, where tensors have shapes and no memory, and adds up its own tensors.

The lines above have some sizes that the lessons left out. Several heads of queries may share one head of keys and
values (kv heads), and in a linear layer several value heads may share one head of keys. Layers with a linear rule
also mix each channel of q, k and v over the last 4 tokens, in a **short convolution** (conv = 4), for which they
keep the last 3. And in a model with **experts**, the feed-forward of a layer is many small ones, of which a token
is sent through a few: only those are read for it.

Three things are often missed. The recurrent state is **float32 whatever the weights are**, because a state in 16 bit
loses changes smaller than its rounding. The short convolution has a state too. And **only softmax layers have a
cache**: an estimate that multiplies by all 48 layers is wrong by a factor of 4.

Decoding reads the weights of the active experts, the whole cache, and reads and writes the state. At a batch of 1
this needs few operations for every byte, so bandwidth sets the least time of a token. `lineate plan qwen3-next-80b`
prints all of it ([planning.md](../planning.md)).
"""

CODE = """\
import torch
from lineate.models import HybridLM, preset
from lineate.planning import HARDWARE, largest_batch, plan_memory, read_model, time_bounds

model = read_model("qwen3-next-80b")
plan = plan_memory(model)
cache = 12 * 2 * 2 * 256 * 2                                       # softmax layers, keys and values, heads, k, bytes
memory = 36 * 32 * 128 * 128 * 4                                   # linear layers, value heads, k, v, float32
convolution = 36 * (2 * 16 * 128 + 32 * 128) * 3 * 2               # q, k and v of the last 3 tokens
state = lambda tokens: cache * tokens + memory + convolution

decode = next(x for x in time_bounds(model, HARDWARE["h200"], tokens=65536) if x.what == "decode")
small = preset("tiny", pattern="KKKM")
allocated = HybridLM(small)(torch.arange(50)[None]).state.nbytes   # what a run really keeps
fits = [largest_batch(plan, 2 * HARDWARE["h200"].memory_bytes, tokens) for tokens in (4096, 65536, 262144)]
print(f"after 65,536 tokens: {state(65536) / 2**20:.0f} MiB of state, at least {1000 * decode.seconds:.2f} ms a token")
"""


def draw(names: Names) -> "Figure":
    """Draw bytes of state and the least time of a token for three mixtures of layers."""
    from lineate.planning import HARDWARE, plan_memory, time_bounds, variants

    figure, (left, right) = panels(2)
    lengths = [2**i for i in range(10, 21, 2)]
    for (label, model), style in zip(variants(names["model"]).items(), (":", "-", "--"), strict=True):
        plan = plan_memory(model)
        left.plot(lengths, [plan.state(1, n) / 2**30 for n in lengths], style, color="#0072B2", label=label)
        bounds = [time_bounds(model, HARDWARE["h200"], tokens=n) for n in lengths]
        times = [next(x.seconds for x in each if x.what == "decode") for each in bounds]
        right.plot(lengths, [1000 * x for x in times], style, color="#0072B2", label=label)
    left.set(xscale="log", yscale="log", xlabel="tokens")
    left.set_title("GiB of state, Qwen3-Next's sizes")
    left.legend(fontsize=8)
    right.set(xscale="log", yscale="log", xlabel="tokens")
    right.set_title("least ms of a token, H200")
    return figure


LESSON = Lesson(
    name="costs",
    title="What a model costs, and what fits",
    equation=EQUATION,
    text=TEXT,
    code=CODE,
    claims=(
        Equality("the plan is the sum by hand, to the byte", "plan.state(batch=1, tokens=65536)", "state(65536)", 0),
        Equality(
            "a plan is what a run keeps, to the byte",
            "plan_memory(read_model(small, 'float32')).state(batch=1, tokens=50)",
            "allocated",
            0,
        ),
        Equality(
            "the least time of a token is its bytes over the bandwidth",
            "decode.seconds",
            "decode.moved / HARDWARE['h200'].bandwidth",
        ),
        Measure("KiB of cache a token", "plan.cache_per_token / 2**10", 24, 24),
        Measure("MiB of state that does not grow", "(plan.memory + plan.conv) / 2**20", 73.6, 73.8),
        Measure(
            "least milliseconds of a token after 65,536, on an H200's bandwidth", "1000 * decode.seconds", 1.5, 2.2
        ),
        Measure("sequences of 65,536 tokens that fit into two H200 with the weights", "fits[1]", 50, 100),
    ),
    picture=Picture("The same sizes with softmax attention in every layer, in none, and in one of four.", draw),
    exercise=Exercise(
        question=(
            "From which length on does a layer of Gated DeltaNet keep less than a layer of softmax attention, in "
            "this model? Count the state alone first, then the convolution too."
        ),
        answer=(
            "The state is 32 * 128 * 128 * 4 bytes = 2 MiB, a token of cache 2 * 2 * 256 * 2 = 2 KiB: equal at 1024 "
            "tokens. With the convolution's 48 KiB they are equal at 1048, so the linear layer keeps less from 1049 "
            "on."
        ),
        code="""\
linear, full = plan.layers[0], plan.layers[3]
alone, together = linear.memory / full.cache_per_token, (linear.memory + linear.conv) / full.cache_per_token
""",
        claims=(
            Equality("the state alone", "alone", "1024", 0),
            Equality("with the convolution", "together", "1048", 0),
        ),
    ),
    next=(
        "This was the last lesson. [Where write-ups disagree](disagreements.md) checks what is presented differently "
        "elsewhere, [derivation.md](../derivation.md) derives all of it, and [ops.md](../ops.md) has the ops for "
        "your own model."
    ),
)

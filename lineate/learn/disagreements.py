"""Where write-ups disagree: questions with programs that show the differences."""

from dataclasses import dataclass

from lineate.learn.lesson import Claim, Equality, Finding, Measure, check, execute
from lineate.system.seeding import own_random_numbers

SETUP = """\
import torch, lineate, lineate.layers

torch.manual_seed(0)
t, d = 48, 12
q, k, v = torch.randn(3, 1, t, 1, d, dtype=torch.float64)
k = torch.nn.functional.normalize(k, dim=-1)
beta, head, channel = torch.rand(1, t, 1).double(), -torch.rand(1, t, 1).double(), -torch.rand(1, t, 1, d).double()
I, outer = torch.eye(d, dtype=torch.float64), torch.outer
gdn = lineate.gated_delta_rule(q, k, v, head, beta, scale=1.0)           # log_decay per head
kda = lineate.kimi_delta_attention(q, k, v, channel, beta, scale=1.0)    # log_decay per key channel

def walk(step):                    # S after all tokens; a are the two log_decays of a token, per head and per channel
    S = torch.zeros(d, d, dtype=torch.float64)
    for i in range(t):
        S = step(S, k[0, i, 0], v[0, i, 0], (head[0, i], channel[0, i, 0]), beta[0, i, 0])
    return S

far = lambda x, y: (x - y).norm() / y.norm()
"""


@dataclass(frozen=True)
class Disagreement:
    """One question that write-ups answer differently."""

    name: str
    """A word for tests and messages."""
    question: str
    found: str
    """The answers found in public."""
    here: str
    """lineate's answer, and the reason."""
    code: str
    """A program that continues SETUP."""
    claims: tuple[Claim, ...]


DISAGREEMENTS = (
    Disagreement(
        "order",
        "Is the memory decayed before or after the erase?",
        "`(I - beta k k^T) Diag(a) S`, and `Diag(a) (I - beta k k^T) S`.",
        "Decay first: the comparison reads what is left, and a full write to a unit key stores exactly v. With one "
        "decay a head the two are the same, so only KDA can tell. This is the order of [Kimi2025] and of its "
        "published model.",
        """\
first = lambda S, k, v, a, b: (I - b * outer(k, k)) @ a[1].exp().diag() @ S + b * outer(k, v)
last = lambda S, k, v, a, b: a[1].exp().diag() @ (I - b * outer(k, k)) @ S + b * outer(k, v)
same = lambda S, k, v, a, b: (I - b * outer(k, k)) @ (a[0].exp() * S) + b * outer(k, v)
swap = lambda S, k, v, a, b: a[0].exp() * (I - b * outer(k, k)) @ S + b * outer(k, v)
""",
        (
            Equality("the op decays first", "kda.state[0, 0]", "walk(first)"),
            Measure("relative difference of the other order, per channel", "far(walk(last), walk(first))", 0.01, 1),
            Equality("per head both orders are one", "walk(swap)", "walk(same)"),
            Equality("and both are the op", "gdn.state[0, 0]", "walk(same)"),
        ),
    ),
    Disagreement(
        "side",
        "Does the decay per channel act on key or on value channels?",
        "`Diag(a) S` (rows, key channels); `S Diag(a)` (columns, value channels); GLA [Yang2024a] writes a general "
        "gate with a factor for both.",
        "On key channels, left of S. A decay of value channels fades parts of every answer alike; a decay of key "
        "channels fades what was stored under some keys and not under others.",
        """\
rows = lambda S, k, v, a, b: a[1].exp()[:, None] * S + outer(k, v)
columns = lambda S, k, v, a, b: S * a[1].exp() + outer(k, v)
gla = lineate.gated_linear_attention(q, k, v, channel).state[0, 0]
swapped = lineate.gated_linear_attention(v, v, k, channel).state[0, 0]
""",
        (
            Equality("the op scales rows", "gla", "walk(rows)"),
            Measure("relative difference of scaling columns", "far(walk(columns), gla)", 0.1, 3),
            Equality("columns are the same rule with k and v exchanged", "swapped.T", "walk(columns)"),
        ),
    ),
    Disagreement(
        "half",
        "Does weight decay come from the squared norm, or from half of it?",
        "A derivation adds the penalty (1 - g) ||S||^2 to the loss, and states that one step of descent multiplies "
        "S by g.",
        "The gradient of ||S||^2 is 2 S, so that step multiplies S by 2 g - 1, which is negative for g < 1/2. With "
        "the factor 1/2 in the penalty it is g. The squared error needs its 1/2 for the same reason.",
        """\
g, S = 0.8, torch.randn(d, d, dtype=torch.float64, requires_grad=True)
step = lambda penalty: S - torch.autograd.grad(penalty, S)[0]
without, with_half = step((1 - g) * S.square().sum()), step((1 - g) / 2 * S.square().sum())
""",
        (
            Equality("without 1/2 the step gives 2 g - 1", "without.detach()", "((2 * g - 1) * S).detach()"),
            Equality("with 1/2 it gives g", "with_half.detach()", "(g * S).detach()"),
        ),
    ),
    Disagreement(
        "one point",
        "Is Gated DeltaNet one step of SGD with weight decay?",
        "The step at one point gives (a I - beta k k^T) S + beta k v^T; it is often printed as if it were a (I - "
        "beta k k^T) S + beta k v^T.",
        "They differ by beta (1 - a) k k^T S under the same names, and are the same under others: a step with rate "
        "eta = a beta and target u = v / a is exactly Gated DeltaNet. Per channel there is no such renaming.",
        """\
point = lambda S, k, v, a, b: (a[0].exp() * I - b * outer(k, k)) @ S + b * outer(k, v)
renamed = lambda S, k, v, a, b: point(S, k, v / a[0].exp(), a, a[0].exp() * b)       # eta = a beta, u = v / a
""",
        (
            Equality("renamed, it is Gated DeltaNet", "walk(renamed)", "gdn.state[0, 0]"),
            Measure("relative difference under the same names", "far(walk(point), gdn.state[0, 0])", 0.02, 1),
        ),
    ),
    Disagreement(
        "mask",
        "Where does the causal mask go?",
        "Before the softmax, as -inf; multiplied onto the scores before the softmax, as 0; multiplied onto the "
        "weights after it.",
        "As -inf before the softmax. A score of 0 is a weight of exp(0) = 1 for the future. Zeroing the weights "
        "afterwards hides the future's values but leaves its scores in the sum below the fraction, unless rows are "
        "divided again.",
        """\
scores, past = q[0, :, 0] @ k[0, :, 0].T / d**0.5, torch.ones(t, t, dtype=torch.float64).tril()
minus_inf = scores.masked_fill(past == 0, -torch.inf).softmax(-1)
product, after = (scores * past).softmax(-1), scores.softmax(-1) * past
""",
        (
            Equality(
                "the op masks with -inf", "lineate.softmax_attention(q, k, v).output[0, :, 0]", "minus_inf @ v[0, :, 0]"
            ),
            Measure(
                "weight on the future of softmax(mask * scores), in the mean",
                "(product * (1 - past)).sum(-1).mean()",
                0.3,
                0.6,
            ),
            Measure(
                "sum of the weights that are left when masked afterwards, in the mean", "after.sum(-1).mean()", 0.4, 0.7
            ),
            Equality("divided again, they are right", "after / after.sum(-1, keepdim=True)", "minus_inf"),
        ),
    ),
    Disagreement(
        "gate layout",
        "In which layout do the output gate and the context meet?",
        "A context of `b heads t d` is reshaped to `b t heads*d` without moving the heads first, and then "
        "multiplied by a gate of `b t heads*d`.",
        "The number of elements is the same, so there is no error, but tokens and heads are mixed: the output of a "
        "token then holds other tokens, the future too. Move the heads after the tokens first, or keep `b t heads "
        "d` throughout, as lineate does.",
        """\
context, gate = torch.randn(2, 3, t, d, dtype=torch.float64), torch.randn(2, t, 3 * d, dtype=torch.float64).sigmoid()
right = gate * context.transpose(1, 2).reshape(2, t, 3 * d)
wrong = gate * context.reshape(2, t, 3 * d)
future = context.clone()
future[:, :, t // 2 :] = 0                                         # only later tokens change
seen = (context.reshape(2, t, 3 * d) - future.reshape(2, t, 3 * d))[:, : t // 2]

layer = lineate.layers.GatedAttention(24, 3, head_dim=d, qk_norm=None).double()
x = torch.randn(2, t, 24, dtype=torch.float64)
parts = layer.in_proj(x).split(3 * d, -1)                          # q | gate | k | v
q, k, v = (parts[i].unflatten(-1, (3, d)) for i in (0, 2, 3))      # b t heads d
context_first = lineate.softmax_attention(q, k, v).output.flatten(2)
by_hand = layer.out_proj(context_first * parts[1].sigmoid())
""",
        (
            Equality("lineate's layer has heads after tokens", "layer(x)[0].detach()", "by_hand.detach()"),
            Measure("relative difference of the two", "far(wrong, right)", 0.5, 2),
            Measure("part of the earlier outputs that later tokens change", "(seen != 0).double().mean()", 0.1, 0.9),
            Equality(
                "heads after tokens, no earlier output changes",
                "context.transpose(1, 2)[:, : t // 2]",
                "future.transpose(1, 2)[:, : t // 2]",
                0,
            ),
        ),
    ),
    Disagreement(
        "state layout",
        "Is the state k by v, or v by k?",
        "S with the read S^T q and transitions on the left; or its transpose with the read S q and transitions on "
        "the right.",
        "`[k, v]`. In the other layout the rule reads S Diag(a) (I - beta k k^T): on paper the diagonal comes "
        "first, yet it is the same rule. Copying that product to the left of a `[k, v]` state gives the other "
        "order, and if k = v no shape tells.",
        """\
ours = lambda S, k, v, a, b: (I - b * outer(k, k)) @ a[1].exp().diag() @ S + b * outer(k, v)
transposed = lambda T, k, v, a, b: T @ a[1].exp().diag() @ (I - b * outer(k, k)) + b * outer(v, k)
copied = lambda S, k, v, a, b: a[1].exp().diag() @ (I - b * outer(k, k)) @ S + b * outer(k, v)
""",
        (
            Equality("the transposed state is the same rule", "walk(transposed).T", "kda.state[0, 0]"),
            Measure("relative difference of the copied product", "far(walk(copied), kda.state[0, 0])", 0.01, 1),
        ),
    ),
    Disagreement(
        "beta",
        "Is beta one number a head, or one a channel?",
        "One a head and token (DeltaNet, Gated DeltaNet, KDA); in some teaching code one a value channel; separate "
        "gates of erase (key channels) and write (value channels) in GDN-2 [Hatamizadeh2026].",
        "One a head. One a value channel is v memories of one column each, every one with its own rate: it runs, "
        "token by token, but a chunk would need v triangular systems in place of one. One a key channel is another "
        "rule: the erase is then not symmetric.",
        """\
wide = torch.rand(1, t, 1, d, dtype=torch.float64)                 # a rate for every value channel
together = lineate.delta_rule(q, k, v, wide, form="recurrent").state[0, 0]
columns = [lineate.delta_rule(q, k, v[..., i : i + 1], wide[..., i]).state[0, 0] for i in range(d)]
keyed = lambda S, k, v, a, b: S + outer(k, b * v - S.T @ (b * wide[0, 0, 0] * k))
""",
        (
            Equality("a rate a value channel is a memory a column", "together", "torch.cat(columns, 1)"),
            Equality(
                "equal rates are the usual rule",
                "lineate.delta_rule(q, k, v, beta[..., None].expand(-1, -1, -1, d), form='recurrent').state",
                "lineate.delta_rule(q, k, v, beta).state",
            ),
            Measure(
                "relative difference of a rate a key channel",
                "far(walk(keyed), lineate.delta_rule(q, k, v, beta).state[0, 0])",
                0.05,
                10,
            ),
        ),
    ),
    Disagreement(
        "norm",
        "Can the norm of a memory without decay fall?",
        '"Without forgetting, the norm of the state never decreases."',
        "It grows in the mean, for random pairs by one pair's squared length a token, but a single write can make "
        "it smaller: v and then -v under one key leave nothing. Under the delta rule a write of 0 erases. What is "
        "true: no transition of the delta rule has a norm above 1 for 0 <= beta ||k||^2 <= 2.",
        """\
norms = (k[0, :, 0, :, None] * v[0, :, 0, None, :]).cumsum(0).flatten(1).norm(dim=-1)
one, sign = k[:, :1].expand(-1, 2, -1, -1), torch.tensor([1.0, -1.0], dtype=torch.float64).view(1, 2, 1, 1)
emptied = lineate.linear_attention(one, one, sign * v[:, :1]).state
erased = lineate.delta_rule(one, one, (sign + 1) * v[:, :1], torch.ones(1, 2, 1, dtype=torch.float64)).state
""",
        (
            Measure(
                "share of random writes of linear attention after which the norm is smaller",
                "(norms.diff() < 0).double().mean()",
                0.05,
                0.6,
            ),
            Equality("v and then -v leave nothing", "emptied", "torch.zeros_like(emptied)"),
            Equality("the delta rule erases with v = 0", "erased", "torch.zeros_like(erased)"),
        ),
    ),
    Disagreement(
        "dtype",
        "In which dtype is the state?",
        "Planners and teaching formulas count it in the dtype of the weights (bfloat16).",
        "float32, whatever the inputs are: a bfloat16 number near 1 has steps of 2^-7, so smaller writes are lost "
        "one by one, however many there are.",
        """\
small = torch.full((1, 1025, 1, 1), 2.0**-10, dtype=torch.bfloat16)        # 1024 small writes after one of 1
small[:, 0] = 1
kept = lineate.linear_attention(torch.ones_like(small), torch.ones_like(small), small).state
rounded = torch.zeros((), dtype=torch.bfloat16)
for x in small.flatten():
    rounded = rounded + x
""",
        (
            Equality("the op's state holds them all", "kept.double().flatten()[0]", "2.0", 0),
            Equality("a state in bfloat16 holds none of them", "rounded.double()", "1.0", 0),
            Equality("a number of the op's state has 4 bytes", "kept.element_size()", "4", 0),
        ),
    ),
    Disagreement(
        "read",
        "Is the memory read before or after the write?",
        "After it; or before it, with a bonus for the token's own pair (RWKV-6 [Peng2024]).",
        "After: a token sees its own value. The two differ by one term, (q . k) beta r, which a layer could learn "
        "to make up for. It also fixes which decay counts: reading after the write, the sum of log_decay includes "
        "the token's own.",
        """\
before, after = [], lineate.gated_delta_rule(q, k, v, head, beta, scale=1.0).output[0, :, 0]
S, own = torch.zeros(d, d, dtype=torch.float64), []
for i in range(t):
    S = head[0, i].exp() * S                                       # decayed, not yet written
    r = beta[0, i, 0] * (v[0, i, 0] - S.T @ k[0, i, 0])
    before.append(S.T @ q[0, i, 0])
    own.append((q[0, i, 0] @ k[0, i, 0]) * r)
    S = S + outer(k[0, i, 0], r)
""",
        (
            Equality("the op reads after the write", "after", "torch.stack(before) + torch.stack(own)"),
            Measure("relative difference of reading before", "far(torch.stack(before), after)", 0.1, 3),
        ),
    ),
)
"""The questions, in the order of the page."""


def run_disagreement(which: Disagreement) -> tuple[Finding, ...]:
    """Run the setup and the program of a question, and check its claims."""
    with own_random_numbers():
        names = execute(which.code, which.name, execute(SETUP, "setup"))
        return check(which.claims, names)

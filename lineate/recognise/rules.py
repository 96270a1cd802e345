"""The table: lineate's rows, and rules that are nearly one of them, with their effects and corrections."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lineate import rule as equation
from lineate.call import Inputs, Request
from lineate.forms.stability import UnstableMemoryWarning
from lineate.ops.rules import attend
from lineate.rule import DELTA, GATED_DELTA, GATED_LINEAR, KIMI_DELTA, LINEAR, Rule, read


@dataclass(frozen=True)
class Row:
    """The description of a row of lineate's table."""

    rule: Rule
    name: str
    """Its name, with those of its relatives that are the same rule."""
    call: str
    """How lineate computes it."""
    stable: str = ""
    """For which gates and keys the memory does not grow; "" if it is not known."""


CORRECTING = "0 <= beta |k|^2 <= 2: with unit keys beta may lie in [0, 2], usually in (0, 1)"
ROWS = (
    Row(
        LINEAR, "linear attention", "lineate.linear_attention(q, k, v)",
        "nothing is forgotten: the memory grows with the number of tokens, for any keys",
    ),
    Row(
        GATED_LINEAR, "gated linear attention (RetNet, Mamba-2, GLA)",
        "lineate.gated_linear_attention(q, k, v, log_decay)",
        "decay in [0, 1), for any keys; where it is 1 the memory grows with the number of tokens",
    ),
    Row(DELTA, "DeltaNet", "lineate.delta_rule(q, k, v, beta)", CORRECTING),
    Row(
        GATED_DELTA, "Gated DeltaNet", "lineate.gated_delta_rule(q, k, v, log_decay, beta)",
        f"decay in [0, 1], {CORRECTING}",
    ),
    Row(
        KIMI_DELTA, "Kimi Delta Attention", "lineate.kimi_delta_attention(q, k, v, log_decay, beta)",
        f"decay in [0, 1] in every key channel, {CORRECTING}",
    ),
)  # fmt: skip
"""The five rows of the equation. They are found from their decay, erase and write."""


GATED_DELTA_2, LOW_RANK, PRODUCT = "gated_delta_rule_2", "diagonal_plus_low_rank", "gated_delta_product"
GENERAL = (GATED_DELTA_2, LOW_RANK, PRODUCT)
"""Rules that are found from their erase (general.py) or their writes (several.py), without fitting their gates."""


OTHER_ROWS = {
    GATED_DELTA_2: (
        "Gated DeltaNet-2",
        "decay in [0, 1], 0 <= sum of erase_x k_x^2 <= 2 keeps the eigenvalue of the erase in [-1, 1]; its norm may "
        "exceed 1 where erase differs between key channels",
    ),
    PRODUCT: ("Gated DeltaProduct", "decay in [0, 1], 0 <= beta |k|^2 <= 2 for each write"),
    LOW_RANK: (
        "diagonal plus low rank",
        "decay in [0, 1], 0 <= direction . probe <= 2 keeps the eigenvalue of the erase in [-1, 1]; its norm may "
        "exceed 1 where direction and probe differ",
    ),
}
"""Names and stable ranges of other rules of lineate.rule.RULES; the others are called by the names of their ops."""


def other_rows() -> tuple[Row, ...]:
    """Return a row for each other rule of lineate.rule.RULES; they are found by their ops."""
    five = [row.rule for row in ROWS]
    return tuple(_other_row(rule) for rule in equation.RULES if rule not in five)


def _other_row(rule: Rule) -> Row:
    name, stable = OTHER_ROWS.get(rule.name, (rule.name.replace("_", " "), ""))
    arguments = ", ".join(("q", "k", "v", *rule.gates))
    return Row(rule, name, f"lineate.{rule.name}({arguments})", stable)


def row_of(corrects: bool, decay: str) -> Row:
    """Return the row of a rule that corrects or accumulates, with a decay "one" (none), "number" or "key"."""
    rules = {"one": DELTA, "number": GATED_DELTA, "key": KIMI_DELTA} if corrects else {"one": LINEAR}
    rule = rules.get(decay, GATED_LINEAR)
    return next(row for row in ROWS if row.rule == rule)


def run_tokens(rule: Rule, S: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Return the memory of lineate's own op after tokens, in float64 and the recurrent form.

    S [k, v]; k [t, k]; v [t, v]; decay [t] or [t, k]; beta [t]. A rule that accumulates has beta folded into v.
    """
    k, v = (x[None, :, None] for x in (k, v if rule.corrects else beta[:, None] * v))  # b t h k
    gates = {"log_decay": decay.log()[None, :, None], "beta": beta[None, :, None]}
    inputs = Inputs(q=k, k=k, v=v, state=S[None, None]).replace(**{name: gates[name] for name in rule.gates})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnstableMemoryWarning)  # the report has the stable range
        return attend(rule, inputs, Request(form="recurrent", backend="torch")).state[0, 0]


Update = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(S, k, v, decay, write) -> the new memory; S, decay and write are [k, v]."""


def accumulate(S: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Forget and add: a S + b k v^T."""
    return a * S + b * torch.outer(k, v)


def correct(S: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Forget, compare and write: a S + b k (v - (a S)^T k)^T."""
    return a * S + b * torch.outer(k, v - read(a * S, k))


def undecayed_read(S: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compare with the memory before it forgets: a S + b k (v - S^T k)^T."""
    return a * S + b * torch.outer(k, v - read(S, k))


def decay_after_erase(S: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Erase and then forget: a (S - b k (S^T k)^T) + b k v^T."""
    return a * (S - b * torch.outer(k, read(S, k))) + b * torch.outer(k, v)


def added_read(S: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add the stored value instead of subtracting it: a S + b k (v + (a S)^T k)^T."""
    return a * S + b * torch.outer(k, v + read(a * S, k))


def added_undecayed_read(S: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add the value stored before forgetting: a S + b k (v + S^T k)^T."""
    return a * S + b * torch.outer(k, v + read(S, k))


def read_by_columns(S: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Read S k in place of S^T k: a S + b k (v - a S k)^T; it needs equal numbers of key and value channels."""
    return a * S + b * torch.outer(k, v - (a * S) @ k)


def undecayed_read_by_columns(S: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Read S k before forgetting: a S + b k (v - S k)^T."""
    return a * S + b * torch.outer(k, v - S @ k)


def oja_per_unit(S: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Let each value shrink its own column: S + b (k v^T - S Diag(v^2))."""
    return S + b * (torch.outer(k, v) - S * v.square())


@dataclass(frozen=True)
class Relative:
    """A rule that is not a row."""

    name: str
    what: str
    """Its effect, and the difference from a row."""
    stable: str = "not known"
    change: str = ""
    """The first words of the remedy; a row in the user's names follows."""


RELATIVES = {
    "undecayed-read": Relative(
        "the read is not decayed",
        "The error v - S^T k is measured before S is decayed, so the erase is too strong by 1 / decay: one SGD step "
        "with weight decay at one point, not Gated DeltaNet. With one decay per head it is Gated DeltaNet of other "
        "gates: beta / decay for beta and decay * v for v.",
        "|decay - beta |k|^2| <= 1, for one decay per head: beta |k|^2 <= 1 + decay",
        "decay S before reading it",
    ),
    "decayed-write": Relative(
        "the new write is decayed too",
        "The decay multiplies the whole update, so what is stored is decay * v, not v.",
        "as the row: decay in [0, 1], 0 <= beta |k|^2 <= 2",
        "decay S alone, before the write",
    ),
    "decay-after-erase": Relative(
        "decay after the erase",
        "Diag(a) (I - beta k k^T) S where Kimi Delta Attention has (I - beta k k^T) Diag(a) S. One decay per head "
        "commutes with the erase and both are Gated DeltaNet; one per channel does not, unless all channels in which "
        "k is not 0 share one decay.",
        "decay in [0, 1], 0 <= beta |k|^2 <= 2",
        "decay S first, then compare and write",
    ),
    "value-channel-decay": Relative(
        "decay on value channels",
        "The decay multiplies the value channels (columns of a key x value memory); the rows of the table decay key "
        "channels or the whole head.",
        "decay in [0, 1], 0 <= beta |k|^2 <= 2 if it corrects",
        "decay the key channels",
    ),
    "decay-per-entry": Relative(
        "one decay per entry",
        "The decay differs from entry to entry of S; the rows of the table have one per head or per key channel.",
        "decay in [0, 1]",
        "use one decay per key channel",
    ),
    "beta-per-key-channel": Relative(
        "one write strength per key channel",
        "The strength multiplies the key where it writes but not where it reads (Rescorla-Wagner with one salience per "
        "cue); the rows of the table have one beta per head.",
        "0 <= sum of beta_x k_x^2 <= 2 keeps the eigenvalue in [-1, 1]; the norm may exceed 1",
        "use one beta per head",
    ),
    "beta-per-value-channel": Relative(
        "one write strength per value channel",
        "Each value channel has its own beta; the rows of the table have one per head. The ops of the correcting rules "
        "take such a beta (b t hv v).",
        "decay in [0, 1], 0 <= beta_y |k|^2 <= 2 in every value channel",
        "use one beta per head",
    ),
    "penalty-without-half": Relative(
        "a weight decay whose penalty has no 1/2",
        "The gradient of lambda |S|^2 is 2 lambda S, so a penalty meant to leave the share g leaves 2 g - 1, which is "
        "negative below g = 1/2; with 1/2 lambda |S|^2 the share is g.",
        "the share 2 g - 1 must lie in [0, 1]: g in [1/2, 1]",
        "write the penalty with 1/2",
    ),
    "sign-of-the-step": Relative(
        "the step has the wrong sign",
        "It climbs the loss: the error of a pair grows by 1 + beta |k|^2 each time it is presented.",
        "never, for beta > 0",
        "add the error v - S^T k, or subtract S^T k - v",
    ),
    "sign-of-the-read": Relative(
        "what is stored is added, not subtracted",
        "It writes v + S^T k: the memory along k grows by 1 + beta |k|^2 at every token.",
        "never, for beta > 0",
        "subtract the read: v - S^T k",
    ),
    "sign-of-the-value": Relative(
        "the value has the wrong sign",
        "It stores -v under k.",
        "as the row with v",
        "write + beta * outer(k, v)",
    ),
    "missing-transpose": Relative(
        "a transpose is missing",
        "A key x value memory answers k with S^T k; this reads S k, which has a shape only if there are as many key "
        "channels as value channels, and is not what was stored under k.",
        "not for all keys: what is written is not compared with what is stored under k",
        "read S.T @ k, or keep S as value x key and write outer(v - S @ k, k)",
    ),
    "other-write": Relative(
        "what is written is not k v^T",
        "A memory stores v under k as the outer product k v^T; k * v multiplies channel by channel instead, and a "
        "constant is the same under every key.",
        "not as a row",
        "write outer(k, v - S^T k)",
    ),
    "unequal-strengths": Relative(
        "erase and write have different strengths",
        "The rows of the table erase and write with one beta; after a write this memory does not move from the old "
        "value straight towards v.",
        "decay in [0, 1], 0 <= erase |k|^2 <= 2",
        "use one beta for both",
    ),
    "growing": Relative(
        "a decay above 1",
        "The old memory is multiplied by more than 1, so that it grows with every token.",
        "never",
        "use a decay in [0, 1], such as exp(g) with g <= 0",
    ),
    "negative-decay": Relative(
        "a decay below 0",
        "The old memory is multiplied by a negative number; lineate's decay is exp(log_decay).",
        "decay in [-1, 1]",
        "use a decay in [0, 1]",
    ),
    "nothing-written": Relative(
        "nothing is written",
        "An empty memory stays empty: no v is stored.",
        "decay in [0, 1]",
        "write beta * outer(k, v - S^T k)",
    ),
    "oja": Relative(
        "Oja's rule, or a delta rule with key and value exchanged",
        "It erases along the value, (k - S v) v^T: the memory learns to give the key back from the value.",
        "0 <= beta |v|^2 <= 2",
        "exchange k and v",
    ),
    "oja-per-unit": Relative(
        "Oja's rule, one unit per value channel",
        "Each value channel shrinks its own column by beta v^2, whatever the key is.",
        "0 <= beta v^2 <= 2 in every value channel",
        "erase along the key",
    ),
    "oja-unsupervised": Relative(
        "Oja's rule",
        "Its output S^T k takes the place of the value: it finds the principal directions of the keys and stores no "
        "values. It is not linear in S.",
        "small beta: beta |S^T k|^2 well below 1",
        "write the value v, and erase along the key",
    ),
    "normalised-hebb": Relative(
        "Hebb's rule with a normalisation",
        "S and what is written are scaled by numbers that depend on S, so the rule is not linear in S and no chunk of "
        "tokens can be computed at once.",
        "always, if the new memory is divided by its own norm",
        "use a decay in place of the division",
    ),
    "second-state": Relative(
        "a second state",
        "It keeps another array besides S from token to token (momentum, a sum of keys, a covariance); the rows of the "
        "table keep S alone. lineate.memory has such rules: Titans has momentum, least_squares a covariance.",
        "depends on both states",
    ),
    "softmax": Relative(
        "softmax attention, not a fixed-size memory",
        "A softmax over keys needs all keys: they do not fold into one S. lineate.softmax_attention computes it, with "
        "a cache that grows by a key and a value a token.",
        "no recurrence",
    ),
}
"""Rules that are no row, by their names in --json."""

COMPUTED = ("undecayed-read", "decayed-write", "decay-after-erase")
"""Relatives that a row computes with other gates."""
SLIPS = (
    *COMPUTED, "sign-of-the-step", "sign-of-the-read", "sign-of-the-value", "penalty-without-half", "growing",
    "negative-decay", "nothing-written", "other-write", "value-channel-decay", "decay-per-entry", "oja-per-unit",
)  # fmt: skip
"""Relatives that are named even where a row computes them: they usually are errors in writing one of the five rows."""

"""The equation: one memory, one step, and the rules that are its rows.

    S' = Diag(exp(log_decay_t)) S_{t-1}              forget        S: [k, v]
    r  = v_t - S'^T k_t   if the rule corrects       compare
       = v_t              if it only accumulates
    S_t = S' + beta_t k_t r^T                        write
    o_t = scale * S_t^T q_t                          read

In these five rules one key is compared, erased and written. The general row has a direction d that is erased, a probe
e that reads what is there, a key k that is written, and a value u; a token may write several times:

    S_t = S' - d_t (S'^T e_t)^T + k_t u_t^T          e = k, d = beta k, u = beta v: the five rules
                                                     e = erase * k, d = k, u = write * v: gated_delta_rule_2
                                                     e = probe, d = direction, u = v: diagonal_plus_low_rank
    S  = S - beta_j k_j (S^T k_j - v_j)^T            for j = 1 .. n, after one S': gated_delta_product

Symbols, here and everywhere: b batch, t tokens, h key heads, hv value heads (a multiple of h), k key dim, v value dim,
n chunks, c chunk length.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.torch_ops.elementwise import elementwise
from lineate.torch_ops.tracing import constant_in_graphs

DecayShape = Literal["none", "head", "channel"]


@dataclass(frozen=True, eq=False)
class Rule:
    """One row of the table. The row of a call selects its checks, forms and mixers; rows are compared by identity."""

    name: str
    """The public op's name, used in messages."""
    corrects: bool
    """Whether the write is the error v - S'^T k (delta rule) or the value itself."""
    decays: tuple[DecayShape, ...]
    """The shapes of log_decay it takes: per head (b t hv), per key channel (b t hv k), or none."""
    gates: tuple[str, ...]
    """The gates of lineate.call.Inputs that it takes, in their order there; all of them, but for a log_decay that may
    be "none"."""
    general: bool = False
    """Whether it is computed as the general row, because what it erases, compares and writes differ, or because it
    writes several times a token."""
    writes: bool = False
    """Whether k, v and beta have several writes a token: `b t n h k`, `b t n hv v`, `b t n hv`."""

    def takes(self, gates: tuple[str, ...]) -> bool:
        """Whether these gates, in their order in Inputs, are all that it needs."""
        if "none" in self.decays and "log_decay" not in gates:
            return gates == tuple(name for name in self.gates if name != "log_decay")
        return gates == self.gates


LINEAR = Rule("linear_attention", corrects=False, decays=("none",), gates=())
GATED_LINEAR = Rule("gated_linear_attention", corrects=False, decays=("head", "channel"), gates=("log_decay",))
DELTA = Rule("delta_rule", corrects=True, decays=("none",), gates=("beta",))
GATED_DELTA = Rule("gated_delta_rule", corrects=True, decays=("head",), gates=("log_decay", "beta"))
KIMI_DELTA = Rule("kimi_delta_attention", corrects=True, decays=("channel",), gates=("log_decay", "beta"))

GATED_DELTA_2 = Rule(
    "gated_delta_rule_2", corrects=True, decays=("head", "channel"), gates=("log_decay", "erase", "write"), general=True
)
GATED_DELTA_PRODUCT = Rule(
    "gated_delta_product",
    corrects=True,
    decays=("none", "head"),
    gates=("log_decay", "beta"),
    general=True,
    writes=True,
)
DIAGONAL_PLUS_LOW_RANK = Rule(
    "diagonal_plus_low_rank", corrects=True, decays=("none", "head", "channel"),
    gates=("log_decay", "probe", "direction"), general=True,
)  # fmt: skip

ONE_KEY_RULES = (LINEAR, GATED_LINEAR, DELTA, GATED_DELTA, KIMI_DELTA)
"""The rules whose one key is compared, erased and written."""
RULES = (*ONE_KEY_RULES, GATED_DELTA_2, GATED_DELTA_PRODUCT, DIAGONAL_PLUS_LOW_RANK)
_BY_NAME = {rule.name: rule for rule in RULES}


def rule_named(name: str) -> Rule | None:
    """Return the row of a rule by its name; None if it is none of the equation's, such as softmax attention."""
    return _BY_NAME.get(name)


def row_of(name: str) -> Rule:
    """Return the row of a rule by its name, which an op of torch.library has instead of the row."""
    if name not in _BY_NAME:
        raise ValueError(
            f"rule must be a row of lineate.rule.RULES to be trained or compiled, {', '.join(_BY_NAME)}, got {name!r}; "
            "add the row there"
        )
    return _BY_NAME[name]


def check_row(rule: Rule) -> None:
    """Raise if a rule has the name of a row of RULES, which ops of torch.library would take in its place."""
    if _BY_NAME.get(rule.name, rule) is not rule:
        raise ValueError(f"rule must have a name of its own, got another row named {rule.name!r}; use that of RULES")


def step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, corrects: bool
) -> tuple[Tensor, Tensor]:
    """Run one token of the equation, for any leading dimensions; return (S_t^T q_t, S_t).

    state [k, v]; q, k [k]; v [v]; decay = exp(log_decay) [1] or [k]; beta [1] or [v]; None means 1.
    """
    forgotten = state if decay is None else decay.unsqueeze(-1) * state
    error = v - read(forgotten, k) if corrects else v
    if beta is not None:
        error = beta * error
    state = forgotten + k.unsqueeze(-1) * error.unsqueeze(-2)
    return read(state, q), state


def general_step(state: Tensor, k: Tensor, u: Tensor, decay: Tensor | None, e: Tensor, d: Tensor) -> Tensor:
    """Run one write of the general row, for any leading dimensions; return S' - d (S'^T e)^T + k u^T.

    state [k, v]; k, e, d [k]; u [v]; decay = exp(log_decay) [1] or [k], None means 1.
    """
    forgotten = state if decay is None else decay.unsqueeze(-1) * state
    erased = d.unsqueeze(-1) * read(forgotten, e).unsqueeze(-2)
    return forgotten - erased + k.unsqueeze(-1) * u.unsqueeze(-2)


def read(state: Tensor, x: Tensor) -> Tensor:
    """Return S^T x, what the memory [k, v] answers to x [k]."""
    return (x.unsqueeze(-2) @ state).squeeze(-2)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the state and of all arithmetic: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Switch autocast off for the device of x, so that the state and the solve stay in float32."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if has_autocast(device) else nullcontext()


@constant_in_graphs
def has_autocast(device: str) -> bool:
    """Whether torch has autocast for this type of device."""
    return torch.amp.is_autocast_available(device)


EPSILON = 1e-6
"""Is added to the square of a norm, so that a vector of zeros can be divided by it."""


def normalize(x: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Return x * rsqrt(sum x^2 + epsilon) over the last dimension: the l2-normalisation of `normalize_qk`."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + epsilon)


def activate(
    gate: Tensor | None,
    write: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    beta_scale: float = 1.0,
    dtype: torch.dtype | None = None,
    lower_bound: float | None = None,
    raw_gates: bool | str = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Return log_decay = decay_of_gate(gate, ...) and beta = beta_scale sigmoid(write) from raw gates.

    With raw_gates "log_decay" or "beta" only that one is raw; the other is returned unchanged.

    gate `b t hv` or `b t hv k`; write `b t hv` or `b t hv v`; A_log `hv`; dt_bias `hv`, or `hv k` per channel. Both
    are computed in `dtype`; None takes the compute dtype of the gate.
    """
    log_decay, beta = gate, write
    if dtype is None:
        dtype = torch.float32 if gate is None else compute_dtype(gate.dtype)
    if gate is not None and raw_gates in (True, "log_decay"):
        log_decay = decay_of_gate(gate.to(dtype), A_log, dt_bias, lower_bound)
    if write is not None and raw_gates in (True, "beta"):
        beta = beta_scale * elementwise(torch.sigmoid, write.to(dtype))
    return log_decay, beta


def decay_of_gate(gate: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Return log_decay from the raw gate, in the dtype of the gate.

        log_decay = -exp(A_log) softplus(gate + dt_bias)                      without a lower bound
                  = lower_bound sigmoid(exp(A_log) (gate + dt_bias))          with one, which is below 0

    gate `... hv` with A_log and dt_bias `hv`; or `b t hv k` per channel, with A_log `hv` and dt_bias `hv` or `hv k`.
    exp(A_log) is 1 without A_log.
    """
    per_channel = gate.dim() == 4
    if dt_bias is not None:
        bias = dt_bias.to(gate.dtype)
        gate = gate + (bias.unsqueeze(-1) if per_channel and bias.dim() == 1 else bias)  # hv 1|k
    speed = None if A_log is None else A_log.to(gate.dtype).exp()
    if speed is not None and per_channel:
        speed = speed.unsqueeze(-1)  # hv 1
    if lower_bound is not None:
        return lower_bound * elementwise(torch.sigmoid, gate if speed is None else speed * gate)
    opened = elementwise(F.softplus, gate)
    return -opened if speed is None else -speed * opened

"""The types that describe one call of a rule: its tensors, the caller's request, and the options it runs with.

The public ops and `torch.library` take flat arguments; everything between them passes these values. They are named
tuples because one-token calls make them for every token, and because torch.compile traces them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lineate.rule import compute_dtype

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that q, k, v and the gates may have."""


class Inputs(NamedTuple):
    """The tensors of a call. An absent gate is None; an absent state is an empty memory."""

    q: Tensor
    """`b t h k`."""
    k: Tensor
    """`b t h k`."""
    v: Tensor
    """`b t hv v`."""
    log_decay: Tensor | None = None
    """`b t hv`, `b t hv k`, or None; the raw gate if Options.raw_decay. (Ops also take `hv`: see spread_decay.)"""
    beta: Tensor | None = None
    """`b t hv`, `b t hv v`, or None; the raw logit if Options.raw_beta."""
    state: Tensor | None = None
    """`b hv k v`; `n_seqs hv k v` for packed sequences."""
    cu_seqlens: Tensor | None = None
    """`n_seqs + 1`: where the sequences packed into one row begin and end."""
    A_log: Tensor | None = None
    """`hv`, for raw gates: log_decay = rule.decay_of_gate(gate, A_log, dt_bias), beta = beta_scale sigmoid(logit)."""
    dt_bias: Tensor | None = None
    """`hv`, or `hv k`; only for raw gates."""


class Slots(NamedTuple):
    """Where the states of the rows lie in the pool that a decoding call is given, and how they are rounded."""

    slots: Tensor | None = None
    """`rows`, or `rows tokens`: where each state is written; None if row i has state i."""
    start_slots: Tensor | None = None
    """`rows`: where each state is read, if elsewhere."""
    seeds: Tensor | None = None
    """`rows`: token i of a row rounds its bfloat16 state stochastically with seeds[row] + i; None: to the nearest."""


class Request(NamedTuple):
    """The options that the caller of an op passes, before they are checked."""

    scale: float | None = None
    """Multiplies the output; None is 1/sqrt(k)."""
    form: str = "auto"
    """'auto', 'recurrent', 'chunkwise' or 'parallel'."""
    backend: str = "auto"
    """'auto', 'torch', 'native' or 'triton'."""
    chunk_size: int | None = None
    """Tokens a chunk; None takes the backend's own size."""
    normalize_qk: bool = False
    """Whether q and k are l2-normalised inside."""


class Options(NamedTuple):
    """How a call runs: everything that is not a tensor."""

    corrects: bool
    """Whether the rule writes the error (delta rules) or the value itself."""
    scale: float
    """Multiplies the output."""
    normalize_qk: bool = False
    """Whether q and k are l2-normalised inside."""
    chunk_size: int = 64
    """Tokens a chunk; the triton kernels take no other size than 64."""
    beta_scale: float = 1.0
    """beta lies in (0, beta_scale) where it is made from a raw logit."""
    raw_gates: bool | str = False
    """Whether the gates are raw; "log_decay" or "beta" if only that one is. There need not be an A_log."""
    lower_bound: float | None = None
    """If given, log_decay of a raw gate lies in (lower_bound, 0)."""

    @property
    def raw_decay(self) -> bool:
        """Whether log_decay is a raw gate."""
        return self.raw_gates in (True, "log_decay")

    @property
    def raw_beta(self) -> bool:
        """Whether beta is a raw logit."""
        return self.raw_gates in (True, "beta")


def in_one_dtype(inputs: Inputs) -> Inputs:
    """Return the inputs with q, k and v in the dtype that theirs promote to, and the state in its compute dtype.

    What is not a tensor of a floating dtype is left as it is, for the checks.
    """
    q, k, v, state = inputs.q, inputs.k, inputs.v, inputs.state
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return inputs
    if not q.dtype == k.dtype == v.dtype:
        if not all(x.dtype in FLOATING for x in (q, k, v)):
            return inputs
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        inputs = inputs._replace(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype))
    if isinstance(state, Tensor) and state.dtype != compute_dtype(inputs.v.dtype) and state.is_floating_point():
        inputs = inputs._replace(state=state.to(compute_dtype(inputs.v.dtype)))
    return inputs


def spread_decay(inputs: Inputs) -> Inputs:
    """Return the inputs with a constant log_decay of each head, `hv`, as a view `b t hv`; others as they are."""
    v, log_decay = inputs.v, inputs.log_decay
    if not isinstance(log_decay, Tensor) or log_decay.dim() != 1 or not isinstance(v, Tensor) or v.dim() != 4:
        return inputs
    if log_decay.shape[0] != v.shape[2]:
        return inputs
    return inputs._replace(log_decay=log_decay.expand(*v.shape[:3]))


def spread_bias(dt_bias: Tensor, gate: Tensor) -> Tensor:
    """Return dt_bias in the shape `hv` or `hv k` of a gate's last dimensions; it may be flat, or one number a head."""
    if gate.dim() == 4 and dt_bias.shape == gate.shape[2:3] and gate.shape[3] > 1:
        return dt_bias[:, None].expand(gate.shape[2:])
    return dt_bias.view(gate.shape[2:])


def which_are_raw(decay: bool, beta: bool) -> bool | str:
    """Return Options.raw_gates from whether each of the gates is raw."""
    if decay == beta:
        return decay
    return "log_decay" if decay else "beta"

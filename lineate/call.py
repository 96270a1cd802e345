"""One call of a rule as two values: what it is called with, and how.

The public ops and `torch.library` take flat arguments; everything between them passes these two.
"""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """What a rule is called with. An absent gate is None; an absent state is an empty memory."""

    q: Tensor
    """`b t h k`."""
    k: Tensor
    """`b t h k`."""
    v: Tensor
    """`b t hv v`."""
    log_decay: Tensor | None = None
    """`b t hv`, `b t hv k`, or None; the raw gate if A_log is given."""
    beta: Tensor | None = None
    """`b t hv`, or None; the raw logit if A_log is given."""
    state: Tensor | None = None
    """`b hv k v`; `n_seqs hv k v` for packed sequences."""
    cu_seqlens: Tensor | None = None
    """`n_seqs + 1`: where the sequences packed into one row begin and end."""
    A_log: Tensor | None = None
    """`hv`: given for raw gates, log_decay = -exp(A_log) softplus(gate + dt_bias), beta = beta_scale sigmoid(logit)."""
    dt_bias: Tensor | None = None
    """`hv`, or `hv k`; only beside A_log."""


class Options(NamedTuple):
    """How a rule is called: everything that is not a tensor."""

    corrects: bool
    """Whether the rule writes the error (delta rules) or the value itself."""
    scale: float
    """Multiplies the output."""
    normalize_qk: bool = False
    """Whether q and k are l2-normalised inside."""
    chunk_size: int | None = None
    """Tokens a chunk, for the backends that let one choose."""
    beta_scale: float = 1.0
    """beta lies in (0, beta_scale) where it is made from a raw logit."""

"""The general row as plain tensors, of which each rule that erases, compares and writes with different keys is a case.

    S' = Diag(exp(log_decay_t)) S_{t-1}
    S_t = S' - d_t (S'^T e_t)^T + k_t u_t^T          n writes a token: decay before the first, read after the last

| rule | e | d | u |
|---|---|---|---|
| gated_delta_rule_2 | erase * k | k | write * v |
| gated_delta_product | beta k, write by write | k | beta v |
| diagonal_plus_low_rank | probe | direction | v |

The recurrent and the parallel form run on these tensors and are differentiated by autograd.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.rule import compute_dtype, general_step, normalize, read

GATES = ("log_decay", "beta", "erase", "write", "probe", "direction")
"""The gates of these rules."""


class GeneralRow(NamedTuple):
    """A call with its writes one after another, m = n t of them; all for value heads."""

    q: Tensor
    """`b t hv k`, scaled."""
    k: Tensor
    """`b m hv k`."""
    u: Tensor
    """`b m hv v`."""
    e: Tensor
    """`b m hv k`."""
    d: Tensor
    """`b m hv k`."""
    log_decay: Tensor | None
    """`b m hv 1|k`: 0 but before the first write of a token."""
    writes: int
    """n."""


def general_row(inputs: Inputs, options: Options) -> GeneralRow:
    """Return a call as the general row, in the compute dtype."""
    dtype = compute_dtype(inputs.v.dtype)
    inputs = inputs.map(lambda x: x.to(dtype), inputs.OF_TOKENS)
    q, k, v, log_decay = inputs.q, inputs.k, inputs.v, inputs.log_decay
    several = options.rule.writes
    n = k.shape[2] if several else 1
    if options.normalize_qk:
        q, k = normalize(q), normalize(k)
    group = v.shape[-2] // q.shape[2]
    q, k = ((x.repeat_interleave(group, dim=-2) if group > 1 else x) for x in (options.scale * q, k))
    beta = inputs.beta
    if several:
        k, v, beta = k.flatten(1, 2), v.flatten(1, 2), None if beta is None else beta.flatten(1, 2)  # b m hv ...
    if log_decay is not None:
        log_decay = log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1)  # b t hv 1|k
        if n > 1:
            rest = log_decay.new_zeros(*log_decay.shape[:2], n - 1, *log_decay.shape[2:])
            log_decay = torch.cat((log_decay.unsqueeze(2), rest), 2).flatten(1, 2)
    rate = beta.unsqueeze(-1) if beta is not None else inputs.write
    e = inputs.probe
    if e is None:
        factor = rate if inputs.erase is None else inputs.erase
        e = k if factor is None else factor * k
    d = k if inputs.direction is None else inputs.direction
    return GeneralRow(q, k, v if rate is None else rate * v, e, d, log_decay, n)


def run_recurrent(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output `b t hv v` and the final state, write by write."""
    row, state = general_row(inputs, options), inputs.state
    assert state is not None
    decay = None if row.log_decay is None else row.log_decay.exp()
    outputs = []
    for i in range(row.k.shape[1]):
        forget = None if decay is None or i % row.writes else decay[:, i]
        state = general_step(state, row.k[:, i], row.u[:, i], forget, row.e[:, i], row.d[:, i])
        if (i + 1) % row.writes == 0:
            outputs.append(read(state, row.q[:, i // row.writes]))
    return torch.stack(outputs, dim=1), state

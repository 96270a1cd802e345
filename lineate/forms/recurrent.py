"""The recurrent form: the equation, token by token.

It takes O(t k v) time. In float64 it is the reference for all other forms; decoding runs it one token at a time.
"""

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.forms.general import GATES, run_recurrent
from lineate.rule import compute_dtype, normalize, step

READS = ("q", "k", "v", *GATES, "state", "cu_seqlens")
"""The tensors of a call that this form reads; packed sequences come one by one."""


def recurrent(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output `b t hv v` and the final state; beta may also be `b t hv v`."""
    if options.rule.general:
        return run_recurrent(inputs, options)
    q, k, v, log_decay, beta, state = inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta, inputs.state
    assert state is not None
    t, h = q.shape[1:3]
    hv = v.shape[2]
    dtype = compute_dtype(v.dtype)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if options.normalize_qk:
        q, k = normalize(q), normalize(k)
    q = q * options.scale
    if hv != h:
        q, k = q.repeat_interleave(hv // h, dim=2), k.repeat_interleave(hv // h, dim=2)  # b t hv k
    decay = None
    if log_decay is not None:
        decay = log_decay.to(dtype).exp()
        decay = decay if decay.dim() == 4 else decay.unsqueeze(-1)  # b t hv 1|k
    if beta is not None:
        beta = beta.to(dtype)
        beta = beta if beta.dim() == 4 else beta.unsqueeze(-1)  # b t hv 1|v

    outputs = []
    for i in range(t):
        decay_i = None if decay is None else decay[:, i]
        beta_i = None if beta is None else beta[:, i]
        output, state = step(state, q[:, i], k[:, i], v[:, i], decay_i, beta_i, options.corrects)
        outputs.append(output)
    return torch.stack(outputs, dim=1), state

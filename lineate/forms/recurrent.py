"""The recurrent form: the equation, token by token.

O(t k v) time. In float64 it is the oracle for everything else; one token at a time it is what decoding runs.
"""

import torch
from torch import Tensor

from lineate.rule import compute_dtype, normalize, step


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
    corrects: bool,
    scale: float,
    normalize_qk: bool,
) -> tuple[Tensor, Tensor]:
    """q, k `b t h k`; v `b t hv v`; log_decay `b t hv` or `b t hv k`; beta `b t hv` or `b t hv v`; state `b hv k v`."""
    t, h = q.shape[1:3]
    hv = v.shape[2]
    dtype = compute_dtype(v.dtype)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if normalize_qk:
        q, k = normalize(q), normalize(k)
    q = q * scale
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
        output, state = step(state, q[:, i], k[:, i], v[:, i], decay_i, beta_i, corrects)
        outputs.append(output)
    return torch.stack(outputs, dim=1), state

"""The parallel form: one chunk of length t, quadratic in t, which computes the effective attention matrix.

    P_ij = sum_x q_ix k_jx e^{G_ix - G_jx}  (j <= i)      M_ij = the same with k_i for q_i  (j < i)
    A = P (I + beta M)^{-1} beta       (rule only accumulates: A = P beta)
    O = A V + (Qr - A Kr) S            (rule only accumulates: O = A V + Qr S)

It shares no code with the chunkwise form and is differentiated by autograd, so that each checks the other. Run chunk
after chunk, it is the chunkwise form for torch.func and forward mode, which must see torch's own functions.
"""

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.rule import compute_dtype, normalize

READS = ("q", "k", "v", "log_decay", "beta", "state", "cu_seqlens")
"""The tensors of a call that this form reads; packed sequences come one by one."""
# exp(-800) is 0 in float64, so a reset of -inf and one of -800 are the same, and differences of sums stay finite.
_RESET = -800.0
# Elements of one [rows, t, k] block of pairwise exponents.
_BLOCK = 1 << 23


def parallel(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output `b t hv v` and the final state."""
    state = inputs.state
    assert state is not None
    q, k, G, rate = _heads_first(inputs, options)
    v = inputs.v.to(q.dtype).transpose(1, 2)  # b hv t v
    P, M = _scores(q, k, G)
    readers = G.to(q.dtype).exp()  # b hv t 1|k
    writers = (G[:, :, -1:] - G).to(q.dtype).exp()
    last = readers[:, :, -1].unsqueeze(-1)  # b hv 1|k 1
    error = v - (readers * k) @ state if options.corrects else v
    R = _solve(M, rate, rate * error) if options.corrects else rate * error
    output = (readers * q) @ state + P @ R
    return output.transpose(1, 2), last * state + (writers * k).mT @ R


def attention_matrix(inputs: Inputs, options: Options) -> Tensor:
    """Return A `b hv t t`, lower triangular, with O = A V from an empty memory: row i is what token i reads.

    It uses only the number of heads and the dtype of the values.
    """
    q, k, G, rate = _heads_first(inputs, options)
    P, M = _scores(q, k, G)
    if not options.corrects:
        return P * rate.mT
    # A = P (I + beta M)^{-1} beta, as the solution of A beta^{-1} (I + beta M) = P without dividing by beta.
    unit = torch.diag_embed(rate.squeeze(-1))
    return P @ _solve(M, rate, unit)


def _heads_first(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q (scaled) and k `b hv t k`, G `b hv t 1|k` in float64, and beta `b hv t 1`."""
    q, k, log_decay, beta = inputs.q, inputs.k, inputs.log_decay, inputs.beta
    dtype = compute_dtype(inputs.v.dtype)
    b, t = q.shape[:2]
    hv = inputs.v.shape[2]
    q, k = q.to(dtype), k.to(dtype)
    if options.normalize_qk:
        q, k = normalize(q), normalize(k)
    group = hv // q.shape[2]
    q, k = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (q * options.scale, k))
    if log_decay is None:
        G = torch.zeros(b, hv, t, 1, dtype=torch.float64, device=q.device)
    else:
        log_decay = log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1)
        G = log_decay.transpose(1, 2).double().clamp(min=_RESET).cumsum(2)
    rate = q.new_ones(b, hv, t, 1) if beta is None else beta.to(dtype).transpose(1, 2).unsqueeze(-1)
    return q, k, G, rate


def _scores(q: Tensor, k: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """Return P (j <= i) and M (j < i) `b hv t t`. The mask comes before exp: every exponent evaluated is <= 0."""
    b, hv, t, key_dim = q.shape
    future = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
    if G.shape[-1] == 1:
        D = (G - G.mT).masked_fill(future, -torch.inf).to(q.dtype).exp()
        return (q @ k.mT) * D, ((k @ k.mT) * D).tril(-1)
    rows = max(1, _BLOCK // (b * hv * t * key_dim))
    P, M = [], []
    for start in range(0, t, rows):
        block = slice(start, min(start + rows, t))
        D = G[:, :, block, None] - G[:, :, None]  # b hv rows t k
        D = D.masked_fill(future[block, :, None], -torch.inf).to(q.dtype).exp() * k[:, :, None]
        P.append((D @ q[:, :, block, :, None]).squeeze(-1))
        M.append((D @ k[:, :, block, :, None]).squeeze(-1))
    return torch.cat(P, dim=2), torch.cat(M, dim=2).tril(-1)


def _solve(M: Tensor, rate: Tensor, right: Tensor) -> Tensor:
    """Return (I + beta M)^{-1} right, by forward substitution."""
    return torch.linalg.solve_triangular(rate * M, right, upper=False, unitriangular=True)

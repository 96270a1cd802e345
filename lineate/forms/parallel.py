"""The parallel form: one chunk of length t, quadratic in t, which computes the effective attention matrix.

    P_ij = sum_x q_ix k_jx e^{G_ix - G_jx}  (j <= i)      M_ij = the same with k_i for q_i  (j < i)
    A = P (I + beta M)^{-1} beta       (rule only accumulates: A = P beta)
    O = A V + (Qr - A Kr) S            (rule only accumulates: O = A V + Qr S)

The general row (forms/general.py) has scores against k and against d, e as reader in M, and X, what is erased:

    X = (I + M_ed)^{-1} (Er S + M_ek U)      O = Qr S + P_qk U - P_qd X      S_next = e^{G_c} S + Kw^T U - Dw^T X

It shares no code with the chunkwise form and is differentiated by autograd, so that each checks the other. Run chunk
after chunk, it is the chunkwise form for torch.func and forward mode, which must see torch's own functions.
"""

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.forms.general import GATES, GeneralRow, general_row
from lineate.rule import compute_dtype, normalize

READS = ("q", "k", "v", *GATES, "state", "cu_seqlens")
"""The tensors of a call that this form reads; packed sequences come one by one."""
# exp(-800) is 0 in float64, so a reset of -inf and one of -800 are the same, and differences of sums stay finite.
_RESET = -800.0
# Elements of one [rows, t, k] block of pairwise exponents.
_BLOCK = 1 << 23


def parallel(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output `b t hv v` and the final state."""
    state = inputs.state
    assert state is not None
    if options.rule.general:
        return _general(general_row(inputs, options), state)
    q, k, G, rate = _heads_first(inputs, options)
    v = inputs.v.to(q.dtype).transpose(1, 2)  # b hv t v
    P, M = _scores(q, k, k, G)
    readers = G.to(q.dtype).exp()  # b hv t 1|k
    writers = (G[:, :, -1:] - G).to(q.dtype).exp()
    last = readers[:, :, -1].unsqueeze(-1)  # b hv 1|k 1
    error = v - (readers * k) @ state if options.corrects else v
    R = _solve(M, rate, rate * error) if options.corrects else rate * error
    output = (readers * q) @ state + P @ R
    return output.transpose(1, 2), last * state + (writers * k).mT @ R


def attention_matrix(inputs: Inputs, options: Options) -> Tensor:
    """Return A `b hv t t`, lower triangular, with O = A V from an empty memory: row i is what token i reads.

    With n writes a token it is `b hv t t n`; for gated_delta_rule_2, O = A (write * V). It uses only the number of
    heads and the dtype of the values.
    """
    if options.rule.general:
        row = general_row(inputs, options)
        q, k, e, d, G = _rows_first(row)
        (P, M), (P_d, M_d) = _scores(q, e, k, G), _scores(q, e, d, G)
        A = (P - P_d @ _solve(M_d, q.new_ones(1), M))[:, :, row.writes - 1 :: row.writes]
        if not options.rule.writes:
            return A
        rate = row.u[..., :1].transpose(1, 2)  # of values that are 1: b hv m 1
        return (A * rate.mT).unflatten(-1, (-1, row.writes))
    q, k, G, rate = _heads_first(inputs, options)
    P, M = _scores(q, k, k, G)
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
    if beta is None:
        return q, k, G, q.new_ones(b, hv, t, 1)
    return q, k, G, (beta if beta.dim() == 4 else beta.unsqueeze(-1)).to(dtype).transpose(1, 2)


def _general(row: GeneralRow, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output `b t hv v` and the final state of a general row."""
    q, k, e, d, G = _rows_first(row)
    U = row.u.transpose(1, 2)
    (P, M), (P_d, M_d) = _scores(q, e, k, G), _scores(q, e, d, G)
    readers, writers = G.to(q.dtype).exp(), (G[:, :, -1:] - G).to(q.dtype).exp()
    last = readers[:, :, -1].unsqueeze(-1)  # b hv 1|k 1
    X = _solve(M_d, q.new_ones(1), (readers * e) @ state + M @ U)
    output = (readers * q) @ state + P @ U - P_d @ X
    final = last * state + (writers * k).mT @ U - (writers * d).mT @ X
    return output.transpose(1, 2)[:, row.writes - 1 :: row.writes], final


def _rows_first(row: GeneralRow) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q (its rows repeated for every write), k, e, d `b hv m k`, and G `b hv m 1|k` in float64."""
    q = row.q.repeat_interleave(row.writes, dim=1)
    q, k, e, d = (x.transpose(1, 2) for x in (q, row.k, row.e, row.d))
    if row.log_decay is None:
        G = torch.zeros(*k.shape[:3], 1, dtype=torch.float64, device=k.device)
    else:
        G = row.log_decay.transpose(1, 2).double().clamp(min=_RESET).cumsum(2)
    return q, k, e, d, G


def _scores(q: Tensor, e: Tensor, k: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """Return P (q by k, j <= i) and M (e by k, j < i) `b hv t t`.

    The mask comes before exp: every exponent evaluated is <= 0.
    """
    b, hv, t, key_dim = q.shape
    future = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
    if G.shape[-1] == 1:
        D = (G - G.mT).masked_fill(future, -torch.inf).to(q.dtype).exp()
        return (q @ k.mT) * D, ((e @ k.mT) * D).tril(-1)
    rows = max(1, _BLOCK // (b * hv * t * key_dim))
    P, M = [], []
    for start in range(0, t, rows):
        block = slice(start, min(start + rows, t))
        D = G[:, :, block, None] - G[:, :, None]  # b hv rows t k
        D = D.masked_fill(future[block, :, None], -torch.inf).to(q.dtype).exp() * k[:, :, None]
        P.append((D @ q[:, :, block, :, None]).squeeze(-1))
        M.append((D @ e[:, :, block, :, None]).squeeze(-1))
    return torch.cat(P, dim=2), torch.cat(M, dim=2).tril(-1)


def _solve(M: Tensor, rate: Tensor, right: Tensor) -> Tensor:
    """Return (I + beta M)^{-1} right, by forward substitution; one beta per value channel solves each column alone."""
    if rate.shape[-1] > 1:
        return _solve_columns(M, rate, right)
    return torch.linalg.solve_triangular(rate * M, right, upper=False, unitriangular=True)


def _solve_columns(M: Tensor, rate: Tensor, right: Tensor) -> Tensor:
    """Return R with R_i = right_i - beta_i * sum_{j < i} M_ij R_j, beta `b hv t v`, half after half."""
    t = right.shape[2]
    if t == 1:
        return right
    half = t // 2
    first = _solve_columns(M[:, :, :half, :half], rate[:, :, :half], right[:, :, :half])
    left = right[:, :, half:] - rate[:, :, half:] * (M[:, :, half:, :half] @ first)
    return torch.cat((first, _solve_columns(M[:, :, half:, half:], rate[:, :, half:], left)), dim=2)

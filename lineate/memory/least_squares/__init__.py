"""Recursive least squares: the memory that has the exact minimum, which DeltaNet approaches step by step.

    S_t = argmin_S  sum_{s <= t} w_s ||S^T k_s - v_s||^2 + r_t ||S||^2,     w_s = beta_s prod_{s < i <= t} lambda_i
    y_t = S_t^T q_t                                                      lambda = exp(log_decay), in (0, 1]

The state is S and P = (sum_s w_s k_s k_s^T + r I)^-1. One token is a rank-1 update:

    g   = beta P k / (lambda + beta k^T P k)         gain
    S_t = S + g (v - S^T k)^T
    P_t = (P - g k^T P) / lambda

The ridge r starts at `ridge` and would be forgotten with the data: P then grows without bound in every direction
without keys. So after each `chunk` tokens of a sequence r is restored to `ridge`, by a = ridge - r:

    P <- (I + a P)^-1 P        S <- (I + a P)^-1 S

restore=False leaves that out, and r_t = ridge prod_{i <= t} lambda_i.

Chunked, with L_t the product of lambda from the chunk's start, u_t = sqrt(beta_t / L_t), K and V with rows u_t k_t and
u_t v_t. From chunk to chunk H = P^-1 and B = H S only add up, so those before all chunks are computed at once, in
float64:

    H <- L_c (H + K^T K) + a I          B <- L_c (B + K^T V)          P = H^-1,  S = P B

Inside of all chunks, with C C^T = I + K P K^T (Cholesky; eigenvalues at least 1), whose leading blocks are the factors
of every prefix:

    [X | E] = C^-1 [K P | V - K S]        y = Q S + tril(Q X^T) E

    op.py        the public op: checks, the state, token by token
    chunked.py   many tokens, in chunks
"""

from lineate.memory.least_squares.chunked import SMALLEST_WEIGHT, TOGETHER
from lineate.memory.least_squares.op import empty_state, least_squares

__all__ = ["SMALLEST_WEIGHT", "TOGETHER", "empty_state", "least_squares"]

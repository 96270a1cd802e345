"""Titans: a memory that learns by gradient descent with momentum, and forgets.

    S_t = eta_t S_{t-1} - theta_t grad_t       grad of 1/2 |f(M; k_t) - v_t|^2 at M0, the weights as the chunk began
    M_t = (1 - alpha_t) M_{t-1} + S_t
    y_t = f(M_t; q_t)

f is a matrix, or an MLP of several: x_{l+1} = silu(x_l M^l), the last one without silu, then optionally a layer norm
and + x. The gradient of one token in each matrix is x^T G of rank 1, so only scores are needed inside a chunk:

    E_ij = prod_{j<r<=i} eta_r      A_ti = prod_{i<r<=t} (1 - alpha_r)      W = A (E theta)
    m_t = prod_{r<=t} eta_r         b_t = prod_{r<=t} (1 - alpha_r)         f = A m
    x M_t = b_t x M + f_t x S - sum_{j<=t} W_tj (x . x_j) G_j               M, S those before the chunk

and M, S at its end are the same sums. The products are taken over just the tokens they span, never as quotients:
gates of exactly 0 or 1 are exact, gradients too.

    op.py      the public op: checks, the state, the loop over chunks
    model.py   the reads and writes of a chunk
    scan.py    many chunks at once on a GPU, where kernels carry M and S from chunk to chunk
"""

from lineate.memory.titans.op import titans, titans_state

__all__ = ["titans", "titans_state"]

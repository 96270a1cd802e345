"""TTT-Linear and TTT-MLP (arXiv 2407.04620): the memory is a small model that is trained on every token.

    z(x) = W x + b                      one layer (TTT-Linear), or gelu between several (TTT-MLP has two)
    loss_s = 1/2 |LN(z(k_s)) - (v_s - k_s)|^2
    W_t = W_0 - f_i sum_{s <= t} rate_s grad loss_s(W_0)       all s of the chunk that holds t, its i-th token
    o_t = q_t + LN(z(q_t; W_t))                                after the write

All gradients of a chunk of c tokens are taken at the weights W_0 of its start; after c tokens W_0 = W_c. The factor f
of the reader's place is max(0, 1/i + learned_i). With G_l = dloss/dz_l and x_l the input of layer l for the keys, the
dual form reads a whole chunk by products, layer after layer, and never makes W_t:

    y_l = y W_l + b_l - tril(f_t rate_s (y_t . x_ls + 1)) G_l       y = q, then gelu(y_l)

A state holds the weights of the chunk's start, the sums of rate_s grad loss_s since, and the place in the chunk.

    op.py      the public op: checks, the state, one token
    dual.py    many tokens: the dual form, chunk by chunk or handed to the kernels
    model.py   the small model: its reads and its gradients
    scan.py    the same chunks on a GPU, where kernels carry the weights from chunk to chunk
"""

from lineate.memory.ttt.op import ttt

__all__ = ["ttt"]

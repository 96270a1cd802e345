"""LaCT: a SwiGLU network per head that reads many tokens, then takes one large step.

    f(x) = W1 (silu(W0 x) * W2 x)                                   W0, W2 `dh d`; W1 `d dh`
    y_t = f(q_t)                                                    apply: the weights are those of the chunk's start
    dW = sum over the chunk of -rate_s grad(-<f(k_s), v_s>)  + mean over the chunk of momentum_s * dW of the last one
    W = rows of (W + NewtonSchulz(dW)) rescaled to their first norms      update: at the end of a whole chunk only

With a = W0 k, u = W2 k, hid = silu(a) u, back = W1^T v:

    dW0 = sum rate0 (back u silu'(a)) k^T      dW1 = sum rate1 v hid^T      dW2 = sum rate2 (back silu(a)) k^T

A call that ends inside a chunk keeps that chunk's sums in the state, and the next call continues the chunk.
The state has a fixed size, independent of the chunk: weights, sums, the last dW, and the rows' norms.

    op.py      the public op: checks, the state, one token
    scan.py    many tokens: runs of chunks, with a backward by hand
    steps.py   the steps of both in torch; lineate.kernels.memories.lact has some of them as kernels
"""

from lineate.memory.lact.op import fresh_state, lact, lact_state

__all__ = ["fresh_state", "lact", "lact_state"]

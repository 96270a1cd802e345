"""The public ops of the general row: what is erased, what is compared and what is written differ; n writes.

    S' = Diag(exp(log_decay_t)) S_{t-1}
    S_t = S' - d_t (S'^T e_t)^T + k_t u_t^T          o_t = scale * S_t^T q_t

lineate/ops/rules.py says what holds for all ops: dtypes, gradients, checks. forms/general.py has the cases.
"""

from torch import Tensor

from lineate.call import Inputs, Request
from lineate.console.hints import OF_OPS, hinted
from lineate.ops.rules import Attended, attend
from lineate.rule import DIAGONAL_PLUS_LOW_RANK, GATED_DELTA_2, GATED_DELTA_PRODUCT


@hinted(OF_OPS)
def gated_delta_rule_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    erase: Tensor,
    write: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
    normalize_qk: bool = False,
) -> Attended[Tensor]:
    """Forget, then erase and write separately: S_t = S' + k_t (write_t * v_t - S'^T (erase_t * k_t))^T (GDN-2).

    With erase = beta and write = beta in all channels it is kimi_delta_attention, or gated_delta_rule. erase = 0 only
    accumulates; write = 0 only erases. Keys should have unit length (normalize_qk=True) and erase lie in [0, 2], or the
    memory may overflow.

    Args:
        q: queries, `b t h k`.
        k: keys, `b t h k`.
        v: values, `b t hv v`, with hv a multiple of h.
        log_decay: `b t hv k` (per key channel) or `b t hv` (per head): natural logarithm, at most 0, per token; or
            `hv`, one constant for each head.
        erase: `b t hv k`: how much of what the memory answers to each key channel is erased, usually in (0, 1) or
            (0, 2).
        write: `b t hv v`: how much of each value channel is written, usually in (0, 1).
        scale: multiplies the output; None is 1/sqrt(k).
        state: the memory to continue from, `b hv k v`; `n_seqs hv k v` with cu_seqlens. None is an empty memory.
        cu_seqlens: `n_seqs + 1`, int: the bounds of sequences packed into one row (b = 1), which never see each other.
        form: "auto", "recurrent", "chunkwise" or "parallel".
        backend: "auto", "torch", "native" (C, on a CPU) or "triton" (on a GPU).
        chunk_size: tokens a chunk of the chunkwise form; None takes the backend's own size.
        normalize_qk: whether q and k are l2-normalised inside.

    Returns:
        Attended(output, state): the output `b t hv v` in the dtype of v, and the memory after the last token.
    """
    inputs = Inputs(
        q=q, k=k, v=v, log_decay=log_decay, erase=erase, write=write, state=state, cu_seqlens=cu_seqlens
    )  # fmt: skip
    return attend(GATED_DELTA_2, inputs, Request(scale, form, backend, chunk_size, normalize_qk))


@hinted(OF_OPS)
def gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
    normalize_qk: bool = False,
) -> Attended[Tensor]:
    """Forget once, correct n times: S' = exp(log_decay_t) S_{t-1}, then S += beta_j k_j (v_j - S^T k_j)^T, j = 1 .. n.

    The token is read after its last write. With n = 1 it is gated_delta_rule; without log_decay it is DeltaProduct.
    Writes with beta = 2 are reflections: n of them are any permutation of n + 1 keys, or rotation of n dimensions. Keys
    should have unit length (normalize_qk=True), or the memory may overflow: see delta_rule.

    Args:
        q: queries, `b t h k`.
        k: keys, `b t n h k`: those of the n writes of each token, in their order.
        v: values, `b t n hv v`, with hv a multiple of h.
        log_decay: `b t hv`: natural logarithm of the decay, at most 0, per token; or `hv`, one constant for each head;
            None: nothing is forgotten.
        beta: the rates of writing, `b t n hv`, in [0, 2].
        scale: multiplies the output; None is 1/sqrt(k).
        state: the memory to continue from, `b hv k v`; `n_seqs hv k v` with cu_seqlens. None is an empty memory.
        cu_seqlens: `n_seqs + 1`, int: the bounds of sequences packed into one row (b = 1), which never see each other.
        form: "auto", "recurrent", "chunkwise" or "parallel".
        backend: "auto", "torch", "native" (C, on a CPU) or "triton" (on a GPU).
        chunk_size: tokens a chunk of the chunkwise form; None takes the backend's own size.
        normalize_qk: whether q and k are l2-normalised inside.

    Returns:
        Attended(output, state): the output `b t hv v` in the dtype of v, and the memory after the last token.
    """
    inputs = Inputs(q=q, k=k, v=v, log_decay=log_decay, beta=beta, state=state, cu_seqlens=cu_seqlens)
    return attend(GATED_DELTA_PRODUCT, inputs, Request(scale, form, backend, chunk_size, normalize_qk))


@hinted(OF_OPS)
def diagonal_plus_low_rank(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    probe: Tensor,
    direction: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
    normalize_qk: bool = False,
) -> Attended[Tensor]:
    """Forget, then erase what a probe reads in a direction of its own, and write: the general row, and RWKV-7.

    S' = Diag(exp(log_decay_t)) S_{t-1}, S_t = S' - direction_t (S'^T probe_t)^T + k_t v_t^T. RWKV-7 probes the memory
    before its decay w: there probe = kk / w and direction = kk * a, with scale=1. The memory may overflow where
    probe . direction is outside [0, 2].

    Args:
        q: queries, `b t h k`.
        k: keys, `b t h k`.
        v: values, `b t hv v`, with hv a multiple of h.
        log_decay: `b t hv k` (per key channel) or `b t hv` (per head): natural logarithm, at most 0, per token; or
            `hv`, one constant for each head; None: nothing is forgotten.
        probe: `b t hv k`: what the memory is read with to be erased. normalize_qk does not change it.
        direction: `b t hv k`: the key that is erased. normalize_qk does not change it.
        scale: multiplies the output; None is 1/sqrt(k).
        state: the memory to continue from, `b hv k v`; `n_seqs hv k v` with cu_seqlens. None is an empty memory.
        cu_seqlens: `n_seqs + 1`, int: the bounds of sequences packed into one row (b = 1), which never see each other.
        form: "auto", "recurrent", "chunkwise" or "parallel".
        backend: "auto", "torch", "native" (C, on a CPU) or "triton" (on a GPU).
        chunk_size: tokens a chunk of the chunkwise form; None takes the backend's own size.
        normalize_qk: whether q and k are l2-normalised inside.

    Returns:
        Attended(output, state): the output `b t hv v` in the dtype of v, and the memory after the last token.
    """
    inputs = Inputs(
        q=q, k=k, v=v, log_decay=log_decay, probe=probe, direction=direction, state=state, cu_seqlens=cu_seqlens
    )  # fmt: skip
    return attend(DIAGONAL_PLUS_LOW_RANK, inputs, Request(scale, form, backend, chunk_size, normalize_qk))

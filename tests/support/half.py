"""The chunk map of docs/derivation.md in plain torch with 16-bit operands, to find how exact a 16-bit kernel can be.

Every matrix product rounds its two operands to the dtype and sums in float32, backward as forward; the state, the gates
and the triangular inverse are float32. With normalize_qk, unless decay is per channel, q and k as they are given, which
need no rounding, are the operands, and their inverse norms stay outside with the decay, as in the kernels: a gradient
divided by a long norm may be too small for float16. `budget` is twice this map's error against the float64 oracle, plus
the rounding of the result.
"""

import itertools

import torch
from torch import Tensor

from lineate.ops.raw_gates import activate
from lineate.rule import normalize
from tests.support.cases import Inputs, Result, errors, weights

CHUNK = 64


class Product(torch.autograd.Function):
    """a @ b of rounded operands; the gradient is rounded too before it is multiplied."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        a, b = a.to(dtype).float(), b.to(dtype).float()
        ctx.save_for_backward(a, b)
        ctx.dtype = dtype
        return a @ b

    @staticmethod
    def backward(ctx, d: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        d = d.to(ctx.dtype).float()
        return d @ b.mT, a.mT @ d, None


class Solve(torch.autograd.Function):
    """R = (I + A)^-1 B for A strictly lower triangular: the inverse in float32, then rounded like any operand.

    X = (I + A)^-T dR      dB = X      dA = -tril(X R^T, -1)
    """

    @staticmethod
    def forward(ctx, A: Tensor, B: Tensor, dtype: torch.dtype) -> Tensor:
        one = torch.eye(A.shape[-1], device=A.device)
        T = torch.linalg.solve_triangular(A + one, one.expand_as(A), upper=False, unitriangular=True).to(dtype).float()
        R = T @ B.to(dtype).float()
        ctx.save_for_backward(T, R)
        ctx.dtype = dtype
        return R

    @staticmethod
    def backward(ctx, dR: Tensor) -> tuple[Tensor, Tensor, None]:
        T, R = ctx.saved_tensors
        X = T.mT @ dR.to(ctx.dtype).float()
        return -(X.to(ctx.dtype).float() @ R.to(ctx.dtype).float().mT).tril(-1), X, None


class Through(torch.autograd.Function):
    """e^{G_c} S, whose gradient is computed from S and dS as they are kept between the passes, which is rounded."""

    @staticmethod
    def forward(ctx, last: Tensor, S: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(last, S.to(dtype).float())
        ctx.dtype = dtype
        return last * S

    @staticmethod
    def backward(ctx, d: Tensor) -> tuple[Tensor, Tensor, None]:
        last, S = ctx.saved_tensors
        dlast = (S * d.to(ctx.dtype).float()).sum(-1, keepdim=True)
        return dlast if last.shape[-2] > 1 else dlast.sum(-2, keepdim=True), last * d, None


def _scores(a: Tensor, k: Tensor, decay: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return sum_x a_ix k_jx e^{G_ix - G_jx}, j <= i; per channel by halving, with factors split at a border."""
    c = a.shape[-2]
    j = torch.arange(c, device=a.device)[None, :]
    i = j.mT
    if decay is None or decay.shape[-1] == 1:
        scores = Product.apply(a, k.mT, dtype)
        if decay is not None:
            G = decay.double().cumsum(-2)
            scores = scores * torch.exp((G - G.mT).masked_fill(j > i, -torch.inf)).float()
        return scores.tril()
    scores = torch.diag_embed((a * k).sum(-1))
    for s in (1, 2, 4, 8, 16, 32):
        reads = (i // s) % 2 == 1
        within = (i // s == j // s) & torch.where(reads, j <= i, j > i)
        factor = torch.exp((within.double() @ decay.double()).float())
        meet = (i // (2 * s) == j // (2 * s)) & (i // s > j // s)
        scores = torch.where(meet, Product.apply(a * factor, (k * factor).mT, dtype), scores)
    return scores


def _chunk(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, norm_q: Tensor,
    norm_k: Tensor, dtype: torch.dtype,
):  # fmt: skip
    """Return output and next state of a chunk `... c k`, decay `... c 1` or `... c k`, beta and norms `... c 1`."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return Product.apply(a, b, dtype)

    def reader(x: Tensor, norm: Tensor) -> Tensor:
        """Return e^G x S; a factor per head stays outside the product."""
        if decay is None:
            return product(x, S) * norm
        return product(x * read, S) if decay.shape[-1] > 1 else product(x, S) * (read * norm)

    if decay is not None:
        G = decay.double().cumsum(-2)
        read, write, last = G.exp().float(), (G[..., -1:, :] - G).exp().float(), G[..., -1:, :].exp().float().mT
    R = v
    if beta is not None:
        M = (_scores(k, k, decay, dtype) * norm_k * norm_k.mT).tril(-1)
        R = Solve.apply(beta * M, beta * (v - reader(k, norm_k)), dtype)
    output = reader(q, norm_q) + product(_scores(q, k, decay, dtype) * norm_q * norm_k.mT, R)
    if decay is None:
        return output, S + product(k.mT, R * norm_k)
    written = product((k * write).mT, R) if decay.shape[-1] > 1 else product(k.mT, R * (write * norm_k))
    return output, Through.apply(last, S, dtype) + written


def _inverse_norm(x: Tensor) -> Tensor:
    """Return what `normalize` multiplies x with, `... 1`."""
    return torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def attend(inputs: Inputs, *, cu_seqlens: Tensor | None = None, normalize_qk: bool = False, scale: float | None = None):
    """Return output and final state of a call, as the public op does, for q, k, v in a 16-bit dtype."""
    dtype = inputs["v"].dtype
    group = inputs["v"].shape[2] // inputs["k"].shape[2]
    q, k, v = (inputs[name].float() for name in "qkv")
    per_channel = "log_decay" in inputs and inputs["log_decay"].dim() == 4
    if normalize_qk and per_channel:
        q, k = normalize(q), normalize(k)
    outside = normalize_qk and not per_channel
    norms = [_inverse_norm(x) if outside else torch.ones_like(x[..., :1]) for x in (q, k)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, *norms = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (q, k, *norms))
    v = v.transpose(1, 2)
    decay, beta = (inputs[name].float() if name in inputs else None for name in ("log_decay", "beta"))
    decay, beta = (
        None if x is None else (x.unsqueeze(-1) if x.dim() == 3 else x).transpose(1, 2) for x in (decay, beta)
    )
    if decay is not None:  # e^-200 is 0: sums stay finite, and smaller decays have no gradient
        decay = torch.where(decay < -200, torch.full_like(decay, -200), decay)
    b, t = q.shape[0], q.shape[2]
    bounds = [0, t] if cu_seqlens is None else cu_seqlens.tolist()
    rows = b if cu_seqlens is None else len(bounds) - 1
    state = inputs.get("state", q.new_zeros(rows, v.shape[1], q.shape[3], v.shape[3]))
    outputs, finals = [], []
    for text, (start, end) in enumerate(itertools.pairwise(bounds)):
        S = state if cu_seqlens is None else state[text : text + 1]
        for first in range(start, end, CHUNK):
            part = slice(first, min(first + CHUNK, end))
            rest = (None if x is None else x[:, :, part] for x in (decay, beta, *norms))
            output, S = _chunk(S, q[:, :, part], k[:, :, part], v[:, :, part], *rest, dtype)
            outputs.append(output * scale)
        finals.append(S)
    return torch.cat(outputs, 2).transpose(1, 2), torch.cat(finals)


def run(inputs: Inputs, *, raw: dict[str, object] | None = None, **options: object) -> Result:
    """Return output, state and all gradients of cases.run's loss.

    With `raw`, those of gates before their activation.
    """
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    call = leaves
    if raw is not None:
        call = {name: x for name, x in leaves.items() if name in ("q", "k", "v", "state")}
        bias = leaves.get("dt_bias")
        bias = None if bias is None else bias.view(leaves["gate"].shape[2:])
        call["log_decay"], call["beta"] = activate(leaves["gate"], leaves["write"], leaves.get("A_log"), bias, **raw)
    output, state = attend(call, **options)
    dtype = inputs["v"].dtype
    loss = sum((x.double() * weights(x, i).to(x.device)).sum() for i, x in ((1, output), (2, state)))
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return Result(output.detach().to(dtype), state.detach(), dict(zip(leaves, grads, strict=True)))


def budget(inputs: Inputs, expected: Result, **options: object) -> dict[str, float]:
    """Return 2 x the errors of this map on the same numbers, half an eps of 16-bit results, and a float32 term.

    The last term, u sqrt(n) for sums of n = c + k + v terms, remains where 16 bits happen to be exact.
    """
    n = CHUNK + inputs["k"].shape[-1] + inputs["v"].shape[-1]
    allowed = {}
    for name, error in errors(run(inputs, **options), expected).items():
        source = {"output": "v"}.get(name, name.removeprefix("d"))
        rounding = torch.finfo(inputs[source].dtype).eps / 2 if source in inputs and source != "state" else 0.0
        allowed[name] = 2 * error + rounding + 2**-24 * n**0.5
    return allowed

"""The general row with 16-bit operands in plain torch, as tests/support/half.py has the five rules.

    (I + M_d) X = Er S + M U      O = Qr S + P U - P_d X      S_next = e^{G_c} S + Kw^T U - Dw^T X

Where d = k, (I + M) R = U - Er S is solved for R = U - X. `budget` is that of half.py.
"""

import itertools

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.forms.general import GeneralRow, general_row
from lineate.rule import Rule
from tests.support.cases import Result, errors, weights
from tests.support.half import CHUNK, Product, Solve, Through, _scores


def _chunk(S: Tensor, row: GeneralRow, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return output and next state of a chunk `b hv m .`; q is 0 but at the last write of a token."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return Product.apply(a, b, dtype)

    q, k, u, e, d, decay, _ = row
    one = torch.ones(1)
    read, write, last = one, one, None
    if decay is not None:
        G = decay.double().cumsum(-2)
        read, write, last = G.exp().float(), (G[..., -1:, :] - G).exp().float(), G[..., -1:, :].exp().float().mT
    erased = product(e * read, S)
    M = _scores(e, d, decay, dtype).tril(-1)
    if d is k:
        R, more = Solve.apply(M, u - erased, dtype), None
    else:
        R = -Solve.apply(M, erased + product(_scores(e, k, decay, dtype).tril(-1), u), dtype)
        more = product(_scores(q, k, decay, dtype), u), product((k * write).mT, u)
    output = product(q * read, S) + product(_scores(q, d, decay, dtype), R)
    kept = S if last is None else Through.apply(last, S, dtype)
    written = product((d * write).mT, R)
    if more is not None:
        output, written = output + more[0], written + more[1]
    return output, kept + written


def attend(rule: Rule, inputs: dict[str, Tensor], *, cu_seqlens: Tensor | None = None, normalize_qk: bool = False):
    """Return output and final state of a call, for q, k, v in a 16-bit dtype."""
    dtype, n = inputs["v"].dtype, inputs["k"].shape[2] if rule.writes else 1
    given = Inputs.of({name: None if name not in inputs else inputs[name].float() for name in Inputs.NAMES})
    row = general_row(given, Options(rule, given.q.shape[-1] ** -0.5, normalize_qk))
    q = torch.nn.functional.pad(row.q.unsqueeze(2), (0, 0, 0, 0, n - 1, 0)).flatten(1, 2)
    decay = row.log_decay
    if decay is not None:  # e^-200 is 0: sums stay finite, and smaller decays have no gradient
        decay = torch.where(decay < -200, torch.full_like(decay, -200), decay)
    u = row.u + (row.u.to(dtype).float() - row.u).detach()
    tensors = [None if x is None else x.transpose(1, 2) for x in (q, row.k, u, row.e, row.d, decay)]
    if row.d is row.k:
        tensors[4] = tensors[1]
    b, m = q.shape[:2]
    ends = [0, m] if cu_seqlens is None else [n * x for x in cu_seqlens.tolist()]
    outputs, finals = [], []
    for text, (start, end) in enumerate(itertools.pairwise(ends)):
        S = given.state if cu_seqlens is None else given.state[text : text + 1]
        for first in range(start, end, CHUNK):
            part = slice(first, min(first + CHUNK, end))
            own = [None if x is None else x[:, :, part] for x in tensors]
            own[4] = own[1] if tensors[4] is tensors[1] else own[4]
            output, S = _chunk(S, GeneralRow(*own, 1), dtype)
            outputs.append(output)
        finals.append(S)
    return torch.cat(outputs, 2).transpose(1, 2)[:, n - 1 :: n], torch.cat(finals)


def budget(rule: Rule, inputs: dict[str, Tensor], expected: Result, **options: object) -> dict[str, float]:
    """Return 2 x the errors of this map on the same numbers, half an eps of 16-bit results, and a float32 term."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    output, state = attend(rule, leaves, **options)
    loss = sum((x.double() * weights(x, i)).sum() for i, x in ((1, output), (2, state)))
    grads = torch.autograd.grad(loss, list(leaves.values()))
    found = Result(output.detach().to(inputs["v"].dtype), state.detach(), dict(zip(leaves, grads, strict=True)))
    terms = CHUNK + inputs["k"].shape[-1] + inputs["v"].shape[-1]
    allowed = {}
    for name, error in errors(found, expected).items():
        source = {"output": "v"}.get(name, name.removeprefix("d"))
        rounding = torch.finfo(inputs[source].dtype).eps / 2 if source in inputs and source != "state" else 0.0
        allowed[name] = 2 * error + rounding + 2**-24 * terms**0.5
    return allowed

"""Packed sequences for forms that know only whole ones: run each text by itself, from its own state."""

from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor


class Form(Protocol):
    """A form over whole sequences: (q, k, v, log_decay, beta, state) -> (output, state)."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]: ...


def run_packed(
    form: Form,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """Tensors are `1 t ...`, state is `n_seqs hv k v`; a text of length 0 returns its state unchanged."""
    bounds = cu_seqlens.tolist()
    outputs, states = [], []
    for i, (start, end) in enumerate(pairwise(bounds)):
        own = state[i : i + 1]
        if end > start:
            text = slice(start, end)
            output, own = form(
                q[:, text],
                k[:, text],
                v[:, text],
                None if log_decay is None else log_decay[:, text],
                None if beta is None else beta[:, text],
                own,
            )
            outputs.append(output)
        states.append(own)
    return torch.cat(outputs, dim=1), torch.cat(states)

"""Forms that know only whole sequences, run text by text of packed ones, or chunk by chunk."""

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
    bounds = check_bounds(cu_seqlens, q.shape[1])
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


def run_chunked(
    form: Form,
    chunk_size: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Each chunk from the state that the one before it left."""
    outputs = []
    for start in range(0, q.shape[1], chunk_size):
        chunk = slice(start, start + chunk_size)
        output, state = form(
            q[:, chunk],
            k[:, chunk],
            v[:, chunk],
            None if log_decay is None else log_decay[:, chunk],
            None if beta is None else beta[:, chunk],
            state,
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1), state


def check_bounds(cu_seqlens: Tensor, t: int) -> list[int]:
    """The values, checked: of compiled calls that can be done only where they run."""
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != t or sorted(bounds) != bounds:
        raise ValueError(f"cu_seqlens must rise from 0 to t = {t}, got {bounds}")
    return bounds

"""Reading long prompts on a GPU in pieces, so that the memory of activations does not grow with the prompt."""

import torch
from torch import Tensor

from lineate.layers import TokenCache
from lineate.models.hybrid import HybridLM, LMOutput
from lineate.models.state import ModelState

PIECE = 16384
"""Tokens of a piece, of all rows together: large enough for the matrix rate of a GPU, also where each token goes to 8
of 256 experts, and small enough for a few GB of activations."""
CHUNK = 64
"""The tokens that the kernels of the rules read at a time; pieces are multiples of it."""


@torch.no_grad()
def read_prompt(
    model: HybridLM, ids: Tensor, state: ModelState | None = None, cu_seqlens: Tensor | None = None, piece: int = PIECE
) -> LMOutput:
    """Read prompts as model(ids, state, cu_seqlens, last_only=True) does, with bounded memory on a GPU.

    On a CPU, under context parallelism, with an empty prompt and for up to `piece` tokens this is that call. Packed
    prompts that are longer together are read one by one.

    Args:
        model: The model.
        ids: Tokens `b t`; with cu_seqlens `1 t`.
        state: What the rows have read before; None for nothing.
        cu_seqlens: Where prompts packed into one row begin and end, `n_seqs + 1`.
        piece: The most tokens of a call, of all rows together.
    """
    whole = not ids.is_cuda or ids.numel() <= piece or model.context is not None
    if whole or (cu_seqlens is not None and not cu_seqlens.diff().all()):
        return model(ids, state, cu_seqlens, last_only=True)
    if cu_seqlens is None:
        return read_rows(model, ids, state, max(CHUNK, piece // ids.shape[0] // CHUNK * CHUNK))
    outputs = []
    for row, own in enumerate(ids.split(cu_seqlens.diff().tolist(), 1)):
        before = None if state is None else state.select(torch.tensor([row], device=ids.device))
        outputs.append(read_rows(model, own, before, piece))
    logits = torch.cat([x.logits for x in outputs], 1)
    return LMOutput(logits, ModelState.join([x.state for x in outputs]), None)


def read_rows(model: HybridLM, ids: Tensor, state: ModelState | None, most: int) -> LMOutput:
    """Read rows of one length, `most` tokens of each at a time."""
    first, *others = ids.split(most, 1)
    seen = 0 if state is None else int(torch.as_tensor(state.lengths).max())
    if state is not None and others:
        state = reserve(state, seen + ids.shape[1])
    out: LMOutput = model(first, state, last_only=True)
    read = reserve(out.state, ids.shape[1]) if state is None and others else out.state
    for part in others:
        out = model(part, read, last_only=True)
        read = out.state
    return out


def reserve(state: ModelState, tokens: int) -> ModelState:
    """Return the state with caches that have room for `tokens` tokens in all, so that reading on copies nothing."""
    layers = tuple(x.reserve(tokens) if isinstance(x, TokenCache) else x for x in state.layers)
    return ModelState(layers, state.lengths)

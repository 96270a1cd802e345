"""Reading long prompts on a GPU in pieces, so that the memory of activations does not grow with the prompt."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lineate.layers import MixtureOfExperts, TokenCache
from lineate.models.nbytes import weights_nbytes
from lineate.models.state import ModelState

PIECE = 32768
"""The most tokens of a piece, of all rows together: enough for the matrix rate of a GPU, also where each token goes to
8 of 256 experts, and few enough for 4 GB of activations."""
SMALLEST = 4096
"""The fewest tokens of a piece, where memory is short."""
SHARE = 8
"""Activations of a piece may take this part of the memory that the weights leave, 1 / SHARE."""
CHUNK = 64
"""The tokens that the kernels of the rules read at a time; pieces are multiples of it."""

Read = Callable[[Tensor, ModelState | None, Tensor | None], tuple[Tensor, ModelState]]
"""Reads ids after a state, packed or not; returns the input of the head, `b t hidden`, and the new state."""


def piece_of(ids: Tensor, blocks: nn.ModuleList, others: Sequence[nn.Module], *, alone: bool) -> int | None:
    """Return how many tokens, of all rows together, a call that wants the last logits alone reads at a time; None: all.

    It is decided by sizes that do not change while a program runs, so that the same prompt is read in the same pieces.

    Args:
        ids: The tokens.
        blocks: The blocks of the model.
        others: The modules around them.
        alone: Whether no other ranks read the same tokens, which must read the same pieces.
    """
    if torch.compiler.is_compiling() or not ids.is_cuda:  # a graph must not depend on the number of tokens
        return None
    if ids.numel() <= SMALLEST or torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing():
        return None
    piece = PIECE
    if alone:
        weights, each = sizes_of(blocks)
        room = torch.cuda.get_device_properties(ids.device).total_memory - weights - weights_nbytes(*others)
        while piece > SMALLEST and SHARE * piece * each > room:
            piece //= 2
    return piece if ids.numel() > piece else None


def sizes_of(blocks: nn.ModuleList) -> tuple[int, int]:
    """Return the bytes of the weights of all blocks, and an estimate of those that the activations of a token take.

    Blocks with modules of the same classes count as equal: to read the sizes of all of them takes milliseconds. The
    activations are the outputs of a block's products. On an H200, 131,072 tokens read at once: Kimi-Linear-48B 109 kB a
    token (estimated 125), Qwen3.5-35B-A3B 69 kB (85).
    """
    kinds: dict[tuple[type, ...], list[nn.Module]] = {}
    for block in blocks:
        kinds.setdefault(tuple(type(x) for x in block.children()), []).append(block)
    weights = sum(len(alike) * weights_nbytes(alike[0]) for alike in kinds.values())
    return weights, max((token_nbytes(alike[0]) for alike in kinds.values()), default=0)


def token_nbytes(block: nn.Module) -> int:
    """Return the bytes of the outputs of a block's products for one token."""

    def nbytes(module: nn.Module) -> int:
        if isinstance(module, MixtureOfExperts):
            _, hidden, size = module.experts_down.shape
            return module.active * (hidden + 2 * size) * module.experts_down.dtype.itemsize
        return module.out_features * module.weight.dtype.itemsize if isinstance(module, nn.Linear) else 0

    return sum(map(nbytes, block.modules()))


def read_pieces(
    read: Read, ids: Tensor, state: ModelState | None, cu_seqlens: Tensor | None, piece: int
) -> tuple[Tensor, ModelState]:
    """Return the head's input of the last token of every row, `b 1 hidden`, and the state, as of one call.

    Of packed prompts, those that fit into a piece are read together, and a longer one alone; none of them may be empty.
    The result is then `1 n_seqs hidden`.

    Args:
        read: Reads some tokens.
        ids: Tokens `b t`; with cu_seqlens `1 t`.
        state: What the rows have read before; None for nothing.
        cu_seqlens: Where prompts packed into one row begin and end, `n_seqs + 1`.
        piece: The most tokens that are read at a time, of all rows together.
    """
    if cu_seqlens is None:
        return read_rows(read, ids, state, share_of(piece, ids.shape[0]))
    last, states, begin, row = [], [], 0, 0
    for lengths in runs_of(cu_seqlens.diff().tolist(), piece):
        end = row + len(lengths)
        own, bounds = ids[:, begin : begin + sum(lengths)], cu_seqlens[row : end + 1] - begin
        before = None if state is None else state.select(torch.arange(row, end, device=ids.device))
        if len(lengths) == 1:
            x, after = read_rows(read, own, before, piece)
        else:
            x, after = read(own, before, bounds)
            x = x[:, bounds[1:] - 1]
        last.append(x)
        states.append(after)
        begin, row = begin + own.shape[1], end
    seen = 0 if state is None else state.lengths
    return torch.cat(last, 1), ModelState(ModelState.join(states).layers, seen + cu_seqlens.diff())


def share_of(piece: int, rows: int) -> int:
    """Return how many tokens of each row are read at a time; piece: of all rows together."""
    return max(CHUNK, piece // rows // CHUNK * CHUNK)


def runs_of(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the lengths in runs of at most `most` in all, or of a single one."""
    run, total = [lengths[0]], lengths[0]
    for length in lengths[1:]:
        if total + length > most:
            yield run
            run, total = [], 0
        run.append(length)
        total += length
    yield run


def read_rows(read: Read, ids: Tensor, state: ModelState | None, most: int) -> tuple[Tensor, ModelState]:
    """Read rows of one length, `most` tokens of each at a time."""
    first, *others = ids.split(most, 1)
    seen = 0 if state is None else int(torch.as_tensor(state.lengths).max())
    if state is not None and others:
        state = reserve(state, seen + ids.shape[1])
    x, after = read(first, state, None)
    if state is None and others:
        after = reserve(after, ids.shape[1])
    for part in others:
        x, after = read(part, after, None)
    return x[:, -1:], after


def reserve(state: ModelState, tokens: int) -> ModelState:
    """Return the state with caches that have room for `tokens` tokens in all, so that reading on copies nothing."""
    layers = tuple(x.reserve(tokens) if isinstance(x, TokenCache) else x for x in state.layers)
    return ModelState(layers, state.lengths)

"""Calls the C code of the rules: one structure of 64-bit words, three entry points."""

import ctypes
import struct
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lineate.call import Options
from lineate.checks import check_decay_values
from lineate.forms.stability import warn_unstable
from lineate.native.build import c_function

_LAYOUT = struct.Struct("12q" + "5q" * 12 + "7q" + "d")  # Call in chunkwise.c
_NO_TENSOR = (0, 0, 0, 0, 0)
_NO_MEMORY, _POSITIVE_DECAY, _UNSTABLE = 1, 2, 4  # bits of what an entry point returns


class Tensors(NamedTuple):
    """The strided tensors of a call, float32 or bfloat16 with a dense last dimension; None for absent ones."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    output: Tensor | None = None
    doutput: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dlog_decay: Tensor | None = None
    dbeta: Tensor | None = None


class States(NamedTuple):
    """The dense float32 states of one call; None where the entry has none."""

    state: Tensor | None = None
    dfinal: Tensor | None = None
    final: Tensor | None = None
    states: Tensor | None = None
    dstate: Tensor | None = None


def run(entry: str, tensors: Tensors, states: States, cu_seqlens: Tensor | None, options: Options) -> None:
    """Fill the structure and call `lineate_<entry>`."""
    corrects, chunk_size = options.corrects, options.chunk_size
    assert tensors.beta is not None or not corrects  # C would read it
    b, t, h, key_dim = tensors.q.shape
    hv, value_dim = tensors.v.shape[2:]
    decay = 0 if tensors.log_decay is None else tensors.log_decay.dim() - 2
    sequences, starts, first_chunk = b, None, None
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        chunks = [-(-(end - start) // chunk_size) for start, end in pairwise(bounds)]
        sequences = len(chunks)
        starts = (ctypes.c_int64 * len(bounds))(*bounds)
        first_chunk = (ctypes.c_int64 * len(chunks))(*accumulate([0, *chunks[:-1]]))
    threads = torch.get_num_threads()
    sizes = (b, t, h, hv // h, key_dim, value_dim, chunk_size, sequences)
    words: list[int] = [*sizes, decay, corrects, options.normalize_qk, threads]
    for x in tensors:
        words += _NO_TENSOR if x is None else (x.data_ptr(), *x.stride()[:3], x.dtype is torch.bfloat16)
    words += [0 if x is None else x.data_ptr() for x in states]
    words += [0 if x is None else ctypes.addressof(x) for x in (starts, first_chunk)]
    status = c_function(entry)(_LAYOUT.pack(*words, options.scale))
    if status & _NO_MEMORY:
        raise MemoryError(f"no memory for the scratch space of {threads} threads at chunk_size = {chunk_size}")
    if status & _POSITIVE_DECAY:
        assert tensors.log_decay is not None
        check_decay_values(tensors.log_decay)
    if status & _UNSTABLE and entry != "backward":
        assert tensors.beta is not None
        warn_unstable(tensors.k, tensors.beta)


def dense(x: Tensor | None) -> Tensor | None:
    """Return x in float32 or bfloat16 with a dense last dimension; copy it only if needed."""
    if x is None:
        return None
    x = x if x.dtype is torch.float32 or x.dtype is torch.bfloat16 else x.float()
    return x if x.dim() == 3 or x.stride(-1) == 1 else x.contiguous()

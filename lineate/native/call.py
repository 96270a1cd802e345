"""Calls the C code of the rules: one structure of 64-bit words, three entry points."""

import ctypes
import struct
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import NamedTuple, overload

import torch
from torch import Tensor

from lineate.call import Options
from lineate.checks import check_decay_values
from lineate.forms.stability import warn_unstable
from lineate.native.build import c_function

_LAYOUT = struct.Struct("12q" + "5q" * 12 + "7q" + "d")  # Call in chunkwise.c
_NO_TENSOR = (0, 0, 0, 0, 0)
_NO_MEMORY, _POSITIVE_DECAY, UNSTABLE = 1, 2, 4  # bits of what an entry point returns


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
    sequences = cut(b, cu_seqlens, chunk_size)
    threads = torch.get_num_threads()
    sizes = (b, t, h, hv // h, key_dim, value_dim, chunk_size, sequences.number)
    words: list[int] = [*sizes, decay, corrects, options.normalize_qk, threads]
    words += strided(tensors)
    words += [0 if x is None else x.data_ptr() for x in states]
    words += sequences.words()
    status = c_function(entry)(_LAYOUT.pack(*words, options.scale))
    check_status(status, threads, chunk_size, tensors.log_decay)
    if status & UNSTABLE and entry != "backward":
        assert tensors.beta is not None
        warn_unstable(tensors.k, tensors.beta)


class Sequences(NamedTuple):
    """The sequences of a call as C reads them."""

    number: int
    starts: ctypes.Array[ctypes.c_int64] | None = None
    """Where each begins, and the end; None if each row is one."""
    first_chunk: ctypes.Array[ctypes.c_int64] | None = None
    """The number of chunks before each."""

    def words(self) -> tuple[int, int]:
        """Return the addresses of both arrays, which last as long as this value."""
        if self.starts is None or self.first_chunk is None:
            return 0, 0
        return ctypes.addressof(self.starts), ctypes.addressof(self.first_chunk)


def cut(b: int, cu_seqlens: Tensor | None, chunk_size: int) -> Sequences:
    """Return the sequences of b rows, or those between the bounds."""
    if cu_seqlens is None:
        return Sequences(b)
    bounds = cu_seqlens.tolist()
    chunks = [-(-(end - start) // chunk_size) for start, end in pairwise(bounds)]
    starts = (ctypes.c_int64 * len(bounds))(*bounds)
    return Sequences(len(chunks), starts, (ctypes.c_int64 * len(chunks))(*accumulate([0, *chunks[:-1]])))


def strided(tensors: Iterable[Tensor | None]) -> list[int]:
    """Return the words of Tensor in rules.h, one tensor after the other."""
    words: list[int] = []
    for x in tensors:
        words += _NO_TENSOR if x is None else (x.data_ptr(), *x.stride()[:3], x.dtype is torch.bfloat16)
    return words


def check_status(status: int, threads: int, chunk_size: int, log_decay: Tensor | None) -> None:
    """Raise what an entry point reports, but for UNSTABLE."""
    if status & _NO_MEMORY:
        raise MemoryError(f"no memory for the scratch space of {threads} threads at chunk_size = {chunk_size}")
    if status & _POSITIVE_DECAY:
        assert log_decay is not None
        check_decay_values(log_decay)


@overload
def dense(x: Tensor) -> Tensor: ...
@overload
def dense(x: None) -> None: ...
def dense(x: Tensor | None) -> Tensor | None:
    """Return x in float32 or bfloat16 with a dense last dimension; copy it only if needed."""
    if x is None:
        return None
    x = x if x.dtype is torch.float32 or x.dtype is torch.bfloat16 else x.float()
    return x if x.dim() == 3 or x.stride(-1) == 1 else x.contiguous()

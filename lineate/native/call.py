"""From tensors to the C code and back: one structure, three entry points."""

import ctypes
from ctypes import c_double, c_int64, c_void_p
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lineate.native.build import library

_NAMES = ("q", "k", "v", "log_decay", "beta", "output", "doutput", "dq", "dk", "dv", "dlog_decay", "dbeta")
_POINTERS = ("state", "dfinal", "final", "states", "dstate", "starts", "first_chunk")
_SIZES = ("b", "t", "h", "group", "key_dim", "value_dim", "chunk", "texts", "decay", "corrects", "normalize", "threads")


class _Tensor(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("row", c_int64), ("token", c_int64), ("head", c_int64), ("half", c_int64)]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, _Tensor) for name in _NAMES),
        *((name, c_void_p) for name in _POINTERS),
        *((name, c_int64) for name in _SIZES),
        ("scale", c_double),
    ]


def run(
    entry: str,
    tensors: dict[str, Tensor | None],
    pointers: dict[str, Tensor | None],
    cu_seqlens: Tensor | None,
    *,
    corrects: bool,
    scale: float,
    normalize_qk: bool,
    chunk_size: int,
) -> None:
    """Fill the structure and call `lineate_<entry>`; tensors are float32 or bfloat16 with a dense last dimension."""
    q, v, log_decay = tensors["q"], tensors["v"], tensors["log_decay"]
    assert q is not None and v is not None
    b, t, h, key_dim = q.shape
    call = _Call()
    for name, x in tensors.items():
        if x is not None:
            setattr(call, name, _Tensor(x.data_ptr(), *x.stride()[:3], x.dtype == torch.bfloat16))
    for name, x in pointers.items():
        setattr(call, name, None if x is None else x.data_ptr())
    call.texts = b
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        chunks = [-(-(end - start) // chunk_size) for start, end in pairwise(bounds)]
        call.texts = len(chunks)
        starts = (c_int64 * len(bounds))(*bounds)
        first_chunk = (c_int64 * len(chunks))(*accumulate([0, *chunks[:-1]]))
        call.starts, call.first_chunk = ctypes.addressof(starts), ctypes.addressof(first_chunk)
    call.b, call.t, call.h, call.group = b, t, h, v.shape[2] // h
    call.key_dim, call.value_dim, call.chunk = key_dim, v.shape[3], chunk_size
    call.decay = 0 if log_decay is None else log_decay.dim() - 2
    call.corrects, call.normalize, call.threads = corrects, normalize_qk, torch.get_num_threads()
    call.scale = scale
    if getattr(library(), f"lineate_{entry}")(ctypes.byref(call)):
        raise MemoryError(f"no memory for the scratch space of {call.threads} threads at chunk_size = {chunk_size}")


def dense(x: Tensor) -> Tensor:
    """float32 or bfloat16 with a dense last dimension; a copy only where that is not so yet."""
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    return x if x.dim() == 3 or x.stride(-1) == 1 else x.contiguous()

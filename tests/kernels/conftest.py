"""Fixtures that make mistakes of kernels visible in memory."""

import importlib

import numpy as np
import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill every uninitialised tensor with NaN, on the GPU too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.zeros(3).new_empty(5).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def guarded_memory(request, monkeypatch):
    """Fail if the interpreter reads or writes outside the tensors that a kernel was given."""
    path = getattr(request.node, "callspec", None) and request.node.callspec.params.get("path")
    if not path or path.device != "cpu":
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    ends = np.zeros((0, 2), np.uint64)
    start, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store

    def init_args(self, args, kwargs):
        nonlocal ends
        given = start(self, args, kwargs)
        tensors = [getattr(x, "base", x) for x in (*given[0], *given[1].values())]  # of a descriptor, its tensor
        tensors = [x for x in tensors if isinstance(x, Tensor) and x.numel()]
        last = [sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) for x in tensors]
        both = ((x.data_ptr(), x.data_ptr() + x.element_size() * (n + 1)) for x, n in zip(tensors, last, strict=True))
        ends = np.array(sorted(both), np.uint64)
        return given

    def check(pointers, mask):
        given = mask if isinstance(mask, np.ndarray) else mask.data  # a descriptor's mask is an array
        at = pointers.data[given.astype(bool)].astype(np.uint64)
        which = np.searchsorted(ends[:, 0], at, "right") - 1
        assert (which >= 0).all() and (at < ends[which, 1]).all(), "an access outside of all tensors"

    def masked_load(self, pointers, mask, *rest, **named):
        check(pointers, mask)
        return load(self, pointers, mask, *rest, **named)

    def masked_store(self, pointers, value, mask, *rest, **named):
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest, **named)

    monkeypatch.setattr(executor, "_init_args_hst", init_args)
    monkeypatch.setattr(builder, "create_masked_load", masked_load)
    monkeypatch.setattr(builder, "create_masked_store", masked_store)

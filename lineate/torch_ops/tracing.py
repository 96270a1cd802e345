"""Tells whether torch is recording, transforming or differentiating a call."""

import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

P = ParamSpec("P")
R = TypeVar("R")
Maybe = TypeVar("Maybe", Tensor, Tensor | None)
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
"""The types whose memory holds their values, unless `is_virtual`; a subclass may be anything."""
WHEN_MODES_RECORD: list[Callable[[], None]] = []
"""Called when a dispatch mode sees a call, because the mode may count operations (flops.py)."""


def constant_in_graphs(run: Callable[P, R]) -> Callable[P, R]:
    """Return run, whose result torch.compile takes as a constant of the graph instead of tracing into it.

    This is torch.compiler.assume_constant_result without its import of torch._dynamo, which takes seconds.
    """
    run._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return run


@constant_in_graphs
def transformed() -> bool:
    """Whether the call is inside a torch.func transform or forward mode.

    The ops ignore tangents, and inside vmap they cannot see which tensors require grad. torch guards graphs by the
    transforms and the level of forward mode that they were made in, so the result is a constant of each graph.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def recorded() -> bool:
    """Whether a compiler, a dispatch mode or torch.jit.trace is active, which must see a call as ops."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack():
        for tell in WHEN_MODES_RECORD:
            tell()
        return True
    return torch._C._get_tracing_state() is not None


def is_virtual(x: Tensor) -> bool:
    """Whether the memory of x does not hold its values: a view with a negative bit, or a zero tensor.

    (A conjugate bit needs complex numbers, which lineate does not support.)
    """
    return x.is_neg() or x._is_zerotensor()


def in_memory(tensors: Iterable[Maybe]) -> list[Maybe]:
    """Return the tensors, with virtual ones copied, for C and kernels, which read memory.

    torch's dispatcher does this for an op; calls that go around it must. Gradients go through the copies.
    """
    # This is is_virtual(x), inlined because decoding checks every tensor.
    return [x.clone() if x is not None and (x.is_neg() or x._is_zerotensor()) else x for x in tensors]


def is_eager(*tensors: Tensor | None) -> bool:
    """Whether the call can bypass the dispatcher: no compiler, mode, transform or tensor subclass is involved."""
    return not recorded() and all(x is None or type(x) in PLAIN_TENSORS for x in tensors) and not transformed()


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd may run a backward of a call with these inputs."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def cpu_by_default(run: Callable[P, R]) -> Callable[P, R]:
    """Return run with the CPU as torch's default device, for lineate's own programs, such as training.

    torch's optimisers make tensors without naming a device. Functions that run inside a user's model name their device.
    """

    @wraps(run)
    def here(*args: P.args, **named: P.kwargs) -> R:
        if torch.get_default_device().type == "cpu":  # a device mode would slow down every call
            return run(*args, **named)
        with torch.device("cpu"):
            return run(*args, **named)

    return here


def uncompiled(run: Callable[P, R]) -> Callable[P, R]:
    """Return run, kept outside the graphs of torch.compile."""

    @wraps(run)
    def outside(*args: P.args, **named: P.kwargs) -> R:
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and the import takes seconds
            return torch.compiler.disable(run)(*args, **named)
        return run(*args, **named)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    return outside

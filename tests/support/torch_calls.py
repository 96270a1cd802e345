"""The view of torch: the calls of lineate's ops, CUDA graphs of its kernels, and how often these are compiled."""

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.cases import same_bits

OpCall = tuple[Any, tuple[Any, ...], dict[str, Any]]


class CapturedOps(TorchDispatchMode):
    """The calls of lineate's own torch ops, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OpCall] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lineate":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def check_ops(calls: Iterable[OpCall]) -> None:
    """opcheck of every call: schema, fake tensors, autograd registration."""
    for op, args, kwargs in calls:
        detached = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in args)
        utils = ["test_schema", "test_faketensor", "test_autograd_registration"]
        torch.library.opcheck(op, detached, kwargs, test_utils=utils)


def check_cuda_graph(compute: Callable[[], list[Tensor]], change: Callable[[int], None]) -> None:
    """Capture a computation once and replay it three times: the same bits as eager calls.

    Args:
        compute: the computation; it reads the same tensors every time.
        change: (turn) -> None gives these tensors other numbers, after each turn.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compute()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute()
    for turn in range(3):
        graph.replay()
        torch.cuda.synchronize()
        for i, (found, expected) in enumerate(zip(captured, compute(), strict=True)):
            assert same_bits(found.detach(), expected.detach()), (turn, i)
        with torch.no_grad():
            change(turn)


def kernels(package: str = "lineate.kernels") -> dict[str, Any]:
    """Return all kernels of Triton and Gluon in a package, by their full names."""
    found = {}
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        try:
            module = importlib.import_module(info.name)
        except ImportError:
            continue
        for name, x in vars(module).items():
            if hasattr(x, "device_caches"):
                found[f"{x.__module__}.{name}"] = x
    return found


def compilations(package: str = "lineate.kernels") -> dict[str, int]:
    """Return how many variants of each kernel have been compiled."""
    return {n: sum(len(cache[0]) for cache in x.device_caches.values()) for n, x in kernels(package).items()}

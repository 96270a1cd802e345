"""Switches autocast off in the backward, where autograd would otherwise multiply in autocast's dtype."""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lineate.call import Inputs
from lineate.torch_ops.tracing import transformed

P = ParamSpec("P")
R = TypeVar("R")


def full_precision_backward(run: Callable[P, R]) -> Callable[P, R]:
    """Return run with a first derivative that is as precise inside of torch.autocast as outside.

    run itself switches autocast off (`full_precision`). The backward happens later, perhaps inside of autocast, so each
    autograd node of run switches it off while it runs. Unless a backward begins inside of autocast, this costs one hook
    for each result.
    """

    @wraps(run)
    def wrapped(*args: P.args, **named: P.kwargs) -> R:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or transformed():
            return run(*args, **named)
        first = torch._C._autograd._get_sequence_nr()  # the sequence number of the first node that run creates
        result = run(*args, **named)
        _protect_results(result, first, {x.grad_fn for x in _tensors((args, named))})
        return result

    return wrapped


def _protect_results(result: Any, first: int, given: set[Node | None]) -> None:
    """Hook the last nodes so that they protect those before them if a backward runs inside of autocast.

    Nodes made before `first`, and those `given` with the inputs (each thread numbers its own nodes), are not run's.
    """
    found = {x.grad_fn: x.device.type for x in _tensors(result) if x.grad_fn is not None}
    for node, device in found.items():
        if node not in given and node._sequence_nr() >= first and torch.amp.is_autocast_available(device):
            _protect(node, device, _Once([x for x, _ in node.next_functions], device, first, given))


class _Once:
    """Protects some nodes and all before them, down to the first of run, when it is called for the first time."""

    def __init__(self, nodes: list[Node | None], device: str, first: int, given: set[Node | None]) -> None:
        self.nodes, self.device, self.first, self.given = nodes, device, first, given

    def __call__(self) -> None:
        waiting, seen = self.nodes, set(self.given)
        self.nodes = []
        while waiting:
            node = waiting.pop()
            # A node without predecessors belongs to a leaf: it outlives the graph and only accumulates gradients.
            if node is None or node in seen or not node.next_functions or node._sequence_nr() < self.first:
                continue
            seen.add(node)
            _protect(node, self.device)
            waiting += [x for x, _ in node.next_functions]


def _protect(node: Node, device: str, at_first: Callable[[], None] | None = None) -> None:
    """Switch autocast off while this node runs; at_first is called if it was on."""
    was_on = False

    def before(*_: Any) -> None:
        nonlocal was_on
        was_on = torch.is_autocast_enabled(device)
        if was_on:
            torch.set_autocast_enabled(device, False)
            if at_first is not None:
                at_first()

    def after(*_: Any) -> None:
        if was_on:
            torch.set_autocast_enabled(device, True)

    node.register_prehook(before)
    node.register_hook(after)


def _tensors(result: Any) -> Iterator[Tensor]:
    """Yield all tensors in tuples, lists, dictionaries and calls."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Inputs):
        yield from result.given().values()
    elif isinstance(result, dict | tuple | list):
        parts: Iterable[Any] = result.values() if isinstance(result, dict) else result
        for part in parts:
            yield from _tensors(part)

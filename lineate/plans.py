"""The plans of calls, by their signatures: what a call has found out is not found out again for the next one like it.

An op checks its arguments, chooses a form and a backend, compiles kernels and lays its tensors out before it launches
anything; for a short call that takes as long as the launches. Calls with one signature (shapes, dtypes, devices,
options; strides and alignment too where launches are replayed) come to the same, so one cache keeps all of it:

    "op", "decode"  the form, the backend and the options of a call that passed every check
    "compiled"      that the kernels of a call have been compiled ahead
    "launches"      the recorded launches of a call on a GPU (kernels/tape.py), or that they cannot be replayed
    "repeat"        how a whole call on a GPU is repeated without checking it again, or that it cannot be

A signature begins with its kind. There is one bound for all kinds, and what was not used for longest is forgotten.
"""

from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lineate.call import Inputs
from lineate.rule import Rule
from lineate.torch_ops.tracing import PLAIN_TENSORS, recorded, transformed

Key = TypeVar("Key")
Value = TypeVar("Value")
Signature = tuple[Any, ...]
Results = tuple[Tensor, Tensor]
"""The output and the final state."""
Run = Callable[[Inputs], Results | None]
PLAIN_OPTIONS = frozenset((float, int, str, bool, type(None)))
"""The types of the options of calls that have a signature."""


class RecentlyUsed(Generic[Key, Value]):
    """A cache that has at least the n keys that were used last, and at most 2 n.

    It is two dicts. A key that is used is in the younger one, or moves there. When that has n keys, it becomes the
    older one, and the older one is forgotten. So a key in use costs one lookup in a dict, without a lock.

    Args:
        n: The least number of keys that it remembers.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._younger: dict[Key, Value] = {}
        self._older: dict[Key, Value] = {}
        self._changing = RLock()  # reentrant, since collecting garbage while it is held may call an op

    def __len__(self) -> int:
        return len(self._younger) + sum(key not in self._younger for key in self._older)

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, which then was used last; None if there is none."""
        value = self._younger.get(key)
        return self._moved(key) if value is None else value

    def put(self, key: Key, value: Value) -> None:
        """Keep the value of a key, which then was used last; it must not be None."""
        with self._changing:
            _forgotten = self._older  # what ends with them may put a key itself, so it ends after this one is in place
            if len(self._younger) >= self.n:
                self._older, self._younger = self._younger, {}  # in this order: a reader finds each key in one of them
            self._younger[key] = value

    def items(self) -> dict[Key, Value]:
        """Return all keys with their values, in no order."""
        with self._changing:
            return {**self._older, **self._younger}

    def forget(self, wanted: Callable[[Key], bool]) -> None:
        """Forget those keys that are wanted."""
        with self._changing:
            older, younger = self._older.copy(), self._younger.copy()  # what is collected meanwhile may put a key
            self._older = {key: x for key, x in older.items() if not wanted(key)}
            self._younger = {key: x for key, x in younger.items() if not wanted(key)}

    def _moved(self, key: Key) -> Value | None:
        value = self._older.get(key)
        if value is not None:
            self.put(key, value)
        return value


PLANS: RecentlyUsed[Signature, Any] = RecentlyUsed(4096)
"""The plans of all calls."""
_NOT_REPEATED = object()


def forget(*kinds: str) -> None:
    """Forget the plans of these kinds, or of all if none is named."""
    PLANS.forget(lambda signature: not kinds or signature[0] in kinds)


def known(kind: str) -> dict[Signature, Any]:
    """Return the plans of a kind, by their signatures."""
    return {signature: plan for signature, plan in PLANS.items().items() if signature[0] == kind}


def call_signature(
    kind: str, rule: Rule | None, tensors: Sequence[Tensor | None], options: Sequence[object]
) -> Signature | None:
    """Return the signature of a call: everything but its tensors' values and where they lie.

    None if it has none, because it is being recorded, or has tensors or options of other types.

    Args:
        kind: the kind of its plan.
        rule: its row.
        tensors: its tensors.
        options: its other arguments.
    """
    if recorded():
        return None
    types = tuple(map(type, options))  # since 1 == 1.0 == True
    if not PLAIN_OPTIONS.issuperset(types):
        return None
    parts: list[object] = [kind, rule, torch.is_grad_enabled(), transformed(), *options, *types]
    for x in tensors:
        if x is None:
            parts.append(None)
        elif type(x) in PLAIN_TENSORS:
            parts += (x.shape, x.dtype, x.device, x.requires_grad)
        else:
            return None
    return tuple(parts)


def repeat_signature(name: Rule | str, inputs: Inputs, options: Sequence[object]) -> Signature | None:
    """Return the signature of a call on a GPU that may be repeated: everything but addresses and values.

    None if it must be checked: it is not on a GPU, is recorded or transformed, needs gradients, or has unusual
    arguments.

    Args:
        name: the row of the rule, or the op's name.
        inputs: its tensors.
        options: its other arguments.
    """
    first = inputs.q
    if not isinstance(first, Tensor) or not first.is_cuda or recorded() or transformed():
        return None
    types = tuple(map(type, options))
    if not PLAIN_OPTIONS.issuperset(types):
        return None
    differentiable = torch.is_grad_enabled()
    parts: list[object] = ["repeat", name, *options, *types]
    for x in inputs.__dict__.values():  # nothing compiles here, and no other way is as fast
        if x is None:
            parts.append(None)
        elif type(x) not in PLAIN_TENSORS or (differentiable and x.requires_grad) or x.is_neg() or x._is_zerotensor():
            return None
        else:
            parts.append((x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16))  # layout_of(x), inlined
    return tuple(parts)


def layout_of(x: Tensor) -> Signature:
    """Return all that launches depend on of one tensor, besides its address and values."""
    return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16


def repeat(signature: Signature | None, inputs: Inputs) -> Results | None:
    """Repeat a call; return None, with nothing done, if it is not known how."""
    run = None if signature is None else PLANS.get(signature)
    if run is None or run is _NOT_REPEATED:
        return None
    results: Results | None = run(inputs)
    return results


def undecided(signature: Signature) -> bool:
    """Whether it is not known yet if calls with this signature can be repeated."""
    return PLANS.get(signature) is None


def remember(signature: Signature, run: Run | None) -> None:
    """Let later calls with this signature call run, which returns None if it cannot; None: they cannot be repeated."""
    PLANS.put(signature, _NOT_REPEATED if run is None else run)

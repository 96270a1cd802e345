"""Repeats a call on a GPU that differs from an earlier one only in the addresses and values of its tensors.

An op checks its arguments, chooses a form and a backend, and lays its tensors out before it launches anything; that
takes the host as long as the kernels of a short prompt take the device. For two calls of one form (shapes, strides,
dtypes, devices, options) all of it comes to the same, so the second repeats what the first has found:

    form = form_of("gated_delta_rule", inputs, options)      # None: the call must be looked at
    results = repeat(form, inputs)                           # None: no call of this form can be repeated
    remember(form, run)                                      # run(inputs) returns the results, or None
"""

from collections.abc import Callable, Sequence
from threading import RLock

import torch
from torch import Tensor

from lineate.call import Inputs
from lineate.torch_ops.tracing import PLAIN_TENSORS, recorded, transformed

Form = tuple[object, ...]
Results = tuple[Tensor, Tensor]
"""The output and the final state."""
Run = Callable[[Inputs], Results | None]

MOST_FORMS = 1024
"""The most forms that are remembered."""
PLAIN_OPTIONS = frozenset((float, int, str, bool, type(None)))
"""The types of options by which calls are remembered."""
_RUNS: dict[Form, Run | None] = {}
"""None: calls of this form cannot be repeated."""
_changing = RLock()  # reentrant, since what is forgotten may be collected there


def form_of(name: str, inputs: Inputs, options: Sequence[object]) -> Form | None:
    """Return all that a call depends on beside addresses and values; None if it must be looked at.

    That is a call that is not on a GPU, is recorded or transformed, needs gradients, or has unusual arguments.

    Args:
        name: the op's name.
        inputs: its tensors.
        options: its other arguments.
    """
    first = inputs.q
    if not isinstance(first, Tensor) or not first.is_cuda or recorded() or transformed():
        return None
    types = tuple(map(type, options))  # since 1 == 1.0 == True
    if not PLAIN_OPTIONS.issuperset(types):
        return None
    differentiable = torch.is_grad_enabled()
    parts: list[object] = [name, *options, *types]
    for x in inputs.tensors():
        if x is None:
            parts.append(None)
        elif type(x) not in PLAIN_TENSORS or (differentiable and x.requires_grad) or x.is_neg() or x._is_zerotensor():
            return None
        else:
            parts.append(layout_of(x))
    return tuple(parts)


def layout_of(x: Tensor) -> Form:
    """Return all that launches depend on of one tensor, beside its address and values."""
    return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16


def repeat(form: Form | None, inputs: Inputs) -> Results | None:
    """Make a call again; return None, with nothing done, if none of its form was remembered."""
    run = None if form is None else _RUNS.get(form)
    return None if run is None else run(inputs)


def undecided(form: Form) -> bool:
    """Whether it is not known yet if calls of this form can be repeated."""
    return form not in _RUNS


def remember(form: Form, run: Run | None) -> None:
    """Let later calls of this form call run; None: they cannot be repeated. The oldest forms are forgotten."""
    with _changing:
        _RUNS[form] = run
        while len(_RUNS) > MOST_FORMS:
            _RUNS.pop(next(iter(_RUNS)), None)


def forget() -> None:
    """Forget all forms."""
    with _changing:
        _RUNS.clear()

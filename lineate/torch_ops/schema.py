"""Flattens a call for torch.library, whose ops take tensors and numbers one by one, and restores it inside the op.

A backend says which fields of a call it reads. They come first in the schema of its ops, in the order of Inputs; then
the places of decoding, if the op has them; then options. Everywhere else a call is one value.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lineate.call import Inputs, Options, Slots
from lineate.rule import row_of

_TYPES = {
    "rule": "str",  # its name
    "scale": "float",
    "normalize_qk": "bool",
    "chunk_size": "SymInt",
    "beta_scale": "float",
    "raw_decay": "bool",
    "raw_beta": "bool",
    "lower_bound": "float?",
}


class Flat:
    """The arguments of an op, in their order, as a schema names them.

    Args:
        reads: the fields of Inputs that the op reads; a call that has another one is refused.
        options: the first fields of Options, those that it takes; the others have their defaults inside of it.
        required: which of those fields are never None, besides q, k and v.
        places: whether it takes Slots.
        kind: the class of the calls.
    """

    def __init__(
        self,
        reads: Sequence[str],
        options: Sequence[str],
        *,
        required: Sequence[str] = ("state",),
        places: bool = False,
        kind: type[Inputs] = Inputs,
    ) -> None:
        self.kind, self.places = kind, Slots._fields if places else ()
        self.reads = tuple(name for name in kind.NAMES if name in reads)
        self.options = tuple(options)
        assert self.options == Options._fields[: len(self.options)], "the options of an op are the first fields"
        self._absent = dict.fromkeys(kind.NAMES)
        self.count = len(self.reads) + len(self.places)
        """The number of arguments that are tensors or None; they come first."""
        self._required = {*kind.OPERANDS, *required}

    def arguments(self, *, written: Sequence[str] = ()) -> str:
        """Return the arguments as torch.library writes them; `written` tensors are modified in place."""
        found = []
        for name in (*self.reads, *self.places):
            alias = "(a!)" if name in written else ""
            found.append(f"Tensor{alias}{'' if name in self._required else '?'} {name}")
        return ", ".join(found + [f"{_TYPES[name]} {name}" for name in self.options])

    def flatten(self, inputs: Inputs, options: Options, where: Slots | None = None) -> tuple[Any, ...]:
        """Return the call as the op's arguments."""
        inputs.refuse_unread(self.reads, f"an op that reads {', '.join(self.reads)}")
        tensors = [getattr(inputs, name) for name in self.reads]
        return (*tensors, *(where or ()), options.rule.name, *options[1 : len(self.options)])

    def restore(self, arguments: Sequence[Any]) -> tuple[Inputs, Options]:
        """Return the call of these arguments; those after the options are ignored."""
        row, *numbers = arguments[self.count : self.count + len(self.options)]
        return self.call(arguments), Options(row_of(row), *numbers)

    def call(self, tensors: Sequence[Tensor | None]) -> Inputs:
        """Return the call of these tensors, which are the first of the op's arguments."""
        return self.kind.of({**self._absent, **dict(zip(self.reads, tensors, strict=False))})

    def slots(self, arguments: Sequence[Any]) -> Slots:
        """Return the places among these arguments."""
        return Slots(*arguments[len(self.reads) : self.count])

    def without(self, *names: str) -> "Flat":
        """Return the same arguments but for these fields."""
        reads = [name for name in self.reads if name not in names]
        required = [name for name in self._required if name not in names]
        return Flat(reads, self.options, required=required, places=bool(self.places), kind=self.kind)


def empty_gradients(inputs: Inputs) -> Inputs:
    """Return room for the gradients of a call's tensors, each in its field; absent ones are None."""
    found: dict[str, Tensor | None] = dict.fromkeys(inputs.NAMES)
    for name in inputs.DIFFERENTIABLE:
        x = getattr(inputs, name)
        if x is not None:
            found[name] = x.new_empty(x.shape)
    return inputs.of(found)


def gradient_tuple(flat: Flat, grads: Inputs) -> tuple[Tensor, ...]:
    """Return the gradients of the fields that an op reads, as the results of its backward: absent ones are empty."""
    found = (getattr(grads, name) for name in flat.reads if name in grads.DIFFERENTIABLE)
    return tuple(grads.q.new_empty(0) if x is None else x for x in found)


def declare_call_op(
    name: str,
    flat: Flat,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    results: str,
    written: Sequence[str] = (),
    more: Sequence[str] = (),
) -> Any:
    """Register `lineate::<name>`, an op without a backward; return it.

    Args:
        name: the op's name.
        flat: its arguments.
        run: takes them and returns the results.
        fake: takes them and returns empty tensors in the results' shapes.
        results: the results as torch.library writes them.
        written: the fields that it modifies.
        more: arguments after those of the call, as torch.library writes them.
    """
    schema = f"({', '.join((flat.arguments(written=written), *more))}) -> {results}"
    op = torch.library.custom_op(f"lineate::{name}", run, mutates_args=tuple(written), schema=schema)
    op.register_fake(fake)
    return op

"""The chunkwise form as one torch op per backend: this file has the shapes and the autograd of each op."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.torch_ops.registrar import Declared, Way, register_op, runs_as_op, way_of
from lineate.torch_ops.schema import Flat, empty_gradients, gradient_tuple
from lineate.torch_ops.tracing import PLAIN_TENSORS, in_memory, is_virtual
from lineate.torch_ops.zeros import read_zeros

Outputs = tuple[Tensor, Tensor, Tensor]
"""The output `b t hv v`, the final state, and the states that enter each chunk, `n b hv k v` (n = 0: not wanted)."""
Chunkwise = Callable[[Inputs, Options], tuple[Tensor, Tensor]]
"""The form as callers use it: it returns the output and the final state."""
OPTIONS = ("rule", "scale", "normalize_qk", "chunk_size")
"""The options of the ops that take no raw gates."""


class Forward(Protocol):
    """A backend's forward, which fills the outputs."""

    def __call__(self, inputs: Inputs, options: Options, outputs: Outputs) -> None: ...


class Backward(Protocol):
    """A backend's backward, which fills the gradients from those of the output and of the final state.

    It starts from `states`, those that entered each chunk; inputs.state is None. Each gradient is in the field of its
    tensor.
    """

    def __call__(
        self, inputs: Inputs, options: Options, states: Tensor, doutput: Tensor, dfinal: Tensor, grads: Inputs
    ) -> None: ...


class MakeOutputs(Protocol):
    """Returns memory for the outputs of a call. keep: whether the states between chunks are wanted."""

    def __call__(self, inputs: Inputs, options: Options, keep: bool) -> Outputs: ...


def empty_outputs(inputs: Inputs, options: Options, keep: bool) -> Outputs:
    """Return memory for the outputs of a call, with states `n b hv k v` in the dtype of the state."""
    v, state, cu_seqlens = inputs.v, inputs.state, inputs.cu_seqlens
    assert state is not None
    b, t, _, key_dim = inputs.q.shape
    sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # An upper bound: each packed sequence may end in part of a chunk.
    chunks = (t + sequences * (options.chunk_size - 1)) // options.chunk_size if keep else 0
    states = state.new_empty(chunks, b, v.shape[2], key_dim, v.shape[3])
    return v.new_empty(v.shape), state.new_empty(state.shape), states


def register(
    name: str,
    run_forward: Forward,
    run_backward: Backward,
    reads: Sequence[str],
    options: Sequence[str] = OPTIONS,
    make_outputs: MakeOutputs = empty_outputs,
    kind: type[Inputs] = Inputs,
) -> Chunkwise:
    """Make the two ops of one backend and return the differentiable function over them.

    Args:
        name: the forward's name.
        run_forward: fills the outputs.
        run_backward: fills the gradients.
        reads: the fields of Inputs that both read.
        options: the fields of Options that both read.
        make_outputs: makes the outputs.
        kind: the class of the calls.
    """
    flat = Flat(reads, options, kind=kind)
    back = flat.without("state")
    differentiable = tuple(x for x in flat.reads if x in kind.DIFFERENTIABLE)
    unread = set(kind.NAMES).difference(flat.reads)

    def run_values(inputs: Inputs, options: Options, keep: bool) -> Outputs:
        outputs = make_outputs(inputs, options, keep)
        run_forward(inputs, options, outputs)
        return outputs

    def forward(*arguments: Any) -> Outputs:
        return run_values(*flat.restore(arguments), arguments[-1])

    def backward(doutput: Tensor, dfinal: Tensor, states: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        inputs, options = back.restore(arguments)
        grads = empty_gradients(inputs.replace(state=dfinal))
        run_backward(inputs, options, states, doutput, dfinal, grads)
        return gradient_tuple(flat, grads)

    def fake(*arguments: Any) -> Outputs:
        return make_outputs(*flat.restore(arguments), arguments[-1])

    def fake_backward(doutput: Tensor, dfinal: Tensor, states: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        return gradient_tuple(flat, empty_gradients(back.restore(arguments)[0].replace(state=dfinal)))

    results = ", ".join("Tensor" for _ in differentiable)
    run = register_op(
        name,
        Declared(forward, f"({flat.arguments()}, bool keep) -> (Tensor, Tensor, Tensor)"),
        Declared(backward, f"(Tensor doutput, Tensor dfinal, Tensor states, {back.arguments()}) -> ({results})"),
        fake=fake,
        fake_backward=fake_backward,
        tensors=flat.count,
        save=partial(_save, flat),
        differentiate=partial(_differentiate, flat),
        hidden=2,
        keeps=True,
    )

    class Direct(torch.autograd.Function):
        """The op of eager calls, whose tensors stay one value; apply(inputs, options, *its differentiable tensors)."""

        @staticmethod
        def forward(ctx, inputs, options, *tensors):  # type: ignore[no-untyped-def]
            output, final, states = run_values(inputs, options, True)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(states, *inputs.replace(state=None).tensors())
            ctx.options, ctx.results = options, [(x.shape, x.dtype) for x in (output, final)]
            return output, final

        @staticmethod
        def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
            states, *saved = ctx.saved_tensors  # read only once, because activation checkpointing refuses a second read
            inputs = kind.of(dict(zip(kind.NAMES, saved, strict=True)))
            arrived = _arrived(states, gradients, ctx.results)
            if runs_as_op(gradients):
                results = getattr(torch.ops.lineate, f"{name}_backward")(
                    *arrived, states, *back.flatten(inputs, ctx.options)
                )
                found = dict(zip(differentiable, results, strict=True))
            else:
                doutput, dfinal = in_memory(arrived)
                room = empty_gradients(inputs.replace(state=dfinal))
                run_backward(inputs, ctx.options, states, doutput, dfinal, room)
                found = room.named()
            given = {*inputs.given(), "state"}
            return None, None, *[found[x] if x in given else None for x in differentiable]

    def chunkwise(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
        way = way_of(inputs.tensors())
        if way is Way.OP:
            output, final, _ = run(*flat.flatten(inputs, options))
            return output, final
        if unread:
            inputs.refuse_unread(flat.reads, name)
        if way is Way.VIRTUAL or (way is Way.DIFFERENTIATED and any(is_virtual(x) for x in inputs.given().values())):
            inputs = inputs.map(lambda x: in_memory((x,))[0])
        if way is Way.DIFFERENTIATED:
            tensors = inputs.named()
            output, final = Direct.apply(inputs, options, *[tensors[x] for x in differentiable])
        else:  # without the op
            output, final, _ = run_values(inputs, options, False)
        return output, final

    return chunkwise


def _save(flat, ctx, arguments, output):  # type: ignore[no-untyped-def]
    """Keep what `_differentiate` needs: all tensors but the state, the states that enter each chunk, and options."""
    state = flat.reads.index("state")
    ctx.save_for_backward(output[2], *arguments[:state], *arguments[state + 1 : flat.count])
    ctx.options = arguments[flat.count : -1]
    ctx.results = [(x.shape, x.dtype) for x in output[:2]]


def _differentiate(flat, backward, ctx, *gradients):  # type: ignore[no-untyped-def]
    """Return the gradients of a chunkwise op's arguments: backward(doutput, dfinal, states, *tensors, *options)."""
    saved = ctx.saved_tensors  # read only once, because activation checkpointing refuses a second read
    states = saved[0]
    _check_kept(states)
    arrived = _arrived(states, gradients, ctx.results)
    grads, given = iter(backward(*arrived, *saved, *ctx.options)), iter(saved[1:])
    found = []
    for name in flat.reads:
        gradient = next(grads) if name in flat.kind.DIFFERENTIABLE else None
        absent = name != "state" and next(given) is None
        found.append(None if absent else gradient)
    return *found, *[None] * (len(ctx.options) + 1)


def _arrived(
    states: Tensor, gradients: Sequence[Tensor | None], results: Sequence[tuple[torch.Size, torch.dtype]]
) -> list[Tensor]:
    """Return the gradients of the output and the final state, zeros for one that did not arrive."""
    return [
        _zeros(states, shape, dtype) if x is None else x
        for x, (shape, dtype) in zip(gradients[:2], results, strict=True)
    ]


def _zeros(like: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return read-only zeros with the properties of a tensor."""
    return read_zeros(shape, dtype, like.device) if type(like) in PLAIN_TENSORS else like.new_zeros(shape, dtype=dtype)


def _check_kept(states: Tensor) -> None:
    """Raise if there are no states between chunks: a call recorded without gradients does not keep them."""
    if states.shape[0] == 0:
        raise RuntimeError(
            "the states for the backward were not kept, because this call was recorded (torch.jit.trace, make_fx) "
            "where nothing required grad; record it with an input that requires grad"
        )

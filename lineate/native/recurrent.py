"""Makes the recurrent form of a C entry point: a plain function for eager calls, an op where calls are recorded."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lineate.call import Inputs, Options
from lineate.checks import check_bounds
from lineate.torch_ops.chunk_op import OPTIONS, MakeOutputs, Outputs
from lineate.torch_ops.schema import Flat, declare_call_op
from lineate.torch_ops.tracing import PLAIN_TENSORS, recorded

Recurrent = Callable[[Inputs, Options], tuple[Tensor, Tensor]]
"""The form as callers use it: it returns the output and the final state."""


def register_recurrent(
    name: str, fill: Callable[[Inputs, Options, Outputs], None], reads: Sequence[str], make_outputs: MakeOutputs
) -> Recurrent:
    """Make the op of a recurrent form without gradients, for decoding, and return the function over it.

    Args:
        name: the op's name.
        fill: runs token by token and fills the outputs; options.chunk_size is 1.
        reads: the fields of Inputs that it reads.
        make_outputs: makes the outputs.
    """
    flat = Flat(reads, OPTIONS)

    def run(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
        if inputs.cu_seqlens is not None:
            check_bounds(inputs.cu_seqlens, inputs.q.shape[1])
        outputs = make_outputs(inputs, options, False)
        fill(inputs, options, outputs)
        return outputs[:2]

    def fake(*arguments: Any) -> tuple[Tensor, Tensor]:
        return make_outputs(*flat.restore(arguments), False)[:2]

    op = declare_call_op(
        name, flat, lambda *arguments: run(*flat.restore(arguments)), fake, results="(Tensor, Tensor)"
    )  # fmt: skip

    def recurrent(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
        """Run token by token. An op costs microseconds, so it is used only for recorded calls and unusual tensors."""
        as_op = recorded()
        if not as_op:
            for x in inputs.tensors():  # one loop, since every token of decoding goes through it
                if x is not None and (type(x) not in PLAIN_TENSORS or x.is_neg() or x._is_zerotensor()):
                    as_op = True
        if as_op:
            output, final = op(*flat.flatten(inputs, options))
            return output, final
        return run(inputs, options)

    return recurrent

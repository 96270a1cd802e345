"""Runs a form over packed sequences one by one, or over one sequence chunk by chunk."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from lineate import checks
from lineate.call import Inputs, Options

Form = Callable[[Inputs, Options], tuple[Tensor, Tensor]]
"""A form over whole sequences: it returns the output and the final state."""


def run_packed(form: Form, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Run each packed sequence by itself; one of length 0 returns its state unchanged.

    Tensors are `1 t ...`, the state is `n_seqs hv k v`.
    """
    assert inputs.cu_seqlens is not None and inputs.state is not None
    bounds = checks.check_bounds(inputs.cu_seqlens, inputs.q.shape[1])
    outputs, states = [], []
    for i, (start, end) in enumerate(pairwise(bounds)):
        own = inputs.state[i : i + 1]
        if end > start:
            output, own = form(inputs.at(slice(start, end), own), options)
            outputs.append(output)
        states.append(own)
    return torch.cat(outputs, dim=1), torch.cat(states)


def run_chunked(form: Form, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Run each chunk from the state that the one before it left."""
    outputs, state = [], inputs.state
    assert state is not None
    for start in range(0, inputs.q.shape[1], options.chunk_size):
        output, state = form(inputs.at(slice(start, start + options.chunk_size), state), options)
        outputs.append(output)
    return torch.cat(outputs, dim=1), state

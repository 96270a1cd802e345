"""Bytes that the weights of a model take in memory."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lineate.models.files.filling import dtype_of
from lineate.quantised.format import Format
from lineate.quantised.weight import kept_nbytes
from lineate.quantised.which import becomes_quantised

Formats = Format | Mapping[str, Format] | None
"""The format of all weights that can be quantised, or that of each quantised weight by its name in the model."""


def weight_bytes(module: nn.Module, dtype: torch.dtype, form: Formats = None, prefix: str = "") -> int:
    """Return the bytes of parameters and buffers in this dtype, but for those that loading keeps in float32.

    Args:
        module: a model or a part of it; its tensors may be on the meta device.
        dtype: of floating tensors.
        form: the format of weights that are quantised, or one for each of their names; None: there are none.
        prefix: of the part's names in the model, such as "layers.0.feed.".
    """
    tensors: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    return sum(tensor_bytes(prefix + name, x, dtype, form) for name, x in tensors.items())


def tensor_bytes(name: str, like: Tensor, dtype: torch.dtype, form: Formats = None) -> int:
    """Return the bytes of one parameter or buffer of this name and shape."""
    own = form.get(name) if isinstance(form, Mapping) else form
    if own is not None and own.dtype != dtype and becomes_quantised(name, tuple(like.shape), own):
        return own.nbytes(tuple(like.shape))
    return like.numel() * dtype_of(name, like, dtype).itemsize


def weights_nbytes(*modules: nn.Module) -> int:
    """Return the bytes of the parameters and buffers of modules in their present formats."""
    tensors = (x for module in modules for found in (module.parameters(), module.buffers()) for x in found)
    return sum(map(kept_nbytes, tensors))

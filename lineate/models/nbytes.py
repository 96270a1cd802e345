"""Bytes that the weights of a model take in memory."""

import torch
from torch import Tensor, nn

from lineate.models.files.filling import dtype_of
from lineate.small.format import Format
from lineate.small.which import becomes_small


def weight_bytes(module: nn.Module, dtype: torch.dtype, form: Format | None = None, prefix: str = "") -> int:
    """Return the bytes of parameters and buffers in this dtype, but for those that loading keeps in float32.

    Args:
        module: a model or a part of it; its tensors may be on the meta device.
        dtype: of floating tensors.
        form: the format of weights that are small; None: there are none.
        prefix: of the part's names in the model, such as "feed.".
    """
    tensors: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    return sum(tensor_bytes(prefix + name, x, dtype, form) for name, x in tensors.items())


def tensor_bytes(name: str, like: Tensor, dtype: torch.dtype, form: Format | None = None) -> int:
    """Return the bytes of one parameter or buffer of this name and shape."""
    if form is not None and form.dtype != dtype and becomes_small(name, tuple(like.shape), form):
        return form.nbytes(tuple(like.shape))
    return like.numel() * dtype_of(name, like, dtype).itemsize

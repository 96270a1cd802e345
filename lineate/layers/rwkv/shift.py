"""The token shift: each token sees the one before it in its own sequence.

    shifted_t = x_t + (x_{t-1} - x_t) * weight        x_0 of a sequence: 0, or the last token of an earlier call

`weight` has one number a channel. The last token of every row is kept in the state, under the name given to
`shift_spec`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.forms.sequences import locate
from lineate.layers.state import TensorSpec


def previous_tokens(x: Tensor, before: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the token before each token of x `b t hidden`, and the last token of every row, `rows hidden`.

    Args:
        x: `b t hidden`; with cu_seqlens `1 t hidden`.
        before: `rows hidden`, the token before the first of every row; None: zeros.
        cu_seqlens: the bounds of packed sequences, which never see each other; they are the rows.
    """
    if before is not None and before.dtype != x.dtype:
        raise ValueError(
            f"the state's token shift must have the dtype of the new tokens, {x.dtype}, got {before.dtype}; continue "
            "under the same autocast and model dtype"
        )
    if cu_seqlens is None:
        first = x.new_zeros(x.shape[0], x.shape[2]) if before is None else before
        last = x[:, -1].clone(memory_format=torch.contiguous_format)  # a view would keep all of x
        return torch.cat((first[:, None], x[:, :-1]), 1), last
    first = x.new_zeros(cu_seqlens.shape[0] - 1, x.shape[2]) if before is None else before
    rows, offsets = locate(cu_seqlens, x.shape[1])
    shifted = F.pad(x[0, :-1], (0, 0, 1, 0))
    previous = torch.where((offsets == 0)[:, None], first[rows], shifted)
    ends = (cu_seqlens[1:] - 1).clamp(min=0)
    last = torch.where((cu_seqlens.diff() > 0)[:, None], x[0, ends], first)  # an empty sequence keeps its own
    return previous[None], last


def mix_previous(x: Tensor, change: Tensor, weight: Tensor) -> Tensor:
    """Return x + change * weight, where change `b t hidden` is the previous tokens minus x."""
    return torch.addcmul(x, change, weight)


def shift_weights(size: int, power: float) -> Tensor:
    """Return 1 - (i / size)^power, the first weights of a token shift of `size` channels."""
    return 1 - (torch.arange(size, device="cpu") / size) ** power


def shift_spec(name: str, hidden: int, dtype: torch.dtype) -> TensorSpec:
    """Return the spec of the last token in a state."""
    return TensorSpec(name, (hidden,), dtype)

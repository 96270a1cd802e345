"""The short causal convolution: each channel of a token sees the last few tokens of its own sequence."""

from functools import partial, reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.forms.sequences import locate
from lineate.layers.gpu import kernels_for
from lineate.layers.state import TensorSpec
from lineate.native import layers as native
from lineate.torch_ops.elementwise import elementwise
from lineate.torch_ops.tracing import is_eager, needs_grad

BLOCK = 128
"""How many tokens are convolved at a time where torch convolves on a CPU."""


def short_convolution(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return silu(y_t), y_tc = bias_c + sum_i weight_ci x_{t - size + 1 + i, c}, and each row's last size - 1 inputs.

    The result has the wider dtype of x and weight; on a GPU under autocast that of x, as in torch's own convolutions.

    Args:
        x: `b t channels`.
        weight: `channels size`.
        state: `rows channels size-1`, the inputs before x; None: zeros.
        cu_seqlens: the bounds of packed sequences, which never see each other; they are the rows.
        bias: `channels`; None: zeros. With a bias torch's own functions run, on every device.
    """
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    past = weight.shape[1] - 1
    if bias is None:
        if past < native.MOST_TAPS and native.serves(x, weight, state):
            return native.short_convolution(x, weight, state, cu_seqlens)
        kernels = kernels_for(x, weight, state)
        if kernels is not None and weight.shape[1] in kernels.SIZES:
            return kernels.short_convolution(x, weight, state, cu_seqlens)
    if cu_seqlens is not None:
        return _packed(x, weight, state, cu_seqlens, bias)
    if state is None:
        before = x.new_zeros(x.shape[0], past, x.shape[2])
    else:
        before = state.transpose(1, 2).to(x.dtype)
    padded = torch.cat((before, x), 1)  # b past+t channels
    last = padded[:, padded.shape[1] - past :].transpose(1, 2)
    last = last.clone(memory_format=torch.contiguous_format)  # a view would keep all of x
    return _convolve(padded, weight, bias), last


def _convolve(padded: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve the contiguous tensor padded `b size-1+t channels`."""
    t, taps = padded.shape[1] - weight.shape[1] + 1, weight.t().contiguous()  # rows without gaps are read faster
    if padded.device.type == "cpu" and is_eager(padded) and not needs_grad(padded, weight, bias):
        return _convolve_in_blocks(padded, taps, bias, t)
    first = padded[:, :t]
    y = first * taps[0] if bias is None else torch.addcmul(bias, first, taps[0])
    for i in range(1, len(taps)):
        y = torch.addcmul(y, padded[:, i : i + t], taps[i])
    return F.silu(y)


def _convolve_in_blocks(padded: Tensor, taps: Tensor, bias: Tensor | None, t: int) -> Tensor:
    """Return the same bits, a few tokens at a time: all taps then read and write what is in the processor's cache."""
    kinds = [x.dtype for x in (padded, taps, bias) if x is not None]
    y = padded.new_empty(padded.shape[0], t, padded.shape[2], dtype=reduce(torch.promote_types, kinds))
    for begin in range(0, t, BLOCK):
        own = y[:, begin : begin + BLOCK]
        first = padded[:, begin : begin + own.shape[1]]
        if bias is None:
            torch.mul(first, taps[0], out=own)
        else:
            torch.addcmul(bias, first, taps[0], out=own)
        for i in range(1, len(taps)):
            own.addcmul_(padded[:, begin + i : begin + i + own.shape[1]], taps[i])
    return elementwise(partial(F.silu, inplace=True), y)


def _packed(
    x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Convolve packed sequences as one longer row, each after its own size - 1 inputs, and cut the outputs from it."""
    past, sequences = weight.shape[1] - 1, cu_seqlens.shape[0] - 1
    rows, _ = locate(cu_seqlens, x.shape[1])
    at = torch.arange(x.shape[1], device=x.device) + (rows + 1) * past  # where a token goes
    fronts = (cu_seqlens[:-1] + torch.arange(sequences, device=x.device) * past)[:, None]
    fronts = fronts + torch.arange(past, device=x.device)  # sequences past
    padded = x.new_zeros(x.shape[1] + sequences * past, x.shape[2]).index_copy(0, at, x[0])
    if state is not None:
        padded = padded.index_copy(0, fronts.flatten(), state.transpose(1, 2).to(x.dtype).flatten(0, 1))
    y = _convolve(F.pad(padded, (0, 0, past, 0))[None], weight, bias)[:, at]
    ends = (cu_seqlens[1:] + (torch.arange(sequences, device=x.device) + 1) * past)[:, None]
    ends = ends - past + torch.arange(past, device=x.device)
    return y, padded[ends].transpose(1, 2)


class ShortConvolution(nn.Module):
    """A short_convolution with its weight `channels size`.

    Args:
        channels: channels, each with its own taps.
        size: tokens that it sees.
        bias: whether each channel has a bias.
    """

    bias: Tensor | None

    def __init__(self, channels: int, size: int = 4, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.register_parameter("bias", nn.Parameter(torch.empty(channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolve x `b t channels`; return it and the state `rows channels size-1`."""
        if state is not None and state.dtype != x.dtype:
            raise ValueError(
                f"the state's conv must have the dtype of the new inputs, {x.dtype}, got {state.dtype}; "
                "continue under the same autocast and model dtype"
            )
        return short_convolution(x, self.weight, state, cu_seqlens, self.bias)

    def extra_repr(self) -> str:
        bias = "" if self.bias is None else ", bias=True"
        return f"channels={self.weight.shape[0]}, size={self.weight.shape[1]}{bias}"


def convolution_spec(conv: ShortConvolution | None, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """Return the spec of the convolution's inputs in a mixer's state; empty if the mixer has no convolution."""
    if conv is None:
        return ()
    channels, size = conv.weight.shape
    return (TensorSpec("conv", (channels, size - 1), dtype),)

"""The forward of a linear layer of transformers: its parameters and its cache, lineate's convolution and rules."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.integrations.transformers_packing import NOT_EMPTY
from lineate.layers.convolution import short_convolution


class Projected(NamedTuple):
    """The outputs of a layer's projections."""

    mixed: Tensor
    """`b t channels`: the input of the convolution."""
    gates: tuple[Tensor, ...]
    """The other inputs of the rule, each `b t ...`; a padding token's gates neither forget nor write."""
    output_gate: Tensor
    """`b t hv*v`, before its activation."""


class Parts(Protocol):
    """The operations that differ between kinds of linear layers. `layer` is the module of transformers."""

    @property
    def borrowed(self) -> tuple[str, ...]:
        """Return the submodules whose weights are read without calling them; accelerate's hooks must load these."""

    def project(self, layer: Any, x: Tensor, mask: Tensor | None) -> Projected:
        """Apply the projections to x `b t hidden`; mask is `b t`, False on padding, whose x is 0."""

    def attend(
        self, layer: Any, mixed: Tensor, gates: tuple[Tensor, ...], state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the rule on the convolution's output; return the rule's output `b t hv v` and the state for the cache.

        The returned state is the given one if the rule wrote into it in place.
        """

    def finish(self, layer: Any, output: Tensor, output_gate: Tensor) -> Tensor:
        """Apply the gated norm and the output projection; return `b t hidden`."""


def linear_forward(original: Callable[..., Any], parts: Parts) -> Callable[..., Any]:
    """Return a forward for the linear layer of one model family.

    Args:
        original: The forward of transformers, which serves layers whose convolution has another activation.
        parts: The parts of layers of this kind.
    """

    def forward(
        self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if self.activation not in ("silu", "swish"):
            return original(self, hidden_states, cache_params, attention_mask, **kwargs)
        mask = None if attention_mask is None else attention_mask.to(hidden_states.device, torch.bool)
        if mask is not None:
            hidden_states = hidden_states * mask[:, :, None]
        projected = parts.project(self, hidden_states, mask)
        output = _attend(self, parts, projected, cache_params, mask, kwargs.get("cu_seq_lens_q"))
        return parts.finish(self, output, projected.output_gate)

    return forward


def _attend(
    layer: Any, parts: Parts, x: Projected, cache: Any, mask: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:  # fmt: skip
    """Return the rule's output `b t hv v`; read the cache, if there is one, and update it."""
    b, t = x.mixed.shape[:2]
    index, size = layer.layer_idx, layer.conv_kernel_size
    before, state = (None, None) if cache is None else _cached(cache.layers[index])
    mixed, gates = x.mixed, x.gates
    if cu_seqlens is not None:
        if state is not None:
            raise ValueError(NOT_EMPTY)
        mixed, *packed = (y.reshape(1, b * t, *y.shape[2:]) for y in (mixed, *gates))
        gates = tuple(packed)
    convolution = layer.conv1d
    weight = convolution.weight.squeeze(1).to(mixed.dtype)
    bias = None if convolution.bias is None else convolution.bias.to(mixed.dtype)
    past = None if before is None else _last(before, size - 1)
    convolved, after = short_convolution(mixed, weight, past, cu_seqlens, bias)
    memory = state
    if state is not None and torch.is_grad_enabled():
        memory = state.clone()  # the cache is overwritten before the backward reads it
    output, final = parts.attend(layer, convolved, gates, memory, cu_seqlens)
    if cache is not None:
        if cu_seqlens is not None:
            rows = _last_texts(mask, cu_seqlens, b, t)
            cache.update_conv_state(after[rows], index, conv_kernel_size=size)
            cache.update_recurrent_state(final[rows], index)
        else:
            _keep_inputs(cache, index, size, mixed, before, mask)
            if final is not state:
                cache.update_recurrent_state(final, index)
    return output.view(b, t, *output.shape[2:])


def _cached(layer: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the convolution's inputs `b channels n` and the state in one layer of a cache; None if it is empty.

    The attributes are those of all versions that OLDEST allows; the cache's methods for this are newer.
    """
    if not layer.has_previous_state[0]:
        return None, None
    return layer.conv_states[0], layer.recurrent_states[0]


def _last(states: Tensor, count: int) -> Tensor:
    """Return the last `count` inputs of `b channels n`, with zeros in front where there are fewer."""
    return F.pad(states, (max(0, count - states.shape[-1]), 0))[..., -count:] if count else states[..., :0]


def _last_texts(mask: Tensor | None, cu_seqlens: Tensor, b: int, t: int) -> Tensor:
    """Return, for each row, the index of the packed sequence with its last token that is not padding."""
    last = torch.arange(1, b + 1, device=cu_seqlens.device) * t - 1
    if mask is not None:
        last = last - _trailing(mask).clamp(max=t - 1)
    return torch.searchsorted(cu_seqlens.to(last.dtype), last, right=True) - 1


def _trailing(mask: Tensor) -> Tensor:
    """Count the padding tokens at the end of each row."""
    return (mask.flip(1).cumsum(1) == 0).sum(1)


def _keep_inputs(cache: Any, index: int, size: int, mixed: Tensor, before: Tensor | None, mask: Tensor | None) -> None:
    """Store the last `size` inputs of the convolution in the cache, without the padding at the end of a row."""
    t = mixed.shape[1]
    if cache.layers[index].record_past:  # the cache keeps all inputs
        cache.update_conv_state(mixed.transpose(1, 2), index, conv_kernel_size=size)
        return
    kept = mixed[:, -size:].transpose(1, 2)  # b channels size
    if mask is not None and (torch.compiler.is_compiling() or not mask[:, -1].all()):
        old = mixed.new_zeros(*kept.shape[:2], size) if before is None else _last(before, size)
        at = torch.arange(size, device=mixed.device) + (t - _trailing(mask))[:, None]  # b size, into old | new
        both = torch.cat((old, mixed.transpose(1, 2)), dim=-1)
        kept = both.gather(2, at[:, None].expand(-1, both.shape[1], -1))
    cache.update_conv_state(kept, index, conv_kernel_size=size)

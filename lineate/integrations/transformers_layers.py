"""Forwards for the layers of transformers' models: their parameters and cache, lineate's convolution and rule."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.call import Inputs
from lineate.integrations.transformers_packing import NOT_EMPTY
from lineate.layers.convolution import short_convolution
from lineate.layers.mixer import delta_from_raw_gates
from lineate.native import layers as native
from lineate.rule import compute_dtype

CLOSED_GATE = -1e4
"""A raw gate that neither forgets nor writes: its softplus and sigmoid are 0, in float16 too."""


class Projected(NamedTuple):
    """The outputs of a layer's projections, before the convolution and the activations."""

    qkv: Tensor
    """`b t channels`: the queries of all heads, then all keys, then all values."""
    output_gate: Tensor
    """`b t hv v`."""
    gate: Tensor
    """Raw decay gate, `b t hv`, or `b t hv k` per key channel."""
    write: Tensor
    """Raw write gate, `b t hv`; its sigmoid times beta_scale is beta."""
    A_log: Tensor
    """`hv`."""
    dt_bias: Tensor
    """`hv`, or `hv*k` flat."""
    heads: tuple[int, int, int, int]
    """The sizes h, hv, k, v."""
    beta_scale: float


Project = Callable[[Any, Tensor], Projected]
"""From a layer and its hidden states `b t hidden` to the inputs of the rule."""


def linear_forward(original: Callable[..., Any], project: Project, norm: str, out: str) -> Callable[..., Any]:
    """Return a forward for the linear layer of one model family.

    Args:
        original: The forward of transformers, which serves layers with another activation or a convolution bias.
        project: Computes the inputs of the rule from the hidden states.
        norm: Name of the layer's gated norm.
        out: Name of the layer's output projection.
    """

    def forward(
        self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if self.activation not in ("silu", "swish") or self.conv1d.bias is not None:
            return original(self, hidden_states, cache_params, attention_mask, **kwargs)
        mask = None if attention_mask is None else attention_mask.to(hidden_states.device, torch.bool)
        if mask is not None:
            hidden_states = hidden_states * mask[:, :, None]
        projected = project(self, hidden_states)
        attended = _attend(self, projected, cache_params, mask, kwargs.get("cu_seq_lens_q"))
        normed = _gated_norm(getattr(self, norm), attended, projected.output_gate)  # b t hv v
        return getattr(self, out)(normed.flatten(2))

    return forward


def latent_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward for Kimi's softmax attention, whose values are narrower than its keys.

    torch's fast attention on a CPU needs keys and values of one width, so the values are padded (4x faster at 2048
    tokens).

    Args:
        original: The forward of transformers, which serves every other device and attention implementation.
    """

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Any, past_key_values: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        b, t = hidden_states.shape[:2]
        narrower = self.qk_head_dim - self.v_head_dim
        if hidden_states.device.type != "cpu" or self.config._attn_implementation != "sdpa" or narrower <= 0 or t == 1:
            return original(self, hidden_states, attention_mask, past_key_values, **kwargs)
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if self.q_lora_rank is None:
            q = self.q_proj(hidden_states)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q = q.view(b, t, -1, self.qk_head_dim).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(hidden_states).split((self.kv_lora_rank, self.qk_rope_head_dim), -1)
        latent, shared = self.kv_a_layernorm(latent)[:, None], shared[:, None]  # b 1 t rank|rope
        if past_key_values is not None:
            latent, shared = past_key_values.update(latent, shared, self.layer_idx)
        keys, values = self.expand_kv(latent, shared)
        output, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](
            self, q, keys, F.pad(values, (0, narrower)), attention_mask,
            dropout=self.attention_dropout if self.training else 0.0, scaling=self.scaling, **kwargs,
        )  # fmt: skip
        return self.o_proj(output[..., : self.v_head_dim].flatten(2)), weights

    return forward


def _gated_norm(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    """Apply the layer's own norm; on a CPU in one fused pass, unless the norm has hooks or was replaced."""
    plain = type(norm).__name__.endswith("RMSNormGated") and "forward" not in norm.__dict__
    hooked = norm._forward_hooks or norm._forward_pre_hooks
    if plain and not hooked and norm.activation in ("silu", "sigmoid") and native.serves(x, norm.weight, gate):
        return native.gated_rms_norm(x, norm.weight, gate, norm.variance_epsilon, norm.activation)
    return norm(x, gate)


def _attend(layer: Any, x: Projected, cache: Any, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return the rule's output `b t hv v`; read the cache, if there is one, and update it."""
    b, t = x.qkv.shape[:2]
    index, size = layer.layer_idx, layer.conv_kernel_size
    before, state = None, None
    if cache is not None:
        before, state = cache.get_conv_state(index), cache.get_recurrent_state(index)
    qkv, gate, write = x.qkv, x.gate, x.write
    if mask is not None:  # padding neither forgets nor writes
        gate, write = (y.masked_fill(~mask.view(b, t, *[1] * (y.dim() - 2)), CLOSED_GATE) for y in (gate, write))
    if cu_seqlens is not None:
        if state is not None:
            raise ValueError(NOT_EMPTY)
        qkv, gate, write = (y.reshape(1, b * t, *y.shape[2:]) for y in (qkv, gate, write))

    weight = layer.conv1d.weight.squeeze(1).to(qkv.dtype)
    mixed, after = short_convolution(qkv, weight, None if before is None else _last(before, size - 1), cu_seqlens)
    h, hv, k, v = x.heads
    queries, keys, values = mixed.split([h * k, h * k, hv * v], dim=-1)
    queries, keys, values = (
        y.unflatten(-1, (n, d)) for y, n, d in ((queries, h, k), (keys, h, k), (values, hv, v))
    )  # fmt: skip
    output, final = _rule(x, queries, keys, values, gate, write, state, cu_seqlens)
    if cache is not None:
        if cu_seqlens is not None:
            rows = _last_texts(mask, cu_seqlens, b, t)
            cache.update_conv_state(after[rows], index, conv_kernel_size=size)
            cache.update_recurrent_state(final[rows], index)
        else:
            _keep_inputs(cache, index, size, qkv, before, mask)
            if final is not state:
                cache.update_recurrent_state(final, index)
    return output.view(b, t, hv, v)


def _rule(
    x: Projected, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, write: Tensor, state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output and the final state, which is the given state if a token was written into it in place."""
    dt_bias = x.dt_bias.view(gate.shape[2:])
    if state is not None:
        state = state.to(compute_dtype(v.dtype))
        if torch.is_grad_enabled():
            state = state.clone()  # the cache is overwritten before the backward reads it
    inputs = Inputs(q, k, v, gate, write, state, cu_seqlens, x.A_log, dt_bias)
    return delta_from_raw_gates(inputs, x.beta_scale, in_place=True)


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


def _keep_inputs(cache: Any, index: int, size: int, qkv: Tensor, before: Tensor | None, mask: Tensor | None) -> None:
    """Store the last `size` inputs of the convolution in the cache, without the padding at the end of a row."""
    t = qkv.shape[1]
    if cache.is_recording_past(index):  # the cache keeps all inputs
        cache.update_conv_state(qkv.transpose(1, 2), index, conv_kernel_size=size)
        return
    kept = qkv[:, -size:].transpose(1, 2)  # b channels size
    if mask is not None and (torch.compiler.is_compiling() or not mask[:, -1].all()):
        old = qkv.new_zeros(*kept.shape[:2], size) if before is None else _last(before, size)
        at = torch.arange(size, device=qkv.device) + (t - _trailing(mask))[:, None]  # b size, into old | new
        both = torch.cat((old, qkv.transpose(1, 2)), dim=-1)
        kept = both.gather(2, at[:, None].expand(-1, both.shape[1], -1))
    cache.update_conv_state(kept, index, conv_kernel_size=size)

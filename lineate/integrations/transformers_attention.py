"""Forwards for parts of transformers' models other than the linear layers."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.integrations.transformers_packing import BOUNDARIES, names_of


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


def unpacked_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that gives `original` one sequence a row.

    Its mask has the numbers of the packed sequences (`packed_mask`). The first result is packed again. The others, such
    as the choice of keys that a layer passes to the next one, are unchanged.

    Args:
        original: The forward of transformers, which mixes all tokens of a row; its mask may only name padding.
    """
    names = names_of(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        key = next((name for name in ("attention_mask", "conv_mask") if given.get(name) is not None), None)
        mask = None if key is None else given[key]
        if mask is None or mask.dtype is torch.bool or mask.max() <= 1:
            return original(self, *args, **kwargs)
        b, t = mask.shape
        tokens = mask.flatten().nonzero()[:, 0]
        _, row, lengths = mask.flatten()[tokens].unique_consecutive(return_inverse=True, return_counts=True)
        column = torch.arange(len(tokens), device=mask.device) - (lengths.cumsum(0) - lengths)[row]
        at = tokens.new_zeros(len(lengths), int(lengths.max())).index_put((row, column), tokens)  # rows by the longest

        def unpack(x: Any) -> Any:
            packed = isinstance(x, Tensor) and x.shape[:2] == (b, t)
            return x.flatten(0, 1)[at] if packed else x

        rows = {name: unpack(x) for name, x in given.items() if name not in BOUNDARIES}
        rows[str(key)] = torch.arange(at.shape[1], device=at.device) < lengths[:, None]
        result = original(self, **rows)
        first, *others = result if isinstance(result, tuple) else (result,)
        packed = first.new_zeros(b * t, *first.shape[2:]).index_copy(0, tokens, first[row, column]).unflatten(0, (b, t))
        return (packed, *others) if isinstance(result, tuple) else packed

    return forward

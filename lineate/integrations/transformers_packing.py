"""Sequences packed into one row of a transformers model: where they begin, and masks that separate them."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

NOT_EMPTY = (
    "past_key_values must be empty for packed sequences (cu_seq_lens_q), got one that has seen tokens; "
    "pass a new cache, or one sequence a row"
)


def text_model_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward for a text model that finds packed sequences and passes their boundaries to every layer.

    Args:
        original: The forward of transformers, which does the rest.
    """

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        given = inputs_embeds if inputs_embeds is not None else input_ids
        borders = None
        if given is not None and not torch.compiler.is_compiling():
            borders = _borders(
                given.shape[0], given.shape[1], attention_mask, position_ids, past_key_values,
                kwargs.get("cu_seq_lens_q"),
            )  # fmt: skip
        if borders is not None and given is not None:
            longest = max(end - start for start, end in pairwise(borders))
            cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=given.device)
            names = (
                "cu_seq_lens_q",
                "cu_seq_lens_k",
                "max_length_q",
                "max_length_k",
            )  # as flash attention names them
            kwargs.update(zip(names, (cu_seqlens, cu_seqlens, longest, longest), strict=True))
            tokens = torch.arange(given.shape[0] * given.shape[1], device=given.device)
            texts = torch.searchsorted(cu_seqlens[1:].to(tokens.dtype), tokens, right=True)
            if position_ids is None:
                position_ids = (tokens - cu_seqlens[texts]).view(given.shape[:2])
            if attention_mask is None or (isinstance(attention_mask, Tensor) and attention_mask.dim() == 2):
                attention_mask = _masks(self, given, texts.view(given.shape[:2]), attention_mask, past_key_values)
        return original(
            self,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    return forward


def _borders(
    b: int, t: int, attention_mask: Any, position_ids: Tensor | None, cache: Any, cu_seqlens: Tensor | None
) -> list[int] | None:
    """Return where the sequences begin if all rows are laid end to end, and the end; None if no row is packed.

    A position that is not its predecessor plus 1 begins a sequence, as in transformers' softmax attention.
    """
    rows = range(0, b * t + 1, t)
    seen = cache is not None and t > 1 and cache.get_seq_length() > 0
    mask = attention_mask if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 else None
    if cu_seqlens is not None:
        if seen:
            raise ValueError(NOT_EMPTY)
        given = cu_seqlens.tolist()
        if given[0] != 0 or given != sorted(given) or given[-1] > b * t:
            raise ValueError(f"cu_seq_lens_q must go up from 0 to at most b * t = {b * t}, got {given}")
        return sorted({*given, *rows})
    if t == 1 or position_ids is None:
        return None
    if position_ids.dim() == 3:  # Qwen3.5: positions in the text and in images, or only in images
        if position_ids.shape[0] != 4:
            return None
        position_ids = position_ids[0]
    begins = position_ids.diff(dim=-1).expand(b, -1) != 1  # b t-1: whether token i + 1 begins a sequence
    if mask is not None:
        valid = mask[:, -t:].to(begins.device, torch.bool)
        begins = begins & valid[:, 1:] & valid[:, :-1]
    if not begins.any():
        return None
    if seen:
        raise ValueError(NOT_EMPTY)
    if mask is not None:
        begins = begins | (valid[:, 1:] != valid[:, :-1])  # padding is a sequence of its own
    at = begins.nonzero()
    return sorted({*rows, *(at[:, 0] * t + at[:, 1] + 1).tolist()})


def _masks(model: Any, given: Tensor, texts: Tensor, mask: Tensor | None, cache: Any) -> dict[str, Any]:
    """Make the masks that a text model would make itself; `texts`, `b t`, has the number of each token's sequence."""
    from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask

    last = texts.shape[1] - 1

    def same_text(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return texts[row, query] == texts[row, key.clamp(max=last)]  # a static cache has room for future tokens

    like = torch.empty(*given.shape[:2], 1, dtype=model.dtype, device=given.device)
    full = create_causal_mask(
        model.config, like, None, past_key_values=cache, position_ids=None, and_mask_function=same_text
    )  # fmt: skip
    return {"full_attention": full, "linear_attention": create_recurrent_attention_mask(model.config, like, mask)}

"""Sequences packed into one row of a transformers model: where they begin, and masks that separate them."""

import inspect
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""The names of the boundaries of packed sequences in flash attention."""
NOT_EMPTY = (
    "past_key_values must be empty for packed sequences (cu_seq_lens_q), got one that has seen tokens; "
    "pass a new cache, or one sequence a row"
)
NO_CACHE = (
    "past_key_values must be None for packed sequences in this model, whose sparse layers cannot cache packed rows; "
    "pass use_cache=False, or one sequence a row"
)
SOFTMAX_LAYERS = ("full_attention", "indexed_attention", "qwen_sparse_attention", "deepseek_sparse_attention")
"""How text models name the masks of their softmax layers; the last two until transformers 5.18."""


def text_model_forward(
    original: Callable[..., Any], unpacked: bool = False, one_mask: bool = False
) -> Callable[..., Any]:  # fmt: skip
    """Return a forward for a text model that finds packed sequences and passes their boundaries to every layer.

    Args:
        original: The forward of transformers, which does the rest.
        unpacked: Whether parts of the model read the sequences from the mask (`unpacked_forward`) and have no cache
            for packed rows.
        one_mask: Whether the softmax layers take the mask of the linear layers.
    """
    parameters = names_of(original)
    cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        tokens = given.get("inputs_embeds")
        tokens = given.get("input_ids") if tokens is None else tokens
        if tokens is None or torch.compiler.is_compiling():
            return original(self, **given)
        b, t = tokens.shape[:2]
        mask, past = given.get("attention_mask"), given.get(cache_name)
        borders = _borders(b, t, mask, past, given)
        if borders is None:
            return original(self, **given)
        if unpacked:
            if past is not None:
                raise ValueError(NO_CACHE)
            given["use_cache"] = False
        longest = max(end - start for start, end in pairwise(borders))
        cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=tokens.device)
        given.update(zip(BOUNDARIES, (cu_seqlens, cu_seqlens, longest, longest), strict=True))
        at = torch.arange(b * t, device=tokens.device)
        texts = torch.searchsorted(cu_seqlens[1:].to(at.dtype), at, right=True)
        softmax_layers = "position_ids" in parameters  # Mamba-2 has none
        if softmax_layers and given.get("position_ids") is None:
            given["position_ids"] = (at - cu_seqlens[texts]).view(b, t)
        if softmax_layers and (mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)):
            like = torch.empty(b, t, 1, dtype=self.dtype, device=tokens.device)
            full, linear = _masks(self.config, like, texts.view(b, t), mask, past, unpacked)
            softmax = dict.fromkeys(SOFTMAX_LAYERS, linear if one_mask else full)
            given["attention_mask"] = {**softmax, "linear_attention": linear}  # models read the names they know
        return original(self, **given)

    return forward


@cache
def names_of(method: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a method's parameters, without self."""
    return tuple(inspect.signature(method).parameters)[1:]


def packed_mask(texts: Tensor, mask: Tensor | None) -> Tensor:
    """Return `b t` with a number from 1 for each sequence, and 0 on padding."""
    numbers = texts + 1
    return numbers if mask is None else numbers * mask[:, -texts.shape[1] :].to(numbers.device, torch.bool)


def _borders(b: int, t: int, attention_mask: Any, past: Any, given: dict[str, Any]) -> list[int] | None:
    """Return where the sequences begin if all rows are laid end to end, and the end; None if no row is packed.

    The model gets cu_seq_lens_q, or else seq_idx, the number of each token's sequence, or else position_ids: a
    position that is not its predecessor plus 1 begins a sequence, as in transformers' softmax attention.
    """
    rows = range(0, b * t + 1, t)
    seen = t > 1 and past is not None and _has_seen(past)
    mask = attention_mask if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 else None
    cu_seqlens = given.get("cu_seq_lens_q")
    if cu_seqlens is not None:
        if seen:
            raise ValueError(NOT_EMPTY)
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends != sorted(ends) or ends[-1] > b * t:
            raise ValueError(f"cu_seq_lens_q must go up from 0 to at most b * t = {b * t}, got {ends}")
        return sorted({*ends, *rows})
    begins = None if t == 1 else _begins(given.get("seq_idx"), given.get("position_ids"))
    if begins is None:
        return None
    begins = begins.expand(b, -1)
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


def _begins(numbers: Tensor | None, positions: Tensor | None) -> Tensor | None:
    """Return, `b|1 t-1`, whether token i + 1 begins a sequence."""
    if numbers is not None:
        return numbers.diff(dim=-1) != 0
    if (
        positions is not None and positions.dim() == 3
    ):  # Qwen3.5: positions in the text and in images, or only in images
        positions = positions[0] if positions.shape[0] == 4 else None
    return None if positions is None else positions.diff(dim=-1) != 1


def _has_seen(past: Any) -> bool:
    """Whether a linear layer of the cache has a state."""
    return any(getattr(layer, "has_previous_state", {0: False})[0] for layer in past.layers)


def _masks(
    config: Any, like: Tensor, texts: Tensor, mask: Tensor | None, past: Any, unpacked: bool
) -> tuple[Tensor, Tensor | None]:
    """Make the masks of softmax and of linear layers; `texts`, `b t`, has the number of each token's sequence."""
    from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask

    last = texts.shape[1] - 1

    def same_text(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return texts[row, query] == texts[row, key.clamp(max=last)]  # a static cache has room for future tokens

    full = create_causal_mask(
        config, like, None, past_key_values=past, position_ids=None, and_mask_function=same_text
    )  # fmt: skip
    return full, packed_mask(texts, mask) if unpacked else create_recurrent_attention_mask(config, like, mask)

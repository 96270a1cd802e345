"""The checks of ids, masks, labels and states by HybridLM and the code around it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.models.state import ModelState
from lineate.parallel.context.segments import Context


def check_ids(ids: Tensor, vocab_size: int, name: str = "input_ids") -> None:
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(ids).__name__}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64, got {str(ids.dtype).removeprefix('torch.')}")
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(f"{name} must have shape (b, t) with at least one token, got {tuple(ids.shape)}")
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"{name} must lie in 0 .. {vocab_size - 1}, got {low} .. {high}")


def check_mask(attention_mask: Tensor, input_ids: Tensor) -> Tensor | None:
    """Return which tokens are not padding, or None if none is padding; synchronise with the device only once."""
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a torch.Tensor, got {type(attention_mask).__name__}")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have shape (b, t) = {tuple(input_ids.shape)}, got {tuple(attention_mask.shape)}"
        )
    if attention_mask.device != input_ids.device:
        raise ValueError(
            f"attention_mask must be on the device of input_ids, {input_ids.device}, got {attention_mask.device}"
        )
    kept = attention_mask.bool()
    begun = F.pad(kept, (1, 0))  # a row has tokens again after padding
    once = ((begun[:, 1:] & ~begun[:, :-1]).sum(1) <= 1).all()
    known, whole, some, once = torch.stack(((kept == attention_mask).all(), kept.all(), kept.any(), once)).tolist()
    if not known:
        raise ValueError(
            "attention_mask must be bool, or 1 for tokens and 0 for padding, got other values; of a mask that is "
            "added to scores pass (mask == 0)"
        )
    if not some:
        raise ValueError("attention_mask must have a token that is not padding, got only 0")
    if not once:
        raise ValueError(
            "attention_mask must have its padding before or after the tokens of a row, got 0 between two of them; "
            "leave these tokens out of input_ids"
        )
    return None if whole else kept


def check_labels(labels: Tensor, shape: torch.Size) -> None:
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a torch.Tensor, got {type(labels).__name__}")
    if labels.shape != shape:
        raise ValueError(f"labels must have shape (b, t) = {tuple(shape)}, got {tuple(labels.shape)}")


def check_context(
    context: Context | None, labels: Tensor | None, attention_mask: Tensor | None, continues: bool | None
) -> None:
    if context is None:
        if continues:
            raise ValueError("continues=True needs context parallelism; call context_parallel(model, group) first")
        return
    if labels is not None:
        raise ValueError(
            "labels cannot be used under context parallelism: the token after a segment's last is on the next rank; "
            "compute the loss from the logits and targets that were shifted before the split"
        )
    if attention_mask is not None:
        raise ValueError("attention_mask cannot be used under context parallelism; pack the sequences with cu_seqlens")


def check_state(state: ModelState | None, blocks: nn.ModuleList, rows: int) -> None:
    if state is None:
        return
    if not isinstance(state, ModelState):
        raise TypeError(f"state must be a ModelState or None, got {type(state).__name__}; pass LMOutput.state")
    if len(state.layers) != len(blocks):
        raise ValueError(f"state must have {len(blocks)} layers, got {len(state.layers)}; it is another model's")
    for n, (layer, block) in enumerate(zip(state.layers, blocks, strict=True)):
        if layer.names != block.state_names:
            names, got = (", ".join(x) for x in (block.state_names, layer.names))  # type: ignore[arg-type]
            raise ValueError(f"state of layer {n} must have {names}, got {got}; it is another model's")
    if state.rows != rows and any(block.state_names for block in blocks):
        raise ValueError(f"state must have {rows} rows, as many as the batch or the packed sequences, got {state.rows}")

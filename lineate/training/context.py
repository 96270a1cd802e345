"""Exact context parallelism: one sequence split over the ranks of a process group (docs/scaling.md).

    context_parallel(model, group)
    part = batch.shard(rank, size)                                   # this rank's tokens
    out = model(part.ids, cu_seqlens=part.cu_seqlens, continues=part.continues)

Outputs and gradients are those of one process with all tokens; a parameter's gradient is the sum over the ranks.
"""

from torch import nn
from torch.distributed import ProcessGroup

from lineate.layers import GatedAttention, LatentAttention, LinearMixer
from lineate.layers.context import Context
from lineate.models.hybrid import HybridLM


def context_parallel(model: nn.Module, group: ProcessGroup) -> None:
    """From now on every call of the model, or of one of its mixers, has this rank's segment of the tokens."""
    parts = [x for x in model.modules() if isinstance(x, HybridLM | LinearMixer | GatedAttention | LatentAttention)]
    if not parts:
        raise ValueError(
            f"model must have mixers of lineate.layers, got {type(model).__name__} without any; "
            "context_parallel knows no other layers"
        )
    others = {type(x).__name__ for x in model.modules() if hasattr(type(x), "context")} - {
        type(x).__name__ for x in parts
    }
    if others:
        raise ValueError(
            f"model must have rules that are linear in their memory, or attention, got {', '.join(sorted(others))}; "
            "use data parallelism for it"
        )
    context = Context(group)
    for part in parts:
        part.context = context

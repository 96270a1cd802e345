"""Exact context parallelism: one sequence split over the ranks of a process group (docs/scaling.md).

    context_parallel(model, group)
    part = batch.shard(rank, size)                                   # this rank's tokens
    out = model(part.ids, cu_seqlens=part.cu_seqlens, continues=part.continues)

Outputs and gradients equal those of one process with all tokens; a parameter's gradient is the sum over the ranks.
"""

from torch import nn
from torch.distributed import ProcessGroup

from lineate.parallel.context.segments import Context, check_splits


def context_parallel(model: nn.Module, group: ProcessGroup) -> None:
    """Make every later call of the model, or of one of its mixers, expect this rank's segment of the tokens.

    Args:
        model: A HybridLM or any module with mixers of lineate.layers; it is changed in place.
        group: The ranks that share a sequence; rank r of the group has the r-th segment.
    """
    parts = [x for x in model.modules() if hasattr(x, "state_spec")]  # a HybridLM itself and every mixer
    if not parts:
        raise ValueError(
            f"model must have mixers of lineate.layers, got {type(model).__name__} without any; "
            "context_parallel knows no other layers"
        )
    check_splits(*parts)
    context = Context(group)
    for part in parts:
        part.context = context  # type: ignore[assignment]

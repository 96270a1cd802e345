"""Joins a command to the other processes that share its model, if there are any (ranks.py)."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it needs torch.distributed, which some builds of torch lack
    from lineate.generation.ranks import RankedJob


def join_job(tensor: int, device: str, folder: str | None, flags: Mapping[str, Any]) -> "RankedJob | None":
    """Join the processes that share a model; None if this process has the whole model.

    Args:
        tensor: How many processes share it.
        device: "cpu" or "cuda".
        folder: Folder of a run or a model, or a name on the hub.
        flags: Other options that must be the same in all processes, by name.
    """
    if tensor == 1 and "WORLD_SIZE" not in os.environ:
        return None
    from lineate.generation.ranks import start_ranks

    return start_ranks(tensor, device, folder, flags)


def working(job: "RankedJob | None") -> AbstractContextManager[None]:
    """Return the context of a command's work on this rank, or an empty one without other ranks.

    Args:
        job: From join_job.
    """
    return nullcontext() if job is None else job.working()

"""Selects the kernels of a device.

A new architecture needs a folder whose class implements `Stages`, and here its import and one line. All of them are
imported wherever triton is; `runs_on` is called before any of a class's kernels.
"""

from functools import cache

import torch

from lineate.kernels.call import Call
from lineate.kernels.hopper.stages import HopperStages
from lineate.kernels.portable.stages import PortableStages
from lineate.kernels.stages import Stages

# The first that runs on a device serves it.
ARCHITECTURES: tuple[type[Stages], ...] = (
    HopperStages,
    PortableStages,
)


@cache
def architecture_of(device: torch.device) -> type[Stages]:
    """Return the stages of a device's architecture."""
    return next(stages for stages in ARCHITECTURES if stages.runs_on(device))


def stages_for(call: Call) -> Stages:
    """Return the stages of one call."""
    return architecture_of(call.q.device)(call)

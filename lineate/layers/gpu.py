"""Decide which calls run the GPU kernels of the layers around the rules."""

import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lineate.dispatch import kernels_run
from lineate.quantised import QuantisedWeight

if TYPE_CHECKING:
    from lineate.kernels.layers.quantised_products import Codes


def kernels_for(*tensors: Tensor | None) -> ModuleType | None:
    """Return lineate.kernels.layers.ops if its kernels take these tensors: on a GPU, outside of vmap and the like."""
    for x in tensors:
        if x is not None and not (x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32)):
            return None
    if not kernels_run():
        return None
    from lineate.kernels.layers import ops as layer_ops  # triton, at its first use

    return layer_ops


def overlaps(device: torch.device) -> bool:
    """Whether launches on this device overlap, as in a graph that is being recorded; see kernels.launching.overlaps.

    Those of compiled code do not.
    """
    if torch.compiler.is_compiling():
        return False
    launching = sys.modules.get("lineate.kernels.launching")  # if not imported, no caller is inside `overlapping`
    return launching is not None and bool(launching.overlaps(device))


def overlapping() -> AbstractContextManager[None]:
    """Let kernels begin before the one before them has ended; see lineate.kernels.launching.overlapping."""
    if not kernels_run():
        return nullcontext()
    from lineate.kernels import launching  # triton, at its first use

    return launching.overlapping()


def coded(weight: Tensor) -> "Codes | None":
    """Return a weight in codes on a GPU as kernels take it; None: it is another one, or kernels do not take it."""
    if not isinstance(weight, QuantisedWeight) or not weight.is_cuda:
        return None
    kernel = weight.format.kernel
    if kernel is None or weight.scales is None:
        return None
    from lineate.kernels.layers.quantised_products import Codes  # triton, at its first use

    return Codes(weight.codes, weight.scales, weight.shape[-2], kernel)


def uncoded(weight: Tensor) -> Tensor:
    """Return the numbers of a quantised weight that are in the dtype it has for others; any other weight unchanged."""
    if isinstance(weight, QuantisedWeight) and weight.format.dtype == weight.dtype:
        return weight.codes
    return weight


def kernel_weight(weight: Tensor) -> "Tensor | Codes":
    """Return a weight as kernels take it: in codes, or its numbers; a weight that they do not take is unchanged."""
    kept = coded(weight)
    return uncoded(weight) if kept is None else kept

"""TMA descriptors of tensors: each tensor is cut into boxes, which are tiles in shared memory."""

from functools import lru_cache
from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SHARED = 232448  # the most bytes of shared memory of a program on sm_90

_FIELDS = len(TensorDescriptor.__dataclass_fields__)


@lru_cache
def layout(columns: int, bits: int) -> Any:
    """Return the layout of a tile: swizzled for the tensor cores; float32 (factors) row by row."""
    return gl.NVMMASharedLayout(min(128, columns * 2) if bits == 16 else 0, bits, 2)


def describe(x: Tensor, rows: int, columns: int, stride: int, box: list[int]) -> Any:
    """Describe x as [rows, columns] with a row stride of `stride`, cut into boxes.

    This skips the checks of TensorDescriptor, because HopperStages.takes_call has already made them.
    """
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = x, [rows, columns], [stride, 1], box
    made.layout, made.padding = layout(box[1], x.element_size() * 8), "zero"
    if _FIELDS > 6:  # triton 3.7
        made.round_f32_to_tf32 = False
    return made


def describe_rows(x: Tensor, columns: int) -> Any:
    """Describe x `b t heads k` as call.in_rows makes it; a box is 64 tokens by the given columns of one head."""
    width = (x.shape[2] - 1) * x.stride(2) + x.shape[3]
    return describe(x, x.shape[0] * x.shape[1], width, x.stride(1), [64, columns])


def describe_squares(x: Tensor) -> Any:
    """Describe P or T, `slot hv 64 64`."""
    return describe(x, x.shape[0] * x.shape[1] * 64, 64, 64, [64, 64])

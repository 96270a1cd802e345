"""CUDA's driver, by ctypes: the functions with which tape.py records and replays launches."""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import local
from typing import Any

import torch

from lineate.native.build import load
from lineate.native.compiler import Code, NativeUnavailable

MAP_BYTES = 128
"""The bytes of a CUtensorMap, a descriptor of TMA."""
REPLAY = Code("replay", (Path(__file__).with_name("replay.c"),))
# Element types of TMA: device descriptors number them differently from host descriptors.
_TMA_TYPES = {**{n: n for n in range(16)}, 8: 10, 9: 8, 10: 9}


@cache
def cuda_driver() -> Any:
    """Return CUDA's driver; None if it is not found, or is older than 12.4 and cannot list a kernel's parameters."""
    p, i = ctypes.c_void_p, ctypes.c_int
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuTensorMapEncodeTiled.argtypes = [p, i, ctypes.c_uint, p, p, p, p, p, i, i, i, i]
        driver.cuFuncGetParamInfo.argtypes = [p, ctypes.c_size_t, p, p]
        driver.cuGetErrorName.argtypes = [i, p]
        driver.cuCtxGetCurrent.argtypes = driver.cuCtxSetCurrent.argtypes = [p]
        driver.cuDeviceGet.argtypes = driver.cuDevicePrimaryCtxRetain.argtypes = [p, i]
        launch_functions(driver)
    except (OSError, AttributeError):
        return None
    return driver


def launch_functions(driver: Any) -> tuple[int, int, int]:
    """Return the addresses of the functions that replay.c calls, in the order of its struct."""
    functions = driver.cuLaunchKernelEx, driver.cuMemsetD8Async, driver.cuTensorMapReplaceAddress
    launch, clear, replace = (ctypes.cast(x, ctypes.c_void_p).value or 0 for x in functions)
    return launch, clear, replace


@cache
def replay_function() -> Any:
    """Return lineate_replay of replay.c; None if it cannot be compiled here, so that no call is replayed."""
    try:
        replay = load(REPLAY).lineate_replay
    except NativeUnavailable:
        return None
    replay.argtypes, replay.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    return replay


_entered = local()


def enter_context(device: torch.device) -> None:
    """Let this thread launch on a device: a thread that has not called CUDA's runtime has no context yet."""
    if getattr(_entered, "done", False):
        return
    driver, context, number = cuda_driver(), ctypes.c_void_p(), ctypes.c_int()
    check(driver.cuCtxGetCurrent(ctypes.byref(context)))
    if not context.value:
        check(driver.cuDeviceGet(ctypes.byref(number), device.index))
        check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number.value))
        check(driver.cuCtxSetCurrent(context))
    _entered.done = True


def check(code: int) -> None:
    """Raise for an error that the driver returned."""
    if code:
        name = ctypes.c_char_p()
        cuda_driver().cuGetErrorName(code, ctypes.byref(name))
        raise RuntimeError(f"the driver refused a launch: {(name.value or b'unknown').decode()}")


def sizes_of(function: int) -> list[int] | None:
    """Return the bytes of each parameter of a kernel; None if no driver reports them."""
    driver = cuda_driver()
    if driver is None:
        return None
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not driver.cuFuncGetParamInfo(function, len(sizes), ctypes.byref(offset), ctypes.byref(size)):
        sizes.append(size.value)
    return sizes


def encode(
    at: int, address: int, swizzle: int, element: int, kind: int, box: Sequence[int], shape: Sequence[int],
    strides: Sequence[int], nan: bool,
) -> None:  # fmt: skip
    """Write a descriptor of TMA to `at`, as Triton does."""
    rank = len(shape)
    shapes = (ctypes.c_uint64 * rank)(*reversed(shape))
    bytes_between = (ctypes.c_uint64 * rank)(*(element * n for n in reversed(strides[:-1])), 0)
    boxes, ones = (ctypes.c_uint32 * rank)(*reversed(box)), (ctypes.c_uint32 * rank)(*[1] * rank)
    no_interleave, promote_128 = 0, 2
    check(
        cuda_driver().cuTensorMapEncodeTiled(
            at, _TMA_TYPES[kind], rank, address, shapes, bytes_between, boxes, ones, no_interleave, swizzle,
            promote_128, int(nan),
        )
    )  # fmt: skip

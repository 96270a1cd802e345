"""Keeps float32 copies of weights in codes, for CPUs and formats without the C code that multiplies by their codes.

Decoding takes many times as long as a product of a few rows. Each weight is therefore decoded once, at its first
product, while a quarter of the memory stays available. A copy takes 4 bytes a weight and ends with its codes.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lineate.quantised.format import BLOCK, Format

_copies: Any = WeakTensorKeyDictionary()  # codes, or the tensor that they are a view of -> {place: (state, copy)}


def expanded(codes: Tensor, scales: Tensor, rows: int, form: Format) -> Tensor | None:
    """Return the weight `rows columns` in float32, which is kept; None where memory does not allow it.

    A copy is used only while the version counters of codes and scales, and their places in memory, show that neither
    has been written or exchanged since. What goes around the counters (codes.data, codes.numpy()) is not noticed.
    """
    if codes.is_inference() or scales.is_inference():  # these have no version counters
        return None
    owner = codes if codes._base is None else codes._base
    place = codes.storage_offset(), codes.shape, codes.stride(), rows, form.name
    state = codes._version, scales._version, codes.data_ptr(), scales.data_ptr()
    copies = _copies.get(owner)
    if copies is not None and place in copies:
        known, copy = copies[place]
        if known == state:
            return copy
        del copies[place]
    if not fits(4 * rows * codes.shape[1] * BLOCK):
        return None
    copy = copied(codes, scales, rows, form)
    if copies is None:
        copies = _copies[owner] = {}
    copies[place] = state, copy
    return copy


@torch.no_grad()
def copied(codes: Tensor, scales: Tensor, rows: int, form: Format) -> Tensor:
    """Return a new copy."""
    return form.decode(codes, scales, rows)


def kept_bytes() -> int:
    """Return the bytes of all copies."""
    return sum(copy.nbytes for copies in _copies.values() for _, copy in copies.values())


def fits(nbytes: int) -> bool:
    """Whether a quarter of the memory stays available after an allocation; False where that is not known."""
    found = [x for x in (machine_memory(), group_memory()) if x is not None]
    return bool(found) and all(available - nbytes >= total / 4 for total, available in found)


def machine_memory() -> tuple[int, int] | None:
    """Return the total and the available bytes of a Linux machine; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return 1024 * kib["MemTotal"], 1024 * kib["MemAvailable"]
    except (OSError, KeyError, ValueError):
        return None


def group_memory() -> tuple[int, int] | None:
    """Return the limit of the container, and what is left of it; None without one."""
    second, first = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for limit, used in (second, tuple(f"memory/{name}" for name in first)):  # the versions of control groups
        try:
            most, taken = (int(Path("/sys/fs/cgroup", name).read_text()) for name in (limit, used))
        except (OSError, ValueError):  # no such group, or "max"
            continue
        return most, most - taken
    return None

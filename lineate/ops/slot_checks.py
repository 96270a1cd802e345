"""Checks of the states of decoding, and of the slots of a pool where they lie."""

import torch
from torch import Tensor

from lineate.checks import check_device, check_state


def check_slots(slots: Tensor | None, start_slots: Tensor | None, rows: int, q: Tensor, *, packed: bool) -> None:
    """Check slots (`rows`, or one for each token) and start_slots (`rows`); check_slot_values checks their values."""
    for name, x in (("slots", slots), ("start_slots", start_slots)):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor or None, got {type(x).__name__}")
        if x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, got {str(x.dtype).removeprefix('torch.')}")
        check_device(name, x, q)
    first = "n_seqs" if packed else "b"
    if slots is None:
        if start_slots is not None:
            raise ValueError("start_slots needs slots, where the memory goes, got slots=None; pass both")
        return
    if slots.dim() == 2:
        right = slots.shape[0] == rows and slots.shape[1] > 0 if packed else slots.shape == (rows, q.shape[1])
    else:
        right = slots.shape == (rows,)
    if not right:
        each = f"({first}, longest sequence) = ({rows}, ...)" if packed else f"({first}, t) = {(rows, q.shape[1])}"
        raise ValueError(f"slots must have shape ({first},) = ({rows},) or {each}, got {tuple(slots.shape)}")
    if slots.dim() == 2 and start_slots is None:
        raise ValueError("slots for each token need start_slots, where each row starts, got start_slots=None")
    if start_slots is not None and start_slots.shape != (rows,):
        raise ValueError(f"start_slots must have shape ({first},) = ({rows},), got {tuple(start_slots.shape)}")


def check_slot_values(
    slots: Tensor | None, start_slots: Tensor | None, cu_seqlens: Tensor | None, n_slots: int
) -> None:
    """Check that slots lie in the pool and that no row uses a slot another one writes; on a GPU check nothing."""
    if slots is None or slots.device.type != "cpu":
        return
    for name, x in (("slots", slots), ("start_slots", start_slots)):
        if x is not None and int(x.max()) >= n_slots:
            raise ValueError(f"{name} must be below n_slots = {n_slots}, got {int(x.max())}; a negative one is idle")
    starts = slots.tolist() if start_slots is None else start_slots.tolist()
    writer: dict[int, int] = {}
    for row, written in enumerate(slots.reshape(slots.shape[0], -1).tolist()):
        for slot in written:
            if starts[row] >= 0 and slot >= 0 and writer.setdefault(slot, row) != row:
                raise ValueError(f"slots must differ between rows, got {slot} in rows {writer[slot]} and {row}")
    for row, slot in enumerate(starts):
        if slot >= 0 and writer.get(slot, row) != row:
            raise ValueError(f"start_slots[{row}] = {slot} is written by row {writer[slot]}; let it write elsewhere")
    if slots.dim() == 2 and cu_seqlens is not None:
        longest = int(cu_seqlens.diff().max())
        if longest > slots.shape[1]:
            raise ValueError(f"slots must have one for each token, at least {longest} a row, got {slots.shape[1]}")


def check_ring_slots(slots: Tensor | None, seeds: Tensor | None, state: Tensor) -> None:
    """Check the slots `rows` of a pool whose ring is emptied, and seeds `rows`; on a GPU, no values."""
    if slots is not None:
        if not isinstance(slots, Tensor):
            raise TypeError(f"slots must be a torch.Tensor or None, got {type(slots).__name__}")
        if slots.dim() != 1:
            raise ValueError(f"slots must have shape (rows,), got {tuple(slots.shape)}")
        check_slots(slots, None, len(slots), state, packed=False)
        check_slot_values(slots if len(slots) else None, None, None, len(state))
    if seeds is not None:
        check_seeds(seeds, len(state) if slots is None else len(slots), state, state, stochastic=True)


def check_seeds(seeds: Tensor | None, rows: int, q: Tensor, state: Tensor, *, stochastic: bool) -> None:
    """Check the seeds `rows` of stochastic rounding, which only a bfloat16 state has."""
    if seeds is not None and not isinstance(seeds, Tensor):
        raise TypeError(f"seeds must be a torch.Tensor or None, got {type(seeds).__name__}")
    if not stochastic:
        if seeds is not None:
            raise ValueError("seeds are for stochastic rounding, got rounding='nearest'; pass rounding='stochastic'")
        return
    if state.dtype is not torch.bfloat16:
        name = str(state.dtype).removeprefix("torch.")
        raise ValueError(f"rounding='stochastic' is for a bfloat16 state, got {name}; leave it 'nearest'")
    if seeds is None:
        raise ValueError(
            f"rounding='stochastic' needs seeds of shape ({rows},), got None; pass the position of each row's token"
        )
    if seeds.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"seeds must be int32 or int64, got {str(seeds.dtype).removeprefix('torch.')}")
    if seeds.shape != (rows,):
        raise ValueError(f"seeds must have shape (rows,) = ({rows},), got {tuple(seeds.shape)}")
    check_device("seeds", seeds, q)


def check_decode_state(state: Tensor | None, q: Tensor, v: Tensor, rows: int, *, pooled: bool) -> None:
    """Check a state `rows hv k v`, or a pool `n_slots hv k v`, that can be written in place."""
    if not isinstance(state, Tensor):
        raise TypeError(f"state must be a torch.Tensor, got {type(state).__name__}; start from torch.zeros")
    sizes = (v.shape[-2], q.shape[3], v.shape[-1])
    if pooled:
        if state.dim() != 4 or state.shape[1:] != sizes or state.shape[0] == 0:
            expected = f"(n_slots, hv, k, v) = (n_slots, {', '.join(map(str, sizes))})"
            raise ValueError(f"state must have shape {expected} with slots, got {tuple(state.shape)}")
        rows = state.shape[0]
    check_state(state, v, q.shape[3], rows, narrow=True)
    if any(stride == 0 and size > 1 for stride, size in zip(state.stride(), state.shape, strict=True)):
        raise ValueError("state must have memory of its own for each row, got an expanded view; call .contiguous()")
    if not state.is_contiguous() and not torch.compiler.is_compiling() and _overlaps(state):
        raise ValueError(
            f"state must have memory of its own for each number, got strides {tuple(state.stride())} for shape "
            f"{tuple(state.shape)}, in which numbers share memory; call .contiguous()"
        )


def _overlaps(x: Tensor) -> bool:
    """Whether two numbers of a strided tensor have the same place in memory."""
    dims = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    reach = 0  # the largest offset of the dimensions so far
    for stride, size in dims:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    # The strides may interleave without overlapping: count the offsets.
    offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in dims:
        offsets = (offsets[:, None] + stride * torch.arange(size, device="cpu")).flatten()
    return len(offsets.unique()) < len(offsets)

"""Replays the launches of repeated calls.

A call of an op makes a handful of launches, each of which costs Triton's launcher tens of microseconds: it binds and
specialises all arguments anew, and encodes TMA descriptors. For two calls with the same shapes, strides, dtypes and
options all of this is the same, except for addresses. So one such call is recorded: its compiled kernels, grids and
parameters, and for every address the tensor of the call that contains it, or its position in the memory that the call
allocated. Later calls allocate that memory in one piece; C (replay.c) writes the new addresses into the parameters and
hands them to the driver.

    launch(kind, given, made, options, run)    # the first call runs `run`, which may compile; the second records it too

A call can be recorded if it only allocates, fills with zeros, and launches kernels; other calls always run.
"""

import ctypes
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lineate import plans
from lineate.kernels.driver import MAP_BYTES, cuda_driver, encode, replay_function, sizes_of
from lineate.kernels.launching import overlaps, recording
from lineate.kernels.replaying import Launch, Map, Place, Tape

_BYTES = {"i1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8}
_FLOATS = {"fp32": ctypes.c_float, "f32": ctypes.c_float, "fp64": ctypes.c_double}
_ALLOCATES = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
_ZEROS = ("zeros", "zeros_like", "new_zeros")
_VIEWS = (
    *("view", "slice", "select", "as_strided", "unsqueeze", "squeeze", "expand", "detach", "alias", "t", "transpose"),
    *("permute", "split", "split_with_sizes", "unbind", "narrow", "flatten", "unflatten", "_unsafe_view"),
)


class _Unfit(Exception):
    """The call cannot be replayed."""


_ONCE = object()
"""Of a call that was made once: the next one is recorded."""
_UNFIT = object()
"""Of a call that cannot be replayed."""


def launch(
    kind: str, given: Sequence[Tensor | None], made: Sequence[Tensor | None], options: Hashable, run: Callable[[], None]
) -> None:
    """Make the launches of `run`: by running it, or from the tape of an earlier call with the same signature.

    Args:
        kind: The operation of `run`.
        given: The tensors that its launches read, or write in place, besides those that it allocates; the first is not
            None.
        made: The tensors that the caller has just allocated for its results. Their shapes and dtypes follow from the
            others.
        options: All other values that the launches depend on.
        run: Makes the launches on the device of the first tensor.
    """
    device = _device(given)
    if device.type != "cuda":
        run()
        return
    with nullcontext() if _is_current(device) else torch.cuda.device(device):
        if _replays() and not overlaps(device):
            _run_or_replay(_signature(kind, given, options), (*given, *made), device, run)
        else:
            run()


def replayed(kind: str, given: Sequence[Tensor | None], made: Sequence[Tensor | None], options: Hashable) -> bool:
    """Replay the launches of an earlier call with such tensors, as for `launch`; return False if nothing was launched.

    Callers use it before they copy tensors, because those of a recorded call need no copies.
    """
    device = _device(given)
    tape = plans.PLANS.get(_signature(kind, given, options)) if device.type == "cuda" else None
    return isinstance(tape, Tape) and may_replay(device) and tape.replay((*given, *made), device)


def find(kind: str, given: Sequence[Tensor | None], options: Hashable) -> tuple[bool, Tape | None]:
    """Return whether it is known if such calls can be replayed, and the tape if they can; as for `launch`."""
    tape = plans.PLANS.get(_signature(kind, given, options))
    return tape is not None and tape is not _ONCE, tape if isinstance(tape, Tape) else None


def may_replay(device: torch.device) -> bool:
    """Whether a tape may be replayed now: not on another device, nor where launches overlap or are observed."""
    return _is_current(device) and not overlaps(device) and not _hooked()


def _signature(kind: str, given: Sequence[Tensor | None], options: Hashable) -> plans.Signature:
    return "launches", kind, options, *(None if x is None else plans.layout_of(x) for x in given)


def _device(given: Sequence[Tensor | None]) -> torch.device:
    assert given[0] is not None
    return given[0].device


def _is_current(device: torch.device) -> bool:
    return torch.cuda.current_device() == device.index


def _replays() -> bool:
    """Whether there are a driver and a compiler for replaying launches."""
    return torch.version.hip is None and cuda_driver() is not None and replay_function() is not None


def _run_or_replay(
    signature: plans.Signature, tensors: Sequence[Tensor | None], device: torch.device, run: Callable[[], None]
) -> None:  # fmt: skip
    tape = plans.PLANS.get(signature)
    if isinstance(tape, Tape) and not _hooked() and tape.replay(tensors, device):
        return
    if tape is None:
        plans.PLANS.put(signature, _ONCE)
    if tape is not _ONCE or recording.get() is not None:
        run()
        return
    recorder = Recorder(tensors)
    token = recording.set(recorder)
    try:
        with _Watch(recorder):
            run()
    finally:
        recording.reset(token)
    made = recorder.tape()
    plans.PLANS.put(signature, _UNFIT if made is None else made)


def tapes() -> dict[Hashable, Tape | None]:
    """Return the recorded calls; None: a call that cannot be replayed."""
    found = plans.known("launches")
    return {key: x if isinstance(x, Tape) else None for key, x in found.items() if x is not _ONCE}


def forget_tapes() -> None:
    """Forget all recorded calls."""
    plans.forget("launches", "repeat")


def _hooked() -> bool:
    """Whether a hook, such as Triton's own profiler, observes every launch."""
    runtime = triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


class Recorder:
    """Records the launches of a call.

    Args:
        tensors: The tensors of the call.
    """

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self.starts = [0 if x is None else x.data_ptr() for x in tensors]
        self.spans = [(0, 0) if x is None else _span(x) for x in tensors]
        self.noted: list[tuple[Any, ...]] = []
        self.rooms: list[tuple[int, int]] = []
        """The addresses of memory that the call has allocated."""
        self.constants: dict[int, Tensor] = {}
        """Tensors by address that existed before the call, such as tables that all calls share."""
        self.unfit: str | None = None

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
        """Launch a kernel, and record it."""
        compiled = kernel.run(*args, grid=grid, warmup=False, **options)
        try:
            self._note(kernel, compiled, grid, args, options)
        except _Unfit as why:
            self.unfit = str(why)
        return compiled

    def _note(self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: Any, options: Any) -> None:
        if 0 in grid:  # Triton launches nothing, and the driver would refuse it
            return
        if compiled is None:
            raise _Unfit("a hook of Triton's has taken the place of a kernel")
        meta, source = compiled.metadata, compiled.src
        plain = (
            not meta.launch_cooperative_grid and getattr(meta, "num_ctas", 1) == 1
            and not meta.global_scratch_size and not meta.profile_scratch_size
        )  # fmt: skip
        if not plain:
            raise _Unfit("a launch has attributes")
        values = dict(zip(kernel.arg_names, args, strict=False)) | options
        described = iter(getattr(meta, "tensordesc_meta", None) or ())
        parameters: list[tuple[str, Any]] = []
        for name, kind in source.signature.items():
            if kind == "constexpr":
                continue
            value = values[name] if name in values else kernel.signature.parameters[name].default
            if kind.startswith("*"):
                parameters.append(("pointer", self._address(value)))
            elif kind.startswith("tensordesc"):
                tma = next(described, None)
                if tma is None or tma["fp4_padded"]:
                    raise _Unfit("a descriptor is not one of TMA")
                encoded = (tma["swizzle"], tma["elem_size"], tma["elem_type"], tuple(tma["block_size"]))
                shape, strides = [int(n) for n in value.shape], [int(n) for n in value.strides]
                whole = (*encoded, tuple(shape), tuple(strides), value.padding == "nan")
                parameters.append(("map", (self._address(value.base), whole)))
                parameters += [("i32", n) for n in shape] + [("i64", n) for n in strides]
            elif kind in _BYTES or kind in _FLOATS:
                parameters.append((kind, value))
            else:
                raise _Unfit(f"a parameter is {kind}")
        parameters += [("i64", 0), ("i64", 0)]  # scratch memory of the device, and of a profiler: none
        sizes = [_size(kind) for kind, _ in parameters]
        if sizes != sizes_of(compiled.function):
            raise _Unfit("the parameters are laid out in another way, or no driver says how")
        whole_grid = (*grid, 1, 1)[:3]
        self.noted.append((compiled, whole_grid, 32 * meta.num_warps, meta.shared, parameters, meta.launch_pdl))

    def zero(self, x: Tensor) -> None:
        """Record that x is set to 0."""
        if not x.is_contiguous():
            self.unfit = "memory with gaps is set to 0"
        elif x.numel():
            self.noted.append((None, self._address(x), x.numel() * x.element_size()))

    def _address(self, x: Tensor) -> int:
        """Return the address of x; keep x if it is neither the caller's nor allocated by the call."""
        at = x.data_ptr()
        if at and at not in self.starts and not any(low <= at < high for low, high in (*self.spans, *self.rooms)):
            self.constants[at] = x
        return at

    def allocate(self, x: Tensor) -> None:
        """Record memory that the call has allocated."""
        storage = x.untyped_storage()
        if storage.nbytes():
            self.rooms.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    def look(self, x: Tensor, views: Any) -> None:
        """Record views of x; the call cannot be replayed if one begins where another tensor of the call does.

        Its address would be mistaken for that tensor's, which may be elsewhere in the next call.
        """
        for view in views if isinstance(views, list | tuple) else (views,):
            if view.data_ptr() != x.data_ptr() and view.data_ptr() in self.starts and view.numel():
                self.unfit = "a part of one tensor begins where another does"

    def tape(self) -> Tape | None:
        """Return the tape, or None if the call cannot be replayed."""
        given = [n for n in self.starts if n]
        if self.unfit is not None or len(set(given)) != len(given) or cuda_driver() is None:
            return None
        try:
            return self._made(_joined(self.rooms))
        except _Unfit:
            return None

    def _made(self, pieces: list[tuple[int, int]]) -> Tape:
        places: list[Place] = []
        launches: list[Launch] = []
        maps: list[Map] = []
        kept: list[Any] = [*self.constants.values()]
        count = sum(kind == "pointer" for each in self.noted if each[0] is not None for kind, _ in each[4])
        count += sum(each[0] is None for each in self.noted)
        pointers = (ctypes.c_uint64 * count)()
        for each in self.noted:
            if each[0] is None:
                launches.append(Launch(None, pointer=len(places), bytes=each[2]))
                places.append(self._place(each[1], pieces))
                continue
            compiled, grid, threads, shared, parameters, linked = each
            entries = (ctypes.c_void_p * len(parameters))()
            for n, (kind, value) in enumerate(parameters):
                if kind == "pointer":
                    entries[n] = ctypes.addressof(pointers) + 8 * len(places)
                    places.append(self._place(value, pieces))
                elif kind == "map":
                    room = ctypes.create_string_buffer(MAP_BYTES + 64)
                    entries[n] = at = -(-ctypes.addressof(room) // 64) * 64
                    encode(at, value[0], *value[1])
                    maps.append(Map(self._place(value[0], pieces), value[0], at))
                    kept.append(room)
                else:
                    number = _number(kind, value)
                    entries[n] = ctypes.addressof(number)
                    kept.append(number)
            kept.append(compiled)
            launches.append(Launch(compiled.function, grid, threads, shared, entries, linked=linked))
        room_bytes = sum(_rounded(high - low) for low, high in pieces)
        return Tape(launches, places, pointers, maps, room_bytes, len(self.starts), kept, cuda_driver())

    def _place(self, at: int, pieces: list[tuple[int, int]]) -> Place:
        """Return the position of an address: at the beginning of a tensor, inside of one, or in memory of the call."""
        if not at:
            raise _Unfit("a pointer to nothing")
        room, constant = len(self.starts), len(self.starts) + 1
        if at in self.starts:
            return Place(self.starts.index(at), 0)
        if at in self.constants:
            return Place(constant, at)
        found = [Place(n, at - low) for n, (low, high) in enumerate(self.spans) if low <= at < high]
        before = 0
        for low, high in pieces:
            if low <= at < high:
                found.append(Place(room, before + at - low))
            before += _rounded(high - low)
        if len(found) != 1:
            raise _Unfit("an address lies in several tensors")
        return found[0]


class _Watch(TorchDispatchMode):
    """Observes the operations of a recorded call other than launches."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if recording.get() is not self.recorder:  # inside compile_only, which launches nothing
            return result
        name = func.overloadpacket.__name__
        if name in _ALLOCATES or name in _ZEROS:
            self.recorder.allocate(result)
        if name in _ZEROS:
            self.recorder.zero(result)
        elif name in _VIEWS:
            self.recorder.look(args[0], result)
        elif name not in _ALLOCATES:
            self.recorder.unfit = f"it calls {name}"
        return result


def _span(x: Tensor) -> tuple[int, int]:
    """Return the first address of x and the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _joined(rooms: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges of addresses with overlapping ones merged; memory that was freed and reused overlaps."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(set(rooms)):
        if found and low < found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def _rounded(size: int) -> int:
    """Return the bytes that a piece of the call's memory takes."""
    return -(-size // 512) * 512


def _size(kind: str) -> int:
    if kind in ("pointer", "map"):
        return 8 if kind == "pointer" else MAP_BYTES
    return ctypes.sizeof(_FLOATS[kind]) if kind in _FLOATS else _BYTES[kind]


def _number(kind: str, value: Any) -> Any:
    if kind in _FLOATS:
        return _FLOATS[kind](float(value))
    return ctypes.c_uint64(int(value) % 2**64)  # its first bytes are the number

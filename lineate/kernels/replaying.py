"""Replays the launches of a recorded call with other addresses, through replay.c."""

import ctypes
from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lineate.kernels.driver import check, enter_context, launch_functions, replay_function


class Place(NamedTuple):
    """The position of an address.

    Args:
        base: The number of the tensor; the number after all of them for memory that the call allocates, and one more
            for an address that does not change.
        offset: Bytes after its beginning; or the address.
    """

    base: int
    offset: int


class Map(NamedTuple):
    """A descriptor of TMA that is a parameter.

    Args:
        place: The position of its tensor.
        address: That tensor's address in the recorded call.
        at: The address of the descriptor itself.
    """

    place: Place
    address: int
    at: int


class Launch(NamedTuple):
    """A launch; or, if function is None, bytes that are set to 0.

    Args:
        function: The kernel's handle.
        grid: Its programs.
        threads: Those of a program.
        shared: The bytes of shared memory of a program.
        parameters: Pointers to the values of its parameters.
        pointer: The number of the pointer that the bytes begin at.
        bytes: The number of bytes that are set to 0.
        linked: Whether it may begin before the previous launch has ended, because the kernel itself waits for that.
    """

    function: int | None
    grid: tuple[int, ...] = (1, 1, 1)
    threads: int = 0
    shared: int = 0
    parameters: Any = None
    pointer: int = 0
    bytes: int = 0
    linked: bool = False


# The structs of replay.c.
class _Place(ctypes.Structure):
    _fields_ = (("base", ctypes.c_int64), ("offset", ctypes.c_uint64))


class _Map(ctypes.Structure):
    _fields_ = (("place", _Place), ("address", ctypes.c_uint64), ("tensor_map", ctypes.c_void_p))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p), ("parameters", ctypes.c_void_p), ("pointer", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64), ("grid", ctypes.c_uint32 * 3), ("threads", ctypes.c_uint32),
        ("shared", ctypes.c_uint32), ("linked", ctypes.c_uint32),
    )  # fmt: skip

    @classmethod
    def of(cls, x: Launch) -> "_Launch":
        parameters = None if x.function is None else ctypes.addressof(x.parameters)
        grid = (ctypes.c_uint32 * 3)(*x.grid)
        return cls(x.function, parameters, x.pointer, x.bytes, grid, x.threads, x.shared, x.linked)


class _Tape(ctypes.Structure):
    _fields_ = (
        ("launch_kernel", ctypes.c_void_p), ("set_bytes", ctypes.c_void_p), ("replace_address", ctypes.c_void_p),
        ("pointers", ctypes.c_void_p), ("places", ctypes.c_void_p), ("maps", ctypes.c_void_p),
        ("launches", ctypes.c_void_p), ("pointer_count", ctypes.c_int64), ("map_count", ctypes.c_int64),
        ("launch_count", ctypes.c_int64),
    )  # fmt: skip


class Tape:
    """The launches of a call, ready to be replayed with other addresses.

    Args:
        launches: All of them, in their order.
        places: Those of all pointers among the parameters, in the order of `pointers`.
        pointers: An array of the pointers, to which the launches' parameters point.
        maps: The descriptors among the parameters.
        room: The bytes that the call allocates.
        tensors: The number of tensors of the call. Places number them, then the room, then constant addresses.
        kept: The objects that the parameters point to.
        driver: The driver, or a substitute in tests.
    """

    def __init__(
        self,
        launches: list[Launch],
        places: list[Place],
        pointers: Any,
        maps: list[Map],
        room: int,
        tensors: int,
        kept: list[Any],
        driver: Any,
    ) -> None:
        self.launches, self.bytes = launches, room
        own_places = (_Place * len(places))(*(_Place(*x) for x in places))
        own_maps = (_Map * len(maps))(*(_Map(_Place(*x.place), x.address, x.at) for x in maps))
        own_launches = (_Launch * len(launches))(*map(_Launch.of, launches))
        arrays = pointers, own_places, own_maps, own_launches
        counts = len(places), len(maps), len(launches)
        self.struct = _Tape(*launch_functions(driver), *map(ctypes.addressof, arrays), *counts)
        self.bases = (ctypes.c_uint64 * (tensors + 2))()
        self.at = ctypes.addressof(self.struct), ctypes.addressof(self.bases)
        self.kept = kept, arrays
        self.lock = Lock()  # protects the memory that C writes; a launch copies the parameters

    def replay(self, tensors: Sequence[Tensor | None], device: torch.device) -> bool:
        """Make the launches on the current stream; tensors as when it was recorded.

        Return False, with nothing launched, if the memory of the call cannot be allocated in one piece.
        """
        enter_context(device)
        room = None
        if self.bytes:
            try:
                room = torch.empty(self.bytes, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:
                return False
        bases: list[Any] = [0 if x is None else x.data_ptr() for x in (*tensors, room, None)]
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        with self.lock:
            self.bases[:] = bases
            code = replay_function()(*self.at, stream)
        check(code)
        return True

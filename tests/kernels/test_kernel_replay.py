"""replay.c: the launches that it makes, with functions of the test in place of the driver's."""

import ctypes
import importlib
from types import SimpleNamespace

import pytest
import torch

from lineate.native.build import why_not

pytest.importorskip("triton")
if why_not() is not None:
    pytest.skip(f"there is no C compiler: {why_not()}", allow_module_level=True)
replaying = importlib.import_module("lineate.kernels.replaying")

P, U, I, Q = ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_uint64
STREAM = 77


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", I), ("unused", I), ("value", I * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", U * 3), ("block", U * 3), ("shared", U), ("stream", P), ("attributes", ctypes.POINTER(Attribute)),
        ("count", U),
    )  # fmt: skip


class Driver:
    """Notes what would be launched. fails: the error of every launch."""

    def __init__(self) -> None:
        self.made: list[tuple] = []
        self.replaced: list[tuple[int, int]] = []
        self.fails = 0
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(I, ctypes.POINTER(Config), P, P, P)(self.launch)
        self.cuMemsetD8Async = ctypes.CFUNCTYPE(I, Q, ctypes.c_ubyte, ctypes.c_size_t, P)(self.clear)
        self.cuTensorMapReplaceAddress = ctypes.CFUNCTYPE(I, P, P)(self.replace)

    def launch(self, config, function, parameters, extra):
        entries = ctypes.cast(parameters, ctypes.POINTER(P))
        values = [ctypes.cast(entries[n], ctypes.POINTER(Q))[0] for n in range(2)]
        how = config.contents
        attributes = [(x.id, x.value[0]) for x in how.attributes[: how.count]]
        sizes = tuple(how.grid), tuple(how.block), how.shared
        self.made.append(("kernel", function, *sizes, how.stream, values, attributes, extra))
        return self.fails

    def clear(self, address, value, count, stream):
        self.made.append(("zeros", address, value, count, stream))
        return self.fails

    def replace(self, tensor_map, address):
        self.replaced.append((tensor_map, address))
        return 0


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(replaying, "enter_context", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    return Driver()


def make(driver, room: int = 0):
    """Return a tape: zeros in memory of the call (or in the second tensor), then a kernel, whose second is fixed."""
    pointers, number = (Q * 2)(), Q(5)
    entries = (P * 2)(ctypes.addressof(pointers) + 8, ctypes.addressof(number))
    places = [replaying.Place(2, 512) if room else replaying.Place(1, 8), replaying.Place(0, 16)]
    maps = [replaying.Map(replaying.Place(1, 4), 1234, 4096), replaying.Map(replaying.Place(3, 999), 999, 8192)]
    launches = [
        replaying.Launch(None, pointer=0, bytes=24),
        replaying.Launch(11, (3, 2, 1), 128, 1000, entries),
        replaying.Launch(12, (1, 1, 1), 32, 0, entries, linked=True),
    ]
    return replaying.Tape(launches, places, pointers, maps, room, 2, [number], driver)


def test_every_address_is_that_of_the_call(driver):
    """Descriptors are changed only where their tensor has moved."""
    tape, device = make(driver), torch.device("cpu")
    for n in range(3):
        x, y = torch.zeros(64), torch.zeros(64)
        for _ in range(2):
            driver.made.clear()
            driver.replaced.clear()
            assert tape.replay([x, y], device)
            at = [each.data_ptr() for each in (x, y)]
            assert driver.made == [
                ("zeros", at[1] + 8, 0, 24, STREAM),
                ("kernel", 11, (3, 2, 1), (128, 1, 1), 1000, STREAM, [at[0] + 16, 5], [], None),
                ("kernel", 12, (1, 1, 1), (32, 1, 1), 0, STREAM, [at[0] + 16, 5], [(6, 1)], None),
            ]
        assert driver.replaced == []
        assert tape.replay([x, x], device) and driver.replaced == [(4096, x.data_ptr() + 4)], n


def test_memory_of_the_call(driver, monkeypatch):
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: made.append(empty(*args, **options)) or made[-1])
    tape = make(driver, room=1024)
    assert tape.replay([torch.zeros(64), None], torch.device("cpu"))
    (room,) = made
    assert room.nbytes == 1024 and driver.made[0] == ("zeros", room.data_ptr() + 512, 0, 24, STREAM)


def test_no_memory_launches_nothing(driver, monkeypatch):
    def refuse(*args, **options):
        raise torch.OutOfMemoryError

    tape = make(driver, room=1024)
    monkeypatch.setattr(torch, "empty", refuse)
    assert not tape.replay([torch.zeros(64), None], torch.device("cpu")) and not driver.made


def test_an_error_of_the_driver_is_named(driver, monkeypatch):
    """After the first refused launch, no other is made."""

    def name(code, text):
        text._obj.value = b"CUDA_ERROR_OF_THE_TEST"

    monkeypatch.setattr(
        importlib.import_module("lineate.kernels.driver"), "cuda_driver", lambda: SimpleNamespace(cuGetErrorName=name)
    )
    tape = make(driver)
    driver.fails = 700
    with pytest.raises(RuntimeError, match="the driver refused a launch: CUDA_ERROR_OF_THE_TEST"):
        tape.replay([torch.zeros(64), torch.zeros(64)], torch.device("cpu"))
    assert len(driver.made) == 1

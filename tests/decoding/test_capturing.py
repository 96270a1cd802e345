"""captured: other work goes on during a capture, and a capture that CUDA refuses leaves torch unchanged."""

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import pytest
import torch
from torch import Tensor

from lineate.decoding import Decoder, capturing
from lineate.decoding.in_place import capture
from lineate.models import HybridLM
from lineate.serving.engine.pool import Pool
from tests.support.serving_models import VOCAB, model, prompt

CUDA = torch.device("cuda")
on_gpu = pytest.mark.gpu


class Refused(RuntimeError):
    """The exception of the fake."""


class FakeCuda:
    """The parts of torch.cuda that a capture uses, and a graph and a generator; notes in which order they are called.

    refuses: the calls that raise.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: tuple[str, ...]) -> None:
        self.calls: list[str] = []
        self.begins_with = "copy of default"
        self.refuses, self.state, self.stream = refuses, "default", "current"
        parts = {
            "device": lambda device: nullcontext(), "current_device": lambda: 3, "synchronize": lambda: None,
            "empty_cache": lambda: None, "CUDAGraph": lambda: self, "graph_pool_handle": lambda: "pool",
            "stream": self.on, "default_generators": {3: self},
        }  # fmt: skip
        for name, part in parts.items():
            monkeypatch.setattr(torch.cuda, name, part, raising=False)
        for name in ("endAllocateToPool", "releasePool"):
            monkeypatch.setattr(torch._C, f"_cuda_{name}", partial(self.call, name), raising=False)
        monkeypatch.setattr(capturing, "FAILED", [])
        monkeypatch.setattr(capturing, "capture_stream", lambda index: f"stream {index}")

    def call(self, name: str, *given: object) -> None:
        self.calls.append(name)
        assert given in ((), (3, "pool"))
        assert self.state == (self.begins_with if name == "begin" else "default")
        assert self.stream == "stream 3"
        if name in self.refuses:
            raise Refused(name)

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def graphsafe_get_state(self) -> str:
        return self.state

    def clone_state(self) -> str:
        return f"copy of {self.state}"

    def graphsafe_set_state(self, state: str) -> None:
        self.state = state

    def capture_begin(self, pool: str, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        assert not torch.is_inference_mode_enabled()
        self.call("begin")

    def capture_end(self) -> None:
        self.call("end")


@pytest.mark.parametrize(
    ("refuses", "calls"),
    [
        ("", "begin work end"),
        ("begin", "begin endAllocateToPool releasePool"),
        ("end", "begin work end endAllocateToPool releasePool"),
        ("work", "begin work end"),
        ("work end", "begin work end endAllocateToPool releasePool"),
        ("end endAllocateToPool", "begin work end endAllocateToPool"),
    ],
)
def test_the_parts_of_a_capture(monkeypatch, refuses, calls):
    """The generator has a copy of its state while a capture begins, and then only; the first error is raised.

    What torch's allocator has begun for a capture that fails is ended, and the graph, to which it has pointers, kept.
    """
    fake = FakeCuda(monkeypatch, tuple(refuses.split()))
    raised = pytest.raises(Refused, match=f"^{refuses.split()[0]}$") if refuses else nullcontext()
    with raised, torch.inference_mode(), capturing.captured(CUDA) as graph:
        assert graph is fake and torch.is_inference_mode_enabled()
        fake.call("work")
    assert fake.calls == calls.split()
    assert (fake.state, fake.stream) == ("default", "current")
    assert [fake] * ("endAllocateToPool" in calls) == capturing.FAILED


@pytest.mark.parametrize("refuses", ["", "begin", "work", "end"])
def test_a_capture_that_draws(monkeypatch, refuses):
    """The default generator is in the capture; if that fails, it goes on with a copy that is in none."""
    fake = FakeCuda(monkeypatch, (refuses,))
    fake.begins_with = "default"
    raised = pytest.raises(Refused, match=f"^{refuses}$") if refuses else nullcontext()
    with raised, capturing.captured(CUDA, draws=True):
        fake.call("work")
    assert fake.calls[0] == "begin"
    assert (fake.state, fake.stream) == ("copy of default" if refuses else "default", "current")


def test_one_capture_at_a_time(monkeypatch):
    """The captures of two threads follow each other."""
    fake = FakeCuda(monkeypatch, ())
    inside, waiting = threading.Event(), threading.Event()

    def second() -> None:
        inside.wait(10)
        waiting.set()
        with capturing.captured(CUDA):
            fake.call("second")

    thread = threading.Thread(target=second)
    thread.start()
    with capturing.captured(CUDA):
        inside.set()
        assert waiting.wait(10)
        thread.join(0.05)  # time enough to go wrong in
        fake.call("first")
    thread.join(10)
    assert fake.calls == ["begin", "first", "end", "begin", "second", "end"]


# On a GPU


def refused() -> None:
    """Begin a capture that CUDA refuses: in it the host reads a number from the device."""
    x = torch.ones(1, device=CUDA)

    def step() -> tuple[Tensor, ...]:
        y = x * 2
        if torch.cuda.is_current_stream_capturing():
            y.item()
        return (y,)

    with pytest.raises(RuntimeError, match="captur"):
        capture(step, [], CUDA)


def counter() -> tuple[Tensor, Callable[[], object]]:
    """Return a number on the device, and a graph that adds 1 to it."""
    x = torch.zeros(1, device=CUDA)
    graph = capture(lambda: (x.add_(1),), [x], CUDA)
    return x, graph.graph.replay


@on_gpu
def test_random_numbers_after_a_refused_capture():
    """The generator goes on as if there had been no capture."""
    torch.cuda.manual_seed(5)
    expected = [torch.randn(100, device=CUDA) for _ in range(3)]
    torch.cuda.manual_seed(5)
    found = [torch.randn(100, device=CUDA)]
    refused()
    found.append(torch.randn(100, device=CUDA))
    counter()
    found.append(torch.randn(100, device=CUDA))
    assert all(map(torch.equal, found, expected))
    assert torch.nn.functional.dropout(torch.ones(1000, device=CUDA)).sum() > 0


@on_gpu
def test_graphs_after_a_refused_capture():
    """An earlier graph is replayed, and a later one is captured."""
    x, add = counter()
    refused()
    add()
    assert x.item() == 1
    y, add_later = counter()
    add_later()
    add()
    assert (x.item(), y.item()) == (2, 1)


@on_gpu
def test_a_graph_captured_in_inference_mode():
    """It is replayed in that mode and outside of it."""
    x = torch.zeros(1, device=CUDA)
    with torch.inference_mode():
        graph = capture(lambda: (x.add_(1),), [x], CUDA)
        graph.replay()
    graph.replay()
    assert x.item() == 2


@on_gpu
def test_the_stream_after_a_refused_capture():
    before = torch.cuda.current_stream()
    refused()
    assert torch.cuda.current_stream() == before


@on_gpu
def test_memory_after_a_refused_capture():
    """Cached memory is still freed before an allocation fails, and the capture's own is given back."""
    refused()
    gc.collect()
    torch.cuda.empty_cache()
    reserved, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((reserved + 2**29) / total)
        first = torch.empty(3 * 2**27, dtype=torch.uint8, device=CUDA)
        del first  # it is cached; what follows fits only without it
        torch.empty(7 * 2**26, dtype=torch.uint8, device=CUDA)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    for _ in range(3):
        refused()
    gc.collect()  # errors keep what the captures have allocated
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved


@on_gpu
def test_other_threads_during_a_capture():
    """They draw random numbers, allocate and replay a graph; none of it is recorded."""
    x, add = counter()
    y = torch.zeros(1, device=CUDA)
    torch.cuda.manual_seed(5)
    expected = torch.randn(4, device=CUDA)
    torch.cuda.manual_seed(5)
    found: list[object] = []
    begun, done = threading.Event(), threading.Event()

    def other() -> None:
        try:
            assert begun.wait(60)
            with torch.cuda.stream(torch.cuda.Stream()):
                found.append(torch.randn(4, device=CUDA).tolist())
                found.append(torch.ones(2**26, device=CUDA).sum().item())
                add()
                torch.cuda.current_stream().synchronize()
        except Exception as error:  # the assertions below show it
            found.append(error)
        finally:
            done.set()

    def step() -> tuple[Tensor, ...]:
        y.add_(1)
        if torch.cuda.is_current_stream_capturing():
            begun.set()
            assert done.wait(60)
        return (y.add_(1),)

    thread = threading.Thread(target=other)
    thread.start()
    graph = capture(step, [y], CUDA)
    thread.join()
    assert found == [expected.tolist(), 2**26]
    assert (x.item(), y.item()) == (1, 0)
    graph.replay()
    assert (x.item(), y.item()) == (1, 2)


def placed(pattern: str) -> HybridLM:
    return copy.deepcopy(model(pattern)).cuda()


@on_gpu
@torch.no_grad()
def test_a_pool_whose_steps_cannot_be_recorded():
    """Memories that learn are read without graphs where they look at their positions; other models go on."""
    lm, learner = placed("GA"), placed("TPNC")
    ids = torch.tensor([prompt(7)], device=CUDA)
    state = lm(ids, last_only=True).state
    decoder, plain = (Decoder(lm, state, room=64, graph=graph) for graph in (True, False))
    pool = Pool(learner, 2, 128)
    pool.join(learner(ids, last_only=True).state)
    pool.step([1])
    pool.trail([[2, 3, 4]])
    pool.accept([1])
    for token in torch.randint(VOCAB, (5, 1, 1), device=CUDA):
        torch.testing.assert_close(decoder(token), plain(token), rtol=1e-4, atol=1e-4)


@on_gpu
def test_random_numbers_in_a_graph():
    """Those of the default generator are refused, or recorded so that each replay draws others."""
    draw = None
    with suppress(RuntimeError):
        draw = capture(lambda: (torch.randn(100, device=CUDA),), [], CUDA)
    if draw is not None:
        assert not torch.equal(*(draw.replay()[0] for _ in range(2)))
    assert torch.randn(4, device=CUDA).isfinite().all()

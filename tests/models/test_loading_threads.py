"""Loading by several threads: the same bits as by one, the first error, interrupts, bounded memory, progress."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bench.models.loading import Sizes, write_gguf
from lineate.models import HybridLM, preset
from lineate.models.files import filling, readers, rounding, threads
from lineate.models.files.checkpoint import Checkpoint, save
from lineate.models.files.loading import LoadingPlan, Piece, load
from lineate.models.files.safetensors import CheckpointError
from lineate.parallel.tensor.ranks import Ranks
from lineate.quantised import FORMATS, QuantisedWeight, quantize
from tests.support.quantised import ENCODINGS, stored_name
from tests.support.quantised_weights import EXPERTS, realistic, sizes


@pytest.fixture
def several(monkeypatch):
    """Load by four threads in parts of some hundred bytes."""
    monkeypatch.setattr(filling, "PART_BYTES", 300)
    monkeypatch.setattr(rounding, "PART_BYTES", 300)
    monkeypatch.setattr(rounding, "AT_ONCE", 1024)
    monkeypatch.setattr(rounding, "AT_ONCE_GPU", 2048)
    monkeypatch.setattr(readers, "CHANGED_BYTES", 512)
    monkeypatch.setattr(threads, "THREAD_BYTES", 1)
    monkeypatch.setattr(threads, "MOST_THREADS", 4)


@pytest.fixture(autouse=True)
def _ends_alone():
    """No thread survives a load, and the number of threads that compute stays."""
    computing = torch.get_num_threads()
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lineate-loading")]
    assert torch.get_num_threads() == computing
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == computing


def bits(x: Tensor) -> list[Tensor]:
    parts = [x.codes, x.scales] if isinstance(x, QuantisedWeight) else [x]
    return [part.detach().cpu().contiguous().view(-1).view(torch.uint8) for part in parts if part is not None]


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(
        torch.equal(a, b)
        for name, x in one.state_dict().items()
        for a, b in zip(bits(x), bits(theirs[name]), strict=True)
    )


class Some(nn.Module):
    """Matrices, all of which are filled alike."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        for i in range(count):
            self.register_parameter(f"x{i}", nn.Parameter(torch.empty(40, 64, device="meta")))


def some(folder: Path, take: dict[int, Callable[[Tensor], Tensor]] | None = None, count: int = 6) -> LoadingPlan:
    """Write the tensors of `Some`; take: how some of them are changed."""
    save(folder, {f"x{i}": torch.randn(40, 64) for i in range(count)}, {})

    def of_data(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda block: block if block.is_meta else change(block)  # the plan is checked on the meta device

    given = {i: of_data(change) for i, change in (take or {}).items()}
    return LoadingPlan({f"x{i}": [Piece(f"x{i}", (40, 64), take=given.get(i))] for i in range(count)})


def untouched(model: nn.Module) -> bool:
    return all(x.is_meta for x in model.state_dict().values())


# The same bits


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("folders")
    model = realistic(sizes("GKMA", experts=EXPERTS, dense_layers=(0,), tie_embeddings=False))
    model.save_pretrained(place / "plain")
    model.to(torch.bfloat16).save_pretrained(place / "half")
    HybridLM.from_pretrained(place / "plain", weights="int4").save_pretrained(place / "int4")
    return place


CASES = {
    "plain": ("plain", {}),
    "other dtype": ("plain", {"dtype": "bfloat16"}),
    "rounded": ("half", {"weights": "int8"}),
    "rounded to half": ("plain", {"weights": "float16"}),
    "tiles": ("int4", {}),
    "tiles in another format": ("int4", {"weights": "int8"}),
}


@pytest.mark.parametrize("case", CASES)
def test_bits_equal_those_of_one_thread(case, folders, request):
    name, options = CASES[case]
    alone = HybridLM.from_pretrained(folders / name, progress=False, **options)
    request.getfixturevalue("several")
    assert same(HybridLM.from_pretrained(folders / name, progress=False, **options), alone)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pinned", [512, 2**24])
def test_bits_on_a_gpu_equal_those_of_one_thread(case, pinned, folders, request, monkeypatch):
    name, options = CASES[case]
    options = {"dtype": "float32", **options} if case == "rounded" else options
    alone = HybridLM.from_pretrained(folders / name, progress=False, device="cuda", **options)
    request.getfixturevalue("several")
    monkeypatch.setattr(readers, "PINNED_BYTES", pinned)
    found = HybridLM.from_pretrained(folders / name, progress=False, device="cuda", **options)
    assert all(x.is_cuda for x in found.parameters()) and same(found, alone)


@pytest.mark.parametrize("options", [{}, {"weights": "int4"}, {"weights": "bfloat16"}])
def test_a_gguf_file(options, tmp_path, request):
    write_gguf(Sizes(hidden=128, layers=4), tmp_path / "x.gguf")
    alone = HybridLM.from_pretrained(tmp_path / "x.gguf", progress=False, **options)
    request.getfixturevalue("several")
    assert same(HybridLM.from_pretrained(tmp_path / "x.gguf", progress=False, **options), alone)


@pytest.mark.parametrize("form", [None, "int8"])
@pytest.mark.parametrize("rank", [0, 1])
def test_shares_of_ranks(rank, form, folders, request):
    class Place(Ranks):
        def __init__(self) -> None:
            self.rank, self.size = rank, 2

    options = {"progress": False, "weights": form, "ranks": Place()}
    alone = HybridLM.from_pretrained(folders / "plain", **options)
    request.getfixturevalue("several")
    assert same(HybridLM.from_pretrained(folders / "plain", **options), alone)


@pytest.mark.parametrize("key", ENCODINGS)
@pytest.mark.parametrize("form", [None, "int8"])
def test_encoded_weights(key, form, several, tmp_path, monkeypatch):
    monkeypatch.setattr("lineate.models.files.encodings.encoded.BLOCK_ELEMENTS", 1024)
    encoding, tensors = ENCODINGS[key], {}
    for i in range(6):
        parts, _ = encoding.write(torch.randn(40, 64))
        tensors |= {stored_name(f"x{i}.weight", end): part for end, part in parts.items()}
    save(tmp_path, tensors, {"quantization_config": encoding.config})
    model, checkpoint = Some(), Checkpoint.open(tmp_path)
    plan = LoadingPlan({f"x{i}": [Piece(f"x{i}.weight", (40, 64))] for i in range(6)})
    formats = {} if form is None else {f"x{i}": FORMATS[form] for i in range(6)}
    load(model, plan, checkpoint, torch.float32, quantised=formats)
    for i in range(6):
        value, found = checkpoint.read(f"x{i}.weight"), model.get_parameter(f"x{i}").detach()
        if form is None:
            assert torch.equal(found, value)
        elif checkpoint.kept_as(f"x{i}.weight") != form:
            assert isinstance(found, QuantisedWeight)
            assert torch.equal(found.decoded(), quantize(value, form).decoded())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pieces_of_every_layout(device, several, tmp_path):
    x, y = torch.randn(40, 64), torch.randn(30, 40)
    save(tmp_path, {"x": x, "y": y, "n": torch.tensor(3), "none": torch.zeros(0, 4)}, {})
    model = nn.Module()
    model.register_parameter("joined", nn.Parameter(torch.empty(40, 94, device="meta")))
    model.register_parameter("rows", nn.Parameter(torch.empty(12, 64, device="meta")))
    model.register_parameter("none", nn.Parameter(torch.empty(0, 4, device="meta")))
    model.register_buffer("n", torch.zeros((), dtype=torch.int64, device="meta"))
    pieces = {
        "joined": [
            Piece("x", (40, 64), (slice(None), slice(0, 64))),
            Piece("y", (30, 40), (slice(None), slice(64, 94)), take=torch.t),
        ],
        "rows": [Piece("x", (40, 64), rows=(20, 32))],
        "none": [Piece("none", (0, 4))],
        "n": [Piece("n", ())],
    }
    with torch.inference_mode():
        load(model, LoadingPlan(pieces), Checkpoint.open(tmp_path), torch.float64, device)
    assert torch.equal(model.joined.cpu(), torch.cat((x, y.t()), 1).double())
    assert torch.equal(model.rows.cpu(), x[20:32].double()) and model.n == 3


class Stream:
    """Stands for a stream of a GPU, whose copies end when they are waited for."""

    def __init__(self, device: object = None) -> None:
        self.copies: list[Callable[[], object]] = []

    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        while self.copies:
            self.copies.pop(0)()


class Event:
    """Stands for an event of the stream of `test_buffers_are_used_again_once_they_are_copied`."""

    stream: Stream

    def __init__(self, blocking: bool) -> None:
        self.copies: list[Callable[[], object]] = []

    def record(self) -> None:
        self.copies = self.stream.copies[:]

    def synchronize(self) -> None:
        while set(self.copies) & set(self.stream.copies):
            self.stream.copies.pop(0)()


def test_buffers_are_used_again_once_they_are_copied(tmp_path, monkeypatch):
    """Copies are delayed until an event is waited for, so a buffer that is used too early has other numbers."""
    x = torch.randn(1000)
    save(tmp_path, {"x": x}, {})
    made = torch.zeros(1000, dtype=torch.float64)
    stream = Event.stream = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(readers, "pinned_memory", lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(readers, "PINNED_BYTES", 128)

    class Delayed(readers.StagedReader):
        def send(self, read: Tensor, part: Tensor) -> None:
            stream.copies.append(lambda: part.copy_(read))

    checkpoint, waiting = Checkpoint.open(tmp_path), []
    with Delayed(lambda: waiting.append(len(stream.copies)), torch.device("cpu"), Stream()) as reader:
        checkpoint.read_by(reader).read_into("x", made)
    assert torch.equal(made, x.double()) and not stream.copies
    assert max(waiting) == readers.PINNED - 1  # a buffer is read into while the other is copied


# Errors


class WrongError(Exception):
    """An error of a test."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_first_error_in_the_order_of_the_files_is_raised(device, several, tmp_path):
    later = threading.Event()

    def first(block: Tensor) -> Tensor:
        assert later.wait(10)
        raise WrongError("first")

    def second(block: Tensor) -> Tensor:
        later.set()
        raise WrongError("second")

    ran: list[int] = []
    model = Some(60)
    takes: dict[int, Callable[[Tensor], Tensor]] = {i: lambda block, i=i: ran.append(i) or block for i in range(60)}
    plan = some(tmp_path, {**takes, 0: first, 1: second}, 60)
    with pytest.raises(WrongError, match="first"):
        load(model, plan, Checkpoint.open(tmp_path), torch.float32, device)
    assert untouched(model)


def test_other_threads_stop_at_an_error(several, tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "MOST_THREADS", 2)
    monkeypatch.setattr(threads, "LEAST_THREADS", 2)
    failed, ran = threading.Event(), []

    def wrong(block: Tensor) -> Tensor:
        failed.set()
        raise WrongError

    def other(block: Tensor) -> Tensor:
        ran.append(1)
        assert failed.wait(10)
        time.sleep(0.02)
        return block

    plan = some(tmp_path, dict.fromkeys(range(1, 50), other) | {0: wrong}, 50)
    with pytest.raises(WrongError):
        load(Some(50), plan, Checkpoint.open(tmp_path), torch.float32)
    assert len(ran) < 40


def test_a_file_that_is_cut_while_it_is_read(several, tmp_path):
    plan = some(tmp_path)
    checkpoint, file = Checkpoint.open(tmp_path), tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: -3 * 64 * 40 * 4 - 100])
    model = Some()
    with pytest.raises(CheckpointError, match=r"x2 needs .* cut while being read"):
        load(model, plan, checkpoint, torch.float32)
    assert untouched(model)


def test_numbers_that_cannot_be_rounded_name_their_tensor(folders, several, tmp_path):
    checkpoint = Checkpoint.open(folders / "plain")
    tensors = {name: checkpoint.read(name) for name in checkpoint.entries}
    tensors["head.weight"][3, 5] = torch.nan
    save(tmp_path, tensors, checkpoint.config)
    for form in ("int8", "float16"):
        with pytest.raises(CheckpointError, match=r"head\.weight must have finite numbers"):
            HybridLM.from_pretrained(tmp_path, progress=False, weights=form)


@pytest.mark.parametrize("begins", [True, False])
def test_an_interrupt_while_a_thread_starts(begins, several, tmp_path, monkeypatch):
    """The second thread begins after its start was interrupted, or never."""
    begin, begun = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if not thread.name.startswith("lineate-loading"):
            return begin(thread)
        begun.append(thread)
        if len(begun) < 2:
            return begin(thread)
        if begins:
            later = threading.Timer(0.05, begin, [thread])
            begin(later)
        raise KeyboardInterrupt

    model, plan = Some(100), some(tmp_path, {}, 100)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        patch.setattr(threads, "INTERRUPTED_SECONDS", 10.0 if begins else 0.05)
        with pytest.raises(KeyboardInterrupt):
            load(model, plan, Checkpoint.open(tmp_path), torch.float32, "cpu")
    assert len(begun) == 2 and (begun[1].ident is not None) == begins
    assert untouched(model)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_interrupt_ends_all_threads(device, several, tmp_path):
    interrupted = threading.Event()

    def interrupt(block: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGINT)  # as a terminal sends it, to the process
        assert interrupted.wait(10)  # the other threads go on until the caller stops them
        return block

    def slow(block: Tensor) -> Tensor:
        time.sleep(0.001)
        return block

    class Stopped(threads.UnitQueue):
        def stop(self) -> None:
            super().stop()
            interrupted.set()

    model, plan = Some(100), some(tmp_path, dict.fromkeys(range(1, 100), slow) | {0: interrupt}, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "UnitQueue", Stopped)
        with pytest.raises(KeyboardInterrupt):
            load(model, plan, Checkpoint.open(tmp_path), torch.float32, device)
    assert untouched(model)


# Memory and progress


def test_what_units_hold_is_bounded(several, tmp_path, monkeypatch):
    held, most, lock = 0, 0, threading.Lock()

    def take(block: Tensor) -> Tensor:
        nonlocal held, most
        with lock:
            held += 1
            most = max(most, held)
        time.sleep(0.002)
        with lock:
            held -= 1
        return block

    monkeypatch.setattr(threads, "HELD_BYTES", 4 * 40 * 64 * 4)  # a block and its result, twice
    plan = some(tmp_path, dict.fromkeys(range(20), take), 20)
    load(Some(20), plan, Checkpoint.open(tmp_path), torch.float32)
    assert most == 2
    monkeypatch.setattr(threads, "HELD_BYTES", 1)
    most = 0
    load(Some(20), plan, Checkpoint.open(tmp_path), torch.float32)
    assert most == 1


@pytest.mark.parametrize("name", ["plain", "half", "int4"])
@pytest.mark.parametrize("form", [None, "int8"])
def test_progress_ends_at_the_bytes_of_the_files(name, form, folders, several, monkeypatch):
    pytest.importorskip("rich")
    from rich.progress import Progress

    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    totals, steps = [], []
    monkeypatch.setattr(Progress, "add_task", lambda self, name, total: totals.append(total) or 0)
    monkeypatch.setattr(Progress, "advance", lambda self, task, nbytes: steps.append(nbytes))
    HybridLM.from_pretrained(folders / name, weights=form)
    assert sum(steps) == totals[0] == Checkpoint.open(folders / name).nbytes
    assert all(step >= 0 for step in steps) and len(steps) > 100


def test_threads_are_as_many_as_the_work(tmp_path, monkeypatch):
    plan, checkpoint = some(tmp_path), Checkpoint.open(tmp_path)
    units = [u for i in range(6) for u in filling.units_of(checkpoint, plan.pieces[f"x{i}"], torch.empty(40, 64))]
    assert threads.thread_count(units, checkpoint, torch.device("cpu")) == 1
    monkeypatch.setattr(threads, "THREAD_BYTES", 64 * 40 * 4 * 2)
    monkeypatch.setattr(threads, "MOST_THREADS", 8)
    for device, count in (("cpu", 3), ("cuda", 3), ("meta", 1)):
        assert threads.thread_count(units, checkpoint, torch.device(device)) == count
    monkeypatch.setattr(threads, "MOST_THREADS", 2)
    assert threads.thread_count(units, checkpoint, torch.device("cpu")) == 2


def test_our_own_preset_in_shards(several, tmp_path):
    torch.manual_seed(0)
    model = HybridLM(preset("tiny"))
    checkpoint = {name: x.detach() for name, x in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    save(tmp_path, checkpoint, config, max_shard_bytes=10**6)
    assert len(list(tmp_path.glob("*.safetensors"))) > readers.OPEN_FILES
    assert same(HybridLM.from_pretrained(tmp_path, progress=False), model)

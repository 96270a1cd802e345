"""The safetensors format, folders of it, and filling a model from them: what must work, and every way to fail."""

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lineate.models import HybridLM
from lineate.models.files.checkpoint import Checkpoint, save
from lineate.models.files.loading import LoadingPlan, MismatchError, Piece, load, stored_dtype
from lineate.models.files.safetensors import STORED_DTYPES, CheckpointError, read_header
from lineate.models.hybrid import empty_model, save_pretrained
from lineate.models.presets import preset


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    x = torch.randn(shape) * 50
    return x > 0 if dtype == torch.bool else x.abs().to(dtype) if not dtype.is_signed else x.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are equal bit for bit, whatever the dtype."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    one, other = (x.contiguous().view(-1).view(torch.uint8) if x.numel() else x for x in (a, b))
    return torch.equal(one, other)


# The format


@pytest.mark.parametrize("name", STORED_DTYPES)
def test_every_dtype_survives(tmp_path, name):
    tensors = {"x": random(STORED_DTYPES[name], 5, 7), "y": random(STORED_DTYPES[name], 3)}
    save(tmp_path, tensors, {})
    checkpoint = Checkpoint.open(tmp_path)
    for key, x in tensors.items():
        assert same(checkpoint.read(key), x)


def odd_tensors() -> dict[str, torch.Tensor]:
    return {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "transposed": torch.randn(6, 4).t(),
        "strided": torch.randn(9, 8)[::2, 1::3],
        "expanded": torch.randn(1, 3).expand(4, 3),
        "byte": torch.tensor([3], dtype=torch.uint8),  # leaves what follows unaligned
        "double": torch.randn(3, dtype=torch.float64),
        'name "with" \u00e4': torch.randn(2),
    }


@pytest.mark.parametrize("max_shard_bytes", [10**9, 64])
def test_odd_tensors_survive(tmp_path, max_shard_bytes):
    save(tmp_path, tensors := odd_tensors(), {"a": [1]}, max_shard_bytes)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.config == {"a": [1]}
    assert checkpoint.entries.keys() == tensors.keys()
    for name, x in tensors.items():
        assert checkpoint.entries[name].shape == x.shape
        assert same(checkpoint.read(name), x)


def test_the_safetensors_package_reads_ours_and_we_read_its(tmp_path):
    package = pytest.importorskip("safetensors.torch")
    tensors = odd_tensors()
    save(tmp_path, tensors, {})
    for name, x in package.load_file(tmp_path / "model.safetensors").items():
        assert same(x, tensors[name])
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    package.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint.open(tmp_path)
    for name, x in tensors.items():
        assert same(checkpoint.read(name), x)


def test_reading_into_other_dtypes_layouts_and_shapes(tmp_path, monkeypatch):
    monkeypatch.setattr("lineate.models.files.safetensors.BUFFER_BYTES", 64)  # forces many refills of the buffer
    x = torch.randn(12, 1, 10)
    save(tmp_path, {"x": x}, {})
    checkpoint = Checkpoint.open(tmp_path)
    targets = {
        "other dtype": torch.full((12, 10), torch.nan, dtype=torch.bfloat16),
        "other shape": torch.full((120,), torch.nan),
        "columns": torch.full((12, 25), torch.nan)[:, 3:13],
        "rows too long for the buffer": torch.full((2, 60, 2), torch.nan)[..., 0],
        "transposed": torch.full((10, 12), torch.nan).t(),
    }
    for target in targets.values():
        checkpoint.read_into("x", target)
        assert torch.equal(target, x.reshape(target.shape).to(target.dtype))
    part = torch.empty(3, 10)
    checkpoint.read_into("x", part, rows=(4, 7))
    assert torch.equal(part, x[4:7, 0])
    with pytest.raises(CheckpointError, match=r"x of shape \(12, 1, 10\) fills 120 elements, got .* \(3, 10\)"):
        checkpoint.read_into("x", part)
    with pytest.raises(CheckpointError, match="expected a tensor nothing"):
        checkpoint.read("nothing")


def write_raw(file: Path, header, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


def f32(first: int, last: int, *shape: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}


CORRUPT = {
    "no bytes": (b"", "", "8 bytes of header length"),
    "garbage": (b"\x93NUMPY\x01\x00 something else entirely", None, "not a safetensors file"),
    "header longer than the file": ({}, 50, "expected a header of 50 bytes, got a file of 10 bytes; it is truncated"),
    "no JSON": (b"{not json", None, "expected a header in JSON"),
    "no object": (b"[1, 2]", None, "maps names to tensors, got list"),
    "name twice": (b'{"x": 1, "x": 2}', None, "'x' stands there twice"),
    "no entry": ({"x": 3}, None, "x must have dtype, shape and data_offsets, got 3"),
    "unknown dtype": ({"x": f32(0, 4, 1, dtype="F4")}, None, "x must have a dtype of F64, .* got 'F4'"),
    "negative shape": ({"x": f32(0, 4, -1)}, None, "x must have a shape and two data_offsets in whole numbers"),
    "size": ({"x": f32(0, 12, 4)}, None, r"x of shape \(4,\) in F32 must take 16 bytes, got .* 12 bytes"),
    "overlap": ({"x": f32(0, 8, 2), "y": f32(4, 12, 2)}, None, "y must start at byte .* it overlaps x"),
    "gap": ({"x": f32(0, 4, 1), "y": f32(8, 12, 1)}, None, "y must start at byte .* it leaves a gap after x"),
    "truncated": ({"x": f32(0, 80, 20)}, None, "x needs 80 bytes from byte .*, got 12 before the end .* truncated"),
    "too long": ({"x": f32(0, 4, 1)}, None, "after x, got a file of .* corrupt"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_corrupt_files_name_the_file_and_the_bytes(tmp_path, case):
    header, length, message = CORRUPT[case]
    file = tmp_path / "model.safetensors"
    if case == "no bytes":
        file.write_bytes(b"123")
    elif case == "garbage":
        file.write_bytes(header)
    else:
        write_raw(file, header, b"" if length else bytes(12), length)
    with pytest.raises(CheckpointError, match=message) as error:
        read_header(file)
    assert str(file) in str(error.value)


def test_a_file_cut_while_it_is_read(tmp_path):
    save(tmp_path, {"x": torch.randn(100)}, {})
    checkpoint = Checkpoint.open(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"x needs 400 bytes at byte .*, got 360 before the end of the file"):
        checkpoint.read("x")


# Folders


def test_folders_that_are_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"expected a file config.json"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="expected JSON"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"expected model.safetensors or .*, got neither"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002.safetensors without an index"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "a.pt", "a.pth", "a.ckpt"])
def test_pickles_are_refused(tmp_path, name):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next"}')
    torch.save({"x": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(CheckpointError, match="never loaded: convert") as error:
        HybridLM.from_pretrained(tmp_path)
    assert name in str(error.value)


@pytest.fixture
def shards(tmp_path) -> Path:
    save(tmp_path, {f"x{i}": torch.randn(10) for i in range(3)}, {}, max_shard_bytes=40)
    return tmp_path


def test_missing_shard_is_named(shards):
    (shards / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"the 3 shards .* got no model-00002-of-00003.safetensors"):
        Checkpoint.open(shards)


def change_index(folder: Path, **places: str) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] |= places
    file.write_text(json.dumps(index))


def test_index_and_shards_must_agree(shards):
    change_index(shards, x1="model-00001-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"places x1 in model-00001-of-00003.safetensors, which does not have it"):
        Checkpoint.open(shards)
    change_index(shards, x1="../elsewhere.safetensors")
    with pytest.raises(CheckpointError, match="names of files next to it"):
        Checkpoint.open(shards)
    (shards / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(CheckpointError, match="expected a weight_map"):
        Checkpoint.open(shards)


def test_tensor_in_two_shards(shards):
    (shards / "model-00003-of-00003.safetensors").write_bytes(
        (shards / "model-00002-of-00003.safetensors").read_bytes()
    )
    with pytest.raises(CheckpointError, match="x1 must be in one shard"):
        Checkpoint.open(shards)


def test_truncated_shard_is_named(shards):
    file = shards / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors: x1 needs 40 bytes .* got 39"):
        Checkpoint.open(shards)


def test_saving_again_leaves_nothing_of_before(shards):
    save(shards, {"y": torch.zeros(3)}, {"b": 2})
    assert sorted(file.name for file in shards.iterdir()) == ["config.json", "model.safetensors"]
    save(shards, {f"x{i}": torch.randn(10) for i in range(2)}, {}, max_shard_bytes=40)
    assert Checkpoint.open(shards).entries.keys() == {"x0", "x1"}
    assert not (shards / "model.safetensors").exists()


def test_failed_save_leaves_nothing(tmp_path, monkeypatch):
    save(tmp_path / "old", {"x": torch.ones(3)}, {"a": 1})
    before = {file.name: file.read_bytes() for file in (tmp_path / "old").iterdir()}
    written = []

    def full(descriptor):
        written.append(descriptor)
        if len(written) % 2 == 0:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("lineate.models.files.safetensors.os.fsync", full)
    for folder in ("old", "new"):
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path / folder, {f"x{i}": torch.randn(10) for i in range(3)}, {}, max_shard_bytes=40)
    assert {file.name: file.read_bytes() for file in (tmp_path / "old").iterdir()} == before
    assert not (tmp_path / "new").exists()


def test_dtypes_that_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match=r"x must have a dtype of .*, got torch.complex64"):
        save(tmp_path / "new", {"x": torch.zeros(2, dtype=torch.complex64)}, {})
    assert not (tmp_path / "new").exists()


# Filling a model


class Small(nn.Module):
    """Two parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(3, 4, bias=False)
        self.A_log = nn.Parameter(torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def small() -> Small:
    with torch.device("meta"):
        return Small()


PIECES = {
    "both.weight": [
        Piece("top", (2, 3), (slice(0, 2),)),
        Piece("rest", (6, 3), (slice(2, 3),), rows=(4, 5)),
        Piece("turned", (3, 1), (slice(3, 4),), take=torch.t),
    ],
    "A_log": [Piece("log", (1, 2, 1))],
    "count": [Piece("n", ())],
}


def small_tensors() -> dict[str, torch.Tensor]:
    return {
        "top": torch.randn(2, 3),
        "rest": torch.randn(6, 3),
        "turned": torch.randn(3, 1),
        "log": torch.randn(1, 2, 1),
        "n": torch.tensor(7),
        "mtp.x": torch.zeros(9),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_become_a_model(tmp_path, dtype):
    tensors = small_tensors()
    save(tmp_path, tensors, {})
    model = small()
    load(model, LoadingPlan(PIECES, (r"^mtp\.",)), Checkpoint.open(tmp_path), dtype=dtype)
    whole = torch.cat((tensors["top"], tensors["rest"][4:5], tensors["turned"].t())).to(dtype)
    assert same(model.both.weight.data, whole)
    assert same(model.A_log.data, tensors["log"].flatten())  # it stays float32
    assert model.count == 7 and model.count.dtype == torch.int64
    assert all(p.requires_grad for p in model.parameters())


def test_everything_wrong_is_told_at_once_and_nothing_is_made(tmp_path):
    tensors = small_tensors() | {
        "other": torch.zeros(2, 2),
        "top": torch.zeros(3, 2),
        "log": torch.zeros(1, 2, 1).int(),
    }
    del tensors["turned"]
    save(tmp_path, tensors, {})
    model = small()
    with pytest.raises(MismatchError) as error:
        load(model, LoadingPlan(PIECES, (r"^mtp\.",)), Checkpoint.open(tmp_path), dtype=torch.float32)
    text = str(error.value)
    assert str(tmp_path) in text
    assert "turned: expected shape (3, 1)" in text
    assert "other: of shape (2, 2)" in text
    assert "top: expected shape (2, 3), got (3, 2)" in text
    assert "log: expected a floating dtype, got torch.int32" in text
    assert len(error.value.missing) == len(error.value.unexpected) == 1 and len(error.value.misshapen) == 2
    assert all(x.device.type == "meta" for x in model.state_dict().values())


def test_a_file_that_ends_early_leaves_the_model_as_it_was(tmp_path):
    save(tmp_path, small_tensors(), {})
    checkpoint, file = Checkpoint.open(tmp_path), tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-60])
    model = small()
    with pytest.raises(CheckpointError, match="cut while being read"):
        load(model, LoadingPlan(PIECES, (r"^mtp\.",)), checkpoint, dtype=torch.float32)
    assert all(x.device.type == "meta" for x in model.state_dict().values())


def _first(block: torch.Tensor) -> torch.Tensor:
    return block[:1]


def changed(**pieces: list[Piece]) -> LoadingPlan:
    return LoadingPlan(PIECES | {name.replace("_", "."): value for name, value in pieces.items()}, ("mtp",))


WRONG_PLANS = {
    "target of no name": LoadingPlan(PIECES | {"more": []}),
    "target left out": LoadingPlan({name: pieces for name, pieces in PIECES.items() if name != "count"}),
    "rows left out": changed(both_weight=PIECES["both.weight"][:2]),
    "rows filled twice": changed(both_weight=[*PIECES["both.weight"][:2], Piece("rest", (6, 3), (1,), (0, 1))]),
    "taken in another shape": changed(
        both_weight=[*PIECES["both.weight"][:2], Piece("turned", (3, 1), (3,), take=torch.t)]
    ),
    "taken to be broadcast": changed(
        both_weight=[*PIECES["both.weight"][:2], Piece("turned", (3, 1), (slice(3, 4),), take=_first)]
    ),
    "not transposed": changed(both_weight=[Piece("sideways", (3, 4))]),
    "too few elements": changed(both_weight=[Piece("top", (2, 3), (slice(0, 4),))]),
}


@pytest.mark.parametrize("case", WRONG_PLANS)
def test_every_element_is_filled_exactly_once(tmp_path, case):
    save(tmp_path, small_tensors(), {})
    with pytest.raises(RuntimeError):
        load(small(), WRONG_PLANS[case], Checkpoint.open(tmp_path), dtype=torch.float32)


def test_buffers_that_no_checkpoint_has(tmp_path):
    save(tmp_path, small_tensors(), {})
    model = small()
    model.register_buffer("table", torch.zeros(3), persistent=False)
    with pytest.raises(RuntimeError, match="buffer table is in no checkpoint"):
        load(model, LoadingPlan(PIECES, ("mtp",)), Checkpoint.open(tmp_path), dtype=torch.float32)


def test_stored_dtype_is_that_of_most_bytes(tmp_path):
    save(tmp_path, {"a": torch.zeros(9).half(), "b": torch.zeros(3), "c": torch.zeros(50, dtype=torch.int64)}, {})
    assert stored_dtype(Checkpoint.open(tmp_path)) == torch.float16


# Our own folders


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("own")
    HybridLM(preset("tiny")).save_pretrained(folder)
    return folder


def test_places_that_cannot_be_used(own, tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/inside"):
        with pytest.raises(ValueError, match=r"folder must be a folder or a new name, got .*, which is a file"):
            HybridLM(preset("tiny")).save_pretrained(tmp_path / place)
    assert (tmp_path / "file").read_text() == ""
    with pytest.raises(ValueError, match="device must be cpu, cuda or another of torch's, got 'gpu'"):
        HybridLM.from_pretrained(own, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"device='cuda:0' needs a GPU that torch can use, .* use device='cpu'"):
            HybridLM.from_pretrained(own, device="cuda:0")


def copied(own: Path, tmp_path: Path, tensors=None, **config) -> Path:
    checkpoint = Checkpoint.open(own)
    found = {name: checkpoint.read(name) for name in checkpoint.entries}
    save(tmp_path, found | (tensors or {}), checkpoint.config | config)
    return tmp_path


def test_unknown_config_key(own, tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json: config has unknown keys 'layrs'"):
        HybridLM.from_pretrained(copied(own, tmp_path, layrs=3))


def test_impossible_config(own, tmp_path):
    with pytest.raises(CheckpointError, match="hidden_size must be an int, got str"):
        HybridLM.from_pretrained(copied(own, tmp_path, hidden_size="128"))


def test_extra_and_misshapen_tensors_of_our_own(own, tmp_path):
    extra = {"layers.9.mixer_norm.weight": torch.zeros(128), "norm.weight": torch.zeros(64)}
    with pytest.raises(MismatchError, match=r"norm.weight: expected shape \(128,\), got \(64,\)") as error:
        HybridLM.from_pretrained(copied(own, tmp_path, extra))
    assert "layers.9.mixer_norm.weight" in str(error.value)


def test_layers_that_are_missing_are_counted(own, tmp_path):
    with pytest.raises(MismatchError, match=r"\.\.\. and \d+ more") as error:
        HybridLM.from_pretrained(copied(own, tmp_path, n_layers=40))
    assert len(error.value.missing) == 36 // 4 * len(
        [n for n in Checkpoint.open(own).entries if n.startswith("layers.")]
    )


@pytest.mark.parametrize("dtype", [torch.int8, "int8", "half", 16])
def test_dtype_must_be_floating(own, dtype):
    message = f"dtype must be one of auto, fp32, float32, bf16, .* got '{str(dtype).removeprefix('torch.')}'"
    with pytest.raises(ValueError, match=message):
        HybridLM.from_pretrained(own, dtype=dtype)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("bfloat16", torch.bfloat16), ("bf16", torch.bfloat16), ("torch.bfloat16", torch.bfloat16),
        ("float16", torch.float16), ("fp16", torch.float16), ("fp32", torch.float32), ("float32", torch.float32),
        ("float64", torch.float64), (torch.bfloat16, torch.bfloat16), ("auto", torch.float32), (None, torch.float32),
    ],
)  # fmt: skip
def test_dtype_by_name(own, given, expected):
    model = HybridLM.from_pretrained(own, dtype=given)
    assert model.dtype == expected
    assert model.layers[0].mixer.A_log.dtype == torch.float32


def test_saving_into_the_folder_it_came_from(own, tmp_path):
    folder = copied(own, tmp_path)
    model = HybridLM.from_pretrained(folder)
    with torch.no_grad():
        model.norm.weight.add_(1)
    model.save_pretrained(folder)
    assert torch.equal(HybridLM.from_pretrained(folder).norm.weight, model.norm.weight)


def test_progress_bar_on_a_terminal(own, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    HybridLM.from_pretrained(own)
    assert capsys.readouterr().out == ""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_loading_to_a_gpu(own, dtype):
    there = HybridLM.from_pretrained(own, dtype=dtype, device="cuda").state_dict()
    for name, x in HybridLM.from_pretrained(own, dtype=dtype).state_dict().items():
        assert there[name].is_cuda and same(there[name].cpu(), x)


# Memory

MEASURE = """
import os, re, sys, torch
from lineate.models import HybridLM
torch.zeros(4, 4) @ torch.zeros(4, 4)
pages = int(open("/proc/self/statm").read().split()[1])
before = pages * os.sysconf("SC_PAGE_SIZE")
model = HybridLM.from_pretrained(sys.argv[1], progress=False)
# (Not getrusage: that starts from what the parent had.)
peak = int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024
print(peak - before, peak, sum(x.nbytes for x in model.state_dict().values()))
"""


def peaks(folder: Path) -> tuple[int, int, int]:
    """Return the growth of resident memory while loading, its absolute peak, and the bytes of the model."""
    run = subprocess.run([sys.executable, "-c", MEASURE, str(folder)], capture_output=True, text=True, check=True)
    grown, peak, size = map(int, run.stdout.split())
    return grown, peak, size


def make_large(folder: Path, size: int) -> None:
    """Make a model of our own of about this many bytes, in shards, with arbitrary contents."""
    config = replace(preset("small"), n_layers=round(size / 7.1e6), vocab_size=2048, tie_embeddings=False)
    tensors = {name: torch.ones(1).expand(x.shape) for name, x in empty_model(config).state_dict().items()}
    save(folder, tensors, {"model_type": "lineate", **config.to_dict()}, max_shard_bytes=size // 3)


@pytest.mark.cover
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("size", [200 * 10**6, pytest.param(2 * 10**9, marks=pytest.mark.slow)])
def test_loading_takes_no_second_copy(tmp_path, size):
    make_large(tmp_path, size)
    grown, peak, model = peaks(tmp_path)
    print(f"{model / 1e6:.0f} MB: grown by {grown / model:.3f} x, absolute peak {peak / model:.3f} x")
    assert model > 0.9 * size
    assert grown < 1.2 * model
    if size > 10**9:
        assert peak < 1.2 * model  # including Python and torch themselves


def test_a_save_stopped_amid_renaming_never_loads_as_a_mixture(tmp_path, monkeypatch):
    model = HybridLM(preset("tiny"))
    save_pretrained(model, tmp_path, max_shard_bytes=10**6)
    done, rename = [], Path.replace

    def stop(self: Path, target: Path) -> Path:
        done.append(target)
        if len(done) == 2:
            raise OSError("disk gone")
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(OSError, match="disk gone"):
        save_pretrained(HybridLM(preset("tiny")), tmp_path, max_shard_bytes=10**6)
    assert not list(tmp_path.glob(".*part"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        HybridLM.from_pretrained(tmp_path, progress=False)
    monkeypatch.undo()
    save_pretrained(model, tmp_path)
    assert same(HybridLM.from_pretrained(tmp_path, progress=False).embed.weight, model.embed.weight)

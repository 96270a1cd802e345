"""Damaged GGUF files are refused by name, with what was expected, before anything is allocated for them."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from lineate.models.files.safetensors import CheckpointError
from lineate.models.opening import open_checkpoint

TEXT, ARRAY, U32, F32 = 8, 9, 4, 6
QWEN = {
    "block_count": 4, "embedding_length": 64, "feed_forward_length": 32, "attention.head_count": 2,
    "attention.head_count_kv": 1, "attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 8,
    "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 32,
    "full_attention_interval": 4,
}  # fmt: skip


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, value: object) -> bytes:
    if isinstance(value, str):
        return text(name) + struct.pack("<I", TEXT) + text(value)
    if isinstance(value, float):
        return text(name) + struct.pack("<If", F32, value)
    if isinstance(value, list):
        return text(name) + struct.pack("<IIQ", ARRAY, U32, len(value)) + struct.pack(f"<{len(value)}I", *value)
    return text(name) + struct.pack("<II", U32, value)


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0, dims: int | None = None) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape[::-1])
    return (
        text(name) + struct.pack("<I", len(shape) if dims is None else dims) + sizes + struct.pack("<IQ", kind, offset)
    )


def build(
    keys: list[bytes] = (), tensors: list[bytes] = (), data: int = 0, version: int = 3, counts: tuple = (None, None)
) -> bytes:
    n_tensors, n_keys = (len(x) if n is None else n for n, x in zip(counts, (tensors, keys), strict=True))
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data)


def model(changes: dict[str, object] | None = None, tensors: list[bytes] = (), data: int = 0, name: str = "qwen35"):
    values = QWEN | {"attention.layer_norm_rms_epsilon": 1e-6} | (changes or {})
    keys = [key("general.architecture", name)]
    keys += [key(f"{name}.{each}", value) for each, value in values.items() if value is not None]
    return build(keys, tensors, data)


FOUR = [tensor(f"x{i}", (8,), 0, 32 * i) for i in range(4)]
NAMED = key("general.architecture", "qwen35")
CASES = {
    "empty": (b"", "expected a GGUF file, which begins with the letters GGUF"),
    "another file": (b"PK\3\4" + bytes(100), "expected a GGUF file"),
    "only the letters": (b"GGUF", r"expected a version of 4 bytes at byte 4, got a file of 4 bytes; it is truncated"),
    "version 1": (build(version=1), "expected version 2 or 3 of GGUF, got version 1; convert it anew"),
    "big-endian": (build(version=3 << 24), "got version 3 in big-endian order"),
    "many tensors": (build(counts=(2**40, None)), r"expected at most 65,536 tensors, got 1,099,511,627,776"),
    "many keys": (build(counts=(None, 2**63)), r"expected at most 4,096 keys, got 9,223,372,036,854,775,808"),
    "keys cut off": (build([NAMED], counts=(None, 3))[:60], "it is truncated or corrupt"),
    "long key": (build([struct.pack("<Q", 2**50)]), r"expected a key of at most 4,096 bytes, got a length of 1,125,8"),
    "long text": (build([text("a") + struct.pack("<IQ", TEXT, 2**40)]), r"the value of 'a' of at most 16,777,216"),
    "text cut off": (build([text("a") + struct.pack("<IQ", TEXT, 2**20)]), r"expected the value of 'a' of 1,048,576"),
    "type of a key": (build([text("a") + struct.pack("<I", 77)]), r"'a' must have a type of 0 .. 12, got 77"),
    "array of arrays": (
        build([text("a") + struct.pack("<IIQ", ARRAY, ARRAY, 1)]),
        "'a' must be an array of numbers or",
    ),
    "long array": (build([text("a") + struct.pack("<IIQ", ARRAY, U32, 2**40)]), r"at most 4,194,304 items, got 1,099"),
    "array cut off": (build([text("a") + struct.pack("<IIQ", ARRAY, U32, 2**20)]), "expected the value of 'a' of 4,19"),
    "texts cut off": (build([text("a") + struct.pack("<IIQ", ARRAY, TEXT, 2**20)]), "the value of 'a' of"),
    "a key twice": (build([NAMED, NAMED]), "the key 'general.architecture' must stand there once, got it twice"),
    "a tensor twice": (build([NAMED], [FOUR[0], FOUR[0]], 64), "x0 must stand there once, got it twice"),
    "no dims": (build([NAMED], [tensor("x", ())]), r"x must have 1 .. 4 dims, got 0"),
    "five dims": (build([NAMED], [tensor("x", (1,) * 5)]), r"x must have 1 .. 4 dims, got 5"),
    "dims cut off": (build([NAMED], [tensor("x", (), dims=4)])[:-40], "truncated or corrupt"),
    "size of 0": (build([NAMED], [tensor("x", (4, 0))]), r"x must have at least 1 and less than 2\^60 elements"),
    "huge shape": (build([NAMED], [tensor("x", (2**40, 2**40))]), r"less than 2\^60 elements, got shape"),
    "unknown type": (
        build([NAMED], [tensor("x", (32,), 99)]),
        r"x must have a type of F32, .*, got the unknown type 99",
    ),
    "type not read": (build([NAMED], [tensor("x", (256,), 23)]), "got IQ4_XS; use a file with another quantisation"),
    "no whole block": (build([NAMED], [tensor("x", (2, 48), 8)]), r"x in Q8_0 must have a last dim .* multiple of 32"),
    "no whole K block": (
        build([NAMED], [tensor("x", (2, 128), 12)]),
        r"x in Q4_K must .* a multiple of 256, got shape",
    ),
    "data cut off": (
        build([NAMED], FOUR, 32 * 4 - 1),
        r"x3 of shape \(8,\) in F32 needs 32 bytes from byte \d+, got 31",
    ),
    "offset outside": (build([NAMED], [tensor("x", (8,), 0, 2**50)], 32), "x must begin 0 bytes after the header, got"),
    "offsets overlap": (build([NAMED], [FOUR[0], tensor("y", (8,), 0, 16)], 64), r"y must begin 32 .*it overlaps x0"),
    "wrong block count": (
        build([NAMED], [tensor("x", (2, 32), 8), tensor("y", (8,), 0, 64)], 96),
        r"y must begin 96 bytes after the header, got 64: it overlaps x",
    ),
    "offsets with a gap": (build([NAMED], [FOUR[0], FOUR[2]], 96), "x2 must begin 32 .*it leaves a gap after x0"),
    "alignment": (build([key("general.alignment", 33)]), "general.alignment must be a power of two .*, got 33"),
    "no architecture": (build([]), "general.architecture must be one of qwen3next, qwen35, .*, got None"),
    "another architecture": (build([key("general.architecture", "llama")]), "must be one of .*, got 'llama'"),
    "number for a name": (build([key("general.architecture", 7)]), "must be one of .*, got 7"),
    "a part alone": (build([NAMED, key("split.count", 3)]), "expected a whole model, got one of 3 parts, whose names"),
    "missing key": (model({"ssm.state_size": None}, FOUR, 128), "expected the key qwen35.ssm.state_size, got none"),
    "text for a number": (model({"ssm.state_size": "x"}, FOUR, 128), "qwen35.ssm.state_size must be a whole number of"),
    "zero": (model({"ssm.group_count": 0}, FOUR, 128), r"qwen35.ssm.group_count must be a whole number of 1 .. "),
    "heads do not divide": (
        model({"ssm.group_count": 3}, FOUR, 128),
        "time_step_rank must be a multiple of .*, 3, got 4",
    ),
    "inner does not divide": (
        model({"ssm.inner_size": 33}, FOUR, 128),
        "inner_size must be a multiple of 4 value heads",
    ),
    "many layers": (
        model({"block_count": 4000}, FOUR, 128),
        "block_count must be at most the number of tensors, 4, got",
    ),
    "scaled positions": (model({"rope.scaling.type": "yarn"}, FOUR, 128), "rope.scaling.type must be none, got 'yarn'"),
    "two head dims": (model({"attention.value_length": 16}, FOUR, 128), "value_length must be key_length, 32, got"),
    "only prediction": (
        model({"nextn_predict_layers": 4}, FOUR, 128),
        "nextn_predict_layers must be below block_count, 4",
    ),
    "missing tensors": (
        model({}, FOUR, 128),
        r"missing \(\d+\):\n    token_embd.weight\n    output_norm.weight\n    blk.0.attn_norm.weight",
    ),
    "rows of a tensor": (
        model({}, [*FOUR, tensor("blk.0.ssm_dt.bias", (5,), 0, 128)], 160),
        r"blk.0.ssm_dt.bias must have 4 rows, got shape \(5,\)",
    ),
    "kimi without layers": (
        model({"attention.head_count_kv": 1}, FOUR, 128, "kimi-linear"),
        "kimi-linear.attention.head_count_kv must have a value for each layer, got one or none",
    ),
    "kimi, too few layers": (
        model({"attention.head_count_kv": [0, 1]}, FOUR, 128, "kimi-linear"),
        r"kimi-linear.attention.head_count_kv must have 4 values, one a layer",
    ),
    "kimi, scores": (
        model({"attention.head_count_kv": [0, 0, 0, 1], "expert_gating_func": 1}, FOUR, 128, "kimi-linear"),
        r"expert_gating_func must be 2 \(sigmoid\), got 1",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_damaged_files_are_refused(case, tmp_path):
    data, match = CASES[case]
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=match) as caught:
        open_checkpoint(file)
    assert "model.gguf" in str(caught.value)


def test_every_cut_of_a_file_is_refused(tmp_path):
    whole, file = build([NAMED, key("a", [1, 2, 3]), key("b", "text")], FOUR, 128), tmp_path / "model.gguf"
    for length in range(0, len(whole), 3):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            open_checkpoint(file)


def test_folders_with_several_files(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(build())
    with pytest.raises(CheckpointError, match=r"expected one GGUF file or the parts of one, got a.gguf, b.gguf; name"):
        open_checkpoint(tmp_path)
    (tmp_path / "b.gguf").rename(tmp_path / "mmproj-b.gguf")  # an encoder of images
    with pytest.raises(CheckpointError, match=r"a\.gguf: general\.architecture must be"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="expected a folder with a checkpoint"):
        open_checkpoint(tmp_path / "none.gguf")


def test_parts_that_disagree(tmp_path):
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    keys = [[key("split.no", n), key("split.count", 2)] for n in range(2)]
    first.write_bytes(build([NAMED, *keys[0]], FOUR, 128))
    for data, match in (
        (build(keys[0]), r"00002-of-00002.gguf: expected part 1 of 2 \(split.no, split.count\), got \(0, 2\)"),
        (build(keys[1], FOUR[:1], 32), "x0 must be in one part, got it in m-00001-of-00002.gguf too"),
    ):
        second.write_bytes(data)
        with pytest.raises(CheckpointError, match=match):
            open_checkpoint(first)
    first.write_bytes(build([NAMED, *keys[0], key("split.tensors.count", 9)], FOUR, 128))
    second.write_bytes(build(keys[1]))
    with pytest.raises(CheckpointError, match="expected 9 tensors in all parts, got 4"):
        open_checkpoint(first)


MEMORY = """
import resource, sys
import torch
from lineate.models.opening import open_checkpoint
open_checkpoint(sys.argv[1])
target = torch.zeros(1024, 256, dtype=torch.bfloat16)
def most():
    return int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1])
before, checkpoint = most(), open_checkpoint(sys.argv[1])
for name in ("model.embed_tokens.weight", "lm_head.weight"):
    for row in range(0, checkpoint.entries[name].shape[0], 1024):
        checkpoint.read_into(name, target, (row, row + 1024))
print(most() - before)
"""


@pytest.mark.cover
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_reading_takes_a_bounded_buffer(tmp_path):
    """A file of 140 MB, of which 1024 rows at a time are read, needs less than 40 MB."""
    rows, columns = 2**18, 256
    size = rows * columns // 32 * 34
    names = ["token_embd.weight", "output.weight"]
    tensors = [tensor(name, (rows, columns), 8, i * size) for i, name in enumerate(names)]
    offset, more = 2 * size, {"output_norm.weight": (columns,)}
    more |= {f"blk.0.{part}.weight": (columns,) for part in ("attn_norm", "post_attention_norm", "attn_q_norm")}
    more |= {f"blk.0.{part}.weight": (columns,) for part in ("attn_k_norm", "attn_q", "attn_k", "attn_v")}
    more |= {f"blk.0.{part}.weight": (columns,) for part in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    for name, shape in more.items():
        tensors.append(tensor(name, shape, 0, offset))
        offset += 4 * columns
    changes = {"block_count": 1, "full_attention_interval": 1, "embedding_length": columns}
    file = tmp_path / "model.gguf"
    head = model(changes, tensors)
    with file.open("wb") as handle:
        handle.write(head)
        handle.truncate(len(head) + offset)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(file)], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40_000, f"it grew by {done.stdout.strip()} kB"

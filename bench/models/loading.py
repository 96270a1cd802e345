"""How far resident memory rises while a checkpoint is loaded on a CPU, above the bytes of its weights.

    python -m bench.models.loading                                            files of .2 GB
    python -m bench.models.loading --gigabytes 4 --json FILE                  4 GB in bfloat16, 2.1 GB in Q8_0

A Qwen3.5-like model with random weights is written to --folder as a GGUF file in Q8_0 and, with the same numbers, as a
folder in bfloat16; both are removed in the end. Each case loads one of them in a fresh process with the system's usual
allocator. Columns:

- planned: the bytes of the weights that `lineate plan` counts.
- peak, stays: by how much resident memory has grown at its peak and in the end; above: peak - planned.
- largest: the bytes of the largest tensor in the file.
"""

import argparse
import json
import math
import os
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.timing import OtherProcesses, cpu_model, in_fresh_process, peak_extra_bytes, resident_bytes, show
from lineate.models import HybridLM
from lineate.models.families.gguf import open_gguf
from lineate.models.files.checkpoint import Checkpoint, save_streamed
from lineate.models.files.safetensors import TensorSize
from lineate.models.opening import open_headers
from lineate.planning import plan_memory, read_model
from lineate.quantised import BY_BITS, quantize

F32, Q8_0, BLOCK, BLOCK_BYTES = 0, 8, 32, 34
AT_ONCE = 2**20  # blocks that are drawn at a time
KEY_U32, KEY_F32, KEY_TEXT = 4, 6, 8


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model; heads have 128 channels, and every 4th layer is softmax attention."""

    hidden: int
    layers: int

    @classmethod
    def of(cls, gigabytes: float) -> "Sizes":
        """Return sizes whose weights have about the given number of gigabytes in bfloat16."""
        hidden = 2048 if gigabytes >= 2 else 512
        one, four = (cls(hidden, layers).parameters for layers in (4, 8))
        return cls(hidden, max(4, 4 * round((gigabytes * 1e9 / 2 - one) / (four - one) + 1)))

    @property
    def vocab(self) -> int:
        return 64 * self.hidden

    @property
    def heads(self) -> int:
        return self.hidden // 128

    @property
    def keys(self) -> dict[str, int | float | str]:
        """The metadata of the GGUF file."""
        sizes = {
            "block_count": self.layers, "context_length": 4096, "embedding_length": self.hidden,
            "feed_forward_length": 3 * self.hidden, "attention.head_count": self.heads,
            "attention.head_count_kv": max(1, self.heads // 4), "attention.key_length": 128,
            "attention.value_length": 128, "attention.layer_norm_rms_epsilon": 1e-6, "rope.dimension_count": 32,
            "rope.freq_base": 1e6, "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": self.heads,
            "ssm.time_step_rank": self.heads, "ssm.inner_size": self.hidden, "full_attention_interval": 4,
        }  # fmt: skip
        return {"general.architecture": "qwen35"} | {f"qwen35.{key}": value for key, value in sizes.items()}

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the GGUF file, whose output is the embedding."""
        wide, narrow = self.hidden, max(1, self.heads // 4) * 128
        found: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab, wide), "output_norm.weight": (wide,)}
        linear = {
            "ssm_a": (self.heads,), "ssm_dt.bias": (self.heads,), "ssm_norm.weight": (128,),
            "ssm_conv1d.weight": (3 * wide, 4), "ssm_out.weight": (wide, wide), "attn_qkv.weight": (3 * wide, wide),
            "attn_gate.weight": (wide, wide), "ssm_beta.weight": (self.heads, wide),
            "ssm_alpha.weight": (self.heads, wide),
        }  # fmt: skip
        attention = {
            "attn_q.weight": (2 * wide, wide), "attn_k.weight": (narrow, wide), "attn_v.weight": (narrow, wide),
            "attn_output.weight": (wide, wide), "attn_q_norm.weight": (128,), "attn_k_norm.weight": (128,),
        }  # fmt: skip
        feed = {
            "attn_norm.weight": (wide,), "post_attention_norm.weight": (wide,), "ffn_gate.weight": (3 * wide, wide),
            "ffn_up.weight": (3 * wide, wide), "ffn_down.weight": (wide, 3 * wide),
        }  # fmt: skip
        for i in range(self.layers):
            own = {**(attention if i % 4 == 3 else linear), **feed}
            found |= {f"blk.{i}.{name}": shape for name, shape in own.items()}
        return found

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.tensors.values()))


# ---- files


def _is_coded(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and not any(part in name for part in ("conv1d", "ssm_alpha", "ssm_beta"))


def _nbytes(name: str, shape: tuple[int, ...]) -> int:
    count = math.prod(shape)
    return count // BLOCK * BLOCK_BYTES if _is_coded(name, shape) else 4 * count


def _contents(name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield the bytes of a tensor, some at a time: codes with a scale of 1e-4, or numbers that suit their name."""
    count = math.prod(shape)
    if not _is_coded(name, shape):
        value = -1.0 if name.endswith("ssm_a") else 1.0 if name.endswith("norm.weight") else 0.01
        yield torch.full((count,), value).view(torch.uint8)
        return
    scale = torch.tensor([1e-4], dtype=torch.float16).view(torch.uint8)
    for first in range(0, count // BLOCK, AT_ONCE):
        blocks = torch.randint(0, 256, (min(AT_ONCE, count // BLOCK - first), BLOCK_BYTES), dtype=torch.uint8)
        blocks[:, :2] = scale
        yield blocks


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _key(name: str, value: int | float | str) -> bytes:
    if isinstance(value, str):
        return _text(name) + struct.pack("<I", KEY_TEXT) + _text(value)
    kind, code = (KEY_U32, "I") if isinstance(value, int) else (KEY_F32, "f")
    return _text(name) + struct.pack(f"<I{code}", kind, value)


def write_gguf(sizes: Sizes, file: Path) -> None:
    """Write a GGUF file in Q8_0, a part of a tensor at a time."""
    torch.manual_seed(0)
    keys, tensors, end = sizes.keys, sizes.tensors, 0
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(_key(*item) for item in keys.items())
    for name, shape in tensors.items():
        head += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", Q8_0 if _is_coded(name, shape) else F32, end)
        end += _nbytes(name, shape) + -_nbytes(name, shape) % 32
    with file.open("wb") as handle:
        handle.write(head + bytes(-len(head) % 32))
        for name, shape in tensors.items():
            for part in _contents(name, shape):
                handle.write(part.numpy().data)
            handle.write(bytes(-_nbytes(name, shape) % 32))


def write_folder(source: Checkpoint, folder: Path) -> None:
    """Write the tensors of a checkpoint as a folder in bfloat16, one at a time; decays stay in float32."""
    kept = {name: torch.float32 if name.endswith("A_log") else torch.bfloat16 for name in source.entries}
    tensors = {name: TensorSize(kept[name], entry.shape) for name, entry in source.entries.items()}
    save_streamed(folder, tensors, lambda name: source.read(name).to(kept[name]), source.config)


# ---- one case


def measure(path: str, weights: str | None) -> dict[str, Any]:
    """Load a checkpoint in this process and return bytes: of the file, planned, at the peak and in the end."""
    quantize(torch.zeros(16, 32), "int4").decoded() @ torch.zeros(32, 1)  # what every first call takes
    source = open_headers(path)
    plan = plan_memory(read_model(path, weights=weights))
    before, held, start = resident_bytes()["all"], [], time.perf_counter()
    found = peak_extra_bytes(
        lambda: held.append(HybridLM.from_pretrained(path, weights=weights, progress=False))  # type: ignore[func-returns-value]
    )
    seconds, stays = time.perf_counter() - start, resident_bytes()["all"] - before
    return {
        "file_bytes": source.nbytes, "planned_bytes": plan.weights, "peak_bytes": int(found["bytes"]),
        "stays_bytes": stays, "above_bytes": int(found["bytes"]) - plan.weights, "seconds": seconds,
        "how": found["how"],
        "largest_bytes": max(entry.nbytes for entry in source.entries.values()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.2, help="of the file in bfloat16")
    parser.add_argument("--json", type=Path, default=Path("bench/out/loading.json"))
    parser.add_argument("--folder", type=Path, help="where the files are made; a temporary folder if none")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure, args.weights)))
        return
    others, sizes = OtherProcesses(), Sizes.of(args.gigabytes)
    place = Path(tempfile.mkdtemp(prefix="loading-", dir=args.folder))
    rows: dict[str, Any] = {}
    try:
        write_gguf(sizes, place / "q8_0.gguf")
        write_folder(open_gguf(place / "q8_0.gguf"), place / "bfloat16")
        cases: dict[str, tuple[str, str | None]] = {"bfloat16, as stored": ("bfloat16", None)}
        cases |= {f"bfloat16, --bits {bits}": ("bfloat16", BY_BITS[bits]) for bits in (8, 4)}
        cases |= {"Q8_0, as stored": ("q8_0.gguf", None), "Q8_0, --bits 4": ("q8_0.gguf", BY_BITS[4])}
        for name, (file, weights) in cases.items():
            more = [] if weights is None else ["--weights", weights]
            command = ["-m", "bench.models.loading", "--measure", str(place / file), *more]
            if (found := in_fresh_process(command, os.environ)) is None:
                sys.exit(f"{name} could not be measured")
            rows[name] = found
            print(f"{name}: {found['above_bytes'] / 1e6:,.0f} MB above", flush=True)
    finally:
        shutil.rmtree(place)
    head = {
        "date": datetime.now(UTC).date().isoformat(), "cpu": cpu_model(), "torch": torch.__version__,
        "gigabytes": args.gigabytes, "hidden": sizes.hidden, "layers": sizes.layers, "vocab": sizes.vocab,
        "parameters": sizes.parameters, "cores_used_by_others": others.cores(),
    }  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({**head, "cases": rows}, indent=1) + "\n")
    columns = ("file", "planned", "peak", "stays", "above", "largest")
    table = [[name, *(f"{row[f'{key}_bytes'] / 1e6:,.0f}" for key in columns)] for name, row in rows.items()]
    show("MB while a checkpoint is loaded", ["", *columns], table)
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

"""The growth of a rank's memory when ranks share the loading of a checkpoint.

    python -m bench.models.tensor [--gigabytes 2] [--ranks 4] [--json FILE]

A bfloat16 checkpoint is written twice: as lineate saves it, and as transformers saves a Qwen3.5 model, whose tensors
are in another order. Then every rank reads its share in a fresh process: how much it grew, and its most on the way.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.timing import in_fresh_process, resident_bytes
from lineate.models import AttentionConfig, FeedConfig, HybridConfig, HybridLM, LinearConfig
from lineate.models.sharding import rank_config
from lineate.parallel.tensor.ranks import Ranks

HIDDEN, VOCAB, LAYERS_A_GIGABYTE = 2048, 65536, 8


class Place(Ranks):
    """A rank that only loads."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def config(layers: int) -> HybridConfig:
    return HybridConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, n_layers=layers, pattern="GGGA",
        linear=LinearConfig(16, 32, 128, 128), attention=AttentionConfig(16, 4, 256, rotary_dim=64),
        feed=FeedConfig(6144), zero_centred_norm=True,
    )  # fmt: skip


def write_own(folder: Path, layers: int) -> None:
    with torch.device("meta"):
        model = HybridLM(config(layers))
    model.to(torch.bfloat16).to_empty(device="cpu").save_pretrained(folder)


def write_theirs(folder: Path, layers: int) -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from transformers.initialization import no_init_weights

    sizes = Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=6144, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128, full_attention_interval=4, tie_word_embeddings=False,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with no_init_weights():
        Qwen3_5ForCausalLM(sizes).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)


def load(folder: str, rank: int, ranks: int) -> dict[str, int]:
    """Load a share in this process; return the resident bytes before, the most while loading, and afterwards."""
    before, most, done = resident_bytes()["all"], 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, resident_bytes()["own"])
            time.sleep(0.005)

    own = resident_bytes()["own"]
    watcher = threading.Thread(target=watch)
    watcher.start()
    model = HybridLM.from_pretrained(folder, progress=False, ranks=Place(rank, ranks))
    done.set()
    watcher.join()
    after = resident_bytes()
    held = sum(x.numel() * x.element_size() for x in model.state_dict().values())
    return {"growth": after["all"] - before, "own": after["own"] - own, "most_own": most - own, "held": held}


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    layers = max(4, round(arguments.gigabytes * LAYERS_A_GIGABYTE) // 4 * 4)
    rank_config(config(layers), arguments.ranks)
    rows = []
    folder = Path(tempfile.mkdtemp())
    try:
        for name, write in (("lineate", write_own), ("Qwen3.5 of transformers", write_theirs)):
            write(folder / "model", layers)
            size = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
            for rank in range(arguments.ranks):
                words = ["-m", "bench.models.tensor", "--one", str(folder / "model"), str(rank), str(arguments.ranks)]
                found = in_fresh_process(words, os.environ)
                if found is not None:
                    rows.append({"layout": name, "rank": rank, "ranks": arguments.ranks, "file": size, **found})
            shutil.rmtree(folder / "model")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'layout':26}{'rank':>8}{'file MB':>9}{'growth MB':>11}{'of file':>9}{'most, own':>11}{'of file':>9}")
    for row in rows:
        print(
            f"{row['layout']:26}{row['rank']:>4} of {row['ranks']}{row['file'] / 1e6:9.0f}{row['growth'] / 1e6:11.0f}"
            f"{row['growth'] / row['file']:9.3f}{row['most_own'] / 1e6:11.0f}{row['most_own'] / row['file']:9.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.5, help="size of the checkpoint, about")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path, default=Path("bench/out/tensor-loading.json"))
    parser.add_argument("--one", nargs=3, metavar=("FOLDER", "RANK", "RANKS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        folder, rank, ranks = arguments.one
        print(json.dumps(load(folder, int(rank), int(ranks))))
        return
    rows = run(arguments)
    show(rows)
    if not rows:
        sys.exit(1)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    head = {"date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__}
    arguments.json.write_text(json.dumps({"header": head, "loading": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The time in which a checkpoint of published layout is loaded, next to those of reading and of copying its bytes.

    python -m bench.models.loading_rate                                                 4 GB to a CPU
    python -m bench.models.loading_rate --gigabytes 40 --devices cpu,cuda --json FILE

A checkpoint with random numbers is written to --folder: the published tensors of some layers. Each case loads it with
HybridLM.from_pretrained, `cold` after its pages have been dropped from the system's cache, `warm` from that cache. Next
to it, threads read the same files in parts of 16 MiB into a buffer each (`read`), and pinned memory is copied to the
GPU (`copy`). A ratio is the time of a load over the longer of these two.
"""

import argparse
import gc
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.models.published_layouts import LAYOUTS
from bench.timing import OtherProcesses, cpu_model, show
from lineate.models import HybridLM
from lineate.models.files import threads as loading_threads

PART = 2**24
COPIED = 2**28
"""The bytes of a copy to the GPU."""


def drop(folder: Path) -> None:
    """Drop the files of a folder from the system's cache."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path, count: int) -> None:
    """Read the files of a folder by several threads, each into a buffer of its own."""
    files = [(file, at) for file in sorted(folder.glob("*.safetensors")) for at in range(0, file.stat().st_size, PART)]
    parts, lock = iter(files), threading.Lock()

    def work() -> None:
        buffer, handles = memoryview(bytearray(PART)), dict[Path, int]()
        try:
            while True:
                with lock:
                    file, at = next(parts, (None, 0))
                if file is None:
                    return
                if file not in handles:
                    handles[file] = os.open(file, os.O_RDONLY)
                os.preadv(handles[file], [buffer], at)
        finally:
            for handle in handles.values():
                os.close(handle)

    workers = [threading.Thread(target=work) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def copy_rate() -> float:
    """Return the bytes a second of copies from pinned memory to the GPU."""
    pinned, there = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True), torch.empty(COPIED, device="cuda").byte()
    there.copy_(pinned)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(8):
        there.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    return 8 * COPIED / (time.perf_counter() - start)


@contextmanager
def at_most(count: int | None) -> Iterator[None]:
    """Load with at most this number of threads; None: the default."""
    before = loading_threads.MOST_THREADS
    loading_threads.MOST_THREADS = before if count is None else count
    try:
        yield
    finally:
        loading_threads.MOST_THREADS = before


def seconds(call: Callable[[], Any]) -> float:
    gc.collect()
    start = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    found = time.perf_counter() - start
    del result
    return found


def measure(
    folder: Path, devices: list[str], formats: list[str], counts: list[int | None], rounds: int
) -> dict[str, Any]:
    """Return the rows of the table: each case's seconds, cold and warm."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    cores = len(os.sched_getaffinity(0))
    readers = max(loading_threads.LEAST_THREADS, min(cores, loading_threads.MOST_THREADS))
    cases: dict[str, Callable[[], Any]] = {f"read, {readers} threads": lambda: read(folder, readers)}
    for device in devices:
        for form in formats:
            for count in counts:
                threads = "" if count is None else f", at most {count} threads"

                def load(device: str = device, form: str = form, count: int | None = count) -> HybridLM:
                    with at_most(count):
                        weights = None if form == "stored" else form
                        return HybridLM.from_pretrained(folder, device=device, weights=weights, progress=False)

                cases[f"load to {device}, {form}{threads}"] = load
    rows: dict[str, dict[str, Any]] = {name: {"cold": [], "warm": []} for name in cases}
    for _ in range(rounds):
        for name, call in cases.items():
            drop(folder)
            for kind in ("cold", "warm"):
                rows[name][kind].append(seconds(call))
                print(f"{name}, {kind}: {rows[name][kind][-1]:.2f} s", flush=True)
    return {name: {**row, "gigabytes": size / 1e9} for name, row in rows.items()}


def table(rows: dict[str, dict[str, Any]], copied: float | None) -> list[list[str]]:
    reading = next(iter(rows.values()))
    found = []
    for name, row in rows.items():
        cells = [name]
        for kind in ("cold", "warm"):
            least = min(row[kind])
            bound = max(min(reading[kind]), row["gigabytes"] * 1e9 / copied if copied and "cuda" in name else 0)
            cells += [f"{least:.2f}", f"{row['gigabytes'] / least:.2f}", f"{least / bound:.2f}"]
        found.append(cells)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=LAYOUTS, default="qwen3-5-35b-a3b")
    parser.add_argument("--gigabytes", type=float, default=4, help="of the files, about; the disk must have room")
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--formats", default="stored", help="of the weights, such as stored,int8")
    parser.add_argument("--threads", default="0", help="the most threads; 0: the default; 1: no other than the caller")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("bench/out/loading-rate.json"))
    parser.add_argument("--folder", type=Path, help="where the files are made; a temporary folder if none")
    args = parser.parse_args()
    devices, others = args.devices.split(","), OtherProcesses()
    place = Path(tempfile.mkdtemp(prefix="loading-", dir=args.folder))
    try:
        start = time.perf_counter()
        config = LAYOUTS[args.model].write(place, args.gigabytes)
        print(f"wrote {config.n_layers} layers in {time.perf_counter() - start:.0f} s", flush=True)
        copied = copy_rate() if "cuda" in devices else None
        counts = [int(count) or None for count in args.threads.split(",")]
        rows = measure(place, devices, args.formats.split(","), counts, args.rounds)
    finally:
        shutil.rmtree(place)
    head = {
        "date": datetime.now(UTC).date().isoformat(), "cpu": cpu_model(), "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if "cuda" in devices else None, "torch": torch.__version__,
        "model": args.model, "layers": config.n_layers, "copy_gigabytes_a_second": copied and copied / 1e9,
        "cores_used_by_others": others.cores(),
    }  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({**head, "cases": rows}, indent=1) + "\n")
    columns = [f"{kind} {unit}" for kind in ("cold", "warm") for unit in ("s", "GB/s", "ratio")]
    show(f"{args.model}, {config.n_layers} layers", ["", *columns], table(rows, copied))
    if copied:
        print(f"copy to the GPU: {copied / 1e9:.1f} GB/s")
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

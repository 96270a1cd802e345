"""Run a function on several ranks, as torchrun would start them, and collect what each returns.

Ranks are forked from a clean server process that has imported torch once. The parent holds the store through which they
meet, on a port that the system chose, so no port is ever guessed.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOAD = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "lineate.models", "lineate.training.distributed"]


def make_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def run_ranks(size: int, worker: Callable[..., Any], *args: Any, store: dist.TCPStore | None = None) -> list[Any]:
    """Run worker(*args) on every rank; return results (tensors and plain values) by rank. An error fails the test.

    A rank that ends without a result has None. store: that of an earlier call, as torchrun keeps it over restarts.
    """
    mp.get_context("forkserver").set_forkserver_preload(PRELOAD)
    store = make_store() if store is None else store
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (size, store.port, folder, worker, args), nprocs=size, start_method="forkserver")
        files = [Path(folder) / str(rank) for rank in range(size)]
        return [torch.load(file, weights_only=True) if file.exists() else None for file in files]


def _rank(rank: int, size: int, port: int, folder: str, worker: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    torch.set_num_threads(1)
    torch.save(worker(*args), Path(folder) / str(rank))
    if dist.is_initialized():
        dist.destroy_process_group()

"""Run a function on several ranks, as torchrun would start them, and collect what each returns; or in one process.

Processes are forked from a clean server process that has imported torch once. The parent holds the store through which
ranks meet, on a port that the system chose, so that no port is ever guessed.
"""

import io
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._pytree import tree_map_only

PRELOAD = [
    "torch.distributed.fsdp", "torch.distributed.checkpoint", "lineate.models", "lineate.training.prepare",
    "torch._dynamo",  # recomputing a block and FSDP import it
]  # fmt: skip


def server() -> Any:
    """Return the context whose processes a server forks; the first of them starts the server."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def make_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def run_ranks(size: int, worker: Callable[..., Any], *args: Any, store: dist.TCPStore | None = None) -> list[Any]:
    """Run worker(*args) on every rank; return results (tensors and plain values) by rank. An error fails the test.

    A rank that ends without a result has None. store: that of an earlier call, as torchrun keeps it over restarts.
    """
    server()
    store = make_store() if store is None else store
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (size, store.port, folder, worker, args), nprocs=size, start_method="forkserver")
        files = [Path(folder) / str(rank) for rank in range(size)]
        return [torch.load(file, weights_only=True) if file.exists() else None for file in files]


def summed(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return each tensor's sum over the ranks, by one collective for each dtype."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        own = {n: x for n, x in enumerate(tensors) if x.dtype == dtype}
        total = torch.cat([x.detach().cpu().flatten() for x in own.values()])
        dist.all_reduce(total, group=group)
        parts = total.to(torch.get_default_device()).split([x.numel() for x in own.values()])
        found |= {n: part.view(x.shape) for (n, x), part in zip(own.items(), parts, strict=True)}
    return [found[n] for n in range(len(tensors))]


def from_first(group: dist.ProcessGroup, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return on all ranks what the first one computes, tensors on the default device."""
    content = io.BytesIO()
    if dist.get_rank(group) == 0:
        torch.save(tree_map_only(Tensor, Tensor.detach, compute()), content)
    sent = [content.getvalue()]
    dist.broadcast_object_list(sent, src=0, group=group, device=torch.device("cpu"))
    return torch.load(io.BytesIO(sent[0]), map_location=torch.get_default_device(), weights_only=True)


class Ended(NamedTuple):
    """How a process ended."""

    code: int
    """Its exit code; -9 if it was killed."""
    out: str
    err: str


class Started:
    """A process of its own that runs worker(*args)."""

    def __init__(self, worker: Callable[..., Any], *args: Any) -> None:
        self.folder = tempfile.TemporaryDirectory()
        given = self.folder.name, torch.get_num_threads(), worker, args
        self.process = server().Process(target=_alone, args=given)
        self.process.start()

    @property
    def runs(self) -> bool:
        return self.process.is_alive()

    def wait(self) -> Ended:
        """Return how it ended."""
        self.process.join()
        with self.folder as folder:
            return Ended(self.process.exitcode, *(Path(folder, name).read_text() for name in ("out", "err")))


def _alone(folder: str, threads: int, worker: Callable[..., Any], args: tuple[Any, ...]) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), descriptor)
    torch.set_num_threads(threads)
    worker(*args)


def _rank(rank: int, size: int, port: int, folder: str, worker: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    torch.set_num_threads(1)
    torch.save(worker(*args), Path(folder) / str(rank))
    if dist.is_initialized():
        dist.destroy_process_group()

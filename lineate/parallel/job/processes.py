"""The setting of a process under torchrun: its rank, its device, and the store through which processes connect.

torchrun starts the processes of a job and sets RANK, WORLD_SIZE and LOCAL_RANK in the environment of each. Without
torchrun there is one process.
"""

import os
import time
import uuid
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""The timeout of a collective for a rank that hangs. A rank that dies is detected at once, as its connections close."""

_VARIABLES = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))


class Place(NamedTuple):
    """The place of this process.

    Args:
        rank: its number, from 0.
        size: the number of processes.
        local_rank: its number among the processes of its machine, which is the index of its GPU.
    """

    rank: int
    size: int
    local_rank: int


def find_place() -> Place:
    """Return the place of this process, as torchrun has set it."""
    return Place(*(_variable(name, alone) for name, alone in _VARIABLES))


def _variable(name: str, alone: int) -> int:
    """Read one of torchrun's environment variables; `alone` if none of them is set."""
    if (text := os.environ.get(name)) is None:
        there = [other for other, _ in _VARIABLES if other in os.environ]
        if there:
            raise RuntimeError(
                f"{name} must be set in the environment besides {', '.join(there)}, got nothing; "
                "start the processes with torchrun"
            )
        return alone
    if not text.isdigit():
        raise RuntimeError(f"{name} in the environment must be a whole number, got {text!r}; torchrun sets it")
    return int(text)


def fresh_store(rank: int, size: int) -> Any:
    """Return torchrun's store with a prefix that is new each time the processes start.

    torchrun keeps its store over restarts, with the addresses of dead processes in it, which a rank may read before
    their successors have written theirs (pytorch issue 135712). A count of restarts cannot serve as the prefix, since
    machines may count differently. So rank 0 chooses a prefix, and every other rank asks for it under a unique word.

    Args:
        rank: the number of this process.
        size: the number of processes.
    """
    store, _, _ = next(rendezvous("env://", rank, size, timeout=COLLECTIVE_TIMEOUT))
    name = uuid.uuid4().hex
    if rank:
        store.set(f"lineate/ask/{rank}", name)
        name = store.get(f"lineate/answer/{name}").decode()  # waits until rank 0 has answered
        store.add(f"lineate/here/{name}", 1)
        return dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    deadline = time.monotonic() + COLLECTIVE_TIMEOUT.total_seconds()
    while (here := store.add(f"lineate/here/{name}", 0)) < size - 1:
        for other in range(1, size):
            if store.check([f"lineate/ask/{other}"]):  # answering a request of a dead process is harmless
                store.set(f"lineate/answer/{store.get(f'lineate/ask/{other}').decode()}", name)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"expected {size} ranks within {COLLECTIVE_TIMEOUT}, got {here + 1}; see the others' messages"
            )
        time.sleep(0.01)
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def device_of(name: str, local_rank: int) -> torch.device:
    """Return this process's device, or raise ValueError if it does not exist.

    Args:
        name: "cpu" or "cuda"; under torchrun each process of a machine takes the GPU of its local rank.
        local_rank: the number of this process on its machine.
    """
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {name!r}")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"device={name!r} needs a GPU that torch can use, got none; use device='cpu'")
    if "WORLD_SIZE" not in os.environ:
        return torch.device("cuda", device.index or 0)
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"device='cuda' needs a GPU for every process of a machine, got {torch.cuda.device_count()} for local rank "
            f"{local_rank}; start fewer with torchrun --nproc-per-node, or use device='cpu'"
        )
    return torch.device("cuda", local_rank)


def join(store: Any, here: Place, device: torch.device) -> None:
    """Make the process group of all processes: gloo on CPUs, NCCL on GPUs.

    Args:
        store: from fresh_store.
        here: the place of this process.
        device: its device.
    """
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store, rank=here.rank, world_size=here.size, timeout=COLLECTIVE_TIMEOUT,
        device_id=device if cuda else None,
    )  # fmt: skip

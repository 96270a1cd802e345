"""A model divided among several processes, for the commands `serve` and `generate` with --tensor.

    ranks = start_ranks(4, "cpu", "folder", flags)      # in each process that torchrun has started
    model, tokenizer = load_model("folder", ranks=ranks.model_ranks)

Every rank must have the same version of lineate and torch, the same kind of processor, the same checkpoint and the
same flags, otherwise it would compute different numbers and stop in the middle of a collective. They are
compared before anything is loaded.
"""

import hashlib
import json
import os
import platform
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import lineate
from lineate.console.terminal import printable
from lineate.generation.loading import locate
from lineate.models.files.gguf_tokenizer import companions_of
from lineate.models.opening import open_checkpoint
from lineate.parallel.job.link import JobEnded, Link, connect
from lineate.parallel.job.processes import Place, device_of, find_place, fresh_store, join
from lineate.parallel.tensor.ranks import Ranks

SAMPLES, SAMPLE_BYTES = 64, 64
"""The number of positions of a weight file that are compared, and the bytes of each."""


class RankedJob:
    """This process among those that share a model.

    Args:
        link: The connections to the other ranks.
        device: Where this rank computes.
    """

    def __init__(self, link: Link, device: str) -> None:
        self.link, self.device = link, device
        self._told = threading.Event()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only rank with input and output."""
        return self.link.rank == 0

    @property
    def model_ranks(self) -> Ranks:
        """The argument `ranks` of HybridLM.from_pretrained, so that this rank reads only its share of the weights."""
        assert dist.group.WORLD is not None
        return Ranks(dist.group.WORLD)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Do the work of a command on this rank, and leave the others at its end.

        If the job ends early, one rank prints the reason, and all processes end, whatever they are waiting for. Work
        with clients notifies them first: it watches the link itself.
        """
        self.link.watch(self._leave)
        try:
            yield
            self.link.gather(None)  # no rank leaves before all have reached this point
            dist.destroy_process_group()
            self.link.close()
        except JobEnded as ended:
            self._leave(str(ended))
        except SystemExit:
            self.link.refuse(f"rank {self.link.rank} has ended; its message says why")
            raise
        except Exception as error:
            if self.is_main and isinstance(error, ValueError | OSError | ImportError):
                self.link.refuse(str(error))  # the others have the same error, or wait for this rank
                raise
            try:
                self.link.fail(error)
            except JobEnded as ended:
                self._leave(str(ended))

    def tell(self, why: str) -> None:
        """Print once why the job has ended, on the responsible rank.

        Args:
            why: One sentence.
        """
        if self.link.rank == self.link.speaker and not self._told.is_set():
            self._told.set()
            print(f"lineate: {printable(why)}; the job ends", file=sys.stderr, flush=True)

    def _leave(self, why: str) -> NoReturn:
        self.tell(why)
        sys.stdout.flush()
        os._exit(1)  # threads may wait for a collective that never ends


def start_ranks(tensor: int, device: str, folder: str | None, flags: Mapping[str, Any]) -> RankedJob | None:
    """Join the other ranks of a job, or return None if this process has the whole model.

    Raise ValueError if the processes are not as many as --tensor says, or differ from each other.

    Args:
        tensor: How many ranks share the model.
        device: "cpu" or "cuda".
        folder: The folder of the model, or its name on the hub.
        flags: The other options that must be the same on all ranks, by name.
    """
    here = find_place()
    if tensor == here.size == 1:
        return None
    if tensor != here.size:
        given = "WORLD_SIZE is not set" if "WORLD_SIZE" not in os.environ else f"WORLD_SIZE = {here.size}"
        raise ValueError(
            f"--tensor must be the number of processes, got {tensor} and {given}; "
            f"start them with torchrun --nproc-per-node {max(tensor, here.size)} and --tensor {max(tensor, here.size)}"
        )
    if folder is None:
        raise ValueError("--tensor needs the folder of a model, or its name on the hub, got none")
    place = device_of(device, here.local_rank)
    about = about_process(place) | about_checkpoint(folder)
    about |= {f"--{name.replace('_', '-')}": (json.dumps(value), repr(value)) for name, value in flags.items()}
    return _join(here, place, about)


def _join(here: Place, device: torch.device, about: Mapping[str, tuple[str, str]]) -> RankedJob:
    """Connect this rank with the others; a refused rank ends, and rank 0 prints the reason."""
    store = fresh_store(here.rank, here.size)
    try:
        link = connect(store, here, about)
    except JobEnded:  # rank 0 has said why
        sys.exit(2)
    join(dist.PrefixStore("model", store), here, device)  # type: ignore[attr-defined]
    return RankedJob(link, str(device))


def about_process(device: torch.device) -> dict[str, tuple[str, str]]:
    """Return the values that must be equal in all processes, by name: the compared value and its text.

    Args:
        device: Where this process computes.
    """
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        processor = f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    said = {
        "version of lineate": lineate.__version__,
        "version of torch": str(torch.__version__),
        "processor": processor,
        "number of threads": str(torch.get_num_threads()),
    }
    return {name: (value, value) for name, value in said.items()}


def about_checkpoint(name: str) -> dict[str, tuple[str, str]]:
    """Return the values of a checkpoint that must be equal: config, tensor headers, and bytes of each weight file.

    64 evenly spread positions of each file are read: another training of the same model is detected, and a file of many
    gigabytes takes milliseconds.

    Args:
        name: A folder of a run or a model, or a name on the hub.
    """
    folder = locate(name)
    checkpoint = open_checkpoint(folder)
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    files: set[Path] = set()
    for tensor, entry in sorted(checkpoint.entries.items()):
        for part in entry.parts:
            files.add(part.file)
            header = [tensor, part.file.name, str(part.dtype), list(part.shape), part.start]
            digest.update(json.dumps(header).encode())
    for file in sorted(files, key=lambda file: file.name):
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as opened:
            for n in range(SAMPLES):
                opened.seek(max(size - SAMPLE_BYTES, 0) * n // (SAMPLES - 1))
                digest.update(opened.read(SAMPLE_BYTES))
    for companion, content in sorted(companions_of(folder).items()):  # the tokenizer: ranks follow the same grammars
        digest.update(companion.encode() + content)
    found = digest.hexdigest()
    return {"checkpoint": (found, f"{folder.name} ({found[:12]})")}

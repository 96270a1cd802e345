"""Several processes that train one model: their ranks, their shared weights, and the sum of their gradients.

torchrun starts the processes and sets the rank of each (RANK, WORLD_SIZE, LOCAL_RANK). Without torchrun there is one
process and no process group, and the methods below do nothing. Ranks form a mesh of `data` x `context` x `tensor`:
ranks with the same place in `data` read segments of the same sequences (context parallelism); others read different
sequences; ranks that differ in `tensor` alone share one model, and read the same tokens. Every rank holds the gradient
of

    (sum of its own tokens' losses) / (number of tokens on all ranks)

so the gradient of the mean loss is the SUM over all ranks with other tokens, even if their numbers differ.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from lineate.models.sharding import share_out_model, square_of_gradients, sum_shared_gradients
from lineate.parallel.job.processes import device_of, find_place, fresh_store, join
from lineate.parallel.tensor.ranks import Ranks

ModelT = TypeVar("ModelT", bound=nn.Module)
ResultT = TypeVar("ResultT")

BARRIER_TIMEOUT = timedelta(hours=12)
"""How long barrier() waits, in which the others wait while rank 0 prepares data or reads a checkpoint."""
BUCKET_ELEMENTS = 2**25
"""The most gradient elements to sum in one collective: 128 MiB in float32."""


@dataclass(frozen=True)
class World:
    """This process and its place among the others; start() makes it, close() ends it."""

    rank: int = 0
    """The place of this process, from 0."""
    size: int = 1
    """The number of processes."""
    local_rank: int = 0
    """The rank among the processes of this machine, which is the index of its GPU."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where this process computes."""
    shard: str = "none"
    """"none": every rank has all parameters. "full": parameters are sharded over all ranks (FSDP2)."""
    mesh: DeviceMesh | None = None
    """The mesh data x context x tensor; None for a single process without a process group."""
    readers: DeviceMesh | None = None
    """The ranks with this one's share of the model, in one dimension: they read other tokens, and shard parameters."""
    patient: dist.ProcessGroup | None = None
    """The process group of barrier(), with a long timeout."""

    @classmethod
    def start(cls, device: str, shard: str = "none", context: int = 1, tensor: int = 1) -> "World":
        """Join the processes that torchrun started (gloo on CPUs, NCCL on GPUs); without torchrun, be the only one.

        Args:
            device: "cpu" or "cuda"; under torchrun each process of a machine takes the GPU of its local rank.
            shard: "none" keeps all parameters on every rank; "full" shards them over all ranks (FSDP2).
            context: How many ranks share a sequence.
            tensor: How many ranks share the model, each with some heads; tensor x context must divide the processes.
        """
        if shard not in ("none", "full"):
            raise ValueError(f"shard must be 'none' or 'full', got {shard!r}")
        for name, given in (("context", context), ("tensor", tensor)):
            if isinstance(given, bool) or not isinstance(given, int) or given < 1:
                raise ValueError(f"{name} must be a number of ranks, at least 1, got {given!r}")
        rank, size, local_rank = here = find_place()
        if size % (context * tensor):
            name = "context" if tensor == 1 else "tensor" if context == 1 else "context x tensor"
            raise ValueError(
                f"{name} must divide the number of processes = {size}, got {context * tensor}; "
                "start more of them with torchrun --nproc-per-node"
            )
        place = device_of(device, local_rank)
        if "WORLD_SIZE" not in os.environ:
            return cls(device=place, shard=shard)
        if dist.is_initialized():
            raise RuntimeError("World.start must come before any process group, got one; close() it first")
        join(fresh_store(rank, size), here, place)
        shape = size // (context * tensor), context, tensor
        mesh = init_device_mesh(place.type, shape, mesh_dim_names=("data", "context", "tensor"))
        readers = mesh["data", "context"]._flatten("readers")
        patient = dist.new_group(backend="gloo", timeout=BARRIER_TIMEOUT)
        return cls(rank, size, local_rank, place, shard, mesh, readers, patient)

    @property
    def is_main(self) -> bool:
        """Whether this rank prints, logs and names checkpoints."""
        return self.rank == 0

    @property
    def context_size(self) -> int:
        """The number of ranks that share a batch."""
        return 1 if self.mesh is None else self.mesh.size(1)

    @property
    def context_rank(self) -> int:
        """Which segment of that batch this rank has."""
        return self.rank // self.tensor_size % self.context_size

    @property
    def tensor_size(self) -> int:
        """The number of ranks that share the model."""
        return 1 if self.mesh is None else self.mesh.size(2)

    @property
    def tensor_rank(self) -> int:
        """Which share of the model this rank has."""
        return self.rank % self.tensor_size

    @property
    def data_size(self) -> int:
        """The number of batches that are computed at the same time."""
        return self.size // (self.context_size * self.tensor_size)

    @property
    def data_rank(self) -> int:
        """Which of these batches this rank has."""
        return self.rank // (self.context_size * self.tensor_size)

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that share the model; None if this one has all of it."""
        return None if self.mesh is None or self.tensor_size == 1 else Ranks(self.mesh["tensor"].get_group())

    def wrap(self, model: ModelT) -> ModelT:
        """Move the model to the device, with rank 0's weights or this rank's shard of them, and return it.

        Call it before making the optimizer. Afterwards run the model only by model(...).

        Args:
            model: The model, which every rank must have built with the same seed; for tensor parallelism a HybridLM,
                whole or already this rank's share.
        """
        if (ranks := self.ranks) is not None and getattr(model, "ranks", None) is None:
            model = share_out_model(model, ranks)
        if self.context_size > 1:
            from lineate.training.context import context_parallel

            assert self.mesh is not None
            context_parallel(model, self.mesh["context"].get_group())
        if self.readers is None or self.readers.size() == 1:
            return model.to(self.device)
        if self.shard == "full":
            return fully_shard_model(model, self.readers)
        model.to(self.device)
        with torch.no_grad():
            for x in model.state_dict().values():
                dist.broadcast(x, group=self.readers.get_group(), group_src=0)
        return model

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks that read other tokens, as a new tensor.

        Args:
            x: This rank's tensor, of the same shape on every rank; ranks that share a model have the same.
        """
        x = x.detach().clone()
        if self.readers is not None:
            dist.all_reduce(x, group=self.readers.get_group())
        return x

    def sum_everywhere(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, as a new tensor.

        Args:
            x: This rank's tensor, of the same shape on every rank.
        """
        x = x.detach().clone()
        if self.mesh is not None:
            dist.all_reduce(x)
        return x

    def finish_gradients(self, model: nn.Module) -> None:
        """Sum the gradients over all ranks, after the last backward pass of a step.

        With shard="full" the backward pass has already summed those of other tokens.

        Args:
            model: The model that wrap() returned.
        """
        if self.readers is None:
            return
        if self.readers.size() > 1 and self.shard != "full":
            for bucket in _buckets(model):
                flat = torch.cat([x.grad.flatten() for x in bucket])  # type: ignore[union-attr]
                dist.all_reduce(flat, group=self.readers.get_group())
                for x, part in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
                    x.grad = part.view_as(x)
        sum_shared_gradients(model)

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale all gradients so that their total norm is at most max_norm.

        Args:
            model: The model that wrap() returned.
            max_norm: The largest norm allowed.

        Returns:
            The norm before scaling, as a plain tensor, the same on every rank.
        """
        if self.tensor_size == 1:
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm
        assert self.mesh is not None
        square = square_of_gradients(model)
        if self.shard == "full":
            dist.all_reduce(square)
        else:
            dist.all_reduce(square, group=self.mesh["tensor"].get_group())
        norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
        return norm

    def barrier(self) -> None:
        """Wait for all ranks, for up to 12 hours; fail at once if one dies."""
        if self.patient is not None:
            dist.barrier(group=self.patient)

    def on_main(self, work: Callable[[], ResultT], what: str) -> ResultT | None:
        """Run work on rank 0 while the others wait as long as in barrier().

        Args:
            work: The function to call on rank 0.
            what: Its description, for the message "rank 0 could not ..." on the other ranks if it fails.

        Returns:
            The result on rank 0, None on the others.
        """
        return on_main(work, what, self.patient)

    def share(self, value: ResultT | None) -> ResultT:
        """Return rank 0's value on every rank; it is pickled between the processes of this job, not to a file.

        Args:
            value: The value on rank 0; ignored on the others.
        """
        box = [value]
        if self.mesh is not None:
            dist.broadcast_object_list(box, src=0, group=self.patient)
        assert box[0] is not None
        return box[0]

    def gather(self, value: ResultT) -> list[ResultT]:
        """Return the values of all ranks, in their order, on every rank; they are pickled as in share().

        Args:
            value: This rank's value.
        """
        found = [value] * self.size
        if self.mesh is not None:
            dist.all_gather_object(found, value, group=self.patient)
        return found

    def close(self) -> None:
        """Leave the process group; no other method may be called afterwards.

        While an exception propagates it does nothing: over NCCL leaving waits for the other ranks, and they wait for
        this one. This process must end so that torchrun ends the others.
        """
        if self.mesh is not None and sys.exc_info()[0] is None:
            dist.destroy_process_group()


def on_main(work: Callable[[], ResultT], what: str, group: dist.ProcessGroup | None = None) -> ResultT | None:
    """Run work on rank 0 while the others wait; if it raises an error there, all ranks raise one.

    Args:
        work: The function to call on rank 0.
        what: Its description, for the message "rank 0 could not ..." on the other ranks.
        group: The ranks that take part, and whose first one works; all of them if None.

    Returns:
        The result on rank 0, None on the others.
    """
    if not dist.is_initialized():
        return work()
    result, error = None, None
    if dist.get_rank(group) == 0:
        try:
            result = work()
        except (OSError, ValueError, ImportError) as problem:
            error = problem
    failed = torch.tensor(int(error is not None), device="cpu")
    dist.all_reduce(failed, group=group)
    if error is not None:
        raise error
    if failed:
        raise OSError(f"rank 0 could not {what}; its own message says why")
    return result


def fully_shard_model(model: ModelT, mesh: DeviceMesh | None) -> ModelT:
    """Shard the model with FSDP2: a block is gathered when it runs, and its gradients are reduce-scattered as a sum."""
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    for block in getattr(model, "layers", ()):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if hasattr(model, "loss_sum"):  # so that it gathers the weights, as forward does
        register_fsdp_forward_method(model, "loss_sum")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # otherwise a factor of 1 uses an operation that gloo lacks
    return model


def _buckets(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Group the parameters by dtype, in the model's order; a missing gradient becomes 0, so that all ranks agree."""
    bucket: list[nn.Parameter] = []
    for x in model.parameters():
        if not x.requires_grad:
            continue
        if x.grad is None:
            x.grad = torch.zeros_like(x)
        if bucket and (x.dtype != bucket[0].dtype or sum(y.numel() for y in bucket) + x.numel() > BUCKET_ELEMENTS):
            yield bucket
            bucket = []
        bucket.append(x)
    if bucket:
        yield bucket

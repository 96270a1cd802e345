"""Tensor parallelism: ranks that each hold some heads of every mixer and some channels of every feed-forward.

    y = leave(mixer(enter(norm(x))))        x is whole on every rank, and so is y

    enter   the identity; its backward sums the gradients of all ranks
    leave   the sum over all ranks; its backward is the identity
    total   the sum over all ranks, forward and backward, for norms over the channels of all ranks
    gather  the channels of all ranks one after another; its backward takes the rank's own

All ranks must make the same calls in the same order. A sum has the same bits on every rank.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lineate.torch_ops.tracing import uncompiled

if TYPE_CHECKING:  # absent from builds of torch without torch.distributed
    from torch.distributed import ProcessGroup


class Ranks:
    """The ranks that share one model.

    Args:
        group: their process group; rank r of it has the r-th share of the heads.
    """

    def __init__(self, group: "ProcessGroup") -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    @uncompiled
    def enter(self, x: Tensor) -> Tensor:
        """Return x, which all ranks have, for a part of the model that the ranks share."""
        return _Sum.apply(x, self, False, True) if x.requires_grad and torch.is_grad_enabled() else x

    @uncompiled
    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks."""
        return self._sum(x, forward=True, backward=False)

    @uncompiled
    def total(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks; each rank's result depends only on its own share."""
        return self._sum(x, forward=True, backward=True)

    @uncompiled
    def gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """Return the last dimension of all ranks' x, one after another.

        Args:
            x: `... sizes[rank]`.
            sizes: how many channels each rank has.
        """
        result: Tensor = _Gather.apply(x, self, tuple(sizes))
        return result

    def sum_in_place(self, x: Tensor) -> Tensor:
        """Replace x by its sum over all ranks, without a gradient."""
        dist.all_reduce(x, group=self.group)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """Return the largest of all ranks' x, element by element, without a gradient."""
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def send_to_first(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> Iterator[Tensor]:
        """Yield every rank's x in turn on the first rank, on the CPU; nothing on the others.

        Args:
            x: this rank's tensor.
            shapes: the shapes that the ranks' tensors have.
        """
        if self.rank:
            dist.send(x.contiguous(), group=self.group, group_dst=0)
            return
        yield x.cpu()
        for rank, shape in enumerate(shapes[1:], 1):
            part = torch.empty(shape, dtype=x.dtype, device=x.device)
            dist.recv(part, group=self.group, group_src=rank)
            yield part.cpu()

    def _sum(self, x: Tensor, *, forward: bool, backward: bool) -> Tensor:
        result: Tensor = _Sum.apply(x, self, forward, backward)
        return result

    def __deepcopy__(self, memo: Any) -> "Ranks":
        return self  # a process group cannot be copied

    def __repr__(self) -> str:
        return f"Ranks(rank={self.rank}, size={self.size})"


class _Sum(torch.autograd.Function):
    """The sum over ranks in the forward, in the backward, or in both."""

    @staticmethod
    def forward(ctx, x, ranks, forward, backward):  # type: ignore[no-untyped-def]
        ctx.ranks, ctx.backward = ranks, backward
        return ranks.sum_in_place(x.contiguous().clone()) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx, d):  # type: ignore[no-untyped-def]
        return ctx.ranks.sum_in_place(d.contiguous().clone()) if ctx.backward else d, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks, sizes):  # type: ignore[no-untyped-def]
        ctx.start, ctx.size = sum(sizes[: ranks.rank]), sizes[ranks.rank]
        widest = max(sizes)
        own = F.pad(x, (0, widest - x.shape[-1])).contiguous()  # a gather needs equal sizes
        parts = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(parts, own, group=ranks.group)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    @staticmethod
    def backward(ctx, d):  # type: ignore[no-untyped-def]
        return d.narrow(-1, ctx.start, ctx.size), None, None


def rms_norm_over(ranks: Ranks, x: Tensor, weight: Tensor | None, eps: float, size: int) -> Tensor:
    """Return RMSNorm over the channels that all ranks have together; in the dtype of x, which is not half precision.

    Args:
        ranks: the ranks.
        x: this rank's channels, last.
        weight: the factors of the channels; None: no factors.
        eps: added to the mean square.
        size: the channels of all ranks.
    """
    mean = ranks.total(x.square().sum(-1, keepdim=True)) / size
    y = x * (mean + eps).rsqrt()
    return y if weight is None else y * weight

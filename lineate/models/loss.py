"""Cross-entropy as a sum, so that parts of a batch add up exactly as the whole; logits never all at once.

    L = sum_i log sum_j e^{z_ij} - z_{i, target_i},   z = x W^T,       dz = softmax(z) - onehot(target)

With a vocabulary of 150,000 the logits of 8,192 tokens are 4.9 GB in float32, and their gradient as much again. So they
are made a few thousand tokens at a time, and the gradients of x and W are computed before they are freed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lineate.native.low_precision_matmul import half_dtype, linear, times, wide_linear
from lineate.parallel.tensor.ranks import Ranks
from lineate.quantised.weight import QuantisedWeight
from lineate.rule import compute_dtype, full_precision

AT_ONCE = 2**26
"""How many logits are made at a time; if there are no more, autograd handles them in one piece."""


def loss_sum(logits: Tensor, targets: Tensor, name: str = "targets") -> tuple[Tensor, Tensor]:
    """Return the sum of -log p(target), in float32, and how many targets there are.

    logits `b t vocab`, targets `b t`; -100 means no target.

    The targets are already shifted: targets_t follows input t. name: how messages call the targets.
    """
    check_targets(targets, logits, logits.shape[-1], name)
    with full_precision(logits):
        z = logits.flatten(0, 1).to(compute_dtype(logits.dtype))
        total = F.cross_entropy(z, targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def head_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the first of loss_sum(x weight^T, targets); x `b t hidden`, weight `vocab hidden`."""
    if targets.numel() * weight.shape[0] <= AT_ONCE:
        return loss_sum(linear(x, weight), targets)[0]
    check_targets(targets, x, weight.shape[0])
    if isinstance(weight, QuantisedWeight):
        return _quantised_head_loss(x.flatten(0, 1), weight, targets.flatten())
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    result: Tensor = _HeadLoss.apply(x.flatten(0, 1), weight, targets.flatten(), dtype, None)
    return result


def _quantised_head_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of x `n hidden` for a quantised weight, which is frozen; the backward recomputes the logits."""

    def part(own: Tensor, wanted: Tensor) -> Tensor:
        return loss_sum(linear(own, weight)[None], wanted[None])[0]

    size = max(1, AT_ONCE // weight.shape[0])
    pairs = zip(x.split(size), targets.split(size), strict=True)
    return torch.stack([checkpoint(part, own, wanted, use_reentrant=False) for own, wanted in pairs]).sum()


def shared_head_loss(x: Tensor, weight: Tensor, targets: Tensor, first: int, ranks: Ranks) -> Tensor:
    """Return the first of loss_sum for a head of which every rank has some tokens; the same on all ranks.

    x `b t hidden`, targets `b t`; weight: this rank's rows of the head; first: the token of its first row.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    weight = weight.decoded() if isinstance(weight, QuantisedWeight) else weight
    own = ranks.enter(x).flatten(0, 1)
    result: Tensor = _HeadLoss.apply(own, weight, targets.flatten(), dtype, (first, ranks))
    return result


def most_bytes(tokens: int, vocab: int, hidden: int) -> int:
    """Return the most bytes that logits and what is made of them take at once: 12 a logit, in pieces two gradients."""
    if tokens * vocab <= AT_ONCE:
        return 12 * tokens * vocab
    return 12 * AT_ONCE + 4 * hidden * (tokens + vocab)


def check_targets(targets: Tensor, like: Tensor, vocab: int, name: str = "targets") -> None:
    """Check shape and values of the targets; values only if reading them does not wait for a GPU."""
    if targets.shape != like.shape[:2]:
        raise ValueError(f"{name} must have shape (b, t) = {tuple(like.shape[:2])}, got {tuple(targets.shape)}")
    if targets.device.type != "cpu" or torch.compiler.is_compiling() or not targets.numel():
        return
    low, high = (int(x) for x in targets.where(targets != -100, 0).aminmax())
    if low < 0 or high >= vocab:
        raise ValueError(f"{name} must lie in 0 .. {vocab - 1}, or be -100 for none, got {low} .. {high}")


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, dtype, shared=None):  # type: ignore[no-untyped-def]
        """x `n hidden`, targets `n`; products in dtype, the rest in float32. The gradients are of the sum.

        shared: the token of the weight's first row, and the ranks that have the others; None: it has all tokens.
        """
        exact, size = compute_dtype(dtype), max(1, AT_ONCE // len(weight))
        wide = half_dtype(x) is not None  # then products are of float32, and the weight is widened in blocks
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight, dtype=exact) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=exact, device=x.device)
        with full_precision(x):
            rounded, dtype = dtype, exact if wide else dtype
            w = weight if wide else weight.to(dtype)
            for start in range(0, len(x), size):
                part, wanted = x[start : start + size].to(dtype), targets[start : start + size]
                there = wanted != -100
                wanted = wanted.where(there, 0)[:, None]
                z = (wide_linear(part, w, None, rounded) if wide else F.linear(part, w)).to(exact)
                if shared is None:
                    own, logs = torch.ones_like(wanted, dtype=torch.bool), z.logsumexp(1, keepdim=True)
                    chosen = z.gather(1, wanted)
                else:
                    own, wanted = _own_tokens(wanted, shared[0], len(weight))
                    logs, chosen = _over_ranks(z, z.gather(1, wanted) * own, shared[1])
                total += (logs - chosen).mul(there[:, None]).sum()
                if dx is None and dweight is None:
                    continue
                dz = z.sub_(logs).exp_()
                dz.scatter_add_(1, wanted, -own.to(exact))
                dz = dz.mul_(there[:, None]).to(dtype)
                if dx is not None:
                    dx[start : start + size] = times(dz, w) if wide else dz @ w
                if dweight is not None:
                    dweight += dz.T @ part
        ctx.save_for_backward(dx, None if dweight is None else dweight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, d):  # type: ignore[no-untyped-def]
        dx, dweight = ctx.saved_tensors
        return *(None if y is None else y * d.to(y.dtype) for y in (dx, dweight)), None, None, None


def _own_tokens(wanted: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return which tokens `n 1` are among a rank's `count`, and their places there, 0 for the others."""
    places = wanted - first
    own = (places >= 0) & (places < count)
    return own, places.where(own, 0)


def _over_ranks(z: Tensor, chosen: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return log sum e^z over all ranks' logits z `n tokens`, and the sum of what each chose, `n 1`."""
    most = ranks.largest(z.amax(1, keepdim=True))
    sums = ranks.sum_in_place(torch.cat(((z - most).exp().sum(1, keepdim=True), chosen), 1))
    return most + sums[:, :1].log(), sums[:, 1:]

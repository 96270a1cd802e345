"""AdamW, and Muon, which steps along the orthogonalised average of the gradients.

    M = mu M + (1 - mu) G        D = (1 - mu) G + mu M        (Nesterov)
    W = (1 - lr weight_decay) W - lr 0.2 sqrt(max(rows, columns)) U V^T      D = U S V^T, the SVD

The factor 0.2 sqrt(...) makes a step about as long as AdamW's, so that both use the same learning rate. Muon trains the
matrices between embedding and head; AdamW trains embedding, head, convolutions, norms, biases and decays.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lineate.layers import MixtureOfExperts

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""a, b, c of X <- a X + b (X X^T) X + c (X X^T)^2 X; five steps bring singular values in (0.001, 1) to 0.7 .. 1.2."""
GATHERED_ELEMENTS = 2**26
"""The most elements that Muon gathers from other ranks and orthogonalises at once, unless one matrix has more."""


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name the weights of the linear layers in the blocks, and those of experts, `count rows columns`.

    Args:
        model: A HybridLM.
    """
    found: dict[str, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        if not prefix.startswith("layers."):
            continue
        names = ("experts_gate_up", "experts_down") if isinstance(module, MixtureOfExperts) else ("weight",)
        if isinstance(module, MixtureOfExperts | nn.Linear):
            found |= {f"{prefix}.{name}": getattr(module, name) for name in names}
    return {name: x for name, x in found.items() if min(x.shape[-2:]) > 1}


def make_optimizer(
    model: nn.Module, kind: str, lr: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """Make the optimizer of a model, with weight decay for matrices, embedding and head only.

    Args:
        model: The model, after World.wrap.
        kind: "adamw" or "muon".
        lr: Learning rate.
        weight_decay: Decoupled weight decay.
        betas: AdamW's decay rates of its two moments.
    """
    matrices = set(hidden_matrices(model).values())
    ends = {x for name, x in model.named_parameters() if name in ("embed.weight", "head.weight")}
    chosen: list[list[nn.Parameter]] = [[], [], []]
    for x in model.parameters():
        if x.requires_grad:
            chosen[0 if x in matrices else 1 if x in ends else 2].append(x)
    groups = [
        {"params": chosen[0], "weight_decay": weight_decay, "muon": kind == "muon"},
        {"params": chosen[1], "weight_decay": weight_decay, "muon": False},
        {"params": chosen[2], "weight_decay": 0.0, "muon": False},
    ]
    groups = [group for group in groups if group["params"]]
    if kind == "muon":
        return Muon(groups, lr=lr, betas=betas)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=_fused(groups))


def can_be_called_off(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step changes nothing if the tensor `found_inf` of the optimiser is 1: Muon and fused AdamW."""
    plain = [group for group in optimizer.param_groups if not group.get("muon")]
    return type(optimizer) in (Muon, torch.optim.AdamW) and all(group.get("fused") for group in plain)


class Muon(torch.optim.Optimizer):
    """Muon for the groups with muon=True, and AdamW for the others.

    As in torch's fused optimisers, a step changes nothing if the tensor `found_inf`, which may be on a GPU, is 1, and a
    group's "lr" may be a tensor without dimensions, in float32, so that a CUDA graph reads it anew in every replay.

    Args:
        groups: Parameter groups, each with "params", "weight_decay" and "muon".
        lr: Learning rate of both.
        betas: AdamW's decay rates of its two moments.
        momentum: Muon's decay rate of the average of gradients.
        eps: AdamW's term in the denominator.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.95,
        eps: float = 1e-8,
    ) -> None:
        groups = list(groups)
        super().__init__(groups, {"lr": lr, "betas": betas, "momentum": momentum, "eps": eps, "weight_decay": 0.0})
        others = [group for group in self.param_groups if not group["muon"]]
        self._adamw = torch.optim.AdamW([dict(group) for group in others], fused=_fused(groups)) if others else None
        for group, whole in zip(others, self._adamw.param_groups if self._adamw else (), strict=True):
            group.update(whole)  # options that AdamW's step reads

        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one step; closures are not supported."""
        assert closure is None
        others = [group for group in self.param_groups if not group["muon"]]
        if self._adamw is not None:
            self._adamw.state, self._adamw.param_groups = self.state, others  # load_state_dict replaces both
            self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
            self._adamw.step()
        for group in self.param_groups:
            if group["muon"]:
                self._step_matrices(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Step the matrices of a group; those of one shape are orthogonalised together, up to GATHERED_ELEMENTS."""
        bad = None if self.found_inf is None else self.found_inf > 0
        fresh = _unless(bad, 1 - group["momentum"], 0.0, group["params"][0].dtype)
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for x in group["params"]:
            if x.grad is None:
                continue
            state = self.state[x]
            if not state:
                state["momentum"] = torch.zeros_like(x)
            if bad is not None:
                x.grad.masked_fill_(bad, 0.0)
            state["momentum"].lerp_(x.grad, fresh)
            shapes.setdefault(tuple(x.shape[-2:]), []).append(x)
        for same in shapes.values():
            some: list[nn.Parameter] = []
            for x in same:
                if some and sum(y.numel() for y in some) + x.numel() > GATHERED_ELEMENTS:
                    self._move(some, group, bad)
                    some = []
                some.append(x)
            self._move(some, group, bad)

    def _move(self, matrices: list[nn.Parameter], group: dict[str, Any], bad: Tensor | None) -> None:
        """Orthogonalise the updates of matrices of one shape and apply them, unless `bad` is true."""
        shape, lr, momentum = matrices[0].shape[-2:], group["lr"], group["momentum"]
        lr = lr.double() if isinstance(lr, Tensor) else lr  # Python's floats have as many bits
        updates = []
        for x in matrices:
            assert x.grad is not None
            update = x.grad.lerp(self.state[x]["momentum"], momentum)
            update = update.full_tensor() if isinstance(update, DTensor) else update
            updates.append(update.reshape(-1, *shape))
        length, moved = -lr * 0.2 * max(shape) ** 0.5, orthogonalize(torch.cat(updates))
        if isinstance(length, Tensor):  # alpha, below, is a number that a CUDA graph would keep
            wide = torch.promote_types(moved.dtype, torch.float32)
            moved, length = moved.to(wide) * length.to(wide), 1.0
        parts = moved.split([len(update) for update in updates])
        kept = _unless(bad, 1 - lr * group["weight_decay"], 1.0, matrices[0].dtype)
        for x, part in zip(matrices, parts, strict=True):
            x.mul_(kept)
            if bad is not None:
                part.masked_fill_(bad, 0.0)
            x.add_(_like(part.view(x.shape), x), alpha=length)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return nearly U V^T of each matrix U S V^T, by Newton-Schulz, with products in bfloat16 on a GPU; 0 stays 0.

    Args:
        matrices: Matrices `n rows columns`.
        steps: How many Newton-Schulz steps to make.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(matrices.dtype)


def _unless(bad: Tensor | None, factor: float | Tensor, instead: float, dtype: torch.dtype) -> Any:
    """Return a factor for tensors of a dtype, or its replacement if `bad`, with one element, is true."""
    wide = torch.promote_types(dtype, torch.float32)
    factor = factor.to(wide) if isinstance(factor, Tensor) else factor
    if bad is None:
        return factor
    made = factor if isinstance(factor, Tensor) else torch.full((), factor, dtype=wide, device=bad.device)
    return made.masked_fill(bad, instead)


def _like(whole: Tensor, x: Tensor) -> Tensor:
    """Shard a tensor that every rank has completely in the same way as x, without communication."""
    if not isinstance(x, DTensor):
        return whole
    everywhere = [Replicate()] * x.device_mesh.ndim
    return DTensor.from_local(whole, x.device_mesh, everywhere, run_check=False).redistribute(placements=x.placements)


def _fused(groups: Iterable[dict[str, Any]]) -> bool | None:
    """Return AdamW's option `fused`: one kernel for all parameters if they are on a GPU."""
    return True if all(x.is_cuda for group in groups for x in group["params"]) else None

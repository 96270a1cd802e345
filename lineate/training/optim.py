"""AdamW, and Muon: steps along the orthogonalised average of the gradients.

    M = mu M + (1 - mu) G        U = (1 - mu) G + mu M        (Nesterov)
    W = (1 - lr weight_decay) W - lr 0.2 sqrt(max(rows, columns)) U V^T      U S V^T the singular values of U

The factor makes a step about as long as one of AdamW, so that both share a learning rate. Muon is for the matrices
between embedding and head; embeddings, head, convolutions, norms, biases and decays have AdamW.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lineate.layers import MixtureOfExperts

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""a X + b (X X^T) X + c (X X^T)^2 X: five of these bring singular values in (0.001, 1) to about 0.7 .. 1.2."""
GATHERED_ELEMENTS = 2**26
"""Elements that Muon orthogonalises at a time, if one matrix has not more: what a rank gathers of others' shards."""


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name: weights of the linear layers inside the blocks, and of the experts, `count rows columns`."""
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
    """kind "adamw" or "muon". Only matrices, the embedding and the head decay."""
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


class Muon(torch.optim.Optimizer):
    """Muon for the groups with muon=True, AdamW for the others."""

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
            group.update(whole)  # what AdamW's step reads beside our own

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        others = [group for group in self.param_groups if not group["muon"]]
        if self._adamw is not None:
            self._adamw.state, self._adamw.param_groups = self.state, others  # load_state_dict replaces both
            self._adamw.step()
        for group in self.param_groups:
            if group["muon"]:
                self._step_matrices(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Matrices of one shape are orthogonalised together, up to GATHERED_ELEMENTS of their elements."""
        momentum = group["momentum"]
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for x in group["params"]:
            if x.grad is None:
                continue
            state = self.state[x]
            if not state:
                state["momentum"] = torch.zeros_like(x)
            state["momentum"].lerp_(x.grad, 1 - momentum)
            shapes.setdefault(tuple(x.shape[-2:]), []).append(x)
        for same in shapes.values():
            some: list[nn.Parameter] = []
            for x in same:
                if some and sum(y.numel() for y in some) + x.numel() > GATHERED_ELEMENTS:
                    self._move(some, group)
                    some = []
                some.append(x)
            self._move(some, group)

    def _move(self, matrices: list[nn.Parameter], group: dict[str, Any]) -> None:
        shape, lr, momentum = matrices[0].shape[-2:], group["lr"], group["momentum"]
        updates = []
        for x in matrices:
            assert x.grad is not None
            update = x.grad.lerp(self.state[x]["momentum"], momentum)
            update = update.full_tensor() if isinstance(update, DTensor) else update
            updates.append(update.reshape(-1, *shape))
        parts = orthogonalize(torch.cat(updates)).split([len(update) for update in updates])
        for x, part in zip(matrices, parts, strict=True):
            x.mul_(1 - lr * group["weight_decay"])
            x.add_(_like(part.view(x.shape), x), alpha=-lr * 0.2 * max(shape) ** 0.5)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """`n rows columns` -> nearly U V^T of each, by Newton-Schulz; products in bfloat16 on a GPU. Zero stays zero."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(matrices.dtype)


def _like(whole: Tensor, x: Tensor) -> Tensor:
    """A tensor that every rank has whole, split as x is; no bytes move."""
    if not isinstance(x, DTensor):
        return whole
    everywhere = [Replicate()] * x.device_mesh.ndim
    return DTensor.from_local(whole, x.device_mesh, everywhere, run_check=False).redistribute(placements=x.placements)


def _fused(groups: Iterable[dict[str, Any]]) -> bool | None:
    """One kernel for all parameters, on a GPU."""
    return True if all(x.is_cuda for group in groups for x in group["params"]) else None

"""Cross-entropy as a sum and a count, so that parts of a batch add up exactly as the whole."""

import torch
import torch.nn.functional as F
from torch import Tensor


def loss_sum(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """sum of -log p(target), in float32, and how many targets there are; logits `b t vocab`, targets `b t`, -100: none.

    The targets are already shifted: targets_t is what follows input t.
    """
    if targets.shape != logits.shape[:2]:
        raise ValueError(f"targets must have shape (b, t) = {tuple(logits.shape[:2])}, got {tuple(targets.shape)}")
    with torch.autocast(logits.device.type, enabled=False):
        total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()

"""The trail of a model: the states of all its layers after each of a few guessed tokens."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lineate.layers import LayerState, Memory
from lineate.layers.counts import Counts
from lineate.layers.trail import Trail
from lineate.models.state import ModelState


@dataclass(frozen=True)
class ModelTrail:
    """The states of a model after each of t guessed tokens a row.

    Args:
        layers: the trail of every layer.
        lengths: tokens before the guesses; (rows,) int64 if the rows differ.
        rows: rows of the batch.
        t: guessed tokens a row.
    """

    layers: tuple[Trail, ...]
    lengths: int | Tensor
    rows: int
    t: int

    @torch.no_grad()
    def after(self, counts: Tensor, into: ModelState | None = None) -> ModelState:
        """Return the state whose row r has read the first counts[r] tokens; 0 is the state that was given.

        On a GPU nothing waits for the device. Counts on a CPU avoid copies, and keep the caches as short as can be.

        Args:
            counts: `rows`, int, each in 0 .. t.
            into: a state whose memories are overwritten with the new ones; it may be the one that was given, and then
                the trail must not be used again. Caches are always cut in place, at the first call.
        """
        shared = Counts.of(counts, self.rows, self.t)
        given: tuple[LayerState | None, ...] = (None,) * len(self.layers) if into is None else into.layers
        layers = tuple(
            layer.after(shared, old.tensors if isinstance(old, Memory) else None)
            for layer, old in zip(self.layers, given, strict=True)
        )
        if counts.device.type == "cpu" and isinstance(self.lengths, int) and int(counts.min()) == int(counts.max()):
            return ModelState(layers, self.lengths + int(counts[0]))
        device = next(iter(layers[0].tensors.values())).device
        return ModelState(layers, self.lengths + shared.on(device))


class TrailOutput(NamedTuple):
    """The result of HybridLM.trail.

    Args:
        logits: `b t vocab`.
        trail: the states after each token.
        hidden: the inputs of the head, `b t hidden`.
    """

    logits: Tensor
    trail: ModelTrail
    hidden: Tensor

"""What a model remembers of the texts it has read: one state a layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lineate.layers import LayerState


@dataclass(frozen=True)
class ModelState:
    """One state a layer, and how many tokens each row has seen. A value: continuing it leaves it as it was."""

    layers: tuple[LayerState, ...]
    lengths: int | Tensor
    """Tokens seen; (rows,) int64 if the rows differ."""

    @property
    def rows(self) -> int:
        return self.layers[0].rows

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' states."""
        return sum(layer.nbytes for layer in self.layers)

    def select(self, rows: Tensor) -> "ModelState":
        """These rows, in this order: for beams, or to drop a text that has ended."""
        lengths = self.lengths if isinstance(self.lengths, int) else self.lengths[rows.to(self.lengths.device)]
        return ModelState(tuple(layer.select(rows) for layer in self.layers), lengths)

    def detach(self) -> "ModelState":
        """Without gradients."""
        return ModelState(tuple(layer.detach() for layer in self.layers), self.lengths)

    def to(self, device: torch.device | str) -> "ModelState":
        """On another device."""
        lengths = self.lengths if isinstance(self.lengths, int) else self.lengths.to(device)
        return ModelState(tuple(layer.to(device) for layer in self.layers), lengths)

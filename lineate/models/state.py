"""The state of a model after the tokens it has read: one state a layer."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lineate.layers import LayerState
from lineate.layers.state import join_lengths, register_tree


@dataclass(frozen=True)
class ModelState:
    """One state a layer, and how many tokens each row has seen. Continuing a state does not change it.

    torch.save and torch.load support it.

    Args:
        layers: the state of every layer.
        lengths: tokens seen; (rows,) int64 if the rows differ.
    """

    layers: tuple[LayerState, ...]
    lengths: int | Tensor

    def __repr__(self) -> str:
        """Describe the layers with counts of equal ones; no value is read."""
        counts: dict[str, int] = {}
        for layer in map(repr, self.layers):
            counts[layer] = counts.get(layer, 0) + 1
        layers = "; ".join(f"{count} x {layer}" for layer, count in counts.items())
        lengths = self.lengths if isinstance(self.lengths, int) else "of each row"
        return f"ModelState(rows={self.rows}, lengths={lengths}, nbytes={self.nbytes}, layers: {layers})"

    @property
    def rows(self) -> int:
        """The rows of the first layer that has a state; 0 if no layer has one."""
        return next((layer.rows for layer in self.layers if layer.names), 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' states."""
        return sum(layer.nbytes for layer in self.layers)

    def select(self, rows: Tensor) -> "ModelState":
        """Return these rows, in this order: for beams, or to drop a sequence that has ended."""
        lengths = self.lengths if isinstance(self.lengths, int) else self.lengths[rows.to(self.lengths.device)]
        return ModelState(tuple(layer.select(rows) for layer in self.layers), lengths)

    @staticmethod
    def join(states: Iterable["ModelState"]) -> "ModelState":
        """Return the rows of several states of one model, each at its own length; the inverse of select."""
        states = list(states)
        if not states or any(len(state.layers) != len(states[0].layers) for state in states):
            found = ", ".join(str(len(state.layers)) for state in states) or "none"
            raise ValueError(f"states must be one or more of one model, with as many layers each, got {found}")
        layers = tuple(_join(own) for own in zip(*(state.layers for state in states), strict=True))
        lengths = [(state.rows, state.lengths) for state in states]
        device = next((x.device for layer in layers for x in layer.tensors.values()), torch.device("cpu"))
        return ModelState(layers, join_lengths(lengths, device))

    def detach(self) -> "ModelState":
        """Return the state without gradients."""
        return ModelState(tuple(layer.detach() for layer in self.layers), self.lengths)

    def to(self, device: torch.device | str) -> "ModelState":
        """Return the state on another device."""
        lengths = self.lengths if isinstance(self.lengths, int) else self.lengths.to(device)
        return ModelState(tuple(layer.to(device) for layer in self.layers), lengths)


def _join(states: tuple[LayerState, ...]) -> LayerState:
    return type(states[0]).join(states)  # type: ignore[arg-type]


def _leaves(state: ModelState) -> tuple[list[Any], None]:
    return [state.layers, state.lengths], None


def _state_of(leaves: Iterable[Any], context: None) -> ModelState:
    return ModelState(*leaves)


register_tree(ModelState, _leaves, _state_of, lambda state: ("layers", "lengths"))
torch.serialization.add_safe_globals([ModelState])  # so that torch.load accepts a saved state

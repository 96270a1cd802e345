"""The rings of the memories of a model: every step reads the memories, and writes them at every n-th token alone."""

from dataclasses import replace

import torch
from torch import Tensor

from lineate.decoding.in_place import Tensors
from lineate.layers import Memory
from lineate.layers.formats import StateFormat
from lineate.layers.mixer import LinearMixer
from lineate.models.hybrid import HybridLM
from lineate.models.state import ModelState
from lineate.ops.rings import MOST


class MemoryRings:
    """The rings of all memories that may have one, with the lengths of the rows as their common counter.

        rings = MemoryRings(model, memories, lengths, every, format)
        state = rings.added_to(state, rows)        # the next call reads and extends them; then lengths grow by 1
        rings.complete(copy, slice(None))          # a copy of the memories gets all tokens

    Args:
        model: The model.
        memories: Tensors `rows ...` by layer and name; they must stay where they are.
        lengths: The tokens of each row, `rows`, which the caller advances.
        every: The tokens after which a memory is written.
        format: The format of the memories.
    """

    def __init__(self, model: HybridLM, memories: Tensors, lengths: Tensor, every: int, format: StateFormat) -> None:
        self._lengths, self._format, self.every = lengths, format, every
        self.folded = lengths.clone()
        """The length of each row when its rings were last empty."""
        self.rings = {
            n: mixer.ring(memories[n]["memory"], every, (lengths, self.folded))
            for n, mixer in mixers_with_rings(model).items()
        }

    def added_to(self, state: ModelState, rows: int) -> ModelState:
        """Return the state of the first rows with their rings.

        Args:
            state: Of in_place.state_in_place.
            rows: The number of its rows.
        """
        layers = list(state.layers)
        for n, ring in self.rings.items():
            own = layers[n]
            assert isinstance(own, Memory)
            layers[n] = replace(own, ring=ring.part(slice(rows)))
        return ModelState(tuple(layers), state.lengths)

    @torch.no_grad()
    def complete(self, copied: ModelState, rows: slice) -> None:
        """Write all entries into a copy of the memories; the memories and the rings are unchanged, so later steps, too.

        Args:
            copied: The copy, as in_place.copied returns it; its memories are written.
            rows: The rows that it has.
        """
        seeds = self._format.seeds(self._lengths[rows] - 1)  # of the last token
        for n, ring in self.rings.items():
            own = ring.part(rows, copied.layers[n]["memory"])
            own.write(None, seeds if own.state.dtype is torch.bfloat16 else None)


def mixers_with_rings(model: HybridLM) -> dict[int, LinearMixer]:
    """Return the mixers by layer whose memories may be written at every n-th token alone; raise if there is none."""
    mixers = {n: block.mixer for n, block in enumerate(model.layers)}
    found = {n: mixer for n, mixer in mixers.items() if isinstance(mixer, LinearMixer) and mixer.takes_ring}
    if not found:
        raise ValueError(
            "state_every needs a layer whose memory can wait to be written (gated linear attention, DeltaNet, Gated "
            f"DeltaNet, Kimi Delta Attention, Mamba-2), got the pattern {model.config.pattern!r}; leave it None"
        )
    return found


def check_state_every(every: object) -> int | None:
    """Return state_every; raise unless it is None or an int in 2 .. MOST."""
    if every is None:
        return None
    if isinstance(every, bool) or not isinstance(every, int) or not 2 <= every <= MOST:
        raise ValueError(f"state_every must be None or an int between 2 and {MOST}, got {every!r}")
    return every

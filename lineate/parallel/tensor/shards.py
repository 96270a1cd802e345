"""The division of a mixer among the ranks of tensor parallelism: each rank has some of the heads.

A rank's mixer is an ordinary one with fewer heads, so its configuration describes it, and its parameters are slices of
the whole mixer's. A row of the registry says both:

    Shard(divide=lambda config, ranks: replace(config, heads=share_out("heads", config.heads, ranks)),
          cuts=lambda mixer: {"in_proj.weight": Cut(0, Part(mixer.width, mixer.heads), ...)})

A parameter without a cut is whole on every rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Part:
    """Channels that follow each other in one dimension of a parameter.

    Args:
        width: how many there are.
        units: the heads that they belong to, in their order; 0: every rank has all of these channels.
    """

    width: int
    units: int = 0

    def range(self, rank: int, ranks: int) -> tuple[int, int]:
        """Return the first and the last + 1 of the channels that a rank has.

        Args:
            rank: the place of the rank.
            ranks: how many there are; they divide the units, or the units divide them, and then several have the same.
        """
        if not self.units or not self.width:
            return 0, self.width
        held = max(self.units // ranks, 1) * (self.width // self.units)
        first = rank * self.units // ranks * (self.width // self.units)
        return first, first + held

    def held_by_several(self, ranks: int) -> bool:
        """Whether ranks replicate channels, so that their gradients must be summed."""
        return ranks > max(self.units, 1)


@dataclass(frozen=True)
class Cut:
    """The division of one dimension of a parameter: in parts, each by its own heads.

    Args:
        dim: the dimension.
        parts: they follow each other, and together are the whole dimension.
    """

    dim: int
    parts: tuple[Part, ...]

    def ranges(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        """Return the first and the last + 1 index of every part that a rank has, in the whole parameter."""
        found, start = [], 0
        for part in self.parts:
            first, last = part.range(rank, ranks)
            found.append((start + first, start + last))
            start += part.width
        return found


Cuts = Mapping[str, Cut]
"""The cuts of a module's parameters and buffers, by name."""


@dataclass(frozen=True)
class Shard:
    """The division of a kind of mixer.

    Args:
        divide: (config, ranks) -> the configuration of one rank's mixer; ValueError if the heads do not divide.
        cuts: (the whole mixer) -> the cuts of its parameters.
    """

    divide: Callable[[Any, int], Any]
    cuts: Callable[[Any], Cuts]


def share_out(name: str, count: int, ranks: int, *, several: bool = False) -> int:
    """Return how many of `count` heads or channels a rank has; raise if they cannot be shared out.

    Args:
        name: their name in the message.
        count: how many there are.
        ranks: how many ranks share them.
        several: whether several ranks may have the same one, if there are fewer than ranks.
    """
    if count % ranks == 0:
        return count // ranks
    if several and ranks % count == 0:
        return 1
    or_fewer = ", or be a multiple of it" if several else ""
    raise ValueError(f"tensor must divide {name} = {count}{or_fewer}, got {ranks}")


def linear_cuts(name: str, linear: nn.Linear, dim: int, parts: tuple[Part, ...]) -> dict[str, Cut]:
    """Return the cuts of a projection's weight, and of its bias if the outputs are cut."""
    cuts = {f"{name}.weight": Cut(dim, parts)}
    return cuts | {f"{name}.bias": Cut(0, parts)} if linear.bias is not None and dim == 0 else cuts

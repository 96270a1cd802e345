"""One layer of every kind with a memory of fixed size, as the registry makes it, under the names used in results."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from lineate.layers import MixerKind, kinds
from lineate.layers.configs import LinearConfig, MemoryConfig
from lineate.layers.registry import Sizes


def name_of(kind: MixerKind) -> str:
    """Return the name of a kind in tables and results."""
    return "KDA" if kind.short == "kda" else kind.label


def make_linear(hidden: int, heads: int) -> dict[str, Callable[[], nn.Module]]:
    """Return functions that make a layer of each linear rule, by name."""
    dim = hidden // heads
    config = LinearConfig(heads, heads, dim, dim)
    return {name_of(kind): partial(kind.make, Sizes(hidden), config) for kind in kinds() if kind.section == "linear"}


def make_learning(hidden: int, heads: int) -> dict[str, Callable[[], nn.Module]]:
    """Return functions that make a layer of each memory that learns, by name; Titans also with two matrices."""
    made: dict[str, Callable[[], nn.Module]] = {}
    for kind in kinds():
        if kind.section == "memory":
            config = MemoryConfig(heads, hidden // heads, conv_size=0 if kind.name == "lact" else 4)  # as published
            made[name_of(kind)] = partial(kind.make, Sizes(hidden), config)
            if kind.name == "titans":
                made["Titans MLP"] = partial(kind.make, Sizes(hidden), replace(config, titans="mlp"))
    return made

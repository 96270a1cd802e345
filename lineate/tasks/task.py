"""The type of a task: it makes batches on the device from (seed, step), and checks its sizes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lineate.console.names import nearest

NOTHING = -100
"""The target of tokens that are not queried."""
STREAMS = ("train", "test")


@dataclass(frozen=True)
class TaskSizes:
    """The sizes of a row; each task reads its own fields."""

    length: int
    """Tokens a row."""
    pairs: int = 1
    """Key-value pairs, or tokens to remember."""
    vocab: int = 64
    """How many different tokens there are."""
    writes: int = 4
    """Overwriting: how often each key is written."""
    modulus: int = 5
    """Counting and arithmetic: the number that results are taken modulo."""
    keys: int = 8
    """Erasing and adding: how many keys there are."""
    values: int = 4
    """Erasing and adding: how many values there are."""
    noise: bool = False
    """Recall: whether random tokens, not zeros, stand between the queries."""


Make = Callable[[int, TaskSizes, torch.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Task:
    """One task."""

    name: str
    """Its name on the command line."""
    summary: str
    """The question, in one sentence."""
    make: Make
    """make(rows, sizes, generator) returns ids and targets, both int64 `rows length` on the generator's device."""
    asked: Callable[[TaskSizes], int]
    """The number of targets a row, which is the same in all rows."""
    obstacle: Callable[[TaskSizes], str | None]
    """Returns a message about invalid sizes, with a remedy, or None."""
    default: TaskSizes
    """The default sizes."""
    uses: tuple[str, ...]
    """The sizes that it reads besides length."""
    dense: bool = False
    """Whether tokens are queried from the start of a row on; accuracy is then that of the second half of a row."""
    tokens: Callable[[TaskSizes], int] = lambda sizes: sizes.vocab
    """Returns how many different tokens there are."""

    def check(self, sizes: TaskSizes) -> None:
        """Refuse sizes that cannot be made."""
        for name in ("length", "pairs", "vocab", "writes", "modulus", "keys", "values"):
            if getattr(sizes, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(sizes, name)}")
        if wrong := self.obstacle(sizes):
            raise ValueError(f"{self.name}: {wrong}")

    def shrink(self, sizes: TaskSizes, factor: int) -> TaskSizes:
        """Return the sizes of the same task with rows, and pairs, smaller by a factor: a stage of a curriculum."""
        return replace(
            sizes,
            length=max(2, sizes.length // factor // 2 * 2),
            pairs=max(1, sizes.pairs // factor) if "pairs" in self.uses else sizes.pairs,
        )

    def batch(
        self,
        rows: int,
        sizes: TaskSizes,
        *,
        seed: int,
        step: int,
        stream: str = "train",
        device: torch.device | str = "cpu",
    ) -> tuple[Tensor, Tensor]:
        """Return ids and targets of a step: the same for the same arguments, and others for testing."""
        return self.make(rows, sizes, seeded(seed, step, stream, device))


def seeded(seed: int, step: int, stream: str, device: torch.device | str) -> torch.Generator:
    """Return a generator on the device whose numbers depend on all of these."""
    mixed = 0
    for part in (seed, STREAMS.index(stream), step):
        mixed = _scramble(mixed ^ _scramble(part + 1))
    return torch.Generator(device).manual_seed(mixed >> 1)


def _scramble(x: int) -> int:
    """Return splitmix64 of a number: neighbouring numbers become unrelated ones."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def uniform(low: int, high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return whole numbers of low .. high - 1, int64."""
    return torch.randint(low, high, shape, generator=generator, device=generator.device)


def distinct(low: int, high: int, rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Return `rows count` different numbers of low .. high - 1 in every row, in random order."""
    draws = torch.rand(rows, high - low, generator=generator, device=generator.device)
    return draws.topk(count).indices + low


def blank(rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return ids of 0 and targets without queries."""
    ids = torch.zeros(rows, length, dtype=torch.int64, device=generator.device)
    return ids, torch.full_like(ids, NOTHING)


def find(name: str, tasks: dict[str, Task]) -> Task:
    """Return a task by its name."""
    if name not in tasks:
        raise ValueError(f"task must be one of {', '.join(tasks)}, got {name!r}{nearest(name, tasks)}")
    return tasks[name]

"""Tasks of memories that are changed in one way only: tokens that erase without writing, or add without erasing.

A row alternates changes and questions. Every token names an operation and all of its operands, so that one token is one
change of the memory, and no convolution is needed. The questions are of random keys.
"""

import torch
from torch import Tensor

from lineate.tasks.task import Task, TaskSizes, blank, uniform


def make_erasing(rows: int, sizes: TaskSizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Set a key to a value, or (a third of the changes) clear it; a question is answered by value + 1, or 0: nothing.

    Tokens: set key, value is values key + value; then come `clear key`, then `what has key`.
    """
    keys, values, n = sizes.keys, sizes.values, sizes.length // 2
    key, value, asked = (uniform(0, most, (rows, n), generator) for most in (keys, values, keys))
    cleared = uniform(0, 3, (rows, n), generator) == 0
    ids, targets = blank(rows, sizes.length, generator)
    ids[:, 0::2] = torch.where(cleared, keys * values + key, values * key + value)
    ids[:, 1::2] = keys * values + keys + asked
    held = torch.where(cleared, 0, value + 1)
    latest = _latest(key, torch.ones_like(cleared), keys).gather(2, asked[..., None])[..., 0]
    targets[:, 1::2] = torch.where(latest < 0, 0, held.gather(1, latest.clamp(min=0)))
    return ids, targets


def make_adding(rows: int, sizes: TaskSizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Add a value to those that a key has, or clear the key; a question is whether a key has a value: 1 or 0.

    A change clears with probability 1 / (values + 1), so that in the long run half of the answers are 1. Tokens: add
    value to key is values key + value; then come `clear key`, then `has key the value`.
    """
    keys, values, n = sizes.keys, sizes.values, sizes.length // 2
    key, value, asked_key, asked_value = (
        uniform(0, most, (rows, n), generator) for most in (keys, values, keys, values)
    )
    cleared = uniform(0, values + 1, (rows, n), generator) == 0
    ids, targets = blank(rows, sizes.length, generator)
    ids[:, 0::2] = torch.where(cleared, keys * values + key, values * key + value)
    asked = values * asked_key + asked_value
    ids[:, 1::2] = keys * values + keys + asked
    added = _latest(values * key + value, ~cleared, keys * values).gather(2, asked[..., None])
    gone = _latest(key, cleared, keys).gather(2, asked_key[..., None])
    targets[:, 1::2] = (added > gone)[..., 0].long()
    return ids, targets


def _latest(which: Tensor, counts: Tensor, kinds: int) -> Tensor:
    """Return `rows n kinds`: the place of the latest token of each kind up to each place, -1 if there is none.

    Args:
        which: the kind of each token, `rows n`.
        counts: whether it counts, `rows n`.
        kinds: how many kinds there are.
    """
    places = torch.arange(which.shape[1], device=which.device)[:, None]
    here = (which[..., None] == torch.arange(kinds, device=which.device)) & counts[..., None]
    return torch.where(here, places, -1).cummax(1).values


def _obstacle(sizes: TaskSizes) -> str | None:
    return f"length must be even, half of the tokens are questions, got {sizes.length}" if sizes.length % 2 else None


STREAM_TASKS = (
    Task(
        "erasing", "keys are set and cleared, and asked for between", make_erasing, lambda s: s.length // 2, _obstacle,
        TaskSizes(64, keys=8, values=4), ("keys", "values"), dense=True, tokens=lambda s: s.keys * (s.values + 2),
    ),
    Task(
        "adding", "values are added to what keys have, and keys cleared", make_adding, lambda s: s.length // 2,
        _obstacle, TaskSizes(64, keys=2, values=16), ("keys", "values"), dense=True,
        tokens=lambda s: s.keys * (2 * s.values + 1),
    ),
)  # fmt: skip

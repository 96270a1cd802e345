"""Tasks of remembering: recall, overwriting, needle, copying, selective copying, induction.

Keys are of the lower half of the vocabulary without 0, values of the upper half. 0 is an empty position.
"""

import torch
from torch import Tensor

from lineate.tasks.task import Task, TaskSizes, blank, distinct, uniform

POWER = 0.01
"""The power of the law by which queries are placed, most of them soon after the pairs: p(i) ~ i^(POWER - 1)."""


def make_recall(rows: int, sizes: TaskSizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make Zoology's multi-query associative recall: pairs, then every key once, at an even position of the rest."""
    ids, targets = blank(rows, sizes.length, generator)
    keys = distinct(1, sizes.vocab // 2, rows, sizes.pairs, generator)
    values = distinct(sizes.vocab // 2, sizes.vocab, rows, sizes.pairs, generator)
    context = 2 * sizes.pairs
    ids[:, 0:context:2], ids[:, 1:context:2] = keys, values
    _ask(ids, targets, context, keys, values, generator)
    if sizes.noise:
        ids = torch.where(ids == 0, uniform(0, sizes.vocab, tuple(ids.shape), generator), ids)
    return ids, targets


def make_overwriting(rows: int, sizes: TaskSizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Write every key `writes` times, in random order, each time with a new value; query the latest."""
    ids, targets = blank(rows, sizes.length, generator)
    n, total = sizes.pairs, sizes.pairs * sizes.writes
    keys = distinct(1, sizes.vocab // 2, rows, n, generator)
    order = distinct(0, total, rows, total, generator) % n  # which key each write is of
    written = uniform(sizes.vocab // 2, sizes.vocab, (rows, total), generator)
    ids[:, 0 : 2 * total : 2], ids[:, 1 : 2 * total : 2] = keys.gather(1, order), written
    moments = torch.arange(total, device=ids.device).expand(rows, total)
    latest = torch.zeros_like(keys).scatter_reduce(1, order, moments, "amax")
    asked = distinct(0, n, rows, n, generator)  # so that the order of queries is not that of `keys`
    _ask(ids, targets, 2 * total, keys.gather(1, asked), written.gather(1, latest).gather(1, asked), generator)
    return ids, targets


def _ask(ids: Tensor, targets: Tensor, start: int, keys: Tensor, values: Tensor, generator: torch.Generator) -> None:
    """Put every key at an even position after `start`, with its value as target there; in place."""
    rows, space = len(ids), (ids.shape[1] - start) // 2
    weight = torch.arange(1, space + 1, device=ids.device, dtype=torch.float32) ** (POWER - 1)
    # The largest weight / exponential are positions drawn by weight, without replacement, in the order of the draws.
    luck = torch.empty(rows, space, device=ids.device).exponential_(generator=generator)
    places = start + 2 * (weight / luck).topk(keys.shape[1]).indices
    ids.scatter_(1, places, keys)
    targets.scatter_(1, places, values)


def make_needle(rows: int, sizes: TaskSizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Put pairs at random positions in noise that has no keys and no values; the last token queries one of them.

    Noise is of the first quarter of the vocabulary, keys are of the second, values of the upper half.
    """
    quarter, half, n = sizes.vocab // 4, sizes.vocab // 2, sizes.pairs
    ids = uniform(0, quarter, (rows, sizes.length), generator)
    keys = distinct(quarter, half, rows, n, generator)
    values = uniform(half, sizes.vocab, (rows, n), generator)
    places = 2 * distinct(0, (sizes.length - 1) // 2, rows, n, generator)
    ids.scatter_(1, places, keys).scatter_(1, places + 1, values)
    targets = blank(rows, sizes.length, generator)[1]
    ids[:, -1], targets[:, -1] = keys[:, 0], values[:, 0]  # which comes first is random already
    return ids, targets


def make_copying(rows: int, sizes: TaskSizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make random tokens, 0, and the same tokens again, each predicted from the one before it."""
    ids, targets = blank(rows, sizes.length, generator)
    n = sizes.length // 2
    tokens = uniform(1, sizes.vocab, (rows, n), generator)
    ids[:, :n], ids[:, n + 1 :], targets[:, n:] = tokens, tokens[:, :-1], tokens
    return ids, targets


def make_selective(rows: int, sizes: TaskSizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Put `pairs` tokens between many 0; at the end are equally many 1, where they are queried in order."""
    ids, targets = blank(rows, sizes.length, generator)
    n = sizes.pairs
    places = distinct(0, sizes.length - n, rows, n, generator).sort(1).values
    tokens = uniform(2, sizes.vocab, (rows, n), generator)
    ids.scatter_(1, places, tokens)
    ids[:, -n:], targets[:, -n:] = 1, tokens
    return ids, targets


def make_induction(rows: int, sizes: TaskSizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make random tokens with one 0 among them and a 0 at the end, which queries the token after the first."""
    ids = uniform(1, sizes.vocab, (rows, sizes.length), generator)
    place = uniform(0, sizes.length - 2, (rows, 1), generator)
    targets = blank(rows, sizes.length, generator)[1]
    targets[:, -1:] = ids.gather(1, place + 1)
    ids.scatter_(1, place, 0)
    ids[:, -1] = 0
    return ids, targets


def _room(sizes: TaskSizes, tokens: int) -> str | None:
    """Return a message if a row lacks room for the tokens, or the vocabulary for the keys."""
    if tokens > sizes.length:
        return (
            f"pairs must leave room for the queries: {sizes.pairs} pairs need a length of at least {tokens}, "
            f"got {sizes.length}; use fewer pairs or a longer row"
        )
    if sizes.pairs >= sizes.vocab // 2:
        return f"vocab must be above {2 * sizes.pairs + 1} for {sizes.pairs} pairs, got {sizes.vocab}"
    return None


def _needle_obstacle(sizes: TaskSizes) -> str | None:
    if sizes.pairs > sizes.vocab // 4:
        return f"vocab must be at least {4 * sizes.pairs} for {sizes.pairs} pairs, got {sizes.vocab}"
    return _room(sizes, 2 * sizes.pairs + 1)


def _copying_obstacle(sizes: TaskSizes) -> str | None:
    if sizes.length % 2:
        return f"length must be even, one half is the copy of the other, got {sizes.length}"
    return None if sizes.vocab > 2 else f"vocab must be at least 3, got {sizes.vocab}"


def _selective_obstacle(sizes: TaskSizes) -> str | None:
    if 2 * sizes.pairs > sizes.length:
        return f"length must be at least {2 * sizes.pairs} for {sizes.pairs} tokens to remember, got {sizes.length}"
    return None if sizes.vocab > 3 else f"vocab must be at least 4, got {sizes.vocab}"


def _induction_obstacle(sizes: TaskSizes) -> str | None:
    if sizes.length < 3:
        return f"length must be at least 3, got {sizes.length}"
    return None if sizes.vocab > 2 else f"vocab must be at least 3, got {sizes.vocab}"


MEMORY_TASKS = (
    Task(
        "recall", "multi-query associative recall: the value of every key", make_recall, lambda s: s.pairs,
        lambda s: _room(s, 4 * s.pairs), TaskSizes(512, 64, 8192), ("pairs", "vocab", "noise"),
    ),
    Task(
        "overwriting", "keys are written several times, the latest value wins", make_overwriting, lambda s: s.pairs,
        lambda s: _room(s, 2 * s.pairs * (s.writes + 1)), TaskSizes(256, 16, 512), ("pairs", "vocab", "writes"),
    ),
    Task(
        "needle", "a pair hidden in noise, asked for at the end", make_needle, lambda s: 1, _needle_obstacle,
        TaskSizes(256, 1, 256), ("pairs", "vocab"),
    ),
    Task(
        "copying", "a row of tokens, then the same again", make_copying, lambda s: s.length // 2, _copying_obstacle,
        TaskSizes(128, 1, 64), ("vocab",),
    ),
    Task(
        "selective-copying", "tokens between blanks, to be told in order", make_selective, lambda s: s.pairs,
        _selective_obstacle, TaskSizes(128, 16, 18), ("pairs", "vocab"),
    ),
    Task(
        "induction", "what came after the mark, when it comes again", make_induction, lambda s: 1, _induction_obstacle,
        TaskSizes(128, 1, 64), ("vocab",),
    ),
)  # fmt: skip

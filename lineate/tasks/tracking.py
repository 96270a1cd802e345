"""Tasks of keeping track: parity, counting modulo m, composing permutations. A row begins with a start token.

The label at every token is the state after it.
"""

from functools import cache
from itertools import permutations

import torch
from torch import Tensor

from lineate.tasks.task import NOTHING, Task, TaskSizes, uniform


def make_parity(rows: int, sizes: TaskSizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make bits (start is 2); the label says whether the ones so far are odd."""
    return _running_sum(rows, sizes.length, 2, generator)


def make_counting(rows: int, sizes: TaskSizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make digits 0 .. modulus - 1 (start is modulus); the label is their sum so far, modulo modulus."""
    return _running_sum(rows, sizes.length, sizes.modulus, generator)


def _running_sum(rows: int, length: int, modulus: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    digits = uniform(0, modulus, (rows, length - 1), generator)
    return _started(digits, digits.cumsum(1) % modulus, modulus)


def _started(tokens: Tensor, states: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Prepend a start token, which has no target."""
    front = tokens.new_full((len(tokens), 1), start)
    return torch.cat((front, tokens), 1), torch.cat((torch.full_like(front, NOTHING), states), 1)


PERMUTATIONS = tuple(permutations(range(5)))
"""The 120 elements of S5; token i is PERMUTATIONS[i]."""


@cache
def products(device: torch.device) -> Tensor:
    """Return `120 120`: [i, j] is the element that does j first, then i: x -> i(j(x))."""
    elements = torch.tensor(PERMUTATIONS, device=device)
    both = elements[:, None, :].expand(120, 120, 5).gather(2, elements[None].expand(120, 120, 5))  # i(j(x))
    digits = 5 ** torch.arange(5, device=device)
    code = torch.empty(5**5, dtype=torch.int64, device=device)
    code[(elements * digits).sum(1)] = torch.arange(120, device=device)
    return code[(both * digits).sum(2)]


def make_s5(rows: int, sizes: TaskSizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make permutations of five things (start is 120); the label is their product so far, the newest applied last.

    The running product is a scan by doubling, of log2(length) lookups.
    """
    tokens = uniform(0, 120, (rows, sizes.length - 1), generator)
    table, states, step = products(generator.device), tokens, 1
    while step < states.shape[1]:
        states = torch.cat((states[:, :step], table[states[:, step:], states[:, :-step]]), 1)
        step *= 2
    return _started(tokens, states, 120)


def _obstacle(sizes: TaskSizes) -> str | None:
    return None if sizes.length > 1 else f"length must be at least 2, a start and one token, got {sizes.length}"


def _counting_obstacle(sizes: TaskSizes) -> str | None:
    return _obstacle(sizes) if sizes.modulus > 1 else f"modulus must be at least 2, got {sizes.modulus}"


TRACKING_TASKS = (
    Task(
        "parity", "whether the ones so far are odd", make_parity, lambda s: s.length - 1, _obstacle,
        TaskSizes(40), (), dense=True, tokens=lambda s: 3,
    ),
    Task(
        "counting", "the sum so far, modulo m", make_counting, lambda s: s.length - 1, _counting_obstacle,
        TaskSizes(40), ("modulus",), dense=True, tokens=lambda s: s.modulus + 1,
    ),
    Task(
        "s5", "the product so far of permutations of five things", make_s5, lambda s: s.length - 1, _obstacle,
        TaskSizes(40), (), dense=True, tokens=lambda s: 121,
    ),
)  # fmt: skip

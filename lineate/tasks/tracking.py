"""Tasks of keeping track: sums modulo m, expressions modulo m, products in a group. A row begins with a start token.

The label at a token is the state after it.
"""

from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations, permutations

import torch
from torch import Tensor

from lineate.tasks.task import Task, TaskSizes, blank, uniform


def make_parity(rows: int, sizes: TaskSizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make bits (start is 2); the label says whether the ones so far are odd."""
    return _running_sum(rows, sizes.length, 2, generator)


def make_counting(rows: int, sizes: TaskSizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make digits 0 .. modulus - 1 (start is modulus); the label is their sum so far, modulo modulus."""
    return _running_sum(rows, sizes.length, sizes.modulus, generator)


def _running_sum(rows: int, length: int, modulus: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    digits = uniform(0, modulus, (rows, length - 1), generator)
    return _started(digits, digits.cumsum(1) % modulus, modulus, generator)


def _started(tokens: Tensor, states: Tensor, start: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Prepend a start token, which has no target."""
    ids, targets = blank(len(tokens), tokens.shape[1] + 1, generator)
    ids[:, 0], ids[:, 1:], targets[:, 1:] = start, tokens, states
    return ids, targets


PLUS, MINUS, TIMES = range(3)
"""Operators of an expression; the token of one is modulus + this."""


def make_arithmetic(rows: int, sizes: TaskSizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make digit, operator, digit, .. without brackets (start is modulus + 3); times is done before plus and minus.

    The label at a digit is the value of the expression so far, modulo modulus.
    """
    m = sizes.modulus
    ids, targets = blank(rows, sizes.length, generator)
    ids[:, 0] = m + 3
    digits = uniform(0, m, (rows, sizes.length // 2), generator)
    operators = uniform(PLUS, TIMES + 1, (rows, (sizes.length - 1) // 2), generator)
    ids[:, 1::2], ids[:, 2::2] = digits, m + operators
    starts, terms = torch.ones_like(digits, dtype=torch.bool), digits.clone()  # terms: signed factors, then products
    before = operators[:, : digits.shape[1] - 1]  # the operator before each digit but the first
    starts[:, 1:] = before != TIMES
    terms[:, 1:] = torch.where(before == MINUS, -digits[:, 1:], digits[:, 1:]) % m
    begun, step = starts.clone(), 1
    while step < terms.shape[1]:  # a scan by doubling: products within terms
        product = terms[:, step:] * terms[:, :-step] % m
        terms = torch.cat((terms[:, :step], torch.where(begun[:, step:], terms[:, step:], product)), 1)
        begun = torch.cat((begun[:, :step], begun[:, step:] | begun[:, :-step]), 1)
        step *= 2
    finished = torch.zeros_like(terms)
    finished[:, 1:] = torch.where(starts[:, 1:], terms[:, :-1], 0)
    targets[:, 1::2] = (finished.cumsum(1) + terms) % m
    return ids, targets


@dataclass(frozen=True)
class Group:
    """A group of permutations; token i is the i-th of its elements."""

    items: int
    """How many things are permuted."""
    even: bool = False
    """Whether it has the even permutations alone, those that an even number of exchanges makes."""

    @property
    def elements(self) -> tuple[tuple[int, ...], ...]:
        """Its permutations, in the order in which itertools lists them."""
        listed = permutations(range(self.items))
        return tuple(p for p in listed if not self.even or sum(a > b for a, b in combinations(p, 2)) % 2 == 0)


GROUPS = {"s3": Group(3), "s4": Group(4), "a5": Group(5, even=True), "s5": Group(5)}
"""The groups of the word problems, by the names of their tasks."""


@cache
def products(group: Group, device: torch.device) -> Tensor:
    """Return `size size`: [i, j] is the element that does j first, then i: x -> i(j(x))."""
    elements = torch.tensor(group.elements, device=device)
    size, items = elements.shape
    shape = (size, size, items)
    both = elements[:, None, :].expand(shape).gather(2, elements[None].expand(shape))  # i(j(x))
    digits = items ** torch.arange(items, device=device)
    code = torch.empty(items**items, dtype=torch.int64, device=device)
    code[(elements * digits).sum(1)] = torch.arange(size, device=device)
    return code[(both * digits).sum(2)]


def make_word(group: Group, rows: int, sizes: TaskSizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make elements of a group (start is its size); the label is their product so far, the newest applied last.

    The running product is a scan by doubling, of log2(length) lookups.
    """
    table = products(group, generator.device)
    tokens = uniform(0, len(table), (rows, sizes.length - 1), generator)
    states, step = tokens, 1
    while step < states.shape[1]:
        states = torch.cat((states[:, :step], table[states[:, step:], states[:, :-step]]), 1)
        step *= 2
    return _started(tokens, states, len(table), generator)


def _obstacle(sizes: TaskSizes) -> str | None:
    return None if sizes.length > 1 else f"length must be at least 2, a start and one token, got {sizes.length}"


def _modulo_obstacle(sizes: TaskSizes) -> str | None:
    return _obstacle(sizes) if sizes.modulus > 1 else f"modulus must be at least 2, got {sizes.modulus}"


def _word_task(name: str, what: str) -> Task:
    group = GROUPS[name]
    tokens = len(group.elements) + 1
    return Task(
        name, f"the product so far of {what}", partial(make_word, group), lambda s: s.length - 1, _obstacle,
        TaskSizes(40), (), dense=True, tokens=lambda s: tokens,
    )  # fmt: skip


TRACKING_TASKS = (
    Task(
        "parity", "whether the ones so far are odd", make_parity, lambda s: s.length - 1, _obstacle,
        TaskSizes(40), (), dense=True, tokens=lambda s: 3,
    ),
    Task(
        "counting", "the sum so far, modulo m", make_counting, lambda s: s.length - 1, _modulo_obstacle,
        TaskSizes(40), ("modulus",), dense=True, tokens=lambda s: s.modulus + 1,
    ),
    Task(
        "arithmetic", "the value of an expression so far, modulo m", make_arithmetic, lambda s: s.length // 2,
        _modulo_obstacle, TaskSizes(40), ("modulus",), dense=True, tokens=lambda s: s.modulus + 4,
    ),
    _word_task("s3", "permutations of three things"),
    _word_task("s4", "permutations of four things"),
    _word_task("a5", "even permutations of five things"),
    _word_task("s5", "permutations of five things"),
)  # fmt: skip

"""The view "Memory": a list of writes and forgettings under every rule, after each of its steps.

A step is one token. Keys are unit vectors, of which any two have the same cosine c: the rows of

    K = sqrt(1 - c) (I - J / n) + sqrt(1 + (n - 1) c) J / n          J: all ones, so that K K^T = (1 - c) I + c J

Each key lies mostly in the channel of its own, and exactly there if c = 0.

A write of key and value is the token (k, v) with its decay and beta. Forgetting a key is a token without key and value:
it only decays. Rules with one decay per head take `decay`; those with one per key channel take `channels`. Softmax
attention has no gates and keeps every pair that was written. Rules of the general row read the same list as the
`by_hand` of their mixer's row says; those that erase and write separately take `erase` and `write`, which are beta
unless they are given.
"""

from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import torch
from torch import Tensor

import lineate
from lineate.call import Inputs
from lineate.explore.memories import DEMO_RULES
from lineate.figures import kind_named
from lineate.layers import kinds
from lineate.layers.by_hand import HandMade, one_head
from lineate.rule import read, rule_named
from lineate.torch_ops.tracing import cpu_by_default
from lineate.web.errors import invalid
from lineate.web.fields import Fields, shown

MOST_STEPS = 64
"""Steps of a list."""
FEWEST_CHANNELS, MOST_CHANNELS = 2, 8
"""Keys, which are also the channels of a key, and channels of a value."""
MOST_COSINE = 0.95
MOST_SHARPNESS = 64.0
LARGEST = 10.0
"""The largest number in a value."""
WRITE, FORGET = "write", "forget"
DIGITS = 6
"""Decimals of the numbers that are sent."""


@dataclass(frozen=True)
class Step:
    """One token of the list."""

    key: int
    """Which key is written or forgotten."""
    value: tuple[float, ...] | None
    """The value to write; None where the key is forgotten."""
    decay: float
    """The decay of rules with one gate per head."""
    channels: tuple[float, ...]
    """The decay of each key channel in Kimi Delta Attention."""
    beta: float
    """The rate of the write, for rules that correct."""
    erase: float
    """The rate of erasing, for rules that erase and write separately."""
    write: float
    """The rate of writing, for rules that erase and write separately."""


@dataclass(frozen=True)
class MemoryRequest:
    """A request of the page."""

    keys: int
    """Named keys, and channels of a key."""
    values: int
    """Channels of a value."""
    cosine: float
    """Cosine between any two keys."""
    sharpness: float
    """The factor of softmax attention's scores."""
    ask: int
    """The key whose attention rows are returned."""
    rules: tuple[str, ...]
    """The rules to run."""
    steps: tuple[Step, ...]
    """The list."""


def key_names(count: int) -> tuple[str, ...]:
    """Return the names of keys: A, B, ...

    Args:
        count: How many there are.
    """
    return tuple(ascii_uppercase[:count])


def value_names(count: int) -> tuple[str, ...]:
    """Return the names of the values that are 1 in one channel: the last letters of the alphabet.

    Args:
        count: How many channels a value has.
    """
    return tuple(ascii_lowercase[-count:])


def read_request(body: Fields) -> MemoryRequest:
    """Read a body; raise ApiError with the name of the first field that is wrong.

    Args:
        body: The fields of the body.
    """
    keys = body.whole("keys", FEWEST_CHANNELS, MOST_CHANNELS) or 4
    values = body.whole("values", FEWEST_CHANNELS, MOST_CHANNELS) or 4
    cosine = body.number("cosine", 0.0, 0.0, MOST_COSINE)
    sharpness = body.number("sharpness", 8.0, 0.0, MOST_SHARPNESS)
    ask = key_names(keys).index(body.word("ask", key_names(keys)) or "A")
    rules = _rules(body)
    steps = tuple(_step(each, keys, values) for each in body.objects("steps", MOST_STEPS) or ())
    body.finish()
    return MemoryRequest(keys, values, cosine, sharpness, ask, rules, steps)


def _rules(body: Fields) -> tuple[str, ...]:
    """Return the rules, each once, in the order of the table; those of the demo if none are named."""
    known = memory_rules()
    found = body.items("rules", len(known))
    for i, name in enumerate(found or ()):
        if name not in known:
            path = f"rules[{i}]"
            message = f"{path} must be one of {', '.join(known)}, got {shown(name)}"
            raise invalid(path, message, "invalid_value")
    return DEMO_RULES if found is None else tuple(name for name in known if name in found)


def memory_rules() -> tuple[str, ...]:
    """Return the rules that the view knows: those of the demo, then the mixers whose row has a `by_hand`."""
    return (*DEMO_RULES, *(kind.name for kind in kinds() if kind.by_hand is not None))


def _step(fields: Fields, keys: int, values: int) -> Step:
    fields.needed("op", f"{WRITE} or {FORGET}")
    writes = fields.word("op", (WRITE, FORGET)) == WRITE
    fields.needed("key", f"one of {', '.join(key_names(keys))}")
    key = key_names(keys).index(fields.word("key", key_names(keys)) or "")  # never empty here
    decay = fields.number("decay", 1.0 if writes else 0.0, 0.0, 1.0)
    own = tuple(decay if writes or i == key else 1.0 for i in range(keys))
    channels = _numbers(fields, "channels", keys, 0.0, 1.0) or own
    value, beta, erase, write = None, 0.0, 0.0, 0.0
    if writes:
        value, beta = _value(fields, values), fields.number("beta", 1.0, 0.0, 2.0)
        erase, write = fields.number("erase", beta, 0.0, 2.0), fields.number("write", beta, 0.0, 2.0)
    fields.finish()
    return Step(key, value, decay, channels, beta, erase, write)


def _value(fields: Fields, count: int) -> tuple[float, ...]:
    """Return a value that is given by its name or by its numbers."""
    names = value_names(count)
    found = fields.needed("value", f"one of {', '.join(names)}, or a list of {count} numbers")
    if isinstance(found, str) and found in names:
        return tuple(float(i == names.index(found)) for i in range(count))
    if not isinstance(found, list):
        raise fields.wrong("value", f"one of {', '.join(names)}, or a list of {count} numbers")
    return _numbers(fields, "value", count, -LARGEST, LARGEST) or ()


def _numbers(fields: Fields, name: str, count: int, least: float, most: float) -> tuple[float, ...] | None:
    """Return `count` numbers in a range, or None if the field is missing."""
    found = fields.items(name, count)
    if found is None:
        return None
    path = fields.path(name)
    if len(found) != count:
        raise invalid(path, f"{path} must have {count} numbers, got {len(found)}", "invalid_value")
    for i, number in enumerate(found):
        if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number <= most:
            where = f"{path}[{i}]"
            message = f"{where} must be a number from {least:g} to {most:g}, got {shown(number)}"
            raise invalid(where, message, "invalid_value")
    return tuple(float(number) for number in found)


def key_vectors(count: int, cosine: float) -> Tensor:
    """Return unit keys `count count`, one a row, of which any two have this cosine.

    Args:
        count: How many keys there are, and how many channels they have.
        cosine: Their cosine, at least 0.
    """
    mean = torch.full((count, count), 1 / count, dtype=torch.float64)
    eye = torch.eye(count, dtype=torch.float64)
    return (1 - cosine) ** 0.5 * (eye - mean) + (1 + (count - 1) * cosine) ** 0.5 * mean


@dataclass(frozen=True)
class _Tokens:
    """The list as tensors, in float64; t steps."""

    keys: Tensor
    """`n k`: the key of every name."""
    writes: Tensor
    """`t`, bool."""
    steps: HandMade
    """The gates; keys are 0 where nothing is written."""

    @property
    def written(self) -> Tensor:
        """The key of every step, `t k`, 0 where nothing is written."""
        return self.steps.k

    @property
    def values(self) -> Tensor:
        """`t v`."""
        return self.steps.v


def _tokens(asked: MemoryRequest) -> _Tokens:
    def tensor(rows: list[Any], *shape: int) -> Tensor:
        return torch.tensor(rows, dtype=torch.float64).view(len(asked.steps), *shape)

    steps, keys = asked.steps, key_vectors(asked.keys, asked.cosine)
    writes = torch.tensor([step.value is not None for step in steps], dtype=torch.bool)
    at = torch.tensor([step.key for step in steps], dtype=torch.int64)
    return _Tokens(
        keys=keys,
        writes=writes,
        steps=HandMade(
            k=keys[at] * writes[:, None],
            v=tensor([step.value or [0.0] * asked.values for step in steps], asked.values),
            log_decay=tensor([step.decay for step in steps]).log(),
            log_decays=tensor([step.channels for step in steps], asked.keys).log(),
            beta=tensor([step.beta for step in steps]),
            erase=tensor([step.erase for step in steps]),
            write=tensor([step.write for step in steps]),
        ),
    )


@torch.no_grad()
@cpu_by_default
def run_memory(asked: MemoryRequest) -> dict[str, Any]:
    """Return the states and answers of every rule after each step, from 0 steps to all.

    Args:
        asked: The list and its settings.
    """
    tokens, targets = _tokens(asked), _targets(asked)
    rules = {name: _run(name, asked, tokens, targets) for name in asked.rules}
    return {
        "keys": {"names": list(key_names(asked.keys)), "vectors": _rounded(tokens.keys)},
        "values": {"names": list(value_names(asked.values)), "written": _rounded(tokens.values)},
        "targets": [[None if row[0] != row[0] else row for row in each] for each in _rounded(targets)],
        "rules": rules,
    }


def _run(name: str, asked: MemoryRequest, tokens: _Tokens, targets: Tensor) -> dict[str, Any]:
    """Return one rule's states, norms, answers to all keys, their errors, and the attention rows of the asked key."""
    inputs = _inputs(name, tokens.steps)
    if inputs is None:
        states, (answers, rows) = None, _softmax(asked, tokens)
    else:
        states, rows = _states(inputs, asked, tokens)  # t+1 k v, t+1 t
        answers = read(states.unsqueeze(1), tokens.keys)  # t+1 n v
    errors = (answers - targets).norm(dim=-1)  # t+1 n; NaN where there is no target
    return {
        "label": kind_named(name).label,
        "states": None if states is None else _rounded(states),
        "norms": None if states is None else _rounded(states.norm(dim=(-2, -1))),
        "answers": _rounded(answers),
        "errors": [_known(each) for each in _rounded(errors)],
        "mean_errors": _known(_rounded(errors.nanmean(dim=-1))),
        "rows": [row[:i] for i, row in enumerate(_rounded(rows))],
    }


def _targets(asked: MemoryRequest) -> Tensor:
    """Return the answers of a perfect memory to each key after each step, `t+1 n v`; NaN if a key was never written.

    It is the value that was written last, and 0 after the key was forgotten.
    """
    now = torch.full((asked.keys, asked.values), torch.nan, dtype=torch.float64)
    found = [now]
    for step in asked.steps:
        now = now.clone()
        if step.value is not None:
            now[step.key] = torch.tensor(step.value, dtype=torch.float64)
        else:
            now[step.key] *= 0.0  # NaN stays
        found.append(now)
    return torch.stack(found)


def _inputs(name: str, steps: HandMade) -> Inputs | None:
    """Return what a rule is called with, `1 t 1 ...`; None for softmax attention."""
    by_hand = kind_named(name).by_hand
    if by_hand is not None:
        return by_hand.inputs(steps)
    rule = rule_named(name)
    if rule is None:
        return None
    gates = {"none": None, "head": one_head(steps.log_decay), "channel": one_head(steps.log_decays)}
    k, v, beta = one_head(steps.k), one_head(steps.v), one_head(steps.beta) if rule.corrects else None
    return Inputs(q=k, k=k, v=v, log_decay=gates[rule.decays[0]], beta=beta)


def _states(inputs: Inputs, asked: MemoryRequest, tokens: _Tokens) -> tuple[Tensor, Tensor]:
    """Return the states `t+1 k v`, and the weights `t+1 t` with which the asked key reads the value of each step.

    Row i of S is S^T e_i, the memory's answer to axis i. So one attention matrix has both: its queries are the axes
    and the asked key, each of them repeated after every step.
    """
    count, channels = len(asked.steps), asked.keys
    weights = torch.zeros(channels + 1, count + 1, count, dtype=torch.float64)
    if count:
        asking = torch.cat((torch.eye(channels, dtype=torch.float64), tokens.keys[asked.ask, None]))
        q = asking[:, None, None].expand(-1, count, 1, -1)  # k+1 t 1 k
        call = inputs.map(lambda x: x.expand(channels + 1, *x.shape[1:]), ("k", *inputs.gates())).replace(q=q).given()
        given: dict[str, Any] = {name: x for name, x in call.items() if name not in ("v", "write")}
        weights[:, 1:] = lineate.attention_matrix(**given, scale=1.0)[:, 0]
        if inputs.write is not None:  # one rate for all channels
            weights = weights * inputs.write[0, :, 0, 0]
    return (weights[:-1] @ tokens.values).transpose(0, 1), weights[-1]


def _softmax(asked: MemoryRequest, tokens: _Tokens) -> tuple[Tensor, Tensor]:
    """Return the answers `t+1 n v` to all keys and the weights `t+1 t` of the asked one; 0 before the first write.

    The values are joined with the columns of an identity matrix, so that the op's output has its weights too.
    """
    count = int(tokens.writes.sum())
    answers = torch.zeros(len(asked.steps) + 1, asked.keys, asked.values, dtype=torch.float64)
    rows = torch.zeros(len(asked.steps) + 1, len(asked.steps), dtype=torch.float64)
    if not count:
        return answers, rows
    q = tokens.keys[:, None, None].expand(-1, count, 1, -1)  # n t 1 k
    k = tokens.written[tokens.writes][None, :, None].expand(asked.keys, -1, -1, -1)
    v = torch.cat((tokens.values[tokens.writes], torch.eye(count, dtype=torch.float64)), -1)
    v = v[None, :, None].expand(asked.keys, -1, -1, -1)
    output = lineate.softmax_attention(q, k, v, scale=asked.sharpness).output[:, :, 0]  # n t v+t
    done = tokens.writes.cumsum(0)  # how many pairs are in the cache after each step
    after, last = done > 0, done[done > 0] - 1
    answers[1:][after] = output[:, last, : asked.values].transpose(0, 1)
    weights = torch.zeros(len(last), len(asked.steps), dtype=torch.float64)
    weights[:, tokens.writes] = output[asked.ask, last, asked.values :]
    rows[1:][after] = weights
    return answers, rows


def _known(numbers: list[float]) -> list[float | None]:
    """Return the numbers with None in place of NaN, which JSON does not have."""
    return [None if number != number else number for number in numbers]


def _rounded(x: Tensor) -> Any:
    return (x.round(decimals=DIGITS) + 0.0).tolist()  # + 0 makes -0 a 0

"""Decoding steps of a model's blocks on a CPU: runs of parts that C computes, and calls of the others in between."""

import ctypes
from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lineate.layers import LayerState
from lineate.layers.bare import runs_own_forward
from lineate.layers.native_steps import Recorded, Unchanged, bind, record_feed, record_mixer, serves
from lineate.models.block import Block
from lineate.native import step as native
from lineate.small.product import are_rounded


class _Half(NamedTuple):
    """A mixer or a feed-forward of a block: the part that C computes, or None where the module is called."""

    layer: int
    is_mixer: bool
    recorded: Recorded | None


class _Run(NamedTuple):
    """Halves of blocks that one call computes; words: their parts, if it is a call of C."""

    halves: tuple[_Half, ...]
    words: bytes | None


class _Plan(NamedTuple):
    """How blocks run, the parts of each of them, and what says whether those are still as they were."""

    runs: tuple[_Run, ...]
    parts: list[dict[str, Any]]
    unchanged: Unchanged


Blocks = nn.ModuleList | Sequence[nn.Module]
_plans: WeakKeyDictionary[nn.Module, _Plan] = WeakKeyDictionary()
"""How blocks run, by the first of them."""


def step(blocks: Blocks, x: Tensor, states: tuple[LayerState, ...]) -> tuple[Tensor, list[LayerState]] | None:
    """Run one token of every row, x `rows 1 hidden`, through all blocks; None if no part of them has a step in C.

    Args:
        blocks: The blocks of a model.
        x: What the first block reads; it is not changed.
        states: The states of all blocks; those that the call owns are overwritten.
    """
    if not len(blocks) or not serves(x):
        return None
    runs = _plan_of(blocks)
    if runs is None:
        return None
    bound = _bind_all(runs, states, x)
    if bound is None:
        return None
    parts, new, shared = bound
    x = x[:, 0].clone(memory_format=torch.contiguous_format)
    for run, words in zip(runs, parts, strict=True):
        if words is not None:
            native.run(x, words, are_rounded())
            continue
        (half,) = run.halves
        block: Any = blocks[half.layer]
        if half.is_mixer:
            y, new[half.layer] = block.run_mixer(x[:, None], states[half.layer])
        else:
            y = block.run_feed(x[:, None])
        x = y[:, 0].contiguous()
    del shared  # what the parts point to
    return x[:, None], [new[n] for n in range(len(blocks))]


def _plan_of(blocks: Blocks) -> tuple[_Run, ...] | None:
    """Return how the blocks run, as it was recorded or, if they were changed since, recorded anew; None: not in C."""
    plan = _plans.get(blocks[0])
    if plan is None or not _is_current(blocks, plan):
        plan = _plans[blocks[0]] = _record(blocks)
    return plan.runs if any(run.words is not None for run in plan.runs) else None


def _is_current(blocks: Blocks, plan: _Plan) -> bool:
    if not plan.runs:
        return True
    own = list(blocks)
    return list(map(_PARTS, own)) == plan.parts and all(map(_is_bare, own)) and plan.unchanged()


_PARTS = attrgetter("_modules")


def _is_bare(block: nn.Module) -> bool:
    """Whether a block is one whose forward is the sum that a step computes."""
    return type(block) is Block and block.in_steps and runs_own_forward(block)


def _record(blocks: Blocks) -> _Plan:
    halves: list[_Half] = []
    for n, block in enumerate(blocks):
        if not _is_bare(block):
            return _Plan((), [], Unchanged([]))
        assert isinstance(block, Block)
        halves.append(_Half(n, True, record_mixer(block.mixer_norm, block.mixer)))
        halves.append(_Half(n, False, record_feed(block.feed_norm, block.feed)))
    runs: list[list[_Half]] = []
    for half in halves:
        if runs and half.recorded is not None and runs[-1][-1].recorded is not None:
            runs[-1].append(half)
        else:
            runs.append([half])
    recorded = [half.recorded for half in halves if half.recorded is not None]
    parts = [dict(block._modules) for block in blocks]
    return _Plan(tuple(_Run(tuple(run), _words(run)) for run in runs), parts, Unchanged(recorded))


def _words(halves: list[_Half]) -> bytes | None:
    parts = [half.recorded.part for half in halves if half.recorded is not None]
    return bytes((native.Part * len(parts))(*parts)) if parts else None


_Parts = list["ctypes.Array[native.Part] | None"]


def _bind_all(
    runs: tuple[_Run, ...], states: tuple[LayerState, ...], x: Tensor
) -> tuple[_Parts, dict[int, LayerState], dict[Hashable, Any]] | None:
    """Return the words of every run with the addresses of these states, and the new states; None if one is unfit."""
    shared: dict[Hashable, Any] = {"rows": x.shape[0]}
    found: _Parts = []
    new: dict[int, LayerState] = {}
    for run in runs:
        if run.words is None:
            found.append(None)
            continue
        parts = (native.Part * len(run.halves)).from_buffer_copy(run.words)
        for part, half in zip(parts, run.halves, strict=True):
            if part.entry.size != x.shape[2]:
                return None
            if half.is_mixer:
                assert half.recorded is not None
                made = bind(part, half.recorded, states[half.layer], shared)
                if made is None:
                    return None
                new[half.layer] = made
        found.append(parts)
    return found, new, shared

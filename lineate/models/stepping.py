"""Decoding steps of a model on a CPU: runs of parts that C computes, and calls of the others in between.

Where C computes all blocks, it looks up the embeddings and multiplies by the head too.
"""

import ctypes
from collections.abc import Hashable, Sequence
from operator import call, is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from lineate.layers import LayerState, Memory
from lineate.layers.bare import runs_own_forward
from lineate.layers.native_steps import (
    MOST_BOUND,
    Recorded,
    bind,
    record_feed,
    record_head,
    record_mixer,
    serves,
    serves_ids,
)  # fmt: skip
from lineate.layers.unchanged import Unchanged
from lineate.models.block import Block
from lineate.native import step as native
from lineate.quantised.product import are_rounded


class Ends(NamedTuple):
    """What a model has around its blocks; without a head, the logits are products with the embeddings."""

    embed: nn.Module
    norm: nn.Module
    head: nn.Module | None


class _Half(NamedTuple):
    """A mixer or a feed-forward of a block: the part that C computes, or None where the module is called."""

    layer: int
    is_mixer: bool
    recorded: Recorded | None


class _Run(NamedTuple):
    """Halves of blocks that one call computes; words: their parts, if it is a call of C."""

    halves: tuple[_Half, ...]
    words: bytes | None


_Parts = list["ctypes.Array[native.Part] | None"]
_Key = tuple[int, int, int]


class _Bound(NamedTuple):
    """The parts of all runs with the addresses of memories, and those: the tensors that are read and written."""

    parts: _Parts
    tensors: "list[ref[Tensor]]"
    addresses: list[int]


class _Plan(NamedTuple):
    """How blocks run.

    Args:
        runs: The parts of all blocks and, if C computes all of them, the head; none: the blocks are called.
        table: The embeddings, if C looks them up.
        hidden: The channels that all parts read; -1 if they differ.
        unchanged: Says whether everything is as it was recorded.
        memories: The layers whose memories are bound to parts, each with the names of its tensors.
        bound: The last memories that were bound; a call takes the parts out while it uses them.
        ends: What is around the blocks, if it was looked at.
    """

    runs: tuple[_Run, ...]
    table: native.Linear | None
    hidden: int
    unchanged: Unchanged
    memories: tuple[tuple[int, tuple[str, ...]], ...]
    bound: dict[_Key, _Bound]
    ends: Ends | None


class _Apart(NamedTuple):
    """The plan of blocks and the ends at a time when C did not compute both together."""

    plan: _Plan | None
    ends: Ends


Blocks = nn.ModuleList | Sequence[nn.Module]
_plans: WeakKeyDictionary[nn.Module, _Plan] = WeakKeyDictionary()
"""How blocks run, by the first of them."""
_whole_plans: WeakKeyDictionary[nn.Module, _Plan] = WeakKeyDictionary()
"""The same with the ends of the model, where C computes all of it."""
_apart: WeakKeyDictionary[nn.Module, _Apart] = WeakKeyDictionary()
"""Blocks that run without the ends; this is asked again when either changes."""


def step(blocks: Blocks, x: Tensor, states: tuple[LayerState, ...]) -> tuple[Tensor, list[LayerState]] | None:
    """Run one token of every row, x `rows 1 hidden`, through all blocks; None if no part of them has a step in C.

    Args:
        blocks: The blocks of a model.
        x: What the first block reads; it is not changed.
        states: The states of all blocks; those that the call owns are overwritten.
    """
    if not len(blocks) or not serves(x):
        return None
    plan = _plan_of(blocks)
    if plan.hidden != x.shape[2] or not any(run.words is not None for run in plan.runs):
        return None
    bound = _bind_all(plan, states, x.shape[0])
    if bound is None:
        return None
    x = x[:, 0].clone(memory_format=torch.contiguous_format)
    for run, words in zip(plan.runs, bound.parts, strict=True):
        if words is not None:
            native.run(x, words, are_rounded())
            continue
        (half,) = run.halves
        block: Any = blocks[half.layer]
        if half.is_mixer:
            y, bound.new[half.layer] = block.run_mixer(x[:, None], states[half.layer])
        else:
            y = block.run_feed(x[:, None])
        x = y[:, 0].contiguous()
    _keep(plan, bound)
    return x[:, None], [bound.new[n] for n in range(len(blocks))]


def step_tokens(
    ends: Ends, blocks: Blocks, ids: Tensor, states: tuple[LayerState, ...]
) -> tuple[Tensor, list[LayerState]] | None:
    """Return the logits `rows 1 vocab` after one token of every row, ids `rows 1`, and the states.

    None if C cannot compute all of it, or if an id is not in the vocabulary, or a state is not one of the blocks.

    Args:
        ends: What is before and behind the blocks.
        blocks: The blocks of a model.
        ids: The tokens.
        states: The states of all blocks; those that the call owns are overwritten.
    """
    if not len(blocks) or len(states) != len(blocks) or not serves_ids(ids):
        return None
    plan = _whole_plan_of(blocks, ends)
    if plan is None or plan.table is None:
        return None
    bound = _bind_all(plan, states, ids.shape[0])
    if bound is None or (parts := bound.parts[0]) is None:
        return None
    ids = ids[:, 0].contiguous()
    logits = torch.empty(ids.shape[0], 1, parts[len(parts) - 1].entry.out, dtype=torch.float32, device="cpu")
    known = native.run_tokens(ids, plan.table, parts, logits, are_rounded())
    _keep(plan, bound)
    return (logits, [bound.new[n] for n in range(len(blocks))]) if known else None


# ---- plans


def _plan_of(blocks: Blocks) -> _Plan:
    """Return how the blocks run, as it was recorded or, if they were changed since, recorded anew."""
    plan = _plans.get(blocks[0])
    if plan is None or not plan.unchanged(blocks):
        plan = _plans[blocks[0]] = _record(blocks, None)
    return plan


def _whole_plan_of(blocks: Blocks, ends: Ends) -> _Plan | None:
    """Return how the blocks run with the ends of the model; None if C does not compute all of it."""
    first = blocks[0]
    apart = _apart.get(first)
    if apart is not None and apart.plan is _plans.get(first) and apart.ends == ends:
        return None
    plan = _whole_plans.get(first)
    if plan is not None and plan.ends == ends and plan.unchanged(blocks):
        return plan
    plan = _record(blocks, ends)
    if plan.table is None:
        _apart[first] = _Apart(_plans.get(first), ends)
        return None
    _whole_plans[first] = plan
    return plan


def _record(blocks: Blocks, ends: Ends | None) -> _Plan:
    halves: list[_Half] = []
    bare = all(type(block) is Block and block.in_steps and runs_own_forward(block) for block in blocks)
    for n, block in enumerate(blocks if bare else ()):
        assert isinstance(block, Block)
        halves.append(_Half(n, True, record_mixer(block.mixer_norm, block.mixer)))
        if block.feed is not None:
            halves.append(_Half(n, False, record_feed(block.feed_norm, block.feed)))
    whole = halves and all(half.recorded is not None for half in halves)
    head = None if ends is None or not whole else record_head(*ends)
    if head is not None:
        halves.append(_Half(len(blocks), False, head[0]))
    runs: list[list[_Half]] = []
    for half in halves:
        if runs and half.recorded is not None and runs[-1][-1].recorded is not None:
            runs[-1].append(half)
        else:
            runs.append([half])
    recorded = [half.recorded for half in halves if half.recorded is not None]
    modules = [module for part in recorded for module in part.modules]
    sizes = {part.part.entry.size for part in recorded}
    found = tuple(_Run(tuple(run), _words(run)) for run in runs)
    memories = tuple(
        (half.layer, names)
        for half in halves
        if half.recorded is not None and (names := half.recorded.memory_names)
    )  # fmt: skip
    hidden = sizes.pop() if len(sizes) == 1 else -1
    table = head[1] if head is not None and hidden == head[1].size else None
    return _Plan(found, table, hidden, Unchanged(list(blocks), modules), memories, {}, ends)


def _words(halves: list[_Half]) -> bytes | None:
    parts = [half.recorded.part for half in halves if half.recorded is not None]
    return bytes((native.Part * len(parts))(*parts)) if parts else None


# ---- states


class _Step(NamedTuple):
    """A call's parts and new states; shared: what the parts point to, which must be kept until they have run."""

    parts: _Parts
    new: dict[int, LayerState]
    shared: dict[Hashable, Any]
    key: _Key | None
    bound: _Bound | None


def _bind_all(plan: _Plan, states: tuple[LayerState, ...], rows: int) -> _Step | None:
    """Return the parts of all runs with the addresses of these states, and the new states; None if one is unfit."""
    shared: dict[Hashable, Any] = {"rows": rows}
    key, bound, new = _bind_again(plan, states, rows)
    known = bound is not None
    parts = [_copy(run) for run in plan.runs] if bound is None else bound.parts
    for run, own in zip(plan.runs, parts, strict=True):
        if own is None:
            continue
        for n, half in enumerate(run.halves):
            if half.is_mixer and half.layer not in new:
                assert half.recorded is not None
                made = bind(own[n], half.recorded, states[half.layer], shared)
                if made is None:
                    return None
                new[half.layer] = made
    if not known and plan.memories:
        both = [(states[layer].tensors, new[layer].tensors, names) for layer, names in plan.memories]
        tensors = [x for given, made, names in both for name in names for x in (given[name], made[name])]
        key = id(tensors[0]), id(tensors[1]), rows
        bound = _Bound(parts, list(map(ref, tensors)), list(map(Tensor.data_ptr, tensors)))
    return _Step(parts, new, shared, key, bound)


def _copy(run: _Run) -> "ctypes.Array[native.Part] | None":
    return None if run.words is None else (native.Part * len(run.halves)).from_buffer_copy(run.words)


def _bind_again(
    plan: _Plan, states: tuple[LayerState, ...], rows: int
) -> tuple[_Key | None, _Bound | None, dict[int, LayerState]]:
    """Return the parts that were bound to these memories before, if they are the same, unmoved; and the new ones."""
    nothing: tuple[None, None, dict[int, LayerState]] = None, None, {}
    tensors: list[Tensor] = []
    new: dict[int, LayerState] = {}
    for layer, names in plan.memories:
        state = states[layer]
        if type(state) is not Memory or state.seeds is not None:
            return nothing
        given = state.tensors
        into = given if state.owned else state.into
        if into is None or tuple(given) != names or tuple(into) != names:
            return nothing
        made = {name: into[name] for name in names}
        for name in names:
            tensors += (given[name], made[name])
        new[layer] = Memory(made)
    if not tensors:
        return nothing
    key = id(tensors[0]), id(tensors[1]), rows
    bound = plan.bound.pop(key, None)
    if bound is None or not all(map(is_, map(call, bound.tensors), tensors)):
        return nothing
    return (key, bound, new) if list(map(Tensor.data_ptr, tensors)) == bound.addresses else nothing


def _keep(plan: _Plan, used: _Step) -> None:
    """Remember the parts of a call for the next one with the same memories."""
    if used.key is not None and used.bound is not None:
        if len(plan.bound) >= MOST_BOUND:
            plan.bound.clear()
        plan.bound[used.key] = used.bound

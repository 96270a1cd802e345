"""Decoding steps of a model on a CPU: runs of sublayers that C computes, and calls of the others in between.

Where C computes all blocks, it can look up the embeddings and multiply by the head as well.
"""

import ctypes
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lineate.layers import LayerState
from lineate.layers.projection import runs_own_forward
from lineate.layers.step.native import (
    Recorded,
    bind,
    record_feed,
    record_head,
    record_mixer,
    serves,
    serves_ids,
)  # fmt: skip
from lineate.layers.step.unchanged import Unchanged
from lineate.models.block import Block
from lineate.native import step as native
from lineate.quantised.product import are_rounded


class Ends(NamedTuple):
    """The modules around the blocks of a model; without a head, the logits are products with the embeddings."""

    embed: nn.Module
    norm: nn.Module
    head: nn.Module | None


class Sublayer(NamedTuple):
    """A mixer or a feed-forward of a block: the part that C computes, or None where the module is called."""

    layer: int
    is_mixer: bool
    recorded: Recorded | None


class Run(NamedTuple):
    """Sublayers that one call computes; words: their parts, if it is a call of C."""

    sublayers: tuple[Sublayer, ...]
    words: bytes | None


Blocks = nn.ModuleList | Sequence[nn.Module]


class Plan(NamedTuple):
    """How a model reads one token of every row.

    Args:
        runs: The sublayers of all blocks; none: the blocks are called.
        head: The last norm and the head, if C computes them and all blocks.
        table: The embeddings, if C looks them up.
        hidden: The channels that all parts read; -1 if they differ.
    """

    runs: tuple[Run, ...]
    head: Recorded | None
    table: native.Linear | None
    hidden: int

    @property
    def is_whole(self) -> bool:
        """Whether C computes the logits from the ids."""
        return self.table is not None

    @property
    def uses_native(self) -> bool:
        """Whether C computes any sublayer."""
        return any(run.words is not None for run in self.runs)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that were read."""
        recorded = [sublayer.recorded for run in self.runs for sublayer in run.sublayers]
        return [module for part in (*recorded, self.head) if part is not None for module in part.modules]


class BoundStep(NamedTuple):
    """The parts of a plan with the addresses of states.

    Args:
        parts: The parts of each run; the head's is the last one where C computes the whole model.
        new: The states after the step, by layer; those of modules that are called are added by the step.
        shared: What the parts point to; it must be kept until they have run.
    """

    parts: list["ctypes.Array[native.Part] | None"]
    new: dict[int, LayerState]
    shared: dict[Hashable, Any]


def record(blocks: Blocks, ends: Ends) -> Plan:
    """Read a model: return the parts that C computes, with the addresses of their weights."""
    sublayers: list[Sublayer] = []
    plain = all(type(block) is Block and block.in_steps and runs_own_forward(block) for block in blocks)
    for n, block in enumerate(blocks if plain else ()):
        assert isinstance(block, Block)
        sublayers.append(Sublayer(n, True, record_mixer(block.mixer_norm, block.mixer)))
        if block.feed is not None:
            sublayers.append(Sublayer(n, False, record_feed(block.feed_norm, block.feed)))
    runs: list[list[Sublayer]] = []
    for sublayer in sublayers:
        if runs and sublayer.recorded is not None and runs[-1][-1].recorded is not None:
            runs[-1].append(sublayer)
        else:
            runs.append([sublayer])
    sizes = {sublayer.recorded.part.entry.size for sublayer in sublayers if sublayer.recorded is not None}
    hidden = sizes.pop() if len(sizes) == 1 else -1
    whole = len(runs) == 1 and runs[0][0].recorded is not None
    head, table = (record_head(*ends) if whole else None) or (None, None)
    if head is None or table is None or table.size != hidden:
        head, table = None, None
    return Plan(tuple(Run(tuple(run), _words(run)) for run in runs), head, table, hidden)


def _words(sublayers: list[Sublayer]) -> bytes | None:
    parts = [sublayer.recorded.part for sublayer in sublayers if sublayer.recorded is not None]
    return bytes((native.Part * len(parts))(*parts)) if parts else None


def bind_states(plan: Plan, states: Sequence[LayerState], rows: int, whole: bool) -> BoundStep | None:
    """Return the parts of all runs with the addresses of these states, and the new states; None if one is unfit.

    Args:
        plan: The plan.
        states: The states of all blocks; those that the caller owns are overwritten by the step.
        rows: Their rows.
        whole: Whether the head follows the blocks, which needs a plan that is whole.
    """
    bound = BoundStep([], {}, {"rows": rows})
    for run in plan.runs:
        if run.words is None:
            bound.parts.append(None)
            continue
        words = run.words if plan.head is None or not whole else run.words + bytes(plan.head.part)
        own = (native.Part * (len(words) // ctypes.sizeof(native.Part))).from_buffer_copy(words)
        for part, sublayer in zip(own, run.sublayers, strict=False):
            if sublayer.is_mixer:
                assert sublayer.recorded is not None
                made = bind(part, sublayer.recorded, states[sublayer.layer], bound.shared)
                if made is None:
                    return None
                bound.new[sublayer.layer] = made
        bound.parts.append(own)
    return bound


def run_blocks(plan: Plan, bound: BoundStep, blocks: Blocks, x: Tensor, states: Sequence[LayerState]) -> Tensor:
    """Return what all blocks make of x `rows 1 hidden`, which is not changed; bound.new has all new states."""
    x = x[:, 0].clone(memory_format=torch.contiguous_format)
    for run, parts in zip(plan.runs, bound.parts, strict=True):
        if parts is not None:
            native.run(x, parts, are_rounded())
            continue
        (sublayer,) = run.sublayers
        block: Any = blocks[sublayer.layer]
        if sublayer.is_mixer:
            y, bound.new[sublayer.layer] = block.run_mixer(x[:, None], states[sublayer.layer])
        else:
            y = block.run_feed(x[:, None])
        x = y[:, 0].contiguous()
    return x[:, None]


def run_tokens(plan: Plan, bound: BoundStep, ids: Tensor) -> Tensor | None:
    """Return the logits `rows 1 vocab` of ids `rows 1`, from a whole plan; None if an id is not in the vocabulary."""
    (parts,), table = bound.parts, plan.table
    assert parts is not None and table is not None
    ids = ids[:, 0].contiguous()
    logits = torch.empty(ids.shape[0], 1, parts[len(parts) - 1].entry.out, dtype=torch.float32, device="cpu")
    return logits if native.run_tokens(ids, table, parts, logits, are_rounded()) else None


class Recording:
    """The plan of a model, and whether the model is still as it was recorded.

    Args:
        ends: The modules around the blocks.
        blocks: The blocks.
    """

    def __init__(self, ends: Ends, blocks: Blocks) -> None:
        self.plan = record(blocks, ends)
        self._ends, self._unchanged = ends, Unchanged(list(blocks), self.plan.modules)

    def is_current(self, ends: Ends, blocks: Blocks) -> bool:
        """Whether these modules are unchanged, as far as C computes them."""
        return ends == self._ends and self._unchanged(blocks)


class NativeSteps:
    """The steps of a model whose caller prepares nothing: every call checks that the model is as it was recorded.

    A copy of a model begins without a plan.
    """

    def __init__(self) -> None:
        self._recording: Recording | None = None

    def __deepcopy__(self, copied: dict[int, Any]) -> "NativeSteps":
        return NativeSteps()

    def __reduce__(self) -> tuple[Any, ...]:
        return NativeSteps, ()

    def read(
        self, ends: Ends, blocks: Blocks, x: Tensor, states: tuple[LayerState, ...]
    ) -> tuple[Tensor, list[LayerState]] | None:
        """Run x `rows 1 hidden` through all blocks; return the result and states, or None if C computes no part of it.

        Args:
            ends: What is before and behind the blocks.
            blocks: The blocks of the model.
            x: What the first block reads; it is not changed.
            states: The states of all blocks; those that the call owns are overwritten.
        """
        if not len(blocks) or not serves(x):
            return None
        plan = self._plan(ends, blocks)
        if plan.hidden != x.shape[2] or not plan.uses_native:
            return None
        bound = bind_states(plan, states, x.shape[0], False)
        if bound is None:
            return None
        x = run_blocks(plan, bound, blocks, x, states)
        return x, [bound.new[n] for n in range(len(blocks))]

    def read_tokens(
        self, ends: Ends, blocks: Blocks, ids: Tensor, states: tuple[LayerState, ...]
    ) -> tuple[Tensor, list[LayerState]] | None:
        """Return the logits `rows 1 vocab` after one token of every row, ids `rows 1`, and the states.

        None if C cannot compute all of it, or if an id is not in the vocabulary, or a state is not one of the blocks.
        """
        if not len(blocks) or len(states) != len(blocks) or not serves_ids(ids):
            return None
        plan = self._plan(ends, blocks)
        bound = bind_states(plan, states, ids.shape[0], True) if plan.is_whole else None
        logits = None if bound is None else run_tokens(plan, bound, ids)
        if bound is None or logits is None:
            return None
        return logits, [bound.new[n] for n in range(len(blocks))]

    def _plan(self, ends: Ends, blocks: Blocks) -> Plan:
        """Return the plan, recorded again if the model was changed since."""
        recording = self._recording
        if recording is None or not recording.is_current(ends, blocks):
            recording = self._recording = Recording(ends, blocks)
        return recording.plan

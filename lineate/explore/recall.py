"""Four experiments, one question each: what does a memory of fixed size remember, and what does it forget?

    interference   how many pairs fit, and does repeating them help?
    overwrite      can one value be replaced while the others stay?
    topics         how much of many writes remains when the subject changes?
    scratch_pad    can one part be forgotten while another stays?

Gates are set by hand to the best values of each rule: open (1) unless something should be forgotten.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from lineate.explore.memories import (
    DEMO_RULES,
    FIXED_SIZE,
    FORGETTING,
    OnProgress,
    RecallSetting,
    WrittenMemory,
    answer_size,
    pairs,
    read,
    recall_error,
    silent,
    state_norm,
    write,
)
from lineate.torch_ops.tracing import cpu_by_default

T = TypeVar("T")

DECAYS = (1.0, 0.995, 0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.85, 0.8, 0.7)
"""Decays per token tried for gated linear attention, which has no other way to overwrite."""
GATES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
"""Forget gates tried when the scratch pad is cleared, from keep everything to forget everything."""

TOPICS = 8
"""Topics before the new one."""


@dataclass(frozen=True)
class Interference:
    """Recall error of all pairs, against how many there are and how often they were told."""

    key_dim: int
    """Channels of a key: the number of pairs that fit without interference, if their keys are orthogonal."""
    pairs: tuple[int, ...]
    """How many pairs were written, once each."""
    error: dict[str, tuple[float, ...]]
    """Recall error of all of them, per rule."""
    repeated_pairs: int
    """How many pairs were written repeatedly."""
    told: tuple[int, ...]
    """How often they were written."""
    error_by_told: dict[str, tuple[float, ...]]
    """Recall error of all of them, per rule."""


@dataclass(frozen=True)
class Frame:
    """The state of the overwriting experiment after one write."""

    step: int
    """How many writes are done."""
    steps: int
    """How many there will be."""
    key: int
    """The key just written."""
    error: dict[str, tuple[float | None, ...]]
    """Per rule, the recall error of every key against its newest value; None if not written yet."""


@dataclass(frozen=True)
class Overwrite:
    """Recall errors after some keys were given a new value."""

    group: int
    """Pairs in each group: old (written first), kept (written later), overwritten (written later, then again)."""
    old: dict[str, float]
    """Recall error of the pairs written first."""
    kept: dict[str, float]
    """Recall error of the pairs written later and never touched again."""
    overwritten: dict[str, float]
    """Recall error of the overwritten keys against their new value."""
    ghost: dict[str, float]
    """How much of the old value is still in the answer for an overwritten key: 1 is all of it, 0 is none."""
    decays: tuple[float, ...]
    """Decays per token tried for gated linear attention."""
    kept_by_decay: tuple[float, ...]
    """Its error on the kept pairs, for every decay."""
    overwritten_by_decay: tuple[float, ...]
    """Its error on the overwritten pairs, for every decay."""
    best_decay: float
    """The decay with the lowest mean error on old, kept and overwritten pairs: the one used above."""
    history: dict[str, tuple[tuple[float | None, ...], ...]]
    """Per rule, for every write, the error of every key (old, then kept, then overwritten); None if not written yet."""


@dataclass(frozen=True)
class Topics:
    """A long stream of topics, one after the other, and a new topic at its end."""

    writes: tuple[int, ...]
    """Positions in the stream at which the state was measured."""
    norm: dict[str, tuple[float, ...]]
    """Frobenius norm of the state there, per rule of fixed size."""
    switches: tuple[int, ...]
    """Positions at which a new topic begins and the rules that can forget do."""
    new_pairs: int
    """Pairs of the last topic."""
    new: dict[str, float]
    """Recall error of these pairs."""
    unseen: dict[str, float]
    """Length of the answer to keys that were never written: it should be 0; a stored value has length 1."""


@dataclass(frozen=True)
class ScratchPad:
    """Facts to keep and a scratch pad, in different key channels; then the scratch pad is no longer needed."""

    facts: dict[str, float]
    """Recall error of the facts, written long ago and still needed."""
    new: dict[str, float]
    """Recall error of the pairs written on the scratch pad after it was cleared."""
    unseen: dict[str, float]
    """Length of the answer to scratch keys that were never written: it should be 0."""
    gates: tuple[float, ...]
    """Forget gates tried for the rules with one gate per head."""
    facts_by_gate: dict[str, tuple[float, ...]]
    """Error on the facts, for every gate."""
    unseen_by_gate: dict[str, tuple[float, ...]]
    """Length of the answer to unseen scratch keys, for every gate."""


@cpu_by_default
def interference(setting: RecallSetting, report: OnProgress = silent) -> Interference:
    """Write more and more pairs; then write one set of pairs repeatedly."""
    dim, generator = setting.key_dim, setting.generator()
    counts = tuple(2**power for power in range((4 * dim).bit_length()) if 2**power <= 4 * dim)
    keys, values = pairs(setting, counts[-1], generator)
    error: dict[str, list[float]] = {rule: [] for rule in DEMO_RULES}
    for done, count in enumerate(counts, start=1):
        for rule in DEMO_RULES:
            memory = write(rule, None, keys[:, :count], values[:, :count])
            error[rule].append(recall_error(memory, keys[:, :count], values[:, :count], setting))
        report(done / (len(counts) + 1))

    told, repeated = (1, 2, 4, 8), max(1, dim // 4)
    keys, values = keys[:, :repeated], values[:, :repeated]
    error_by_told: dict[str, list[float]] = {rule: [] for rule in DEMO_RULES}
    for rule in DEMO_RULES:
        repeats: WrittenMemory | None = None
        for time in range(1, told[-1] + 1):
            repeats = write(rule, repeats, keys, values)
            if time in told:
                error_by_told[rule].append(recall_error(repeats, keys, values, setting))
    report(1.0)
    return Interference(dim, counts, _frozen(error), repeated, told, _frozen(error_by_told))


@cpu_by_default
def overwrite(
    setting: RecallSetting, report: OnProgress = silent, watch: Callable[[Frame], None] | None = None
) -> Overwrite:
    """Write old pairs, then kept ones and ones to be overwritten, then overwrite these; read all back each time."""
    group, generator = setting.group, setting.generator()
    keys, first = pairs(setting, 3 * group, generator)
    _, second = pairs(setting, group, generator)
    old, kept, changed = slice(0, group), slice(group, 2 * group), slice(2 * group, 3 * group)
    order = list(range(group))
    for index in range(group):
        order += [group + index, 2 * group + index]  # kept and overwritten pairs are equally old
    order += range(2 * group, 3 * group)
    values = torch.cat((first[:, order[:-group]], second), dim=1)
    newest = first.clone()

    sweep = []
    for decay in DECAYS:
        stream = torch.full((len(order),), decay)
        memory = write("gated_linear_attention", None, keys[:, order], values, stream)
        errors = [recall_error(memory, keys[:, part], first[:, part], setting) for part in (old, kept)]
        sweep.append((*errors, recall_error(memory, keys[:, changed], second, setting)))
    best_decay = DECAYS[min(range(len(DECAYS)), key=lambda i: sum(sweep[i]))]

    memories: dict[str, WrittenMemory | None] = dict.fromkeys(DEMO_RULES)
    history: dict[str, list[tuple[float | None, ...]]] = {rule: [] for rule in DEMO_RULES}
    seen: set[int] = set()
    for step, key in enumerate(order, start=1):
        newest[:, key] = values[:, step - 1]
        seen.add(key)
        for rule in DEMO_RULES:
            decay_now = torch.tensor([best_decay]) if rule == "gated_linear_attention" else None
            after = write(rule, memories[rule], keys[:, [key]], values[:, [step - 1]], decay_now)
            distance = (read(after, keys, setting) - newest).square().sum(dim=-1).mean(dim=(0, 2)).sqrt().tolist()
            history[rule].append(tuple(x if i in seen else None for i, x in enumerate(distance)))
            memories[rule] = after
        if watch is not None:
            watch(Frame(step, len(order), key, {rule: history[rule][-1] for rule in DEMO_RULES}))
        report(step / len(order))

    full = {rule: memory for rule, memory in memories.items() if memory is not None}
    ghost = {}
    for rule, memory in full.items():
        answer = read(memory, keys[:, changed], setting)
        ghost[rule] = (answer * first[:, changed]).sum(dim=-1).mean().item()
    return Overwrite(
        group=group,
        old={rule: recall_error(m, keys[:, old], newest[:, old], setting) for rule, m in full.items()},
        kept={rule: recall_error(m, keys[:, kept], newest[:, kept], setting) for rule, m in full.items()},
        overwritten={rule: recall_error(m, keys[:, changed], second, setting) for rule, m in full.items()},
        ghost=ghost,
        decays=DECAYS,
        kept_by_decay=tuple(errors[1] for errors in sweep),
        overwritten_by_decay=tuple(errors[2] for errors in sweep),
        best_decay=best_decay,
        history=_frozen(history),
    )


@cpu_by_default
def topics(setting: RecallSetting, report: OnProgress = silent) -> Topics:
    """Write TOPICS topics of key_dim pairs each, then a small one; rules that can forget do so at every switch."""
    dim, generator = setting.key_dim, setting.generator()
    piece = max(1, dim // 8)
    lengths = [dim] * TOPICS + [2 * setting.group]
    memories: dict[str, WrittenMemory | None] = dict.fromkeys(DEMO_RULES)
    norm: dict[str, list[float]] = {rule: [] for rule in FIXED_SIZE}
    written, positions, switches = 0, [], []
    keys = values = torch.empty(0)
    for topic, length in enumerate(lengths):
        keys, values = pairs(setting, length, generator)
        if topic > 0:
            switches.append(written)
        for start in range(0, length, piece):
            part = slice(start, min(start + piece, length))
            decay = torch.ones(part.stop - start)
            if start == 0:
                decay[0] = 0.0
            written += part.stop - start
            positions.append(written)
            for rule in DEMO_RULES:
                memory = write(rule, memories[rule], keys[:, part], values[:, part], decay)
                memories[rule] = memory
                size = state_norm(memory)
                if size is not None:
                    norm[rule].append(size)
        report((topic + 1) / len(lengths))
    unseen, _ = pairs(setting, lengths[-1], generator)
    full = {rule: memory for rule, memory in memories.items() if memory is not None}
    return Topics(
        writes=tuple(positions),
        norm=_frozen(norm),
        switches=tuple(switches),
        new_pairs=lengths[-1],
        new={rule: recall_error(memory, keys, values, setting) for rule, memory in full.items()},
        unseen={rule: answer_size(memory, unseen, setting) for rule, memory in full.items()},
    )


@cpu_by_default
def scratch_pad(setting: RecallSetting, report: OnProgress = silent) -> ScratchPad:
    """Write facts in half of the channels, fill a scratch pad in the other half, clear the pad, write on it again."""
    dim, generator = setting.key_dim, setting.generator()
    pad, rest = slice(0, dim // 2), slice(dim // 2, dim)
    facts = pairs(setting, setting.group, generator, rest)
    scratch = pairs(setting, 4 * dim, generator, pad)
    fresh = pairs(setting, setting.group, generator, pad)
    unseen, _ = pairs(setting, setting.group, generator, pad)

    filled = {rule: write(rule, write(rule, None, *facts), *scratch) for rule in DEMO_RULES}

    def after(rule: str, gate: float) -> WrittenMemory:
        decay = torch.ones(setting.group)
        decay[0] = gate
        return write(rule, filled[rule], *fresh, decay, pad)

    facts_by_gate: dict[str, list[float]] = {rule: [] for rule in FORGETTING[:2]}
    unseen_by_gate: dict[str, list[float]] = {rule: [] for rule in FORGETTING[:2]}
    for done, gate in enumerate(GATES, start=1):
        for rule in facts_by_gate:
            memory = after(rule, gate)
            facts_by_gate[rule].append(recall_error(memory, *facts, setting))
            unseen_by_gate[rule].append(answer_size(memory, unseen, setting))
        report(done / len(GATES))
    cleared = {rule: after(rule, 0.0) for rule in DEMO_RULES}
    return ScratchPad(
        facts={rule: recall_error(memory, *facts, setting) for rule, memory in cleared.items()},
        new={rule: recall_error(memory, *fresh, setting) for rule, memory in cleared.items()},
        unseen={rule: answer_size(memory, unseen, setting) for rule, memory in cleared.items()},
        gates=GATES,
        facts_by_gate=_frozen(facts_by_gate),
        unseen_by_gate=_frozen(unseen_by_gate),
    )


def _frozen(lists: dict[str, list[T]]) -> dict[str, tuple[T, ...]]:
    """Return the same numbers as tuples, for a frozen result."""
    return {name: tuple(items) for name, items in lists.items()}

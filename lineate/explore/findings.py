"""Sentences about the results: each is selected by comparing measured numbers."""

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import lineate
from lineate.explore.cost import MeasuredCost
from lineate.explore.memories import DEMO_RULES, RecallSetting
from lineate.explore.recall import Interference, Overwrite, ScratchPad, Topics

UNUSUAL = "This run does not show the usual effect; the memory may be too small for it."


@dataclass(frozen=True)
class SummaryRow:
    """One memory in the summary; all errors are recall errors."""

    kept: float
    """Error on pairs written once and never touched."""
    overwritten: float
    """Error on overwritten keys, against the new value."""
    old: float
    """Error on the pairs written first."""
    new_topic: float
    """Error on a new topic after many others."""
    unseen: float
    """Length of the answer to keys never written, after many topics."""
    facts: float
    """Error on facts to keep, after the scratch pad in the other channels was cleared."""
    norm: float | None
    """Frobenius norm of the state after many writes; a cache has none."""
    bytes: int
    """Bytes of state after the longest text."""


@dataclass(frozen=True)
class Reason:
    """Why a rule was invented: one number of the rule before it, and its own."""

    rule: str
    """The rule."""
    before: str
    """The rule it improves on."""
    problem: str
    """What was wrong."""
    measure: str
    """The meaning of the two numbers."""
    value_before: float
    """The number of the rule it improves on; lower is better."""
    value: float
    """Its own number."""


@dataclass(frozen=True)
class Results:
    """Everything the demo measured."""

    lineate: str
    """Version."""
    torch: str
    """Version."""
    python: str
    """Version."""
    setting: RecallSetting
    """Size and seed of the recall experiments."""
    summary: dict[str, SummaryRow]
    """One row per memory."""
    reasons: tuple[Reason, ...]
    """One per rule of fixed size."""
    interference: Interference
    overwrite: Overwrite
    topics: Topics
    scratch_pad: ScratchPad
    cost: MeasuredCost


def collect(
    setting: RecallSetting,
    interference: Interference,
    overwrite: Overwrite,
    topics: Topics,
    scratch_pad: ScratchPad,
    cost: MeasuredCost,
) -> Results:
    """Return the experiments with their summary and the versions that ran them."""
    many = topics.writes.index(topics.switches[-1])
    summary = {
        rule: SummaryRow(
            kept=overwrite.kept[rule],
            overwritten=overwrite.overwritten[rule],
            old=overwrite.old[rule],
            new_topic=topics.new[rule],
            unseen=topics.unseen[rule],
            facts=scratch_pad.facts[rule],
            norm=topics.norm[rule][many] if rule in topics.norm else None,
            bytes=cost.bytes[rule][-1],
        )
        for rule in DEMO_RULES
    }
    return Results(
        lineate=lineate.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        setting=setting,
        summary=summary,
        reasons=_reasons(overwrite, topics, scratch_pad, cost),
        interference=interference,
        overwrite=overwrite,
        topics=topics,
        scratch_pad=scratch_pad,
        cost=cost,
    )


def save(results: Results, path: Path) -> None:
    """Write all numbers as JSON, one field a line."""
    lines = []
    for name, value in asdict(results).items():
        if isinstance(value, dict):
            fields = (f"    {json.dumps(field)}: {json.dumps(content)}" for field, content in value.items())
            lines.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(fields) + "\n  }")
        else:
            lines.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _reasons(overwrite: Overwrite, topics: Topics, scratch_pad: ScratchPad, cost: MeasuredCost) -> tuple[Reason, ...]:
    many = topics.writes.index(topics.switches[-1])
    softmax, linear, gated_linear = "softmax_attention", "linear_attention", "gated_linear_attention"
    delta, gated_delta, kimi = "delta_rule", "gated_delta_rule", "kimi_delta_attention"
    length, writes = cost.lengths[-1], topics.switches[-1]
    return (
        Reason(
            linear, softmax, "its cache grows with the text",
            f"bytes of state after {length} tokens", cost.bytes[softmax][-1], cost.bytes[linear][-1],
        ),
        Reason(
            gated_linear, linear, "its state only grows, nothing fades",
            f"norm of the state after {writes} writes", topics.norm[linear][many], topics.norm[gated_linear][many],
        ),
        Reason(
            delta, linear, "it adds a new value to the old one",
            "error on overwritten keys", overwrite.overwritten[linear], overwrite.overwritten[delta],
        ),
        Reason(
            gated_delta, delta, "it replaces key by key and never clears",
            "answer to a key never written", topics.unseen[delta], topics.unseen[gated_delta],
        ),
        Reason(
            kimi, gated_delta, "its one gate clears all or nothing",
            "error on the facts to keep", scratch_pad.facts[gated_delta], scratch_pad.facts[kimi],
        ),
    )  # fmt: skip


def change(before: float, after: float) -> str:
    """Describe the change between two numbers."""
    if after > 1.05 * before + 0.005:
        return f"grows from {before:.2f} to {after:.2f}"
    if after < 0.95 * before - 0.005:
        return f"falls from {before:.2f} to {after:.2f}"
    return f"stays at {after:.2f}"


def size(count: float) -> str:
    """Return bytes in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def interference_findings(result: Interference) -> list[str]:
    """Describe the effect of more pairs, and of repeating them, on the error."""
    linear, delta = result.error["linear_attention"], result.error["delta_rule"]
    again_linear, again_delta = (result.error_by_told[rule] for rule in ("linear_attention", "delta_rule"))
    expected = again_linear[-1] > again_linear[0] and again_delta[-1] < again_delta[0]
    return [
        f"From {result.pairs[0]} to {result.pairs[-1]} pairs the error of linear attention "
        f"{change(linear[0], linear[-1])}, that of DeltaNet {change(delta[0], delta[-1])}.",
        f"When {result.repeated_pairs} pairs are told {result.told[-1]} times instead of once, the error of linear "
        f"attention {change(again_linear[0], again_linear[-1])}, that of DeltaNet "
        f"{change(again_delta[0], again_delta[-1])}.",
        "Linear attention adds what it already holds; DeltaNet writes only what is still missing, so it learns."
        if expected
        else UNUSUAL,
    ]


def overwrite_findings(result: Overwrite) -> list[str]:
    """Describe the remainder of the old value, and the effect of overwriting on the other pairs."""
    ghost, changed, kept = result.ghost, result.overwritten, result.kept
    linear, delta, softmax = "linear_attention", "delta_rule", "softmax_attention"
    both = min(map(max, result.kept_by_decay, result.overwritten_by_decay))
    expected = max(kept[delta], changed[delta]) < both and changed[delta] < changed[linear]
    return [
        f"Linear attention adds the new value to the old one: {ghost[linear]:.0%} of the old value is still in the "
        f"answer. DeltaNet takes the old value out first: {ghost[delta]:.0%} is left.",
        f"Gated linear attention can only fade everything (here by {result.best_decay:g} a write). No decay it could "
        f"use brings both kept and overwritten below {both:.2f}; DeltaNet has {kept[delta]:.2f} and "
        f"{changed[delta]:.2f}."
        if expected
        else UNUSUAL,
        f"Softmax attention stores both values under one key and, knowing no order, mixes them ({ghost[softmax]:.0%} "
        "old); models add positions for that.",
    ]


def topics_findings(result: Topics) -> list[str]:
    """Describe the growth of the state, and the benefit of clearing it."""
    many = result.writes.index(result.switches[-1])
    norm = {rule: values[many] for rule, values in result.norm.items()}
    linear, delta, gated = "linear_attention", "delta_rule", "gated_delta_rule"
    expected = result.unseen[gated] < result.unseen[delta] and result.new[gated] < result.new[delta]
    first = result.norm[linear][result.writes.index(result.switches[0])]
    return [
        f"From {result.switches[0]} to {result.switches[-1]} writes the norm of linear attention "
        f"{change(first, norm[linear])}; DeltaNet ends at {norm[delta]:.2f}, Gated DeltaNet at {norm[gated]:.2f}.",
        f"DeltaNet can only replace key by key, so finished topics stay behind: it answers a key it never saw with "
        f"length {result.unseen[delta]:.2f}, where a real value has 1. Gated DeltaNet clears everything with one "
        f"token: it answers {result.unseen[gated]:.2f}, and its error on the new topic is {result.new[gated]:.2f} "
        f"instead of {result.new[delta]:.2f}."
        if expected
        else UNUSUAL,
    ]


def scratch_pad_findings(result: ScratchPad) -> list[str]:
    """Describe the benefit of one gate per channel."""
    delta, gated, kimi = "delta_rule", "gated_delta_rule", "kimi_delta_attention"
    facts, unseen = result.facts, result.unseen
    both = min(map(max, result.facts_by_gate[gated], result.unseen_by_gate[gated]))
    torn = facts[delta] < facts[gated] and unseen[gated] < unseen[delta]
    return [
        f"DeltaNet keeps the facts (error {facts[delta]:.2f}) and the clutter ({unseen[delta]:.2f}). Gated DeltaNet "
        f"clears the clutter ({unseen[gated]:.2f}) and the facts with it (error {facts[gated]:.2f})."
        if torn
        else UNUSUAL,
        f"Kimi Delta Attention clears the scratch channels alone: facts {facts[kimi]:.2f}, clutter {unseen[kimi]:.2f}. "
        f"No single gate, open or half open, brings both below {both:.2f}."
        if max(facts[kimi], unseen[kimi]) < both
        else UNUSUAL,
    ]


def cost_findings(result: MeasuredCost) -> list[str]:
    """Describe the length from which a fixed memory is faster."""
    softmax, linear, kimi = "softmax_attention", "linear_attention", "kimi_delta_attention"
    held, first, last = result.bytes, result.lengths[0], result.lengths[-1]
    decode, prefill = result.decode_microseconds, result.prefill_microseconds
    ratio = held[softmax][-1] / held[linear][-1]
    ahead = [ours < theirs for ours, theirs in zip(decode[kimi], decode[softmax], strict=True)]
    if not ahead[-1]:
        verdict = "At these lengths the cache is still faster."
    elif all(ahead):
        verdict = "Kimi Delta Attention is faster at every length."
    else:
        index = len(ahead) - 1 - ahead[::-1].index(False)
        verdict = (
            f"Kimi Delta Attention gets ahead between {result.lengths[index]} and {result.lengths[index + 1]} tokens."
        )
    fixed = size(held[linear][0])
    if held[linear][0] != held[linear][-1]:
        fixed += f" to {size(held[linear][-1])}"
    return [
        f"From {first} to {last} tokens the key/value cache goes from {size(held[softmax][0])} to "
        f"{size(held[softmax][-1])}. Every fixed memory holds {fixed}: in the end {ratio:.3g} times less.",
        f"One more token after {first} and after {last} tokens: softmax attention {decode[softmax][0]:.0f} and "
        f"{decode[softmax][-1]:.0f} us, Kimi Delta Attention {decode[kimi][0]:.0f} and {decode[kimi][-1]:.0f} us. "
        f"{verdict}",
        f"Reading, per token of {first} and of {last}: softmax attention {prefill[softmax][0]:.0f} and "
        f"{prefill[softmax][-1]:.0f} us, Kimi Delta Attention {prefill[kimi][0]:.0f} and {prefill[kimi][-1]:.0f} us.",
    ]

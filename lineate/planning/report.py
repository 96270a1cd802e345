"""All numbers of `lineate plan` in one dictionary, from which the tables, JSON, CSV and the figure are made.

Keys end in their unit: _bytes, _tokens, _seconds, _flops, _tokens_per_second.
"""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from lineate.layers import kind_of, kinds
from lineate.planning.communication import Received, decode_received, prefill_received, training_received
from lineate.planning.compute import FlopsPlan, plan_flops
from lineate.planning.estimates import estimate_times, read_fits
from lineate.planning.fit import first_smaller, largest_batch, longest_context
from lineate.planning.formulas import differences, taught_heads, taught_variants, teaching_of
from lineate.planning.hardware import (
    HARDWARE,
    Hardware,
    decode_bound,
    prefill_bound,
    time_bounds,
    tokens_per_second,
    training_bound,
)
from lineate.planning.memory import LayerMemory, MemoryPlan, plan_memory, plan_training
from lineate.planning.models import WHOLE, Model, Split, variants
from lineate.planning.split import split_model

PlanNumbers = dict[str, Any]
MOST_RATE, RANDOM_RATE = "most_tokens_per_second", "most_tokens_per_second_experts_at_random"
"""Keys of the rates of decoding the largest batch; the second differs only for a model with experts."""


@dataclass(frozen=True)
class PlanRequest:
    """The request."""

    model: Model
    contexts: tuple[int, ...]
    """Tokens of a sequence, in rising order."""
    batch: int = 1
    batches: tuple[int, ...] = ()
    """Numbers of sequences that get a table, if there is more than one."""
    machines: tuple[Hardware, ...] = tuple(HARDWARE.values())
    """The machines whose memory and times count."""
    memory_bytes: int | None = None
    """The memory that all must fit into, if it is not the machines' own."""
    state_dtype: str = "float32"
    conv_dtype: str | None = None
    cache_dtype: str | None = None
    tokens_per_step: int | None = 8192
    """Tokens of a training step; None leaves training out."""
    optimizer: str = "adamw"
    precision: str = "bfloat16"
    recompute: bool = False
    split: Split = WHOLE
    """The ranks that share the model; all numbers are then those of one rank."""

    @property
    def rank(self) -> Model:
        """The model of one rank."""
        return split_model(self.model, self.split.tensor, self.split.context, self.split.replicas)

    def plan(self, model: Model) -> MemoryPlan:
        return plan_memory(model, self.state_dtype, self.conv_dtype, self.cache_dtype)


def make_report(request: PlanRequest) -> PlanNumbers:
    """Return everything except the teaching formulas; if ranks share the model, of one rank."""
    rank = request.rank
    plan, flops = request.plan(rank), plan_flops(rank)
    others = {name: (request.plan(model), plan_flops(model)) for name, model in variants(rank).items()}
    same = [name for name, (other, _) in others.items() if other.model.config.letters == plan.model.config.letters]
    sides = {f"{name} (this model)" if name in same else name: plans for name, plans in others.items()}
    if not same:
        sides = {"this model": (plan, flops), **sides}
    own = next(name for name in sides if "this model" in name)
    return {
        "model": model_numbers(plan),
        "ranks": _ranks(request, plan),
        "batch": request.batch,
        "contexts_tokens": list(request.contexts),
        "weights": _weights(plan),
        "state_of_a_sequence": _state(plan),
        "against_context": [_at(plan, request.batch, tokens) for tokens in request.contexts],
        "against_batch": {
            str(batch): [plan.total(batch, tokens) for tokens in request.contexts] for batch in request.batches
        },
        "own": own,
        "variants": {name: _variant(request, *plans) for name, plans in sides.items()},
        "crossover": _crossover(others["linear only"][0], others["softmax only"][0]),
        "flops_per_token": [_flops(flops, tokens, request.recompute) for tokens in request.contexts],
        "recompute": request.recompute,
        "fits": [{"of": name, **fit} for name, (other, _) in sides.items() for fit in _fits(request, other)],
        "times": [
            {"of": name, **time} for name, plans in sides.items() for machine in request.machines
            for tokens in request.contexts for time in _times(plans[0], machine, request.batch, tokens)
        ],
        "fitted": [
            {"of": name, **time} for name, plans in sides.items() for machine in request.machines
            for tokens in request.contexts for time in _fitted(plans[0], machine, request.batch, tokens)
        ],
        "fits_of_times": _measurements() if request.machines else {},
        "training": _training(request, plan),
        "layers": [_layer(layer, flops, request.contexts) for layer in plan.layers],
    }  # fmt: skip


def make_teaching_report(request: PlanRequest) -> PlanNumbers:
    """Return the simplified formulas next to the exact bytes of the same three models."""
    plans = {name: request.plan(model) for name, model in taught_variants(request.model).items()}
    taught = [teaching_of(request.model, tokens, request.batch) for tokens in request.contexts]
    return {
        "model": model_numbers(request.plan(request.model)) | {"taught_heads": taught_heads(request.model)},
        "batch": request.batch,
        "contexts_tokens": list(request.contexts),
        "teaching": {
            name: {
                "formula": formula,
                "letters": plan.model.config.letters,
                "formula_bytes": [numbers[formula] for numbers in taught],
                "exact_bytes": [plan.state(request.batch, tokens) for tokens in request.contexts],
            }
            for (name, plan), formula in zip(plans.items(), taught[0], strict=True)
        },
        "differences": differences(
            request.model,
            request.contexts[len(request.contexts) // 2],
            request.state_dtype,
            request.conv_dtype,
            request.cache_dtype,
        ),
    }


def cache_kinds() -> dict[str, str]:
    """Return the key of each kind of cache that a mixer may have, such as "latent_bytes" for "latent"."""
    return {kind.cache: f"{kind.cache.replace(' ', '_')}_bytes" for kind in kinds() if kind.cache}


def middle(report: PlanNumbers) -> int:
    """Return the middle length, for tables with room for one."""
    contexts: list[int] = report["contexts_tokens"]
    return contexts[len(contexts) // 2]


def model_numbers(plan: MemoryPlan) -> PlanNumbers:
    """Return the description of a model."""
    model, c = plan.model, plan.model.config
    return {
        "name": model.name, "origin": model.origin, "family": c.family, "dtype": model.dtype_name,
        **({} if model.weights is None else {"weights": model.weights_text}),
        "hidden_size": c.hidden_size, "n_layers": c.n_layers, "letters": c.letters, "vocab_size": c.vocab_size,
        "tied_embeddings": c.tie_embeddings, "parameters": plan.parameters,
        "active_parameters": plan.active_parameters, "experts": c.experts is not None,
        "longest_trained_tokens": c.max_position,
        "rules": {kind_of(letter).label: c.letters.count(letter) for letter in dict.fromkeys(c.letters)},
    }  # fmt: skip


def _ranks(request: PlanRequest, plan: MemoryPlan) -> PlanNumbers | None:
    """Return how ranks share the model, and the bytes that each receives; None for a single rank."""
    split = request.split
    if split == WHOLE:
        return None
    whole = request.plan(request.model)
    return {
        "tensor": split.tensor,
        "context": split.context,
        "replicas": split.replicas,
        "ranks": split.ranks,
        "whole_parameters": whole.parameters,
        "whole_weights_bytes": whole.weights,
        "decode_received": _received(decode_received(plan, request.batch)),
        "prefill_received": [_received(prefill_received(plan, request.batch, n)) for n in request.contexts],
    }


def _received(x: Received) -> PlanNumbers:
    return {
        "total_bytes": x.total, "sums_bytes": x.sums, "logits_bytes": x.logits, "context_bytes": x.context,
        "gradients_bytes": x.gradients, "shared_gradients_bytes": x.shared, "collectives": x.calls,
    }  # fmt: skip


def _weights(plan: MemoryPlan) -> PlanNumbers:
    feed = sum(layer.feed for layer in plan.layers)
    return {
        "total_bytes": plan.weights,
        "mixers_bytes": sum(layer.weights for layer in plan.layers) - feed,
        "feed_forward_bytes": feed,
        "embedding_bytes": plan.embedding,
        "head_bytes": plan.head,
        "norm_bytes": plan.norm,
        "prediction_bytes": plan.prediction,
    }


def _state(plan: MemoryPlan) -> PlanNumbers:
    name = {key: str(getattr(plan, key)).removeprefix("torch.") for key in ("state_dtype", "conv_dtype", "cache_dtype")}
    return {
        "recurrent_bytes": plan.memory, "convolution_bytes": plan.conv, "cache_bytes_per_token": plan.cache_per_token,
        **name,
    }  # fmt: skip


def _at(plan: MemoryPlan, batch: int, tokens: int) -> PlanNumbers:
    return {
        "tokens": tokens,
        **{key: plan.cache(batch, tokens, kind) for kind, key in cache_kinds().items()},
        "recurrent_bytes": batch * plan.memory,
        "convolution_bytes": batch * plan.conv,
        "state_bytes": plan.state(batch, tokens),
        "total_bytes": plan.total(batch, tokens),
    }


def _variant(request: PlanRequest, plan: MemoryPlan, flops: FlopsPlan) -> PlanNumbers:
    return {
        "letters": plan.model.config.letters,
        "weights_bytes": plan.weights,
        **{key: value for key, value in _state(plan).items() if not key.endswith("dtype")},
        "state_bytes": [plan.state(request.batch, tokens) for tokens in request.contexts],
        "decode_flops": [flops.decode(tokens) for tokens in request.contexts],
        "prefill_flops_per_token": [flops.prefill(tokens) for tokens in request.contexts],
    }


def _crossover(linear: MemoryPlan, full: MemoryPlan) -> PlanNumbers:
    """Return the first length at which a linear layer's state is smaller than an attention layer's cache."""
    one, other = linear.layers[0], full.layers[0]
    fixed = one.memory + one.conv
    return {
        "tokens": first_smaller(one, other), "linear_rule": one.rule, "linear_layer_bytes": fixed,
        "full_rule": other.rule, "full_layer_bytes_per_token": other.cache_per_token,
    }  # fmt: skip


def _flops(flops: FlopsPlan, tokens: int, recompute: bool) -> PlanNumbers:
    """Return operations by both conventions.

    "executed" counts as torch's counter does, with all pairs of a causal attention; "least" counts half of them.
    """
    return {"tokens": tokens} | {
        f"{what}_{convention}": number
        for convention in ("executed", "least")
        for what, number in (
            ("prefill", flops.prefill(tokens, convention)),
            ("decode", flops.decode(tokens, convention)),
            ("training", flops.training(tokens, recompute, convention)),
        )
    }


def _layer(layer: LayerMemory, flops: FlopsPlan, contexts: tuple[int, ...]) -> PlanNumbers:
    return {
        "index": layer.index, "letter": layer.letter, "rule": layer.rule, "weights_bytes": layer.weights,
        "feed_forward_bytes": layer.feed, "recurrent_bytes": layer.memory, "convolution_bytes": layer.conv,
        "cache": layer.cache, "cache_bytes_per_token": layer.cache_per_token,
        "prefill_flops_per_token": [flops.layers[layer.index].forward(n) / n for n in contexts],
        "decode_flops": [flops.layers[layer.index].decode(n) for n in contexts],
    }  # fmt: skip


def _fits(request: PlanRequest, plan: MemoryPlan) -> list[PlanNumbers]:
    rooms: list[tuple[Hardware | None, int]] = [(x, request.memory_bytes or x.memory_bytes) for x in request.machines]
    if not rooms and request.memory_bytes is not None:
        rooms = [(None, request.memory_bytes)]
    return [_fit(request, plan, machine, room) for machine, room in rooms]


def _fit(request: PlanRequest, plan: MemoryPlan, machine: Hardware | None, room: int) -> PlanNumbers:
    """Return what fits into the given bytes, and upper bounds of its decoding rate; None where nothing fits or runs."""
    batches = [largest_batch(plan, room, tokens) for tokens in request.contexts]
    rates = {
        key: [
            tokens_per_second(plan, machine, batch, tokens, routing) if machine and batch else None
            for batch, tokens in zip(batches, request.contexts, strict=True)
        ]
        for key, routing in ((MOST_RATE, "least"), (RANDOM_RATE, "expected"))
    }
    return {
        "hardware": machine.name if machine else "the memory given",
        "memory_bytes": room,
        "weights_fit": plan.weights <= room,
        "longest_context_tokens": longest_context(plan, room, request.batch),
        "any_length_fits": longest_context(plan, room, request.batch) is None,
        "largest_batch": batches,
        **rates,
    }


def _times(plan: MemoryPlan, machine: Hardware, batch: int, tokens: int) -> list[PlanNumbers]:
    return [
        {
            "hardware": machine.name, "what": x.what, "tokens": tokens, "least_seconds": x.seconds, "limit": x.limit,
            "flops": x.flops, "moved_bytes": x.moved, "received_bytes": x.received,
        }
        for x in time_bounds(plan, machine, batch, tokens)
        if x.what != "training step"
    ]  # fmt: skip


def _fitted(plan: MemoryPlan, machine: Hardware, batch: int, tokens: int) -> list[PlanNumbers]:
    """Return the fitted times of lineate next to the bounds, both with experts chosen at random."""
    least = {
        "prefill": prefill_bound(plan, machine, batch, tokens).seconds,
        "decode": decode_bound(plan, machine, batch, tokens, "expected").seconds,
    }
    return [
        {
            "hardware": machine.name, "what": x.what, "tokens": tokens, "least_seconds": least[x.what],
            "fitted_seconds": x.seconds, "median_error": x.median_error, "largest_error": x.largest_error,
            "outside": list(x.outside), "why_not": x.why_not,
        }
        for x in estimate_times(plan, machine, batch, tokens)
    ]  # fmt: skip


def _measurements() -> PlanNumbers:
    """Return the measurements behind the fitted times of each machine, by kind of step."""
    return {
        fit.hardware.name: {
            "date": fit.date,
            **{
                f"{what}_{key}": value
                for what, time in fit.times.items()
                for key, value in (
                    ("measurements", sum(x.points for x in time.formats.values())),
                    ("new_model_largest_error", time.new_model_largest_error),
                )
            },
        }
        for fit in read_fits().values()
    }


def _training(request: PlanRequest, memory: MemoryPlan) -> PlanNumbers | None:
    if request.tokens_per_step is None:
        return None
    tokens, half = request.tokens_per_step, request.precision == "bfloat16"
    plan = plan_training(memory.model, tokens, request.precision, request.optimizer)
    length = min(tokens * request.split.context, request.contexts[0])
    steps = []
    for machine in request.machines:
        x = training_bound(
            memory, machine, tokens, length, request.optimizer, request.precision, request.recompute
        )  # fmt: skip
        steps.append({"hardware": machine.name, "least_seconds": x.seconds, "limit": x.limit})
    shared = {}
    if request.split != WHOLE:
        shared = {"received": _received(training_received(memory, tokens, length, half, request.recompute))}
    return {
        "tokens_per_step": request.tokens_per_step,
        "text_tokens": length,
        "optimizer": request.optimizer,
        "precision": request.precision,
        **shared,
        **{f"{f.name}_bytes": getattr(plan, f.name) for f in fields(plan) if f.name != "by_layer"},
        "activations_by_layer_bytes": list(plan.by_layer),
        "total_bytes": plan.total(),
        "total_recomputed_bytes": plan.total(recompute=True),
        "times": steps,
    }


def csv_text(report: PlanNumbers) -> str:
    """Return one line per number: table, owner, length (if relevant), name and unit."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "of", "tokens", "quantity", "value"])
    kinds = {"teaching": _teaching_numbers, "where": _where_numbers}
    writer.writerows(next((lines for key, lines in kinds.items() if key in report), _numbers)(report))
    return out.getvalue()


def _numbers(report: PlanNumbers) -> Iterator[tuple[Any, ...]]:
    contexts, name = report["contexts_tokens"], report["model"]["name"]
    for part in ("model", "ranks", "weights", "state_of_a_sequence", "crossover", "training"):
        for key, value in (report[part] or {}).items():
            if not isinstance(value, dict | list):
                yield part, name, "", key, value
    for part in ("against_context", "flops_per_token"):
        for row in report[part]:
            yield from ((part, name, row["tokens"], key, value) for key, value in row.items() if key != "tokens")
    for batch, totals in report["against_batch"].items():
        for tokens, total in zip(contexts, totals, strict=True):
            yield "against_batch", name, tokens, f"total_bytes of {batch} sequences", total
    wholes = [("variants", name, x) for name, x in report["variants"].items()]
    wholes += [("layers", str(x["index"]), x) for x in report["layers"]]
    wholes += [(f"fits, {x['hardware']}", x["of"], x) for x in report["fits"]]
    for part, whose, x in wholes:
        for key, value in x.items():
            if key in ("of", "hardware", "index"):
                continue
            if isinstance(value, list):
                yield from ((part, whose, tokens, key, number) for tokens, number in zip(contexts, value, strict=True))
            else:
                yield part, whose, "", key, value
    for x in report["times"]:
        for key in ("least_seconds", "limit", "flops", "moved_bytes", "received_bytes"):
            yield f"times, {x['what']}, {x['hardware']}", x["of"], x["tokens"], key, x[key]
    for machine, found in report["fits_of_times"].items():
        yield from (("fits_of_times", machine, "", key, value) for key, value in found.items() if value is not None)
    for x in report["fitted"]:
        for key in ("fitted_seconds", "median_error", "largest_error", "why_not"):
            if x[key] is not None:
                yield f"fitted, {x['what']}, {x['hardware']}", x["of"], x["tokens"], key, x[key]
        if x["outside"]:
            yield f"fitted, {x['what']}, {x['hardware']}", x["of"], x["tokens"], "outside", "; ".join(x["outside"])
    training = report["training"] or {}
    for index, saved in enumerate(training.get("activations_by_layer_bytes", ())):
        yield "layers", str(index), "", "activations_bytes", saved
    for x in training.get("times", ()):
        for key in ("least_seconds", "limit"):
            yield f"times, training step, {x['hardware']}", report["own"], "", key, x[key]
    yield from _received_numbers(report)


def _received_numbers(report: PlanNumbers) -> Iterator[tuple[Any, ...]]:
    """Yield the bytes that a rank receives."""
    if report["ranks"] is None:
        return
    name, training = report["model"]["name"], report["training"] or {}
    rows = [("decode", "", report["ranks"]["decode_received"]), ("training step", "", training.get("received", {}))]
    rows += [
        ("prefill", n, x) for n, x in zip(report["contexts_tokens"], report["ranks"]["prefill_received"], strict=True)
    ]
    for what, tokens, x in rows:
        yield from ((f"received, {what}", name, tokens, key, value) for key, value in x.items())


def _teaching_numbers(report: PlanNumbers) -> Iterator[tuple[Any, ...]]:
    for name, x in report["teaching"].items():
        for key in ("formula_bytes", "exact_bytes"):
            for tokens, number in zip(report["contexts_tokens"], x[key], strict=True):
                yield "teaching", name, tokens, key, number


def _where_numbers(report: PlanNumbers) -> Iterator[tuple[Any, ...]]:
    for x in report["where"]:
        whose = f"{x['hardware']}, {x['weights']}"
        for key, value in x.items():
            if isinstance(value, list):
                lines = zip(report["contexts_tokens"], value, strict=True)
                yield from (("where", whose, tokens, key, number) for tokens, number in lines)
            elif key not in ("hardware", "weights") and value is not None:
                yield "where", whose, "", key, value

"""The view "Plan": bytes, least times and what fits, for a model by name or by sizes, next to pure attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lineate.layers import kinds
from lineate.models.presets import PRESETS
from lineate.planning import (
    DTYPES,
    HARDWARE,
    Estimate,
    Hardware,
    MemoryPlan,
    Model,
    crossover,
    estimate_times,
    from_numbers,
    largest_batch,
    longest_context,
    plan_memory,
    read_model,
    several,
    time_bounds,
    tokens_per_second,
    variants,
)
from lineate.planning.units import show_bytes, show_count, show_number, show_seconds
from lineate.web.errors import invalid
from lineate.web.fields import Fields

MOST_TOKENS, MOST_BATCH, MOST_DEVICES = 2**24, 2**14, 1024
MOST_HIDDEN, MOST_LAYERS, MOST_HEAD = 16384, 128, 512
HEAD_STEP = 16
"""The channels of a head are a multiple of this."""
MOST_PATTERN = MOST_LAYERS
CURVE = tuple(2**i for i in range(10, 25))
"""Lengths of the chart, in tokens."""
SIZES = ("hidden_size", "layers", "head_dim", "kv_heads")
OWN, PURE = "own", "pure"


@dataclass(frozen=True)
class PlanRequest:
    """A request of the page."""

    model: Model
    """The model."""
    context: int
    """Tokens of a sequence."""
    batch: int
    """Sequences at a time."""
    hardware: Hardware
    """The machine, or several as one."""


def read_request(body: Fields) -> PlanRequest:
    """Read a body; raise ApiError with the name of the first field that is wrong.

    Args:
        body: The fields of the body.
    """
    preset = body.word("preset", tuple(PRESETS))
    pattern = _pattern(body)
    dtype = body.word("dtype", tuple(DTYPES))
    context = body.whole("context", 1, MOST_TOKENS) or 32768
    batch = body.whole("batch", 1, MOST_BATCH) or 1
    machine = HARDWARE[body.word("hardware", tuple(HARDWARE)) or "h100"]
    devices = body.whole("devices", 1, MOST_DEVICES) or 1
    if preset is not None:
        body.refuse(SIZES, f"the preset {preset} has sizes of its own")
        body.finish()
        model = _made(pattern, lambda: read_model(preset, dtype, pattern))
    else:
        model = _from_sizes(body, pattern or "GGGA", dtype or "bfloat16")
    return PlanRequest(model, context, batch, several(machine, devices))


def _pattern(body: Fields) -> str | None:
    """Return the letters of the pattern, each of which is a mixer's."""
    found, known = body.text("pattern", MOST_PATTERN), [kind.letter for kind in kinds()]
    if found is not None and (not found or set(found) - set(known)):
        raise body.wrong("pattern", f"letters of {' '.join(known)}")
    return found


def _from_sizes(body: Fields, pattern: str, dtype: str) -> Model:
    hidden = body.whole("hidden_size", 64, MOST_HIDDEN) or 2048
    layers = body.whole("layers", 1, MOST_LAYERS) or 24
    head = body.whole("head_dim", HEAD_STEP, MOST_HEAD) or 128
    if head % HEAD_STEP:
        raise body.wrong("head_dim", f"a multiple of {HEAD_STEP}")
    if hidden % head:
        raise body.wrong("hidden_size", f"a multiple of head_dim = {head}")
    heads = hidden // head
    shared = body.whole("kv_heads", 1, heads) or heads
    if heads % shared:
        raise body.wrong("kv_heads", f"a divisor of hidden_size / head_dim = {heads}")
    body.finish()
    return _made(
        pattern,
        lambda: from_numbers(hidden, heads, layers, dtype, kv_heads=shared, head_dim=head, pattern=pattern),
    )


def _made(pattern: str | None, make: Callable[[], Model]) -> Model:
    """Return a model; sizes that one of the mixers does not take are an error of the pattern."""
    try:
        return make()
    except ValueError as error:
        raise invalid("pattern", f"pattern {pattern}: {error}", "invalid_value") from None


def run_plan(asked: PlanRequest) -> dict[str, Any]:
    """Return the numbers of the model and of the same sizes with softmax attention in every layer.

    Args:
        asked: The model, the machine and the lengths.
    """
    models = {OWN: asked.model, PURE: variants(asked.model)["softmax only"]}
    plans = {name: plan_memory(model) for name, model in models.items()}
    return {
        "name": asked.model.name,
        "dtype": asked.model.dtype_name,
        "parameters": show_count(plans[OWN].parameters),
        "context": asked.context,
        "batch": asked.batch,
        "hardware": {
            "name": asked.hardware.name,
            "notes": asked.hardware.notes,
            "memory": _bytes(asked.hardware.memory_bytes),
        },
        "crossover": crossover(asked.model),
        "curve_tokens": list(CURVE),
        "models": {name: _numbers(asked, plan) for name, plan in plans.items()},
    }


def _numbers(asked: PlanRequest, plan: MemoryPlan) -> dict[str, Any]:
    """Return the memory, what fits and the least times of one model."""
    room, batch, context = asked.hardware.memory_bytes, asked.batch, asked.context
    total, config = plan.total(batch, context), plan.model.config
    most = largest_batch(plan, room, context)
    routings = {"": "least"} if config.experts is None else {"": "least", " (experts at random)": "expected"}
    rates = {
        what: tokens_per_second(plan, asked.hardware, most, context, routing)
        for what, routing in routings.items()
        if most
    }
    times = [x for x in time_bounds(plan, asked.hardware, batch, context) if x.what != "training step"]
    return {
        "pattern": config.pattern,
        "letters": config.letters,
        "parts": {
            "weights": _bytes(plan.weights),
            "state": _bytes(batch * (plan.memory + plan.conv)),
            "cache": _bytes(plan.cache(batch, context)),
        },
        "total": _bytes(total),
        "fits": total <= room,
        "weights_fit": plan.weights <= room,
        "longest_context": longest_context(plan, room, batch),
        "largest_batch": most,
        "rates": [{"what": what, "per_second": rate, "text": show_number(rate)} for what, rate in rates.items()],
        "times": [
            {"what": x.what, "seconds": x.seconds, "text": show_seconds(x.seconds), "limit": x.limit} for x in times
        ],
        "fitted": [
            {"what": x.what, "seconds": x.seconds, "text": _fitted(x)}
            for x in estimate_times(plan, asked.hardware, batch, context)
        ],
        "curve_bytes": [plan.total(batch, tokens) for tokens in CURVE],
    }


def _fitted(x: Estimate) -> str:
    """Return a fitted time with its error, or why there is none."""
    if x.seconds is None:
        return str(x.why_not)
    known = "extrapolated" if x.outside else f"± {x.largest_error:.0%}"
    return f"{show_seconds(x.seconds)} ({known})"


def _bytes(count: int) -> dict[str, Any]:
    return {"bytes": count, "text": show_bytes(count)}

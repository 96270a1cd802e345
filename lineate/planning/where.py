"""The table of --fits: one model on one to eight devices that divide it, in 16, 8 and 4 bits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lineate.planning.fit import largest_batch, longest_context
from lineate.planning.hardware import HARDWARE, Hardware, decode_bound
from lineate.planning.models import Model
from lineate.planning.report import PlanNumbers, PlanRequest, middle, model_numbers
from lineate.planning.split import split_model
from lineate.planning.tables import Rows, headline, longest, memory, say, sequences, table
from lineate.planning.units import show_bytes, show_seconds, show_tokens

if TYPE_CHECKING:
    from rich.console import Console

DEVICES = (1, 2, 4, 8)
"""How many of a machine are tried."""
FORMATS = (None, "int8", "int4")
"""The formats of large weights that are tried; None: as stored."""
LIMITS = {"memory bandwidth": "memory", "matrix rate": "products", "link": "link"}
"""Short names of the limits of a step."""


@dataclass(frozen=True)
class Place:
    """Devices that divide a model among them as tensor ranks."""

    hardware: Hardware
    """One of the devices."""
    devices: int
    """How many there are."""

    @property
    def name(self) -> str:
        """Such as 8 x H200 SXM."""
        return self.hardware.name if self.devices == 1 else f"{self.devices} x {self.hardware.name}"


PLACES = (
    *(Place(HARDWARE["h200"], n) for n in DEVICES),
    *(Place(HARDWARE[name], 8) for name in ("rtx4090", "rtx5090")),
)
"""The devices that are tried if none are named."""


def make_fits_report(request: PlanRequest, places: tuple[Place, ...] = PLACES) -> PlanNumbers:
    """Return the results of each place in each format.

    Args:
        request: The model, the lengths and the number of sequences; its machines and its split do not count.
        places: The groups of devices.
    """
    return {
        "model": model_numbers(request.plan(request.model)),
        "batch": request.batch,
        "contexts_tokens": list(request.contexts),
        "where": [_at(request, place, form) for place in places for form in FORMATS],
    }


def places_for(machines: tuple[Hardware, ...], memory_bytes: int | None) -> tuple[Place, ...]:
    """Return 1, 2, 4 and 8 of the one machine that is named, else those of PLACES; with other memory if it is given."""
    places = PLACES if len(machines) != 1 else tuple(Place(machines[0], n) for n in DEVICES)
    if memory_bytes is None:
        return places
    return tuple(replace(x, hardware=replace(x.hardware, memory_bytes=memory_bytes)) for x in places)


def _at(request: PlanRequest, place: Place, form: str | None) -> PlanNumbers:
    model, machine = request.model, place.hardware
    found: PlanNumbers = {
        "hardware": place.name,
        "devices": place.devices,
        "memory_bytes": machine.memory_bytes,
        "weights": model.dtype_name if form is None else form,
    }
    try:
        rank = split_model(_in(model, form), place.devices)
    except ValueError as error:
        return found | {"why_not": str(error)}
    plan = request.plan(rank)
    room = machine.memory_bytes
    steps = [decode_bound(plan, machine, request.batch, n) for n in request.contexts]
    batches = [largest_batch(plan, room, n) for n in request.contexts]
    return found | {
        "why_not": None,
        "weights_bytes": plan.weights,
        "weights_fit": plan.weights <= room,
        "state_bytes": [plan.state(request.batch, n) for n in request.contexts],
        "longest_context_tokens": longest_context(plan, room, request.batch),
        "any_length_fits": longest_context(plan, room, request.batch) is None,
        "largest_batch": batches,
        "decode_seconds": [x.seconds for x in steps],
        "decode_limit": [x.limit for x in steps],
        "received_bytes": steps[0].received,
    }


def _in(model: Model, form: str | None) -> Model:
    return model if form is None else replace(model, weights=form, kept=())


def print_fits(report: PlanNumbers, console: "Console") -> None:
    """Print the tables of make_fits_report."""
    m, batch = report["model"], sequences(report["batch"])
    say(console, headline(m), style="bold")
    if m["longest_trained_tokens"] is not None:
        say(console, f"Made for sequences of up to {m['longest_trained_tokens']:,} tokens.")
    at = report["contexts_tokens"].index(middle(report))
    shown = show_tokens(middle(report))
    table(console, "Weights of a device", *_rows(report, lambda x: show_bytes(x["weights_bytes"])))
    table(console, f"Longest context in tokens, {batch}", *_rows(report, _longest))
    table(console, f"Most sequences of {shown} tokens", *_rows(report, _most(at)))
    table(console, f"Least time of a decoding step after {shown} tokens, {batch}", *_rows(report, _step(at)))
    say(
        console, "memory, products, link: what takes longest. Devices divide heads, channels and vocabulary (--tensor)."
    )
    if reasons := list(dict.fromkeys(x["why_not"] for x in report["where"] if x["why_not"])):
        say(console, f"cannot be divided: {reasons[0]}")


def _rows(report: PlanNumbers, cell: Callable[[PlanNumbers], str]) -> tuple[list[str], Rows]:
    """Return a column for each format and a row for each place."""
    where = report["where"]
    head = ["", "memory", *dict.fromkeys(x["weights"] for x in where)]
    rows: Rows = []
    for x in where:
        if not rows or rows[-1][0] != x["hardware"]:
            rows.append([x["hardware"], memory(x)])
        rows[-1].append("not divisible" if x["why_not"] else cell(x))
    return head, rows


def _longest(x: PlanNumbers) -> str:
    return longest(x) if x["weights_fit"] else "does not fit"


def _most(at: int) -> Callable[[PlanNumbers], str]:
    return lambda x: f"{x['largest_batch'][at]:,}" if x["weights_fit"] else "-"


def _step(at: int) -> Callable[[PlanNumbers], str]:
    """Return the text of the least time of a step at one of the lengths, with its limit."""

    def show(x: PlanNumbers) -> str:
        if not x["weights_fit"]:
            return "-"
        return f"{show_seconds(x['decode_seconds'][at])} {LIMITS[x['decode_limit'][at]]}"

    return show

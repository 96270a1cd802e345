"""Estimates of the times that lineate itself takes: sums of terms with coefficients fitted to measurements.

    seconds = sum over terms of coefficient * amount, and at least the lower bound

    decode    bytes of weights, of states and of caches; layers, and layers of latent attention besides; with quantised
              weights, the operations of their products
    prefill   operations without attention, operations of attention over keys and values and over latents; bytes of
              weights

Weights and their products have a coefficient for each format. `python -m bench.models.fit_plan` fits the coefficients
and writes estimates.json. An estimate is never part of a bound.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lineate.layers import kind_of
from lineate.models.reading import PIECE, share_of
from lineate.planning.compute import decode_bytes, plan_flops, touched_weights
from lineate.planning.hardware import HARDWARE, Hardware, decode_bound, prefill_bound
from lineate.planning.memory import MemoryPlan, plan_memory
from lineate.planning.models import Model, check_size
from lineate.planning.units import show_bytes, show_flops, show_rate, show_seconds

FILE = Path(__file__).with_name("estimates.json")
"""The fitted coefficients and their errors."""
MEASURED_DTYPE = torch.bfloat16
"""The dtype of everything but quantised weights and the recurrent state in the measurements."""
WEIGHTS, PRODUCTS = "bytes of weights in {}", "operations in {}"
"""Names of the terms that every format of weights has for itself."""
TOLERANCE = 1e-3
"""By how much a time may be below the shortest one; more than the rounding of estimates.json."""
STATE, CACHE, LAYERS, LATENT_LAYERS = "bytes of states", "bytes of caches", "layers", "layers of latent attention"
ATTENTION, LATENT_ATTENTION = "operations of attention", "operations of latent attention"


@dataclass(frozen=True)
class FormatErrors:
    """The measurements with weights in one format, and by how much the fit to all others misses each of them."""

    points: int
    """The number of measurements."""
    median_error: float
    """The median of |prediction / measured - 1| of measurements that the fit did not have."""
    largest_error: float
    """The largest of them."""
    rows: tuple[int, int]
    """The fewest and the most sequences that were measured."""
    tokens: tuple[int, int]
    """The fewest and the most tokens of a sequence that were measured."""


@dataclass(frozen=True)
class TimeFit:
    """The fitted times of one kind of step on one device."""

    coefficients: Mapping[str, float]
    """Seconds for each unit of a term."""
    largest: Mapping[str, float]
    """The largest amount of each term that was measured."""
    shortest_seconds: float
    """The shortest fitted time of a measured step."""
    formats: Mapping[str, FormatErrors]
    """Errors and ranges by the format of large weights; "bfloat16" where none are quantised."""
    new_model_median_error: float | None
    """The median of |prediction / measured - 1| of models of which the fit had no measurement; None if unknown."""
    new_model_largest_error: float | None
    """The largest of them."""

    def seconds(self, terms: Mapping[str, float]) -> float:
        """Return the fitted time of amounts of terms."""
        return sum(self.coefficients[name] * amount for name, amount in terms.items() if amount)


@dataclass(frozen=True)
class DeviceFit:
    """All fitted times of one device."""

    device: str
    """Its key in HARDWARE."""
    date: str
    """The date of the newest measurement."""
    letters: str
    """The letters of the mixers of the measured models."""
    times: Mapping[str, TimeFit]
    """The fits by kind of step: "prefill" and "decode"."""

    @property
    def hardware(self) -> Hardware:
        return HARDWARE[self.device]


@dataclass(frozen=True)
class Estimate:
    """A time of lineate, fitted to measurements, with its error; no bound."""

    what: str
    """"prefill" or "decode"."""
    seconds: float | None
    """The fitted time; None if no fit covers the model on this device."""
    median_error: float | None
    """The median error of measurements that were left out of the fit, relative to what was measured."""
    largest_error: float | None
    """The largest such error."""
    outside: tuple[str, ...]
    """How the shape is outside the range of the measured ones, in words; empty if it is inside."""
    why_not: str | None
    """Why there is no fitted time; None if there is one."""


def estimate_times(model: Model | MemoryPlan, hardware: Hardware, batch: int = 1, tokens: int = 4096) -> list[Estimate]:
    """Return the fitted times of lineate for a prefill and for decoding one token.

    The times are of one device that was measured, with experts chosen at random. Everything that no fit covers has
    `why_not`: other devices and dtypes, ranks, formats and mixers that were not measured.

    Args:
        model: The model, or the plan of its memory, which has the dtypes of its state.
        hardware: The machine.
        batch: Sequences at a time.
        tokens: Tokens of a sequence: those of the prefill, and those before the decoded token.
    """
    for name, value in (("batch", batch), ("tokens", tokens)):
        check_size(name, value)
    plan = model if isinstance(model, MemoryPlan) else plan_memory(model)
    return [estimate_prefill(plan, hardware, batch, tokens), estimate_decode(plan, hardware, batch, tokens)]


def estimate_prefill(
    plan: MemoryPlan, hardware: Hardware, batch: int, tokens: int, piece: int | None = None
) -> Estimate:  # fmt: skip
    """Return the fitted time of reading `batch` sequences of `tokens` tokens.

    Args:
        plan: The memory of the model.
        hardware: The machine.
        batch: Sequences at a time.
        tokens: Tokens of each sequence.
        piece: Tokens of a sequence in a call, which reads PIECE of them at a time (models/reading.py); None: all.
    """
    fit = find_fit(hardware)
    if (why_not := _why_not("prefill", plan, fit)) is not None or fit is None:
        return Estimate("prefill", None, None, None, (), why_not)
    terms = prefill_terms(plan, batch, tokens, piece)
    least = prefill_bound(plan, fit.hardware, batch, tokens).seconds
    return _estimate("prefill", plan, fit, terms, least, batch, tokens)


def estimate_decode(plan: MemoryPlan, hardware: Hardware, batch: int, tokens: int) -> Estimate:
    """Return the fitted time of a decoding step: one token in each of `batch` sequences, after `tokens` others.

    Args:
        plan: The memory of the model.
        hardware: The machine.
        batch: Sequences at a time.
        tokens: Tokens of each sequence before the decoded one.
    """
    fit = find_fit(hardware)
    if (why_not := _why_not("decode", plan, fit)) is not None or fit is None:
        return Estimate("decode", None, None, None, (), why_not)
    terms = decode_terms(plan, batch, tokens)
    least = decode_bound(plan, fit.hardware, batch, tokens, "expected").seconds
    return _estimate("decode", plan, fit, terms, least, batch, tokens)


def decode_terms(plan: MemoryPlan, batch: int, tokens: int) -> dict[str, float]:
    """Return the amounts of the terms of a decoding step, with experts chosen at random.

    Args:
        plan: The memory of the model.
        batch: Sequences at a time.
        tokens: Tokens of each sequence before the decoded one.
    """
    moved, form = decode_bytes(plan, batch, tokens, "expected"), weights_format(plan.model)
    terms: dict[str, float] = {
        WEIGHTS.format(form): moved.weights,
        STATE: moved.state,
        CACHE: moved.cache,
        LAYERS: len(plan.layers),
        LATENT_LAYERS: sum(x.cache == "latent" for x in plan.layers),
    }
    if plan.model.weights is not None:
        flops = plan_flops(plan.model)
        terms[PRODUCTS.format(form)] = batch * (flops.head + sum(x.projections + x.feed for x in flops.layers))
    return terms


def prefill_terms(plan: MemoryPlan, batch: int, tokens: int, piece: int | None = None) -> dict[str, float]:
    """Return the amounts of the terms of reading `batch` sequences, with experts chosen at random.

    Args:
        plan: The memory of the model.
        batch: Sequences at a time.
        tokens: Tokens of each sequence.
        piece: Tokens of a sequence in a call, which reads PIECE of them at a time (models/reading.py); None: all.
    """
    for name, value in (("batch", batch), ("tokens", tokens), ("piece", tokens if piece is None else piece)):
        check_size(name, value)
    at_once = min(tokens, share_of(PIECE, batch), tokens if piece is None else piece)
    flops, form = plan_flops(plan.model), weights_format(plan.model)
    attention = {"latent": 0, "keys and values": 0}
    for layer, kept in zip(flops.layers, plan.layers, strict=True):
        if kept.cache:
            attention[kept.cache] = attention.get(kept.cache, 0) + batch * layer.mixing(tokens, "least")
    return {
        PRODUCTS.format(form): batch * flops.forward(tokens, 1, "least") - sum(attention.values()),
        ATTENTION: attention["keys and values"],
        LATENT_ATTENTION: attention["latent"],
        WEIGHTS.format(form): -(-tokens // at_once) * touched_weights(plan, batch * at_once, "expected"),
    }


def weights_format(model: Model) -> str:
    """Return the format of large weights, or the dtype if they have no format of their own."""
    return model.weights_text or model.dtype_name


def find_fit(hardware: Hardware) -> DeviceFit | None:
    """Return the fit of a machine; None if there is none, or if its rates are not those of the measured machine."""
    for fit in read_fits().values():
        known = fit.hardware
        rates = known.name, known.bandwidth, known.matrix_rate
        if (hardware.name, hardware.bandwidth, hardware.matrix_rate) == rates:
            return fit
    return None


@lru_cache(1)
def read_fits() -> dict[str, DeviceFit]:
    """Return the fits of estimates.json by device."""
    return {device: _device_fit(device, found) for device, found in json.loads(FILE.read_text()).items()}


def _device_fit(device: str, found: dict[str, Any]) -> DeviceFit:
    times = {what: _time_fit(x) for what, x in found["times"].items()}
    return DeviceFit(device, found["date"], found["letters"], times)


def _time_fit(found: dict[str, Any]) -> TimeFit:
    formats = {
        name: FormatErrors(**x | {"rows": tuple(x["rows"]), "tokens": tuple(x["tokens"])})
        for name, x in found["formats"].items()
    }
    return TimeFit(**found | {"formats": formats})


def _why_not(what: str, plan: MemoryPlan, fit: DeviceFit | None) -> str | None:
    """Return why a fit, if there is any, does not cover a model; None if it does."""
    model = plan.model
    if fit is None:
        devices = ", ".join(x.hardware.name for x in read_fits().values())
        return f"no measurement on this machine (measured: {devices})"
    if model.split.tensor > 1 or model.split.context > 1:
        return "no measurement with several ranks (measured: one device)"
    if model.dtype != MEASURED_DTYPE:
        return f"no measurement in {model.dtype_name} (measured: bfloat16)"
    dtypes = plan.state_dtype, plan.conv_dtype, plan.cache_dtype
    if dtypes != (torch.float32, MEASURED_DTYPE, MEASURED_DTYPE):
        names = ", ".join(str(x).removeprefix("torch.") for x in dtypes)
        return f"no measurement with states, convolutions and caches in {names} (measured: float32, bfloat16, bfloat16)"
    formats = fit.times[what].formats
    if (form := weights_format(model)) not in formats:
        return f"no measurement with weights in {form} (measured: {', '.join(formats)})"
    if others := dict.fromkeys(x for x in model.config.letters if x not in fit.letters):
        return f"no measured model has {', '.join(kind_of(letter).label for letter in others)}"
    return None


def _estimate(
    what: str, plan: MemoryPlan, fit: DeviceFit, terms: Mapping[str, float], least: float, batch: int, tokens: int
) -> Estimate:
    """Return the fitted time of a covered model, never less than its lower bound."""
    time = fit.times[what]
    errors, seconds = time.formats[weights_format(plan.model)], max(least, time.seconds(terms))
    outside = [
        f"{what} of {value:,} {name} (measured: {_range(known)})"
        for name, value, known in (("sequences", batch, errors.rows), ("tokens", tokens, errors.tokens))
        if not known[0] <= value <= known[1]
    ]
    if not outside:  # else the amounts follow from the batch or the length
        outside += [
            f"{what}, {name}: {_amount(name, amount)} (measured: up to {_amount(name, time.largest[name])})"
            for name, amount in terms.items()
            if amount > time.largest[name]
        ]
    if seconds < time.shortest_seconds * (1 - TOLERANCE):
        outside.append(f"{what} shorter than all measured ones ({show_seconds(time.shortest_seconds)})")
    if (needed := plan.total(batch, tokens)) > (room := fit.hardware.memory_bytes):
        outside.append(f"{show_rate(needed, 'B')} do not fit into {show_rate(room, 'B')}")
    return Estimate(what, seconds, errors.median_error, errors.largest_error, tuple(outside), None)


def _range(known: tuple[int, int]) -> str:
    return f"{known[0]:,}" if known[0] == known[1] else f"{known[0]:,} to {known[1]:,}"


def _amount(name: str, amount: float) -> str:
    """Return an amount of a term with its unit."""
    if name.startswith("bytes"):
        return show_bytes(amount)
    return show_flops(amount) if name.startswith("operations") else f"{amount:,.0f}"

"""Helpers that the tests of decoding with a ring share: tokens one by one through decode, with a ring and without."""

from typing import NamedTuple

import torch
from torch import Tensor

from lineate.ops.decoding import decode
from lineate.ops.rings import Ring
from tests.support.cases import Inputs, Result
from tests.support.decode_cases import Path


class Read(NamedTuple):
    """The tokens that were read one by one: the outputs, the pool, and the ring."""

    output: Tensor
    state: Tensor
    ring: Ring


RING_OPTIONS = ("raw_gates", "A_log", "dt_bias", "lower_bound", "normalize_qk")
"""The options of decode that Ring takes."""


def token_of(inputs: Inputs, i: int, device: str = "cpu") -> Inputs:
    """Return token i of a call, without its state."""
    return {name: x[:, i : i + 1].to(device) for name, x in inputs.items() if name != "state"}


def moved(options: dict[str, object], device: str) -> dict[str, object]:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}


def fold(ring: Ring, path: Path, slots: Tensor | None = None, seeds: Tensor | None = None) -> None:
    """Fold a ring by the kernel, or by torch."""
    if path == ("cpu", "triton"):  # Ring.fold runs torch on a CPU
        from lineate.call import Options, Slots
        from lineate.kernels.portable import launch_ring

        options = Options(ring.rule, 1.0, raw_decay=ring.raw_decay, lower_bound=ring.lower_bound)
        rows = len(ring.state) if slots is None else len(slots)
        launch_ring.fold(ring.state, Slots(slots, seeds=seeds), ring.tensors, rows, options)
        ring.reset(slots)
    else:
        ring.fold(slots, seeds=seeds)


def read_tokens(
    inputs: Inputs, path: Path, every: int, fold_after: tuple[int, ...] = (), seeds: Tensor | None = None,
    **options: object,
) -> Read:  # fmt: skip
    """Read all tokens with a ring, and fold it after those with the numbers of fold_after, and at the end."""
    device, backend = path
    state, options = inputs["state"].to(device).clone(), moved(options, device)
    first = token_of(inputs, 0, device)
    ring = Ring(**first, state=state, every=every, **{x: options[x] for x in RING_OPTIONS if x in options})
    outputs = []
    for i in range(inputs["q"].shape[1]):
        places = {"seeds": (seeds + i).to(device), "rounding": "stochastic"} if seeds is not None else {}
        token = token_of(inputs, i, device)
        outputs.append(decode(**token, state=state, ring=ring, backend=backend, **options, **places).cpu())
        if i in fold_after:
            fold(ring, path, seeds=places.get("seeds"))
    fold(ring, path, seeds=None if seeds is None else (seeds + inputs["q"].shape[1] - 1).to(device))
    return Read(torch.cat(outputs, 1), state.cpu(), ring)


def result(read: Read) -> Result:
    return Result(read.output, read.state, {})

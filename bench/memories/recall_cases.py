"""The rules and memories of bench/memories/recall.py, each as a pair of functions: write pairs, read keys.

Each has one head and as many channels as its budget of state bytes allows. The settings are what one chooses by hand
(rates, momentum, forgetting, ridge, chunk); each memory has at most eight, and the best is chosen on seeds that are not
measured.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

import lineate
from lineate.memory.lact import lact, lact_state
from lineate.memory.least_squares import least_squares
from lineate.memory.titans import titans, titans_state
from lineate.memory.ttt import ttt

State = dict[str, Tensor]
Setting = dict[str, float]
NEVER = 2**40  # a chunk that does not end


@dataclass(frozen=True)
class MemoryContestant:
    """A memory of one head."""

    name: str
    settings: tuple[Setting, ...]
    write: Callable[[Tensor, Tensor, Setting, State | None], State]
    """Takes k, v `b t d`, a setting, and a state or None; returns the state."""
    read: Callable[[State, Tensor, Setting], Tensor]
    """Takes a state and q `b n d`; returns `b n d`, without writing."""
    weights: tuple[str, ...]
    """The prefixes of the names of the state's tensors that are the model's weights."""
    scaled: bool = True
    """Whether a result of reading has the size of a value."""

    def norm(self, state: State) -> Tensor:
        """Return the norm of all weights together, `b`."""
        own = [x for name, x in state.items() if name.startswith(self.weights) and not name.endswith("_sum")]
        return torch.stack([x.flatten(1).square().sum(1) for x in own]).sum(0).sqrt()

    def state_bytes(self, d: int) -> int:
        """Return the bytes of the state of one row."""
        k = torch.zeros(1, 16, d)
        return sum(x.nbytes for x in self.write(k, k, self.settings[0], None).values())

    def width(self, budget: int) -> int:
        """Return the most channels whose state has at most `budget` bytes."""
        low, high = 2, 512
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.state_bytes(middle) <= budget else (low, middle)
        return low


def grid(**values: tuple[float, ...]) -> tuple[Setting, ...]:
    return tuple(dict(zip(values, x, strict=True)) for x in product(*values.values()))


def _head(x: Tensor) -> Tensor:
    return x.unsqueeze(2)  # b t 1 d


def _full(like: Tensor, value: float) -> Tensor:
    return torch.full((*like.shape[:2], 1), value, dtype=like.dtype)


def _of_matrix(op: Callable[[Tensor, Tensor, Setting, Tensor | None], Any]) -> dict[str, Any]:
    """Return the functions of one of lineate's five ops, whose state is a matrix."""

    def write(k: Tensor, v: Tensor, s: Setting, state: State | None) -> State:
        return {"S": op(_head(k), _head(v), s, None if state is None else state["S"]).state}

    return {"write": write, "read": lambda state, q, s: q @ state["S"][:, 0], "weights": ("S",)}


def _linear(k: Tensor, v: Tensor, s: Setting, S: Tensor | None) -> Any:
    return lineate.linear_attention(k, k, v, scale=1.0, state=S)


def _gated_linear(k: Tensor, v: Tensor, s: Setting, S: Tensor | None) -> Any:
    return lineate.gated_linear_attention(k, k, v, _full(k, math.log(s["keep"])), scale=1.0, state=S)


def _delta(k: Tensor, v: Tensor, s: Setting, S: Tensor | None) -> Any:
    return lineate.delta_rule(k, k, v, _full(k, s["rate"]), scale=1.0, state=S)


def _gated_delta(k: Tensor, v: Tensor, s: Setting, S: Tensor | None) -> Any:
    return lineate.gated_delta_rule(k, k, v, _full(k, math.log(s["keep"])), _full(k, s["rate"]), scale=1.0, state=S)


def _kimi(k: Tensor, v: Tensor, s: Setting, S: Tensor | None) -> Any:
    """Run Kimi Delta Attention; its channels keep from `keep` to 1 of their content, evenly spaced in the logarithm."""
    log_decay = torch.linspace(0, math.log(s["keep"]), k.shape[-1]).expand(k.shape)
    return lineate.kimi_delta_attention(k, k, v, log_decay, _full(k, s["rate"]), scale=1.0, state=S)


@lru_cache
def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Return initial weights, always the same, with standard deviation 1 / sqrt(inputs)."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, *shape, generator=generator) * shape[0] ** -0.5 for shape in shapes]


def _ttt(expand: int) -> dict[str, Any]:
    """Return TTT's functions.

    Keys are longer than 1, because the bias answers all keys alike, as if each key had one more channel with value 1.
    """

    def start(d: int) -> State:
        sizes = [d, *([expand * d] if expand else []), d]
        state = {}
        for i, w in enumerate(_random(*pairwise(sizes)), 1):
            state |= {f"weight{i}": w, f"bias{i}": torch.zeros(1, w.shape[-1])}
        return state

    def run(q: Tensor, k: Tensor, v: Tensor, rate: float, chunk: int, state: State) -> tuple[Tensor, State]:
        d = q.shape[-1]
        ones, zeros = torch.ones(1, d), torch.zeros(1, d)
        return ttt(_head(q), _head(k), _head(v), _full(k, rate), ones, zeros, state, chunk=chunk)

    def write(k: Tensor, v: Tensor, s: Setting, state: State | None) -> State:
        k = s["length"] * k
        return run(k, k, v, s["rate"], int(s["chunk"]), start(k.shape[-1]) if state is None else state)[1]

    def read(state: State, q: Tensor, s: Setting) -> Tensor:
        assert not state["position"].any(), "TTT is read at the end of a chunk"
        q = s["length"] * q
        return run(q, q, q, 0.0, int(s["chunk"]), state)[0][:, :, 0]

    return {"write": write, "read": read, "weights": ("weight", "bias")}


def _titans(expand: int) -> dict[str, Any]:
    def run(
        q: Tensor, k: Tensor, v: Tensor, rate: float, momentum: float, keep: float, chunk: int, state: State | None
    ) -> tuple[Tensor, State]:
        d = q.shape[-1]
        if state is None:
            first = _random((d, expand * d), (expand * d, d)) if expand else [torch.zeros(1, d, d)]
            state = titans_state(first, q.shape[0])
        gates = (_full(k, rate), _full(k, momentum), _full(k, 1 - keep))
        return titans(_head(q), _head(k), _head(v), *gates, state, chunk=chunk)

    def write(k: Tensor, v: Tensor, s: Setting, state: State | None) -> State:
        after = run(k, k, v, s["rate"], s["momentum"], s.get("keep", 1.0), int(s["chunk"]), state)[1]
        return {name: x.clone() for name, x in after.items()}

    def read(state: State, q: Tensor, s: Setting) -> Tensor:
        return run(q, q, q, 0.0, 0.0, 1.0, int(s["chunk"]), state)[0][:, :, 0]

    return {"write": write, "read": read, "weights": ("weights_",)}


def _lact_write(k: Tensor, v: Tensor, s: Setting, state: State | None) -> State:
    if state is None:
        d = k.shape[-1]
        state = lact_state(_random((d, d), (d, d), (d, d)), k.shape[0])
    rates = _full(k, s["rate"])[..., None].expand(*k.shape[:2], 1, 3)
    muon = bool(s["muon"])
    return lact(
        _head(k), _head(k), _head(v), rates, _full(k, s["momentum"]), state, chunk=int(s["chunk"]), muon=muon
    )[1]  # fmt: skip


def _lact_read(state: State, q: Tensor, s: Setting) -> Tensor:
    rates = torch.zeros(*q.shape[:2], 1, 3)
    return lact(_head(q), _head(q), _head(q), rates, None, state, chunk=NEVER)[0][:, :, 0]


def _least_squares_write(k: Tensor, v: Tensor, s: Setting, state: State | None) -> State:
    log_decay = None if s["keep"] == 1 else _full(k, math.log(s["keep"]))
    return least_squares(_head(k), _head(k), _head(v), log_decay, ridge=s["ridge"], state=state, chunk=16)[1]


CONTESTANTS = (
    MemoryContestant("linear attention", ({},), **_of_matrix(_linear)),
    MemoryContestant(
        "gated linear attention",
        grid(keep=(0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9999)), **_of_matrix(_gated_linear),
    ),
    MemoryContestant("DeltaNet", grid(rate=(0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)), **_of_matrix(_delta)),
    MemoryContestant(
        "Gated DeltaNet", grid(rate=(0.02, 0.2, 0.6, 1.0), keep=(0.99, 0.9999)), **_of_matrix(_gated_delta)
    ),
    MemoryContestant("KDA", grid(rate=(0.02, 0.2, 0.6, 1.0), keep=(0.98, 0.9998)), **_of_matrix(_kimi)),
    MemoryContestant("TTT-Linear", grid(rate=(0.02, 0.05, 0.1, 0.3), length=(3, 6), chunk=(4,)), **_ttt(0)),
    MemoryContestant("TTT-MLP", grid(rate=(0.02, 0.05, 0.1, 0.3), length=(3, 6), chunk=(4,)), **_ttt(4)),
    MemoryContestant("Titans", grid(rate=(0.05, 0.2, 0.5, 1.0), momentum=(0.0, 0.5), chunk=(4,)), **_titans(0)),
    MemoryContestant("Titans MLP", grid(rate=(0.02, 0.05, 0.1, 0.2), momentum=(0.0, 0.5), chunk=(4,)), **_titans(2)),
    MemoryContestant(
        "LaCT",
        grid(muon=(1,), rate=(1.0,), momentum=(0.0, 0.5), chunk=(16, 64))
        + grid(muon=(0,), rate=(0.3, 1.0), momentum=(0.0, 0.5), chunk=(16,)),
        _lact_write, _lact_read, ("weights_",), scaled=False,
    ),
    MemoryContestant(
        "least squares", grid(ridge=(1e-1, 1e-2, 1e-3, 1e-4), keep=(1.0, 0.95)),
        _least_squares_write, lambda state, q, s: q @ state["S"][:, 0], ("S",),
    ),
)  # fmt: skip

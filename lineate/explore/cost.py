"""The cost of a memory against the length of the text: bytes and time per token, next to softmax attention.

Prefill is one call of the public op over the whole text. Decode is one more token after it, from the state the prefill
left. Softmax attention decodes with torch's fused kernel over a preallocated cache, without copies or checks, its best
case.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

import lineate
from lineate.explore.memories import DEMO_RULES, FIXED_SIZE, OnProgress, attend, silent
from lineate.torch_ops.tracing import cpu_by_default


@dataclass(frozen=True)
class CostSetting:
    """The size of the cost experiment."""

    heads: int = 2
    """Heads, each with its own memory."""
    head_dim: int = 128
    """Channels of a key and of a value."""
    lengths: tuple[int, ...] = (256, 1024, 4096, 16384)
    """Tokens in the text."""
    rounds: int = 40
    """How often a prefill is timed at most."""
    decode_rounds: int = 5
    """How often a burst of decoded tokens is timed."""
    seconds: float = 16.0
    """Stop repeating a length after a tenth of this, and leave out a length that would take longer than this."""
    seed: int = 0
    """Seed of the inputs."""


@dataclass(frozen=True)
class MeasuredCost:
    """Bytes and median times, one number for every length."""

    heads: int
    """Heads, each with its own memory."""
    head_dim: int
    """Channels of a key and of a value."""
    threads: int
    """Threads torch computed with."""
    lengths: tuple[int, ...]
    """Tokens in the text."""
    bytes: dict[str, tuple[int, ...]]
    """Bytes of the state after that many tokens: float32 memories, and a key/value cache in bfloat16."""
    prefill_microseconds: dict[str, tuple[float, ...]]
    """Time per token of reading the whole text, float32."""
    decode_microseconds: dict[str, tuple[float, ...]]
    """Time of one more token after it, float32."""


@dataclass(frozen=True)
class _Tokens:
    q: Tensor
    k: Tensor
    v: Tensor
    per_head: Tensor
    per_channel: Tensor
    beta: Tensor

    def part(self, part: slice) -> "_Tokens":
        return _Tokens(*(getattr(self, name)[:, part] for name in self.__dataclass_fields__))


@cpu_by_default
def measure_cost(setting: CostSetting, report: OnProgress = silent) -> MeasuredCost:
    """Run every rule over longer and longer sequences; measure the state it leaves and the time it takes."""
    work = [length * (1 + length / 4096) for length in setting.lengths]
    lengths: list[int] = []
    held: dict[str, list[int]] = {rule: [] for rule in DEMO_RULES}
    prefill: dict[str, list[float]] = {rule: [] for rule in DEMO_RULES}
    decode: dict[str, list[float]] = {rule: [] for rule in DEMO_RULES}
    with torch.inference_mode():
        _measure_length(setting, setting.lengths[0], 1, silent)  # the first calls include one-time setup
        for index, length in enumerate(setting.lengths):
            if lengths and _predict(prefill, lengths[-1], length) > setting.seconds:
                break
            part = _part(report, sum(work[:index]) / sum(work), work[index] / sum(work))
            prefill_times, decode_times, sizes = _measure_length(setting, length, setting.rounds, part)
            lengths.append(length)
            for rule in DEMO_RULES:
                prefill[rule].append(prefill_times[rule] / length * 1e6)
                decode[rule].append(decode_times[rule] * 1e6)
                held[rule].append(sizes[rule])
    report(1.0)
    return MeasuredCost(
        heads=setting.heads,
        head_dim=setting.head_dim,
        threads=torch.get_num_threads(),
        lengths=tuple(lengths),
        bytes={rule: tuple(sizes) for rule, sizes in held.items()},
        prefill_microseconds={rule: tuple(times) for rule, times in prefill.items()},
        decode_microseconds={rule: tuple(times) for rule, times in decode.items()},
    )


def _measure_length(
    setting: CostSetting, length: int, rounds: int, report: OnProgress
) -> tuple[dict[str, float], dict[str, float], dict[str, int]]:
    """Return, for each rule, the median seconds of a prefill and of a decoded token, and the bytes of state."""
    tokens = _make_tokens(setting, length + 1)
    text, last = tokens.part(slice(0, length)), tokens.part(slice(length, length + 1))
    states: dict[str, Tensor] = {}
    prefill: dict[str, list[float]] = {rule: [] for rule in DEMO_RULES}
    started = time.perf_counter()
    for _ in range(rounds):  # rules take turns, so that a busy moment of the machine hits all of them
        for rule in FIXED_SIZE:
            seconds, states[rule] = _timed(partial(_attend, rule, text, None))
            prefill[rule].append(seconds)
            report(len(states) / (len(DEMO_RULES) + 1))
        seconds, _ = _timed(lambda: lineate.softmax_attention(text.q, text.k, text.v).output)
        prefill["softmax_attention"].append(seconds)
        if time.perf_counter() - started > setting.seconds / 10:
            break

    keys, values = (x.transpose(1, 2).contiguous() for x in (tokens.k, tokens.v))
    query = last.q.transpose(1, 2)
    decode: dict[str, list[float]] = {rule: [] for rule in DEMO_RULES}
    for _ in range(setting.decode_rounds):
        for rule in FIXED_SIZE:
            decode[rule] += _burst(partial(_attend, rule, last, states[rule]))
        decode["softmax_attention"] += _burst(partial(F.scaled_dot_product_attention, query, keys, values))

    cache = lineate.KeyValueCache(text.k.bfloat16(), text.v.bfloat16())
    sizes = {rule: states[rule].nbytes for rule in FIXED_SIZE} | {"softmax_attention": cache.nbytes}
    return _medians(prefill), _medians(decode), sizes


def _make_tokens(setting: CostSetting, count: int) -> _Tokens:
    generator = torch.Generator().manual_seed(setting.seed)
    shape = (1, count, setting.heads, setting.head_dim)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    per_channel = -0.1 * torch.rand(shape, generator=generator)
    beta = torch.rand(shape[:3], generator=generator)
    return _Tokens(q, F.normalize(k, dim=-1), v, per_channel[..., 0], per_channel, beta)


def _attend(rule: str, tokens: _Tokens, state: Tensor | None) -> Tensor:
    qkv = tokens.q, tokens.k, tokens.v
    return attend(rule, qkv, tokens.per_head, tokens.per_channel, tokens.beta, state)


def _timed(run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result


def _burst(run: Callable[[], Tensor]) -> list[float]:
    """Return the times of a few calls in a row, without the first, which finds no data in the processor's cache."""
    return [_timed(run)[0] for _ in range(6)][1:]


def _part(report: OnProgress, before: float, share: float) -> OnProgress:
    """Return the callback of one part of the work."""
    return lambda done: report(before + done * share)


def _medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {rule: median(seconds) for rule, seconds in times.items()}


def _predict(prefill: dict[str, list[float]], last: int, length: int) -> float:
    """Return the seconds that one prefill of every rule will take: quadratic for softmax attention, else linear."""
    growth = {rule: 1.0 for rule in FIXED_SIZE} | {"softmax_attention": length / last}
    return sum(prefill[rule][-1] * 1e-6 * length * growth[rule] for rule in DEMO_RULES)

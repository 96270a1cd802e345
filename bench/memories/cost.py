"""The cost of a token in each layer, in the chunked forms, and in the reference that differentiates by autograd."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from bench import timing
from bench.memories.contestants import make_learning, make_linear
from bench.rules.contestants import difference
from lineate.memory import MEMORY_RULES, run_reference
from lineate.memory.lact import lact, lact_state
from lineate.memory.least_squares import least_squares
from lineate.memory.titans import titans, titans_state
from lineate.memory.ttt import ttt

HIDDEN, HEADS, T = 256, 4, 2048
D = HIDDEN // HEADS
STEPS = 64  # tokens of a run that processes one token at a time


def layers(quick: bool) -> list[dict[str, Any]]:
    """Measure microseconds per token and the bytes of the state.

    The times are those of a whole sequence, of its backward too, and of one token at a time.
    """
    torch.manual_seed(0)
    x = torch.randn(1, T, HIDDEN)
    modules = {name: make() for name, make in (make_linear(HIDDEN, HEADS) | make_learning(HIDDEN, HEADS)).items()}
    calls: dict[tuple[str, str], timing.Call] = {}
    bytes_ = {}
    for name, module in modules.items():
        with torch.no_grad():
            _, state = module(x[:, :STEPS])
        bytes_[name] = {
            "fixed": sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in module.state_spec),
            "memory": sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in module.state_spec
                          if spec.name not in ("conv", "keys", "values")),
        }  # fmt: skip
        calls[name, "forward"] = _no_grad(lambda module=module: module(x)[0])
        calls[name, "steps"] = _no_grad(lambda module=module, state=state: _one_by_one(module, x, state))
        calls[name, "train"] = lambda module=module: _train(module, x)
    samples = timing.interleave(calls, rounds=2 if quick else 5, budget=1.0 if quick else 4.0)
    rows: list[dict[str, Any]] = []
    for name in modules:
        forward, train = (1e6 / T * samples[name, what].minimum for what in ("forward", "train"))
        steps = 1e6 / STEPS * samples[name, "steps"].minimum
        rows.append({"name": name, "forward_us": forward, "train_us": train, "step_us": steps, **bytes_[name]})
    gated = next(row for row in rows if row["name"] == "Gated DeltaNet")
    timing.show(
        f"A layer, hidden {HIDDEN}, {HEADS} heads, t {T}, b 1, float32: microseconds a token, fastest of the rounds",
        ["", "whole text", "of Gated DeltaNet's", "with backward", "one at a time", "over whole text",
         "state KiB", "of it the memory"],
        [[r["name"], f"{r['forward_us']:.1f}", f"{r['forward_us'] / gated['forward_us']:.1f}", f"{r['train_us']:.1f}",
          f"{r['step_us']:.0f}", f"{r['step_us'] / r['forward_us']:.0f}", f"{r['fixed'] / 1024:.0f}",
          f"{r['memory'] / 1024:.0f}"] for r in rows],
    )  # fmt: skip
    return rows


def _no_grad(call: timing.Call) -> timing.Call:
    def run() -> Any:
        with torch.no_grad():
            return call()

    return run


def _one_by_one(module: nn.Module, x: Tensor, state: Any) -> None:
    for i in range(STEPS):
        _, state = module(x[:, i : i + 1], state)


def _train(module: nn.Module, x: Tensor) -> None:
    with torch.enable_grad():
        module(x)[0].square().mean().backward()


def forms(quick: bool) -> list[dict[str, Any]]:
    """Measure the time per token of a chunked form on T tokens, and of the autograd reference on fewer tokens.

    The reference may have fewer, because each of its tokens costs the same.
    """
    some = 32 if quick else 128
    calls: dict[tuple[str, str], timing.Call] = {}
    for name, (chunked, reference) in _forms().items():
        with torch.no_grad():
            _, relative = difference(chunked(some), reference(some))
        if not relative < 1e-3:
            raise SystemExit(f"{name}: the chunked form and the reference differ by {relative:.2g}")
        calls[name, "chunked"] = _no_grad(lambda chunked=chunked: chunked(T))
        calls[name, "reference"] = _no_grad(lambda reference=reference: reference(some))
    samples = timing.interleave(calls, rounds=2 if quick else 4, budget=1.0 if quick else 4.0)
    rows = []
    for name in _forms():
        chunked, reference = samples[name, "chunked"].minimum / T, samples[name, "reference"].minimum / some
        rows.append({"name": name, "chunked_us": 1e6 * chunked, "reference_us": 1e6 * reference,
                     "speed_up": reference / chunked})  # fmt: skip
    timing.show(
        f"Chunked forms on {T} tokens, the autograd reference on {some}; {HEADS} heads of {D}, b 1, float32, forward",
        ["", "chunked, us a token", "reference", "times faster"],
        [[r["name"], f"{r['chunked_us']:.1f}", f"{r['reference_us']:.0f}", f"{r['speed_up']:.0f}"] for r in rows],
    )
    return rows


def _forms() -> dict[str, tuple[Callable[[int], Any], Callable[[int], Any]]]:
    """Return the chunked form and the reference of each memory, as functions of the number of first tokens."""
    torch.manual_seed(0)
    q, k = (nn.functional.normalize(torch.randn(1, T, HEADS, D), dim=-1) for _ in range(2))
    v = torch.randn(1, T, HEADS, D)
    rate, momentum, alpha = (size * torch.rand(1, T, HEADS) for size in (0.3, 0.5, 0.01))

    def weights(*sizes: int) -> list[Tensor]:
        return [torch.randn(HEADS, n, m) * n**-0.5 for n, m in pairwise(sizes)]

    gamma, beta = torch.ones(HEADS, D), torch.zeros(HEADS, D)
    result = {}
    for name, own in (("TTT-Linear", weights(D, D)), ("TTT-MLP", weights(D, 4 * D, D))):
        biases = [torch.zeros(HEADS, w.shape[-1]) for w in own]
        start = {f"weight{i + 1}": w for i, w in enumerate(own)} | {f"bias{i + 1}": x for i, x in enumerate(biases)}
        labels = [""] if len(own) == 1 else ["1", "2"]
        named = {f"W{x}": w for x, w in zip(labels, own, strict=True)}
        named |= {f"b{x}": a for x, a in zip(labels, biases, strict=True)} | {"gamma": gamma, "beta": beta}
        result[name] = (
            lambda t, start=start: ttt(q[:, :t], k[:, :t], v[:, :t], rate[:, :t], gamma, beta, start)[0],
            lambda t, name=name, named=named: run_reference(
                MEMORY_RULES[name], q[:, :t], k[:, :t], v[:, :t], {"rate": rate[:, :t]}, named
            )[0],
        )
    for name, own in (("Titans", weights(D, D)), ("Titans MLP", weights(D, 2 * D, D))):
        labels = ["S"] if len(own) == 1 else ["W1", "W2"]
        named = dict(zip(labels, own, strict=True))
        rule = replace(MEMORY_RULES[name], chunk=16)
        result[name] = (
            lambda t, own=own: titans(
                q[:, :t], k[:, :t], v[:, :t], 0.3 * rate[:, :t], momentum[:, :t], alpha[:, :t], titans_state(own, 1)
            )[0],
            lambda t, rule=rule, named=named: run_reference(
                rule, q[:, :t], k[:, :t], v[:, :t],
                {"rate": 0.3 * rate[:, :t], "momentum": momentum[:, :t], "log_decay": (-alpha[:, :t]).log1p()}, named,
            )[0],
        )  # fmt: skip
    swiglu = weights(D, D) + weights(D, D) + weights(D, D)
    named = {f"W{i}": w for i, w in enumerate(swiglu)}
    result["LaCT"] = (
        lambda t: lact(
            q[:, :t], k[:, :t], v[:, :t], rate[:, :t, :, None].expand(1, t, HEADS, 3), momentum[:, :t],
            lact_state(swiglu, 1), chunk=64 if t < 2048 else 2048,
        )[0],
        lambda t: run_reference(
            replace(MEMORY_RULES["LaCT"], chunk=64), q[:, :t], k[:, :t], v[:, :t],
            {"rate": rate[:, :t], "momentum": momentum[:, :t]}, named,
        )[0],
    )  # fmt: skip
    log_decay = (-alpha).log1p()
    result["least squares"] = (
        lambda t: least_squares(q[:, :t], k[:, :t], v[:, :t], log_decay[:, :t], ridge=0.1, restore=False)[0],
        lambda t: run_reference(
            MEMORY_RULES["least squares"], q[:, :t], k[:, :t], v[:, :t], {"log_decay": log_decay[:, :t]},
            {"S": torch.zeros(HEADS, D, D)}, ridge=0.1,
        )[0],
    )  # fmt: skip
    return result

"""One contestant of the GPU benchmark on some cases, in a process of its own that bench/rules/gpu.py starts.

Every line that it appends to the given file is one JSON object: {"start": case} before a case, its result after it.
"""

import gc
import importlib.metadata
import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.rules import gpu_timing
from bench.rules.gpu_adapters import MAKE, BackendLog, in_layout, load_peer, plans, state_of
from bench.rules.gpu_cases import CASES, CONTESTANTS, TRAIN, Case
from bench.rules.gpu_inputs import LEAVES, LOWER_BOUND, PeerInputs, make_inputs
from bench.timing import Call


def call_of(case: Case, who: str, x: PeerInputs) -> Call:
    """Return a contestant's call on inputs of lineate's layout: a forward, or a forward with its backward."""
    x = in_layout(case, who, x)
    return train(case, who, x) if case.what == TRAIN else torch.no_grad()(MAKE[who](case, x))


def train(case: Case, who: str, x: PeerInputs) -> Callable[[], list[Tensor]]:
    """Return the output, and the gradients of q, k, v and the gates for a random gradient of the output."""
    x = x.map(lambda name, y: y.detach().requires_grad_(y.is_floating_point() and name != "state"))
    call = MAKE[who](case, x)
    generator = torch.Generator(x.v.device).manual_seed(1)  # the same for every contestant
    weight = torch.randn(x.v.shape, generator=generator, device=x.v.device, dtype=x.v.dtype)

    def step() -> list[Tensor]:
        output = call()[0]
        return [output.detach(), *torch.autograd.grad(output, x.leaves, weight)]

    step.weight = weight  # type: ignore[attr-defined]
    return step


def named(case: Case, who: str, x: PeerInputs, got: Any) -> dict[str, Tensor]:
    """Return the tensors of a result by their names, in lineate's layout."""
    if case.what == TRAIN:
        leaves = [(n, y) for n in LEAVES if (y := getattr(x, n)) is not None]
        gradients = {n: y.view_as(leaf) for (n, leaf), y in zip(leaves, got[1:], strict=True)}
        return {"output": got[0].view_as(x.v), **gradients}
    return {"output": got[0].view_as(x.v), "state": state_of(who, got[1])}


def error(case: Case, who: str, x: PeerInputs, got: Any, weight: Tensor | None) -> float:
    """Return the largest of a result's relative errors."""
    return max(errors(case, who, x, got, weight).values())


def errors(case: Case, who: str, x: PeerInputs, got: Any, weight: Tensor | None) -> dict[str, float]:
    """Return the relative errors (2-norm) of the result's tensors for the last sequence and key head.

    The reference is lineate's torch form in float32, with the same inputs and the decay that the contestant computes. A
    gradient has the name of its input. An error is infinite if the result is not finite.
    """
    want = reference(case, who, x, weight)
    found = {}
    for name, y in named(case, who, x, got).items():
        wrong = float((last_head(case, name, y) - want[name]).norm() / want[name].norm())
        found[name] = wrong if math.isfinite(wrong) else math.inf
    return found


def last_head(case: Case, name: str, y: Tensor) -> Tensor:
    """Return what belongs to the last sequence and key head, in float32."""
    group = case.hv // case.h
    if name in ("A_log", "dt_bias"):
        return y[-group:].float()
    if name == "state":
        return y[-1:, -group:].float()
    y = y[-1:, -case.lengths[-1] :] if case.lengths else y[-1:]
    return (y[:, :, -1:] if name in ("q", "k") else y[:, :, -group:]).float()


def reference(case: Case, who: str, x: PeerInputs, weight: Tensor | None) -> dict[str, Tensor]:
    """Return the results of the last sequence and key head by the torch form in float32."""
    from bench.rules.contestants import OPS

    small = replace(x, cu_seqlens=None).map(lambda name, y: last_head(case, name, y))
    if case.raw:
        assert small.gate is not None and small.write is not None and small.A_log is not None
        pre, rate = small.gate + small.dt_bias, small.A_log.exp()
        rate = rate[:, None] if pre.dim() == 4 else rate
        bounded = "bounded" in CONTESTANTS[who].label
        log_decay = LOWER_BOUND * torch.sigmoid(rate * pre) if bounded else -rate * F.softplus(pre)
        small = replace(small, q=F.normalize(small.q, dim=-1), k=F.normalize(small.k, dim=-1), log_decay=log_decay,
                        beta=small.write.sigmoid())  # fmt: skip
    leaves = {n: y.detach().requires_grad_(case.what == TRAIN) for n in LEAVES if (y := getattr(small, n)) is not None}
    output, state = OPS[case.rule](*leaves.values(), state=small.state, backend="torch")
    found = {"output": output.detach(), "state": state.detach()}
    if case.what == TRAIN:
        assert weight is not None
        gradients = torch.autograd.grad(output, tuple(leaves.values()), last_head(case, "v", weight.view_as(x.v)))
        found |= zip(leaves, gradients, strict=True)
    return found


def differences(case: Case, who: str, x: PeerInputs, got: Any) -> list[float]:
    """Return the relative differences (2-norm) of a peer's results from ours, over all tokens and heads."""
    theirs, own = (named(case, w, x, y) for w, y in ((who, got), ("ours", call_of(case, "ours", x)())))
    return [float((theirs[n].float() - y.float()).norm() / y.float().norm()) for n, y in own.items()]


def calls_of(case: Case, who: str) -> tuple[list[Call], Callable[[], dict[str, Any]]]:
    """Return the call on as many input sets as fill twice the L2 cache, and a function that checks the first one."""
    cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or 2**26
    sets = [make_inputs(case, 0)]
    wanted = min(gpu_timing.AT_MOST, math.ceil(2 * cache / sets[0].nbytes))
    sets += [make_inputs(case, seed) for seed in range(1, wanted)]
    made: list[Any] = [call_of(case, who, x) for x in sets]

    def check() -> dict[str, Any]:
        x = sets[0] if sets[0].state is None else replace(sets[0], state=sets[0].state.clone())
        got = made[0]()
        found: dict[str, Any] = {"error": error(case, who, x, got, getattr(made[0], "weight", None))}
        if who.startswith("flashinfer"):
            found["differences"] = differences(case, who, x, got)
        return found

    return made, check


def versions() -> dict[str, str]:
    """Return the versions of the packages that are imported so far."""
    found = {}
    for module, package in (
        ("torch", "torch"), ("triton", "triton"), ("lineate", "lineate"), ("fla", "fla-core"), ("tilelang", "tilelang"),
        ("flash_qla", "flash-qla"), ("flash_kda", "flash-kda"), ("flashinfer", "flashinfer-python"),
        ("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi"), ("cudnn", "nvidia-cudnn-frontend"),
        ("attn_gym", "attn-gym"),
    ):  # fmt: skip
        if module in sys.modules:
            version = getattr(sys.modules[module], "__version__", None)
            try:
                found[module] = str(version or importlib.metadata.version(package))
            except importlib.metadata.PackageNotFoundError:
                found[module] = "unknown"
    return found


def main(job: dict[str, Any]) -> None:
    """Run a job: who, the cases' indices, seconds a measurement, whether to try graphs, the file, the peers' folder."""
    out = Path(job["file"])

    def say(line: dict[str, Any]) -> None:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")

    if job["who"] == "ceilings":
        driver = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        say({"ceilings": gpu_timing.ceilings(), **driver, "versions": versions()})
        return
    who = job["who"]
    log = BackendLog()
    log.listen()
    torch.zeros(1, device="cuda")
    start = time.perf_counter()
    load_peer(who, job["peers"])
    imported = time.perf_counter() - start
    for number, index in enumerate(job["cases"]):
        case = CASES[index]
        say({"start": index})
        fit = True
        try:
            result, fit = run(case, who, job)
            result |= {**case.record(), "who": who, "cold": number == 0 and job["fresh"], "import_s": imported}
            if CONTESTANTS[who].package == "fla":
                result["path"] = log.path()
            elif chosen := plans():
                result["path"] = chosen
            say({"done": index, "result": result, "versions": versions()})
        except Exception as problem:  # this case is lost, but the others go on
            traceback.print_exc()
            say({"failed": index, "why": summary(problem), "versions": versions()})
            fit = fit and "CUDA" not in str(problem)
        gc.collect()
        if not fit:
            return
        torch.cuda.empty_cache()


def run(case: Case, who: str, job: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Measure one case; return its result, and whether this process can go on after it."""
    calls, check = calls_of(case, who)
    result = gpu_timing.measure(calls, seconds=job["seconds"], graph=job["graph"])
    try:
        torch.cuda.synchronize()
        if who != "sdpa" and case.group != "length":  # the lengths repeat a shape that is already checked
            result |= check()
    except Exception as problem:  # the times remain valid
        traceback.print_exc()
        result["check_error"] = summary(problem)
        return result, "CUDA" not in str(problem)
    return result, True


def summary(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".strip().splitlines()[0][:200]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

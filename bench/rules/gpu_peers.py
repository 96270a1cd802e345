"""One contestant of the GPU benchmark on some cases, in a process of its own that bench/rules/gpu.py starts.

Every line that it appends to the given file is one JSON object: {"start": case} before a case, its result after it.
"""

import gc
import importlib
import importlib.metadata
import json
import logging
import math
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.rules import gpu_timing
from bench.rules.gpu_cases import BY_CHANCE, CASES, CONTESTANTS, HEAD_DIM, SINGLE, STEP, TRAIN, Case
from bench.timing import Call

DEVICE = "cuda"
LOWER_BOUND = -5.0  # the lower bound of the bounded gate
RESULT = tuple[Tensor, Tensor | None]  # output and final state


@dataclass(frozen=True)
class PeerInputs:
    """q, k `b t h k`; v `b t hv v`; gates `b t hv [k]`, final or raw; raw gates' parameters; a state; packed bounds."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    beta: Tensor | None = None
    gate: Tensor | None = None
    write: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    state: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def map(self, change: Callable[[str, Tensor], Tensor]) -> "PeerInputs":
        return PeerInputs(**{f.name: None if (x := getattr(self, f.name)) is None else change(f.name, x)
                         for f in fields(self)})  # fmt: skip

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for f in fields(self) if (x := getattr(self, f.name)) is not None)

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in (self.q, self.k, self.v, self.log_decay, self.beta) if x is not None]


def make_inputs(case: Case, seed: int) -> PeerInputs:
    """Return random inputs: unit q and k, beta in (0, 1), log_decay with a median of about -0.14.

    log_decay is -exp(x - 2) with x normal.
    """
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE, dtype=dtype)

    b, t, h, hv = case.b, case.t, case.h, case.hv
    bounds = torch.tensor([0, *case.lengths], device=DEVICE).cumsum(0) if case.lengths else None
    q, k = (normal(b, t, h, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2))
    v = normal(b, t, hv, HEAD_DIM, dtype=torch.bfloat16)
    gate_shape = (b, t, hv, HEAD_DIM) if case.rule == "kda" else (b, t, hv)
    if case.raw:
        gate, write = normal(*gate_shape, dtype=torch.bfloat16), normal(b, t, hv, dtype=torch.bfloat16)
        dt_bias = -2.5 + 0.5 * normal(*((hv, HEAD_DIM) if case.rule == "kda" else (hv,)))
        raw = {"gate": gate, "write": write, "A_log": 0.5 * normal(hv), "dt_bias": dt_bias}
        return PeerInputs(q, k, v, **raw, cu_seqlens=bounds)
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    beta = None if case.rule == "linear" else normal(b, t, hv).sigmoid()
    log_decay = normal(*gate_shape).sub_(2).exp_().neg_() if case.rule in ("gdn", "kda") else None
    dtype = torch.float32 if case.state == SINGLE else torch.bfloat16
    state = normal(b, hv, HEAD_DIM, HEAD_DIM).to(dtype) if case.what == STEP else None
    return PeerInputs(q, k, v, log_decay=log_decay, beta=beta, state=state, cu_seqlens=bounds)


def ours(case: Case, x: PeerInputs, lower_bound: float | None = None) -> Callable[[], RESULT]:
    import lineate
    from bench.rules.contestants import OPS

    if case.what == STEP:
        from lineate.ops.decoding import decode

        assert x.state is not None
        state = x.state  # updated in place
        options: dict[str, Any] = {"backend": "triton"}
        if case.state == BY_CHANCE:
            options |= {"rounding": "stochastic", "seeds": torch.arange(case.b, device=DEVICE)}
        return lambda: (decode(x.q, x.k, x.v, x.log_decay, x.beta, state=state, **options), state)
    if case.raw:
        return lambda: lineate.fused_delta_rule(
            x.q, x.k, x.v, x.gate, x.write, x.A_log, x.dt_bias, normalize_qk=True, cu_seqlens=x.cu_seqlens,
            lower_bound=lower_bound,
        )  # fmt: skip
    gates = [y for y in (x.log_decay, x.beta) if y is not None]
    op = OPS[case.rule]
    if x.cu_seqlens is None:
        return lambda: op(x.q, x.k, x.v, *gates, backend="triton")
    return lambda: op(x.q, x.k, x.v, *gates, cu_seqlens=x.cu_seqlens, backend="triton")


def portable(case: Case, x: PeerInputs) -> Callable[[], RESULT]:
    """Return our call with the kernels for all GPUs, which the later calls of this process then use, too."""
    from lineate.kernels import architectures
    from lineate.kernels.portable.stages import PortableStages

    architectures.ARCHITECTURES = (PortableStages,)
    architectures.architecture_of.cache_clear()
    assert architectures.architecture_of(x.q.device) is PortableStages
    return ours(case, x)


def flashinfer(case: Case, x: PeerInputs, segments: bool = False) -> Callable[[], RESULT]:
    from bench.rules import gpu_flashinfer

    assert x.log_decay is not None and x.beta is not None
    lengths = case.lengths or case.b * (case.t,)
    return gpu_flashinfer.call(x.q, x.k, x.v, x.log_decay, x.beta, lengths, segments)


def fla(case: Case, x: PeerInputs, bounded: bool = False) -> Callable[[], RESULT]:
    from fla.ops import delta_rule, gated_delta_rule, kda, linear_attn

    if case.what == STEP:
        step = {"gdn": gated_delta_rule.fused_recurrent_gated_delta_rule, "kda": kda.fused_recurrent_kda}[case.rule]
        return lambda: step(x.q, x.k, x.v, g=x.log_decay, beta=x.beta, initial_state=x.state, output_final_state=True)
    if case.raw:
        assert case.rule == "kda" and x.dt_bias is not None
        options: dict[str, Any] = {"A_log": x.A_log, "dt_bias": x.dt_bias.reshape(-1)}
        if bounded:
            options |= {"safe_gate": True, "lower_bound": LOWER_BOUND}
        return lambda: kda.chunk_kda(
            x.q, x.k, x.v, x.gate, x.write, output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, **options,
        )  # fmt: skip
    if case.rule == "linear":
        return lambda: linear_attn.chunk_linear_attn(x.q, x.k, x.v, normalize=False, output_final_state=True)
    if case.rule == "delta":
        return lambda: delta_rule.chunk_delta_rule(x.q, x.k, x.v, x.beta, output_final_state=True)
    op = {"gdn": gated_delta_rule.chunk_gated_delta_rule, "kda": kda.chunk_kda}[case.rule]
    return lambda: op(x.q, x.k, x.v, x.log_decay, x.beta, output_final_state=True)


def flashqla(case: Case, x: PeerInputs) -> Callable[[], RESULT]:
    import flash_qla

    return lambda: flash_qla.chunk_gated_delta_rule(x.q, x.k, x.v, x.log_decay, x.beta, output_final_state=True)


def flashkda(case: Case, x: PeerInputs) -> Callable[[], RESULT]:
    import flash_kda

    def call() -> RESULT:
        output = torch.empty_like(x.v)
        state = torch.empty(case.b, case.hv, HEAD_DIM, HEAD_DIM, device=DEVICE)  # b h v k
        scale = HEAD_DIM**-0.5
        flash_kda.fwd(x.q, x.k, x.v, x.gate, x.write, scale, output, x.A_log, x.dt_bias, LOWER_BOUND, final_state=state)
        return output, state.transpose(-1, -2)

    return call


def sdpa(case: Case, x: PeerInputs) -> Callable[[], RESULT]:
    """Return a call of softmax attention with hv heads for all of q, k, v."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    group = case.hv // case.h
    q, k, v = (y.repeat_interleave(n, dim=2).transpose(1, 2).contiguous()
               for y, n in ((x.q, group), (x.k, group), (x.v, 1)))  # b h t k  # fmt: skip

    def call() -> RESULT:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True), None

    return call


MAKE: dict[str, Callable[[Case, PeerInputs], Callable[[], RESULT]]] = {
    "ours": ours, "ours-bounded": lambda case, x: ours(case, x, LOWER_BOUND), "portable": portable,
    "flashinfer": flashinfer,
    "flashinfer-cp": lambda case, x: flashinfer(case, x, segments=True),
    "fla": fla, "fla-bounded": lambda case, x: fla(case, x, bounded=True), "flashqla": flashqla,
    "flashkda": flashkda, "sdpa": sdpa,
}  # fmt: skip


def train(
    case: Case, make: Callable[[Case, PeerInputs], Callable[[], RESULT]], x: PeerInputs
) -> Callable[[], list[Tensor]]:
    """Return the output, and the gradients of q, k, v and the gates for a random gradient of the output."""
    x = x.map(lambda _, y: y.detach().requires_grad_(y.is_floating_point()))
    call = make(case, x)
    weight = torch.randn(x.v.shape, device=DEVICE, dtype=x.v.dtype)

    def step() -> list[Tensor]:
        output = call()[0]
        return [output.detach(), *torch.autograd.grad(output, x.leaves, weight)]

    step.weight = weight  # type: ignore[attr-defined]
    return step


def error(case: Case, who: str, x: PeerInputs, got: Any, weight: Tensor | None) -> float:
    """Return the largest relative error (2-norm) of the result's tensors for the last sequence and key head.

    The reference is lineate's torch form in float32, with the same inputs and the decay that the contestant computes.
    """
    from bench.rules.contestants import OPS

    group = case.hv // case.h

    def part(name: str, y: Tensor) -> Tensor:
        if name in ("A_log", "dt_bias"):
            return y[-group:].float()
        if name == "state":
            return y[-1:, -group:].float()
        y = y[-1:, -case.lengths[-1] :] if case.lengths else y[-1:]
        return (y[:, :, -1:] if name in ("q", "k") else y[:, :, -group:]).float()

    small = replace(x, cu_seqlens=None).map(part)
    if case.raw:
        assert small.gate is not None and small.write is not None and small.A_log is not None
        pre, rate = small.gate + small.dt_bias, small.A_log.exp()
        rate = rate[:, None] if pre.dim() == 4 else rate
        bounded = "bounded" in CONTESTANTS[who].label
        log_decay = LOWER_BOUND * torch.sigmoid(rate * pre) if bounded else -rate * F.softplus(pre)
        small = replace(small, q=F.normalize(small.q, dim=-1), k=F.normalize(small.k, dim=-1), log_decay=log_decay,
                        beta=small.write.sigmoid())  # fmt: skip
    op = OPS[case.rule]
    small = replace(small, **{n: y.detach().requires_grad_(case.what == TRAIN) for n in ("q", "k", "v", "log_decay",
                              "beta") if (y := getattr(small, n)) is not None})  # fmt: skip
    output, state = op(*small.leaves, state=small.state, backend="torch")
    if case.what == TRAIN:
        assert weight is not None
        want = [output, *torch.autograd.grad(output, small.leaves, part("v", weight))]
        names = ["v", *(n for n in ("q", "k", "v", "log_decay", "beta") if getattr(x, n) is not None)]
        pairs = [(part(n, y), z) for n, y, z in zip(names, got, want, strict=True)]
    else:
        pairs = [(part("v", got[0]), output), (part("state", got[1]), state)]
    errors = [float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs]
    return max(e if math.isfinite(e) else math.inf for e in errors)


def differences(case: Case, x: PeerInputs, got: RESULT) -> list[float]:
    """Return the relative differences (2-norm) of a peer's output and states from ours, over all tokens and heads."""
    pairs = zip(got, torch.no_grad()(ours(case, x))(), strict=True)
    return [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]


def calls_of(case: Case, who: str) -> tuple[list[Call], Callable[[], dict[str, Any]]]:
    """Return the call on as many input sets as fill twice the L2 cache, and a function that checks the first one."""
    cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or 2**26
    sets = [make_inputs(case, 0)]
    wanted = min(gpu_timing.AT_MOST, math.ceil(2 * cache / sets[0].nbytes))
    sets += [make_inputs(case, seed) for seed in range(1, wanted)]
    made: list[Any] = []
    for x in sets:
        made.append(train(case, MAKE[who], x) if case.what == TRAIN else torch.no_grad()(MAKE[who](case, x)))

    def check() -> dict[str, Any]:
        x = sets[0] if sets[0].state is None else replace(sets[0], state=sets[0].state.clone())
        got = made[0]()
        found: dict[str, Any] = {"error": error(case, who, x, got, getattr(made[0], "weight", None))}
        if who.startswith("flashinfer"):
            found["differences"] = differences(case, x, got)
        return found

    return made, check


def versions() -> dict[str, str]:
    """Return the versions of the packages that are imported so far."""
    found = {}
    for module, package in (
        ("torch", "torch"), ("triton", "triton"), ("lineate", "lineate"), ("fla", "fla-core"), ("tilelang", "tilelang"),
        ("flash_qla", "flash-qla"), ("flash_kda", "flash-kda"), ("flashinfer", "flashinfer-python"),
        ("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi"),
    ):  # fmt: skip
        if module in sys.modules:
            version = getattr(sys.modules[module], "__version__", None)
            try:
                found[module] = str(version or importlib.metadata.version(package))
            except importlib.metadata.PackageNotFoundError:
                found[module] = "unknown"
    return found


class BackendLog(logging.Handler):
    """Records which backends fla says it handed its calls to."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if " -> " in text and "rejected" not in text:
            self.taken.append(text.removeprefix("[FLA Backend] ").removeprefix("fla.ops."))


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
    if who.startswith("flashinfer"):
        from bench.rules import gpu_flashinfer

        gpu_flashinfer.load(job["peers"])
    elif job["peers"] and CONTESTANTS[who].package not in ("lineate", "torch"):
        sys.path.insert(0, job["peers"])
    log = BackendLog()
    logging.getLogger("fla").addHandler(log)
    logging.getLogger("fla").setLevel(logging.INFO)
    torch.zeros(1, device=DEVICE)
    start = time.perf_counter()
    importlib.import_module(CONTESTANTS[who].package)
    imported = time.perf_counter() - start
    for number, index in enumerate(job["cases"]):
        case = CASES[index]
        say({"start": index})
        fit = True
        try:
            result, fit = run(case, who, job)
            result |= {**case.record(), "who": who, "cold": number == 0 and job["fresh"], "import_s": imported}
            if CONTESTANTS[who].package == "fla":
                result["path"] = sorted(set(log.taken)) or ["Triton alone"]
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

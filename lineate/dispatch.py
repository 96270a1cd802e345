"""Which form and backend run a call, decided in one pure function, and `explain`, which tells."""

import importlib
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from lineate import checks, flops
from lineate.native.build import why_not
from lineate.processor import why_wide
from lineate.rule import DELTA, GATED_DELTA, GATED_LINEAR, KIMI_DELTA, LINEAR, Rule
from lineate.tracing import PLAIN, needs_grad, recorded, transformed

Signature = tuple[object, ...]

FORMS = ("auto", "recurrent", "chunkwise", "parallel")
BACKENDS = ("auto", "torch", "native", "triton")
# The chunk length that is fastest on each backend (bench/rules/cpu.py, table "chunk size"). The triton kernels take no
# other.
CHUNK_SIZES = {"torch": flops.CHUNK, "native": 32, "triton": 64}
# The widest key and value heads that the triton kernels hold in registers.
TRITON_WIDTH = 256
TRANSFORMED = "torch.func transforms and forward mode know torch's functions alone"
"""Why another backend than torch cannot run inside of them."""
# Up to this many tokens the token loop beats setting up a chunk (bench/rules/cpu.py, table "short").
RECURRENT_UP_TO = 8


@dataclass(frozen=True)
class Plan:
    """What runs, and why."""

    rule: str
    """The public op's name."""
    form: str
    """'recurrent', 'chunkwise' or 'parallel'."""
    backend: str
    """'torch', 'native' or 'triton'."""
    chunk_size: int
    """Tokens a chunk: 1 for the recurrent form, t for the parallel one."""
    reason: str
    """One clause a choice."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.form}, {self.backend}, chunks of {self.chunk_size}\n  {self.reason}"


def resolve(
    rule: Rule,
    *,
    t: int,
    width: int,
    packed: bool,
    beta_per_channel: bool,
    needs_grad: bool,
    transformed: bool,
    device: str,
    dtype: torch.dtype,
    no_native: str | None,
    no_triton: str | None,
    form: str,
    backend: str,
    chunk_size: int | None,
    wide: str | None = None,
) -> Plan:
    """`auto` becomes a choice; an explicit request that cannot be served raises, never falls back.

    width is the larger of k and v. transformed: in a torch.func transform or forward mode, which only torch's own
    functions know. no_native and no_triton say why that backend cannot run on this machine, or are None if it can.
    wide: what there is to say of a dtype that this processor does not multiply.
    """
    if beta_per_channel and form not in ("auto", "recurrent"):
        raise ValueError(
            f"form={form!r} needs beta of shape (b, t, hv); one beta per value channel (b, t, hv, v) "
            "is supported by form='recurrent' only"
        )
    if form != "auto":
        why_form = f"form {form!r} as asked"
    elif beta_per_channel:
        form, why_form = "recurrent", "form 'recurrent' because beta has one rate per value channel"
    elif t <= RECURRENT_UP_TO and not packed and not needs_grad:
        form, why_form = "recurrent", f"form 'recurrent' because t is at most {RECURRENT_UP_TO}: decoding"
    else:
        form, why_form = "chunkwise", "form 'chunkwise': linear in t, quadratic only inside a chunk"

    obstacles = {
        "native": _native_obstacle(form, beta_per_channel, needs_grad, device, dtype) or no_native,
        "triton": no_triton or _triton_obstacle(form, needs_grad, device, dtype, width, chunk_size),
        "torch": None,
    }
    if transformed:
        for name in ("native", "triton"):
            obstacles[name] = obstacles[name] or TRANSFORMED
    own = "triton" if device == "cuda" else "native"  # the backend made for the device
    if backend == "auto":
        backend = own if obstacles[own] is None else "torch"
        found = {"triton": "runs kernels made for a GPU", "native": "runs float32 on a CPU"}
        why_backend = f"backend {backend!r} " + (f"because {obstacles[own]}" if obstacles[own] else found[backend])
    else:
        if obstacles[backend] is not None:
            raise ValueError(f"backend={backend!r} cannot serve this call: {obstacles[backend]}; use backend='torch'")
        why_backend = f"backend {backend!r} as asked"
    chunk_size = CHUNK_SIZES[backend] if chunk_size is None else chunk_size
    size = {"recurrent": 1, "chunkwise": min(chunk_size, t), "parallel": t}[form]
    return Plan(rule.name, form, backend, size, "; ".join(x for x in (why_form, why_backend, wide) if x))


def _native_obstacle(
    form: str, beta_per_channel: bool, needs_grad: bool, device: str, dtype: torch.dtype
) -> str | None:
    """What about this call the native backend does not do, or None."""
    if device != "cpu":
        return f"the native backend needs CPU tensors, got {device}"
    if dtype == torch.float64:
        return "the native backend computes in float32, got float64 inputs"
    if form == "parallel":
        return "the native backend has no parallel form"
    if form == "recurrent" and beta_per_channel:
        return "the native backend takes no beta per value channel"
    if form == "recurrent" and needs_grad:
        return "the native recurrent form has no gradients"
    return None


def _triton_obstacle(
    form: str, needs_grad: bool, device: str, dtype: torch.dtype, width: int, chunk_size: int | None
) -> str | None:
    """What about this call the triton kernels do not do, or None."""
    if device == "cpu" and dtype != torch.float32:
        return f"triton's interpreter computes float32 only, got {str(dtype).removeprefix('torch.')}"
    if dtype == torch.float64:
        return "the triton kernels compute in float32, got float64 inputs"
    if form == "parallel":
        return "the triton backend has no parallel form"
    if form == "recurrent" and needs_grad:
        return "the triton recurrent form has no gradients"
    if width > TRITON_WIDTH:
        return f"the triton kernels take k and v up to {TRITON_WIDTH}, got {width}"
    if form == "chunkwise" and chunk_size not in (None, CHUNK_SIZES["triton"]):
        return f"the triton kernels work in chunks of {CHUNK_SIZES['triton']}, got chunk_size={chunk_size}"
    return None


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    form: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
    normalize_qk: bool = False,
) -> Plan:
    """Say which rule these gates select, which form, backend and chunk size would run, and why; runs nothing.

    >>> print(lineate.explain(q, k, v, log_decay, beta))
    gated_delta_rule: chunkwise, native, chunks of 32
      form 'chunkwise': linear in t, quadratic only inside a chunk; backend 'native' runs float32 on a CPU
    """
    plan = check_and_resolve(
        select_rule(log_decay, beta),
        q,
        k,
        v,
        log_decay,
        beta,
        scale=scale,
        state=state,
        cu_seqlens=cu_seqlens,
        form=form,
        backend=backend,
        chunk_size=chunk_size,
        normalize_qk=normalize_qk,
    )
    checks.check_decay(log_decay)
    return plan


def select_rule(log_decay: Tensor | None, beta: Tensor | None) -> Rule:
    """The row of the table that takes these gates."""
    if beta is None:
        return LINEAR if log_decay is None else GATED_LINEAR
    if log_decay is None:
        return DELTA
    return KIMI_DELTA if isinstance(log_decay, Tensor) and log_decay.dim() == 4 else GATED_DELTA


# Plans of calls that passed every check, by all that the checks and the plan depend on: decoding makes the same call
# for every token, and looking at it again would take a fifth of the step.
_KNOWN: dict[Signature, Plan] = {}
KNOWN_AT_MOST = 1024
_PLAIN = frozenset((float, int, str, bool, type(None)))


def call_signature(tensors: tuple[Tensor | None, ...], options: tuple[object, ...]) -> Signature | None:
    """All of a call but the values of its tensors, or None where checks must look again: odd types, and recording."""
    if recorded():
        return None
    types = tuple(map(type, options))
    if not _PLAIN.issuperset(types):
        return None
    parts: list[object] = [torch.is_grad_enabled(), transformed(), *options, *types]
    for x in tensors:
        if x is None:
            parts.append(None)
        elif type(x) in PLAIN:
            parts += (x.shape, x.dtype, x.device, x.requires_grad)
        else:
            return None
    return tuple(parts)


def check_and_resolve(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    *,
    scale: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    form: str,
    backend: str,
    chunk_size: int | None,
    normalize_qk: bool,
) -> Plan:
    """All checks of one call, then its plan."""
    options = (scale, form, backend, chunk_size, normalize_qk)
    signature = None  # the values of cu_seqlens are looked at every time
    if cu_seqlens is None:
        signature = call_signature((q, k, v, log_decay, beta, state), options)
    if signature is not None:
        signature = (rule, *signature)
        if signature in _KNOWN:
            return _KNOWN[signature]
    checks.check_choice("form", form, FORMS)
    checks.check_choice("backend", backend, BACKENDS)
    checks.check_chunk_size(chunk_size)
    checks.check_scale(scale)
    checks.check_flag("normalize_qk", normalize_qk)
    checks.check_inputs(rule, q, k, v, log_decay, beta)
    b, t = q.shape[:2]
    checks.check_cu_seqlens(cu_seqlens, b, t)
    n_states = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    checks.check_state(state, v, q.shape[-1], n_states)
    plan = resolve(
        rule,
        t=t,
        width=max(q.shape[-1], v.shape[-1]),
        packed=cu_seqlens is not None,
        beta_per_channel=beta is not None and beta.dim() == 4,
        needs_grad=needs_grad(q, k, v, log_decay, beta, state),
        transformed=transformed(),
        device=q.device.type,
        dtype=q.dtype,
        no_native=_no_native() if q.device.type == "cpu" and backend in ("auto", "native") else None,
        no_triton=why_no_triton(q.device.type) if q.device.type == "cuda" or backend == "triton" else None,
        form=form,
        backend=backend,
        chunk_size=chunk_size,
        wide=why_wide(q.dtype) if q.device.type == "cpu" else None,
    )
    if signature is not None and len(_KNOWN) < KNOWN_AT_MOST:
        _KNOWN[signature] = plan
    return plan


def _no_native() -> str | None:
    """Why the native backend cannot run on this machine, or None; compiles it the first time."""
    return why_not()


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo, which takes seconds.
_no_native._dynamo_marked_constant = True  # type: ignore[attr-defined]


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


interpreted._dynamo_marked_constant = True  # type: ignore[attr-defined]


def why_no_triton(device: str) -> str | None:
    """Why the triton kernels cannot run on this device, or None; imports them. Triton's interpreter runs on a CPU."""
    if device != "cuda" and not (device == "cpu" and interpreted()):
        return f"the triton kernels need CUDA tensors, got {device}"
    try:
        importlib.import_module("lineate.kernels.ops")
    except ImportError as missing:
        return f"triton is not installed ({missing})"
    return None


why_no_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


def kernels_run() -> bool:
    """Whether kernels may be called for CUDA tensors: triton is there, and nothing like vmap is at work."""
    return why_no_triton("cuda") is None and not transformed()


def empty_state(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Zeros `b hv k v`, or `n_seqs hv k v` with packed sequences."""
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return torch.zeros(rows, v.shape[2], q.shape[3], v.shape[3], dtype=dtype, device=v.device)

"""Chooses the form and the backend of a call; `explain` returns the choice with its reasons."""

import importlib
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from lineate import checks, kernels
from lineate.call import Inputs, Options, Request, in_one_dtype, spread_decay
from lineate.forms import chunkwise, parallel, recurrent
from lineate.native import general as native_general
from lineate.native import ops as native
from lineate.native.build import why_not
from lineate.plans import PLANS, call_signature
from lineate.rule import RULES, Rule, check_row
from lineate.system.processor import why_wide
from lineate.torch_ops import flops
from lineate.torch_ops.tracing import constant_in_graphs, needs_grad, transformed
from lineate.torch_ops.zeros import read_zeros

FORMS = ("auto", "recurrent", "chunkwise", "parallel")
BACKENDS = ("auto", "torch", "native", "triton")
# The chunk length that is fastest on each backend (bench/rules/cpu.py, table "chunk size"). The triton kernels take no
# other.
CHUNK_SIZES = {"torch": flops.CHUNK, "native": 32, "triton": 64}
# The widest key and value heads that the triton kernels hold in registers.
TRITON_WIDTH = 256
TRANSFORMED = "torch.func transforms and forward mode know torch's functions alone"
"""Why only the torch backend runs inside a transform."""
# Up to this many tokens the token loop beats setting up a chunk (bench/rules/cpu.py, table "short").
RECURRENT_UP_TO = 8


READS = {
    ("recurrent", "torch"): recurrent.READS,
    ("chunkwise", "torch"): tuple({*chunkwise.READS, *parallel.READS}),  # of the parallel form, chunk by chunk
    ("parallel", "torch"): parallel.READS,
    ("recurrent", "native"): native.READS,
    ("chunkwise", "native"): native.READS,
    ("recurrent", "triton"): kernels.RECURRENT_READS,
    ("chunkwise", "triton"): kernels.CHUNKWISE_READS,
}
"""The tensors of a call that each form reads on each backend; a call with another one is not served by it."""
GENERAL_READS = {
    ("recurrent", "native"): native_general.READS,
    ("chunkwise", "native"): native_general.READS,
    ("recurrent", "triton"): kernels.GENERAL_READS,
    ("chunkwise", "triton"): kernels.GENERAL_READS,
}
"""The same for rules of the general row, where another op computes them."""


@dataclass(frozen=True)
class Plan:
    """The form, backend and chunk size that a call runs with, and the reasons."""

    rule: str
    """The public op's name."""
    form: str
    """'recurrent', 'chunkwise' or 'parallel'."""
    backend: str
    """'torch', 'native' or 'triton'."""
    chunk_size: int
    """Tokens a chunk: 1 for the recurrent form, t for the parallel one."""
    reason: str
    """The reasons, one clause for each choice."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.form}, {self.backend}, chunks of {self.chunk_size}\n  {self.reason}"


@dataclass(frozen=True)
class Facts:
    """The properties of a call that the choice depends on, besides its rule and request."""

    t: int
    """Tokens a row."""
    width: int
    """The larger of k and v."""
    given: tuple[str, ...] = ()
    """The names of the tensors that are there; raw gates become gates before a backend that takes none."""
    packed: bool = False
    """Whether there are cu_seqlens."""
    beta_per_channel: bool = False
    """Whether beta has one rate per value channel."""
    writes: int = 1
    """Writes a token."""
    needs_grad: bool = False
    """Whether autograd will want a backward."""
    transformed: bool = False
    """Whether the call is inside a torch.func transform or forward mode, which support only torch's own functions."""
    device: str = "cpu"
    """The type of the tensors' device."""
    dtype: torch.dtype = torch.float32
    """The dtype of q, k and v."""
    no_native: str | None = None
    """Why the native backend cannot run on this machine, or None."""
    no_triton: str | None = None
    """Why the triton backend cannot run on this machine, or None."""
    wide: str | None = None
    """A note on a dtype that this processor has no multiply instructions for, or None."""


def resolve(rule: Rule, facts: Facts, request: Request) -> Plan:
    """Choose a form and a backend for 'auto'; raise if an explicit request cannot be served, without falling back."""
    form, backend, t = request.form, request.backend, facts.t
    if form != "auto":
        if unread := _unread(rule, form, "torch", facts):
            raise ValueError(f"form={form!r} cannot serve this call: it {unread}; use form='auto'")
        why_form = f"form {form!r} as asked"
    elif facts.beta_per_channel and facts.device == "cuda" and not (facts.needs_grad or facts.no_triton):
        form, why_form = "recurrent", "form 'recurrent' because the kernel for one beta per value channel is recurrent"
    elif t <= RECURRENT_UP_TO and not facts.packed and not facts.needs_grad:
        form, why_form = "recurrent", f"form 'recurrent' because t is at most {RECURRENT_UP_TO}: decoding"
    else:
        form, why_form = "chunkwise", "form 'chunkwise': linear in t, quadratic only inside a chunk"
    if unread := _unread(rule, form, "torch", facts):
        form, why_form = _form_that_reads(rule, facts), f"because form {form!r} {unread}"
        why_form = f"form {form!r} {why_form}"

    obstacles = {
        "native": _native_obstacle(rule, form, facts) or facts.no_native,
        "triton": facts.no_triton or _triton_obstacle(rule, form, facts, request.chunk_size),
        "torch": None,
    }
    if facts.transformed:
        for name in ("native", "triton"):
            obstacles[name] = obstacles[name] or TRANSFORMED
    own = "triton" if facts.device == "cuda" else "native"  # the backend made for the device
    if backend == "auto":
        backend = own if obstacles[own] is None else "torch"
        found = {"triton": "runs kernels made for a GPU", "native": "runs float32 on a CPU"}
        why_backend = f"backend {backend!r} " + (f"because {obstacles[own]}" if obstacles[own] else found[backend])
    else:
        if obstacles[backend] is not None:
            raise ValueError(f"backend={backend!r} cannot serve this call: {obstacles[backend]}; use backend='torch'")
        why_backend = f"backend {backend!r} as asked"
    chunk_size = request.chunk_size
    if chunk_size is None:
        chunk_size = CHUNK_SIZES[backend]
        if backend == "native":
            chunk_size = max(1, chunk_size // facts.writes)
    size = {"recurrent": 1, "chunkwise": min(chunk_size, t), "parallel": t}[form]
    return Plan(rule.name, form, backend, size, "; ".join(x for x in (why_form, why_backend, facts.wide) if x))


def _unread(rule: Rule, form: str, backend: str, facts: Facts) -> str | None:
    """Return that a form does not read some of the call's tensors on a backend, or None if it reads all."""
    reads = READS[form, backend]
    if rule.general:
        reads = GENERAL_READS.get((form, backend), reads)
    missing = [name for name in facts.given if name not in reads]
    return f"does not read {', '.join(missing)}" if missing else None


def _form_that_reads(rule: Rule, facts: Facts) -> str:
    """Return the first form that reads all tensors of a call."""
    for form in FORMS[1:]:
        if _unread(rule, form, "torch", facts) is None:
            return form
    unread = _unread(rule, FORMS[1], "torch", facts)
    raise ValueError(f"no form can serve this call: form {FORMS[1]!r} {unread}; leave it None")


def _native_obstacle(rule: Rule, form: str, facts: Facts) -> str | None:
    """Return the feature of this call that the native backend does not support, or None."""
    if facts.device != "cpu":
        return f"the native backend needs CPU tensors, got {facts.device}"
    if facts.dtype == torch.float64:
        return "the native backend computes in float32, got float64 inputs"
    if form == "parallel":
        return "the native backend has no parallel form"
    if rule.general and rule not in native_general.RULES:
        return f"the native backend has no {rule.name}"
    if unread := _unread(rule, form, "native", facts):
        return f"the native backend {unread}"
    if facts.beta_per_channel:
        return "the native backend takes no beta per value channel"
    if form == "recurrent" and facts.needs_grad:
        return "the native recurrent form has no gradients"
    return None


def _triton_obstacle(rule: Rule, form: str, facts: Facts, chunk_size: int | None) -> str | None:
    """Return the feature of this call that the triton kernels do not support, or None."""
    if facts.device == "cpu" and facts.dtype != torch.float32:
        return f"triton's interpreter computes float32 only, got {str(facts.dtype).removeprefix('torch.')}"
    if facts.dtype == torch.float64:
        return "the triton kernels compute in float32, got float64 inputs"
    if form == "parallel":
        return "the triton backend has no parallel form"
    if rule.general and rule not in kernels.GENERAL_RULES:
        return f"the triton backend has no {rule.name}"
    if unread := _unread(rule, form, "triton", facts):
        return f"the triton backend {unread}"
    if form == "chunkwise" and facts.beta_per_channel:
        return "the triton chunkwise form takes no beta per value channel"
    if form == "recurrent" and facts.needs_grad:
        return "the triton recurrent form has no gradients"
    if form == "recurrent" and facts.writes > kernels.DECODE_WRITES:
        return f"the triton recurrent form takes up to {kernels.DECODE_WRITES} writes a token, got {facts.writes}"
    if facts.width > TRITON_WIDTH:
        return f"the triton kernels take k and v up to {TRITON_WIDTH}, got {facts.width}"
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
    erase: Tensor | None = None,
    write: Tensor | None = None,
    probe: Tensor | None = None,
    direction: Tensor | None = None,
    form: str = "auto",
    backend: str = "auto",
    chunk_size: int | None = None,
    normalize_qk: bool = False,
) -> Plan:
    """Return the rule that these gates select, and the form, backend and chunk size that would run; run nothing.

    >>> print(lineate.explain(q, k, v, log_decay, beta))
    gated_delta_rule: chunkwise, native, chunks of 32
      form 'chunkwise': linear in t, quadratic only inside a chunk; backend 'native' runs float32 on a CPU

    Args:
        q: queries, `b t h k`.
        k: keys, `b t h k`; `b t n h k` selects gated_delta_product, and v and beta then have n writes too.
        v: values, `b t hv v`, with hv a multiple of h.
        log_decay: `b t hv` (per head), `b t hv k` (per key channel), `hv` (a constant of each head), or None for a rule
            that does not forget.
        beta: `b t hv`, `b t hv v`, or None for a rule that only accumulates.
        scale: multiplies the output; None is 1/sqrt(k).
        state: the memory to continue from, `b hv k v`; `n_seqs hv k v` with cu_seqlens. None is an empty memory.
        cu_seqlens: `n_seqs + 1`, int: the bounds of sequences packed into one row (b = 1), which never see each other.
        erase: `b t hv k`, of gated_delta_rule_2.
        write: `b t hv v`, of gated_delta_rule_2.
        probe: `b t hv k`, of diagonal_plus_low_rank.
        direction: `b t hv k`, of diagonal_plus_low_rank.
        form: "auto", "recurrent", "chunkwise" or "parallel".
        backend: "auto", "torch", "native" (C, on a CPU) or "triton" (on a GPU).
        chunk_size: tokens a chunk of the chunkwise form; None takes the backend's own size.
        normalize_qk: whether q and k are l2-normalised inside.

    Returns:
        The plan; print it, or read its fields.
    """
    given = Inputs(
        q=q, k=k, v=v, log_decay=log_decay, beta=beta, erase=erase, write=write, probe=probe, direction=direction,
        state=state, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    request = Request(scale, form, backend, chunk_size, normalize_qk)
    plan, _ = check_and_resolve(select_rule(given), spread_decay(in_one_dtype(given)), request)
    checks.check_decay(log_decay)
    return plan


def select_rule(inputs: Inputs) -> Rule:
    """Return the rule that takes the gates of a call, for ops and mixers that do not name one."""
    gates, log_decay = inputs.gates(), inputs.log_decay
    shape = "channel" if isinstance(log_decay, Tensor) and log_decay.dim() == 4 else "head"
    several = isinstance(inputs.k, Tensor) and inputs.k.dim() == 5
    found = None
    for rule in RULES:
        if rule.writes == several and rule.takes(gates):
            found = rule if found is None or shape in rule.decays else found
    if found is None:
        known = ", ".join(f"{rule.name} ({', '.join(rule.gates) or 'none'})" for rule in RULES)
        raise ValueError(f"gates must be those of a rule, got {', '.join(gates) or 'none'}; the rules take {known}")
    return found


def check_and_resolve(rule: Rule, inputs: Inputs, request: Request) -> tuple[Plan, Options]:
    """Check everything about one call except the values of its gates; return its plan and its options."""
    signature, bounds = None, inputs.cu_seqlens
    if bounds is None or (isinstance(bounds, Tensor) and bounds.is_cuda):  # on a CPU, every call checks their values
        signature = call_signature("op", rule, inputs.tensors(), request)
    if signature is not None:
        known: tuple[Plan, Options] | None = PLANS.get(signature)
        if known is not None:
            return known
    q, v, beta, cu_seqlens = inputs.q, inputs.v, inputs.beta, inputs.cu_seqlens
    checks.check_choice("form", request.form, FORMS)
    checks.check_choice("backend", request.backend, BACKENDS)
    checks.check_chunk_size(request.chunk_size)
    checks.check_scale(request.scale)
    checks.check_flag("normalize_qk", request.normalize_qk)
    checks.check_inputs(rule, inputs)
    check_row(rule)
    b, t, _, key_dim = q.shape
    checks.check_cu_seqlens(cu_seqlens, b, t)
    n_states = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    checks.check_state(inputs.state, v, key_dim, n_states)
    device = q.device.type
    facts = Facts(
        t,
        width=max(key_dim, v.shape[-1]),
        packed=cu_seqlens is not None,
        beta_per_channel=beta is not None and beta.dim() == 4 and not rule.writes,
        writes=inputs.k.shape[2] if rule.writes else 1,
        given=tuple(x.name for x in inputs.FIELDS if x.role != "parameter" and getattr(inputs, x.name) is not None),
        needs_grad=needs_grad(*(getattr(inputs, name) for name in inputs.DIFFERENTIABLE)),
        transformed=transformed(),
        device=device,
        dtype=q.dtype,
        no_native=_no_native(rule) if device == "cpu" and request.backend in ("auto", "native") else None,
        no_triton=why_no_triton(device) if device == "cuda" or request.backend == "triton" else None,
        wide=why_wide(q.dtype) if device == "cpu" else None,
    )
    plan = resolve(rule, facts, request)
    options = Options(rule, resolve_scale(request.scale, key_dim), request.normalize_qk, plan.chunk_size)
    if signature is not None:
        PLANS.put(signature, (plan, options))
    return plan, options


def resolve_scale(scale: float | None, key_dim: int) -> float:
    """Return the scale asked for, or 1/sqrt(k) for None."""
    return key_dim**-0.5 if scale is None else float(scale)


@constant_in_graphs
def _no_native(rule: Rule) -> str | None:
    """Return why the native backend cannot run a rule on this machine, or None; compile it the first time."""
    return why_not("general" if rule.general else "rules")


@constant_in_graphs
def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@constant_in_graphs
def why_no_triton(device: str) -> str | None:
    """Import the kernels and return why they cannot run on this device, or None; the interpreter runs on a CPU."""
    if device != "cuda" and not (device == "cpu" and interpreted()):
        return f"the triton kernels need CUDA tensors, got {device}"
    try:
        importlib.import_module("lineate.kernels.ops")
    except ImportError as missing:
        return f"triton is not installed ({missing})"
    return None


def kernels_run() -> bool:
    """Whether kernels may be called for CUDA tensors: triton is installed, and no transform such as vmap is active."""
    return why_no_triton("cuda") is None and not transformed()


def empty_state(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, dtype: torch.dtype, *, shared: bool = False
) -> Tensor:  # fmt: skip
    """Return zeros `b hv k v`, or `n_seqs hv k v` with packed sequences.

    shared: whether the caller only reads them, so that calls may share them.
    """
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = rows, v.shape[-2], q.shape[-1], v.shape[-1]
    return read_zeros(shape, dtype, v.device) if shared else torch.zeros(shape, dtype=dtype, device=v.device)

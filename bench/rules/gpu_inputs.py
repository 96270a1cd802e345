"""The inputs of the GPU benchmark's cases, the same for every contestant."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.rules.gpu_cases import HEAD_DIM, SINGLE, STEP, UNIFORM, Case

LEAVES = ("q", "k", "v", "log_decay", "beta")  # the inputs that have gradients, where a rule has them
LOWER_BOUND = -5.0  # of the bounded gate, and of log decays that are drawn uniformly


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
        return [x for name in LEAVES if (x := getattr(self, name)) is not None]


def make_inputs(case: Case, seed: int, device: str = "cuda") -> PeerInputs:
    """Return random inputs: unit q and k, beta in (0, 1), log_decay with a median of about -0.14.

    log_decay is -exp(x - 2) with x normal, or uniform between -5 and 0 if the case says so.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    b, t, h, hv = case.b, case.t, case.h, case.hv
    bounds = torch.tensor([0, *case.lengths], device=device).cumsum(0) if case.lengths else None
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
    log_decay = None
    if case.rule in ("gdn", "kda") and case.decay == UNIFORM:
        log_decay = LOWER_BOUND * torch.rand(*gate_shape, generator=generator, device=device)
    elif case.rule in ("gdn", "kda"):
        log_decay = normal(*gate_shape).sub_(2).exp_().neg_()
    dtype = torch.float32 if case.state == SINGLE else torch.bfloat16
    begins = case.what == STEP or case.resumed
    state = normal(len(case.lengths) or b, hv, HEAD_DIM, HEAD_DIM).to(dtype) if begins else None
    return PeerInputs(q, k, v, log_decay=log_decay, beta=beta, state=state, cu_seqlens=bounds)

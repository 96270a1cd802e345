"""The contestants' calls: each takes the inputs of a case and returns a call that gives the output and the states.

All begin with q, k `b t h k`, v `b t hv v`, the logarithm of the decay `b t hv [k]` and states `sequence hv k v`. Where
a package wants another layout, `in_layout` changes the inputs once, before anything is timed:

    cudnn       tokens of all sequences `t h k` without a batch axis, states `sequence hv v k`, bounds in int32
    attn-gym    states `sequence hv v k`, bounds in int32; equally many heads of q, k and v for KDA
    flashinfer  the same tokens as cudnn, but the decay itself and beta, bounds in int64 (gpu_flashinfer.py)
    fla, flashqla    the layouts of lineate; bounds in int64
"""

import importlib
import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.rules.gpu_cases import BY_CHANCE, CONTESTANTS, HEAD_DIM, STEP, Case
from bench.rules.gpu_inputs import LOWER_BOUND, PeerInputs

RESULT = tuple[Tensor, Tensor | None]  # output and final state
Adapter = Callable[[Case, PeerInputs], Callable[[], RESULT]]
WITHOUT_BATCH = ("cudnn",)  # contestants whose tokens have no batch axis
VALUES_FIRST = ("cudnn", "attn-gym")  # those whose states are `sequence hv v k`


def ours(case: Case, x: PeerInputs, lower_bound: float | None = None) -> Callable[[], RESULT]:
    import lineate
    from bench.rules.contestants import OPS

    if case.what == STEP:
        from lineate.ops.decoding import decode

        assert x.state is not None
        state = x.state  # updated in place
        options: dict[str, Any] = {"backend": "triton"}
        if case.state == BY_CHANCE:
            options |= {"rounding": "stochastic", "seeds": torch.arange(case.b, device=x.q.device)}
        return lambda: (decode(x.q, x.k, x.v, x.log_decay, x.beta, state=state, **options), state)
    if case.raw:
        return lambda: lineate.fused_delta_rule(
            x.q, x.k, x.v, x.gate, x.write, x.A_log, x.dt_bias, normalize_qk=True, cu_seqlens=x.cu_seqlens,
            lower_bound=lower_bound,
        )  # fmt: skip
    gates = [y for y in (x.log_decay, x.beta) if y is not None]
    op = OPS[case.rule]
    options = {"backend": "triton"}
    options |= {} if x.cu_seqlens is None else {"cu_seqlens": x.cu_seqlens}
    options |= {} if x.state is None else {"state": x.state}
    return lambda: op(x.q, x.k, x.v, *gates, **options)


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


def fla(case: Case, x: PeerInputs, bounded: bool = False, safe: bool = False) -> Callable[[], RESULT]:
    """Return fla's call.

    With bounded it computes the bounded gate. With safe it may use that no logarithm of a decay is below -5.
    """
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
    options = {"initial_state": x.state, "cu_seqlens": x.cu_seqlens}
    options |= {"safe_gate": True} if safe else {}
    return lambda: op(x.q, x.k, x.v, x.log_decay, x.beta, output_final_state=True, **options)


def flashqla(case: Case, x: PeerInputs) -> Callable[[], RESULT]:
    import flash_qla

    return lambda: flash_qla.chunk_gated_delta_rule(
        x.q, x.k, x.v, x.log_decay, x.beta, initial_state=x.state, cu_seqlens=x.cu_seqlens, output_final_state=True
    )


def cudnn(case: Case, x: PeerInputs) -> Callable[[], RESULT]:
    """Return a call of cuDNN's frontend, which chooses the plan by itself (`plans` says which)."""
    from cudnn.linear_attention.ops import kimi_delta_attention

    return lambda: kimi_delta_attention(
        x.q, x.k, x.v, x.log_decay, x.beta, x.cu_seqlens, initial_state=x.state, output_final_state=True
    )


def attn_gym(case: Case, x: PeerInputs) -> Callable[[], RESULT]:
    from attn_gym.linear import chunk_gdn, chunk_kda

    op = {"gdn": chunk_gdn, "kda": chunk_kda}[case.rule]
    return lambda: op(
        x.q, x.k, x.v, x.log_decay, x.beta, x.state, cu_seqlens=x.cu_seqlens, output_final_state=True
    )  # fmt: skip


def flashkda(case: Case, x: PeerInputs) -> Callable[[], RESULT]:
    import flash_kda

    def call() -> RESULT:
        output = torch.empty_like(x.v)
        state = torch.empty(case.b, case.hv, HEAD_DIM, HEAD_DIM, device=x.q.device)  # b h v k
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


MAKE: dict[str, Adapter] = {
    "ours": ours, "ours-bounded": lambda case, x: ours(case, x, LOWER_BOUND), "portable": portable,
    "flashinfer": flashinfer,
    "flashinfer-cp": lambda case, x: flashinfer(case, x, segments=True),
    "cudnn": cudnn, "attn-gym": attn_gym, "fla": fla, "fla-bounded": lambda case, x: fla(case, x, bounded=True),
    "fla-safe": lambda case, x: fla(case, x, safe=True), "flashqla": flashqla,
    "flashkda": flashkda, "sdpa": sdpa,
}  # fmt: skip


def in_layout(case: Case, who: str, x: PeerInputs) -> PeerInputs:
    """Return the inputs in the layout that a contestant takes; tokens and gates are views."""
    bounds = x.cu_seqlens
    if who in WITHOUT_BATCH:
        bounds = torch.arange(case.b + 1, device=x.q.device) * case.t if bounds is None else bounds
        shared = ("state", "cu_seqlens", "A_log", "dt_bias")
        x = x.map(lambda name, y: y if name in shared else y.flatten(0, 1))
    if who in VALUES_FIRST:
        state = None if x.state is None else x.state.transpose(-1, -2).contiguous()
        x = replace(x, state=state, cu_seqlens=None if bounds is None else bounds.int())
    return x


def state_of(who: str, state: Tensor) -> Tensor:
    """Return a contestant's states as `sequence hv k v`."""
    return state.transpose(-1, -2) if who in VALUES_FIRST else state


def load_peer(who: str, peers: str) -> None:
    """Import a contestant's package from the peers' folder, or an installed one if that is empty."""
    from bench.rules import gpu_flashinfer

    compiler = shutil.which("nvcc")
    if compiler and "CUDA_HOME" not in os.environ:  # torch's own copy of CUDA's headers is not complete
        os.environ["CUDA_HOME"] = str(Path(compiler).resolve().parents[1])
    if who.startswith("flashinfer"):
        gpu_flashinfer.load(peers)
    elif peers and CONTESTANTS[who].package not in ("lineate", "torch"):
        gpu_flashinfer.add_to_path(peers)
    importlib.import_module(CONTESTANTS[who].package)


class BackendLog(logging.Handler):
    """Records which backends fla says it handed its calls to."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []

    def listen(self) -> None:
        logging.getLogger("fla").addHandler(self)
        logging.getLogger("fla").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if " -> " in text and "rejected" not in text:
            self.taken.append(text.removeprefix("[FLA Backend] ").removeprefix("fla.ops."))

    def path(self) -> list[str]:
        return sorted(set(self.taken)) or ["Triton alone"]


def plans() -> list[str]:
    """Return the names of the plans that cuDNN's frontend has chosen so far."""
    kda = sys.modules.get("cudnn.linear_attention.ops.kda")
    if kda is None:
        return []
    graphs = [entry[0] for cache in (kda.fprop_cache, kda.bprop_cache) for entry in cache.values()]
    return sorted({str(getattr(graph.selected_engine, "name", "cuDNN's backend")) for graph in graphs})

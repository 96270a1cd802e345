"""Calls whose kernels are lowered, on tensors without memory; each is named by strings and numbers (lowering.py)."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

import lineate
from lineate import plans
from lineate.call import Inputs, Options, Slots
from lineate.kernels import launching, pipeline
from lineate.kernels.layers import (
    around_attention,
    cached,
    grouping,
    latent,
    mixture,
    ops,
    pieces,
    products,
    quantised_products,
    routing,
    squares,
    token,
)  # fmt: skip
from lineate.kernels.layers import experts as products_of_experts
from lineate.kernels.memories.lact_features import features
from lineate.kernels.portable.decode_general import GatedNorm
from lineate.kernels.portable.decode_general import decode_general as decode_writes
from lineate.layers import MixtureOfExperts, RMSNorm
from lineate.memory.lact import lact, lact_state
from lineate.memory.titans.op import titans, titans_state
from lineate.memory.ttt import ttt
from lineate.ops.decoding import decode as run_decode
from lineate.ops.rings import Ring
from lineate.quantised.format import FORMATS
from lineate.rule import GATED_DELTA_2, GATED_DELTA_PRODUCT
from tests.support.lowered_steps import whole_step

SIZES = {
    "128": (2, 300, 4, 4, 128, 128),
    "grouped": (1, 4096, 2, 8, 128, 128),
    "cut": (1, 32768, 2, 4, 128, 128),
    "many heads": (4, 300, 48, 48, 128, 128),
    "64": (1, 300, 2, 4, 64, 64),
    "60": (1, 300, 2, 2, 60, 60),
    "wide": (1, 300, 1, 1, 256, 256),
    "32 heads": (1, 16387, 16, 32, 128, 128),
    "48 heads": (1, 4096, 16, 48, 128, 128),
    "short": (1, 3000, 16, 32, 128, 128),
    "two rows": (2, 16384, 16, 32, 128, 128),
}
"""b, t, h, hv, k, v."""
OPS = {
    "linear": lineate.linear_attention,
    "gated_linear": lineate.gated_linear_attention,
    "gated_linear_channel": lineate.gated_linear_attention,
    "delta": lineate.delta_rule,
    "gated_delta": lineate.gated_delta_rule,
    "kimi_delta": lineate.kimi_delta_attention,
}

compile_only = pipeline.compile_only
pipeline.compile_only = lambda function: None  # what it would compile in other threads is launched right after it


class Unrecorded:
    """Launches kernels; without it, calls would be recorded and replayed where there is a driver of CUDA's."""

    def launch(self, kernel: Any, grid: tuple[int, ...], *given: object, **options: object) -> Any:
        return kernel.run(*given, grid=grid, warmup=False, **options)


launching.recording.set(Unrecorded())


def empty(*shape: int, dtype: torch.dtype | str = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype, device="cuda")


def differentiated(outputs: Any, wanted: bool, leaves: list[Tensor]) -> None:
    """Run the backward of all outputs, if it is wanted."""
    outputs = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    if wanted:
        torch.autograd.grad(outputs, leaves, [torch.empty_like(x) for x in outputs], allow_unused=True)


def rule(row: str, dtype: str, backward: bool, packed: bool, gates: str, size: str) -> None:
    """Run a rule. gates: "given", "normed" (q and k are normalised too), "raw" (likewise), "bounded" (raw)."""
    b, t, h, hv, k, v = SIZES[size]
    if packed:
        b, t = 1, b * t
    channel = (k,) if row in ("kimi_delta", "gated_linear_channel") else ()
    rows = 2 if packed else b
    inputs = {name: empty(b, t, h, k, dtype=dtype) for name in ("q", "k")}
    inputs |= {"v": empty(b, t, hv, v, dtype=dtype), "state": empty(rows, hv, k, v)}
    raw = gates in ("raw", "bounded")
    if row not in ("linear", "delta"):
        inputs["gate" if raw else "log_decay"] = empty(b, t, hv, *channel, dtype=dtype)
    if "delta" in row:
        inputs["write" if raw else "beta"] = empty(b, t, hv, dtype=dtype)
    if raw:
        inputs |= {"A_log": empty(hv), "dt_bias": empty(hv, *channel)}
    leaves = list(inputs.values())
    for x in leaves:
        x.requires_grad_(backward)
    options: dict[str, Any] = {"cu_seqlens": empty(rows + 1, dtype="int64") if packed else None}
    if gates == "bounded":
        options["lower_bound"] = -5.0
    if not raw:
        options |= {"form": "chunkwise", "normalize_qk": gates == "normed"}
    outputs = (lineate.fused_delta_rule if raw else OPS[row])(**inputs, **options, backend="triton")
    differentiated(outputs, backward, leaves)


def general(row: str, dtype: str, backward: bool, packed: bool, decay: str, size: str, normed: bool = False) -> None:
    """Run a rule of the general row. decay: "none", "head" or "channel"; packed: two sequences."""
    b, t, h, hv, k, v = SIZES[size]
    if packed:
        b, t = 1, b * t
    rows, several = 2 if packed else b, (2,) if row == "gated_delta_product" else ()
    inputs = {"q": empty(b, t, h, k, dtype=dtype), "k": empty(b, t, *several, h, k, dtype=dtype)}
    inputs |= {"v": empty(b, t, *several, hv, v, dtype=dtype), "state": empty(rows, hv, k, v)}
    inputs["log_decay"] = None if decay == "none" else empty(b, t, hv, *((k,) if decay == "channel" else ()))
    widths = {
        "gated_delta_rule_2": {"erase": k, "write": v}, "diagonal_plus_low_rank": {"probe": k, "direction": k},
        "gated_delta_product": {},
    }  # fmt: skip
    inputs |= {name: empty(b, t, hv, width, dtype=dtype) for name, width in widths[row].items()}
    if several:
        inputs["beta"] = empty(b, t, *several, hv, dtype=dtype)
    leaves = [x.requires_grad_(backward) for x in inputs.values() if x is not None]
    outputs = getattr(lineate, row)(
        **inputs, cu_seqlens=empty(rows + 1, dtype="int64") if packed else None, form="chunkwise", backend="triton",
        normalize_qk=normed,
    )  # fmt: skip
    differentiated(outputs, backward, leaves)


def ahead(**options: Any) -> None:
    """Run a rule whose kernels are compiled before it, and refuse those that are not.

    In the general row, small kernels around the stages compile when they are launched: portable/elements.py, layout.py.
    """
    gpus = triton.runtime.driver.active
    early = 0

    def compile_first(function: Callable[[], None]) -> None:
        nonlocal early
        compile_only(function)
        early = len(gpus.compiled)

    gpus.forget()
    gpus.compiled.clear()
    plans.forget("compiled")
    with mock.patch.object(pipeline, "compile_only", compile_first):
        (general if "decay" in options else rule)(**options)
    small = (".elements.", ".layout.") if "decay" in options else ()
    late = [name for name in gpus.compiled[early:] if not any(x in name for x in small)]
    assert early and not late, f"compiled when they were launched: {late}"


def memories(state: str, slots: str, b: int, t: int, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """Return the memories `hv k v` that t tokens of b rows read and write, and how those in bfloat16 are rounded."""
    where: dict[str, Any] = {"state": empty(7 if slots != "none" else b, *sizes, dtype=state)}
    if slots != "none":
        where["slots"] = empty(*((b, t) if slots == "tokens" else (b,)), dtype="int64")
    if slots == "tokens":
        where["start_slots"] = empty(b, dtype="int64")
    if state == "bfloat16":
        where |= {"rounding": "stochastic", "seeds": empty(b, dtype="int64")}
    return where


def decode(row: str, dtype: str, state: str, gates: str, slots: str, t: int = 1, size: str = "grouped") -> None:
    """Run a few tokens. slots: "none", "rows" or "tokens", whose memories are all kept."""
    _, _, h, hv, k, v = SIZES[size]
    b, channel = 3, (k,) if row in ("kimi_delta", "gated_linear_channel") else ()
    given = {name: empty(b, t, heads, width, dtype=dtype) for name, heads, width in (("q", h, k), ("k", h, k))}
    given["v"] = empty(b, t, hv, v, dtype=dtype)
    if row not in ("linear", "delta"):
        given["log_decay"] = empty(b, t, hv, *channel, dtype=dtype)
    if "delta" in row:
        given["beta"] = empty(b, t, hv, dtype=dtype)
    if gates == "raw":
        given |= {"A_log": empty(hv), "dt_bias": empty(hv, *channel)}
    where = memories(state, slots, b, t, (hv, k, v))
    run_decode(**given, **where, normalize_qk=gates == "raw", raw_gates=gates == "raw", backend="triton")


def decode_ring(
    row: str, dtype: str, state: str, gates: str, slots: bool, every: int, size: str, overlap: bool
) -> None:
    """Read a token into a ring, and fold it. gates: "given", "raw" or "bounded"; overlap: as in a step of a model."""
    _, _, h, hv, k, v = SIZES[size]
    b, channel = 3, (k,) if row in ("kimi_delta", "gated_linear_channel") else ()
    given = {name: empty(b, 1, heads, width, dtype=dtype) for name, heads, width in (("q", h, k), ("k", h, k))}
    given["v"] = empty(b, 1, hv, v, dtype=dtype)
    if row not in ("linear", "delta"):
        given["log_decay"] = empty(b, 1, hv, *channel, dtype=dtype)
    if "delta" in row:
        given["beta"] = empty(b, 1, hv, dtype=dtype)
    raw: dict[str, Any] = {"raw_gates": gates != "given"}
    if gates != "given":
        raw |= {"A_log": empty(hv), "dt_bias": empty(hv, *channel), "lower_bound": -5.0 if gates == "bounded" else None}
    pool = empty(7, hv, k, v, dtype=state)
    ring = Ring(**given, **raw, state=pool, every=every, normalize_qk=True)
    where: dict[str, Any] = {"slots": empty(b, dtype="int64")} if slots else {}
    if not slots:
        ring, pool = ring.part(slice(b)), pool[:b]
    rounded = {"rounding": "stochastic", "seeds": empty(b, dtype="int64")} if state == "bfloat16" and slots else {}
    with launching.overlapping() if overlap else nullcontext():
        run_decode(**given, **raw, **where, **rounded, state=pool, normalize_qk=True, ring=ring, backend="triton")
        if overlap:  # as in a step of a model
            inputs = Inputs(**given, state=pool, A_log=raw.get("A_log"), dt_bias=raw.get("dt_bias"))
            options = Options(ring.rule, 1.0, True, raw_decay=gates != "given", raw_beta="delta" in row)
            pipeline.decode_ring(inputs, Slots(where.get("slots")), ring.tensors, options, settled=True)
    ring.fold(where.get("slots"), seeds=rounded.get("seeds"))


def decode_general(
    row: str, dtype: str, state: str, raw: bool, slots: str, decay: str, writes: int = 1, size: str = "grouped"
) -> None:  # fmt: skip
    """Run a few tokens of a rule of the general row. raw: whether q and k are normalised and the gates are raw."""
    _, _, h, hv, k, v = SIZES[size]
    b, t, several = 3, 2, (writes,) if row == "gated_delta_product" else ()
    given = {"q": empty(b, t, h, k, dtype=dtype), "k": empty(b, t, *several, h, k, dtype=dtype)}
    given["v"] = empty(b, t, *several, hv, v, dtype=dtype)
    widths = {"gated_delta_rule_2": {"erase": k, "write": v}, "diagonal_plus_low_rank": {"probe": k, "direction": k}}
    given |= {name: empty(b, t, hv, width, dtype=dtype) for name, width in widths.get(row, {}).items()}
    channel = (k,) if decay == "channel" else ()
    if decay != "none":
        given["log_decay"] = empty(b, t, hv, *channel, dtype=dtype)
        given |= {"A_log": empty(hv), "dt_bias": empty(hv, *channel)} if raw else {}
    if several:
        given["beta"] = empty(b, t, writes, hv, dtype=dtype)
    where = memories(state, slots, b, t, (hv, k, v))
    gates = raw and ("log_decay" in given or "beta" in given)
    run_decode(**given, **where, normalize_qk=raw, raw_gates=gates, backend="triton")


def layer(name: str, dtype: str, odd: bool) -> None:
    """Run an op around the rules and its backward. odd: sizes that are no powers of two, and no multiples of 8."""
    width, t = (45, 33) if odd else (2048, 300)
    if name == "short_convolution":
        x, weight = empty(2, t, width, dtype=dtype), empty(width, 3 if odd else 4, dtype=dtype)
        given = [x, weight, empty(2, width, weight.shape[1] - 1, dtype=dtype)]
    elif name == "packed_convolution":
        given = [empty(1, t, width, dtype=dtype), empty(width, 4, dtype=dtype)]
    elif name == "one_convolution":
        given = [empty(2, 1, width, dtype=dtype), empty(width, 4, dtype=dtype), empty(2, width, 3, dtype=dtype)]
    elif name == "glu":
        given = [empty(2, t, 2 * width, dtype=dtype)]
    elif name == "rotate":
        given = [empty(2, t, 4, 60 if odd else 128, dtype=dtype)]
    elif name == "features":
        given = [empty(2, t, 3 * width, dtype=dtype), empty(2, width, dtype=dtype), empty(2, width, dtype=dtype)]
    else:
        gate = [empty(2, t, 4, width, dtype=dtype)] if name == "gated_rms_norm" else []
        given = [empty(2, t, 4, width, dtype=dtype), *gate, empty(width, dtype=dtype)]
    for x in given:
        x.requires_grad_()
    calls: dict[str, Callable[[], Any]] = {
        "packed_convolution": lambda: ops.short_convolution(*given, None, empty(4, dtype="int64")),
        "one_convolution": lambda: ops.short_convolution(*given),
        "rotate": lambda: ops.rotate(*given, *(empty(t, given[0].shape[-1] // 4) for _ in range(2))),
        "features": lambda: features(*given, 3 if odd else 4),
    }
    outputs = calls.get(name, lambda: getattr(ops, name)(*given))()
    differentiated(outputs if isinstance(outputs, tuple) else (outputs,), True, given)


def step(name: str, dtype: str, rows: int, overlap: bool) -> None:
    """Run a kernel of a decoding step. overlap: whether launches begin before those before them have ended."""
    x, n = empty(rows, 2048, dtype=dtype), 4096
    weight, norm = empty(n, 2048, dtype=dtype), (empty(2048, dtype=dtype), 1e-6, True)
    convolution = empty(512, 4, dtype=dtype), empty(rows, 512, 3, dtype=dtype)
    with launching.overlapping() if overlap else nullcontext():
        if name == "convolution":
            ops.convolve_in_place(empty(rows, 512, dtype=dtype), *convolution)
            ops.convolve_in_place(empty(rows, 512, dtype=dtype), *convolution, empty(512, dtype=dtype))
        elif name == "product" and rows == 1:
            products.product_one(x, weight, norm=norm, convolution=convolution)
            products.product_one(x, weight, empty(n, dtype=dtype), residual=empty(1, n, dtype=dtype))
            products.product_one(x, weight, norm=norm, gated=True)
            low = empty(1, 128, dtype=dtype), empty(n, 128, dtype=dtype)
            products.product_pair(*low, *low)
        elif name == "product" and products.serves_few(x, weight):
            products.product_few(x, weight, convolution=convolution)
            products.product_few(x, weight, gated=True)
            products.product_few(x, weight, parts=products.parts_of(n, 2048))
        elif name == "norm":
            products.add_and_norm(x, empty(2, rows, 2048, dtype="float32"), norm)
            products.add_and_norm(x, empty(1, rows, 2048, dtype="float32"), None)
            ops.rms_norm(x, norm[0])
            ops.glu(x)
        elif name == "cached":
            keys, values = (empty(rows, 500, 2, 128, dtype=dtype) for _ in range(2))
            for t in (1, 3):
                q, lengths = empty(rows, t, 8, 128, dtype=dtype), empty(rows, dtype="int64")
                cached.cached_attention(q, keys, values, lengths, 0.1, empty(rows, t, 1024, dtype=dtype))
        elif name == "latent":
            for t, rank, shared in ((1, 512, 64), (3, 512, 64), (2, 20, 6), (1, 64, 0)):
                q, r = empty(rows, t, 32, rank, dtype=dtype), empty(rows, t, 32, shared, dtype=dtype)
                cache, lengths = empty(rows, 500, 1, rank + shared, dtype=dtype), empty(rows, dtype="int64")
                latent.latent_attention(q, r, cache, lengths, 0.1)
                for turning in (None, empty(shared // 2)) if shared else (None,):
                    own, width = empty(rows, rank + shared, dtype=dtype), empty(rank, dtype=dtype)
                    parts = own.split((rank, shared), -1)
                    latent.place(r[:, :1], *parts, (width, 1e-6, False), turning, lengths, cache)
        elif name == "piece":
            for key, value, shared in ((128, 128, 64), (256, 256, 0), (9, 7, 4)):
                q, n = empty(rows, 300, 4, key + shared, dtype=dtype), 500
                k, v = empty(rows, n, 4, key, dtype=dtype), empty(rows, n, 4, value, dtype=dtype)
                p = empty(rows, n, 1, shared, dtype=dtype) if shared else None
                blocks = [pieces.Block(k, v, p, first) for first in (0, n, 2 * n)]
                pieces.piece_attention(q, blocks, 3 * n, 3 * n, 0.1)
                pieces.piece_attention(
                    q[:1], blocks, 3 * n, empty(rows, dtype="int64"), 0.1, empty(rows + 1, dtype="int64"), 90
                )
        elif name == "square":
            for heads, size in ((4, 128), (2, 36)):
                found, kept = empty(rows, heads, 300, size, dtype=dtype), empty(rows, 300, heads, size, dtype="float32")
                sums, logs = (found, empty(rows, heads, 300)), empty(rows, heads, 300)
                squares.join(sums, sums, kept)
                squares.join((kept.transpose(1, 2), logs), sums, empty(rows, 200, heads, size, dtype=dtype), 50)
                own, shared = empty(rows, 20, heads, size, dtype=dtype), empty(rows, 20, 1, 24, dtype=dtype)
                around_attention.keys_of(own, shared)
                around_attention.gated(own.flatten(2), own.flatten(2))
        elif name == "place":
            q, k, v = (empty(rows, 1, heads, 128, dtype=dtype) for heads in (8, 2, 2))
            caches = [empty(rows, 500, 2, 128, dtype=dtype) for _ in range(2)]
            lengths, width = empty(rows, dtype="int64"), empty(128, dtype=dtype)
            token.place(q, k, v, (width, width, 1e-6, True), empty(32), lengths, *caches)
            token.place(q, k, v, None, None, lengths, *caches)
        elif name == "mix":
            for state, channel, silu in (("float32", (), True), ("bfloat16", (128,), False)):
                q, k, v = (empty(rows, 1, heads, 128, dtype=dtype) for heads in (2, 2, 8))
                gate, write = empty(rows, 1, 8, *channel, dtype=dtype), empty(rows, 1, 8, dtype=dtype)
                memory = empty(rows, 8, 128, 128, dtype=state)
                parameters = {"A_log": empty(8), "dt_bias": empty(8, *channel)}
                inputs = Inputs(q, k, v, log_decay=gate, beta=write, state=memory, **parameters)
                token.mix(
                    inputs, token.Token(True, "speed", 0.1),
                    (empty(rows, 1, 1024, dtype=dtype), empty(128, dtype=dtype), 1e-6, silu),
                    seeds=empty(rows, dtype="int64") if state == "bfloat16" else None,
                )  # fmt: skip
                inputs = inputs.replace(log_decay=gate[..., 0] if channel else gate, beta=None)
                inputs = inputs.replace(dt_bias=empty(8))
                found = token.mix(inputs, token.Token(False, "step", 1.0), None, empty(8, dtype=dtype))
                z, over = empty(rows, 1, 1024, dtype=dtype), empty(1024, dtype=dtype)
                own = GatedNorm(z, over[:128], 1e-6, silu)
                raw = Options(GATED_DELTA_2, 0.1, True, raw_decay=True)
                parts = inputs.replace(erase=gate_of(rows, dtype), write=gate_of(rows, dtype))
                decode_writes(parts, Slots(), raw, settled=True, logits=True, norm=own if rows == 1 else None)
                k, v, write = (
                    empty(rows, 1, 3, *size, dtype=dtype) for size in ((2, 128), (8, 128), (8,))
                )  # fmt: skip
                several = inputs.replace(k=k, v=v, beta=write, log_decay=gate[..., 0] if channel else gate)
                raw = raw._replace(rule=GATED_DELTA_PRODUCT, raw_beta=True)
                decode_writes(several, Slots(), raw, settled=True, norm=own if rows == 1 else None)
                token.norm_groups(found, z, over, groups=2, eps=1e-6, gate_first=silu)


def gate_of(rows: int, dtype: str) -> Tensor:
    """Return a gate per channel of 8 heads, one column of a wider projection."""
    return empty(rows, 1, 3072, dtype=dtype)[..., :1024].unflatten(-1, (8, 128))


def codes_of(form: str, *shape: int) -> quantised_products.Codes:
    """Return a weight in codes."""
    kept = FORMATS[form]
    parts = zip(kept.shapes(shape), (kept.codes_dtype, kept.scales_dtype), strict=True)
    return quantised_products.Codes(*(empty(*s, dtype=d) for s, d in parts), shape[-2], kept.kernel)


def quantised(form: str, dtype: str, rows: int, overlap: bool) -> None:
    """Run all products with a weight of few bits."""
    n, k, experts = 512, 1024, 4

    def codes(*first: int) -> quantised_products.Codes:
        return codes_of(form, *first, n, k)

    x, weight = empty(rows, k, dtype=dtype), codes()
    norm = (empty(k, dtype=dtype), 1e-6, True) if quantised_products.takes_norm(x) else None
    convolution = empty(256, 4, dtype=dtype), empty(rows, 256, 3, dtype=dtype)
    with launching.overlapping() if overlap else nullcontext():
        if quantised_products.serves(x, weight):
            quantised_products.multiply(
                x, weight, empty(n, dtype=dtype), norm=norm, residual=empty(rows, n, dtype=dtype)
            )
            quantised_products.multiply(x, weight, convolution=convolution)
            quantised_products.multiply(x, weight, gated=True)
            quantised_products.multiply(x, weight, parts=quantised_products.parts_of(x, weight))
            chosen = empty(2 * rows, dtype="int64")
            quantised_products.multiply_experts(x, codes(experts), quantised_products.Pairs(chosen, 2), gated=True)
        quantised_products.decoded(weight, x.dtype)
        quantised_products.decoded(codes(experts), x.dtype)
        quantised_products.decoded_rows(weight, empty(3, 5, dtype="int64"), x.dtype)
        if form == "fp8" and launching.is_hopper(x.device):  # the others have no such numbers
            quantised_products.round_rows(x)


def experts(dtype: str, rows: int, scores: str, overlap: bool, form: str | None = None) -> None:
    """Run a mixture of experts; form: that of the weights of its experts."""
    kind = "swiglu" if scores == "softmax" else "relu2"
    groups = {} if scores == "softmax" else {"groups": 4, "active_groups": 2, "scale": 2.5}
    with torch.device("meta"):
        layer = MixtureOfExperts(
            256, 36, 4, 192, shared_size=192, shared_gate=scores == "softmax", scores=scores, kind=kind, **groups
        )
    layer = layer.to(getattr(torch, dtype)).requires_grad_(False)
    x = empty(rows, 256, dtype=dtype)
    in_kernels = mock.patch.object(MixtureOfExperts, "run_in_torch", None)  # they serve it
    with launching.overlapping() if overlap else nullcontext(), in_kernels:
        if form is None:
            layer(x)
            if rows == 1:
                layer.after(RMSNorm(256).requires_grad_(False), x)
        else:
            weights = (codes_of(form, *y.shape) for y in (layer.experts_gate_up, layer.experts_down))
            how = routing.Routing(4, scores == "sigmoid", **groups)
            router = mixture.Router(layer.router.weight, layer.router_bias, None, how)
            made = mixture.Experts(*weights, kind)
            outside = empty(rows, 256, dtype=dtype)
            if mixture.takes_shared(x, coded=True):
                own, outside = (codes_of(form, *y.shape[1:]) for y in (layer.experts_gate_up, layer.experts_down)), None
                made = made._replace(shared=tuple(own))
            assert mixture.serves(x, router, made)
            mixture.mix(x, router, made, outside)
    if form is None and dtype == "bfloat16":
        grouping.sort(empty(rows, 4, dtype="int32"), 36)
        groups, tile = (
            grouping.group(empty(rows, 4, dtype="int32"), 24, 160, True),
            mixture.tile(128, 64, 64, 8, 3, rest=32),
        )
        hidden, y = (empty(groups.blocks.numel() * 160, n, dtype=dtype) for n in (192, 256))
        weights = products_of_experts.Weights(layer.experts_gate_up, None, kind)
        products_of_experts.multiply(x, weights, groups, hidden, every=4, tile=tile, placed=True)
        if launching.is_hopper(x.device):
            products_of_experts.leave(hidden, layer.experts_down, groups, y, rest=32)


def memory(name: str, backward: bool, d: int) -> None:
    """Run a memory that learns, and its backward if it is wanted."""
    b, t, h = 2, 70, 2
    q, k, v = (empty(b, t, h, d) for _ in range(3))
    rate, options = [empty(b, t, h) for _ in range(3)], {}
    if name.startswith("ttt"):
        widths = [d, d] if name == "ttt_linear" else [d, 4 * d, d]
        state = {}
        for i, (a, c) in enumerate(pairwise(widths), 1):
            state |= {f"weight{i}": empty(h, a, c), f"bias{i}": empty(h, c)}
        run, given = ttt, [q, k, v, rate[0], empty(h, d), empty(h, d)]
    elif name.startswith("titans"):
        sizes = (d, d) if name == "titans_linear" else (d, 2 * d, d)
        state = titans_state([empty(h, *pair) for pair in pairwise(sizes)], b)
        run, given = titans, [q, k, v, *rate]
        options = {} if name == "titans_linear" else {"clip": 1.0, "residual": True, "norm": True}
    else:
        state = lact_state([empty(h, *shape) for shape in ((2 * d, d), (d, 2 * d), (2 * d, d))], b)
        run, given, options = lact, [q, k, v, empty(b, t, h, 3), rate[0]], {"chunk": 32}
    state = {name: x for name, x in state.items() if name != "position"}  # positions would be read from the device
    leaves = [*given, *state.values()]
    for x in leaves:
        x.requires_grad_(backward)
    y, after = run(*given, state, **options)
    differentiated([y, *after.values()], backward, leaves)


@triton.jit
def move_pointer(x, GIVEN: tl.constexpr):
    """Move a pointer that is not given, and then store nothing."""
    x += tl.program_id(0)
    if GIVEN:
        tl.store(x, 0)


def broken() -> None:
    """Launch a kernel that the interpreter runs, and that does not compile."""
    launching.start(move_pointer, (1,))(None, GIVEN=False)


CALLS = {
    f.__name__: f
    for f in (
        *(rule, general, ahead, decode, decode_ring, decode_general, layer, step, quantised, experts, memory, broken),
        whole_step,
    )
}

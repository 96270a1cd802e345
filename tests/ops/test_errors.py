"""Wrong calls: each raises its exact message (argument, expected, got, remedy) and changes nothing."""

from collections.abc import Callable

import pytest
import torch
from torch import zeros

import lineate
from tests.support.cases import (
    DELTA,
    FORWARD_PATHS,
    GATED_DELTA,
    GATED_LINEAR,
    GATED_LINEAR_CHANNEL,
    KIMI_DELTA,
    LINEAR,
    ROWS,
    Row,
    Shape,
    convert,
    draw,
    interpreted,
    needs_native,
)

SHAPE = Shape(2, 6, 2, 4, 3, 5)  # b, t, h, hv, k, v
META = torch.device("meta")
Arguments = dict[str, object]


def arguments(row: Row = GATED_DELTA, **changes: object) -> Arguments:
    return {**convert(draw(row, SHAPE), torch.float32), **changes}


def packed(**changes: object) -> Arguments:
    """Return the first row of the batch as packed sequences."""
    return {**{name: x[:1] for name, x in arguments().items() if name != "state"}, **changes}


def cache(**changes: object) -> Arguments:
    """Return a call of softmax attention with a cache of itself, changed."""
    own = arguments(LINEAR)
    keys, values, ends = (
        changes.pop(name, own.get(which)) for name, which in (("keys", "k"), ("values", "v"), ("cached_ends", None))
    )
    del own["state"]
    return {**own, "state": lineate.KeyValueCache(keys, values, ends), **changes}


def one_row(call: Arguments) -> Arguments:
    return {name: x[:1] if name in "qkv" else x for name, x in call.items()}


def packed_qkv() -> Arguments:
    return {name: x for name, x in packed().items() if name in "qkv"}


def raw(**changes: object) -> Arguments:
    """Return the arguments of fused_delta_rule."""
    own = arguments()
    gates = {"gate": own.pop("log_decay"), "write": own.pop("beta"), "A_log": zeros(4), "dt_bias": zeros(4)}
    return {**own, **gates, **changes}


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


TRITON = "backend='triton' cannot serve this call: {}; use backend='torch'"


# Keywords that every op takes, and the messages for wrong values.
KEYWORDS: list[tuple[str, Arguments, type[Exception], str]] = [
    ("unknown form", {"form": "fast"}, ValueError,
     "form must be one of 'auto', 'recurrent', 'chunkwise', 'parallel', got 'fast'"),
    ("form None", {"form": None}, ValueError,
     "form must be one of 'auto', 'recurrent', 'chunkwise', 'parallel', got None"),
    ("unknown backend", {"backend": "cuda"}, ValueError,
     "backend must be one of 'auto', 'torch', 'native', 'triton', got 'cuda'"),
    ("triton has no parallel form", {"backend": "triton", "form": "parallel"}, ValueError,
     "backend='triton' cannot serve this call: the triton backend has no parallel form; use backend='torch'"),
    ("triton in other chunks", {"backend": "triton", "form": "chunkwise", "chunk_size": 32}, ValueError,
     "backend='triton' cannot serve this call: the triton kernels work in chunks of 64, got chunk_size=32; "
     "use backend='torch'"),
    ("native has no parallel form", {"backend": "native", "form": "parallel"}, ValueError,
     "backend='native' cannot serve this call: the native backend has no parallel form; use backend='torch'"),
    ("chunk_size 0", {"chunk_size": 0}, ValueError,
     "chunk_size must be at least 1, got 0; None takes the backend's own"),
    ("chunk_size negative", {"chunk_size": -64}, ValueError,
     "chunk_size must be at least 1, got -64; None takes the backend's own"),
    ("chunk_size float", {"chunk_size": 64.0}, TypeError, "chunk_size must be an int or None, got float"),
    ("chunk_size bool", {"chunk_size": True}, TypeError, "chunk_size must be an int or None, got bool"),
    ("scale str", {"scale": "1"}, TypeError, "scale must be a number or None (1/sqrt(k)), got str"),
    ("scale bool", {"scale": True}, TypeError, "scale must be a number or None (1/sqrt(k)), got bool"),
    ("scale tensor", {"scale": torch.ones(())}, TypeError, "scale must be a number or None (1/sqrt(k)), got Tensor"),
    ("scale inf", {"scale": float("inf")}, ValueError, "scale must be finite, got inf"),
    ("scale nan", {"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    ("normalize_qk int", {"normalize_qk": 1}, TypeError, "normalize_qk must be a bool, got int"),
    ("normalize_qk str", {"normalize_qk": "yes"}, TypeError, "normalize_qk must be a bool, got str"),
    ("normalize_qk None", {"normalize_qk": None}, TypeError, "normalize_qk must be a bool, got NoneType"),
    ("state list", {"state": [0.0]}, TypeError, "state must be a torch.Tensor or None, got list"),
    ("state transposed", {"state": zeros(2, 4, 5, 3)}, ValueError,
     "state must have shape (b, hv, k, v) = (2, 4, 3, 5), got (2, 4, 5, 3)"),
    ("state per key head", {"state": zeros(2, 2, 3, 5)}, ValueError,
     "state must have shape (b, hv, k, v) = (2, 4, 3, 5), got (2, 2, 3, 5)"),
    ("state of another batch", {"state": zeros(1, 4, 3, 5)}, ValueError,
     "state must have shape (b, hv, k, v) = (2, 4, 3, 5), got (1, 4, 3, 5)"),
    ("state int", {"state": zeros(2, 4, 3, 5, dtype=torch.int64)}, ValueError,
     "state must be float32 for float32 inputs, got int64; convert it with .to(torch.float32)"),
    ("state elsewhere", {"state": zeros(2, 4, 3, 5, device=META)}, ValueError,
     "state must be on the device of q, cpu, got meta; move it with .to(q.device)"),
    ("cu_seqlens of a batch", {"cu_seqlens": ints(0, 6)}, ValueError,
     "cu_seqlens needs the sequences packed into one row, b = 1, got b = 2; reshape to (1, b * t, ...)"),
    ("q list", {"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
    ("k None", {"k": None}, TypeError, "k must be a torch.Tensor, got NoneType"),
    ("v float", {"v": 1.0}, TypeError, "v must be a torch.Tensor, got float"),
    ("q of 3 dimensions", {"q": zeros(2, 6, 3)}, ValueError,
     "q must have 4 dimensions (b, t, h, k), got shape (2, 6, 3)"),
    ("v of 3 dimensions", {"v": zeros(2, 6, 20)}, ValueError,
     "v must have 4 dimensions (b, t, hv, v), got shape (2, 6, 20)"),
    ("q int", {"q": zeros(2, 6, 2, 3, dtype=torch.int64)}, ValueError,
     "q must be float64, float32, bfloat16 or float16, got int64; convert it with .float()"),
    ("k of another key dim", {"k": zeros(2, 6, 2, 4)}, ValueError,
     "k must have the shape of q, (b, t, h, k) = (2, 6, 2, 3), got (2, 6, 2, 4)"),
    ("v of other tokens", {"v": zeros(2, 7, 4, 5)}, ValueError,
     "v must have shape (b, t, hv, v) with (b, t) = (2, 6), got (2, 7, 4, 5)"),
    ("v of another batch", {"v": zeros(3, 6, 4, 5)}, ValueError,
     "v must have shape (b, t, hv, v) with (b, t) = (2, 6), got (3, 6, 4, 5)"),
    ("hv no multiple of h", {"v": zeros(2, 6, 3, 5)}, ValueError,
     "v must have a multiple of h = 2 value heads (each key head serves hv / h of them), got hv = 3"),
    ("k float8", {"k": zeros(2, 6, 2, 3).to(torch.float8_e5m2)}, ValueError,
     "k must be float64, float32, bfloat16 or float16, got float8_e5m2; convert it with .float()"),
    ("k elsewhere", {"k": zeros(2, 6, 2, 3, device=META)}, ValueError,
     "k must be on the device of q, cpu, got meta; move it with .to(q.device)"),
    ("v elsewhere", {"v": zeros(2, 6, 4, 5, device=META)}, ValueError,
     "v must be on the device of q, cpu, got meta; move it with .to(q.device)"),
]  # fmt: skip

Op = Callable[..., object]
# Calls that only some ops can get wrong.
CALLS: list[tuple[str, Op, Arguments, type[Exception], str]] = [
    ("no tokens", lineate.linear_attention, {"q": zeros(2, 0, 2, 3), "k": zeros(2, 0, 2, 3), "v": zeros(2, 0, 4, 5)},
     ValueError, "every dimension must be at least 1, got q (2, 0, 2, 3) and v (2, 0, 4, 5)"),
    ("keys of another dtype than the queries of softmax", lineate.softmax_attention,
     {**arguments(LINEAR, state=None), "k": zeros(2, 6, 2, 3, dtype=torch.float64)}, ValueError,
     "k must have the dtype of q, float32, got float64; convert with .to(q.dtype)"),
    # log_decay
    ("log_decay list", GATED_DELTA.op, arguments(log_decay=[0.0]), TypeError,
     "log_decay must be a torch.Tensor, got list"),
    ("log_decay int", GATED_DELTA.op, arguments(log_decay=zeros(2, 6, 4, dtype=torch.int32)), ValueError,
     "log_decay must be float64, float32, bfloat16 or float16, got int32"),
    ("log_decay elsewhere", GATED_DELTA.op, arguments(log_decay=zeros(2, 6, 4, device=META)), ValueError,
     "log_decay must be on the device of q, cpu, got meta; move it with .to(q.device)"),
    ("log_decay per key head", GATED_DELTA.op, arguments(log_decay=zeros(2, 6, 2)), ValueError,
     "log_decay must have shape (b, t, hv) = (2, 6, 4), got (2, 6, 2)"),
    ("log_decay per channel to gated_delta_rule", GATED_DELTA.op, arguments(log_decay=zeros(2, 6, 4, 3)), ValueError,
     "log_decay must have shape (b, t, hv) = (2, 6, 4), got (2, 6, 4, 3); "
     "for a decay per key channel use kimi_delta_attention"),
    ("log_decay per head to kimi_delta_attention", KIMI_DELTA.op, arguments(KIMI_DELTA, log_decay=zeros(2, 6, 4)),
     ValueError, "log_decay must have shape (b, t, hv, k) = (2, 6, 4, 3), got (2, 6, 4); "
     "for a decay per head use gated_delta_rule"),
    ("log_decay per value channel", GATED_LINEAR.op, arguments(GATED_LINEAR, log_decay=zeros(2, 6, 4, 5)), ValueError,
     "log_decay must have shape (b, t, hv) = (2, 6, 4) or (b, t, hv, k) = (2, 6, 4, 3), got (2, 6, 4, 5)"),
    ("log_decay of other heads", GATED_LINEAR.op, arguments(GATED_LINEAR, log_decay=zeros(2)), ValueError,
     "log_decay must have shape (b, t, hv) = (2, 6, 4) or (b, t, hv, k) = (2, 6, 4, 3), got (2,); "
     "a constant decay of each head has shape (hv,) = (4,)"),
    ("a constant log_decay to kimi_delta_attention", KIMI_DELTA.op, arguments(KIMI_DELTA, log_decay=zeros(4)),
     ValueError, "log_decay must have shape (b, t, hv, k) = (2, 6, 4, 3), got (4,); "
     "a constant decay of each head has shape (hv,) = (4,), and is for gated_delta_rule"),
    ("log_decay positive", GATED_DELTA.op, arguments(log_decay=zeros(2, 6, 4) + 0.25), ValueError,
     "log_decay must be <= 0 (natural log of a decay in [0, 1]), got a maximum of 0.25; "
     "pass log(decay), or -exp(A_log) * softplus(x)"),
    ("log_decay positive once", KIMI_DELTA.op,
     arguments(KIMI_DELTA, log_decay=zeros(2, 6, 4, 3).index_fill(1, ints(3), 1e-3)), ValueError,
     "log_decay must be <= 0 (natural log of a decay in [0, 1]), got a maximum of 0.001; "
     "pass log(decay), or -exp(A_log) * softplus(x)"),
    # beta
    ("beta float", DELTA.op, arguments(DELTA, beta=0.5), TypeError, "beta must be a torch.Tensor, got float"),
    ("beta bool", DELTA.op, arguments(DELTA, beta=zeros(2, 6, 4, dtype=torch.bool)), ValueError,
     "beta must be float64, float32, bfloat16 or float16, got bool"),
    ("beta elsewhere", DELTA.op, arguments(DELTA, beta=zeros(2, 6, 4, device=META)), ValueError,
     "beta must be on the device of q, cpu, got meta; move it with .to(q.device)"),
    ("beta per key head", GATED_DELTA.op, arguments(beta=zeros(2, 6, 2)), ValueError,
     "beta must have shape (b, t, hv) = (2, 6, 4) or (b, t, hv, v) = (2, 6, 4, 5), got (2, 6, 2)"),
    ("beta per key channel", GATED_DELTA.op, arguments(beta=zeros(2, 6, 4, 3)), ValueError,
     "beta must have shape (b, t, hv) = (2, 6, 4) or (b, t, hv, v) = (2, 6, 4, 5), got (2, 6, 4, 3)"),
    ("beta per value channel, native", DELTA.op, arguments(DELTA, beta=zeros(2, 6, 4, 5), backend="native"),
     ValueError, "backend='native' cannot serve this call: the native backend takes no beta per value channel; "
     "use backend='torch'"),
    # backend
    ("native float64", GATED_DELTA.op, {**draw(GATED_DELTA, SHAPE), "backend": "native"}, ValueError,
     "backend='native' cannot serve this call: the native backend computes in float32, got float64 inputs; "
     "use backend='torch'"),
    ("native elsewhere", lineate.linear_attention,
     {**{name: zeros(1, 3, 2, 2, device=META) for name in "qkv"}, "backend": "native"}, ValueError,
     "backend='native' cannot serve this call: the native backend needs CPU tensors, got meta; use backend='torch'"),
    ("triton float64", GATED_DELTA.op, {**draw(GATED_DELTA, SHAPE), "backend": "triton"}, ValueError,
     TRITON.format("triton's interpreter computes float32 only, got float64")),
    ("triton's interpreter in bfloat16", GATED_DELTA.op,
     {**convert(draw(GATED_DELTA, SHAPE), torch.bfloat16), "backend": "triton"}, ValueError,
     TRITON.format("triton's interpreter computes float32 only, got bfloat16")),
    ("triton elsewhere", lineate.linear_attention,
     {**{name: zeros(1, 3, 2, 2, device=META) for name in "qkv"}, "backend": "triton"}, ValueError,
     TRITON.format("the triton kernels need CUDA tensors, got meta")),
    ("triton, wide keys", DELTA.op,
     {**convert(draw(DELTA, Shape(1, 9, 1, 1, 257, 2)), torch.float32), "backend": "triton"}, ValueError,
     TRITON.format("the triton kernels take k and v up to 256, got 257")),
    ("triton, wide values", KIMI_DELTA.op,
     {**convert(draw(KIMI_DELTA, Shape(1, 1, 1, 1, 2, 300)), torch.float32), "backend": "triton"}, ValueError,
     TRITON.format("the triton kernels take k and v up to 256, got 300")),
    ("triton, beta per value channel, chunkwise", DELTA.op,
     arguments(DELTA, beta=zeros(2, 6, 4, 5), backend="triton", form="chunkwise"), ValueError,
     TRITON.format("the triton chunkwise form takes no beta per value channel")),
    ("triton log_decay positive", GATED_DELTA.op,
     arguments(log_decay=zeros(2, 6, 4) + 0.25, backend="triton", form="chunkwise"), ValueError,
     "log_decay must be <= 0 (natural log of a decay in [0, 1]), got a maximum of 0.25; "
     "pass log(decay), or -exp(A_log) * softplus(x)"),
    # cu_seqlens
    ("cu_seqlens list", GATED_DELTA.op, packed(cu_seqlens=[0, 6]), TypeError,
     "cu_seqlens must be a torch.Tensor, got list; pass torch.tensor([0, ..., t]) with the cumulative lengths"),
    ("cu_seqlens float", GATED_DELTA.op, packed(cu_seqlens=torch.tensor([0.0, 6.0])), ValueError,
     "cu_seqlens must be int32 or int64, got float32"),
    ("cu_seqlens of 2 dimensions", GATED_DELTA.op, packed(cu_seqlens=ints(0, 6)[None]), ValueError,
     "cu_seqlens must have shape (n_seqs + 1,) with at least 2 entries, got (1, 2)"),
    ("cu_seqlens of one entry", GATED_DELTA.op, packed(cu_seqlens=ints(0)), ValueError,
     "cu_seqlens must have shape (n_seqs + 1,) with at least 2 entries, got (1,)"),
    ("cu_seqlens without 0", GATED_DELTA.op, packed(cu_seqlens=ints(1, 6)), ValueError,
     "cu_seqlens must start at 0 and end at t = 6, got 1 and 6"),
    ("cu_seqlens without t", GATED_DELTA.op, packed(cu_seqlens=ints(0, 5)), ValueError,
     "cu_seqlens must start at 0 and end at t = 6, got 0 and 5"),
    ("cu_seqlens past t", GATED_DELTA.op, packed(cu_seqlens=ints(0, 7)), ValueError,
     "cu_seqlens must start at 0 and end at t = 6, got 0 and 7"),
    ("cu_seqlens decreasing", GATED_DELTA.op, packed(cu_seqlens=ints(0, 4, 2, 6)), ValueError,
     "cu_seqlens must not decrease, got [0, 4, 2, 6]"),
    ("cu_seqlens long and decreasing", GATED_DELTA.op, packed(cu_seqlens=ints(0, 2, 1, *[4] * 20, 6)), ValueError,
     "cu_seqlens must not decrease, got [0, 2, 1, 4, 4, 4, 4, 4, 4, 4, 4, ...]"),
    ("one state, two sequences", GATED_DELTA.op, packed(cu_seqlens=ints(0, 2, 6), state=zeros(1, 4, 3, 5)), ValueError,
     "state must have shape (n_seqs, hv, k, v) = (2, 4, 3, 5), got (1, 4, 3, 5)"),
    # linear attention
    ("normalize int", lineate.linear_attention, arguments(LINEAR, normalize=1), TypeError,
     "normalize must be a bool, got int"),
    ("unknown feature map", lineate.linear_attention, arguments(LINEAR, feature_map="relu"), ValueError,
     "feature_map must be one of 'identity', 'elu+1', got 'relu'"),
    ("state without the key sum", lineate.linear_attention, arguments(LINEAR, normalize=True), ValueError,
     "state must have shape (b, hv, k, v) = (2, 4, 3, 6), got (2, 4, 3, 5)"),
    # raw gates
    ("raw gate int", lineate.fused_delta_rule, raw(gate=zeros(2, 6, 4, dtype=torch.int32)), ValueError,
     "gate must be float64, float32, bfloat16 or float16, got int32; convert it with .float()"),
    ("raw gate per key head", lineate.fused_delta_rule, raw(gate=zeros(2, 6, 2)), ValueError,
     "gate must have shape (b, t, hv) = (2, 6, 4) or (b, t, hv, k) = (2, 6, 4, 3), got (2, 6, 2)"),
    ("raw gate per value channel", lineate.fused_delta_rule, raw(gate=zeros(2, 6, 4, 5)), ValueError,
     "gate must have shape (b, t, hv) = (2, 6, 4) or (b, t, hv, k) = (2, 6, 4, 3), got (2, 6, 4, 5)"),
    ("raw gate float8", lineate.fused_delta_rule, raw(gate=zeros(2, 6, 4).to(torch.float8_e5m2)), ValueError,
     "gate must be float64, float32, bfloat16 or float16, got float8_e5m2; convert it with .float()"),
    ("raw gate elsewhere", lineate.fused_delta_rule, raw(gate=zeros(2, 6, 4, device=META)), ValueError,
     "gate must be on the device of q, cpu, got meta; move it with .to(q.device)"),
    ("write bool", lineate.fused_delta_rule, raw(write=zeros(2, 6, 4, dtype=torch.bool)), ValueError,
     "write must be float64, float32, bfloat16 or float16, got bool; convert it with .float()"),
    ("write per key head", lineate.fused_delta_rule, raw(write=zeros(2, 6, 2)), ValueError,
     "write must have shape (b, t, hv) = (2, 6, 4), got (2, 6, 2)"),
    ("write per value channel", lineate.fused_delta_rule, raw(write=zeros(2, 6, 4, 5)), ValueError,
     "write must have shape (b, t, hv) = (2, 6, 4), got (2, 6, 4, 5)"),
    ("A_log float", lineate.fused_delta_rule, raw(A_log=0.0), TypeError, "A_log must be a torch.Tensor, got float"),
    ("A_log int", lineate.fused_delta_rule, raw(A_log=ints(1, 2, 3, 4)), ValueError,
     "A_log must be float64, float32, bfloat16 or float16, got int64; convert it with .float()"),
    ("A_log per key head", lineate.fused_delta_rule, raw(A_log=zeros(2)), ValueError,
     "A_log must have shape (hv,) = (4,), got (2,)"),
    ("A_log of 2 dimensions", lineate.fused_delta_rule, raw(A_log=zeros(4, 1)), ValueError,
     "A_log must have shape (hv,) = (4,), got (4, 1)"),
    ("dt_bias list", lineate.fused_delta_rule, raw(dt_bias=[0.0] * 4), TypeError,
     "dt_bias must be a torch.Tensor, got list"),
    ("dt_bias int", lineate.fused_delta_rule, raw(dt_bias=ints(1, 2, 3, 4)), ValueError,
     "dt_bias must be float64, float32, bfloat16 or float16, got int64; convert it with .float()"),
    ("dt_bias per channel of a gate per head", lineate.fused_delta_rule, raw(dt_bias=zeros(4, 3)), ValueError,
     "dt_bias must have shape (hv,) = (4,), got (4, 3)"),
    ("dt_bias of a key channel", lineate.fused_delta_rule,
     raw(gate=zeros(2, 6, 4, 3), dt_bias=zeros(3)), ValueError,
     "dt_bias must have shape (hv,) = (4,) or (hv, k) = (4, 3) or (hv * k,) = (12,), got (3,)"),
    ("beta_scale str", lineate.fused_delta_rule, raw(beta_scale="2"), TypeError,
     "beta_scale must be a number, got str"),
    ("beta_scale bool", lineate.fused_delta_rule, raw(beta_scale=True), TypeError,
     "beta_scale must be a number, got bool"),
    ("beta_scale tensor", lineate.fused_delta_rule, raw(beta_scale=torch.ones(())), TypeError,
     "beta_scale must be a number, got Tensor"),
    ("beta_scale 0", lineate.fused_delta_rule, raw(beta_scale=0), ValueError,
     "beta_scale must be finite and above 0, got 0; 1 and 2 are usual"),
    ("beta_scale negative", lineate.fused_delta_rule, raw(beta_scale=-1.0), ValueError,
     "beta_scale must be finite and above 0, got -1.0; 1 and 2 are usual"),
    ("beta_scale inf", lineate.fused_delta_rule, raw(beta_scale=float("inf")), ValueError,
     "beta_scale must be finite and above 0, got inf; 1 and 2 are usual"),
    ("beta_scale nan", lineate.fused_delta_rule, raw(beta_scale=float("nan")), ValueError,
     "beta_scale must be finite and above 0, got nan; 1 and 2 are usual"),
    ("gate twice", lineate.fused_delta_rule, raw(log_decay=zeros(2, 6, 4)), ValueError,
     "gate must be None if log_decay is given, got both; pass one of them"),
    ("write twice", lineate.fused_delta_rule, raw(beta=zeros(2, 6, 4)), ValueError,
     "write must be None if beta is given, got both; pass one of them"),
    ("A_log of log_decay", lineate.fused_delta_rule, raw(gate=None, log_decay=zeros(2, 6, 4)), ValueError,
     "A_log is for a raw gate, got log_decay itself; pass gate, or leave A_log None"),
    ("beta_scale of beta", lineate.fused_delta_rule, raw(write=None, beta=zeros(2, 6, 4), beta_scale=2.0), ValueError,
     "beta_scale is for a raw logit, got 2.0 and beta itself; multiply beta by it"),
    ("A_log None", lineate.fused_delta_rule, raw(A_log=None), TypeError, "A_log must be a torch.Tensor, got NoneType"),
    ("lower_bound str", lineate.fused_delta_rule, raw(lower_bound="-5"), TypeError,
     "lower_bound must be a number, got str"),
    ("lower_bound tensor", lineate.fused_delta_rule, raw(lower_bound=-torch.ones(())), TypeError,
     "lower_bound must be a number, got Tensor"),
    ("lower_bound positive", lineate.fused_delta_rule, raw(lower_bound=5.0), ValueError,
     "lower_bound must be finite and below 0, got 5.0; -5 is usual"),
    ("lower_bound 0", lineate.fused_delta_rule, raw(lower_bound=0), ValueError,
     "lower_bound must be finite and below 0, got 0; -5 is usual"),
    ("lower_bound -inf", lineate.fused_delta_rule, raw(lower_bound=-float("inf")), ValueError,
     "lower_bound must be finite and below 0, got -inf; -5 is usual"),
    ("lower_bound nan", lineate.fused_delta_rule, raw(lower_bound=float("nan")), ValueError,
     "lower_bound must be finite and below 0, got nan; -5 is usual"),
    ("fused backend", lineate.fused_delta_rule, raw(backend="cuda"), ValueError,
     "backend must be one of 'auto', 'torch', 'native', 'triton', got 'cuda'"),
    ("fused scale", lineate.fused_delta_rule, raw(scale="1"), TypeError,
     "scale must be a number or None (1/sqrt(k)), got str"),
    ("fused normalize_qk", lineate.fused_delta_rule, raw(normalize_qk=1), TypeError,
     "normalize_qk must be a bool, got int"),
    ("fused state", lineate.fused_delta_rule, raw(state=zeros(2, 4, 5, 3)), ValueError,
     "state must have shape (b, hv, k, v) = (2, 4, 3, 5), got (2, 4, 5, 3)"),
    ("fused cu_seqlens", lineate.fused_delta_rule, raw(cu_seqlens=ints(0, 6)), ValueError,
     "cu_seqlens needs the sequences packed into one row, b = 1, got b = 2; reshape to (1, b * t, ...)"),
    ("fused v", lineate.fused_delta_rule, raw(v=zeros(2, 6, 3, 5)), ValueError,
     "v must have a multiple of h = 2 value heads (each key head serves hv / h of them), got hv = 3"),
    ("fused triton, wide", lineate.fused_delta_rule,
     {"q": zeros(1, 6, 1, 260), "k": zeros(1, 6, 1, 260), "v": zeros(1, 6, 1, 2), "gate": zeros(1, 6, 1),
      "write": zeros(1, 6, 1), "A_log": zeros(1), "backend": "triton"}, ValueError,
     TRITON.format("the triton kernels take k and v up to 256, got 260")),
    ("fused form", lineate.fused_delta_rule, raw(form="recurrent"), TypeError,
     "fused_delta_rule() got an unexpected keyword argument 'form'"),
    # softmax attention
    ("cache tensor", lineate.softmax_attention, arguments(LINEAR), TypeError,
     "state must be a lineate.KeyValueCache or None, got Tensor"),
    ("cache of other key heads", lineate.softmax_attention, cache(keys=zeros(2, 6, 1, 3)), ValueError,
     "state.keys must have shape (2, p, 2, 3) for p cached tokens, got (2, 6, 1, 3)"),
    ("cache of another value dim", lineate.softmax_attention, cache(values=zeros(2, 6, 4, 2)), ValueError,
     "state.values must have shape (2, p, 4, 5) for p cached tokens, got (2, 6, 4, 2)"),
    ("cache of another dtype", lineate.softmax_attention, cache(keys=zeros(2, 6, 2, 3, dtype=torch.float64)),
     ValueError, "state.keys must be float32 like the inputs, got float64"),
    ("cache elsewhere", lineate.softmax_attention, cache(values=zeros(2, 6, 4, 5, device=META)), ValueError,
     "state.values must be on the device of q, cpu, got meta; move it with .to(q.device)"),
    ("packed cache", lineate.softmax_attention, cache(cached_ends=ints(0, 6)), ValueError,
     "state must come from a call with cu_seqlens exactly when this one has it"),
    ("cache not packed", lineate.softmax_attention,
     one_row(cache(keys=zeros(1, 6, 2, 3), values=zeros(1, 6, 4, 5), cu_seqlens=ints(0, 6))), ValueError,
     "state must come from a call with cu_seqlens exactly when this one has it"),
    ("cache of other sequences", lineate.softmax_attention,
     one_row(cache(keys=zeros(1, 6, 2, 3), values=zeros(1, 6, 4, 5), cached_ends=ints(0, 6),
                   cu_seqlens=ints(0, 2, 6))), ValueError,
     "state must hold 2 sequences like cu_seqlens, got 1"),
    ("softmax scale", lineate.softmax_attention, {**packed_qkv(), "scale": "1"}, TypeError,
     "scale must be a number or None (1/sqrt(k)), got str"),
    ("softmax normalize_qk", lineate.softmax_attention, {**packed_qkv(), "normalize_qk": 0}, TypeError,
     "normalize_qk must be a bool, got int"),
    ("softmax cu_seqlens", lineate.softmax_attention, {**packed_qkv(), "cu_seqlens": ints(0, 7)}, ValueError,
     "cu_seqlens must start at 0 and end at t = 6, got 0 and 7"),
    # attention matrix
    ("matrix k", lineate.attention_matrix, {"q": zeros(2, 6, 2, 3), "k": zeros(2, 5, 2, 3)}, ValueError,
     "k must have the shape of q, (b, t, h, k) = (2, 6, 2, 3), got (2, 5, 2, 3)"),
    ("matrix scale", lineate.attention_matrix, {"q": zeros(2, 6, 2, 3), "k": zeros(2, 6, 2, 3), "scale": "1"},
     TypeError, "scale must be a number or None (1/sqrt(k)), got str"),
    ("matrix log_decay", lineate.attention_matrix,
     {"q": zeros(2, 6, 2, 3), "k": zeros(2, 6, 2, 3), "log_decay": zeros(2, 6, 2) + 1}, ValueError,
     "log_decay must be <= 0 (natural log of a decay in [0, 1]), got a maximum of 1; "
     "pass log(decay), or -exp(A_log) * softplus(x)"),
    ("matrix q", lineate.attention_matrix, {"q": [1], "k": zeros(2, 6, 2, 3)}, TypeError,
     "q must be a torch.Tensor, got list"),
    ("matrix log_decay of 1 dimension", lineate.attention_matrix,
     {"q": zeros(2, 6, 2, 3), "k": zeros(2, 6, 2, 3), "log_decay": zeros(3), "beta": zeros(2, 6, 2)}, ValueError,
     "log_decay must have shape (b, t, hv) = (2, 6, 2), got (3,); "
     "a constant decay of each head has shape (hv,) = (2,)"),
    ("matrix log_decay of 3 heads", lineate.attention_matrix,
     {"q": zeros(2, 6, 2, 3), "k": zeros(2, 6, 2, 3), "log_decay": zeros(2, 6, 3)}, ValueError,
     "log_decay must have shape (b, t, hv) = (2, 6, 2) or (b, t, hv, k) = (2, 6, 2, 3), got (2, 6, 3)"),
    ("matrix beta list", lineate.attention_matrix, {"q": zeros(2, 6, 2, 3), "k": zeros(2, 6, 2, 3), "beta": [1]},
     TypeError, "beta must be a torch.Tensor, got list"),
    ("matrix beta per value channel", lineate.attention_matrix,
     {"q": zeros(2, 6, 2, 3), "k": zeros(2, 6, 2, 3), "beta": zeros(2, 6, 2, 1)}, ValueError,
     "beta must have shape (b, t, hv) for one matrix a head, got (2, 6, 2, 1); "
     "pass the rates of one value channel at a time"),
    # explain
    ("explain log_decay list", lineate.explain, arguments(log_decay=[1]), TypeError,
     "log_decay must be a torch.Tensor, got list"),
    ("explain log_decay positive", lineate.explain, arguments(log_decay=zeros(2, 6, 4) + 1), ValueError,
     "log_decay must be <= 0 (natural log of a decay in [0, 1]), got a maximum of 1; "
     "pass log(decay), or -exp(A_log) * softplus(x)"),
    # the signature: no **kwargs, and options by name only
    ("misspelt keyword", GATED_DELTA.op, arguments(chunksize=64), TypeError,
     "gated_delta_rule() has no argument 'chunksize'; did you mean 'chunk_size'?"),
]  # fmt: skip


def check(op: Op, call: Arguments, error: type[Exception], message: str) -> None:
    """Check that the message is exact, and that no tensor changes."""
    kept = {name: x.clone() for name, x in call.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(Exception) as caught:
        op(**call)
    assert type(caught.value) is error
    assert str(caught.value) == message
    for name, x in kept.items():
        assert x.is_meta or torch.equal(call[name], x), name


def named(table: list[tuple]) -> list[object]:
    """Return the parameters by name; triton's message about a CPU tensor needs triton's interpreter."""
    return [pytest.param(*rest, id=name, marks=[interpreted] if "triton" in name else []) for name, *rest in table]


@pytest.mark.parametrize(("changes", "error", "message"), named(KEYWORDS))
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_wrong_keywords_of_every_op(row, changes, error, message):
    check(row.op, arguments(row, **changes), error, message)


@pytest.mark.parametrize(("op", "call", "error", "message"), named(CALLS))
def test_wrong_calls(op, call, error, message):
    check(op, call, error, message)


@pytest.mark.parametrize("path", FORWARD_PATHS)
@pytest.mark.parametrize("row", [GATED_LINEAR, GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_one_positive_log_decay_anywhere(row, path):
    """It may be first, last or alone among resets; every form and backend refuses it before anything is modified."""
    message = (
        "log_decay must be <= 0 (natural log of a decay in [0, 1]), got a maximum of 0.5; "
        "pass log(decay), or -exp(A_log) * softplus(x)"
    )
    for special in ("ordinary", "reset -inf"):
        for place in (0, 7, -1):
            call = convert(draw(row, Shape(2, 20, 2, 4, 3, 5), special), torch.float32)
            call["log_decay"].flatten()[place] = 0.5
            check(row.op, {**call, **path}, ValueError, message)


@pytest.mark.parametrize("path", [{}, *FORWARD_PATHS])
@pytest.mark.parametrize("row", [x for x in ROWS if x is not LINEAR], ids=str)
def test_a_rule_needs_its_gates(row, path):
    """Every form and backend refuses missing gates: no other rule runs instead, and C code reads no missing tensor."""
    remedies = {
        "log_decay": f"without decay use {'delta_rule' if row.corrects else 'linear_attention'}",
        "beta": "to write at full rate pass torch.ones(2, 6, 4)",
    }
    for name in remedies.keys() & arguments(row).keys():
        message = f"{name} must be a torch.Tensor, got NoneType; {remedies[name]}"
        check(row.op, {**arguments(row), name: None, **path}, TypeError, message)


@needs_native
def test_the_native_recurrent_form_has_no_gradients():
    call = {name: x.requires_grad_() for name, x in arguments().items()}
    message = "backend='native' cannot serve this call: the native recurrent form has no gradients; use backend='torch'"
    check(GATED_DELTA.op, {**call, "form": "recurrent", "backend": "native"}, ValueError, message)


@interpreted
def test_the_triton_recurrent_form_has_no_gradients():
    call = {name: x.requires_grad_() for name, x in arguments().items()}
    message = TRITON.format("the triton recurrent form has no gradients")
    check(GATED_DELTA.op, {**call, "form": "recurrent", "backend": "triton"}, ValueError, message)


def test_options_are_keywords_only():
    q, k, v, beta = (arguments(DELTA)[name] for name in ("q", "k", "v", "beta"))
    with pytest.raises(TypeError, match=r"^delta_rule\(\) takes 4 positional arguments but 5 were given$"):
        lineate.delta_rule(q, k, v, beta, 0.5)


def test_explain_makes_the_same_checks():
    for name, changes, error, message in KEYWORDS:
        if "triton" not in name:
            check(lineate.explain, arguments(**changes), error, message)
    for name, op, call, error, message in CALLS:
        if op is GATED_DELTA.op and name.startswith(("beta", "cu_seqlens", "native")):
            check(lineate.explain, call, error, message)


def test_what_may_look_wrong_but_is_not():
    """The cases are int scales, int32 bounds, gates of another dtype than q, a state that is a view, one token,
    one head, and hv = 7h."""
    call = arguments()
    call["log_decay"], call["beta"] = call["log_decay"].double(), call["beta"].bfloat16()
    call["state"] = torch.zeros(2, 4, 5, 3).mT
    for form in ("recurrent", "chunkwise", "parallel"):
        assert GATED_DELTA.op(**call, form=form, scale=1).output.dtype == torch.float32
    assert GATED_DELTA.op(**packed(cu_seqlens=ints(0, 0, 6, 6).int())).state.shape == (3, 4, 3, 5)
    one = draw(KIMI_DELTA, Shape(1, 1, 1, 7, 1, 1))
    assert KIMI_DELTA.op(**one).output.shape == (1, 1, 7, 1)

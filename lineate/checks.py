"""Checks of arguments. Each error message names the argument, the expected value, the given one, and the remedy."""

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lineate.call import FLOATING, Inputs
from lineate.rule import Rule, compute_dtype

_LETTERS = "(b, t, h, k)"


def check_inputs(rule: Rule, inputs: Inputs) -> None:
    """Check q, k, v and the gates of one call against each other and against what the rule takes."""
    q, v, log_decay, beta = inputs.q, inputs.v, inputs.log_decay, inputs.beta
    if rule.writes:
        _check_writes(rule, inputs)
    else:
        check_qkv(q, inputs.k, v)
    for name in inputs.gates():
        if name not in rule.gates:
            taken = ", ".join(rule.gates) or "no gates"
            raise ValueError(f"{name} must be None for {rule.name}, which takes {taken}, got a tensor; leave it None")
    b, t, *_, hv, value_dim = v.shape
    key_dim = q.shape[-1]
    if log_decay is not None or "none" not in rule.decays:
        plain = f"use {'delta_rule' if rule.corrects else 'linear_attention'}"
        if rule.general:  # no other rule has its gates
            plain = f"pass torch.zeros{(b, t, hv)}"
        _check_tensor("log_decay", log_decay, q, missing=f"without decay {plain}")
        assert log_decay is not None
        shapes: dict[str, tuple[int, ...]] = {"head": (b, t, hv), "channel": (b, t, hv, key_dim)}
        allowed: list[tuple[int, ...]] = [shapes[decay] for decay in rule.decays if decay != "none"]
        if tuple(log_decay.shape) not in allowed:
            letters = {"head": "(b, t, hv)", "channel": "(b, t, hv, k)"}
            wanted = " or ".join(f"{letters[d]} = {shapes[d]}" for d in rule.decays if d != "none")
            remedy = _decay_remedy(rule, log_decay, shapes) or _gate_hint("log_decay", log_decay, allowed)
            raise ValueError(f"log_decay must have shape {wanted}, got {tuple(log_decay.shape)}{remedy}")
    if "beta" in rule.gates:
        _check_tensor("beta", beta, q, missing=f"to write at full rate pass torch.ones{(b, t, hv)}")
        assert beta is not None
        shape, wide = tuple(v.shape[:-1]), (b, t, hv, value_dim)  # b t hv, or b t n hv
        if beta.shape != v.shape[:-1] and (rule.writes or tuple(beta.shape) != wide):
            wanted = f"(b, t, n, hv) = {shape}" if rule.writes else f"(b, t, hv) = {shape} or (b, t, hv, v) = {wide}"
            hint = "" if rule.writes else _gate_hint("beta", beta, [shape, wide])
            raise ValueError(f"beta must have shape {wanted}, got {tuple(beta.shape)}{hint}")
    _check_other_gates(rule, inputs)


def _check_other_gates(rule: Rule, inputs: Inputs) -> None:
    """Check the gates of a rule that have no check of their own against the shapes that their fields have."""
    b, t, *_, hv, value_dim = inputs.v.shape
    sizes = {"b": b, "t": t, "hv": hv, "v": value_dim, "k": inputs.q.shape[-1]}
    for field in inputs.FIELDS:
        if field.name not in rule.gates or field.name in ("log_decay", "beta"):
            continue
        gate = getattr(inputs, field.name)
        _check_tensor(field.name, gate, inputs.q, missing=f"{rule.name} takes it for each token")
        allowed = {letters: tuple(sizes[x] for x in letters.split()) for letters in field.shapes}
        if tuple(gate.shape) not in allowed.values():
            wanted = " or ".join(f"({', '.join(letters.split())}) = {shape}" for letters, shape in allowed.items())
            hint = _gate_hint(field.name, gate, list(allowed.values()))
            raise ValueError(f"{field.name} must have shape {wanted}, got {tuple(gate.shape)}{hint}")


def check_one_rate(beta: Tensor | None) -> None:
    """Refuse one beta per value channel: each channel would have an attention matrix of its own."""
    if isinstance(beta, Tensor) and beta.dim() == 4:
        raise ValueError(
            f"beta must have shape (b, t, hv) for one matrix a head, got {tuple(beta.shape)}; "
            "pass the rates of one value channel at a time"
        )


def check_decay(log_decay: Tensor | None) -> None:
    """Raise if a value is above 0, even if others are NaN; accept tensors whose values cannot be read."""
    if log_decay is not None and is_concrete(log_decay):
        check_decay_values(log_decay)


def check_decay_values(log_decay: Tensor) -> None:
    """Raise if a value is above 0; the native backend, which checks while it computes, calls this for the message."""
    largest = log_decay.amax().item()
    if largest != largest:  # a NaN hides the others
        largest = log_decay.masked_fill(log_decay.isnan(), -torch.inf).amax().item()
    if largest > 0:
        raise ValueError(
            f"log_decay must be <= 0 (natural log of a decay in [0, 1]), got a maximum of {largest:.6g}; "
            "pass log(decay), or -exp(A_log) * softplus(x)"
        )


LEAST_LEFT = -25.0
"""The least sum of log_decay over a chunk of least squares: float64 bears no smaller weight of a pair than e^-25."""


def check_forgetting(total: Tensor, chunk: int) -> None:
    """Check `total`, the sums of log_decay over chunks, for least squares."""
    if is_concrete(total) and total.numel() and total.amin().item() < LEAST_LEFT:
        raise ValueError(
            f"log_decay must sum to at least {LEAST_LEFT:g} over chunk = {chunk} tokens for least squares, whose ridge "
            f"is restored only then, got {total.amin().item():.4g}; use a smaller chunk, or form='recurrent'"
        )


def check_position(position: Tensor, rows: int, chunk: int) -> None:
    """Check the positions of a state: how many tokens of its current chunk each row has read."""
    if position.shape != (rows,) or position.dtype != torch.int64:
        raise ValueError(
            f"state['position'] must be int64 of shape (rows,) = ({rows},), "
            f"got {position.dtype} of {tuple(position.shape)}"
        )
    if is_concrete(position) and rows and not 0 <= int(position.min()) <= int(position.max()) < chunk:
        raise ValueError(
            f"state['position'] must be at least 0 and below chunk = {chunk}, got {position.tolist()}; "
            "continue with the chunk that the state was made with"
        )


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check q, k `b t h k` and v `b t hv v`: hv is a multiple of h; all have one floating dtype and one device."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            letters = "(b, t, hv, v)" if name == "v" else _LETTERS
            raise ValueError(f"{name} must have 4 dimensions {letters}, got shape {tuple(x.shape)}")
        if x.dtype not in FLOATING:
            raise ValueError(
                f"{name} must be float64, float32, bfloat16 or float16, got {named(x.dtype)}; convert it with .float()"
            )
    if k.shape != q.shape:
        name = "k" if v.shape[1] == q.shape[1] else "q"
        hint = _head_first(name) if _swapped(k.shape) == tuple(q.shape) else ""
        raise ValueError(f"k must have the shape of q, (b, t, h, k) = {tuple(q.shape)}, got {tuple(k.shape)}{hint}")
    b, t, h, _ = q.shape
    if v.shape[:2] != (b, t):
        hint = ""
        if v.shape[0] == b and v.shape[2] == t and v.shape[1] % max(h, 1) == 0:
            hint = _head_first("v")
        elif v.shape[0] == b and v.shape[2] == h and v.shape[1] % max(t, 1) == 0:  # t is the heads of q
            hint = _head_first("q", "k", "v")
        raise ValueError(f"v must have shape (b, t, hv, v) with (b, t) = {(b, t)}, got {tuple(v.shape)}{hint}")
    if 0 in q.shape or 0 in v.shape:
        raise ValueError(f"every dimension must be at least 1, got q {tuple(q.shape)} and v {tuple(v.shape)}")
    if v.shape[2] % h:
        raise ValueError(
            f"v must have a multiple of h = {h} value heads (each key head serves hv / h of them), "
            f"got hv = {v.shape[2]}"
        )
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(
                f"{name} must have the dtype of q, {named(q.dtype)}, got {named(x.dtype)}; convert with .to(q.dtype)"
            )
        check_device(name, x, q)


def _check_writes(rule: Rule, inputs: Inputs) -> None:
    """Check k `b t n h k` and v `b t n hv v`, of which each write is like the k and v of a rule with one."""
    for name, letters in (("k", "(b, t, n, h, k)"), ("v", "(b, t, n, hv, v)")):
        x = getattr(inputs, name)
        if isinstance(x, Tensor) and (x.dim() != 5 or 0 in x.shape):
            raise ValueError(
                f"{name} must have 5 dimensions {letters} for {rule.name}, each at least 1, got shape "
                f"{tuple(x.shape)}; with one write a token pass {name}.unsqueeze(2)"
            )
    writes = [x.shape[2] for x in (inputs.k, inputs.v) if isinstance(x, Tensor)]
    if len(set(writes)) > 1:
        raise ValueError(f"v must have as many writes a token as k, n = {writes[0]}, got {writes[1]}")
    check_qkv(inputs.q, *(x[:, :, 0] if isinstance(x, Tensor) else x for x in (inputs.k, inputs.v)))


def check_state(state: Tensor | None, v: Tensor, key_dim: int, n_states: int, *, narrow: bool = False) -> None:
    """Check a state `b hv k v` (packed: `n_seqs hv k v`) in float32, or float64 for float64 inputs.

    narrow: whether it may be bfloat16 instead of float32.
    """
    if state is None:
        return
    if not isinstance(state, Tensor):
        raise TypeError(f"state must be a torch.Tensor or None, got {type(state).__name__}")
    expected = (n_states, v.shape[-2], key_dim, v.shape[-1])
    if tuple(state.shape) != expected:
        first = "b" if n_states == v.shape[0] else "n_seqs"
        hint = ""
        if expected[1] != v.shape[1] and tuple(state.shape) == (n_states, v.shape[1], key_dim, v.shape[-1]):
            hint = _head_first("q", "k", "v")
        raise ValueError(f"state must have shape ({first}, hv, k, v) = {expected}, got {tuple(state.shape)}{hint}")
    dtype = compute_dtype(v.dtype)
    known = (dtype, torch.bfloat16) if narrow and dtype is torch.float32 else (dtype,)
    if state.dtype not in known:
        raise ValueError(
            f"state must be {' or '.join(map(named, known))} for {named(v.dtype)} inputs, got {named(state.dtype)}; "
            f"convert it with .to(torch.{named(dtype)})"
        )
    check_device("state", state, v)


def check_raw_gates(inputs: Inputs, beta_scale: float, lower_bound: float | None, raw_gates: bool | str) -> None:
    """Check those gates that are raw: gate `b t hv` or `b t hv k` with its parameters, and write `b t hv`.

    There must be no parameters of a gate that is not raw.
    """
    q, v, gate, write = inputs.q, inputs.v, inputs.log_decay, inputs.beta
    b, t, hv, key_dim = *v.shape[:3], q.shape[3]
    for name, instead, raw in (("gate", "log_decay", gate), ("write", "beta", write)):
        if raw is None and raw_gates in (True, instead):
            raise TypeError(
                f"{name} must be a torch.Tensor, got NoneType; log_decay= can be given instead of gate, and beta= "
                "instead of write"
            )
    if raw_gates in (True, "log_decay"):
        _check_raw("gate", gate, q, {"(b, t, hv)": (b, t, hv), "(b, t, hv, k)": (b, t, hv, key_dim)})
        assert gate is not None
        check_gate_parameters(gate, inputs.A_log, inputs.dt_bias, lower_bound)
    else:
        for name, x in (("A_log", inputs.A_log), ("dt_bias", inputs.dt_bias), ("lower_bound", lower_bound)):
            if x is not None:
                raise ValueError(f"{name} is for a raw gate, got log_decay itself; pass gate, or leave {name} None")
    _check_beta_scale(beta_scale)
    if raw_gates in (True, "beta"):
        _check_raw("write", write, q, {"(b, t, hv)": (b, t, hv)})
    elif beta_scale != 1:
        raise ValueError(f"beta_scale is for a raw logit, got {beta_scale} and beta itself; multiply beta by it")


def _check_beta_scale(beta_scale: float) -> None:
    _check_number("beta_scale", beta_scale)
    if not 0 < beta_scale <= sys.float_info.max:
        raise ValueError(f"beta_scale must be finite and above 0, got {_shown(beta_scale)}; 1 and 2 are usual")


def check_either(raw: str, given: str, tensors: tuple[Any, Any]) -> bool:
    """Check that a gate is given once, raw or itself; return whether it is raw."""
    if tensors[0] is not None and tensors[1] is not None:
        raise ValueError(f"{raw} must be None if {given} is given, got both; pass one of them")
    return tensors[1] is None


def check_gate(gate: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> None:
    """Check a gate by itself, `b t hv` or `b t hv k`, and its parameters."""
    _check_raw("gate", gate, gate)
    if gate.dim() not in (3, 4):
        raise ValueError(f"gate must have shape (b, t, hv) or (b, t, hv, k), got {tuple(gate.shape)}")
    check_gate_parameters(gate, A_log, dt_bias, lower_bound)


def check_gate_parameters(
    gate: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> None:  # fmt: skip
    """Check A_log `hv`, dt_bias `hv` (per channel also `hv k`, or flat), and lower_bound; with it A_log may be None."""
    check_lower_bound(lower_bound)
    hv, key_dim = gate.shape[2], gate.shape[-1]
    if A_log is not None or lower_bound is None:
        _check_raw("A_log", A_log, gate, {"(hv,)": (hv,)})
    if dt_bias is not None:
        shapes: dict[str, tuple[int, ...]] = {"(hv,)": (hv,)}
        if gate.dim() == 4:
            shapes |= {"(hv, k)": (hv, key_dim), "(hv * k,)": (hv * key_dim,)}
        _check_raw("dt_bias", dt_bias, gate, shapes)


def _check_raw(name: str, x: Any, q: Tensor, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
    """Check the type, dtype, device and shape of a raw gate or of its parameters; shapes: the allowed ones by name."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in FLOATING:
        raise ValueError(
            f"{name} must be float64, float32, bfloat16 or float16, got {named(x.dtype)}; convert it with .float()"
        )
    check_device(name, x, q)
    if shapes is not None and tuple(x.shape) not in shapes.values():
        wanted = " or ".join(f"{symbols} = {sizes}" for symbols, sizes in shapes.items())
        hint = _gate_hint(name, x, list(shapes.values())) if name in ("gate", "write") else ""
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(x.shape)}{hint}")


def check_lower_bound(lower_bound: float | None, name: str = "lower_bound") -> None:
    """Check the lower bound of a gate: a finite number below 0, or None."""
    if lower_bound is None:
        return
    _check_number(name, lower_bound)
    if not -sys.float_info.max <= lower_bound < 0:
        raise ValueError(f"{name} must be finite and below 0, got {_shown(lower_bound)}; -5 is usual")


def check_decode_gates(inputs: Inputs, beta_scale: float, lower_bound: float | None, raw_gates: bool | str) -> None:
    """Check that A_log, dt_bias, lower_bound and beta_scale fit the gates, raw or not; either gate may be None."""
    check_lower_bound(lower_bound)
    q, v, log_decay, A_log, dt_bias = inputs.q, inputs.v, inputs.log_decay, inputs.A_log, inputs.dt_bias
    _check_beta_scale(beta_scale)
    if raw_gates in (False, "beta"):
        for name, given in (("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound)):
            if given is not None:
                raise ValueError(f"{name} is for raw gates, got raw_gates={raw_gates!r}; pass raw_gates=True")
    if raw_gates in (False, "log_decay") and beta_scale != 1:
        raise ValueError(
            f"beta_scale is for raw gates, got {beta_scale} and raw_gates={raw_gates!r}; multiply beta by it"
        )
    if not raw_gates:
        return
    for name, given in (("log_decay", log_decay), ("beta", inputs.beta)):
        if raw_gates == name and given is None:
            raise ValueError(f"raw_gates={name!r} needs {name}, got None; leave it False")
    if log_decay is None and inputs.beta is None:
        raise ValueError("raw_gates=True needs log_decay or beta, got neither; leave it False")
    if inputs.beta is None and beta_scale != 1:
        raise ValueError(f"beta_scale={beta_scale} needs beta, the raw logit, got beta=None; leave it 1")
    if raw_gates == "beta":
        return
    if log_decay is None:
        if A_log is not None or dt_bias is not None:
            raise ValueError("A_log and dt_bias need log_decay, the raw gate, got log_decay=None")
        if lower_bound is not None:
            raise ValueError("lower_bound needs log_decay, the raw gate, got log_decay=None; leave it None")
        return
    hv, key_dim = v.shape[-2], q.shape[3]
    if A_log is None and lower_bound is None:
        raise ValueError(f"raw_gates=True with log_decay needs A_log of shape (hv,) = ({hv},), got None")
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {named(x.dtype)}; convert it with .float()")
        check_device(name, x, q)
        if x.shape == (hv,) or (name == "dt_bias" and log_decay.dim() == 4 and x.shape == (hv, key_dim)):
            continue
        wanted = f"(hv,) = ({hv},)"
        if name == "dt_bias" and log_decay.dim() == 4:
            wanted += f" or (hv, k) = {(hv, key_dim)} or (hv * k,) = ({hv * key_dim},)"
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(x.shape)}")


def check_cu_seqlens(cu_seqlens: Tensor | None, b: int, t: int) -> None:
    """Check cu_seqlens `n_seqs + 1`: 0, the ends of the packed sequences in order, the last of them t."""
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(
            f"cu_seqlens must be a torch.Tensor, got {type(cu_seqlens).__name__}; "
            "pass torch.tensor([0, ..., t]) with the cumulative lengths"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be int32 or int64, got {named(cu_seqlens.dtype)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens must have shape (n_seqs + 1,) with at least 2 entries, got {tuple(cu_seqlens.shape)}"
        )
    if b != 1:
        raise ValueError(
            f"cu_seqlens needs the sequences packed into one row, b = 1, got b = {b}; reshape to (1, b * t, ...)"
        )
    if not is_concrete(cu_seqlens):
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != t:
        raise ValueError(f"cu_seqlens must start at 0 and end at t = {t}, got {bounds[0]} and {bounds[-1]}")
    if any(end < start for start, end in pairwise(bounds)):
        raise ValueError(f"cu_seqlens must not decrease, got {_shorten(bounds)}")


def check_scale(scale: float | None) -> None:
    """Check a scale: a finite number, or None for 1/sqrt(k)."""
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale must be a number or None (1/sqrt(k)), got {type(scale).__name__}")
    if not abs(scale) <= sys.float_info.max:  # an int may be larger
        raise ValueError(f"scale must be finite, got {_shown(scale)}")


def check_chunk_size(chunk_size: int | None) -> None:
    """Check a chunk size: a positive int, or None for the backend's own."""
    if chunk_size is None:
        return
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f"chunk_size must be an int or None, got {type(chunk_size).__name__}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}; None takes the backend's own")


def check_every(keep_states_every: int) -> None:
    """Check after how many tokens a state is kept: a positive int."""
    if isinstance(keep_states_every, bool) or not isinstance(keep_states_every, int):
        raise TypeError(f"keep_states_every must be an int, got {type(keep_states_every).__name__}")
    if keep_states_every < 1:
        raise ValueError(f"keep_states_every must be at least 1, got {keep_states_every}; 64 keeps one a chunk")


def check_flag(name: str, flag: bool) -> None:
    """Check that flag is a bool, to catch tensors and arguments in the wrong place."""
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must be a bool, got {type(flag).__name__}")


def check_which_raw(raw_gates: bool | str) -> None:
    """Check that raw_gates is a bool, or names one gate."""
    if not isinstance(raw_gates, bool | str):
        raise TypeError(f"raw_gates must be a bool, 'log_decay' or 'beta', got {type(raw_gates).__name__}")
    if raw_gates not in (False, True, "log_decay", "beta"):
        raise ValueError(f"raw_gates must be a bool, 'log_decay' or 'beta', got {raw_gates!r}")


def check_choice(name: str, choice: str, allowed: Sequence[str]) -> None:
    """Check that choice is one of the allowed words."""
    if choice not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {choice!r}")


def _decay_remedy(rule: Rule, log_decay: Tensor, shapes: dict[str, tuple[int, ...]]) -> str:
    if log_decay.dim() == 1:
        constant = f"a constant decay of each head has shape (hv,) = ({shapes['head'][2]},)"
        return f"; {constant}" if "head" in rule.decays else f"; {constant}, and is for gated_delta_rule"
    if rule.decays == ("head",) and tuple(log_decay.shape) == shapes["channel"]:
        return "; for a decay per key channel use kimi_delta_attention"
    if rule.decays == ("channel",) and tuple(log_decay.shape) == shapes["head"]:
        return "; for a decay per head use gated_delta_rule"
    return ""


def _swapped(shape: torch.Size) -> tuple[int, ...]:
    """Return the shape after transpose(1, 2)."""
    return (shape[0], shape[2], shape[1], *shape[3:])


def _head_first(*names: str) -> str:
    """Return the hint for tensors whose heads precede their tokens, as in torch's scaled_dot_product_attention."""
    if len(names) == 1:
        return f"; {names[0]} looks like (b, heads, t, ...): pass {names[0]}.transpose(1, 2)"
    listed = f"{', '.join(names[:-1])} and {names[-1]}"
    return f"; {listed} look like (b, heads, t, ...): pass {names[0]}.transpose(1, 2) and so on"


def _gate_hint(name: str, x: Tensor, allowed: list[tuple[int, ...]]) -> str:
    """Return a hint if a gate fits after transpose(1, 2): its heads come first, or those of q, k and v do."""
    if x.dim() < 3 or _swapped(x.shape) not in allowed:
        return ""
    return _head_first(name) if x.shape[1] < x.shape[2] else _head_first("q", "k", "v")  # tokens outnumber heads


def _check_tensor(name: str, x: Any, q: Tensor, missing: str) -> None:
    """Check the type, dtype and device of a gate; missing: the remedy for None."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, got {type(x).__name__}" + (f"; {missing}" if x is None else "")
        )
    if x.dtype not in FLOATING:
        raise ValueError(f"{name} must be float64, float32, bfloat16 or float16, got {named(x.dtype)}")
    check_device(name, x, q)


def check_device(name: str, x: Tensor | None, q: Tensor) -> None:
    if x is not None and x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}; move it with .to(q.device)")


def _check_number(name: str, x: Any) -> None:
    if isinstance(x, bool) or not isinstance(x, int | float):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")


def is_concrete(x: Tensor) -> bool:
    """Whether the values of x can be read: False while recording, inside vmap, and on a GPU, which would wait."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # it may have no values
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x) and not torch._C._len_torch_dispatch_stack()


def _shown(x: float) -> str:
    """Return a number for a message; for a long int its size, since Python refuses to write it out in full."""
    if isinstance(x, int) and x.bit_length() > 64:
        return f"an int of {x.bit_length()} bits"
    return str(x)


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shorten(bounds: list[int]) -> str:
    return str(bounds) if len(bounds) <= 12 else f"[{', '.join(map(str, bounds[:11]))}, ...]"


def check_bounds(cu_seqlens: Tensor, t: int) -> list[int]:
    """Return the values of cu_seqlens, checked; in a compiled call the check happens when the graph runs."""
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != t or sorted(bounds) != bounds:
        raise ValueError(f"cu_seqlens must rise from 0 to t = {t}, got {bounds}")
    return bounds

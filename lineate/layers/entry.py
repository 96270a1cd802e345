"""The checks around a mixer: what it is called with, before it runs, and what a mixer of the user's own returns."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lineate import checks
from lineate.layers.state import LayerState, Memory, TensorSpec, TokenCache
from lineate.parallel.context.segments import Bounds, Segment, check_splits
from lineate.torch_ops.tracing import recorded

PROJECTED = ("conv", "shift", "keys", "values", "latent")
"""Tensors of a state that have the dtype of in_proj's input or result, which autocast may lower."""


class Mixer(Protocol):
    """The parts of a mixer that the checks read."""

    @property
    def in_proj(self) -> nn.Linear: ...
    @property
    def state_spec(self) -> tuple[TensorSpec, ...]: ...


def check_call(mixer: Mixer, x: Any, state: Any, cu_seqlens: Any) -> None:
    """Check the arguments of mixer.forward; nothing waits for a GPU.

    Decoding repeats the same call, so a call is first compared with the last one that passed, in a third of the time.
    """
    form = None if state is None or cu_seqlens is not None else _form(x, state)
    if form is not None and vars(mixer).get("_passed") == form:
        return
    if isinstance(cu_seqlens, Segment) or getattr(mixer, "context", None) is not None:
        check_splits(mixer)
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() != 3 or not x.numel():
        raise ValueError(f"x must have shape (b, t, hidden) with at least one token, got {tuple(x.shape)}")
    packed = cu_seqlens.cu_seqlens if isinstance(cu_seqlens, Segment) else cu_seqlens
    checks.check_cu_seqlens(packed, *x.shape[:2])
    if not _is_plain(mixer.in_proj):
        return
    again = _check_projected(mixer.in_proj, x)
    if state is not None:
        again &= _check_state(mixer, state, x, x.shape[0] if packed is None else packed.shape[0] - 1)
    if form is not None and again:
        vars(mixer)["_passed"] = form


def _form(x: Any, state: Any) -> Any:
    """Return everything that the checks look at, or None if it cannot be compared."""
    if not isinstance(x, Tensor) or not isinstance(state, Memory | TokenCache) or recorded():
        return None
    tensors = [(name, y.shape, y.dtype, y.device) for name, y in state.tensors.items()]
    return x.shape, x.dtype, x.device, type(state), state.rows, tensors


def _is_plain(in_proj: nn.Module) -> bool:
    """Whether the weight tells the input and output sizes; not if it is wrapped, quantised, or fetched when it runs."""
    return (
        type(in_proj) is nn.Linear
        and not in_proj.weight.is_meta
        and not in_proj._forward_pre_hooks
        and "forward" not in vars(in_proj)
    )


def _check_projected(in_proj: nn.Linear, x: Tensor) -> bool:
    """Whether this check may be cached; False if x passed only because autocast is on."""
    weight, hidden = in_proj.weight, in_proj.in_features
    if x.shape[2] != hidden:
        raise ValueError(f"x must have shape (b, t, hidden) = (b, t, {hidden}), got {tuple(x.shape)}")
    if x.dtype != weight.dtype and not (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
        raise ValueError(
            f"x must have the dtype of the layer, {_name(weight.dtype)}, got {_name(x.dtype)}; convert x or the layer"
        )
    if x.device != weight.device:
        raise ValueError(f"x must be on the device of the layer, {weight.device}, got {x.device}; move x or the layer")
    return x.dtype == weight.dtype


def _check_state(mixer: Mixer, state: Any, x: Tensor, rows: int) -> bool:
    """Whether this check may be cached; False if the state passed only because autocast is on."""
    specs, again = mixer.state_spec, True
    kind, first = (TokenCache, 2) if _grows(specs) else (Memory, 1)
    if not isinstance(state, kind):
        raise TypeError(
            f"state must be a {kind.__name__} or None, got {type(state).__name__}; pass what this layer returned"
        )
    tensors = state.tensors
    if len(tensors) != len(specs) or any(spec.name not in tensors for spec in specs):
        names = ", ".join(spec.name for spec in specs)
        raise ValueError(f"state must have {names}, got {', '.join(tensors)}; it is another layer's")
    if state.rows != rows:
        raise ValueError(
            f"state must have {rows} rows, as many as the batch or the packed sequences, got {state.rows}; "
            "state.select takes some of them"
        )
    for spec in specs:
        got = tensors[spec.name]
        if got.shape[first:] != spec.shape[first - 1 :] or (first == 1 and got.shape[0] != rows):
            wanted = ", ".join(map(str, (rows, *spec.shape)))
            raise ValueError(
                f"state[{spec.name!r}] must have shape ({wanted}{',' * (not spec.shape)}), got {tuple(got.shape)}; "
                "it is another layer's"
            )
        if got.dtype != spec.dtype and got.dtype not in spec.dtypes:
            again = False
            lowered = got.is_floating_point() and torch.is_autocast_enabled(x.device.type)
            if spec.name not in PROJECTED or not lowered:  # otherwise checked against the new tokens
                raise ValueError(
                    f"state[{spec.name!r}] must be {_name(spec.dtype)}, got {_name(got.dtype)}; "
                    "continue under the same autocast and model dtype"
                )
        if got.device != x.device:
            raise ValueError(
                f"state[{spec.name!r}] must be on the device of x, {x.device}, got {got.device}; "
                "move it with state.to(x.device)"
            )
    return again


def check_result(
    mixer: nn.Module, specs: tuple[TensorSpec, ...], result: Any, x: Tensor, cu_seqlens: Bounds
) -> tuple[Tensor, LayerState]:
    """Return what mixer.forward returned for x if it is (y, state) as `specs` says; otherwise raise.

    The dtypes of the state are left to the mixer, as autocast may lower them.
    """
    packed = cu_seqlens.cu_seqlens if isinstance(cu_seqlens, Segment) else cu_seqlens
    rows = x.shape[0] if packed is None else packed.shape[0] - 1
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(_wrong_result(mixer, specs, x, rows, _described(result)))
    y, state = result
    if not isinstance(y, Tensor):
        raise TypeError(_wrong_result(mixer, specs, x, rows, f"{_described(y)} for y"))
    if y.shape != x.shape:
        raise ValueError(_wrong_result(mixer, specs, x, rows, f"y of shape {tuple(y.shape)}"))
    grows = _grows(specs)
    if not isinstance(state, TokenCache if grows else Memory):
        raise TypeError(_wrong_result(mixer, specs, x, rows, f"{_described(state)} for state"))
    tensors = state.tensors
    if len(tensors) != len(specs):
        raise ValueError(_wrong_result(mixer, specs, x, rows, _named(tensors)))
    for (name, found), spec in zip(tensors.items(), specs, strict=True):
        if name != spec.name:
            raise ValueError(_wrong_result(mixer, specs, x, rows, _named(tensors)))
        if found.shape[2:] != spec.shape[1:] if grows else found.shape != (rows, *spec.shape):
            raise ValueError(_wrong_result(mixer, specs, x, rows, f"{name} of shape {tuple(found.shape)}"))
    if grows and state.rows != rows:
        raise ValueError(_wrong_result(mixer, specs, x, rows, f"a TokenCache of {state.rows} rows"))
    return y, state


def _grows(specs: tuple[TensorSpec, ...]) -> bool:
    """Whether the state is a TokenCache."""
    return bool(specs) and "t" in specs[0].shape


def _wrong_result(mixer: nn.Module, specs: tuple[TensorSpec, ...], x: Tensor, rows: int, got: str) -> str:
    """Return the message about a forward that does not return (y, state)."""
    tensors = "; ".join(f"{spec.name} ({', '.join(map(str, (rows, *spec.shape)))})" for spec in specs) or "no tensors"
    example = "{" + ", ".join(f"{spec.name!r}: ..." for spec in specs) + "}"
    kind, made = "Memory", f"Memory({example})"
    if _grows(specs):
        kind, made = "TokenCache", f"TokenCache.of({example}, cu_seqlens), or state.append(...) if there is a state"
    return (
        f"forward of {type(mixer).__name__} must return (y, state), with y of the shape of x, {tuple(x.shape)}, and "
        f"state a {kind} as its state_spec says: {tensors}; got {got}; write return y, {made}"
    )


def _named(tensors: Mapping[str, Tensor]) -> str:
    return f"a state with {', '.join(tensors) or 'no tensors'}"


def _described(value: Any) -> str:
    """Return what a value is, without its contents."""
    if isinstance(value, Tensor):
        return f"a Tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

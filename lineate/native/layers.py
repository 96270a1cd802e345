"""The parts of a layer around the op, in C for float32 on a CPU: short convolution with silu, RMSNorm, glu.

The functions of lineate.layers that call these document what they compute.
"""

import struct

import torch
from torch import Tensor

from lineate import checks
from lineate.native.build import c_function, why_not
from lineate.torch_ops.registrar import register_op
from lineate.torch_ops.tracing import constant_in_graphs, transformed

MOST_TAPS = 4
"""The most taps of a convolution in C; torch runs larger ones."""
ACTIVATIONS = ("", "silu", "sigmoid")

_CONVOLUTION = struct.Struct("24q")  # Conv in convolution.c; Norm and Glu in layers.c
_NORM = struct.Struct("23q2dq")
_GLU = struct.Struct("9q")


def serves(*tensors: Tensor | None) -> bool:
    """Whether the C code can run on these: all are float32 on a CPU, and no transform such as vmap is active."""
    for x in tensors:
        if x is not None and (x.dtype is not torch.float32 or not x.is_cpu):
            return False
    return _ready() and not transformed()


@constant_in_graphs
def _ready() -> bool:
    return why_not("layers", "rules") is None  # a model needs both, which are compiled in parallel


def _dense(x: Tensor) -> Tensor:
    """Return x with a dense last dimension."""
    return x if x.stride()[-1] == 1 else x.contiguous()


def _like(x: Tensor) -> Tensor:
    """Return a new contiguous tensor of this shape."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


# ---- short convolution


def short_convolution(
    x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run lineate.layers.convolution.short_convolution for up to MOST_TAPS taps."""
    return _run_convolution(x, weight, state, cu_seqlens)


def _convolution(
    x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return silu(y) `b t channels` and the new state `rows channels size-1`, whose channels are dense."""
    y, final = _like(x), _state(x, weight.shape[1] - 1, cu_seqlens)
    _convolve("convolution", x, weight, state, cu_seqlens, (y, final), (None, None), (None, None, None))
    return y, final


def _convolution_backward(
    dy: Tensor | None,
    dfinal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dweight and dstate, which is empty without a state."""
    dy = torch.zeros_like(x) if dy is None else dy
    dfinal = None if dfinal is None else dfinal.transpose(1, 2).contiguous()
    dx, dweight, dstate = grads = _convolution_grads(x, weight, state)
    wanted = (dx, dweight, None if state is None else dstate)
    _convolve("convolution_backward", x, weight, state, cu_seqlens, (None, None), (_dense(dy), dfinal), wanted)
    return grads


def _convolution_grads(x: Tensor, weight: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    dstate = x.new_empty(0) if state is None else x.new_empty_strided(state.shape, _strides(*state.shape[1:]))
    return _like(x), _like(weight), dstate


def _state(x: Tensor, past: int, cu_seqlens: Tensor | None) -> Tensor:
    """Return memory for the last inputs of each sequence."""
    b, _, channels = x.shape
    rows = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty_strided((rows, channels, past), _strides(channels, past))


def _strides(channels: int, past: int) -> tuple[int, int, int]:
    """Return the strides of `rows channels past` that lies in memory as `rows past channels`."""
    return (channels * past, 1, channels)


def _convolve(
    entry: str,
    x: Tensor,
    weight: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    outputs: tuple[Tensor | None, Tensor | None],
    arrived: tuple[Tensor | None, Tensor | None],
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Call the C code. arrived: dy with a dense last dimension, dfinal `rows size-1 channels` contiguous."""
    b, t, channels = x.shape
    known, size = weight.shape
    rows = b
    if cu_seqlens is not None:
        checks.check_cu_seqlens(cu_seqlens, b, t)
        cu_seqlens = cu_seqlens.to("cpu", torch.int64).contiguous()
        rows = cu_seqlens.shape[0] - 1
    if known != channels:
        raise ValueError(f"weight must have shape (channels, size) = ({channels}, {size}), got {tuple(weight.shape)}")
    if state is not None and state.shape != (rows, channels, size - 1):
        raise ValueError(
            f"state must have shape (rows, channels, size - 1) = ({rows}, {channels}, {size - 1}), "
            f"got {tuple(state.shape)}"
        )
    x, weight = _dense(x), weight.contiguous()
    x_row, x_token, _ = x.stride()
    state_strides = (0, 0, 0) if state is None else state.stride()
    (y, final), (dy, dfinal), (dx, dweight, dstate) = outputs, arrived, grads
    dy_row, dy_token, _ = (0, 0, 0) if dy is None else dy.stride()
    words = _CONVOLUTION.pack(
        b, t, channels, size, rows, torch.get_num_threads(),
        x.data_ptr(), weight.data_ptr(), _address(state), x_row, x_token, *state_strides, _address(cu_seqlens),
        _address(y), _address(final), _address(dy), _address(dfinal), dy_row, dy_token,
        _address(dx), _address(dweight), _address(dstate),
    )  # fmt: skip
    c_function(entry)(words)


def _fake_convolution(x, weight, state, cu_seqlens):  # type: ignore[no-untyped-def]
    return _like(x), _state(x, weight.shape[1] - 1, cu_seqlens)


_run_convolution = register_op(
    "short_convolution_native",
    _convolution,
    _convolution_backward,
    fake=_fake_convolution,
    fake_backward=lambda dy, dfinal, x, weight, state, cu_seqlens: _convolution_grads(x, weight, state),
    tensors=4,
)


# ---- RMSNorm


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centred: bool = False) -> Tensor:
    """Return x / sqrt(mean x^2 + eps) * weight over the last dimension; zero-centred: * (1 + weight)."""
    return _run_norm(x, weight, None, eps, zero_centred, "")


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float, activation: str) -> Tensor:
    """Return rms_norm(x) * activation(gate), "silu" or "sigmoid"; gate has the shape of x."""
    return _run_norm(x, weight, gate, eps, False, activation)


def _norm(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, zero_centred: bool, activation: str) -> Tensor:
    y = _like(x)
    _normalize("norm", x, weight, gate, None, (y, None, None, None), eps, zero_centred, activation)
    return y


def _norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, zero_centred: bool, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dweight and dgate, which is empty without a gate."""
    dx, dweight, dgate = _norm_grads(x, weight, gate)
    _normalize("norm_backward", x, weight, gate, dy, (None, dx, dgate, dweight), eps, zero_centred, activation)
    return dx, dweight, dgate


def _norm_grads(x: Tensor, weight: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), _like(weight), x.new_empty(0) if gate is None else _like(gate)


def _normalize(
    entry: str,
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    dy: Tensor | None,
    results: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    eps: float,
    zero_centred: bool,
    activation: str,
) -> None:
    """Call the C code, which fills results: y, dx, dgate, dweight."""
    shape = x.shape
    size = shape[-1]
    if weight.shape != (size,):
        raise ValueError(f"weight must have shape (size,) = ({size},), got {tuple(weight.shape)}")
    if gate is not None and gate.shape != shape:
        raise ValueError(f"gate must have the shape of x, {tuple(shape)}, got {tuple(gate.shape)}")
    x, weight = _rows(x), weight.contiguous()
    gate, dy = None if gate is None else _rows(gate), None if dy is None else _rows(dy)
    *_, j, k, _ = (1, 1, *x.shape)
    rows = x.numel() // size if size else 0
    y, dx, dgate, dweight = results
    words = _NORM.pack(
        j, k, rows, size, ACTIVATIONS.index(activation), torch.get_num_threads(),
        *_locate(x), *_locate(gate), *_locate(dy), weight.data_ptr(),
        _address(y), _address(dx), _address(dgate), _address(dweight), eps, zero_centred, 0,
    )  # fmt: skip
    if c_function(entry)(words):
        raise MemoryError(f"no memory to add up the gradient of weight over {rows} rows")


def _rows(x: Tensor) -> Tensor:
    """Return x as dense rows in at most three dimensions."""
    return _dense(x if x.dim() <= 4 else x.reshape(-1, x.shape[-1]))


def _locate(x: Tensor | None) -> tuple[int, int, int, int]:
    """Return the address and the strides of x: Rows in layers.c."""
    if x is None:
        return (0, 0, 0, 0)
    i, j, k, _ = (0, 0, 0, *x.stride())[-4:]
    return (x.data_ptr(), i, j, k)


_run_norm = register_op(
    "rms_norm_native",
    _norm,
    _norm_backward,
    fake=lambda x, *_: _like(x),
    fake_backward=lambda dy, x, weight, gate, *_: _norm_grads(x, weight, gate),
    tensors=3,
)


# ---- glu


def glu(x: Tensor) -> Tensor:
    """Return silu(gate) * up, where x is gate | up."""
    return _run_glu(x)


def _glu(x: Tensor) -> Tensor:
    y = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    _gate("glu", x, None, (y, None))
    return y


def _glu_backward(dy: Tensor, x: Tensor) -> Tensor:
    dx = _like(x)
    _gate("glu_backward", x, dy, (None, dx))
    return dx


def _gate(entry: str, x: Tensor, dy: Tensor | None, results: tuple[Tensor | None, Tensor | None]) -> None:
    """Call the C code, which fills results: y, dx."""
    width = x.shape[-1]
    if width % 2:
        raise ValueError(f"x must hold gate | up, an even last dimension, got {tuple(x.shape)}")
    x, x_row = _flat(x)
    dy, dy_row = (None, 0) if dy is None else _flat(dy)
    rows = x.numel() // width if width else 0
    y, dx = results
    words = _GLU.pack(
        rows, width // 2, torch.get_num_threads(), x.data_ptr(), _address(dy), x_row, dy_row, _address(y), _address(dx)
    )
    c_function(entry)(words)


def _flat(x: Tensor) -> tuple[Tensor, int]:
    """Return x with dense rows at equal distances, and that distance."""
    if x.is_contiguous():
        return x, x.shape[-1]
    x = _dense(x.reshape(-1, x.shape[-1]))
    return x, x.stride(0)


_run_glu = register_op(
    "glu_native",
    _glu,
    _glu_backward,
    fake=lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2),
    fake_backward=lambda dy, x: _like(x),
    tensors=1,
)

"""The kernels of rows.py and rotary.py as torch ops, and the functions that layers call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lineate.kernels.launching import ceil_div, next_power, overlap_options, start
from lineate.kernels.layers import convolution
from lineate.kernels.layers import rows as kernels
from lineate.kernels.layers.rotary import turn
from lineate.kernels.tape import launch
from lineate.torch_ops.invariance import is_batch_invariant
from lineate.torch_ops.registrar import register_op

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (2, 3, 4)
"""The sizes of a convolution that the kernels take."""
WIDEST_NORM = 8192

# Enough programs for any device; a constant, so that no result depends on the device.
_PROGRAMS = 2048


def unit_of(sizes: Sequence[int]) -> int:
    """Return the unit of strides in elements: 8 if all are multiples of it, so a thread can load 16 bytes."""
    return 8 if all(size % 8 == 0 for size in sizes) else 1


def strides_of(x: Tensor, dims: int) -> tuple[int, ...]:
    """Return the first strides; 0 for a dimension of one element, whose stride is arbitrary and must not matter."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(x.shape[:dims], x.stride(), strict=False))


def _dense_rows(x: Tensor) -> Tensor:
    """Return x if its last dimension is contiguous, as in a view of a fused projection, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def check_dtypes(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.dtype not in KERNEL_DTYPES:
            raise ValueError(f"{name} must be bfloat16, float16 or float32 for the kernels, got {x.dtype}; use torch")


# The short convolution


def _walks(b: int, t: int, channel_blocks: int) -> tuple[int, int]:
    """Return how many tokens a program walks, and how many programs a batch row has (times channel_blocks)."""
    walk = min(max(ceil_div(b * t * channel_blocks, 4 * _PROGRAMS) * 4, 16), 128)
    return walk, ceil_div(t, walk)


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> tuple[int, Tensor | None]:
    if cu_seqlens is None:
        return x.shape[0], None
    return cu_seqlens.shape[0] - 1, cu_seqlens.to(x.device).contiguous()


def _convolve_room(
    x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    y = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    return y, x.new_empty(sequences, x.shape[2], weight.shape[1] - 1)


def _convolve(
    x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y, and the last inputs of each sequence."""
    y, final = _convolve_room(x, weight, state, cu_seqlens)
    b, t, channels = x.shape
    x, weight = _dense_rows(x), weight.contiguous()
    state = None if state is None else state.to(x.dtype).contiguous()
    x_row, x_token = strides_of(x, 2)
    unit = unit_of((channels, x_row, x_token))
    constants = {"CHANNELS": channels, "SIZE": weight.shape[1], "UNIT": unit}
    sequences, bounds = _sequences(x, cu_seqlens)

    def run() -> None:
        if t == 1 and bounds is None:
            block = min(256, next_power(channels))
            start(convolution.convolve_one, (b * ceil_div(channels, block),))(
                x, weight, None, state, y, final, x_row // unit, **constants, BC=block, OVERLAP=False, num_warps=2
            )
            return
        block = min(512, next_power(channels))
        channel_blocks = ceil_div(channels, block)
        walk, blocks = _walks(b, t, channel_blocks)
        start(convolution.convolve, ((b * blocks + sequences) * channel_blocks,))(
            x, weight, state, bounds, y, final, t, sequences, walk, blocks, b * blocks, x_row // unit, x_token // unit,
            **constants, BC=block, num_warps=4,
        )  # fmt: skip

    launch("convolution", (x, weight, state, bounds), (y, final), None, run)
    return y, final


def _convolve_backward_room(
    dy: Tensor, dfinal: Tensor | None, x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dstate = x.new_empty(0) if state is None else state.new_empty(state.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dstate


def _convolve_backward(
    dy: Tensor, dfinal: Tensor | None, x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dweight and dstate, which has no elements if there was no state."""
    dx, dweight, dstate = _convolve_backward_room(dy, dfinal, x, weight, state, cu_seqlens)
    b, t, channels = x.shape
    x, dy, weight = _dense_rows(x), _dense_rows(dy), weight.contiguous()
    given = state is not None
    state = None if state is None else state.to(x.dtype).contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    strides = (*strides_of(x, 2), *strides_of(dy, 2))
    unit = unit_of((channels, *strides))
    block = min(512, next_power(channels))
    channel_blocks = ceil_div(channels, block)
    size = weight.shape[1]
    sequences, bounds = _sequences(x, cu_seqlens)

    def run() -> None:
        walk, blocks = _walks(b, t, channel_blocks)
        partials = torch.empty(b * blocks, size, channels, dtype=torch.float32, device=x.device)
        start(convolution.convolve_backward, ((b * blocks + (sequences if given else 0)) * channel_blocks,))(
            x, weight, state, bounds, dy, dfinal, dx, dstate if given else None, partials,
            t, sequences, walk, blocks, b * blocks, *(s // unit for s in strides),
            CHANNELS=channels, SIZE=size, BC=block, UNIT=unit, num_warps=4,
        )  # fmt: skip
        _add_partials(partials, dweight)

    made = dx, dstate if given else None, dweight
    launch("convolution's gradients", (x, weight, state, bounds, dy, dfinal), made, dstate.dtype, run)
    return dx, dweight, dstate


def _add_partials(partials: Tensor, total: Tensor) -> None:
    """Add up partials `count size channels` into total `channels size` (size 1: `channels`)."""
    count, size, channels = partials.shape
    start(kernels.add_partials, (ceil_div(size * channels, 32),))(
        partials, total, count, CHANNELS=channels, SIZE=size, ROWS=32, BC=32, num_warps=4
    )


def _save_convolution(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)
    ctx.result = output[0].shape, output[0].dtype


def _differentiate_convolution(backward, ctx, dy, dfinal):  # type: ignore[no-untyped-def]
    x, weight, state, cu_seqlens = ctx.saved_tensors
    if dy is None:
        dy = x.new_zeros(ctx.result[0], dtype=ctx.result[1])
    dx, dweight, dstate = backward(dy, dfinal, x, weight, state, cu_seqlens)
    return dx, dweight, None if state is None else dstate, None


_run_convolution = register_op(
    "short_convolution_triton",
    _convolve,
    _convolve_backward,
    fake=_convolve_room,
    fake_backward=_convolve_backward_room,
    tensors=4,
    save=_save_convolution,
    differentiate=_differentiate_convolution,
)


def short_convolution(
    x: Tensor, weight: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run lineate.layers.short_convolution: return y `b t channels` and the new state `rows channels size-1`.

    Bounds are not checked, because that would wait for the device. If they are wrong, nothing outside x is touched, and
    tokens outside every sequence give 0.
    """
    check_dtypes(x=x, weight=weight)
    if weight.shape[1] not in SIZES:
        raise ValueError(f"weight must have shape (channels, size) with size in {SIZES}, got {tuple(weight.shape)}")
    return _run_convolution(x, weight, state, cu_seqlens)


def convolve_in_place(x: Tensor, weight: Tensor, state: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolve one token a row, x `rows channels`; the state `rows channels size-1` is overwritten. No gradients.

    The launches shortly before this must not write the state, which is read while they run (launching.overlapping).
    """
    y = x.new_empty(x.shape)
    channels = x.shape[1]
    (x_row,) = (x.stride(0),) if is_batch_invariant() else strides_of(x, 1)  # which chooses a kernel
    unit = unit_of((channels, x_row))
    block = min(256, next_power(channels))
    with torch.cuda.device_of(x):
        start(convolution.convolve_one, (x.shape[0] * ceil_div(channels, block),))(
            x, weight.contiguous(), bias, state, y, state, x_row // unit,
            CHANNELS=channels, SIZE=weight.shape[1], UNIT=unit, BC=block, num_warps=2,
            **overlap_options(x.device),
        )  # fmt: skip
    return y


# The norms


def _in_heads(x: Tensor) -> Tensor:
    """Return x `... size` as `outer heads size`; a copy only if its memory does not allow a view."""
    return _dense_rows(x).reshape(-1, x.shape[-2] if x.dim() > 3 else 1, x.shape[-1])


def _norm_tiles(size: int, elements: int) -> dict[str, int]:
    width = next_power(size)
    return {"ROWS": max(1, elements // width), "BN": width, "num_warps": min(max(width // 512, 4), 16)}


def _norm_room(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, activation: str, zero_centred: bool, dtype: torch.dtype
) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, activation: str, zero_centred: bool, dtype: torch.dtype
) -> Tensor:
    y = x.new_empty(x.shape, dtype=dtype)
    x = _in_heads(x)
    gate = None if gate is None else _in_heads(gate)
    outer, heads, size = x.shape
    strides = (*strides_of(x, 2), *((0, 0) if gate is None else strides_of(gate, 2)))
    viewed = gate is not None and is_batch_invariant()  # a view of one row has no stride, which must not matter
    unit = 1 if viewed else unit_of((size, *strides))
    tile = _norm_tiles(size, 4096)
    weight = weight.contiguous()

    def run() -> None:
        start(kernels.norm, (ceil_div(outer * heads, tile["ROWS"]),))(
            x, gate, weight, y, outer * heads, eps, *(s // unit for s in strides),
            HEADS=heads, SIZE=size, UNIT=unit, SILU=activation == "silu", SHIFT=float(zero_centred), **tile,
            **overlap_options(x.device),
        )  # fmt: skip

    launch("norm", (x, gate, weight), (y,), (eps, activation, zero_centred, dtype, viewed), run)
    return y


def _norm_backward_room(
    dy: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, activation: str, zero_centred: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dgate = x.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return x.new_empty(x.shape), dgate, weight.new_empty(weight.shape)


def _norm_backward(
    dy: Tensor, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, activation: str, zero_centred: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dx, dgate (without elements if there was no gate) and dweight."""
    dx, dgate, dweight = _norm_backward_room(dy, x, gate, weight, eps, activation, zero_centred)
    x, dy = _in_heads(x), _in_heads(dy)
    gate = None if gate is None else _in_heads(gate)
    outer, heads, size = x.shape
    strides = (*strides_of(x, 2), *((0, 0) if gate is None else strides_of(gate, 2)), *strides_of(dy, 2))
    unit = unit_of((size, *strides))
    tile = _norm_tiles(size, 2048)
    most = _PROGRAMS if tile["BN"] <= 256 else _PROGRAMS // 4  # each writes its part of dweight
    tiles = ceil_div(ceil_div(outer * heads, tile["ROWS"]), most)
    programs = ceil_div(outer * heads, tile["ROWS"] * tiles) if tiles else 0
    weight = weight.contiguous()

    def run() -> None:
        partials = torch.empty(programs, 1, size, dtype=torch.float32, device=x.device)
        start(kernels.norm_backward, (programs,))(
            x, gate, weight, dy, dx, None if gate is None else dgate, partials, outer * heads, tiles, eps,
            *(s // unit for s in strides),
            HEADS=heads, SIZE=size, UNIT=unit, SILU=activation == "silu", SHIFT=float(zero_centred), **tile,
        )  # fmt: skip
        _add_partials(partials, dweight)

    made = dx, None if gate is None else dgate, dweight
    launch("norm's gradients", (x, gate, weight, dy), made, (eps, activation, zero_centred), run)
    return dx, dgate, dweight


def _save_norm(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:6]


def _differentiate_norm(backward, ctx, dy):  # type: ignore[no-untyped-def]
    if dy is None:
        return (None,) * 7
    x, gate, weight = ctx.saved_tensors  # read only once, because activation checkpointing refuses a second read
    dx, dgate, dweight = backward(dy, x, gate, weight, *ctx.options)
    return dx, None if gate is None else dgate, dweight, None, None, None, None


_run_norm = register_op(
    "norm_triton",
    _norm,
    _norm_backward,
    fake=_norm_room,
    fake_backward=_norm_backward_room,
    tensors=3,
    save=_save_norm,
    differentiate=_differentiate_norm,
)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, zero_centred: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """Return x / sqrt(mean x^2 + eps) * weight (zero-centred: 1 + weight) over the last dimension; dtype None: x's."""
    check_dtypes(x=x, weight=weight)
    _check_width(x)
    return _run_norm(x, None, weight, eps, "", zero_centred, x.dtype if dtype is None else dtype)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6, activation: str = "silu"
) -> Tensor:  # fmt: skip
    """Return x / sqrt(mean x^2 + eps) * weight * activation(gate) over the last dimension, in the dtype of x."""
    check_dtypes(x=x, gate=gate, weight=weight)
    _check_width(x)
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"activation must be 'silu' or 'sigmoid', got {activation!r}")
    if gate.shape != x.shape:
        raise ValueError(f"gate must have the shape of x = {tuple(x.shape)}, got {tuple(gate.shape)}")
    return _run_norm(x, gate, weight, eps, activation, False, x.dtype)


def _check_width(x: Tensor) -> None:
    if x.shape[-1] > WIDEST_NORM:
        raise ValueError(f"x must have at most {WIDEST_NORM} channels for the kernels, got {x.shape[-1]}; use torch")


# The gated linear unit


def as_rows(x: Tensor) -> Tensor:
    """Return x `... n` as `rows n`; a copy only if its memory does not allow a view."""
    return _dense_rows(x).reshape(-1, x.shape[-1])


def _unit_tiles(rows: int, n: int, elements: int) -> tuple[dict[str, int], int]:
    """Return the size of a tile of `elements` elements, and the number of tiles."""
    width = min(1024, next_power(n))
    tile = {"ROWS": elements // width, "BN": width}
    return tile, ceil_div(rows, tile["ROWS"]) * ceil_div(n, width)


def _glu_room(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _glu(x: Tensor) -> Tensor:
    y = _glu_room(x)
    x = as_rows(x)
    rows, n = x.shape[0], x.shape[1] // 2
    (x_row,) = strides_of(x, 1)
    unit = unit_of((n, x_row))
    tile, programs = _unit_tiles(rows, n, 4096)

    def run() -> None:
        start(kernels.gated_unit, (programs,))(
            x, y, rows, x_row // unit, N=n, **tile, UNIT=unit, num_warps=4, **overlap_options(x.device)
        )

    launch("unit", (x,), (y,), None, run)
    return y


def _glu_backward_room(dy: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _glu_backward(dy: Tensor, x: Tensor) -> Tensor:
    dx = x.new_empty(x.shape)
    x, dy = as_rows(x), as_rows(dy)
    rows, n = x.shape[0], x.shape[1] // 2
    strides = (*strides_of(x, 1), *strides_of(dy, 1))
    unit = unit_of((n, *strides))
    tile, programs = _unit_tiles(rows, n, 2048)

    def run() -> None:
        start(kernels.gated_unit_backward, (programs,))(
            x, dy, dx, rows, *(s // unit for s in strides), N=n, **tile, UNIT=unit, num_warps=4
        )

    launch("unit's gradients", (x, dy), (dx,), None, run)
    return dx


def _differentiate_glu(backward, ctx, dy):  # type: ignore[no-untyped-def]
    return None if dy is None else backward(dy, *ctx.saved_tensors)


def _save_glu(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


_run_glu = register_op(
    "glu_triton",
    _glu,
    _glu_backward,
    fake=_glu_room,
    fake_backward=_glu_backward_room,
    tensors=1,
    save=_save_glu,
    differentiate=_differentiate_glu,
)


def glu(x: Tensor) -> Tensor:
    """Return silu(gate) * up, where x is gate | up."""
    check_dtypes(x=x)
    return _run_glu(x)


# Rotary positions


def _rotate_room(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    return x.new_empty(x.shape)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    y = _rotate_room(x, cos, sin, back)
    x = _dense_rows(x)
    b, t, heads, size = x.shape
    half = cos.shape[-1]
    strides = strides_of(x, 3)
    unit = unit_of((size, half, *strides))
    tile = {"ROWS": 16, "BH": next_power(half), "BR": next_power(max(size - 2 * half, 1))}

    def run() -> None:
        start(turn, (ceil_div(b * t * heads, tile["ROWS"]),))(
            x, y, cos, sin, b * t * heads, t, *(s // unit for s in strides), t * half if cos.dim() == 3 else 0,
            HEADS=heads, SIZE=size, HALF=half, BACK=back, **tile, UNIT=unit, num_warps=4,
        )  # fmt: skip

    launch("turn", (x, cos, sin), (y,), back, run)
    return y


def _rotate_backward_room(dy: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    return dy.new_empty(dy.shape)


def _rotate_backward(dy: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    return _rotate(dy, cos, sin, not back)


def _save_rotate(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, cos, sin, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate_rotate(backward, ctx, dy):  # type: ignore[no-untyped-def]
    dx = None if dy is None else backward(dy, *ctx.saved_tensors, ctx.back)
    return dx, None, None, None


_run_rotate = register_op(
    "rotate_triton",
    _rotate,
    _rotate_backward,
    fake=_rotate_room,
    fake_backward=_rotate_backward_room,
    tensors=3,
    save=_save_rotate,
    differentiate=_differentiate_rotate,
)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x `b t heads d` with its first 2 n channels rotated by the angles of cos and sin `[b] t n`, float32."""
    check_dtypes(x=x)
    for name, table in (("cos", cos), ("sin", sin)):
        shapes = [(*x.shape[k:2], cos.shape[-1]) for k in (0, 1)]
        if tuple(table.shape) not in shapes or table.dtype != torch.float32 or 2 * cos.shape[-1] > x.shape[-1]:
            raise ValueError(
                f"{name} must be float32 of shape ([b,] t, n), n at most {x.shape[-1] // 2}, for x {tuple(x.shape)}, "
                f"got {table.dtype} of {tuple(table.shape)}"
            )
    return _run_rotate(x, cos.contiguous(), sin.contiguous(), False)

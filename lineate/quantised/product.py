"""x weight^T for a weight in codes, with the gradient of x; the weight itself is frozen."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.native import quantised as native
from lineate.native.build import available
from lineate.quantised.expanded import expanded
from lineate.quantised.format import BLOCK, FORMATS, TILE, Format
from lineate.torch_ops.registrar import register_op
from lineate.torch_ops.tracing import in_memory, is_eager, transformed

_float8 = ContextVar("float8_activations", default=0)  # how many blocks are open
_rounded = ContextVar("rounded_activations", default=0)
DECODED = 2**20
"""Elements that are decoded at a time."""
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantised_linear(x: Tensor, codes: Tensor, scales: Tensor, shape: tuple[int, int], form: Format) -> Tensor:
    """Return x weight^T in x's dtype; x `... columns`, codes and scales of a weight of this shape in tiles."""
    if not form.holds(codes, scales, shape):
        raise ValueError(
            f"codes and scales must be the tiles of a weight {tuple(shape)}, uint8 and {_text(form.scales_dtype)} for "
            f"{form.name}, got {tuple(codes.shape)} in {codes.dtype} and {tuple(scales.shape)} in {scales.dtype}; use "
            "quantize"
        )
    check_input(x, shape, codes.device)
    if transformed():  # torch.func differentiates plain torch
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        return F.linear(x.to(wide), form.decode(codes, scales, shape[0]).to(wide)).to(x.dtype)
    result: Tensor = _run(x, codes, scales, shape[0], form.name)
    return result


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def float8_activations(device: torch.device | str = "cuda") -> Iterator[None]:
    """Round rows to float8 where many of them are multiplied by a weight of fp8 on a GPU, which is twice as fast.

    Inside, in this thread, torch._scaled_mm multiplies more than 64 rows of bfloat16 by a weight whose columns are a
    multiple of 128. 128 columns of a row share a scale. Every other product is what it is outside.

    Args:
        device: A GPU of compute capability 9; otherwise ValueError is raised.
    """
    place = torch.device(device)
    if place.type != "cuda" or not torch.cuda.is_available() or not _has_triton():
        raise ValueError(f"float8_activations needs a GPU with Triton, got device {place}; leave it out")
    from lineate.kernels.layers import quantised_products  # triton, at its first use

    why = quantised_products.why_not_float8(place)
    if why is not None:
        raise ValueError(f"float8_activations cannot run: {why}; leave it out")
    with _counted(_float8):
        yield


@contextmanager
def rounded_activations() -> Iterator[None]:
    """Round rows further before they are multiplied by weights of int8 and float16 on a CPU, which is faster.

    Inside, rows are rounded to 8 bits for int8, 32 columns with a scale, where they otherwise have 15. At most 16 rows
    are rounded to float16 for float16, and eight products at a time are summed in it, on CPUs that multiply so (ARM
    with fp16) and where no gradient is needed; a product that overflows there is computed again in float32. Every other
    product is what it is outside, such as those of other threads: a started Engine has a thread of its own.
    """
    with _counted(_rounded):
        yield


@contextmanager
def _counted(opened: ContextVar[int]) -> Iterator[None]:
    """Count a block while it is open; blocks may be left in any order, as generators leave theirs."""
    opened.set(opened.get() + 1)
    try:
        yield
    finally:
        opened.set(max(0, opened.get() - 1))


def are_rounded() -> bool:
    """Whether rounded_activations is on."""
    return _rounded.get() > 0


def half_linear(x: Tensor, weight: Tensor) -> Tensor | None:
    """Return x weight^T in x's dtype, multiplied in float16 if rounded_activations allows it; None if not.

    x `... k`, weight `m k`.
    """
    if not are_rounded() or weight.dtype is not torch.float16 or x.dtype is torch.float64 or not is_eager(x, weight):
        return None
    x, weight = in_memory((x, weight))
    y = native.half_product(x.reshape(-1, x.shape[-1]), weight)
    return None if y is None else y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def check_input(x: Tensor, shape: tuple[int, int], device: torch.device) -> None:
    """Raise unless x can be multiplied with a weight of this shape on this device."""
    if not x.dtype.is_floating_point or x.dim() == 0 or x.shape[-1] != shape[1]:
        raise ValueError(f"x must be floats `... {shape[1]}` for a weight {shape}, got {tuple(x.shape)} in {x.dtype}")
    if x.device != device:
        raise ValueError(f"x must be on the device of the weight, {device}, got {x.device}; move one of them")


def decoded(codes: Tensor, scales: Tensor, rows: int, dtype: torch.dtype, form: Format) -> Tensor:
    """Return the weight `rows columns`, or `experts rows columns`, in this dtype."""
    if form.kernel is not None and _on_gpu(codes, dtype) and codes.dim() in (5, 6):
        from lineate.kernels.layers import quantised_products  # triton, at its first use

        return quantised_products.decoded(quantised_products.Codes(codes, scales, rows, form.kernel), dtype)
    return form.decode(codes, scales, rows).to(dtype)


def looked_up(codes: Tensor, scales: Tensor, ids: Tensor, rows: int, dtype: torch.dtype, form: Format) -> Tensor:
    """Return these rows of a weight `rows columns` in this dtype, `... columns`; the ids must be those of rows."""
    if form.kernel is not None and _on_gpu(codes, dtype):
        from lineate.kernels.layers import quantised_products  # triton, at its first use

        return quantised_products.decoded_rows(quantised_products.Codes(codes, scales, rows, form.kernel), ids, dtype)
    coded = form.product
    if coded is not None and coded.looks_up and codes.is_cpu and is_eager(codes, scales, ids) and available("products"):
        flat = ids.reshape(-1).to("cpu", torch.int64).contiguous()
        made = native.rows(codes.contiguous(), scales.contiguous(), flat, coded)
        return made.view(*ids.shape, made.shape[1]).to(dtype)
    return form.decode_rows(codes, scales, ids).to(dtype)


def _on_gpu(codes: Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels take these codes, for numbers of this dtype."""
    return codes.is_cuda and dtype in _KERNEL_DTYPES and _has_triton() and is_eager(codes) and codes.is_contiguous()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _forward(x: Tensor, codes: Tensor, scales: Tensor, rows: int, form: str) -> Tensor:
    flat, kept = x.reshape(-1, x.shape[-1]), FORMATS[form]
    if flat.shape[0] and x.is_cuda and kept.kernel is not None and _on_gpu(codes, x.dtype):
        from lineate.kernels.layers import quantised_products  # triton, at its first use

        weight = quantised_products.Codes(codes, scales.contiguous(), rows, kept.kernel)
        y = quantised_products.linear(flat.contiguous(), weight, _float8.get() > 0)
        return y.view(*x.shape[:-1], rows)
    on_cpu, coded = x.is_cpu and x.dtype is not torch.float64, kept.product
    if on_cpu and coded is not None and flat.shape[0] and available("products"):
        y = native.product(flat.float(), codes.contiguous(), scales.contiguous(), rows, coded, are_rounded())
    elif on_cpu and (copy := expanded(codes, scales, rows, kept)) is not None:
        y = F.linear(flat.float(), copy)
    else:
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        y = torch.empty(flat.shape[0], rows, dtype=wide, device=x.device)
        for first, block in _blocks(codes, scales, rows, kept):
            y[:, first : first + len(block)] = F.linear(flat.to(wide), block.to(wide))
    return y.to(x.dtype).view(*x.shape[:-1], rows)


def _backward(dy: Tensor, x: Tensor, codes: Tensor, scales: Tensor, rows: int, form: str) -> Tensor:
    """Return dx = dy weight."""
    flat = dy.reshape(-1, rows)
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    dx = torch.zeros(flat.shape[0], x.shape[-1], dtype=wide, device=x.device)
    for first, block in _blocks(codes, scales, rows, FORMATS[form]):
        dx.addmm_(flat[:, first : first + len(block)].to(wide), block.to(wide))
    return dx.to(x.dtype).view_as(x)


def _blocks(codes: Tensor, scales: Tensor, rows: int, form: Format) -> Iterator[tuple[int, Tensor]]:
    """Yield a first row and the rows from there on in float32, a few tiles at a time."""
    columns = codes.shape[1] * BLOCK
    tiles = max(1, DECODED // (TILE * columns))
    for at in range(0, codes.shape[0], tiles):
        first = at * TILE
        yield first, form.decode(codes[at : at + tiles], scales[at : at + tiles], min(rows - first, tiles * TILE))


def _fake(x: Tensor, codes: Tensor, scales: Tensor, rows: int, form: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


_run = register_op(
    "quantised_linear",
    _forward,
    _backward,
    fake=_fake,
    fake_backward=lambda dy, x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    tensors=3,
)

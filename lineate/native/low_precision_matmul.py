"""Multiplies matrices on a CPU where torch is slow: 16-bit ones without instructions for them, and a few rows.

    y = round(wide(x) wide(W)^T + wide(bias))       summed in float32, rounded once

On such a CPU, torch's own products in bfloat16 take up to hundreds of times as long. Weights are not converted: blocks
of their rows are widened one after another, so that a model's memory does not double. Under autocast the operands are
not rounded first; the result has autocast's dtype.

A few rows, as decoding has them, are multiplied by our C code, also on a CPU with 16-bit products. torch needs up to
twice the time for four to sixteen rows of float32, and on some processors more than we do for up to 64; its bits depend
on their number, ours do not.

Inside a compiler or a transform, plain torch functions run, without blocks. Tensor subclasses that define their own
products, such as quantised weights, use those.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lineate.native import product as native
from lineate.system.processor import multiplies
from lineate.torch_ops.tracing import is_eager, needs_grad

BLOCK = 2**20
"""The most elements that are widened as a whole (4 MB in float32); larger weights are widened in blocks of 16 MB."""
_HALVES = (torch.bfloat16, torch.float16)


def half_dtype(x: Tensor) -> torch.dtype | None:
    """Return the 16-bit dtype of products with x if they must go through float32; None if torch multiplies."""
    dtype = x.dtype
    if torch.is_autocast_enabled("cpu") and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype("cpu")
    return dtype if dtype in _HALVES and x.is_cpu and not multiplies(dtype) else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias; x `... k`, weight `m k`, bias `m`."""
    dtype = half_dtype(x)
    if dtype is None or not _multiply(x, weight, bias) or weight.dim() != 2:
        few = _few_rows(x, weight, bias) if has_few_rows(x) else None
        return F.linear(x, weight, bias) if few is None else few
    with _without_autocast():
        if needs_grad(x, weight, bias) and is_eager(x, weight, bias):
            result: Tensor = _Linear.apply(x, weight, bias, dtype)
            return result
        return wide_linear(x, weight, bias, dtype)


def has_few_rows(x: Tensor) -> bool:
    """Whether x `... k` has so few rows that our C code may multiply them; a graph is for all numbers."""
    if torch.compiler.is_compiling() or not x.is_cpu:
        return False
    most = native.MOST_ROWS if x.dtype is torch.float32 else native.FEW_ROWS if x.dtype in _HALVES else 0
    return 0 < x.numel() <= most * x.shape[-1]


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return x weight^T + bias of a few rows; None where torch must multiply."""
    if weight.dtype is not x.dtype or not weight.is_cpu or weight.dim() != 2 or needs_grad(x, weight, bias):
        return None
    if torch.is_autocast_enabled("cpu") or not is_eager(x, weight, bias):
        return None
    y = native.product(x.reshape(-1, x.shape[-1]), weight)
    if y is None:
        return None
    return (y if bias is None else y + bias).to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Return x y."""
    dtype = half_dtype(x)
    if dtype is None or not _multiply(x, y, None):
        return x @ y
    with _without_autocast():
        return (x.float() @ y.float()).to(dtype)


def multiply_heads(x: Tensor, y: Tensor) -> Tensor:
    """Return x_h y_h for every head h; x `b t h n`, y `h n m` -> `b t h m`."""
    if has_separate_rows(x, y):
        return torch.cat([multiply_heads(row, y) for row in x.split(1)])
    dtype = half_dtype(x)
    if dtype is None or not _multiply(x, y, None):
        return torch.einsum("bthn,hnm->bthm", x, y)
    with _without_autocast():
        if not is_eager(x, y) or needs_grad(x, y):
            return torch.einsum("bthn,hnm->bthm", x.float(), y.float()).to(dtype)
        heads = [times(own, of_head) for own, of_head in zip(x.flatten(0, 1).unbind(1), y, strict=True)]
        return torch.stack(heads, 1).to(dtype).unflatten(0, x.shape[:2])


def has_separate_rows(x: Tensor, *others: Tensor) -> bool:
    """Whether torch must compute the rows of x `rows ...` one by one, because its bits depend on their number.

    These are the few rows of a decoding step on a CPU, whose products with weights have the bits of one row.
    """
    if torch.compiler.is_compiling() or not x.is_cpu or not 1 < x.shape[0] <= native.MOST_ROWS:
        return False
    return not needs_grad(x, *others) and is_eager(x, *others)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    shared_keys: bool = False,
) -> Tensor:
    """Run F.scaled_dot_product_attention; q `b heads t k`, k and v `b kv n k|v`, kv < heads only with shared_keys."""
    # torch wants bools, which comparisons of sizes are not in a graph for any length, nor inside torch.jit.trace.
    causal, shared_keys = True if causal else False, True if shared_keys else False  # noqa: SIM210
    dtype = half_dtype(q)
    if dtype is None or not (_multiply(q, k, None) and _multiply(q, v, None)):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=shared_keys
        )
    softmax: Callable[[Tensor, Tensor, Tensor], Tensor] = partial(
        F.scaled_dot_product_attention, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=shared_keys
    )
    with _without_autocast():
        if k.numel() <= BLOCK or not is_eager(q, k, v) or needs_grad(q, k, v):
            return softmax(q.float(), k.float(), v.float()).to(dtype)
        large = k[0, 0].numel() >= BLOCK // 16  # for small heads, a loop over heads costs more than widening
        if q.shape[2] <= 128 and large and not causal and not shared_keys:
            return _attend_few(q, k, v, mask, q.shape[3] ** -0.5 if scale is None else scale, dtype)
        heads = zip(*(x.chunk(k.shape[1], 1) for x in (q, k, v)), strict=True)  # one for each head of the keys
        return torch.cat([softmax(*(x.float() for x in own)).to(dtype) for own in heads], 1)


def _attend_few(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """Run attention of few queries over many keys without storing these wide; q `b heads t k`, k, v `b heads n k|v`."""
    output = torch.empty(*q.shape[:3], v.shape[3], dtype=dtype, device=q.device)
    for row, head in product(range(q.shape[0]), range(q.shape[1])):
        scores = scale * wide_linear(q[row, head], k[row, head])
        if mask is not None:
            shown = mask.expand(*q.shape[:3], k.shape[2])[row, head]
            scores = scores.masked_fill(~shown, -torch.inf)
        output[row, head] = times(scores.softmax(-1), v[row, head])
    return output


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return x weight^T + bias for operands of any dtype through float32, in blocks; autocast must be off."""
    if not is_eager(x, weight, bias):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype)
    rows = x.reshape(-1, x.shape[-1])
    wide = native.product(rows, weight)
    if wide is None and (weight.numel() <= BLOCK or weight.dtype == torch.float32):
        wide = F.linear(rows.float(), weight.float())
    if wide is not None:
        y = (wide if bias is None else wide + bias).to(dtype)
    else:
        y, rows = torch.empty(rows.shape[0], weight.shape[0], dtype=dtype, device=x.device), rows.float()
        for at, block in _blocks(weight):
            y[:, at] = F.linear(rows, block, None if bias is None else bias[at].float())
    return y.view(*x.shape[:-1], weight.shape[0])


def times(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight in float32; x `n m`, weight `m k` of any dtype; autocast must be off."""
    if needs_grad(x, weight) or weight.dtype == torch.float32 or not is_eager(x, weight):
        return x.float() @ weight.float()
    found = native.combine(x, weight) if weight.stride(1) == 1 else native.product(x, weight.mT)
    if found is not None:
        return found
    if weight.numel() <= BLOCK:
        return x.float() @ weight.float()
    out = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float32, device=x.device)
    for rows, block in _blocks(weight):
        out.addmm_(x[:, rows].float(), block)
    return out


def _outer(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x^T y in dtype; x `n m`, y `n k`."""
    x, y = x.T, y.float()
    if needs_grad(x, y) or x.shape[0] * y.shape[1] <= BLOCK:
        return (x.float() @ y).to(dtype)
    out, size = torch.empty(x.shape[0], y.shape[1], dtype=dtype, device=x.device), max(64, BLOCK // y.shape[1])
    for start in range(0, len(x), size):
        out[start : start + size] = x[start : start + size].float() @ y
    return out


class LinearThroughFloat32(TorchFunctionMode):
    """A mode that replaces F.linear by `linear`, for modules that wrap a linear layer or have hooks."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (_linear if func is F.linear else func)(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run linear, with the argument names of F.linear."""
    return linear(input, weight, bias)


def _without_autocast() -> AbstractContextManager[object]:
    """Switch autocast off if it is on, so that float32 stays float32; checking first is cheaper than switching."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def _multiply(x: Tensor, y: Tensor, bias: Tensor | None) -> bool:
    """Whether torch would multiply these: they have one dtype, or autocast is on. Otherwise torch raises."""
    if not (_is_plain(x) and _is_plain(y)):
        return False
    if torch.is_autocast_enabled("cpu"):
        return y.is_floating_point() and y.dtype is not torch.float64 and y.is_cpu
    return y.dtype is x.dtype and y.is_cpu and (bias is None or bias.dtype is x.dtype)


def _is_plain(x: Tensor) -> bool:
    """Whether x is a plain tensor, or of a subclass that does not override torch's functions."""
    kind = type(x)
    if kind in (Tensor, torch.nn.Parameter):
        return True
    function = getattr(kind.__torch_function__, "__func__", None)
    own = function is not Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    return not own and kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def _blocks(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows with these rows of the weight in float32; each block overwrites the one before."""
    size = max(64, 4 * BLOCK // weight.shape[1])  # larger blocks, larger products, which are faster
    buffer = torch.empty(min(size, len(weight)), weight.shape[1], dtype=torch.float32, device=weight.device)
    for start in range(0, len(weight), size):
        block = weight[start : start + size]
        yield slice(start, start + size), buffer[: len(block)].copy_(block)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, dtype):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.bias = None if bias is None else bias.dtype
        return wide_linear(x, weight, bias, dtype)

    @staticmethod
    def backward(ctx, d):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        rows, dx, dweight, dbias = d.reshape(-1, d.shape[-1]), None, None, None
        with _without_autocast():
            if ctx.needs_input_grad[0]:
                dx = times(rows, weight).to(x.dtype).view_as(x)
            if ctx.needs_input_grad[1]:
                dweight = _outer(rows, x.reshape(-1, x.shape[-1]), weight.dtype)
            if ctx.needs_input_grad[2]:
                dbias = rows.float().sum(0).to(ctx.bias)
        return dx, dweight, dbias, None

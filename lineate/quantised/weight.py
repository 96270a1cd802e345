"""A frozen weight that is kept in 16, 8 or 4 bits or float8, and looks like a tensor of its own dtype.

    linear.weight = nn.Parameter(quantize(linear.weight, "int8"), requires_grad=False)

Products with it (F.linear), lookups (F.embedding) and an expert of many (weight[e]) read the stored numbers.
Any other function of torch gets the decoded values.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.native.low_precision_matmul import wide_linear
from lineate.quantised.format import BLOCK, Format, find_format
from lineate.quantised.old_files import format_of_parts
from lineate.quantised.product import check_input, decoded, half_linear, looked_up, quantised_linear
from lineate.quantised.rounding import TooLargeError
from lineate.rule import full_precision, has_autocast
from lineate.torch_ops.tracing import is_eager, needs_grad


class QuantisedWeight(Tensor):
    """A weight `... rows columns` in a format of `lineate.quantised.FORMATS`.

    Args:
        codes: numbers of 16 bits in the weight's shape, or codes of 8 or 4 in tiles (lineate/quantised/format.py).
        scales: in tiles, in the format's dtype; None for 16 bits.
        shape: of the weight.
        form: the format, or its name.
        dtype: that the weight has for others, which is that of products with it.
    """

    codes: Tensor
    scales: Tensor | None
    format: Format

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        scales: Tensor | None,
        shape: tuple[int, ...],
        form: str | Format,
        dtype: torch.dtype = torch.float32,
    ) -> "QuantisedWeight":
        made: QuantisedWeight = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=codes.device, requires_grad=False
        )
        return made

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor | None,
        shape: tuple[int, ...],
        form: str | Format,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.codes, self.scales, self.format = codes, scales, find_format(form, "form")
        if (scales is None) is self.format.has_codes:
            wanted, got = ("None", "a tensor") if scales is not None else ("a tensor", "None")
            raise ValueError(f"scales must be {wanted} for {self.format.name}, got {got}; use quantize")

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"format": self.format.name}

    def __setstate__(self, state: Any) -> None:
        """Take the parts that torch.save wrote, and the format by its name."""
        vars(self).update(state)
        named = state.get("format")
        self.format = format_of_parts(self.codes, self.scales) if named is None else find_format(named)

    @property
    def nbytes_kept(self) -> int:
        """The bytes that the weight takes."""
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def decoded(self) -> Tensor:
        """Return the values, a plain tensor in the weight's dtype."""
        if self.scales is None:
            return self.codes.to(self.dtype)
        return decoded(self.codes, self.scales, self.shape[-2], self.dtype, self.format)

    def with_parts(self, run: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> "QuantisedWeight":
        """Return the same weight with run(codes) and run(scales), such as copies on a device."""
        scales = None if self.scales is None else run(self.scales)
        return QuantisedWeight(run(self.codes), scales, tuple(self.shape), self.format, dtype or self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"QuantisedWeight({self.format.name}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        parts = ["codes"] if self.scales is None else ["codes", "scales"]
        return parts, (tuple(self.shape), self.format.name, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> "QuantisedWeight":
        return QuantisedWeight(inner["codes"], inner.get("scales"), *meta)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = _FUNCTIONS.get(func)
        if own is not None:
            found = own(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        own = _OPS.get(func)
        if own is not None:
            return own(*args, **kwargs)
        if func._schema.is_mutable:
            raise RuntimeError(f"a QuantisedWeight is frozen, and {func} would change it; decode it with .decoded()")
        return func(*_decoded(args), **_decoded(kwargs))


def quantize(x: Tensor, form: str | Format, dtype: torch.dtype | None = None) -> QuantisedWeight:
    """Return a weight `... rows columns` in a format of fewer bits.

    Args:
        x: the weight; its columns must be a multiple of 32 for 8 and 4 bits.
        form: the format or its name, "bfloat16", "float16", "int8", "int4" or "fp8".
        dtype: that the result has for others; None: that of x.
    """
    form, shape = find_format(form, "form"), tuple(x.shape)
    if not form.fits(shape):
        raise ValueError(
            f"x must have at least 2 dims and columns in multiples of {BLOCK} for {form.name}, got shape {shape}; "
            "keep it in 16 or 32 bits"
        )
    try:
        return QuantisedWeight(*form.encode(x), shape, form, dtype or x.dtype)
    except TooLargeError as error:
        raise TooLargeError(f"x {error}") from None


def _decoded(value: Any) -> Any:
    """Replace every quantised weight in these arguments by its values."""
    if isinstance(value, QuantisedWeight):
        return value.decoded()
    if isinstance(value, tuple | list):
        return type(value)(_decoded(x) for x in value)
    if isinstance(value, dict):
        return {key: _decoded(x) for key, x in value.items()}
    return value


# ---- functions of torch that read the stored numbers


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, QuantisedWeight) or weight.dim() != 2 or isinstance(input, QuantisedWeight):
        return NotImplemented
    if (lowered := _autocast_dtype(input)) is not None:
        bias = None if bias is None else bias.to(lowered)
        with full_precision(input):
            return _linear(input.to(lowered), weight, bias)
    shape = weight.shape[0], weight.shape[1]
    if weight.scales is None:
        check_input(input, shape, weight.codes.device)
        if needs_grad(input) or input.is_cuda:
            y = F.linear(input, weight.codes.to(input.dtype))
        else:
            rounded = half_linear(input, weight.codes)
            y = wide_linear(input, weight.codes, None, input.dtype) if rounded is None else rounded
    else:
        y = quantised_linear(input, weight.codes, weight.scales, shape, weight.format)
    return y if bias is None else y + bias


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which F.linear converts its operands under autocast; None: it leaves them alone."""
    device = x.device.type
    if not x.is_floating_point() or x.dtype is torch.float64 or not has_autocast(device):
        return None
    if not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *more: Any,
    **named: Any,
) -> Any:
    if not isinstance(weight, QuantisedWeight) or weight.dim() != 2:
        return NotImplemented
    if max_norm is not None:
        raise ValueError(f"max_norm must be None for a quantised weight, which is frozen, got {max_norm}; decode it")
    if weight.scales is None:
        return F.embedding(input, weight.codes).to(weight.dtype)
    _check_ids(input, weight.shape[0])
    return looked_up(weight.codes, weight.scales, input, weight.shape[0], weight.dtype, weight.format)


def _check_ids(ids: Tensor, rows: int) -> None:
    """Raise unless these are rows of a weight; its tiles have more rows, and negative numbers count from their end."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids of an embedding must be int32 or int64, got {ids.dtype}")
    if ids.is_cpu and ids.numel() and is_eager(ids):
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= rows:
            raise IndexError(f"ids of an embedding must lie in 0 .. {rows - 1}, got {low} .. {high}")


def _item(weight: Tensor, index: Any) -> Any:
    if not isinstance(weight, QuantisedWeight) or type(index) is not int or weight.dim() != 3:
        return NotImplemented
    scales = None if weight.scales is None else weight.scales[index]
    return QuantisedWeight(weight.codes[index], scales, tuple(weight.shape[1:]), weight.format, weight.dtype)


def _detach(weight: QuantisedWeight) -> QuantisedWeight:
    """Return the same weight; through dispatch, torch would import 500 modules for its distributed tensors."""
    return weight.with_parts(Tensor.detach)


def _share(weight: QuantisedWeight) -> QuantisedWeight:
    """Move the numbers into memory that other processes see; the weight itself has none."""
    for part in (weight.codes, weight.scales):
        if part is not None:
            part.share_memory_()
    return weight


def _set_data(weight: Tensor, new: Tensor) -> None:
    """Take the numbers of another weight of this format and shape; torch would set nothing, and not say so."""
    if not isinstance(weight, QuantisedWeight) or not isinstance(new, QuantisedWeight) or not _are_alike(weight, new):
        raise RuntimeError(
            f"the data of a QuantisedWeight must be those of one of its own format, {weight!r:.120}, "
            f"got {_shown(new)}; replace the parameter instead: module.weight = nn.Parameter(tensor)"
        )
    weight.codes, weight.scales = new.codes, new.scales


def _are_alike(one: QuantisedWeight, other: QuantisedWeight) -> bool:
    return (one.format, one.shape, one.dtype) == (other.format, other.shape, other.dtype)


def _shown(x: Tensor) -> str:
    return f"{x!r:.120}" if isinstance(x, QuantisedWeight) else f"a plain tensor of shape {tuple(x.shape)}"


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    F.linear: _linear,
    F.embedding: _embedding,
    Tensor.__getitem__: _item,
    Tensor.detach: _detach,
    Tensor.share_memory_: _share,
    Tensor.is_shared: lambda weight: weight.codes.is_shared(),
}


# ---- ops of torch that copy or move a weight


def _to_copy(
    x: QuantisedWeight, *, dtype: Any = None, device: Any = None, non_blocking: bool = False, **named: Any
) -> Any:
    if dtype is not None and not dtype.is_floating_point:
        return torch.ops.aten._to_copy(x.decoded(), dtype=dtype, device=device)
    return x.with_parts(lambda part: part.to(device, non_blocking=non_blocking, copy=True), dtype)


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Overwrite x by a weight of the same format and shape, as load_state_dict does; a plain x by the values."""
    if not isinstance(x, QuantisedWeight):
        assert isinstance(source, QuantisedWeight)
        return x.copy_(source.decoded(), non_blocking)
    if not isinstance(source, QuantisedWeight) or (source.format, source.shape) != (x.format, x.shape):
        raise RuntimeError(
            f"a QuantisedWeight is only overwritten by one of its own format, {x!r}, got {_shown(source)}; use quantize"
        )
    x.codes.copy_(source.codes, non_blocking)
    if x.scales is not None and source.scales is not None:
        x.scales.copy_(source.scales, non_blocking)
    for part in (x.codes, x.scales):  # torch counts no versions of what is written inside an op
        if part is not None and not part.is_inference():
            torch.autograd.graph.increment_version(part)
    return x


_OPS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.detach.default: lambda x: x.with_parts(lambda part: part.detach()),
    torch.ops.aten.alias.default: lambda x: x.with_parts(lambda part: part),
    torch.ops.aten.clone.default: lambda x, **named: x.with_parts(lambda part: part.clone()),
    torch.ops.aten.empty_like.default: lambda x, **named: x.with_parts(torch.empty_like),
    torch.ops.aten._to_copy.default: _to_copy,
    torch.ops.aten.copy_.default: _copy,
}


SmallWeight = QuantisedWeight  # what files of torch.save before 0.2.0 name, here or in lineate.small
_NAMES = tuple((QuantisedWeight, f"lineate.{package}.weight.SmallWeight") for package in ("quantised", "small"))
torch.serialization.add_safe_globals([QuantisedWeight, *_NAMES])  # so that torch.load accepts a saved state_dict


def kept_nbytes(x: Tensor) -> int:
    """Return the bytes that a tensor takes, quantised or not."""
    return x.nbytes_kept if isinstance(x, QuantisedWeight) else x.nbytes

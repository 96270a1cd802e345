"""Which weights of a model are quantised, in one list.

    quantised       in_proj (RWKV-7: q_proj, k_proj, v_proj) and out_proj of mixers, gate_up_proj, up_proj and
                    down_proj of feed-forwards (shared experts too), experts_gate_up, experts_down, embed, head, and
                    in_proj of the prediction head
    stay as is      convolutions, norms, biases, A_log, dt_bias, D; routers and the gates of shared experts; low-rank
                    gates (decay_proj, gate_proj, and all of RWKV-7's); up_proj of latent attention; the initial weights
                    of memories that learn; and, for 8 and 4 bits, any weight whose columns are no multiple of 32

What stays has few numbers, is exponentiated, decides which expert runs, or is read in another way than by a product.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lineate.quantised.format import BY_BITS, TILE, Format, find_format
from lineate.quantised.rounding import TooLargeError, check_half
from lineate.quantised.weight import QuantisedWeight

MATRICES = re.compile(
    r"(^|\.)(embed|head|mixer\.(in_proj|[qkv]_proj|out_proj)|prediction\.in_proj|feed\.(shared\.)?(gate_up|up|down)_proj)\.weight$"
)
"""Names of parameters `rows columns` that are quantised."""
EXPERTS = re.compile(r"(^|\.)feed\.experts_(gate_up|down)$")
"""Names of parameters `experts rows columns` that are quantised."""
BLOCK = 2**18
"""Elements that are rounded at a time."""


def name_of_bits(bits: int | str | None, flag: str = "--bits") -> str | None:
    """Return the name of the format that a number of bits, also as a text, or "fp8" stands for; None stays None."""
    if bits is None:
        return None
    found = next((name for known, name in BY_BITS.items() if str(known) == str(bits).lower()), None)
    if found is None:
        raise ValueError(f"{flag} must be one of {', '.join(map(str, BY_BITS))}, got {bits}")
    return found


def quantised_formats(model: nn.Module | Mapping[str, tuple[int, ...]], form: str | Format) -> dict[str, Format]:
    """Return the parameters that are quantised, by name, and their format.

    Args:
        model: A model, or the shapes of its parameters by name.
        form: The format or its name, "bfloat16", "float16", "int8", "int4" or "fp8".
    """
    form = find_format(form)
    shapes = _shapes(model) if isinstance(model, nn.Module) else model
    return {name: form for name, shape in shapes.items() if becomes_quantised(name, tuple(shape), form)}


def becomes_quantised(name: str, shape: tuple[int, ...], form: Format) -> bool:
    """Whether a parameter of this name and shape is quantised."""
    found = MATRICES.search(name) if len(shape) == 2 else EXPERTS.search(name) if len(shape) == 3 else None
    return found is not None and form.fits(shape)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in model.named_parameters()}


def quantised_parameters(model: nn.Module) -> dict[str, QuantisedWeight]:
    """Return the parameters that are quantised, by name."""
    return {name: x for name, x in model.named_parameters() if isinstance(x, QuantisedWeight)}


def format_of(model: nn.Module) -> Format | None:
    """Return the format that a model's weights are kept in; None if none is quantised, ValueError if they are mixed."""
    found = {name: x.format for name, x in quantised_parameters(model).items()}
    if not found:
        return None
    form = next(iter(found.values()))
    wanted = quantised_formats(model, form)
    if found != wanted:
        name = next(name for name in {**wanted, **found} if found.get(name) != wanted.get(name))
        kinds = [x[name].name if name in x else "not quantised" for x in (wanted, found)]
        raise ValueError(
            f"all weights of a model must be quantised in one format: {name} must be {kinds[0]}, got {kinds[1]}; "
            f"lineate.quantised.shrink(model, {form.name!r}) makes them so"
        )
    return form


@torch.no_grad()
def shrink(model: nn.Module, form: str | Format) -> nn.Module:
    """Quantise a model's weights, in place and one after the other, and return the model.

    Args:
        model: A HybridLM; weights in another format, as those of a GGUF file may be, are rounded again.
        form: The format or its name, "bfloat16", "float16", "int8", "int4" or "fp8".
    """
    form = find_format(form)
    wanted = quantised_formats(model, form)
    for name in {**wanted, **quantised_parameters(model)}:
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        weight: Tensor = module.get_parameter(key)
        if isinstance(weight, QuantisedWeight):
            if name in wanted and weight.format == form:
                continue
            weight = weight.decoded()
        kept = weight.detach()
        if name in wanted:
            kept = empty_quantised(tuple(weight.shape), form, weight.dtype, weight.device)
            try:
                fill_quantised(kept, weight.detach())
            except TooLargeError as error:
                raise TooLargeError(f"{name} {error}") from None
        module.register_parameter(key, nn.Parameter(kept, requires_grad=False))
        del weight
    return model


def empty_quantised(
    shape: tuple[int, ...], form: Format, dtype: torch.dtype, device: torch.device | str, allocate: Any = torch.empty
) -> QuantisedWeight:
    """Return a quantised weight whose codes and scales are not written yet.

    Args:
        shape: Of the weight, `... rows columns`.
        form: The format.
        dtype: That the weight has for others.
        device: Where its codes are.
        allocate: Makes a tensor from a shape, and the keywords dtype and device.
    """
    codes, scales = form.shapes(shape)
    made = allocate(codes, dtype=form.codes_dtype, device=device)
    factors = None if scales is None else allocate(scales, dtype=form.scales_dtype, device=device)
    return QuantisedWeight(made, factors, shape, form, dtype)


def fill_quantised(weight: QuantisedWeight, values: Tensor, first: int = 0) -> None:
    """Write rows of a quantised weight, a few at a time.

    Args:
        weight: The weight, `rows columns`, or `n rows columns` if values has all its rows.
        values: The rows from `first` on, in any floating dtype.
        first: The first row, a multiple of 16.
    """
    if values.dim() == 3:
        for own, wanted in zip(expert_views(weight), values, strict=True):
            fill_quantised(own, wanted)
        return
    if weight.scales is None:
        check_half(weight.codes[first : first + len(values)].copy_(values))
        return
    step = max(TILE, BLOCK // values.shape[1] // TILE * TILE)
    for at in range(0, len(values), step):
        codes, scales = weight.format.to_codes(values[at : at + step])
        write_codes(weight, codes, scales, first + at)


def write_codes(weight: QuantisedWeight, codes: Tensor, scales: Tensor, first: int = 0) -> None:
    """Write codes `n columns`, one a byte, and scales `n scales` of the rows from `first`, a multiple of 16, on."""
    assert weight.scales is not None and first % TILE == 0
    assert scales.shape[1] == weight.format.scale_count(codes.shape[1])
    tiled, factors = weight.format.to_tiles(codes, scales)
    at = slice(first // TILE, first // TILE + len(tiled))
    weight.codes[at].copy_(tiled)
    weight.scales[at].copy_(factors)


def expert_views(weight: QuantisedWeight) -> list[QuantisedWeight]:
    """Return the weight `rows columns` of each expert, sharing memory with `n rows columns`."""
    shape, dtype = tuple(weight.shape[1:]), weight.dtype
    scales = [None] * weight.shape[0] if weight.scales is None else weight.scales
    return [
        QuantisedWeight(own, factors, shape, weight.format, dtype)
        for own, factors in zip(weight.codes, scales, strict=True)
    ]

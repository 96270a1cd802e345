"""Models with random weights, in the shapes of published ones: to measure speed and memory without a checkpoint."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lineate.models.config import HybridConfig
from lineate.models.files.filling import dtype_of
from lineate.models.hybrid import HybridLM, draw_weights, empty_model
from lineate.models.presets import preset
from lineate.models.pretrained import check_target
from lineate.quantised.format import FP8, INT4, INT8, TILE, Format, find_format
from lineate.quantised.weight import QuantisedWeight
from lineate.quantised.which import becomes_quantised, empty_quantised, expert_views, fill_quantised
from lineate.system.seeding import own_random_numbers
from lineate.torch_ops.dtypes import parse_dtype

FLOAT8_DEVIATION = 100.0
"""The deviation of random float8 numbers, which reach 448; their scales bring it to that of the weight."""
PIECE = 2**26
"""Numbers that are drawn at a time where they are rounded."""


@torch.inference_mode(False)
@torch.no_grad()
def random_model(
    config: HybridConfig | str,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    weights: str | Format | None = None,
    seed: int = 0,
) -> HybridLM:
    """Return a model in eval mode with random weights, made on the device without a copy elsewhere.

    Matrices are normal with deviation `config.initializer_range`; decays, norms and convolutions are those of a new
    model. The layers are filled one after the other, and quantised weights are drawn as codes, so that the peak of
    memory is about that of the weights. Texts of such a model are noise: it has the speed and the memory of a trained
    one, except that its tokens choose experts about evenly. The same seed, device and options give the same weights.

        model = random_model("kimi-linear-48b", "bfloat16", "cuda")
        model = random_model("qwen3-next-80b", "bfloat16", "cuda", weights="fp8")

    Args:
        config: The shape, or the name of a preset.
        dtype: Of the weights, except decays and the bias of routers, which are float32; None or "auto": float32 on a
            CPU, bfloat16 elsewhere.
        device: Where the weights are made.
        weights: The format of large weights, "bfloat16", "float16", "int8", "int4" or "fp8"; None: all have the dtype.
        seed: Of the random numbers; the generators of the CPU and of the device keep their states.
    """
    config = preset(config) if isinstance(config, str) else config
    form = None if weights is None else find_format(weights)
    check_target(device)
    place = torch.device(device)
    named = None if dtype is None or dtype == "auto" else parse_dtype(dtype, also=("auto",))
    chosen = named or (torch.float32 if place.type == "cpu" else torch.bfloat16)
    model = empty_model(config).eval()
    with torch.random.fork_rng([place] if place.type == "cuda" else []), own_random_numbers(seed):
        for name, unit in _units(model):
            _fill(name, unit, config, chosen, place, form)
    return model


def _units(model: HybridLM) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of a model that are filled one after the other, with their names."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{n}", part) for n, part in enumerate(child))
        else:
            yield name, child


def _fill(
    name: str, unit: nn.Module, config: HybridConfig, dtype: torch.dtype, device: torch.device, form: Format | None
) -> None:
    """Give a part of a model on the meta device its tensors; weights to be quantised stay there until the end."""
    coded: list[tuple[nn.Module, str, Tensor]] = []
    for prefix, module in unit.named_modules(prefix=name):
        for key, x in list(module.named_parameters(recurse=False)):
            if form is not None and becomes_quantised(f"{prefix}.{key}", tuple(x.shape), form):
                coded.append((module, key, x))
                continue
            made = torch.empty(x.shape, dtype=dtype_of(key, x, dtype), device=device)
            module.register_parameter(key, nn.Parameter(made, x.requires_grad))
        for key, x in list(module.named_buffers(recurse=False)):
            module.register_buffer(key, torch.zeros(x.shape, dtype=dtype_of(key, x, dtype), device=device))
    unit.apply(_reset)
    draw_weights(unit, config.initializer_range)
    for module, key, x in coded:
        assert form is not None
        made = random_quantised(tuple(x.shape), form, dtype, device, config.initializer_range)
        module.register_parameter(key, nn.Parameter(made, requires_grad=False))


def _reset(module: nn.Module) -> None:
    """Draw the parameters that a layer draws itself; draw_weights draws those of projections and embeddings."""
    if not isinstance(module, nn.Linear | nn.Embedding) and hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]


@torch.no_grad()
def random_quantised(
    shape: tuple[int, ...],
    form: str | Format,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    deviation: float = 0.02,
) -> QuantisedWeight:
    """Return a quantised weight of random numbers, which are drawn as codes, without a weight of another dtype.

    Numbers of int8 and int4 are uniform, all others normal.

    Args:
        shape: Of the weight, `... rows columns`.
        form: The format or its name.
        dtype: That the weight has for others.
        device: Where it is made.
        deviation: Of the numbers.
    """
    form = find_format(form)
    weight = empty_quantised(shape, form, dtype, device)
    if weight.scales is None:
        weight.codes.normal_(0, deviation)
        return weight
    if form not in (INT8, INT4, FP8):
        _fill_rounded(weight, deviation)
        return weight
    if form is FP8:
        _draw_float8(weight.codes)
        weight.scales.fill_(deviation / FLOAT8_DEVIATION)
    else:
        weight.codes.random_(0, 256)
        weight.scales.fill_(deviation / (2**form.bits / 12**0.5))
    if rest := shape[-2] % TILE:  # rows beyond the weight have scales of 0
        weight.scales[..., -1, :, rest:] = 0
    return weight


def _draw_float8(codes: Tensor) -> None:
    """Fill codes with normal float8 numbers, some at a time."""
    for piece in codes.view(-1).split(PIECE):
        drawn = torch.empty(piece.shape, dtype=torch.bfloat16, device=piece.device).normal_(0, FLOAT8_DEVIATION)
        piece.copy_(drawn.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


def _fill_rounded(weight: QuantisedWeight, deviation: float) -> None:
    """Fill a weight of any format with rounded normal numbers, one matrix after the other."""
    for own in expert_views(weight) if weight.dim() == 3 else [weight]:
        fill_quantised(own, torch.empty(own.shape, device=own.device).normal_(0, deviation))

"""Small mixtures of experts for the tests of their kernels: a layer, its parts, its sum in float64."""

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.layers import MixtureOfExperts
from lineate.quantised import FORMATS, QuantisedWeight, quantize
from tests.support.paths import Path

mixture = importlib.import_module("lineate.kernels.layers.mixture")
routing = importlib.import_module("lineate.kernels.layers.routing")
quantised_products = importlib.import_module("lineate.kernels.layers.quantised_products")
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
COUNT, ACTIVE = 12, 3


def layer_of(path: Path, hidden: int = 72, size: int = 20, **options: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    made = MixtureOfExperts(hidden, COUNT, ACTIVE, size, **options).requires_grad_(False)
    if made.router_bias is not None:
        made.router_bias.uniform_(-0.2, 0.2)
    return made.to(path.dtype).to(path.device)


def parts_of(layer: MixtureOfExperts, shared: bool = True) -> tuple[Any, Any]:
    """Return the router and the experts as the kernels take them; shared: with the shared expert as one more."""
    how = routing.Routing(
        layer.active, layer.scores == "sigmoid", layer.renormalize, layer.scale, layer.groups, layer.active_groups
    )
    gate = None if layer.shared_gate is None else layer.shared_gate.weight.detach()
    own = None
    if shared and layer.shared is not None:
        enter = layer.shared.gate_up_proj if layer.kind == "swiglu" else layer.shared.up_proj
        own = enter.weight.detach(), layer.shared.down_proj.weight.detach()
    router = mixture.Router(layer.router.weight.detach(), layer.router_bias, gate, how)
    kept = mixture.Experts(layer.experts_gate_up.detach(), layer.experts_down.detach(), layer.kind, own)
    return router, kept


def draw(path: Path, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(path.dtype).to(path.device)


def chosen_by(layer: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    router, _ = parts_of(layer)
    logits = routing.score(x, router.weight, None)
    rounded = torch.float32 if router.routing.sigmoid else x.dtype
    return routing.choose(logits, router.bias, router.routing, experts=layer.count, rounded=rounded)


def plain(layer: MixtureOfExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Return the layer's output in float64 for these experts."""
    x = x.double()

    def feed(row: Tensor, enter: Tensor, leave: Tensor) -> Tensor:
        made = enter.double() @ row
        if layer.kind == "relu2":
            return leave.double() @ made.relu().square()
        gate, up = made.chunk(2)
        return leave.double() @ (F.silu(gate) * up)

    y = torch.zeros_like(x)
    for t, row in enumerate(x):
        for weight, e in zip(weights[t].double(), chosen[t].tolist(), strict=True):
            y[t] += weight * feed(row, layer.experts_gate_up[e], layer.experts_down[e])
    if layer.shared is not None:
        enter = layer.shared.gate_up_proj if layer.kind == "swiglu" else layer.shared.up_proj
        made = torch.stack([feed(row, enter.weight, layer.shared.down_proj.weight) for row in x])
        opened = 1.0 if layer.shared_gate is None else (x @ layer.shared_gate.weight.double().T).sigmoid()
        y += opened * made
    return y


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    found, expected = found.double().cpu(), expected.double().cpu()
    assert found.shape == expected.shape
    assert float((found - expected).norm() / expected.norm()) < BOUND[dtype]


def codes_of(weight: Tensor, form: str, path: Path) -> tuple[Any, Tensor]:
    """Return a weight in a format as kernels take it, and its decoded numbers."""
    rounded = quantize(weight.float().cpu(), form)
    assert isinstance(rounded, QuantisedWeight)
    tiles = rounded.codes.to(path.device), rounded.scales.to(path.device)
    return quantised_products.Codes(*tiles, rounded.shape[-2], FORMATS[form].kernel), rounded.decoded().to(path.device)


def put_in_codes(owner: nn.Module, name: str, form: str, path: Path) -> Any:
    """Round a weight of a module; return its codes."""
    codes, decoded = codes_of(getattr(owner, name), form, path)
    setattr(owner, name, nn.Parameter(decoded, requires_grad=False))
    return codes

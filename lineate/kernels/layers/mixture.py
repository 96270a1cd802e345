"""A mixture of experts without gradients: routing, grouping, two products and a sum, without waiting for the device.

| rows | weights of 16 or 32 bits | weights in codes |
|---|---|---|
| 1 .. ALONE | every pair of a token and an expert reads its weights (experts.py) | likewise (quantised_products.py) |
| .. FEW | a block of pairs of one expert reads its weights once, in the same configuration | likewise on Hopper |
| more | blocks of more pairs | likewise on Hopper, otherwise not served |

Up to FEW rows, a row's bits do not depend on the other rows nor on their number. With more rows they do not depend on
the other rows, as long as the number of rows selects the same configuration.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.kernels.launching import next_power
from lineate.kernels.layers import expert_tiles, experts, quantised_products
from lineate.kernels.layers.experts import Weights
from lineate.kernels.layers.grouping import Groups, group, sort
from lineate.kernels.layers.ops import KERNEL_DTYPES
from lineate.kernels.layers.quantised_products import Codes
from lineate.kernels.layers.routing import FEW, Routing, choose, fits, score
from lineate.kernels.tape import launch
from lineate.torch_ops.tracing import PLAIN_TENSORS

ALONE = 1
"""Up to this many rows, pairs are not grouped: hardly two of them have the same expert."""
INSIDE = 512
"""Up to this many rows a shared expert is one more expert; more rows are multiplied by torch."""
Tile = dict[str, int]


class Router(NamedTuple):
    """The router of a mixture.

    Args:
        weight: `experts k`.
        bias: `experts`, of sigmoid scores; or None.
        gate: `1 k`, of the shared expert; or None.
        routing: How experts are chosen.
    """

    weight: Tensor
    bias: Tensor | None
    gate: Tensor | None
    routing: Routing


class Experts(NamedTuple):
    """The weights of a mixture.

    Args:
        gate_up: `experts 2n k`, or with kind "relu2" `experts n k`.
        down: `experts k n`.
        kind: "swiglu" or "relu2".
        shared: The two weights of a shared expert of the same size, or None.
    """

    gate_up: Tensor | Codes
    down: Tensor | Codes
    kind: str
    shared: tuple[Tensor, Tensor] | None = None


def serves(tokens: Tensor, router: Router, made: Experts) -> bool:
    """Whether `mix` supports these tokens `rows k` and weights, none of which needs a gradient."""
    if tokens.dtype not in KERNEL_DTYPES or not tokens.shape[0] or not fits(router.routing, router.weight.shape[0]):
        return False
    if not _are_plain(tokens, router.weight, router.gate, *(made.shared or ())):
        return False
    if isinstance(made.gate_up, Codes) and isinstance(made.down, Codes):
        return made.shared is None and _serves_codes(tokens, made.gate_up) and _serves_codes(tokens, made.down)
    return isinstance(made.gate_up, Tensor) and isinstance(made.down, Tensor) and _are_plain(
        tokens, made.gate_up, made.down
    )  # fmt: skip


def _are_plain(tokens: Tensor, *weights: Tensor | None) -> bool:
    """Whether weights are dense and have the dtype of the tokens."""
    return all(
        x is None or (type(x) in PLAIN_TENSORS and x.dtype is tokens.dtype and x.is_contiguous()) for x in weights
    )


def _serves_codes(tokens: Tensor, weight: Codes) -> bool:
    if not (weight.codes.is_contiguous() and weight.scales.is_contiguous()):
        return False
    if weight.codes.data_ptr() % 16 or weight.scales.data_ptr() % 16:
        return False
    return tokens.shape[0] <= FEW or quantised_products.uses_tensor_cores(tokens)


def mix(tokens: Tensor, router: Router, made: Experts, shared: Tensor | None = None) -> Tensor:
    """Return the weighted sum of each token's experts and the shared one, `rows k`, where `serves`.

    Args:
        tokens: `rows k`.
        router: Chooses the experts.
        made: Their weights.
        shared: The output of a shared expert that `made` does not have, `rows k`, before its gate.
    """
    tokens = tokens.contiguous()
    y = torch.empty_like(tokens)
    shared = None if shared is None else shared.contiguous()

    def run() -> None:
        logits = score(tokens, router.weight, router.gate)
        weights, chosen = choose(
            logits, router.bias, router.routing, experts=router.weight.shape[0],
            rounded=torch.float32 if router.routing.sigmoid else tokens.dtype,
            shared=shared is not None or made.shared is not None, named=made.shared is not None,
        )  # fmt: skip
        parts = products(tokens, chosen, made)
        experts.add(parts, weights, y, shared=shared)

    given = (tokens, *router[:3], *_tensors(made.gate_up), *_tensors(made.down), *(made.shared or ()), shared)
    launch("experts", given, (y,), (router.routing, made.kind, made.shared is None, shared is None), run)
    return y


def _tensors(weight: Tensor | Codes) -> tuple[Tensor, ...]:
    return (weight.codes, weight.scales) if isinstance(weight, Codes) else (weight,)


def products(tokens: Tensor, chosen: Tensor, made: Experts, tiles: "Tiles | None" = None) -> Tensor:
    """Return the outputs of the chosen experts, `rows width k`; the last column of chosen may be the shared one.

    Args:
        tokens: `rows k`, dense.
        chosen: `rows width`, int32, dense.
        made: The weights.
        tiles: The configuration of the products of weights of 16 or 32 bits; None: the one for this number of rows.
    """
    rows, width = chosen.shape
    if isinstance(made.gate_up, Codes):
        assert isinstance(made.down, Codes)
        return _coded_products(tokens, chosen, made.gate_up, made.down, made.kind)
    assert isinstance(made.down, Tensor)
    if tiles is None:
        tiles = tiles_of(tokens, made)
    count = made.gate_up.shape[0]
    groups = (
        Groups(chosen.view(-1), None, 1)
        if rows <= ALONE
        else group(chosen, count + (made.shared is not None), tiles.enter["BM"])
    )
    enter, leave = made.shared or (None, None)
    pairs = rows * width
    if tiles.described:
        hidden = tokens.new_empty(pairs, made.down.shape[2])
        parts = tokens.new_empty(pairs, tokens.shape[1])
        kind = experts.GATED[made.kind]
        expert_tiles.multiply(tokens, made.gate_up, groups, hidden, every=width, kind=kind, tile=tiles.enter)
        expert_tiles.multiply(hidden, made.down, groups, parts, every=1, kind=0, tile=tiles.leave)
        return parts.view(rows, width, -1)
    hidden = experts.multiply(
        tokens, Weights(made.gate_up, enter, made.kind), groups, (pairs, width), tiles.enter, tokens.dtype
    )  # fmt: skip
    few = torch.float32 if rows <= FEW else tokens.dtype  # more rows would write as much as they read
    parts = experts.multiply(hidden, Weights(made.down, leave, None), groups, (pairs, 1), tiles.leave, few)
    return parts.view(rows, width, -1)


def grouped_products(tokens: Tensor, chosen: Tensor, made: Experts) -> tuple[Tensor, Tensor]:
    """Return the outputs of the chosen experts by torch's grouped product, `pairs k`, and where each pair's lies.

    Args:
        tokens: `rows k`, dense, in bfloat16.
        chosen: `rows width`, int32, dense, without a shared expert.
        made: The weights, in bfloat16.
    """
    assert isinstance(made.gate_up, Tensor) and isinstance(made.down, Tensor)
    order, places, ends = sort(chosen, made.gate_up.shape[0])
    gathered = tokens.index_select(0, order // chosen.shape[1])
    hidden = F.grouped_mm(gathered, made.gate_up.transpose(1, 2), offs=ends)
    hidden = experts.activate(hidden, made.kind)
    return F.grouped_mm(hidden, made.down.transpose(1, 2), offs=ends), places


class Tiles(NamedTuple):
    """The configurations of the two products; BM is the same.

    Args:
        enter: Of the product with gate_up.
        leave: Of the product with down.
        described: Whether they are those of expert_tiles.py, otherwise of experts.py.
    """

    enter: Tile
    leave: Tile
    described: bool = False


def _are_described(tokens: Tensor, made: Experts, tiles: "Tiles") -> bool:
    """Whether the kernels of expert_tiles.py serve both products."""
    gated = made.kind == "swiglu"
    assert isinstance(made.gate_up, Tensor) and isinstance(made.down, Tensor)
    entered = expert_tiles.serves(tokens, made.gate_up, tiles.enter, gated)
    return entered and expert_tiles.serves(tokens, made.down, tiles.leave, False)


def tile(BM: int, BN: int, BK: int, warps: int, stages: int, swap: bool = False) -> Tile:
    """Return a configuration of multiply_blocks."""
    return {"BM": BM, "BN": BN, "BK": BK, "SWAP": swap, "num_warps": warps, "num_stages": stages}


def tiles_of(tokens: Tensor, made: Experts) -> Tiles:
    """Return the configurations for tokens `rows k`; up to FEW rows they are the same."""
    assert isinstance(made.gate_up, Tensor) and isinstance(made.down, Tensor)
    rows = tokens.shape[0]
    if tokens.dtype is torch.float32:
        size = 16 if rows <= FEW else 32
        return Tiles(tile(size, 16, 32, 4, 3), tile(size, 32, 32, 4, 3))
    if rows > INSIDE:
        found = Tiles(described(64, 128, 64, 4, 3), described(64, 128, 64, 4, 4), True)
        if made.shared is None and _are_described(tokens, made, found):
            return found
    if rows <= FEW:
        found = Tiles(tile(16, 32, 128, 4, 3, swap=True), tile(16, 64, 128, 4, 3, swap=True))
    elif rows <= INSIDE:
        found = Tiles(tile(32, 64, 64, 4, 4), tile(32, 128, 64, 4, 4))
    else:
        found = Tiles(tile(64, 128, 64, 8, 4), tile(64, 256, 64, 8, 4))
    return Tiles(_narrowed(found.enter, made.down.shape[2]), _narrowed(found.leave, made.down.shape[1]))


def described(BM: int, BN: int, BK: int, warps: int, stages: int) -> Tile:
    """Return a configuration of multiply_tiles."""
    return {"BM": BM, "BN": BN, "BK": BK, "num_warps": warps, "num_stages": stages}


def _narrowed(tile: Tile, n: int) -> Tile:
    """Return the configuration for a product with n channels, which may be fewer than those of a tile."""
    return tile | {"BN": max(16, min(tile["BN"], next_power(n)))}


def _coded_products(tokens: Tensor, chosen: Tensor, gate_up: Codes, down: Codes, kind: str) -> Tensor:
    """Return the outputs of the chosen experts, whose weights are in codes."""
    rows, width = chosen.shape
    groups = None
    if rows > ALONE and quantised_products.uses_tensor_cores(tokens):
        groups = group(chosen, gate_up.codes.shape[0], 8 if rows <= FEW else 32 if rows <= 1024 else 64)
    gated = kind == "swiglu" and quantised_products.takes_gate(gate_up)
    flat = chosen.view(-1)
    hidden = quantised_products.multiply_experts(tokens, gate_up, flat, every=width, gated=gated, groups=groups)
    if not gated:
        hidden = experts.activate(hidden, kind)
    parts = quantised_products.multiply_experts(hidden, down, flat, every=1, gated=False, groups=groups)
    return parts.view(rows, width, -1)

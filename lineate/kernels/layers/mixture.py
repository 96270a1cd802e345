"""A mixture of experts without gradients: routing, grouping, two products and a sum, without waiting for the device.

| rows | weights of 16 or 32 bits | weights in codes |
|---|---|---|
| 1 .. ALONE | every pair of a token and an expert reads its weights (experts.py) | likewise (quantised_products.py) |
| .. FEW | a block of pairs of one expert reads its weights once, in the same configuration | likewise on Hopper |
| .. MOST_CODED | blocks of more pairs | blocks of more pairs on Hopper |
| .. MOST_PAIRS of an expert | blocks of more pairs | on Hopper codes are decoded for each block (coded_blocks.py) |
| more | blocks of more pairs | likewise; experts are decoded, some at a time |

Torch runs more than FEW rows of float32. Up to FEW rows, a row's bits do not depend on the other rows nor on their
number, except that one row has a second product of its own (experts.leave_row, quantised.leave_quantised_row), as it
has in the other products of a step. With more rows they do not depend on the other rows, as long as the number of rows
selects the same configuration. In a batch-invariant step all numbers of rows, one included, take the way of FEW rows.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.kernels.launching import is_hopper, next_power
from lineate.kernels.layers import coded_blocks, experts, quantised_products
from lineate.kernels.layers.experts import Weights
from lineate.kernels.layers.grouping import Groups, group, sort
from lineate.kernels.layers.ops import KERNEL_DTYPES
from lineate.kernels.layers.products import Norm
from lineate.kernels.layers.quantised_products import Codes
from lineate.kernels.layers.routing import FEW, Routing, choose, fits, score
from lineate.kernels.tape import launch
from lineate.torch_ops.invariance import is_batch_invariant
from lineate.torch_ops.tracing import PLAIN_TENSORS

ALONE = 1
"""Up to this many rows, pairs are not grouped: no two of them have the same expert."""
INSIDE = 512
"""Up to this many rows a shared expert is one more expert; more rows are multiplied by torch."""
MOST_CODED = 512
"""The most rows whose products with codes have the same bits for any number of rows."""
MOST_PAIRS = 64
"""With more pairs of an expert, on average, weights are decoded once for all of its blocks."""
DECODED = 2**28
"""Elements of experts that are decoded at a time."""
REST, MOST_WITH_REST = 32, 136
"""Up to this mean of an expert's pairs, blocks have 128 and REST others, so that nearly all experts have one block."""
LEAST_SHARED = 99 * 1024
"""Shared memory of a program on GPUs of compute capability 8 that have the least."""
MOST_ROWS = 2**20
"""The most rows, whose blocks fit into the second dimension of a grid."""
Tile = dict[str, int]
Weight = Tensor | Codes


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
    """The weights of a mixture: all dense in the dtype of the tokens, or all in codes.

    Args:
        gate_up: `experts 2n k`, or with kind "relu2" `experts n k`.
        down: `experts k n`.
        kind: "swiglu" or "relu2".
        shared: The two weights of a shared expert of the same size, or None.
    """

    gate_up: Weight
    down: Weight
    kind: str
    shared: tuple[Weight, Weight] | None = None


class Tiles(NamedTuple):
    """The configurations of the two products; BM and REST are the same.

    Args:
        enter: Of the product with gate_up.
        leave: Of the product with down.
    """

    enter: Tile
    leave: Tile


def serves(tokens: Tensor, router: Router, made: Experts) -> bool:
    """Whether `mix` supports these tokens `rows k` and weights, none of which needs a gradient."""
    if (
        tokens.dtype not in KERNEL_DTYPES
        or not 0 < tokens.shape[0] <= MOST_ROWS
        or not fits(router.routing, router.weight.shape[0])
    ):
        return False
    if tokens.dtype is torch.float32 and tokens.is_cuda and not takes_few(tokens):  # cuBLAS takes less time
        return False
    if not _are_plain(tokens, router.weight, router.gate):
        return False
    weights = (made.gate_up, made.down, *(made.shared or ()))
    if any(isinstance(x, Codes) for x in weights):
        return all(isinstance(x, Codes) and _serves_codes(tokens, x) for x in weights) and (
            made.shared is None or takes_shared(tokens, coded=True)
        )
    return _are_plain(tokens, *weights)


def takes_few(tokens: Tensor) -> bool:
    """Whether these tokens are multiplied in the configuration of FEW rows."""
    return tokens.shape[0] <= FEW or is_batch_invariant()


def takes_shared(tokens: Tensor, coded: bool) -> bool:
    """Whether a shared expert may be one of the experts of this number of tokens."""
    if coded and not quantised_products.uses_tensor_cores(tokens):
        return False
    return tokens.shape[0] <= (_most_coded(tokens) if coded else INSIDE) or is_batch_invariant()


def _are_plain(tokens: Tensor, *weights: Weight | None) -> bool:
    """Whether weights are dense and have the dtype of the tokens."""
    return all(
        x is None or (type(x) in PLAIN_TENSORS and x.dtype is tokens.dtype and x.is_contiguous())  # type: ignore
        for x in weights
    )


def _serves_codes(tokens: Tensor, weight: Codes) -> bool:
    if not (weight.codes.is_contiguous() and weight.scales.is_contiguous()):
        return False
    if weight.codes.data_ptr() % 16 or weight.scales.data_ptr() % 16:
        return False
    return tokens.shape[0] <= _most_coded(tokens) or weight.rows % 16 == 0  # decoded rows are whole tiles


def _most_coded(tokens: Tensor) -> int:
    """Return how many rows are multiplied by codes."""
    if is_batch_invariant():
        return MOST_ROWS
    return MOST_CODED if quantised_products.uses_tensor_cores(tokens) else FEW


def mix(
    tokens: Tensor,
    router: Router,
    made: Experts,
    shared: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts and the shared one, `rows k`, where `serves`.

    With dense weights, the second product of one row is one launch with the sum and the residual, which begins to load
    the weights of the chosen experts while the first product runs. Elsewhere, with a norm, torch adds the residual: a
    step of Qwen3.5-35B-A3B took 2.36 ms on an H200, and 2.43 with the residual in the last launch.

    Args:
        tokens: `rows k`.
        router: Chooses the experts.
        made: Their weights.
        shared: The output of a shared expert that `made` does not have, `rows k`, before its gate.
        residual: `rows k`, which is added to the sum.
        norm: An RMSNorm of the tokens, for one row and no `shared`: its result goes to the router and the experts.
    """
    tokens = tokens.contiguous()
    y = torch.empty_like(tokens)
    shared, residual = (None if x is None else x.contiguous() for x in (shared, residual))
    invariant = is_batch_invariant()
    alone = not invariant and len(tokens) <= ALONE and shared is None and takes_row(tokens, made, router.routing.active)
    if residual is not None and norm is not None and not alone:
        return residual + mix(tokens, router, made, norm=norm)
    own = residual is tokens  # the launches are recorded by the addresses of `given`, which must differ

    def run() -> None:
        normed = tokens if norm is None else torch.empty_like(tokens)
        logits = score(tokens, router.weight, router.gate, norm=norm, normed=None if norm is None else normed)
        weights, chosen = choose(
            logits, router.bias, router.routing, experts=router.weight.shape[0],
            rounded=torch.float32 if router.routing.sigmoid else tokens.dtype,
            shared=shared is not None or made.shared is not None, named=made.shared is not None,
        )  # fmt: skip
        if alone:
            _product_of_one(normed, chosen, weights, made, y, residual)
            return
        parts, places = products(normed, chosen, made)
        experts.add(parts, weights, y, places=places, shared=shared, residual=residual)

    weights = made.gate_up, made.down, *(made.shared or ())
    scale, *options = (None,) if norm is None else norm
    numbers = (x for weight in weights for x in _tensors(weight))
    given = (tokens, scale, *router[:3], *numbers, shared, None if own else residual)
    kind = router.routing, made.kind, made.shared is None, shared is None, alone, own, invariant, *options
    launch("experts", given, (y,), kind, run)
    return y


def takes_row(tokens: Tensor, made: Experts, active: int) -> bool:
    """Whether the products of one row are two launches, the sum and a residual included."""
    pairs = active + (made.shared is not None)
    if isinstance(made.down, Codes):
        return quantised_products.takes_row(tokens, made.down, pairs)
    return experts.rows_of_leave(made.down, pairs) > 0


def _product_of_one(
    tokens: Tensor, chosen: Tensor, weights: Tensor, made: Experts, y: Tensor, residual: Tensor | None
) -> None:
    """Write the sum of the chosen experts of one row into y."""
    if isinstance(made.down, Codes):
        _coded_product_of_one(tokens, chosen, weights, made, y, residual)
        return
    assert isinstance(made.gate_up, Tensor) and isinstance(made.down, Tensor)
    width, count, n = chosen.shape[1], len(made.gate_up), made.down.shape[2]
    enter, leave = (None, None) if made.shared is None else made.shared
    tile = tiles_of(tokens, count, n, width).enter
    groups, hidden = Groups(chosen.view(-1), None, 1), tokens.new_empty(width, n)
    first = Weights(made.gate_up, enter, made.kind)  # type: ignore[arg-type]
    experts.multiply(tokens, first, groups, hidden, every=width, tile=tile, late=True)
    experts.leave_one(hidden, Weights(made.down, leave, None), chosen, weights, y, residual)  # type: ignore[arg-type]


def _coded_product_of_one(
    tokens: Tensor, chosen: Tensor, weights: Tensor, made: Experts, y: Tensor, residual: Tensor | None
) -> None:
    """The same of experts whose weights are in codes."""
    assert isinstance(made.gate_up, Codes) and isinstance(made.down, Codes)
    gated = made.kind == "swiglu" and quantised_products.takes_gate(made.gate_up)
    enter, leave = (None, None) if made.shared is None else made.shared
    pairs = quantised_products.Pairs(chosen.view(-1), chosen.shape[1], None, enter)  # type: ignore[arg-type]
    hidden = quantised_products.multiply_experts(tokens, made.gate_up, pairs, gated=gated, late=True)
    if not gated:
        hidden = experts.activate(hidden, made.kind)
    quantised_products.leave_one(hidden, made.down, leave, chosen, weights, y, residual)  # type: ignore[arg-type]


def _tensors(weight: Weight) -> tuple[Tensor, ...]:
    return (weight.codes, weight.scales) if isinstance(weight, Codes) else (weight,)


def products(tokens: Tensor, chosen: Tensor, made: Experts, tiles: Tiles | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the outputs of the chosen experts, `rows width k`; the last column of chosen may be the shared one.

    If there are places, one for each pair, the outputs are `places k` instead.

    Args:
        tokens: `rows k`, dense.
        chosen: `rows width`, int32, dense.
        made: The weights.
        tiles: The configuration of the products of weights of 16 or 32 bits; None: the one for this number of rows.
    """
    (rows, k), width, coded = tokens.shape, chosen.shape[1], isinstance(made.gate_up, Codes)
    if coded and rows <= _most_coded(tokens):
        return _coded_products(tokens, chosen, made), None
    count = _tensors(made.gate_up)[0].shape[0]
    if coded and tiles is None and rows * width <= MOST_PAIRS * count and _takes_blocks(tokens, made):
        return _products_of_blocks(tokens, chosen, made), None
    n = made.down.columns if isinstance(made.down, Codes) else made.down.shape[2]
    if tiles is None:
        tiles = tiles_of(tokens, count, n, width)
    size, described = tiles.enter["BM"] + tiles.enter["REST"], False
    if rows <= ALONE and not is_batch_invariant():
        groups = Groups(chosen.view(-1), None, 1)
    else:
        described = made.shared is None and experts.leaves_by_descriptors(tokens, (k, n), tiles.enter)
        groups = group(chosen, count + (made.shared is not None), size, described)
    places = groups.blocks.numel() * size if described else rows * width
    hidden = tokens.new_empty(places, n)
    few = torch.float32 if takes_few(tokens) else tokens.dtype  # more rows would write as much as they read
    parts = tokens.new_empty(places, k, dtype=few)
    own = (None, None) if made.shared is None else made.shared
    for weight, begin in _slices(made.gate_up, tokens.dtype):
        weights = Weights(weight, own[0], made.kind, begin)  # type: ignore[arg-type]
        experts.multiply(tokens, weights, groups, hidden, every=width, tile=tiles.enter, placed=described)
    for weight, begin in _slices(made.down, tokens.dtype):
        if described:
            experts.leave(hidden, weight, groups, parts, begin, rest=tiles.leave["REST"])
            continue
        weights = Weights(weight, own[1], None, begin)  # type: ignore[arg-type]
        experts.multiply(hidden, weights, groups, parts, every=1, tile=tiles.leave)
    return (parts, groups.places) if described else (parts.view(rows, width, k), None)


def _slices(weight: Weight, dtype: torch.dtype) -> Iterator[tuple[Tensor, int]]:
    """Yield a weight `experts n k`, or the decoded weights of some experts at a time, and the first one's number."""
    if isinstance(weight, Tensor):
        yield weight, 0
        return
    count = weight.codes.shape[0]
    most = max(1, DECODED // (weight.rows * weight.columns))
    each = max(n for n in range(1, min(count, most) + 1) if count % n == 0)  # the kernel is compiled for this number
    for begin in range(0, count, each):
        end = begin + each
        own = Codes(weight.codes[begin:end], weight.scales[begin:end], weight.rows, weight.kernel)
        yield quantised_products.decoded(own, dtype), begin


def _coded_products(tokens: Tensor, chosen: Tensor, made: Experts) -> Tensor:
    """Return the outputs of the chosen experts, whose weights are in codes."""
    assert isinstance(made.gate_up, Codes) and isinstance(made.down, Codes)
    rows, width = chosen.shape
    groups = None
    if (rows > ALONE or is_batch_invariant()) and quantised_products.uses_tensor_cores(tokens):
        count = made.gate_up.codes.shape[0] + (made.shared is not None)
        groups = group(chosen, count, _size_of_coded_blocks(0 if is_batch_invariant() else rows * width / count))
    gated = made.kind == "swiglu" and quantised_products.takes_gate(made.gate_up)
    enter, leave = (None, None) if made.shared is None else made.shared
    flat = chosen.view(-1)
    pairs = quantised_products.Pairs(flat, width, groups, enter)  # type: ignore[arg-type]
    hidden = quantised_products.multiply_experts(tokens, made.gate_up, pairs, gated=gated)
    if not gated:
        hidden = experts.activate(hidden, made.kind)
    pairs = quantised_products.Pairs(flat, 1, groups, leave)  # type: ignore[arg-type]
    return quantised_products.multiply_experts(hidden, made.down, pairs).view(rows, width, -1)


def _size_of_coded_blocks(mean: float) -> int:
    """Return the pairs of a block that is multiplied by codes, from those of an expert; it changes no bit of a result.

    us on an H200 of the two products, Kimi-Linear-48B in fp8 (k 2304, n 1024, 256 experts), blocks of 8, 16 and 32:

        128 rows (mean 4)     664    776    1191
        256 rows (8)          692    778    1266
        512 rows (16)        1050    981    1247
    """
    return 8 if mean <= 8 else 16 if mean <= 16 else 32


def _takes_blocks(tokens: Tensor, made: Experts) -> bool:
    """Whether codes are decoded in the products of blocks of pairs."""
    assert isinstance(made.gate_up, Codes) and isinstance(made.down, Codes)
    return (
        quantised_products.uses_tensor_cores(tokens) and made.shared is None
        and coded_blocks.serves(made.gate_up) and coded_blocks.serves(made.down)
    )  # fmt: skip


def _products_of_blocks(tokens: Tensor, chosen: Tensor, made: Experts) -> Tensor:
    """Return the outputs of the chosen experts, whose weights are in codes, for many pairs of an expert."""
    assert isinstance(made.gate_up, Codes) and isinstance(made.down, Codes)
    (rows, k), width = tokens.shape, chosen.shape[1]
    groups = group(chosen, made.gate_up.codes.shape[0], coded_blocks.SHAPE["BM"])
    hidden = tokens.new_empty(rows * width, made.down.columns)
    parts = tokens.new_empty(rows * width, k)
    coded_blocks.multiply(tokens, made.gate_up, made.kind, groups, hidden, every=width)
    coded_blocks.multiply(hidden, made.down, None, groups, parts, every=1)
    return parts.view(rows, width, k)


def grouped_products(tokens: Tensor, chosen: Tensor, made: Experts) -> tuple[Tensor, Tensor]:
    """Return the outputs of the chosen experts by torch's grouped product, `pairs k`, and where each pair's lies.

    It takes longer than `products` on an H200, for all numbers of rows (bench/models/experts.py).

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


def tile(BM: int, BN: int, BK: int, warps: int, stages: int, *, swap: bool = False, rest: int = 0) -> Tile:
    """Return a configuration of multiply_blocks."""
    return {"BM": BM, "REST": rest, "BN": BN, "BK": BK, "SWAP": swap, "num_warps": warps, "num_stages": stages}


def tiles_of(tokens: Tensor, count: int, n: int, width: int) -> Tiles:
    """Return the configurations for tokens `rows k`, each with `width` of `count` experts of n channels.

    Up to FEW rows, and in a batch-invariant step, they are the same.

    us on an H200 of the two products, Qwen3.5-35B-A3B (k 2048, n 512, 256 experts):

                     BM 64 (8 warps)    BM 128      REST 32
        4096 rows    406, 254           363, 223    338, 197
    """
    rows, k = tokens.shape
    mean = rows * width // count  # pairs of an expert
    if tokens.dtype is torch.float32:
        found = Tiles(tile(16, 16, 32, 4, 3), tile(16, 32, 32, 4, 3))
    elif takes_few(tokens):
        found = Tiles(tile(16, 32, 128, 4, 3, swap=True), tile(16, 64, 128, 4, 3, swap=True))
    elif mean <= 16:
        found = Tiles(tile(32, 64, 64, 4, 4), tile(32, 128, 64, 4, 4))
    elif mean <= 64:
        found = Tiles(tile(64, 128, 64, 8, 4), tile(64, 128, 64, 8, 4))
    else:
        rest = REST if mean <= MOST_WITH_REST and is_hopper(tokens.device) else 0
        found = Tiles(tile(128, 128, 64, 8, 3, rest=rest), tile(128, 128, 64, 8, 3, rest=rest))
    enter, leave = _narrowed(found.enter, n), _narrowed(found.leave, k)
    if not is_hopper(tokens.device):
        enter, leave = (
            _shortened(enter, 2 * enter["BN"], tokens.itemsize),
            _shortened(leave, leave["BN"], tokens.itemsize),
        )
    return Tiles(enter, leave)


def _narrowed(tile: Tile, n: int) -> Tile:
    """Return the configuration for a product with n channels, which may be fewer than those of a tile."""
    return tile | {"BN": max(16, min(tile["BN"], next_power(n)))}


def _shortened(tile: Tile, wide: int, size: int) -> Tile:
    """Return the configuration with as many stages as fit into the shared memory of any GPU.

    wide: rows of the weight of a tile; size: bytes of an element.
    """
    stage = (tile["BM"] + wide) * tile["BK"] * size
    return tile | {"num_stages": max(2, min(tile["num_stages"], LEAST_SHARED // stage))}

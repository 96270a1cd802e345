"""Measures the costs of a mixer by running it, if its row in the registry has no counts.

Operations are counted on torch's meta device, which computes nothing, at the sizes of the model. The cost of
a sequence that is too long to run is extrapolated in blocks of LAYER_BLOCK tokens; this is exact if the operations grow
with the tokens or with their square.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from lineate.layers.entry import check_result
from lineate.layers.registry import MixerKind, ModelSizes, Operations, Sizes, check_made
from lineate.layers.state import LayerState
from lineate.system.seeding import own_random_numbers
from lineate.torch_ops.tracing import cpu_by_default

LAYER_BLOCK = 512
"""Tokens by which a sequence grows between two runs; chunks of up to this many tokens divide it."""


def operations_of(kind: MixerKind, model: ModelSizes) -> Operations:
    """Return the counts of a kind of mixer: those of its row, or measured ones, equal in both conventions."""
    if kind.operations is not None:
        return kind.operations
    sizes = Sizes(model.hidden_size, model.norm_eps, model.zero_centred_norm)

    def projections(_: ModelSizes, config: Any) -> int:
        return _projections(kind, sizes, config)

    def mixing(config: Any, tokens: int, convention: str) -> int:
        return _along(lambda n: _count(kind, sizes, config, 0, n), tokens) - tokens * _projections(kind, sizes, config)

    def mixing_one(config: Any, context: int, convention: str) -> int:
        return _along(lambda n: _count(kind, sizes, config, n, 1), context) - _projections(kind, sizes, config)

    return Operations(projections, mixing, mixing_one)


def kept_bytes(kind: MixerKind, model: ModelSizes, config: Any, half: bool) -> float:
    """Measure the bytes per token that the backward of a mixer keeps besides its input."""
    sizes = Sizes(model.hidden_size, model.norm_eps, model.zero_centred_norm)
    return _kept_bytes(kind, sizes, config, half)


@lru_cache(256)
@cpu_by_default
def _kept_bytes(kind: MixerKind, sizes: Sizes, config: Any, half: bool) -> float:
    with own_random_numbers():
        mixer = check_made(kind, kind.make(sizes, config))
    found = []
    for tokens in (LAYER_BLOCK // 2, LAYER_BLOCK):
        x = torch.zeros(1, tokens, sizes.hidden_size, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            found.append(saved_bytes(mixer, x))
    return (found[1] - found[0]) / (LAYER_BLOCK // 2) - (
        2 if half else 4
    ) * sizes.hidden_size  # the input is the block's


def _along(count: Callable[[int], int], tokens: int) -> int:
    """Return count(tokens); for long sequences, from a quadratic through the counts of three shorter ones."""
    blocks, rest = divmod(tokens, LAYER_BLOCK)
    if blocks <= 3:
        return count(tokens)
    first, second, third = (count(rest + n * LAYER_BLOCK) for n in (1, 2, 3))
    slope, curve = second - first, third - 2 * second + first
    return first + (blocks - 1) * slope + (blocks - 1) * (blocks - 2) // 2 * curve


@lru_cache(4096)
def _count(kind: MixerKind, sizes: Sizes, config: Any, context: int, tokens: int) -> int:
    """Count the operations of `tokens` tokens after `context` others, on the meta device or else on a CPU."""
    try:
        return _count_on("meta", kind, sizes, config, context, tokens)
    except (RuntimeError, NotImplementedError):  # the mixer reads values, which meta tensors do not have
        return _count_on("cpu", kind, sizes, config, context, tokens)


def _count_on(device: str, kind: MixerKind, sizes: Sizes, config: Any, context: int, tokens: int) -> int:
    from torch.utils.flop_counter import FlopCounterMode  # its import takes longer than that of lineate

    with own_random_numbers(), torch.device(device), torch.no_grad():
        mixer = check_made(kind, kind.make(sizes, config))
        state, specs = None, mixer.state_spec
        if context:
            before = torch.zeros(1, context, sizes.hidden_size)
            _, state = check_result(mixer, specs, _run(mixer, before), before, None)  # type: ignore[arg-type]
        x = torch.zeros(1, tokens, sizes.hidden_size)
        with FlopCounterMode(display=False) as counter:
            check_result(mixer, specs, _run(mixer, x, state), x, None)  # type: ignore[arg-type]
    return counter.get_total_flops()


@lru_cache(256)
def _projections(kind: MixerKind, sizes: Sizes, config: Any) -> int:
    """Return the operations a token of the linear layers, each of which is called once."""
    with torch.device("meta"):
        mixer = check_made(kind, kind.make(sizes, config))
    return sum(2 * module.weight.numel() for module in mixer.modules() if isinstance(module, nn.Linear))


def _run(mixer: nn.Module, x: Tensor, state: LayerState | None = None) -> Any:
    """Run a mixer alone; one that reads what an earlier layer hands on gets something in its place."""
    stand_in = getattr(mixer, "stand_in", None)
    return mixer(x, state) if stand_in is None else mixer(x, state, None, stand_in(x))


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """Return the bytes of the tensors that a call's backward would need, without parameters."""
    own = {y.untyped_storage().data_ptr() for y in [*module.parameters(), *module.buffers()]}
    found: dict[int, tuple[int, Tensor]] = {}

    def keep(y: Tensor) -> Tensor:
        storage = y.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes(), y  # keeps the tensor, so that its address is not reused
        return y

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda y: y):
        kept = _run(module, x)
    total = sum(nbytes for nbytes, _ in found.values())
    del kept
    return total

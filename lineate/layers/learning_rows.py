"""Rows of the memories that learn, until they stand beside their classes."""

from collections.abc import Callable
from typing import Any

from torch import nn

from lineate.layers.configs import MemoryConfig
from lineate.layers.lact import LaCT
from lineate.layers.learning_costs import learning_kept, learning_operations
from lineate.layers.least_squares import LeastSquares
from lineate.layers.registry import Look, MixerKind, ModelSizes, register
from lineate.layers.titans import Titans
from lineate.layers.ttt import TTTMLP, TTTLinear


def _shared(model: ModelSizes, memory: MemoryConfig) -> tuple[tuple[int, int], dict[str, Any]]:
    chunk = {} if memory.chunk is None else {"chunk": memory.chunk}
    return (model.hidden_size, memory.heads), {"conv_size": memory.conv_size, **chunk}


def _make_ttt(mixer: Callable[..., nn.Module]) -> Callable[[ModelSizes, MemoryConfig], nn.Module]:
    def make(model: ModelSizes, memory: MemoryConfig) -> nn.Module:
        sizes, shared = _shared(model, memory)
        return mixer(*sizes, **shared, head_dim=memory.head_dim)

    return make


def _make_titans(model: ModelSizes, memory: MemoryConfig) -> nn.Module:
    sizes, shared = _shared(model, memory)
    return Titans(*sizes, **shared, head_dim=memory.head_dim, memory=memory.titans)


def _make_lact(model: ModelSizes, memory: MemoryConfig) -> nn.Module:
    sizes, shared = _shared(model, memory)
    return LaCT(*sizes, **shared, head_dim=memory.head_dim, window=memory.window)


def _make_least_squares(model: ModelSizes, memory: MemoryConfig) -> nn.Module:
    sizes, shared = _shared(model, memory)
    return LeastSquares(*sizes, **shared, key_dim=memory.head_dim, value_dim=memory.head_dim)


for _letter, _name, _label, _short, _make, _look in (
    ("T", "ttt_linear", "TTT-Linear", "ttt", _make_ttt(TTTLinear), Look("#0072B2", "v", (0, (5, 3)))),
    ("P", "ttt_mlp", "TTT-MLP", "ttt-mlp", _make_ttt(TTTMLP), Look("#882255", "P", (0, (3, 3)))),
    ("N", "titans", "Titans", "titans", _make_titans, Look("#999933", "<", (0, (8, 2)))),
    ("C", "lact", "LaCT", "lact", _make_lact, Look("#AA4499", ">", (0, (3, 1, 1, 3)))),
    ("E", "least_squares", "least squares", "least-squares", _make_least_squares, Look("#332288", "h", (0, (2, 4)))),
):
    register(
        MixerKind(
            letter=_letter,
            name=_name,
            label=_label,
            short=_short,
            config=MemoryConfig,
            section="memory",
            make=_make,
            operations=learning_operations(_letter),
            kept_bytes=learning_kept(_letter),
            look=_look,
        )
    )

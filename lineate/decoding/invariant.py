"""Batch-invariant decoding: the bits of a row's logits do not depend on how many rows run, on which, or on its index.

On a CPU the rows of a step run in groups of up to TOGETHER, in which every row has the bits that it has alone; one by
one where that does not hold, such as for modules of other libraries. On a GPU all rows run in kernels that are chosen
by the sizes of a row (layers/invariant.py); a model with a part that has no such kernel is found by a trial of the
step, and its rows run one by one.
"""

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from lineate.decoding.in_place import Tensors, read_in_place, state_in_place, write_back
from lineate.layers.formats import StateFormat
from lineate.layers.projection import run_own_forwards
from lineate.layers.registry import kind_of
from lineate.layers.softmax import reads_own_length
from lineate.models.hybrid import HybridLM
from lineate.native.build import available
from lineate.native.product import FEW_ROWS
from lineate.quantised import QuantisedWeight
from lineate.torch_ops.invariance import batch_invariant

TOGETHER = FEW_ROWS
"""The most rows of a group on a CPU."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_invariant(model: HybridLM) -> None:
    """Raise if a model cannot decode with batch_invariant=True.

    Args:
        model: The model.
    """
    device = model.device.type
    if device not in ("cpu", "cuda"):
        raise ValueError(f"batch_invariant=True needs a model on a CPU or a CUDA GPU, got {device}; leave it out")
    if model.ranks is not None:
        raise ValueError(
            f"batch_invariant=True needs a model on one device, got the share of one of {model.ranks.size} ranks, "
            "whose sums are not covered; leave it out"
        )
    if torch.is_autocast_enabled(device):
        raise ValueError("batch_invariant=True does not support autocast; convert the model with model.to(dtype)")
    for n, block in enumerate(model.layers if device == "cuda" else ()):
        cached = any("t" in spec.shape for spec in block.state_specs)  # type: ignore[union-attr]
        if cached and not reads_own_length(block.mixer, 1):  # type: ignore[arg-type]
            raise ValueError(
                f"batch_invariant=True needs attention that reads each row's own length on a GPU, which layer {n}, "
                f"{block.mixer!r:.200}, does not: its heads are too wide, or Triton is missing; decode it on a CPU"
            )


def rows_together(model: HybridLM) -> int | None:
    """Return how many rows of a step may run together, as far as that is known before a step; None: all.

    Args:
        model: The model, which check_invariant accepts.
    """
    if model.device.type == "cuda":
        return None
    plain = (
        model.is_plain
        and available("products")
        and not _has_any_global_hook()
        and all(kind_of(letter).built_in for letter in set(model.config.letters))
        and run_own_forwards(model)
        and all(_is_multiplied(x) for x in model.parameters())
    )
    return TOGETHER if plain else 1


def _is_multiplied(x: Tensor) -> bool:
    """Whether C multiplies a few rows by this weight."""
    if isinstance(x, QuantisedWeight) and x.format.has_codes:
        return x.format.product is not None
    return x.dtype in _DTYPES


def read_in_groups(
    model: HybridLM,
    ids: Tensor,
    states: tuple[Tensors, Tensors, Tensor],
    window: int,
    format: StateFormat,
    together: int | None,
) -> tuple[Tensor, Tensor]:
    """Read one token of every row in place; return the logits `rows 1 vocab` and the inputs of the head.

    The lengths are not changed.

    Args:
        model: The model.
        ids: Tokens, `rows 1`.
        states: Memories `rows ...` and caches `rows capacity ...`, by layer and name, and lengths `rows`.
        window: How many entries of the caches attention reads at most.
        format: How the memories are kept.
        together: The rows of a group; None: all of them, in kernels that do not depend on their number.
    """
    memories, caches, lengths = states
    found: list[tuple[Tensor, Tensor]] = []
    rows = len(ids)
    with batch_invariant(not (ids.is_cuda and together == 1)):
        for first in range(0, rows, together or rows):
            at = slice(first, min(rows, first + (together or rows)))
            own, kept = (
                {n: {name: x[at] for name, x in each.items()} for n, each in part.items()}
                for part in (memories, caches)
            )
            state = state_in_place(own, kept, window, lengths[at], format=format)
            read = read_in_place(model, ids[at], state, (False, torch.bfloat16))
            write_back(own, read.state)
            found.append((read.logits, read.hidden))
    logits, hidden = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*found, strict=True))
    return logits, hidden

"""The division of a model among ranks, and the model of one of them.

tensor      heads, channels and vocabulary are divided over these ranks, which all see the same tokens
context     a sequence is divided over these ranks (training, and reading a prompt)
replicas    copies of both, each with sequences of its own
"""

from dataclasses import replace

from lineate.models.config import HybridConfig
from lineate.models.sharding import divide_config, tensor_sizes
from lineate.parallel.context.segments import check_splits
from lineate.planning.memory import empty_of
from lineate.planning.models import WHOLE, Model, Split, check_size

MOST_RANKS = 2**20
"""The most ranks of a kind; a larger number is treated as a typo."""
TRIED_SIZES = 256
"""The message about a size that does not divide names those up to this one that do."""


def split_model(model: Model, tensor: int = 1, context: int = 1, replicas: int = 1) -> Model:
    """Return the model of one rank, whose bytes, operations and times are those of a rank.

    Args:
        model: The whole model.
        tensor: Ranks that divide heads, channels and vocabulary among them.
        context: Ranks that divide each sequence among them.
        replicas: Copies of all this, each with sequences of its own.

    >>> rank = split_model(read_model("qwen3-next-80b"), tensor=8)
    >>> plan_memory(rank).weights, time_bounds(rank, HARDWARE["h200"])
    """
    for name, value in (("tensor", tensor), ("context", context), ("replicas", replicas)):
        check_size(name, value)
        if value > MOST_RANKS:
            raise ValueError(f"{name} must be at most {MOST_RANKS:,}, got {value:,}")
    if model.split != WHOLE:
        raise ValueError(f"model must be whole, got {model.name}")
    if context > 1:
        _check_context(model.config, context)
    model = replace(model, split=Split(tensor, context, replicas))
    if tensor == 1:
        return model
    name = f"{model.name}, one of {tensor} tensor ranks"
    return replace(model, name=name, config=_rank_config(model.config, tensor), whole=model.config)


def _rank_config(config: HybridConfig, tensor: int) -> HybridConfig:
    """Return the sizes of the rank that has the most tokens of the vocabulary, which need not divide."""
    try:
        return max((divide_config(config, tensor, rank) for rank in (0, tensor - 1)), key=lambda x: x.vocab_size)
    except ValueError as error:
        sizes = tensor_sizes(config, TRIED_SIZES)
        wanted = "1" if sizes == [1] else "one of " + ", ".join(map(str, sizes))
        raise ValueError(f"tensor must be {wanted} for this model, got {tensor}: {error}") from None


def _check_context(config: HybridConfig, context: int) -> None:
    """Raise if a mixer cannot pass its memory from rank to rank."""
    try:
        blocks = empty_of(config).layers
        parts = [part for block in blocks for part in (block.mixer, block.feed) if hasattr(part, "state_spec")]
        check_splits(*parts)
    except ValueError as error:
        raise ValueError(f"context must be 1 for this model, got {context}: {error}") from None

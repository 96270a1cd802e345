"""The longest context and the largest batch that fit, and the length from which a state is smaller than a cache."""

from lineate.planning.memory import LayerMemory, MemoryPlan, plan_memory
from lineate.planning.models import Model, check_size, variants


def longest_context(plan: MemoryPlan, memory_bytes: int, batch: int = 1) -> int | None:
    """Return the largest number of tokens n of each of `batch` sequences that fits.

    plan.total(batch, n) <= memory_bytes < plan.total(batch, n + 1). The result is None if nothing grows, so that any
    length fits, and 0 if weights and fixed state leave no room for a token, or do not fit themselves.

    Args:
        plan: The memory of the model.
        memory_bytes: Bytes available for weights and state.
        batch: Sequences at a time.
    """
    check_size("memory_bytes", memory_bytes)
    check_size("batch", batch)
    left = memory_bytes - plan.total(batch, 0)
    if left < 0:
        return 0
    return left // (batch * plan.cache_per_token) if plan.cache_per_token else None


def largest_batch(plan: MemoryPlan, memory_bytes: int, tokens: int) -> int:
    """Return the largest number of sequences n of `tokens` tokens that fits.

    plan.total(n, tokens) <= memory_bytes < plan.total(n + 1, tokens).

    Args:
        plan: The memory of the model.
        memory_bytes: Bytes available for weights and state.
        tokens: Tokens of each sequence.
    """
    check_size("memory_bytes", memory_bytes)
    check_size("tokens", tokens)
    return max(0, (memory_bytes - plan.weights) // plan.state(1, tokens))


def crossover(
    model: Model, state_dtype: str = "float32", conv_dtype: str | None = None, cache_dtype: str | None = None
) -> int:
    """Return the first length at which a linear layer's fixed state has fewer bytes than a full layer's cache.

    The layers are the model's own; if it has no layer of a kind, the one of variants() is used.

    Args:
        model: The model.
        state_dtype: Dtype of the recurrent state.
        conv_dtype: Dtype of the convolution state; None is the model's.
        cache_dtype: Dtype of the cache; None is the model's.
    """
    made, dtypes = variants(model), (state_dtype, conv_dtype, cache_dtype)
    linear, full = (plan_memory(made[name], *dtypes).layers[0] for name in ("linear only", "softmax only"))
    return first_smaller(linear, full)


def first_smaller(linear: LayerMemory, full: LayerMemory) -> int:
    """Return the first length at which a linear layer's state has fewer bytes than a full layer's cache."""
    return (linear.memory + linear.conv) // full.cache_per_token + 1

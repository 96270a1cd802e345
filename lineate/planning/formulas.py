"""The simplified formulas that courses teach, to check plots made with them, and how the exact bytes differ.

    full attention    batch * tokens * n_heads * d_head * 2 * bytes * n_layers
    DeltaNet          batch * n_heads * d_head * d_head * bytes * n_layers          no convolution
    3:1               n_layers / 4 layers of the first and the rest of the second; a:b of a pattern in the same way

d_head is emb_dim // n_heads, and a GB is 10^9 bytes. The number of layers of each kind need not be whole.
"""

from fractions import Fraction

import torch

from lineate.layers import kind_of
from lineate.planning.memory import LayerMemory, plan_memory
from lineate.planning.models import Model, check_size, dtype_of, mixed_ratio, variants


def teaching(
    emb_dim: int,
    n_heads: int,
    n_layers: int,
    tokens: int,
    batch: int = 1,
    dtype: str = "bf16",
    ratio: tuple[int, int] = (3, 1),
) -> dict[str, float]:
    """Return bytes by the three formulas: "full attention", "DeltaNet", "3:1" (or another ratio).

    Whole numbers are ints.

    Args:
        emb_dim: Channels of a token.
        n_heads: Heads of every layer, of emb_dim // n_heads channels.
        n_layers: Layers of all kinds.
        tokens: Tokens of each sequence.
        batch: Sequences at a time.
        dtype: Dtype of the cache and of the state.
        ratio: Layers of DeltaNet to layers of full attention.
    """
    sizes = {"emb_dim": emb_dim, "n_heads": n_heads, "n_layers": n_layers, "batch": batch}
    sizes |= {"ratio[0]": ratio[0], "ratio[1]": ratio[1]}
    for name, value in sizes.items():
        check_size(name, value)
    check_size("tokens", tokens, 0)
    d_head, itemsize = emb_dim // n_heads, dtype_of(dtype).itemsize
    full = batch * tokens * n_heads * d_head * 2 * itemsize
    delta = batch * n_heads * d_head * d_head * itemsize
    mixed = Fraction(n_layers * (ratio[1] * full + ratio[0] * delta), sum(ratio))
    return {
        "full attention": n_layers * full, "DeltaNet": n_layers * delta, f"{ratio[0]}:{ratio[1]}": _number(mixed)
    }  # fmt: skip


def teaching_of(model: Model, tokens: int, batch: int = 1) -> dict[str, float]:
    """Return the same for a model, by its hidden size, heads, dtype and the ratio of its pattern.

    The heads are those of its attention, else of its linear layers.

    Args:
        model: The model.
        tokens: Tokens of each sequence.
        batch: Sequences at a time.
    """
    c = model.config
    return teaching(c.hidden_size, taught_heads(model), c.n_layers, tokens, batch, model.dtype_name, mixed_ratio(c))


def taught_variants(model: Model) -> dict[str, Model]:
    """Return the models whose bytes the three formulas are for: softmax only, linear only, and the mixture."""
    softmax, linear, mixed = variants(model).items()
    ratio = mixed_ratio(model.config)
    if ratio == (3, 1):
        return dict((softmax, linear, mixed))
    return dict((softmax, linear, (f"{ratio[0]}:{ratio[1]} hybrid", model)))


def taught_heads(model: Model) -> int:
    """Return the number of heads in the formulas."""
    c = model.config
    for part in (c.attention, c.latent, c.linear, c.mamba, c.memory, *c.mixers.values()):
        if isinstance(heads := getattr(part, "heads", None), int):
            return heads
    raise ValueError(f"the teaching formulas need a number of heads, and no mixer of {model.name} has one")


def differences(
    model: Model, tokens: int = 32768, state_dtype: str = "float32", conv_dtype: str | None = None,
    cache_dtype: str | None = None,
) -> list[str]:  # fmt: skip
    """Describe how exact bytes differ from the formulas, and why: one sentence each, with the numbers of this model.

    Args:
        model: The model.
        tokens: Tokens of the sequence that the totals are of.
        state_dtype: Dtype of the recurrent state.
        conv_dtype: Dtype of the convolution state; None is the model's.
        cache_dtype: Dtype of the cache; None is the model's.
    """
    dtypes = state_dtype, conv_dtype, cache_dtype
    made = {name: plan_memory(variant, *dtypes) for name, variant in taught_variants(model).items()}
    linear, full = made["linear only"].layers[0], made["softmax only"].layers[0]
    taught = teaching_of(model, tokens)
    c, heads, itemsize = model.config, taught_heads(model), model.dtype.itemsize
    d_head = c.hidden_size // heads
    kept, cached = made["linear only"].state_dtype, made["softmax only"].cache_dtype
    said = _state_differences(model, linear, kept, heads, d_head)
    said += _cache_differences(model, full, cached, heads, d_head)
    a, b = mixed_ratio(c)
    if len({kind_of(letter).grows for letter in c.letters}) == 1:
        said.append(f"The pattern {c.pattern} has one kind of layer; the hybrid next to it is an example of {a}:{b}.")
    attending = Fraction(c.n_layers * b, a + b)
    whole = sum(bool(layer.cache) for layer in made[f"{a}:{b} hybrid"].layers)
    if whole != attending:
        said.append(
            f"Layers are whole: of {c.n_layers}, {whole} attend in a {a}:{b} pattern; the formula has "
            f"{float(attending):g}."
        )
    if len(said) > 1:
        said.append(
            f"Altogether a linear layer keeps {linear.memory + linear.conv:,} bytes of a sequence, where the formula "
            f"has {heads * d_head * d_head * itemsize:,}."
        )
    for name, key in zip(made, taught, strict=True):
        exact = made[name].state(1, tokens)
        said.append(
            f"One sequence of {tokens:,} tokens, {name}: {exact / 1e9:.4g} GB exactly, {taught[key] / 1e9:.4g} GB by "
            f"the formula ({exact / taught[key]:.4g} times)."
        )
    return said


def _state_differences(
    model: Model, linear: LayerMemory, dtype: torch.dtype, heads: int, d_head: int
) -> list[str]:  # fmt: skip
    c, said = model.config, []
    if dtype.itemsize != model.dtype.itemsize:
        sizes = f"{dtype.itemsize} bytes an element, not {model.dtype.itemsize} ({model.dtype_name})"
        said.append(
            f"The recurrent state is float32 whatever the weights are: {sizes}; a state in 16 bit forgets what is "
            "smaller than its rounding."
            if dtype == torch.float32
            else f"The recurrent state is planned in {str(dtype).removeprefix('torch.')}: {sizes}."
        )
    section, matrix = kind_of(linear.letter).section, None
    if section == "linear" and c.linear is not None:
        matrix = c.linear.value_heads, c.linear.key_dim
    elif section == "mamba" and c.mamba is not None:
        matrix = c.mamba.heads, c.mamba.state_dim
    if matrix is not None:
        own, rows = matrix
        columns = linear.memory // (own * rows * dtype.itemsize)
        if (own, rows, columns) != (heads, d_head, d_head):
            said.append(
                f"A linear layer has {own} value heads of {rows} x {columns} ({own * rows * columns:,} elements), not "
                f"{heads} of {d_head} x {d_head} ({heads * d_head * d_head:,})."
            )
    elif section not in ("linear", "mamba"):
        said.append(
            f"The memory of {linear.rule} is {linear.memory:,} bytes a layer: its weights and what it has summed up."
        )
    if linear.conv:
        said.append(
            f"The short convolution keeps its last inputs: {linear.conv:,} bytes a layer and sequence, "
            f"{100 * linear.conv / linear.memory:.3g}% of the recurrent state, which the formula leaves out."
        )
    return said


def _cache_differences(model: Model, full: LayerMemory, dtype: torch.dtype, heads: int, d_head: int) -> list[str]:
    c, said = model.config, []
    formula = 2 * heads * d_head * model.dtype.itemsize
    if dtype.itemsize != model.dtype.itemsize:
        said.append(
            f"The cache is planned in {str(dtype).removeprefix('torch.')}: {dtype.itemsize} bytes an element, not "
            f"{model.dtype.itemsize} ({model.dtype_name})."
        )
    if full.cache == "latent":
        assert c.latent is not None
        said.append(
            f"Latent attention caches one vector of {c.latent.rank} + {c.latent.rope_dim} channels a token, "
            f"{full.cache_per_token:,} bytes a layer, not a key and a value of every head ({formula:,})."
        )
        return said
    a = c.attention
    if a is None:
        return said
    if a.kv_heads != a.heads:
        said.append(
            f"Keys and values have {a.kv_heads} heads, not {a.heads}: each is shared by {a.heads // a.kv_heads} heads "
            f"of queries, so the cache is {a.heads / a.kv_heads:g} times smaller."
        )
    if a.head_dim != d_head:
        said.append(
            f"A head of attention has {a.head_dim} channels, not emb_dim / n_heads = {d_head}: a token takes "
            f"{full.cache_per_token:,} bytes a layer, where the formula has {formula:,}."
        )
    return said


def _number(x: Fraction) -> float:
    return x.numerator if x.denominator == 1 else float(x)

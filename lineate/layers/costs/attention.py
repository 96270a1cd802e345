"""The costs of softmax attention and latent attention: operations, and bytes that the backward keeps.

lineate/planning/compute.py and lineate/planning/activations.py define the counts.
"""

from lineate.layers.configs import AttentionConfig, LatentConfig
from lineate.layers.registry import ModelSizes, Operations


def _pairs(tokens: int, convention: str) -> int:
    """Return the pairs of tokens that are compared: all of them if plain torch runs, else the causal ones."""
    return tokens * tokens if convention == "executed" else tokens * (tokens + 1) // 2


def _attention_projections(model: ModelSizes, a: AttentionConfig) -> int:
    wide, narrow = a.heads * a.head_dim, a.kv_heads * a.head_dim
    return 2 * model.hidden_size * (wide * (3 if a.gated else 2) + 2 * narrow)


ATTENTION = Operations(
    _attention_projections,
    lambda a, tokens, convention: 4 * a.heads * a.head_dim * _pairs(tokens, convention),
    lambda a, context, convention: 4 * a.heads * a.head_dim * (context + 1),
)


def attention_kept(a: AttentionConfig, half: bool) -> float:
    """Return the bytes a token that the backward keeps.

    These are in_proj's output; q and k if norm or rotation made new ones; the output; its gate and the product with it.
    In 16 bit they include contiguous copies of q, k and v for the kernel of packed sequences. Keys and values that an
    older torch repeats for grouped queries are not counted.
    """
    e = 2 if half else 4
    wide, narrow = a.heads * a.head_dim, a.kv_heads * a.head_dim
    projected = wide * (2 if a.gated else 1) + 2 * narrow
    made = wide + narrow if a.rotary_dim or a.qk_norm else 0
    if half:
        made = wide + 2 * narrow
    return e * (projected + made + wide * (3 if a.gated else 1)) + 4 * a.heads


def _latent_projections(model: ModelSizes, m: LatentConfig) -> int:
    made = m.heads * (m.nope_dim + m.rope_dim + m.value_dim) + m.rank + m.rope_dim + m.gate_width
    return 2 * model.hidden_size * made


def _latent_mixing(m: LatentConfig, tokens: int, convention: str) -> int:
    keys, values = m.nope_dim + m.rope_dim, m.value_dim
    wide = max(keys, values) if convention == "executed" else values  # the kernels want one width
    made = 2 * tokens * m.rank * m.heads * (m.nope_dim + values)
    return made + 2 * m.heads * (keys + wide) * _pairs(tokens, convention)


def _latent_mixing_one(m: LatentConfig, context: int, convention: str) -> int:
    seen, key = context + 1, m.rank + m.rope_dim
    wide = key if convention == "executed" else m.rank
    absorbed = 2 * m.heads * (m.rank * (m.nope_dim + m.value_dim) + seen * (key + wide))
    if convention == "executed":
        return absorbed
    made = m.rank * (m.nope_dim + m.value_dim) + m.nope_dim + m.rope_dim + m.value_dim
    return min(absorbed, 2 * m.heads * seen * made)


LATENT = Operations(_latent_projections, _latent_mixing, _latent_mixing_one)
"""Making keys and values from the latent vectors belongs to the mixing, not to the projections."""


def latent_kept(m: LatentConfig, half: bool) -> float:
    """Return the bytes a token that the backward keeps.

    These are in_proj's output, the cached vector, keys and values of all heads, the output, and its product with the
    activated gate.
    """
    e = 2 if half else 4
    keys, values = m.heads * (m.nope_dim + m.rope_dim), m.heads * m.value_dim
    padded = keys > values  # values are widened to the keys, and the output cut
    made = 2 * keys + values if padded else m.heads * m.nope_dim + 2 * values
    turned = keys if m.rope_theta is not None else 0
    gated = 2 * m.gate_width + (values if m.gate is not None and not padded else 0)
    return e * (keys + 2 * (m.rank + m.rope_dim) + keys + made + turned + gated) + 4 * m.heads

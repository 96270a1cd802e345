"""The small model of a rule: a HybridLM whose layers all have it, or the mixers of a pattern."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from lineate.console.names import nearest
from lineate.layers import MixerKind, kinds
from lineate.models import (
    AttentionConfig,
    FeedConfig,
    HybridConfig,
    LatentConfig,
    LinearConfig,
    MambaConfig,
    MemoryConfig,
    RwkvConfig,
)
from lineate.rule import RULES

WITH_BETA = tuple(rule.name for rule in RULES if "beta" in rule.gates or "erase" in rule.gates)
"""The rules that have a beta, by the names of their rows; that of GDN-2 is its rate of erasing."""
SEVERAL_WRITES = tuple(rule.name for rule in RULES if rule.writes)
"""The rules that write several times a token."""


@dataclass(frozen=True)
class ModelOptions:
    """The settings that all rules of a comparison share."""

    width: int = 128
    """Channels of a token."""
    layers: int = 2
    """Layers of the model."""
    heads: int = 1
    """Heads, of width / heads channels each, for keys and for values."""
    conv: int = 4
    """Tokens that the short convolution of the linear rules sees; 0 is no convolution."""
    beta_scale: float = 1.0
    """beta lies in (0, beta_scale), unless the rule's name ends in -2."""
    init: float = 0.02
    """Standard deviation of the first weights."""
    decay: bool = True
    """Whether Gated DeltaProduct has its decay; the other rules with a decay need theirs."""


def kinds_by_word() -> dict[str, MixerKind]:
    """Return the rows of all mixers by their names on the command line; the memories that learn come last."""
    return {kind.word: kind for kind in sorted(kinds(), key=lambda kind: kind.learns)}


class ParsedRule(NamedTuple):
    """The meaning of a rule's name on the command line."""

    pattern: str
    """Letters of mixers."""
    beta_scale: float
    """beta lies in (0, this)."""
    writes: int | None = None
    """Writes a token of Gated DeltaProduct; None: the name does not say it."""


def parse_rule(name: str, beta_scale: float = 1.0) -> ParsedRule:
    """Return the meaning of "gdn", of a pattern such as "GGGA", or of either with -2: beta in (0, 2).

    "product3" is Gated DeltaProduct with three writes a token.
    """
    known = kinds_by_word()
    letters = [kind.letter for kind in kinds()]
    word, dash, _ = name.partition("-2")
    word, writes = _without_writes(word)
    pattern = known[word].letter if word in known else word if not set(word) - set(letters) else ""
    if not pattern or name not in (given := f"{word}{writes or ''}", f"{given}-2"):
        raise ValueError(
            f"rules must be of {', '.join(known)}, or patterns of the letters {', '.join(letters)}, got {name!r}"
            f"{nearest(name, known)}"
        )
    with_beta = {word: kind.letter for word, kind in known.items() if (kind.rule or kind.name) in WITH_BETA}
    if dash and not set(pattern) & set(with_beta.values()):
        *most, last = with_beta
        raise ValueError(f"rules: {name!r} has no beta, only {', '.join(most)} and {last} have one; leave -2 out")
    return ParsedRule(pattern, 2.0 if dash else beta_scale, writes)


def _without_writes(word: str) -> tuple[str, int | None]:
    """Return "product" and 3 of "product3"; any other word unchanged, and None."""
    for known, kind in kinds_by_word().items():
        if (kind.rule or kind.name) in SEVERAL_WRITES and re.fullmatch(f"{known}[1-9][0-9]*", word):
            return known, int(word.removeprefix(known))
    return word, None


def label(name: str) -> str:
    """Return a rule's display name."""
    word, dash, _ = name.partition("-2")
    word, writes = _without_writes(word)
    kind = kinds_by_word().get(word)
    shown = word if kind is None else kind.short_label or kind.label
    if writes:
        shown += f", n = {writes}"
    return shown + (", beta in (0, 2)" if dash else "")


def make_config(rule: str, tokens: int, options: ModelOptions) -> HybridConfig:
    """Return the model of one rule.

    Softmax and latent attention have rotary positions on half of a head's channels and no convolution. The latent
    vector has half of the width.

    Args:
        rule: A mixer's name on the command line such as "gdn", or a pattern such as "GGGA"; with "-2" at its end, beta
            lies in (0, 2). "product3" writes three times a token.
        tokens: How many different tokens there are.
        options: The sizes that all rules share.
    """
    pattern, beta_scale, writes = parse_rule(rule, options.beta_scale)
    if options.width < 1 or options.heads < 1 or options.layers < 1:
        raise ValueError(f"width, heads and layers must be at least 1, got {options}")
    if options.width % (4 * options.heads):
        raise ValueError(
            f"width must be a multiple of 4 * heads = {4 * options.heads}, got {options.width}; rotary positions turn "
            "half of a head's channels"
        )
    if len(pattern) > options.layers:
        raise ValueError(f"layers must be at least {len(pattern)} for the pattern {pattern!r}, got {options.layers}")
    dim = options.width // options.heads
    return HybridConfig(
        vocab_size=tokens, hidden_size=options.width, n_layers=options.layers, pattern=pattern, tie_embeddings=True,
        initializer_range=options.init,
        linear=LinearConfig(
            options.heads, options.heads, dim, dim, conv_size=options.conv, beta_scale=beta_scale,
            writes=writes or LinearConfig.writes, forgets=options.decay,
        ),
        mamba=MambaConfig(options.heads, dim, dim, conv_size=options.conv),
        rwkv=RwkvConfig.of_width(options.width, options.heads, dim),
        memory=MemoryConfig(options.heads, dim, conv_size=options.conv),
        attention=AttentionConfig(options.heads, options.heads, dim, rotary_dim=dim // 2),
        latent=LatentConfig(
            options.heads, options.width // 2, dim - dim // 2, dim // 2, dim, rope_theta=10000.0
        ),
        feed=FeedConfig(2 * options.width),
    )  # fmt: skip

"""Configurations with a name: sizes to train, and the shapes of published models."""

from collections.abc import Callable
from dataclasses import fields

from lineate.console.hints import hinted
from lineate.layers.linear import KIMI_DELTA_KIND
from lineate.models.config import (
    AttentionConfig,
    ExpertsConfig,
    FeedConfig,
    HybridConfig,
    LatentConfig,
    LinearConfig,
    MambaConfig,
    MemoryConfig,
    RwkvConfig,
)


def _sized(hidden: int, layers: int, heads: int, pattern: str, vocab_size: int) -> HybridConfig:
    """Return a 3:1 hybrid of our own: heads of 64 or 128 channels, SwiGLU of about 8/3 hidden."""
    dim = hidden // heads
    feed = -(-8 * hidden // 3 // 64) * 64
    kimi = KIMI_DELTA_KIND.letter in pattern
    return HybridConfig(
        vocab_size=vocab_size, hidden_size=hidden, n_layers=layers, pattern=pattern, tie_embeddings=True,
        linear=LinearConfig(
            heads, heads, dim, dim, gate_activation="sigmoid" if kimi else "silu", norm_eps=1e-5 if kimi else 1e-6
        ),
        mamba=MambaConfig(2 * heads, dim, dim),
        rwkv=RwkvConfig.of_width(hidden, heads, dim),
        memory=MemoryConfig(heads, dim),
        attention=AttentionConfig(heads, max(1, heads // 4), dim, rotary_dim=dim // 2),
        latent=LatentConfig(heads, rank=max(64, hidden // 4), nope_dim=dim, rope_dim=dim // 2, value_dim=dim),
        feed=FeedConfig(feed),
    )  # fmt: skip


def tiny(pattern: str = "GGGA", vocab_size: int = 256) -> HybridConfig:
    """About 1M parameters: seconds on a laptop."""
    return _sized(128, 4, 2, pattern, vocab_size)


def small(pattern: str = "GGGA", vocab_size: int = 256) -> HybridConfig:
    """About 15M."""
    return _sized(384, 8, 6, pattern, vocab_size)


def compact(pattern: str = "GGGA", vocab_size: int = 256) -> HybridConfig:
    """About 50M."""
    return _sized(512, 16, 4, pattern, vocab_size)


def base(pattern: str = "GGGA", vocab_size: int = 32768) -> HybridConfig:
    """About 115M."""
    return _sized(768, 12, 6, pattern, vocab_size)


def medium(pattern: str = "GGGA", vocab_size: int = 32768) -> HybridConfig:
    """About 350M."""
    return _sized(1024, 24, 8, pattern, vocab_size)


def large(pattern: str = "GGGA", vocab_size: int = 65536) -> HybridConfig:
    """About 940M."""
    return _sized(1536, 28, 12, pattern, vocab_size)


def qwen3_next_80b() -> HybridConfig:
    """Qwen3-Next-80B-A3B."""
    return HybridConfig(
        vocab_size=151936, hidden_size=2048, n_layers=48, pattern="GGGA", family="qwen3_next",
        linear=LinearConfig(16, 32, 128, 128),
        attention=AttentionConfig(16, 2, 256, rotary_dim=64, rope_theta=1e7),
        experts=ExpertsConfig(512, 10, 512, shared_size=512, shared_gate=True),
        zero_centred_norm=True, max_position=262144,
    )  # fmt: skip


def qwen3_5_27b() -> HybridConfig:
    """Qwen3.5-27B, its text part."""
    return HybridConfig(
        vocab_size=248320, hidden_size=5120, n_layers=64, pattern="GGGA", family="qwen3_5",
        linear=LinearConfig(16, 48, 128, 128),
        attention=AttentionConfig(24, 4, 256, rotary_dim=64, rope_theta=1e7),
        feed=FeedConfig(17408), zero_centred_norm=True, max_position=262144,
    )  # fmt: skip


def qwen3_5_35b_a3b() -> HybridConfig:
    """Qwen3.5-35B-A3B, its text part."""
    return HybridConfig(
        vocab_size=248320, hidden_size=2048, n_layers=40, pattern="GGGA", family="qwen3_5_moe",
        linear=LinearConfig(16, 32, 128, 128),
        attention=AttentionConfig(16, 2, 256, rotary_dim=64, rope_theta=1e7),
        experts=ExpertsConfig(256, 8, 512, shared_size=512, shared_gate=True),
        zero_centred_norm=True, max_position=262144,
    )  # fmt: skip


def kimi_linear_48b() -> HybridConfig:
    """Kimi-Linear-48B-A3B: full attention in layers 4, 8, 12, 16, 20, 24 and 27, counted from 1."""
    return HybridConfig(
        vocab_size=163840, hidden_size=2304, n_layers=27, pattern="KKKM" * 6 + "KKM", family="kimi_linear",
        linear=LinearConfig(32, 32, 128, 128, norm_eps=1e-5, gate_activation="sigmoid"),
        latent=LatentConfig(32, rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        feed=FeedConfig(9216), dense_layers=(0,),
        experts=ExpertsConfig(256, 8, 1024, shared_size=1024, scores="sigmoid", scale=2.446),
        norm_eps=1e-5, max_position=1048576,
    )  # fmt: skip


def olmo_hybrid_7b() -> HybridConfig:
    """OLMo-Hybrid-7B."""
    return HybridConfig(
        vocab_size=100352, hidden_size=3840, n_layers=32, pattern="GGGA", family="olmo_hybrid",
        linear=LinearConfig(30, 30, 96, 192, beta_scale=2.0, norm_eps=1e-5),
        attention=AttentionConfig(30, 30, 128, gated=False, qk_norm="full"),
        feed=FeedConfig(11008), norm_after="A", max_position=65536,
    )  # fmt: skip


PRESETS: dict[str, Callable[..., HybridConfig]] = {
    f.__name__.replace("_", "-"): f
    for f in (
        tiny, small, compact, base, medium, large,
        qwen3_next_80b, qwen3_5_27b, qwen3_5_35b_a3b, kimi_linear_48b, olmo_hybrid_7b,
    )
}  # fmt: skip


_FIELDS = {
    x.name: f"it is a field of HybridConfig: write dataclasses.replace(preset(...), {x.name}=...)"
    for x in fields(HybridConfig)
}


@hinted(_FIELDS)
def preset(name: str, pattern: str | None = None, vocab_size: int | None = None) -> HybridConfig:
    """Return a configuration by name.

    Args:
        name: a key of PRESETS.
        pattern: mixers of the layers, for the sizes to train.
        vocab_size: tokens of the vocabulary, for the sizes to train.
    """
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    if name in ("tiny", "small", "compact", "base", "medium", "large"):
        make = PRESETS[name]
        options = {key: value for key, value in (("pattern", pattern), ("vocab_size", vocab_size)) if value is not None}
        return make(**options)
    if pattern is not None or vocab_size is not None:
        raise ValueError(f"pattern and vocab_size cannot be changed for {name!r}, the shape of a published model")
    return PRESETS[name]()

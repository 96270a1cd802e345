"""Configurations in which no two sizes are equal, so that none can be mistaken for another."""

from lineate.models import (
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


def odd(pattern: str, **changes: object) -> HybridConfig:
    """Return a configuration of odd, unequal sizes: 3 key heads for 6 value heads, 5 attention heads."""
    parts: dict[str, object] = {
        "linear": LinearConfig(3, 6, 7, 11, decay_rank=5, gate_rank=6),
        "mamba": MambaConfig(6, 5, 7, groups=3, norm_groups=2),
        "rwkv": RwkvConfig(3, 8, value_dim=5, decay_rank=4, rate_rank=6, value_rank=9, gate_rank=10),
        "memory": MemoryConfig(3, 10, chunk=4),
        "attention": AttentionConfig(5, 1, 9, rotary_dim=4, bias=True),
        "latent": LatentConfig(5, rank=13, nope_dim=6, rope_dim=4, value_dim=7),
        "feed": FeedConfig(21),
    }
    sizes = {"vocab_size": 61, "hidden_size": 30, "n_layers": len(pattern), "pattern": pattern}
    return HybridConfig(**(sizes | parts | changes))  # type: ignore[arg-type]


EXPERTS = ExpertsConfig(6, 2, 10, shared_size=12, shared_gate=True, scores="sigmoid")

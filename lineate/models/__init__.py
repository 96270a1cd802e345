"""Hybrid language models: build one from a pattern, or load a published checkpoint.

model = HybridLM(HybridConfig(vocab_size=256, hidden_size=512, n_layers=8, pattern="GGGA", ...))
model = HybridLM.from_pretrained("folder or hub name")
"""

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
from lineate.models.hybrid import HybridLM, LMOutput
from lineate.models.presets import PRESETS, preset
from lineate.models.state import ModelState

__all__ = [
    "HybridLM",
    "HybridConfig",
    "LMOutput",
    "ModelState",
    "LinearConfig",
    "MambaConfig",
    "MemoryConfig",
    "RwkvConfig",
    "AttentionConfig",
    "LatentConfig",
    "FeedConfig",
    "ExpertsConfig",
    "PRESETS",
    "preset",
]

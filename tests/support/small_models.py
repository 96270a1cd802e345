"""Small models in which every part matters: norms are not 1, weights are not tiny."""

from dataclasses import replace

import torch

from lineate.models import ExpertsConfig, FeedConfig, HybridConfig, HybridLM, MambaConfig

EXPERTS = ExpertsConfig(8, 2, 64, shared_size=64, shared_gate=True)


def variants(config: HybridConfig) -> dict[str, HybridConfig]:
    """Return a configuration of four layers and others like it: with experts, of all rules, without feed-forwards."""
    mamba = MambaConfig(4, 32, 32, groups=2)
    return {
        "GGGA": config,
        "KKKM, experts": replace(config, pattern="KKKM", experts=EXPERTS, dense_layers=(0,), tie_embeddings=True),
        "LRDGKAM": replace(config, pattern="LRDGKAM", n_layers=7),
        "SSA, mixers alone": replace(
            config, pattern="SSA", n_layers=3, mamba=mamba, mixer_only=(1,), residual_scale=0.5,
            feed=FeedConfig(64, "relu2"),
        ),
    }  # fmt: skip


def random_model(config: HybridConfig) -> HybridLM:
    """Return a random float32 model with zero-centred norms between -.5 and .5."""
    torch.manual_seed(0)
    model = HybridLM(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "norm" in name:
                x.uniform_(-0.5, 0.5)
            elif x.dim() >= 2 and "conv" not in name:
                x.mul_(3)
    return model

"""Small models in which every part matters: norms are not 1, weights are not tiny."""

import torch

from lineate.models import HybridConfig, HybridLM


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

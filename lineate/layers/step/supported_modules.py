"""Which modules a step may compute instead of calling them: their forward is that of a known class.

Mixers are known by the `StepSpec` of their rows.
"""

from torch import nn

from lineate.layers.attention import GatedAttention
from lineate.layers.convolution import ShortConvolution
from lineate.layers.feed import MixtureOfExperts, SwiGLU
from lineate.layers.latent import LatentAttention
from lineate.layers.mamba2 import GroupedGatedNorm
from lineate.layers.norm import GatedRMSNorm, RMSNorm
from lineate.layers.registry import kinds

_MODULES: tuple[type[nn.Module], ...] = (
    nn.Linear, nn.Embedding, RMSNorm, GatedRMSNorm, GroupedGatedNorm, ShortConvolution, SwiGLU,
    MixtureOfExperts, GatedAttention, LatentAttention, *(row.step.mixer for row in kinds() if row.step is not None),
)  # fmt: skip
KNOWN = {kind: kind.forward for kind in _MODULES}
"""The modules whose forward the steps compute; others, such as adapters around one of these, are called."""


def are_unchanged() -> bool:
    """Whether the known classes still have their own forward; somebody may have set another one."""
    return all(kind.forward is own for kind, own in KNOWN.items())

"""Which modules a step may compute instead of calling them: their forward is that of a known class."""

from torch import nn

from lineate.layers.attention import GatedAttention
from lineate.layers.convolution import ShortConvolution
from lineate.layers.feed import SwiGLU
from lineate.layers.linear import GatedDeltaNet, KimiDeltaAttention
from lineate.layers.norm import GatedRMSNorm, RMSNorm

KNOWN = {
    kind: kind.forward
    for kind in (
        nn.Linear, nn.Embedding, RMSNorm, GatedRMSNorm, ShortConvolution, SwiGLU, GatedAttention, GatedDeltaNet,
        KimiDeltaAttention,
    )
}  # fmt: skip
"""The modules whose forward the steps compute; others, such as adapters around one of these, are called."""


def are_unchanged() -> bool:
    """Whether the known classes still have their own forward; somebody may have set another one."""
    return all(kind.forward is own for kind, own in KNOWN.items())


def runs_own_forward(module: nn.Module) -> bool:
    """Whether calling the module runs the forward of its class, and nothing before or after it."""
    return not (module._forward_pre_hooks or module._forward_hooks or "forward" in module.__dict__)

"""Layers: token mixers and feed-forwards, each `forward(x, state=None, cu_seqlens=None) -> (y, state)`.

    mixer = GatedDeltaNet(1024, heads=8, value_heads=16, key_dim=64, value_dim=64)
    y, state = mixer(x)                    # x b t hidden
    y, state = mixer(x_next, state)        # continue where it stopped
    y, state = mixer(packed, cu_seqlens=bounds)   # b = 1: packed sequences, which never see each other

Every mixer declares its state once: `state_spec`, a tuple of TensorSpec(name, shape, dtype). Its row in the registry
(`kinds`, `kind_of`) holds everything else that the library knows about it; `register` adds a mixer of your own
(examples/own_rule.py).
"""

from lineate.layers.attention import GatedAttention
from lineate.layers.convolution import ShortConvolution, short_convolution
from lineate.layers.feed import MixtureOfExperts, SquaredReLU, SwiGLU
from lineate.layers.lact import LaCT
from lineate.layers.latent import LatentAttention
from lineate.layers.least_squares import LeastSquares
from lineate.layers.linear import (
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    LinearAttention,
)
from lineate.layers.mamba2 import Mamba2
from lineate.layers.mixer import LinearMixer
from lineate.layers.norm import GatedRMSNorm, LayerNorm, RMSNorm
from lineate.layers.registry import Look, MixerKind, ModelSizes, Operations, kind_of, kinds, register
from lineate.layers.rwkv.channel_mix import ChannelMix
from lineate.layers.rwkv.time_mix import RWKV7
from lineate.layers.state import Carried, LayerState, Memory, TensorSpec, TokenCache
from lineate.layers.titans import Titans
from lineate.layers.ttt import TTTMLP, TTTLinear
from lineate.layers.variants.comba import Comba
from lineate.layers.variants.delta_product import GatedDeltaProduct
from lineate.layers.variants.gdn2 import GatedDeltaNet2
from lineate.layers.variants.hgrn2 import HGRN2
from lineate.layers.variants.preconditioned import PreconditionedGatedDeltaNet, PreconditionedKimiDeltaAttention
from lineate.layers.variants.retention import Retention, RotaryRetention

__all__ = [
    "LinearAttention",
    "GatedLinearAttention",
    "DeltaNet",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "LinearMixer",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "Comba",
    "PreconditionedGatedDeltaNet",
    "PreconditionedKimiDeltaAttention",
    "Mamba2",
    "RWKV7",
    "HGRN2",
    "Retention",
    "RotaryRetention",
    "LeastSquares",
    "TTTLinear",
    "TTTMLP",
    "Titans",
    "LaCT",
    "GatedAttention",
    "LatentAttention",
    "SwiGLU",
    "SquaredReLU",
    "ChannelMix",
    "MixtureOfExperts",
    "ShortConvolution",
    "short_convolution",
    "RMSNorm",
    "GatedRMSNorm",
    "LayerNorm",
    "LayerState",
    "Memory",
    "Carried",
    "TokenCache",
    "TensorSpec",
    "MixerKind",
    "ModelSizes",
    "Operations",
    "Look",
    "register",
    "kinds",
    "kind_of",
]

"""The norms of a model, and its ends where embeddings are scaled (Granite) or normalised (RWKV)."""

import torch.nn.functional as F
from torch import Tensor, nn

from lineate.layers import LayerNorm, RMSNorm
from lineate.models.config import HybridConfig
from lineate.rule import compute_dtype


class ScaledEmbedding(nn.Embedding):
    """An embedding whose vectors are multiplied by a constant; its weight, which may be the head too, is not.

    Args:
        count: tokens of the vocabulary.
        size: channels.
        scale: the constant.
    """

    def __init__(self, count: int, size: int, scale: float) -> None:
        super().__init__(count, size)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


class ScaledNorm(RMSNorm):
    """RMSNorm times a constant, rounded once: what the head reads, so that the logits are multiplied by it.

    Args:
        size: channels.
        eps: added to the mean square.
        scale: the constant.
        zero_centred: whether it multiplies by 1 + weight.
    """

    def __init__(self, size: int, eps: float, scale: float, *, zero_centred: bool = False) -> None:
        super().__init__(size, eps, zero_centred=zero_centred)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x.dtype)
        weight = (self.weight.to(dtype) + self.zero_centred) * self.scale
        return F.rms_norm(x.to(dtype), x.shape[-1:], weight, self.eps).to(x.dtype)


class NormedEmbedding(nn.Embedding):
    """An embedding whose vectors go through a norm.

    Args:
        count: tokens of the vocabulary.
        size: channels.
        norm: the norm.
    """

    def __init__(self, count: int, size: int, norm: nn.Module) -> None:
        super().__init__(count, size)
        self.norm = norm

    def forward(self, input: Tensor) -> Tensor:
        normed: Tensor = self.norm(super().forward(input))
        return normed


def make_norm(config: HybridConfig) -> RMSNorm | LayerNorm:
    """Make a norm of a model's residual stream."""
    if config.norm == "layer":
        return LayerNorm(config.hidden_size, config.norm_eps)
    return RMSNorm(config.hidden_size, config.norm_eps, zero_centred=config.zero_centred_norm)


def make_embedding(config: HybridConfig) -> nn.Embedding:
    """Make the embedding of a model."""
    if config.embedding_norm:
        return NormedEmbedding(config.vocab_size, config.hidden_size, make_norm(config))
    if config.embedding_scale == 1:
        return nn.Embedding(config.vocab_size, config.hidden_size)
    return ScaledEmbedding(config.vocab_size, config.hidden_size, config.embedding_scale)


def make_last_norm(config: HybridConfig) -> RMSNorm | LayerNorm:
    """Make the norm before the head."""
    size, eps, centred = config.hidden_size, config.norm_eps, config.zero_centred_norm
    if config.logit_scale == 1:
        return make_norm(config)
    return ScaledNorm(size, eps, config.logit_scale, zero_centred=centred)

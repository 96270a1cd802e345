"""Generating text with a model, token by token."""

from lineate.generation.graphed import GraphedDecoder
from lineate.generation.sampling import choose, generate, stream_text

__all__ = ["GraphedDecoder", "choose", "generate", "stream_text"]

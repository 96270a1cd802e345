"""Text from a model: choosing tokens, one after the other."""

from lineate.generation.graphed import GraphedDecoder
from lineate.generation.sampling import choose, generate, stream_text

__all__ = ["GraphedDecoder", "choose", "generate", "stream_text"]

"""Generating text with a model, token by token."""

from lineate.generation.choice import Sampling, choose_tokens, log_probabilities
from lineate.generation.graphed import GraphedDecoder
from lineate.generation.sampling import Generation, choose, generate, stream_text

__all__ = [
    "Generation",
    "GraphedDecoder",
    "Sampling",
    "choose",
    "choose_tokens",
    "generate",
    "log_probabilities",
    "stream_text",
]

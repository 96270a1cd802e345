"""Generating text with a model, token by token."""

from typing import TYPE_CHECKING

from lineate.system.lazy import first_use

if TYPE_CHECKING:
    from lineate.generation.choice import Sampling, choose_tokens, log_probabilities
    from lineate.generation.graphed import GraphedDecoder
    from lineate.generation.sampling import Generation, choose, generate, stream_text
else:
    __getattr__, __dir__ = first_use(
        __name__,
        {
            "choice": ("Sampling", "choose_tokens", "log_probabilities"),
            "graphed": ("GraphedDecoder",),
            "sampling": ("Generation", "choose", "generate", "stream_text"),
        },
    )  # fmt: skip

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

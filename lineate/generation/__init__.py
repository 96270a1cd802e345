"""Generating text with a model, token by token."""

import warnings
from typing import TYPE_CHECKING, Any

from lineate.system.lazy import first_use

if TYPE_CHECKING:
    from lineate.generation.choice import Sampling, choose_tokens, log_probabilities
    from lineate.generation.generated import Generation
    from lineate.generation.sampling import choose, generate, stream_text
else:
    _find, __dir__ = first_use(
        __name__,
        {
            "choice": ("Sampling", "choose_tokens", "log_probabilities"),
            "generated": ("Generation",),
            "sampling": ("choose", "generate", "stream_text"),
        },
    )

    def __getattr__(name: str) -> Any:
        if name != "GraphedDecoder":
            return _find(name)
        message = (
            "lineate.generation.GraphedDecoder is now lineate.decoding.Decoder; the old name will be removed in 0.3.0"
        )
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        from lineate.decoding import Decoder

        return Decoder


__all__ = [
    "Generation",
    "Sampling",
    "choose",
    "choose_tokens",
    "generate",
    "log_probabilities",
    "stream_text",
]

"""Decoding: an object that is prepared once for a model, rows and room, and then reads a token of every row a call."""

import warnings
from typing import TYPE_CHECKING, Any

from lineate.system.lazy import first_use

if TYPE_CHECKING:
    from lineate.decoding.decoder import Decoder
else:
    _find, __dir__ = first_use(__name__, {"decoder": ("Decoder",)})

    def __getattr__(name: str) -> Any:
        if name != "decode":
            return _find(name)
        message = "lineate.decoding.decode is now lineate.decode; the old name will be removed in 0.3.0"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        from lineate.ops.decoding import decode

        return decode


__all__ = ["Decoder"]

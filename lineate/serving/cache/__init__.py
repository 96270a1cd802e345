"""States by the tokens they have read, in memory, on disk and shared between processes."""

from typing import TYPE_CHECKING

from lineate.system.lazy import first_use

if TYPE_CHECKING:
    from lineate.serving.cache.cache import StateCache
else:
    __getattr__, __dir__ = first_use(__name__, {"cache": ("StateCache",)})

__all__ = ["StateCache"]

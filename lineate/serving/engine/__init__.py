"""Many requests at once: admission, prompts, rows that decode, their tensors."""

from typing import TYPE_CHECKING

from lineate.system.lazy import first_use

if TYPE_CHECKING:
    from lineate.serving.engine.engine import Engine
else:
    __getattr__, __dir__ = first_use(__name__, {"engine": ("Engine",)})

__all__ = ["Engine"]

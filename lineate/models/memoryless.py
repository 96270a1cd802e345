"""Models without memory for their tensors, on the meta device."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lineate.models.config import HybridConfig

AnyModel = TypeVar("AnyModel", bound=nn.Module)


def without_memory(make: Callable[[HybridConfig], AnyModel], config: HybridConfig) -> AnyModel:
    """Make a model without memory for its tensors."""
    with torch.device("meta"), _WithoutNormal():
        return make(config)


class _WithoutNormal(TorchFunctionMode):
    """Leaves out nn.init.normal_, which on meta tensors does nothing but import 150 MB of torch."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return kwargs.get("tensor") if func is nn.init.normal_ else func(*args, **kwargs)

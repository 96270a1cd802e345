"""The row of a checkpoint family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lineate.models.config import HybridConfig
from lineate.models.files.loading import LoadingPlan

Shape = tuple[int, ...]


@dataclass(frozen=True)
class CheckpointFamily:
    """The reader of a family's checkpoints."""

    model_types: tuple[str, ...]
    """The values of model_type in config.json."""
    config_from: Callable[[dict[str, Any]], HybridConfig]
    """Reads config.json."""
    plan: Callable[[HybridConfig, Mapping[str, Shape]], LoadingPlan]
    """(config, shapes of the tensors) -> where every tensor of the model comes from."""
    signature: str
    """Matches the name of a tensor that no other family has."""
    predicts: Callable[[HybridConfig, Mapping[str, Shape]], bool] = lambda config, shapes: False
    """(config, shapes of the tensors) -> whether they have a supported head of multi-token prediction."""
    complete: Callable[[dict[str, Any], Mapping[str, Shape]], dict[str, Any]] = lambda values, shapes: values
    """(config.json, shapes of the tensors) -> config.json with the sizes that it lacks and the shapes have."""

"""The old names of modules that moved in 0.2.0: importing one warns and gives the module at its new place."""

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    ("", "system"): "waiting processor folders lazy seeding",
    ("", "console"): "options terminal names hints extras",
    ("", "torch_ops"): "chunk_op registrar opaque tracing precision flops zeros elementwise dtypes",
    ("", "native"): "half:low_precision_matmul",
    ("native", "native"): "small:quantised",
    ("", "ops"): "fused:raw_gates slot_checks rounding",
    ("forms", "ops"): "softmax",
    ("", "forms"): "sequences stability",
    ("small", "quantised"): "format weight product expanded which",
    ("", ""): "small:quantised again:plans recent:plans",
    ("layers", "parallel.context"): "context:segments carry balance workload",
    ("layers", "parallel.tensor"): "ranks shards",
    ("", "parallel.job"): "processes",
    ("generation", "parallel.job"): "link",
    ("generation", "decoding"): "graphed:decoder in_place capturing",
    ("serving", "decoding"): "graphs:rows",
    ("layers", "layers.step"): "native_steps:native steps:launches bare:supported_modules unchanged",
    ("layers", "layers.costs"): "attention_costs:attention learning_costs:learning linear_costs:linear measuring",
    (
        "serving",
        "serving.engine",
    ): "batch pool warming requests reading continuation planning guessing answers lockstep",
    ("serving", "serving.cache"): "radix blocks kept aging spill neighbours sealed identity peers",
    ("serving", "serving.drafting"): "predicting",
    (
        "integrations.ray",
        "serving.replicas",
    ): "call cluster front gathered options outgoing prefixes prompts replica router routing",
    ("integrations", "serving"): "ray:replicas",
    ("serving", "web"): "gate limits connections metrics",
    ("serving.api", "web"): "errors fields responses intake",
}
"""The modules that moved from one package to another; "old:new" where the name changed too. Removed in 0.3.0."""


def renamed() -> dict[str, str]:
    """Return the new name of each module by its old one."""
    found = {}
    for (old, new), modules in MOVED.items():
        for module in modules.split():
            before, _, after = module.partition(":")
            found[_joined(old, before)] = _joined(new, after or before)
    return found


def _joined(package: str, module: str) -> str:
    return ".".join(filter(None, ("lineate", package, module)))


class _Alias(Loader):
    """Loads the module at the new place."""

    def __init__(self, new: str) -> None:
        self._new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has set the spec of the old name


class Renamed(MetaPathFinder):
    """Finds modules by their old names.

    Args:
        names: The new name of each.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how the module is loaded, with a warning at the line that imports it; None for other names."""
        new = self._names.get(fullname)
        if new is None:
            return None
        frame = sys._getframe(1)
        while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        message = f"{fullname} is now {new}; the old name will be removed in 0.3.0"
        warnings.warn_explicit(message, DeprecationWarning, frame.f_code.co_filename, frame.f_lineno)
        return ModuleSpec(fullname, _Alias(new))

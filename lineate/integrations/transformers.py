"""transformers' own hybrid models on lineate: layers with delta rules and with Mamba-2 (transformers_families.py).

    from lineate.integrations.transformers import enable
    print(enable())                                  # holds for existing and new models, until disable()

enable() replaces the `forward` of a few classes: the linear layers; the text models, to find the boundaries of packed
sequences; parts that mix tokens and know no boundaries; and Kimi's latent attention, on a CPU. Parameters, caches and
everything else remain transformers'.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lineate.integrations.transformers_attention import latent_forward, unpacked_forward
from lineate.integrations.transformers_families import MODEL_PATCHES, ModelPatch
from lineate.integrations.transformers_layers import linear_forward
from lineate.integrations.transformers_packing import text_model_forward

OLDEST = (5, 17)
"""The oldest version of transformers that works: older models do not pass boundaries to all of their Mamba layers."""


@dataclass(frozen=True)
class EnableReport:
    """The changes that `enable` made."""

    version: str
    """The version of transformers."""
    families: dict[str, tuple[str, ...]]
    """For each changed family the functions that were replaced, such as 'Qwen3NextModel.forward'."""
    skipped: dict[str, str]
    """For each family that was not changed, the reason."""
    action: str = "run on lineate"
    """The action, as text for the report."""

    def __str__(self) -> str:
        lines = [f"transformers {self.version}: {len(self.families)} families {self.action}"]
        width = max(map(len, (*self.families, *self.skipped)), default=0)
        lines += [f"  {name:{width}}  {', '.join(functions)}" for name, functions in self.families.items()]
        lines += [f"  {name:{width}}  unchanged: {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Replaced:
    """A class whose forward is replaced."""

    owner: Any
    """The class of transformers."""
    original: Callable[..., Any]
    ours: Callable[..., Any]


_REPLACED: list[_Replaced] = []
_REPORT: EnableReport | None = None


def enable() -> EnableReport:
    """Run the linear layers of all families on lineate, in existing and in new models.

    Calling it again changes nothing. Afterwards packed sequences do not see each other in any layer: their boundaries
    come from `cu_seq_lens_q`, or else from `seq_idx`, or else from `position_ids` that do not increase by 1. Under
    torch.compile only `cu_seq_lens_q` is used, since the values of the positions are not known then. Packed rows of
    Qwen4 and GLM-5 make no cache. Padding on either side does not change the states. A model with accelerate's hooks
    (device_map) must be loaded after this call.

    Returns:
        Which families were changed, and which were not and why; print it.
    """
    global _REPORT
    if _REPORT is not None:
        return _REPORT
    version = _check_transformers()
    found: list[_Replaced] = []
    families, skipped = {}, {}
    for family in MODEL_PATCHES:
        try:
            replaced = _replacements(family)
        except (ImportError, AttributeError) as missing:
            skipped[family.name] = str(missing)
            continue
        found += replaced
        families[family.name] = tuple(f"{x.owner.__name__}.forward" for x in replaced)
    if not families:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise ImportError(f"transformers must have one of {', '.join(skipped)}, got {version} ({reasons}); upgrade it")
    for x in found:
        x.owner.forward = x.ours
    _REPLACED.extend(found)
    _REPORT = EnableReport(version, families, skipped)
    return _REPORT


def disable() -> None:
    """Restore exactly what `enable` replaced; without an earlier `enable` this changes nothing."""
    global _REPORT
    for x in _REPLACED:
        if x.owner.__dict__.get("forward") is x.ours:  # otherwise other code has replaced it since
            x.owner.forward = x.original
    _REPLACED.clear()
    _REPORT = None


def is_enabled() -> bool:
    """Whether `enable` is in effect."""
    return _REPORT is not None


@contextmanager
def enabled() -> Iterator[EnableReport]:
    """Enable inside a `with` block, and restore the previous setting afterwards."""
    before = is_enabled()
    try:
        yield enable()
    finally:
        if not before:
            disable()


def _check_transformers() -> str:
    """Return the version of transformers, or raise an error that says what to install."""
    try:
        import transformers
    except ImportError as missing:
        raise ImportError(f"transformers must be installed, got {missing}; run pip install 'lineate[hf]'") from missing
    version = str(transformers.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(f"transformers must be {oldest} or newer, got {version}; run pip install -U transformers")
    return version


def _replacements(family: ModelPatch) -> list[_Replaced]:
    """Make the forwards for the classes of one family; raise if transformers lacks a class or a helper."""
    from transformers.integrations.accelerate import force_accelerate_hooks

    module = importlib.import_module(f"transformers.models.{family.name}.modeling_{family.name}")
    makers: list[tuple[str | None, Callable[..., Any]]] = [
        (family.layer, lambda original: linear_forward(original, family.parts)),
        (family.model, lambda original: text_model_forward(original, family.unpacked is not None, family.one_mask)),
        (family.latent, latent_forward),
        (family.unpacked, unpacked_forward),
    ]
    replaced = []
    for name, make in makers:
        if name is not None:
            owner = getattr(module, name)
            original = _own_forward(owner)
            forward = make(original)
            if name == family.layer:
                forward = force_accelerate_hooks(list(family.parts.borrowed))(forward)
            replaced.append(_Replaced(owner, original, functools.wraps(original)(forward)))
    return replaced


def _own_forward(owner: Any) -> Callable[..., Any]:
    """Return the forward that a class defines itself; disable() could not restore an inherited one."""
    if "forward" not in owner.__dict__:
        raise AttributeError(f"{owner.__name__} must define forward itself, got one that it inherits")
    forward: Callable[..., Any] = owner.__dict__["forward"]
    return forward

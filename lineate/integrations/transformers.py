"""transformers' own Qwen3-Next, Qwen3.5, Kimi Linear and OLMo-Hybrid models on lineate.

    from lineate.integrations.transformers import enable
    print(enable())                                  # models made before and after, until disable()

Replaced, on the classes: the forward of the linear layers, that of the text models, which finds the borders of packed
texts, and that of Kimi's latent attention, for a CPU. Parameters, caches and everything else stay theirs.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lineate.integrations.transformers_layers import (
    Project,
    latent_forward,
    linear_forward,
    project_kimi,
    project_olmo,
    project_qwen3_5,
    project_qwen3_next,
)
from lineate.integrations.transformers_packing import text_model_forward


@dataclass(frozen=True)
class Family:
    """One model family: the classes to change and what is its own about the linear layer."""

    name: str
    """The folder below transformers.models."""
    layer: str
    """The class of the linear layer."""
    model: str
    """The class of the text model, which makes the masks and calls the layers."""
    project: Project
    """From the hidden states to what the rule takes."""
    norm: str = "norm"
    """The layer's gated norm."""
    out: str = "out_proj"
    """The layer's output projection."""
    attention: str | None = None
    """The class of a softmax layer with values narrower than its keys, if the family has one."""
    borrowed: tuple[str, ...] = ("conv1d",)
    """Children whose weights are used without calling them: accelerate's hooks must bring these first."""


FAMILIES = (
    Family("qwen3_next", "Qwen3NextGatedDeltaNet", "Qwen3NextModel", project_qwen3_next),
    Family("qwen3_5", "Qwen3_5GatedDeltaNet", "Qwen3_5TextModel", project_qwen3_5),
    Family("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", "Qwen3_5MoeTextModel", project_qwen3_5),
    Family(
        "kimi_linear", "KimiLinearDeltaAttention", "KimiLinearModel", project_kimi,
        norm="o_norm", out="o_proj", attention="KimiLinearAttention", borrowed=("conv1d", "forget_gate"),
    ),
    Family("olmo_hybrid", "OlmoHybridGatedDeltaNet", "OlmoHybridModel", project_olmo, norm="o_norm", out="o_proj"),
)  # fmt: skip
# What the layers ask of a cache; a transformers without one of these is too old.
_CACHE_METHODS = (
    "get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state", "is_recording_past",
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What `enable` changed, or `disable` put back."""

    version: str
    """Of transformers."""
    families: dict[str, tuple[str, ...]]
    """For each family the functions replaced, such as 'Qwen3NextModel.forward'."""
    skipped: dict[str, str]
    """For each family left as it is, why."""
    action: str = "run on lineate"

    def __str__(self) -> str:
        lines = [f"transformers {self.version}: {len(self.families)} families {self.action}"]
        width = max(map(len, (*self.families, *self.skipped)), default=0)
        lines += [f"  {name:{width}}  {', '.join(functions)}" for name, functions in self.families.items()]
        lines += [f"  {name:{width}}  left as it is: {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Replaced:
    owner: Any
    """The class."""
    original: Callable[..., Any]
    ours: Callable[..., Any]


_REPLACED: list[_Replaced] = []
_REPORT: Report | None = None


def enable() -> Report:
    """Run the linear layers of all families on lineate, in models that exist and in models to come; say what changed.

    Calling it again changes nothing. Packed texts are then kept apart in every layer: borders come from
    `cu_seq_lens_q`, else from `position_ids` that do not go up by 1. Under torch.compile only `cu_seq_lens_q` is looked
    at, as the values of the positions are not known. Padding on either side leaves the states untouched.
    A model whose modules carry accelerate's hooks (device_map) must be loaded after this call.
    """
    global _REPORT
    if _REPORT is not None:
        return _REPORT
    version = _check_transformers()
    found: list[_Replaced] = []
    families, skipped = {}, {}
    for family in FAMILIES:
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
    _REPORT = Report(version, families, skipped)
    return _REPORT


def disable() -> None:
    """Put back exactly what `enable` replaced; without a call of `enable` before it changes nothing."""
    global _REPORT
    for x in _REPLACED:
        if x.owner.__dict__.get("forward") is x.ours:  # else someone replaced it after us: theirs to undo
            x.owner.forward = x.original
    _REPLACED.clear()
    _REPORT = None


def is_enabled() -> bool:
    """Whether the families run on lineate now."""
    return _REPORT is not None


@contextmanager
def enabled() -> Iterator[Report]:
    """`with enabled(): ...`; after it things are as they were before, also if they were enabled then."""
    before = is_enabled()
    try:
        yield enable()
    finally:
        if not before:
            disable()


def _check_transformers() -> str:
    """The version of transformers, or an error that says what to install."""
    try:
        import transformers
        from transformers.cache_utils import Cache
    except ImportError as missing:
        raise ImportError(f"transformers must be installed, got {missing}; run pip install 'lineate[hf]'") from missing
    lacking = [name for name in _CACHE_METHODS if not hasattr(Cache, name)]
    if lacking:
        raise ImportError(
            f"transformers must have caches for linear layers, got {transformers.__version__} "
            f"without Cache.{lacking[0]}; run pip install -U transformers"
        )
    return str(transformers.__version__)


def _replacements(family: Family) -> list[_Replaced]:
    """Our forwards for the classes of one family; raises if a class or a helper is missing."""
    module = importlib.import_module(f"transformers.models.{family.name}.modeling_{family.name}")
    layer, model = getattr(module, family.layer), getattr(module, family.model)
    original = layer.__dict__["forward"]
    forward = linear_forward(original, family.project, family.norm, family.out)
    forward = module.force_accelerate_hooks(list(family.borrowed))(forward)
    replaced = [_Replaced(layer, original, functools.wraps(original)(forward))]
    original = model.__dict__["forward"]
    replaced.append(_Replaced(model, original, functools.wraps(original)(text_model_forward(original))))
    if family.attention is not None:
        attention = getattr(module, family.attention)
        original = attention.__dict__["forward"]
        replaced.append(_Replaced(attention, original, functools.wraps(original)(latent_forward(original))))
    return replaced

"""Check that a model is what its configuration describes, since save_pretrained writes only that and the tensors.

from_pretrained makes a model from the configuration alone and fills it with the tensors. A part of another class with
tensors of the same names, or a setting that was changed after construction, would be lost silently. So the model is
compared, part by part, with an empty one of its configuration before anything is written.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from inspect import isfunction
from typing import Any

from torch import Tensor, nn

from lineate.quantised.weight import QuantisedWeight

HOW_IT_RUNS = {"training", "recompute", "recompute_chunks", "context", "sampling_defaults", "_compiled_call_impl"}
"""Attributes that change how a module runs, or where, but not what it computes."""
PLAIN_SETTINGS = (bool, int, float, str, tuple, type(None))
REMEDIES = {
    "peft": "merge the adapters into the weights first",
    "torch._dynamo": "save the model that was compiled, or compile in place with module.compile()",
}
"""Advice, by the package of the class that was found in place of the expected one."""
REMEDY = (
    "undo the change, or keep the weights with torch.save(model.state_dict(), file) and make the change again before "
    "load_state_dict"
)


def check_described(model: nn.Module, reference: nn.Module, around: nn.Module | None = None) -> None:
    """Raise if the model differs from `reference`, an empty model of its configuration, in more than its numbers.

    around: a module that runs the model's parts, whose own methods must be those of its class. Hooks are not compared:
    as in torch's own state_dict, they belong to the caller and not to the model.
    """
    found = list(_differences("model", model, reference))
    if around is not None:
        methods = [key for key in vars(around) if isfunction(getattr(type(around), key, None))]
        found += [(f"model{text}", REMEDY) for text in _shadowed(around, methods)]
    if not found:
        return
    (first, remedy), more = found[0], "" if len(found) == 1 else f" (and {len(found) - 1} more differences)"
    raise ValueError(
        f"cannot save a model that its configuration does not describe, as from_pretrained would make another: "
        f"{first}{more}; {remedy}"
    )


def check_whole(tensors: Mapping[str, Tensor]) -> None:
    """Raise if a tensor has no numbers here to be written."""
    for name, x in tensors.items():
        if x.is_meta:
            raise ValueError(f"cannot save {name}, which is on the meta device (offloaded, or never filled); load it")
        if type(x) not in (Tensor, nn.Parameter, QuantisedWeight):
            kind = type(x).__name__
            remedy = "use lineate.training.sharded.save_distributed" if kind == "DTensor" else "convert it first"
            raise ValueError(f"cannot save {name}: it must be a plain tensor, got a {kind}; {remedy}")


def _differences(name: str, module: nn.Module | None, reference: nn.Module | None) -> Iterator[tuple[str, str]]:
    """Yield each difference and its remedy in words; inside a part of another class nothing is compared."""
    kind, expected = _class_of(module), _class_of(reference)
    if kind is not expected:
        package = next((key for key in REMEDIES if kind.__module__.startswith(key)), "")
        yield f"{name} must be {_shown(expected, kind)}, got {_shown(kind, expected)}", REMEDIES.get(package, REMEDY)
        return
    if module is None or reference is None:
        return
    shadowed = _shadowed(module, (key for key in vars(module) if key not in vars(reference)))
    for text in (*_changed_settings(module, reference), *shadowed, *_changed_tensors(module, reference)):
        yield f"{name}{text}", REMEDY
    for key in dict.fromkeys((*reference._modules, *module._modules)):
        child, wanted = module._modules.get(key), reference._modules.get(key)
        yield from _differences(key if name == "model" else f"{name}.{key}", child, wanted)


def _changed_settings(module: nn.Module, reference: nn.Module) -> Iterator[str]:
    for key, wanted in vars(reference).items():
        if key.startswith("_") or key in HOW_IT_RUNS or not isinstance(wanted, PLAIN_SETTINGS):
            continue
        value = vars(module).get(key, None if key in module._modules else "nothing")  # parts are compared as such
        if not isinstance(value, PLAIN_SETTINGS) or value != wanted:
            yield f".{key} must be {wanted!r}, got {_text(value)}"


def _shadowed(module: nn.Module, keys: Iterable[str]) -> Iterator[str]:
    """Yield those of these attributes that shadow an attribute of the class."""
    for key in keys:
        value = vars(module)[key]
        if key not in HOW_IT_RUNS and hasattr(type(module), key) and not _is_wrapped(module, key, value):
            yield f".{key} must be that of {_class_of(module).__name__}, got {_text(value)}"


def _changed_tensors(module: nn.Module, reference: nn.Module) -> Iterator[str]:
    for kind in ("_parameters", "_buffers"):
        have, want = (
            {key: None if x is None else tuple(x.shape) for key, x in getattr(owner, kind).items()}
            for owner in (module, reference)
        )
        for key in dict.fromkeys((*want, *have)):
            if key not in have or key not in want or have[key] != want[key]:
                texts = ("nothing" if key not in x or x[key] is None else f"shape {x[key]}" for x in (want, have))
                yield ".{} must have {}, got {}".format(key, *texts)


def _class_of(module: nn.Module | None) -> type:
    """Return the class of a module; for one sharded by FSDP2, which makes a subclass, return the original class."""
    kind = type(module)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        return next(base for base in kind.__mro__ if not issubclass(base, fsdp.FSDPModule))
    return kind


def _is_wrapped(module: nn.Module, key: str, value: Any) -> bool:
    """Whether this is the method of the class, run by torch.compile, FSDP2, or accelerate's offloading or autocast."""
    marked = {"_hf_hook", "_original_forward"} & vars(module).keys() or _class_of(module) is not type(module)
    for _ in range(8):
        if hasattr(value, "_torchdynamo_orig_callable"):
            value = value._torchdynamo_orig_callable
        elif marked and hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        else:
            break
    own = getattr(value, "__self__", module) is module  # not the method of another module
    return own and getattr(value, "__func__", value) is getattr(type(module), key)


def _text(value: Any) -> str:
    """Return a plain value as text, or else its class, since a tensor's numbers would fill the screen."""
    return f"{value!r:.80}" if isinstance(value, PLAIN_SETTINGS) else f"a {type(value).__name__}"


def _shown(kind: type, other: type) -> str:
    """Return the name of a class, with its module if two classes have the same name."""
    if kind is type(None):
        return "nothing"
    return kind.__qualname__ if kind.__qualname__ != other.__qualname__ else f"{kind.__module__}.{kind.__qualname__}"

"""Changed copies of a model with the same weights: a gate open, or another rule in a layer.

The copy shares every tensor with the model. Its modules are its own, so that hooks and changes never reach the model,
which may be generating text for others at the same time.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lineate.explore.attention import rule_matrix
from lineate.explore.subject import Given, Trace, run_rule, trace_layer
from lineate.layers import LinearMixer
from lineate.layers.projection import project
from lineate.layers.state import Memory
from lineate.models import HybridLM

DECAY, WRITE, OUTPUT = "decay", "write", "output"
GATES = (DECAY, WRITE, OUTPUT)
"""The gates of a layer: the decay, the write strength and the output gate."""
RATES = ("beta", "erase", "write")
"""The gates of a rule that are the write strength."""
SOFTMAX = "softmax_attention"
OPEN = {"sigmoid": 40.0, "silu": 1.2784645427610738, "none": 0.0}
"""The input with which a gate of this activation multiplies by 1; unused without a gate."""


@dataclass(frozen=True)
class Change:
    """The changes of one layer."""

    rule: str | None = None
    """The rule that runs in place of the layer's own, on the same q, k, v and gates; None: its own."""
    off: frozenset[str] = frozenset()
    """The gates that are open: nothing is forgotten, every token writes with rate 1, the whole output goes on."""

    def of(self, found: Trace) -> Trace:
        """Return the inputs of the changed layer's rule; for softmax attention they are unchanged.

        Args:
            found: The inputs of the layer's own rule.
        """
        if self.rule is not None and self.rule != SOFTMAX:
            found = found.under(self.rule)
        if DECAY in self.off and found.log_decay is not None:
            found = replace(found, log_decay=torch.zeros_like(found.log_decay))
        if WRITE in self.off:
            rates = {name: getattr(found, name) for name in RATES}
            opened: dict[str, Any] = {name: torch.ones_like(x) for name, x in rates.items() if x is not None}
            found = replace(found, **opened)
        return found


def gates_of(mixer: nn.Module, found: Trace | None) -> list[str]:
    """Return the gates that a layer has; none if it cannot be changed.

    Args:
        mixer: The layer's mixer.
        found: The inputs of its rule on a text; None: it has no picture.
    """
    if found is None or not isinstance(mixer, LinearMixer):
        return []
    if not mixer.gates_alone:
        return [OUTPUT]
    rates = any(getattr(found, name) is not None for name in RATES)
    there = {DECAY: found.log_decay is not None, WRITE: rates, OUTPUT: True}
    return [gate for gate in GATES if there[gate]]


def beside(model: HybridLM, changes: Mapping[int, Change] | None = None) -> HybridLM:
    """Return a copy of a model that shares its tensors, with these layers changed.

    Args:
        model: The model, which is not changed.
        changes: The changes by layer; those layers have a LinearMixer.
    """
    own = _shallow(model)
    layers = []
    for n, block in enumerate(model.layers):
        copied = _shallow(block)
        mixer = _shallow(block.mixer)
        if changes and n in changes:
            mixer.forward = partial(_changed_forward, own, n, changes[n])
        copied._modules["mixer"] = mixer
        layers.append(copied)
    own._modules["layers"] = nn.ModuleList(layers)
    return own


def _shallow(module: Any) -> Any:
    """Return a module with the same parameters and parts, whose hooks and parts can be changed without the other's."""
    own = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):
            own.__dict__[name] = value.copy()
    return own


def _changed_forward(
    model: HybridLM, layer: int, change: Change, x: Tensor, state: Any = None, cu_seqlens: Any = None
) -> tuple[Tensor, Memory]:
    """Run the changed mixer of a layer on a sequence x `1 t hidden` that begins here."""
    mixer: Any = model.layers[layer].mixer
    output = _read(change, trace_layer(model, layer, Given(x))).to(x.dtype)  # t hv v
    z = mixer.output_gate(mixer.project(x)[1:]).unflatten(-1, output.shape[1:])
    if OUTPUT in change.off:
        z = torch.full_like(z, OPEN[mixer.norm.activation])
    y = mixer.norm(output[None], z)
    return project(mixer.out_proj, y.flatten(2)), Memory({})


def _read(change: Change, found: Trace) -> Tensor:
    """Return the output of the rule of a changed layer, `t hv v`."""
    if change.rule != SOFTMAX:
        changed = change.of(found)
        output = run_rule(changed)[0]
        if found.rule != "linear_attention" or changed.row.corrects:
            return output
        return output / run_rule(replace(changed, v=torch.ones_like(changed.v)))[0]  # as the layer itself divides
    heads = [found.head(i) for i in range(found.v.shape[1])]
    return torch.stack([rule_matrix(one, SOFTMAX) @ one.values[:, 0] for one in heads], 1)


@dataclass(frozen=True)
class Softmax:
    """The attention weights and the cache of one layer of softmax attention on a text."""

    weights: Tensor
    """`heads t t`: the weight with which each token reads each value."""
    keys: Tensor
    """`kv t k`."""
    values: Tensor
    """`kv t v`."""


def softmax_of(mixer: nn.Module, x: Tensor) -> Softmax | None:
    """Return the softmax attention that a mixer computes on x `1 t hidden`; None if it computes none.

    Its attention is called once more with the columns of an identity matrix as values, so that the output is the
    weights.

    Args:
        mixer: The mixer.
        x: Its input.
    """
    with _Watch() as watch:
        mixer(x)
    if not watch.calls:
        return None
    weights, keys, values = (torch.cat(parts, 1)[0].float() for parts in zip(*watch.calls, strict=True))
    return Softmax(weights, keys, values)


class _Watch(TorchFunctionMode):
    """Records the weights, keys and values of each softmax attention that this thread computes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            q, k, v = args
            eye = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*v.shape[:2], -1, -1)
            self.calls.append((func(q, k, eye, **kwargs), k, v))
        return func(*args, **kwargs)

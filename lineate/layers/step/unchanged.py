"""A check that the modules which a step was recorded from have not been changed since."""

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from lineate.quantised import QuantisedWeight


class Unchanged:
    """A check that modules have not changed since they were read: none was replaced, hooked, moved or reconfigured.

    After a step, whose weights have filled the caches, every object is loaded from main memory. So each kind of check
    is one pass over a flat list, without a Python call for each module.

    Args:
        blocks: The modules around the others; they are not kept alive.
        modules: All modules that were read.
    """

    def __init__(self, blocks: Sequence[nn.Module], modules: Sequence[nn.Module]) -> None:
        every = [*blocks, *modules]
        self._modules, self._kinds = list(modules), list(map(type, every))
        self._own = list(map(vars, every))
        self._values = list(map(dict, self._own))  # with settings, such as an epsilon
        self._hooks = [own[name] for own in self._own for name in ("_forward_pre_hooks", "_forward_hooks")]
        self._hooked = list(map(dict, self._hooks))
        self._inner = [own[name] for own in self._own for name in ("_modules", "_parameters")]
        self._tensors = _flat(self._inner)
        self._quantised = [x for x in self._tensors if isinstance(x, QuantisedWeight)]
        self._codes, self._scales = [x.codes for x in self._quantised], [x.scales for x in self._quantised]
        plain = [x for x in self._tensors if isinstance(x, Tensor) and not isinstance(x, QuantisedWeight)]
        self._kept = [*plain, *self._codes, *(x for x in self._scales if x is not None)]
        self._addresses = list(map(Tensor.data_ptr, self._kept))
        self._dense = list(map(Tensor.is_contiguous, self._kept))
        self._counts = list(map(Tensor.numel, self._kept))

    def __call__(self, blocks: Iterable[nn.Module]) -> bool:
        every = [*blocks, *self._modules]
        if (
            not _are(map(type, every), self._kinds)
            or not _are(map(vars, every), self._own)
            or self._hooks != self._hooked
        ):
            return False
        try:
            if self._own != self._values:
                return False
        except (RuntimeError, TypeError, ValueError):  # of a value that has no == of its own kind
            return False
        if not _are(_flat(self._inner), self._tensors):
            return False
        if not _are(map(_CODES, self._quantised), self._codes) or not _are(map(_SCALES, self._quantised), self._scales):
            return False
        if list(map(Tensor.data_ptr, self._kept)) != self._addresses:
            return False
        if list(map(Tensor.numel, self._kept)) != self._counts:
            return False
        return list(map(Tensor.is_contiguous, self._kept)) == self._dense


_CODES, _SCALES = attrgetter("codes"), attrgetter("scales")


def _flat(dicts: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def _are(found: Iterable[object], wanted: list[Any]) -> bool:
    """Whether the objects are these, in this order."""
    found = list(found)
    return len(found) == len(wanted) and all(map(is_, found, wanted))

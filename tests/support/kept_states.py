"""Small states for the tests of the state cache, and how they are compared."""

import torch

from lineate.layers import Memory, TokenCache
from lineate.models import ModelState
from lineate.serving.cache.cache import StateCache


def same(x: ModelState, y: ModelState) -> bool:
    """Whether two states of one row agree in every bit of every tensor."""
    if int(x.lengths) != int(y.lengths) or len(x.layers) != len(y.layers):
        return False
    for a, b in zip(x.layers, y.layers, strict=True):
        if type(a) is not type(b) or a.names != b.names:
            return False
        for name in a.names:
            p, q = a[name], b[name]
            if isinstance(a, TokenCache):
                p, q = p[:, : int(a.lengths)], q[:, : int(b.lengths)]
            if p.dtype != q.dtype or p.shape != q.shape:
                return False
            if not torch.equal(p.flatten().view(torch.uint8), q.flatten().view(torch.uint8)):
                return False
    return True


def linear_state(tokens: int, size: int = 4) -> ModelState:
    return ModelState((Memory({"memory": torch.randn(1, size)}),), tokens)


def hybrid_state(tokens: int, size: int = 4) -> ModelState:
    cache = TokenCache({"keys": torch.randn(1, tokens, 2), "values": torch.randn(1, tokens, 3)}, tokens)
    return ModelState((Memory({"memory": torch.randn(1, size)}), cache), tokens)


def longer(state: ModelState, tokens: int) -> ModelState:
    """Return a state of more tokens whose caches begin with those of the given one."""
    memory, cache = state.layers
    with torch.no_grad():
        more = cache.append({"keys": torch.randn(1, tokens, 2), "values": torch.randn(1, tokens, 3)})
    return ModelState((Memory({"memory": torch.randn_like(memory["memory"])}), more), state.lengths + tokens)


def held(cache: StateCache) -> int:
    return sum(x.nbytes for x in cache.tensors())

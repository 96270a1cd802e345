"""States are printed as names, shapes and bytes, briefly and without reading a value."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import lineate
from lineate.layers.state import Memory, TokenCache
from lineate.models import HybridLM, preset


class NoValues(TorchDispatchMode):
    """Refuses ops that make Python wait for a tensor's value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func) and "_to_copy" not in str(func), func
        return func(*args, **(kwargs or {}))


def run(pattern: str, packed: bool = False):
    model = HybridLM(preset("tiny", pattern))
    ids = torch.zeros(1, 12, dtype=torch.long)
    return model(ids, cu_seqlens=torch.tensor([0, 5, 12]) if packed else None).state


STATES = {
    "model": lambda: run("GGGA"),
    "model of packed sequences": lambda: run("KMAT", packed=True),
    "every learning memory": lambda: run("TPNC"),
    "memory": lambda: Memory({"memory": torch.zeros(2, 4, 8, 8), "conv": torch.zeros(2, 24, 3)}, owned=True),
    "cache": lambda: TokenCache({"keys": torch.zeros(2, 7, 1, 8), "values": torch.zeros(2, 7, 1, 4)}, 7),
    "cache of packed sequences": lambda: TokenCache.of({"keys": torch.zeros(1, 7, 1, 8)}, torch.tensor([0, 3, 7])),
    "cache with room": lambda: STATES["cache"]().append(
        {"keys": torch.ones(2, 1, 1, 8), "values": torch.ones(2, 1, 1, 4)}
    ),
    "softmax attention": lambda: lineate.softmax_attention(*torch.randn(3, 1, 9, 2, 8)).state,
}


@pytest.mark.parametrize("name", STATES)
@torch.no_grad()
def test_a_state_prints_no_values(name):
    state = STATES[name]()
    with NoValues():
        text = repr(state)
    assert "tensor(" not in text and "\n" not in text
    assert len(text) < 2000 and f"nbytes={state.nbytes}" in text
    assert type(state).__name__ in text


def test_what_is_printed():
    with torch.no_grad():
        text = repr(run("GGGA"))
        grown = repr(STATES["cache with room"]())
    memory = "3 x Memory(conv (1, 384, 3) float32, memory (1, 2, 64, 64) float32 on cpu, nbytes=37376)"
    cache = "1 x TokenCache(keys (1, 12, 1, 64) float32, values (1, 12, 1, 64) float32 on cpu, rows=1, lengths=12, "
    assert text.startswith("ModelState(rows=1, lengths=12, nbytes=") and memory in text and cache in text
    assert (
        grown
        == "TokenCache(keys (2, 8, 1, 8) float32, values (2, 8, 1, 4) float32 on cpu, rows=2, lengths=8, nbytes=768)"
    )


def test_printing_a_packed_cache_leaves_it_packed():
    cache = STATES["cache of packed sequences"]()
    before = copy.copy(vars(cache))
    assert "packed keys (1, 7, 1, 8)" in repr(cache) and "lengths=of each row" in repr(cache)
    assert vars(cache) == before


def test_fake_and_traced_states_are_printed():
    with FakeTensorMode():
        assert "nbytes=256" in repr(Memory({"memory": torch.zeros(1, 1, 8, 8)}))
        assert "lengths=7" in repr(STATES["cache"]())

    def printed(x):
        return x * len(repr(Memory({"memory": x})))

    x = torch.ones(1, 1, 2, 2)
    compiled = torch.compile(printed, backend="eager")(x)
    assert torch.equal(compiled, printed(x))

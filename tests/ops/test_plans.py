"""The caches of calls: what is used stays, what is new comes in, and there is a bound."""

import threading

import pytest
import torch

import lineate
from lineate import dispatch
from lineate.call import Inputs, Request
from lineate.dispatch import check_and_resolve
from lineate.ops import decode_calls
from lineate.plans import PLANS, RecentlyUsed, forget
from lineate.rule import GATED_DELTA

COUNT = 600


def test_the_keys_used_last_stay():
    """Compared with a list of all uses; a key that was forgotten is put again."""
    cache, uses = RecentlyUsed[int, str](8), []
    generator = torch.Generator().manual_seed(1)
    for key in (torch.rand(4000, generator=generator) ** 3 * 60).int().tolist():
        last = list(dict.fromkeys(reversed(uses)))
        found = cache.get(key)
        assert found == (str(key) if key in last[:8] else found) and found in (str(key), None)
        assert key in last or found is None
        if found is None:
            cache.put(key, str(key))
        uses.append(key)
        assert len(cache) <= 16
    assert len(cache) >= 8


def test_one_key_in_use_among_new_ones():
    cache = RecentlyUsed[int, int](4)
    cache.put(0, 7)
    for key in range(1, 1000):
        cache.put(key, key)
        assert cache.get(0) == 7 and cache.get(key) == key
    assert cache.get(1) is None


def test_threads():
    """Whatever other threads put, a value is its key's."""
    cache, wrong = RecentlyUsed[int, int](16), []

    def work(seed: int) -> None:
        for key in torch.randint(64, (5000,), generator=torch.Generator().manual_seed(seed)).tolist():
            found = cache.get(key)
            if found is None:
                cache.put(key, 3 * key)
            elif found != 3 * key:
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(cache) <= 32


def checked(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[int]:
    """Return a list that grows by 1 with each call of a function that only unknown calls reach."""
    calls, own = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: calls.append(1) or own(*given))
    return calls


@pytest.fixture
def few_plans(monkeypatch):
    """Let the cache have room for fewer plans than the tests make."""
    forget()
    monkeypatch.setattr(PLANS, "n", COUNT // 3)
    yield
    forget()


def test_ops_after_many_signatures(monkeypatch, few_plans):
    """After many others, a call that is made among them is not checked again, and neither is a new one."""
    calls = checked(monkeypatch, dispatch, "resolve")

    def resolve(n: int) -> None:
        x = torch.zeros(1, 1, 1, 1)
        request = Request(float(n), "recurrent", "torch", None, False)
        check_and_resolve(GATED_DELTA, Inputs(q=x, k=x, v=x, log_decay=x[..., 0], beta=x[..., 0]), request)

    for n in range(1, COUNT + 1):
        resolve(n)
        resolve(1)
    assert len(calls) == COUNT
    resolve(COUNT)
    resolve(1)
    assert len(calls) == COUNT
    assert len(PLANS) <= 2 * PLANS.n


@pytest.mark.cover
def test_decode_after_many_signatures(monkeypatch, few_plans):
    calls = checked(monkeypatch, decode_calls, "resolve_scale")
    x, state = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    for n in range(1, COUNT + 1):
        for scale in (float(n), 1.0):
            lineate.decode(x, x, x, state=state, scale=scale, backend="torch")
    assert len(calls) == COUNT
    lineate.decode(x, x, x, state=state, scale=float(COUNT), backend="torch")
    assert len(calls) == COUNT
    assert len(PLANS) <= 2 * PLANS.n

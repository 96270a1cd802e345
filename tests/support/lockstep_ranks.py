"""Run tests of the engine on several ranks: the same test functions, whose engines, caches and models are on all ranks.

Rank 0 runs pytest. Where a test module makes an Engine, a StateCache or a model of serving_models, it gets one that
every other rank makes too; before anything happens to it on rank 0, the others are told what to drive. What a request
must yield comes from `alone` of serving_models, which is an ordinary engine in one process.
"""

import base64
import io
import pickle
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lineate.models import HybridLM
from lineate.models.sharding import share_out_model
from lineate.parallel.job.link import Link, connect
from lineate.parallel.job.processes import find_place, fresh_store
from lineate.parallel.tensor.ranks import Ranks
from lineate.serving.cache.cache import StateCache
from lineate.serving.cache.peers import LinkedPeers
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.lockstep import Lockstep
from tests.support import serving_models

TIMEOUT = timedelta(seconds=60)
"""How long a rank waits for a call of the model that the others do not make."""
TESTS = Path(__file__).parents[1] / "serving"


class Joined:
    """The objects that a rank has made: its engines and its caches by name."""

    def __init__(self) -> None:
        place = find_place()
        store = fresh_store(place.rank, place.size)
        self.link = connect(store, place, {})
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("model", store), rank=place.rank, world_size=place.size, timeout=TIMEOUT
        )
        self.engines: dict[str, Lockstep] = {}
        self.caches: dict[str, StateCache] = {}
        self.made = 0

    def announce(self, what: str, value: Any = None) -> str:
        """Tell the other ranks what happens next; return a new name for it."""
        self.made += 1
        name = f"{what} {self.made}"
        self.link.send("drive", what)
        self.link.send("made", [name, dump(value)])
        return name


joined: Joined


class Channel:
    """The link of one engine among several: the other ranks learn which engine makes a step."""

    def __init__(self, name: str) -> None:
        self._name = name

    def send(self, kind: str, value: Any) -> None:
        if kind == "step":
            joined.link.send("drive", self._name)
        joined.link.send(kind, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(joined.link, name)


class RankedEngine(Lockstep):
    """Made like an Engine, on rank 0; all ranks have one."""

    def __init__(self, model: HybridLM, **options: Any) -> None:
        self.name = joined.announce("engine", (model, options))
        super().__init__(Engine(model, **options), Channel(self.name), serving_models.Counting.read)

    @property
    def pool(self) -> Any:
        return self.engine.pool

    @property
    def plan(self) -> Any:
        return self.engine.plan

    @property
    def model(self) -> HybridLM:
        return self.engine.model


class RankedCache(StateCache):
    """Made like a StateCache, on rank 0; all ranks have one, and folders of their own."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self.name = joined.announce("cache", (given, options))
        super().__init__(**own_options(*given, **options))

    def clear(self) -> None:
        joined.announce("clear", self.name)
        super().clear()

    def close(self) -> None:
        joined.announce("close", self.name)
        super().close()


def own_options(*given: Any, **options: Any) -> dict[str, Any]:
    """Return the arguments of a StateCache, with a folder of this rank instead of one for all."""
    named = dict(zip(("budget_bytes", "spacing", "folder", "identity"), given, strict=False)) | options
    if named.get("folder") is not None:
        named["folder"] = Path(named["folder"]) / f"rank-{joined.link.rank}"
    return named | {"peers": LinkedPeers(joined.link)}


@cache
def ranked_model(pattern: str) -> HybridLM:
    """Return this rank's share of a model, which notices calls that differ between the ranks."""
    made = share_out_model(serving_models.model(pattern), Ranks(dist.group.WORLD)).eval()
    made.embed.register_forward_pre_hook(compare)
    made.pattern = pattern
    return made


def compare(_: Any, inputs: tuple[torch.Tensor]) -> None:
    """Raise unless all ranks read the same tokens."""
    ids = inputs[0]
    size = torch.tensor([ids.numel(), *ids.shape[-2:]])
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    assert all(torch.equal(x, size) for x in sizes), (ids.shape, sizes)
    tokens = [torch.empty_like(ids) for _ in sizes]
    dist.all_gather(tokens, ids.contiguous())
    assert all(torch.equal(x, ids) for x in tokens), tokens


class Pickler(pickle.Pickler):
    """Writes caches and models, which every rank has, as their names."""

    def persistent_id(self, value: Any) -> tuple[str, str] | None:
        if isinstance(value, RankedCache):
            return "cache", value.name
        return ("model", value.pattern) if isinstance(value, HybridLM) else None


class Unpickler(pickle.Unpickler):
    def persistent_load(self, name: tuple[str, str]) -> Any:
        return joined.caches[name[1]] if name[0] == "cache" else ranked_model(name[1])


def dump(value: Any) -> str:
    content = io.BytesIO()
    Pickler(content).dump(value)
    return base64.b64encode(content.getvalue()).decode()


def load(text: str) -> Any:
    return Unpickler(io.BytesIO(base64.b64decode(text))).load()


class Patched:
    """A plugin of pytest that puts the engines, caches and models of all ranks into the module of a test."""

    def __init__(self) -> None:
        self.passed: list[str] = []

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        ranked = {"Engine": RankedEngine, "StateCache": RankedCache, "model": ranked_model}
        for name, value in ranked.items():
            if hasattr(item.module, name):
                setattr(item.module, name, value)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)


def run_tests(names: list[str], more: list[str]) -> list[Any]:
    """Run tests of tests/serving on rank 0, and drive the others; return a code, how many passed, and what was said."""
    global joined
    sys.path.insert(0, str(TESTS))
    joined = Joined()
    if joined.link.rank:
        drive()
        return []
    plugin, said = Patched(), io.StringIO()
    with redirect_stdout(said):
        ids = [str(TESTS / name) for name in names]
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *more, *ids], plugins=[plugin])
    joined.announce("end")
    leave(joined.link)
    return [int(code), len(plugin.passed), said.getvalue()]


def drive() -> None:
    """Do on another rank what rank 0 says, until it ends."""
    while (what := joined.link.receive("drive")) != "end":
        if what in joined.engines:
            if not joined.engines[what].follow_step():
                del joined.engines[what]
            continue
        name, text = joined.link.receive("made")
        DRIVEN[what](name, load(text))
    joined.link.receive("made")
    leave(joined.link)


def leave(link: Link) -> None:
    link.gather(None)
    link.close()


def make_engine(name: str, given: Any) -> None:
    model, options = given
    joined.engines[name] = Lockstep(Engine(model, **options), Channel(name), serving_models.Counting.read)


def make_cache(name: str, given: Any) -> None:
    values, options = given
    joined.caches[name] = StateCache(**own_options(*values, **options))


DRIVEN: dict[str, Callable[[str, Any], None]] = {
    "engine": make_engine,
    "cache": make_cache,
    "clear": lambda _, name: joined.caches[name].clear(),
    "close": lambda _, name: joined.caches.pop(name).close(),
}

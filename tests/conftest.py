"""Run Triton kernels in the interpreter if there is no CUDA device; this must be set before triton is imported.

--shard 3/8 runs the third of eight parts, so that several processes can run side by side. Tests that compile the same
kernels (a row in a dtype) stay in one part.

--quick runs one case of each test function, a different one for each function, so that all kinds of cases are covered.
The mark `cover` keeps a function or a case out of it, the mark `slow` out of `make test`: tests/support/marks.py says
how they are used.

--pairs takes, of a function marked `slow(but=...)`, only those cases for a GPU that together contain every two values.
"""

import gc
import os
import sys
import zlib
from collections import defaultdict

import pytest
import torch

from tests.support import browser_install, interpreter
from tests.support.marks import choose_slow

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

THREADS = torch.get_num_threads()


def pytest_runtest_setup(item):
    if torch.get_num_threads() != THREADS:  # a benchmark that a test has run sets them; results have other bits then
        torch.set_num_threads(THREADS)
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        interpreter.make_quick()
    if "lineate.kernels.tape" in sys.modules:  # a test may change what the launches of a call depend on
        sys.modules["lineate.kernels.tape"].forget_tapes()


def pytest_addoption(parser):
    parser.addoption("--shard", default="1/1", help="which part of the tests to run, such as 3/8")
    parser.addoption("--quick", action="store_true", help="run one case of each function without the mark cover")
    parser.addoption("--pairs", action="store_true", help="on a GPU, run the cases that contain every two values")


def _group(item):
    """Return a name for the tests that compile the same kernels; those of other sizes may go into another part."""
    if "on_gpu" in item.fixturenames:
        return "on_gpu"  # the ranks of all these cases start only once
    parts = getattr(item, "callspec", None)
    ids = [] if parts is None else [str(parts.params[name]) for name in ("row", "path") if name in parts.params]
    if parts is not None and "shape" in parts.params:
        ids.append(item.name.split("[")[0])
    elif "fused" in item.name or "more_chunks" in item.name:
        ids.append("fused" if "fused" in item.name else "more chunks")
    return "-".join(ids) or item.nodeid


def _quick(items):
    """Return one case of each function, chosen by its name, among those without the mark cover."""
    cases = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("cover"):
            cases[item.nodeid.split("[")[0].split("/")[-1]].append(item)
    return [x[zlib.crc32(name.encode()) % len(x)] for name, x in cases.items()]


def _shard(items, which, count):
    groups = defaultdict(list)
    for item in items:
        groups[_group(item)].append(item)
    shards = [[] for _ in range(count)]
    for group in sorted(groups.values(), key=lambda group: (-len(group), group[0].nodeid)):
        min(shards, key=len).extend(group)
    return shards[which - 1]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    redundant = set(choose_slow(items, config.getoption("--pairs")))
    yield  # here -m deselects
    own = [item for item in items if item not in redundant]
    own = _quick(own) if config.getoption("--quick") else own
    which, count = map(int, config.getoption("--shard").split("/"))
    if count > 1:
        own = _shard(own, which, count)
    ids = {item.nodeid for item in own}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in ids])
    items[:] = [item for item in items if item.nodeid in ids]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """Say at the very end what no browser was there for: a page that is not tested is no detail."""
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum(browser_install.MISSING in str(report.longrepr) for report in skipped)
    if count:
        terminalreporter.section("THE PAGES WERE NOT TESTED", red=True, bold=True)
        many = f"{count} test{'s' * (count > 1)} of the pages did not run"
        terminalreporter.line(f"WARNING: {many}: {browser_install.MISSING}; {browser_install.REMEDY}", red=True)


def pytest_collection_finish():
    """Let the garbage collector skip what importing and collecting have made: it is millions of objects, and it stays.

    A full collection among them takes a second, and tests, compilers and matplotlib cause many. The small ones, after
    each 700 new objects by default, take one second in twenty.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)

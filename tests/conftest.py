"""Without a CUDA device Triton kernels run in the interpreter, which must be said before triton is imported.

--shard 3/8 runs the third of eight parts, for several processes side by side: what compiles the same kernels (a row in
a dtype) stays in one of them.
"""

import os
import sys
from collections import defaultdict

import interpreter
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_runtest_setup(item):
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        interpreter.make_quick()


def pytest_addoption(parser):
    parser.addoption("--shard", default="1/1", help="which part of the tests to run, such as 3/8")


def _group(item):
    """Of tests that compile the same kernels; those of other sizes, which do not, may go elsewhere."""
    if "on_gpu" in item.fixturenames:
        return "on_gpu"  # the ranks of all these cases start once
    parts = getattr(item, "callspec", None)
    ids = [] if parts is None else [str(parts.params[name]) for name in ("row", "path") if name in parts.params]
    if parts is not None and "shape" in parts.params:
        ids.append(item.name.split("[")[0])
    elif "fused" in item.name or "more_chunks" in item.name:
        ids.append("fused" if "fused" in item.name else "more chunks")
    return "-".join(ids) or item.nodeid


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    which, count = map(int, config.getoption("--shard").split("/"))
    if count == 1:
        return
    groups = defaultdict(list)
    for item in items:
        groups[_group(item)].append(item)
    shards = [[] for _ in range(count)]
    for group in sorted(groups.values(), key=lambda group: (-len(group), group[0].nodeid)):
        min(shards, key=len).extend(group)
    own = {item.nodeid for item in shards[which - 1]}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in own])
    items[:] = [item for item in items if item.nodeid in own]

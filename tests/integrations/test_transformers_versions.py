"""The versions of transformers that lineate works with: what is promised, and the tests against the oldest and newest.

    pip install --no-deps --target FOLDER transformers==5.17.0 "huggingface-hub<2"
    LINEATE_TRANSFORMERS=FOLDER pytest tests/integrations/test_transformers_versions.py

Several folders are separated as those of PATH are.
"""

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from lineate.integrations.transformers import OLDEST, enabled
from tests.support.transformers_models import MODELS

ROOT = Path(__file__).parents[2]
NEWEST = re.search(r"^transformers==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE).group(1)
FOLDERS = [Path(folder) for folder in os.environ.get("LINEATE_TRANSFORMERS", "").split(os.pathsep) if folder]


def test_the_extra_asks_for_the_oldest():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["hf"] == ["transformers>=" + ".".join(map(str, OLDEST))]
    assert tuple(map(int, NEWEST.split(".")[:2])) >= OLDEST


def test_the_newest_has_all_families():
    installed = metadata.version("transformers")
    if installed != NEWEST:
        pytest.skip(f"transformers {NEWEST} of constraints.txt is not installed, but {installed}")
    with enabled() as report:
        assert list(report.families) == list(MODELS) and not report.skipped


@pytest.mark.parametrize("wanted", [".".join(map(str, OLDEST)) + ".", NEWEST], ids=["oldest", "newest"])
def test_all_tests_pass_with_this_version(wanted):
    """The fast tests, in a process that imports transformers from a folder."""
    found = [x.parent for folder in FOLDERS for x in folder.glob(f"transformers-{wanted}*.dist-info")]
    if not found:
        pytest.skip(f"no folder of LINEATE_TRANSFORMERS has transformers {wanted}")
    here = Path(__file__).parent
    files = [str(here / name) for name in ("test_transformers.py", "test_transformers_packing.py")]
    paths = os.pathsep.join(map(str, (found[0].resolve(), ROOT)))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", run.stdout).group(1)) > 50

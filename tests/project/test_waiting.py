"""How torch's threads wait in commands, and that a program that imports lineate keeps its own settings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lineate
from lineate.system.waiting import SPINS, spin_briefly


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["python", "/usr/bin/lineate", "train"], SPINS),
        (["python", "-u", "-m", "lineate.cli", "train"], SPINS),
        (["python", "train.py", "--out", "x/lineate"], None),
        (["python", "-c", "import lineate"], None),
        (["python", "-m", "pytest"], None),
        (["lineate", "train"], SPINS),
        (["python", "-W", "error", "-X", "dev", "-u", "bin/lineate", "train"], SPINS),
        (["python", "-Im", "lineate.cli"], SPINS),
        (["python", "-mlineate.cli"], SPINS),
        (["python", "-Werror", "--check-hash-based-pycs", "never", "bin/lineate"], SPINS),
        (["python", "mine.py", "lineate"], None),
        (["python", "-u", "mine.py", "lineate"], None),
        (["python", "mine.py", "-m", "lineate.cli"], None),
        (["python", "-c", "pass", "lineate"], None),
        (["python", "-cpass", "lineate"], None),
        (["python", "-m", "mine", "lineate"], None),
        (["python", "-m", "lineate.cli.mine"], None),
        (["python", "-W", "lineate", "mine.py"], None),
        (["python", "-", "lineate"], None),
        (["python", "-m"], None),
        (["python"], None),
        ([], None),
    ],
)
def test_commands_spin_briefly(words, found):
    environment: dict[str, str] = {}
    spin_briefly(words, environment)
    assert environment.get("GOMP_SPINCOUNT") == found


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_users_settings_win(name):
    environment = {name: "active"}
    spin_briefly(["lineate", "train"], environment)
    assert environment == {name: "active"}


def test_it_is_set_before_torch_is_loaded(tmp_path):
    """The folder's own torch notes what it finds, and ends the process."""
    (tmp_path / "torch.py").write_text("import os\nprint(os.environ.get('GOMP_SPINCOUNT'), flush=True)\nos._exit(0)\n")
    paths = os.pathsep.join((str(tmp_path), str(Path(lineate.__file__).parents[1])))
    variables = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    starts = ((["-m", "lineate.cli", "tasks", "recall"], SPINS), (["-c", "import lineate; lineate.decode"], "None"))
    for words, found in starts:
        command = [sys.executable, *words]
        done = subprocess.run(command, env={**variables, "PYTHONPATH": paths}, capture_output=True, text=True)
        assert done.stdout.strip() == found

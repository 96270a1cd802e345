"""`lineate train` under torchrun: a rank that dies ends the job, or the job resumes from its last checkpoint."""

import itertools
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lineate.training.checkpoint import write_json
from lineate.training.config import TrainConfig
from lineate.training.distributed import World
from lineate.training.prepare import restarted

HERE = Path(__file__).parent
SCRIPT = """
import sys
from test_torchrun import break_at
from lineate.cli import main
break_at(int(sys.argv.pop(1)), sys.argv.pop(1))
main()
"""


def break_at(step, how):
    """Kill rank 1, or let it fail, in this step, once: not after a restart."""
    real, calls = World.clip, itertools.count()

    def clip(self, *args):  # called once per step
        if next(calls) == step and self.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("rank 1 broke")
        return real(self, *args)

    World.clip = clip


def torchrun(folder, out, step, how="killed", restarts=0, shard="none", context=1, tensor=1):
    """Run 8 steps on 2 ranks, saved after 2, 4, ..."""
    (folder / "script.py").write_text(SCRIPT)
    if not (folder / "data.txt").exists():
        (folder / "data.txt").write_text("".join(f"{n} and {n + 1} make {2 * n + 1}\n" for n in range(2000)))
        (folder / "more.txt").write_text("a text to validate with " * 99)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    options = {
        "out": out, "cache": folder / "cache", "pattern": "GA", "length": 32, "rows": 4, "steps": 8, "warmup": 2,
        "save-every": 2, "eval-every": 0, "sample-every": 0, "validation-fraction": 0.5, "device": "cpu",
        "shard": shard, "context": context, "tensor": tensor, "data": folder / "data.txt",
        "optimizer": "muon" if tensor == 1 else "adamw",
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in options.items()] + [f"--data={folder / 'more.txt'}"]
    return subprocess.run(
        [sys.executable, *launch, str(folder / "script.py"), str(step), how, "train", *flags],
        env=os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent / 'support'}", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,  # far below the timeout of a collective, which must not be needed
    )  # fmt: skip


def test_a_restart_resumes_only_its_own_run(tmp_path, monkeypatch):
    """A folder with another run is refused in every start, not only in the first."""
    config = TrainConfig(out=str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not restarted(config)
    write_json(tmp_path / "config.json", config.to_dict())
    assert restarted(config) and not restarted(replace(config, lr=1e-3))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert not restarted(config)


@pytest.mark.slow
@pytest.mark.parametrize("shard, context, tensor", [("none", 1, 1), ("full", 1, 1), ("full", 2, 1), ("none", 1, 2)])
def test_a_killed_rank_is_restarted_and_nothing_changes(tmp_path, shard, context, tensor):
    split = {"shard": shard, "context": context, "tensor": tensor}
    whole = torchrun(tmp_path, tmp_path / "whole", -1, **split)
    assert whole.returncode == 0, whole.stderr[-3000:]
    again = torchrun(tmp_path, tmp_path / "again", 5, restarts=1, **split)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "steps 0 to 8" in again.stdout and "steps 4 to 8" in again.stdout, again.stdout
    weights = [(tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("whole", "again")]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "failed"])
def test_a_dead_rank_ends_the_job(tmp_path, how):
    job = torchrun(tmp_path, tmp_path / "run", 5, how)
    assert job.returncode != 0
    assert (tmp_path / "run" / "checkpoints" / "step-000004").is_dir()
    if how == "failed":
        assert "Traceback" in job.stderr and "RuntimeError: rank 1 broke" in job.stderr
    else:
        assert "exitcode  : -9" in job.stderr

"""bench.rules.gpu_decode, with the GPU's timing replaced: every layer runs, and the report has what it promises."""

import pytest
import torch

from tests.support.cases import interpreted

pytest.importorskip("triton")


@interpreted
def test_every_layer_is_measured(monkeypatch, capsys):
    from bench.rules import gpu_decode

    def run(step, every: int, pools: int, replays: int) -> float:
        for i in range(every):
            step(i, pools - 1)
        return 2.0

    for name, value in {"DEVICE": "cpu", "HEADS": 2, "SIZE": 8, "ROWS": (2, 1), "microseconds": run}.items():
        monkeypatch.setattr(gpu_decode, name, value)
    args = gpu_decode.parse(["--every", "2", "--tiles", "8x1"])
    for layer in gpu_decode.LAYERS:
        found = gpu_decode.measure(layer._replace(state=torch.float32), 2, args)
        assert set(found["us"]) == {"copy", "decode", "ring", "ring 8x1"} and found["of a copy"]["ring"] == 1.0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(gpu_decode.LAYERS) and all(line.endswith("over 0.65") for line in lines)

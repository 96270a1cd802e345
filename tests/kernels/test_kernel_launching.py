"""Launches that only compile, and one compilation for every batch size and length."""

import importlib
from types import SimpleNamespace

import pytest
import torch

import lineate
from lineate import plans
from tests.support.cases import bounds
from tests.support.paths import BF16
from tests.support.raw_gates import FUSED_ROWS, raw_inputs
from tests.support.rule_kernels import MODEL, on_gpu
from tests.support.torch_calls import compilations, kernels


@pytest.mark.parametrize("problem", [None, ValueError, KeyboardInterrupt])
def test_launches_that_only_compile(problem):
    """Nothing is launched; however the dry run ends, it leaves no trace in later launches or in Triton."""
    launching = pytest.importorskip("lineate.kernels.launching")
    modes = importlib.import_module("triton.runtime._async_compile").active_mode
    seen = []

    class Kernel:
        def run(self, *args, grid, warmup, **options):
            seen.append((args, grid, warmup, modes.get() is not None, options))

    def function():
        launching.start(Kernel(), (1, 2))(3, four=5)
        if problem:
            raise problem

    if problem:
        with pytest.raises(problem):
            launching.compile_only(function)
    else:
        launching.compile_only(function)
    launching.start(Kernel(), (6,))()
    assert seen == [((3,), (1, 2), True, True, {"four": 5}), ((), (6,), False, False, {})]
    assert modes.get() is None


@pytest.mark.parametrize(("grid", "compiled"), [((3,), True), ((0, 2), True), ((3,), False)])
def test_launches_that_cannot_be_replayed(grid, compiled, monkeypatch):
    """Without a driver that lists parameters, or a kernel, a recorded launch is made and nothing is replayed."""
    pytest.importorskip("triton")
    tape = importlib.import_module("lineate.kernels.tape")
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    meta = SimpleNamespace(
        launch_cooperative_grid=False, launch_pdl=False, num_ctas=1, global_scratch_size=0, profile_scratch_size=0
    )
    made = SimpleNamespace(metadata=meta, src=SimpleNamespace(signature={"x": "*fp32"}), function=0)
    launched = []

    class Kernel:
        arg_names = ("x",)

        def run(self, *args, grid, warmup):
            launched.append((args, grid, warmup))
            return made if compiled else None

    x = torch.ones(3)
    recorder = tape.Recorder([x])
    recorder.launch(Kernel(), grid, x)
    assert launched == [((x,), grid, False)]
    assert recorder.tape() is None


def test_parts_that_begin_where_another_tensor_does():
    """An address that may be of two tensors of a call cannot be replayed with others."""
    pytest.importorskip("triton")
    tape = importlib.import_module("lineate.kernels.tape")
    x = torch.ones(8, 4)
    for part, fits in ((x[4:], False), (x[2:], True), (x[:4], True), (x.view(4, 8), True)):
        recorder = tape.Recorder([x, x[4:]])
        recorder.look(x, [part])
        assert (recorder.unfit is None) == fits


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("row", FUSED_ROWS, ids=str)
def test_one_compilation_for_every_batch_and_length(row, packed, monkeypatch):
    """No new t, b or number of sequences may compile anything again, because a server sees all of them.

    Everything that a call and its backward need was compiled before them, in parallel.
    """
    chunkwise = importlib.import_module("lineate.kernels.pipeline")
    before, ahead, compile_ahead = None, {}, chunkwise.compile_ahead
    for kernel in kernels().values():
        kernel.device_caches.clear()
    plans.forget("compiled")
    monkeypatch.setattr(
        chunkwise, "compile_ahead", lambda *args: (compile_ahead(*args), ahead.update(compilations()))[0]
    )
    for b, t in ((2, 130), (1, 64), (3, 65), (1, 1), (5, 16), (2, 100)):
        texts = (t,) * b if packed else None
        shape = MODEL._replace(b=1, t=b * t) if packed else MODEL._replace(b=b, t=t)
        inputs = on_gpu(raw_inputs(row, BF16, "bias", shape, texts and len(texts)))
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        output, state = lineate.fused_delta_rule(**leaves, cu_seqlens=bounds(texts).cuda() if texts else None)
        torch.autograd.grad(output.float().sum() + state.sum(), list(leaves.values()))
        after = compilations()
        before = before or after
        assert after == ahead, (b, t)
        assert {n: x for n, x in after.items() if x != before.get(n)} == {}, (b, t)

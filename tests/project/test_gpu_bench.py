"""bench/rules/gpu.py without a GPU: what it plans, its tables, its checks, and processes that fail."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lineate
from bench.rules import gpu, gpu_inputs, gpu_peers, gpu_tables
from bench.rules.gpu_cases import (
    BATCHES,
    BY_CHANCE,
    CASES,
    NARROW,
    PREFILL,
    SEQUENCES,
    SINGLE,
    STEP,
    VARIANTS,
    Case,
    floor_ms,
    least_bytes,
)

ROOT = Path(__file__).parents[2]
CEILINGS = {"copy_bytes_per_second": 4.28e12, "matrix_flop_per_second": 7.1e14}
FOUR = ("ours", "flashinfer", "flashinfer-cp", "portable")


def run_of(tmp_path: Path, *arguments: str) -> gpu.Run:
    return gpu.Run(gpu.parse(["--json", str(tmp_path / "gpu.json"), *arguments]))


def case_of(shape: str, group: str = PREFILL, **wanted: object) -> Case:
    fits = (c for c in CASES if (c.group, c.shape) == (group, shape))
    return next(c for c in fits if all(getattr(c, name) == value for name, value in wanted.items()))


def result_of(case: Case, who: str, graph: float | None, **more: object) -> dict[str, object]:
    times = {"graph_ms": graph, "event_ms": graph and graph + 0.01, "host_ms": 0.05}
    return {**case.record(), "who": who, **times, **more}


def test_cases_have_names_of_their_own():
    names = [(case.group, case.name) for case in CASES]
    assert len(set(names)) == len(names)
    assert case_of("8x4096 32/32").name == "gdn forward 8x4096,32,32 packed"
    assert case_of("1024+7168 16/32").t == 8192


def test_prefill_is_planned_for_four_contestants_in_one_process_each(tmp_path):
    run = run_of(tmp_path, "--only", "prefill,prefill-variants", "--warm")
    plans = {who: run.plan(who) for who in run.args.contestants}
    variants = len(SEQUENCES) + 2 * len(BATCHES)
    assert {who: [len(cases) for cases in plan] for who, plan in plans.items() if plan} == {
        who: [len(SEQUENCES) + (variants if who == "ours" else 0)] for who in FOUR
    }


def test_missing_leaves_out_what_the_file_has(tmp_path):
    first, second = (case_of(shape) for shape in ("1x32768 16/64", "1x8192 2/8"))
    known = [result_of(first, "ours", 1.0), {**result_of(second, "ours", None), "failed": "it crashed"}]
    (tmp_path / "gpu.json").write_text(json.dumps({"results": known}))
    (cases,) = run_of(tmp_path, "--only", "prefill", "--warm", "--missing").plan("ours")
    assert CASES.index(first) not in cases and CASES.index(second) in cases
    assert len(run_of(tmp_path, "--only", "prefill", "--warm", "--keep").plan("ours")[0]) == len(SEQUENCES)


def test_an_unknown_group_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu.parse(["--only", "prefil"])
    assert "--only takes" in capsys.readouterr().err


def test_a_peer_without_its_packages_is_absent(tmp_path):
    assert gpu.absent("ours", tmp_path) == ""
    for package, missing in (("flashinfer", "nvidia_cutlass_dsl"), ("nvidia_cutlass_dsl", "tvm_ffi"), ("tvm_ffi", "")):
        (tmp_path / package).mkdir()
        assert gpu.absent("flashinfer", tmp_path) == (missing and f"no package {missing}")


def test_a_dry_run_needs_no_gpu(tmp_path):
    command = [sys.executable, "-m", "bench.rules.gpu", "--dry-run", "--only", "prefill", "--peers", str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()
    assert sum(line.startswith("lineate  ") for line in lines) == len(SEQUENCES)
    assert any(
        line.startswith("FlashInfer ") and line.endswith("not measured: no package flashinfer") for line in lines
    )


def test_the_prefill_table_takes_the_faster_path_of_flashinfer():
    one, few = case_of("1x32768 16/64"), case_of("6144+2048 4/16")
    data = {"ceilings": CEILINGS, "results": [
        result_of(one, "ours", 1.0, error=3e-3), result_of(one, "flashinfer", 1.5, differences=[4e-3, 5e-3]),
        result_of(one, "flashinfer-cp", 2.5), result_of(one, "portable", 1.8),
        result_of(few, "flashinfer", 0.4), result_of(few, "flashinfer-cp", 0.2),
        {**result_of(few, "ours", None), "failed": "it crashed"},
    ]}  # fmt: skip
    columns, rows = gpu_tables.prefill_table(data)
    first, second = (list(zip(columns, row, strict=True)) for row in rows)
    for cell in (
        ("sequences, h/hv", "1x32768 16/64"), ("lineate graph", "1.000"), ("FlashInfer graph", "1.500"),
        ("FlashInfer / lineate", "1.50"), ("its path", "single"), ("lineate events", "1.010"), ("host", "0.0500"),
        ("plain Triton graph", "1.800"), ("/ lineate", "1.80"), ("floor", f"{floor_ms(one, CEILINGS):.3f}"),
    ):  # fmt: skip
        assert cell in first
    assert ("its path", "segments") in second and ("FlashInfer / lineate", "-") in second
    columns, rows = gpu_tables.accuracy_table(data)
    above, below = (dict(zip(columns, row, strict=True)) for row in rows)
    assert (above["lineate"], above["FlashInfer differs: output, state"]) == ("3.0e-03", "4.0e-03, 5.0e-03")
    assert (below["lineate"], below["note"]) == ("-", "lineate: it crashed")


def test_the_table_of_variants_sets_packed_beside_batch():
    packed = case_of("8x4096 32/32")
    batch = case_of("8x4096 32/32", VARIANTS, raw=False)
    raw = case_of("8x4096 32/32", VARIANTS, raw=True, b=1)
    results = [result_of(c, "ours", t) for c, t in ((packed, 0.5), (batch, 0.4), (raw, 0.6))]
    columns, (row,) = gpu_tables.variants_table({"ceilings": None, "results": results})
    assert columns[1:5] == ["packed", "batch", "packed, raw gates", "batch, raw gates"]
    times = ["0.500 / 0.510 / 0.0500", "0.400 / 0.410 / 0.0500", "0.600 / 0.610 / 0.0500", "-"]
    assert row == ["8x4096 32/32", *times, ""]


@pytest.mark.parametrize("raw", [False, True], ids=["gates", "raw"])
@pytest.mark.parametrize("lengths", [(), (40, 70)], ids=["batch", "packed"])
def test_errors_are_those_of_the_last_sequence_and_key_head(raw, lengths):
    b, t = (1, sum(lengths)) if lengths else (2, 70)
    case = Case(PREFILL, "gdn", "forward", b, t, 2, 4, raw=raw, lengths=lengths)
    x = gpu_inputs.make_inputs(case, 0, "cpu").map(lambda _, y: y.float() if y.is_floating_point() else y)
    if raw:
        got = lineate.fused_delta_rule(
            x.q, x.k, x.v, x.gate, x.write, x.A_log, x.dt_bias, cu_seqlens=x.cu_seqlens, backend="torch"
        )
    else:
        got = lineate.gated_delta_rule(x.q, x.k, x.v, x.log_decay, x.beta, cu_seqlens=x.cu_seqlens, backend="torch")
    assert gpu_peers.error(case, "ours", x, got, None) < 1e-5
    output, state = got
    for wrong in ((output.index_fill(1, torch.tensor([t - 70]), 0.0), state), (output, 2 * state)):
        assert gpu_peers.error(case, "ours", x, wrong, None) > 1e-3
    other = replace(x, q=x.q.flip(1))
    assert gpu_peers.error(case, "ours", other, got, None) > 1e-2


def test_the_floor_of_a_step_reads_and_writes_the_state_once():
    """However many tokens there are; a bfloat16 state has half the bytes, and each token adds its vectors alone."""
    states, vectors = 2 * 256 * 32 * 128 * 128, 256 * 32 * (4 * 2 * 128 + 2 * 4)
    for t in (1, 2, 4, 8):
        for state, size in ((SINGLE, 4), (NARROW, 2), (BY_CHANCE, 2)):
            assert least_bytes(Case("decode", "gdn", STEP, 256, t, 32, 32, state=state)) == size * states + t * vectors
    names = [case.name for case in CASES if case.group == "decode"]
    assert len(names) == len(set(names)) == 22 and {"gdn decode 256,8,32,32", "kda decode 1,1,32,32 bfloat16"} < set(
        names
    )


@pytest.mark.parametrize("state", [SINGLE, NARROW, BY_CHANCE])
def test_errors_of_a_step(state):
    """The reference starts from the same state, in float32; rounding is smaller than what counts as wrong."""
    case = Case("decode", "kda", STEP, 2, 4, 1, 2, state=state)
    x = gpu_inputs.make_inputs(case, 0, "cpu")
    assert x.state.dtype == (torch.float32 if state == SINGLE else torch.bfloat16)
    x = x.map(lambda name, y: y if name == "state" else y.float())
    before = replace(x, state=x.state.clone())
    seeds = {} if state != BY_CHANCE else {"rounding": "stochastic", "seeds": torch.arange(2)}
    output = lineate.decode(x.q, x.k, x.v, x.log_decay, x.beta, state=x.state, **seeds)
    found = gpu_peers.error(case, "ours", before, (output, x.state), None)
    assert found < 1e-5 if state == SINGLE else 1e-4 < found < gpu_tables.WRONG / 2


@pytest.mark.cover
def test_flashinfer_is_imported_without_its_own_packages(tmp_path):
    """Neither its __init__ files nor its utilities run; a module finds the stand-in where it expects the utilities."""
    kernels = tmp_path / "flashinfer" / "gdn_kernels" / "delta_rule_dsl"
    kernels.mkdir(parents=True)
    for folder in (kernels, *list(kernels.parents)[:2]):
        (folder / "__init__.py").write_text("raise ImportError('not this one')")
    (tmp_path / "flashinfer" / "utils.py").write_text("raise ImportError('nor this one')")
    (kernels / "probe.py").write_text("from ...utils import _get_cache_buf\nimport torch\n"
        "def memory(n): return _get_cache_buf('probe', n, torch.device('cpu'))\n")  # fmt: skip
    code = (
        "import sys; from bench.rules import gpu_flashinfer; gpu_flashinfer.load(sys.argv[1])\n"
        "from flashinfer.gdn_kernels.delta_rule_dsl.probe import memory\n"
        "a = memory(8); assert memory(4).data_ptr() == a.data_ptr(); assert memory(16).numel() == 16\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT)


CHILD = """
import json, os, sys
job = json.loads(sys.argv[1])
from bench.rules.gpu_cases import CASES
for number, index in enumerate(job["cases"]):
    with open(job["file"], "a") as file:
        print(json.dumps({"start": index}), file=file)
        if CASES[index].shape == "8x8192 16/32":
            file.close()
            os._exit(6)
        result = {**CASES[index].record(), "who": job["who"], "graph_ms": 1.0, "event_ms": 1.0, "host_ms": 0.1}
        print(json.dumps({"done": index, "result": result, "versions": {}}), file=file)
"""


def test_a_process_that_dies_loses_one_case(tmp_path, monkeypatch):
    (tmp_path / "dying_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(gpu, "CHILD", "dying_child")
    run = run_of(tmp_path, "--only", "prefill", "--warm")
    (cases,) = run.plan("ours")
    run.batch("ours", cases)
    written = json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert len(written) == len(SEQUENCES)
    (lost,) = (r for r in written if r["event_ms"] is None)
    assert lost["case"] == case_of("8x8192 16/32").name and lost["failed"].startswith("exit code 6")

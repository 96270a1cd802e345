"""bench/rules/gpu_contest.py without a GPU: shapes, filters, layouts, checks, tables, and processes that fail."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import lineate
from bench.rules import gpu_contest, gpu_contest_cases, gpu_peers, gpu_timing
from bench.rules.gpu_adapters import in_layout, plans
from bench.rules.gpu_cases import FORWARD, SEQUENCES, TRAIN, TRAINED, UNIFORM, Case, least_bytes
from bench.rules.gpu_contest_cases import (
    COLUMNS,
    KDA_SHAPES,
    NOBODY,
    PEERS,
    TABLES,
    bound_ms,
    case_of,
    choose,
    estimate,
    headings,
    kda,
    row,
    shape_of,
    summary,
    tables,
)
from bench.rules.gpu_contest_child import Child, distance
from bench.rules.gpu_inputs import PeerInputs, make_inputs

ROOT = Path(__file__).parents[2]
RATE = 4.28e12


def record_of(table: str, case: Case, who: str, own: float, peer: float | None, **more: object) -> dict[str, object]:
    def side(graph: float) -> dict[str, float]:
        return {"graph_ms": graph, "event_ms": graph + 0.02, "host_ms": 0.05}

    record = {**case.record(), "table": table, "who": who, "bound_ms": bound_ms(case, RATE), "lineate": side(own)}
    record |= {"errors": {"lineate": {"output": 3e-3}, "peer": {"output": 4e-3, "state": 5e-3}}, "path": ""}
    return json.loads(json.dumps({**record, **({} if peer is None else {"peer": side(peer)}), **more}))


def test_the_tables_have_fifteen_and_thirteen_shapes():
    assert len(tables()["gdn"]) == len(SEQUENCES) == 15
    assert len(KDA_SHAPES) == len(set(KDA_SHAPES)) == 13
    found = tables()["kda"]
    assert [(shape_of(c), c.what) for c in found] == [
        (f"{t},{h},{n}", what) for what in (FORWARD, TRAIN) for t, h, n in KDA_SHAPES
    ]
    assert all(c.resumed and c.decay == UNIFORM and sum(c.lengths or (c.t,)) == c.t for c in found)
    assert case_of(json.loads(json.dumps(kda(8192, 12, 4, TRAIN).record()))) == kda(8192, 12, 4, TRAIN)


def test_filters():
    assert len(choose(TABLES, (), ())) == 15 + 26
    assert choose(["kda"], [TRAIN], ["8192,12,4"]) == [("kda", kda(8192, 12, 4, TRAIN))]
    assert [shape_of(c) for _, c in choose(TABLES, [FORWARD], ["8x4096,32/32", "1024,96,1"])] == [
        "8x4096,32/32", "1024,96,1",
    ]  # fmt: skip
    assert {c.decay for _, c in choose(["kda"], (), (), TRAINED)} == {TRAINED}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--against", "flashinfer,cudn"], "--against takes flashinfer, cudnn"),
        (["--tables", "gla"], "--tables takes gdn, kda"),
        (["--shapes", "8192,13,4"], "--shapes takes 1x32768,16/64"),
        (["--peers", "/no/such/folder"], "--peers must be a folder"),
    ],
)
def test_arguments_that_do_not_fit(given, message, capsys):
    with pytest.raises(SystemExit):
        gpu_contest.parse(given)
    assert message in capsys.readouterr().err


def test_bounds_count_what_is_read_and_written_once():
    token = 4 * 2 * 128 + 4 * 128 + 4  # q, k, v and the output; the decay; beta
    back = 4 * 2 * 128 + 4 * 128 + 4 + 3 * 2 * 128 + 4 * 128 + 4  # reads those with do, writes the gradients
    state = 4 * 12 * 4 * 128 * 128
    assert least_bytes(kda(8192, 12, 4, FORWARD)) == 12 * 8192 * token + 2 * state
    assert least_bytes(kda(8192, 12, 4, TRAIN)) == 12 * 8192 * (token + back) + 3 * state
    assert bound_ms(kda(8192, 12, 4, FORWARD), 1e12) == pytest.approx(1e-9 * (12 * 8192 * token + 2 * state))


def test_the_estimate_counts_pairs_and_the_compilers_that_wait_for_each_other():
    cases = choose(TABLES, (), ())
    both = estimate(["flashinfer", "cudnn"], cases)
    assert both == gpu_contest_cases.STARTS + PEERS["flashinfer"].prepares + gpu_contest_cases.PAIR * 41
    assert estimate(["flashinfer", "cudnn", "fla"], cases) == pytest.approx(
        both + PEERS["fla"].prepares + gpu_contest_cases.PAIR * 41
    )
    assert estimate([NOBODY], cases) == gpu_contest_cases.STARTS + gpu_contest_cases.PAIR * 41


def small(what: str, sequences: int, rule: str = "kda") -> tuple[Case, PeerInputs]:
    case = kda(96, 3, sequences, what) if rule == "kda" else gpu_contest_cases.prefill((40, 30), 2, 4)
    x = make_inputs(case, 0, "cpu")
    assert case.rule != "kda" or -5 <= float(x.log_decay.min()) < -4.9 < -0.1 < float(x.log_decay.max()) <= 0
    return case, x.map(lambda _, y: y.float() if y.is_floating_point() else y)


def as_documented(q, k, v, g, beta, cu_seqlens, *, initial_state, output_final_state):
    """Compute what cuDNN's frontend documents: tokens `t h d`, states `sequence h v k`, bounds in int32."""
    assert q.dim() == 3 and cu_seqlens.dtype == torch.int32 and initial_state.is_contiguous() and output_final_state
    tokens = (y.unsqueeze(0) for y in (q, k, v, g, beta))
    output, state = lineate.kimi_delta_attention(
        *tokens, state=initial_state.transpose(-1, -2), cu_seqlens=cu_seqlens.long(), backend="torch"
    )
    return output[0], state.transpose(-1, -2).contiguous()


@pytest.mark.parametrize("what", [FORWARD, TRAIN])
@pytest.mark.parametrize("sequences", [1, 2])
def test_layouts_of_cudnn(what, sequences, monkeypatch):
    """Values of all inputs, and gradients of all, survive the way to the package's layout and back."""
    for name in ("cudnn", "cudnn.linear_attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    ops = ModuleType("cudnn.linear_attention.ops")
    ops.kimi_delta_attention = as_documented
    monkeypatch.setitem(sys.modules, ops.__name__, ops)
    case, x = small(what, sequences)
    call = gpu_peers.call_of(case, "cudnn", x)
    found = gpu_peers.errors(case, "cudnn", x, call(), getattr(call, "weight", None))
    gradients = ["q", "k", "v", "log_decay", "beta"] if what == TRAIN else ["state"]
    assert list(found) == ["output", *gradients] and max(found.values()) < 1e-5
    wrong = gpu_peers.errors(case, "cudnn", x, [y.roll(1, -1) for y in call()], getattr(call, "weight", None))
    assert min(wrong[name] for name in wrong if name != "beta") > 1e-2


def test_layouts_of_attention_gym(monkeypatch):
    def chunk_gdn(q, k, v, gate, beta, initial_state=None, *, cu_seqlens=None, output_final_state=False):
        assert initial_state is None and cu_seqlens.dtype == torch.int32 and output_final_state
        output, state = lineate.gated_delta_rule(q, k, v, gate, beta, cu_seqlens=cu_seqlens.long(), backend="torch")
        return output, state.transpose(-1, -2)

    linear = ModuleType("attn_gym.linear")
    linear.chunk_gdn = linear.chunk_kda = chunk_gdn
    monkeypatch.setitem(sys.modules, "attn_gym", ModuleType("attn_gym"))
    monkeypatch.setitem(sys.modules, "attn_gym.linear", linear)
    case, x = small(FORWARD, 2, "gdn")
    assert max(gpu_peers.errors(case, "attn-gym", x, gpu_peers.call_of(case, "attn-gym", x)(), None).values()) < 1e-5


def test_a_batch_becomes_packed_where_tokens_have_no_batch_axis():
    case = Case("kda", "kda", FORWARD, 2, 5, 1, 1)
    x = in_layout(case, "cudnn", make_inputs(case, 0, "cpu"))
    assert x.q.shape == (10, 1, 128) and x.log_decay.shape == (10, 1, 128) and x.beta.shape == (10, 1)
    assert x.cu_seqlens.tolist() == [0, 5, 10] and x.state is None


def test_the_plans_of_cudnn_are_those_of_its_graphs(monkeypatch):
    assert plans() == []
    graph = SimpleNamespace(selected_engine=SimpleNamespace(name="kda_hopper_cuda"))
    kda_module = SimpleNamespace(fprop_cache={1: (graph, {})}, bprop_cache={1: (graph, {})})
    monkeypatch.setitem(sys.modules, "cudnn.linear_attention.ops.kda", kda_module)
    assert plans() == ["kda_hopper_cuda"]


def child_of(case: Case, who: str, tmp_path: Path) -> Child:
    return Child({"who": who, "folder": str(tmp_path), "seconds": 0.1, "cases": [(0, case.record())]})


def test_a_path_with_another_function_is_refused(tmp_path, monkeypatch):
    """Other paths go on; without any, the case is lost, with the reasons."""
    case, x = small(FORWARD, 2, "gdn")

    def result(case, key, x, long):
        output = {"ours": torch.ones(3), "flashinfer": torch.ones(3) * 1.001, "flashinfer-cp": torch.zeros(3)}[key]
        return {"output": output}, {"output": 1e-3}

    monkeypatch.setattr("bench.rules.gpu_contest_child.result", result)
    monkeypatch.setattr("bench.rules.gpu_contest_child.make_inputs", lambda case, seed: x)
    found = child_of(case, "flashinfer", tmp_path).check(case)
    assert list(found["paths"]) == ["single"] and "another function" in found["refused"]["segments"]
    assert found["paths"]["single"]["differences"]["output"] == pytest.approx(1e-3, rel=0.1)
    assert "segments refused: ArithmeticError" in gpu_contest.checked(found)
    monkeypatch.setattr("bench.rules.gpu_contest_child.ANOTHER_FUNCTION", 1e-6)
    with pytest.raises(RuntimeError, match="another function"):
        child_of(case, "flashinfer", tmp_path).check(case)


def test_a_result_that_is_not_finite_is_infinitely_far():
    assert distance(torch.tensor([math.nan]), torch.ones(1)) == math.inf
    assert distance(torch.full((2,), 1.1), torch.ones(2)) == pytest.approx(0.1)


def test_sides_are_measured_in_turns(monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_timing, "back_to_back", lambda calls, count: [calls[0]() or 9.0, *[1.0] * (count - 1)])
    found = gpu_timing.in_turns({x: [lambda x=x: order.append(x)] for x in "ab"}, 1e-9, 3)
    assert order[-6:] == list("ababab")
    assert found == {x: [1.0] * 12 for x in "ab"}  # 3 turns of 5, each without its first


def test_rows_have_ratios_of_the_same_process():
    case = kda(8192, 24, 1, FORWARD)
    cells = dict(zip(COLUMNS[:4], row(record_of("kda", case, "cudnn", 0.4, 0.3)), strict=False))
    assert cells == {
        "shape": "8192,24,1", "peer": "cuDNN", "lineate graph": "0.400", "peer graph": "0.300",
    }  # fmt: skip
    cells = row(record_of("kda", case, "cudnn", 0.4, 0.3, plans=["kda_hopper_cuda"]))
    bound = bound_ms(case, RATE)
    assert cells[4:8] == ["0.75", "0.420", "0.320", "0.76"]
    assert cells[9:] == [f"{bound:.4f}", f"{0.4 / bound:.2f}", f"{0.3 / bound:.2f}", "3.0e-03, 5.0e-03",
                         "kda_hopper_cuda"]  # fmt: skip


def test_notes_name_what_is_wrong():
    case = kda(2048, 12, 1, TRAIN)
    bad = record_of("kda", case, "fla", 0.2, 0.3, path="bounded decay", differences={"output": 1e-3, "q": 0.2})
    assert row(bad)[1] == "fla, bounded decay" and "DIFFERENCE of the peer in q" in row(bad)[-1]
    bad["peer"]["graph_ms"], bad["peer"]["graph_error"] = None, "not permitted"
    bad["lineate"]["event_ms"] = 1.0
    assert "host bounds lineate; no graph of the peer (not permitted)" in row(bad)[-1]
    lost = {**case.record(), "table": "kda", "who": "cudnn", "failed": "exit code 6"}
    assert row(lost)[:5] == ["2048,12,1", "cuDNN", "-", "-", "-"] and row(lost)[-1] == "exit code 6"
    alone = record_of("kda", case, NOBODY, 0.2, None)
    assert row(alone)[1:5] == ["(alone)", "0.200", "-", "-"]


def test_the_summary_counts_the_cases_and_takes_the_geometric_mean():
    ahead, behind = (kda(*KDA_SHAPES[i], FORWARD) for i in (0, 7))
    records = [record_of("kda", ahead, "cudnn", 0.1, 0.4), record_of("kda", behind, "cudnn", 0.4, 0.2)]
    (line,) = summary([*records, {**ahead.record(), "table": "kda", "who": "cudnn", "failed": "it crashed"}])
    assert line.startswith("forward, cuDNN / lineate: graphs: ahead on 1 of 2, 1.41x, least 0.50x; from Python: ")
    assert summary([record_of("kda", ahead, NOBODY, 0.1, None)]) == []


def test_records_stand_in_the_order_of_the_tables():
    last, first = kda(*KDA_SHAPES[-1], FORWARD), kda(*KDA_SHAPES[0], FORWARD)
    prefill = tables()["gdn"][0]
    records = [
        record_of("kda", last, "cudnn", 1, 1), record_of("kda", first, "fla", 1, 1),
        record_of("gdn", prefill, "flashinfer", 1, 1), record_of("kda", first, "cudnn", 1, 1),
    ]  # fmt: skip
    found = {key: [(shape_of(case_of(r)), r["who"]) for r in rows] for key, rows in headings(records).items()}
    assert found == {
        ("gdn", FORWARD): [("1x32768,16/64", "flashinfer")],
        ("kda", FORWARD): [("2048,12,1", "cudnn"), ("2048,12,1", "fla"), ("1024,96,1", "cudnn")],
    }


def run_main(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_contest", *arguments])
    gpu_contest.main()


def test_a_dry_run_needs_no_gpu_and_names_who_is_left_out(tmp_path, monkeypatch, capsys):
    (tmp_path / "cudnn").mkdir()
    run_main(monkeypatch, "--dry-run", "--peers", str(tmp_path), "--against", "cudnn,attn-gym", "--tables", "kda")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("attention-gym is left out: no package")
    assert lines[1].startswith("26 measurements, about ")
    assert len(lines) == 28 and lines[2].split() == ["cuDNN", "kda", "forward", "2048,12,1", "bound", "0.009", "ms"]


CHILD = """
import json, os, sys, time
from pathlib import Path
job = json.loads(sys.argv[1])
folder = Path(job["folder"])
def say(**line):
    with (folder / "lines").open("a") as file:
        print(json.dumps(line), file=file)
def wait(name):
    while not (folder / name).exists():
        time.sleep(0.01)
if job["who"] == "flashqla":
    say(absent="ImportError: no tilelang")
    sys.exit()
say(loaded={"lineate": "0", job["who"]: "1"}, gpu="a GPU", cuda="13")
wait("prepare")
say(compiled=True)
for n, case in job["cases"]:
    say(checks=n)
    known = {"errors": {"lineate": {"output": 1e-3}}, "paths": {"": {"errors": {}, "differences": {"output": 2e-3}}}}
    say(checked=n, errors=known)
say(ready=1.0)
wait("measure")
side = {"graph_ms": 1.0, "event_ms": 1.1, "host_ms": 0.1}
for n, case in job["cases"]:
    say(measures=n)
    if job["who"] == "fla" and n == 1:
        os._exit(6)
    say(done=n, record={"lineate": side, "peer": side, "bound_ms": 0.5, "path": ""}, versions={})
"""


def test_processes_measure_one_after_another_and_a_dead_one_loses_its_cases(tmp_path, monkeypatch, capsys):
    (tmp_path / "lone_child.py").write_text(CHILD)
    for package in ("flashinfer", "nvidia_cutlass_dsl", "tvm_ffi", "flash_qla", "fla"):
        (tmp_path / package).mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(gpu_contest, "CHILD", "lone_child")
    shapes = ["--shapes", "1x32768,16/64", "1x2048,2/8", "8x1024,2/8"]
    out = tmp_path / "contest.json"
    run_main(monkeypatch, "--peers", str(tmp_path), "--json", str(out), "--tables", "gdn", *shapes)
    data = json.loads(out.read_text())
    assert data["header"]["absent"] == {"attention-gym": "no package attn_gym", "FlashQLA": "ImportError: no tilelang"}
    assert data["header"]["gpu"] == "a GPU" and data["header"]["versions"]["fla"] == "1"
    ended = [(r["who"], "failed" in r) for r in data["results"]]
    assert ended == [("flashinfer", False)] * 3 + [("fla", False), ("fla", True), ("fla", True)]
    assert data["results"][-1]["failed"].startswith("exit code 6")
    text = capsys.readouterr().out
    assert "graphs: ahead on 0 of 3, 1.00x" in text and "fla is left out" not in text
    run_main(monkeypatch, "--show", "--json", str(out))
    assert "8x1024,2/8" in capsys.readouterr().out


@pytest.mark.cover
def test_the_process_says_why_a_peer_is_absent(tmp_path):
    """On a machine without a GPU, or without the package, it ends with the reason instead of a trace."""
    (tmp_path / "cudnn").mkdir()
    (tmp_path / "cudnn" / "__init__.py").write_text("raise ImportError('not built for this machine')")
    job = {"who": "cudnn", "folder": str(tmp_path), "seconds": 0.1, "peers": str(tmp_path), "cases": []}
    command = [sys.executable, "-m", "bench.rules.gpu_contest_child", json.dumps(job)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    (line,) = (tmp_path / "lines").read_text().splitlines()
    why = json.loads(line)["absent"]
    assert ("not built for this machine" in why) if torch.cuda.is_available() else why

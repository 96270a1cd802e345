"""bench/models/quantised_weights.py compares the same weights on all sides, and its tables say what its JSON has."""

import json
import sys

import pytest
import torch

from bench.models import quantised_error, quantised_tables, quantised_weights
from bench.models.quantised_model import BITS, Files, Shape, draw_weights, shrink, step_bytes
from bench.models.quantised_sides import LLAMA, OURS, THEIRS, TORCHAO, Opener, Ran, takes_part
from bench.serving.gguf_writer import TYPES, is_matrix, tensors, write_gguf
from lineate.models import HybridLM
from lineate.models.presets import tiny
from lineate.quantised import QuantisedWeight

SHAPE = Shape(layers=4, hidden=128)


@pytest.fixture(scope="module")
def theirs(files):
    return files.theirs(torch.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    pytest.importorskip("transformers")
    return Files(tmp_path_factory.mktemp("files"), SHAPE)


@pytest.mark.parametrize("form", BITS)
def test_a_form_is_read_back_as_it_was_made(files, form):
    made, again = files.ours(form), files.ours(form)  # the second is read from the files that the first has written
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(made(ids).logits, again(ids).logits)
    weights = dict(again.named_parameters())
    quantised = {name for name, x in weights.items() if isinstance(x, QuantisedWeight)}
    assert bool(quantised) == (form != "float32")
    assert step_bytes(again) == sum(
        x.nbytes_kept if name in quantised else x.nbytes for name, x in weights.items() if name != "embed.weight"
    )


def test_sides_make_the_same_tokens(files):
    opener = Opener(files, 1, None, 64)
    ids = list(range(7, 20))
    ran = {side: opener.open(side, "float32").run(ids, 6) for side in (OURS, THEIRS)}
    assert ran[OURS].tokens == ran[THEIRS].tokens and len(ran[OURS].tokens) == 6
    assert all(len(one.step_seconds) == 5 for one in ran.values())
    assert quantised_weights.same_tokens({side: [one] for side, one in ran.items()}) == {OURS: 1, THEIRS: 1}


def test_the_part_of_tokens_before_the_first_difference():
    runs = {OURS: [Ran(1, [], [1, 2, 3, 4])], LLAMA: [Ran(1, [], [1, 2, 9, 4])]}
    assert quantised_weights.same_tokens(runs) == {OURS: 1, LLAMA: 0.5}


def test_who_takes_part():
    taking = {form: [side for side in (OURS, THEIRS, TORCHAO, LLAMA) if takes_part(side, form)] for form in BITS}
    assert taking["float32"] == taking["bfloat16"] == [OURS, THEIRS, LLAMA]
    assert taking["float16"] == [OURS, LLAMA]
    assert taking["int8"] == taking["int4"] == [OURS, TORCHAO, LLAMA]


@pytest.mark.cover
@pytest.mark.parametrize("kind", TYPES)
def test_gguf_files_have_the_values_that_the_type_keeps(theirs, kind, tmp_path):
    gguf = pytest.importorskip("gguf")
    write_gguf(theirs, tmp_path / "model.gguf", kind)
    found = {x.name: x for x in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    for name, tensor in tensors(theirs.config, theirs.state_dict()):
        own = found.pop(name)
        matrix = is_matrix(name, tensor.shape)
        assert own.tensor_type.name == (kind if matrix else "F32")
        values = torch.from_numpy(gguf.quants.dequantize(own.data, own.tensor_type).copy()).view(tensor.shape)
        within = {"F32": 0, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 1e-2, "Q4_0": 0.15}[kind if matrix else "F32"]
        assert (values - tensor).norm() <= within * tensor.norm()
    assert not found


def test_drawn_weights_differ_in_size():
    torch.manual_seed(0)
    model = HybridLM(tiny("GGGA"))
    draw_weights(model)
    weight = model.layers[0].mixer.in_proj.weight.detach()
    assert model.embed.weight.detach().std() == pytest.approx(1, rel=0.15)
    assert weight.norm(dim=1).std() / weight.norm(dim=1).mean() == pytest.approx(0.2, rel=0.3)
    other = HybridLM(tiny("GGGA"))
    draw_weights(other)
    assert torch.equal(weight, other.layers[0].mixer.in_proj.weight)


@pytest.mark.cover
@torch.no_grad()
def test_errors_are_those_of_the_quantised_weights():
    rows = quantised_error.random_errors(["tiny A"], ["bfloat16", "int8", "int4"], seeds=1, tokens=32)
    assert 0 < rows[0]["bfloat16"] < rows[0]["int8"] < rows[0]["int4"] < 0.5
    torch.manual_seed(0)
    model = HybridLM(tiny("GGGA", 257)).eval()
    first, own = quantised_error.trained_errors(model, bytes(range(256)) * 8, ["int8"], rows=2, tokens=200)
    assert first["form"] == "float32" and own["tokens"] == 200 and own["positions"] == 2 * quantised_error.ROW
    assert own["perplexity_rise"] == pytest.approx(own["perplexity"] / first["perplexity"] - 1)
    # Up to its first other token, a free run reads what a forced one reads.
    assert 0 < own["free_until"] / 100 <= min(own["own"], own["free"]) <= 1
    ids = torch.arange(64)[None]
    exact = model(ids).logits
    assert quantised_error.relative(exact, exact) == 0
    assert quantised_error.relative(shrink(model, "int8")(ids).logits, exact) > 0


def test_same_until():
    a = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    b = torch.tensor([[1, 2, 9, 4], [1, 2, 3, 4]])
    assert quantised_error.same_until(a, b).tolist() == [2, 4]


def run(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["quantised_weights", *arguments])
    threads = torch.get_num_threads()
    try:
        quantised_weights.main()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_whole_run(files, tmp_path, monkeypatch, capsys):
    found = tmp_path / "found.json"
    options = {
        "--layers": SHAPE.layers, "--hidden": SHAPE.hidden, "--folder": files.folder.parent, "--json": found,
        "--rounds": 1, "--threads": 1, "--forms": "float32,int8", "--sides": "lineate,transformers",
        "--parts": "decode,prefill,batch,memory,read",
    }  # fmt: skip
    monkeypatch.setattr(quantised_weights, "MIDDLE", 40)
    monkeypatch.setattr(quantised_weights, "LONG", 80)
    run(monkeypatch, *(str(x) for pair in options.items() for x in pair))
    data = json.loads(found.read_text())
    assert [(row["form"], row["tokens"]) for row in data["decode"]] == [
        ("float32", 16), ("float32", 80), ("int8", 16), ("int8", 80)
    ]  # fmt: skip
    for row in data["decode"]:
        sides = [OURS, THEIRS] if row["form"] == "float32" else [OURS]
        assert list(row["seconds"]) == sides and all(len(x) == quantised_weights.STEPS for x in row["seconds"].values())
    assert [row["tokens"] for row in data["prefill"]] == [40, 80] * 2
    wide, narrow = (row["bytes"][OURS]["after"] for row in data["memory"])
    assert wide["all"] >= wide["own"] + wide["files"] > 0 and narrow["all"] > 0
    wide, narrow = (row["bytes"] for row in data["read"])
    assert 3.5 < wide / narrow < 4
    assert len(data["batch"]) == 2 and "other_cores" in data["header"]
    out = capsys.readouterr().out
    assert all(
        title in out for title, _ in (quantised_tables.TABLES[part] for part in data if part in quantised_tables.TABLES)
    )


@pytest.mark.parametrize("flag", ["--parts", "--forms", "--sides"])
def test_unknown_words_are_refused(monkeypatch, flag):
    with pytest.raises(SystemExit, match=f"{flag} must have words of .*, got 'nothing'"):
        run(monkeypatch, flag, "nothing")


def test_tables_have_ratios_to_llama_cpp(capsys):
    decode = {"form": "int8", "tokens": 16, "seconds": {OURS: [0.02, 0.01, 0.03], LLAMA: [0.04, 0.05, 0.02]}}
    columns, rows = quantised_tables.decode_table([{**decode, "same": {OURS: 1, LLAMA: 0.5}}])
    assert columns[2:] == [OURS, LLAMA, "ratio of medians", "of fastest", "same tokens"]
    assert rows == [["int8", "16", "20.0 10.0", "40.0 20.0", "0.50", "0.50", "50%"]]
    _, rows = quantised_tables.rate_table([{"form": "int8", "tokens": 100, "seconds": {OURS: [1, 2], LLAMA: [4, 2]}}])
    assert rows == [["int8", "100", "100", "50", "2.00", "2.00"]]
    _, rows = quantised_tables.batch_table([{"form": "int8", "rows": 8, "tokens_per_second": {OURS: [40], LLAMA: []}}])
    assert rows == [["int8", "8", "40.0", "", ""]]
    of = {"all": 3e6, "own": 2e6, "files": 1e6}
    _, rows = quantised_tables.memory_table([{"form": "int4", "bytes": {OURS: {"before": of, "after": of}}}])
    assert rows == [["int4", "3 (2 + 1)", "", "", "3"]]

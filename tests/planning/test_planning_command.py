"""`lineate plan`: its numbers are the library's, bad input gives one line, figures keep their text."""

import csv
import io
import json
from pathlib import Path

import pytest
import torch

from tests.support import fresh
from tests.support.marks import slow_but

pytest.importorskip("rich")
pytest.importorskip("typer")

from typer.testing import CliRunner

from lineate.cli import build_app
from lineate.models import HybridLM, preset
from lineate.planning import HARDWARE, crossover, plan_flops, plan_memory, plan_training, read_model, time_bounds
from lineate.planning.report import PlanRequest, csv_text, make_report, make_teaching_report
from lineate.planning.units import read_bandwidth, read_bytes, read_counts, read_flops, show_bytes, show_seconds
from tests.support.families import FAMILIES

TEACHING = ("--emb-dim", 2048, "--n-heads", 16, "--n-layers", 48, "--dtype", "bf16", "--teaching")


def plan(*words):
    return CliRunner().invoke(build_app(), ["plan", *map(str, words)])


def numbers(*words):
    done = plan(*words, "--json", "-")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout, parse_constant=pytest.fail)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a checkpoint of ours in 16 bits."""
    path = tmp_path_factory.mktemp("planned") / "tiny-model"
    HybridLM(preset("tiny")).bfloat16().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "name", slow_but(["qwen3-next-80b", "qwen3-5-27b", "kimi-linear-48b", "small"], ["qwen3-next-80b", "small"])
)
def test_numbers_are_those_of_the_library(name):
    got = numbers(name, "--context", "300,8k", "--batch", 3, "--hardware", "h200")
    model = read_model(name)
    memory, flops = plan_memory(model), plan_flops(model)
    assert got["weights"]["total_bytes"] == memory.weights
    assert sum(value for key, value in got["weights"].items() if key != "total_bytes") == memory.weights
    assert got["crossover"]["tokens"] == crossover(model)
    for i, tokens in enumerate((300, 8192)):
        row = got["against_context"][i]
        assert (row["tokens"], row["state_bytes"], row["total_bytes"]) == (
            tokens, memory.state(3, tokens), memory.total(3, tokens)
        )  # fmt: skip
        kinds = ("keys_and_values", "latent", "recurrent", "convolution")
        assert sum(row[f"{kind}_bytes"] for kind in kinds) == row["state_bytes"]
        assert got["variants"][got["own"]]["state_bytes"][i] == row["state_bytes"]
        assert got["flops_per_token"][i]["decode_executed"] == flops.decode(tokens)
        bounds = {x.what: x for x in time_bounds(model, HARDWARE["h200"], 3, tokens)}
        times = [x for x in got["times"] if (x["of"], x["tokens"]) == (got["own"], tokens)]
        for what in ("prefill", "decode"):
            found = next(x for x in times if x["what"] == what)
            assert found["least_seconds"] == bounds[what].seconds and found["limit"] == bounds[what].limit
            assert (found["flops"], found["moved_bytes"]) == (bounds[what].flops, bounds[what].moved)
    assert got["training"]["total_bytes"] == plan_training(model, 8192).total()
    assert len(got["layers"]) == model.config.n_layers


@pytest.mark.cover
def test_server_figures_on_the_command_line():
    got = numbers("qwen3-5-27b", "--batch", 4, "--conv-dtype", "float32", "--context", 65536, "--no-train")
    row = got["against_context"][0]
    assert row["recurrent_bytes"] == 576 * 2**20 and row["convolution_bytes"] == int(22.5 * 2**20)
    assert row["keys_and_values_bytes"] == 4 * 65536 * 16 * 2 * 4 * 256 * 2
    assert got["training"] is None


def test_a_folder_is_planned_in_the_dtype_it_is_stored_in(folder):
    got = numbers(folder, "--context", 100)
    assert got["model"]["name"] == "tiny-model" and got["model"]["dtype"] == "bfloat16"
    assert got["model"]["origin"] == "folder" and got["state_of_a_sequence"]["state_dtype"] == "float32"
    assert got["against_context"][0]["keys_and_values_bytes"] == 100 * 2 * 64 * 2
    assert numbers(folder / "config.json", "--context", 100)["against_context"] == got["against_context"]


@pytest.mark.parametrize("family", FAMILIES)
def test_config_of_every_family(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    getattr(transformers, FAMILIES[family].config)(**FAMILIES[family].values).save_pretrained(tmp_path)
    got = numbers(tmp_path / "config.json", "--context", 64, "--no-train")
    own = {"mamba2": "linear only (this model)", "nemotron_h": "this model"}.get(family, "3:1 hybrid (this model)")
    assert len(got["layers"]) == 5 and got["own"] == own
    assert got["model"]["rules"] in (
        {"Gated DeltaNet": 4, "softmax attention": 1}, {"Kimi Delta Attention": 4, "latent attention": 1},
        {"Mamba-2": 4, "softmax attention": 1}, {"Mamba-2": 5},
    )  # fmt: skip


@pytest.mark.cover
@pytest.mark.parametrize("letters", ["A", "L", "TPNCE", "KKKM", "GGGGGGGA"])
def test_every_pattern_has_tables_of_80_columns(letters, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = plan("small", "--pattern", letters, "--layers")
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    for title in (
        "State,",
        "other mixers",
        "Operations",
        "What fits",
        "no program can beat",
        "Training,",
        "Every layer",
    ):
        assert title in done.stdout


@pytest.mark.cover
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_numbers_are_never_cut(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = plan("kimi-linear-48b", "--hardware", "h200", "--batch", 8, "--layers").stdout.splitlines()
    row = "1,048,576 63 GiB 320 MiB 11.25 MiB 63.32 GiB 154.8 GiB"
    assert row in (" ".join(line.split()) for line in lines)
    assert sum("Kimi Delta Attention" in line and "3.463 GiB" in line for line in lines) == 19
    assert sum(line.endswith(("bandwidth", "bandwidth ")) for line in lines) >= 5


@pytest.mark.cover
def test_without_a_machine_all_are_shown():
    lines = [" ".join(line.split()) for line in plan("kimi-linear-48b", "--no-train").stdout.splitlines()]
    assert "RTX 4090 24 GB weights do not fit - -" in lines
    assert any(line.startswith("H200 SXM 141 GB 5,296,508 74") for line in lines)
    bounds = lines[: lines.index("Times of lineate, fitted to measurements, one sequence")]
    assert all(sum(line.startswith(x.name) for line in bounds) == 2 for x in HARDWARE.values())


@pytest.mark.cover
@pytest.mark.parametrize("name, hardware", [("qwen3-next-80b", "b200"), ("small", "cpu")])
def test_how_fast_the_largest_batch_is(name, hardware):
    got = numbers(name, "--context", "4k,64k", "--hardware", hardware, "--no-train")
    plans = {key: plan_memory(read_model(name, pattern=x["letters"])) for key, x in got["variants"].items()}
    machine = HARDWARE[hardware]
    for fit in got["fits"]:
        for i, tokens in enumerate((4096, 65536)):
            memory, batch = plans[fit["of"]], fit["largest_batch"][i]
            assert memory.total(batch, tokens) <= machine.memory_bytes < memory.total(batch + 1, tokens)
            steps = [x.seconds for x in time_bounds(memory, machine, batch, tokens) if x.what.startswith("decode")]
            assert fit["most_tokens_per_second"][i] == batch / steps[0]
            assert fit["most_tokens_per_second_experts_at_random"][i] == batch / steps[-1]
    own = next(fit for fit in got["fits"] if fit["of"] == got["own"])
    lines = [line.split() for line in plan(name, "--context", "4k,64k", "--hardware", hardware).stdout.splitlines()]
    shown = next(line for line in lines if line[:2] == ["at", "65,536"])
    assert f"{own['most_tokens_per_second'][1]:,.4g}" in shown or f"{own['most_tokens_per_second'][1]:,.0f}" in shown


@pytest.mark.cover
def test_how_fast_each_machine_is():
    got = numbers("kimi-linear-48b", "--context", "64k", "--no-train")
    done = plan("kimi-linear-48b", "--context", "64k", "--no-train").stdout
    rates = {x["hardware"]: x["most_tokens_per_second"][0] for x in got["fits"] if x["of"] == got["own"]}
    assert rates["RTX 4090"] is None and rates["B200"] > rates["H200 SXM"] > 0
    for name, rate in rates.items():
        line = next(line for line in done.splitlines() if line.startswith(name))
        assert line.split()[-1] == ("-" if rate is None else f"{rate:,.0f}")
    assert "if each chooses at random" in " ".join(done.split())


def test_memory_alone_has_no_speed():
    got = numbers("tiny", "--context", "64k", "--memory", "10GB", "--no-train")
    assert all(x["largest_batch"][0] > 0 and x["most_tokens_per_second"] == [None] for x in got["fits"])
    assert "okens a second" not in plan("tiny", "--memory", "10GB").stdout


def test_csv_and_json_have_the_same_numbers(tmp_path):
    file = tmp_path / "new" / "plan.csv"
    done = plan("tiny", "--context", "1k,2k", "--json", tmp_path / "plan.json", "--csv", file)
    assert done.exit_code == 0 and str(file) in done.stdout.replace("\n", "")
    report = json.loads((tmp_path / "plan.json").read_text())
    rows = {(x["table"], x["of"], x["tokens"], x["quantity"]): x["value"] for x in csv.DictReader(file.open())}
    assert len(rows) == file.read_text().count("\n") - 1  # no number has two lines
    assert rows["weights", "tiny", "", "total_bytes"] == str(report["weights"]["total_bytes"])
    softmax = report["variants"]["softmax only"]
    assert rows["variants", "softmax only", "2048", "state_bytes"] == str(softmax["state_bytes"][1])
    x = report["times"][-1]
    assert rows[f"times, {x['what']}, {x['hardware']}", x["of"], "2048", "moved_bytes"] == str(x["moved_bytes"])
    for part in ("against_context", "flops_per_token"):
        for row in report[part]:
            for key in row.keys() - {"tokens"}:
                assert rows[part, "tiny", str(row["tokens"]), key] == str(row[key])


def test_several_batches_have_a_table():
    got = numbers("tiny", "--batch", "64,1,8", "--context", "1k,2k", "--no-train")
    memory = plan_memory(read_model("tiny"))
    assert got["against_batch"] == {str(n): [memory.total(n, 1024), memory.total(n, 2048)] for n in (1, 8, 64)}
    done = plan("tiny", "--batch", "64,1,8", "--no-train")
    assert "batch 64" in done.stdout and "State, one sequence" in done.stdout


@pytest.mark.cover
def test_teaching_gives_the_numbers_people_know():
    got = numbers(*TEACHING, "--context", "4096,131072", "--batch", 2)["teaching"]
    assert got["softmax only"]["formula_bytes"] == [3221225472, 103079215104]
    assert got["linear only"]["formula_bytes"] == [50331648, 50331648]
    assert got["3:1 hybrid"]["formula_bytes"] == [843055104, 25807552512]
    assert got["softmax only"]["exact_bytes"] == got["softmax only"]["formula_bytes"]
    assert got["linear only"]["exact_bytes"] == [2 * 48 * (16 * 128 * 128 * 4 + 3 * 2048 * 3 * 2)] * 2


@pytest.mark.cover
def test_as_readers_type_it():
    """The options of the script with which the formulas are taught work, spelled as there."""
    words = ["--emb_dim", 2048, "--n_heads", 16, "--n_layers", 48, "--dtype", "bf16", "--batch", 1]
    words += ["--min_ctx", 128, "--max_ctx", 131072]
    for form in (words, [*words, "--teaching"]):
        got = numbers(*form)
        assert got["contexts_tokens"] == [2**n for n in range(7, 18)]
        assert (got["model"]["hidden_size"], got["model"]["n_layers"], got["model"]["dtype"]) == (2048, 48, "bfloat16")
    assert got["teaching"]["3:1 hybrid"]["formula_bytes"][-1] == 12_903_776_256


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("flag", ["--dtype", "--state-dtype", "--conv-dtype", "--cache_dtype", "--precision"])
@pytest.mark.parametrize("names", [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")], ids="/".join)
def test_dtypes_have_two_names(names, flag):
    if (flag, names[0]) == ("--precision", "fp16"):
        names = ("bf16", "bfloat16")  # there is no training in float16
    got = [numbers("tiny", "--context", "1k", flag, name) for name in names]
    assert got[0] | {"command": ""} == got[1] | {"command": ""}


@pytest.mark.parametrize(
    "words, lengths",
    [
        (["--min_ctx", "100", "--max_ctx", "1000"], [100, 128, 256, 512, 1000]),
        (["--min-ctx", "64k"], [65536, 131072]),
        (["--min_ctx", "256k"], [262144]),  # beyond the other's default
        (["--max_ctx", "100"], [100]),
        (["--max_ctx", "512"], [128, 256, 512]),
        (["--min_ctx", "5", "--max_ctx", "5"], [5]),
        ([], [4096, 16384, 65536, 262144, 1048576]),
    ],
)
def test_a_range_of_lengths(words, lengths):
    assert numbers("tiny", "--no-train", *words)["contexts_tokens"] == lengths


@pytest.mark.cover
@pytest.mark.parametrize(
    "words, assumed",
    [
        ([], {"--emb-dim": 2048, "--n-heads": 16, "--n-layers": 48, "--dtype": "bf16", "--pattern": "GGGA"}),
        (["--emb_dim", "1024", "--pattern", "GGA"], {"--n-heads": 16, "--n-layers": 48, "--dtype": "bf16"}),
        (["--dtype", "fp32", "--n-layers", "8"], {"--emb-dim": 2048, "--n-heads": 16, "--pattern": "GGGA"}),
    ],
)
def test_teaching_alone_has_defaults_and_says_them(words, assumed):
    assert numbers("--teaching", *words)["assumed"] == assumed
    said = " ".join(plan("--teaching", *words).stdout.split())
    assert f"Not given, so taken: {' '.join(f'{name} {value}' for name, value in assumed.items())}." in said
    if not words:
        assert numbers("--teaching")["teaching"] == numbers(*TEACHING)["teaching"]
    assert "Not given" not in plan(*TEACHING, "--pattern", "GGGA").stdout
    assert numbers("tiny", "--teaching")["assumed"] == {}


@pytest.mark.cover
@pytest.mark.parametrize("model", [TEACHING[:-1], ("qwen3-next-80b",)])
def test_teaching_has_the_ratio_of_the_pattern(model):
    got = numbers(*model, "--pattern", "GGGGGGGA", "--teaching", "--context", "65536")["teaching"]
    assert list(got) == ["softmax only", "linear only", "7:1 hybrid"]
    assert got["7:1 hybrid"]["formula"] == "7:1"
    assert got["7:1 hybrid"]["formula_bytes"] == [(25_769_803_776 + 7 * 25_165_824) // 8]
    exact = (got[name]["exact_bytes"][0] for name in ("softmax only", "linear only", "7:1 hybrid"))
    softmax, linear, mixed = exact
    assert 8 * mixed == softmax + 7 * linear
    lines = [line.split() for line in plan(*model, "--pattern", "GGGGGGGA", "--teaching").stdout.splitlines()]
    assert ["tokens", "full", "attention", "exact", "DeltaNet", "exact", "7:1", "exact"] in lines


def test_teaching_of_one_kind_of_layer_says_that_the_ratio_is_an_example():
    shown = " ".join(plan("--pattern", "A", "--teaching").stdout.split())
    assert "The pattern A has one kind of layer; the hybrid next to it is an example of 3:1." in shown


@pytest.mark.cover
def test_other_mixers_in_a_published_shape():
    got = numbers("qwen3-next-80b", "--pattern", "GGGGGGGA", "--no-train")
    assert got["model"]["rules"] == {"Gated DeltaNet": 42, "softmax attention": 6}
    assert got["model"]["name"] == "qwen3-next-80b, GGGGGGGA" and got["own"] == "this model"
    told = plan("qwen3-next-80b", "--pattern", "GGGGGGGA", "--no-train").stdout
    assert told.startswith("qwen3-next-80b, GGGGGGGA: 48 layers (42 x Gated DeltaNet, 6 x softmax attention)")


def test_other_mixers_in_a_folder(folder):
    assert numbers(folder, "--pattern", "KKKM", "--no-train")["model"]["name"] == "tiny-model, KKKM"


def test_teaching_says_why_exact_bytes_differ():
    done = plan(*TEACHING)
    text = " ".join(done.stdout.split())
    assert "float32 whatever the weights are" in text and "short convolution" in text
    assert "25.7698" in text and "6.4613" in text  # 65,536 tokens
    rows = list(csv.DictReader(io.StringIO(plan(*TEACHING, "--csv", "-").stdout)))
    assert {x["of"] for x in rows} == {"softmax only", "linear only", "3:1 hybrid"}
    assert all(float(x["value"]) > 0 for x in rows)


BAD = {
    "nothing": ([], "say what to plan"),
    "unknown preset": (["qwen4"], "qwen3-next-80b"),
    "missing file": (["/nowhere/config.json"], "does not exist"),
    "no JSON": (["{tmp}/bad.json"], "not JSON"),
    "a list": (["{tmp}/list.json"], "got list"),
    "no heads": (["{tmp}/heads.json"], "json"),
    "many layers": (["{tmp}/layers.json"], "n_layers must be at most 4,096"),
    "empty folder": (["{tmp}"], "config.json"),
    "context": (["tiny", "--context", "-5"], "--context must be whole numbers"),
    "no context": (["tiny", "--context", "0"], "--context must be"),
    "batch": (["tiny", "--batch", "0"], "--batch must be whole numbers of at least 1"),
    "memory": (["tiny", "--memory", "nonsense"], "--memory must be a size such as 80GB"),
    "negative memory": (["tiny", "--memory", "-3GB"], "--memory must be"),
    "hardware": (["tiny", "--hardware", "h300"], "--hardware must be one of h100"),
    "bandwidth alone": (["tiny", "--bandwidth", "3TB/s"], "given together"),
    "flops": (["tiny", "--flops", "x", "--hardware", "h200"], "--flops must be a rate"),
    "plot suffix": (["tiny", "--plot", "{tmp}/x.gif"], ".png, .svg, .pdf"),
    "plot under a file": (["tiny", "--plot", "{tmp}/bad.json/x.png"], "is no folder"),
    "plot is a folder": (["tiny", "--plot", "{tmp}/f.png"], "it is a folder"),
    "json is a folder": (["tiny", "--json", "{tmp}"], "it is a folder"),
    "two printed": (["tiny", "--json", "-", "--csv", "-"], "cannot both"),
    "panels alone": (["tiny", "--panels", "memory"], "--plot FILE"),
    "panel": (["tiny", "--panels", "x", "--plot", "{tmp}/x.png"], "--panels must be of memory"),
    "panel without machine": (["tiny", "--panels", "decode", "--plot", "{tmp}/x.png", "--memory", "3"], "--hardware"),
    "teaching on a machine": (["tiny", "--teaching", "--hardware", "h200"], "no meaning with --teaching"),
    "both": (["tiny", "--emb-dim", "64"], "leave it out"),
    "few numbers": (["--emb-dim", "64"], "--n-heads must be given too"),
    "heads": (["--emb-dim", "64", "--n-heads", "3", "--n-layers", "2"], "--emb-dim must be a multiple"),
    "layers": (["--emb-dim", "64", "--n-heads", "4", "--n-layers", "0"], "--n-layers must be at least 1"),
    "letters": (["tiny", "--pattern", "XY"], "--pattern must be made of"),
    "dtype": (["tiny", "--dtype", "bf17"], "--dtype must be one of fp32"),
    "pattern of a model": (["qwen3-next-80b", "--pattern", "GX"], "--pattern must be made of"),
    "two kinds of lengths": (["tiny", "--context", "1k", "--min-ctx", "128"], "leave it out, or leave out --min-ctx"),
    "a range upside down": (["tiny", "--min_ctx", "9k", "--max_ctx", "8k"], "at most --max-ctx = 8,192, got 9,216"),
    "several ends": (["tiny", "--max-ctx", "1k,2k"], "--max-ctx must be one number, got '1k,2k'"),
    "no end": (["tiny", "--max-ctx", "x"], "--max-ctx must be whole numbers"),
    "axes": (["tiny", "--axes", "logarithmic", "--plot", "{tmp}/x.png"], "--axes must be log or linear"),
    "three axes": (["tiny", "--axes", "log,log,log", "--plot", "{tmp}/x.png"], "--axes must be log or linear, or two"),
    "half of the axes": (["tiny", "--axes", "log,", "--plot", "{tmp}/x.png"], "got 'log,'"),
    "axes of nothing": (["tiny", "--axes", "linear"], "--plot FILE"),
    "taught heads": (["--teaching", "--emb-dim", "1000"], "--emb-dim must be a multiple of n_heads = 16, got 1000"),
    "optimizer": (["tiny", "--optimizer", "sgd"], "--optimizer must be adamw or muon"),
    "precision": (["tiny", "--precision", "fp4"], "--precision must be"),
    "tokens": (["tiny", "--tokens-per-step", "0"], "--tokens-per-step must be at least 1"),
    "same file": (["tiny", "--json", "{tmp}/a", "--csv", "{tmp}/b/../a"], "must be different files"),
    "no letters": (["--emb-dim", "64", "--n-heads", "4", "--n-layers", "2", "--pattern", ""], "--pattern must"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, tmp_path):
    words, expected = BAD[case]
    llama = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama |= {"vocab_size": 10, "intermediate_size": 3}
    (tmp_path / "bad.json").write_text("no json")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "heads.json").write_text(json.dumps(llama | {"num_attention_heads": 0}))
    (tmp_path / "layers.json").write_text(json.dumps(llama | {"num_hidden_layers": 10**7}))
    (tmp_path / "f.png").mkdir()
    done = plan(*(word.replace("{tmp}", str(tmp_path)) for word in words))
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert done.stdout == ""
    assert done.stderr.startswith("lineate: ") and done.stderr.count("\n") == 1
    assert expected in done.stderr


@pytest.mark.cover
def test_what_is_printed_alone_stays_json_or_csv(tmp_path):
    done = plan(
        "tiny", "--no-train", "--json", "-", "--csv", str(tmp_path / "a.csv"), "--plot", str(tmp_path / "a.svg")
    )
    assert json.loads(done.stdout)["model"]["name"] == "tiny"
    assert "a.csv" in done.stderr and "a.svg" in done.stderr


def test_a_training_step_is_on_texts_of_the_shortest_length():
    words = ("tiny", "--hardware", "h200", "--context", "1k,64k", "--tokens-per-step", "1048576")
    got = numbers(*words)["training"]
    assert got["text_tokens"] == 1024
    one = next(x for x in time_bounds(read_model("tiny"), HARDWARE["h200"], 1024, 1024) if x.what == "training step")
    assert got["times"][0]["least_seconds"] == one.seconds
    assert numbers(*words, "--recompute")["training"]["times"][0]["least_seconds"] > one.seconds
    assert "A step on sequences of 1,024 tokens takes at least" in " ".join(plan(*words).stdout.split())


def test_own_numbers_of_a_machine():
    named = numbers("tiny", "--context", "1M", "--hardware", "h200")
    slow = numbers("tiny", "--context", "1M", "--hardware", "h200", "--bandwidth", "2.4TB/s", "--memory", "1GB")
    given = numbers("tiny", "--context", "1M", "--bandwidth", "2.4TB/s", "--flops", "1e9", "--memory", "1GB")

    def decode(got):
        return next(x for x in got["times"] if x["of"] == got["own"] and x["what"] == "decode")["least_seconds"]

    assert decode(slow) == pytest.approx(2 * decode(named))
    assert decode(given) > decode(slow)  # nothing stays in a cache
    own = next(x for x in slow["fits"] if x["of"] == slow["own"])
    assert own["memory_bytes"] == 10**9
    model = plan_memory(read_model("tiny"))
    longest = own["longest_context_tokens"]
    assert model.total(1, longest) <= 10**9 < model.total(1, longest + 1)
    only_memory = numbers("tiny", "--memory", "1GB", "--context", "1M")
    assert only_memory["times"] == [] and only_memory["fits"][0]["hardware"] == "the memory given"


def test_units():
    assert read_bytes("80GB", "x") == read_bytes("80", "x") == 80 * 10**9
    assert read_bytes("1.5 gib", "x") == 3 * 2**29 and read_bytes("512 MB", "x") == 512 * 10**6
    assert read_bandwidth("3.35TB/s", "x") == 3.35e12 and read_bandwidth("100", "x") == 1e11
    assert read_flops("989TFLOPS", "x") == read_flops("989", "x") == 989e12
    assert read_counts("1M, 4096,32k,4096", "x") == (4096, 32768, 2**20)
    assert [show_bytes(n) for n in (0, 1023, 23592960, 2**40)] == ["0 B", "1023 B", "22.5 MiB", "1 TiB"]
    assert [show_seconds(x) for x in (1.62e-3, 2.0, 4321.0, 3e-10)] == ["1.62 ms", "2 s", "4,321 s", "0.3 ns"]


class TestFigures:
    @pytest.mark.cover
    @pytest.mark.parametrize(
        "suffix, start",
        [("png", b"\x89PNG"), ("svg", b"<?xml"), pytest.param("pdf", b"%PDF", marks=pytest.mark.slow)],
    )
    def test_written_twice_the_same(self, suffix, start, tmp_path):
        pytest.importorskip("matplotlib")
        for name in ("a", "b"):
            done = plan("tiny", "--no-train", "--plot", tmp_path / f"{name}.{suffix}", "--panels", "memory")
            assert done.exit_code == 0, done.output
        first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in "ab")
        assert first.startswith(start) and first == second

    @pytest.mark.cover
    @pytest.mark.parametrize(
        "name, pattern, machine",
        [
            ("qwen3-next-80b", None, "a100"),
            pytest.param("kimi-linear-48b", None, "rtx4090", marks=pytest.mark.slow),
            ("small", "TPNCE", "cpu"),
            pytest.param("small", "A", "h200", marks=pytest.mark.slow),
        ],
    )
    def test_no_text_leaves_the_figure_or_another_panel(self, name, pattern, machine):
        pytest.importorskip("matplotlib")
        from lineate.figures import styled
        from lineate.planning.plots import draw_report

        contexts = tuple(2**n for n in range(6, 21))
        model = read_model(name, pattern=pattern)
        report = make_report(PlanRequest(model, contexts, machines=(HARDWARE[machine],), tokens_per_step=None))
        with styled():
            figure = draw_report(report, ("memory", "batch", "flops", "decode", "prefill"))
            check_texts(figure)

    @pytest.mark.cover
    @pytest.mark.parametrize(
        "name, last",
        [
            pytest.param("qwen3-next-80b", 131072, marks=pytest.mark.slow),
            pytest.param("kimi-linear-48b", 2**20, marks=pytest.mark.slow),
            ("small", 300),
        ],
    )
    def test_linear_axes(self, name, last):
        pytest.importorskip("matplotlib")
        from lineate.figures import styled
        from lineate.planning.plots import draw_report

        contexts = tuple(sorted({1 + (last - 1) * i // 64 for i in range(65)}))
        request = PlanRequest(read_model(name), contexts, machines=(HARDWARE["rtx4090"],), tokens_per_step=None)
        with styled():
            figure = draw_report(make_report(request), ("memory", "batch", "flops", "decode", "prefill"), (True, True))
            shown = [axes for axes in figure.axes if axes.get_visible()]
            assert all((axes.get_xscale(), axes.get_yscale()) == ("linear", "linear") for axes in shown)
            assert all(axes.get_xlim()[0] == axes.get_ylim()[0] == 0 for axes in shown)
            check_texts(figure)

    @pytest.mark.cover
    @pytest.mark.parametrize(
        "words, scale, points",
        [
            (["--min_ctx", "128", "--max_ctx", "4096"], "linear", 65),
            (["--min_ctx", "128", "--max_ctx", "4096", "--axes", "log"], "log", 6),
            (["--context", "128,4096"], "log", 6),
            (["--context", "128,4096", "--axes", "linear"], "linear", 65),
            (["--context", "128,4096", "--axes", "Linear, log"], "linear,log", 65),
            (["--min_ctx", "128", "--max_ctx", "4096", "--axes", "log,linear"], "log,linear", 6),
        ],
    )
    @pytest.mark.slow(but="values")
    @pytest.mark.parametrize("teaching", [True, False])
    def test_a_range_has_linear_axes(self, words, scale, points, teaching, tmp_path, monkeypatch):
        pytest.importorskip("matplotlib")
        from lineate.planning import plots

        drawn = []
        monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
        done = plan("tiny", "--no-train", *words, *["--teaching"] * teaching, "--plot", tmp_path / "x.png")
        assert done.exit_code == 0, done.output
        axes = drawn[0].axes[0]
        words = scale.split(",")
        assert (axes.get_xscale(), axes.get_yscale()) == (words[0], words[-1])
        for axis, word in ((axes.get_xlim(), words[0]), (axes.get_ylim(), words[-1])):
            assert (axis[0] == 0) == (word == "linear") and axis[0] < axis[1]
        check_texts(drawn[0])
        x = axes.lines[0].get_xdata()
        assert (len(x), x[0], x[-1]) == (points, 128, 4096)

    def test_teaching(self):
        pytest.importorskip("matplotlib")
        from lineate.figures import styled
        from lineate.planning.plots import draw_teaching

        with styled():
            check_texts(draw_teaching(make_teaching_report(PlanRequest(read_model("small"), (256, 1024, 4096)))))


def check_texts(figure):
    """Check that titles and labels are inside the figure and do not overlap, and that axes have names and units."""
    from matplotlib import pyplot as plt

    figure.canvas.draw()
    boxes = []
    for axes in (x for x in figure.axes if x.get_visible()):
        assert axes.get_xlabel() and axes.get_ylabel() and axes.get_title(loc="left")
        for text in (axes._left_title, axes.xaxis.label, axes.yaxis.label):
            boxes.append((text.get_text(), text.get_window_extent()))
        ticks = [x for x in axes.get_yticklabels() + axes.get_xticklabels() if x.get_text()]
        assert len(ticks) >= 4
        boxes += [(x.get_text(), x.get_window_extent()) for x in axes.get_xticklabels() if x.get_text()]
    whole = figure.bbox
    for i, (text, box) in enumerate(boxes):
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1, text
        for other, another in boxes[i + 1 :]:
            assert not box.overlaps(another), (text, other)
    plt.close(figure)


@pytest.mark.cover
def test_output_in_the_docs_is_real(monkeypatch):
    """Every line below a `$ lineate plan` in docs/planning.md is one that the command prints at 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")
    printed: list[str] = []
    checked = 0
    for line in (Path(__file__).parents[2] / "docs" / "planning.md").read_text().splitlines():
        if line.startswith("    $ lineate plan "):
            printed = [x.rstrip() for x in plan(*line.split()[3:]).stdout.splitlines()]
        elif line and not line.startswith("    "):
            printed = []
        elif line and printed:
            assert line[4:].rstrip() in printed
            checked += 1
    assert checked > 30


@pytest.mark.cover
def test_without_plots_nothing_heavy_is_imported():
    code = "import sys, lineate.planning, lineate.planning.report, lineate.planning.command\n"
    code += "print([x for x in ('matplotlib', 'rich', 'typer', 'transformers') if x in sys.modules])"
    assert fresh.run(code).stdout.strip() == "[]"


def test_csv_of_a_report_without_training_or_machines():
    request = PlanRequest(read_model("tiny"), (128,), machines=(), tokens_per_step=None)
    report = make_report(request)
    assert report["fits"] == report["times"] == [] and "training," not in csv_text(report)
    assert torch.float32.itemsize * 2 * 64 == report["state_of_a_sequence"]["cache_bytes_per_token"]

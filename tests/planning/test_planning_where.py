"""`lineate plan` of models that ranks share, and what fits where: the library's numbers, and one line for bad input."""

import csv
import json
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("typer")

from typer.testing import CliRunner

from lineate.cli import build_app
from lineate.planning import (
    HARDWARE,
    decode_received,
    largest_batch,
    longest_context,
    plan_memory,
    plan_training,
    prefill_received,
    read_model,
    split_model,
    time_bounds,
    training_received,
)
from lineate.planning.hardware import decode_bound


def plan(*words: Any) -> Any:
    return CliRunner().invoke(build_app(), ["plan", *map(str, words)])


def numbers(*words: Any) -> Any:
    done = plan(*words, "--json", "-")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout, parse_constant=pytest.fail)


@pytest.mark.cover
def test_numbers_of_a_rank_are_those_of_the_library() -> None:
    words = ("kimi-linear-48b", "--tensor", 4, "--context-ranks", 2, "--replicas", 3)
    got = numbers(*words, "--context", "4k,64k", "--batch", 5, "--hardware", "h200")
    model = split_model(read_model("kimi-linear-48b"), 4, 2, 3)
    memory, whole = plan_memory(model), plan_memory(read_model("kimi-linear-48b"))
    assert got["weights"]["total_bytes"] == memory.weights and got["model"]["parameters"] == memory.parameters
    assert got["model"]["name"] == "kimi-linear-48b, one of 4 tensor ranks"
    ranks = got["ranks"]
    assert [ranks[key] for key in ("tensor", "context", "replicas", "ranks")] == [4, 2, 3, 24]
    assert (ranks["whole_parameters"], ranks["whole_weights_bytes"]) == (whole.parameters, whole.weights)
    decode = decode_received(memory, 5)
    assert ranks["decode_received"] == {
        "total_bytes": decode.total, "sums_bytes": decode.sums, "logits_bytes": decode.logits, "context_bytes": 0,
        "gradients_bytes": 0, "shared_gradients_bytes": 0, "collectives": decode.calls,
    }  # fmt: skip
    for i, tokens in enumerate((4096, 65536)):
        assert got["against_context"][i]["state_bytes"] == memory.state(5, tokens)
        assert ranks["prefill_received"][i]["total_bytes"] == prefill_received(memory, 5, tokens).total
        bounds = {x.what: x for x in time_bounds(memory, HARDWARE["h200"], 5, tokens)}
        for x in (x for x in got["times"] if (x["of"], x["tokens"]) == (got["own"], tokens)):
            bound = bounds[x["what"]]
            assert (x["least_seconds"], x["limit"]) == (bound.seconds, bound.limit)
            assert x["received_bytes"] == bound.received > 0
    training = got["training"]
    assert training["total_bytes"] == plan_training(model, 8192).total() and training["text_tokens"] == 4096
    assert training["received"]["total_bytes"] == training_received(memory, 8192, 4096).total


def test_one_rank_has_no_table_of_ranks() -> None:
    assert numbers("tiny", "--no-train")["ranks"] is None
    assert "receives" not in plan("tiny").stdout and "link" not in plan("tiny").stdout


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("words", [("--tensor", 2), ("--context-ranks", 4), ("--replicas", 1024), ("--fits",)])
@pytest.mark.parametrize("columns", [80, 200])
def test_tables_have_80_columns(words: tuple[Any, ...], columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = plan("qwen3-next-80b", *words)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= columns
    assert not any(line.rstrip().endswith("-") and "MiB" in line for line in lines)
    if "--fits" not in words:
        assert any(line.startswith("What a rank receives from others") for line in lines)
        assert any(line.split()[:2] == ["prefill", "1,048,576"] for line in lines)


def test_replicas_change_no_byte_of_serving() -> None:
    one, many = numbers("tiny"), numbers("tiny", "--replicas", 8)
    for key in ("weights", "against_context", "fits", "variants"):
        assert one[key] == many[key]
    parameters = plan_memory(read_model("tiny")).parameters
    assert many["training"]["received"]["gradients_bytes"] == 2 * (4 * parameters - 4 * parameters // 8)
    assert "of all replicas are 8 times" in " ".join(plan("tiny", "--replicas", 8).stdout.split())


@pytest.mark.cover
def test_the_rate_of_the_link() -> None:
    words = ("qwen3-next-80b", "--tensor", 8, "--hardware", "h200", "--context", "4k", "--no-train")
    fast, slow = numbers(*words), numbers(*words, "--link", "1GB/s")

    def prefill(got: Any) -> Any:
        return next(x for x in got["times"] if x["of"] == got["own"] and x["what"] == "prefill")

    assert prefill(slow)["limit"] == "link"
    assert prefill(slow)["least_seconds"] == prefill(slow)["received_bytes"] / 1e9
    assert prefill(fast)["received_bytes"] == prefill(slow)["received_bytes"]
    given = numbers(*words[:3], "--bandwidth", "4.8TB/s", "--flops", 989, "--memory", 141, "--link", 1, "--no-train")
    assert any(x["limit"] == "link" for x in given["times"])


@pytest.mark.cover
def test_csv_and_json_have_the_same_numbers(tmp_path: Any) -> None:
    for words in (("medium", "--tensor", 2, "--replicas", 2), ("medium", "--fits")):
        file = tmp_path / "plan.csv"
        done = plan(*words, "--context", "1k,2k", "--json", tmp_path / "plan.json", "--csv", file)
        assert done.exit_code == 0, done.output
        report = json.loads((tmp_path / "plan.json").read_text())
        rows = {(x["table"], x["of"], x["tokens"], x["quantity"]): x["value"] for x in csv.DictReader(file.open())}
        assert len(rows) == file.read_text().count("\n") - 1  # no number has two lines
        if "where" in report:
            for x in report["where"]:
                whose = f"{x['hardware']}, {x['weights']}"
                for i, tokens in enumerate(("1024", "2048")):
                    assert rows["where", whose, tokens, "largest_batch"] == str(x["largest_batch"][i])
            continue
        name = report["model"]["name"]
        assert rows["ranks", name, "", "tensor"] == "2"
        for key, value in report["ranks"]["prefill_received"][1].items():
            assert rows["received, prefill", name, "2048", key] == str(value)
        for key, value in report["training"]["received"].items():
            assert rows["received, training step", name, "", key] == str(value)


@pytest.mark.cover
@pytest.mark.parametrize("name", ["qwen3-next-80b", "kimi-linear-48b"])
def test_what_fits_where_is_exact(name: str) -> None:
    got = numbers(name, "--fits", "--context", "4k,64k", "--batch", 2)
    places = dict.fromkeys((x["hardware"], x["devices"]) for x in got["where"])
    assert list(places) == [
        ("H200 SXM", 1), ("2 x H200 SXM", 2), ("4 x H200 SXM", 4), ("8 x H200 SXM", 8), ("8 x RTX 4090", 8),
        ("8 x RTX 5090", 8),
    ]  # fmt: skip
    fitting = 0
    for x in got["where"]:
        machine = next(y for y in HARDWARE.values() if x["hardware"].endswith(y.name))
        model = read_model(name)
        model = model if x["weights"] == "bfloat16" else replace(model, weights=x["weights"])
        memory, room = plan_memory(split_model(model, tensor=x["devices"])), machine.memory_bytes
        assert x["why_not"] is None and x["memory_bytes"] == room
        assert (x["weights_bytes"], x["weights_fit"]) == (memory.weights, memory.weights <= room)
        assert x["longest_context_tokens"] == longest_context(memory, room, 2)
        assert x["largest_batch"] == [largest_batch(memory, room, n) for n in (4096, 65536)]
        steps = [decode_bound(memory, machine, 2, n) for n in (4096, 65536)]
        assert x["decode_seconds"] == [y.seconds for y in steps] and x["decode_limit"] == [y.limit for y in steps]
        if n := x["longest_context_tokens"]:
            assert memory.total(2, n) <= room < memory.total(2, n + 1)
            fitting += 1
    assert fitting == (17 if name == "qwen3-next-80b" else 18)
    shown = plan(name, "--fits").stdout
    assert ("does not fit" in shown) == (fitting < 18)


def test_what_fits_on_a_machine_of_ones_own() -> None:
    got = numbers("olmo-hybrid-7b", "--fits", "--hardware", "rtx4090", "--memory", "20GB", "--context", "4k")
    assert [x["devices"] for x in got["where"][::3]] == [1, 2, 4, 8]
    assert {x["memory_bytes"] for x in got["where"]} == {20 * 10**9}
    cannot = [x for x in got["where"] if x["devices"] > 2]  # it has 30 heads
    assert all("tensor must be one of 1, 2" in x["why_not"] for x in cannot)
    shown = plan("olmo-hybrid-7b", "--fits", "--hardware", "rtx4090").stdout
    assert "not divisible" in shown and "key heads = 30" in " ".join(shown.split())


BAD = {
    "heads": (["qwen3-next-80b", "--tensor", 3], "--tensor must be one of 1, 2, 4, 8, 16 for this model, got 3: "),
    "heads and channels": (["large", "--tensor", 8], "--tensor must be 1 for this model, got 8: "),
    "no rank": (["tiny", "--tensor", 0], "--tensor must be a whole number of at least 1, got 0"),
    "context": (["tiny", "--context-ranks", -1], "--context-ranks must be a whole number of at least 1, got -1"),
    "learning": (["tiny", "--pattern", "TA", "--context-ranks", 2], "--context-ranks must be 1 for this model, got 2"),
    "replicas": (["tiny", "--replicas", 10**7], "--replicas must be at most 1,048,576, got 10,000,000"),
    "devices": (["tiny", "--devices", 2, "--tensor", 2], "leave it out, or leave out --tensor"),
    "teaching": (["tiny", "--teaching", "--tensor", 2], "--tensor has no meaning with --teaching"),
    "teaching fits": (["tiny", "--teaching", "--fits"], "--fits has no meaning with --teaching"),
    "fits": (["tiny", "--fits", "--replicas", 2], "--replicas has no meaning with --fits"),
    "fits of bits": (["tiny", "--fits", "--bits", 8], "--bits has no meaning with --fits"),
    "link": (["tiny", "--link", "x", "--hardware", "h200"], "--link must be a rate such as"),
    "link alone": (["tiny", "--link", 1], "--link must be given with --hardware"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case: str) -> None:
    words, expected = BAD[case]
    done = plan(*words)
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.startswith("lineate: ") and done.stderr.count("\n") == 1
    assert expected in done.stderr

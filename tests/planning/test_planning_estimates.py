"""Fitted times: where there are none, what is outside the measurements, and the fit itself against planted numbers."""

import csv
import io
import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("typer")

from typer.testing import CliRunner

from bench.models.fit_plan import (
    DOCS,
    RESULTS,
    Fit,
    file_of,
    make_fits,
    nonnegative,
    plan_of,
    read_points,
    tables_of,
    with_tables,
)
from lineate.cli import build_app
from lineate.models.reading import PIECE
from lineate.planning import (
    HARDWARE,
    estimate_decode,
    estimate_prefill,
    estimate_times,
    estimates,
    plan_memory,
    read_model,
    several,
    split_model,
)
from lineate.planning.estimates import FILE, decode_terms, prefill_terms, read_fits
from lineate.planning.hardware import decode_bound, prefill_bound

H200 = HARDWARE["h200"]
FLAGSHIPS = ("qwen3-5-35b-a3b", "kimi-linear-48b")
LENGTHS, BATCHES = (512, 4096, 32768, 131072, 2**20), (1, 2, 8, 64, 256, 4096)
SHAPES = ("decode 1 after 4,096", "decode 1 after 131,072", "decode 64 after 512", "decode 256 after 512",
          "prefill 4,096", "prefill 32,768", "prefill 131,072", "read 131,072 in pieces of 8,192")  # fmt: skip
PLANTED = {
    "operations in": 1 / 500e12, "operations of attention": 1 / 450e12, "operations of latent attention": 1 / 400e12,
    "bytes of weights": 1 / 4e12, "bytes of states": 1 / 3e12, "bytes of caches": 1 / 2e12, "layers": 20e-6,
    "layers of latent attention": 70e-6,
}  # fmt: skip


def invoke(*words):
    done = CliRunner().invoke(build_app(), ["plan", *map(str, words), "--no-train"])
    assert done.exit_code == 0, done.output
    return done.stdout


def planted(name):
    """Return the planted coefficient of a term."""
    return PLANTED[name] if name in PLANTED else next(x for key, x in PLANTED.items() if name.startswith(key))


def write(folder, name, records, date="2026-11-19T04:57+00:00", gpu="NVIDIA H200"):
    about = {"gpu": gpu, "torch": "2.11", "triton": "3.6", "date": date}
    (folder / name).write_text(json.dumps({"about": about, "records": records}))


def records(weights="bf16", models=FLAGSHIPS, shapes=SHAPES, times=1.0):
    """Return records of bench.models.flagships whose times are made of the planted coefficients."""
    found = []
    for model in models:
        plan = plan_of(model, None if weights == "bf16" else weights)
        for what in shapes:
            numbers = [int(word.replace(",", "")) for word in what.split() if word[0].isdigit()]
            if what.startswith("decode"):
                terms = decode_terms(plan, *numbers)
            else:
                terms = prefill_terms(plan, 1, *numbers)
            seconds = times * sum(planted(name) * amount for name, amount in terms.items())
            found.append({"model": model, "weights": weights, "what": what, "ms": 1e3 * seconds})
    return found


@pytest.fixture(scope="module")
def fits():
    return make_fits(read_points(RESULTS))


@pytest.fixture(scope="module")
def planted_file(tmp_path_factory):
    """Return a file of coefficients fitted to planted times, whose ranges do not depend on the measurements."""
    folder = tmp_path_factory.mktemp("planted")
    write(folder, "flagships-h200.json", records())
    file = folder / "estimates.json"
    file.write_text(json.dumps(file_of(make_fits(read_points(folder)))))
    return file


@pytest.fixture
def ranges(planted_file, monkeypatch):
    """Estimate with the planted coefficients."""
    monkeypatch.setattr(estimates, "FILE", planted_file)
    read_fits.cache_clear()
    yield
    read_fits.cache_clear()


def close(found, expected):
    """Compare numbers that another machine may round differently in the last digit, and everything else exactly."""
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert list(found) == list(expected)
        for key in found:
            close(found[key], expected[key])
    elif isinstance(found, float):
        assert found == pytest.approx(expected, rel=2e-3, abs=2e-4 if expected > 1e-3 else 0)
    else:
        assert found == expected


def test_the_committed_fit_is_that_of_the_committed_measurements(fits):
    """If this fails: python -m bench.models.fit_plan, and commit what it writes."""
    close(json.loads(FILE.read_text()), json.loads(json.dumps(file_of(fits))))
    text = DOCS.read_text()
    assert text == with_tables(text, tables_of(fits))


def test_the_documented_tables_need_their_markers():
    with pytest.raises(ValueError, match="must have the lines"):
        with_tables("# Planning\n", "")


def test_measured_shapes_are_inside_the_range_and_near_what_was_measured(fits):
    for fit in (fit for times in fits.values() for fit in times.values()):
        for i, point in enumerate(fit.points):
            if point.what == "decode":
                found = estimate_decode(point.plan, H200, point.batch, point.tokens)
            else:
                found = estimate_prefill(point.plan, H200, point.batch, point.tokens, point.piece)
            assert found.outside == () and found.why_not is None
            assert found.seconds == pytest.approx(float(fit.fitted[i]), rel=2e-3)
            known = read_fits()["h200"].times[point.what].formats[point.weights]
            assert (found.median_error, found.largest_error) == (known.median_error, known.largest_error)


@pytest.mark.parametrize("name", FLAGSHIPS)
def test_longer_and_more_sequences_take_longer_and_never_less_than_the_bound(name):
    plan = plan_memory(read_model(name))
    for what, bound, others in (("prefill", prefill_bound, ()), ("decode", decode_bound, ("expected",))):
        index = ("prefill", "decode").index(what)
        times = [[estimate_times(plan, H200, b, n)[index].seconds for n in LENGTHS] for b in BATCHES]
        for rows in (times, list(zip(*times, strict=True))):
            assert all(list(row) == sorted(row) for row in rows)
        least = [[bound(plan, H200, b, n, *others).seconds for n in LENGTHS] for b in BATCHES]
        assert all(x >= y for row, own in zip(times, least, strict=True) for x, y in zip(row, own, strict=True))


def test_pieces_of_a_prompt_read_the_weights_again():
    plan = plan_memory(read_model(FLAGSHIPS[0]))
    whole = estimate_prefill(plan, H200, 1, 65536)
    assert estimate_prefill(plan, H200, 1, 65536, 65536) == whole == estimate_prefill(plan, H200, 1, 65536, 2**20)
    assert estimate_prefill(plan, H200, 1, 65536, PIECE) == whole, "a call reads so many at a time"
    name = "bytes of weights in bfloat16"
    one = prefill_terms(plan, 1, PIECE)[name]
    assert prefill_terms(plan, 1, 4 * PIECE)[name] == prefill_terms(plan, 4, PIECE)[name] == 4 * one
    assert estimate_prefill(plan, H200, 1, 65536, 4096).seconds > whole.seconds
    with pytest.raises(ValueError, match="piece must be a whole number of at least 1, got 0"):
        estimate_prefill(plan, H200, 1, 65536, 0)
    with pytest.raises(ValueError, match="batch must be a whole number of at least 1, got 0"):
        estimate_prefill(plan, H200, 0, 65536)


CASES = {
    "another device": (lambda: read_model(FLAGSHIPS[0]), HARDWARE["b200"], "no measurement on this machine"),
    "several devices": (lambda: read_model(FLAGSHIPS[0]), several(H200, 2), "no measurement on this machine"),
    "another bandwidth": (
        lambda: read_model(FLAGSHIPS[0]), replace(H200, bandwidth=9e12), "no measurement on this machine"
    ),
    "another dtype": (lambda: read_model(FLAGSHIPS[0], "float32"), H200, "no measurement in float32"),
    "ranks": (lambda: split_model(read_model(FLAGSHIPS[0]), tensor=2), H200, "no measurement with several ranks"),
    "an unmeasured format": (
        lambda: read_model(FLAGSHIPS[0], "bfloat16", weights="int8"), H200,
        "no measurement with weights in int8 (measured: bfloat16)",
    ),
    "a GGUF file": (
        lambda: replace(read_model(FLAGSHIPS[0]), weights="int8", kept=(("a", "int4"), ("b", "int8"))), H200,
        "no measurement with weights in int8 and int4",
    ),
    "an unmeasured mixer": (
        lambda: read_model(FLAGSHIPS[0], pattern="GGGT"), H200, "no measured model has TTT-Linear"
    ),
    "a state in bfloat16": (
        lambda: plan_memory(read_model(FLAGSHIPS[0]), "bfloat16"), H200,
        "no measurement with states, convolutions and caches in bfloat16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_was_not_measured_has_no_fitted_time(case, ranges):
    make, machine, words = CASES[case]
    for found in estimate_times(make(), machine, 1, 4096):
        assert found.why_not.startswith(words)
        assert (found.seconds, found.median_error, found.largest_error, found.outside) == (None, None, None, ())


def test_another_link_or_replicas_are_the_measured_machine():
    model = read_model(FLAGSHIPS[0])
    assert estimate_times(model, replace(H200, link=1e9)) == estimate_times(model, H200)
    assert estimate_times(split_model(model, replicas=4), H200) == estimate_times(model, H200)


@pytest.mark.parametrize(
    "name, batch, tokens, prefill, decode",
    [
        (FLAGSHIPS[0], 1, 8192, (), ()),
        (FLAGSHIPS[0], 64, 512, ("of 64 sequences", "of 512 tokens"), ()),
        (FLAGSHIPS[0], 1, 2**20, ("of 1,048,576 tokens",), ("of 1,048,576 tokens",)),
        (FLAGSHIPS[0], 512, 4096, ("of 512 sequences", "fit into 141 GB"), ("of 512 sequences", "fit into 141 GB")),
        (FLAGSHIPS[0], 64, 16384, ("of 64 sequences",), ("bytes of caches: 20 GiB",)),
        ("compact", 1, 8192, ("shorter than all measured",), ("shorter than all measured",)),
        ("qwen3-next-80b", 1, 8192, ("fit into 141 GB",), ("layers: 48 (measured: up to 40)", "fit into 141 GB")),
    ],
)
def test_shapes_outside_the_range_say_so(name, batch, tokens, prefill, decode, ranges):
    model = read_model(name, "bfloat16")
    for found, words in zip(estimate_times(model, H200, batch, tokens), (prefill, decode), strict=True):
        assert found.seconds is not None
        assert bool(found.outside) == bool(words), found
        for word in words:
            assert any(word in x for x in found.outside), (word, found.outside)


def test_a_wrong_size_is_refused():
    with pytest.raises(ValueError, match="batch must be a whole number of at least 1, got 0"):
        estimate_times(read_model("tiny"), H200, 0)


def test_the_command_shows_fitted_times_next_to_bounds(ranges):
    words = ("kimi-linear-48b", "--hardware", "h200", "--context", "4k,256k")
    report = json.loads(invoke(*words, "--json", "-"))
    plan = plan_memory(read_model("kimi-linear-48b"))
    own = [x for x in report["fitted"] if x["of"] == report["own"]]
    for x in own:
        found = {y.what: y for y in estimate_times(plan, H200, 1, x["tokens"])}[x["what"]]
        assert (x["fitted_seconds"], x["outside"]) == (found.seconds, list(found.outside))
    assert not any("fitted" in key for x in report["times"] for key in x)  # a bound stays a bound
    bounds = {(x["tokens"], x["what"]): x["least_seconds"] for x in report["times"] if x["of"] == report["own"]}
    assert all(x["least_seconds"] == bounds[x["tokens"], x["what"]] for x in own)
    lines = [" ".join(line.split()) for line in invoke(*words).splitlines()]
    assert "Times of lineate, fitted to measurements, one sequence" in lines
    start = next(i for i, line in enumerate(lines) if line.startswith("Times of lineate"))
    assert any(line.startswith("4,096 ") and line.count("±") == 2 for line in lines[start:])
    assert any(line.startswith("262,144 ") and line.count("*") == 2 for line in lines[start:])
    assert any(line.startswith("* Extrapolated") for line in lines[start:])
    table = list(csv.DictReader(io.StringIO(invoke(*words, "--csv", "-"))))
    rows = [x for x in table if x["table"] == "fitted, decode, H200 SXM" and x["of"] == report["own"]]
    assert [float(x["value"]) for x in rows if x["quantity"] == "fitted_seconds"] == [
        x["fitted_seconds"] for x in own if x["what"] == "decode"
    ]
    assert [x["tokens"] for x in rows if x["quantity"] == "outside"] == ["262144"]


def test_experts_at_random_are_in_both_times_of_a_batch():
    report = json.loads(invoke("qwen3-5-35b-a3b", "--hardware", "h200", "--context", 512, "--batch", 64, "--json", "-"))
    bounds = {x["what"]: x["least_seconds"] for x in report["times"] if x["of"] == report["own"]}
    decode = next(x for x in report["fitted"] if (x["of"], x["what"]) == (report["own"], "decode"))
    assert decode["least_seconds"] == bounds["decode, experts at random"] > bounds["decode"]


def test_the_command_says_where_there_is_no_fit(ranges):
    text = " ".join(invoke("kimi-linear-48b", "--hardware", "b200").split())
    assert "Times of lineate" not in text
    assert "No fitted time of lineate on B200 (prefill, decode): no measurement on this machine" in text
    everywhere = " ".join(invoke("kimi-linear-48b").split())
    assert "Times of lineate" in everywhere and "No fitted time of lineate on H100 SXM, B200," in everywhere
    assert "fitted" not in invoke("kimi-linear-48b", "--memory", "80GB")


def test_the_fit_finds_planted_coefficients(tmp_path):
    write(tmp_path, "flagships-h200.json", [*records(), *records("int8")])
    for what, fit in make_fits(read_points(tmp_path))["h200"].items():
        for name, x in zip(fit.names, fit.coefficients.tolist(), strict=True):
            if what == "decode" and name.startswith("operations in"):
                continue  # in few rows it takes less than the differences between the other terms
            assert x == pytest.approx(planted(name), rel=0.05), name
        assert max(fit.errors(fit.fitted)) < 1e-6
        assert max(fit.errors(fit.left_out)) < 0.05
        formats = fit.numbers()["formats"]
        assert {form: x["points"] for form, x in formats.items()} == {"bfloat16": 8, "int8": 8}


def test_no_rate_is_above_the_machines(tmp_path):
    write(tmp_path, "flagships-h200.json", records(times=0.1))
    for fit in make_fits(read_points(tmp_path))["h200"].values():
        for name, x in zip(fit.names, fit.coefficients.tolist(), strict=True):
            peak = H200.bandwidth if name.startswith("bytes") else H200.rate(torch.bfloat16)
            assert x >= (1 / peak if name.startswith(("bytes", "operations")) else 0)
        assert bool((fit.fitted >= fit.bounds).all())


def test_the_newest_measurement_counts_and_others_are_named(tmp_path, capsys):
    old, new = records(times=2.0), records(shapes=SHAPES[:3])
    write(tmp_path, "flagships-a.json", new, "2026-12-01")
    write(tmp_path, "flagships-b.json", old, "2026-11-19T04:57+00:00")
    other = {"model": FLAGSHIPS[0], "weights": "bf16"}
    write(
        tmp_path, "flagships-c.json",
        [other | {"what": "training", "ms": 1.0}, other | {"what": "decode", "out_of_memory": True}],
    )  # fmt: skip
    points = read_points(tmp_path)
    assert len(points) == len(old)
    assert {x.source.date[:7] for x in points} == {"2026-11", "2026-12"}
    assert sum(x.source.file == "flagships-a.json" for x in points) == len(new)
    assert "'training' is neither a decoding step nor a prompt" in capsys.readouterr().out


def test_few_measurements_of_a_format_are_left_out(tmp_path):
    write(tmp_path, "flagships-h200.json", [*records(), *records("int4", FLAGSHIPS[:1], SHAPES[:3])])
    fits = make_fits(read_points(tmp_path))["h200"]
    assert "int4" not in {x.weights for fit in fits.values() for x in fit.points}


def test_too_few_measurements_and_unknown_devices_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must have results of bench\.models\.flagships, got none"):
        read_points(tmp_path)
    write(tmp_path, "flagships-h200.json", records(models=FLAGSHIPS[:1], shapes=SHAPES[:4]))
    with pytest.raises(ValueError, match="5 coefficients need more measurements, got 4"):
        Fit(read_points(tmp_path), H200)
    write(tmp_path, "flagships-z.json", records(models=FLAGSHIPS[:1]), gpu="NVIDIA A1")
    with pytest.raises(ValueError, match=r"must be of one of NVIDIA H200, got 'NVIDIA A1'; add it to DEVICES"):
        read_points(tmp_path)


@pytest.mark.parametrize("seed", range(20))
def test_nonnegative_least_squares_meets_the_optimality_conditions(seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(12, n, generator=generator, dtype=torch.float64) for n in (6, 1))
    a *= 10.0 ** torch.arange(6)  # scales of terms differ by many orders
    x = nonnegative(a, b[:, 0])
    gradient = a.T @ (b[:, 0] - a @ x) / a.abs().amax(0)
    assert bool((x >= 0).all()) and bool((gradient <= 1e-8).all())
    assert bool((gradient[x > 0].abs() <= 1e-8).all())

"""bench/models/flashinfer.py without a GPU and without FlashInfer: its cases, bounds, references and messages."""

import pytest
import torch

from bench.models import flashinfer
from bench.models.flashinfer import CASES, CONTESTANTS, PAGE, Case, cells, error_of, main, make_problem, pages, row_of


def small(layer: str) -> flashinfer.Problem:
    torch.manual_seed(0)
    return make_problem(Case(layer, 2, 2 * PAGE), "cpu", torch.float32)


def test_cases_are_whole_pages():
    assert all(entries % PAGE == 0 for _, entries in CASES)
    bounds, indices, queries = pages(Case("kimi", 3, 2 * PAGE))
    assert bounds.tolist() == [0, 2, 4, 6]
    assert indices.tolist() == list(range(6))
    assert queries.tolist() == [0, 1, 2, 3]


def test_bounds_are_of_cache_queries_and_outputs():
    assert Case("kimi", 1, 32768).bound_us == pytest.approx(1e6 * (32768 * 1152 + 32 * (576 + 512) * 2) / 4.8e12)
    assert Case("qwen", 64, 512).bound_us == pytest.approx(1e6 * 64 * (512 * 2048 + 2 * 16 * 256 * 2) / 4.8e12)


def test_reference_is_torchs_attention_of_the_last_row():
    problem = small("qwen")
    q, (k, v) = problem.queries[0], problem.caches[0]
    heads = [x.transpose(1, 2).double() for x in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*heads, scale=problem.scale, enable_gqa=True)
    output = wanted.transpose(1, 2)  # rows 1 heads d
    found = flashinfer.reference(problem)
    assert error_of(output, found) < 1e-12
    assert error_of(output[:, 0], found) < 1e-12
    assert error_of(output.flip(0), found) > 0.1


def test_reference_of_latent_attention_sums_the_latent_part():
    problem = small("kimi")
    q = torch.cat(problem.queries, -1)[:, 0].double()  # rows heads 576
    entries = problem.caches[0][0][:, :, 0].double()  # rows n 576
    weights = torch.softmax(problem.scale * q @ entries.transpose(1, 2), -1)
    assert error_of(weights @ entries[..., :512], flashinfer.reference(problem)) < 1e-12


def test_rows_of_the_table():
    case = Case("qwen", 64, 4096)
    row = row_of(case, "lineate", 2 * case.bound_us, 0.00123)
    assert row["gb_per_s"] == pytest.approx(2400)
    found = cells(row)
    assert (found[0], found[1], found[-2:]) == ("qwen 64 x 4096", "lineate", ["50%", "1.2e-03"])
    assert len(found) == len(flashinfer.COLUMNS)


def test_a_contestant_that_fails_is_left_out(monkeypatch, capsys):
    def fails(problem):
        raise RuntimeError("no such kernel")

    def gives_the_reference(problem):
        output = flashinfer.reference(problem).expand(problem.case.rows, -1, -1)
        return [lambda: output]

    problem = small("kimi")
    monkeypatch.setitem(CONTESTANTS, "kimi", {"one": fails, "two": gives_the_reference})
    monkeypatch.setattr(flashinfer, "make_problem", lambda case: problem)
    monkeypatch.setattr(flashinfer, "graph_us", lambda calls, rounds: 10.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    (row,) = flashinfer.measure(problem.case, 1)
    assert (row["contestant"], row["us"], row["error"]) == ("two", 10.0, 0.0)
    assert "one: RuntimeError: no such kernel" in capsys.readouterr().out


@pytest.mark.parametrize("given", [[], ["--build", "a", "--peers", "b"], ["--peers", "a", "--only", "other"]])
def test_arguments_that_do_not_fit(given, capsys):
    with pytest.raises(SystemExit) as failure:
        main(given)
    assert failure.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_folders_that_lack_something(tmp_path):
    with pytest.raises(SystemExit, match="no folder flashinfer"):
        main(["--peers", str(tmp_path)])
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "nvidia_nvvm-13.0.88-py3-none-any.whl").touch()
    with pytest.raises(SystemExit, match="no wheels of: flashinfer_python, apache_tvm_ffi") as failure:
        main(["--build", str(tmp_path)])
    assert "nvidia_nvvm" not in str(failure.value)

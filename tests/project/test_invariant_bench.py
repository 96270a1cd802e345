"""bench/models/invariant.py runs, and writes what it prints."""

import json

from bench.models import invariant


def test_the_price_is_measured(tmp_path, capsys):
    file = tmp_path / "found.json"
    sizes = ["--hidden", "128", "--layers", "4", "--vocab", "200", "--rows", "1", "20", "--rounds", "1"]
    invariant.main([*sizes, "--device", "cpu", "--forms", "bfloat16", "int8", "--json", str(file)])
    results = json.loads(file.read_text())["results"]
    assert [(row["form"], row["rows"]) for row in results] == [(x, n) for x in ("bfloat16", "int8") for n in (1, 20)]
    assert all(row["invariant_same"] and row["invariant_ms"] > 0 for row in results)
    assert all(row["price"] == row["invariant_ms"] / row["usual_ms"] for row in results)
    assert "same bits" in capsys.readouterr().out


def test_the_model_has_2_4_billion_parameters():
    from lineate.models.hybrid import empty_model

    parameters = sum(x.numel() for x in empty_model(invariant.config_of()).parameters())
    assert 2.2e9 < parameters < 2.6e9

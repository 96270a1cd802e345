"""bench/models/loading.py writes one model twice, and counts the bytes that loading it takes."""

import json
import sys

import pytest
import torch

from bench.models import loading
from lineate.models import HybridLM
from lineate.models.families.gguf import open_gguf
from lineate.quantised import QuantisedWeight

SIZES = loading.Sizes(hidden=128, layers=4)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    place = tmp_path_factory.mktemp("files")
    loading.write_gguf(SIZES, place / "q8_0.gguf")
    loading.write_folder(open_gguf(place / "q8_0.gguf"), place / "bfloat16")
    return place


def test_both_files_have_the_same_numbers(files):
    coded = HybridLM.from_pretrained(files / "q8_0.gguf", progress=False)
    plain = HybridLM.from_pretrained(files / "bfloat16", progress=False)
    assert plain.dtype == torch.bfloat16 and isinstance(coded.embed.weight, QuantisedWeight)
    assert sum(x.numel() for x in plain.parameters()) == SIZES.parameters
    others = dict(plain.named_parameters())
    for name, x in coded.named_parameters():
        values = x.decoded() if isinstance(x, QuantisedWeight) else x
        # alpha and beta are rounded to 8 bits next to the codes of q, k, v and z
        torch.testing.assert_close(others[name].float(), values.float(), atol=1e-4, rtol=2**-8)
    assert coded(torch.arange(9)[None]).logits.isfinite().all()


@pytest.mark.parametrize("gigabytes", [0.1, 1, 4])
def test_sizes(gigabytes):
    sizes = loading.Sizes.of(gigabytes)
    assert sizes.layers % 4 == 0 and abs(2 * sizes.parameters / 1e9 / gigabytes - 1) < 0.35


def test_what_is_measured(files, tmp_path, monkeypatch, capsys):
    found = loading.measure(str(files / "q8_0.gguf"), None)
    model = HybridLM.from_pretrained(files / "q8_0.gguf", progress=False)
    kept = sum(x.nbytes_kept if isinstance(x, QuantisedWeight) else x.nbytes for x in model.parameters())
    assert found["planned_bytes"] == kept and found["peak_bytes"] - kept == found["above_bytes"]
    assert found["largest_bytes"] == SIZES.vocab * SIZES.hidden // 32 * 34 < found["file_bytes"]
    monkeypatch.setattr(loading, "in_fresh_process", lambda command, environment: found)
    argv = ["loading", "--gigabytes", "0.01", "--json", str(tmp_path / "out.json"), "--folder", str(tmp_path)]
    monkeypatch.setattr(loading.Sizes, "of", classmethod(lambda cls, gigabytes: SIZES))
    monkeypatch.setattr(sys, "argv", argv)
    loading.main()
    assert len(json.loads((tmp_path / "out.json").read_text())["cases"]) == 5
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]  # the files are removed
    assert "Q8_0, as stored" in capsys.readouterr().out

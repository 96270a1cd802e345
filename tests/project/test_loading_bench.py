"""bench/models/loading.py and loading_rate.py write models and measure the memory and the time of loading them."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from bench.models import loading, loading_rate, published_layouts
from bench.models.published_layouts import LAYOUTS, Layout
from lineate.models import HybridLM
from lineate.models.families import make_plan, read_config
from lineate.models.families.gguf import open_gguf
from lineate.models.files.checkpoint import Checkpoint
from lineate.models.files.loading import check_all
from lineate.models.files.safetensors import Entry
from lineate.models.hybrid import empty_model
from lineate.models.presets import preset
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


# Published layouts


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_those_of_the_published_sizes(name, tmp_path):
    layout = LAYOUTS[name]
    config = layout.config(15)
    assert 0.7 < layout.nbytes(config) / 15e9 <= 1 and len(set(config.letters)) == 2
    entries = {key: Entry(tmp_path / "x", size.dtype, size.shape, 0) for key, size in layout.tensors(config).items()}
    checkpoint = Checkpoint(tmp_path, layout.values(config), entries)
    found = read_config(checkpoint)
    assert (found.letters, found.linear, found.experts) == (config.letters, *sizes_of(found, config))
    model = empty_model(found)
    check_all(model.state_dict(), make_plan(checkpoint, found, model), checkpoint)


def sizes_of(found, config):
    """Return the linear layers and the experts of a preset, with the details that a config.json decides."""
    linear, experts = found.linear, found.experts
    same = ("heads", "value_heads", "key_dim", "value_dim")
    assert [getattr(linear, key) for key in same] == [getattr(config.linear, key) for key in same]
    same = ("count", "active", "size", "shared_size")
    assert [getattr(experts, key) for key in same] == [getattr(config.experts, key) for key in same]
    return linear, experts


@pytest.mark.slow
def test_the_rate_of_loading(tmp_path, monkeypatch, capsys):
    def little(self: Layout, gigabytes: float):
        config = preset(self.preset)
        experts = replace(config.experts, count=8, size=32, shared_size=32)
        linear = replace(config.linear, heads=2, value_heads=2, key_dim=32, value_dim=32)
        return replace(config, n_layers=2, pattern="GA", vocab_size=512, hidden_size=64, experts=experts, linear=linear)

    monkeypatch.setattr(Layout, "config", little)
    monkeypatch.setattr(published_layouts, "NOISE", 1001)
    argv = ["loading_rate", "--threads", "0,1", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", [*argv, "--folder", str(tmp_path)])
    loading_rate.main()
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["cases"]) == 3 and all(
        len(row["cold"]) == len(row["warm"]) == 1 for row in found["cases"].values()
    )
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]  # the files are removed
    assert "load to cpu, stored, at most 1 threads" in capsys.readouterr().out

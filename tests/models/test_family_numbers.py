"""Numbers of configurations that transformers reads in a way of its own, or has a default for."""

import json

import pytest
import torch

from lineate.models import HybridLM

transformers = pytest.importorskip("transformers")

from tests.support.families import VOCAB, build, rewrite  # noqa: E402

transformers.utils.logging.disable_progress_bar()
IDS = torch.randint(VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


def test_steps_of_nemotron_are_at_least_time_step_min(tmp_path):
    """As in transformers, which does not read time_step_limit."""
    other = build("nemotron_h", time_step_min=0.3, time_step_limit=(0.01, 0.5))
    other.save_pretrained(tmp_path)
    model = HybridLM.from_pretrained(tmp_path, progress=False)
    assert (model.config.mamba.step_least, model.config.mamba.step_most) == (0.3, None)
    assert (model(IDS).logits - other(IDS).logits).abs().max() <= 1e-5


@pytest.mark.parametrize(("name", "key"), [
    ("kimi_linear", "routed_scaling_factor"), ("bailing_hybrid", "routed_scaling_factor"),
    ("nemotron_h", "routed_scaling_factor"), ("nemotron_h", "time_step_min"),
])  # fmt: skip
def test_a_number_that_a_config_leaves_out_is_that_of_transformers(tmp_path, name, key):
    build(name).save_pretrained(tmp_path / "theirs")
    folder = rewrite(tmp_path / "theirs", tmp_path / "without", config={key: None})
    assert key not in json.loads((folder / "config.json").read_text())
    other = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert getattr(other.config, key) == getattr(type(other.config)(), key)
    model = HybridLM.from_pretrained(folder, progress=False)
    ours = model.config.mamba.step_least if key == "time_step_min" else model.config.experts.scale
    assert ours == getattr(other.config, key)
    assert (model(IDS).logits - other(IDS).logits).abs().max() <= 1e-5

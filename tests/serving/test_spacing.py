"""The default of --spacing: the tokens of a piece of a prompt, by device and by the number of experts."""

from dataclasses import replace

import pytest

from lineate.models import ExpertsConfig, preset
from lineate.serving.arguments import ServeArguments
from lineate.serving.building import application
from lineate.serving.engine.reading import default_spacing

TINY = preset("tiny", vocab_size=257)
GPU = {
    "no experts": (TINY, 1024),
    "Qwen3.5-27B": (preset("qwen3-5-27b"), 1024),
    "Kimi, 8 of 256": (preset("kimi-linear-48b"), 4096),
    "Qwen3-Next, 10 of 512: less than 128 tokens an expert": (preset("qwen3-next-80b"), 4096),
    "2 of 16, just enough": (replace(TINY, experts=ExpertsConfig(16, 2, 64)), 1024),
    "2 of 17, one step more": (replace(TINY, experts=ExpertsConfig(17, 2, 64)), 2048),
    "2 of 32": (replace(TINY, experts=ExpertsConfig(32, 2, 64)), 2048),
}


@pytest.mark.parametrize("case", GPU)
def test_default_spacing(case):
    config, expected = GPU[case]
    assert default_spacing(config, on_gpu=True) == expected
    assert default_spacing(config, on_gpu=False) == 128


@pytest.mark.parametrize(("given", "expected"), [(None, 2048), (64, 64)])
def test_the_server_takes_it_unless_an_option_names_another(monkeypatch, given, expected):
    pytest.importorskip("fastapi")
    from lineate.serving.arguments import settings_of

    config = replace(TINY, experts=ExpertsConfig(32, 2, 64))
    monkeypatch.setattr("lineate.generation.loading.random_shape", lambda name: config)
    monkeypatch.setattr("lineate.serving.engine.reading.CPU_SPACING", default_spacing(config, on_gpu=True))
    asked = ServeArguments("tiny", random_weights=True, device="cpu", spacing=given, context=4096, slots=1)
    _, engine, _, _ = application(asked, settings_of(asked))
    assert engine.spacing == engine.cache.spacing == expected

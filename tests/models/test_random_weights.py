"""Models with random weights in the shape of a preset: their tensors, the scale of their numbers, their memory."""

from dataclasses import replace

import pytest
import torch

from lineate.models import preset
from lineate.models.config import ExpertsConfig
from lineate.models.hybrid import empty_model
from lineate.models.random_weights import random_model, random_quantised
from lineate.quantised import FORMATS, Format, QuantisedWeight, register_format
from lineate.quantised.format import FP8, INT8, TILE, temporary_formats
from lineate.quantised.which import format_of, quantised_formats

EXPERTS = ExpertsConfig(8, 2, 64, shared_size=64, shared_gate=True, scores="sigmoid")
CONFIGS = {
    "linear and softmax": preset("tiny", pattern="GKEA"),
    "experts, latent attention": replace(preset("tiny", pattern="KM"), tie_embeddings=False, experts=EXPERTS),
    "memories that learn, Mamba-2": preset("tiny", pattern="STPL"),
}


@pytest.mark.parametrize("weights", [None, "bfloat16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("case", CONFIGS)
def test_every_tensor_is_made_in_its_dtype_and_the_model_runs(case, weights):
    config = CONFIGS[case]
    model = random_model(config, "float32", weights=weights)
    empty = empty_model(config)
    assert {n: x.shape for n, x in model.state_dict().items()} == {n: x.shape for n, x in empty.state_dict().items()}
    wanted = {} if weights is None else quantised_formats(empty, weights)
    found = {n: x.format for n, x in model.named_parameters() if isinstance(x, QuantisedWeight)}
    assert found == wanted and not model.training
    assert all(x.dtype == torch.float32 and x.device.type == "cpu" for x in model.state_dict().values())
    with torch.no_grad():
        logits = model(torch.arange(70)[None] % config.vocab_size).logits
    assert logits.isfinite().all() and 0.01 < logits.std() < 10


def test_numbers_are_those_of_a_new_model():
    config = replace(CONFIGS["experts, latent attention"], initializer_range=0.05)
    model = random_model(config)
    for name, x in model.named_parameters():
        if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")):
            assert (x == (0 if config.zero_centred_norm else 1)).all(), name
        elif x.dim() >= 2 and "conv" not in name and name.endswith(("weight", "experts_gate_up", "experts_down")):
            assert x.std().item() == pytest.approx(0.05, rel=0.1), name
    kimi = model.layers[0].mixer
    assert kimi.A_log.min() >= 0 and kimi.A_log.exp().max() <= 16  # a decay as a new layer draws it
    assert (model.layers[0].feed.router_bias == 0).all()


def test_decays_stay_in_float32_in_a_model_of_bfloat16():
    model = random_model(CONFIGS["experts, latent attention"], torch.bfloat16, weights="int8")
    kept = {n.rpartition(".")[2] for n, x in model.state_dict().items() if x.dtype == torch.float32}
    assert kept == {"A_log", "dt_bias", "router_bias"} and model.dtype == torch.bfloat16
    assert format_of(model) is INT8


def test_the_seed_decides_and_generators_keep_their_states():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, again, other = (random_model("tiny", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    one, two, three = (list(model.state_dict().values()) for model in (first, again, other))
    assert all(map(torch.equal, one, two)) and not all(map(torch.equal, one, three))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(40, 64), (3, 40, 160)])
def test_quantised_weights_have_the_deviation_and_rows_to_a_whole_tile(name, shape):
    weight = random_quantised(shape, name, torch.float32, deviation=0.03)
    values = weight.decoded().float()
    assert values.shape == shape and values.isfinite().all()
    assert values.std().item() == pytest.approx(0.03, rel=0.1) and abs(values.mean().item()) < 0.0045
    # the codes of int4 reach from -8 to 7
    if weight.scales is not None:
        assert (weight.scales[..., -1, :, 40 % TILE :] == 0).all() and (weight.scales[..., 0, :, :] != 0).all()


def test_a_format_of_ones_own_is_rounded():
    with temporary_formats():
        own = register_format(Format("int8-own", 8, round=INT8.round, numbers=INT8.numbers))
        values = random_quantised((2, 32, 64), own, torch.float32).decoded()
    assert values.std().item() == pytest.approx(0.02, rel=0.1)


def test_float8_numbers_are_drawn_in_pieces(monkeypatch):
    monkeypatch.setattr("lineate.models.random_weights.PIECE", 1000)
    values = random_quantised((64, 128), FP8, torch.float32).decoded()
    assert values.std().item() == pytest.approx(0.02, rel=0.1)


def test_no_plain_weight_is_made_of_what_becomes_codes(monkeypatch):
    """Else a model that fits into the memory in 4 bits could not be made there."""
    config, made, empty = CONFIGS["experts, latent attention"], [], torch.empty

    def counted(*shape, **options):
        x = empty(*shape, **options)
        made.append(0 if x.is_meta or not x.is_floating_point() else x.numel())
        return x

    monkeypatch.setattr(torch, "empty", counted)
    model = random_model(config, weights="int4")
    plain = sum(x.numel() for x in model.parameters() if not isinstance(x, QuantisedWeight))
    assert sum(made) == plain < 0.1 * sum(x.numel() for x in model.parameters())


WRONG = {
    "a preset": (dict(config="huge"), "preset must be one of tiny, small, .* got 'huge'"),
    "a format": (dict(config="tiny", weights="int3"), "weights must be .*int8.* got 'int3'"),
    "a dtype": (dict(config="tiny", dtype="int8"), "dtype must be"),
    "a device": (dict(config="tiny", device="abacus"), "device must be cpu, cuda or another"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case):
    options, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        random_model(**options)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [None, "bfloat16", "int8", "int4", "fp8"])
def test_a_gpu_has_room_for_little_more_than_the_weights(weights):
    config = preset("large")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = random_model(config, "bfloat16", "cuda", weights)
    own = torch.cuda.memory_allocated() - before
    assert torch.cuda.max_memory_allocated() - before < own + 256 * 2**20  # PIECE float8 numbers are drawn in bfloat16
    assert {x.device.type for x in model.parameters()} == {"cuda"} and model.dtype == torch.bfloat16
    with torch.no_grad():
        logits = model(torch.arange(300, device="cuda")[None]).logits.float()
    assert logits.isfinite().all() and 0.01 < logits.std() < 10

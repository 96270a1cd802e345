"""Quantised weights in wrong hands: what C must never read, what torch does around them, and values that do not fit."""

import copy
import io
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.generation import generate
from lineate.models import HybridLM
from lineate.models.files.checkpoint import save
from lineate.models.files.safetensors import CheckpointError
from lineate.quantised import FORMATS, QuantisedWeight, quantize, shrink
from lineate.quantised.which import format_of, quantised_parameters
from tests.support.quantised_weights import realistic, sizes, tokens

ALL, CODED = tuple(FORMATS), ("int8", "int4", "fp8")


def weight(form: str, *shape: int) -> QuantisedWeight:
    return quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)), form)


# Products


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(2, 96), r"x must be floats `\.\.\. 64` for a weight \(40, 64\), got \(2, 96\) in torch\.float32"),
        (torch.ones(2, 32), r"got \(2, 32\) in torch\.float32"),
        (torch.ones(2, 63), r"got \(2, 63\) in torch\.float32"),
        (torch.ones(2, 64, dtype=torch.long), r"got \(2, 64\) in torch\.int64"),
        (torch.tensor(1.0), r"got \(\) in torch\.float32"),
        (torch.ones(2, 64, device="meta"), "x must be on the device of the weight, cpu, got meta; move one"),
    ],
    ids=["too many columns", "too few", "no multiple of 32", "whole numbers", "no dims", "another device"],
)
def test_inputs_that_do_not_fit_are_refused(form: str, x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        F.linear(x, weight(form, 40, 64))


@pytest.mark.parametrize("form", ALL)
def test_a_weight_without_memory_is_not_read(form: str) -> None:
    with pytest.raises(ValueError, match="x must be on the device of the weight, meta, got cpu"):
        F.linear(torch.ones(2, 64), weight(form, 40, 64).to("meta"))


@pytest.mark.parametrize("form", CODED)
def test_codes_of_another_shape_are_not_read(form: str) -> None:
    good = weight(form, 40, 160)
    assert good.scales is not None
    for codes, scales in (
        (good.codes[:2], good.scales),
        (good.codes, good.scales[:2]),
        (good.codes[:, :1], good.scales),
        (good.codes[:2], good.scales[:2]),
        (good.codes.view(torch.int8), good.scales),
        (good.codes, good.scales.double()),
        (good.codes.flatten(), good.scales),
    ):
        with pytest.raises(ValueError, match=r"codes and scales must be the tiles of a weight \(40, 160\)"):
            F.linear(torch.ones(1, 160), QuantisedWeight(codes, scales, (40, 160), form))


@pytest.mark.parametrize("form", ALL)
def test_any_layout_of_the_input(form: str) -> None:
    quantised, x = weight(form, 40, 64), torch.randn(6, 64)
    wanted = F.linear(x, quantised)
    wide = torch.randn(6, 130)
    wide[:, 1:129:2] = x
    for other in (x.T.contiguous().T, wide[:, 1:129:2], torch.complex(x, -x).conj().imag):
        assert torch.equal(F.linear(other, quantised), wanted)
    assert torch.equal(F.linear(x[:1].expand(5, 64), quantised), wanted[:1].expand(5, 40))
    assert torch.equal(F.linear(x.view(2, 3, 64).transpose(0, 1), quantised), wanted.view(2, 3, 40).transpose(0, 1))
    assert torch.equal(F.linear(x[0], quantised), wanted[0])
    assert F.linear(x[:0], quantised).shape == (0, 40) and F.linear(torch.ones(2, 0, 64), quantised).shape == (2, 0, 40)


@pytest.mark.parametrize("form", CODED)
def test_rows_that_a_weight_does_not_have(form: str) -> None:
    quantised = weight(form, 40, 64)  # its tiles have 48 rows
    for ids in ([0, 40], [47], [48], [-1, 3]):
        with pytest.raises(IndexError, match=r"ids of an embedding must lie in 0 \.\. 39, got"):
            F.embedding(torch.tensor(ids), quantised)
    with pytest.raises(ValueError, match=r"must be int32 or int64, got torch\.uint8"):
        F.embedding(torch.tensor([1], dtype=torch.uint8), quantised)
    assert F.embedding(torch.empty(0, 3, dtype=torch.long), quantised).shape == (0, 3, 64)


@pytest.mark.parametrize("form", ALL)
def test_an_embedding_is_not_renormalised(form: str) -> None:
    with pytest.raises(ValueError, match="max_norm must be None for a quantised weight"):
        F.embedding(torch.tensor([1]), weight(form, 40, 64), max_norm=1.0)


@pytest.mark.parametrize("form", ALL)
def test_an_index_that_is_no_number_of_an_expert(form: str) -> None:
    quantised = weight(form, 3, 24, 64)
    plain = quantised.decoded()
    for index in (True, slice(1, 3), torch.tensor(1), (0, 2)):
        assert torch.equal(quantised[index], plain[index])
    assert torch.equal(quantised[-1].decoded(), plain[-1])
    with pytest.raises(IndexError):
        quantised[3]


# What torch does with modules


def same(one: nn.Module, other: nn.Module, ids: Tensor) -> bool:
    with torch.no_grad():
        return torch.equal(one(ids).logits, other(ids).logits)


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("tied", [True, False])
def test_copies_of_a_model(form: str, tied: bool) -> None:
    model, ids = shrink(realistic(sizes("GA", tie_embeddings=tied)), form), tokens(1, 9)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    assert {type(stored[name]) for name in quantised_parameters(model)} == {QuantisedWeight}
    other = shrink(realistic(sizes("GA", tie_embeddings=tied), seed=1), form)
    assert not same(other, model, ids)
    other.load_state_dict(stored)
    assert same(other, model, ids)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.share_memory()):
        assert same(twin, model, ids) and format_of(twin) == FORMATS[form]
        assert not any(x.requires_grad for x in quantised_parameters(twin).values())
    assert model.to("cpu") is model and format_of(model.float()) == FORMATS[form]
    assert model.half().dtype == torch.float16 and format_of(model) == FORMATS[form]
    assert model.embed.weight.dtype == model.norm.weight.dtype == torch.float16
    model.float()
    assert len({id(x) for x in model.state_dict(keep_vars=True).values()}) == len(model.state_dict())


@pytest.mark.parametrize("form", ALL)
def test_a_plain_model_takes_the_values(form: str) -> None:
    quantised = shrink(realistic(sizes("GA")), form)
    plain = realistic(sizes("GA"), seed=1)
    plain.load_state_dict(quantised.state_dict())
    for name, x in quantised_parameters(quantised).items():
        assert torch.equal(plain.get_parameter(name), x.decoded())
    with pytest.raises(RuntimeError, match="only overwritten by one of its own format"):
        quantised.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("form", ALL)
def test_data_that_is_set(form: str) -> None:
    model, ids = shrink(realistic(sizes("GA")), form), tokens(1, 9)
    other = shrink(realistic(sizes("GA"), seed=1), form)
    for name, x in quantised_parameters(model).items():
        x.data = other.get_parameter(name).data
        assert torch.equal(x.decoded(), other.get_parameter(name).decoded())
    with pytest.raises(RuntimeError, match="replace the parameter instead"):
        model.embed.weight.data = torch.zeros(97, 128)
    with pytest.raises(RuntimeError, match="must be those of one of its own format"):
        model.embed.weight.data = other.layers[0].mixer.in_proj.weight.data
    with pytest.raises(RuntimeError, match="frozen"):
        model.embed.weight.data.mul_(2)
    assert not same(model, shrink(realistic(sizes("GA")), form), ids)


@pytest.mark.parametrize("form", ALL)
def test_transforms_of_torch(form: str) -> None:
    layer = nn.Linear(64, 40, bias=False)
    layer.weight = nn.Parameter(quantize(layer.weight, form), requires_grad=False)
    x, plain = torch.randn(3, 64), layer.weight.decoded()
    torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x), atol=2e-2, rtol=0)
    torch.testing.assert_close(torch.func.jacrev(layer)(x[0]), plain, atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.func.jvp(layer, (x,), (x,))[1], x @ plain.T, atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", ALL)
def test_a_whole_model_under_autocast_and_in_inference_mode(form: str) -> None:
    model, ids = shrink(realistic(sizes("GAK")), form), tokens(2, 13)
    with torch.no_grad():
        wanted = model(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            assert (model(ids).logits.float() - wanted).norm() < 0.02 * wanted.norm()
        with torch.inference_mode():
            state = model(ids).state
            then = model(ids[:, :1], state).logits
        assert torch.equal(model(ids[:, :1], state).logits, then)  # and outside of it


# Values


@pytest.mark.parametrize("form", ["float16", "int8", "int4"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e7, -3e38])
def test_values_that_codes_cannot_stand_for(form: str, value: float, tmp_path: Path) -> None:
    x = torch.randn(40, 64)
    x[17, 33] = value
    with pytest.raises(ValueError, match=r"x must have finite numbers of at most [\d,]+ in size to be kept in"):
        quantize(x, form)
    model = realistic(sizes("G"))
    with torch.no_grad():
        model.layers[0].mixer.in_proj.weight[17, 33] = value
    model.save_pretrained(tmp_path / "plain")
    message = r"model\.safetensors: layers\.0\.mixer\.in_proj\.weight must have finite numbers"
    with pytest.raises(CheckpointError, match=message):
        HybridLM.from_pretrained(tmp_path / "plain", weights=form, progress=False)
    with pytest.raises(ValueError, match=r"layers\.0\.mixer\.in_proj\.weight must have finite numbers"):
        shrink(model, form)


# Threads and processes


@pytest.mark.parametrize("form", CODED)
def test_many_callers_at_once(form: str) -> None:
    model, ids = shrink(realistic(sizes("GGGA")), form), tokens(3, 12)
    wanted = [list(generate(model, ids[n : n + 1], 30)) for n in range(3)]
    found: dict[int, list[Tensor]] = {}
    threads = torch.get_num_threads()

    def run(n: int) -> None:
        found[n] = list(generate(model, ids[n % 3 : n % 3 + 1], 30))

    try:
        torch.set_num_threads(3)
        callers = [threading.Thread(target=run, args=(n,)) for n in range(6)]
        for caller in callers:
            caller.start()
        for n in (1, 4, 2, 3):  # while they run
            torch.set_num_threads(n)
        for caller in callers:
            caller.join()
    finally:
        torch.set_num_threads(threads)
    for n in range(6):
        assert torch.equal(torch.cat(found[n]), torch.cat(wanted[n % 3]))


FORK = """
import os, sys, torch
import torch.nn.functional as F
from lineate.quantised import quantize
torch.set_num_threads(3)
x, quantised = torch.randn(2, 512), quantize(torch.randn(2048, 512), "int8")
wanted = F.linear(x, quantised)
for n in range(4):
    child = os.fork()
    if not child:
        os._exit(0 if all(torch.equal(F.linear(x, quantised), wanted) for _ in range(20)) else 1)
    assert torch.equal(F.linear(x, quantised), wanted)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.cover
@pytest.mark.skipif(not hasattr(sys, "getdlopenflags"), reason="fork is of Unix")
def test_a_process_that_forks_after_threads_have_started() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    model = realistic(sizes("GA"))
    model.save_pretrained(tmp_path)
    for form in (None, *ALL):
        with torch.device("meta"):
            found = HybridLM.from_pretrained(tmp_path, weights=form, progress=False)
        assert same(found, model if form is None else shrink(copy.deepcopy(model), form), tokens(1, 9))


def test_a_folder_of_zeros_stays_zero(tmp_path: Path) -> None:
    model = realistic(sizes("G"))
    tensors = {name: torch.zeros_like(x) for name, x in model.state_dict().items()}
    model.save_pretrained(tmp_path / "model")
    save(tmp_path / "zeros", tensors, {"model_type": "lineate", **model.config.to_dict()})
    for form in CODED:
        quantised = HybridLM.from_pretrained(tmp_path / "zeros", weights=form, progress=False)
        assert not quantised.embed.weight.decoded().any()

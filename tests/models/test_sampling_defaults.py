"""The sampling options that a checkpoint names: read, refused if they are wrong, used by generate, and saved."""

import json
from types import SimpleNamespace

import pytest
import torch

from lineate.explore.pictures import PictureOptions
from lineate.explore.subject import open_subject
from lineate.generation import Sampling, generate
from lineate.generation.defaults import OWN, SamplingFlags
from lineate.models import HybridLM, preset
from lineate.models.files.safetensors import CheckpointError
from lineate.models.quantizing import quantize_checkpoint
from lineate.models.sampling_defaults import SamplingDefaults, parse_sampling_defaults
from lineate.serving import building
from lineate.serving.drafting import DraftModel
from lineate.text import Bytes

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [3, 4], "pad_token_id": 3}
NAMED = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
FILE = "generation_config.json"


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    HybridLM(preset("tiny", "GA", vocab_size=60)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder, **options):
    return HybridLM.from_pretrained(folder, progress=False, **options)


def write(folder, values):
    (folder / FILE).write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def read(folder):
    return json.loads((folder / FILE).read_text())


def test_they_are_read_and_kept(folder, tmp_path):
    assert load(folder).sampling_defaults is None
    write(folder, QWEN)
    model = load(folder)
    assert model.sampling_defaults == NAMED and model.end_tokens == {3, 4}
    assert str(NAMED) == "temperature 0.6, top_k 20, top_p 0.95"
    assert load(folder, sampling_defaults=False).sampling_defaults is None
    load(folder, sampling_defaults=False).save_pretrained(tmp_path / "unread")
    assert read(tmp_path / "unread") == QWEN  # what was not read is not changed
    quantize_checkpoint(folder, tmp_path / "int8", "int8", progress=False)
    assert load(tmp_path / "int8").sampling_defaults == NAMED


@pytest.mark.parametrize(
    "values, expected",
    [
        ({"eos_token_id": 3, "_from_model_config": True}, None),
        ({"temperature": None, "top_p": None}, None),
        ({"do_sample": True}, None),
        ({"do_sample": False}, SamplingDefaults(temperature=0.0)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, SamplingDefaults(temperature=0.0, top_p=0.9)),
        ({"temperature": 1, "top_k": -1}, SamplingDefaults(temperature=1.0, top_k=0)),
        ({"top_k": 20.0, "min_p": 0.05}, SamplingDefaults(top_k=20, min_p=0.05)),
        ({"repetition_penalty": 1.05, "presence_penalty": 1.5, "frequency_penalty": -1},
         SamplingDefaults(repetition_penalty=1.05, presence_penalty=1.5, frequency_penalty=-1.0)),
    ],
)  # fmt: skip
def test_what_a_file_says(values, expected, tmp_path):
    assert parse_sampling_defaults(tmp_path, values) == expected


HOSTILE = {
    "a word": ('{"temperature": "hot"}', "temperature must be a number from 0 to 100, got 'hot'"),
    "below 0": ('{"temperature": -1}', "temperature must be a number from 0 to 100, got -1"),
    "NaN": ('{"temperature": NaN}', "temperature must be a number from 0 to 100, got nan"),
    "infinity": ('{"repetition_penalty": Infinity}', "repetition_penalty must be a number from 0.01 to 100, got inf"),
    "a huge top_k": (
        '{"top_k": 1%s}' % ("0" * 30),
        "top_k must be a whole number from -1 to 2,147,483,647, got 1,000,000,000",
    ),
    "half a top_k": ('{"top_k": 1.5}', "top_k must be a whole number from -1 to 2,147,483,647, got 1.5"),
    "true": ('{"top_k": true}', "top_k must be a whole number from -1 to 2,147,483,647, got True"),
    "a list": ('{"top_p": [0.9]}', "top_p must be a number from 1e-06 to 1, got [0.9]"),
    "no probability": ('{"top_p": 0}', "top_p must be a number from 1e-06 to 1, got 0"),
    "more than 1": ('{"min_p": 1.5}', "min_p must be a number from 0 to 1, got 1.5"),
    "a penalty of 0": ('{"repetition_penalty": 0}', "repetition_penalty must be a number from 0.01 to 100, got 0"),
    "do_sample": ('{"do_sample": "no"}', "do_sample must be true or false, got 'no'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_wrong_values_are_refused_by_file_and_key(case, folder):
    text, expected = HOSTILE[case]
    write(folder, text)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert expected in str(error.value) and str(folder / FILE) in str(error.value)
    assert "leave it out" in str(error.value)
    assert load(folder, sampling_defaults=False).sampling_defaults is None  # the model itself can be used


def test_what_draws_nothing_takes_a_checkpoint_with_wrong_values(folder, tmp_path):
    text = '{"temperature": -1, "top_p": 0.9}'
    write(folder, text)
    with pytest.warns(UserWarning, match=r"temperature must be .*; the sampling options are copied unchanged to"):
        quantize_checkpoint(folder, tmp_path / "int8", "int8", progress=False)
    assert (tmp_path / "int8" / FILE).read_text() == text
    assert load(tmp_path / "int8", sampling_defaults=False).sampling_defaults is None
    with pytest.raises(CheckpointError, match="temperature must be"):
        load(tmp_path / "int8")
    assert open_subject(PictureOptions(model=str(folder))).model.sampling_defaults is None


def test_a_draft_takes_a_checkpoint_with_wrong_values(tmp_path):
    model = HybridLM(preset("tiny", "GA", vocab_size=260))
    model.save_pretrained(tmp_path)
    Bytes().save(tmp_path)
    write(tmp_path, {"temperature": -1})
    asked = SimpleNamespace(draft=str(tmp_path), dtype="auto", bits=None)
    assert isinstance(building.find_drafter(asked, model), DraftModel)


def test_what_is_set_is_refused_alike():
    with pytest.raises(ValueError, match="top_p must be a number from 1e-06 to 1, got 2"):
        SamplingDefaults(top_p=2)


def test_changes_are_saved(folder, tmp_path):
    model = load(write(folder, QWEN))
    model.sampling_defaults = SamplingDefaults(temperature=0.9, min_p=0.05)
    model.save_pretrained(tmp_path / "a")
    expected = {"do_sample": True, "temperature": 0.9, "min_p": 0.05, "eos_token_id": [3, 4], "pad_token_id": 3}
    assert read(tmp_path / "a") == expected and load(tmp_path / "a").sampling_defaults == model.sampling_defaults
    model.sampling_defaults = SamplingDefaults(temperature=0.0, top_p=0.9)  # transformers refuses a temperature of 0
    model.save_pretrained(tmp_path / "b")
    assert read(tmp_path / "b")["do_sample"] is False and "temperature" not in read(tmp_path / "b")
    assert load(tmp_path / "b").sampling_defaults == model.sampling_defaults
    model.sampling_defaults = SamplingDefaults()
    model.save_pretrained(tmp_path / "c")
    assert read(tmp_path / "c") == {"eos_token_id": [3, 4], "pad_token_id": 3}
    assert load(tmp_path / "c").sampling_defaults is None
    new = HybridLM(preset("tiny", "GA", vocab_size=60))
    new.sampling_defaults = NAMED
    new.save_pretrained(tmp_path / "d")
    assert load(tmp_path / "d").sampling_defaults == NAMED


# What generate does with them


def rows(model, **options):
    return generate(model, [[1, 2, 3]], 12, stop=(), **options).run()


def test_generate_uses_them(folder):
    plain = load(folder)
    model = load(write(folder, QWEN))
    assert rows(model, seed=5) == rows(plain, seed=5, temperature=0.6, top_k=20, top_p=0.95) != rows(plain, seed=5)
    assert rows(model, seed=5, temperature=2.0) == rows(plain, seed=5, temperature=2.0, top_k=20, top_p=0.95)
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert rows(model, seed=5, **neutral) == rows(plain, seed=5)
    greedy = load(write(folder, {"do_sample": False, "temperature": 0.6}))
    assert rows(greedy, seed=5) == rows(greedy, seed=6) == rows(plain, temperature=0.0)
    assert model.generate([[1, 2, 3]], 12, stop=(), seed=5).run() == rows(model, seed=5)


def test_generate_is_a_method_of_the_model(folder):
    model = load(folder)
    made = model.generate([[1, 2, 3], [4, 5]], 6, temperature=0.8, top_p=0.9, seed=[0, 1])
    other = generate(model, [[1, 2, 3], [4, 5]], 6, temperature=0.8, top_p=0.9, seed=[0, 1])
    assert [x.tolist() for x in made] == [x.tolist() for x in other]
    ids, mask = torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    padded = model.generate(ids, 4, top_k=5, min_p=0.01, repetition_penalty=1.2, stop=(), attention_mask=mask)
    whole = model.generate([[1, 2], [3, 4, 5]], 4, top_k=5, min_p=0.01, repetition_penalty=1.2, stop=())
    assert padded.run() == whole.run()
    more = model.generate(whole.last[:, None], 3, stop=(), state=whole.state)
    assert [len(row) for row in more.run()] == [3, 3]


def test_given_options_win_and_a_checkpoint_replaces_all_others():
    assert SamplingFlags().resolve(None, OWN) == OWN
    assert SamplingFlags({"top_p": 0.5}, 7).resolve(None, OWN) == Sampling(temperature=0.8, top_p=0.5, seed=7)
    assert SamplingFlags().resolve(SamplingDefaults(), OWN) == OWN
    assert SamplingFlags().resolve(SamplingDefaults(temperature=0.6), OWN) == Sampling(temperature=0.6)  # top_p: 1
    given = SamplingFlags({"top_k": 0, "temperature": None})
    assert given.resolve(NAMED, OWN) == Sampling(temperature=0.6, top_p=0.95)
    assert given.used(NAMED) == "temperature 0.6, top_p 0.95" and given.used(None) == ""
    off = SamplingFlags(source="none")
    assert off.resolve(NAMED, OWN) == OWN and off.used(NAMED) == "" and not off.reads
    with pytest.raises(ValueError, match="--sampling-defaults must be checkpoint or none, got 'non'; did you mean 'no"):
        SamplingFlags(source="non")
    with pytest.raises(ValueError, match="top_p must be above 0"):
        SamplingFlags({"top_p": 0})

"""save_pretrained keeps the tokenizer and the end tokens that a model came with."""

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch

from lineate.models import HybridLM, preset
from lineate.models.files.safetensors import CheckpointError

FILES = {
    "tokenizer.json": b'{"version": "1.0",\n  "model": {}}',
    "tokenizer_config.json": b'{"eos_token": "x"}\r\n',
    "special_tokens_map.json": b"{}",
    "chat_template.jinja": "{{ messages }} \u4e2d".encode(),
    "tiktoken.model": b"AA== 0\n",
    "merges.txt": b"a b\n",
    "additional_chat_templates/tool_use.jinja": b"tools",
    "generation_config.json": b'{"eos_token_id": [7, 9],  "temperature": 0.6}',
}


def tiny(pattern, **changes):
    return replace(preset("tiny", pattern, vocab_size=20), **changes)


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a model with a tokenizer."""
    torch.manual_seed(0)
    place = tmp_path / "first"
    HybridLM(tiny("GA", eos_token_ids=(5,))).save_pretrained(place)
    for name, data in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(data)
    (place / "modeling_x.py").write_text("raise SystemExit")
    return place


def load(folder):
    return HybridLM.from_pretrained(folder, progress=False)


def contents(folder):
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(x.relative_to(folder)): x.read_bytes() for x in files if not x.name.startswith(("model", "config"))}


def test_files_are_copied_byte_for_byte(folder, tmp_path):
    model = load(folder)
    assert model.end_tokens == {5, 7, 9}
    for make, place in ((lambda: model, "a"), (lambda: copy.deepcopy(model), "b"), (lambda: load(tmp_path / "b"), "c")):
        make().save_pretrained(tmp_path / place)
        assert contents(tmp_path / place) == FILES
        again = load(tmp_path / place)
        assert again.end_tokens == {5, 7, 9}
        assert all(torch.equal(x, y) for x, y in zip(again.parameters(), model.parameters(), strict=True))
    model.save_pretrained(folder)  # over what it was loaded from
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES


def test_a_new_model_has_no_end_tokens_and_writes_no_file(tmp_path):
    model = HybridLM(tiny("G"))
    assert model.end_tokens == frozenset()
    (tmp_path / "tokenizer.json").write_text("kept")
    model.save_pretrained(tmp_path)
    assert contents(tmp_path) == {"tokenizer.json": b"kept"}


def test_end_tokens_are_written_for_others(tmp_path):
    model = HybridLM(tiny("G", eos_token_ids=(3, 4), bos_token_id=1))
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written == {"bos_token_id": 1, "eos_token_id": [3, 4]} and load(tmp_path).end_tokens == {3, 4}


@pytest.mark.parametrize("text", ['{"eos_token_id": 9}', "{", '{"eos_token_id": "x"}'])
def test_end_tokens_of_a_model_that_was_there_before_are_replaced(tmp_path, text):
    for ends in ((), (3,)):
        (tmp_path / "generation_config.json").write_text(text)
        HybridLM(tiny("G", eos_token_ids=ends)).save_pretrained(tmp_path)
        assert load(tmp_path).end_tokens == set(ends)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3, "top_p": 0.5}')
    HybridLM(tiny("G", eos_token_ids=(3,))).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": 3, "top_p": 0.5}


def test_the_weights_are_saved_even_if_the_tokenizer_is_gone(folder, tmp_path):
    model = load(folder)
    (folder / "tokenizer.json").unlink()
    (tmp_path / "secret").write_text("secret")
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.warns(UserWarning, match=r"whose files cannot be read .*link to a file outside.*copy it there"):
        model.save_pretrained(tmp_path / "a")
    shutil.rmtree(folder)
    with pytest.warns(UserWarning, match="the model was loaded from .*first, which is gone: its tokenizer is not in"):
        model.save_pretrained(tmp_path / "b")
    for place in ("a", "b"):
        assert contents(tmp_path / place).keys() == {"generation_config.json"}
        assert load(tmp_path / place).end_tokens == {5, 7, 9}


def test_a_wrong_generation_config_is_named(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": {"a": 1}}')
    with pytest.raises(CheckpointError, match=r"eos_token_id of generation_config\.json"):
        load(folder)

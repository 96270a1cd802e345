"""The tokenizer inside a GGUF file encodes as the one it was converted from; commands take the file alone."""

import json
import shutil
import warnings

import pytest
import torch
from typer.testing import CliRunner

from lineate.cli import build_app
from lineate.models import HybridLM
from lineate.text import has_tokenizer, load_tokenizer
from tests.support.families import build

pytest.importorskip("gguf")
pytest.importorskip("transformers")
from tests.support import gguf_files, published

TEXTS = [
    "Hello, world! It's 2026.",
    "na\u00efve caf\u00e9 nai\u0308ve \u4e2d\u6587 \U0001f600\n\n  two  spaces\t",
    "<|im_start|>user\nwho?<|im_end|>\n<think>\n</think>",
    "",
]


def keys_of(folder, pre: str = "qwen2") -> dict[str, object]:
    """Return the keys that the converter writes for the tokenizer of a folder."""
    value = json.loads((folder / "tokenizer.json").read_text())
    ids = {**value["model"]["vocab"], **{x["content"]: x["id"] for x in value["added_tokens"]}}
    special = {x["content"]: x["special"] for x in value["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    assert [ids[token] for token in tokens] == list(range(len(tokens)))
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, "[PAD]"],
        "token_type": [{None: 1, True: 3, False: 4}[special.get(token)] for token in tokens] + [5],
        "merges": [" ".join(pair) if isinstance(pair, list) else pair for pair in value["model"]["merges"]],
        "eos_token_id": ids["<|im_end|>"],
        "eot_token_id": ids["<|im_end|>"],
        "padding_token_id": ids["<|endoftext|>"],
        "add_bos_token": False,
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the folder of a model with a tokenizer, and a GGUF file of both in a folder of its own."""
    folder = tmp_path_factory.mktemp("published")
    published.make_published("bytes", folder)
    keys = keys_of(folder)
    build("qwen3_5", vocab_size=len(keys["tokens"])).save_pretrained(folder)
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return folder, gguf_files.write(file, folder, tokens=keys, template=published.CHAT)


def test_it_encodes_decodes_and_renders_as_the_folders(made):
    folder, file = made
    ours, theirs = load_tokenizer(file), load_tokenizer(folder)
    assert has_tokenizer(file) and has_tokenizer(file.parent)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode_rendered(text) == theirs.encode_rendered(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.end == theirs.end and ours.ends == theirs.ends and ours.start == theirs.start
    assert ours.special_texts == theirs.special_texts and ours.vocab_size == theirs.vocab_size
    messages = [{"role": "user", "content": "who?"}]
    assert ours.encode_chat(messages) == theirs.encode_chat(messages)


def test_commands_take_the_file_alone(made):
    _, file = made
    found = CliRunner().invoke(build_app(), ["generate", str(file), "--prompt", "Hello", "--tokens", "4"])
    assert found.exit_code == 0, found.output
    found = CliRunner().invoke(build_app(), ["inspect", str(file)])
    assert found.exit_code == 0 and "qwen3_5" in found.output and "GGGAG" in found.output, found.output
    assert "F32" in found.output and "would not load" not in found.output


def test_it_is_kept_when_the_model_is_saved(made, tmp_path):
    folder, file = made
    model = HybridLM.from_pretrained(file, progress=False)
    model.save_pretrained(tmp_path / "saved")
    ours, theirs = load_tokenizer(tmp_path / "saved"), load_tokenizer(folder)
    assert all(ours.encode(text) == theirs.encode(text) for text in TEXTS)
    again = HybridLM.from_pretrained(tmp_path / "saved", progress=False)
    assert again.end_tokens == model.end_tokens == {theirs.end}
    assert all(torch.equal(x, y) for x, y in zip(again.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("change", [{"pre": "another"}, {"model": "llama"}, {"pre": None}])
def test_one_of_another_kind_is_read_from_beside(change, made, tmp_path):
    folder, _ = made
    keys = {key: value for key, value in (keys_of(folder) | change).items() if value is not None}
    file = gguf_files.write(tmp_path / "model.gguf", folder, tokens=keys)
    assert not has_tokenizer(file)
    with pytest.raises(ValueError, match=r"model\.gguf: tokenizer\.ggml\.model must be gpt2 and .*next to the file"):
        load_tokenizer(file)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        HybridLM.from_pretrained(file, progress=False).save_pretrained(tmp_path / "saved")
    assert any("its tokenizer is not in" in str(x.message) for x in heard)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    assert has_tokenizer(file)
    assert all(load_tokenizer(file).encode(text) == load_tokenizer(folder).encode(text) for text in TEXTS)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"merges": ["a b c"]}, r"merges must have pairs of tokens, got 'a b c'"),
        ({"token_type": [1, 1]}, r"tokens and token_type must be equally many, different tokens, got \d+, of"),
        ({"tokens": [1, 2]}, r"tokens must be an array of str, got"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, r"got 2, of which 1 are different, and 2"),
    ],
)
def test_damaged_ones_are_named(change, match, made, tmp_path):
    folder, _ = made
    file = gguf_files.write(tmp_path / "model.gguf", folder, tokens=keys_of(folder) | change)
    with pytest.raises(ValueError, match=match):
        load_tokenizer(file)

"""Tokenizers of published checkpoints encode and decode as transformers does, and run nothing of their folders."""

import json
import os
import pickle
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from lineate.models.files.safetensors import CheckpointError
from lineate.text import PublishedTokenizer, has_tokenizer, load_tokenizer
from tests.support.published import CHAT, KINDS, SPECIAL, make_published, write_ranks

WORDS = st.lists(
    st.one_of(
        st.sampled_from([*SPECIAL, "<think>", "<s>", " ", "\n", "the ", "12 345", "\u4e2d", "\U0001f600"]), st.text()
    ),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return, for each kind, transformers' tokenizer and ours."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind.replace(" ", "-"))
        found[kind] = (make_published(kind, folder), load_tokenizer(folder), folder)
    return found


@pytest.mark.cover
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=WORDS)
@example(text="")
@example(text="a<|im_end|>b <|im_end|> c<|im_")
def test_texts_are_encoded_and_decoded_as_by_transformers(made, kind, text):
    theirs, ours, _ = made[kind]
    ids = theirs.encode(text, add_special_tokens=False)
    assert ours.encode_rendered(text) == ids
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert [*ours.start, *ids] == theirs.encode(text)
    if kind.startswith("bytes") or not text.startswith((" ", "\u2581")):
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.encode_many([text, "x"])[0].tolist() == ours.encode(text)


@pytest.mark.cover
@pytest.mark.parametrize("kind", ["bytes", "bytes with bos"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ids_are_decoded_as_by_transformers(made, kind, data):
    theirs, ours, _ = made[kind]
    ids = data.draw(st.lists(st.integers(0, len(theirs) - 1), max_size=30))
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, keep_special=True) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.cover
@settings(max_examples=100, deadline=None)
@given(text=WORDS)
def test_no_text_makes_a_special_token(made, text):
    for _, ours, _ in made.values():
        special = {ours.encode_rendered(x)[-1] for x in SPECIAL}
        assert not special & set(ours.encode(text))


@pytest.mark.parametrize("kind", KINDS)
def test_its_facts(made, kind):
    theirs, ours, folder = made[kind]
    end = theirs.convert_tokens_to_ids("<|im_end|>")
    assert (ours.end, ours.ends) == (end, {end}) and ours.vocab_size == len(theirs)
    assert ours.start == ((theirs.convert_tokens_to_ids("<s>"),) if kind == "bytes with bos" else ())
    assert [ours.token_bytes(end), ours.special_text(end), ours.token_bytes(10**6)] == [b"", "<|im_end|>", b""]
    thought = theirs.convert_tokens_to_ids("<think>")
    assert ours.token_bytes(thought) == b"<think>" and ours.special_text(thought) is None
    assert ours.chat.source == CHAT and has_tokenizer(folder)
    with pytest.raises(ValueError, match="ids must be in 0"):
        ours.token_bytes(-1)


def test_single_bytes_are_exact(made):
    _, ours, _ = made["bytes"]
    text = "na\u00efve \U0001f600 \u4e2d\n"
    assert b"".join(map(ours.token_bytes, ours.encode(text))) == text.encode()
    assert {ours.token_bytes(i) for i in range(ours.vocab_size)} >= {bytes((i,)) for i in range(256)}
    _, pieces, _ = made["pieces with bytes"]
    assert b"".join(map(pieces.token_bytes, pieces.encode("a \U0001f600"))) == " a \U0001f600".encode()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_saved_byte_for_byte_and_pickled(made, kind, tmp_path):
    _, ours, folder = made[kind]
    ours.save(tmp_path / "copy")
    names = sorted(x.name for x in folder.iterdir())
    assert sorted(x.name for x in (tmp_path / "copy").iterdir()) == names
    assert all((tmp_path / "copy" / name).read_bytes() == (folder / name).read_bytes() for name in names)
    for back in (load_tokenizer(tmp_path / "copy"), pickle.loads(pickle.dumps(ours))):
        assert (back.identity, back.ends, back.start) == (ours.identity, ours.ends, ours.start)
        assert np.array_equal(back.encode("the <|im_end|>"), ours.encode("the <|im_end|>"))
    assert ours.identity != made["bytes" if kind == "pieces" else "pieces"][1].identity


def test_stop_tokens_of_every_file(tmp_path):
    theirs = make_published("bytes", tmp_path, eos_token="<|endoftext|>")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 7, "text_config": {"eos_token_id": 8}}')
    named = {theirs.convert_tokens_to_ids(x) for x in ("<|endoftext|>", "<|im_end|>")}
    assert load_tokenizer(tmp_path).ends == {5, 6, 7, 8} | named
    assert load_tokenizer(tmp_path).end == theirs.eos_token_id
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert load_tokenizer(tmp_path).ends == {9, 7, 8} | named
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id must be an id or a list"):
        load_tokenizer(tmp_path)


def test_added_tokens_of_other_files(tmp_path):
    """tokenizer_config.json and special_tokens_map.json may have tokens that tokenizer.json lacks."""
    make_published("bytes", tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    size = load_tokenizer(tmp_path).vocab_size
    more = {str(size): {"content": "<new>", "special": True}, str(size + 1): {"content": "<plain>", "special": False}}
    config |= {"added_tokens_decoder": more, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_start|>"}}')
    ours = load_tokenizer(tmp_path)
    assert ours.encode_rendered("<new><plain>") == [size, size + 1] and ours.vocab_size == size + 2
    assert ours.special_text(size) == "<new>" and ours.special_text(size + 1) is None
    assert ours.special_text(ours.end) == "<|im_start|>"
    config["added_tokens_decoder"] = {str(size + 5): {"content": "<far>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"must have the next free id, {size}, got {size + 5}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("value, start", [(True, ("<|im_start|>",)), (False, ())])
def test_add_bos_token_decides(tmp_path, value, start):
    theirs = make_published("bytes with bos", tmp_path, add_bos_token=value, bos_token="<s>")
    ours = load_tokenizer(tmp_path)
    assert [*ours.start, *ours.encode("the")] == theirs.encode("the") and bool(ours.start) == value


def reference_ranks(ranks, piece):
    """Join neighbours of the lowest rank, the first of them, until no two neighbours are a token."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[n : n + 1] for n in range(len(piece))]
    while True:
        joined = [(ranks[a + b], n) for n, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not joined:
            return [ranks[part] for part in parts]
        n = min(joined)[1]
        parts[n : n + 2] = [parts[n] + parts[n + 1]]


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """Return a tiktoken model in Kimi's form, and its ranks."""
    tokens = [bytes((byte,)) for byte in range(256)]
    tokens += [b"th", b"he", b"the", b" t", b" the", b"in", b"ing", b"er", b"\xe4\xb8", b"\xe4\xb8\xad", b"ab", b"bc"]
    tokens += [b"abc", b"12", b"123", b"  ", b"\n\n", b"'s", b"\xf0\x9f", b"\xf0\x9f\x98\x80", b"H", b"He"][:20]
    tokens = list(dict.fromkeys(tokens))
    special = [(0, "[BOS]"), (1, "[EOS]"), (2, "<|im_end|>")]
    folder = write_ranks(tmp_path_factory.mktemp("kimi"), tokens, special)
    return load_tokenizer(folder), {token: rank for rank, token in enumerate(tokens)}, folder


@settings(max_examples=150, deadline=None)
@given(word=st.text("abcthein", min_size=1, max_size=14))
@example(word="abcbc")
@example(word="ththe")
def test_ranks_are_joined_as_tiktoken_joins_them(kimi, word):
    ours, ranks, _ = kimi
    assert ours.encode(word) == reference_ranks(ranks, word.encode())


def test_a_tiktoken_model_is_read_without_its_code(kimi):
    ours, ranks, folder = kimi
    size = len(ranks)
    assert ours.vocab_size == size + 256 and ours.end == size + 1 and ours.ends == {size + 1}
    for text, pieces in {
        "the 1234's": ["the", " ", "123", "4", "'s"],
        "The\u4e2d\u6587the": ["The", "\u4e2d\u6587", "the"],
        "in's  \n\n x\U0001f600": ["in's", "  \n\n", " x", "\U0001f600"],
        "camelCase": ["camel", "Case"],
    }.items():
        assert ours.encode(text) == [i for piece in pieces for i in reference_ranks(ranks, piece.encode())]
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode_rendered("[BOS]the[EOS]") == [size, ranks[b"the"], size + 1]
    assert ours.special_text(size + 9) == f"<|reserved_token_{size + 9}|>"
    assert "tokenization_kimi.py" not in os.listdir(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"auto_map": {"AutoTokenizer": "tokenization_other.X"}},
            "to name tokenization_kimi, got .*write tokenizer.json",
        ),
        (b"!!! 0\n", "line 1 must be a new token in base64 and its rank, 0, got"),
        (b"AA== 0\nAA== 1\n", "line 2 must be a new token"),
        (b"AA== 0\n", "a token for each of the 256 bytes, got none for 1"),
    ],
)
def test_ranks_that_cannot_be_read(kimi, tmp_path, change, message):
    folder = write_ranks(tmp_path / "x", [bytes((byte,)) for byte in range(256)])
    if isinstance(change, bytes):
        (folder / "tiktoken.model").write_bytes(change)
    else:
        (folder / "tokenizer_config.json").write_text(json.dumps(change))
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(folder)


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer \(tokenizer_kind\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x00")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.model alone cannot be read: write tokenizer\.json once"):
        load_tokenizer(tmp_path)
    make_published("bytes", tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    for decoder in (None, {"type": "WordPiece", "prefix": "##", "cleanup": True}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole | {"decoder": decoder}))
        with pytest.raises(
            CheckpointError, match=r"tokenizer\.json: expected a decoder of bytes \(ByteLevel\) or of pieces"
        ):
            load_tokenizer(tmp_path)
    for broken in ("{}", "[" * 10000, "\x00"):
        (tmp_path / "tokenizer.json").write_text(broken)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected one of the tokenizers library"):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        kept = (tmp_path / name).read_bytes() if (tmp_path / name).is_file() else b"{}"
        for broken in ("[]", "{", '{"a": 1, "a": 2}', "[" * 99999):
            (tmp_path / name).write_text(broken)
            with pytest.raises(CheckpointError, match=f"{name}: expected"):
                load_tokenizer(tmp_path)
        (tmp_path / name).write_bytes(kept)
    assert load_tokenizer(tmp_path).encode("x")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        ImportError, match=r"needs tokenizers, which is not installed; run pip install 'lineate\[serve\]'"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
)
def test_links_do_not_leave_the_folder(tmp_path, name):
    folder = tmp_path / "model"
    make_published("bytes", folder)
    outside = tmp_path / "outside"
    outside.write_bytes((folder / name).read_bytes() if (folder / name).is_file() else b"{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"got a link to a file outside of it; copy that file into"):
        load_tokenizer(folder)
    (folder / name).unlink()
    (folder / "kept").write_bytes(outside.read_bytes())
    (folder / name).symlink_to("kept")
    assert load_tokenizer(folder).encode("x")


def test_links_of_the_hubs_cache_are_followed(tmp_path):
    folder = tmp_path / "models--a--b" / "snapshots" / "0123"
    make_published("bytes", folder)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for file in list(folder.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(f"../../blobs/{file.name}")
    assert PublishedTokenizer.open(folder).encode("x")

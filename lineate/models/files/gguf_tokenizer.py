"""The tokenizer inside a GGUF file, converted to the files of published checkpoints: tokenizer.json and related ones.

tokenizer.ggml.model     "gpt2": byte-level BPE
tokenizer.ggml.pre       the splitting of texts into pieces; a name, whose regular expression is not in the file
tokenizer.ggml.tokens    the tokens; merges: pairs of them, joined by a space; token_type: which are special
tokenizer.chat_template  and names of tokens with a role: bos_token_id, eos_token_id, ...
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lineate.models.fields import show
from lineate.models.files.companions import GENERATION, read_companions
from lineate.models.files.gguf_header import Header, LongArray, read_header
from lineate.models.files.pieces import KIMI, QWEN2, QWEN35
from lineate.models.files.safetensors import CheckpointError

PREFIX, TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
PIECES: Mapping[str, tuple[str, str | None]] = {
    "qwen2": (QWEN2, "NFC"),
    "qwen35": (QWEN35, "NFC"),
    "kimi-k2": (KIMI, None),
}
"""The regular expression and the normal form of each value of tokenizer.ggml.pre."""
VOCABULARIES = ("tokenizer_kind.json", "tokenizer.json", "tokenizer.model", "tiktoken.model")
"""Files one of which every tokenizer has."""
NORMAL, CONTROL, OWN, UNUSED = 1, 3, 4, 5
"""Types of tokens: ordinary; special; found as a whole in a text; without a meaning."""
ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


class UnknownTokenizer(CheckpointError):
    """The tokenizer of the file is of an unsupported kind."""


def companions_of(source: Path) -> dict[str, bytes]:
    """Return the files of the tokenizer of a checkpoint, which is a folder or a GGUF file.

    If a GGUF file has no supported one, they are those next to it; raise UnknownTokenizer if there are none either.
    """
    if source.is_dir():
        return read_companions(source)
    try:
        return gguf_companions(read_header(source))
    except UnknownTokenizer:
        beside = read_companions(source.parent)
        if not beside.keys() & set(VOCABULARIES):
            raise
        return beside


def has_tokens(header: Header) -> bool:
    """Whether a file has a tokenizer of a kind that can be read."""
    kind, pre = (header.metadata.get(f"{PREFIX}{key}") for key in ("model", "pre"))
    return kind == "gpt2" and isinstance(pre, str) and pre in PIECES


def gguf_companions(header: Header) -> dict[str, bytes]:
    """Return the contents of tokenizer.json, tokenizer_config.json and generation_config.json.

    Raise UnknownTokenizer if the file has no tokenizer, or one of another kind.
    """
    kind, pre = (header.metadata.get(f"{PREFIX}{key}") for key in ("model", "pre"))
    if not has_tokens(header) or not isinstance(pre, str):
        raise UnknownTokenizer(
            f"{header.file}: {PREFIX}model must be gpt2 and {PREFIX}pre one of {', '.join(PIECES)}, got {show(kind)} "
            f"and {show(pre)}; put the model's tokenizer.json next to the file"
        )
    tokens, merges, types = (_texts(header, key) for key in ("tokens", "merges", "token_type"))
    if not types:
        types = [NORMAL] * len(tokens)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens) or not tokens:
        raise CheckpointError(
            f"{header.file}: {PREFIX}tokens and token_type must be equally many, different tokens, got {len(tokens)}, "
            f"of which {len(set(tokens))} are different, and {len(types)}"
        )
    pairs = [merge.split(" ") for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        wrong = next(merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2)
        raise CheckpointError(f"{header.file}: {PREFIX}merges must have pairs of tokens, got {show(wrong)}")
    names = {role: tokens[i] for key, role in ROLES.items() if (i := _token(header, key, len(tokens))) is not None}
    config: dict[str, Any] = {**names, "add_bos_token": header.metadata.get(f"{PREFIX}add_bos_token") is True}
    templates = _templates(header)
    if templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    ends = [i for key in ("eos", "eot") if (i := _token(header, key, len(tokens))) is not None]
    files: dict[str, Any] = {
        "tokenizer.json": _tokenizer(tokens, types, pairs, *PIECES[pre]),
        "tokenizer_config.json": config,
    }
    if ends:
        files[GENERATION] = {"eos_token_id": list(dict.fromkeys(ends))}
    return {name: json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") for name, value in files.items()}


def _texts(header: Header, key: str) -> list[Any]:
    """Return an array of the tokenizer; empty if there is none."""
    value = header.metadata.get(f"{PREFIX}{key}", [])
    value = value.read() if isinstance(value, LongArray) else value
    wanted = int if key == "token_type" else str
    if not isinstance(value, list) or not all(isinstance(x, wanted) for x in value):
        raise CheckpointError(f"{header.file}: {PREFIX}{key} must be an array of {wanted.__name__}, got {show(value)}")
    return value


def _token(header: Header, key: str, count: int) -> int | None:
    value = header.metadata.get(f"{PREFIX}{key}_token_id")
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count else None


def _templates(header: Header) -> dict[str, str]:
    found = {}
    for key, value in header.metadata.items():
        if isinstance(value, str) and (key == TEMPLATE or key.startswith(f"{TEMPLATE}.")):
            found[key.removeprefix(TEMPLATE).removeprefix(".") or "default"] = value
    return found if "default" in found else {}


def _tokenizer(
    tokens: list[str], types: list[int], merges: list[list[str]], pieces: str, normal_form: str | None
) -> dict[str, Any]:
    """Return the contents of tokenizer.json."""
    whole = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": token, **flags, "special": kind == CONTROL}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, OWN)
    ]
    vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
    split = {"type": "Split", "pattern": {"Regex": pieces}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None if normal_form is None else {"type": normal_form},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", **whole}]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **whole},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }

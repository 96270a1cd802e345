"""Texts, and stores and views of their tokens."""

import json
from pathlib import Path

import numpy as np

from lineate.training import tokens
from lineate.training.sources import documents
from lineate.training.tokenizer import make_tokenizer
from lineate.training.tokens import TokenStore, TokenView

TEXTS = ["hello", "", "the quick brown fox", "\u00e9\u4e2d\U0001f600\x00", "a\r\nb\n\n", "<|endoftext|>", "\ufeffx"]
END = 256


def write_lines(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def make_store(folder, texts, name="bytes"):
    """A store of exactly these texts, empty ones too (which the sources leave out)."""
    made = make_tokenizer(name, texts)
    path = Path(folder) / "store.tokens"
    tokens._make(path, "key", made, iter(texts))
    return TokenStore._open(path, "key"), made


def view_of(lengths):
    """Documents of these lengths whose tokens are all different."""
    lengths = np.array(lengths, np.int64)
    stops = np.cumsum(lengths)
    return TokenView("train", np.arange(stops[-1], dtype=np.uint32), stops - lengths, lengths)


# Tokenizers


def bpe_texts():
    return [*documents([json.__path__[0]]), "a\n\n \n\n\n " * 300]  # runs of newlines become tokens

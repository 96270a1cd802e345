"""Documents, and stores and views of their tokens."""

import json
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np

from lineate.text.tokenizer import make_tokenizer
from lineate.training import tokens
from lineate.training.sources import documents
from lineate.training.tokens import TokenStore, TokenView

TEXTS = ["hello", "", "the quick brown fox", "\u00e9\u4e2d\U0001f600\x00", "a\r\nb\n\n", "<|endoftext|>", "\ufeffx"]
END = 256


def write_lines(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def make_store(folder, texts, made=None):
    """Make a new store of exactly these documents, even empty ones (which sources leave out).

    Return its tokenizer too.
    """
    made = make_tokenizer("bytes", texts) if made is None else made
    own = Path(tempfile.mkdtemp(dir=folder))
    (own / "source.txt").write_text("not read")
    with patch.object(tokens, "documents", lambda data, report: iter(texts)):
        return TokenStore.open_or_make([str(own / "source.txt")], made, own / "cache"), made


def view_of(lengths):
    """Return documents of these lengths whose tokens are all different."""
    lengths = np.array(lengths, np.int64)
    stops = np.cumsum(lengths)
    return TokenView("train", np.arange(stops[-1], dtype=np.uint32), stops - lengths, lengths)


# Tokenizers


def bpe_texts():
    return [*documents([json.__path__[0]]), "a\n\n \n\n\n " * 300]  # runs of newlines become tokens

"""Fixtures: a trained tokenizer."""

import pytest
from token_stores import bpe_texts

from lineate.text import make_tokenizer


@pytest.fixture(scope="module")
def bpe():
    pytest.importorskip("tokenizers")
    return make_tokenizer("bpe:400", bpe_texts())

"""Fixtures: a trained tokenizer."""

import pytest

from lineate.text import make_tokenizer
from tests.support.token_stores import bpe_texts


@pytest.fixture(scope="module")
def bpe():
    pytest.importorskip("tokenizers")
    return make_tokenizer("bpe:400", bpe_texts())

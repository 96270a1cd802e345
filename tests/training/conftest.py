"""Fixtures: a trained tokenizer, a file of texts, and short samples."""

import random

import pytest

from lineate.text.tokenizer import make_tokenizer
from tests.support.runs import short_samples
from tests.support.token_stores import bpe_texts


@pytest.fixture(scope="module")
def bpe():
    pytest.importorskip("tokenizers")
    return make_tokenizer("bpe:400", bpe_texts())


@pytest.fixture(scope="module", autouse=True)
def quick_looks():
    with short_samples():
        yield


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    rng = random.Random(0)
    for i in range(20):
        (folder / f"{i}.txt").write_text("".join(rng.choices("abcdef \n", k=rng.randint(1, 300))))
    return [str(folder)]

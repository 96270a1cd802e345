"""Tokens on the axes of pictures show their texts, with every character visible and none read as a formula."""

import json
from io import BytesIO
from xml.etree import ElementTree

import pytest

from tests.support.marks import slow_but

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from matplotlib.text import Text

from lineate import figures
from lineate.explore.pictures import PictureOptions, find
from lineate.explore.words import LONGEST_LABEL, cut, visible
from lineate.models import HybridLM, preset

HOSTILE = "a_b $x_1^{2$ \\frac{ <b>&amp;\t\x1b[31m\n\u4e2d"
"""Unfinished formulas, markup, an escape sequence, blanks, and a character that few fonts have."""


def folder_with(tokenizer, folder, vocab_size):
    """Write a model whose tokenizer is "bytes", "bpe" (ours), "published" (only tokenizer.json) or none."""
    if tokenizer is not None:
        from lineate.text.tokenizer import make_tokenizer

        name = "bytes" if tokenizer == "bytes" else f"bpe:{vocab_size}"
        make_tokenizer(name, ["internationalization of words and words " * 9]).save(folder)
        if tokenizer == "published":
            (folder / "tokenizer_kind.json").unlink()
    HybridLM(preset("tiny", "KA", vocab_size=vocab_size)).save_pretrained(folder)
    return folder


def ticks_of(figure):
    """Return the labels of the x axis, and of the y axis, of every panel that has any."""
    figure.draw_without_rendering()
    panels = [tuple([x.get_text() for x in axis.get_ticklabels()] for axis in (a.xaxis, a.yaxis)) for a in figure.axes]
    return [panel for panel in panels if panel[0]]


def draw(name, **options):
    numbers = json.loads(json.dumps(find(name).compute(PictureOptions(**options))))
    with figures.styled():
        return find(name).draw(numbers)


@pytest.mark.parametrize(
    ("word", "seen"),
    [
        ("mean", "mean"),
        (" the", "\u2423the"),
        ("\n\n", "\u21b5\u21b5"),
        ("\t\r\x00\x1b\x7f\x9b", "\u21e5\\r\\x00\\x1b\\x7f\\x9b"),
        ("$a_b$ \\n", "$a_b$\u2423\\n"),
        ("<i>&", "<i>&"),
        ("\xa0\u200b\u202e\ud800", "\\xa0\\u200b\\u202e\\ud800"),
        ("\xe9\u03b1\u4e2d", "\xe9\u03b1\u4e2d"),
    ],
)
def test_every_character_is_seen(word, seen):
    assert visible(word) == seen


def test_what_the_font_lacks_is_spelt_and_long_words_are_cut():
    assert visible("a \u4e2d", {ord("a"), 0x2423}) == "a\u2423\\u4e2d"
    assert visible("\n\t", {ord("a")}) == "\\n\\t"
    assert cut("x" * LONGEST_LABEL) == "x" * LONGEST_LABEL and cut("x" * 99) == "x" * (LONGEST_LABEL - 2) + ".."


@pytest.mark.cover
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "published"])
def test_attention_labels_both_axes_with_the_texts_of_the_tokens(tmp_path, tokenizer):
    if tokenizer != "bytes":
        pytest.importorskip("tokenizers")
    folder = folder_with(tokenizer, tmp_path, 280)
    panels = ticks_of(draw("attention", model=str(folder), text="internationalization of"))
    assert len(panels) == 6
    for x, y in panels:
        assert x == y and x[-1] in ("of", "f", "\u2423of")
        whole = "".join(x)
        assert whole.startswith("int") and "\u2423of" in whole
        assert max(map(len, x)) <= LONGEST_LABEL and (tokenizer == "bytes") == (len(x) == 23)


@pytest.mark.cover
def test_without_a_tokenizer_ticks_are_positions(tmp_path):
    for x, y in ticks_of(draw("attention", model=str(folder_with(None, tmp_path, 32)), tokens=20)):
        assert x == y == ["1", "8", "16"]


@pytest.mark.cover
def test_many_tokens_have_labels_that_do_not_touch():
    text = "".join(chr(ord("a") + n % 26) for n in range(120))
    for x, _ in ticks_of(draw("attention", model="tiny", text=text, tokens=120)):
        assert 24 <= len(x) <= 60
        every = 120 // len(x)
        assert "".join(x) == text[::every]


@pytest.mark.cover
def test_the_state_labels_a_short_text_and_counts_a_long_one():
    short = ticks_of(draw("state", model="tiny", text="def mean(x):", tokens=12))
    assert list("def\u2423mean(x):") in [x for x, _ in short]
    long = ticks_of(draw("state", model="tiny", tokens=100))
    assert all(label.isdigit() for x, _ in long for label in x)


@pytest.mark.cover
@pytest.mark.filterwarnings("error")  # a glyph that the font lacks causes a warning
@pytest.mark.parametrize("name", slow_but(["attention", "state"], ["state"]))
def test_hostile_texts_are_drawn_as_they_are(name):
    figure, written = draw(name, model="tiny", text=HOSTILE, tokens=40), BytesIO()
    figure.savefig(written, format="svg")
    ElementTree.fromstring(written.getvalue())  # there is no character that XML forbids, and no markup from the tokens
    labels = [x for x in figure.findobj(Text) if x.get_text() in ("$", "_", "\\x1b", "&", "\u21e5")]
    assert len(labels) >= 5 and not any(x.get_parse_math() for x in labels)


@pytest.mark.cover
def test_numbers_of_an_earlier_version_are_still_drawn(tmp_path):
    numbers = find("attention").compute(PictureOptions(model="tiny", tokens=9))
    del numbers["model"]["words_are_text"]
    with figures.styled():
        ticks = ticks_of(find("attention").draw(numbers))
    assert ticks[0][0] == ["1", "8"]


def test_special_tokens_of_a_published_tokenizer_have_their_names(tmp_path):
    pytest.importorskip("tokenizers")
    folder = folder_with("published", tmp_path, 280)
    found = find("attention").compute(PictureOptions(model=str(folder), text="of<|endoftext|>of"))
    assert "<|endoftext|>" in found["model"]["words"]

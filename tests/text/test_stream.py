"""Text as it is made: whole characters only, nothing lost, and no part of a stop string."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lineate.text import Bytes, Detokenizer, StopStrings, load_tokenizer

STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


@pytest.fixture(scope="module")
def all_tokenizers(tmp_path_factory, bpe):
    pytest.importorskip("transformers")
    from tests.support.published import KINDS, make_published

    found = [Bytes(), bpe]
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind.replace(" ", "-"))
        make_published(kind, folder)
        found.append(load_tokenizer(folder))
    return found


def pushed(tokenizer, ids, **options):
    stream = Detokenizer(tokenizer, **options)
    return [*(stream.push(i) for i in ids), stream.finish()]


@pytest.mark.cover
@settings(max_examples=100, deadline=None)
@given(data=st.data(), keep=st.booleans())
def test_pushes_together_are_the_decoded_text(all_tokenizers, data, keep):
    """Random ids are mostly invalid UTF-8."""
    for tokenizer in all_tokenizers:
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
        assert "".join(pushed(tokenizer, ids, keep_special=keep)) == tokenizer.decode(ids, keep_special=keep)


@pytest.mark.cover
@settings(max_examples=100, deadline=None)
@given(text=st.text())
@example(text="\U0001f469\u200d\U0001f680 \u4e2d\u6587 na\u00efve")
@example(text="  two spaces")
def test_no_character_is_split(all_tokenizers, text):
    for tokenizer in all_tokenizers[:4]:
        ids = tokenizer.encode(text)
        parts = pushed(tokenizer, ids)
        whole = tokenizer.decode(ids)
        assert "".join(parts) == whole and parts[-1] == ""
        if "\ufffd" not in whole:
            assert not any("\ufffd" in part for part in parts)


def test_bytes_are_held_back_until_it_is_certain():
    cat = "\U0001f431".encode()
    assert pushed(Bytes(), cat) == ["", "", "", "\U0001f431", ""]
    assert pushed(Bytes(), [*cat[:3], 0x61]) == ["", "", "", "\ufffda", ""]
    assert pushed(Bytes(), [0xFF, 0x61]) == ["\ufffd", "a", ""]
    assert pushed(Bytes(), [0xE4, 0xB8]) == ["", "", "\ufffd"]
    assert pushed(Bytes(), [*cat[:2], 256, *cat[2:]]) == ["", "", "", "", "\U0001f431", ""]


def test_a_space_at_the_beginning_is_that_of_a_continued_text(all_tokenizers):
    for tokenizer in all_tokenizers[4:]:
        ids = tokenizer.encode("the memory")
        assert "".join(pushed(tokenizer, ids)) == "the memory"
        assert "".join(pushed(tokenizer, ids, after=ids)) == " the memory"
        assert "".join(pushed(tokenizer, ids, after=[*tokenizer.ends])) == "the memory"


def test_each_token_takes_the_same_time(bpe):
    """A token's bytes are asked for once, however long the text is."""
    asked = []

    class Counting(Bytes):
        def token_bytes(self, token):
            asked.append(token)
            return super().token_bytes(token)

    ids = list(b"a long text " * 50)
    pushed(Counting(), ids)
    assert asked == ids


# Stop strings


def cut(text, stops):
    """Return the text before the stop string that is complete first, and that string; the longest of several."""
    for n in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:n].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[: n - len(stop)], stop
    return text, None


@pytest.mark.cover
@settings(max_examples=250, deadline=None)
@given(parts=st.lists(st.text("abcd", max_size=6), max_size=12), stops=STOPS)
@example(parts=["aab", "aabaac"], stops=["aabaaa", "aac"])
def test_stop_strings_over_any_division(parts, stops):
    stream, shown, met = StopStrings(stops), "", None
    for n, part in enumerate(parts):
        text, met = stream.push(part)
        shown += text
        so_far = cut("".join(parts[: n + 1]), stops)
        assert met == so_far[1] and so_far[0].startswith(shown)
        if met is not None:
            break
        held = "".join(parts[: n + 1])[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)  # nothing is held back without need
    shown += stream.finish()
    assert (shown, met) == cut("".join(parts), stops)


def test_what_stops_stays_stopped():
    stream = StopStrings(["\n\nUser:"])
    assert stream.push("hello\n") == ("hello", None)
    assert stream.push("\nUse") == ("", None)
    assert stream.push("r: x") == ("", "\n\nUser:")
    assert stream.push("more") == ("", "\n\nUser:") and stream.finish() == ""
    stream = StopStrings([])
    assert stream.push("all") == ("all", None) and stream.finish() == ""
    with pytest.raises(ValueError, match="stop strings must have at least one character, got ''"):
        StopStrings(["a", ""])

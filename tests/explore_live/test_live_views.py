"""The views Model and Learning in a browser: read, step, look, change, exchange an optimiser, open a link, save."""

import re

import pytest
from PIL import Image

from lineate.text import Bytes
from tests.support.chat_page import REFUSED
from tests.support.explore_page import SIZES, untrained
from tests.support.marks import slow_but

pytestmark = pytest.mark.cover


def summary(page, *words):
    """Wait until the sentence above the pictures of the model has these words."""
    found = page.locator("#model-summary")
    for word in words:
        found = found.filter(has_text=word)
    found.wait_for()


def drag(page, name, value):
    """Set a slider as dragging does."""
    page.locator(f"#{name}").evaluate(
        """(x, value) => {
            x.value = value;
            x.dispatchEvent(new Event("input", { bubbles: true }));
            x.dispatchEvent(new Event("change", { bubbles: true }));
        }""",
        value,
    )


def titles(page, view="model"):
    return [text.split(":")[0] for text in page.locator(f"#{view} figure svg > title").all_text_contents()]


@pytest.mark.parametrize("size", slow_but(SIZES, ["wide"]))
def test_a_text_is_read_token_by_token(sized):
    page = sized
    page.click("#tab-model")
    summary(page, "layer 0, Kimi Delta Attention, head 0, after token 39 of 39", "Mean loss")
    lives = page.locator("#layer option").count() * [None]
    for layer in range(2):  # those that decay
        page.select_option("#layer", str(layer))
        summary(page, f"layer {layer},")
        texts = page.locator("#attention-head option").all_inner_texts()
        lives[layer] = [float(re.fullmatch(r"\d: half-life ([\d.]+) tokens", text)[1]) for text in texts]
    most = max(life for each in lives[:2] for life in each)
    layer = next(n for n in range(2) if most in lives[n])
    slowest = f"layer {layer}, head {lives[layer].index(most)} forgets slowest: its median half-life is"
    assert slowest in page.locator("#slowest").inner_text()
    page.select_option("#layer", "0")
    page.fill("#text", "aba")
    summary(page, "after token 3 of 3")
    summary(page, re.compile(r"highest [\d.]+ at token [23] \([ab]\)"))
    assert page.locator("#tokens button").all_inner_texts() == ["a", "b", "a"]
    assert page.locator("#token-after").is_disabled()
    page.click("#token-before")
    summary(page, "after token 2 of 3")
    page.get_by_role("button", name="Token 1: a").click()
    summary(page, "after token 1 of 3")
    page.click("#token-after")
    summary(page, "after token 2 of 3")
    drag(page, "token", 3)
    summary(page, "after token 3 of 3")
    assert page.locator("#next caption").inner_text() == "What may follow token 3 (a)"
    assert page.locator("#next tbody tr").count() == 8
    assert [name.partition(",")[0] for name in titles(page)] == [
        "Attention", "State S after token 3", "Gates at each token", "Norms of the state and of each write",
        "Loss of each token",
    ]  # fmt: skip
    page.select_option("#layer", "2")
    summary(page, "layer 2, softmax attention, head 0")
    assert titles(page)[1] == "Cache after token 3"
    page.select_option("#attention-head", "1")
    summary(page, "head 1")
    assert page.locator("#rule").is_disabled() and page.locator("#gate-decay").is_disabled()
    page.select_option("#layer", "3")
    summary(page, "layer 3", "see the view Learning")


@pytest.mark.parametrize("size", slow_but(SIZES, ["phone"]))
def test_a_change_is_seen_beside_the_model(sized):
    page = sized
    page.click("#tab-model")
    summary(page, "Mean loss")
    if page.viewport_size["width"] < 900:  # the pictures stand between the layer and its change
        page.get_by_role("button", name="Change this layer").click()
        assert 0 <= page.locator("#change-title").bounding_box()["y"] < 844 - 200
        assert page.evaluate("document.activeElement.id") == "rule"
    else:
        assert not page.locator("#to-change").is_visible()
    page.select_option("#rule", "linear_attention")
    summary(page, "with the changes")
    names = [name.partition(",")[0] for name in titles(page)]
    assert names[:4] == [
        "Attention of the model", "Attention with the changes", "State S of the model after token 39",
        "State S with the changes after token 39",
    ]  # fmt: skip
    assert page.locator("#next thead th").all_inner_texts() == [
        "Token",
        "Probability",
        "With the changes",
        "Difference",
    ]
    first = page.locator("#model-summary").inner_text()
    page.select_option("#layer", "1")
    summary(page, "layer 1, Gated DeltaNet", "with the changes")
    page.get_by_label("Forget nothing").check()
    page.locator("#changes", has_text="layer 0: linear attention; layer 1: decay gate open").wait_for()
    summary(page, "with the changes")
    page.click("#unchange")
    page.locator("#changes", has_text="Nothing is changed").wait_for()
    page.locator("#model-pictures figure").nth(5).wait_for(state="detached")
    assert not page.get_by_label("Forget nothing").is_checked()
    page.select_option("#layer", "0")
    summary(page, "layer 0")
    page.select_option("#rule", "linear_attention")
    summary(page, "with the changes")
    assert page.locator("#model-summary").inner_text() == first


def test_what_is_refused_is_said(page, window, tmp_path):
    window.expected = REFUSED
    page.goto(page.url.partition("#")[0] + "#model?layer=9")
    page.locator("#notice", has_text="layer must be from 0 to 3, got 9").wait_for()
    page.goto(page.url.partition("#")[0] + "#model")
    summary(page, "Mean loss")
    page.fill("#text", "")
    page.locator("#notice", has_text="text must have from 1 to 128 tokens, got 0").wait_for()
    page.fill("#text", "ab")
    summary(page, "after token 2 of 2")
    assert not page.locator("#notice").is_visible()
    page.select_option("#which-model", label="a folder …")
    page.fill("#folder", str(tmp_path))
    page.locator("#folder-form").get_by_role("button", name="Open").click()
    page.locator(
        "#notice", has_text="model must be one of the built-in models or the folder of a checkpoint"
    ).wait_for()
    page.select_option("#which-model", "given")
    summary(page, "tiny, untrained")
    page.locator("#notice").wait_for(state="hidden")


def test_a_layer_with_several_writes_is_shown(page, tmp_path):
    given = untrained("UJQV").subject
    given.model.save_pretrained(tmp_path / "general")
    Bytes().save(tmp_path / "general")
    page.click("#tab-model")
    summary(page, "Mean loss")
    page.select_option("#which-model", label="a folder …")
    page.fill("#folder", str(tmp_path / "general"))
    page.locator("#folder-form").get_by_role("button", name="Open").click()
    summary(page, "layer 0, Gated DeltaProduct")
    page.fill("#text", "ab")
    summary(page, "after token 2 of 2")
    first = page.locator("#model-pictures figure").first
    assert "2 writes a token" in first.inner_text()
    assert page.locator("#rule option").first.inner_text() == "Gated DeltaProduct (own)"
    bars = page.locator("#model-pictures svg rect > title").all_text_contents()
    assert any(text.startswith("token 2, write 1:") for text in bars)
    page.select_option("#rule", "gated_delta_rule")
    summary(page, "with the changes", "(+0.000)")
    page.select_option("#layer", "3")
    summary(page, "layer 3, RWKV-7")
    assert page.locator("#rule").is_disabled() and page.locator("#rule").input_value() == "rwkv7"
    page.locator("#model-pictures", has_text="share erased along its key").wait_for()


def losses(page):
    rows = page.locator("#losses tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


def learned(page, words):
    page.locator("#learning-summary", has_text=words).wait_for()


@pytest.mark.parametrize("size", slow_but(SIZES, ["phone"]))
def test_an_optimiser_is_exchanged(sized):
    page = sized
    page.click("#tab-learning")
    learned(page, "After 96 of 96 tokens (a few pairs, repeated)")
    before = losses(page)
    assert len(before) == 6 and before["Titans"][:2] == ["momentum", "0.3"] and before["LaCT"][0] == "muon"
    page.select_option("#optimiser-titans", "adam")
    page.locator("#losses tr", has_text="Titans").filter(has_text="adam").wait_for()
    after = losses(page)
    assert after["Titans"][1] == "0.05" and {**after, "Titans": before["Titans"]} == before
    page.locator("#learners").get_by_label("LaCT (C)").uncheck()
    page.locator("#losses tr", has_text="LaCT").wait_for(state="detached")
    drag(page, "rate-titans", 9)  # 1
    page.locator("#losses tr", has_text="Titans").filter(has_text=re.compile("adam\\s*1")).wait_for()
    drag(page, "learning-at", 8)
    page.locator("#losses caption", has_text="to token 8").wait_for()
    page.select_option("#task", "turn")
    learned(page, "another map from half on")
    page.click("#own-optimisers")
    page.locator("#losses tr", has_text="LaCT").wait_for()
    assert losses(page)["Titans"][:2] == ["momentum", "0.3"]


def test_links_restore_both_views(page, window):
    page.click("#tab-model")
    summary(page, "Mean loss")
    page.fill("#text", "x = 1; y & z")
    summary(page, "of 12")
    page.select_option("#layer", "1")
    page.select_option("#attention-head", "1")
    page.select_option("#rule", "delta_rule")
    page.get_by_label("Write with rate 1").check()
    page.locator("#changes", has_text="layer 1: DeltaNet, write gate open").wait_for()
    drag(page, "token", 7)
    summary(page, "layer 1, Gated DeltaNet, head 1, after token 7 of 12", "with the changes")
    other = window.context.new_page()
    other.goto(page.url)
    summary(other, "layer 1, Gated DeltaNet, head 1, after token 7 of 12", "with the changes")
    assert other.locator("#model-pictures").inner_text() == page.locator("#model-pictures").inner_text()
    assert other.locator("#text").input_value() == "x = 1; y & z" and other.url == page.url
    page.click("#tab-learning")
    learned(page, "After 96")
    page.select_option("#optimiser-lact", "sgd")
    drag(page, "learning-at", 20)
    page.locator("#losses tr", has_text="LaCT").filter(has_text="sgd").wait_for()
    other.goto(page.url)
    learned(other, "After 20 of 96")
    assert losses(other) == losses(page) and other.url == page.url


LINKS = (
    "model?layer=x", "model?at=0", "model?changes=0:magic:", "model?changes=0::door", "model?a=1",
    "learning?task=chess", "learning?memories=titans:luck:1", "learning?memories=titans:sgd:0.123", "learning?chunk=5",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS)
def test_a_wrong_link_is_said(page, link):
    page.goto(page.url.partition("#")[0] + f"#{link}")
    page.locator("#notice", has_text="The link could not be read").wait_for()
    view = link.partition("?")[0]
    page.locator(f"#{view} figure svg").first.wait_for()
    if view == "model":
        page.select_option("#layer", "1")
    else:
        drag(page, "seed", 1)
    page.locator("#notice").wait_for(state="hidden")


@pytest.mark.parametrize("view", slow_but(["model", "learning"], ["model"]))
def test_pictures_are_saved(page, view, tmp_path):
    word = {"model": "Attention", "learning": "1 - cosine"}[view]
    page.click(f"#tab-{view}")
    page.locator(f"#{view} figure svg").first.wait_for()
    for kind in ("svg", "png"):
        with page.expect_download() as download:
            page.click(f"#save-{kind}")
        assert download.value.suggested_filename == f"lineate-{view}.{kind}"
        download.value.save_as(tmp_path / f"picture.{kind}")
    svg = (tmp_path / "picture.svg").read_text()
    assert svg.startswith("<svg") and word in svg and "http://127" not in svg
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
    image = Image.open(tmp_path / "picture.png")
    assert image.size == (int(2 * width + 0.99), int(2 * height + 0.99))
    assert len(image.convert("RGB").getcolors(2**20)) > 10

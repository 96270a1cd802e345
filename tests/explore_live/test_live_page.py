"""The page of `lineate explore` in a browser: write, overwrite, ask, forget, undo, open a link, save the picture."""

import re

import pytest
from PIL import Image

from lineate.planning import HARDWARE, from_numbers, plan_memory, time_bounds, variants
from tests.support.explore_page import NO_NUMBER, SIZES, answers, asked, clear, steps, write
from tests.support.marks import slow_but

pytestmark = pytest.mark.cover


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


def shows(page, rule, cells):
    """Wait until the row of a rule in the table of answers has this answer, error and norm."""
    row = page.locator("#answers tr", has=page.get_by_role("rowheader", name=rule, exact=True))
    row.filter(has_text=re.compile(r"\s*".join(map(re.escape, [rule, *cells])) + "$")).wait_for()


@pytest.mark.parametrize("size", slow_but(SIZES, ["phone"]))
def test_write_overwrite_ask_forget_undo(sized):
    page = sized
    clear(page)
    assert steps(page) == [] and set(answers(page)["DeltaNet"]) == {"nothing", NO_NUMBER, "0"}
    asked(page, "Asked for A after step 0: nothing was written under it")
    drag(page, "decay", 1)
    write(page, "A", "w")
    asked(page, "Asked for A after step 1")
    write(page, "A", "y")
    asked(page, "after step 2")
    assert answers(page)["linear attention"] == ["1 w, 1 y", "1", "1.41"]
    assert answers(page)["DeltaNet"] == ["1 y", "0", "1"]
    assert answers(page)["softmax attention"] == [".50 w, .50 y", ".71", NO_NUMBER]
    write(page, "B", "x")
    page.get_by_label("Ask for B").check()
    asked(page, "Asked for B after step 3")
    assert answers(page)["Gated DeltaNet"] == ["1 x", "0", "1.41"]
    page.get_by_role("button", name="Forget A").click()
    asked(page, "after step 4")
    assert answers(page)["Gated DeltaNet"] == ["nothing", "1", "0"]
    assert answers(page)["Kimi Delta Attention"] == ["1 x", "0", "1"]
    assert steps(page) == ["A = w", "A = y", "B = x", "forget A"]
    page.click("#undo")
    asked(page, "after step 3")
    assert steps(page) == ["A = w", "A = y", "B = x"] and answers(page)["Gated DeltaNet"][0] == "1 x"
    page.click("#redo")
    asked(page, "after step 4")
    drag(page, "at", 1)
    asked(page, "after step 1")
    assert answers(page)["DeltaNet"] == ["nothing", NO_NUMBER, "1"]
    page.get_by_role("button", name="Remove step 2").click()
    page.locator("#at-value", has_text="1 of 3").wait_for()
    assert steps(page) == ["A = w", "B = x", "forget A"]


def test_gates_move_the_picture(page):
    page.get_by_role("button", name="Step 2: B = x").click()
    asked(page, "after step 2")
    page.get_by_label("Ask for A").check()
    shows(page, "gated linear attention", [".90 w", ".10", "1.35"])
    drag(page, "decay", 0.5)
    shows(page, "gated linear attention", [".50 w", ".50", "1.12"])
    shows(page, "Kimi Delta Attention", [".50 w", ".50", "1.12"])
    page.get_by_text("Decay of each channel").click()
    drag(page, "channel-1", 1)
    shows(page, "Kimi Delta Attention", ["1 w", "0", "1.41"])
    shows(page, "Gated DeltaNet", [".50 w", ".50", "1.12"])
    page.click("#undo")  # one drag is one entry
    shows(page, "Kimi Delta Attention", [".50 w", ".50", "1.12"])
    page.get_by_label("Ask for B").check()
    drag(page, "beta", 0.5)
    shows(page, "DeltaNet", [".50 x", ".50", "1.12"])
    page.click("#all-steps")
    page.get_by_label("Ask for A").check()
    shows(page, "DeltaNet", [".50 w", ".50", ".71"])


def test_keys_that_are_alike(page):
    clear(page)
    drag(page, "decay", 1)
    drag(page, "cosine", 0.5)
    write(page, "A", "w")
    write(page, "B", "x")
    page.get_by_label("Ask for A").check()
    shows(page, "linear attention", ["1 w, .50 x", ".50", "1.41"])
    shows(page, "DeltaNet", [".75 w, .50 x", ".56", "1.32"])
    drag(page, "keys", 2)
    drag(page, "values", 2)
    page.locator("#steps .go").first.wait_for(state="detached")  # w and x are no longer there
    assert page.locator(".keys button:not(.forget)").all_inner_texts() == ["y", "z"] * 2
    page.get_by_text("Write a vector").click()
    page.get_by_label("y", exact=True).fill("0.25")
    page.get_by_label("z", exact=True).fill("-2")
    page.locator("#vector-form").get_by_role("button", name="Write").click()
    shows(page, "DeltaNet", [".25 y, -2 z", "0", "2.02"])


def test_rules_are_chosen(page):
    for name in ("linear (L)", "gated linear (R)", "softmax (A)"):
        page.locator("#rules").get_by_label(name).uncheck()
    page.locator("#panels figure").nth(3).wait_for(state="detached")
    assert list(answers(page)) == ["DeltaNet", "Gated DeltaNet", "Kimi Delta Attention"]


def test_rules_that_erase_and_write_separately(page, window):
    for name in ("Gated DeltaNet-2 (J)", "DeltaProduct (U)", "RWKV-7 (V)"):
        page.locator("#rules").get_by_label(name).check()
    clear(page)
    drag(page, "decay", 0.8)
    write(page, "A", "w")
    write(page, "B", "x")
    shows(page, "Gated DeltaNet-2", [".80 w", ".20", "1.28"])
    shows(page, "Gated DeltaProduct", ["1 w", "0", "1.41"])  # one token, which forgets before A
    page.get_by_text("Erase and write separately").click()
    write(page, "A", "y")
    drag(page, "write", 0.5)
    shows(page, "Gated DeltaNet-2", [".50 y", ".50", ".94"])
    drag(page, "erase", 0)
    shows(page, "Gated DeltaNet-2", [".64 w, .50 y", ".81", "1.14"])
    shows(page, "RWKV-7", [".64 w, 1 y", ".64", "1.43"])
    other = window.context.new_page()
    other.goto(page.url)
    asked(other, "after step 3")
    assert answers(other) == answers(page) and "A:y:0.8:1:e0:w0.5" in page.url
    drag(page, "beta", 0.5)  # both rates are beta again
    shows(page, "Gated DeltaNet-2", [".32 w, .50 y", ".59", "1"])


def test_a_link_restores_the_view(page, window):
    write(page, "C", "z")
    drag(page, "cosine", 0.3)
    page.get_by_role("button", name="Forget B").click()
    drag(page, "at", 4)
    page.get_by_label("Ask for C").check()
    page.locator("#rules").get_by_label("DeltaNet (D)", exact=True).uncheck()
    asked(page, "Asked for C after step 4")
    page.locator("#panels figure").nth(5).wait_for(state="detached")
    before, link = answers(page), page.url
    other = window.context.new_page()
    other.goto(link)
    asked(other, "Asked for C after step 4")
    assert answers(other) == before and steps(other) == steps(page)
    assert other.url == link and other.locator("#cosine").input_value() == "0.3"
    assert other.locator("#panels svg").all_inner_texts() == page.locator("#panels svg").all_inner_texts()


LINKS = ("memory?keys=99", "memory?steps=A:w:2:1", "memory?steps=Z:w:1:1", "memory?%", "plan?context=x", "plan?a=1")


@pytest.mark.parametrize("link", slow_but(LINKS, ["plan?context=x"]))
def test_a_wrong_link_is_said(page, link):
    page.goto(page.url.partition("#")[0] + f"#{link}")
    page.locator("#notice", has_text="The link could not be read").wait_for()
    if "plan" in link:
        page.locator("#numbers caption", has_text="On H100 SXM").wait_for()
        drag(page, "batch", 1)
    else:
        asked(page, "after step 3")
        write(page, "A", "z")
    page.locator("#notice").wait_for(state="hidden")


@pytest.mark.parametrize("view", slow_but(["memory", "plan"], ["memory"]))
def test_pictures_are_saved(page, view, tmp_path):
    page.click(f"#tab-{view}")
    page.locator(f"#{view} figure svg").first.wait_for()
    for kind in ("svg", "png"):
        with page.expect_download() as download:
            page.click(f"#save-{kind}")
        assert download.value.suggested_filename == f"lineate-{view}.{kind}"
        download.value.save_as(tmp_path / f"picture.{kind}")
    svg = (tmp_path / "picture.svg").read_text()
    word = "Kimi Delta Attention" if view == "memory" else "Memory against context"
    assert svg.startswith("<svg") and word in svg and "http://127" not in svg
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
    image = Image.open(tmp_path / "picture.png")
    assert image.size == (2 * width, 2 * height) and len(image.convert("RGB").getcolors(2**20)) > 10


@pytest.mark.parametrize("size", slow_but(SIZES, ["wide"]))
def test_plan(sized):
    page = sized
    write(page, "C", "z")
    page.click("#tab-plan")
    page.locator("#numbers td", has_text="GiB").first.wait_for()

    def row(name):
        return page.locator("#numbers tr", has=page.get_by_role("rowheader", name=name, exact=True)).locator("td")

    assert row("Cache").all_inner_texts() == ["12 GiB", "48 GiB"] and row("Fits").all_inner_texts() == ["yes", "yes"]
    assert row("Largest batch, 128k tokens").all_inner_texts() == ["47", "12"]
    model = from_numbers(2048, 16, 24, kv_heads=4)
    plans = [plan_memory(each) for each in (model, variants(model)["softmax only"])]
    steps = [time_bounds(x, HARDWARE["h100"], n, 131072)[1].seconds for x, n in zip(plans, (47, 12), strict=True)]
    rates = [float(text.replace(",", "")) for text in row("Tokens/s of that batch, at most").all_inner_texts()]
    assert rates == pytest.approx([47 / steps[0], 12 / steps[1]], rel=1e-3)
    drag(page, "context", 20)
    row("Fits").first.filter(has_text="only the weights").wait_for()
    assert row("Cache").all_inner_texts() == ["96 GiB", "384 GiB"]
    page.fill("#pattern", "g")
    row("Longest context, batch 8").first.filter(has_text="any").wait_for()
    assert row("Cache").first.inner_text() == "0 B"
    page.fill("#pattern", "GX")
    page.locator("#notice", has_text="X, which is no mixer").wait_for()
    page.select_option("#preset", "qwen3-next-80b")
    page.locator("#verdict", has_text="qwen3-next-80b").wait_for()
    assert not page.locator("#hidden").is_visible()
    drag(page, "devices", 3)
    row("Fits").first.filter(has_text="yes").wait_for()
    link, verdict = page.url, page.locator("#verdict").inner_text()
    page.click("#tab-memory")
    page.click("#undo")  # the history is still there
    page.locator("#at-value", has_text="3 of 3").wait_for()
    page.goto(link)
    page.locator("#verdict", has_text="8 x H100").wait_for()
    assert page.locator("#verdict").inner_text() == verdict and page.locator("#devices").input_value() == "3"

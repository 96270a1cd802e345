"""The page of `lineate explore` by keyboard alone, on a phone, in light and dark, and when its server is gone.

What axe-core finds is asked for where it is there; it is not a part of the repository:

    mkdir -p out/axe && npm pack axe-core --pack-destination out/axe
    tar -xzf out/axe/axe-core-*.tgz -C out/axe --strip-components=1
"""

from pathlib import Path

import pytest

from tests.support.browser import Window
from tests.support.chat_page import focused, walk
from tests.support.explore_page import answers, asked, steps, tiny_texts, write
from tests.support.marks import slow_but
from tests.support.page_checks import CONTRAST

pytestmark = pytest.mark.cover

AXE = Path(__file__).parents[2] / "out" / "axe" / "axe.min.js"
VIEWS = ("memory", "model", "learning", "plan", "lessons")
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def test_keyboard_only(page):
    walk(page, "Skip to the view")
    page.keyboard.press("Enter")
    walk(page, "Ask for A")
    page.keyboard.press("ArrowDown")
    asked(page, "Asked for B after step 3")
    walk(page, "Write B = w")
    for key in ("ArrowUp", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert focused(page)[0] == "Write C = x"
    page.keyboard.press("Enter")
    asked(page, "after step 4")
    assert focused(page)[0] == "Write C = x"
    page.keyboard.press("Space")
    asked(page, "after step 5")
    walk(page, "After step")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    asked(page, "after step 3")
    walk(page, "Undo")
    page.keyboard.press("Enter")
    page.locator("#at-value", has_text="4 of 4").wait_for()
    walk(page, "Step 2: B = x")
    page.keyboard.press("Enter")
    asked(page, "after step 2")
    assert focused(page)[0] == "Step 2: B = x"
    walk(page, "Remove step 2")
    page.keyboard.press("Enter")
    assert steps(page) == ["A = w", "A = y", "C = x"]
    page.keyboard.press("Control+z")
    page.locator("#at-value", has_text="2 of 4").wait_for()
    page.keyboard.press("Control+Shift+z")
    page.locator("#at-value", has_text="1 of 3").wait_for()
    walk(page, "Decay")
    page.keyboard.press("Home")
    page.locator("#decay + output", has_text="0").wait_for()
    walk(page, "Plan", "Shift+Tab", most=60)
    page.keyboard.press("Enter")
    page.locator("#numbers td").first.wait_for()
    walk(page, "Context")
    page.keyboard.press("End")
    page.locator("#context + output", has_text="16M").wait_for()


@pytest.mark.slow
def test_keyboard_only_in_the_other_views(page):
    walk(page, "Learning")
    page.keyboard.press("Enter")
    page.locator("#losses td").first.wait_for()
    walk(page, "Task")
    page.keyboard.press("End")
    page.locator("#learning-summary", has_text="another map from half on").wait_for()
    walk(page, "Optimiser")
    page.keyboard.press("ArrowDown")
    page.locator("#losses td", has_text="momentum").nth(1).wait_for()
    walk(page, "Model", "Shift+Tab")
    page.keyboard.press("Enter")
    page.locator("#model-summary", has_text="after token 39 of 39").wait_for()
    walk(page, "Text that the model reads")
    page.keyboard.press("Control+a")
    page.keyboard.type("abc")
    page.locator("#model-summary", has_text="after token 3 of 3").wait_for()
    walk(page, "After token")
    page.keyboard.press("ArrowLeft")
    page.locator("#model-summary", has_text="after token 2 of 3").wait_for()
    walk(page, "Token 2: b")
    for key, token in (("Home", 1), ("ArrowRight", 2), ("End", 3), ("ArrowLeft", 2)):
        page.keyboard.press(key)
        page.locator("#model-summary", has_text=f"after token {token} of 3").wait_for()
        assert focused(page)[0] == f"Token {token}: {'abc'[token - 1]}"
    walk(page, "Layer")
    page.keyboard.press("ArrowDown")
    page.locator("#model-summary", has_text="layer 1").wait_for()
    walk(page, "Forget nothing (decay gate open)")
    page.keyboard.press("Space")
    page.locator("#model-summary", has_text="with the changes").wait_for()
    walk(page, "Undo all changes")
    page.keyboard.press("Enter")
    page.locator("#changes", has_text="Nothing is changed").wait_for()


def show(page, view):
    """Open a view in which all there is to see can be seen."""
    page.click(f"#tab-{view}")
    if view == "lessons":
        page.click("#lesson-run")
        page.click("#lesson-answer summary")
        page.locator("#lesson canvas[data-drawn]").wait_for()
        return
    page.locator(f"#{view} figure svg").first.wait_for()
    if view == "memory":
        page.get_by_text("Decay of each channel").click()
        page.get_by_text("Write a vector").click()
    elif view == "model":
        page.select_option("#rule", "delta_rule")
        page.locator("#model-summary", has_text="with the changes").wait_for()
        page.select_option("#which-model", label="a folder …")


@pytest.mark.parametrize("view", slow_but(VIEWS, ["model"]))
def test_phone(browser, address, view):
    window = Window(browser, address, **PHONE)
    page = window.open()
    asked(page, "after step 3")
    if view == "memory":
        for key in "ABCD" * 3:
            write(page, key, "x")
        asked(page, "after step 15")
    show(page, view)
    assert page.evaluate("document.scrollingElement.scrollWidth") == 390
    inside = f"[...document.querySelectorAll('header, #{view} *')]"
    wide = page.evaluate(f"""() => {inside}.filter((x) => x.checkVisibility() && !x.closest(".scroll > *")
        && x.getBoundingClientRect().right > 391).map((x) => x.outerHTML)""")
    assert wide == []
    small = page.evaluate(f"""() => {inside}.filter((x) => x.matches("button, select, nav a, ol a, a.go")
        && x.checkVisibility() && Math.min(x.offsetWidth, x.offsetHeight) < 40).map((x) => x.outerHTML)""")
    assert small == []  # a finger can hit every button
    assert tiny_texts(page) == []
    window.context.close()
    window.check()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(browser, address, scheme):
    window = Window(browser, address, color_scheme=scheme)
    page = window.open()
    asked(page, "after step 3")
    write(page, "D", "z")
    page.click("#undo")  # Redo can be pressed, and a step is current
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] < 128")
    assert dark == (scheme == "dark")
    for view in VIEWS:
        show(page, view)
        page.evaluate("document.activeElement.blur()")
        seen, low = page.evaluate(CONTRAST)
        assert seen > 50 and low == [] and tiny_texts(page) == []
    window.context.close()
    window.check()


@pytest.mark.slow
@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not in out/axe: see the top of this file")
@pytest.mark.parametrize("case", ["light 390", "light 1440", "dark 390", "dark 1440"])
def test_axe_finds_no_serious_fault(browser, address, case):
    scheme, width = case.split()
    size = PHONE if width == "390" else {"viewport": {"width": 1440, "height": 900}}
    window = Window(browser, address, color_scheme=scheme, **size)
    page = window.open()
    asked(page, "after step 3")
    page.evaluate(AXE.read_text())
    for view in VIEWS:
        show(page, view)
        found = page.evaluate("axe.run()")
        assert len(found["passes"]) > 20
        serious = [x for x in found["violations"] if x["impact"] in ("serious", "critical")]
        assert [(x["id"], [node["html"] for node in x["nodes"]]) for x in serious] == [], view
    window.context.close()
    window.check()


def test_names_for_screen_readers(page):
    unnamed = """() => [...document.querySelectorAll("button, input, select, a, svg, table")]
        .filter((x) => x.checkVisibility()
        && !(x.getAttribute("aria-label") || x.labels?.length || x.textContent.trim())).map((x) => x.outerHTML)"""
    assert page.evaluate(unnamed) == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((x) => x.id)")
    assert len(ids) == len(set(ids))
    label = page.locator("#panels svg > title").first.text_content()
    assert label == "linear attention, asked for A: 1 w, 1 y, error 1"
    write(page, "D", "z")
    assert page.locator("#status").inner_text() == "Step 4: D = z"


@pytest.mark.slow
def test_there_are_so_many_steps_and_no_more(page):
    for i in range(61):
        write(page, "ABCD"[i % 4], "wxyz"[i % 3])
    asked(page, "after step 64")
    write(page, "A", "w")
    page.locator("#notice", has_text="at most 64 steps").wait_for()
    assert len(steps(page)) == 64 and len(answers(page)) == 6


def test_a_server_that_is_gone_is_said(browser, address):
    window = Window(browser, address)
    window.expected = "Failed to load resource"
    page = window.open()
    asked(page, "after step 3")
    window.context.route("**/api/memory", lambda route: route.abort())
    write(page, "D", "z")
    page.locator("#notice", has_text="lineate explore does not answer").wait_for()
    window.context.unroute("**/api/memory")
    write(page, "D", "y")
    asked(page, "after step 5")
    window.context.close()
    window.check()

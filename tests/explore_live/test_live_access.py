"""The page of `lineate explore` by keyboard alone, on a phone, in light and dark, and when its server is gone."""

import pytest
from browser import Window
from chat_page import focused, walk
from explore_page import answers, asked, steps, tiny_texts, write
from few import few
from page_checks import CONTRAST

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


@pytest.mark.parametrize("view", ["memory", "plan"])
def test_phone(browser, address, view):
    window = Window(browser, address, **PHONE)
    page = window.open()
    asked(page, "after step 3")
    for key in "ABCD" * 3:
        write(page, key, "x")
    asked(page, "after step 15")
    page.get_by_text("Decay of each channel").click()
    page.get_by_text("Write a vector").click()
    page.click(f"#tab-{view}")
    page.locator(f"#{view} figure svg").first.wait_for()
    assert page.evaluate("document.scrollingElement.scrollWidth") == 390
    inside = f"[...document.querySelectorAll('header, #{view} *')]"
    wide = page.evaluate(
        f"{inside}.filter((x) => x.checkVisibility() && x.getBoundingClientRect().right > 391).map((x) => x.outerHTML)"
    )
    assert wide == []
    small = page.evaluate(f"""() => {inside}.filter((x) => x.matches("button, select, nav a") && x.checkVisibility()
        && Math.min(x.offsetWidth, x.offsetHeight) < 40).map((x) => x.outerHTML)""")
    assert small == []  # a finger can hit every button
    assert tiny_texts(page) == []
    window.context.close()
    window.check()


@pytest.mark.parametrize("scheme", few(["light", "dark"], ["dark"]))
def test_contrast(browser, address, scheme):
    window = Window(browser, address, color_scheme=scheme)
    page = window.open()
    asked(page, "after step 3")
    page.get_by_text("Write a vector").click()
    page.get_by_text("Decay of each channel").click()
    write(page, "D", "z")
    page.click("#undo")  # Redo can be pressed, and a step is current
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] < 128")
    assert dark == (scheme == "dark")
    for view in ("memory", "plan"):
        page.click(f"#tab-{view}")
        page.locator(f"#{view} figure svg").first.wait_for()
        page.evaluate("document.activeElement.blur()")
        seen, low = page.evaluate(CONTRAST)
        assert seen > 50 and low == [] and tiny_texts(page) == []
    window.context.close()
    window.check()


def test_names_for_screen_readers(page):
    unnamed = """() => [...document.querySelectorAll("button, input, select, a, svg, table")]
        .filter((x) => x.checkVisibility()
        && !(x.getAttribute("aria-label") || x.labels?.length || x.textContent.trim())).map((x) => x.outerHTML)"""
    assert page.evaluate(unnamed) == []
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

"""The chat page by keyboard alone, with a screen reader, on a phone, and in light and dark."""

import re

import pytest

from tests.support.browser import Window
from tests.support.chat_page import REFUSED, focused, say, texts, titles, walk
from tests.support.marks import slow_but
from tests.support.page_checks import CONTRAST
from tests.support.scripted_server import Script

pytestmark = pytest.mark.cover


def test_keyboard_only(server, page):
    page.locator("#model", has_text="scripted").wait_for()
    assert focused(page)[0] == "Message"
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    server.scripts["first line\nsecond line"] = Script(pieces=("Answer ", "one."), hold_after=1)
    page.keyboard.press("Enter")
    page.locator(".assistant .text", has_text="Answer").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("You stopped this answer.").wait_for()
    assert texts(page)[0] == "first line\nsecond line"

    server.scripts["first line\nsecond line"] = Script(pieces=("Answer two.",))
    walk(page, "Regenerate", "Shift+Tab")
    page.keyboard.press("Enter")
    page.locator(".strip").wait_for()
    walk(page, "Previous version", "Shift+Tab")
    page.keyboard.press("Enter")
    assert texts(page)[1] == "Answer"
    assert focused(page)[0] == "Next version"  # the only one left to press
    walk(page, "Edit", "Shift+Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Control+a")
    page.keyboard.type("edited")
    page.keyboard.press("Enter")
    page.locator(".assistant", has_text="You said: edited").locator(".strip").wait_for()
    walk(page, "Fork", "Shift+Tab")
    page.keyboard.press("Enter")
    page.locator("#title", has_text="(fork)").wait_for()
    walk(page, "Settings", "Shift+Tab")
    page.keyboard.press("Enter")
    assert focused(page)[0] == "System prompt"
    page.keyboard.press("Escape")
    assert focused(page)[0] == "Settings"
    walk(page, "Delete edited (fork)", "Shift+Tab")
    page.keyboard.press("Enter")
    walk(page, "Delete")
    page.keyboard.press("Enter")
    assert titles(page) == ["edited"] and focused(page)[0] == "New conversation"
    page.evaluate("document.activeElement.blur()")
    walk(page, "Skip to the message box")
    page.keyboard.press("Enter")
    page.keyboard.type("typed")
    assert page.locator("#message").input_value() == "typed"


def test_a_screen_reader_hears_paragraphs_not_tokens(server, page):
    page.evaluate("""() => {
        window.heard = [];
        new MutationObserver((changes) => {
            for (const change of changes) for (const node of change.addedNodes) window.heard.push(node.textContent);
        }).observe(document.getElementById("announcements"), { childList: true, subtree: true, characterData: true });
    }""")
    text = "One two three four.\n\nFive six seven.\n\nEight nine"
    server.scripts["Read"] = Script(pieces=tuple(re.findall(r"\S+\s*", text)))
    say(page, "Read")
    assert page.evaluate("heard") == ["One two three four.", "Five six seven.", "Eight nine", "The answer is complete."]
    live = page.locator("#announcements")
    assert live.get_attribute("role") == "log" and live.get_attribute("aria-live") == "polite"
    assert page.locator("[aria-live], [role=log], [role=status]").count() == 1  # the turns themselves are silent
    unnamed = page.evaluate("""() => [...document.querySelectorAll("button, input, textarea, select, a, [role=group]")]
        .filter((x) => !(x.getAttribute("aria-label") || x.labels?.length || x.textContent.trim()))
        .map((x) => x.outerHTML)""")
    assert unnamed == []


@pytest.mark.slow
@pytest.mark.parametrize("layers", [12, 48, 96])
def test_many_layers_fit(layers, server, page):
    server.pattern = "GGGA" * (layers // 4)
    page.reload()
    page.set_viewport_size({"width": 1440, "height": 900})
    say(page, "hello")
    assert page.locator(".layer").count() == layers
    assert page.evaluate(
        "[...document.querySelectorAll('.strip, .memory')].every((x) => x.scrollWidth <= x.clientWidth)"
    )
    assert page.evaluate("Math.min(...[...document.querySelectorAll('.layer')].map((x) => x.offsetWidth)) >= 4")


@pytest.mark.parametrize("pattern", ["GGGA", pytest.param("GGGA" * 24, marks=pytest.mark.slow)])
def test_phone(pattern, browser, server):
    server.pattern = pattern
    window = Window(browser, server.address, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = window.open()
    server.scripts["Wide"] = Script(
        pieces=(
            "x" * 400,
            f"\n\n```\n{'y ' * 300}\n```\n\n- {'z' * 300}",
        )
    )
    say(page, "Wide")
    say(page, "w" * 500)

    def no_overflow():
        assert page.evaluate("document.scrollingElement.scrollWidth") == 390
        inside = "[...document.querySelectorAll('#scroll, .turn, .strip, .layers, .memory, #composer, header')]"
        assert page.evaluate(f"{inside}.filter((x) => x.scrollWidth > x.clientWidth + 1).map((x) => x.className)") == []

    no_overflow()
    small = page.evaluate("""() => [...document.querySelectorAll("main button")].filter((x) => x.offsetParent
        && !x.matches(".layer") && Math.min(x.offsetWidth, x.offsetHeight) < 40).map((x) => x.textContent)""")
    assert small == []  # a finger can hit every button
    send_box = page.locator("#send").bounding_box()
    assert send_box["x"] + send_box["width"] <= 390 and send_box["y"] + send_box["height"] <= 844
    assert not page.locator("#new").is_visible()
    page.tap("#open-sidebar")
    assert page.locator("#new").is_visible() and focused(page)[0] == "New conversation"
    page.keyboard.press("Escape")
    assert not page.locator("#new").is_visible() and focused(page)[0] == "Conversations"
    page.tap("#open-sidebar")
    page.tap("#new")
    assert texts(page) == [] and not page.locator("#new").is_visible()
    page.tap("#open-sidebar")
    page.locator("#conversations .open").tap()
    page.locator(".turn").first.wait_for()
    page.tap("#open-settings")
    no_overflow()
    box = page.locator("#settings").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    window.context.close()
    window.check()


@pytest.mark.parametrize("scheme", slow_but(["light", "dark"], ["dark"]))
def test_contrast(scheme, browser, server):
    window = Window(browser, server.address, color_scheme=scheme)
    window.expected = REFUSED
    page = window.open()
    server.scripts["All"] = Script(pieces=("Text `code` **bold**\n\n```py\nx = 1\n```\n\n- item",))
    server.scripts["Fail"] = Script(refusals=[503])
    say(page, "All")
    say(page, "Fail")
    page.locator("#conversations li").hover()
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] < 128")
    assert dark == (scheme == "dark")
    seen, low = page.evaluate(CONTRAST)
    assert seen > 30 and low == []
    page.click("#open-settings")
    assert page.evaluate(CONTRAST)[1] == []
    window.context.close()
    window.check()

"""An error on the chat page is shown where it happened, can be retried, and loses nothing that was typed."""

import pytest

from tests.support.browser import Window
from tests.support.chat_page import REFUSED, roles, say, send, texts
from tests.support.scripted_server import Script, ScriptedServer

HALVES = {"pieces": ("Half ", "whole.")}


@pytest.mark.cover
@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            {"refusals": [429]},
            "too many requests at the moment. It says: refused with 429. It asks you to wait 7 seconds.",
        ),
        pytest.param(
            {"refusals": [503]}, "cannot answer at the moment. It says: refused with 503.", marks=pytest.mark.slow
        ),
        pytest.param({"refusals": [400]}, "refused this request. It says: refused with 400.", marks=pytest.mark.slow),
        # A browser drops what it has not read when a connection breaks: wait until the first half is shown.
        (HALVES | {"hold_after": 1, "cut_after": 1}, "The connection was lost before the answer was complete."),
        pytest.param(HALVES | {"end_after": 1}, "The connection ended before the answer", marks=pytest.mark.slow),
        pytest.param(HALVES | {"error_after": 1}, "It says: out of memory.", marks=pytest.mark.slow),
    ],
    ids=["429", "503", "400", "disconnect", "early-end", "error-event"],
)
def test_an_error_is_shown_and_retried(script, message, server, window, page):
    window.expected = REFUSED
    server.scripts["Try"] = script = Script(**script)
    send(page, "Try")
    if script.hold_after is not None:
        page.locator(".turn .text", has_text="Half").wait_for()
        server.release()
    page.locator(".error").wait_for()
    assert message in page.locator(".error").inner_text()
    cut = script.pieces[0] == "Half "
    assert texts(page) == ["Try", "Half" if cut else ""]
    page.fill("#message", "next thought")
    page.reload()  # the error is part of the conversation
    assert message in page.locator(".error").inner_text()
    page.click(".retry")
    page.locator(".strip").wait_for()
    assert texts(page) == ["Try", "Half whole." if cut else "Fine."] and page.locator(".error").count() == 0
    assert page.locator("#message").input_value() == "next thought"
    assert page.locator(".versions").count() == int(cut)  # what had been written stays as a version


@pytest.mark.slow
def test_retrying_an_earlier_answer_keeps_what_followed(server, window, page):
    window.expected = REFUSED
    server.scripts["Try"] = Script(refusals=[503])
    say(page, "Try")
    say(page, "go on")
    assert texts(page) == ["Try", "", "go on", "You said: go on"]
    assert roles(server.requests[-1]) == [("user", "Try"), ("user", "go on")]
    page.click(".retry")
    page.locator(".versions").wait_for()
    page.locator(".turn.running").wait_for(state="detached")
    assert texts(page) == ["Try", "Fine."]
    page.get_by_role("button", name="Previous version").click()
    assert texts(page) == ["Try", "", "go on", "You said: go on"]


@pytest.mark.cover
@pytest.mark.slow
def test_a_server_that_cannot_be_reached(server, window, page):
    window.expected = REFUSED
    window.context.route("**/v1/chat/completions", lambda route: route.abort())
    say(page, "Anyone?")
    assert "The server cannot be reached." in page.locator(".error").inner_text()
    window.context.unroute("**/v1/chat/completions")
    page.click(".retry")
    page.locator(".strip").wait_for()
    assert texts(page) == ["Anyone?", "You said: Anyone?"]


@pytest.mark.cover
def test_a_key_is_asked_for_where_the_server_wants_one(browser):
    with ScriptedServer(key="secret") as server:
        window = Window(browser, server.address)
        window.expected = REFUSED
        page = window.open()
        page.locator("#notice").get_by_label("API key").wait_for()
        say(page, "hello")
        card = page.locator(".error")
        card.get_by_label("API key").fill("wrong")
        card.get_by_role("button", name="Use this key").click()
        page.locator(".turn.running").wait_for(state="detached")
        card.get_by_label("API key").fill("secret")
        card.get_by_role("button", name="Use this key").click()
        page.locator(".strip").wait_for()
        assert texts(page) == ["hello", "You said: hello"] and not page.locator("#notice").is_visible()
        page.reload()
        say(page, "again")
        assert texts(page)[-1] == "You said: again"
        assert "secret" not in page.evaluate("JSON.stringify({...localStorage})")  # it goes when the tab closes
        window.context.close()
        window.check()


@pytest.mark.cover
@pytest.mark.slow
def test_a_full_storage_is_said_and_loses_nothing_that_is_shown(page):
    page.evaluate("""() => {
        for (let size = 1 << 22; size >= 1; size >>= 1)
            try { for (let n = 0; ; n += 1) localStorage.setItem(`fill.${size}.${n}`, "x".repeat(size)); } catch {}
    }""")
    say(page, "hello")
    assert "storage is full" in page.locator("#notice").inner_text()
    assert texts(page) == ["hello", "You said: hello"]

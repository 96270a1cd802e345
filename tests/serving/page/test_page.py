"""Actions of people on the chat page: talk, stop, fork, edit, come back, and keep several conversations."""

import json
import re

import pytest

from tests.support.browser import Window
from tests.support.chat_page import REFUSED, held, roles, row, say, send, texts, titles
from tests.support.marks import slow_but
from tests.support.scripted_server import MEMORY_BYTES, Script, ScriptedServer


@pytest.mark.cover
def test_an_answer_streams(server, page):
    held(server, page, "Tell me", ["One ", "two ", "three."], after=2)
    assert texts(page) == ["Tell me", "One two"]
    assert page.locator("#stop").is_visible() and not page.locator("#send").is_visible()
    server.release()
    page.locator("#send").wait_for()
    assert texts(page) == ["Tell me", "One two three."]
    assert page.title() == "Tell me · lineate" and page.locator("#model").inner_text() == "scripted"
    assert page.locator("#message").input_value() == ""
    strip = page.locator(".strip").inner_text()
    assert re.search(r"0 prompt tokens cached\s+3 read", strip)
    assert re.search(r"first token after [\d.,]+ m?s\s+3 tokens written\s+[\d.,]+ tokens/s", strip)
    assert server.requests[0]["model"] == "scripted" and roles(server.requests[0]) == [("user", "Tell me")]


@pytest.mark.cover
def test_the_strip_shows_the_cache_and_how_each_layer_grew(page):
    say(page, "first")
    say(page, "second " * 30)
    now, then = page.locator(".strip").nth(1), page.locator(".strip").nth(0)
    words = re.search(r"(\d+) prompt tokens cached\s+(\d+) read", now.inner_text())
    cached, read = map(int, words.groups())
    assert cached > 0 and read > 0
    share = now.locator(".bar .cached").bounding_box()["width"] / now.locator(".bar").bounding_box()["width"]
    assert share == pytest.approx(cached / (cached + read), abs=0.01)

    def heights(strip):
        return [bar.bounding_box()["height"] for bar in strip.locator(".layer .all").all()]

    before, after = heights(then), heights(now)
    assert len(after) == 4 and before[:3] == after[:3] and after[3] > 1.5 * before[3]
    kept = now.locator(".layer .kept").nth(3).bounding_box()["height"]
    assert kept == pytest.approx(before[3], abs=1)  # the lower part of the bar is what the last answer left

    now.locator(".layer").nth(0).focus()
    fixed = f"Layer 1 (Gated DeltaNet): {MEMORY_BYTES // 1024}.0 KiB, memory of a fixed size, as after the last answer"
    assert now.locator(".readout").inner_text() == fixed
    page.keyboard.press("End")
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert re.fullmatch(
        r"Layer 4 \(softmax\): [\d.]+ KiB, cache, grows with the tokens, [\d.]+ KiB more than .*", label
    )
    assert now.locator(".readout").inner_text() == label
    assert now.locator(".layer[tabindex='0']").count() == 1  # the layers are one stop of the Tab key
    then.locator(".layer").nth(3).hover()
    assert "Layer 4 (softmax)" in then.locator(".readout").inner_text()


@pytest.mark.cover
@pytest.mark.parametrize("how", ["Escape", pytest.param("button", marks=pytest.mark.slow)])
def test_stop_keeps_what_was_written(how, server, page):
    held(server, page, "Count", ["One ", "two ", "three."], after=2)
    page.fill("#message", "typed meanwhile")
    page.keyboard.press("Enter")  # waits for the answer to end
    if how == "Escape":
        page.keyboard.press("Escape")
    else:
        page.click("#stop")
    page.get_by_text("You stopped this answer.").wait_for()
    assert texts(page) == ["Count", "One two"] and page.locator("#message").input_value() == "typed meanwhile"
    for _ in range(100):
        if server.cancelled:
            break
        page.wait_for_timeout(20)
    assert server.cancelled == ["Count"] and len(server.requests) == 1

    say(page, "go on")
    assert roles(server.requests[1]) == [("user", "Count"), ("assistant", "One two "), ("user", "go on")]


@pytest.mark.cover
@pytest.mark.slow
def test_regenerating_keeps_the_other_version(server, page):
    server.scripts["Choose"] = Script(pieces=("Heads.",))
    say(page, "Choose")
    server.scripts["Choose"] = Script(pieces=("Tails.",))
    page.click(".assistant .again")
    page.locator(".turn .text", has_text="Tails.").wait_for()
    page.locator(".strip").wait_for()
    assert roles(server.requests[1]) == [("user", "Choose")]
    assert texts(page) == ["Choose", "Tails."] and "2 of 2" in page.locator(".versions").inner_text()
    page.get_by_role("button", name="Previous version").click()
    assert texts(page) == ["Choose", "Heads."]
    page.reload()
    assert texts(page) == ["Choose", "Heads."]
    page.get_by_role("button", name="Next version").click()
    assert texts(page) == ["Choose", "Tails."]


@pytest.mark.cover
def test_regenerating_with_a_seed_draws_with_the_next_one(server, window, page):
    """The same seed would give the same answer again; a retry, which replaces nothing, keeps its seed."""
    page.click("#open-settings")
    page.get_by_label("Seed").fill("7")
    page.get_by_role("button", name="Save").click()
    window.expected = REFUSED
    server.scripts["Choose"] = Script(refusals=[503])
    send(page, "Choose")
    page.locator(".retry").click()
    page.locator(".strip").wait_for()
    for version in (2, 3):
        page.click(".assistant .again")
        page.locator(".versions", has_text=f"{version} of {version}").wait_for()
        page.locator(".strip").wait_for()
    assert [body["seed"] for body in server.requests] == [7, 7, 8, 9]


@pytest.mark.cover
@pytest.mark.parametrize("at", slow_but([0, 1, 2], [1]))
def test_fork_from_any_turn(at, server, page):
    say(page, "one")
    say(page, "two")
    whole = texts(page)
    page.locator(".turn").nth(at).locator(".fork").click()
    page.locator("#title", has_text="(fork)").wait_for()
    assert texts(page) == whole[: at + 1]
    assert titles(page) == ["one (fork)", "one"]
    if at == 1:
        say(page, "three")
        assert roles(server.requests[-1]) == [("user", "one"), ("assistant", "You said: one"), ("user", "three")]
        words = page.locator(".strip").last.inner_text()
        assert re.search(r"7 prompt tokens cached\s+1 read", words)  # the fork continues what the server has read
    else:  # ends with a turn of the reader's, which can be answered unchanged
        page.click(".answer")
        page.locator(".assistant").nth(at // 2).locator(".strip").wait_for()
        assert texts(page) == whole[: at + 2]
    row(page, "one").last.locator(".open").click()
    assert texts(page) == whole


@pytest.mark.cover
def test_edit_and_resend(server, page):
    say(page, "one")
    say(page, "two")
    whole = texts(page)
    page.locator(".user").nth(0).locator(".edit").click()
    editor = page.get_by_label("Edit this turn")
    assert editor.input_value() == "one"
    editor.fill("something else")
    page.keyboard.press("Escape")  # leaves everything unchanged
    assert texts(page) == whole
    page.locator(".user").nth(0).locator(".edit").click()
    editor.fill("uno")
    page.keyboard.press("Enter")
    page.locator(".turn .text", has_text="You said: uno").wait_for()
    assert roles(server.requests[-1]) == [("user", "uno")]
    assert texts(page) == ["uno", "You said: uno"]
    page.get_by_role("button", name="Previous version").click()
    assert texts(page) == whole  # with the turns that followed it


@pytest.mark.cover
def test_reload_in_the_middle_of_an_answer(server, page):
    say(page, "hello")
    held(server, page, "more", ["A beginning ", "and an end."])
    page.fill("#message", "half a thought")
    page.reload()
    assert texts(page) == ["hello", "You said: hello", "more", "A beginning"]
    assert page.get_by_text("The page was closed before this answer was complete.").is_visible()
    assert page.locator("#message").input_value() == "half a thought"
    assert page.locator(".strip").count() == 1


@pytest.mark.cover
def test_two_conversations(server, page):
    held(server, page, "slow one", ["Wait ", "for it."])
    page.click("#new")
    assert texts(page) == [] and page.locator("#message").input_value() == ""
    say(page, "quick one")
    assert titles(page)[0] == "quick one"
    assert row(page, "slow one").locator(".dot").is_visible()  # its answer goes on behind this one
    page.fill("#message", "a draft here")
    server.release()
    row(page, "slow one").locator(".dot").wait_for(state="detached")
    row(page, "slow one").locator(".open").click()
    page.locator("#title", has_text="slow one").wait_for()
    assert texts(page) == ["slow one", "Wait for it."] and page.locator("#message").input_value() == ""
    page.go_back()
    page.locator("#title", has_text="quick one").wait_for()
    assert texts(page) == ["quick one", "You said: quick one"]
    assert page.locator("#message").input_value() == "a draft here"


@pytest.mark.cover
@pytest.mark.slow
def test_rename_and_delete(page):
    say(page, "mine")
    page.click("#new")
    say(page, "other")
    row(page, "mine").hover()
    row(page, "mine").get_by_role("button", name="Rename").click()
    page.get_by_label("Name of the conversation").fill("Renamed")
    page.keyboard.press("Enter")
    assert sorted(titles(page)) == ["Renamed", "other"]
    row(page, "other").hover()
    row(page, "other").get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Cancel").click()
    assert sorted(titles(page)) == ["Renamed", "other"]
    page.fill("#message", "a draft that goes with it")
    row(page, "other").hover()
    row(page, "other").get_by_role("button", name="Delete").click()
    page.locator("#confirm").get_by_role("button", name="Delete").click()
    assert titles(page) == ["Renamed"] and texts(page) == []
    page.reload()
    assert titles(page) == ["Renamed"]


@pytest.mark.cover
@pytest.mark.slow
def test_settings_are_sent(server, page):
    page.click("#open-settings")
    assert not page.locator("#set-key").is_visible() and not page.locator("#set-model").is_visible()
    page.get_by_label("System prompt").fill("Be brief.")
    values = {"Temperature": "0", "Top-p": "0.9", "Top-k": "40", "Min-p": "0.05", "Max tokens": "64", "Seed": "7"}
    for label, value in values.items():
        page.get_by_label(label).fill(value)
    page.get_by_role("button", name="Save").click()
    say(page, "hello")
    body = server.requests[0]
    given = {"temperature": 0, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 64, "seed": 7}
    assert {name: body.get(name) for name in given} == given
    assert roles(body) == [("system", "Be brief."), ("user", "hello")]

    page.reload()
    page.click("#open-settings")
    page.get_by_label("Top-k").fill("")
    page.get_by_label("System prompt").fill("")
    page.get_by_label("Top-p").fill("3")
    page.get_by_role("button", name="Save").click()
    assert page.locator("#settings").is_visible()  # 3 is out of range: the browser says so
    page.get_by_label("Top-p").fill("0.5")
    page.get_by_role("button", name="Save").click()
    say(page, "again")
    assert "top_k" not in server.requests[1] and server.requests[1]["top_p"] == 0.5
    assert roles(server.requests[1])[0] == ("user", "hello")


@pytest.mark.cover
@pytest.mark.slow
def test_one_of_several_models(browser):
    with ScriptedServer(models=("small", "large")) as server:
        window = Window(browser, server.address)
        page = window.open()
        page.locator("#model", has_text="small").wait_for()
        page.click("#open-settings")
        page.get_by_label("Model").select_option("large")
        page.get_by_role("button", name="Save").click()
        say(page, "hello")
        assert server.requests[0]["model"] == "large" and page.locator("#model").inner_text() == "large"
        window.context.close()
        window.check()


@pytest.mark.cover
@pytest.mark.slow
def test_a_turn_that_is_sent_before_the_models_are_known(server, window):
    routes = []
    window.context.route("**/v1/models", lambda route: routes.append(route))
    page = window.open()
    send(page, "early")
    page.locator(".turn.running").wait_for()
    assert server.requests == []
    window.context.unroute("**/v1/models")  # the page asks again, for sampling defaults
    routes[0].continue_()
    page.locator(".strip").wait_for()
    assert server.requests[0]["model"] == "scripted" and texts(page) == ["early", "You said: early"]


@pytest.mark.cover
@pytest.mark.slow
def test_an_answer_that_met_its_limit_says_so(server, page):
    server.scripts["Long"] = Script(finish="length")
    say(page, "Long")
    assert page.get_by_text("The answer ended at its limit of tokens.").is_visible()


@pytest.mark.cover
@pytest.mark.slow
def test_an_edit_survives_an_answer_that_ends(server, page):
    say(page, "one")
    page.locator(".user .edit").click()
    page.get_by_label("Edit this turn").fill("not sent yet")
    server.scripts["two"] = Script(hold_after=0)
    send(page, "two")
    page.locator(".turn.running").wait_for()
    server.release()
    page.locator(".turn.running").wait_for(state="detached")
    assert page.get_by_label("Edit this turn").input_value() == "not sent yet"


@pytest.mark.cover
@pytest.mark.slow
def test_two_tabs_share_conversations(window, page):
    other = window.open()
    say(page, "from the first tab")
    row(other, "from the first tab").locator(".open").click()
    other.locator(".strip").wait_for()
    say(other, "from the second tab")
    page.locator(".turn .text", has_text="You said: from the second tab").wait_for()
    assert texts(page) == texts(other)
    say(page, "and back")
    assert len(texts(page)) == 6


@pytest.mark.cover
@pytest.mark.slow
def test_two_tabs_write_into_one_conversation(server, window, page):
    say(page, "begin")
    other = window.context.new_page()
    other.goto(page.url)
    held(server, page, "from the first", ["Slow ", "answer."])
    other.get_by_text("This answer is being written in another tab.").wait_for()
    say(other, "from the second")
    server.release()
    page.locator(".strip").nth(1).wait_for()
    assert texts(page) == ["begin", "You said: begin", "from the first", "Slow answer."]
    page.reload()
    stored = page.evaluate("Object.values(localStorage).join()")
    for text in ("from the first", "Slow answer.", "from the second", "You said: from the second"):
        assert text in stored


@pytest.mark.cover
@pytest.mark.slow
def test_an_emptied_draft_leaves_no_conversation(page):
    page.fill("#message", "a thought")
    row(page, "New conversation").wait_for()
    page.fill("#message", "")
    row(page, "New conversation").wait_for(state="detached")
    page.reload()
    assert titles(page) == []


@pytest.mark.cover
@pytest.mark.slow
def test_copying(server, window, page):
    window.context.grant_permissions(["clipboard-read", "clipboard-write"])
    server.scripts["Code"] = Script(pieces=("Run **this**:\n\n```sh\n", "ls -l\n", "pwd\n```"))
    say(page, "Code")
    page.locator(".assistant .actions .copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "Run **this**:\n\n```sh\nls -l\npwd\n```"
    page.get_by_role("button", name="Copy this code").click()
    page.locator(".code-head", has_text="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "ls -l\npwd"


@pytest.mark.cover
@pytest.mark.slow
def test_damaged_conversations_are_left_alone(page):
    wrong = json.dumps({"id": "b", "nodes": {"x": 1}, "chosen": {}})
    bad = {"lineate.conversation.a": "{", "lineate.conversation.b": wrong}
    page.evaluate("(bad) => Object.assign(localStorage, bad)", bad)
    page.evaluate("localStorage['lineate.settings'] = '{'")
    page.reload()
    say(page, "hello")
    assert titles(page) == ["hello"] and texts(page) == ["hello", "You said: hello"]
    assert page.evaluate("localStorage['lineate.conversation.a']") == "{"


@pytest.mark.cover
@pytest.mark.slow
def test_the_end_stays_in_sight_until_the_reader_scrolls_away(server, page):
    lines = "\n\n".join(f"line {n}" for n in range(200))
    server.scripts["Much"] = Script(pieces=(lines, "\n\nlast " * 100, "\n\nthe very end"), hold_after=1)
    send(page, "Much")
    page.locator(".assistant .text", has_text="line 199").wait_for()
    bottom = "[document.getElementById('scroll')].every((x) => x.scrollHeight - x.scrollTop - x.clientHeight < 5)"
    page.locator("#to-end").wait_for(state="hidden")
    assert page.evaluate(bottom)
    page.locator("#scroll").hover()
    page.mouse.wheel(0, -2000)
    page.locator("#to-end").wait_for()
    server.release()
    page.locator(".strip").wait_for()
    assert not page.evaluate(bottom)
    page.click("#to-end")
    assert page.evaluate(bottom) and not page.locator("#to-end").is_visible()

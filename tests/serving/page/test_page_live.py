"""The chat page against the server itself, with a small random model."""

from dataclasses import replace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from lineate.models import preset
from lineate.serving.app import Settings, describe
from lineate.serving.cache.cache import StateCache
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.requests import Request
from tests.support.browser import Window
from tests.support.chat_page import REFUSED, say, send, texts
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.live_server import WAIT, live, until
from tests.support.small_models import random_model

pytestmark = pytest.mark.cover

CONTEXT, SLOTS = 8192, 4
KEY = "a key of this server"


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="module")
def engine(tokenizer):
    model = random_model(replace(preset("tiny", vocab_size=tokenizer.vocab_size), n_layers=4, pattern="GGGA"))
    engine = Engine(model, slots=SLOTS, context=CONTEXT, spacing=64, cache=StateCache(2**27, 64))
    engine.start()
    engine.submit(Request((0,), max_new_tokens=2)).result(
        WAIT
    )  # compiles the C code where it never has, longer than a page waits
    yield engine
    engine.stop(drain=False)


@pytest.fixture
def window(browser, engine, tokenizer):
    description = describe(engine.model, tokenizer, "random", CONTEXT, SLOTS)
    with live(engine, tokenizer, description, Settings(api_keys=(KEY,))) as server:
        own = Window(browser, server.url)
        own.expected = REFUSED
        yield own
        own.context.close()
        own.check()
    until(lambda: engine.stats.waiting + engine.stats.reading + engine.stats.running == 0, "the end of all requests")


@pytest.fixture
def page(window):
    page = window.open()
    page.locator("#notice").get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Use this key").click()
    page.locator("#model", has_text="random").wait_for()
    return page


def settings(page, **values):
    page.click("#open-settings")
    for name, value in values.items():
        page.fill(f"#set-{name}", str(value))
    page.get_by_role("button", name="Save").click()


def numbers(page):
    """Return cached and read tokens, and the bytes of each layer, of the last answer."""
    layers = page.evaluate("""() => {
        const all = Object.keys(localStorage).filter((name) => name.startsWith("lineate.conversation."))
            .map((name) => JSON.parse(localStorage[name])).sort((a, b) => b.changed - a.changed);
        const last = Object.values(all[0].nodes).filter((node) => node.usage).at(-1);
        return last.usage.lineate.layers.map((layer) => [layer.letter, layer.kind, layer.bytes]);
    }""")
    shown = page.locator(".strip").last.locator(".prompt").inner_text()
    cached, read = (int("".join(filter(str.isdigit, part))) for part in shown.split("cached"))
    return cached, read, layers


def test_a_conversation(page, engine):
    settings(page, system="Be brief. " * 20, max_tokens=24, seed=3)
    say(page, "Hello, who are you?")
    first = texts(page)
    cached, read, layers = numbers(page)
    assert len(first) == 2 and cached == 0 and read > 200
    assert [letter for letter, _, _ in layers] == list("GGGA")
    assert [kind for _, kind, _ in layers] == ["memory"] * 3 + ["cache"]
    assert [size for *_, size in layers] == describe(engine.model, chat_tokenizer(), "", 1, 1).state_bytes(read + 24)

    say(page, "And now?")
    cached, read, grown = numbers(page)
    assert cached >= 192 and 0 < read < 200  # the state at the last multiple of the spacing, or a later one
    assert [size for *_, size in grown[:3]] == [size for *_, size in layers[:3]] and grown[3][2] > layers[3][2]

    page.locator(".assistant").first.locator(".fork").click()
    page.locator("#title", has_text="(fork)").wait_for()
    assert texts(page) == first
    page.locator(".assistant .again").click()  # with the next seed
    page.locator(".versions").wait_for()
    page.locator(".strip").wait_for()
    other = texts(page)
    assert other[0] == first[0] and other[1] != first[1]
    page.locator(".assistant").first.locator(".fork").click()
    page.locator("#title", has_text="(fork)").wait_for()
    page.locator(".versions").wait_for(state="detached")
    settings(page, seed=4)
    page.locator(".user .edit").click()
    page.get_by_role(
        "button", name="Send", exact=True
    ).first.click()  # the same seed and the same prompt give the same answer
    page.locator(".versions").wait_for()
    page.locator(".strip").wait_for()
    assert texts(page) == other


def test_stopping_frees_the_row(page, engine):
    settings(page, max_tokens=8000, seed=1)
    send(page, "Write for a long time.")
    page.locator(".assistant .text > *").first.wait_for()
    assert engine.stats.running == 1
    page.keyboard.press("Escape")
    page.get_by_text("You stopped this answer.").wait_for()
    until(lambda: engine.stats.running == 0, "the end of the request")
    assert texts(page)[1] != ""


@pytest.mark.slow
def test_what_the_server_refuses_is_said(page):
    send(page, "x" * 9000)
    page.locator(".error").wait_for()
    assert (
        f"at most {CONTEXT - 1} tokens" in page.locator(".error").inner_text() and page.locator(".retry").is_visible()
    )

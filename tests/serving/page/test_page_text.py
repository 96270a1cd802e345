"""The text of a model is shown as text and simple elements, never as markup; the files need no loose policy."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from lineate.web.pages import page_files
from tests.support.browser import Window
from tests.support.chat_page import REFUSED, roles, say, texts, titles
from tests.support.scripted_server import PAGE, Script, ScriptedServer

ROOT = Path(__file__).parents[3]
NOWHERE = (
    "http:", "https:", "@import", "eval(", "new Function", "innerHTML", "outerHTML", "insertAdjacentHTML",
    "document.write", 'setAttribute("style"', "javascript:",
)  # fmt: skip


HOSTILE = """<script>window.pwned = 1</script><img src=x onerror="window.pwned = 1">

# <img src=x onerror="window.pwned = 1">
- <svg onload="window.pwned = 1"> **<b onclick="window.pwned = 1">bold</b>** `<script>window.pwned = 1</script>`

```html"><img src=x onerror="window.pwned=1">
</code></pre><script>window.pwned = 1</script>
```

[link](javascript:window.pwned=1) ![image](http://elsewhere.example/x.png) <iframe src="http://elsewhere.example"></iframe>
"""


@pytest.mark.cover
def test_hostile_text_stays_text(browser):
    name = '<img src=x onerror="window.pwned=1">'
    with ScriptedServer(models=(name, "other")) as server:
        window = Window(browser, server.address)
        window.expected = REFUSED
        page = window.open()
        server.scripts[name] = Script(pieces=tuple(re.findall(r"(?s).{1,7}", HOSTILE)))
        server.scripts["<b>refuse</b>"] = Script(refusals=[400])
        say(page, name)
        shown = page.locator(".assistant .text").inner_text()
        first = "<script>window.pwned = 1</script><img"
        for part in (first, "<svg onload", "</code></pre><script>", "[link](javascript:", "<iframe"):
            assert part in shown
        allowed = {"P", "H4", "UL", "LI", "STRONG", "CODE", "DIV", "SPAN", "BUTTON", "PRE"}
        made = page.evaluate("[...document.querySelectorAll('.assistant .text *')].map((x) => x.tagName)")
        assert set(made) == allowed
        attributes = page.evaluate("""() => [...document.querySelectorAll(".assistant .text *")]
            .flatMap((x) => x.getAttributeNames()).filter((name) => /^(on|src$|href$|style$)/.test(name))""")
        assert attributes == []
        assert texts(page)[0] == name and titles(page)[0] == name and page.locator("#model").inner_text() == name
        say(page, "<b>refuse</b>")
        page.click("#open-settings")
        page.keyboard.press("Escape")
        page.locator("#conversations li").hover()
        page.locator("#conversations .delete").click()
        assert name in page.locator("#confirm-text").inner_text()
        page.keyboard.press("Escape")
        page.reload()
        assert page.locator(".assistant .text").first.inner_text() == shown
        assert page.evaluate("window.pwned") is None
        assert page.locator("main :is(img, script, iframe, svg):not(header svg)").count() == 0
        window.context.close()
        window.check()


@pytest.mark.cover
@pytest.mark.slow
def test_markdown(server, page):
    """Return each answer as an outline of its elements."""
    outline = """(node) => {
        const show = (x) => x.nodeType === 3 ? x.data : x.matches(".code-head") ? ""
            : x.matches(".lines") ? x.textContent :
            `${x.tagName.toLowerCase()}${x.start > 1 ? x.start : ""}(${[...x.childNodes].map(show).join("")})`;
        return [...node.childNodes].map(show).join(" ");
    }"""
    cases = {
        "One\ntwo\n\nthree": "p(One\ntwo) p(three)",
        "a **bold `x`** b": "p(a strong(bold code(x)) b)",
        "*it* and 2 * 3 * 4": "p(em(it) and 2 * 3 * 4)",
        "f(*args, **kwargs)": "p(f(*args, **kwargs))",
        "**open and *closed*": "p(**open and em(closed))",
        "``a ` b`` and `open": "p(code(a ` b) and `open)",
        "# Title\ntext": "h4(Title) p(text)",
        "text:\n- a\n- b\n  - c\n\nend": "p(text:) ul(li(p(a))li(p(b)ul(li(p(c))))) p(end)",
        "3. x\n4. y": "ol3(li(p(x))li(p(y)))",
        "1. run\n   ```sh\n   ls\n     -l\n   ```\n2. done": "ol(li(p(run)div(pre(code(ls\n  -l))))li(p(done)))",
        "```py\na = 1\n\n# b\n```\nafter": "div(pre(code(a = 1\n\n# b))) p(after)",
        "````\n```\n````": "div(pre(code(```)))",
        "```\nnot closed": "div(pre(code(not closed)))",
        "**\u202eright** to left": "p(strong(\u202eright) to left)",
    }
    for number, (text, expected) in enumerate(cases.items()):
        server.scripts[f"case {number}"] = Script(pieces=tuple(text))
        say(page, f"case {number}")
        assert page.locator(".assistant .text").last.evaluate(outline) == expected


@pytest.mark.cover
@pytest.mark.slow
@pytest.mark.parametrize("text", ["`" * 50_000, "`a``b```c" * 4000, "**a *b " * 8000, "- " * 20_000, "  - x\n" * 4000])
def test_text_that_a_careless_parser_would_never_finish(text, server, page):
    server.scripts["long"] = Script(pieces=(text,))
    say(page, "long")
    assert page.locator(".strip").is_visible()


@pytest.mark.cover
@pytest.mark.slow
def test_thoughts_are_folded_away(server, page):
    server.scripts["Think"] = Script(pieces=("<think>\nhm, ", "well</think>", "\n\nThe answer."))
    say(page, "Think")
    assert texts(page) == ["Think", "The answer."] and not page.locator(".thinking p").last.is_visible()
    page.locator(".assistant summary").click()
    assert page.locator(".thinking p").last.is_visible()
    say(page, "and?")
    assert roles(server.requests[1])[1] == ("assistant", "<think>\nhm, well</think>\n\nThe answer.")


def test_a_strict_policy_is_possible():
    """Nothing in the files needs more than `default-src 'self'`, and nothing makes markup from text."""
    files = [file for file in page_files(PAGE) if file.suffix in (".html", ".js", ".css", ".svg")]
    assert len(files) == len(page_files(PAGE))  # the folders have nothing else
    for file in files:
        text = file.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        for word in NOWHERE:
            assert word not in text, f"{file.name} has {word}"
    index = (PAGE / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", index)
    assert "default-src 'self'" in index


def test_the_page_is_part_of_the_package():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["lineate"]
    found = {file for pattern in patterns for file in (ROOT / "lineate").glob(pattern)}
    assert set(page_files(PAGE)) <= found


@pytest.mark.cover
def test_events_may_be_split_anywhere(page):
    """Events are the same however a network cuts their bytes, whichever line ends the server uses."""
    text = ": a comment\r\n\r\ndata: Tromsø 🏔\r\n\r\ndata:two\ndata: lines\n\nevent: x\rdata: last\r\rdata: not ended"
    found = page.evaluate(
        """async (text) => {
            const { serverSentEvents } = await import("./api.js");
            const bytes = new TextEncoder().encode(text);
            const read = async (...cuts) => {
                const parts = [0, ...cuts].map((from, n) => bytes.slice(from, cuts[n] ?? bytes.length));
                const stream = new ReadableStream({
                    pull(to) { if (parts.length) to.enqueue(parts.shift()); else to.close(); },
                });
                const events = [];
                for await (const event of serverSentEvents(stream)) events.push(event);
                return JSON.stringify(events);
            };
            const found = new Set([await read(), await read(...Array.from(bytes.keys()).slice(1))]);
            for (let cut = 1; cut < bytes.length; cut += 1) found.add(await read(cut));
            return [...found];
        }""",
        text,
    )
    assert [json.loads(events) for events in found] == [["Tromsø 🏔", "two\nlines", "last"]]

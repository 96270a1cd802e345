"""Steps on the chat page that its tests share."""

from tests.support.scripted_server import Script

REFUSED = "Failed to load resource"
"""What a browser writes into its console when a server refuses a request."""


def send(page, text):
    page.fill("#message", text)
    page.press("#message", "Enter")


def say(page, text):
    """Send a turn and wait until its answer has ended."""
    send(page, text)
    page.locator(".turn.running").wait_for(state="detached")
    page.locator("#send").wait_for()


def texts(page):
    """Return the texts of the turns that are shown."""
    return [text.strip() for text in page.locator(".turn .text").all_inner_texts()]


def titles(page):
    return [title.strip() for title in page.locator("#conversations .open").all_inner_texts()]


def roles(body):
    return [(message["role"], message["content"]) for message in body["messages"]]


def row(page, title):
    return page.locator("#conversations li", has_text=title)


def held(server, page, text, pieces, after=1):
    """Send a turn whose answer stops after some pieces and waits."""
    server.scripts[text] = Script(pieces=tuple(pieces), hold_after=after)
    send(page, text)
    page.locator(".assistant .text", has_text="".join(pieces[:after]).strip()).last.wait_for()


def focused(page):
    """Return the name of the focused element, and whether its focus can be seen."""
    return page.evaluate("""() => {
        const x = document.activeElement, style = getComputedStyle(x);
        if (x === document.body) return ["the page", true];  // behind the last element, before the browser's own
        const label = x.getAttribute("aria-label") ?? x.labels?.[0]?.textContent ?? x.textContent;
        return [label.trim(), style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0];
    }""")


def walk(page, to, key="Tab", most=30):
    """Press Tab until the element of this name has the focus."""
    for _ in range(most):
        page.keyboard.press(key)
        name, seen = focused(page)
        assert seen, f"the focus of {name} cannot be seen"
        if name == to:
            return
    raise AssertionError(f"{to} is not reached by {key}")

"""An answer that grows is drawn as it would be at once, by work that grows with what is new."""

import random
import re
from itertools import pairwise

import pytest

from tests.support.chat_page import say, send
from tests.support.scripted_server import Script

SHOW = """
const { Growing } = await import("./growing.js");
const outline = (x) => x.nodeType === 3 ? x.data
    : x.matches(".lines") ? x.textContent
    : x.matches(".part") ? drawn(x, "")
    : `${x.tagName}${x.start > 1 ? x.start : ""}${x.getAttribute("aria-label") ?? ""}(${drawn(x, "")})`;
const drawn = (parent, between = " ") => [...parent.childNodes].map(outline).join(between);
"""
PARTS = (
    "a", "word", " ", "  ", "    ", "\n", "\n", "\n\n", "- ", "* ", "+", "-", "1. ", "2)", "1", "# ", "##", "```",
    "```py", "~~~", "`", "``", "*", "**", "***", "x", "\t", "  - ", "   1. ", "\u00e9", "\r", "0. ",
)  # fmt: skip
"""What changes how the text before or after it is read."""
LINE = "the state keeps what it `has` read and **forgets** a little with *each* token"
LONG = {
    "blocks": f"# A title\n\n{LINE}\n\n- {LINE}\n- {LINE}\n\n```py\n{LINE}\n```\n\n",
    "code": f"{LINE}\n",
    "list": f"- {LINE}\n",
    "nested": f"- {LINE}\n  - {LINE}\n\n    {LINE}\n",
    "inner": f"  - {LINE}\n",
    "words": f"{LINE} ",
    "strong": "x *y* ",
    "em": "x **y** ",
    "strong in an item": "x *y* ",
    "marks": "**a *b ",
    "codes": "*`a`*",
    "backtick": f"{LINE} ".replace("`", ""),
    "backticks": " ".join("`" * run for run in range(1, 281)) + " ",
    "blank": "\n",
    "blank in an item": "\n",
    "word": "x",
}
BEGINNINGS = {
    "code": "```py\n", "inner": "- one\n", "strong": "**a ", "em": "*a ", "strong in an item": "- **a ",
    "backtick": "`a ", "blank": "a\n", "blank in an item": "- a\n",
}  # fmt: skip
WAITING = {"strong", "em", "strong in an item", "marks", "backtick", "backticks"}
"""Kinds whose last 2,000 characters a mark to come may still change."""
FAR = ("a ", "word ", *PARTS[20:], "`" * 16, "`" * 17, "x" * 700, "w " * 500, "y" * 1995, "*b* ", "**c** ", "`d`")
"""Marks, and words so long that partners are too far from each other."""


@pytest.mark.cover
def test_an_answer_looks_as_if_it_came_at_once(page):
    draw = random.Random(0)
    texts = ["".join(draw.choices(PARTS, k=draw.randint(1, 40))) for _ in range(300)]
    texts += [f"```\n{'x y' * 3}\n" + "line\n" * 150 + "```\nend"]
    texts += ["".join(draw.choices(FAR, k=draw.randint(3, 30))) for _ in range(40)]
    wrong = page.evaluate(f"""async (texts) => {{ {SHOW}
        const wrong = [];
        for (const text of texts) {{
            const parent = document.createElement("div"), growing = new Growing(parent);
            for (let end = 1; end <= text.length; end += 1) {{
                growing.show(text.slice(0, end));
                if (text.length > 200 && end % 37) continue;
                const once = document.createElement("div");
                new Growing(once).show(text.slice(0, end));
                if (drawn(once) === drawn(parent)) continue;
                wrong.push([text.slice(0, end), drawn(once), drawn(parent)]);
                break;
            }}
        }}
        return wrong.slice(0, 3);
    }}""", texts)  # fmt: skip
    assert wrong == []


@pytest.mark.cover
@pytest.mark.parametrize("kind", LONG)
def test_the_work_grows_with_the_text(kind, page):
    """Count the nodes that are made and the searches in the text while 40 and 160 KB come in pieces."""
    works = page.evaluate(f"""async ([first, part]) => {{ {SHOW}
        const works = [], counts = {{ made: 0, read: 0 }};
        const count = (of, name, what) => {{
            const own = of[name];
            of[name] = function (...given) {{ counts[what] += 1; return own.apply(this, given); }};
            return () => {{ of[name] = own; }};
        }};
        for (const size of [40 * 1024, 160 * 1024]) {{
            const whole = (first + part.repeat(size / part.length)).slice(0, size);
            const parent = document.createElement("div"), growing = new Growing(parent);
            Object.assign(counts, {{ made: 0, read: 0 }});
            const undo = [
                count(document, "createElement", "made"), count(document, "createTextNode", "made"),
                count(RegExp.prototype, "exec", "read"), count(String.prototype, "indexOf", "read"),
                count(String.prototype, "trim", "read"),
            ];
            for (let end = 512; end <= size; end += 512) growing.show(whole.slice(0, end));
            for (const step of undo) step();
            const nodes = document.createTreeWalker(parent);
            let left = 0;
            while (nodes.nextNode()) left += 1;
            works.push({{ ...counts, left }});
        }}
        return works;
    }}""", [BEGINNINGS.get(kind, ""), LONG[kind]])  # fmt: skip
    short, long = works
    assert short["made"] > 0 and short["read"] > 0
    assert long["made"] <= 5 * short["made"] and long["read"] <= 5 * short["read"]
    if kind not in WAITING:
        assert long["made"] <= 4 * long["left"] + 4 * 320  # a piece makes again only what it continues


@pytest.mark.cover
def test_marks_that_are_too_far_from_their_partners_are_text(page):
    """A `<` or `&` after such a mark is text as well."""
    far, near = "x " * 1001, "x " * 900
    found = page.evaluate(f"""async (texts) => {{ {SHOW}
        return texts.map((text) => {{
            const parent = document.createElement("div");
            new Growing(parent).show(text);
            return drawn(parent);
        }});
    }}""", [f"**a {near}b** c", f"**a {far}b** c *d*", f"`a {near}` b", f"`a {far}` <b>&lt; `<i>`",
            f"{'`' * 16}a{'`' * 16}", f"{'`' * 17}a{'`' * 17} b"])  # fmt: skip
    assert found == [
        f"P(STRONG(a {near}b) c)", f"P(**a {far}b** c EM(d))", f"P(CODE(a {near}) b)",
        f"P(`a {far}CODE( <b>&lt; )<i>`)", "P(CODE(a))", f"P({'`' * 17}a{'`' * 17} b)",
    ]  # fmt: skip


@pytest.mark.cover
def test_an_answer_that_begins_otherwise_is_drawn_anew(page):
    found = page.evaluate(f"""async () => {{ {SHOW}
        const parent = document.createElement("div"), growing = new Growing(parent);
        return ["- one\\n- two\\n\\nthree", "- one\\n- two", "- other", "text", ""].map((text) => {{
            growing.show(text);
            return drawn(parent);
        }});
    }}""")
    assert found == ["UL(LI(P(one))LI(P(two))) P(three)", "UL(LI(P(one))LI(P(two)))", "UL(LI(P(other)))", "P(text)", ""]


DIRECTIONS = {
    "word": "ltr", "\u05d0 word": "rtl", "1, 2: \u0627 x": "rtl", "12 * **x \u05d0": "ltr", "": "ltr", "1 + 1": "ltr",
    "- \u05d0\n- b": "rtl", "\u4e2d \u05d0": "ltr", "\U0001e900": "rtl", "\u200f1": "rtl", "\u200e\u05d0": "ltr",
    "\u0301\u05d0": "rtl", "\U0001f600 \ufb1d": "rtl", "`\u0661` x": "ltr", "\u2160 \u05d0": "ltr",
}  # fmt: skip


def test_the_direction_of_an_answer_is_that_of_its_first_letter(page):
    """It is the one that `dir="auto"` gives, which makes a browser read the text again for every element."""
    found = page.evaluate("""async (texts) => {
        const { directionOf } = await import("./direction.js");
        return texts.map((text) => {
            const auto = document.createElement("p");
            auto.dir = "auto";
            auto.textContent = text;
            document.body.append(auto);
            const direction = getComputedStyle(auto).direction;
            auto.remove();
            return [directionOf(text), direction];
        });
    }""", list(DIRECTIONS))  # fmt: skip
    assert found == [[direction, direction] for direction in DIRECTIONS.values()]


def test_an_answer_has_its_direction_while_it_grows(server, page):
    server.scripts["Say"] = Script(pieces=("1. ", "\u05d0\n", "2. b"))
    say(page, "Say")
    text = page.locator(".assistant .text")
    assert text.get_attribute("dir") == "rtl" and text.locator("li").count() == 2


SIZES = (4096, 18432 + 2 * 2000)
"""Characters of a part: at least, and at most; emphasis is not divided."""
LINES = {"lines": f"{LINE}\n", "plain lines": f"{LINE}\n".replace("`", "").replace("*", ""), "marks": "**a *b\n"}
"""Text with line ends, at which dividing it cannot be seen."""
WITHOUT = {
    "words": f"{LINE} ", "strong": f"**{'w ' * 900}** ", "word": "x", "emoji": "\U0001f600",
    "codes": "`aa aa aa aa`*b b b b b b*",
}  # fmt: skip


@pytest.mark.parametrize("kind", [*LINES, *WITHOUT])
def test_long_paragraphs_are_divided_without_a_change(kind, page):
    """Compare 60 KB with the same nodes in one paragraph; with line ends, height and selected text are equal too."""
    part = {**LINES, **WITHOUT}[kind]
    found = page.evaluate(f"""async (text) => {{ {SHOW}
        const {{ inline }} = await import("./markdown.js");
        const around = document.createElement("div"), turn = document.createElement("article");
        around.className = "text";
        turn.className = "turn";
        turn.append(around);
        document.getElementById("turns").append(turn);
        const seen = (parent) => {{
            getSelection().selectAllChildren(parent);
            return [drawn(parent), parent.getBoundingClientRect().height, getSelection().toString()];
        }};
        const shown = [];
        for (const step of [text.length, 997]) {{
            around.replaceChildren();
            const growing = new Growing(around);
            for (let end = step; end < text.length + step; end += step) growing.show(text.slice(0, end));
            shown.push(seen(around));
        }}
        const sizes = [...around.querySelectorAll(".part")].map((x) => x.textContent.length);
        const others = [...around.firstChild.childNodes].filter((x) => !x.matches?.(".part"));
        const rest = others.reduce((sum, x) => sum + x.textContent.length, 0);
        const once = document.createElement("p");
        once.append(...inline(text).nodes);
        around.replaceChildren(once);
        return [...shown, seen(around), sizes, rest];
    }}""", (part * (61440 // len(part)))[:-1])  # fmt: skip
    at_once, grown, undivided, sizes, rest = found
    assert at_once == grown
    assert at_once[0] == undivided[0]
    if kind in LINES:
        assert at_once == undivided
    assert len(sizes) >= 3 and SIZES[0] <= min(sizes) and max([*sizes, rest]) <= SIZES[1]


@pytest.mark.parametrize("part", ["- ok\n", f"{LINE}\n"])
def test_a_long_answer_is_drawn_in_stages(part, page):
    """Each call draws at most 16 KiB; the last one leaves what one draw of the whole answer leaves."""
    drawn, at_once, steps = page.evaluate(f"""async (text) => {{ {SHOW}
        const {{ Turn }} = await import("./turns.js");
        const node = {{ id: "a", parent: null, role: "assistant", text, status: "done" }};
        const turn = new Turn(node, {{}}), once = document.createElement("div"), steps = [];
        const conversation = {{ nodes: {{ a: node }}, chosen: {{}} }};
        turn.update(node, {{ conversation, running: false, busy: false, last: true, before: null, most: 1 }});
        for (steps.push(turn.grown.text.length); !turn.complete; steps.push(turn.grown.text.length)) turn.grow();
        new Growing(once).show(text);
        return [drawn(turn.text), drawn(once), steps];
    }}""", (part * (102400 // len(part)))[:-1])  # fmt: skip
    assert drawn == at_once and len(steps) == 7
    assert max(after - before for before, after in pairwise([0, *steps])) <= 16384


def test_all_of_long_answers_is_on_the_page(server, page):
    """Also after a reload, and of an answer that another one follows while it is drawn; the end stays in sight."""
    long = f"- {LINE}\n" * 600 + "the end"
    server.scripts["Long"] = Script(pieces=(long,))
    say(page, "Long")
    say(page, "and?")
    whole = """(texts) => texts.every((text, n) => text === document.querySelectorAll(".assistant .text")[n]?.innerText
        .replace(/\\s+/g, " ").trim())"""
    texts = [re.sub(r"\s+", " ", re.sub(r"(?m)^- |[`*]", "", long)).strip(), "You said: and?"]
    page.wait_for_function(whole, arg=texts)
    page.reload()
    page.wait_for_function(whole, arg=texts)
    page.wait_for_function("""() => {
        const { scrollHeight, scrollTop, clientHeight } = document.getElementById("scroll");
        return scrollHeight > 5 * clientHeight && scrollHeight - scrollTop - clientHeight < 2;
    }""")


def test_long_thoughts_are_divided(server, page):
    thought = "it thinks\n" * 3000
    pieces = [thought[at : at + 1000] for at in range(0, len(thought), 1000)]
    server.scripts["Think"] = Script(pieces=("<think>", *pieces, "end</think>Yes."), hold_after=3)
    send(page, "Think")
    page.locator(".assistant summary").click()
    server.release()
    page.locator(".assistant .text", has_text="Yes.").wait_for()
    shown = page.locator(".thinking p").last
    assert shown.evaluate("(x) => x.textContent") == f"{thought}end"
    sizes = shown.evaluate("(x) => [...x.querySelectorAll('.part')].map((y) => y.textContent.length)")
    assert len(sizes) == 7 and min(sizes) >= SIZES[0]

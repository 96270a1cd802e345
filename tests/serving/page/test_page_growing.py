"""An answer that grows is drawn as it would be at once, by work that grows with what is new."""

import random

import pytest

SHOW = """
const { Growing } = await import("./growing.js");
const outline = (x) => x.nodeType === 3 ? x.data : x.matches(".lines") ? x.textContent
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
    """What shows `<` and `&` after such a mark is text as well."""
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

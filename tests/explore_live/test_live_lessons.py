"""The view "Lessons": what its endpoints answer and refuse, and lessons that are read and run in a browser."""

import base64
import io

import pytest
from PIL import Image

import lineate
from lineate.explore.live import lessons_view
from lineate.learn.lesson import run
from lineate.learn.lessons import all_lessons
from tests.support.browser import Window
from tests.support.chat_page import walk
from tests.support.explore_page import SIZES
from tests.support.marks import slow_but

LESSONS = all_lessons()
REFUSED = "Failed to load resource"


def ask(client, path, **body):
    reply = client.post(f"/api/{path}", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_every_lesson_is_listed_and_shown(client):
    listed = client.get("/api/about").json()["lessons"]
    assert [(x["number"], x["name"], x["title"]) for x in listed] == [(n, x.name, x.title) for n, x in LESSONS.items()]
    for number, lesson in LESSONS.items():
        found = ask(client, "lessons", lesson=number)
        assert found["equation"] == lesson.equation.rstrip() and found["code"] == lesson.code.rstrip()
        assert found["answer_code"] == lesson.exercise.code.rstrip() and found["next"] and found["question"]
        assert "](" not in "".join(found[part] for part in ("text", "question", "answer", "next"))
    assert ask(client, "lessons", lesson=9)["references"][0].startswith("[Kimi2025] Kimi Team (2025)")


@pytest.mark.parametrize("number", slow_but(LESSONS, [9]))
def test_a_lesson_is_run_by_the_runner_of_the_terminal(client, number):
    found, own = ask(client, "lessons/run", lesson=number), run(LESSONS[number])
    assert found["holds"] and found["printed"] == own.printed.rstrip()
    for told, findings in ((found["findings"], own.findings), (found["answers"], own.answers)):
        assert [(x["says"], x["shown"], x["told"]) for x in told] == [
            (x.claim.says, x.claim.shown, x.told) for x in findings
        ]
    assert Image.open(io.BytesIO(base64.b64decode(found["picture"]))).width > 1000


def test_a_claim_that_fails_is_told(client, monkeypatch):
    op = lineate.delta_rule
    monkeypatch.setattr(lineate, "delta_rule", lambda q, k, v, beta, **options: op(q, k, v, beta / 2, **options))
    monkeypatch.setattr(lessons_view, "find_spec", lambda name: None)  # as if there were no matplotlib
    found = ask(client, "lessons/run", lesson=6)
    assert not found["holds"] and not found["findings"][0]["holds"] and found["findings"][-1]["holds"]
    assert found["picture"] is None


@pytest.mark.parametrize("path", ["lessons", "lessons/run"])
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "lesson"), ({"lesson": 0}, "lesson"), ({"lesson": 13}, "lesson"), ({"lesson": "6"}, "lesson"),
        ({"lesson": True}, "lesson"), ({"lesson": 1.5}, "lesson"), ({"lesson": [6]}, "lesson"),
        ({"lesson": 6, "code": "print(1)"}, "code"), ({"lesson": "__import__('os')"}, "lesson"),
    ],
)  # fmt: skip
def test_only_the_number_of_a_lesson_is_taken(client, path, body, field, monkeypatch):
    monkeypatch.setattr(lessons_view, "run", lambda lesson: pytest.fail("nothing may run"))
    reply = client.post(f"/api/{path}", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == field


def drawn(page):
    page.locator("#lesson canvas[data-drawn]").wait_for()


def headed(page, words):
    page.locator("#lesson-title", has_text=words).wait_for()


@pytest.mark.cover
@pytest.mark.parametrize("size", slow_but(SIZES, ["phone"]))
def test_a_lesson_is_read_run_and_answered(sized, size, tmp_path):
    page, lesson = sized, LESSONS[9]
    page.click("#tab-lessons")
    headed(page, "1. Softmax attention")
    name = f"9. {lesson.title}" if size == "wide" else f"9. {lesson.name}"
    page.get_by_role("link", name=name, exact=True).click()
    headed(page, f"9. {lesson.title}")
    assert page.locator("#lesson .code code").first.inner_text() == lesson.code.rstrip()
    assert page.locator("#lesson-outcome").inner_text() == ""
    page.get_by_role("button", name="Run this program").click()
    drawn(page)
    assert page.locator("#lesson-state").inner_text() == "All 7 claims hold."
    assert page.locator("#status").inner_text() == "Lesson 9: All 7 claims hold."
    text = page.locator("#lesson-outcome").inner_text()
    assert "relative difference of one step in the other order: 0.035" in text  # printed
    assert "holds with equal channels it is Gated DeltaNet: off by " in text and lesson.picture.caption in text
    page.click("#lesson-answer summary")
    assert "holds the other order: off by" in page.locator("#lesson-answers").inner_text()
    with page.expect_download() as download:
        page.click("#save-png")
    assert download.value.suggested_filename == "lineate-09-kimi.png" and not page.locator("#save-svg").is_visible()
    download.value.save_as(tmp_path / "picture.png")
    assert Image.open(tmp_path / "picture.png").width > 1000
    other = page.context.new_page()
    other.goto(page.url)
    drawn(other)
    assert other.url == page.url and other.url.endswith("#lessons?lesson=9&run=1&answer=1")
    assert other.locator("#lesson").inner_text() == page.locator("#lesson").inner_text()
    page.get_by_role("link", name="Next: 10. ").click()
    headed(page, "10. Attention as learning")
    assert page.evaluate("document.activeElement.id") == "lesson-title"
    assert page.locator("#lesson-list [aria-current]").count() == 1 and page.url.endswith("#lessons?lesson=10")
    page.go_back()
    drawn(page)  # what was run is still there
    page.get_by_role("link", name="Open Memory").click()
    page.locator("#answers caption", has_text="Asked for B after step 3").wait_for()
    assert page.locator("#save-svg").is_visible()


@pytest.mark.slow
def test_every_lesson_opens_a_view(browser, address):
    window = Window(browser, address, **SIZES["wide"])
    page = window.open()
    for number in LESSONS:
        page.goto(f"{address}/#lessons?lesson={number}")
        headed(page, f"{number}. ")
        assert page.locator("#lesson code", has_text="`").count() == 0
        page.locator("#lesson a.go", has_text="Open ").click()
        view = page.url.partition("#")[2].partition("?")[0]
        page.locator(f"#{view} figure svg").first.wait_for()
        assert view != "lessons" and not page.locator("#notice").is_visible()
    window.context.close()
    window.check()


@pytest.mark.slow
def test_keyboard_only(page):
    walk(page, "Lessons")
    page.keyboard.press("Enter")
    headed(page, "1. ")
    walk(page, f"9.{LESSONS[9].title}{LESSONS[9].name}", most=60)  # all text of the link, of which a screen shows half
    page.keyboard.press("Enter")
    headed(page, "9. ")
    walk(page, "Code, python")
    walk(page, "Run this program")
    page.keyboard.press("Enter")
    drawn(page)
    walk(page, "Answer")
    page.keyboard.press("Enter")
    page.locator("#lesson-answers", has_text="holds").wait_for()
    walk(page, "Open Memory: write A and B, forget A")
    page.keyboard.press("Enter")
    page.locator("#answers caption", has_text="Asked for B").wait_for()


@pytest.mark.parametrize("link", slow_but(["lesson=13", "lesson=kimi", "run=2", "code=1"], ["lesson=13"]))
def test_a_wrong_link_is_said(page, link):
    page.goto(page.url.partition("#")[0] + f"#lessons?{link}")
    page.locator("#notice", has_text="The link could not be read").wait_for()
    headed(page, "1. Softmax attention")
    page.get_by_role("link", name="2. Linear attention").first.click()
    page.locator("#notice").wait_for(state="hidden")


@pytest.mark.slow
def test_a_server_that_is_gone_is_said(page, window):
    window.expected = REFUSED
    page.click("#tab-lessons")
    headed(page, "1. ")
    window.context.route("**/api/lessons/run", lambda route: route.abort())
    page.click("#lesson-run")
    page.locator("#notice", has_text="lineate explore does not answer").wait_for()
    assert page.url.endswith("#lessons?lesson=1") and page.locator("#lesson-run").is_enabled()
    window.context.unroute("**/api/lessons/run")
    page.click("#lesson-run")
    drawn(page)
    assert not page.locator("#notice").is_visible()

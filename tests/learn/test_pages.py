"""The pages of docs/learn are what the modules say, and their pictures are what the modules draw."""

import re
from pathlib import Path

import pytest

from tests.support.marks import slow_but

pytest.importorskip("matplotlib")

from lineate.learn.lesson import picture_source, run, save_picture
from lineate.learn.lessons import all_lessons
from lineate.learn.references import CITATION, GROUPS, REFERENCES, cited, group_of
from lineate.learn.render import render_pages
from lineate.learn.show import file_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/learn"
MOST_BYTES = 60_000
AGAIN = "run python -m lineate.learn.render docs/learn"


@pytest.fixture(scope="module")
def outcomes():
    return {number: run(lesson) for number, lesson in all_lessons().items()}


@pytest.mark.cover
def test_the_pages_are_current(outcomes):
    pages = render_pages(outcomes)
    wrong = [name for name, text in pages.items() if (FOLDER / name).read_text(encoding="utf-8") != text]
    assert wrong == [], AGAIN
    assert {path.name for path in FOLDER.glob("*.md")} == {name for name in pages if "/" not in name}


@pytest.mark.cover
@pytest.mark.parametrize("number", all_lessons())
def test_the_pictures_are_current_and_small(number):
    lesson = all_lessons()[number]
    path = FOLDER / "images" / f"{file_name(number, lesson)}.png"
    assert path.stat().st_size < MOST_BYTES
    assert picture_source(path) == lesson.picture.digest(lesson.code), AGAIN


@pytest.mark.parametrize("number", slow_but(all_lessons(), [2, 9]))
def test_a_picture_is_drawn_with_its_source(number, outcomes, tmp_path):
    """A lesson whose program or drawing has changed must be drawn anew for the pages, so few are drawn here again."""
    lesson, path = all_lessons()[number], tmp_path / "picture.png"
    save_picture(lesson.picture, lesson.code, outcomes[number].names, path)
    assert path.stat().st_size < MOST_BYTES
    assert picture_source(path) == lesson.picture.digest(lesson.code)


def test_no_picture_is_left_over():
    wanted = {f"{file_name(number, lesson)}.png" for number, lesson in all_lessons().items()}
    assert {path.name for path in (FOLDER / "images").iterdir()} == wanted


def test_every_page_is_in_the_navigation():
    shown = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in FOLDER.glob("*.md")]
    assert [page for page in (*pages, "references.md") if f"- {page}\n" not in shown] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_citations_are_known_and_linked(page):
    """A key with a year in square brackets is a reference, and its target stands at the end of the page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    keys = set(CITATION.findall(text))
    assert sorted(keys - set(REFERENCES)) == []
    if page.name == "references.md":
        return
    up = "../" * (len(page.relative_to(ROOT / "docs").parts) - 1)
    headings = {key: re.sub(r"[^\w\- ]", "", group_of(key).lower()).replace(" ", "-") for key in keys}
    lines = text.splitlines()
    assert [key for key in sorted(keys) if f"[{key}]: {up}references.md#{headings[key]}" not in lines] == []


def test_references_are_well_formed():
    assert len(REFERENCES) == sum(map(len, GROUPS.values()))
    for reference in REFERENCES.values():
        assert re.fullmatch(r"(\d{4}\.\d{4,5})?", reference.arxiv), reference.key
        assert 1900 < reference.year < 2100 and reference.authors and reference.title
        year = re.search(r"\d{4}", reference.key)
        assert year is None or int(year[0]) == reference.year
    arxiv = [reference.arxiv for reference in REFERENCES.values() if reference.arxiv]
    assert len(set(arxiv)) == len(arxiv)


def test_every_reference_is_cited():
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "references.md"]
    found = {reference.key for page in pages for reference in cited(page.read_text())}
    assert sorted(set(REFERENCES) - found) == []


def test_citations_are_found_in_their_order():
    assert [x.key for x in cited("[Kimi2025], x[0], [Nobody1999], [Dao2022], [Kimi2025]")] == ["Kimi2025", "Dao2022"]

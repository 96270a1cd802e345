"""The programs in the documentation run, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])


def programs(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "count"), [("README.md", 1), ("docs/serving.md", None)])
def test_programs_run(page, count):
    """The first `count`, or all, one after another: a later one may use what an earlier one made."""
    names: dict[str, object] = {}
    found = programs(ROOT / page)[:count]
    assert found
    for text in found:
        exec(compile(text, page, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link

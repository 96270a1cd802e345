"""The demo's page is self-contained, well formed, agrees with the terminal, and has the numbers of demo.json."""

import base64
import json
import struct
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from lineate import cli
from lineate.explore.findings import size
from lineate.explore.memories import DEMO_RULES
from lineate.figures import narrow_label_of

typer_testing = pytest.importorskip("typer.testing", reason="the command line needs typer")
pytest.importorskip("matplotlib", reason="the demo draws")

from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

from lineate.explore.report import Section, save_report  # noqa: E402

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Collects tables as rows of text, images, links, headings and all text; fails where tags do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.images: list[dict[str, str | None]] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.headings: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag == "img":
            self.images.append(dict(attrs))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag == "h2":
            self.headings.append("")
        if tag == "br":
            self.handle_data(" ")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data
        if self.open and self.open[-1] == "h2":
            self.headings[-1] += data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("demo")
    threads = torch.get_num_threads()
    done = typer_testing.CliRunner().invoke(cli.build_app(), ["demo", "--quick", "--out", str(out)])
    torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    return out, done.output


@pytest.fixture(scope="module")
def page(run: tuple[Path, str]) -> Page:
    return Page((run[0] / "report.html").read_text(encoding="utf-8"))


@pytest.mark.cover
def test_the_demo_says_where_the_page_is(run: tuple[Path, str]) -> None:
    out, said = run
    before, last = said.splitlines()[-2:]
    assert "one page" in before and last.strip() == str(out / "report.html")


@pytest.mark.cover
def test_nothing_is_loaded_from_elsewhere(run: tuple[Path, str], page: Page) -> None:
    html = (run[0] / "report.html").read_text(encoding="utf-8")
    assert "@import" not in html and "url(" not in html
    assert not {tag for tag, _, _ in page.attributes} & {"script", "link", "iframe", "object"}
    for _, name, value in page.attributes:
        assert name not in ("srcset", "onload", "onclick", "action", "data")
        if name == "src":
            assert value is not None and value.startswith("data:image/png;base64,")
        if name == "href":
            assert value is not None and value.startswith("#")
    targets = {value for _, name, value in page.attributes if name == "id"}
    assert {value[1:] for _, name, value in page.attributes if name == "href" and value} == targets


@pytest.mark.cover
def test_the_images_are_the_files(run: tuple[Path, str], page: Page) -> None:
    files = sorted(run[0].glob("*.png"))
    assert len(files) == len(page.images) == 5
    for image, file in zip(page.images, files, strict=True):
        source = image["src"]
        assert source is not None and image["alt"]
        data = base64.b64decode(source.partition(",")[2], validate=True)
        assert data == file.read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert width > 800 and height > 400


@pytest.mark.cover
def test_the_tables_have_the_numbers_of_the_json(run: tuple[Path, str], page: Page) -> None:
    saved = json.loads((run[0] / "demo.json").read_text())
    summary, reasons, filled, changed, topics, cleared, cost = page.tables
    expected = {
        rule: [
            *(f"{row[name]:.2f}" for name in ("kept", "overwritten", "old", "new_topic", "unseen", "facts")),
            "-" if row["norm"] is None else f"{row['norm']:.1f}",
            size(row["bytes"]),
        ]
        for rule, row in saved["summary"].items()
    }
    assert _rows(summary) == expected
    for row, reason in zip(reasons, saved["reasons"], strict=True):
        show = size if reason["measure"].startswith("bytes") else "{:.2f}".format
        assert f"{show(reason['value_before'])} -> {show(reason['value'])}" in row[1]
    again = saved["interference"]["error_by_told"]
    assert {rule: row[-1] for rule, row in _rows(filled).items()} == {
        rule: f"{again[rule][-1]:.2f}" for rule in DEMO_RULES
    }
    for column, name in enumerate(("old", "kept", "overwritten")):
        found = {rule: row[column] for rule, row in _rows(changed).items()}
        assert found == {rule: f"{saved['overwrite'][name][rule]:.2f}" for rule in DEMO_RULES}
    assert {rule: row[-1] for rule, row in _rows(topics).items()} == _shown(saved["topics"]["unseen"])
    assert {rule: row[0] for rule, row in _rows(cleared).items()} == _shown(saved["scratch_pad"]["facts"])
    times = saved["cost"]["prefill_microseconds"]
    assert {rule: row[-1] for rule, row in _rows(cost).items()} == {
        rule: f"{times[rule][-1]:.0f}" for rule in DEMO_RULES
    }


def test_the_page_says_what_the_terminal_said(run: tuple[Path, str], page: Page) -> None:
    terminal = " ".join(run[1].split())
    for scene in ("1  Many pairs in one memory", "5  What it costs", "Summary", "Why each rule was invented"):
        assert scene in page.headings and " ".join(scene.split()) in terminal
    assert page.headings[0] == "Summary"
    for words in ("DeltaNet writes only what is still missing", "in the end 32 times less", "mean cosine of 0.1"):
        assert words in page.text and words in terminal


def _rows(table: list[list[str]]) -> dict[str, list[str]]:
    """Return the cells of every memory, without the star of the best."""
    names = {narrow_label_of(rule): rule for rule in DEMO_RULES}
    return {names[row[0]]: [cell.rstrip("* ") for cell in row[1:]] for row in table[1:]}


def _shown(values: dict[str, float]) -> dict[str, str]:
    return {rule: f"{value:.2f}" for rule, value in values.items()}


def test_everything_is_escaped(tmp_path: Path) -> None:
    evil = '<script>alert("&")</script>'
    section = Section(evil)
    section.paragraph(evil)
    section.note(evil)
    section.sentences([evil])
    table = Table()
    table.add_column(evil)
    table.add_column(evil, justify="right")
    table.add_row(Text(evil, style="bold"), Text.assemble("a", (evil, "bold red")), style="dim")
    section.table(table)
    picture = tmp_path / "x.png"
    picture.write_bytes(b"not really")
    section.image(picture, f'" onload={evil}')
    save_report(tmp_path / "page.html", evil, section, [section], evil)
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(html)
    assert "<script" not in html and not any(name == "onload" for _, name, _ in page.attributes)
    assert page.headings == [evil] and page.tables[0] == [[evil, evil], [evil, f"a{evil}"]]
    assert '<b class="worse">' in html and '<tr class="dim">' in html
    assert page.text.count(evil) >= 10

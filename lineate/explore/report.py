"""The demo as one self-contained HTML page with embedded pictures, for light and dark screens and for print.

The page has the contents of the terminal: the same rich tables, the same sentences. All text is escaped.
"""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from rich.table import Table
from rich.text import Text

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""The content security policy: browsers load nothing else."""
PAGE_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1d2127; --soft: #5b6470; --line: #d5dae1; --best: #00694d; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --ink: #e4e7eb; --soft: #a2abb6; --line: #3a414a; --best: #5fd0a8; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { margin: 0 0 .5rem; font-size: 1.6rem; line-height: 1.25; }
h2 { margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); font-size: 1.2rem; }
p, ul, nav { max-width: 46rem; margin: .6rem 0; }
li { margin: .3rem 0; }
nav a { margin-right: 1rem; white-space: nowrap; }
a { color: inherit; }
.note, footer { color: var(--soft); font-size: .875rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
thead th { vertical-align: bottom; font-weight: 600; border-bottom-color: var(--soft); }
tr th:first-child { padding-left: 0; }
tbody th { font-weight: 400; white-space: nowrap; }
.right { text-align: right; white-space: nowrap; }
.dim { color: var(--soft); }
b { color: var(--best); white-space: nowrap; }
.worse { color: inherit; }
figure { margin: 1.25rem 0; }
img { display: block; width: 100%; height: auto; padding: .5rem; background: #ffffff; border: 1px solid var(--line);
  border-radius: 4px; }
@media (max-width: 45rem) {
  table { font-size: .8rem; }
  th, td { padding: .25rem .35rem; }
}
@media (max-width: 34rem) {
  figure { overflow-x: auto; }
  img { min-width: 40rem; }
}
@media print {
  :root { color-scheme: light; --paper: #ffffff; --ink: #000000; --soft: #444444; --line: #bbbbbb; --best: #00543e; }
  @page { margin: 15mm; }
  html { font-size: 10pt; }
  body { max-width: none; padding: 0; }
  nav { display: none; }
  h2 { break-after: avoid; }
  .wide { overflow: visible; }
  table, figure, li { break-inside: avoid; }
  th, td { padding: .15rem .4rem; }
  img { min-width: 0; padding: 0; border: none; }
}
"""


class Section:
    """One part of the page: a heading and the added contents, in order."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.parts: list[str] = []

    def paragraph(self, text: str) -> None:
        """Add plain text."""
        self.parts.append(f"<p>{escape(text)}</p>")

    def note(self, text: str) -> None:
        """Add small print."""
        self.parts.append(f'<p class="note">{escape(text)}</p>')

    def sentences(self, sentences: Sequence[str]) -> None:
        """Add findings as a list."""
        self.parts.append("<ul>\n" + "\n".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "\n</ul>")

    def table(self, table: Table) -> None:
        """Add a rich table: headers, bold cells and dim rows stay, and the first column names the rows."""
        lines = ['<div class="wide"><table>']
        if table.show_header:
            cells = "".join(
                f'<th scope="col"{_right(column.justify)}>{_markup(column.header)}</th>' for column in table.columns
            )
            lines.append(f"<thead><tr>{cells}</tr></thead>")
        lines.append("<tbody>")
        columns = [(column.justify, list(column.cells)) for column in table.columns]
        for index, row in enumerate(table.rows):
            head, *numbers = (
                f"<td{_right(justify)}>{_markup(cells[index])}</td>" if number else _markup(cells[index])
                for number, (justify, cells) in enumerate(columns)
            )
            dim = ' class="dim"' if row.style == "dim" else ""
            lines.append(f'<tr{dim}><th scope="row">{head}</th>{"".join(numbers)}</tr>')
        self.parts.append("\n".join([*lines, "</tbody></table></div>"]))

    def image(self, path: Path, description: str) -> None:
        """Add a PNG file, inside the page; the description is for those who cannot see it."""
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        self.parts.append(f'<figure><img src="data:image/png;base64,{data}" alt="{escape(description)}"></figure>')


def save_report(path: Path, title: str, introduction: Section, sections: Sequence[Section], footer: str) -> None:
    """Write the page: its title, an introduction (its heading is not shown), links to the sections, these, a footer."""
    links = "\n".join(f'<a href="#part-{i}">{escape(section.title)}</a>' for i, section in enumerate(sections))
    lines = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>{PAGE_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{escape(title)}</h1>",
        *introduction.parts,
        f"<nav>\n{links}\n</nav>",
    ]
    for i, section in enumerate(sections):
        lines += [f'<section id="part-{i}">\n<h2>{escape(section.title)}</h2>', *section.parts, "</section>"]
    lines += [f"</main>\n<footer>{escape(footer)}</footer>\n</body>\n</html>\n"]
    path.write_text("\n".join(lines), encoding="utf-8")


def _right(justify: str) -> str:
    return ' class="right"' if justify == "right" else ""


def _markup(cell: object) -> str:
    """Return a cell's text; what is bold on the terminal is bold here, and green unless it is red there."""
    if not isinstance(cell, Text):
        return escape(str(cell)).replace("\n", "<br>")
    pieces = cell.divide(sorted({edge for span in cell.spans for edge in (span.start, span.end)}))
    result = ""
    for piece in pieces:
        text = escape(piece.plain).replace("\n", "<br>")
        style = " ".join(str(style) for style in (cell.style, *(span.style for span in piece.spans)))
        tag = '<b class="worse">' if "red" in style else "<b>"
        result += f"{tag}{text}</b>" if "bold" in style and text else text
    return result

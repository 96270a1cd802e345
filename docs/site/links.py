"""A hook of mkdocs: the pages link to files beside docs/, which are no part of the site.

The site shows such a link as its text with the file's path behind it.
"""

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]*)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page's text without links that lead out of docs/."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def shown(match: re.Match[str]) -> str:
        text, link = match.groups()
        path = posixpath.normpath(posixpath.join(folder, link))
        if path.startswith("docs/"):
            return match.group()
        return text if path in text or text.strip("`/") == path else f"{text} (`{path}`)"

    return LINK.sub(shown, markdown)

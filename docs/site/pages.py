"""A hook of mkdocs that adapts pages for the site.

- A link to a file outside docs/, which is no part of the site, becomes its text with the file's path behind it.
- <a, b> in prose is an inner product, not a tag of HTML.
"""

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]*)[^)]*\)")
CODE = re.compile(r"(^```.*?^```|^    .*?$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page for the site."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def shown(match: re.Match[str]) -> str:
        text, link = match.groups()
        path = posixpath.normpath(posixpath.join(folder, link))
        if path.startswith("docs/"):
            return match.group()
        return text if path in text or text.strip("`/") == path else f"{text} (`{path}`)"

    parts = CODE.split(LINK.sub(shown, markdown))
    parts[::2] = [re.sub(r"<(?=\w)", "&lt;", prose) for prose in parts[::2]]
    return "".join(parts)

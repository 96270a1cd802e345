"""The files of pages: those of a page's own folder and those that all pages share."""

from os import PathLike
from pathlib import Path

from starlette.staticfiles import StaticFiles

SHARED = Path(__file__).with_name("page")
"""The files that all pages share."""


class PageFiles(StaticFiles):
    """Serves the files of one folder, then those that all pages share.

    Args:
        folder: The folder of the page.
        html: Whether "/" is index.html.
    """

    def __init__(self, folder: Path, html: bool = False) -> None:
        super().__init__(directory=folder, html=html)

    def get_directories(
        self, directory: str | PathLike[str] | None = None, packages: list[str | tuple[str, str]] | None = None
    ) -> list[str | PathLike[str]]:
        """Return the folders in which a file is searched, in this order."""
        return [*super().get_directories(directory, packages), SHARED]


def page_files(folder: Path) -> list[Path]:
    """Return all files that a page consists of.

    Args:
        folder: The folder of the page.
    """
    return sorted([*folder.iterdir(), *SHARED.iterdir()], key=lambda file: file.name)

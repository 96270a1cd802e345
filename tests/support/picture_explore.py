"""Take the pictures of `lineate explore` for the documentation: python -m tests.support.picture_explore docs/images"""

import io
import sys
from pathlib import Path

from PIL import Image

from tests.support.browser import Window, started
from tests.support.explore_page import exploring

SHOWN = {
    "explore": (
        "#memory?cosine=0.3&ask=A&at=4&steps=A:w:0.9:1;B:x:0.9:1;A:y:0.9:1;C:z:0.9:1;B:!:0",
        "#answers caption:text('after step 4')",
    ),
    "explore-lessons": ("#lessons?lesson=9&run=1", "#lesson canvas[data-drawn]"),
}
"""For each picture the link of its view, and what must be seen before it is taken."""


def main(folder: Path) -> None:
    """Write the pictures into a folder."""
    with exploring() as address, started() as browser:
        for name, (link, shown) in SHOWN.items():
            window = Window(browser, address, viewport={"width": 1440, "height": 1012})
            page = window.context.new_page()
            page.goto(f"{address}/{link}")
            page.locator(shown).wait_for()
            page.wait_for_timeout(300)
            if name == "explore-lessons":
                page.evaluate("window.scrollTo(0, document.querySelector('#lesson h3').offsetTop - 60)")
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
                folder / f"{name}.png", optimize=True
            )
            window.context.close()
            window.check()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

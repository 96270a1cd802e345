"""Take the picture of `lineate explore` for the documentation: python tests/support/picture_explore.py docs/images"""

import io
import sys
from pathlib import Path

from browser import Window, started
from explore_page import asked, exploring
from PIL import Image

LINK = "#memory?cosine=0.3&ask=A&at=4&steps=A:w:0.9:1;B:x:0.9:1;A:y:0.9:1;C:z:0.9:1;B:!:0"


def main(folder: Path) -> None:
    """Write the picture into a folder."""
    with exploring() as address, started() as browser:
        window = Window(browser, address, viewport={"width": 1440, "height": 1012})
        page = window.context.new_page()
        page.goto(f"{address}/{LINK}")
        asked(page, "after step 4")
        page.wait_for_timeout(300)
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            folder / "explore.png", optimize=True
        )
        window.context.close()
        window.check()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Take the pictures of `lineate explore` for the documentation: python -m tests.support.picture_explore docs/images"""

import io
import sys
from pathlib import Path

from PIL import Image

from tests.support.browser import Window, started
from tests.support.explore_page import SIZES, exploring

SHOWN = {
    "explore": (
        "#memory?cosine=0.3&ask=A&at=4&steps=A:w:0.9:1;B:x:0.9:1;A:y:0.9:1;C:z:0.9:1;B:!:0",
        "#answers caption:text('after step 4')",
    ),
    "explore-model": (
        "#model?model=small&layer=0&head=1&at=20&changes=0:linear_attention:",
        "#model-summary:text('with the changes')",
    ),
    "explore-lessons": ("#lessons?lesson=9&run=1", "#lesson canvas[data-drawn]"),
}
"""For each picture the link of its view, and what must be seen before it is taken."""

HEIGHTS = {"explore-model": 1180}
GAP = 40
PHONES = (
    (SHOWN["explore-model"], "dark"),
    (("#learning", "#learning figure svg >> nth=0"), "light"),
)
"""The views of the picture of phones, which stand next to each other."""


def main(folder: Path) -> None:
    """Write the pictures into a folder."""
    with exploring() as address, started() as browser:
        for name, (link, shown) in SHOWN.items():
            window = Window(browser, address, viewport={"width": 1440, "height": HEIGHTS.get(name, 1012)})
            page = window.context.new_page()
            page.goto(f"{address}/{link}")
            page.locator(shown).wait_for()
            page.wait_for_timeout(300)
            if name == "explore-lessons":
                page.evaluate("window.scrollTo(0, document.querySelector('#lesson h3').offsetTop - 60)")
            save(Image.open(io.BytesIO(page.screenshot())).convert("RGB"), folder / f"{name}.png")
            window.context.close()
            window.check()
        taken = []
        for (link, shown), colours in PHONES:
            size = {**SIZES["phone"], "viewport": {"width": 390, "height": 1500}, "device_scale_factor": 2}
            window = Window(browser, address, **size, color_scheme=colours)
            page = window.context.new_page()
            page.goto(f"{address}/{link}")
            page.locator(shown).wait_for()
            page.wait_for_timeout(300)
            taken.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
            window.context.close()
            window.check()
        both = Image.new("RGB", (sum(x.width for x in taken) + GAP, taken[0].height), "white")
        both.paste(taken[0], (0, 0))
        both.paste(taken[1], (taken[0].width + GAP, 0))
        save(both, folder / "explore-phone.png")


def save(picture: Image.Image, file: Path) -> None:
    """Write a picture with 256 colours."""
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(file, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Take the pictures of the chat page that the documentation shows: python -m tests.support.picture_page docs/images

The answers are scripted, so that the pictures do not depend on a checkpoint.
"""

import io
import re
import sys
from pathlib import Path

from PIL import Image

from tests.support.browser import Window, started
from tests.support.chat_page import say
from tests.support.scripted_server import Script, ScriptedServer

TALK = {
    "How does the delta rule change a memory?": """It **replaces** what a key held before, rather than adding to it:

```python
def step(state, k, v, beta):
    read = state @ k                      # what the memory says now
    return state + beta * torch.outer(v - read, k)
```

1. A key that is written twice keeps the *second* value.
2. With `beta = 1` the old value is gone.
3. The state keeps its size, whatever the length of the text.
""",
    "And what happens when it is full?": """Keys overlap then, and reading one of them returns a mixture of values. \
A gate that forgets before each write makes room again.""",
}
SHOTS = {
    "page-wide": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"},
    "page-phone": {
        "viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "has_touch": True, "is_mobile": True,
    },
}  # fmt: skip


def main(folder: Path) -> None:
    """Write the pictures into a folder."""
    with started() as browser:
        for name, options in SHOTS.items():
            with ScriptedServer(models=("hybrid-24-layers",), pattern="GGGA" * 6) as server:
                for text, answer in TALK.items():
                    server.scripts[text] = Script(pieces=tuple(re.findall(r"\S+\s*", answer)), pause=0.012)
                window = Window(browser, server.address, **options)
                page = window.open()
                say(page, "Plan a walk of two hours by the lake")
                page.evaluate("document.getElementById('new').click()")
                for text in TALK:
                    say(page, text)
                page.evaluate("document.activeElement.blur()")
                page.wait_for_timeout(300)
                picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
                picture.quantize(128, dither=Image.Dither.NONE).save(folder / f"{name}.png", optimize=True)
                window.context.close()
                window.check()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

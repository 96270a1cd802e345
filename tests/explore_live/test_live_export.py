"""`lineate explore --export`: a copy of the page on a plain file server, what it keeps, and what is live only."""

import functools
import http.server
import json
import threading
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from lineate.cli import build_app
from lineate.explore.live import export as exporting
from tests.support.browser import Window
from tests.support.explore_page import answers, asked, some_models

pytestmark = pytest.mark.cover

LIVE_ONLY = "This page is a copy without a server, and it keeps no answer for that"


@contextmanager
def served(folder):
    """Serve the folder above a copy as `python -m http.server` does, and yield the address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    handler = functools.partial(Quiet, directory=folder.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(30)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A copy with a short text, one task, two memories, one preset and one lesson."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "TEXT", "aba")
        patch.setattr(exporting, "TASKS", {"pairs": exporting.TASKS["pairs"]})
        patch.setattr(exporting, "LEARNERS", {name: exporting.LEARNERS[name] for name in ("delta_rule", "titans")})
        patch.setattr(exporting, "NUMBERS", (9,))
        patch.setattr(exporting, "PRESETS", {"tiny": exporting.PRESETS["tiny"]})
        folder = tmp_path_factory.mktemp("files") / "copy"
        files, size = exporting.export(folder, some_models())
    assert files == sum(path.is_file() for path in folder.rglob("*")) and size < 8 * 2**20
    return folder


@pytest.fixture
def copied(browser, small):
    with served(small) as address:
        own = Window(browser, address, viewport={"width": 1440, "height": 900})
        page = own.context.new_page()
        page.goto(f"{address}/{small.name}/")
        yield page
        own.context.close()
        own.check()


def shows(page, view):
    page.click(f"#tab-{view}")
    page.locator(f"#{view} figure svg").first.wait_for()
    assert not page.locator("#notice").is_visible()


def test_a_copy_shows_every_view(copied):
    page = copied
    asked(page, "Asked for A after step 3")
    assert answers(page)["DeltaNet"] == ["1 y", "0", "1.41"]
    page.get_by_label("Ask for B").check()
    asked(page, "Asked for B")
    shows(page, "model")
    page.locator("#model-summary", has_text="after token 3 of 3").wait_for()
    page.click("#token-before")
    page.locator("#model-summary", has_text="after token 2 of 3").wait_for()
    page.select_option("#layer", "2")
    page.select_option("#attention-head", "1")
    page.locator("#model-summary", has_text="layer 2, softmax attention, head 1").wait_for()
    page.select_option("#layer", "0")
    page.get_by_label("Forget nothing").check()
    page.locator("#model-summary", has_text="with the changes").wait_for()
    page.goto(page.url.partition("#")[0] + "#learning?memories=delta_rule:sgd:1;titans:momentum:0.3")
    shows(page, "learning")
    page.select_option("#optimiser-titans", "adam")
    page.locator("#losses tr", has_text="Titans").filter(has_text="adam").wait_for()
    shows(page, "plan")
    page.locator("#context").press("End")
    page.locator("#numbers tr", has_text="Cache").filter(has_text="1.5 TiB").wait_for()
    page.goto(page.url.partition("#")[0] + "#lessons?lesson=9")
    page.get_by_role("button", name="Show what running it gave").click()
    page.locator("#lesson canvas[data-drawn]").wait_for()
    assert not page.locator("#notice").is_visible()


@pytest.mark.slow
def test_a_copy_says_what_is_live_only(copied):
    page = copied
    asked(page, "after step 3")
    page.get_by_text("What it keeps, and what is live only").click()
    text = page.locator("#kept").inner_text()
    for view in ("Memory", "Model", "Learning", "Plan", "Lessons"):
        assert view in text
    assert text.count("Live only: ") == 4 and "'aba'" in text and "every layer, every head, every token" in text
    page.get_by_role("link", name="write A and B, forget A").click()
    asked(page, "Asked for B after step 3")
    assert answers(page)["Kimi Delta Attention"][:2] == ["1 x", "0"]
    page.get_by_role("link", name="layer 0: output gate open").click()
    page.locator("#model-summary", has_text="with the changes").wait_for()
    page.fill("#text", "something else")
    page.locator("#notice", has_text=LIVE_ONLY).wait_for()
    assert page.locator("#which-model option").all_inner_texts() == ["tiny, untrained"]
    page.click("#tab-memory")
    page.locator("#notice").wait_for(state="hidden")
    page.get_by_role("button", name="Write C = x").click()
    page.locator("#notice", has_text=LIVE_ONLY).wait_for()


@pytest.mark.slow
def test_every_link_of_a_whole_copy(browser, tmp_path):
    folder = tmp_path / "copy"
    exporting.export(folder, some_models())
    kept = json.loads((folder / "api" / "about").read_text())["kept"]
    links = [link["href"] for part in kept["views"] for link in part["links"]]
    with served(folder) as address:
        window = Window(browser, address)
        for link in links:
            page = window.context.new_page()
            page.goto(f"{address}/copy/{link}")
            view = link[1:].partition("?")[0]
            page.locator(
                f"#{view} figure svg, #{view} canvas[data-drawn], #model-summary:text('see the view Learning')"
            ).first.wait_for()
            assert not page.locator("#notice").is_visible(), link
            page.close()
        window.context.close()
        window.check()


def test_a_copy_is_replaced_and_other_files_are_not(small, tmp_path):
    def run(folder):
        done = CliRunner().invoke(build_app(), ["explore", "--export", str(folder)])
        return done.exit_code, " ".join((done.stdout + done.stderr).split())

    (tmp_path / "thesis.txt").write_text("years")
    code, said = run(tmp_path)
    assert code == 2 and "--export must be a new or empty folder, or an earlier copy" in said
    code, said = run(tmp_path / "thesis.txt")
    assert code == 2 and "which is a file" in said
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert (small / "kept" / "index.json").is_file()

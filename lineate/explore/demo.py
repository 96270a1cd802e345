"""The demo on the terminal: five scenes with a table and findings each, a summary, and all of it as a page."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lineate.console.terminal import printable
from lineate.explore import findings, recall, tables
from lineate.explore.cost import CostSetting, measure_cost
from lineate.explore.memories import OnProgress, RecallSetting
from lineate.explore.report import Section, save_report
from lineate.system.threads import one_thread

PART_SECONDS = {
    "filling the memories": 1.5,
    "overwriting": 3.5,
    "changing the topic": 1.5,
    "clearing a scratch pad": 0.5,
    "measuring the cost": 14.0,
    "drawing": 4.0,
}
"""The parts of the demo and the approximate seconds of each, so that the bar moves evenly."""
FIGURES = {
    "1_interference.png": "Recall error against the number of pairs, and against how often the same pairs were told.",
    "2_overwrite.png": "Recall error of every key after every write, one panel per memory.",
    "3_topics.png": "Norm of the state over many topics; error on the last topic; answer to a key never written.",
    "4_compromises.png": "Errors that one gate can reach, against correcting and against a gate per channel.",
    "5_cost.png": "Bytes of state, time of the next token and time of reading, against the tokens of text.",
}
"""Alternative texts of the pictures of the scenes."""
FRAME_SECONDS = 0.08
"""Seconds that one write stays on the screen of a terminal."""


def run_demo(out: Path, *, seed: int = 0, quick: bool = False, console: Console | None = None) -> findings.Results:
    """Run and print all scenes; save plots, `demo.json` and `report.html` into the folder `out`, which must exist."""
    console = Console(highlight=False) if console is None else console
    setting, cost_setting = RecallSetting(seed=seed), CostSetting(seed=seed)
    if quick:
        setting = RecallSetting(key_dim=64, trials=4, seed=seed)
        cost_setting = CostSetting(head_dim=32, lengths=(64, 256, 1024), rounds=1, decode_rounds=1, seed=seed)
    dim, group = setting.key_dim, setting.group
    started = time.perf_counter()
    with one_thread(), _Stage(console) as stage:
        stage.say(
            "Six memories are told pairs (key, value) and then asked for the values. Five have a fixed size: a "
            f"{dim} x {dim} matrix S, changed by every write and read as S^T key. Softmax attention, the reference, "
            "stores every pair."
        )
        stage.say(
            "Recall error: 0 is perfect, 1 is as bad as no answer, above 1 is worse than none. "
            "* marks the best memory of fixed size."
        )
        stage.note(
            "Keys and values are random, of length 1 (two keys of a topic have a mean cosine of "
            f"{setting.similarity:g}); means of {setting.trials} memories, seed {seed}. Gates are set by hand as "
            "well as each rule allows: open unless something should be forgotten; beta is 1. Softmax attention "
            f"reads with scale {setting.softmax_scale:g}."
        )

        stage.title("1  Many pairs in one memory")
        stage.say("All pairs share one matrix. Look at the error as pairs are added, and as they are repeated.")
        filled = recall.interference(setting, stage.begin("filling the memories"))
        stage.show(tables.interference_table(filled), findings.interference_findings(filled))
        stage.note("All gates are open here: gated linear = linear, and Gated DeltaNet = Kimi Delta = DeltaNet.")

        stage.title("2  Overwriting")
        stage.say(
            f"{group} old pairs are written, then {2 * group} more, and {group} of these get a new value. Look at the "
            "overwritten ones."
        )
        console.print("On the board every cell is a key, shaded by how well its newest value is recalled.")
        changed = recall.overwrite(setting, stage.begin("overwriting"), stage.watch)
        stage.show(tables.overwrite_table(changed), findings.overwrite_findings(changed))
        stage.note("Only gated linear uses its gate here; with open gates Gated DeltaNet and Kimi Delta are DeltaNet.")

        stage.title("3  Changing the topic")
        stage.say(
            f"{recall.TOPICS} topics of {dim} pairs, then a new one of {2 * group}; rules that can forget do so when "
            "the topic changes. Look at the size of the state, and at the answer to a key never written: best is 0."
        )
        topics = recall.topics(setting, stage.begin("changing the topic"))
        stage.show(tables.topics_table(topics), findings.topics_findings(topics))

        stage.title("4  Clearing one part")
        stage.say(
            f"{group} facts use one half of the key channels, {4 * dim} scratch pairs the other half. The scratch "
            f"pad is cleared and {group} new pairs are written on it. Look for a row that keeps the facts and loses "
            "the clutter."
        )
        cleared = recall.scratch_pad(setting, stage.begin("clearing a scratch pad"))
        stage.show(tables.scratch_pad_table(cleared), findings.scratch_pad_findings(cleared))

        stage.title("5  What it costs")
        stage.say(
            "decode: the time of one more token after a text; prefill: the time per token of reading the text. "
            "Look at what stays the same from a short text to a long one."
        )
        cost = measure_cost(cost_setting, stage.begin("measuring the cost"))
        stage.show(tables.cost_table(cost), findings.cost_findings(cost))
        stage.note(
            f"One layer, {cost.heads} heads of {cost.head_dim} channels, CPU, {cost.threads} thread; state float32, "
            "cache bfloat16, times float32 medians. Softmax decodes at its best: torch's fused kernel alone, no "
            "cache copied."
        )

        results = findings.collect(setting, filled, changed, topics, cleared, cost)
        drawn = stage.begin("drawing")
        from lineate.explore.plots import save_plots  # matplotlib takes a second to import

        paths = [*save_plots(results, out, drawn), out / "demo.json"]
        findings.save(results, paths[-1])

    stage.title("Summary")
    stage.note(
        "kept, overwritten, old: scene 2. new topic, unseen key, state norm: scene 3. facts: scene 4. "
        f"bytes: scene 5, at {cost.lengths[-1]} tokens. Lower is better."
        " The norm is a size, not a score."
    )
    stage.table(tables.summary_table(results))
    stage.title("Why each rule was invented")
    stage.table(tables.reasons_table(results))
    _save_page(out, stage.sections, results, quick)
    console.print(f"\nDone in {time.perf_counter() - started:.0f} seconds. Pictures and numbers:")
    for path in paths:
        console.print(Text(printable(f"  {path}")), soft_wrap=True)
    console.print("All of it on one page, for a browser:")
    console.print(Text(printable(f"  {out / 'report.html'}")), soft_wrap=True)
    return results


def _save_page(out: Path, said: Sequence[Section], results: findings.Results, quick: bool) -> None:
    """Write the output as `report.html`: the summary comes first, and every scene has its picture."""
    introduction, *scenes, summary, reasons = said
    for scene, (name, description) in zip(scenes, FIGURES.items(), strict=True):
        scene.image(out / name, description)
    command = f"lineate demo --seed {results.setting.seed}" + (" --quick" if quick else "")
    save_report(
        out / "report.html",
        "What six memories remember, and what they cost",
        introduction,
        [summary, reasons, *scenes],
        f"Made by `{command}` with lineate {results.lineate}, torch {results.torch}, Python {results.python}. "
        "demo.json next to this page has all numbers.",
    )


class _Stage:
    """Prints to the console and keeps the output for the page; a terminal also shows a grid of keys and a progress bar.

    No drawing happens in the background, because the scenes measure time.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, auto_refresh=False)
        self._task = self._progress.add_task("", total=sum(PART_SECONDS.values()))
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._board: RenderableType = ""
        self.sections = [Section("Introduction")]

    def __enter__(self) -> "_Stage":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def title(self, text: str) -> None:
        self.console.print()
        self.console.rule(f"[bold]{text}", align="left", style="default", characters="-")
        self.sections.append(Section(text))

    def say(self, text: str) -> None:
        self.console.print(Text(text))
        self.sections[-1].paragraph(text)

    def note(self, text: str) -> None:
        self.console.print(Text(text, style="dim italic"))
        self.sections[-1].note(text)

    def table(self, table: Table) -> None:
        self.console.print(table)
        self.sections[-1].table(table)

    def begin(self, part: str) -> OnProgress:
        """Return the callback of one part, which moves the bar from where the earlier parts end."""
        names = list(PART_SECONDS)
        offset = sum(PART_SECONDS[name] for name in names[: names.index(part)])

        def report(done: float) -> None:
            self._progress.update(self._task, completed=offset + done * PART_SECONDS[part], description=part)
            self._draw()

        report(0.0)
        return report

    def watch(self, frame: recall.Frame) -> None:
        """Show one write; the last one stays on the screen."""
        ascii_only = self.console.options.ascii_only
        self._board = tables.board(frame, len(frame.error["delta_rule"]) // 3, ascii_only)
        if frame.step == frame.steps:
            self.console.print()
            self.console.print(self._board)
            self._board = ""
        elif self.console.is_terminal:
            self._draw()
            time.sleep(FRAME_SECONDS)

    def show(self, table: Table, sentences: Sequence[str]) -> None:
        self.console.print()
        self.table(table)
        self.console.print()
        lines = Table.grid(padding=(0, 1, 0, 0))
        for sentence in sentences:
            lines.add_row("-", Text(sentence))
        self.console.print(lines)
        self.sections[-1].sentences(sentences)

    def _draw(self) -> None:
        if self.console.is_terminal:
            self._live.update(Group("", self._board, self._progress), refresh=True)

"""Reports of a run: progress in the terminal, metrics.jsonl, TensorBoard, samples, and the plot of the loss."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from lineate.console.extras import not_installed
from lineate.console.terminal import console, printable
from lineate.training.config import TrainConfig

METRICS_FILE = "metrics.jsonl"
PLOT_FILE = "loss.png"


class RunReporter:
    """Print and record the progress of a run, on the main rank only; a full disk gives a warning but stops nothing.

    Args:
        config: The options of the run.
        main: Whether this is the main rank.
    """

    def __init__(self, config: TrainConfig, main: bool) -> None:
        self.folder, self.steps, self.main = Path(config.out), config.steps, main
        self.every = max(1, config.steps // 20)  # steps between printed lines if there is no terminal
        self._file: Any = None
        self._made: list[Path] = []
        """The files and folders that lock() made: metrics.jsonl, the run's folder, its parents."""
        self._board: Any = None
        self._console: Any = None
        self._bar: Any = None
        self._task: Any = None
        self._first: tuple[int, float] | None = None
        self._warned: set[str] = set()
        if main:
            try:
                self._console = console()
            except ModuleNotFoundError:
                return

    def say(self, text: str) -> None:
        """Print a text."""
        if self.main:
            if self._console is None:
                print(printable(text), flush=True)
            else:
                self._console.print(text, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning."""
        if self.main:
            if self._console is not None and self._console.is_terminal:
                self._console.print(f"warning: {text}", style="yellow", soft_wrap=True)
            else:
                print(f"warning: {printable(text)}", file=sys.stderr, flush=True)

    def lock(self) -> None:
        """Lock the run's folder until close(), as two runs in one folder would overwrite each other's files."""
        file = self.folder / METRICS_FILE
        if not self.main or self._file is not None:
            return
        try:
            while self._file is None:
                self._made = [path for path in (file, self.folder, *self.folder.parents) if not path.exists()]
                self.folder.mkdir(parents=True, exist_ok=True)
                handle = file.open("ab", buffering=0)
                try:
                    _lock(handle, self.folder)
                    if _is_still(handle, file):  # another process may have removed it in release()
                        self._file = handle
                finally:
                    if self._file is None:
                        handle.close()
        except OSError as error:
            why = "it is a file" if isinstance(error, FileExistsError) else f"{error.filename}: {error.strerror}"
            raise ValueError(f"out must be a folder that can be written, got {self.folder} ({why})") from None

    def release(self) -> None:
        """Close a run that never began, and remove what lock() made, where it is still empty."""
        for path in self._made if self._file is not None else ():
            try:
                if path.name != METRICS_FILE:
                    path.rmdir()
                elif path.stat().st_size == 0:
                    path.unlink()
            except OSError:  # not empty, or another process has removed it
                pass
        self.close()

    def open(self, step: int, position: int, tensorboard: bool) -> None:
        """Open metrics.jsonl and show progress.

        Args:
            step: The step to continue from.
            position: Size of metrics.jsonl at that step; lines that a killed run wrote after it are removed.
            tensorboard: Whether to write events for TensorBoard.
        """
        self._first = (step, time.monotonic())
        if not self.main:
            return
        self.lock()
        size = os.fstat(self._file.fileno()).st_size
        if position < size:
            self._file.truncate(position)
        elif position > size:
            self.warn(
                f"{self.folder / METRICS_FILE} lacks lines up to step {step}: {position} bytes were saved, got {size}"
            )
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1)
        if self._console is not None and self._console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(None),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=self.steps, completed=step)
            self._bar.start()

    @property
    def position(self) -> int:
        """The size of metrics.jsonl in bytes, after syncing it to the disk."""
        if self._file is None:
            return 0
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def write(self, values: dict[str, Any]) -> None:
        """Write one line of metrics.jsonl, and TensorBoard's events.

        Args:
            values: Numbers by name, among them "step".
        """
        if self._file is None:
            return
        size = os.fstat(self._file.fileno()).st_size
        line = json.dumps(values).encode() + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError("the disk is full")
        except OSError as error:
            self._file.truncate(size)  # remove the incomplete line
            self._once(
                f"{self.folder / METRICS_FILE} lacks lines from step {values['step']} on ({error.strerror or error})"
            )
        if self._board is not None:
            try:
                for name, value in values.items():
                    if isinstance(value, float):
                        self._board.add_scalar(name, value, values["step"])
            except OSError as error:
                self._board = None
                self._once(f"TensorBoard's events stop at step {values['step']} ({error})")

    def _once(self, text: str) -> None:
        """Warn once for each first word of a text."""
        kind = text.partition(" ")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            self.warn(text)

    def step(self, step: int, loss: float, lr: float, tokens: int, seconds: float) -> None:
        """Show the progress after a step, counted from 1.

        Args:
            step: The step.
            loss: Its loss.
            lr: Its learning rate.
            tokens: How many tokens it had.
            seconds: How long it took.
        """
        if not self.main:
            return
        assert self._first is not None
        rate = tokens / seconds if seconds else 0.0
        per_step = (time.monotonic() - self._first[1]) / max(1, step - self._first[0])
        eta = _clock((self.steps - step) * per_step)
        if self._bar is not None:
            text = f"loss {loss:.3f}  {_count(rate)} tokens/s  ETA {eta}"
            self._bar.update(self._task, completed=step, description=text)
        elif step % self.every == 0 or step == self.steps:
            width = len(str(self.steps))
            self.say(
                f"step {step:{width}}/{self.steps}  loss {loss:.3f}  lr {lr:.1e}  {_count(rate)} tokens/s  ETA {eta}"
            )

    def sample(self, step: int, text: str) -> None:
        """Print a sample of the model's text, with dots for control characters.

        Args:
            step: The step after which it was made.
            text: The sample.
        """
        lines = "\n".join(f"    | {line}" for line in printable(text).split("\n"))
        self.say(f"sample at step {step}:\n{lines}")
        if self._board is not None:
            self._board.add_text("sample", lines, step)

    def hide(self) -> None:
        """Remove the progress bar and restore the terminal's cursor."""
        if self._bar is not None:
            self._bar.stop()

    def close(self) -> None:
        """Stop the progress bar, and close the files, which unlocks the folder."""
        for part in (self._bar and self._bar.stop, self._board and self._board.close, self._file and self._file.close):
            if part:
                part()
        self._bar = self._board = self._file = None


def _lock(file: Any, folder: Path) -> None:
    """Lock a file until it is closed or its process ends; raise ValueError if another process holds the lock."""
    try:
        import fcntl
    except ModuleNotFoundError:  # this system has no file locks
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{folder} is being trained by another process; wait for it, or stop it first") from None
    except OSError:  # this file system has no locks
        pass


def _is_still(handle: Any, file: Path) -> bool:
    """Whether the name still belongs to the open file."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), file.stat())
    except FileNotFoundError:
        return False


def need_tensorboard() -> None:
    """Raise ValueError if TensorBoard is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        raise ValueError(not_installed("tensorboard=True", "tensorboard")) from None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; raise ValueError if one was not written by a run.

    Args:
        folder: The run's folder.
    """
    found = []
    for number, line in enumerate((folder / METRICS_FILE).read_text().splitlines(), start=1):
        try:
            found.append(values := json.loads(line))
            good = isinstance(values["step"], int) and all(isinstance(x, int | float) for x in values.values())
        except (ValueError, TypeError, KeyError, RecursionError):
            good = False
        if not good:
            raise ValueError(
                f"{folder / METRICS_FILE}, line {number} must have a step and its numbers, got {line!r:.80}"
            )
    return found


def plot_loss(folder: Path, entropy: float | None = None) -> Path:
    """Plot the training loss of each step, its average, and the validation loss to loss.png.

    Args:
        folder: The run's folder.
        entropy: The unigram entropy, drawn as a line if given.

    Returns:
        The path of the plot.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    lines = read_metrics(folder)
    steps = [line["step"] for line in lines if "loss" in line]
    losses = [line["loss"] for line in lines if "loss" in line]
    checked = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(steps, losses, color="0.75", linewidth=0.8, label="training, each step")
    axes.plot(steps, smooth(losses), color="C0", label="training, average")
    if checked:
        axes.plot(*zip(*checked, strict=True), "o-", color="C1", markersize=4, label="validation")
    if entropy is not None:
        axes.axhline(entropy, color="0.4", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set(xlabel="step", ylabel="nats per token", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    file = folder / PLOT_FILE
    figure.savefig(file, dpi=150)
    plt.close(figure)
    return file


def smooth(values: list[float]) -> list[float]:
    """Average exponentially over about a fortieth of the values, short enough not to lag behind a falling loss."""
    weight = 1 - 1 / max(1.0, len(values) / 40)
    total = norm = 0.0
    smoothed = []
    for value in values:
        total, norm = weight * total + value, weight * norm + 1
        smoothed.append(total / norm)
    return smoothed


def _count(n: float) -> str:
    return f"{n / 1e6:.2f}M" if n >= 1e6 else f"{n / 1e3:.1f}k" if n >= 1e3 else f"{n:.0f}"


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"

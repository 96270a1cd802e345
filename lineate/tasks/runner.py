"""Train one rule on one task with one seed (a cell), and many cells in parallel processes."""

import math
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from threading import Event, Thread
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.console.names import nearest
from lineate.models import HybridLM
from lineate.tasks.model import ModelOptions, make_config
from lineate.tasks.registry import TASKS
from lineate.tasks.task import NOTHING, Task, TaskSizes
from lineate.torch_ops.dtypes import full_name
from lineate.torch_ops.tracing import cpu_by_default

Say = Callable[[str], None]
TRAINING_DTYPES = ("float32", "tf32", "bfloat16")


@dataclass(frozen=True)
class TrainOptions:
    """The settings of training and testing of every cell."""

    steps: int = 2000
    """Steps of the optimiser at most."""
    rows: int = 64
    """Rows a step; smaller stages of the curriculum have the same number of tokens, so more rows."""
    lr: float = 2e-3
    """The highest learning rate, reached after a warm-up of 5% of the steps; a cosine then falls to 2% of it."""
    weight_decay: float = 0.01
    """Weight decay of AdamW."""
    clip: float = 1.0
    """The largest norm of the gradients; longer ones are scaled down to it."""
    curriculum: int = 1
    """Rows (and pairs) are first smaller by this factor, then by half of it, .., in the first third of the steps."""
    eval_every: int = 100
    """Steps between two tests."""
    test_rows: int = 512
    """Rows of a test."""
    stop_at: float = 0.995
    """Stop when two tests in a row reach this accuracy, also at the stop_lengths."""
    minutes: float = math.inf
    """Stop after this many minutes."""
    dtype: str = "float32"
    """float32; tf32, in which a GPU multiplies projections; or bfloat16, which is autocast over float32 weights."""
    device: str = "cpu"
    """Where it is trained: "cpu", "cuda" or "cuda:1"."""
    test_pairs: tuple[int, ...] = ()
    """Other numbers of pairs that the trained model is tested with."""
    test_lengths: tuple[int, ...] = ()
    """Other lengths of a row that the trained model is tested with."""
    stop_lengths: tuple[int, ...] = ()
    """Other lengths of a row at which a run must be as accurate before it stops."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", full_name(self.dtype))


@dataclass(frozen=True)
class Cell:
    """One training run."""

    task: str
    rule: str
    seed: int
    sizes: TaskSizes
    model: ModelOptions
    train: TrainOptions
    quick: bool = False
    """Whether it is part of a --quick comparison, whose files have names of their own."""

    @property
    def stem(self) -> str:
        """The prefix of its file names."""
        return f"{self.task}-quick" if self.quick else self.task

    def __str__(self) -> str:
        return f"{self.task} {self.rule} seed {self.seed}"


@dataclass
class CellResult:
    """The result of a cell."""

    rule: str
    seed: int
    accuracy: float = 0.0
    """Held-out accuracy, at the sizes it was trained for."""
    by_pairs: dict[int, float] = field(default_factory=dict)
    by_length: dict[int, float] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    stopped: str = "steps"
    """The reason it stopped: "accuracy", "steps", "minutes", or "not finite"."""
    parameters: int = 0
    history: list[tuple[int, float, float]] = field(default_factory=list)
    """Step, loss and accuracy of every test."""


def default_pairs(task: Task, sizes: TaskSizes) -> tuple[int, ...]:
    """Return an eighth, a quarter, half and all of the pairs, and twice as many if a row has room.

    A task without pairs has none.
    """
    if "pairs" not in task.uses or sizes.pairs == 1:
        return ()
    counts = sorted({max(1, sizes.pairs // n) for n in (8, 4, 2)} | {sizes.pairs, 2 * sizes.pairs})
    return tuple(n for n in counts if task.obstacle(replace(sizes, pairs=n)) is None)


def plan_cells(
    task: Task,
    rules: Sequence[str],
    sizes: TaskSizes,
    model: ModelOptions,
    train: TrainOptions,
    seeds: int,
    quick: bool = False,
) -> list[Cell]:
    """Return every rule with every seed, after all checks.

    Args:
        task: The task.
        rules: Mixers' names on the command line or patterns, as make_config takes them.
        sizes: The sizes that every model is trained for.
        model: The sizes of the models.
        train: How they are trained and tested.
        seeds: How many seeds each rule is trained with, from 0.
        quick: Whether they are part of a --quick comparison, whose files have names of their own.
    """
    task.check(sizes)
    if train.test_pairs and "pairs" not in task.uses:
        raise ValueError(f"test_pairs has no meaning for {task.name}; leave it out")
    for n in train.test_pairs:
        task.check(replace(sizes, pairs=n))
    for n in (*train.test_lengths, *train.stop_lengths):
        task.check(replace(sizes, length=n))
    for name, low, high in (("lr", 0.0, 1.0), ("minutes", 0.0, math.inf), ("stop_at", 0.0, math.inf)):
        if not low < getattr(train, name) <= high:
            raise ValueError(f"{name} must be above {low:g} and at most {high:g}, got {getattr(train, name)}")
    if train.curriculum & (train.curriculum - 1):
        raise ValueError(f"curriculum must be a power of two, got {train.curriculum}")
    if train.dtype not in TRAINING_DTYPES:
        raise ValueError(
            f"dtype must be one of {', '.join(TRAINING_DTYPES)}, got {train.dtype!r}"
            f"{nearest(train.dtype, TRAINING_DTYPES)}"
        )
    if not 0 < model.beta_scale <= 2:
        raise ValueError(f"beta_scale must be above 0 and at most 2, got {model.beta_scale}")
    if not 0 < model.init <= 1:
        raise ValueError(f"init must be above 0 and at most 1, got {model.init}")
    if len(set(rules)) < len(rules):
        raise ValueError(f"rules must differ, got {','.join(rules)}")
    for rule in rules:
        make_config(rule, task.tokens(sizes), model)
    return [Cell(task.name, rule, seed, sizes, model, train, quick) for rule in rules for seed in range(seeds)]


def sizes_at(task: Task, sizes: TaskSizes, step: int, train: TrainOptions) -> TaskSizes:
    """Return the sizes of a step; they grow in the first third of the steps, without stages that cannot be made."""
    stages = [task.shrink(sizes, 2**n) for n in range(int(math.log2(train.curriculum)), 0, -1)]
    stages = [stage for stage in stages if task.obstacle(stage) is None]
    stage = 3 * step * len(stages) // max(train.steps, 1)
    return stages[stage] if stage < len(stages) else sizes


def learning_rate(step: int, train: TrainOptions) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine."""
    warm = max(1, train.steps // 20)
    if step < warm:
        return train.lr * (step + 1) / warm
    done = (step - warm) / max(1, train.steps - warm)
    return train.lr * (0.02 + 0.49 * (1 + math.cos(math.pi * done)))


def logits_asked(model: HybridLM, ids: Tensor, targets: Tensor, asked: int) -> tuple[Tensor, Tensor]:
    """Return logits `rows asked vocab` and targets `rows asked` at the queried tokens, without a sync."""
    x, _ = model.hidden(model.embed(ids))
    if asked < ids.shape[1] - 1:
        places = (targets != NOTHING).to(torch.int8).topk(asked, 1, sorted=False).indices.sort(1).values
    else:
        places = torch.arange(ids.shape[1] - asked, ids.shape[1], device=ids.device).expand(len(ids), -1)
    return model.logits(x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))), targets.gather(1, places)


def _autocast(train: TrainOptions) -> torch.autocast:
    return torch.autocast(torch.device(train.device).type, torch.bfloat16, enabled=train.dtype == "bfloat16")


@torch.no_grad()
@cpu_by_default
def measure(model: HybridLM, task: Task, sizes: TaskSizes, seed: int, train: TrainOptions) -> float:
    """Return accuracy on held-out rows; if every token is queried, on the second half of each row."""
    model.eval()
    rows = max(1, min(train.test_rows, 2**17 // sizes.length))  # a batch that fits anywhere
    right, count = torch.zeros((), dtype=torch.int64, device=train.device), 0
    for step in range(-(-train.test_rows // rows)):
        ids, targets = task.batch(rows, sizes, seed=seed, step=step, stream="test", device=train.device)
        with _autocast(train):
            logits, targets = logits_asked(model, ids, targets, task.asked(sizes))
        hits = logits.argmax(-1) == targets
        if task.dense:
            hits = hits[:, hits.shape[1] // 2 :]
        right, count = right + hits.sum(), count + hits.numel()
    model.train()
    return int(right) / count


@contextmanager
def precision(train: TrainOptions) -> Iterator[None]:
    """Let float32 products be tf32 ones if the options say so."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if train.dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def start(cell: Cell) -> tuple[HybridLM, torch.optim.Optimizer]:
    """Return the model of a cell with its first weights, and its optimizer."""
    train, device = cell.train, torch.device(cell.train.device)
    torch.manual_seed(cell.seed)
    with device:
        model = HybridLM(make_config(cell.rule, TASKS[cell.task].tokens(cell.sizes), cell.model))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=train.lr, betas=(0.9, 0.98), fused=device.type == "cuda",
    )  # fmt: skip
    return model, optimizer


def train_step(cell: Cell, model: HybridLM, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    """Take one step; return its loss."""
    task, sizes, train = TASKS[cell.task], cell.sizes, cell.train
    now = sizes_at(task, sizes, step, train)
    rows = max(1, train.rows * sizes.length // now.length)
    ids, targets = task.batch(rows, now, seed=cell.seed, step=step, device=train.device)
    with _autocast(train):
        logits, asked = logits_asked(model, ids, targets, task.asked(now))
    loss = F.cross_entropy(logits.flatten(0, 1).float(), asked.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, train)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


@cpu_by_default
def train_cell(cell: Cell, report: Say = print, tick: Callable[[int], None] = lambda steps: None) -> CellResult:
    """Train with regular tests until the task is learnt, or steps or minutes run out; then test all sizes.

    `tick` is called with the number of steps taken, after each.
    """
    with precision(cell.train):
        return _train_cell(cell, report, tick)


def _train_cell(cell: Cell, report: Say, tick: Callable[[int], None]) -> CellResult:
    task, sizes, train = TASKS[cell.task], cell.sizes, cell.train
    model, optimizer = start(cell)
    result = CellResult(cell.rule, cell.seed, parameters=sum(p.numel() for p in model.parameters()))
    began = time.monotonic()
    learnt = 0  # consecutive tests that reached the accuracy
    for step in range(train.steps):
        loss = train_step(cell, model, optimizer, step)
        result.steps = step + 1
        tick(result.steps)
        if result.steps % train.eval_every and result.steps < train.steps:
            continue
        result.accuracy = measure(model, task, sizes, cell.seed, train)
        loss_now = float(loss)
        result.history.append((result.steps, loss_now, result.accuracy))
        report(f"[{cell}] step {result.steps}: loss {loss_now:.4f}, accuracy {result.accuracy:.2%}")
        learnt = learnt + 1 if _is_learnt(cell, model, result.accuracy) else 0
        if not math.isfinite(loss_now):
            result.stopped = "not finite"
        elif learnt == 2:
            result.stopped = "accuracy"
        elif time.monotonic() - began > 60 * train.minutes:
            result.stopped = "minutes"
        else:
            continue
        break
    for n in train.test_pairs:
        result.by_pairs[n] = measure(model, task, replace(sizes, pairs=n), cell.seed, train)
    for n in train.test_lengths:
        result.by_length[n] = measure(model, task, replace(sizes, length=n), cell.seed, train)
    result.seconds = time.monotonic() - began
    return result


def _is_learnt(cell: Cell, model: HybridLM, accuracy: float) -> bool:
    """Whether the accuracy at the length of training, and that at the stop_lengths, is enough to stop."""
    task, sizes, train = TASKS[cell.task], cell.sizes, cell.train
    longer = (measure(model, task, replace(sizes, length=n), cell.seed, train) for n in train.stop_lengths)
    return accuracy >= train.stop_at and all(x >= train.stop_at for x in longer)


class Watcher(Protocol):
    """The interface of a progress display of the runs."""

    def say(self, line: str) -> None:
        """Show a line."""

    def step(self, cell: Cell, steps: int) -> None:
        """Record the number of steps that a cell has taken."""

    def finish(self, cell: Cell) -> None:
        """Record that a cell is trained and tested."""


def run_cells(
    cells: Sequence[Cell], jobs: int, watcher: Watcher, keep: Callable[[list[CellResult]], object]
) -> list[CellResult]:
    """Run all cells, and return their results in the same order.

    In several processes, a cell that fails does not stop the others; its error is raised when all are done.

    Args:
        cells: What to train.
        jobs: How many processes run at a time; they share the device. 1 runs one cell after the other in this process.
        watcher: Receives the progress of the runs.
        keep: Called with all results so far after each new one.
    """
    results: dict[Cell, CellResult] = {}

    def add(cell: Cell, result: CellResult) -> None:
        results[cell] = result
        watcher.finish(cell)
        keep([results[cell] for cell in cells if cell in results])

    if jobs == 1 or len(cells) == 1:
        for cell in cells:
            add(cell, train_cell(cell, watcher.say, lambda steps, cell=cell: watcher.step(cell, steps)))  # type: ignore[misc]
        return list(results.values())
    failures: list[BaseException] = []
    processes = get_context("spawn")
    messages = processes.Queue()
    with (
        _listening(messages, watcher),
        ProcessPoolExecutor(min(jobs, len(cells)), processes, _start_process, (messages,)) as pool,
    ):
        futures = {pool.submit(_train_in_process, cell): cell for cell in cells}
        for future in as_completed(futures):
            if (failure := future.exception()) is None:
                add(futures[future], future.result())
            else:
                watcher.say(f"[{futures[future]}] failed: {failure}")
                failures.append(failure)
    if failures:
        raise failures[0]
    return list(map(results.__getitem__, cells))


@contextmanager
def _listening(messages: Any, watcher: Watcher) -> Iterator[None]:
    """Forward the messages of the processes from a thread that only reads, so that a dead process cannot block it."""
    over = Event()

    def listen() -> None:
        while True:
            try:
                cell, said = messages.get(timeout=0.1)
            except queue.Empty:
                if over.is_set():
                    return
                continue
            if isinstance(said, str):
                watcher.say(said)
            else:
                watcher.step(cell, said)

    thread = Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


_messages: Any = None
"""The queue for the lines and steps of a process of run_cells."""


def _start_process(messages: Any) -> None:
    global _messages
    _messages = messages
    torch.set_num_threads(1)


def _train_in_process(cell: Cell) -> CellResult:
    return train_cell(cell, lambda line: _messages.put((cell, line)), lambda steps: _messages.put((cell, steps)))

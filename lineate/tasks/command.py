"""`lineate tasks`: train rules on a task, print the table, draw the figure."""

import inspect
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineate.console.names import named_path
from lineate.console.options import add_command, argument, option, parameters, sign
from lineate.tasks import DEFAULT_RULES

if TYPE_CHECKING:
    import typer

    from lineate.tasks.progress import RunCost
    from lineate.tasks.runner import Cell


@dataclass(frozen=True)
class TasksArguments:
    """The options of `lineate tasks`: a field is an option of the command line."""

    task: str = argument(
        "recall, overwriting, needle, copying, selective-copying, induction, erasing, adding, parity, counting, "
        "arithmetic, s3, s4, a5, s5.",
        "TASK",
    )
    rules: str = option(
        DEFAULT_RULES,
        "Rules with commas between: linear, gla, deltanet, gdn, kda, gdn2, product, rwkv7, softmax, mla, ttt, ttt-mlp, "
        "titans, lact, least-squares, or patterns such as GGGA or KM; with -2, as in deltanet-2, beta lies in (0, 2); "
        "product3 writes three times a token.",
    )
    length: int | None = option(None, "Tokens a row.")
    pairs: int | None = option(None, "Pairs, or tokens to remember.")
    vocab: int | None = option(None, "Tokens there are.")
    writes: int | None = option(None, "overwriting: writes a key.")
    modulus: int | None = option(None, "counting, arithmetic: modulo what.")
    keys: int | None = option(None, "erasing, adding: keys there are.")
    values: int | None = option(None, "erasing, adding: values there are.")
    noise: bool = option(False, "recall: random tokens between the queries, not 0.", "--noise")
    width: int = option(128, "Channels of the model.")
    layers: int = option(2, "Layers of the model.")
    heads: int = option(1, "Heads, of width / heads channels.")
    conv: int = option(4, "Size of the short convolution; 0: none.", least=0)
    beta_scale: float = option(1.0, "beta lies in (0, this): 1 or 2.")
    init: float = option(0.02, "Standard deviation of the first weights.")
    decay: bool = option(True, "Whether Gated DeltaProduct has its decay.", "--decay/--no-decay")
    seeds: int = option(3, "Train with the seeds 0 .. this - 1.", least=1)
    steps: int = option(2000, "Steps at most.", least=1)
    rows: int = option(64, "Rows a step.", least=1)
    lr: float = option(2e-3, "The highest learning rate.", "--lr", "--learning-rate")
    weight_decay: float = option(0.01, "Of matrices.", least=0)
    curriculum: int = option(
        1, "The first third of the steps grows from rows and pairs smaller by this factor; 1: none.", least=1
    )
    eval_every: int = option(100, "Steps between tests.", least=1)
    test_rows: int = option(512, "Rows of a test.", least=1)
    stop_at: float = option(0.995, "Stop when two tests in a row are this accurate; 2: never.")
    minutes: float = option(math.inf, "Stop every run after this many minutes.", least=0)
    test_pairs: str | None = option(None, "Pairs to test, with commas; an eighth .. all.")
    test_lengths: str | None = option(None, "Lengths to test, with commas; 1, 2, 4 times.")
    stop_lengths: str | None = option(None, "Lengths at which a run must be as accurate too before it stops.")
    dtype: str = option("float32", "float32, tf32, or bfloat16 (autocast).")
    device: str = option("auto", "cpu, cuda; auto: cuda if there is one.")
    quick: bool = option(False, "Small sizes and one seed: a minute or two; other options still count.", "--quick")
    jobs: int = option(1, "Runs at a time, in processes that share the device.", least=1)
    out: Path = option(  # noqa: RUF009  # it is a field
        Path("out/tasks"), "Folder for the figure and the numbers.", parser=named_path, metavar="FOLDER"
    )
    overwrite: bool = option(False, "Replace the task's files in --out.", "--overwrite")


SIZE_FLAGS = ("length", "pairs", "vocab", "writes", "modulus", "keys", "values", "noise")
MODEL_FLAGS = ("width", "layers", "heads", "conv", "beta_scale", "init", "decay")
TRAIN_FLAGS = (
    "steps", "rows", "lr", "weight_decay", "curriculum", "eval_every", "test_rows", "stop_at", "minutes", "dtype",
)  # fmt: skip
TESTS = ("test_pairs", "test_lengths", "stop_lengths")
FLAGS = (*SIZE_FLAGS, *MODEL_FLAGS, *TRAIN_FLAGS, *TESTS, "rules", "seeds", "device")
"""The options that define training and tests."""


def add_commands(app: "typer.Typer") -> None:
    """Add `lineate tasks` to the command line."""
    import typer

    def tasks(context: typer.Context, **given: Any) -> None:
        """Train small models on a task that distinguishes the rules; print the table and draw the figure."""
        run_tasks(TasksArguments(**given), {name for name in FLAGS if _is_given(context, name)})

    sign(tasks, {"context": (typer.Context, inspect.Parameter.empty)} | parameters(TasksArguments))
    add_command(
        app,
        tasks,
        "lineate tasks recall --rules linear,deltanet,gdn,kda --quick",
        "lineate tasks counting --length 256 --out counted",
    )


def run_tasks(asked: TasksArguments, given: set[str]) -> None:
    """Train and test the requested cells; `given` names the options that the user gave."""
    import matplotlib  # noqa: F401  # say now, not after training, that it is missing
    import typer
    from rich.console import Console

    from lineate.console.names import hyphenated, spelled
    from lineate.console.terminal import fail
    from lineate.system.folders import check_out
    from lineate.tasks.progress import Progress, estimate, lanes
    from lineate.tasks.quick import QUICK
    from lineate.tasks.registry import TASKS
    from lineate.tasks.report import print_table, save, save_numbers
    from lineate.tasks.runner import run_cells

    task, out, quick = spelled(asked.task, TASKS), asked.out, asked.quick
    try:
        flags = {name: getattr(asked, name) for name in FLAGS}
        flags["rules"] = hyphenated(flags["rules"])
        cells = _plan(task, _quickened(task, flags, given) if quick else flags, quick)
        if (there := out / f"{cells[0].stem}.json").exists() and not asked.overwrite:
            what = f"{task} --quick" if quick else task
            raise ValueError(f"--out must have no results of {what}, got '{there}'; choose another, or --overwrite")
        check_out(out)
    except ValueError as error:
        fail(error, 2)
    command = shlex.join(["lineate", *sys.argv[1:]])
    side_by_side = lanes(cells, asked.jobs)
    typer.echo("timing a few steps of every model ...")
    with _threads(1 if asked.jobs > 1 else None):
        costs = estimate(cells)
        for line in outlook(costs, side_by_side, None if quick else lambda: _quick_costs(task, flags, given)):
            typer.echo(line)
    with Progress(costs, side_by_side, Console()) as progress:
        results = run_cells(cells, asked.jobs, progress, lambda done: save_numbers(cells[0], done, out, command))
    print_table(cells[0], results)
    if quick:
        typer.echo(QUICK[task].look)
    for path in save(cells[0], results, out, command):
        typer.echo(path)


def _is_given(context: "typer.Context", name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _quickened(task: str, flags: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """Return the flags with those of --quick in place of all that were not given; patterns get the layers they need."""
    from lineate.tasks.model import parse_rule
    from lineate.tasks.quick import QUICK
    from lineate.tasks.registry import TASKS
    from lineate.tasks.task import find

    small = {name: value for name, value in QUICK[find(task, TASKS).name].flags.items() if name not in given}
    flags = flags | small
    if "layers" in small:
        flags["layers"] = max(small["layers"], *(len(parse_rule(rule).pattern) for rule in flags["rules"].split(",")))
    return flags


def _plan(task: str, flags: dict[str, Any], quick: bool) -> "list[Cell]":
    """Return the runs that the flags define, after all checks."""
    from lineate.tasks.model import ModelOptions
    from lineate.tasks.registry import TASKS
    from lineate.tasks.runner import TrainOptions, default_pairs, plan_cells
    from lineate.tasks.task import find

    chosen = find(task, TASKS)
    sizes = chosen.default
    for name in SIZE_FLAGS:
        value = flags[name]
        if value is None or value is False:
            continue
        if name != "length" and name not in chosen.uses:
            raise ValueError(f"--{name} has no meaning for {task}; leave it out")
        sizes = replace(sizes, **{name: value})
    train = TrainOptions(
        **{name: flags[name] for name in TRAIN_FLAGS}, device=_device(flags["device"]),
        test_pairs=_numbers("--test-pairs", flags["test_pairs"], default_pairs(chosen, sizes)),
        test_lengths=_numbers("--test-lengths", flags["test_lengths"], tuple(n * sizes.length for n in (1, 2, 4))),
        stop_lengths=_numbers("--stop-lengths", flags["stop_lengths"], ()),
    )  # fmt: skip
    model = ModelOptions(**{name: flags[name] for name in MODEL_FLAGS})
    return plan_cells(chosen, flags["rules"].split(","), sizes, model, train, flags["seeds"], quick)


def _quick_costs(task: str, flags: dict[str, Any], given: set[str]) -> "Mapping[Cell, RunCost]":
    """Return the cost of the same command with --quick; nothing if its flags do not fit --quick."""
    from lineate.tasks.progress import estimate

    try:
        return estimate(_plan(task, _quickened(task, flags, given), True))
    except ValueError:
        return {}


def outlook(
    costs: "Mapping[Cell, RunCost]", side_by_side: int, quick: "Callable[[], Mapping[Cell, RunCost]] | None"
) -> Iterator[str]:
    """Yield the messages before the start: the estimated time, and options that shorten it if it is long."""
    from lineate.tasks.progress import LONG, duration, whole

    train = next(iter(costs)).train
    seconds = whole(costs, side_by_side)
    runs = f"{len(costs)} run{'s' * (len(costs) > 1)} of at most {train.steps} steps"
    less = "; less if rules learn the task early" if train.stop_at <= 1 else ""
    if seconds < LONG or quick is None:
        yield f"{runs}: about {duration(seconds)} on this machine{less}"
        return
    small = quick()
    shorter = whole(small, side_by_side) if small else seconds
    hint = f"; --quick takes about {duration(shorter)}" if shorter < seconds / 2 else ""
    yield f"{runs}: about {duration(seconds)} on this machine{hint}"
    yield "runs that learn the task early end sooner; --seeds, --steps and --minutes (of a run) shorten the others"


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Let torch use this number of threads inside; None leaves the number unchanged."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _numbers(flag: str, text: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """Return whole numbers that are written with commas between."""
    if text is None:
        return default
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} must be whole numbers with commas between, got {text!r}") from None


def _device(name: str) -> str:
    """Return the device's name, resolved for auto; a missing device is an error."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, got {name!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name} needs a GPU that torch can use, and there is none; use --device cpu")
    return name

"""`lineate tasks`: train rules on a task, print the table, draw the figure."""

import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lineate.names import named_path

if TYPE_CHECKING:
    import typer

    from lineate.tasks.progress import Cost
    from lineate.tasks.runner import Cell

DEFAULT_RULES = "linear,gla,deltanet,gdn,kda,softmax"


def add_commands(app: "typer.Typer") -> None:
    """Add `lineate tasks` to the command line."""
    import typer

    @app.command()
    def tasks(
        context: typer.Context,
        task: Annotated[
            str,
            typer.Argument(
                metavar="TASK",
                help="recall, overwriting, needle, copying, selective-copying, induction, parity, counting, s5.",
            ),
        ],
        rules: Annotated[
            str,
            typer.Option(
                help="Rules with commas between: linear, gla, deltanet, gdn, kda, softmax, mla, ttt, ttt-mlp, titans, "
                "lact, least-squares, or patterns such as GGGA or KM; with -2, as in deltanet-2, beta lies in (0, 2)."
            ),
        ] = DEFAULT_RULES,
        length: Annotated[int | None, typer.Option(help="Tokens a row.")] = None,
        pairs: Annotated[int | None, typer.Option(help="Pairs, or tokens to remember.")] = None,
        vocab: Annotated[int | None, typer.Option(help="Tokens there are.")] = None,
        writes: Annotated[int | None, typer.Option(help="overwriting: writes a key.")] = None,
        modulus: Annotated[int | None, typer.Option(help="counting: modulo what.")] = None,
        noise: Annotated[
            bool, typer.Option("--noise", help="recall: random tokens between the queries, not 0.")
        ] = False,
        width: Annotated[int, typer.Option(help="Channels of the model.")] = 128,
        layers: Annotated[int, typer.Option(help="Layers of the model.")] = 2,
        heads: Annotated[int, typer.Option(help="Heads, of width / heads channels.")] = 1,
        conv: Annotated[int, typer.Option(help="Size of the short convolution; 0: none.", min=0)] = 4,
        beta_scale: Annotated[float, typer.Option(help="beta lies in (0, this): 1 or 2.")] = 1.0,
        init: Annotated[float, typer.Option(help="Standard deviation of the first weights.")] = 0.02,
        seeds: Annotated[int, typer.Option(help="Train with the seeds 0 .. this - 1.", min=1)] = 3,
        steps: Annotated[int, typer.Option(help="Steps at most.", min=1)] = 2000,
        rows: Annotated[int, typer.Option(help="Rows a step.", min=1)] = 64,
        lr: Annotated[float, typer.Option("--lr", "--learning-rate", help="The highest learning rate.")] = 2e-3,
        weight_decay: Annotated[float, typer.Option(help="Of matrices.", min=0)] = 0.01,
        curriculum: Annotated[
            int,
            typer.Option(
                help="The first third of the steps grows from rows and pairs smaller by this factor; 1: none.", min=1
            ),
        ] = 1,
        eval_every: Annotated[int, typer.Option(help="Steps between tests.", min=1)] = 100,
        test_rows: Annotated[int, typer.Option(help="Rows of a test.", min=1)] = 512,
        stop_at: Annotated[
            float, typer.Option(help="Stop when two tests in a row are this accurate; 2: never.")
        ] = 0.995,
        minutes: Annotated[float, typer.Option(help="Stop every run after so many minutes.", min=0)] = math.inf,
        test_pairs: Annotated[str | None, typer.Option(help="Pairs to test, with commas; an eighth .. all.")] = None,
        test_lengths: Annotated[str | None, typer.Option(help="Lengths to test, with commas; 1, 2, 4 times.")] = None,
        dtype: Annotated[str, typer.Option(help="float32, tf32, or bfloat16 (autocast).")] = "float32",
        device: Annotated[str, typer.Option(help="cpu, cuda; auto: cuda if there is one.")] = "auto",
        quick: Annotated[
            bool,
            typer.Option("--quick", help="Small sizes and one seed: a minute or two; other options still count."),
        ] = False,
        jobs: Annotated[int, typer.Option(help="Runs at a time, in processes that share the device.", min=1)] = 1,
        out: Annotated[
            Path, typer.Option(parser=named_path, metavar="FOLDER", help="Folder for the figure and the numbers.")
        ] = Path("out/tasks"),
        overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the task's files in --out.")] = False,
    ) -> None:
        """Train small models on a task that tells the rules apart; print the table and draw the figure."""
        import matplotlib  # noqa: F401  # say now, not after training, that it is missing
        from rich.console import Console

        from lineate.folders import check_out
        from lineate.names import hyphenated, spelled
        from lineate.tasks.progress import Progress, estimate, lanes
        from lineate.tasks.quick import QUICK
        from lineate.tasks.registry import TASKS
        from lineate.tasks.report import print_table, save, save_numbers
        from lineate.tasks.runner import run_cells
        from lineate.terminal import fail

        task = spelled(task, TASKS)
        try:
            flags = {name: context.params[name] for name in FLAGS}
            flags["rules"] = hyphenated(flags["rules"])
            given = {name for name in FLAGS if _is_given(context, name)}
            cells = _plan(task, _quickened(task, flags, given) if quick else flags, quick)
            if (there := out / f"{cells[0].stem}.json").exists() and not overwrite:
                what = f"{task} --quick" if quick else task
                raise ValueError(f"--out must have no results of {what}, got '{there}'; choose another, or --overwrite")
            check_out(out)
        except ValueError as error:
            fail(error, 2)
        command = shlex.join(["lineate", *sys.argv[1:]])
        side_by_side = lanes(cells, jobs)
        typer.echo("timing a few steps of every model ...")
        with _threads(1 if jobs > 1 else None):
            costs = estimate(cells)
            for line in _outlook(costs, side_by_side, None if quick else lambda: _quick_costs(task, flags, given)):
                typer.echo(line)
        with Progress(costs, side_by_side, Console()) as progress:
            results = run_cells(cells, jobs, progress, lambda done: save_numbers(cells[0], done, out, command))
        print_table(cells[0], results)
        if quick:
            typer.echo(QUICK[task].look)
        for path in save(cells[0], results, out, command):
            typer.echo(path)


SIZE_FLAGS = ("length", "pairs", "vocab", "writes", "modulus", "noise")
MODEL_FLAGS = ("width", "layers", "heads", "conv", "beta_scale", "init")
TRAIN_FLAGS = (
    "steps", "rows", "lr", "weight_decay", "curriculum", "eval_every", "test_rows", "stop_at", "minutes", "dtype",
)  # fmt: skip
FLAGS = (*SIZE_FLAGS, *MODEL_FLAGS, *TRAIN_FLAGS, "rules", "seeds", "test_pairs", "test_lengths", "device")
"""The options that say what is trained and tested, and how."""


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
        flags["layers"] = max(small["layers"], *(len(parse_rule(rule)[0]) for rule in flags["rules"].split(",")))
    return flags


def _plan(task: str, flags: dict[str, Any], quick: bool) -> "list[Cell]":
    """Return the runs that the flags ask for, after all checks."""
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
    )  # fmt: skip
    model = ModelOptions(**{name: flags[name] for name in MODEL_FLAGS})
    return plan_cells(chosen, flags["rules"].split(","), sizes, model, train, flags["seeds"], quick)


def _quick_costs(task: str, flags: dict[str, Any], given: set[str]) -> "Mapping[Cell, Cost]":
    """Return what the same command costs with --quick; nothing if its flags do not go together with that."""
    from lineate.tasks.progress import estimate

    try:
        return estimate(_plan(task, _quickened(task, flags, given), True))
    except ValueError:
        return {}


def _outlook(
    costs: "Mapping[Cell, Cost]", side_by_side: int, quick: "Callable[[], Mapping[Cell, Cost]] | None"
) -> Iterator[str]:
    """Yield what to say before the start: how long it takes, and how it could be shorter if that is long."""
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
    """Let torch use so many threads inside; None: as many as it does."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _numbers(flag: str, text: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """Whole numbers with commas between."""
    if text is None:
        return default
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} must be whole numbers with commas between, got {text!r}") from None


def _device(name: str) -> str:
    """auto becomes a device; a device that is not there is an error."""
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

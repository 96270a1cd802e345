"""`lineate tasks`: train rules on a task, print the table, draw the figure."""

import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    import typer

DEFAULT_RULES = "linear,gla,deltanet,gdn,kda,softmax"


def add_commands(app: "typer.Typer") -> None:
    """Add `lineate tasks` to the command line."""
    import typer

    @app.command()
    def tasks(
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
                help="Rules with commas between: linear, gla, deltanet, gdn, kda, softmax, ttt, ttt-mlp, titans, lact, "
                "least-squares, or "
                "patterns such as GGGA; with -2, as in deltanet-2, beta lies in (0, 2)."
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
        jobs: Annotated[int, typer.Option(help="Runs at a time, in processes that share the device.", min=1)] = 1,
        out: Annotated[Path, typer.Option(help="Folder for the figure and the numbers.")] = Path("out/tasks"),
        overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the task's files in --out.")] = False,
    ) -> None:
        """Train small models on a task that tells the rules apart; print the table and draw the figure."""
        import matplotlib  # noqa: F401  # say now, not after training, that it is missing

        from lineate.checks import check_out
        from lineate.names import hyphenated, spelled
        from lineate.tasks.model import ModelOptions
        from lineate.tasks.registry import TASKS
        from lineate.tasks.report import print_table, save, save_numbers
        from lineate.tasks.runner import TrainOptions, default_pairs, plan_cells, run_cells
        from lineate.tasks.task import find
        from lineate.terminal import fail

        task, rules = spelled(task, TASKS), hyphenated(rules)
        try:
            chosen = find(task, TASKS)
            given = {"pairs": pairs, "vocab": vocab, "writes": writes, "modulus": modulus, "noise": noise or None}
            for name, value in given.items():
                if value is not None and name not in chosen.uses:
                    raise ValueError(f"--{name} has no meaning for {task}; leave it out")
            changed: dict[str, Any] = {"length": length} | given
            sizes = replace(chosen.default, **{name: x for name, x in changed.items() if x is not None})
            train = TrainOptions(
                steps=steps, rows=rows, lr=lr, weight_decay=weight_decay, curriculum=curriculum, eval_every=eval_every,
                test_rows=test_rows, stop_at=stop_at, minutes=minutes, dtype=dtype, device=_device(device),
                test_pairs=_numbers("--test-pairs", test_pairs, default_pairs(chosen, sizes)),
                test_lengths=_numbers("--test-lengths", test_lengths, tuple(n * sizes.length for n in (1, 2, 4))),
            )  # fmt: skip
            model = ModelOptions(width, layers, heads, conv, beta_scale, init)
            cells = plan_cells(chosen, rules.split(","), sizes, model, train, seeds)
            if (there := out / f"{task}.json").exists() and not overwrite:
                raise ValueError(f"--out must have no results of {task}, got '{there}'; choose another, or --overwrite")
            check_out(out)
        except ValueError as error:
            fail(error, 2)
        command = shlex.join(["lineate", *sys.argv[1:]])
        results = run_cells(cells, jobs, typer.echo, lambda done: save_numbers(cells[0], done, out, command))
        print_table(cells[0], results)
        for path in save(cells[0], results, out, command):
            typer.echo(path)


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

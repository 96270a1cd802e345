"""`lineate plan`: what a model needs, as tables, JSON, CSV and a figure."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lineate.names import spelled, user_path
from lineate.planning.options import (
    CONTEXTS,
    RANGE,
    check_files,
    choose_machines,
    choose_panels,
    doubling,
    has_linear_axes,
    read_contexts,
)

if TYPE_CHECKING:
    import typer

    from lineate.planning.models import Model
    from lineate.planning.report import Request

TAUGHT: dict[str, int | str] = {
    "--emb-dim": 2048, "--n-heads": 16, "--n-layers": 48, "--dtype": "bf16", "--pattern": "GGGA"
}  # fmt: skip
"""What --teaching takes for numbers that are not given; the last two are those of from_numbers."""
EVEN = 64
"""Steps between the points of a figure with linear axes."""
ARGUMENTS = (
    "emb_dim", "n_heads", "kv_heads", "head_dim", "dtype", "state_dtype", "conv_dtype", "cache_dtype", "pattern",
    "hardware", "optimizer",
)  # fmt: skip
"""Of the library, which options are named for."""
OPTIMIZERS, PRECISIONS = ("adamw", "muon"), ("bfloat16", "float32")
MOST_DEVICES = 2**20
HOW = (
    "say what to plan: a preset (lineate plan qwen3-next-80b), a checkpoint's folder, a config.json, or numbers "
    "(lineate plan --emb-dim 2048 --n-heads 16 --n-layers 48); lineate plan --help lists the options"
)


def add_commands(app: "typer.Typer") -> None:
    """Add `lineate plan` to the command line."""
    import typer

    @app.command()
    def plan(
        source: Annotated[
            str | None,
            typer.Argument(
                metavar="MODEL", help="A preset, a checkpoint's or a run's folder, a config.json, or a hub name."
            ),
        ] = None,
        emb_dim: Annotated[
            int | None, typer.Option("--emb-dim", "--hidden-size", help="Numbers instead of a model: channels.")
        ] = None,
        n_heads: Annotated[int | None, typer.Option(help="Numbers: heads.")] = None,
        n_layers: Annotated[int | None, typer.Option(help="Numbers: layers.")] = None,
        kv_heads: Annotated[int | None, typer.Option(help="Numbers: heads of keys and values; --n-heads.")] = None,
        head_dim: Annotated[int | None, typer.Option(help="Numbers: channels a head; emb-dim / n-heads.")] = None,
        vocab_size: Annotated[int | None, typer.Option(help="Numbers: tokens there are; 32768.")] = None,
        feed_size: Annotated[int | None, typer.Option(help="Numbers: of the feed-forward; 8/3 emb-dim.")] = None,
        pattern: Annotated[
            str | None, typer.Option(help="Mixers of the layers, tiled, in place of the model's: GGGGGGGA.")
        ] = None,
        dtype: Annotated[
            str | None, typer.Option(help="Of weights, cache and convolutions: fp32, bf16, fp16, fp8, int8.")
        ] = None,
        state_dtype: Annotated[str, typer.Option(help="Of the recurrent state.")] = "float32",
        conv_dtype: Annotated[str | None, typer.Option(help="Of the convolution state, if another.")] = None,
        cache_dtype: Annotated[str | None, typer.Option(help="Of the cache, if another.")] = None,
        context: Annotated[
            str | None,
            typer.Option(
                "--context", "--context-length", help=f"Tokens of a sequence, with commas; 32k is 32768; {CONTEXTS}."
            ),
        ] = None,
        min_ctx: Annotated[
            str | None, typer.Option(help=f"Or from so many tokens on, every power of two; {RANGE[0]}.")
        ] = None,
        max_ctx: Annotated[str | None, typer.Option(help=f"To so many tokens; {RANGE[1]}.")] = None,
        batch: Annotated[
            str, typer.Option("--batch", "--batch-size", help="Sequences at a time; several with commas.")
        ] = "1",
        memory: Annotated[str | None, typer.Option(help="What must fit into: 80GB, 79.6GiB.")] = None,
        hardware: Annotated[
            str | None, typer.Option(help="h100, h200, b200, a100, rtx4090, cpu; all of them if none.")
        ] = None,
        devices: Annotated[int, typer.Option(help="So many of them, the model spread evenly.")] = 1,
        bandwidth: Annotated[str | None, typer.Option(help="Other hardware: 3.35TB/s.")] = None,
        flops: Annotated[str | None, typer.Option(help="Other hardware: 989TFLOPS of dense products.")] = None,
        train: Annotated[bool, typer.Option("--train/--no-train", help="Training memory too.")] = True,
        tokens_per_step: Annotated[int, typer.Option(help="Training: tokens of a step on one device.")] = 8192,
        optimizer: Annotated[str, typer.Option(help="Training: adamw or muon.")] = "adamw",
        precision: Annotated[str, typer.Option(help="Training: bf16 (autocast) or fp32.")] = "bfloat16",
        recompute: Annotated[bool, typer.Option("--recompute", help="Training step: layers are run twice.")] = False,
        teaching: Annotated[
            bool, typer.Option("--teaching", help="The simplified formulas people know, and why they differ.")
        ] = False,
        layers: Annotated[bool, typer.Option("--layers", help="A row for every layer.")] = False,
        json_file: Annotated[
            str | None, typer.Option("--json", metavar="FILE", help="All numbers as JSON; - prints them alone.")
        ] = None,
        csv_file: Annotated[
            str | None, typer.Option("--csv", metavar="FILE", help="All numbers as CSV; - prints them alone.")
        ] = None,
        plot: Annotated[Path | None, typer.Option(metavar="FILE", help="A figure: .png, .svg or .pdf.")] = None,
        panels: Annotated[
            str | None, typer.Option(help="Of the figure, with commas: memory, batch, flops, decode, prefill.")
        ] = None,
        axes: Annotated[
            str | None, typer.Option(help="Of the figure: log, or linear, as it is with --min-ctx or --max-ctx.")
        ] = None,
    ) -> None:
        """Plan a model: bytes of weights and state, operations, least times, what fits. No weight is read."""
        from lineate.planning.hardware import several
        from lineate.planning.models import DTYPES
        from lineate.planning.report import Request, make_report, make_teaching_report
        from lineate.planning.units import MOST, read_counts
        from lineate.terminal import fail, printable

        numbers = {
            "--emb-dim": emb_dim, "--n-heads": n_heads, "--n-layers": n_layers, "--kv-heads": kv_heads,
            "--head-dim": head_dim, "--vocab-size": vocab_size, "--feed-size": feed_size,
        }  # fmt: skip
        try:
            unused = {
                "--memory": memory, "--hardware": hardware, "--bandwidth": bandwidth, "--flops": flops,
                "--devices": devices if devices != 1 else None,
                "--panels": panels, "--layers": layers or None, "--recompute": recompute or None,
            }  # fmt: skip
            if teaching and (given := [name for name, value in unused.items() if value is not None]):
                raise ValueError(f"{given[0]} has no meaning with --teaching; leave it out")
            check_files(json_file, csv_file, plot)
            contexts, batches = read_contexts(context, min_ctx, max_ctx), read_counts(batch, "--batch")
            linear = has_linear_axes(axes, plot, min_ctx is not None or max_ctx is not None)
            if not 1 <= tokens_per_step <= MOST:
                raise ValueError(f"--tokens-per-step must be at least 1 and at most 2^40, got {tokens_per_step}")
            precision = str(DTYPES.get(precision, precision)).removeprefix("torch.")
            for name, word, words in (("--optimizer", optimizer, OPTIMIZERS), ("--precision", precision, PRECISIONS)):
                if word not in words:
                    raise ValueError(f"{name} must be {' or '.join(words)}, got {word!r}")
            if not 1 <= devices <= MOST_DEVICES:
                raise ValueError(f"--devices must be at least 1 and at most {MOST_DEVICES}, got {devices}")
            machines, room = choose_machines(hardware, bandwidth, flops, memory)
            machines, room = tuple(several(x, devices) for x in machines), None if room is None else room * devices
            drawn = choose_panels(panels, plot, bool(machines))
            assumed: dict[str, int | str] = {}
            if teaching and source is None:
                asked: dict[str, int | str | None] = {**numbers, "--dtype": dtype, "--pattern": pattern}
                assumed = {name: value for name, value in TAUGHT.items() if asked[name] is None}
                numbers |= {name: value for name, value in assumed.items() if isinstance(value, int)}
            request = Request(
                _model(source, numbers, pattern, dtype), contexts, batches[0], batches if len(batches) > 1 else (),
                machines, room, state_dtype, conv_dtype, cache_dtype, tokens_per_step if train else None, optimizer,
                precision, recompute,
            )  # fmt: skip
            report = (make_teaching_report if teaching else make_report)(request)
        except (ValueError, TypeError, OSError) as error:
            fail(_one_line(error), 2)
        report = {"command": shlex.join(["lineate", *sys.argv[1:]]), "assumed": assumed, **report}
        _show(report, json_file, csv_file, layers)
        if plot is not None:
            _draw(request, plot, drawn, teaching, context is None and min_ctx is None and max_ctx is None, linear)
            typer.echo(printable(str(plot)), err="-" in (json_file, csv_file))


def _model(source: str | None, numbers: dict[str, int | None], pattern: str | None, dtype: str | None) -> "Model":
    """From a name or from numbers, not both."""
    from lineate.models.files.hub import is_hub_name
    from lineate.models.presets import PRESETS
    from lineate.planning.models import from_numbers, read_model
    from lineate.training.command import model_folder

    given = {name: value for name, value in numbers.items() if value is not None}
    if source is not None and given:
        raise ValueError(f"{next(iter(given))} is for a model made of numbers; leave it out, or leave out {source!r}")
    if source:
        try:
            source, place = spelled(source, PRESETS), user_path(source)
            if source in PRESETS or is_hub_name(source) or (found := model_folder(place)) == place:
                return read_model(source, dtype, pattern)
            name = place.resolve().name + ("" if pattern is None else f", {pattern}")
            return replace(read_model(found, dtype, pattern), name=name)
        except (ArithmeticError, MemoryError) as error:
            raise ValueError(f"{source} has sizes that no model can have ({type(error).__name__})") from None
    if not given:
        raise ValueError(HOW)
    needed = ("--emb-dim", "--n-heads", "--n-layers")
    if missing := [name for name in needed if name not in given]:
        raise ValueError(f"{missing[0]} must be given too: numbers need {', '.join(needed)}")
    for name, value in given.items():
        _check_size(name, value)
    return from_numbers(
        given["--emb-dim"], given["--n-heads"], given["--n-layers"], dtype=dtype or "bf16",
        kv_heads=given.get("--kv-heads"), head_dim=given.get("--head-dim"), vocab_size=given.get("--vocab-size"),
        feed_size=given.get("--feed-size"), pattern="GGGA" if pattern is None else pattern,
    )  # fmt: skip


def _check_size(name: str, value: int, least: int = 1) -> None:
    from lineate.models.fields import MOST_CHANNELS, MOST_LAYERS

    most = MOST_LAYERS if name in ("--n-layers", "n_layers") else MOST_CHANNELS
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {value:,}")


def _one_line(error: Exception) -> str:
    """A message of the library, with an option's name in place of an argument's."""
    text = " ".join(str(error).split())
    name, must, rest = text.partition(" must ")
    return f"--{name.replace('_', '-')}{must}{rest}" if name in ARGUMENTS else text


def _show(report: dict[str, Any], json_file: str | None, csv_file: str | None, layers: bool) -> None:
    """Tables, unless numbers are printed instead; files."""
    import typer

    from lineate.planning.report import csv_text
    from lineate.planning.tables import print_report, print_teaching
    from lineate.terminal import console, printable

    texts = [(json_file, json.dumps(report, indent=1) + "\n"), (csv_file, csv_text(report))]
    for name, text in texts:  # before the tables, which may be cut by a pipe
        if name is not None and name != "-":
            user_path(name).write_text(text, encoding="utf-8", errors="surrogateescape")
    if "-" not in (json_file, csv_file):
        wide = console(width=max(80, console().width))  # in less, numbers would be cut in two
        if "teaching" in report:
            print_teaching(report, wide)
        else:
            print_report(report, wide, layers)
    for name, text in texts:
        if name == "-":
            typer.echo(printable(text), nl=False)
        elif name is not None:
            typer.echo(printable(name), err="-" in (json_file, csv_file))  # what is printed must stay JSON, or CSV


def _draw(
    request: "Request", plot: Path, panels: tuple[str, ...], teaching: bool, usual: bool, linear: bool
) -> None:  # fmt: skip
    """The figure, from the shortest context on, or from a 16th of it if there is but one or if they are the usual ones.

    Points: every power of two, or so many evenly spaced ones if the axes are linear.
    """
    from lineate.explore.style import styled
    from lineate.planning.hardware import find_hardware
    from lineate.planning.plots import draw_report, draw_teaching, save
    from lineate.planning.report import make_report, make_teaching_report

    first, last = request.contexts[0], request.contexts[-1]
    if first == last or usual:
        first = max(1, first // 16)
    machines = request.machines if len(request.machines) == 1 else (find_hardware("h200"),) * bool(request.machines)
    grid = doubling(first, last)
    if linear:
        grid = tuple(sorted({first + (last - first) * i // EVEN for i in range(EVEN + 1)}))
    request = replace(request, contexts=grid, machines=machines, tokens_per_step=None)
    with styled():
        if teaching:
            figure = draw_teaching(make_teaching_report(request), linear)
        else:
            figure = draw_report(make_report(request), panels, linear)
        save(figure, user_path(plot))

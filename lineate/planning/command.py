"""`lineate plan`: what a model needs, as tables, JSON, CSV and a figure."""

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineate.console.names import spelled, user_path
from lineate.console.options import add_command, parameters, sign
from lineate.planning.options import (
    PlanArguments,
    check_files,
    choose_machines,
    choose_panels,
    doubling,
    linear_axes,
    read_contexts,
)

if TYPE_CHECKING:
    import typer

    from lineate.planning.models import Model
    from lineate.planning.report import PlanRequest

TAUGHT: dict[str, int | str] = {
    "--emb-dim": 2048, "--n-heads": 16, "--n-layers": 48, "--dtype": "bf16", "--pattern": "GGGA"
}  # fmt: skip
"""The default numbers of --teaching; the last two are the defaults of from_numbers."""
EVEN = 64
"""How many steps a figure has from its first length to its last if the axis of lengths is linear."""
ARGUMENTS = (
    "emb_dim", "n_heads", "kv_heads", "head_dim", "dtype", "state_dtype", "conv_dtype", "cache_dtype", "pattern",
    "hardware", "optimizer", "tensor", "context", "replicas",
)  # fmt: skip
"""Arguments of the library with an option of the same name."""
OTHER_NAMES = {"context": "context-ranks"}
"""Options with another name, because --context has the lengths."""
OPTIMIZERS, PRECISIONS = ("adamw", "muon"), ("bfloat16", "float32")
MOST_DEVICES = 2**20
HOW = (
    "say what to plan: a preset (lineate plan qwen3-next-80b), a checkpoint's folder, a GGUF file, a config.json, or "
    "numbers (lineate plan --emb-dim 2048 --n-heads 16 --n-layers 48); lineate plan --help lists the options"
)


def add_commands(app: "typer.Typer") -> None:
    """Add `lineate plan` to the command line."""

    def plan(**given: Any) -> None:
        """Plan a model: bytes of weights and state, operations, least times, what fits. No weight is read."""
        run_plan(PlanArguments(**given))

    sign(plan, parameters(PlanArguments))
    add_command(
        app, plan, "lineate plan qwen3-next-80b --hardware h200 --context 4k,128k,1M",
        "lineate plan --emb-dim 2048 --n-heads 16 --n-layers 48 --no-train",
    )  # fmt: skip


def run_plan(asked: PlanArguments) -> None:
    """Print and write the requested results; a wrong option ends the program."""
    import typer

    from lineate.console.terminal import fail, printable

    assumed: dict[str, int | str] = {}
    try:
        asked.check_teaching()
        asked.check_fits()
        check_files(asked.json_file, asked.csv_file, asked.plot)
        if asked.teaching and asked.source is None:
            wanted: dict[str, int | str | None] = {**asked.numbers, "--dtype": asked.dtype, "--pattern": asked.pattern}
            assumed = {name: value for name, value in TAUGHT.items() if wanted[name] is None}
        request, panels, linear = _read(asked, assumed)
        report = _make(asked, request)
    except (ValueError, TypeError, OSError) as error:
        fail(_one_line(error), 2)
    report = {"command": shlex.join(["lineate", *sys.argv[1:]]), "assumed": assumed, **report}
    _show(report, asked.json_file, asked.csv_file, asked.layers)
    if asked.plot is not None:
        _draw(request, asked.plot, panels, asked.teaching, asked.context is None and not asked.in_range, linear)
        typer.echo(printable(str(asked.plot)), err="-" in (asked.json_file, asked.csv_file))


def _read(
    asked: PlanArguments, assumed: Mapping[str, int | str]
) -> tuple["PlanRequest", tuple[str, ...], tuple[bool, bool]]:
    """Return the request, the panels of the figure, and whether its axes x and y are linear."""
    from lineate.planning.hardware import several
    from lineate.planning.models import DTYPES, Split
    from lineate.planning.report import PlanRequest
    from lineate.planning.units import MOST_COUNTED, read_counts

    contexts = read_contexts(asked.context, asked.min_ctx, asked.max_ctx)
    batches = read_counts(asked.batch, "--batch")
    linear = linear_axes(asked.axes, asked.plot, asked.in_range)
    if not 1 <= asked.tokens_per_step <= MOST_COUNTED:
        raise ValueError(f"--tokens-per-step must be at least 1 and at most 2^40, got {asked.tokens_per_step}")
    precision = str(DTYPES.get(asked.precision, asked.precision)).removeprefix("torch.")
    for name, word, words in (("--optimizer", asked.optimizer, OPTIMIZERS), ("--precision", precision, PRECISIONS)):
        if word not in words:
            raise ValueError(f"{name} must be {' or '.join(words)}, got {word!r}")
    if not 1 <= asked.devices <= MOST_DEVICES:
        raise ValueError(f"--devices must be at least 1 and at most {MOST_DEVICES}, got {asked.devices}")
    machines, room = choose_machines(asked.hardware, asked.bandwidth, asked.flops, asked.memory, asked.link)
    machines = tuple(several(x, asked.devices) for x in machines)
    panels = choose_panels(asked.panels, asked.plot, bool(machines))
    numbers = asked.numbers | {name: value for name, value in assumed.items() if isinstance(value, int)}
    request = PlanRequest(
        _with_bits(asked, lambda dtype: _model(asked.source, numbers, asked.pattern, dtype)),
        contexts,
        batches[0],
        batches if len(batches) > 1 else (),
        machines,
        None if room is None else room * asked.devices,
        asked.state_dtype,
        asked.conv_dtype,
        asked.cache_dtype,
        asked.tokens_per_step if asked.train else None,
        asked.optimizer,
        precision,
        asked.recompute,
        Split(asked.tensor, asked.context_ranks, asked.replicas),
    )
    return request, panels, linear


def _make(asked: PlanArguments, request: "PlanRequest") -> dict[str, Any]:
    """Return the requested numbers."""
    from lineate.planning.report import make_report, make_teaching_report
    from lineate.planning.where import make_fits_report, places_for

    if asked.fits:
        return make_fits_report(request, places_for(request.machines, request.memory_bytes))
    return make_teaching_report(request) if asked.teaching else make_report(request)


def _with_bits(asked: PlanArguments, make: Callable[[str | None], "Model"]) -> "Model":
    """Return the model that a dtype makes, with weights of --bits if there are any."""
    from lineate.quantised.which import name_of_bits

    weights = name_of_bits(asked.bits)
    return make(asked.dtype) if weights is None else replace(make(asked.dtype or "float32"), weights=weights, kept=())


def _model(source: str | None, numbers: dict[str, int | None], pattern: str | None, dtype: str | None) -> "Model":
    """Return a model from its name or from numbers; both together are refused."""
    from lineate.generation.loading import model_folder
    from lineate.models.files.hub import is_hub_name
    from lineate.models.presets import PRESETS
    from lineate.planning.models import from_numbers, read_model

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
    """Return a message of the library with an option's name in place of an argument's."""
    text = " ".join(str(error).split())
    name, must, rest = text.partition(" must ")
    flag = OTHER_NAMES.get(name, name.replace("_", "-"))
    return f"--{flag}{must}{rest}" if name in ARGUMENTS else text


def _show(report: dict[str, Any], json_file: str | None, csv_file: str | None, layers: bool) -> None:
    """Print the tables, unless numbers are printed instead, and write the files."""
    import typer

    from lineate.console.terminal import console, printable
    from lineate.planning.report import csv_text
    from lineate.planning.tables import print_report, print_teaching
    from lineate.planning.where import print_fits

    texts = [(json_file, json.dumps(report, indent=1) + "\n"), (csv_file, csv_text(report))]
    for name, text in texts:  # before the tables, whose output may be cut by a pipe
        if name is not None and name != "-":
            user_path(name).write_text(text, encoding="utf-8", errors="surrogateescape")
    if "-" not in (json_file, csv_file):
        wide = console(width=max(80, console().width))  # fewer columns would cut numbers in two
        if "teaching" in report:
            print_teaching(report, wide)
        elif "where" in report:
            print_fits(report, wide)
        else:
            print_report(report, wide, layers)
    for name, text in texts:
        if name == "-":
            typer.echo(printable(text), nl=False)
        elif name is not None:
            typer.echo(printable(name), err="-" in (json_file, csv_file))  # stdout must stay valid JSON or CSV


def _draw(
    request: "PlanRequest", plot: Path, panels: tuple[str, ...], teaching: bool, usual: bool, linear: tuple[bool, bool]
) -> None:  # fmt: skip
    """Draw the figure from the shortest context on, or from a 16th of it if there is only one or if none was given.

    There is a point at every power of two, or EVEN steps if the axis of lengths is linear.
    """
    from lineate.figures import styled
    from lineate.planning.hardware import find_hardware
    from lineate.planning.plots import draw_report, draw_teaching, save
    from lineate.planning.report import make_report, make_teaching_report

    first, last = request.contexts[0], request.contexts[-1]
    if first == last or usual:
        first = max(1, first // 16)
    machines = request.machines if len(request.machines) == 1 else (find_hardware("h200"),) * bool(request.machines)
    grid = doubling(first, last)
    if linear[0]:
        grid = tuple(sorted({first + (last - first) * i // EVEN for i in range(EVEN + 1)}))
    request = replace(request, contexts=grid, machines=machines, tokens_per_step=None)
    with styled():
        if teaching:
            figure = draw_teaching(make_teaching_report(request), linear)
        else:
            figure = draw_report(make_report(request), panels, linear)
        save(figure, user_path(plot))

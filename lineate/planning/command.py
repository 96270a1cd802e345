"""`lineate plan`: what a model needs, as tables, JSON, CSV and a figure."""

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    import typer

    from lineate.planning.hardware import Hardware
    from lineate.planning.models import Model
    from lineate.planning.report import Request

CONTEXTS = "4k,16k,64k,256k,1M"
ARGUMENTS = (
    "emb_dim", "n_heads", "kv_heads", "head_dim", "dtype", "state_dtype", "conv_dtype", "cache_dtype", "pattern",
    "hardware", "optimizer",
)  # fmt: skip
"""Of the library, which options are named for."""
OPTIMIZERS, PRECISIONS = ("adamw", "muon"), ("bfloat16", "float32")
MOST_DEVICES = 2**20
PANELS = ("memory", "batch", "flops", "decode", "prefill")
SUFFIXES = (".png", ".svg", ".pdf")
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
            typer.Argument(metavar="MODEL", help="A preset, a checkpoint's or a run's folder, or a config.json."),
        ] = None,
        emb_dim: Annotated[int | None, typer.Option(help="Numbers instead of a model: channels.")] = None,
        n_heads: Annotated[int | None, typer.Option(help="Numbers: heads.")] = None,
        n_layers: Annotated[int | None, typer.Option(help="Numbers: layers.")] = None,
        kv_heads: Annotated[int | None, typer.Option(help="Numbers: heads of keys and values; --n-heads.")] = None,
        head_dim: Annotated[int | None, typer.Option(help="Numbers: channels a head; emb-dim / n-heads.")] = None,
        vocab_size: Annotated[int | None, typer.Option(help="Numbers: tokens there are; 32768.")] = None,
        feed_size: Annotated[int | None, typer.Option(help="Numbers: of the feed-forward; 8/3 emb-dim.")] = None,
        pattern: Annotated[
            str | None, typer.Option(help="Mixers of the layers, tiled: GGGA (numbers, and presets to train).")
        ] = None,
        dtype: Annotated[
            str | None, typer.Option(help="Of weights, cache and convolutions: fp32, bf16, fp16, fp8, int8.")
        ] = None,
        state_dtype: Annotated[str, typer.Option(help="Of the recurrent state.")] = "float32",
        conv_dtype: Annotated[str | None, typer.Option(help="Of the convolution state, if another.")] = None,
        cache_dtype: Annotated[str | None, typer.Option(help="Of the cache, if another.")] = None,
        context: Annotated[str, typer.Option(help="Tokens of a sequence, with commas; 32k is 32768.")] = CONTEXTS,
        batch: Annotated[str, typer.Option(help="Sequences at a time; several with commas.")] = "1",
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
        precision: Annotated[str, typer.Option(help="Training: bfloat16 (autocast) or float32.")] = "bfloat16",
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
    ) -> None:
        """Plan a model: bytes of weights and state, operations, least times, what fits. No weight is read."""
        from lineate.planning.hardware import several
        from lineate.planning.report import Request, make_report, make_teaching_report
        from lineate.planning.units import MOST, read_counts

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
            _check_files(json_file, csv_file, plot)
            contexts, batches = read_counts(context, "--context"), read_counts(batch, "--batch")
            if not 1 <= tokens_per_step <= MOST:
                raise ValueError(f"--tokens-per-step must be at least 1 and at most 2^40, got {tokens_per_step}")
            for name, word, words in (("--optimizer", optimizer, OPTIMIZERS), ("--precision", precision, PRECISIONS)):
                if word not in words:
                    raise ValueError(f"{name} must be {' or '.join(words)}, got {word!r}")
            if not 1 <= devices <= MOST_DEVICES:
                raise ValueError(f"--devices must be at least 1 and at most {MOST_DEVICES}, got {devices}")
            machines, room = _machines(hardware, bandwidth, flops, memory)
            machines, room = tuple(several(x, devices) for x in machines), None if room is None else room * devices
            drawn = _panels(panels, plot, bool(machines))
            request = Request(
                _model(source, numbers, pattern, dtype), contexts, batches[0], batches if len(batches) > 1 else (),
                machines, room, state_dtype, conv_dtype, cache_dtype, tokens_per_step if train else None, optimizer,
                precision, recompute,
            )  # fmt: skip
            report = (make_teaching_report if teaching else make_report)(request)
        except (ValueError, TypeError, OSError) as error:
            typer.echo(f"lineate: {_one_line(error)}", err=True)
            raise typer.Exit(2) from None
        report = {"command": shlex.join(["lineate", *sys.argv[1:]]), **report}
        _show(report, json_file, csv_file, layers)
        if plot is not None:
            _draw(request, plot, drawn, teaching)
            typer.echo(plot, err="-" in (json_file, csv_file))


def _model(source: str | None, numbers: dict[str, int | None], pattern: str | None, dtype: str | None) -> "Model":
    """From a name or from numbers, not both."""
    from lineate.models.presets import PRESETS
    from lineate.planning.models import from_numbers, read_model
    from lineate.training.command import model_folder

    given = {name: value for name, value in numbers.items() if value is not None}
    if source is not None and given:
        raise ValueError(f"{next(iter(given))} is for a model made of numbers; leave it out, or leave out {source!r}")
    if source:
        try:
            place = Path(source).expanduser()
            if source in PRESETS or (found := model_folder(place)) == place:
                return read_model(source, dtype, pattern)
            return replace(read_model(found, dtype, pattern), name=place.resolve().name)
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


def _machines(
    hardware: str | None, bandwidth: str | None, flops: str | None, memory: str | None
) -> tuple[tuple["Hardware", ...], int | None]:
    """One machine (by name, some of its numbers changed, or by numbers alone), none (only memory), or all we know."""
    from lineate.planning.hardware import HARDWARE, find_hardware, make_hardware
    from lineate.planning.units import read_bandwidth, read_bytes, read_flops

    room = None if memory is None else read_bytes(memory, "--memory")
    moved = None if bandwidth is None else read_bandwidth(bandwidth, "--bandwidth")
    rate = None if flops is None else read_flops(flops, "--flops")
    if hardware is not None:
        machine = find_hardware(hardware)
        if moved is not None or rate is not None:
            rates = machine.matrix_rate if rate is None else {"float32": rate}
            machine = replace(machine, bandwidth=moved or machine.bandwidth, matrix_rate=rates)
        return (machine,), room
    if moved is not None and rate is not None and room is not None:
        return (make_hardware(room, moved, rate),), room
    if moved is not None or rate is not None:
        raise ValueError("--bandwidth, --flops and --memory must be given together, or with --hardware")
    return ((), room) if room is not None else (tuple(HARDWARE.values()), None)


def _panels(panels: str | None, plot: Path | None, machines: bool) -> tuple[str, ...]:
    """The panels of the figure."""
    if panels is None:
        return ("memory", "decode") if machines else ("memory", "batch")
    if plot is None:
        raise ValueError("--panels are those of a figure; give --plot FILE too")
    chosen = tuple(dict.fromkeys(word.strip() for word in panels.split(",")))
    for word in chosen:
        if word not in PANELS:
            raise ValueError(f"--panels must be of {', '.join(PANELS)}, with commas between, got {panels!r}")
        if word in ("decode", "prefill") and not machines:
            raise ValueError(f"--panels {word} needs --hardware, or --bandwidth and --flops")
    return chosen


def _check_files(json_file: str | None, csv_file: str | None, plot: Path | None) -> None:
    """Prove that the files can be written, before anything is computed."""
    from lineate.checks import why_not_writable

    if json_file == csv_file == "-":
        raise ValueError("--json - and --csv - cannot both be printed; write one of them to a file")
    for flag, name in (("--json", json_file), ("--csv", csv_file), ("--plot", plot)):
        if name is None or (str(name) == "-" and flag != "--plot"):
            continue
        path = Path(name).expanduser()
        if flag == "--plot" and path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"--plot must be a file that ends in {', '.join(SUFFIXES)}, got '{name}'")
        if path.parent.exists() and not path.parent.is_dir():
            why: str | None = f"'{path.parent}' is no folder"
        else:
            why = "it is a folder" if path.is_dir() else why_not_writable(path.parent)
        if path.is_file() and not os.access(path, os.W_OK):
            why = "it may not be changed"
        if why is not None:
            raise ValueError(f"{flag} must be a file that can be written, got '{name}' ({why}); choose another")
    files = [Path(name).expanduser().resolve() for name in (json_file, csv_file, plot) if name not in (None, "-")]
    if len(set(files)) < len(files):
        raise ValueError("--json, --csv and --plot must be different files, got the same twice")
    if plot is not None:
        import matplotlib  # noqa: F401  # say now, not after all tables, that it is missing


def _show(report: dict[str, Any], json_file: str | None, csv_file: str | None, layers: bool) -> None:
    """Tables, unless numbers are printed instead; files."""
    import typer

    from lineate.planning.report import csv_text
    from lineate.planning.tables import print_report, print_teaching

    texts = [(json_file, json.dumps(report, indent=1) + "\n"), (csv_file, csv_text(report))]
    for name, text in texts:  # before the tables, which may be cut by a pipe
        if name is not None and name != "-":
            Path(name).expanduser().write_text(text, encoding="utf-8")
    if "-" not in (json_file, csv_file):
        from rich.console import Console

        console = Console()
        console = Console(width=max(80, console.width))  # in less, numbers would be cut in two
        if "teaching" in report:
            print_teaching(report, console)
        else:
            print_report(report, console, layers)
    for name, text in texts:
        if name == "-":
            typer.echo(text, nl=False)
        elif name is not None:
            typer.echo(name, err="-" in (json_file, csv_file))  # what is printed must stay JSON, or CSV


def _draw(request: "Request", plot: Path, panels: tuple[str, ...], teaching: bool) -> None:
    """The figure: a point for every power of two from the shortest context (if there are several) on."""
    from lineate.explore.style import styled
    from lineate.planning.hardware import find_hardware
    from lineate.planning.plots import draw_report, draw_teaching, save
    from lineate.planning.report import make_report, make_teaching_report
    from lineate.planning.units import read_counts

    first, last = request.contexts[0], request.contexts[-1]
    if first == last or request.contexts == read_counts(CONTEXTS, "--context"):
        first = max(1, first // 16)
    between = (2**n for n in range(first.bit_length(), last.bit_length()))
    machines = request.machines if len(request.machines) == 1 else (find_hardware("h200"),) * bool(request.machines)
    grid = tuple(sorted({first, last, *between}))
    request = replace(request, contexts=grid, machines=machines, tokens_per_step=None)
    with styled():
        figure = draw_teaching(make_teaching_report(request)) if teaching else draw_report(make_report(request), panels)
        save(figure, plot.expanduser())

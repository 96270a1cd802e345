"""The options of `lineate plan`, read and checked before anything is computed."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lineate.console.names import user_path
from lineate.console.options import argument, option

if TYPE_CHECKING:
    from lineate.planning.hardware import Hardware

DEFAULT_CONTEXTS = "4k,16k,64k,256k,1M"
DEFAULT_RANGE = ("128", "128k")
"""The values of --min-ctx and --max-ctx if only the other is given."""
AXES = ("log", "linear")
PANEL_NAMES = ("memory", "batch", "flops", "decode", "prefill")
FIGURE_ENDINGS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class PlanArguments:
    """The options of `lineate plan`: a field is an option of the command line."""

    source: str | None = argument(
        "A preset, a checkpoint's or a run's folder, a config.json, or a hub name.", "MODEL", None
    )
    emb_dim: int | None = option(None, "Numbers instead of a model: channels.", "--emb-dim", "--hidden-size")
    n_heads: int | None = option(None, "Numbers: heads.")
    n_layers: int | None = option(None, "Numbers: layers.")
    kv_heads: int | None = option(None, "Numbers: heads of keys and values; --n-heads.")
    head_dim: int | None = option(None, "Numbers: channels a head; emb-dim / n-heads.")
    vocab_size: int | None = option(None, "Numbers: tokens there are; 32768.")
    feed_size: int | None = option(None, "Numbers: of the feed-forward; 8/3 emb-dim.")
    pattern: str | None = option(None, "Mixers of the layers, tiled, in place of the model's: GGGGGGGA.")
    dtype: str | None = option(None, "Of weights, cache and convolutions: fp32, bf16, fp16, fp8, int8.")
    bits: str | None = option(None, "Of large weights: 16, 8, 4 or fp8; --dtype, else fp32, is then that of others.")
    state_dtype: str = option("float32", "Of the recurrent state.")
    conv_dtype: str | None = option(None, "Of the convolution state, if another.")
    cache_dtype: str | None = option(None, "Of the cache, if another.")
    context: str | None = option(
        None, f"Tokens of a sequence, with commas; 32k is 32768; {DEFAULT_CONTEXTS}.", "--context", "--context-length"
    )
    min_ctx: str | None = option(None, f"Or every power of two from this many tokens; {DEFAULT_RANGE[0]}.")
    max_ctx: str | None = option(None, f"To this many tokens; {DEFAULT_RANGE[1]}.")
    batch: str = option("1", "Sequences at a time; several with commas.", "--batch", "--batch-size")
    memory: str | None = option(None, "What must fit into: 80GB, 79.6GiB.")
    hardware: str | None = option(None, "h100, h200, b200, a100, rtx4090, rtx5090, cpu; all of them if none.")
    devices: int = option(1, "Number of machines, the model spread evenly.")
    tensor: int = option(1, "Ranks that divide heads and channels: all numbers are then those of one rank.")
    context_ranks: int = option(1, "Ranks that divide each sequence, in a prefill and in training.")
    replicas: int = option(1, "Copies of all this, each with sequences of its own.")
    fits: bool = option(False, "What fits where: the model on 1 to 8 devices, in 16, 8 and 4 bits.", "--fits")
    bandwidth: str | None = option(None, "Other hardware: 3.35TB/s.")
    flops: str | None = option(None, "Other hardware: 989TFLOPS of dense products.")
    link: str | None = option(None, "Other hardware: what a rank receives from the others, 450GB/s.")
    train: bool = option(True, "Training memory too.", "--train/--no-train")
    tokens_per_step: int = option(8192, "Training: tokens of a step on one device.")
    optimizer: str = option("adamw", "Training: adamw or muon.")
    precision: str = option("bfloat16", "Training: bf16 (autocast) or fp32.")
    recompute: bool = option(False, "Training step: layers are run twice.", "--recompute")
    teaching: bool = option(False, "The simplified formulas people know, and why they differ.", "--teaching")
    layers: bool = option(False, "A row for every layer.", "--layers")
    json_file: str | None = option(None, "All numbers as JSON; - prints them alone.", "--json", metavar="FILE")
    csv_file: str | None = option(None, "All numbers as CSV; - prints them alone.", "--csv", metavar="FILE")
    plot: Path | None = option(None, "A figure: .png, .svg or .pdf.", metavar="FILE")  # noqa: RUF009  # it is a field
    panels: str | None = option(None, "Of the figure, with commas: memory, batch, flops, decode, prefill.")
    axes: str | None = option(
        None, "Of the figure: log, or linear, the default with --min-ctx or --max-ctx; or x,y: linear,log."
    )

    @property
    def numbers(self) -> dict[str, int | None]:
        """The numbers of a model without a config, by their flags."""
        return {
            "--emb-dim": self.emb_dim, "--n-heads": self.n_heads, "--n-layers": self.n_layers,
            "--kv-heads": self.kv_heads, "--head-dim": self.head_dim, "--vocab-size": self.vocab_size,
            "--feed-size": self.feed_size,
        }  # fmt: skip

    @property
    def in_range(self) -> bool:
        """Whether the lengths are given by the ends of a range."""
        return self.min_ctx is not None or self.max_ctx is not None

    @property
    def ranks(self) -> dict[str, int]:
        """The numbers of ranks, by their flags."""
        return {"--tensor": self.tensor, "--context-ranks": self.context_ranks, "--replicas": self.replicas}

    def check_teaching(self) -> None:
        """Refuse options that have no meaning for the teaching formulas."""
        unused = {
            "--memory": self.memory, "--hardware": self.hardware, "--bandwidth": self.bandwidth, "--flops": self.flops,
            "--devices": self.devices if self.devices != 1 else None,
            "--panels": self.panels, "--layers": self.layers or None, "--recompute": self.recompute or None,
            "--link": self.link, "--fits": self.fits or None, **self._several(),
        }  # fmt: skip
        if self.teaching and (given := [name for name, value in unused.items() if value is not None]):
            raise ValueError(f"{given[0]} has no meaning with --teaching; leave it out")

    def check_fits(self) -> None:
        """Refuse options that have no meaning for the table of --fits."""
        unused = {
            "--devices": self.devices if self.devices != 1 else None, "--bits": self.bits, "--plot": self.plot,
            "--panels": self.panels, "--layers": self.layers or None, "--recompute": self.recompute or None,
            **self._several(),
        }  # fmt: skip
        if self.fits and (given := [name for name, value in unused.items() if value is not None]):
            raise ValueError(f"{given[0]} has no meaning with --fits, which tries several; leave it out")
        if self.devices != 1 and (given := [name for name, value in self._several().items() if value is not None]):
            raise ValueError(f"--devices spreads a model evenly without ranks; leave it out, or leave out {given[0]}")

    def _several(self) -> dict[str, int | None]:
        """Return the numbers of ranks that are given, by their flags; None where there is one rank."""
        return {name: None if value == 1 else value for name, value in self.ranks.items()}


def read_contexts(context: str | None, first: str | None, last: str | None) -> tuple[int, ...]:
    """Return the lengths given, or those of a range: its ends and all powers of two between them."""
    from lineate.planning.units import read_counts

    if first is None and last is None:
        return read_counts(DEFAULT_CONTEXTS if context is None else context, "--context")
    if context is not None:
        raise ValueError("--context names all lengths; leave it out, or leave out --min-ctx and --max-ctx")
    ends: list[int] = []
    for flag, text, default in (("--min-ctx", first, DEFAULT_RANGE[0]), ("--max-ctx", last, DEFAULT_RANGE[1])):
        counts = read_counts(default if text is None else text, flag)
        if len(counts) > 1:
            raise ValueError(f"{flag} must be one number, got {text!r}; --context takes several")
        ends.append(counts[0])
    if ends[0] > ends[1] and None in (first, last):  # a default gives way
        return (ends[1 if first is None else 0],)
    if ends[0] > ends[1]:
        raise ValueError(f"--min-ctx must be at most --max-ctx = {ends[1]:,}, got {ends[0]:,}")
    return doubling(*ends)


def doubling(first: int, last: int) -> tuple[int, ...]:
    """Return both ends and the powers of two between them."""
    return tuple(sorted({first, last, *(2**n for n in range(first.bit_length(), last.bit_length()))}))


def linear_axes(axes: str | None, plot: Path | None, in_range: bool) -> tuple[bool, bool]:
    """Return whether the figure's axes of lengths (x) and of numbers (y) are linear."""
    if axes is None:
        return in_range, in_range
    words = [word.strip().lower() for word in axes.split(",")]
    if len(words) > 2 or set(words) - set(AXES):
        raise ValueError(
            f"--axes must be {' or '.join(AXES)}, or two of these for x and y, as linear,log, got {axes!r}"
        )
    if plot is None:
        raise ValueError("--axes are those of a figure; give --plot FILE too")
    return words[0] == "linear", words[-1] == "linear"


def choose_panels(panels: str | None, plot: Path | None, machines: bool) -> tuple[str, ...]:
    """Return the panels of the figure."""
    if panels is None:
        return ("memory", "decode") if machines else ("memory", "batch")
    if plot is None:
        raise ValueError("--panels are those of a figure; give --plot FILE too")
    chosen = tuple(dict.fromkeys(word.strip() for word in panels.split(",")))
    for word in chosen:
        if word not in PANEL_NAMES:
            raise ValueError(f"--panels must be of {', '.join(PANEL_NAMES)}, with commas between, got {panels!r}")
        if word in ("decode", "prefill") and not machines:
            raise ValueError(f"--panels {word} needs --hardware, or --bandwidth and --flops")
    return chosen


def choose_machines(
    hardware: str | None, bandwidth: str | None, flops: str | None, memory: str | None, link: str | None = None
) -> tuple[tuple["Hardware", ...], int | None]:
    """Return the machines to plan for, and the memory given.

    There is one machine (by name, with some of its numbers changed, or by numbers alone), none if only memory is given,
    or else all that are known.
    """
    from lineate.planning.hardware import HARDWARE, find_hardware, make_hardware
    from lineate.planning.units import read_bandwidth, read_bytes, read_flops

    room = None if memory is None else read_bytes(memory, "--memory")
    moved = None if bandwidth is None else read_bandwidth(bandwidth, "--bandwidth")
    rate = None if flops is None else read_flops(flops, "--flops")
    linked = None if link is None else read_bandwidth(link, "--link")
    if hardware is not None:
        machine = find_hardware(hardware)
        if moved is not None or rate is not None:
            rates = machine.matrix_rate if rate is None else {"float32": rate}
            machine = replace(machine, bandwidth=moved or machine.bandwidth, matrix_rate=rates)
        if linked is not None:
            machine = replace(machine, link=linked, network=linked)
        return (machine,), room
    if moved is not None and rate is not None and room is not None:
        return (make_hardware(room, moved, rate, link=linked or math.inf),), room
    if moved is not None or rate is not None:
        raise ValueError("--bandwidth, --flops and --memory must be given together, or with --hardware")
    if linked is not None:
        raise ValueError("--link must be given with --hardware, or with --bandwidth, --flops and --memory")
    return ((), room) if room is not None else (tuple(HARDWARE.values()), None)


def check_files(json_file: str | None, csv_file: str | None, plot: Path | None) -> None:
    """Check that the files can be written, before anything is computed."""
    from lineate.system.folders import why_not_writable_file

    if json_file == csv_file == "-":
        raise ValueError("--json - and --csv - cannot both be printed; write one of them to a file")
    for flag, name in (("--json", json_file), ("--csv", csv_file), ("--plot", plot)):
        if name is None or (str(name) == "-" and flag != "--plot"):
            continue
        path = user_path(name)
        if flag == "--plot" and path.suffix.lower() not in FIGURE_ENDINGS:
            raise ValueError(f"--plot must be a file that ends in {', '.join(FIGURE_ENDINGS)}, got '{name}'")
        if (why := why_not_writable_file(path)) is not None:
            raise ValueError(f"{flag} must be a file that can be written, got '{name}' ({why}); choose another")
    files = [user_path(name).resolve() for name in (json_file, csv_file, plot) if name is not None and str(name) != "-"]
    if len(set(files)) < len(files):
        raise ValueError("--json, --csv and --plot must be different files, got the same twice")
    if plot is not None:
        import matplotlib  # noqa: F401  # say now, not after all tables, that it is missing

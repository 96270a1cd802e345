"""Describe a checkpoint from its headers alone: layers, rules, heads, parameters, bytes on disk, bytes of state."""

from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lineate.console.terminal import console
from lineate.layers import MixtureOfExperts, kind_of
from lineate.layers.state import INPUTS
from lineate.models.config import HybridConfig
from lineate.models.families import make_plan, other_family, present, quantised_format, read_config
from lineate.models.files.loading import MismatchError, check_tensors
from lineate.models.hybrid import HybridLM, empty_model
from lineate.models.nbytes import weight_bytes
from lineate.models.opening import open_headers
from lineate.models.pretrained import stored_formats, usual_dtype
from lineate.quantised.format import BY_BITS, FORMATS
from lineate.system.processor import why_wide


@dataclass(frozen=True)
class Description:
    """A checkpoint in numbers."""

    folder: Path
    family: str
    config: HybridConfig
    parameters: int
    """The number of parameters of the model, without tensors of the checkpoint that it does not use."""
    active_parameters: int
    """The number of parameters that one token is multiplied with; of the experts, only those it is routed to."""
    bytes_by_dtype: dict[str, int]
    """Bytes on disk of all tensors."""
    ignored_bytes: int
    """Bytes on disk that are not needed by the model, such as those of a vision encoder."""
    state_dtype: str
    """The dtype of the convolution's inputs and of the cache; the memory is float32."""
    memory_bytes: int
    """Bytes of the memories of one sequence, whatever its length."""
    conv_bytes: int
    """Bytes of the last inputs of the convolutions of one sequence."""
    cache_bytes_per_token: int
    """Bytes that one more token adds."""
    problem: str | None
    """Why the checkpoint cannot be loaded, if it cannot."""
    encoding: str | None = None
    """How the weights are quantised, if they are."""
    weights: str | None = None
    """The format of a checkpoint of ours that was saved with quantised weights."""
    stored_formats: dict[str, int] = field(default_factory=dict)
    """How many weights are quantised if the checkpoint is loaded as it is stored, by format."""
    loaded_bytes: int = 0
    """Bytes of the model in memory if it is loaded as it is stored, on a CPU."""
    weight_bytes: dict[int | str, int] = field(default_factory=dict)
    """Bytes of the model in memory by the bits of large weights, or "fp8", with the others in float32, as on a CPU."""

    @property
    def bytes_on_disk(self) -> int:
        return sum(self.bytes_by_dtype.values())

    def state_bytes(self, tokens: int) -> int:
        """Return the bytes of the state of one sequence after `tokens` tokens."""
        return self.memory_bytes + self.conv_bytes + tokens * self.cache_bytes_per_token


def describe(folder: str | Path) -> Description:
    """Read config.json and the headers of a folder or of a hub name; no weights."""
    stored = open_headers(folder)
    config = read_config(stored)
    model = empty_model(config)
    checkpoint = present(stored, model)
    plan = make_plan(checkpoint, config, model)
    floating = {name for name, x in model.state_dict().items() if x.is_floating_point()}
    problem = None
    try:
        check_tensors(plan, checkpoint, floating, other_family(checkpoint))
    except MismatchError as error:
        problem = str(error)
    sizes: dict[str, int] = {}
    for part in (part for entry in stored.entries.values() for part in entry.parts):
        sizes[part.encoding] = sizes.get(part.encoding, 0) + part.nbytes
    used = {piece.source for pieces in plan.pieces.values() for piece in pieces}
    unused = (part for name, entry in checkpoint.entries.items() if name not in used for part in entry.parts)
    dtype, form = usual_dtype(checkpoint, None, "cpu"), quantised_format(checkpoint)
    quantised = {bits: weight_bytes(model, torch.float32, FORMATS[name]) for bits, name in BY_BITS.items()}
    kept = stored_formats(model, checkpoint, plan, dtype)
    loaded = weight_bytes(model, dtype, kept)
    parameters = sum(x.numel() for x in model.parameters())
    predicting = 0 if model.prediction is None else sum(x.numel() for x in model.prediction.parameters())
    memory, conv, cache = _state_bytes(model.to(dtype))
    return Description(
        folder=checkpoint.folder,
        family=str(checkpoint.config["model_type"]),
        config=config,
        parameters=parameters,
        active_parameters=parameters - idle_parameters(model.layers) - predicting,
        bytes_by_dtype=dict(sorted(sizes.items(), key=lambda item: -item[1])),
        ignored_bytes=sum(part.nbytes for part in unused),
        state_dtype=str(dtype).removeprefix("torch."),
        memory_bytes=memory,
        conv_bytes=conv,
        cache_bytes_per_token=cache,
        problem=problem,
        encoding=None if checkpoint.encoding is None else str(checkpoint.encoding),
        weights=None if form is None else form.name,
        stored_formats=dict(Counter(form.name for form in kept.values()).most_common()),
        loaded_bytes=loaded,
        weight_bytes=quantised,
    )


def print_description(folder: str | Path) -> None:
    """Print a table in the terminal."""
    from rich import box
    from rich.table import Table

    found = describe(folder)
    table = Table(box=box.SIMPLE, show_header=False, title=str(folder), title_justify="left")
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in rows(found):
        table.add_row(name, value)
    screen = console()
    screen.print(table)
    if found.problem is not None:
        screen.print(f"This checkpoint would not load.\n{found.problem}", style="red")


def rows(found: Description) -> list[tuple[str, str]]:
    """Return name and text of each line of the table."""
    c = found.config
    counts = {letter: c.letters.count(letter) for letter in dict.fromkeys(c.letters)}
    lines = [
        ("family", found.family),
        ("layers", f"{c.n_layers}: {c.letters}"),
        ("rules", ", ".join(f"{n} x {kind_of(letter).label} ({letter})" for letter, n in counts.items())),
        ("hidden, vocabulary", f"{c.hidden_size}, {c.vocab_size}{', tied' if c.tie_embeddings else ''}"),
    ]
    sizes = {kind.section or kind.label: c.part(kind) for kind in c.mixer_kinds()}
    lines += [(name, _sizes(part)) for name, part in sizes.items()]
    if c.feed is not None:
        count = sum(map(c.has_dense, range(c.n_layers)))
        some = "" if count == c.n_layers else f", in {count} of {c.n_layers} layers"
        lines.append(("feed-forward", f"{c.feed.size}{_ungated(c.feed.kind)}{some}"))
    if c.experts is not None:
        e = c.experts
        shared = f", shared expert of {e.shared_size}" if e.shared_size else ""
        lines.append(
            ("experts", f"{e.active} of {e.count} of size {e.size}{_ungated(e.kind)}, {e.scores} scores{shared}")
        )
    scales = {"embeddings": c.embedding_scale, "residuals": c.residual_scale, "logits": c.logit_scale}
    if shown := [f"{name} {scale:.4g}" for name, scale in scales.items() if scale != 1]:
        lines.append(("multipliers", ", ".join(shown)))
    active = f", {_count(found.active_parameters)} active per token"
    lines.append(("parameters", _count(found.parameters) + (active if c.experts is not None else "")))
    by_dtype = ", ".join(f"{name} {_bytes(n)}" for name, n in found.bytes_by_dtype.items())
    unused = f"; {_bytes(found.ignored_bytes)} not needed" if found.ignored_bytes else ""
    lines.append(("on disk", f"{_bytes(found.bytes_on_disk)} ({by_dtype}){unused}"))
    if found.encoding is not None:
        also = ", or kept by --bits fp8" if "float8_e4m3fn" in found.encoding else ""
        lines.append(("quantised", f"{found.encoding}; decoded when they are read{also}"))
    if found.weights is not None:
        lines.append(("large weights", f"{found.weights}, {FORMATS[found.weights].bits} bits"))
    kept = [f"{count:,} weights in {name}" for name, count in found.stored_formats.items()]
    formats = ", ".join([*kept, f"{'all others' if kept else 'all'} in {found.state_dtype}"])
    lines.append(("loaded as stored", f"{_bytes(found.loaded_bytes)}: {formats}"))
    named = {bits: f"at {bits} bits" if isinstance(bits, int) else f"in {bits}" for bits in found.weight_bytes}
    bits = ", ".join(f"{_bytes(n)} {named[bits]}" for bits, n in found.weight_bytes.items())
    lines.append(("weights in memory", f"{bits}; see --bits"))
    if (wide := why_wide(getattr(torch, found.state_dtype))) is not None:
        lines.append(("on this CPU", wide))
    fixed = found.memory_bytes + found.conv_bytes
    lines.append(
        (
            "state per sequence",
            f"{_bytes(fixed)} (memory {_bytes(found.memory_bytes)} float32, convolution {_bytes(found.conv_bytes)} "
            f"{found.state_dtype}) + {_bytes(found.cache_bytes_per_token)} per token",
        )
    )
    return lines


def _ungated(kind: str) -> str:
    """Return a remark on a feed-forward without a gate."""
    return {"relu2": ", squared ReLU", "channel_mix": ", squared ReLU behind a token shift"}.get(kind, "")


def _sizes(part: Any) -> str:
    """Return the sizes of a mixer in words; a dataclass of the user's may have none for them."""
    if hasattr(part, "describe"):
        return str(part.describe())
    return ", ".join(f"{f.name} {getattr(part, f.name)}" for f in fields(part))


def _state_bytes(model: HybridLM) -> tuple[int, int, int]:
    """Return the bytes of the memories, of the convolutions, and what a token adds."""
    specs = [spec for layer in model.state_spec for spec in layer]
    memory = sum(spec.nbytes() for spec in specs if "t" not in spec.shape and spec.name not in INPUTS)
    conv = sum(spec.nbytes() for spec in specs if spec.name in INPUTS)
    return memory, conv, sum(spec.nbytes(1) for spec in specs if "t" in spec.shape)


def idle_parameters(model: nn.Module) -> int:
    """Return how many parameters belong to experts that a token is not routed to."""
    idle = 0
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            size = module.experts_gate_up[0].numel() + module.experts_down[0].numel()
            idle += (module.count - module.active) * size
    return idle


def _count(n: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return str(n)


def _bytes(n: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:.4g} {unit}"
    return f"{n} B"

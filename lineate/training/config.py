"""Every option of a training run, with its default and one line of documentation."""

import json
import math
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin

from lineate.console.names import closest

CONFIG_FILE = "config.json"
"""The file of options in a run's folder."""
OPTION_VALUES = {
    "optimizer": ("adamw", "muon"),
    "schedule": ("cosine", "wsd"),
    "dtype": ("float32", "bfloat16"),
    "on_bad_loss": ("stop", "skip"),
    "shard": ("none", "full"),
    "graph": ("auto", "on", "off"),
}
"""The values that an option may have, for options with a fixed set."""
MOST_THREADS = 1024
"""The most threads that can be asked for."""
FIXED_OPTIONS = ("model", "pattern", "tokenizer", "length", "rows", "seed", "optimizer", "validation_fraction")
"""Options that a resumed run cannot change: its weights or its position in the data would mean something else. The data
may move; prepare.py compares their contents."""


def option(default: Any, help: str, also: str | None = None) -> Any:
    """Return a dataclass field for an option.

    Args:
        default: Its default.
        help: One line of documentation, also shown by `lineate train --help`.
        also: A second name of the flag.
    """
    return field(default=default, metadata={"help": help, "also": also})


@dataclass(frozen=True)
class TrainConfig:
    """The options of a training run; the help of each field documents it."""

    out: str = option("out/train", "Folder of the run: config, metrics, checkpoints, plot, model.")
    model: str = option(
        "tiny", "Preset (tiny, small, base, medium, large, ...) or folder or hub name of a checkpoint to go on from."
    )
    pattern: str | None = option(None, "Mixers of a preset's layers, one letter a layer, tiled; GGGA if not given.")
    data: tuple[str, ...] = option(
        ("stdlib",), "stdlib, a file or folder (.txt .md .rst .py .jsonl), or hf:NAME[:SPLIT[:CONFIG]]; repeat it."
    )
    tokenizer: str = option(
        "bytes", "bytes, or bpe:SIZE, trained on the data; a model that lineate train wrote brings its own."
    )
    cache: str | None = option(None, "Folder of the token files; the user's cache folder if not given.")
    length: int = option(256, "Tokens in a row; no sequence sees beyond its row.")
    rows: int = option(8, "Rows in a step, over all ranks and micro-batches.", also="--batch-size")
    accumulate: int = option(1, "Micro-batches in which a rank computes its rows of a step.")
    steps: int = option(300, "Steps of the optimiser.")
    optimizer: str = option("muon", "muon (hidden matrices; adamw for the rest) or adamw.")
    lr: float = option(4e-3, "Highest learning rate.", also="--learning-rate")
    weight_decay: float = option(0.1, "Decay of matrices, decoupled: a step multiplies them by 1 - lr * weight_decay.")
    betas: tuple[float, float] = option((0.9, 0.95), "Decay rates of adamw's two moments.")
    warmup: int | None = option(
        None, "Steps in which the learning rate rises from 0; if not given, 20, or a fifth of fewer than 100 steps."
    )
    schedule: str = option("cosine", "After the warm-up: cosine, or wsd (stable, then linear decay).")
    decay: float = option(0.2, "Part of the steps in which wsd decays.")
    min_lr: float = option(0.1, "Lowest learning rate, as a part of the highest.")
    clip: float = option(1.0, "Largest norm of all gradients together; 0: no clipping.")
    dtype: str = option("float32", "bfloat16: torch.autocast; weights, optimiser and loss stay float32.")
    recompute: bool = option(
        False, "Keep only the input of each block and compute the rest again in the backward pass."
    )
    compile: bool = option(False, "torch.compile of each block; says before the first step whether it pays.")
    graph: str = option(
        "auto", "Each step as one CUDA graph, with the same results: auto (where possible, or says why not), on or off."
    )
    seed: int = option(0, "Seed of the weights, the order of the documents, and the samples.")
    device: str = option("auto", "cpu, cuda, or auto: a GPU if there is one.")
    threads: int | str = option(
        "auto", "Threads of a rank on a CPU: a number, or auto, the fastest measured; a resumed run keeps its number."
    )
    validation_fraction: float = option(0.02, "Part of the documents that is never trained on.")
    eval_every: int = option(100, "Steps between validation losses; 0: only at the end.")
    eval_batches: int = option(8, "Batches in a validation loss.")
    sample_every: int = option(100, "Steps between samples of text; 0: none.")
    prompt: str = option("def ", "The beginning of the samples.")
    save_every: int = option(100, "Steps between checkpoints; 0: only at the end.")
    keep: int = option(2, "Checkpoints to keep.")
    on_bad_loss: str = option("stop", "When a loss or gradient is not finite: stop, or skip the step.")
    shard: str = option("none", "Over ranks: none (every rank has all weights), or full (FSDP2).")
    context: int = option(1, "Ranks that share each row (context parallelism).")
    tensor: int = option(1, "Ranks that share the model, each with some heads (tensor parallelism).")
    tensorboard: bool = option(False, "Write events for TensorBoard.")

    def __post_init__(self) -> None:
        from lineate.torch_ops.dtypes import full_name  # now, as it needs torch, which lineate train --help does not

        object.__setattr__(self, "dtype", full_name(self.dtype))
        if isinstance(self.threads, str) and self.threads in map(str, range(MOST_THREADS + 1)):
            object.__setattr__(self, "threads", int(self.threads))  # the command line has words

    def check(self) -> None:
        """Raise ValueError for every mistake that can be found without the data or the device."""
        for f in fields(self):
            _check_type(f.name, getattr(self, f.name), f.type)
        for name, words in OPTION_VALUES.items():
            if (value := getattr(self, name)) not in words:
                raise ValueError(f"{name} must be one of {', '.join(words)}, got {value!r}")
        counts = ("rows", "accumulate", "steps", "keep", "eval_batches", "context", "tensor")
        least = dict.fromkeys(counts, 1) | {"length": 2}
        least |= dict.fromkeys(("eval_every", "sample_every", "save_every", "clip", "weight_decay"), 0)
        for name, smallest in least.items():
            if (value := getattr(self, name)) < smallest:
                raise ValueError(f"{name} must be at least {smallest}, got {value}")
        if self.threads != "auto" and not (isinstance(self.threads, int) and 1 <= self.threads <= MOST_THREADS):
            raise ValueError(f"threads must be auto or a number from 1 to {MOST_THREADS}, got {self.threads!r}")
        for name, low, high in (("min_lr", 0, 1), ("decay", 0, 1), ("seed", 0, 2**63 - 1)):
            if not low <= (value := getattr(self, name)) <= high:
                raise ValueError(f"{name} must lie in {low} .. {high}, got {value}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in 0 .. 1, without 1, got {self.betas}")
        if not self.lr > 0:
            raise ValueError(f"lr must be above 0, got {self.lr}")
        if not 0 < self.validation_fraction <= 0.5:
            raise ValueError(f"validation_fraction must be above 0 and at most 0.5, got {self.validation_fraction}")
        if not self.data or "" in self.data:
            got = "''" if self.data else "none"
            raise ValueError(f"data must name at least one source, got {got}; use stdlib, a file or a folder")
        for name in ("out", "model", "cache"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} must be a name, got ''; leave it out, or write . for the current folder")
        if self.warmup and not 0 < self.warmup < self.steps:
            raise ValueError(
                f"warmup must be at least 0 and less than steps = {self.steps}, got {self.warmup}; or leave it out"
            )
        if self.tensor > 1 and self.optimizer == "muon":
            raise ValueError(
                f"optimizer must be adamw with tensor = {self.tensor}, got muon, which needs whole matrices; use "
                "--shard full instead of --tensor"
            )
        if self.rows % self.accumulate:
            raise ValueError(f"rows must be a multiple of accumulate = {self.accumulate}, got {self.rows}")

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainConfig":
        """Make a configuration from JSON values and check it; unknown keys are errors.

        Args:
            values: Options by name; those left out have their defaults.
        """
        known = {f.name: f for f in fields(cls)}
        for name in values:
            if name not in known:
                also = {f.metadata["also"].strip("-"): f.name for f in known.values() if f.metadata["also"]}
                near = closest(name, [*known, *also])
                hint = f"; did you mean {also.get(near, near)!r}?" if near else f"; known are {', '.join(known)}"
                raise ValueError(f"the config has an unknown key {name!r}{hint}")
        plain: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
        config = cls(**plain)
        config.check()
        return config

    @classmethod
    def load(cls, file: Path, changes: dict[str, Any] | None = None) -> "TrainConfig":
        """Read a configuration from a JSON file.

        Args:
            file: The file.
            changes: Options that replace those in the file.
        """
        try:
            values = json.loads(file.read_text())
        except OSError as error:
            raise ValueError(f"expected a config in JSON, got {file} ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected a config in JSON, got {file}, which is not ({error})") from None
        if not isinstance(values, dict):
            raise ValueError(f"{file} must map names to values, got a {type(values).__name__}")
        try:
            return cls.from_dict(values | (changes or {}))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    @property
    def warmup_steps(self) -> int:
        """The number of warm-up steps: `warmup`, or its default for this number of steps."""
        return min(20, self.steps // 5) if self.warmup is None else self.warmup

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0.

        Args:
            step: The step.
        """
        warmup = self.warmup_steps
        if step < warmup:
            return self.lr * (step + 1) / warmup
        if self.schedule == "cosine":
            done = (step - warmup) / max(1, self.steps - warmup)
            return self.lr * (self.min_lr + (1 - self.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
        start = max(warmup, round(self.steps * (1 - self.decay)))
        done = min(1.0, max(0, step - start) / max(1, self.steps - start))
        return self.lr * (1 - (1 - self.min_lr) * done)


def _check_type(name: str, value: Any, wanted: Any) -> None:
    """Raise ValueError if a value is not of its field's type; an int is accepted for a float."""
    if get_origin(wanted) is tuple:
        inner = get_args(wanted)
        if not isinstance(value, tuple) or (inner[-1] is not ... and len(value) != len(inner)):
            many = "several values" if inner[-1] is ... else f"{len(inner)} values"
            raise ValueError(f"{name} must be {many}, got {value!r:.80}")
        for x in value:
            _check_type(name, x, inner[0])
        return
    kinds = get_args(wanted) or (wanted,)
    fits = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
    if not fits or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("none" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"{name} must be of type {names}, got {value!r:.80}")
    if float in kinds and not abs(value) <= sys.float_info.max:  # an int may be too large for a float
        raise ValueError(f"{name} must be finite, got {value!r:.80}")

"""The command `lineate train`."""

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from lineate.console.names import named_path, spelled, user_path
from lineate.console.options import add_command, sign
from lineate.console.terminal import fail, print_anything
from lineate.training.config import CONFIG_FILE, TrainConfig

if TYPE_CHECKING:
    import typer


def add_commands(app: "typer.Typer") -> None:
    """Add the command to the application."""

    def train(**given: Any) -> None:
        """Train a hybrid language model on text; without arguments, a small one on Python's own standard library.

        Everything is written to the folder --out. For several processes: torchrun ... -m lineate.cli train.
        """
        if "TORCHELASTIC_RUN_ID" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import record

            record(run_train)(given)  # gives torchrun's summary the traceback of the rank that failed
        else:
            run_train(given)

    _sign(train)
    add_command(
        app, train, "lineate train --data ~/texts --model small --steps 2000",
        "lineate train --resume out/train --steps 4000",
    )  # fmt: skip


def run_train(given: dict[str, Any]) -> None:
    """Train as the flags say, which replace options of a config file or of the resumed run.

    Args:
        given: Flags by the names of TrainConfig's fields, and `resume` and `config`; None if not given.
    """
    from lineate.generation.loading import fetch_model, model_folder
    from lineate.models.files.hub import is_hub_name
    from lineate.models.presets import PRESETS
    from lineate.training.loop import TrainingStopped
    from lineate.training.prepare import check_folder, prepare, restarted

    print_anything()
    given = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items() if x not in (None, [])}
    resume, file = given.pop("resume", None), given.pop("config", None)
    try:
        if "model" in given:
            given["model"] = spelled(given["model"], PRESETS)
            if is_hub_name(given["model"]):
                given["model"] = str(fetch_model(given["model"]))
            elif given["model"] not in PRESETS:
                given["model"] = str(model_folder(user_path(named_path(given["model"]))))
        if resume is not None and ("out" in given or file is not None):
            raise ValueError("--resume says already where the run and its config are; leave out --out and --config")
        if resume is not None:
            check_folder(resume, True)
            config = TrainConfig.load(resume / CONFIG_FILE, given | {"out": str(resume)})
        elif file is not None:
            config = TrainConfig.load(file, given)
        else:
            config = TrainConfig.from_dict(given)
        trainer = prepare(config, resume=resume is not None or restarted(config))
    except (ValueError, OSError, ImportError) as error:
        fail(error, 2)
    try:
        trainer.run()
    except TrainingStopped as error:
        fail(error, 1)
    finally:
        trainer.close()


def _sign(command: Any) -> None:
    """Give the command one flag for each field of TrainConfig, with its type, help and default."""
    import typer

    hints: dict[str, Any] = {
        "resume": Annotated[
            Path | None, typer.Option(parser=named_path, metavar="RUN", help="Go on with the run in this folder.")
        ],
        "config": Annotated[
            Path | None, typer.Option(parser=named_path, metavar="FILE", help="A config in JSON; flags win over it.")
        ],
    }
    for f in fields(TrainConfig):
        kind: Any = f.type
        shown = f.default
        if get_origin(kind) is tuple:
            inner = get_args(kind)
            kind = list[inner[0]] | None if inner[-1] is ... else kind | None  # type: ignore[valid-type]
            shown = " ".join(map(str, f.default))  # type: ignore[arg-type]
        elif kind == int | str:  # a word of the command line, which TrainConfig reads
            kind = str | None
        elif type(None) not in get_args(kind):
            kind = kind | None
        default = "" if shown is None else f" [default: {shown}]"
        flags = () if f.metadata["also"] is None else (f"--{f.name}", f.metadata["also"])
        option = typer.Option(*flags, help=f.metadata["help"] + default)
        hints[f.name] = Annotated[kind, option]
    sign(command, {name: (kind, None) for name, kind in hints.items()})

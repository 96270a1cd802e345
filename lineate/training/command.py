"""The commands `lineate train` and `lineate generate`."""

import io
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from lineate.names import named_path, spelled, user_path
from lineate.options import sign
from lineate.terminal import fail, printable
from lineate.training.config import CONFIG_FILE, TrainConfig

if TYPE_CHECKING:
    import typer


def add_commands(app: "typer.Typer") -> None:
    """Add both commands to the application; typer is imported here because it is optional."""
    import typer

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
    app.command()(train)

    @app.command()
    def generate(
        folder: Annotated[
            str, typer.Argument(metavar="RUN", help="Folder of a run, or of a model and tokenizer, or a hub name.")
        ],
        prompt: Annotated[str, typer.Option(help="What the text starts with.")] = "",
        tokens: Annotated[int, typer.Option(help="Most tokens to add.", min=1)] = 400,
        temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0)] = 0.8,
        top_k: Annotated[int, typer.Option(help="Only among the k likeliest; 0: all.", min=0)] = 0,
        top_p: Annotated[float, typer.Option(help="Only among the likeliest with so much probability.")] = 0.95,
        seed: Annotated[int, typer.Option(help="Seed of the draws.", min=0, max=2**63 - 1)] = 0,
        device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
        raw: Annotated[
            bool, typer.Option("--raw", help="Write control characters as they are, not as dots: for a file.")
        ] = False,
    ) -> None:
        """Continue a prompt with a trained model; the text appears as it is made."""
        try:
            run_generate(folder, prompt, tokens, temperature, top_k, top_p, seed, device, raw)
        except (ValueError, OSError, RuntimeError) as error:
            fail(error, 1 if isinstance(error, RuntimeError) else 2)


def run_train(given: dict[str, Any]) -> None:
    """Train as the flags say, which replace options of a config file or of the resumed run.

    Args:
        given: Flags by the names of TrainConfig's fields, and `resume` and `config`; None if not given.
    """
    from lineate.models.files.hub import is_hub_name
    from lineate.models.presets import PRESETS
    from lineate.training.loop import TrainingStopped
    from lineate.training.prepare import check_folder, prepare, restarted

    _print_anything()
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


def run_generate(
    folder: str | Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    device: str,
    raw: bool = False,
) -> None:
    """Print a prompt and its continuation.

    Args:
        folder: Folder of a run, or of a model with its tokenizer, or a name on the hub.
        prompt: The text to continue.
        tokens: The most tokens to add.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Draw only from the k likeliest tokens; 0 for all.
        top_p: Draw only from the likeliest tokens whose probabilities together reach p.
        seed: Seed of the draws.
        device: "cpu" or "cuda".
        raw: Print control characters as they are, rather than as dots.
    """
    import torch

    from lineate.generation import generate, stream_text
    from lineate.models import HybridLM
    from lineate.models.files.hub import is_hub_name
    from lineate.training.distributed import World
    from lineate.training.tokenizer import load_tokenizer

    _print_anything()
    place = fetch_model(str(folder)) if is_hub_name(folder) else find_model(user_path(named_path(folder)))
    tokenizer = load_tokenizer(place)
    model = HybridLM.from_pretrained(place, device=World.start(device).device, progress=False)
    start = torch.tensor([[tokenizer.end, *tokenizer.encode(prompt)]], device="cpu")
    drawn = generate(
        model, start, tokens,
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=(tokenizer.end,),
    )  # fmt: skip
    sys.stdout.write(prompt if raw else printable(prompt))
    for text in stream_text(tokenizer, (int(token) for token in drawn)):
        sys.stdout.write(text if raw else printable(text))
        sys.stdout.flush()
    sys.stdout.write("\n")


def fetch_model(name: str) -> Path:
    """Download a model from the hub and return its folder; the weights come only if its tokenizer can be read."""
    from lineate.models.files.hub import ALL, TEXTS, fetch
    from lineate.training.tokenizer import load_tokenizer

    load_tokenizer(fetch(name, TEXTS))
    return fetch(name, ALL)


def find_model(folder: Path) -> Path:
    """Return the folder of a run's finished model, or else its newest checkpoint; or the folder, if it is a model's."""
    from lineate.training.checkpoint import newest

    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    found = newest(folder / "checkpoints", lambda text: print(f"warning: {printable(text)}", file=sys.stderr))
    if found is not None:
        if not (found / "model.safetensors").is_file():
            raise ValueError(
                f"{found} was written by several ranks; finish the run first: lineate train --resume {folder}"
            )
        return found
    if not _has_weights(folder):
        raise ValueError(f"expected the folder of a run or of a model, got {folder}, which has no model yet")
    return folder


def model_folder(folder: Path) -> Path:
    """Return find_model(folder) if the folder is a run without weights of its own, else the folder."""
    if _has_weights(folder):
        return folder
    is_run = (folder / "model" / "config.json").is_file() or (folder / "checkpoints").is_dir()
    return find_model(folder) if is_run else folder


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))


def _print_anything() -> None:
    """Let stdout print a question mark for characters that its encoding lacks; a model may generate any."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


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
        elif type(None) not in get_args(kind):
            kind = kind | None
        default = "" if shown is None else f" [default: {shown}]"
        flags = () if f.metadata["also"] is None else (f"--{f.name}", f.metadata["also"])
        option = typer.Option(*flags, help=f.metadata["help"].replace("[", r"\[") + default.replace("[", r"\["))
        hints[f.name] = Annotated[kind, option]
    sign(command, {name: (kind, None) for name, kind in hints.items()})

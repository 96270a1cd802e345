"""Make a Trainer from a configuration; mistakes in options, data or checkpoints are found here, before any training."""

import os
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lineate.console.names import nearest
from lineate.layers import kind_of
from lineate.models import HybridConfig, HybridLM
from lineate.models.families import quantised_format, read_config
from lineate.models.files.checkpoint import Checkpoint, read_json
from lineate.models.files.safetensors import CheckpointError
from lineate.models.hybrid import make_mixer
from lineate.models.presets import PRESETS, preset
from lineate.models.sharding import rank_config
from lineate.parallel.context.segments import check_splits
from lineate.parallel.tensor.ranks import Ranks
from lineate.system import folders
from lineate.text import Bytes, Tokenizer, has_tokenizer, load_tokenizer, make_tokenizer
from lineate.text.tokenizer import check_name
from lineate.torch_ops.tracing import cpu_by_default
from lineate.training import checkpoint
from lineate.training.config import CONFIG_FILE, FIXED_OPTIONS, MOST_THREADS, TrainConfig
from lineate.training.distributed import World
from lineate.training.graphed import obstacle
from lineate.training.loop import Trainer
from lineate.training.optim import make_optimizer
from lineate.training.order import ShuffledBatches
from lineate.training.report import METRICS_FILE, PLOT_FILE, RunReporter, need_tensorboard
from lineate.training.sources import documents
from lineate.training.threads import set_threads
from lineate.training.tokens import TokenStore

RUN_STATE_TYPES: dict[str, tuple[type, ...]] = {
    "step": (int,), "looked": (int,), "config": (dict,), "data": (dict,), "metrics": (int,), "skipped": (int,),
    "best": (float, int, type(None)), "random": (list,), "threads": (int, type(None)),
}  # fmt: skip
"""The keys of a checkpoint's state.json and their types; an int must be at least 0."""
SEQUENCES_STEP = 8
"""Micro-batches that CUDA graphs compute have a multiple of this many packed sequences; the last ones are empty."""
OTHER_TOKENIZERS = ("tokenizer*", "vocab.*", "merges.txt", "spiece.model", "*.tiktoken", "tiktoken.model")
"""Names of published tokenizers' files, of which training cannot read all."""


@cpu_by_default
def train(config: TrainConfig, *, resume: bool = False) -> Trainer:
    """Train a model to the end.

    Args:
        config: The options of the run.
        resume: Whether to go on from the newest checkpoint in config.out.

    Returns:
        The trainer, with the trained model.
    """
    trainer = prepare(config, resume=resume)
    try:
        trainer.run()
    finally:
        trainer.close()
    return trainer


@cpu_by_default
def prepare(config: TrainConfig, *, resume: bool = False) -> Trainer:
    """Return a run that is ready to train, or raise ValueError or OSError with the reason why there is none.

    The run's folder is locked before it is checked, so that no other process can use it. A run that cannot be prepared
    leaves the folder unchanged.

    Args:
        config: The options of the run.
        resume: Whether to go on from the newest checkpoint in config.out.
    """
    config.check()
    check_name(config.tokenizer)
    out = Path(config.out)
    check_folder(out, resume)
    if not resume:
        _check_model(config)
    _check_ranks(config)
    if config.tensorboard:
        need_tensorboard()
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    world = World.start(device, config.shard, config.context, config.tensor)
    report = RunReporter(config, world.is_main)
    threads = torch.get_num_threads()

    def take() -> None:
        """Lock the run's folder."""
        report.lock()
        check_folder(out, resume)  # checked a second time under the lock, because another process may have changed it
        if (why := folders.why_not_writable(out)) is not None:
            raise ValueError(f"out must be a folder that can be written, got {out} ({why})")

    try:
        world.on_main(take, "use the run's folder")
        trainer = _prepare(config, resume, world, report)
        trainer.threads_before = threads
        trainer.begin()
    except BaseException:
        torch.set_num_threads(threads)
        report.release()
        raise
    return trainer


def _prepare(config: TrainConfig, resume: bool, world: World, report: RunReporter) -> Trainer:
    """Make the tokenizer, the data, the model and the optimiser, from the newest checkpoint if there is one."""
    if config.rows % (world.data_size * config.accumulate):
        raise ValueError(
            f"rows must be a multiple of data ranks x accumulate = {world.data_size} x {config.accumulate}, "
            f"got {config.rows}"
        )
    saved = _newest(Path(config.out) / "checkpoints", world, report) if resume else None
    if resume:
        report.say(f"going on from {saved}" if saved else "no checkpoint yet: starting from step 0")
        if saved is None:
            _check_model(config)
    state = None if saved is None else _read_state(saved, config)
    kept = None if state is None else state["threads"]
    threads = set_threads(config, _sizes(config, saved).hidden_size, kept, world, report)
    tokenizer = _tokenizer(config, saved, world)
    _check_prompt(config.prompt, tokenizer)
    store = world.on_main(  # rank 0 writes the file, and the others open it
        lambda: TokenStore.open_or_make(config.data, tokenizer, config.cache, report.say), "prepare the data"
    )
    if store is None:
        store = TokenStore.open_or_make(config.data, tokenizer, config.cache)
    data = {
        "tokens": store.n_tokens,
        "documents": store.n_documents,
        "bounds_crc32": zlib.crc32(store.starts.tobytes()),
        "tokens_crc32": store.crc32,
    }
    if state is not None and state["data"] != data:
        raise ValueError(
            f"data must be what the run began with, {state['data'].get('tokens')} tokens of "
            f"{state['data'].get('documents')} documents, got {data['tokens']} of {data['documents']}: its text has "
            "changed; start a new run"
        )
    learn, check = store.split(config.validation_fraction, config.seed)
    batches, validation = (ShuffledBatches(view, config.length, config.rows, config.seed) for view in (learn, check))
    torch.manual_seed(config.seed)
    model = _model(config, tokenizer, world.ranks) if saved is None else _saved_model(saved)
    for block in model.layers:
        block.recompute = config.recompute  # type: ignore[assignment]
    by_ranks = saved is not None and (saved / checkpoint.RANKS_FOLDER).is_dir()
    if saved is not None:
        checkpoint.check_ranks_folder(saved, world)
    if saved is not None and not by_ranks:
        checkpoint.load_model(saved, model)
    model = world.wrap(model)
    optimizer = make_optimizer(model, config.optimizer, config.lr, config.weight_decay, config.betas)
    trainer = Trainer(
        config=config, world=world, report=report, tokenizer=tokenizer, data=data, batches=batches,
        validation=validation, model=model, optimizer=optimizer, entropy=learn.unigram_entropy(), threads=threads,
        runs_ahead=world.size == 1 and world.device.type == "cuda",
    )  # fmt: skip
    if saved is not None and state is not None:
        if by_ranks:
            from lineate.training.sharded import load_distributed

            # Without the saved options, as those of the config apply.
            group = None if world.readers is None else world.readers.get_group()
            load_distributed(checkpoint.ranks_folder(saved, world), model, optimizer, options=False, group=group)
        else:
            checkpoint.load_optimizer(saved, model, optimizer)
        trainer.step, trainer.looked, trainer.saved = state["step"], state["looked"], state["step"]
        trainer.position = state["metrics"]
        trainer.best, trainer.skipped = state["best"], state["skipped"]
        checkpoint.load_random_state(saved, state["random"], world.device)
    if config.compile:
        for block in model.layers:
            block.compile()
    trainer.no_graph = _no_graph(trainer)
    if config.graph == "on" and trainer.no_graph is not None:
        raise ValueError(f"graph = on is not possible: {trainer.no_graph}; use --graph auto")
    trainer.whole_steps = trainer.no_graph is None
    if trainer.whole_steps:  # also without graphs, so that these change no bits
        trainer.sequences = -(-batches.most_sequences(config.accumulate) // SEQUENCES_STEP) * SEQUENCES_STEP
    return trainer


def _no_graph(trainer: Trainer) -> str | None:
    """Return why the steps of a run cannot be CUDA graphs; None if nothing is known against it."""
    if trainer.world.device.type != "cuda":
        return "there are graphs on a GPU alone"
    if trainer.world.size > 1:
        return f"{trainer.world.size} ranks exchange numbers in every step"
    for letter in trainer.model.config.letters:
        if not (kind := kind_of(letter)).built_in:
            return f"only the mixers of lineate are known to read nothing from the GPU, which {kind.name} may do"
    return obstacle(trainer.model, trainer.optimizer)


def _sizes(config: TrainConfig, saved: Path | None = None) -> HybridConfig:
    """Return the configuration of the model of a checkpoint, or else of a new one, but for its vocabulary."""
    if saved is not None:
        return read_config(Checkpoint(saved, read_json(saved / CONFIG_FILE), {}))
    if config.model in PRESETS:
        return preset(config.model, config.pattern, vocab_size=config.tensor)
    return read_config(Checkpoint.open(Path(config.model)))


def check_folder(out: Path, resume: bool) -> None:
    """Raise ValueError if a run to resume has no folder, or if a new one would overwrite files.

    Args:
        out: The run's folder.
        resume: Whether the run is to be resumed.
    """
    if resume:
        if not (out / CONFIG_FILE).is_file():
            raise ValueError(f"resume must be the folder of a run, got {out}, which has no {CONFIG_FILE}")
        return
    if (out / CONFIG_FILE).exists():
        raise ValueError(
            f"out must be a new folder, got {out}, which has a run; go on with --resume {out}, or choose another --out"
        )
    for name in (METRICS_FILE, PLOT_FILE, "tokenizer", "checkpoints", "model"):
        path = out / name
        if any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size:
            raise ValueError(
                f"out must be a new folder, got {out} with {name} that the run would overwrite; choose another --out"
            )


def restarted(config: TrainConfig) -> bool:
    """Whether torchrun has restarted this process after a failure, with the same run in config.out."""
    file = Path(config.out) / CONFIG_FILE
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return again and file.is_file() and TrainConfig.load(file) == config


def _newest(folder: Path, world: World, report: RunReporter) -> Path | None:
    """Return the newest complete checkpoint; rank 0 verifies the files, and all ranks use what it found."""
    found = world.on_main(lambda: checkpoint.newest(folder, report.warn), "read the checkpoints")
    step = int(world.sum_everywhere(torch.tensor(0 if found is None else int(found.name[5:]) + 1, device="cpu")))
    if not step and (damaged := checkpoint.checkpoints(folder)):
        raise ValueError(
            f"resume needs a whole checkpoint, got {len(damaged)} in {folder}, all damaged; remove them to start again "
            "from step 0"
        )
    return folder / f"step-{step - 1:06d}" if step else None


def _read_state(path: Path, config: TrainConfig) -> dict[str, Any]:
    """Read state.json of a checkpoint; raise if it is damaged or this configuration cannot continue it."""
    file = path / checkpoint.RUN_STATE_FILE
    state = read_json(file)
    state.setdefault("looked", state.get("step"))  # earlier versions did not write it, and it equalled step
    state.setdefault("threads", torch.get_num_threads())  # nor this, and never set it
    older = f"remove {path} to go on from an older checkpoint"
    for name, kinds in RUN_STATE_TYPES.items():
        value = state.get(name, ...)
        if not isinstance(value, kinds) or value is True or value is False or (isinstance(value, int) and value < 0):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            got = "none" if value is ... else f"{value!r:.80}"
            raise CheckpointError(f"{file}: expected {name} of type {names}, got {got}; {older}")
    if not state["looked"] <= state["step"] == int(path.name[5:]):
        raise CheckpointError(
            f"{file}: expected step {int(path.name[5:])}, as its folder says, and looked no larger, got "
            f"step {state['step']} and looked {state['looked']}; {older}"
        )
    if state["threads"] is not None and not 1 <= state["threads"] <= MOST_THREADS:
        raise CheckpointError(f"{file}: expected threads from 1 to {MOST_THREADS}, got {state['threads']}; {older}")
    for name in FIXED_OPTIONS:
        was, now = state["config"].get(name), config.to_dict()[name]
        if was != now:
            why = "; the vocabularies differ" if name == "tokenizer" else ""
            raise ValueError(
                f"{name} cannot change in a resumed run, expected {was!r}, got {now!r}{why}; start a new run"
            )
    if state["step"] > config.steps:
        raise ValueError(f"steps must be at least {state['step']}, which are done, got {config.steps}")
    return state


def _tokenizer(config: TrainConfig, saved: Path | None, world: World) -> Tokenizer:
    """Return the tokenizer of the checkpoint, or of the model's folder, or else a new one."""
    own, start = Path(config.out) / "tokenizer", Path(config.model)
    if saved is not None:
        tokenizer = load_tokenizer(saved)
        if has_tokenizer(own) and (got := load_tokenizer(own)).identity != tokenizer.identity:
            raise ValueError(
                f"{own} must be the tokenizer of {saved}, {tokenizer.name} with a vocabulary of "
                f"{tokenizer.vocab_size}, got {got.name} with {got.vocab_size}: the vocabularies differ; remove {own} "
                "to use the former"
            )
        return tokenizer
    if config.model not in PRESETS and has_tokenizer(start):
        return load_tokenizer(start)
    texts = documents(config.data, lambda skipped: None)  # TokenStore reports these
    return world.share(world.on_main(lambda: make_tokenizer(config.tokenizer, texts), "make the tokenizer"))


def _check_prompt(prompt: str, tokenizer: Tokenizer) -> None:
    """Raise ValueError if the tokenizer cannot encode the prompt, rather than at the first sample."""
    try:
        tokenizer.encode(prompt)
    except ValueError as error:
        raise ValueError(f"prompt must be text, got {prompt!r} ({error})") from None


def _check_model(config: TrainConfig) -> None:
    """Raise ValueError if the model or its vocabulary does not fit the options; reads neither data nor weights."""
    start = Path(config.model)
    if config.model in PRESETS:
        preset(config.model, config.pattern, vocab_size=1)
        return
    if not start.is_dir():
        raise ValueError(
            f"model must be one of {', '.join(PRESETS)}, or the folder of a checkpoint, got {config.model!r}"
            f"{nearest(config.model, PRESETS)}"
        )
    if config.pattern is not None:
        raise ValueError(
            f"pattern is for presets, got {config.pattern!r} with the model of {config.model}; leave it out"
        )
    stored = Checkpoint.open(start)
    found = read_config(stored)
    if (form := quantised_format(stored)) is not None:
        raise ValueError(
            f"model must have weights that can be trained, got {config.model}, whose weights are frozen in "
            f"{form.name}; train the checkpoint that it was made from"
        )
    vocabulary = found.vocab_size
    if has_tokenizer(start):
        tokenizer = load_tokenizer(start)
        _ = tokenizer.end  # which separates documents: raises if there is none
        name, size = tokenizer.name, tokenizer.vocab_size
        if config.tokenizer not in ("bytes", name):
            raise ValueError(
                f"tokenizer must be that of the model in {start}, {name!r}, got {config.tokenizer!r}; leave it out"
            )
        fits = size <= vocabulary
    else:
        name, size = config.tokenizer, check_name(config.tokenizer) or Bytes.vocab_size
        others = sorted(file.name for pattern in OTHER_TOKENIZERS for file in start.glob(pattern))
        if others:
            raise ValueError(
                f"model must bring a tokenizer that can be read (tokenizer.json), got {start} with "
                f"{', '.join(others[:3])} alone; {name!r} would give ids that mean other tokens: "
                "write tokenizer.json with transformers, or train a preset"
            )
        # With a published model, equal sizes are the only sign that they belong together; ours may have unused ids.
        fits = size <= vocabulary if found.family == "lineate" else size == vocabulary
    if not fits:
        raise ValueError(
            f"tokenizer {name!r} has a vocabulary of {size}, the model of {start} one of {vocabulary}: its ids would "
            "mean other tokens; train a preset, or train this model in Python on ids of its own tokenizer"
        )


def _check_ranks(config: TrainConfig) -> None:
    """Raise ValueError if rows or the model are to be shared among ranks and it has layers that cannot do so."""
    if config.context == config.tensor == 1:
        return
    if config.model not in PRESETS and not Path(config.model).is_dir():  # a resumed run does not need the folder
        return
    sizes = _sizes(config)
    rank_config(sizes, config.tensor)
    if config.context == 1:
        return
    with torch.device("meta"):
        check_splits(*(make_mixer(sizes, letter) for letter in sorted(set(sizes.letters))))


def _saved_model(path: Path) -> HybridLM:
    """Make the model that a checkpoint describes, without its weights yet."""
    return HybridLM(read_config(Checkpoint(path, read_json(path / CONFIG_FILE), {})))


def _model(config: TrainConfig, tokenizer: Tokenizer, ranks: Ranks | None) -> HybridLM:
    """Make a new model from a preset, or load one, or a rank's share of it, from a folder; on the CPU, in float32."""
    if config.model in PRESETS:
        sizes = preset(config.model, config.pattern, tokenizer.vocab_size)
        return HybridLM(replace(sizes, bos_token_id=tokenizer.end, eos_token_ids=(tokenizer.end,)))
    # The head of multi-token prediction is left out: nothing here would train it.
    options = {"dtype": torch.float32, "progress": False, "prediction": False, "ranks": ranks}
    return HybridLM.from_pretrained(Path(config.model), **options).train()  # type: ignore[arg-type]

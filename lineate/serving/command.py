"""The command `lineate serve`."""

import logging
import signal
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineate.console.extras import missing_module, not_installed
from lineate.console.names import named_path, user_path
from lineate.console.options import add_command, parameters, sign
from lineate.console.terminal import fail
from lineate.serving.arguments import (
    HEAD,
    KEYS,
    LOOKUP,
    NONE,
    ServeArguments,
    check_invariant_options,
    limits_of,
    name_of,
    read_keys,
    sampling_of,
    say,
    settings_of,
    sizes_of,
)
from lineate.serving.building import add_explorer, application, load
from lineate.web.listening import is_local, listen

if TYPE_CHECKING:
    import typer
    from fastapi import FastAPI
    from starlette.applications import Starlette

    from lineate.generation.ranks import RankedJob
    from lineate.models import HybridLM
    from lineate.serving.draining import DrainingServer
    from lineate.serving.engine.engine import Engine
    from lineate.serving.replicas.cluster import RayReplicas
    from lineate.serving.replicas.options import ReplicaOptions
    from lineate.text.base import Tokenizer

__all__ = ["ServeArguments", "add_commands", "add_explorer", "make_replica", "read_keys", "run_serve"]

OF_RANK_0 = ("folder", "host", "port", "name", "api_key", "cors", "allow_host", "access_log", "tensor", "cache_folder")
"""Options that may differ between processes that share a model, or are compared in another way."""


def add_commands(app: "typer.Typer") -> None:
    """Add `lineate serve` to the command line."""

    def serve(**given: Any) -> None:
        """Serve a model: OpenAI's API, a chat page, metrics. Prompts that share a beginning read it once."""
        run_serve(ServeArguments(**given))

    sign(serve, parameters(ServeArguments))
    add_command(
        app, serve, "lineate serve ~/models/Qwen3.5-4B --bits 8", "lineate serve --port 8080 --slots 4 --temperature 0"
    )


def run_serve(asked: ServeArguments) -> None:
    """Load the model and serve it until SIGTERM or Ctrl+C; a wrong option ends the program.

    Args:
        asked: The options.
    """
    from lineate.generation.job import join_job, working
    from lineate.generation.loading import find_device

    try:
        asked = replace(asked, device=find_device(asked.device))
        _check_tensor(asked)
        _check_random(asked)
        check_invariant_options(asked)
        flags = {name: value for name, value in asdict(asked).items() if name not in OF_RANK_0}
        flags["cache_folder"] = asked.cache_folder is not None
        job = join_job(asked.tensor, asked.device, asked.folder, flags)
    except (ValueError, OSError, ImportError) as error:
        fail(error, 2)
    with working(job):
        if job is None or job.is_main:
            _serve(asked, job)
        else:
            _follow(asked, job)


def _serve(asked: ServeArguments, job: "RankedJob | None") -> None:
    """Run the server, on rank 0 if there are several ranks."""
    try:
        replicated = _replica_options(asked)
        listening = listen(asked.host, asked.port)
        port = listening.getsockname()[1]
        if replicated is None:
            server, engine = _prepare(asked, port, job)
        else:
            server, replicas = _prepare_replicas(asked, replicated, port)
    except ModuleNotFoundError as error:
        if (module := missing_module(error)) is None:
            raise
        fail(not_installed("lineate serve", module), 1)
    except (ValueError, OSError, ImportError) as error:
        fail(error, 2)
    if replicated is not None:
        replicas.run(server, listening)
        return
    engine.start()
    try:
        server.run([listening])
    finally:
        engine.stop(drain=False)
        if engine.cache is not None:
            engine.cache.close()


def _follow(asked: ServeArguments, job: "RankedJob") -> None:
    """Follow the steps of rank 0's server until it ends."""
    from lineate.serving.api.guides import Grammars
    from lineate.serving.engine.lockstep import Lockstep

    engine, _, tokenizer = load(asked, job)
    grammars = Grammars(tokenizer, limits_of(asked).grammar_bytes)
    front = Lockstep(engine, job.link, lambda grammar: grammars.guide(grammar, "response_format"))
    for number in (signal.SIGTERM, signal.SIGINT):  # torchrun sends them to all ranks, and rank 0 drains
        signal.signal(number, signal.SIG_IGN)
    front.follow()
    if engine.cache is not None:
        engine.cache.close()


def _end(job: "RankedJob", server: "DrainingServer", why: str) -> None:
    """Print why the job has ended, and end the server after clients have received their errors."""
    job.tell(why)
    server.drain()


def _prepare(asked: ServeArguments, port: int, job: "RankedJob | None") -> tuple["DrainingServer", Any]:
    """Return the server and its engine, or rank 0's of several; nothing runs yet."""
    app, engine, model, tokenizer = application(asked, settings_of(asked), job)
    server = _server(asked, app, port)
    _print_progress()
    if job is not None:
        engine.watch(partial(_end, job, server))
    _announce(asked, port, model, tokenizer)
    return server, engine


def _print_progress() -> None:
    """Print the log's lines about long prompts on the server's terminal."""
    from lineate.serving.engine.progress import LOG

    class Terminal(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage())

    if not LOG.handlers:
        LOG.addHandler(Terminal())
        LOG.setLevel(logging.INFO)


def _server(asked: ServeArguments, app: "Starlette", port: int) -> "DrainingServer":
    """Return the server of an application."""
    import uvicorn

    from lineate.serving.draining import DrainingServer

    config = uvicorn.Config(
        app, asked.host, port, lifespan="off", log_level="info" if asked.access_log else "warning",
        access_log=asked.access_log, server_header=False, timeout_graceful_shutdown=10,
    )  # fmt: skip
    return DrainingServer(app, config)


def _check_tensor(asked: ServeArguments) -> None:
    """Raise if several processes are to share each of several replicas; checked before any of them is started."""
    if asked.replicas is not None and asked.tensor > 1:
        raise ValueError(
            f"--tensor must be 1 with --replicas, got {asked.tensor}; a replica is one process. Start one "
            f"torchrun --nproc-per-node {asked.tensor} ... serve --tensor {asked.tensor} without --replicas for each "
            "replica, behind a load balancer of your own"
        )


def _check_random(asked: ServeArguments) -> None:
    """Raise if random weights are asked for without a preset, or in several processes, or a preset without them."""
    from lineate.generation.loading import random_shape
    from lineate.models.presets import PRESETS

    if not asked.random_weights:
        if asked.folder in PRESETS and not Path(asked.folder).exists():
            raise ValueError(
                f"MODEL must be the folder of a run or of a model, or a name on the hub, got {asked.folder!r}, a "
                "preset, which is a shape without weights; add --random-weights to measure its speed"
            )
        return
    random_shape(asked.folder)
    if asked.tensor > 1 or asked.replicas is not None:
        got = f"--tensor {asked.tensor}" if asked.tensor > 1 else f"--replicas {asked.replicas}"
        raise ValueError(f"--random-weights must be served by one process, got {got}; leave it out")


def _replica_options(asked: ServeArguments) -> "ReplicaOptions | None":
    """Return the options of replicas; None if one engine in this process serves."""
    from lineate.serving.replicas.options import ReplicaOptions

    given = {
        "--max-replicas": asked.max_replicas, "--target-queue": asked.target_queue, "--imbalance": asked.imbalance,
        "--cluster": asked.cluster, "--replica-cpus": asked.replica_cpus, "--replica-gpus": asked.replica_gpus,
    }  # fmt: skip
    if asked.replicas is None:
        if found := [f"{flag} {value}" for flag, value in given.items() if value is not None]:
            raise ValueError(f"--replicas must be given with {found[0]}, got none; add --replicas 2, for example")
        return None
    if asked.target_queue is not None and asked.max_replicas is None:
        least = asked.replicas + 1
        raise ValueError(f"--max-replicas must be given with --target-queue, got none; add --max-replicas {least}")
    return ReplicaOptions(
        asked.replicas,
        most=asked.max_replicas,
        target=float(asked.slots if asked.target_queue is None else asked.target_queue),
        imbalance=4 if asked.imbalance is None else asked.imbalance,
        cluster=asked.cluster,
        cpus=1.0 if asked.replica_cpus is None else asked.replica_cpus,
        gpus=float(asked.device != "cpu") if asked.replica_gpus is None else asked.replica_gpus,
        at_once=asked.slots + 2 * asked.queue,
        drain_seconds=asked.drain,
    )


def _prepare_replicas(
    asked: ServeArguments, replicated: "ReplicaOptions", port: int
) -> tuple["DrainingServer", "RayReplicas"]:
    """Return the server of the front, and the replicas, which are running; problems of the model are detected first."""
    from lineate.generation.loading import check_model, load_or_builtin
    from lineate.serving.replicas.cluster import RayReplicas
    from lineate.serving.replicas.front import make_front

    settings, _ = settings_of(asked), sizes_of(asked)
    limits = replace(settings.limits, requests=settings.limits.requests * replicated.limit)
    if asked.folder is None:
        load_or_builtin(None, asked.dtype, "cpu", say)  # trained now, and not by every replica
    else:
        check_model(asked.folder)
    if asked.draft not in (NONE, LOOKUP, HEAD):
        check_model(asked.draft)
    there = replace(
        asked,
        folder=None if asked.folder is None else _whole_name(asked.folder),
        cache_folder=None if asked.cache_folder is None else _whole_path(asked.cache_folder),
        draft=asked.draft if asked.draft in (NONE, LOOKUP, HEAD) else _whole_name(asked.draft),
        name=name_of(asked),
        api_key=None,
    )
    say(f"starting {replicated.replicas} replicas of {name_of(asked)} under Ray Serve")
    try:
        replicas = RayReplicas(partial(make_replica, there), replicated, f"{name_of(asked)}-{port}")
    except RuntimeError as error:
        fail(error, 1)
    app = make_front(replicas, replace(settings, limits=limits))
    _say_where(asked, port)
    return _server(asked, app, port), replicas


def make_replica(asked: ServeArguments) -> tuple["FastAPI", "Engine"]:
    """Return the application and the engine of a replica; a replica's process calls this.

    Args:
        asked: The options of the command, with whole paths.
    """
    from lineate.serving.app import Settings

    app, engine, _, _ = application(asked, Settings(limits=limits_of(asked)))  # the front checks keys and names
    return app, engine


def _whole_name(name: str) -> str:
    """Return the name of a model that is the same in every folder: a path, or a name on the hub."""
    from lineate.models.files.hub import is_hub_name

    return name if is_hub_name(name) else _whole_path(name)


def _whole_path(name: str) -> str:
    """Return a path that is the same in every folder."""
    return str(user_path(named_path(name)).resolve())


def _announce(asked: ServeArguments, port: int, model: "HybridLM", tokenizer: "Tokenizer") -> None:
    """Print a description of the served model."""
    from lineate.planning.units import show_bytes, show_count
    from lineate.quantised.which import format_of

    count = show_count(sum(x.numel() for x in model.parameters()))
    ranks = "" if asked.tensor == 1 else f" on each of {asked.tensor} ranks"
    state = show_bytes(model.state_nbytes(1, asked.context, asked.state_dtype))
    form = format_of(model)
    kept = "" if form is None else f" in {form.name}"
    say(
        f"{name_of(asked)}: {count} parameters{kept}{ranks}, {model.config.pattern}, {tokenizer.name} on {asked.device}"
    )
    say(f"{asked.slots} sequences of {asked.context} tokens, {state} of state each; cache {asked.cache}")
    if asked.random_weights:
        say(f"warning: the weights are random, in the shape of {asked.folder}: answers are noise, only speed is real")
    if found := sampling_of(asked).used(model.sampling_defaults):
        say(f"sampling of the checkpoint: {found}; --sampling-defaults none leaves it out")
    _say_where(asked, port)


def _say_where(asked: ServeArguments, port: int) -> None:
    """Print the addresses of the server."""
    host = f"[{asked.host}]" if ":" in asked.host else asked.host
    say(f"http://{host}:{port}/ has the chat page; http://{host}:{port}/v1 is OpenAI's API")
    if not read_keys(asked.api_key) and asked.tensor == 1:
        say(f"http://{host}:{port}/explore/ shows what the model does with a text, token by token")
    if not is_local(asked.host) and not read_keys(asked.api_key):
        say(f"warning: other machines can use this server without a key; set {KEYS}")

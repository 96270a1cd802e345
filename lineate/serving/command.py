"""The command `lineate serve`."""

import ipaddress
import os
import socket
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lineate.names import named_path, user_path
from lineate.options import argument, option, parameters, sign
from lineate.terminal import fail, printable

if TYPE_CHECKING:
    import typer
    from fastapi import FastAPI
    from starlette.applications import Starlette

    from lineate.integrations.ray.cluster import RayReplicas
    from lineate.integrations.ray.options import ReplicaOptions
    from lineate.models import HybridLM
    from lineate.serving.app import Settings
    from lineate.serving.draining import DrainingServer
    from lineate.serving.engine import Engine
    from lineate.serving.limits import Limits
    from lineate.text.base import Tokenizer

NEEDED = ("fastapi", "starlette", "uvicorn", "pydantic_core", "prometheus_client", "jinja2", "llguidance", "tokenizers")
"""Modules that come with the extra serve."""
KEYS = "LINEATE_API_KEY"
BUILT_IN = "lineate-small"
"""The name of the model that is served if none is given."""
LOOKUP, HEAD, NONE = "lookup", "head", "none"


@dataclass(frozen=True)
class ServeArguments:
    """The options of `lineate serve`."""

    folder: str | None = argument(
        "Folder of a run, or of a model and tokenizer, or a hub name; none: a small model.", "[MODEL]", None
    )
    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0: every address of this machine.")
    port: int = option(8000, "Port to listen at; 0: a free one.", least=0, most=65535)
    name: str | None = option(None, "Name of the model in requests; the folder's or hub's by default.")
    api_key: str | None = option(None, f"Keys of which requests need one, with commas between; or set {KEYS}.")
    device: str = option("cpu", "cpu or cuda.")
    dtype: str = option("auto", "float32, bfloat16, ...; auto: as stored.")
    bits: int | None = option(None, "Keep large weights in 16, 8 or 4 bits; none: as stored.")
    slots: int = option(8, "Sequences that are generated at once.", least=1, most=4096)
    context: int = option(8192, "Most tokens of a prompt and its continuation.", least=2, most=2**24)
    memory: str | None = option(None, "Most memory for running sequences, such as 4GB.", metavar="SIZE")
    queue: int = option(128, "Most requests that wait; more get status 429.", least=1, most=2**20)
    cache: str = option("1GB", "Memory for states of prompts that were read; 0: keep none.", metavar="SIZE")
    cache_folder: str | None = option(
        None, "Where kept states go when memory is full or the server ends.", metavar="FOLDER"
    )
    spacing: int | None = option(
        None, "Distance of kept states in tokens, a multiple of 64; 256 on a CPU, 1024 on a GPU.", least=64, most=2**20
    )
    exact: bool = option(False, "Reuse only states that give the same bits as reading the whole prompt.", "--exact")
    draft: str = option(
        NONE, "Guess tokens ahead: lookup (from the text), head (of the model), a smaller model's folder, or none."
    )
    guesses: int = option(4, "Most tokens that are guessed ahead.", least=1, most=32)
    max_tokens: int | None = option(None, "Most tokens that a request may generate.", least=1)
    max_prompt: int | None = option(None, "Most tokens of a prompt.", least=1)
    max_body: str = option("8MB", "Most bytes of a request.", metavar="SIZE")
    timeout: float = option(600.0, "Seconds after which a request is ended.", least=0.001)
    drain: float = option(30.0, "Seconds that running requests have to end after SIGTERM.", least=0.001)
    cors: str | None = option(None, "Origins whose pages may call the server, with commas between.")
    allow_host: str | None = option(None, "More names by which the server may be called, with commas between.")
    access_log: bool = option(False, "Log every request.", "--access-log")
    replicas: int | None = option(
        None, "Serve this many copies of the model under Ray Serve; none: one, in this process.", least=1, most=4096
    )
    max_replicas: int | None = option(
        None, "Let the replicas grow in number up to this as requests wait, and shrink again.", least=1, most=4096
    )
    target_queue: float | None = option(
        None, "Requests of a replica, running or waiting, that growing aims at; --slots by default.", least=0.01
    )
    imbalance: int | None = option(
        None, "Requests that a replica may have more than the least busy one for the sake of its cache; 4 by default.",
        least=0,
    )  # fmt: skip
    cluster: str | None = option(None, "Address of the Ray cluster to join, or auto; none: start a Ray of its own.")
    replica_cpus: float | None = option(None, "Processors that a replica takes in Ray; 1 by default.", least=0.001)
    replica_gpus: float | None = option(
        None, "GPUs that a replica takes in Ray; 1 with --device cuda by default, else none.", least=0.001
    )


def add_commands(app: "typer.Typer") -> None:
    """Add `lineate serve` to the command line."""

    def serve(**given: Any) -> None:
        """Serve a model: OpenAI's API, a chat page, metrics. Prompts that share a beginning read it once."""
        run_serve(ServeArguments(**given))

    sign(serve, parameters(ServeArguments))
    app.command()(serve)


def run_serve(asked: ServeArguments) -> None:
    """Load the model and serve it until SIGTERM or Ctrl+C; a wrong option ends the program.

    Args:
        asked: The options.
    """
    try:
        replicated = _replica_options(asked)
        listening = listen(asked.host, asked.port)
        port = listening.getsockname()[1]
        if replicated is None:
            server, engine = _prepare(asked, port)
        else:
            server, replicas = _prepare_replicas(asked, replicated, port)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in (*NEEDED, "ray"):
            raise
        extra = "ray" if module == "ray" else "serve"
        fail(f"lineate serve needs {module}, which is not installed; run pip install 'lineate[{extra}]'", 1)
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


def listen(host: str, port: int) -> socket.socket:
    """Take an address, so that one that is taken is noticed before a model is loaded; clients cannot connect yet.

    Args:
        host: A name or an address of this machine.
        port: The port; 0 takes a free one.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(
            f"--host must be a name or an address of this machine, got {host!r} ({error.strerror})"
        ) from None
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as error:
        made.close()
        raise ValueError(f"--host and --port must be free, got {host}:{port} ({error.strerror})") from None
    return made


def _prepare(asked: ServeArguments, port: int) -> tuple["DrainingServer", "Engine"]:
    """Return the server and its engine; nothing runs yet."""
    app, engine, model, tokenizer = _application(asked, _settings(asked))
    _announce(asked, port, model, tokenizer)
    return _server(asked, app, port), engine


def _server(asked: ServeArguments, app: "Starlette", port: int) -> "DrainingServer":
    """Return the server of an application."""
    import uvicorn

    from lineate.serving.draining import DrainingServer

    config = uvicorn.Config(
        app, asked.host, port, lifespan="off", log_level="info" if asked.access_log else "warning",
        access_log=asked.access_log, server_header=False, timeout_graceful_shutdown=10,
    )  # fmt: skip
    return DrainingServer(app, config)


def _settings(asked: ServeArguments) -> "Settings":
    """Return how the server is reached, and what requests may ask for."""
    from lineate.generation.loading import check_device
    from lineate.serving.app import Settings

    check_device(asked.device)
    hosts = allowed_hosts(asked.host, _words(asked.allow_host))
    return Settings(read_keys(asked.api_key), _words(asked.cors), hosts, _limits(asked))


def _limits(asked: ServeArguments) -> "Limits":
    """Return what requests may ask for."""
    from lineate.planning.units import read_bytes
    from lineate.serving.limits import Limits

    return Limits(
        body_bytes=read_bytes(asked.max_body, "--max-body"),
        prompt_tokens=asked.max_prompt,
        new_tokens=asked.max_tokens,
        seconds=asked.timeout,
        drain_seconds=asked.drain,
    )


def _application(asked: ServeArguments, settings: "Settings") -> tuple["FastAPI", "Engine", "HybridLM", "Tokenizer"]:
    """Return the application and its engine, which is not started, with the model and its tokenizer."""
    from lineate.generation.loading import load_or_builtin
    from lineate.serving.app import describe, make_app
    from lineate.serving.warming import warm_up
    from lineate.small.which import name_of_bits

    model, tokenizer = load_or_builtin(asked.folder, asked.dtype, asked.device, _say, name_of_bits(asked.bits))
    engine = _engine(asked, model)
    warm_up(engine, 0 if asked.draft == NONE else asked.guesses)
    description = describe(model, tokenizer, _name(asked), asked.context, asked.slots)
    app = make_app(engine, tokenizer, description, settings)
    add_explorer(app, settings.api_keys, model, tokenizer, _name(asked))
    return app, engine, model, tokenizer


def _replica_options(asked: ServeArguments) -> "ReplicaOptions | None":
    """Return what the options say about replicas; None if one engine in this process serves."""
    from lineate.integrations.ray.options import ReplicaOptions

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
    """Return the server of the front, and the replicas, which run; what is wrong with the model is noticed before."""
    from lineate.generation.loading import check_model, load_or_builtin
    from lineate.integrations.ray.cluster import RayReplicas
    from lineate.integrations.ray.front import make_front

    settings, _ = _settings(asked), _sizes(asked)
    limits = replace(settings.limits, requests=settings.limits.requests * replicated.limit)
    if asked.folder is None:
        load_or_builtin(None, asked.dtype, "cpu", _say)  # trained now, and not by every replica
    else:
        check_model(asked.folder)
    if asked.draft not in (NONE, LOOKUP, HEAD):
        check_model(asked.draft)
    there = replace(
        asked,
        folder=None if asked.folder is None else _whole_name(asked.folder),
        cache_folder=None if asked.cache_folder is None else _whole_path(asked.cache_folder),
        draft=asked.draft if asked.draft in (NONE, LOOKUP, HEAD) else _whole_name(asked.draft),
        name=_name(asked),
        api_key=None,
    )
    _say(f"starting {replicated.replicas} replicas of {_name(asked)} under Ray Serve")
    try:
        replicas = RayReplicas(partial(make_replica, there), replicated, f"{_name(asked)}-{port}")
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

    app, engine, _, _ = _application(asked, Settings(limits=_limits(asked)))  # the front checks keys and names
    return app, engine


def _whole_name(name: str) -> str:
    """Return the name of a model that is the same in every folder: a path, or a name on the hub."""
    from lineate.models.files.hub import is_hub_name

    return name if is_hub_name(name) else _whole_path(name)


def _whole_path(name: str) -> str:
    """Return a path that is the same in every folder."""
    return str(user_path(named_path(name)).resolve())


def add_explorer(app: "FastAPI", keys: tuple[str, ...], model: "HybridLM", tokenizer: "Tokenizer", name: str) -> None:
    """Serve `lineate explore` at /explore/, unless requests need a key, for which its page has no field.

    A model on a GPU is left to the engine alone, whose recorded graphs allow no other work between them.

    Args:
        app: The application of the server.
        keys: Keys of which a request needs one.
        model: The model that is served.
        tokenizer: Its tokenizer.
        name: Its name in requests.
    """
    if keys:
        return
    from starlette.responses import RedirectResponse
    from starlette.routing import Route

    from lineate.explore.live.app import make_views
    from lineate.explore.live.models import Models, served

    # Before the route of the chat page's files, which would look for one of this name.
    app.router.routes.insert(0, Route("/explore", lambda request: RedirectResponse("explore/")))
    app.mount("/explore", make_views(Models(served(model, tokenizer, name) if model.device.type == "cpu" else None)))


def _engine(asked: ServeArguments, model: "HybridLM") -> "Engine":
    """Return the engine with its cache and drafter."""
    from lineate.serving.cache import StateCache
    from lineate.serving.engine import Engine
    from lineate.serving.identity import identity_of

    budget, memory = _sizes(asked)
    folder = None if asked.cache_folder is None else user_path(named_path(asked.cache_folder))
    spacing = asked.spacing or (1024 if model.device.type == "cuda" else 256)
    shared, identity = asked.replicas is not None, identity_of(model) if folder else ""
    cache = StateCache(budget, spacing, folder, identity, shared=shared) if budget else None
    return Engine(
        model,
        slots=asked.slots,
        context=asked.context,
        memory_bytes=memory,
        spacing=spacing,
        queue=asked.queue,
        cache=cache,
        exact=asked.exact,
        drafter=_drafter(asked, model),
        most_guesses=asked.guesses,
    )


def _sizes(asked: ServeArguments) -> tuple[int, int | None]:
    """Return the bytes of the cache and of running sequences."""
    from lineate.planning.units import read_bytes

    budget = 0 if asked.cache.strip() == "0" else read_bytes(asked.cache, "--cache")
    if asked.cache_folder is not None and not budget:
        raise ValueError("--cache-folder needs --cache above 0")
    return budget, None if asked.memory is None else read_bytes(asked.memory, "--memory")


def _drafter(asked: ServeArguments, model: "HybridLM") -> Any:
    from lineate.generation.loading import load_model
    from lineate.serving.drafting import DraftModel, PromptLookup
    from lineate.serving.predicting import PredictionDrafter
    from lineate.small.which import name_of_bits

    if asked.draft == NONE:
        return None
    if asked.draft == LOOKUP:
        return PromptLookup()
    if asked.draft == HEAD:
        return PredictionDrafter(model)
    smaller, _ = load_model(asked.draft, asked.dtype, asked.device, name_of_bits(asked.bits))
    return DraftModel(smaller, model.config.vocab_size)


def read_keys(given: str | None) -> tuple[str, ...]:
    """Return the keys of the option, or else of the environment; an empty key is refused.

    Args:
        given: The option, with commas between keys.
    """
    keys = _words(os.environ.get(KEYS) if given is None else given)
    if not all(key.isascii() and key.isprintable() and key and " " not in key for key in keys):
        raise ValueError(f"--api-key and {KEYS} must be visible ASCII characters without spaces")
    return keys


def _words(given: str | None) -> tuple[str, ...]:
    """Return what stands between commas."""
    return () if given is None else tuple(word.strip() for word in given.split(","))


def allowed_hosts(host: str, more: tuple[str, ...] = ()) -> frozenset[str]:
    """Return the names by which a server may be called; any if it listens to other machines and none was named.

    Args:
        host: The name or address that the server listens at.
        more: Names that are allowed as well.
    """
    named = {name.lower() for name in more}
    if is_local(host):
        return frozenset({"localhost", "127.0.0.1", "::1", host.lower(), *named})
    return frozenset({host.lower(), *named} if named else ())


def is_local(host: str) -> bool:
    """Whether only programs on this machine can reach an address.

    Args:
        host: A name or an address.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _name(asked: ServeArguments) -> str:
    """Return the name of the model: never a path of this machine."""
    if asked.name:
        return asked.name
    if asked.folder is None:
        return BUILT_IN
    from lineate.models.files.hub import is_hub_name

    return asked.folder if is_hub_name(asked.folder) else user_path(asked.folder).resolve().name


def _announce(asked: ServeArguments, port: int, model: "HybridLM", tokenizer: "Tokenizer") -> None:
    """Say what is served, and where."""
    from lineate.planning.units import show_bytes, show_count
    from lineate.small.which import format_of

    count = show_count(sum(x.numel() for x in model.parameters()))
    state = show_bytes(model.state_nbytes(1, asked.context))
    form = format_of(model)
    kept = "" if form is None else f" in {form.name}"
    _say(f"{_name(asked)}: {count} parameters{kept}, {model.config.pattern}, {tokenizer.name} on {asked.device}")
    _say(f"{asked.slots} sequences of {asked.context} tokens, {state} of state each; cache {asked.cache}")
    _say_where(asked, port)


def _say_where(asked: ServeArguments, port: int) -> None:
    """Say where the server is reached."""
    host = f"[{asked.host}]" if ":" in asked.host else asked.host
    _say(f"http://{host}:{port}/ has the chat page; http://{host}:{port}/v1 is OpenAI's API")
    if not read_keys(asked.api_key):
        _say(f"http://{host}:{port}/explore/ shows what the model does with a text, token by token")
    if not is_local(asked.host) and not read_keys(asked.api_key):
        _say(f"warning: other machines can use this server without a key; set {KEYS}")


def _say(text: str) -> None:
    print(f"lineate: {printable(text)}", file=sys.stderr, flush=True)

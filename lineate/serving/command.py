"""The command `lineate serve`."""

import ipaddress
import os
import signal
import socket
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lineate.names import named_path, user_path
from lineate.options import argument, option, parameters, sign
from lineate.terminal import fail, printable

if TYPE_CHECKING:
    import typer
    from fastapi import FastAPI

    from lineate.generation.ranks import RankedJob
    from lineate.models import HybridLM
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
OF_RANK_0 = ("folder", "host", "port", "name", "api_key", "cors", "allow_host", "access_log", "tensor", "cache_folder")
"""Options that may differ between processes that share a model, or are compared in another way."""


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
    tensor: int = option(1, "Processes that share the model; start as many with torchrun.", least=1, most=4096)


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
    from lineate.generation.job import join_job, working

    try:
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
    """Serve, on rank 0 if there are several."""
    try:
        listening = listen(asked.host, asked.port)
        server, engine = _prepare(asked, listening.getsockname()[1], job)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in NEEDED:
            raise
        fail(f"lineate serve needs {module}, which is not installed; run pip install 'lineate[serve]'", 1)
    except (ValueError, OSError, ImportError) as error:
        fail(error, 2)
    engine.start()
    try:
        server.run([listening])
    finally:
        engine.stop(drain=False)
        if engine.cache is not None:
            engine.cache.close()


def _follow(asked: ServeArguments, job: "RankedJob") -> None:
    """Make the steps of rank 0's server until it ends."""
    from lineate.serving.api.guides import Grammars
    from lineate.serving.lockstep import Lockstep

    engine, _, tokenizer = _load(asked, job)
    grammars = Grammars(tokenizer, _limits(asked).grammar_bytes)
    front = Lockstep(engine, job.link, lambda grammar: grammars.guide(grammar, "response_format"))
    for number in (signal.SIGTERM, signal.SIGINT):  # torchrun sends them to all ranks, and rank 0 drains
        signal.signal(number, signal.SIG_IGN)
    front.follow()
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


def _load(asked: ServeArguments, job: "RankedJob | None") -> tuple["Engine", "HybridLM", "Tokenizer"]:
    """Return the engine of this rank, warmed up, its model and the tokenizer."""
    from lineate.generation.loading import load_model, load_or_builtin
    from lineate.serving.warming import warm_up
    from lineate.small.which import name_of_bits

    weights = name_of_bits(asked.bits)
    if job is None:
        model, tokenizer = load_or_builtin(asked.folder, asked.dtype, asked.device, _say, weights)
    else:
        assert asked.folder is not None
        model, tokenizer = load_model(asked.folder, asked.dtype, job.device, weights, job.model_ranks)
    engine = _engine(asked, model, job)
    warm_up(engine, 0 if asked.draft == NONE else asked.guesses)
    return engine, model, tokenizer


def _end(job: "RankedJob", server: "DrainingServer", why: str) -> None:
    """Say why the job has ended, and let the server go once clients have had their errors."""
    job.tell(why)
    server.drain()


def _prepare(asked: ServeArguments, port: int, job: "RankedJob | None") -> tuple["DrainingServer", Any]:
    """Return the server and its engine, or rank 0's of several; nothing runs yet."""
    import uvicorn

    from lineate.generation.loading import check_device
    from lineate.serving.app import Settings, describe, make_app
    from lineate.serving.draining import DrainingServer

    check_device(asked.device)
    limits = _limits(asked)
    settings = Settings(
        read_keys(asked.api_key), _words(asked.cors), allowed_hosts(asked.host, _words(asked.allow_host)), limits
    )
    own, model, tokenizer = _load(asked, job)
    description = describe(model, tokenizer, _name(asked), asked.context, asked.slots)
    engine: Any = own
    if job is not None:
        from lineate.serving.lockstep import Lockstep

        engine = Lockstep(own, job.link)
    app = make_app(engine, tokenizer, description, settings)
    if job is None:  # views call the model outside of the engine's steps
        add_explorer(app, settings.api_keys, model, tokenizer, _name(asked))
    config = uvicorn.Config(
        app, asked.host, port, lifespan="off", log_level="info" if asked.access_log else "warning",
        access_log=asked.access_log, server_header=False, timeout_graceful_shutdown=10,
    )  # fmt: skip
    server = DrainingServer(app, config)
    if job is not None:
        engine.watch(partial(_end, job, server))
    _announce(asked, port, model, tokenizer)
    return server, engine


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


def _engine(asked: ServeArguments, model: "HybridLM", job: "RankedJob | None") -> "Engine":
    """Return the engine with its cache and drafter."""
    from lineate.planning.units import read_bytes
    from lineate.serving.cache import StateCache
    from lineate.serving.engine import Engine
    from lineate.serving.identity import identity_of
    from lineate.serving.peers import LinkedPeers

    budget = 0 if asked.cache.strip() == "0" else read_bytes(asked.cache, "--cache")
    folder = None if asked.cache_folder is None else user_path(named_path(asked.cache_folder))
    if folder is not None and not budget:
        raise ValueError("--cache-folder needs --cache above 0")
    spacing = asked.spacing or (1024 if model.device.type == "cuda" else 256)
    peers = None
    if job is not None:  # every rank has a part of each state
        peers = LinkedPeers(job.link)
        folder = None if folder is None else folder / f"rank-{job.link.rank}-of-{job.link.size}"
    cache = StateCache(budget, spacing, folder, identity_of(model) if folder else "", peers=peers) if budget else None
    return Engine(
        model,
        slots=asked.slots,
        context=asked.context,
        memory_bytes=None if asked.memory is None else read_bytes(asked.memory, "--memory"),
        spacing=spacing,
        queue=asked.queue,
        cache=cache,
        exact=asked.exact,
        drafter=_drafter(asked, model),
        most_guesses=asked.guesses,
    )


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
    smaller, _ = load_model(asked.draft, asked.dtype, model.device, name_of_bits(asked.bits))
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
    ranks = "" if asked.tensor == 1 else f" on each of {asked.tensor} ranks"
    state = show_bytes(model.state_nbytes(1, asked.context))
    form = format_of(model)
    kept = "" if form is None else f" in {form.name}"
    _say(f"{_name(asked)}: {count} parameters{kept}{ranks}, {model.config.pattern}, {tokenizer.name} on {asked.device}")
    _say(f"{asked.slots} sequences of {asked.context} tokens, {state} of state each; cache {asked.cache}")
    host = f"[{asked.host}]" if ":" in asked.host else asked.host
    _say(f"http://{host}:{port}/ has the chat page; http://{host}:{port}/v1 is OpenAI's API")
    if not read_keys(asked.api_key) and asked.tensor == 1:
        _say(f"http://{host}:{port}/explore/ shows what the model does with a text, token by token")
    if not is_local(asked.host) and not read_keys(asked.api_key):
        _say(f"warning: other machines can use this server without a key; set {KEYS}")


def _say(text: str) -> None:
    print(f"lineate: {printable(text)}", file=sys.stderr, flush=True)

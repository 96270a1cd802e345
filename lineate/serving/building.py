"""Builds an engine and its application from the options of `lineate serve`."""

from typing import TYPE_CHECKING, Any

from lineate.console.names import named_path, user_path
from lineate.serving.arguments import HEAD, LOOKUP, NONE, ServeArguments, name_of, sampling_of, say, sizes_of

if TYPE_CHECKING:
    from fastapi import FastAPI

    from lineate.generation.ranks import RankedJob
    from lineate.models import HybridLM
    from lineate.serving.app import Settings
    from lineate.serving.engine.engine import Engine
    from lineate.text.base import Tokenizer


def load(asked: ServeArguments, job: "RankedJob | None") -> tuple["Engine", "HybridLM", "Tokenizer"]:
    """Return the engine of this rank, warmed up, its model and the tokenizer.

    Args:
        asked: The options.
        job: The processes that share the model; None: there is one.
    """
    from lineate.generation.loading import find_device, load_model, load_or_builtin, load_random
    from lineate.quantised.which import name_of_bits
    from lineate.serving.engine.warming import warm_up

    weights, defaults = name_of_bits(asked.bits), sampling_of(asked).reads
    if asked.random_weights:
        model, tokenizer = load_random(asked.folder, asked.dtype, find_device(asked.device), weights)
    elif job is None:
        model, tokenizer = load_or_builtin(asked.folder, asked.dtype, find_device(asked.device), say, weights, defaults)
    else:
        assert asked.folder is not None
        model, tokenizer = load_model(asked.folder, asked.dtype, job.device, weights, job.model_ranks, defaults)
    engine = _engine(asked, model, job)
    warm_up(engine, 0 if asked.draft == NONE else asked.guesses)
    return engine, model, tokenizer


def application(
    asked: ServeArguments, settings: "Settings", job: "RankedJob | None" = None
) -> tuple["FastAPI", Any, "HybridLM", "Tokenizer"]:
    """Return the application and its engine, or those of rank 0, which are not started; the model; its tokenizer.

    Args:
        asked: The options.
        settings: The access settings and the limits of requests.
        job: The processes that share the model; None: there is one.
    """
    from lineate.serving.app import describe, make_app

    own, model, tokenizer = load(asked, job)
    description = describe(
        model, tokenizer, name_of(asked), asked.context, asked.slots, own.pool.format, sampling_of(asked),
        asked.random_weights, asked.batch_invariant,
    )  # fmt: skip
    engine: Any = own
    if job is not None:
        from lineate.serving.engine.lockstep import Lockstep

        engine = Lockstep(own, job.link)
    app = make_app(engine, tokenizer, description, settings)
    if job is None:  # views call the model outside of the engine's steps
        add_explorer(app, settings.api_keys, model, tokenizer, name_of(asked))
    return app, engine, model, tokenizer


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
    from lineate.serving.routes import EXPLORER

    # Before the route of the chat page's files, which would search for a file of this name.
    app.router.routes.insert(0, Route(EXPLORER, lambda request: RedirectResponse(f"{EXPLORER[1:]}/")))
    app.mount(EXPLORER, make_views(Models(served(model, tokenizer, name) if model.device.type == "cpu" else None)))


def _engine(asked: ServeArguments, model: "HybridLM", job: "RankedJob | None") -> "Engine":
    """Return the engine with its cache and drafter."""
    from lineate.serving.cache.cache import StateCache
    from lineate.serving.cache.identity import identity_of
    from lineate.serving.cache.peers import LinkedPeers
    from lineate.serving.engine.engine import Engine
    from lineate.serving.engine.reading import default_spacing

    budget, memory = sizes_of(asked)
    folder = None if asked.cache_folder is None else user_path(named_path(asked.cache_folder))
    spacing = asked.spacing or default_spacing(model.config, model.device.type == "cuda")
    peers = None
    if job is not None:  # every rank has a part of each state
        peers = LinkedPeers(job.link)
        folder = None if folder is None else folder / f"rank-{job.link.rank}-of-{job.link.size}"
    identity = identity_of(model, asked.state_dtype, asked.state_rounding) if folder else ""
    shared = asked.replicas is not None
    cache = StateCache(budget, spacing, folder, identity, shared=shared, peers=peers) if budget else None
    return Engine(
        model,
        slots=asked.slots,
        context=asked.context,
        memory_bytes=memory,
        spacing=spacing,
        queue=asked.queue,
        cache=cache,
        drafter=find_drafter(asked, model),
        most_guesses=asked.guesses,
        state_dtype=asked.state_dtype,
        state_rounding=asked.state_rounding,
        batch_invariant=asked.batch_invariant,
    )


def find_drafter(asked: ServeArguments, model: "HybridLM") -> Any:
    """Return the drafter that the options select; None: no drafter.

    Args:
        asked: The options.
        model: The model that checks the guesses.
    """
    from lineate.generation.loading import load_model
    from lineate.quantised.which import name_of_bits
    from lineate.serving.drafting import DraftModel, PromptLookup
    from lineate.serving.drafting.predicting import PredictionDrafter

    if asked.draft == NONE:
        return None
    if asked.draft == LOOKUP:
        return PromptLookup()
    if asked.draft == HEAD:
        return PredictionDrafter(model)
    smaller, _ = load_model(asked.draft, asked.dtype, model.device, name_of_bits(asked.bits), sampling_defaults=False)
    return DraftModel(smaller, model.config.vocab_size)

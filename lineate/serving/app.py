"""The server: OpenAI's API, a few endpoints of lineate's, metrics, and the page."""

import dataclasses
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

import lineate
from lineate.generation.choice import Sampling
from lineate.generation.defaults import SamplingFlags, shown_options
from lineate.layers import kind_of
from lineate.layers.formats import AS_COMPUTED, StateFormat
from lineate.models import HybridLM
from lineate.models.hybrid import empty_model
from lineate.quantised.which import format_of
from lineate.serving.api.chat import chat
from lineate.serving.api.completions import complete
from lineate.serving.api.foreign import EXPOSED
from lineate.serving.api.service import Description, Engine, Service
from lineate.serving.api.tokens import detokenize, tokenize
from lineate.text.base import Tokenizer
from lineate.web.errors import ApiError
from lineate.web.fields import shown
from lineate.web.gate import Gate, Keys, Traffic
from lineate.web.limits import Limits
from lineate.web.metrics import CONTENT_TYPE, Metrics
from lineate.web.pages import PageFiles
from lineate.web.responses import answer, answer_api_error, answer_http_error

PAGE = Path(__file__).with_name("page")
"""The chat page, served at /."""


@dataclass(frozen=True)
class Settings:
    """Access settings of the server."""

    api_keys: tuple[str, ...] = ()
    """Keys of which a request needs one; without any, every request is served."""
    cors: tuple[str, ...] = ()
    """Origins whose pages may call the server."""
    hosts: frozenset[str] = frozenset()
    """Host names that requests may use; any if empty."""
    limits: Limits = field(default_factory=Limits)
    """The limits of requests."""


def describe(
    model: HybridLM,
    tokenizer: Tokenizer,
    name: str,
    context: int,
    slots: int,
    format: StateFormat = AS_COMPUTED,
    sampling: SamplingFlags | None = None,
) -> Description:
    """Return the public description of a model.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        name: The name that requests use.
        context: The most tokens of a prompt and its continuation.
        slots: The most concurrent choices.
        format: The format of the memories of running sequences.
        sampling: The sampling options of requests that do not name them; None: the checkpoint's, else OpenAI's.
    """
    layers = []
    whole = model if model.ranks is None else empty_model(model.config).to(model.dtype)  # not one rank's share of it
    for letter, specs in zip(model.config.letters, format.specs(whole.state_spec), strict=True):
        kind = kind_of(letter)
        fixed = sum(spec.nbytes(0) for spec in specs)
        per_token = sum(spec.nbytes(1) for spec in specs) - fixed
        layers.append(
            {"letter": letter, "kind": kind.name, "label": kind.label, "fixed": fixed, "per_token": per_token}
        )
    form = format_of(model)
    kept = {} if form is None else {"weights": form.name}
    if format.is_narrow:
        kept |= {"state_dtype": "bfloat16", "state_rounding": format.rounding}
    text = " ".join([f"{lineate.__version__} {model.config} {tokenizer.identity} {context}", *kept.values()])
    details = {
        "pattern": model.config.pattern,
        "parameters": sum(x.numel() for x in whole.parameters()),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        **kept,
        "device": model.device.type,
        **({} if model.ranks is None else {"ranks": model.ranks.size}),
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "has_chat_template": tokenizer.chat is not None,
    }
    return Description(
        name=name,
        context=context,
        slots=slots,
        created=int(time.time()),
        fingerprint=f"lineate-{hashlib.sha256(text.encode()).hexdigest()[:12]}",
        layers=tuple(layers),
        details=tuple(details.items()),
        sampling=(sampling or SamplingFlags()).resolve(model.sampling_defaults, Sampling()),
    )


def numbers_of(engine: Engine) -> Mapping[str, Mapping[str, Any]]:
    """Return the numbers of an engine and its cache by name."""
    found = {"engine": {**_plain(engine.stats), "slots": engine.slots}}
    if engine.cache is not None:
        found["cache"] = _plain(engine.cache.stats)
    return found


def _plain(stats: Any) -> dict[str, Any]:
    return dataclasses.asdict(stats)


def make_app(engine: Engine, tokenizer: Tokenizer, description: Description, settings: Settings) -> FastAPI:
    """Return the application; `app.state.traffic` has its current requests.

    Args:
        engine: Generates tokens; it must have been started.
        tokenizer: The model's tokenizer.
        description: The public description of the model.
        settings: Keys, origins, limits.
    """
    metrics = Metrics(lambda: numbers_of(engine))
    service = Service(engine, tokenizer, description, settings.limits, metrics)
    traffic = Traffic()
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, title="lineate")
    app.state.traffic, app.state.service = traffic, service
    app.include_router(_routes(service, Keys(settings.api_keys)))

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        status = "draining" if traffic.draining else "ok"
        return answer({"status": status}, 503 if traffic.draining else 200)

    if PAGE.is_dir():
        _add_page(app)
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(
        Gate, traffic=traffic, metrics=metrics, hosts=settings.hosts, most=settings.limits.requests
    )  # fmt: skip
    if settings.cors:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors), allow_methods=["GET", "POST"],
            allow_headers=["*"], expose_headers=list(EXPOSED),  # OpenAI's client sends x-stainless-...
        )  # fmt: skip
    return app


def _add_page(app: FastAPI) -> None:
    """Serve the files of the page; a mount at / would prevent 405 answers of other routes."""
    files = PageFiles(PAGE)

    @app.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    @app.get("/{name}")
    async def file_of_page(request: Request, name: str) -> Response:
        return await files.get_response(name, request.scope)


def _routes(service: Service, keys: Keys) -> APIRouter:
    """Return the routes that need a key."""

    async def with_key(request: Request) -> None:
        keys.check(request)

    router = APIRouter(dependencies=[Depends(with_key)])
    description = service.description
    model = {
        "id": description.name, "object": "model", "created": description.created, "owned_by": "lineate",
        "max_model_len": description.context, "sampling_defaults": shown_options(description.sampling),
    }  # fmt: skip

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await chat(service, request)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await complete(service, request)

    @router.post("/tokenize")
    async def tokens_of(request: Request) -> Response:
        return await tokenize(service, request)

    @router.post("/detokenize")
    async def text_of(request: Request) -> Response:
        return await detokenize(service, request)

    @router.get("/v1/models")
    async def models() -> Response:
        return answer({"object": "list", "data": [model]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != description.name:
            message = f"model must be {description.name!r}, the one that is served here, got {shown(name)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return answer(model)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @router.get("/lineate/info")
    async def info() -> Response:
        value = dataclasses.asdict(description) | {"details": dict(description.details)}
        value["sampling"] = shown_options(description.sampling)
        return answer(value | {"limits": dataclasses.asdict(service.limits), "version": lineate.__version__})

    @router.get("/lineate/stats")
    async def stats() -> Response:
        return answer(numbers_of(service.engine))

    return router


async def _http_error(request: Request, error: Exception) -> Response:
    missing = isinstance(error, HTTPException) and error.status_code == 404
    return answer_http_error(request, error, "not_found" if missing else None)

"""The server: it answers the endpoints of routes.py for one model."""

import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

import lineate
from lineate.generation.choice import Sampling
from lineate.generation.defaults import SamplingFlags
from lineate.layers import kind_of
from lineate.layers.formats import AS_COMPUTED, StateFormat
from lineate.models import HybridLM
from lineate.models.hybrid import empty_model
from lineate.quantised.which import format_of
from lineate.serving.api.foreign import EXPOSED
from lineate.serving.api.operating import numbers_of
from lineate.serving.api.service import Description, Engine, Service
from lineate.serving.routes import ENDPOINTS, Endpoint, methods_of
from lineate.text.base import Tokenizer
from lineate.web.errors import ApiError
from lineate.web.gate import Gate, Keys, Traffic
from lineate.web.limits import Limits
from lineate.web.metrics import Metrics
from lineate.web.responses import answer_api_error, answer_http_error, read_body


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
    random_weights: bool = False,
    batch_invariant: bool = False,
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
        random_weights: Whether the weights are random, so that clients are told.
        batch_invariant: Whether logits do not depend on the other rows, so that clients are told.
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
    kept: dict[str, Any] = {} if form is None else {"weights": form.name}
    if format.is_narrow:
        kept |= {"state_dtype": "bfloat16", "state_rounding": format.rounding}
    if batch_invariant:
        kept["batch_invariant"] = True
    settings = [key if value is True else value for key, value in kept.items()]
    text = " ".join([f"{lineate.__version__} {model.config} {tokenizer.identity} {context}", *settings])
    details = {
        "pattern": model.config.pattern,
        "parameters": sum(x.numel() for x in whole.parameters()),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        **kept,
        **({"random_weights": True} if random_weights else {}),
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


def make_app(
    engine: Engine,
    tokenizer: Tokenizer,
    description: Description,
    settings: Settings,
    endpoints: Sequence[Endpoint] = ENDPOINTS,
) -> FastAPI:
    """Return the application; `app.state.traffic` has its current requests.

    Args:
        engine: Generates tokens; it must have been started.
        tokenizer: The model's tokenizer.
        description: The public description of the model.
        settings: Keys, origins, limits.
        endpoints: The rows that it serves.
    """
    metrics = Metrics(lambda: numbers_of(engine))
    service = Service(engine, tokenizer, description, settings.limits, metrics)
    traffic, keys = Traffic(), Keys(settings.api_keys)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, title="lineate")
    app.state.traffic, app.state.service = traffic, service
    for row in endpoints:
        app.add_api_route(row.path, _route(row, service, keys), methods=[*row.methods])
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(
        Gate, traffic=traffic, metrics=metrics, hosts=settings.hosts, most=settings.limits.requests
    )  # fmt: skip
    if settings.cors:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors), allow_methods=methods_of(endpoints),
            allow_headers=["*"], expose_headers=list(EXPOSED),  # OpenAI's client sends x-stainless-...
        )  # fmt: skip
    return app


def _route(row: Endpoint, service: Service, keys: Keys) -> Callable[[Request], Awaitable[Response]]:
    """Return the function of a row: it checks the key, then reads the body, then answers."""

    async def respond(request: Request) -> Response:
        if row.key:
            keys.check(request)
        takes = row.has_body(request.method)
        body = await read_body(request, service.limits, service.intake) if takes else b""
        return await row.answer(service, request, body)

    return respond


async def _http_error(request: Request, error: Exception) -> Response:
    missing = isinstance(error, HTTPException) and error.status_code == 404
    return answer_http_error(request, error, "not_found" if missing else None)

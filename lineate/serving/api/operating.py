"""The endpoints about the server itself: its model, limits, numbers, metrics and health; the files of the chat page."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import lineate
from lineate.generation.defaults import shown_options
from lineate.serving.api.service import Description, Engine, Service
from lineate.web.errors import ApiError
from lineate.web.fields import shown
from lineate.web.metrics import CONTENT_TYPE
from lineate.web.pages import PageFiles
from lineate.web.responses import answer

PAGE = Path(__file__).parents[1] / "page"
"""The chat page, served at /."""
FILES = PageFiles(PAGE)


def numbers_of(engine: Engine) -> Mapping[str, Mapping[str, Any]]:
    """Return the numbers of an engine and its cache by name."""
    found = {"engine": {**dataclasses.asdict(engine.stats), "slots": engine.slots}}
    if engine.cache is not None:
        found["cache"] = dataclasses.asdict(engine.cache.stats)
    return found


def _shown_model(description: Description) -> dict[str, Any]:
    random = {"random_weights": True} if dict(description.details).get("random_weights") else {}
    return {
        "id": description.name, "object": "model", "created": description.created, "owned_by": "lineate",
        "max_model_len": description.context, "sampling_defaults": shown_options(description.sampling),
        **random,
    }  # fmt: skip


async def models(service: Service, request: Request, body: bytes) -> Response:
    """Return the list of models, which has one."""
    return answer({"object": "list", "data": [_shown_model(service.description)]})


async def one_model(service: Service, request: Request, body: bytes) -> Response:
    """Return the model that the path names; raise ApiError if it is not served."""
    own, name = service.description.name, request.path_params["name"]
    if name != own:
        message = f"model must be {own!r}, the one that is served here, got {shown(name)}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return answer(_shown_model(service.description))


async def info(service: Service, request: Request, body: bytes) -> Response:
    """Return the description of the model, and the limits."""
    description = service.description
    value = dataclasses.asdict(description) | {"details": dict(description.details)}
    value["sampling"] = shown_options(description.sampling)
    return answer(value | {"limits": dataclasses.asdict(service.limits), "version": lineate.__version__})


async def stats(service: Service, request: Request, body: bytes) -> Response:
    """Return the numbers of the engine and its cache."""
    return answer(numbers_of(service.engine))


async def metrics(service: Service, request: Request, body: bytes) -> Response:
    """Return the counts for Prometheus."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE)


async def health(service: Service, request: Request, body: bytes) -> Response:
    """Return whether the server takes requests."""
    draining = request.app.state.traffic.draining
    return answer({"status": "draining" if draining else "ok"}, 503 if draining else 200)


async def page(service: Service, request: Request, body: bytes) -> Response:
    """Return the chat page."""
    return await FILES.get_response("index.html", request.scope)


async def file_of_page(service: Service, request: Request, body: bytes) -> Response:
    """Return a file of the chat page."""
    return await FILES.get_response(request.path_params["name"], request.scope)

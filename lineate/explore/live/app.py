"""The application of `lineate explore`: a page, its limits, and one endpoint for each view."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import lineate
from lineate.explore.live import learning_view, lessons_view, memory_view, model_view, plan_view
from lineate.explore.live.models import MOST_TOKENS, Models
from lineate.explore.memories import DEMO_RULES
from lineate.figures import kind_named, narrow_label_of
from lineate.layers import kinds
from lineate.models.presets import PRESETS
from lineate.planning import HARDWARE
from lineate.rule import rule_named
from lineate.web.errors import ApiError
from lineate.web.fields import Fields, parse
from lineate.web.gate import Gate, Traffic
from lineate.web.limits import Limits
from lineate.web.metrics import Metrics
from lineate.web.pages import PageFiles
from lineate.web.responses import answer, answer_api_error, answer_http_error, read_body

PAGE = Path(__file__).with_name("page")
"""The files of the page, served at /."""
LIMITS = Limits(body_bytes=64 * 2**10, requests=16)
"""The longest list of steps has a quarter of these bytes."""
REMEDY = "lineate explore --allow-host NAME"
TEXT = "for value in values:\n    total += value"
"""The initial text of a model."""


def make_app(hosts: frozenset[str] = frozenset(), models: Models | None = None) -> FastAPI:
    """Return the application; between requests it keeps only models and their last results.

    Args:
        hosts: Host names that requests may use; any if there are none.
        models: The models of the view "Model"; None: the built-in ones.
    """
    app = make_views(models or Models())
    app.add_middleware(
        Gate, traffic=Traffic(), metrics=Metrics(dict), hosts=hosts, most=LIMITS.requests, remedy=REMEDY
    )  # fmt: skip
    return app


def make_views(models: Models) -> FastAPI:
    """Return the page and its endpoints without a gate, for an application that has its own.

    Args:
        models: The models of the view "Model".
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, title="lineate explore")
    about, files = describe(models), PageFiles(PAGE)

    @app.get("/api/about")
    async def what_there_is() -> Response:
        return answer(about)

    for view, run in VIEWS.items():
        app.add_api_route(f"/api/{view}", _endpoint(run, models), methods=["POST"])

    @app.get("/")
    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    @app.get("/{name}")
    async def file_of_page(request: Request, name: str) -> Response:
        return await files.get_response(name, request.scope)

    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(HTTPException, _http_error)
    return app


View = Callable[[Fields, Models], dict[str, Any]]
VIEWS: dict[str, View] = {
    "memory": lambda body, _: memory_view.run_memory(memory_view.read_request(body)),
    "plan": lambda body, _: plan_view.run_plan(plan_view.read_request(body)),
    "learning": lambda body, _: learning_view.run_learning(learning_view.read_request(body)),
    "lessons": lambda body, _: lessons_view.show_lesson(lessons_view.read_request(body)),
    "lessons/run": lambda body, _: lessons_view.run_lesson(lessons_view.read_request(body)),
    "model": lambda body, models: model_view.run_model(model_view.read_request(body, models, step=False)),
    "model/step": lambda body, models: model_view.run_step(model_view.read_request(body, models, step=True)),
}
"""The function of each endpoint below /api/."""


def _endpoint(run: View, models: Models) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that computes in a thread, so that other requests are answered meanwhile."""

    async def endpoint(request: Request) -> Response:
        body = parse(await read_body(request, LIMITS))
        return answer(await asyncio.to_thread(run, body, models))

    return endpoint


def describe(models: Models) -> dict[str, Any]:
    """Return the choices of the page: rules, mixers, presets, machines, models, and the limits of each field.

    Args:
        models: The models of the view "Model".
    """
    return {
        "version": lineate.__version__,
        "rules": [_rule(name) for name in DEMO_RULES],
        "memory_rules": [_rule(name) for name in memory_view.memory_rules()],
        "mixers": [{"letter": kind.letter, "label": kind.label} for kind in kinds()],
        "presets": list(PRESETS),
        "dtypes": ["float32", "bfloat16", "float16", "fp8", "int8"],
        "hardware": [
            {"name": name, "label": machine.name, "notes": machine.notes} for name, machine in HARDWARE.items()
        ],
        "limits": {
            "steps": memory_view.MOST_STEPS,
            "channels": [memory_view.FEWEST_CHANNELS, memory_view.MOST_CHANNELS],
            "cosine": memory_view.MOST_COSINE,
            "sharpness": memory_view.MOST_SHARPNESS,
            "number": memory_view.LARGEST,
            "context": plan_view.MOST_TOKENS,
            "batch": plan_view.MOST_BATCH,
            "hidden_size": plan_view.MOST_HIDDEN,
            "layers": plan_view.MOST_LAYERS,
            "pattern": plan_view.MOST_PATTERN,
            "devices": plan_view.MOST_DEVICES,
            "tokens": MOST_TOKENS,
            "characters": model_view.MOST_CHARACTERS,
        },
        "models": [{"name": name, "label": label} for name, label in models.names.items()],
        "folders": models.folders,
        "text": TEXT,
        "learning": learning_view.describe(),
        "lessons": lessons_view.describe(),
    }


def _rule(name: str) -> dict[str, Any]:
    """Return the name, colour and gates of a rule for the page."""
    kind, row = kind_named(name), rule_named(name)
    return {
        "name": name, "letter": kind.letter, "label": kind.label, "short": narrow_label_of(name),
        "color": kind.look.color, "corrects": row is not None and row.corrects,
        "decay": "none" if row is None else row.decays[0], "cache": row is None and kind.by_hand is None,
        "note": "" if kind.by_hand is None else kind.by_hand.note,
    }  # fmt: skip


async def _http_error(request: Request, error: Exception) -> Response:
    return answer_http_error(request, error)

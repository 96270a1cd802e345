"""The table of routes, which the server, its replicas under Ray and the front of the replicas read.

    ENDPOINTS      one row for each endpoint: make_app of app.py serves them, in one process and in each replica
    OTHER_PATHS    all other paths, which the front passes on: the mounted explorer, and paths that nothing serves

A new endpoint is a row of ENDPOINTS and the function that answers it (CONTRIBUTING.md, "An endpoint").
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from lineate.serving.api import operating
from lineate.serving.api.chat import chat
from lineate.serving.api.completions import complete
from lineate.serving.api.service import Service
from lineate.serving.api.tokens import detokenize, tokenize
from lineate.serving.replicas import gathered
from lineate.serving.replicas.prompts import CHAT, COMPLETIONS, PromptReader

Answer = Callable[[Service, Request, bytes], Awaitable[Response]]
"""Answers a request: its service, the request, and the body, which is empty unless the row has `body`."""
READ, WRITE = ("GET", "HEAD"), ("POST",)


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Requests that the front passes on to a replica."""

    path: str
    """The path as Starlette writes it: "/v1/models/{name:path}"."""
    methods: tuple[str, ...] = READ
    """The methods that are answered."""
    body: bool = False
    """Whether a request has a JSON body, which is read before the request is answered or passed on."""
    key: bool = True
    """Whether a request needs a key, if the server has keys."""
    prompt: PromptReader | None = None
    """How the front reads the prompt of a body, to choose the replica that knows most of it; None: any replica."""

    def has_body(self, method: str) -> bool:
        """Whether the body of a request with this method is read."""
        return self.body and method in self.methods and method not in READ


@dataclass(frozen=True, kw_only=True)
class Endpoint(Paths):
    """A row of the table."""

    answer: Answer
    """Answers a request."""
    about: str
    """The content of its answers: its line of the table in docs/serving.md."""
    front: gathered.FrontAnswer | None = None
    """Answers in the front, for all replicas; None: the front passes requests on to one replica."""


ENDPOINTS = (
    Endpoint(
        path="/v1/chat/completions", methods=WRITE, answer=chat, body=True, prompt=CHAT,
        about="a conversation, through the model's chat template",
    ),
    Endpoint(
        path="/v1/completions", methods=WRITE, answer=complete, body=True, prompt=COMPLETIONS,
        about="a text, several texts, or ids of tokens",
    ),
    Endpoint(
        path="/tokenize", methods=WRITE, answer=tokenize, body=True,
        about='the ids of `{"prompt": ...}` or `{"messages": ...}`',
    ),
    Endpoint(path="/detokenize", methods=WRITE, answer=detokenize, body=True, about='the text of `{"tokens": ...}`'),
    Endpoint(
        path="/v1/models", answer=operating.models,
        about="the model, and the sampling options of requests that do not name them",
    ),
    Endpoint(path="/v1/models/{name:path}", answer=operating.one_model, about="the same without the list"),
    Endpoint(path="/lineate/info", answer=operating.info, about="the layers and their bytes of state, the limits"),
    Endpoint(
        path="/lineate/stats", answer=operating.stats, front=gathered.stats,
        about="the numbers of the engine and the cache",
    ),
    Endpoint(
        path="/metrics", answer=operating.metrics, front=gathered.metrics,
        about="counts for Prometheus: queue, slots, cache, guesses, times, tokens, requests by status",
    ),
    Endpoint(
        path="/health", answer=operating.health, key=False, front=gathered.health,
        about='200 `{"status": "ok"}`, or 503 while the server shuts down',
    ),
    Endpoint(path="/", answer=operating.page, key=False, about="the chat page"),
    Endpoint(path="/{name}", answer=operating.file_of_page, key=False, about="the files of the chat page"),
)  # fmt: skip
"""The first row that matches a request answers it."""

EXPLORER = "/explore"
"""The path at which the server mounts `lineate explore`, if it serves it."""
OTHER_PATHS = (
    Paths(path=f"{EXPLORER}/api/{{path:path}}", methods=(*READ, *WRITE), body=True),
    Paths(path="/{path:path}"),
)
"""Paths that are no endpoints of the server, in order; a replica answers them."""


def methods_of(endpoints: Sequence[Paths]) -> list[str]:
    """Return the methods of endpoints, in the order in which they occur."""
    return [*dict.fromkeys(method for row in endpoints for method in row.methods)]

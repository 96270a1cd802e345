"""A server with the interface of lineate's whose answers are written down in advance.

The page's tests need a server that refuses, stalls or breaks off exactly when they say so. A script belongs to the text
of the last turn; a turn without a script is echoed. The tokens are words, the cache is every prompt and answer so far,
and the layers are those of a small hybrid model: G is a memory of a fixed size, A a cache.
"""

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed")  # whoever imports this module is skipped
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from lineate.web.pages import PageFiles

PAGE = Path(__file__).parents[2] / "lineate" / "serving" / "page"
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
MEMORY_BYTES = 48 * 1024
CACHE_BYTES_A_TOKEN = 1024


@dataclass
class Script:
    """The event after a turn."""

    pieces: tuple[str, ...] = ("Fine.",)
    """The answer, one piece an event."""
    refusals: list[int] = field(default_factory=list)
    """HTTP statuses that the first requests get instead."""
    cut_after: int | None = None
    """The connection breaks after so many pieces, the first time."""
    end_after: int | None = None
    """The stream ends after so many pieces, as if it were complete, the first time."""
    error_after: int | None = None
    """The stream reports an error after so many pieces, the first time."""
    hold_after: int | None = None
    """The answer waits after so many pieces until the test calls `release`."""
    pause: float = 0.0
    """Seconds before each piece."""
    finish: str = "stop"
    """Why the answer ends."""


class ScriptedServer:
    """Runs in a thread on a free port of this machine; `requests` has the bodies that it got."""

    def __init__(self, key: str | None = None, models: tuple[str, ...] = ("scripted",), pattern: str = "GGGA") -> None:
        self.key, self.models, self.pattern = key, models, pattern
        self.scripts: dict[str, Script] = {}
        self.requests: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        """Texts of the turns whose answer the reader stopped."""
        self._seen: list[list[str]] = []
        self._go = threading.Event()
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.get("/v1/models")(self._models)
        app.get("/lineate/info")(self._info)
        app.post("/v1/chat/completions")(self._complete)
        app.mount("/", PageFiles(PAGE, html=True))
        self._server = uvicorn.Server(uvicorn.Config(self._guarded(app), port=0, log_level="critical", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> "ScriptedServer":
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)

    def forget(self) -> None:
        """Forget the scripts, the requests and the cache, and have four layers again."""
        self.pattern = "GGGA"
        self.release()
        self._go = threading.Event()
        for kept in (self.scripts, self.requests, self.cancelled, self._seen):
            kept.clear()

    def release(self) -> None:
        """Let the answers that wait go on."""
        self._go.set()

    def _guarded(self, app: FastAPI) -> Any:
        """Return the app with a check of the key and the policy in the headers of every response."""

        async def guard(scope: Any, receive: Any, send: Any) -> None:
            async def send_with_policy(message: Any) -> None:
                if message["type"] == "http.response.start":
                    message["headers"].append((b"content-security-policy", POLICY.encode()))
                await send(message)

            given = dict(scope["headers"]).get(b"authorization", b"").decode()
            if scope["path"].startswith(("/v1/", "/lineate/")) and self.key and given != f"Bearer {self.key}":
                await _error(401, "the Authorization header has no valid key")(scope, receive, send)
            else:
                await app(scope, receive, send_with_policy)

        return guard

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0} for name in self.models]}

    async def _info(self) -> dict[str, Any]:
        fixed = {
            "letter": "G",
            "kind": "gated_delta_net",
            "label": "Gated DeltaNet",
            "fixed": MEMORY_BYTES,
            "per_token": 0,
        }
        cache = {"letter": "A", "kind": "attention", "label": "softmax", "fixed": 0, "per_token": CACHE_BYTES_A_TOKEN}
        return {"layers": [cache if letter == "A" else fixed for letter in self.pattern]}

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        text = body["messages"][-1]["content"]
        script = self.scripts.get(text, Script(pieces=tuple(re.findall(r"\S+\s*", f"You said: {text}"))))
        if script.refusals:
            status = script.refusals.pop(0)
            return _error(status, f"refused with {status}", {"Retry-After": "7"} if status in (429, 503) else {})
        assert body["stream"] and body["stream_options"]["include_usage"]
        return StreamingResponse(self._stream(body, text, script), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any], text: str, script: Script) -> AsyncIterator[str]:
        prompt = [word for message in body["messages"] for word in (message["role"], *message["content"].split())]
        begun = time.monotonic()
        yield _event(body, {"role": "assistant", "content": ""})
        for number, piece in enumerate([*script.pieces, None]):
            if number == script.hold_after:
                await self._hold(text)
            if number == script.cut_after:
                script.cut_after = None
                raise ConnectionError("the script breaks off here")
            if number == script.end_after:
                script.end_after = None
                return
            if number == script.error_after:
                script.error_after = None
                yield f"data: {json.dumps({'error': {'message': 'out of memory', 'code': 500}})}\n\n"
                return
            await asyncio.sleep(script.pause)
            if piece is not None:
                yield _event(body, {"content": piece})
        yield _event(body, {}, script.finish)
        yield _event(body, None, None, *self._counts(prompt, script.pieces, time.monotonic() - begun))
        yield "data: [DONE]\n\n"

    async def _hold(self, text: str) -> None:
        go = self._go
        try:
            while not go.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled.append(text)
            raise

    def _counts(
        self, prompt: list[str], pieces: tuple[str, ...], seconds: float
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return OpenAI's usage and what lineate adds to it."""
        cached = max((_common(prompt, seen) for seen in self._seen), default=0)
        cached = min(cached, len(prompt) - 1)
        self._seen.append([*prompt, "assistant", *"".join(pieces).split()])
        tokens = len(prompt) + len(pieces)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(pieces),
            "total_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        own = {
            "cached_tokens": cached,
            "read_tokens": len(prompt) - cached,
            "tokens_per_second": len(pieces) / max(seconds, 1e-3),
            "state_bytes": [tokens * CACHE_BYTES_A_TOKEN if x == "A" else MEMORY_BYTES for x in self.pattern],
            "stopped_by": None,
        }
        return usage, own


def _common(a: list[str], b: list[str]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "type": "error", "code": status}}, status, headers=headers)


def _event(body: dict[str, Any], delta: Any, finish: str | None = None, usage: Any = None, own: Any = None) -> str:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    chunk = {
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": body.get("model"),
        "choices": choices, "usage": usage,
    }  # fmt: skip
    return f"data: {json.dumps(chunk | ({} if own is None else {'lineate': own}))}\n\n"

"""/v1/completions: a text, or several, and its continuations."""

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lineate.serving.api.fields import parse
from lineate.serving.api.responses import GONE, EventStream, answer, read_body, unless_gone
from lineate.serving.api.running import Running, TextLogprobs
from lineate.serving.api.schemas import CompletionCall, read_completion
from lineate.serving.api.service import Service, with_seed
from lineate.serving.requests import TokenLogprob


async def complete(service: Service, request: Request) -> Response:
    """Answer a request to /v1/completions."""
    call = read_completion(parse(await read_body(request, service.limits)), service.server)
    wanted = call.wanted
    prompts = await service.work(lambda: [service.text_prompt(prompt, wanted) for prompt in call.prompts])
    requests = [
        service.request(prompt, with_seed(wanted, n * wanted.n), None, "prompt") for n, prompt in enumerate(prompts)
    ]
    running = Running(service, requests, wanted.stops, False, "prompt")
    answering = _Answer(service, call, running)
    if wanted.stream:
        return EventStream(answering.chunks(), service.limits, answering.close)
    try:
        body = await unless_gone(request.receive, answering.whole())
    finally:
        answering.close()
    return Response(status_code=GONE) if body is None else answer(body)


class _Answer:
    """The answer to one body, whole or in chunks."""

    def __init__(self, service: Service, call: CompletionCall, running: Running) -> None:
        self._service, self._call, self._running = service, call, running
        description = service.description
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": description.name,
            "system_fingerprint": description.fingerprint,
        }
        self._count = len(call.prompts) * call.wanted.n
        self._lists = [TextLogprobs(service.tokenizer, len(self._echo(n))) for n in range(self._count)]
        self._closed = False

    def close(self) -> None:
        """Free what still runs, and count the tokens once."""
        if not self._closed:
            self._closed = True
            self._running.close()
            self._service.metrics.generated(self._running.counts.usage(), self._own())

    def _own(self) -> dict[str, Any]:
        counts = self._running.counts
        return counts.own(self._service.description.state_bytes(counts.longest))

    def _echo(self, choice: int) -> str:
        """Return the text that a choice begins with."""
        if not self._call.echo:
            return ""
        prompt = self._call.prompts[choice // self._call.wanted.n]
        return prompt if isinstance(prompt, str) else self._service.tokenizer.decode(prompt)

    def _choice(self, number: int, text: str, entries: tuple[TokenLogprob, ...], finish: str | None) -> dict[str, Any]:
        logprobs = None
        if self._call.wanted.logprobs is not None:
            logprobs = self._lists[number].lists(entries)
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish}

    async def whole(self) -> dict[str, Any]:
        """Return the answer when all choices have ended."""
        texts = [self._echo(n) for n in range(self._count)]
        entries: list[tuple[TokenLogprob, ...]] = [()] * len(texts)
        finishes: list[str | None] = [None] * len(texts)
        async for piece in self._running.pieces():
            if piece is not None:
                texts[piece.choice] += piece.text
                entries[piece.choice] += piece.logprobs
                finishes[piece.choice] = piece.finish
        choices = [self._choice(n, texts[n], entries[n], finishes[n]) for n in range(len(texts))]
        return {**self._head, "choices": choices, "usage": self._running.counts.usage(), "lineate": self._own()}

    async def chunks(self) -> AsyncIterator[dict[str, Any] | None]:
        """Yield chunks as text arrives."""
        usage: dict[str, Any] = {"usage": None} if self._call.wanted.usage_chunk else {}
        for n in range(self._count):
            if text := self._echo(n):
                yield {**self._head, "choices": [self._choice(n, text, (), None)], **usage}
        async for piece in self._running.pieces(self._service.limits.heartbeat_seconds):
            if piece is None:
                yield None
                continue
            choice = self._choice(piece.choice, piece.text, piece.logprobs, piece.finish)
            yield {**self._head, "choices": [choice], **usage}
        if usage:
            yield {**self._head, "choices": [], "usage": self._running.counts.usage(), "lineate": self._own()}

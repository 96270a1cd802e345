"""/v1/completions: a text, or several, and its continuations."""

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lineate.serving.api.answering import Answering
from lineate.serving.api.fields import parse
from lineate.serving.api.responses import read_body
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
    return await _Answer(service, call, running).respond(request, wanted.stream)


class _Answer(Answering):
    """The answer to one body, whole or in chunks."""

    def __init__(self, service: Service, call: CompletionCall, running: Running) -> None:
        super().__init__(service, running, "cmpl", "text_completion")
        self._call = call
        self._count = len(call.prompts) * call.wanted.n
        self._lists = [TextLogprobs(service.tokenizer, len(self._echo(n))) for n in range(self._count)]

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

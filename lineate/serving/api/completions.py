"""/v1/completions: a text, or several, and its continuations."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lineate.serving.api.answering import Answering
from lineate.serving.api.fields import Fields
from lineate.serving.api.responses import read_body
from lineate.serving.api.running import Piece, Running, TextLogprobs
from lineate.serving.api.schemas import CompletionCall, read_completion
from lineate.serving.api.service import Prompt, Service, with_seed


async def complete(service: Service, request: Request) -> Response:
    """Answer a request to /v1/completions."""

    def prepared(fields: Fields) -> tuple[CompletionCall, list[Prompt]]:
        call = read_completion(fields, service.server)
        return call, [service.text_prompt(prompt, call.wanted) for prompt in call.prompts]

    body = await read_body(request, service.limits)
    call, prompts = await service.prepare(body, prepared, service.limits.choices * service.server.most_prompt)
    prompts, wanted = await service.guided(prompts), call.wanted
    requests = [
        service.request(prompt, with_seed(wanted, n * wanted.n), None, "prompt") for n, prompt in enumerate(prompts)
    ]
    running = Running(service, requests, wanted.stops, False, "prompt")
    return await _Answer(service, call, prompts, running).respond(request, wanted.stream, call.ignored)


class _Answer(Answering):
    """The answer to one body, whole or in chunks."""

    def __init__(self, service: Service, call: CompletionCall, prompts: Sequence[Prompt], running: Running) -> None:
        super().__init__(service, running, "cmpl", "text_completion")
        self._call = call
        self._count = len(call.prompts) * call.wanted.n
        self._lists = [
            TextLogprobs(service.tokenizer, prompts[n // call.wanted.n].ids, len(self._echo(n)))
            for n in range(self._count)
        ]

    def _echo(self, choice: int) -> str:
        """Return the text that a choice begins with."""
        if not self._call.wanted.echo:
            return ""
        prompt = self._call.prompts[choice // self._call.wanted.n]
        return prompt if isinstance(prompt, str) else self._service.tokenizer.decode(prompt)

    def _choice(self, number: int, text: str, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self._call.wanted.logprobs is not None:
            logprobs = self._lists[number].lists(piece.prompt, piece.logprobs)
        finish = piece.finish
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish}

    async def whole(self) -> dict[str, Any]:
        """Return the answer when all choices have ended."""
        found: list[list[Piece]] = [[] for _ in range(self._count)]
        async for piece in self._running.pieces():
            if piece is not None:
                found[piece.choice].append(piece)
        made = [self._joined(n, pieces) for n, pieces in enumerate(found)]
        choices = await self._service.work(lambda: [self._choice(*each) for each in made])  # prompts have many tokens
        return {**self._head, "choices": choices, "usage": self._running.counts.usage(), "lineate": self._own()}

    def _joined(self, number: int, pieces: Sequence[Piece]) -> tuple[int, str, Piece]:
        """Return a choice's number, its text, and all of its pieces as one."""
        entries = tuple(entry for piece in pieces for entry in piece.logprobs)
        whole = replace(pieces[-1], prompt=pieces[0].prompt, logprobs=entries)
        return number, self._echo(number) + "".join(piece.text for piece in pieces), whole

    async def chunks(self) -> AsyncIterator[dict[str, Any] | None]:
        """Yield chunks as text arrives."""
        usage: dict[str, Any] = {"usage": None} if self._call.wanted.usage_chunk else {}
        begun = set() if self._call.wanted.echo else set(range(self._count))
        async for piece in self._running.pieces(self._service.limits.heartbeat_seconds):
            if piece is None:
                yield None
                continue
            text = piece.text if piece.choice in begun else self._echo(piece.choice) + piece.text
            begun.add(piece.choice)
            choice = self._choice(piece.choice, text, piece)
            yield {**self._head, "choices": [choice], **usage}
        if usage:
            yield {**self._head, "choices": [], "usage": self._running.counts.usage(), "lineate": self._own()}

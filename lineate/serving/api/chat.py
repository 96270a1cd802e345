"""/v1/chat/completions: a conversation, and the assistant's next message."""

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lineate.serving.api.answering import Answering
from lineate.serving.api.calls import Called
from lineate.serving.api.running import Piece, Running, chat_logprobs
from lineate.serving.api.schemas import ChatCall, read_chat
from lineate.serving.api.service import Prompt, Service
from lineate.serving.api.tools import AnswerParser, Said
from lineate.web.fields import Fields
from lineate.web.responses import Chunk, Comment


async def chat(service: Service, request: Request, body: bytes) -> Response:
    """Answer a request to /v1/chat/completions."""

    def prepared(fields: Fields) -> tuple[ChatCall, Prompt]:
        call = read_chat(fields, service.server)
        return call, service.chat_prompt(call)

    call, prompt = await service.prepare(body, prepared)
    (prompt,) = await service.guided([prompt])
    wanted = service.request(prompt, call.wanted, service.limits.default_new_tokens, "messages")
    stops = (*call.wanted.stops, *service.chat_stops)
    running = Running(service, [wanted], stops, bool(call.tools or prompt.reasoning), "messages")
    return await _Answer(service, call, running, prompt.reasoning).respond(request, call.wanted.stream, call.ignored)


class _Answer(Answering):
    """The answer to one body, whole or in chunks."""

    def __init__(self, service: Service, call: ChatCall, running: Running, reasoning: str) -> None:
        kind = "chat.completion.chunk" if call.wanted.stream else "chat.completion"
        super().__init__(service, running, "chatcmpl", kind)
        self._call = call
        # The plain template ends with "Assistant:", so the space after it belongs to the template, not to the answer.
        trim = service.tokenizer.chat is None
        self._parsers = [AnswerParser(call.tools, reasoning, trim) for _ in range(call.wanted.n)]

    def _parts(self, piece: Piece) -> tuple[list[Said | Called], str | None]:
        """Return the contents of a piece, and why the choice ends, if it does."""
        parser = self._parsers[piece.choice]
        parts, finish = parser.push(piece.text), piece.finish
        if finish is not None:
            parts += parser.finish(cut=finish != "stop")
        if not self._call.parallel and parser.calls:
            last = next((n for n, part in enumerate(parts) if isinstance(part, Called)), len(parts) - 1)
            parts, finish = parts[: last + 1], "stop"
            self._running.stop(piece.choice)
        if finish == "stop" and parser.calls:
            finish = "tool_calls"
        return parts, finish

    def _logprobs(self, piece: Piece) -> list[dict[str, Any]] | None:
        if self._call.wanted.logprobs is None:
            return None
        tokenizer = self._service.tokenizer
        return chat_logprobs(tokenizer, piece.logprobs)

    async def whole(self) -> dict[str, Any]:
        """Return the answer when all choices have ended."""
        choices = [_Message() for _ in self._parsers]
        async for piece in self._running.pieces():
            if isinstance(piece, Piece):
                parts, finish = self._parts(piece)
                choices[piece.choice].add(parts, self._logprobs(piece), finish)
        listed = [choice.value(n) for n, choice in enumerate(choices)]
        return {**self._head, "choices": listed, "usage": self._running.counts.usage(), "lineate": self._own()}

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Yield chunks as text arrives; a call is yielded when it is complete."""
        usage: dict[str, Any] = {"usage": None} if self._call.wanted.usage_chunk else {}
        called = [0] * len(self._parsers)
        for n in range(len(self._parsers)):
            yield {**self._head, "choices": [_delta(n, {"role": "assistant", "content": ""})], **usage}
        async for piece in self._running.pieces(self._service.limits):
            if isinstance(piece, Comment):
                yield piece
                continue
            n = piece.choice
            parts, finish = self._parts(piece)
            logprobs = self._logprobs(piece)
            if logprobs and not parts:
                parts = [Said("")]
            for part in parts:
                if isinstance(part, Called):
                    for delta in _call_deltas(part, called[n]):
                        yield {**self._head, "choices": [_delta(n, delta, logprobs)], **usage}
                        logprobs = None
                    called[n] += 1
                else:
                    delta = {"reasoning_content" if part.reasoning else "content": part.text}
                    yield {**self._head, "choices": [_delta(n, delta, logprobs)], **usage}
                logprobs = None
            if finish is not None:
                yield {**self._head, "choices": [_delta(n, {}, None, finish)], **usage}
        if usage:
            yield {**self._head, "choices": [], "usage": self._running.counts.usage(), "lineate": self._own()}


class _Message:
    """The message of one choice, assembled from pieces."""

    def __init__(self) -> None:
        self._texts: dict[bool, str] = {False: "", True: ""}
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] | None = None
        self._finish: str | None = None

    def add(self, parts: list[Said | Called], logprobs: list[dict[str, Any]] | None, finish: str | None) -> None:
        """Add a piece."""
        for part in parts:
            if isinstance(part, Called):
                function = {"name": part.name, "arguments": part.arguments}
                self._calls.append({"id": part.id, "type": "function", "function": function})
            else:
                self._texts[part.reasoning] += part.text
        if logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *logprobs]
        self._finish = finish or self._finish

    def value(self, index: int) -> dict[str, Any]:
        """Return the choice."""
        content = self._texts[False]
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self._calls else "")}
        message["refusal"] = None
        if self._texts[True]:
            message["reasoning_content"] = self._texts[True]
        if self._calls:
            message["tool_calls"] = self._calls
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self._finish}


def _delta(
    index: int, delta: dict[str, Any], logprobs: list[dict[str, Any]] | None = None, finish: str | None = None
) -> dict[str, Any]:
    found = None if logprobs is None else {"content": logprobs, "refusal": None}
    return {"index": index, "delta": delta, "logprobs": found, "finish_reason": finish}


def _call_deltas(call: Called, index: int) -> list[dict[str, Any]]:
    """Return the chunks of a call: its name, then its arguments."""
    first = {"index": index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
    return [
        {"tool_calls": [first]},
        {"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]},
    ]

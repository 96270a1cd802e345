"""From the engine's events to pieces of text: characters that are complete, stop strings, log-probabilities."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lineate.serving.api.errors import ApiError, internal, invalid, unavailable
from lineate.serving.api.guides import NOT_FOLLOWED
from lineate.serving.api.service import Service
from lineate.serving.api.tools import MARKERS
from lineate.serving.requests import Event, Handle, Request, TokenLogprob
from lineate.text.base import Tokenizer
from lineate.text.stream import Detokenizer, StopStrings

LOG = logging.getLogger("lineate.serving")
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks; OpenAI's number."""


@dataclass(frozen=True)
class Piece:
    """What one choice has gained."""

    choice: int
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    """ "stop" or "length", if the choice has ended."""


@dataclass
class Counts:
    """What all choices of a request took."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    longest: int = 0
    """Tokens of the longest choice, its prompt included."""
    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    """When the first token came."""
    last: float | None = None
    stopped_by: str | None = None
    """ "time" or "shutdown", if that ended a choice early."""

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def own(self, state_bytes: list[int]) -> dict[str, Any]:
        """Return what lineate adds to it."""
        last = self.last or self.began
        first = self.first or last
        seconds = last - first
        return {
            "cached_tokens": self.cached,
            "read_tokens": self.prompt - self.cached,
            "first_token_seconds": round(first - self.began, 6),
            "seconds": round(last - self.began, 6),
            "tokens_per_second": round((self.completion - 1) / seconds, 3) if seconds > 0 else None,
            "state_bytes": state_bytes,
            "stopped_by": self.stopped_by,
        }


class _Choice:
    """The text of one choice so far."""

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str], markers: dict[int, str]) -> None:
        self._text = Detokenizer(tokenizer, after=ids)
        self._stops = StopStrings(stops)
        self._markers = markers
        self.tokens = 0
        self.cached: int | None = None
        self.done = False

    def take(self, event: Event, stop_tokens: frozenset[int]) -> tuple[str, int, bool]:
        """Return the text that can be shown, how many tokens count, and whether a stop string was met."""
        shown, met, counted = "", None, 0
        for n, token in enumerate(event.tokens, 1):
            counted = n
            if event.finished == "stop" and n == len(event.tokens) and token in stop_tokens:
                break
            text, met = self._stops.push(self._text.push(token) + self._markers.get(token, ""))
            shown += text
            if met is not None:
                break
        if met is None and event.finished is not None:
            text, met = self._stops.push(self._text.finish())
            shown += text if met is not None else text + self._stops.finish()
        self.tokens += counted
        return shown, counted, met is not None


class Running:
    """The requests of one body in the engine; choice i of prompt p is number p * n + i.

    Args:
        service: The model that is served.
        requests: One request for each prompt, all with the same n.
        stops: Strings that end a choice.
        show_markers: Whether tokens for calls and reasoning are shown, which may be special ones.
        param: The field that an error about the length names.
    """

    def __init__(
        self, service: Service, requests: Sequence[Request], stops: Sequence[str], show_markers: bool, param: str
    ) -> None:
        if len(requests) > (most := service.engine.queue):  # waiting would not help
            raise invalid(param, f"{param} must have at most {most} prompts, got {len(requests)}", "invalid_value")
        self._service, self._requests = service, requests
        self.n = requests[0].n
        markers = _hidden_markers(service.tokenizer) if show_markers else {}
        self._choices = [_Choice(service.tokenizer, x.ids, stops, markers) for x in requests for _ in range(x.n)]
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.counts = Counts(prompt=sum(len(x.ids) for x in requests))
        self._handles: list[Handle] = []
        try:
            for n, request in enumerate(requests):
                self._handles.append(service.submit(request, self._listener(n), param))
        except BaseException:
            self.close()
            raise

    @property
    def unfinished(self) -> int:
        """How many choices have not ended."""
        return sum(not choice.done for choice in self._choices)

    def close(self) -> None:
        """Cancel what still runs; the engine frees its slots before the next step."""
        for n, handle in enumerate(self._handles):
            if not all(choice.done for choice in self._choices[n * self.n : (n + 1) * self.n]):
                handle.cancel()
        self._finish_counts()

    def stop(self, choice: int) -> None:
        """End a choice whose text is complete, as a stop token would."""
        if not self._choices[choice].done:
            self._choices[choice].done = True
            self._handles[choice // self.n].stop(choice % self.n)

    async def pieces(self, heartbeat: float | None = None) -> AsyncIterator[Piece | None]:
        """Yield pieces until all choices have ended; None after so many seconds of silence."""
        while self.unfinished:
            try:
                async with asyncio.timeout(heartbeat):
                    n, event = await self._events.get()
            except TimeoutError:
                yield None
                continue
            piece = self._piece(n, event)
            if piece is not None:
                yield piece
        self._finish_counts()

    def _piece(self, n: int, event: Event) -> Piece | None:
        number = n * self.n + event.index
        choice, handle = self._choices[number], self._handles[n]
        if choice.done:
            return None
        if event.finished == "error":
            LOG.error("request %d failed: %s", handle.number, event.error)
            choice.done = True
            if NOT_FOLLOWED in (event.error or ""):
                raise invalid("response_format", f"the schema is too complex: {NOT_FOLLOWED} further", "invalid_schema")
            raise internal(str(handle.number))
        if event.tokens:
            self.counts.last = time.monotonic()
            self.counts.first = self.counts.first or self.counts.last
        if choice.cached is None and (event.tokens or event.finished):
            choice.cached = event.cached_tokens
        shown, counted, met = choice.take(event, self._requests[n].stop_tokens)
        finish = "stop" if met else event.finished
        if met and event.finished is None:
            handle.stop(event.index)
        if finish in ("cancelled", "timeout"):
            if not choice.tokens:
                choice.done = True
                raise _unanswered(finish)
            self.counts.stopped_by = "time" if finish == "timeout" else "shutdown"
            finish = "length"
        choice.done = finish is not None
        if not shown and finish is None and not event.logprobs:
            return None
        return Piece(number, shown, event.logprobs[:counted], finish)

    def _finish_counts(self) -> None:
        """Sum what the choices took; the prompt of several choices is read once."""
        counts = self.counts
        counts.completion = sum(choice.tokens for choice in self._choices)
        counts.cached = sum(self._choices[n * self.n].cached or 0 for n in range(len(self._requests)))
        counts.longest = max(
            len(request.ids) + choice.tokens
            for n, request in enumerate(self._requests)
            for choice in self._choices[n * self.n : (n + 1) * self.n]
        )

    def _listener(self, n: int) -> Any:
        """Return a function that brings events from the engine's thread into this loop."""

        def bring(event: Event) -> None:
            try:
                self._loop.call_soon_threadsafe(self._events.put_nowait, (n, event))
            except RuntimeError:  # the loop has ended: nobody waits for the event
                LOG.debug("an event came after the server had ended")

        return bring


def _unanswered(finish: str) -> ApiError:
    """Return the error of a request that ended before its first token."""
    if finish == "timeout":
        return unavailable("the request waited longer than the server's time limit", "timeout")
    return unavailable("the server is shutting down", "shutting_down")


def _hidden_markers(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the texts of markers that are special tokens, which a Detokenizer does not show."""
    found = {}
    for text in MARKERS:
        ids = tokenizer.encode_rendered(text)
        if len(ids) == 1 and not tokenizer.token_bytes(ids[0]):
            found[ids[0]] = text
    return found


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob], ends: frozenset[int]) -> list[dict[str, Any]]:
    """Return log-probabilities as /v1/chat/completions lists them."""
    return [
        {
            **_entry(tokenizer, x.token, x.logprob),
            "top_logprobs": [_entry(tokenizer, token, logprob) for token, logprob in x.top],
        }
        for x in entries
        if x.token not in ends
    ]


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    found = tokenizer.shown_bytes(token, True)
    return {"token": found.decode("utf-8", "replace"), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(found)}


class TextLogprobs:
    """Lists log-probabilities as /v1/completions does, with the place of each token in the text.

    Args:
        tokenizer: Says what tokens look like.
        start: Characters of the text before the first token.
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0) -> None:
        self._tokenizer, self._offset = tokenizer, start
        self._text = Detokenizer(tokenizer)

    def lists(self, entries: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        """Return the lists for the next tokens; those that end the text are left out."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for x in entries:
            if x.token in self._tokenizer.ends:
                continue
            lists["tokens"].append(self._name(x.token))
            lists["token_logprobs"].append(max(x.logprob, LEAST_LOGPROB))
            lists["top_logprobs"].append({self._name(i): max(logprob, LEAST_LOGPROB) for i, logprob in x.top})
            lists["text_offset"].append(self._offset)
            self._offset += len(self._text.push(x.token))
        return lists

    def _name(self, token: int) -> str:
        """Return the text of a token; one that is part of a character is written as its bytes."""
        found = self._tokenizer.shown_bytes(token, True)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

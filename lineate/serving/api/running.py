"""Converts the engine's events to pieces of text: complete characters, stop strings, log-probabilities."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lineate.serving.api.guides import NOT_FOLLOWED
from lineate.serving.api.service import Service
from lineate.serving.api.tools import MARKERS
from lineate.serving.engine.requests import Event, Handle, Request, TokenLogprob
from lineate.text.base import Tokenizer
from lineate.text.stream import Detokenizer, StopStrings
from lineate.web.errors import ApiError, internal, invalid, shutting_down, unavailable
from lineate.web.limits import Limits
from lineate.web.responses import Comment

LOG = logging.getLogger("lineate.serving")
STILL = Comment("still working")
"""Keeps proxies from closing a stream without output."""
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks; OpenAI's number."""
EARLIER = 0.001
"""Seconds by which later parts of a request time out earlier, so that none begins after the first has ended."""


@dataclass(frozen=True)
class Piece:
    """New output of one choice."""

    choice: int
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt: tuple[TokenLogprob, ...] | None = None
    """The log-probabilities of the prompt's tokens after the first, in the first piece, if they were requested."""
    finish: str | None = None
    """ "stop", "length" or "shutdown", if the choice has ended."""


@dataclass
class Counts:
    """The tokens and times of all choices of a request."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    longest: int = 0
    """Tokens of the longest choice, its prompt included."""
    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    """The time of the first token."""
    last: float | None = None
    stopped_by: str | None = None
    """ "time" or "shutdown", if one of these ended a choice early."""

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def own(self, state_bytes: list[int]) -> dict[str, Any]:
        """Return the fields that lineate adds to it."""
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
        service: The served model.
        requests: One request for each prompt, all with the same n. If that is above the engine's slots, the choices
            beyond wait as requests of their own, which read the prompt again unless its state is kept.
        stops: Strings that end a choice.
        show_markers: Whether tokens for calls and reasoning are shown, which may be special ones.
        param: The field that an error about the length names.
    """

    def __init__(
        self, service: Service, requests: Sequence[Request], stops: Sequence[str], show_markers: bool, param: str
    ) -> None:
        parts = [part for n, request in enumerate(requests) for part in _parts(request, n, service.engine.slots)]
        if len(parts) > (most := service.engine.queue):  # waiting would not help
            message = f"{param} and n must need at most {most} places in the queue, got {len(parts)}"
            raise invalid(param, message, "invalid_value")
        self._service, self._parts, self.n = service, parts, requests[0].n
        markers = _hidden_markers(service.tokenizer) if show_markers else {}
        self._choices = [_Choice(service.tokenizer, x.ids, stops, markers) for x in requests for _ in range(x.n)]
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.counts = Counts(prompt=sum(len(x.ids) for x in requests))
        self._handles: list[Handle] = []
        self._cut: list[tuple[int, str]] = []  # choices that ended without a token, and the reason
        try:
            began = time.monotonic()
            for n, (_, request) in enumerate(parts):
                if n and request.timeout is not None:  # no part may begin after the time limit of the first one
                    left = request.timeout - (time.monotonic() - began) - EARLIER
                    request = replace(request, timeout=max(left, EARLIER))
                self._handles.append(service.submit(request, self._listener(n), param))
        except BaseException:
            self.close()
            raise

    @property
    def unfinished(self) -> int:
        """How many choices have not ended."""
        return sum(not choice.done for choice in self._choices)

    def close(self) -> None:
        """Cancel the choices that still run; the engine frees their slots before the next step."""
        for (first, request), handle in zip(self._parts, self._handles, strict=False):
            if not all(choice.done for choice in self._choices[first : first + request.n]):
                handle.cancel()
        self._finish_counts()

    def stop(self, choice: int) -> None:
        """End a choice whose text is complete, as a stop token would."""
        if not self._choices[choice].done:
            self._choices[choice].done = True
            part = next(n for n, (first, x) in enumerate(self._parts) if choice < first + x.n)
            self._handles[part].stop(choice - self._parts[part][0])

    async def pieces(self, limits: Limits | None = None) -> AsyncIterator[Piece | Comment]:
        """Yield pieces until all choices have ended, and comments after the limits' seconds without output.

        Choices that ended before their first token, by the time limit or a shutdown, come last with an empty text.
        ApiError is raised if there are no others.

        Args:
            limits: After how long there are comments; None: there are none.
        """
        period, silence = None, 0.0
        while self.unfinished:
            if limits is not None:
                period = min(limits.progress_seconds, limits.heartbeat_seconds - silence)
            try:
                async with asyncio.timeout(period):
                    n, event = await self._events.get()
            except TimeoutError:
                assert limits is not None and period is not None
                silence += period
                comment = self._progress() or (STILL if silence >= limits.heartbeat_seconds else None)
                if comment is not None:
                    silence = 0.0
                    yield comment
                continue
            silence = 0.0
            piece = self._piece(n, event)
            if piece is not None:
                yield piece
        self._finish_counts()
        if len(self._cut) == len(self._choices):
            raise _unanswered(self._cut[0][1])
        for number, finish in self._cut:
            yield Piece(number, finish=self._reason(finish))

    def _progress(self) -> Comment | None:
        """Return how far the prompts are read; None if none is being read."""
        found = [handle.progress for handle in self._handles if handle.progress.reads]
        if not found:
            return None
        return Comment(f"reading {sum(x.tokens for x in found)} of {sum(x.total for x in found)} tokens")

    def _reason(self, finish: str) -> str:
        """Record why a choice was ended early, and return its finish_reason for clients."""
        if finish == "shutdown":
            self.counts.stopped_by = "shutdown"
            return "shutdown"
        self.counts.stopped_by = self.counts.stopped_by or "time"
        return "length"

    def _piece(self, n: int, event: Event) -> Piece | None:
        first, request = self._parts[n]
        number = first + event.index
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
        shown, counted, met = choice.take(event, request.stop_tokens)
        finish = "stop" if met else event.finished
        if met and event.finished is None:
            handle.stop(event.index)
        if finish in ("shutdown", "timeout"):
            if not choice.tokens:
                choice.done = True
                self._cut.append((number, finish))
                return None
            finish = self._reason(finish)
        choice.done = finish is not None
        if not shown and finish is None and not event.logprobs and event.prompt is None:
            return None
        return Piece(number, shown, event.logprobs[:counted], event.prompt, finish)

    def _finish_counts(self) -> None:
        """Sum the usage of the choices; the prompt of several choices counts once."""
        counts = self.counts
        counts.completion = sum(choice.tokens for choice in self._choices)
        counts.cached = sum(choice.cached or 0 for choice in self._choices[:: self.n])
        counts.longest = max(
            len(request.ids) + choice.tokens
            for first, request in self._parts
            for choice in self._choices[first : first + request.n]
        )

    def _listener(self, n: int) -> Any:
        """Return a function that passes events from the engine's thread to this event loop."""

        def bring(event: Event) -> None:
            try:
                self._loop.call_soon_threadsafe(self._events.put_nowait, (n, event))
            except RuntimeError:  # the loop has ended: no task waits for the event
                LOG.debug("an event came after the server had ended")

        return bring


def _parts(request: Request, number: int, slots: int) -> list[tuple[int, Request]]:
    """Divide prompt `number` into requests that the engine can run; return each with its first choice."""
    found = []
    for first in range(0, request.n, slots):
        seed = (request.sampling.seed + first) % 2**64
        sampling = replace(request.sampling, seed=seed) if first else request.sampling
        part = replace(request, n=min(slots, request.n - first), sampling=sampling)
        found.append((number * request.n + first, part))
    return found


def _unanswered(finish: str) -> ApiError:
    """Return the error of a request that ended before its first token."""
    if finish == "timeout":
        return unavailable("the request waited longer than the server's time limit", "timeout")
    return shutting_down("the server is shutting down")


def _hidden_markers(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the texts of markers that are special tokens, which a Detokenizer does not show."""
    found = {}
    for text in MARKERS:
        ids = tokenizer.encode_rendered(text)
        if len(ids) == 1 and not tokenizer.token_bytes(ids[0]):
            found[ids[0]] = text
    return found


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return log-probabilities as /v1/chat/completions lists them."""
    return [
        {
            **_entry(tokenizer, x.token, x.logprob),
            "top_logprobs": [_entry(tokenizer, token, logprob) for token, logprob in x.top],
        }
        for x in entries
    ]


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    found = tokenizer.shown_bytes(token, True)
    return {"token": found.decode("utf-8", "replace"), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(found)}


class TextLogprobs:
    """Lists log-probabilities as /v1/completions does, with the offset of each token in the text.

    Args:
        tokenizer: Provides the texts of tokens.
        prompt: The tokens of the prompt that the text continues; none if the text begins with the prompt's own tokens.
        start: Characters of the text before the first new token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), start: int = 0) -> None:
        self._tokenizer, self._offset = tokenizer, start
        self._text = Detokenizer(tokenizer, after=prompt)

    def prompt_lists(self, ids: Sequence[int], prompt: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        """Return the lists for the tokens of a prompt, the first of which has no log-probability."""
        return self._lists(zip(ids, (None, *prompt), strict=True))

    def lists(self, entries: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        """Return the lists for the next tokens."""
        return self._lists((x.token, x) for x in entries)

    def _lists(self, entries: Iterable[tuple[int, TokenLogprob | None]]) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, x in entries:
            self._add(lists, token, x, self._offset)
            self._offset += len(self._text.push(token))
        return lists

    def _add(self, lists: dict[str, list[Any]], token: int, x: TokenLogprob | None, offset: int) -> None:
        lists["tokens"].append(self._name(token))
        lists["token_logprobs"].append(None if x is None else max(x.logprob, LEAST_LOGPROB))
        top: dict[str, float] = {}
        for i, logprob in () if x is None else x.top:
            top.setdefault(self._name(i), max(logprob, LEAST_LOGPROB))  # of tokens with the same text, the likeliest
        lists["top_logprobs"].append(None if x is None else top)
        lists["text_offset"].append(offset)

    def _name(self, token: int) -> str:
        """Return the text of a token; one that is part of a character is written as its bytes."""
        found = self._tokenizer.shown_bytes(token, True)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

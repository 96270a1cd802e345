"""The part that the endpoints share: engine, tokenizer, template, limits, and the encoding of prompts."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from lineate.generation.choice import Sampling
from lineate.serving.api.bodies import check_values
from lineate.serving.api.guides import Grammars, Guide
from lineate.serving.api.lanes import Lanes
from lineate.serving.api.schemas import ChatCall, Server, Wanted
from lineate.serving.api.tools import THINK, THOUGHT, calls_grammar, form_of
from lineate.serving.engine.requests import EngineStopped, Event, Handle, QueueFull, Request, TooLong
from lineate.text.base import Tokenizer
from lineate.text.bounded import TooManyTokens
from lineate.text.chat import DEFAULT_STOPS, ChatError
from lineate.web.errors import ApiError, invalid, queue_full, too_long, unavailable
from lineate.web.fields import Fields, parse
from lineate.web.intake import Intake
from lineate.web.limits import Limits
from lineate.web.metrics import Metrics

Made = TypeVar("Made")


class Engine(Protocol):
    """The part of an engine's interface that the server needs."""

    @property
    def slots(self) -> int: ...

    @property
    def queue(self) -> int: ...

    @property
    def stats(self) -> Any: ...

    @property
    def cache(self) -> Any: ...

    def stop(self, drain: bool = True, timeout: float | None = None) -> None:
        """End all requests."""
        ...

    def submit(self, request: Request, listener: Callable[[Event], None] | None = None) -> Handle:
        """Queue a request; raise QueueFull, TooLong or EngineStopped."""
        ...


@dataclass(frozen=True)
class Description:
    """The public description of the model."""

    name: str
    """The name that requests use."""
    context: int
    """The most tokens of a prompt and its continuation."""
    slots: int
    """The most concurrent choices."""
    created: int
    """When the server started, in seconds since 1970."""
    fingerprint: str
    """A fingerprint of the model, its tokenizer and lineate's version."""
    layers: tuple[dict[str, Any], ...] = ()
    """For each layer its kind, its label, and the bytes of its state: `fixed`, and `per_token`."""
    details: tuple[tuple[str, Any], ...] = ()
    """More facts for /lineate/info."""
    sampling: Sampling = field(default_factory=Sampling)
    """The default sampling options of requests."""

    def state_bytes(self, tokens: int) -> list[int]:
        """Return the bytes of each layer's state after a number of tokens."""
        return [layer["fixed"] + tokens * layer["per_token"] for layer in self.layers]


@dataclass(frozen=True)
class Prompt:
    """A prompt that is ready to be submitted."""

    ids: tuple[int, ...]
    guide: Guide | None = None
    reasoning: str = ""
    """ "open", "maybe" or ""; see AnswerParser."""
    grammar: tuple[str, str] | None = None
    """The grammar of the answer, and the field that names it; `guided` makes the guide."""


class Service:
    """The served model, and the conversion of bodies to requests of its engine.

    Args:
        engine: Generates tokens.
        tokenizer: The model's tokenizer.
        description: The public description of the model.
        limits: The limits of requests.
        metrics: Counts.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, description: Description, limits: Limits, metrics: Metrics
    ) -> None:
        self.engine, self.tokenizer, self.description = engine, tokenizer, description
        self.limits, self.metrics = limits, metrics
        most = description.context - 1  # leave room for one more token
        most = most if limits.prompt_tokens is None else min(most, limits.prompt_tokens)
        self.server = Server(description.name, tokenizer.vocab_size, most, limits, description.sampling)
        self.chat_stops = DEFAULT_STOPS if tokenizer.chat is None else ()
        self.grammars = Grammars(tokenizer, limits.grammar_bytes)
        source = "" if tokenizer.chat is None else tokenizer.chat.source + (tokenizer.chat.tool_source or "")
        self._form = form_of(source)
        self._thinks = THOUGHT in source
        self._lanes, self.intake = Lanes(), Intake()

    def close(self) -> None:
        """Let the threads end."""
        self._lanes.close()

    async def prepare(self, body: bytes, made: Callable[[Fields], Made], ids: int = 0) -> Made:
        """Read a body and make a prompt of it in a thread; long bodies do not delay short ones.

        Args:
            body: The body.
            made: Takes its fields.
            ids: The most ids that it may have, besides other values.
        """

        def prepared() -> Made:
            check_values(body, self.limits.values + ids)
            return made(parse(body))

        return await self._lanes.prepare(prepared, len(body))

    async def write(self, made: Callable[[], Made], entries: int) -> Made:
        """Write an answer with a given number of log-probabilities in a thread; long ones do not delay short ones."""
        return await self._lanes.write(made, entries)

    async def guided(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return prompts with guides for their grammars, which are compiled in a separate thread."""
        wanted = [prompt.grammar for prompt in prompts if prompt.grammar is not None]
        if not wanted:
            return [*prompts]

        def made() -> list[Prompt]:
            return [x if x.grammar is None else replace(x, guide=self.grammars.guide(*x.grammar)) for x in prompts]

        known = all(self.grammars.has(grammar) for grammar, _ in wanted)
        return await (self._lanes.prepare(made, 0) if known else self._lanes.compile(made))

    def text_prompt(self, prompt: str | tuple[int, ...], wanted: Wanted, starts: bool = True) -> Prompt:
        """Return the prompt of /v1/completions; ids are used unchanged.

        Args:
            prompt: A text, or ids.
            wanted: The options of the body.
            starts: Whether the tokenizer's start tokens are put before a text.
        """
        if isinstance(prompt, str):
            start = self.tokenizer.start if starts else ()
            most = max(0, self.server.most_prompt - len(start))
            try:
                prompt = (*start, *self.tokenizer.encode_within(prompt, most))
            except TooManyTokens as error:
                raise self._too_long("prompt", len(start) + error.least, error.exact) from None
        self._check_length(prompt, "prompt")
        return Prompt(prompt, grammar=self._format_grammar(wanted, ""))

    def chat_prompt(self, call: ChatCall) -> Prompt:
        """Return the prompt of /v1/chat/completions, with a guide if the answer must be JSON or a call."""
        try:
            ids = self.chat_ids(call.messages, call.tools, call.options, self.server.most_prompt)
        except TooManyTokens as error:
            raise self._too_long("messages", error.least, error.exact) from None
        self._check_length(ids, "messages")
        ending = self.tokenizer.decode(ids[-8:], keep_special=True).rstrip()
        reasoning = "" if not self._thinks else "open" if ending.endswith(THINK) else "maybe"
        grammar = self._format_grammar(call.wanted, reasoning)
        if call.named or call.tool_choice == "required":
            own = [x for x in call.tools if not call.named or x["function"]["name"] == call.tool_choice]
            self.grammars.check_size(json.dumps(own), "tools")
            made = calls_grammar(self._form, own, call.parallel, self._encode_marker)
            grammar = self._grammar(made, "tools", reasoning)
        return Prompt(ids, None, reasoning, grammar)

    def chat_ids(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], options: dict[str, Any], most: int
    ) -> tuple[int, ...]:
        """Return at most `most` ids of a chat, in which only the template makes control tokens; or TooManyTokens."""
        try:
            return tuple(self.tokenizer.encode_chat(messages, tools or None, most_tokens=most, **options))
        except ChatError as error:
            where = None if self.tokenizer.chat is None else self.tokenizer.chat.where
            message = str(error) if where is None else str(error).replace(where, "the chat template")
            raise invalid("messages", message, "invalid_chat") from None

    def request(self, prompt: Prompt, wanted: Wanted, default: int | None, param: str) -> Request:
        """Return the request for the engine.

        Args:
            prompt: The prompt.
            wanted: The options of the body.
            default: The most tokens if the body does not name a limit; fewer if the context has less room.
            param: The field that an error about the length names.
        """
        room = self.description.context - len(prompt.ids)
        most = wanted.max_new_tokens
        if most is None:
            most = min(x for x in (default, self.limits.new_tokens, room) if x is not None)
        elif most > room:
            asked = f"{len(prompt.ids)} tokens of {param} and {wanted.length_param} = {most}"
            context = self.description.context
            raise too_long(f"the context has room for {context} tokens, got {asked}", wanted.length_param)
        ends = frozenset() if wanted.ignore_end else self.tokenizer.ends
        return Request(
            ids=prompt.ids,
            sampling=wanted.sampling,
            max_new_tokens=most,
            stop_tokens=ends | frozenset(wanted.stop_tokens),
            n=wanted.n,
            logprobs=wanted.logprobs,
            prompt_logprobs=wanted.logprobs if wanted.echo else None,
            guide=prompt.guide,
            timeout=self.limits.seconds,
        )

    def submit(self, request: Request, listener: Callable[[Event], None], param: str) -> Handle:
        """Submit a request to the engine; raise ApiError if the engine refuses it."""
        try:
            return self.engine.submit(request, listener)
        except QueueFull as error:
            raise queue_full(max(1, math.ceil(error.retry_after))) from None
        except TooLong as error:
            raise too_long(str(error), param) from None
        except EngineStopped:
            raise unavailable("the server is stopping", "stopping") from None

    def _check_length(self, ids: Sequence[int], param: str) -> None:
        """Raise if there is nothing to read, or no room for one more token."""
        if not ids:
            raise invalid(param, f"{param} must have at least one token, got none", "invalid_value")
        if len(ids) > self.server.most_prompt:
            raise self._too_long(param, len(ids), True)

    def _too_long(self, param: str, tokens: int, exact: bool) -> ApiError:
        got = f"{'' if exact else 'at least '}{tokens}"
        return too_long(f"{param} must have at most {self.server.most_prompt} tokens, got {got}", param)

    def _format_grammar(self, wanted: Wanted, reasoning: str) -> tuple[str, str] | None:
        if wanted.format is None:
            return None
        return self._grammar(self.grammars.json(wanted.format), wanted.format.param, reasoning)

    def _grammar(self, grammar: str, param: str, reasoning: str) -> tuple[str, str]:
        return self.grammars.after_reasoning(grammar) if reasoning == "open" else grammar, param

    def _encode_marker(self, text: str) -> list[int]:
        return self.tokenizer.encode_rendered(text)


def with_seed(wanted: Wanted, shift: int) -> Wanted:
    """Return the options for another prompt of the same request, with a seed of its own."""
    seed = (wanted.sampling.seed + shift) % 2**64
    return replace(wanted, sampling=replace(wanted.sampling, seed=seed)) if shift else wanted

"""/v1/completions: a text, or several, and its continuations."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lineate.serving.api.answering import Answering
from lineate.serving.api.running import Piece, Running, TextLogprobs
from lineate.serving.api.schemas import CompletionCall, read_completion
from lineate.serving.api.service import Prompt, Service, with_seed
from lineate.serving.engine.requests import TokenLogprob
from lineate.text.base import Tokenizer
from lineate.web.errors import invalid
from lineate.web.fields import Fields
from lineate.web.json_text import dump, dump_characters, dump_items
from lineate.web.responses import Chunk, Comment


async def complete(service: Service, request: Request, body: bytes) -> Response:
    """Answer a request to /v1/completions."""

    def prepared(fields: Fields) -> tuple[CompletionCall, list[Prompt], list[str]]:
        call = read_completion(fields, service.server)
        prompts = [service.text_prompt(prompt, call.wanted, call.starts) for prompt in call.prompts]
        _check_echo(call, prompts, service.limits.echoed_logprobs)
        texts = call.prompts if call.wanted.echo else ()
        return call, prompts, [x if isinstance(x, str) else service.tokenizer.decode(x) for x in texts]

    most_ids = service.limits.choices * service.server.most_prompt
    call, prompts, echoes = await service.prepare(body, prepared, most_ids)
    prompts, wanted = await service.guided(prompts), call.wanted
    requests = [
        service.request(prompt, with_seed(wanted, n * wanted.n), None, "prompt") for n, prompt in enumerate(prompts)
    ]
    running = Running(service, requests, wanted.stops, False, "prompt")
    begins = [_Begin(service.tokenizer, x.ids, echoes[n] if echoes else "") for n, x in enumerate(prompts)]
    return await _Answer(service, call, begins, running).respond(request, wanted.stream, call.ignored)


def _check_echo(call: CompletionCall, prompts: Sequence[Prompt], most: int) -> None:
    """Refuse a request that would list the log-probabilities of very many tokens of prompts."""
    tokens, n = sum(len(prompt.ids) for prompt in prompts), call.wanted.n
    if call.wanted.echo and call.wanted.logprobs is not None and tokens * n > most:
        message = f"with echo and logprobs, tokens of prompt times n must be at most {most}, got {tokens} x {n}"
        remedy = "send fewer prompts, a smaller n, or no echo"
        raise invalid("prompt" if n == 1 else "n", f"{message}; {remedy}", "invalid_value")


class _Begin:
    """The beginning that all choices of a prompt share, as JSON that is written once.

    Args:
        tokenizer: Provides the texts of tokens.
        ids: The tokens of the prompt.
        echo: The text that choices begin with.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int], echo: str) -> None:
        self.ids, self.echo = ids, echo
        self._tokenizer = tokenizer
        self._text: str | None = None
        self._lists: dict[str, str] | None = None

    def text(self) -> str:
        """Return the characters of the echoed text as JSON."""
        if self._text is None:
            self._text = dump_characters(self.echo)
        return self._text

    def lists(self, prompt: Sequence[TokenLogprob] | None) -> dict[str, str]:
        """Return the items of the prompt's lists as JSON; none until a choice has its log-probabilities."""
        if self._lists is None and prompt is not None:
            lists = TextLogprobs(self._tokenizer).prompt_lists(self.ids, prompt)
            self._lists = {name: dump_items(values) for name, values in lists.items()}
        return self._lists or {}


class _Answer(Answering):
    """The answer to one body, whole or in chunks."""

    def __init__(self, service: Service, call: CompletionCall, begins: Sequence[_Begin], running: Running) -> None:
        super().__init__(service, running, "cmpl", "text_completion")
        self._call, self._begins = call, begins
        self._count = len(begins) * call.wanted.n
        found = [begins[n // call.wanted.n] for n in range(self._count)]
        self._lists = [TextLogprobs(service.tokenizer, begin.ids, len(begin.echo)) for begin in found]

    def _choice(self, pieces: Sequence[Piece], first: bool) -> str:
        """Return the pieces of one choice as JSON; the first ones begin with the prompt, if it is echoed."""
        number, logprobs = pieces[0].choice, "null"
        begin = self._begins[number // self._call.wanted.n]
        if self._call.wanted.logprobs is not None:
            before = begin.lists(pieces[0].prompt) if first else {}
            own = self._lists[number].lists([entry for piece in pieces for entry in piece.logprobs])
            parts = {name: filter(None, (before.get(name), dump_items(values))) for name, values in own.items()}
            logprobs = "{" + ",".join(f'"{name}":[{",".join(part)}]' for name, part in parts.items()) + "}"
        text = (begin.text() if first else "") + dump_characters("".join(piece.text for piece in pieces))
        finish = dump(pieces[-1].finish)
        return f'{{"index":{number},"text":"{text}","logprobs":{logprobs},"finish_reason":{finish}}}'

    def _body(self, choices: Sequence[str], more: dict[str, Any]) -> bytes:
        """Return choices in JSON as a body, with more fields."""
        rest = "," + dump(more)[1:] if more else "}"
        return f'{dump(self._head)[:-1]},"choices":[{",".join(choices)}]{rest}'.encode()

    def _entries(self, begins: Sequence[_Begin]) -> int:
        """Return how many tokens of prompts are echoed."""
        return sum(len(begin.ids) for begin in begins) if self._call.wanted.echo else 0

    async def whole(self) -> bytes:
        """Return the answer when all choices have ended."""
        found: list[list[Piece]] = [[] for _ in range(self._count)]
        async for piece in self._running.pieces():
            if isinstance(piece, Piece):
                found[piece.choice].append(piece)
        counts = self._running.counts
        more = {"usage": counts.usage(), "lineate": self._own()}
        entries = self._entries(self._begins) * self._call.wanted.n
        entries += 0 if self._call.wanted.logprobs is None else counts.completion
        return await self._service.write(lambda: self._body([self._choice(x, True) for x in found], more), entries)

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Yield chunks as text arrives."""
        usage: dict[str, Any] = {"usage": None} if self._call.wanted.usage_chunk else {}
        begun = set() if self._call.wanted.echo else set(range(self._count))
        async for piece in self._running.pieces(self._service.limits):
            if isinstance(piece, Comment):
                yield piece
            elif piece.choice in begun:
                yield self._body([self._choice([piece], False)], usage)
            else:
                begun.add(piece.choice)
                yield await self._first(piece, usage)
        if usage:
            yield {**self._head, "choices": [], "usage": self._running.counts.usage(), "lineate": self._own()}

    async def _first(self, piece: Piece, usage: dict[str, Any]) -> bytes:
        """Return the chunk that has the echoed prompt."""
        entries = self._entries([self._begins[piece.choice // self._call.wanted.n]])
        return await self._service.write(lambda: self._body([self._choice([piece], True)], usage), entries)

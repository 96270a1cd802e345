"""Grammars that constrain the generated text: JSON, JSON of a schema, tool calls.

llguidance says for each step which tokens the grammar allows; the engine chooses among those.
"""

import json
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lineate.serving.api.schemas import JsonFormat
from lineate.web.errors import ApiError, invalid

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NOT_FOLLOWED = "the grammar cannot be followed"
"""The beginning of the message of a guide that fails while tokens are generated."""
KEPT = 64
"""Compiled grammars that are kept."""
MOST_OPTIONAL = 500
"""Optional properties of one object: llguidance can follow no more, and compiling takes the square of their number."""
JSON_OPTIONS = {"whitespace_pattern": r"[ \n]{0,16}"}
"""White space between the parts of JSON is bounded, so that a model cannot write white space for ever."""


class TextTokens(Protocol):
    """The part of a tokenizer's interface that a guide needs."""

    vocab_size: int

    @property
    def ends(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_rendered(self, text: str) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...


class Guide:
    """A state of a grammar: the tokens allowed next; the engine advances it by each generated token.

    Args:
        matcher: The grammar and how far it has been followed.
        grammar: Its text, from which other ranks make the same guide.
    """

    def __init__(self, matcher: "LLMatcher", grammar: str) -> None:
        self._matcher, self.grammar = matcher, grammar

    def allowed(self, vocab: int) -> Tensor:
        """Return a mask of the allowed next tokens, `vocab` bool, with end tokens only where the grammar may end.

        Args:
            vocab: The size of the model's vocabulary, at least the tokenizer's; tokens beyond that are not allowed.
        """
        found = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) != 0
        self._check()
        return torch.nn.functional.pad(found, (0, vocab - len(found)))

    def advance(self, token: int) -> None:
        """Follow a token, which must be one of those allowed."""
        self._matcher.consume_token(token)
        self._check()

    def rollback(self, tokens: int) -> None:
        """Take back the last tokens.

        Args:
            tokens: Their number.
        """
        self._matcher.rollback(tokens)
        self._check()

    def copy(self) -> "Guide":
        """Return an independent copy of the guide in the same state."""
        return Guide(self._matcher.deep_copy(), self.grammar)

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing can follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"{NOT_FOLLOWED}: {_reason(self._matcher)}")


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the latest; safe to use from several threads.

    Args:
        tokenizer: The tokenizer of the model.
        most_bytes: Bytes of a grammar's text.
    """

    def __init__(self, tokenizer: TextTokens, most_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._most_bytes = most_bytes
        self._made: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def json(self, wanted: JsonFormat) -> str:
        """Return the grammar of a `response_format`."""
        from llguidance import LLMatcher

        schema = {"type": "object"} if wanted.schema is None else wanted.schema
        schema = {key: value for key, value in schema.items() if key != "x-guidance"}  # options are the server's
        text = json.dumps(schema)
        self.check_size(text, wanted.param)
        _check_properties(schema, wanted.param)
        return LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)  # type: ignore[arg-type]

    def check_size(self, text: str, param: str) -> None:
        """Raise ApiError if schemas, or a grammar, are too long to be compiled.

        Args:
            text: The schemas or the grammar.
            param: The field that an error names.
        """
        if len(text) > self._most_bytes:
            raise invalid(param, f"{param} must have at most {self._most_bytes} bytes, got {len(text)}")

    def has(self, grammar: str) -> bool:
        """Whether a grammar is in the cache, so that its guide is available at once."""
        with self._lock:
            return grammar in self._kept

    def after_reasoning(self, grammar: str) -> str:
        """Return a grammar that allows any text up to </think>, and then what the given one allows."""
        inner = json.loads(grammar) if grammar.startswith("{") else {"grammars": [{"lark_grammar": grammar}]}
        first = inner["grammars"][0] | {"name": "answer"}
        outer = 'start: thoughts /\\n{0,2}/ @answer\nthoughts[suffix="</think>"]: /(?s:.*)/\n'
        return json.dumps({"grammars": [{"lark_grammar": outer}, first, *inner["grammars"][1:]]})

    def guide(self, grammar: str, param: str) -> Guide:
        """Compile a grammar; raise ApiError if that is impossible.

        Args:
            grammar: The grammar.
            param: The field that an error names.
        """
        from llguidance import LLMatcher

        self.check_size(grammar, param)
        with self._lock:
            if (matcher := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return Guide(matcher.deep_copy(), grammar)
            if self._made is None:
                self._made = _make(self._tokenizer)
        matcher = LLMatcher(self._made, grammar, log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_logit_bias()  # some impossible or too large grammars are only detected here
        if matcher.is_error():
            message = f"{param} must be a JSON schema that can be followed: {_reason(matcher)}"
            raise invalid(param, message, "invalid_schema")
        with self._lock:
            self._kept[grammar] = matcher
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return Guide(matcher.deep_copy(), grammar)


def _check_properties(schema: Any, param: str) -> None:
    """Refuse objects with more optional properties than a grammar can offer, before it takes seconds to compile."""
    ahead = [schema]
    while ahead:
        value = ahead.pop()
        ahead += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        properties = value.get("properties") if isinstance(value, dict) else None
        if not isinstance(properties, dict) or len(properties) <= MOST_OPTIONAL:
            continue
        required = value.get("required")
        named = {x for x in required if isinstance(x, str)} if isinstance(required, list) else ()
        optional = sum(name not in named for name in properties)
        if optional > MOST_OPTIONAL:
            most = f"at most {MOST_OPTIONAL} properties that are not required in one object"
            raise invalid(param, f"{param} must be a schema with {most}, got {optional}", "invalid_schema")


def _reason(matcher: "LLMatcher") -> str:
    """Return why a grammar failed, on one line."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:200]


def _limits() -> Any:
    """Return bounds on the work of compiling and following; a schema beyond them is refused."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, max_grammar_size=200_000, max_lexer_states=100_000)


def _make(tokenizer: TextTokens) -> "LLTokenizer":
    """Return llguidance's view of a tokenizer: the bytes of every token, and which tokens are not text."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if not tokenizer.ends:
        message = "response_format and tool_choice need a model with an end token, which this one lacks"
        raise ApiError(400, message, param="response_format", code="unsupported_value")
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    special = [i for i, text in enumerate(tokens) if not text or i in tokenizer.ends]
    for i in special:
        tokens[i] = f"<|{i}|>".encode()
    return LLTokenizer(
        TokenizerWrapper(_Encoder(tokenizer, tokens, special)),
        n_vocab=tokenizer.vocab_size,
        eos_token=sorted(tokenizer.ends),
    )


class _Encoder:
    """The attributes that llguidance's TokenizerWrapper reads."""

    bos_token_id = None

    def __init__(self, tokenizer: TextTokens, tokens: list[bytes], special: list[int]) -> None:
        self.tokens, self.special_token_ids = tokens, special
        self.eos_token_id = min(tokenizer.ends)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("text must be a string")  # the wrapper checks once whether bytes are accepted
        return self._tokenizer.encode(text)

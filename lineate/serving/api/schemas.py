"""The bodies of requests as frozen values; every range is checked here, before anything is computed."""

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

from lineate.generation.choice import Sampling
from lineate.serving.api.foreign import accept_foreign
from lineate.serving.api.messages import read_messages, read_tools
from lineate.web.errors import ApiError, invalid, too_long
from lineate.web.fields import Fields, shown
from lineate.web.limits import Limits

MOST_TOP_LOGPROBS = 20
MOST_TOP_LOGPROBS_OF_COMPLETIONS = 5
DEFAULT_COMPLETION_TOKENS = 16
"""The default number of tokens of /v1/completions, which is OpenAI's."""
MOST_TEMPLATE_VALUES = 1000
"""Values in chat_template_kwargs, including those within lists and objects."""
MOST_TEMPLATE_BYTES = 64 * 2**10
"""Bytes of chat_template_kwargs as JSON."""


@dataclass(frozen=True)
class Server:
    """The settings of the server that the reading of a body needs."""

    model: str
    """The name of the served model."""
    vocab_size: int
    """The upper bound (exclusive) of token ids."""
    most_prompt: int
    """Tokens of a prompt."""
    limits: Limits = field(default_factory=Limits)
    """The limits of a request."""
    sampling: Sampling = field(default_factory=Sampling)
    """The default options of a request."""


@dataclass(frozen=True)
class JsonFormat:
    """A `response_format`: any JSON object, or JSON that a schema describes."""

    schema: dict[str, Any] | None = None
    """The schema; None for any object."""
    param: str = "response_format"
    """The field that an error about the schema names."""


@dataclass(frozen=True)
class Wanted:
    """The fields that both endpoints share."""

    sampling: Sampling
    """How tokens are chosen; the seed is the given one, or a random one."""
    max_new_tokens: int | None
    """The most tokens of a choice; None: the default of chats, or all that fit in completions."""
    length_param: str
    """The field that set it."""
    stops: tuple[str, ...]
    """Strings that end the text, which does not contain them."""
    stop_tokens: tuple[int, ...]
    """Tokens that end the text, besides those of the tokenizer."""
    ignore_end: bool
    """Whether the tokenizer's end tokens do not end the text."""
    n: int
    """Choices of one prompt."""
    logprobs: int | None
    """How many of the likeliest tokens are listed with each token; None: no log-probabilities."""
    echo: bool
    """Whether the text begins with the prompt, whose tokens then have log-probabilities, too."""
    stream: bool
    """Whether the answer is sent as server-sent events."""
    usage_chunk: bool
    """Whether a stream ends with a chunk that counts tokens."""
    format: JsonFormat | None
    """The required format of the text."""


@dataclass(frozen=True)
class CompletionCall:
    """The body of /v1/completions."""

    wanted: Wanted
    prompts: tuple[str | tuple[int, ...], ...]
    """Texts, or ids of tokens."""
    starts: bool = True
    """Whether the ids of a text begin with the tokenizer's start tokens."""
    ignored: tuple[str, ...] = ()
    """Fields of other servers that had no effect."""


@dataclass(frozen=True)
class ChatCall:
    """The body of /v1/chat/completions."""

    wanted: Wanted
    messages: tuple[dict[str, Any], ...]
    """The messages in the form of chat templates."""
    tools: tuple[dict[str, Any], ...]
    """Functions that the model may call; empty: none."""
    tool_choice: str
    """ "auto", "required" (some tool), or the only name that must be called."""
    named: bool
    """Whether tool_choice is a name."""
    parallel: bool
    """Whether one answer may have several calls."""
    options: dict[str, Any]
    """Variables for the template, such as enable_thinking."""
    ignored: tuple[str, ...] = ()
    """Fields of other servers that had no effect."""


def read_completion(fields: Fields, server: Server) -> CompletionCall:
    """Read the body of /v1/completions; raise ApiError if it is wrong."""
    limits = server.limits
    prompts = _prompts(fields, server)
    echo = fields.flag("echo")
    logprobs = fields.whole("logprobs", 0, MOST_TOP_LOGPROBS_OF_COMPLETIONS)
    max_tokens = _most_tokens(fields, ("max_tokens", "n_predict"), limits, least=0)
    fields.refuse(("suffix",), "the model only continues a text")
    if max_tokens is None and fields.value.get("n_predict") != -1:
        max_tokens = DEFAULT_COMPLETION_TOKENS, "max_tokens"
    wanted = _wanted(fields, server, max_tokens, logprobs, echo)
    best = fields.whole("best_of", 1, 128)
    if best is not None and best != wanted.n:
        raise invalid("best_of", f"best_of must be n = {wanted.n} or left out, got {best}", "unsupported_value")
    _check_choices(len(prompts), wanted.n, limits)
    starts = fields.flag("add_special_tokens", True)
    ignored = accept_foreign(fields)
    fields.finish()
    return CompletionCall(wanted, prompts, starts, ignored)


def read_chat(fields: Fields, server: Server) -> ChatCall:
    """Read the body of /v1/chat/completions; raise ApiError if it is wrong."""
    limits = server.limits
    messages = read_messages(fields, limits)
    tools = read_tools(fields, limits)
    choice, named = _tool_choice(fields, tools)
    parallel = fields.flag("parallel_tool_calls", True)
    top = fields.whole("top_logprobs", 0, MOST_TOP_LOGPROBS)
    logprobs: int | None = None
    if fields.flag("logprobs"):
        logprobs = top or 0
    elif top is not None:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true", "invalid_value")
    wanted = _wanted(
        fields, server, _most_tokens(fields, ("max_completion_tokens", "max_tokens", "n_predict"), limits), logprobs
    )
    if wanted.format is not None and choice not in ("none", "auto"):
        raise invalid("tool_choice", "tool_choice must be 'auto' or 'none' with response_format, as both constrain it")
    options = _template_options(fields)
    modalities = fields.take("modalities")
    if modalities not in (None, ["text"]):
        raise fields.wrong("modalities", '["text"], the only one that the model writes')
    fields.refuse(("audio", "web_search_options"), "the model reads and writes text")
    fields.refuse(("functions", "function_call"), "they are deprecated; use tools and tool_choice")
    ignored = accept_foreign(fields)
    fields.finish()
    tools = () if choice == "none" else tools
    return ChatCall(wanted, messages, tools, choice, named, parallel, options, ignored)


def _wanted(
    fields: Fields, server: Server, most: tuple[int, str] | None, logprobs: int | None, echo: bool = False
) -> Wanted:
    """Read the fields that both endpoints share."""
    check_model(fields, server)
    stream = fields.flag("stream")
    options = fields.child("stream_options")
    usage = False
    if options is not None:
        if not stream:
            raise invalid("stream_options", "stream_options is only for stream: true", "invalid_value")
        usage = options.flag("include_usage")
        options.ignore("include_obfuscation", "continuous_usage_stats")
        options.finish()
    return Wanted(
        sampling=_sampling(fields, server),
        max_new_tokens=None if most is None else most[0],
        length_param="max_tokens" if most is None else most[1],
        stops=_stops(fields, server.limits),
        stop_tokens=_stop_tokens(fields, server),
        ignore_end=fields.flag("ignore_eos"),
        n=fields.whole("n", 1, server.limits.choices) or 1,
        logprobs=logprobs,
        echo=echo,
        stream=stream,
        usage_chunk=usage,
        format=_format(fields),
    )


def check_model(fields: Fields, server: Server) -> None:
    """Raise ApiError if the body names another model; without a name it means the served one."""
    name = fields.text("model")
    if name is not None and name != server.model:
        message = f"model must be {server.model!r}, the one that is served here, got {shown(name)}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _sampling(fields: Fields, server: Server) -> Sampling:
    seed, own = fields.whole("seed", -(2**63), 2**64 - 1), server.sampling
    top_k = fields.whole("top_k", -1, 2**31 - 1)
    return Sampling(
        temperature=fields.number("temperature", own.temperature, 0, 2),
        top_p=max(fields.number("top_p", own.top_p, 0, 1), 1e-6),  # 0 is the likeliest token alone
        top_k=own.top_k if top_k is None else max(top_k, 0),  # -1 means all tokens, as in other servers
        min_p=fields.number("min_p", own.min_p, 0, 1),
        repetition_penalty=fields.number("repetition_penalty", own.repetition_penalty, 0.01, 100),
        presence_penalty=fields.number("presence_penalty", own.presence_penalty, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", own.frequency_penalty, -2, 2),
        logit_bias=_biases(fields, server),
        seed=secrets.randbits(63) if seed is None else seed,
    )


def _biases(fields: Fields, server: Server) -> tuple[tuple[int, float], ...]:
    given = fields.child("logit_bias")
    if given is None:
        return ()
    if len(given.value) > server.limits.biases:
        raise invalid("logit_bias", f"logit_bias must have at most {server.limits.biases} entries", "invalid_value")
    found: dict[int, float] = {}
    for key in given.value:
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < server.vocab_size):
            raise invalid("logit_bias", f"logit_bias must have ids below {server.vocab_size} as keys, got {shown(key)}")
        found[int(key)] = given.number(key, 0.0, -100, 100)
    return tuple(sorted(found.items()))


def _most_tokens(fields: Fields, names: tuple[str, ...], limits: Limits, least: int = 1) -> tuple[int, str] | None:
    """Return the most tokens to generate and the field that says so; the first of the names wins."""
    if fields.value.get("n_predict") == -1:  # llama.cpp's value for as many as fit
        fields.ignore("n_predict")
        names = tuple(name for name in names if name != "n_predict")
    found = [(value, name) for name in names if (value := fields.whole(name, least, 2**31 - 1)) is not None]
    if not found:
        return None
    value, name = found[0]
    if limits.new_tokens is not None and value > limits.new_tokens:
        raise fields.wrong(name, f"at most {limits.new_tokens}, the limit of this server")
    return value, name


def _stops(fields: Fields, limits: Limits) -> tuple[str, ...]:
    given = fields.take("stop")
    if given is None:
        return ()
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list) or not all(isinstance(x, str) for x in given):
        raise fields.wrong("stop", "a string or a list of strings")
    if len(given) > limits.stops:
        raise invalid("stop", f"stop must have at most {limits.stops} strings, got {len(given)}", "invalid_value")
    if any(not 1 <= len(x) <= limits.stop_characters for x in given):
        raise invalid(
            "stop", f"each string of stop must have 1 to {limits.stop_characters} characters", "invalid_value"
        )
    return tuple(given)


def _stop_tokens(fields: Fields, server: Server) -> tuple[int, ...]:
    given = fields.items("stop_token_ids", server.limits.stops)
    for token in given or ():
        if not is_token(token, server.vocab_size):
            raise fields.wrong("stop_token_ids", f"a list of ids below {server.vocab_size}")
    return tuple(given or ())


def _format(fields: Fields) -> JsonFormat | None:
    given = fields.child("response_format")
    if given is None:
        return None
    given.needed("type", "text, json_object or json_schema")
    kind = given.word("type", ("text", "json_object", "json_schema"))
    outer = given.child("json_schema")
    given.finish()
    if kind != "json_schema":
        return None if kind == "text" else JsonFormat()
    if outer is None:
        given.needed("json_schema", "an object with a name and a schema")
        raise AssertionError
    outer.name()
    outer.text("description")
    outer.flag("strict")
    schema = outer.child("schema")
    outer.finish()
    return JsonFormat({} if schema is None else schema.value, "response_format.json_schema.schema")


def _check_choices(prompts: int, n: int, limits: Limits) -> None:
    if prompts * n > limits.choices:
        message = f"prompts times n must be at most {limits.choices}, got {prompts} x {n}"
        raise invalid("prompt", message, "invalid_value")


def _prompts(fields: Fields, server: Server) -> tuple[str | tuple[int, ...], ...]:
    """Read a text, several texts, ids, or several lists of ids."""
    expected = "a string, a list of strings, a list of ids, or a list of lists of ids"
    given = fields.needed("prompt", expected)
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list) or not given:
        raise fields.wrong("prompt", expected)
    if all(isinstance(x, str) for x in given):
        return tuple(given)
    lists = given if all(isinstance(x, list) for x in given) else [given]
    _check_choices(len(lists), 1, server.limits)
    if (longest := max(map(len, lists))) > server.most_prompt:
        raise too_long(f"prompt must have at most {server.most_prompt} tokens, got {longest}", "prompt")
    if not all(lists) or not all(is_token(token, server.vocab_size) for ids in lists for token in ids):
        raise fields.wrong("prompt", f"{expected}, ids being whole numbers below {server.vocab_size}")
    return tuple(map(tuple, lists))


def is_token(value: Any, vocab_size: int) -> bool:
    """Whether a value is the id of a token."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def _tool_choice(fields: Fields, tools: tuple[dict[str, Any], ...]) -> tuple[str, bool]:
    """Return how tools are chosen, and whether that is a name."""
    given = fields.take("tool_choice")
    if given is None:
        return "auto" if tools else "none", False
    expected = "none, auto, required, or an object that names a function"
    if isinstance(given, str):
        if given not in ("none", "auto", "required"):
            raise fields.wrong("tool_choice", expected)
        if given == "required" and not tools:
            raise invalid("tool_choice", "tool_choice 'required' needs tools", "invalid_value")
        return given if tools else "none", False
    outer = fields.child("tool_choice")
    if outer is None or outer.word("type", ("function",)) is None:
        raise fields.wrong("tool_choice", expected)
    function = outer.child("function")
    outer.finish()
    if function is None:
        raise fields.wrong("tool_choice", expected)
    name = function.name()
    function.finish()
    if name not in (tool["function"]["name"] for tool in tools):
        raise invalid("tool_choice", f"tool_choice must name a function of tools, got {shown(name)}", "invalid_value")
    return name, True


def _check_size(options: dict[str, Any]) -> None:
    """Refuse variables that would take a template long to process."""
    param, count, level = "chat_template_kwargs", 0, [options]
    while level:
        value: Any = level.pop()
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        count += len(children)
        if count > MOST_TEMPLATE_VALUES:
            raise invalid(param, f"{param} must have at most {MOST_TEMPLATE_VALUES} values in all", "invalid_value")
        level.extend(children)
    if (size := len(json.dumps(options, ensure_ascii=False).encode())) > MOST_TEMPLATE_BYTES:
        raise invalid(param, f"{param} must have at most {MOST_TEMPLATE_BYTES} bytes, got {size}", "invalid_value")


def _template_options(fields: Fields) -> dict[str, Any]:
    """Return variables for the template; the standard variables of templates cannot be replaced."""
    given = fields.child("chat_template_kwargs")
    options = {} if given is None else dict(given.value)
    _check_size(options)
    for name in ("self", "messages", "tools", "add_generation_prompt", "most_tokens"):
        if name in options:
            raise invalid("chat_template_kwargs", f"chat_template_kwargs must not have {name!r}", "invalid_value")
    effort = fields.word("reasoning_effort", ("none", "minimal", "low", "medium", "high", "xhigh"))
    if effort is not None:
        options = {"reasoning_effort": effort, "enable_thinking": effort not in ("none", "minimal"), **options}
    return options

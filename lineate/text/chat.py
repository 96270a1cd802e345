"""Chat templates, which convert a conversation to the text format of a model's training.

A template is untrusted, so it runs in lineate.text.sandbox, with bounded work.
"""

import importlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lineate.console.extras import not_installed
from lineate.models.files.companions import TEMPLATES
from lineate.models.files.safetensors import CheckpointError, parse_json

CHAT_FILE = "chat_template.jinja"
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content | trim }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""The template for models without one: names and paragraphs, in plain text.

It ends with "Assistant:", so that an answer begins with a space, which is not written twice in the next turn.
"""
DEFAULT_STOPS = ("\n\nUser:", "\n\nSystem:", "\n\nAssistant:")
"""The strings that end an answer with DEFAULT_TEMPLATE."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Field names of a message's reasoning; templates read the first two."""
DEEPEST = 64
"""How deep lists and dictionaries of a message may be nested."""


class ChatError(ValueError):
    """A conversation cannot be rendered; the message says whether the template or the conversation is the reason."""


class ChatTemplate:
    """The chat template of a model.

    Args:
        source: The template, in Jinja.
        variables: Its variables besides the conversation, such as bos_token.
        tool_source: The template for conversations with tools, if there is another one for them.
        where: Its file, for messages.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        tool_source: str | None = None,
        where: str = "the chat template",
    ) -> None:
        self.source, self.variables, self.tool_source, self.where = source, dict(variables or {}), tool_source, where

    def __reduce__(self) -> Any:
        return ChatTemplate, (self.source, self.variables, self.tool_source, self.where)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: The messages, each with a role and its content.
            tools: Descriptions of functions that the model may call, as JSON schemas.
            add_generation_prompt: Whether the text ends with the beginning of the assistant's answer.
            kwargs: More variables of the template, such as enable_thinking.
        """
        if not isinstance(messages, Sequence) or not all(isinstance(x, Mapping) for x in messages):
            raise ChatError(f"messages must be a list of dictionaries, got {type(messages).__name__} of other things")
        values = {
            **self.variables,
            **_plain("variables", kwargs),
            "messages": [_with_reasoning(x) for x in _plain("messages", list(messages))],
            "tools": None if tools is None else _plain("tools", list(tools)),
            "documents": _plain("documents", kwargs.get("documents")),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        return self._run(values, bool(tools) and self.tool_source is not None)

    def check(self) -> None:
        """Raise ChatError if this is not a template."""
        self._sandbox.allow()
        _ = self._compiled

    @cached_property
    def _sandbox(self) -> Any:
        return _sandbox().Environment()

    @cached_property
    def _compiled(self) -> tuple[Any, ...]:
        sources = (self.source, self.source if self.tool_source is None else self.tool_source)
        return tuple(map(self._compile, sources))

    def _compile(self, source: str) -> Any:
        sandbox = _sandbox()
        most = sandbox.LONGEST_SOURCE
        if len(source) > most:
            raise ChatError(f"{self.where}: expected a template of at most {most:,} characters, got {len(source):,}")
        try:
            return self._sandbox.from_string(source)
        except Exception as error:  # a hostile template can make the parser and Python's compiler raise almost anything
            raise ChatError(f"{self.where}: expected a Jinja template, got one that is not ({_words(error)})") from None

    def _run(self, values: dict[str, Any], with_tools: bool) -> str:
        sandbox, template = self._sandbox, self._compiled[with_tools]
        sandbox.allow(values)
        try:
            context = template.new_context(values)
            return str(sandbox.concat(template.root_render_func(context)))
        except Exception as error:  # templates call raise_exception, divide by zero, recurse for ever, ...
            raise ChatError(
                f"{self.where} cannot render these messages: {_words(error)}; change the messages, or the template"
            ) from None


def read_chat(folder: Path, files: Mapping[str, bytes], variables: Mapping[str, Any]) -> ChatTemplate | None:
    """Return the chat template of a folder's files; None if there is none.

    It is in chat_template.jinja, in chat_template.json, or in tokenizer_config.json as a text or a list of named
    templates. Of several, "default" is the template, and "tool_use" that for conversations with tools.

    Args:
        folder: The folder, for messages.
        files: Its files by name.
        variables: The template's variables besides the conversation.
    """
    found: dict[str, str] = {}
    where = folder / CHAT_FILE
    for name in ("tokenizer_config.json", "chat_template.json"):
        if name in files and not found:
            where = folder / name
            found = _named(where, _read_json(where, files[name]).get("chat_template"))
    separate = {"default": CHAT_FILE} | {Path(x).stem: x for x in files if x.startswith(f"{TEMPLATES}/")}
    separate = {name: file for name, file in separate.items() if file in files}
    if separate:  # as in transformers, separate files override the others
        where = folder / separate.get("default", next(iter(separate.values())))
        found = {name: _decode(folder / file, files[file]) for name, file in separate.items()}
    if not found:
        return None
    if "default" not in found:
        raise CheckpointError(
            f"{where}: expected a chat template named 'default', got {', '.join(sorted(found))[:200]}"
        )
    return ChatTemplate(found["default"], variables, found.get("tool_use"), str(where))


def _named(where: Path, value: Any) -> dict[str, str]:
    """Return templates by name, from a text or a list of {"name": ..., "template": ...}."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    listed = value if isinstance(value, list) else [value]
    pairs: list[tuple[Any, Any]] = [
        (x.get("name"), x.get("template")) if isinstance(x, dict) else (None, None) for x in listed
    ]
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise CheckpointError(
            f"{where}: chat_template must be a text or a list of names and templates, got {value!r:.80}"
        )
    return dict(pairs)


def _read_json(where: Path, data: bytes) -> dict[str, Any]:
    try:
        value = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: expected JSON, got a file that is not ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def _decode(where: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: expected a template in UTF-8, got bytes that are not ({error})") from None


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    """Return a copy that has only texts, numbers, lists and dictionaries; raise for anything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth > DEEPEST:
        raise ChatError(f"{name} must be nested at most {DEEPEST} deep, got more")
    if isinstance(value, Mapping):
        return {str(key): _plain(name, x, depth + 1) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, x, depth + 1) for x in value]
    raise ChatError(f"{name} must hold texts, numbers, lists and dictionaries, got a {type(value).__name__}")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose reasoning, if it has some, is there under every name that templates read."""
    found = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or calls itself without end"
    return f"{str(error) or type(error).__name__:.500}"


def _sandbox() -> Any:
    try:
        return importlib.import_module("lineate.text.sandbox")
    except ImportError as error:
        raise ImportError(not_installed("a chat template", "jinja2")) from error

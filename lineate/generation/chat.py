"""A conversation with a model, in which a turn reads only what is new.

The state of the model is kept where the user's turn ends, where the answer begins and where it ends. The next turn
continues from the longest of these that its text begins with: if the chat template renders the conversation as an
extension of what was read, that is everything before the new message. States are values, so taking a turn back, or
going on in two ways, costs nothing.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lineate.generation.choice import Sampling
from lineate.generation.generated import Generation
from lineate.generation.sampling import generate
from lineate.models import HybridLM, ModelState
from lineate.models.fields import show
from lineate.system.folders import why_not_writable_file
from lineate.text import DEFAULT_STOPS, DEFAULT_TEMPLATE, ChatTemplate, Detokenizer, StopStrings, Tokenizer
from lineate.text.shield import Shield

Message = dict[str, Any]
ROLES = ("system", "user", "assistant")
LARGEST_FILE = 16 * 2**20
"""The most bytes of a file that `load` reads."""
LARGEST_COUNT = 2**31 - 1
"""The most that a resumed file may set where tokens are counted."""
DEFAULT = Sampling(temperature=0.8, top_p=0.95)


@dataclass(frozen=True)
class Kept:
    """A text that the model has read, its tokens, and the state after the last of them.

    Args:
        text: The text.
        ids: Its tokens, in the order of reading.
        state: The state after them, of one row.
    """

    text: str
    ids: tuple[int, ...]
    state: ModelState


@dataclass(frozen=True)
class Turn:
    """The numbers of tokens and the times of an answer.

    Args:
        reused: Tokens of the prompt whose state was kept, so that they were not read a second time.
        read: Tokens that were read before the answer.
        made: Tokens of the answer.
        reading: Seconds until the first token of the answer.
        making: Seconds for its other tokens.
    """

    reused: int
    read: int
    made: int
    reading: float
    making: float

    @property
    def rate(self) -> float:
        """Tokens a second after the first."""
        return (self.made - 1) / self.making if self.made > 1 and self.making > 0 else 0.0


@dataclass
class Conversation:
    """Messages, and the states of the model that has read them.

        talk = Conversation(model, tokenizer)
        for text in talk.answer("What is a state?"): print(text, end="")
        other = talk.copy()                                          # goes on in another way, from the same states
        talk.undo()

    Args:
        model: The model.
        tokenizer: Its tokenizer; without a chat template of its own, a plain one is used.
        sampling: How tokens are chosen.
        max_new_tokens: The most tokens of an answer.
        stop: Strings that end an answer.
        messages: The messages so far, each with a role and its content.
    """

    model: HybridLM
    tokenizer: Tokenizer
    sampling: Sampling = DEFAULT
    max_new_tokens: int = 1024
    stop: tuple[str, ...] = ()
    messages: list[Message] = field(default_factory=list)
    turn: Turn | None = field(default=None, init=False)
    """The numbers of tokens and the times of the last answer."""
    _kept: list[Kept] = field(default_factory=list, init=False, repr=False)

    @property
    def template(self) -> ChatTemplate:
        """The chat template of the tokenizer, or the plain one."""
        return self.tokenizer.chat or ChatTemplate(DEFAULT_TEMPLATE)

    @property
    def nbytes(self) -> int:
        """Bytes of all states that are kept."""
        return sum(kept.state.nbytes for kept in self._kept)

    def copy(self) -> "Conversation":
        """Return a conversation that continues from the same messages and states; this one is not changed."""
        other = replace(self, messages=[dict(message) for message in self.messages])
        other._kept = list(self._kept)
        return other

    def system(self, text: str) -> None:
        """Set the system message; an empty text removes it. The whole conversation is read again with the next turn.

        Args:
            text: What the model is told before the conversation.
        """
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def undo(self) -> str | None:
        """Take back the last message of the user and what followed, and return it; None if there is none."""
        asked = [n for n, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            return None
        text = str(self.messages[asked[-1]]["content"])
        del self.messages[asked[-1] :]
        self._forget()
        return text

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self._kept.clear()

    def answer(self, text: str) -> Iterator[str]:
        """Add a message of the user, and yield the model's answer as it is made.

        The answer becomes a message when it ends, also if it is closed before. `turn` then has its numbers of tokens
        and times. If nothing was answered, the user's message is removed.

        Args:
            text: The message.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            yield from self._answer()
        finally:
            if self.messages[-1]["role"] == "user":
                self.messages.pop()

    def save(self, file: Path, overwrite: bool = False) -> None:
        """Write the messages, and how answers are drawn, to a JSON file.

        Args:
            file: The file.
            overwrite: Whether it may replace another file.
        """
        if (why := why_not_writable_file(file)) is not None:
            raise ValueError(f"expected a file that can be written, got '{file}' ({why}); choose another name")
        if file.exists() and not overwrite:
            raise ValueError(f"expected a file that does not exist, got '{file}'; choose another name")
        kept = {
            "messages": self.messages, "sampling": asdict(self.sampling), "max_new_tokens": self.max_new_tokens,
            "stop": list(self.stop),
        }  # fmt: skip
        part = file.with_name(f"{file.name}.part")
        part.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", "utf-8")
        part.replace(file)  # a disk that is full leaves the file that was there

    def load(self, file: Path) -> None:
        """Replace the messages by those of a JSON file; they are read with the next turn.

        Args:
            file: A file that `save` wrote, of at most 16 MiB.
        """
        self._set(_read(file))

    def resume(self, file: Path) -> None:
        """Go on with a saved conversation as if it had not ended: with its messages, and its options where it has them.

        Args:
            file: A file that `save` wrote.
        """
        found = _read(file)
        options = _options(file, found)
        self._set(found)
        self.sampling = options.get("sampling", self.sampling)
        self.max_new_tokens = options.get("max_new_tokens", self.max_new_tokens)
        self.stop = options.get("stop", self.stop)

    def _set(self, found: dict[str, Any]) -> None:
        messages: list[Message] = found["messages"]
        if messages:
            self._rendered(messages)  # raises before anything is replaced
        self.messages = messages
        self._forget()

    def _answer(self) -> Iterator[str]:
        started = time.perf_counter()
        prompt = self._rendered(self.messages, True)
        begun = self._found(prompt)
        ids = self._encoded(prompt, begun)
        if not ids:
            raise ValueError("the conversation must render to at least one token, got none; write a message")
        reused = 0 if begun is None else len(begun.ids)
        before = self._read_user_turn(prompt, ids, begun) or begun
        read, state = (0, None) if before is None else (len(before.ids), before.state)
        made = generate(
            self.model, [ids[read:]], self.max_new_tokens,
            sampling=[self.sampling], stop=self.tokenizer.ends | self.model.end_tokens,
            state=state, earlier=[ids[:read]],
        )  # fmt: skip
        words, stops = Detokenizer(self.tokenizer, after=ids), StopStrings(self._stops)
        shown, pushed, first = "", 0, started
        points: dict[int, ModelState] = {}  # tokens of the answer that were read, and the state after them
        try:
            for piece in self._pieces(made, words):
                if len(made.tokens[0]) == 1:
                    first = time.perf_counter()
                    assert made.state is not None
                    self._kept.append(Kept(prompt, tuple(ids), made.state))
                all_shown = pushed == len(shown)
                pushed += len(piece)
                safe, met = stops.push(piece)
                shown += safe
                if pushed == len(shown):
                    points = {}
                elif all_shown and made.state is not None:  # a stop string may begin in this token
                    points = {len(made.tokens[0]) - 1: made.state}
                yield safe
                if met is not None:
                    return
            shown += (rest := stops.finish())
            yield rest
        finally:
            if tokens := made.tokens[0]:
                now = time.perf_counter()
                self.turn = Turn(reused, len(ids) - reused, len(tokens), first - started, now - first)
                assert made.state is not None
                points[len(tokens) - 1] = made.state
                self._end(prompt, shown)
                for count, state in points.items():
                    self._keep(prompt, ids, tokens[:count], state)

    def _pieces(self, made: Generation, words: Detokenizer) -> Iterator[str]:
        """Yield the text of each token, which may be empty, and of what was held back."""
        for token in made:
            number = int(token)
            known = number < self.tokenizer.vocab_size  # the model may have rows without a token
            yield words.push(number) if known and number not in self.tokenizer.ends else ""
        yield words.finish()

    @property
    def _stops(self) -> tuple[str, ...]:
        return self.stop if self.tokenizer.chat is not None else (*self.stop, *DEFAULT_STOPS)

    def _rendered(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation; special tokens that messages spell are marked (lineate.text.shield)."""
        return self.template.render(self._shield(messages).cover(messages), None, add_generation_prompt)

    def _shield(self, messages: list[Message]) -> Shield:
        return Shield(self.tokenizer.special_texts, messages)

    def _encoded(self, prompt: str, begun: Kept | None) -> list[int]:
        """Return the tokens of a prompt; those that were read already stay as they were read."""
        if begun is not None:
            ids, new = list(begun.ids), prompt[len(begun.text) :]
        else:  # a template of its own writes the first tokens itself
            ids, new = [] if self.tokenizer.chat is not None else list(self.tokenizer.start), prompt
        for part, covered in self._shield(self.messages).parts(new):
            ids += self.tokenizer.encode(part) if covered else self.tokenizer.encode_rendered(part)
        return ids

    def _read_user_turn(self, prompt: str, ids: list[int], begun: Kept | None) -> Kept | None:
        """Read up to the end of the user's message and keep the state there, which every later turn begins with.

        Templates may render an answer differently once it has been given, for instance without its reasoning.
        """
        text = self._rendered(self.messages)
        if not prompt.startswith(text) or len(text) == len(prompt) or (begun and not text.startswith(begun.text)):
            return None
        own = self._encoded(text, begun)
        read = 0 if begun is None else len(begun.ids)
        if own != ids[: len(own)] or not read < len(own) < len(ids):  # a token spans the border
            return None
        with torch.no_grad():
            new = torch.tensor([own[read:]], device=self.model.device)
            state = self.model(new, None if begun is None else begun.state, last_only=True).state
        self._kept.append(Kept(text, tuple(own), state))
        return self._kept[-1]

    def _end(self, prompt: str, shown: str) -> None:
        """Add the answer to the messages."""
        for content in (shown, shown.strip()):  # a template may write the space or newline before the answer itself
            message = {"role": "assistant", "content": content}
            if self._rendered([*self.messages, message]).startswith(prompt + shown):
                break
        self.messages.append(message)

    def _keep(self, prompt: str, ids: list[int], read: list[int], state: ModelState) -> None:
        """Keep the state after a prompt and the tokens of its answer that were read."""
        if not read or not all(token < self.tokenizer.vocab_size for token in read):
            return
        words = Detokenizer(self.tokenizer, keep_special=True, after=ids)
        text = prompt + "".join(map(words.push, read))
        if not words.finish():  # else the last character is incomplete
            self._kept.append(Kept(text, (*ids, *read), state))

    def _found(self, prompt: str) -> Kept | None:
        """Return the longest kept state that the prompt begins with, and forget those that it does not begin with."""
        self._kept = [kept for kept in self._kept if prompt.startswith(kept.text) and len(kept.text) < len(prompt)]
        return max(self._kept, key=lambda kept: len(kept.text), default=None)

    def _forget(self) -> None:
        """Forget states after the end of the messages."""
        if not self.messages:
            self._kept.clear()
            return
        text = self._rendered(self.messages)
        self._kept = [kept for kept in self._kept if text.startswith(kept.text)]


def _read(file: Path) -> dict[str, Any]:
    """Return what a file that `save` wrote has; its messages are good."""
    with file.open("rb") as stream:
        text = stream.read(LARGEST_FILE + 1)  # not its size: a pipe or a device has none
    if len(text) > LARGEST_FILE:
        raise ValueError(f"{file} must have at most {LARGEST_FILE:,} bytes, got more; a conversation takes less")
    try:
        found = json.loads(text.decode("utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} must be a conversation in JSON, got a file that is not ({error})") from None
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ValueError(
            f'{file} must have "messages", a list of objects with a role of {", ".join(ROLES)} and a Unicode '
            "text as content, got another one; write one with /save to see how it looks"
        )
    return found


def _options(file: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a conversation that a file has."""
    options: dict[str, Any] = {}
    try:
        if "sampling" in found:
            options["sampling"] = _sampling(found["sampling"])
        if "max_new_tokens" in found:
            options["max_new_tokens"] = tokens = found["max_new_tokens"]
            if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= LARGEST_COUNT:
                raise ValueError(f"max_new_tokens must be an int from 1 to {LARGEST_COUNT:,}, got {show(tokens)}")
        if "stop" in found:
            stop = found["stop"]
            if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
                raise ValueError(f"stop must be a list of texts that are not empty, got {show(stop)}")
            options["stop"] = tuple(stop)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} must have options as /save writes them, got others ({error}); /load takes only its "
                         "messages") from None  # fmt: skip
    return options


def _sampling(given: Any) -> Sampling:
    """Return the sampling options of a file; what is wrong with them raises ValueError or TypeError with its key."""
    if not isinstance(given, dict):
        raise ValueError(f"sampling must be an object, got {show(given)}")
    biases = given.get("logit_bias", [])
    if not isinstance(biases, list) or not all(map(_is_bias, biases)):
        raise ValueError(f"logit_bias must be a list of pairs of a token and a number, got {show(biases)}")
    for name, value in given.items():
        if name == "top_k" and isinstance(value, int) and value > LARGEST_COUNT:
            raise ValueError(f"top_k must be at most {LARGEST_COUNT:,}, got {show(value)}")
        if name not in ("logit_bias", "seed") and not _is_number(value):
            raise ValueError(f"{name} must be a number that a float can hold, got {show(value)}")
    return Sampling(**{**given, "logit_bias": tuple((token, float(bias)) for token, bias in biases)})


def _is_bias(value: Any) -> bool:
    """Whether a value of JSON is a token and what is added to its logit."""
    pair = isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
    return pair and isinstance(value[0], int) and 0 <= value[0] <= LARGEST_COUNT


def _is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("role") not in ROLES or not isinstance(value.get("content"), str):
        return False
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # JSON can spell half of a surrogate pair
    except UnicodeEncodeError:
        return False
    return True

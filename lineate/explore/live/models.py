"""The models of the view "Model": the built-in ones, one that was given, and folders that the page names."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from lineate.console.names import user_path
from lineate.explore.live.changes import Change, Softmax, beside, softmax_of
from lineate.explore.pictures import PictureOptions
from lineate.explore.state import steps
from lineate.explore.subject import Given, Subject, Trace, caught, open_subject, reader_of, trace_layer
from lineate.explore.words import visible
from lineate.layers import kind_of
from lineate.models import HybridLM
from lineate.text import Tokenizer
from lineate.torch_ops.tracing import cpu_by_default
from lineate.web.errors import invalid
from lineate.web.fields import shown

MOST_TOKENS = 128
"""Tokens of a text: the pictures have a column for each."""
MOST_PARAMETERS = 2 * 10**9
"""The most parameters of a folder that the page names; one of the command line may have any number."""
MOST_FOLDERS, MOST_READINGS = 2, 4
"""Folders that stay loaded, and texts of a model whose numbers are kept for the next step."""
SMALL, SERVED, GIVEN = "small", "served", "given"
"""Names of models that are not folders."""
OLD_NAMES = {"chat": SMALL}
"""Names in links of earlier versions, with those of today."""


@dataclass
class Reading:
    """The results of a model, changed or not, on a text."""

    ids: Tensor
    """`t`."""
    words: tuple[str, ...]
    """The displayed texts of the tokens."""
    model: HybridLM
    """The copy that read it."""
    changes: Mapping[int, Change]
    """Its changes, by layer."""
    inputs: dict[int, Given]
    """The arguments of the call of each layer's mixer."""
    log_probs: Tensor
    """`t vocab`: of the token after each."""
    _found: dict[Any, Any] = field(default_factory=dict)

    def trace(self, layer: int) -> Trace | None:
        """Return the inputs of a layer's rule, with the layer's change; None if its mixer has no such picture.

        Args:
            layer: The layer.
        """
        if kind_of(self.model.config.letters[layer]).trace is None:
            return None
        found: Trace = self._once(("trace", layer), lambda: trace_layer(self.model, layer, self.inputs[layer]))
        return self.changes[layer].of(found) if layer in self.changes else found

    def softmax(self, layer: int) -> Softmax | None:
        """Return the softmax attention of a layer; None if it has none.

        Args:
            layer: The layer.
        """
        if kind_of(self.model.config.letters[layer]).first is not None:  # it cannot run without the layers before it
            return None
        mixer: Any = self.model.layers[layer].mixer
        found: Softmax | None = self._once(("softmax", layer), lambda: softmax_of(mixer, self.inputs[layer].x))
        return found

    def states(self, layer: int, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the states and norms of one head, as `lineate.explore.state.steps` does.

        Args:
            layer: The layer, which has a trace.
            head: The head.
        """
        found = self.trace(layer)
        assert found is not None
        states: tuple[Tensor, Tensor, Tensor, Tensor] = self._once((layer, head), lambda: steps(found.head(head)))
        return states

    def _once(self, key: Any, compute: Callable[[], Any]) -> Any:
        if key not in self._found:
            self._found[key] = compute()
        return self._found[key]


class OpenModel:
    """A model of the page; it computes one request at a time.

    Args:
        name: The name in requests.
        subject: The model, and how it reads text.
        facts: Its description, as lines of a name and a text.
    """

    def __init__(self, name: str, subject: Subject, facts: list[tuple[str, str]] | None = None) -> None:
        self.name, self.subject, self.facts = name, subject, facts or []
        self.lock = Lock()
        self._readings: OrderedDict[Any, Reading] = OrderedDict()

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text; raise ApiError if it has none, too many, or some that the model has not.

        Args:
            text: The text; numbers with blanks between where there is no tokenizer.
        """
        config, name = self.subject.config, self.subject.name
        try:
            ids = _numbers(text, config.vocab_size) if self.subject.encode is None else self.subject.encode(text)
        except ValueError as error:
            raise invalid("text", f"text cannot be read by {name}: {error}", "invalid_value") from None
        if not 1 <= len(ids) <= MOST_TOKENS:
            remedy = "write some" if not ids else "shorten it"
            message = f"text must have from 1 to {MOST_TOKENS} tokens, got {len(ids)}; {remedy}"
            raise invalid("text", message, "invalid_value")
        if max(ids) >= config.vocab_size:
            raise invalid(
                "text",
                f"text must have tokens below {config.vocab_size}, all that {name} has, got {max(ids)}; the tokenizer "
                "in the folder is another model's",
            )
        return tuple(ids)

    def read(self, ids: tuple[int, ...], changes: Mapping[int, Change]) -> Reading:
        """Return the model's results on these tokens; the last few are kept.

        Args:
            ids: The tokens.
            changes: The changes by layer.
        """
        key = ids, tuple(sorted(changes.items(), key=lambda item: item[0]))
        if key not in self._readings:
            self._readings[key] = self._read(ids, changes)
        self._readings.move_to_end(key)
        while len(self._readings) > MOST_READINGS:
            self._readings.popitem(last=False)
        return self._readings[key]

    @torch.no_grad()
    def _read(self, ids: tuple[int, ...], changes: Mapping[int, Change]) -> Reading:
        model = beside(self.subject.model, changes)
        tokens = torch.tensor([ids], device=model.device)
        with caught(model, range(model.config.n_layers)) as inputs:
            logits = model(tokens).logits[0]
        decode = self.subject.decode or str
        words = tuple(visible(decode(number)) or str(number) for number in ids)
        return Reading(tokens[0], words, model, changes, inputs, logits.float().log_softmax(-1))

    def word(self, token: int) -> str:
        """Return the displayed text of a token.

        Args:
            token: Its number.
        """
        decode = self.subject.decode or str
        try:
            return visible(decode(token)) or str(token)
        except ValueError:  # rows of the vocabulary after the tokenizer's last one
            return str(token)


class Models:
    """The models that the page can choose from; they are created at their first use.

    Args:
        given: A model of the command line or of a server; it comes first.
        folders: Whether requests may name folders of this machine.
    """

    def __init__(self, given: OpenModel | None = None, folders: bool = False) -> None:
        self._fixed = {x.name: x for x in ([given] if given else []) + [_small()]}
        self.folders = folders
        self._opened: OrderedDict[str, OpenModel] = OrderedDict()
        self._lock = Lock()

    @property
    def names(self) -> dict[str, str]:
        """The models that have a name, each with its label."""
        return {name: model.subject.name for name, model in self._fixed.items()}

    def find(self, name: str) -> OpenModel:
        """Return a model by its name or folder; raise ApiError if it cannot be opened.

        Args:
            name: A name of `names`, or a folder.
        """
        name = OLD_NAMES.get(name, name)
        if name in self._fixed:
            return self._fixed[name]
        if not self.folders:
            known = ", ".join(self._fixed)
            message = f"model must be one of {known}, got {shown(name)}; start lineate explore FOLDER to see another"
            raise invalid("model", message, "invalid_value")
        with self._lock:
            if name not in self._opened:
                self._opened[name] = open_folder(name, MOST_PARAMETERS)
            self._opened.move_to_end(name)
            while len(self._opened) > MOST_FOLDERS:
                self._opened.popitem(last=False)
            return self._opened[name]


def _small() -> OpenModel:
    return OpenModel(SMALL, open_subject(PictureOptions()))


def served(model: HybridLM, tokenizer: Tokenizer, name: str) -> OpenModel:
    """Return a served model as a model of the page.

    Args:
        model: The model; only copies of its modules run (`changes.beside`).
        tokenizer: Its tokenizer.
        name: Its name for people.
    """
    return OpenModel(SERVED, Subject(model.config, lambda: model, name, True, *reader_of(tokenizer)))


@cpu_by_default
def open_given(name: str) -> OpenModel:
    """Return the model that the command line names; raise ValueError or OSError if it cannot be loaded.

    Args:
        name: A folder of a checkpoint or a run, a hub name, or a preset.
    """
    from lineate.models.inspect import describe, rows

    try:
        subject = open_subject(PictureOptions(model=name))
    except ValueError as error:  # --model is how lineate picture names it
        raise ValueError(str(error).replace("--model ", "MODEL ")) from None
    facts = rows(describe(user_path(name))) if user_path(name).is_dir() and not _is_run(user_path(name)) else []
    assert subject.model is not None  # loaded now, so that errors are reported at the start
    return OpenModel(GIVEN, subject, facts)


@cpu_by_default
def open_folder(name: str, most: int) -> OpenModel:
    """Return the model of a folder; raise ApiError if it cannot be loaded.

    Args:
        name: The folder, which is never fetched from anywhere.
        most: How many parameters it may have.
    """
    from lineate.generation.loading import find_model
    from lineate.models.inspect import describe, rows

    wanted = "model must be one of the built-in models or the folder of a checkpoint"
    folder = user_path(name)
    try:
        there = bool(name.strip()) and folder.is_dir()
    except (OSError, ValueError):  # too long for a name, or with a NUL
        there = False
    if not there:
        raise invalid("model", f"{wanted}, got {shown(name)}, which is no folder; look at its spelling")
    try:
        place = find_model(folder)
        found = describe(place)
        if found.problem is not None:
            raise ValueError(found.problem)
        if found.parameters > most:
            raise ValueError(f"it has {found.parameters:,} parameters, and the page opens at most {most:,}; start "
                             "lineate explore FOLDER to open it")  # fmt: skip
        subject = open_subject(PictureOptions(model=str(folder)))
        assert subject.model is not None
    except (ValueError, OSError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise invalid("model", f"{wanted}, got {shown(name)}, which cannot be loaded: {reason}") from None
    return OpenModel(name, subject, rows(found))


def _is_run(folder: Path) -> bool:
    return not (folder / "config.json").is_file()


def _numbers(text: str, most: int) -> list[int]:
    """Return the tokens of a model without a tokenizer."""
    words = text.split()
    for word in words:
        if not word.isdecimal() or not word.isascii() or not 0 <= int(word) < most:
            raise ValueError(
                f"its folder has no tokenizer, so the text must be numbers from 0 to {most - 1} with blanks between, "
                f"got {shown(word)}"
            )
    return [int(word) for word in words]

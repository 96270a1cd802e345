"""The view "Model": a text through a model, token by token, and the same model with a gate open or another rule.

`run_model` answers for a whole text: tokens, attention matrix, gates, norms and losses of one layer and head.
`run_step` answers for one token: the state after it, and the likely next tokens.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lineate.call import Options
from lineate.explore.attention import rule_matrix
from lineate.explore.forgetting import half_life
from lineate.explore.live.changes import GATES, SOFTMAX, Change, gates_of
from lineate.explore.live.models import Models, OpenModel, Reading
from lineate.explore.memories import DEMO_RULES
from lineate.explore.subject import Trace, pictured_rule
from lineate.figures import label_of
from lineate.forms.general import general_row
from lineate.layers import LinearMixer, kind_of
from lineate.rule import ONE_KEY_RULES
from lineate.torch_ops.tracing import cpu_by_default
from lineate.web.errors import invalid
from lineate.web.fields import Fields

MOST_CHARACTERS = 4096
MOST_CELLS = 64
"""Rows and columns of a sent state; larger ones are sent as the largest number of each block."""
MOST_CHANNELS = 32
"""Rows of decays that are sent; more channels are sent as means of neighbours."""
NEXT = 8
"""Likely next tokens of the model and of the changed one."""
DIGITS, CELL_DIGITS = 4, 3
MEMORY, CACHE, NONE = "memory", "softmax", "none"


@dataclass(frozen=True)
class ModelRequest:
    """A request of the page."""

    model: OpenModel
    """The model."""
    ids: tuple[int, ...]
    """The tokens of the text."""
    layer: int
    """The layer that is shown."""
    head: int
    """Its head."""
    changes: dict[int, Change]
    """The changes by layer."""
    at: int
    """The number of tokens read; 0 for the whole text."""


def read_request(body: Fields, models: Models, step: bool) -> ModelRequest:
    """Read a body; raise ApiError with the name of the first field that is wrong.

    Args:
        body: The fields of the body.
        models: The available models.
        step: Whether the request is for one step rather than the whole text.
    """
    model = models.find(body.text("model", MOST_CHARACTERS) or next(iter(models.names)))
    body.needed("text", "the text that the model reads")
    ids = model.encode(body.text("text", MOST_CHARACTERS) or "")
    letters = model.subject.config.letters
    layer = body.whole("layer", 0, len(letters) - 1) or 0
    head = body.whole("head", 0, heads_of(model, layer) - 1) or 0
    changes = dict(_change(each, model) for each in body.objects("changes", len(letters)) or ())
    at = 0
    if step:
        at = body.whole("at", 1, len(ids)) or len(ids)
    body.finish()
    return ModelRequest(model, ids, layer, head, changes, at)


def heads_of(model: OpenModel, layer: int) -> int:
    """Return how many heads a layer has; 1 if its mixer does not define it.

    Args:
        model: The model.
        layer: The layer.
    """
    config = model.subject.config
    part = config.part(kind_of(config.letters[layer]))
    return getattr(part, "value_heads", None) or getattr(part, "heads", None) or 1


def _change(fields: Fields, model: OpenModel) -> tuple[int, Change]:
    letters = model.subject.config.letters
    fields.needed("layer", f"from 0 to {len(letters) - 1}")
    layer = fields.whole("layer", 0, len(letters) - 1) or 0
    if not _changeable(model, layer):
        kind = kind_of(letters[layer])
        possible = [n for n in range(len(letters)) if _changeable(model, n)]
        among = f"one of {', '.join(map(str, possible))}" if possible else "left out: no layer of this model can change"
        path = fields.path("layer")
        raise invalid(path, f"{path} must be {among}, got {layer}, whose mixer is {kind.label} ({kind.letter})")
    rule = fields.word("rule", DEMO_RULES)
    off = fields.items("off", len(GATES)) or []
    for i, gate in enumerate(off):
        if gate not in GATES:
            path = f"{fields.path('off')}[{i}]"
            raise invalid(path, f"{path} must be one of {', '.join(GATES)}, got {gate!r}", "invalid_value")
    fields.finish()
    own = pictured_rule(kind_of(letters[layer]))
    return layer, Change(None if rule == own else rule, frozenset(off))


def _changeable(model: OpenModel, layer: int) -> bool:
    """Whether the rule of a layer can be exchanged: its mixer is one of lineate's with a fixed-size memory."""
    kind = kind_of(model.subject.config.letters[layer])
    mixer = getattr(kind.make, "__self__", None)
    return kind.trace is not None and isinstance(mixer, type) and issubclass(mixer, LinearMixer)


@torch.no_grad()
@cpu_by_default
def run_model(asked: ModelRequest) -> dict[str, Any]:
    """Return the results of a text in one layer and head, for the model and the changed one.

    Args:
        asked: The model, the text, and the selection.
    """
    with asked.model.lock:
        own, changed = _readings(asked)
        return {
            "model": describe(asked.model, own),
            "tokens": list(own.words),
            "layer": asked.layer,
            "head": asked.head,
            "kind": _kind(own, asked.layer),
            "own": _picture(own, asked),
            "changed": None if changed is None else _picture(changed, asked),
            "loss": {"own": _loss(own), "changed": None if changed is None else _loss(changed)},
        }


@torch.no_grad()
@cpu_by_default
def run_step(asked: ModelRequest) -> dict[str, Any]:
    """Return the state of a head after some tokens, and the likely next tokens.

    Args:
        asked: The model, the text, what is shown, with the number of tokens.
    """
    with asked.model.lock:
        own, changed = _readings(asked)
        return {
            "at": asked.at,
            "own": _state(own, asked),
            "changed": None if changed is None else _state(changed, asked),
            "next": _next(asked, own, changed),
        }


def _readings(asked: ModelRequest) -> tuple[Reading, Reading | None]:
    changes = {n: change for n, change in asked.changes.items() if change != Change()}
    own = asked.model.read(asked.ids, {})
    return own, asked.model.read(asked.ids, changes) if changes else None


def describe(model: OpenModel, own: Reading | None = None) -> dict[str, Any]:
    """Return the description of a model for the page.

    Args:
        model: The model.
        own: Its results on a text, from which the gates of its layers are known; None: they are left out.
    """
    config, layers = model.subject.config, []
    for n, letter in enumerate(config.letters):
        kind = kind_of(letter)
        changeable = _changeable(model, n)
        gates = gates_of(own.model.layers[n].mixer, own.trace(n)) if own and changeable else []  # type: ignore[arg-type]
        layers.append(
            {"letter": letter, "label": kind.label, "rule": pictured_rule(kind), "heads": heads_of(model, n),
             "gates": gates, "changeable": changeable, "half_lives": _half_lives(own, n)}
        )  # fmt: skip
    return {
        "name": model.name, "label": model.subject.name, "trained": model.subject.trained,
        "tokenizer": model.subject.encode is not None, "layers": layers, "facts": [list(row) for row in model.facts],
    }  # fmt: skip


def _half_lives(own: Reading | None, layer: int) -> list[float]:
    """Return the median half-life of each head over tokens and channels, in tokens; empty if nothing decays."""
    found = None if own is None else own.trace(layer)
    if found is None or found.log_decay is None:
        return []
    lives = half_life(found.log_decay.double().median(0).values)  # hv or hv k
    return _three_digits(lives.view(len(lives), -1).median(1).values)


def _kind(reading: Reading, layer: int) -> str:
    if reading.trace(layer) is not None:
        return MEMORY
    return NONE if reading.softmax(layer) is None else CACHE


def _rule(reading: Reading, asked: ModelRequest) -> str:
    """Return the name of the rule that runs in the layer."""
    change = reading.changes.get(asked.layer, Change())
    kind = kind_of(asked.model.subject.config.letters[asked.layer])
    return change.rule or pictured_rule(kind)


def _picture(reading: Reading, asked: ModelRequest) -> dict[str, Any] | None:
    """Return matrix, gates and norms of one head; None if the layer has no picture."""
    kind, found = _kind(reading, asked.layer), reading.trace(asked.layer)
    if kind == NONE:
        return None
    if found is None or _rule(reading, asked) == SOFTMAX:
        return {"rule": _label(reading, asked), "matrix": _triangle(_weights(reading, asked)), "norms": None,
                "decay": None, "beta": None, "erased": None, "write": None, "writes": _writes(found)}  # fmt: skip
    one = found.head(asked.head)
    states, written, corrected, forgotten = reading.states(asked.layer, asked.head)
    return {
        "rule": _label(reading, asked),
        "matrix": _triangle(rule_matrix(one, one.op)),
        "norms": {
            "state": numbers(states.norm(dim=(1, 2))),
            "written": numbers(written),
            "corrected": numbers(corrected) if one.row.corrects else None,
            "forgotten": None if one.log_decay is None else numbers(forgotten),
        },
        "decay": None if one.log_decay is None else _decay(one.log_decay[:, 0]),
        "beta": None if one.beta is None else numbers(one.beta[..., 0].flatten()),
        "erased": None if one.row in ONE_KEY_RULES else numbers(erased_share(one)),
        "write": None if one.write is None else numbers(one.write[:, 0].mean(-1)),
        "writes": one.writes,
    }


def _writes(found: Trace | None) -> int:
    return 1 if found is None else found.writes


def erased_share(one: Trace) -> Tensor:
    """Return e . d of each write of one head, `m`: the share that is erased of what the memory holds along d.

    Args:
        one: The inputs of the rule of one head.
    """
    row = general_row(one.inputs, Options(one.row, 1.0))
    return (row.e * row.d).sum(-1)[0, :, 0]


def _label(reading: Reading, asked: ModelRequest) -> str:
    return label_of(_rule(reading, asked))


def _weights(reading: Reading, asked: ModelRequest) -> Tensor:
    """Return the weights `t t` of softmax attention: the layer's own, or those of the rule that replaces it."""
    found = reading.trace(asked.layer)
    if found is not None:
        return rule_matrix(found.head(asked.head), SOFTMAX)
    softmax = reading.softmax(asked.layer)
    assert softmax is not None
    return softmax.weights[asked.head]


def _decay(log_decay: Tensor) -> dict[str, Any]:
    """Return the decay of each token, a row for each channel (slow ones first) or one for the head."""
    rows = log_decay[None] if log_decay.dim() == 1 else log_decay.T  # channels t
    order = rows.mean(1).argsort(descending=True, stable=True)
    lives = half_life(rows.double().median(1).values)
    size = -(-len(rows) // MOST_CHANNELS)
    kept = rows[order].exp().split(size)
    return {
        "per": "head" if log_decay.dim() == 1 else "channel",
        "channels": len(rows),
        "rows": [numbers(each.mean(0)) for each in kept],
        "half_life": _three_digits(torch.stack((lives.min(), lives.median(), lives.max()))),
    }


def _three_digits(x: Tensor) -> list[float]:
    return [float(f"{number:.3g}") for number in x.tolist()]


def _loss(reading: Reading) -> list[float]:
    """Return -log p of every token but the first, in nats."""
    ids = reading.ids
    found: list[float] = numbers(-reading.log_probs[:-1].gather(1, ids[1:, None])[:, 0])
    return found


def _state(reading: Reading, asked: ModelRequest) -> dict[str, Any] | None:
    """Return the state of a head: S, or the keys and values of a cache."""
    kind = _kind(reading, asked.layer)
    if kind == NONE:
        return None
    if kind == CACHE or _rule(reading, asked) == SOFTMAX:
        keys, values = _cache(reading, asked)
        return {"kind": "cache", "rows": len(keys), "columns": keys.shape[1] + values.shape[1],
                "cells": numbers(largest_of_blocks(torch.cat((keys, values), 1)), CELL_DIGITS)}  # fmt: skip
    state = reading.states(asked.layer, asked.head)[0][asked.at - 1]
    return {
        "kind": "state",
        "rows": len(state),
        "columns": state.shape[1],
        "cells": numbers(largest_of_blocks(state), CELL_DIGITS),
    }


def _cache(reading: Reading, asked: ModelRequest) -> tuple[Tensor, Tensor]:
    """Return the keys `at k` and values `at v` that a head has kept."""
    found, softmax = reading.trace(asked.layer), reading.softmax(asked.layer)
    if found is not None:
        one = found.head(asked.head)
        return one.keys[: one.writes * asked.at, 0], one.values[: one.writes * asked.at, 0]
    assert softmax is not None
    head = asked.head // (len(softmax.weights) // len(softmax.keys))
    return softmax.keys[head, : asked.at], softmax.values[head, : asked.at]


def _next(asked: ModelRequest, own: Reading, changed: Reading | None) -> list[dict[str, Any]]:
    """Return the likeliest next tokens of both models, each with both probabilities."""
    rows = [reading.log_probs[asked.at - 1].exp() for reading in (own, changed) if reading is not None]
    best = dict.fromkeys(token for row in rows for token in row.topk(min(NEXT, len(row))).indices.tolist())
    known = own.ids[asked.at].item() if asked.at < len(own.ids) else None
    return [
        {
            "token": asked.model.word(token),
            "own": round(float(rows[0][token]), DIGITS),
            "changed": None if changed is None else round(float(rows[1][token]), DIGITS),
            "follows": token == known,
        }
        for token in best
    ]


def _triangle(matrix: Tensor) -> list[list[float]]:
    """Return the rows of a causal matrix `t m` up to its diagonal, the writes of the token itself."""
    n = matrix.shape[1] // matrix.shape[0]
    return [row[: n * (i + 1)] for i, row in enumerate(numbers(matrix))]


def largest_of_blocks(x: Tensor) -> Tensor:
    """Return a matrix of at most MOST_CELLS rows and columns: of each block, the number of largest absolute value.

    Args:
        x: The matrix.
    """
    high, wide = (-(-size // MOST_CELLS) for size in x.shape)
    rows, columns = -(-x.shape[0] // high), -(-x.shape[1] // wide)
    padded = torch.nn.functional.pad(x, (0, columns * wide - x.shape[1], 0, rows * high - x.shape[0]))
    blocks = padded.view(rows, high, columns, wide)
    most, least = blocks.amax((1, 3)), blocks.amin((1, 3))
    return torch.where(most >= -least, most, least)


def numbers(x: Tensor, digits: int = DIGITS) -> Any:
    """Return lists of numbers, rounded to digits of the largest; infinities become the largest number.

    Args:
        x: The tensor.
        digits: The digits.
    """
    x = x.detach().double().cpu().nan_to_num()
    most = float(x.abs().max()) if x.numel() else 0.0
    decimals = digits - math.ceil(math.log10(most)) if most > 0 else 0
    return (x.round(decimals=min(decimals, 300)) + 0.0).tolist()  # + 0 makes -0 a 0

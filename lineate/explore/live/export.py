"""`lineate explore --export FOLDER`: the page as plain files, with the answers that its views show first.

A copy has the page's own files, `api/about`, and `kept/`: an index of requests and, for each, the file and the position
of its answer. The page searches the index instead of sending a request to the server (page/server.js). The page lists
the kept answers, and marks all others as available only live.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lineate.explore.live.app import PAGE, VIEWS, describe
from lineate.explore.live.changes import GATES
from lineate.explore.live.examples import MEMORIES, Body, memory_link
from lineate.explore.live.learning_view import LEARNERS, TASKS
from lineate.explore.live.lessons_view import NUMBERS
from lineate.explore.live.model_view import describe as describe_model
from lineate.explore.live.models import Models, OpenModel
from lineate.explore.memories import DEMO_RULES
from lineate.figures import label_of
from lineate.models.presets import PRESETS
from lineate.web.fields import Fields
from lineate.web.pages import page_files

TEXT = "for value in values:"
"""The text that the model of a copy has read."""
MOST_HEADS = 24
"""Heads of all layers that are kept; a larger model keeps fewer heads of each layer."""
KEPT, INDEX = "kept", "kept/index.json"


@dataclass
class _Copy:
    """The answers that are kept, and their description on the page."""

    models: Models
    files: dict[str, list[Any]] = field(default_factory=dict)
    index: list[dict[str, Any]] = field(default_factory=list)
    views: list[dict[str, Any]] = field(default_factory=list)

    def keep(self, view: str, file: str, body: Body) -> Any:
        """Compute an answer and append it to a file; return it."""
        answers = self.files.setdefault(f"{KEPT}/{file}.json", [])
        self.index.append(
            {"path": f"api/{view}", "body": body, "file": f"{KEPT}/{file}.json", "item": len(answers)}
        )  # fmt: skip
        answers.append(VIEWS[view](Fields(body), self.models))
        return answers[-1]

    def tell(self, name: str, text: str, links: list[tuple[str, str]]) -> None:
        """Describe the kept answers of a view, with links [address, label]."""
        self.views.append(
            {"name": name, "text": text, "links": [{"href": href, "label": label} for href, label in links]}
        )  # fmt: skip


def export(folder: Path, models: Models) -> tuple[int, int]:
    """Write the page and its first answers; return how many files and bytes there are.

    Args:
        folder: A folder that does not exist, is empty, or has an earlier copy, which is replaced.
        models: The models of the page, of which the first is kept.
    """
    _check(folder)
    copy = _Copy(models)
    _keep_memory(copy)
    text = _keep_model(copy)
    _keep_learning(copy)
    _keep_plan(copy)
    _keep_lessons(copy)
    about = describe(models) | {
        "text": text, "folders": False, "models": [{"name": n, "label": x} for n, x in list(models.names.items())[:1]],
        "kept": {
            "index": INDEX, "title": "This is a copy without a server. What it keeps, and what is live only",
            "views": copy.views,
        },
    }  # fmt: skip
    written = {"api/about": about, INDEX: copy.index, **copy.files}
    if (folder / KEPT).is_dir():
        shutil.rmtree(folder / KEPT)
    for name, value in written.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(value, separators=(",", ":")), encoding="utf-8")
    for source in page_files(PAGE):
        shutil.copyfile(source, folder / source.name)
    files = [path for path in folder.rglob("*") if path.is_file()]
    return len(files), sum(path.stat().st_size for path in files)


def _check(folder: Path) -> None:
    """Refuse a folder whose files would be mixed with those of the page."""
    if folder.is_dir() and (any(folder.iterdir()) and not (folder / INDEX).is_file()):
        raise ValueError(
            f"--export must be a new or empty folder, or an earlier copy, got '{folder}', which has other files; "
            "choose another name"
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--export must be a folder, got '{folder}', which is a file; choose another name")
    folder.mkdir(parents=True, exist_ok=True)


def _keep_memory(copy: _Copy) -> None:
    links = []
    for title, (cosine, steps) in MEMORIES.items():
        for ask in "ABCD":
            body = {"keys": 4, "values": 4, "cosine": cosine, "sharpness": 8, "ask": ask, "rules": list(DEMO_RULES)}
            copy.keep("memory", "memory", body | {"steps": steps})
        links.append((memory_link(title), title))
    text = (
        f"Kept: these {len(MEMORIES)} lists of steps, every step of them, every rule, every key that is asked for. "
        "Live only: other steps, gates and sizes, and leaving out rules."
    )
    copy.tell("Memory", text, links)


def _keep_model(copy: _Copy) -> str:
    """Keep one text in every layer, all its steps, and the changes of one layer; return the text."""
    model = copy.models.find(next(iter(copy.models.names)))
    layers = describe_model(model)["layers"]
    heads = max(1, MOST_HEADS // len(layers))
    text = TEXT if model.subject.encode is not None else "0 1 2 3 4 5 6 7"
    for n, layer in enumerate(layers):
        for head in range(min(heads, layer["heads"])):
            _keep_head(copy, f"model-{n}-{head}", _model_body(model, text, n, head))
    target = next((n for n, layer in enumerate(layers) if layer["changeable"]), None)
    links = [(f"#model?layer={n}", f"layer {n}: {layer['label']}") for n, layer in enumerate(layers)]
    changes = [] if target is None else list(_changes(target, layers[target]["rule"]))
    for i, (change, label) in enumerate(changes):
        for head in range(min(heads, layers[target or 0]["heads"])):
            _keep_head(copy, f"model-change-{i}-{head}", _model_body(model, text, target or 0, head, [change]))
        written = f"{target}:{change.get('rule', '')}:{'+'.join(change.get('off', []))}"
        links.append((f"#model?layer={target}&changes={quote(written)}", f"layer {target}: {label}"))
    whole = all(layer["heads"] <= heads for layer in layers)
    copy.tell(
        "Model",
        f"Kept: {model.subject.name} on the text {text!r}, every layer, {'every head' if whole else f'{heads} heads'}, "
        f"every token; each change of layer {target} alone, seen in that layer. Live only: other texts, models and "
        "changes.",
        links,
    )
    return text


def _model_body(model: OpenModel, text: str, layer: int, head: int, changes: list[Body] | None = None) -> Body:
    return {"model": model.name, "text": text, "layer": layer, "head": head, "changes": changes or []}


def _changes(layer: int, own: str) -> Iterator[tuple[Body, str]]:
    """Yield the changes of a layer that are kept: each gate open, and each other rule."""
    for gate in GATES:
        yield {"layer": layer, "off": [gate]}, f"{gate} gate open"
    for rule in DEMO_RULES:
        if rule != own:
            yield {"layer": layer, "rule": rule}, label_of(rule)


def _keep_head(copy: _Copy, file: str, body: Body) -> None:
    tokens = copy.keep("model", file, body)["tokens"]
    copy.keep("model/step", file, body)  # initially the page does not know the last token
    for at in range(1, len(tokens) + 1):
        copy.keep("model/step", file, body | {"at": at})


def _keep_learning(copy: _Copy) -> None:
    shared = {"tokens": 96, "channels": 8, "seed": 0, "momentum": 0.6, "decay": 1, "chunk": 4}
    for task in TASKS:
        for name, learner in LEARNERS.items():
            for optimiser, rate in learner.rates.items():
                body = {"memory": name, "optimiser": optimiser, "rate": rate, "task": task, **shared}
                copy.keep("learning", f"learning-{task}", body)
    copy.tell(
        "Learning",
        "Kept: every task and memory with each of its optimisers, at the rate that the page chooses. Live only: other "
        "rates, momentum, chunks, sizes and seeds.",
        [(f"#learning?task={task}", label) for task, label in TASKS.items()],
    )


def _keep_plan(copy: _Copy) -> None:
    run = {"hardware": "h100", "devices": 1, "batch": 8}
    sizes = {"pattern": "GGGA", "dtype": "bfloat16", "hidden_size": 2048, "layers": 24, "head_dim": 128, "kv_heads": 4}
    for power in range(10, 25):
        copy.keep("plan", "plan", {**run, **sizes, "context": 2**power})
    for name in PRESETS:
        copy.keep("plan", "plan", {**run, "preset": name, "context": 2**17})
    copy.tell(
        "Plan",
        "Kept: the first sizes at every context, and each preset at 128k tokens, on H100 with batch 8. Live only: "
        "everything else.",
        [("#plan", "by its sizes"), *((f"#plan?preset={name}", name) for name in PRESETS)],
    )


def _keep_lessons(copy: _Copy) -> None:
    links = []
    for number in NUMBERS:
        title = copy.keep("lessons", "lessons", {"lesson": number})["title"]
        copy.keep("lessons/run", f"lesson-{number}", {"lesson": number})
        links.append((f"#lessons?lesson={number}&run=1", f"{number}. {title}"))
    copy.tell("Lessons", "Kept: all lessons, and what running each gave when this copy was made.", links)

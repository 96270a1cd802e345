"""The contestants of bench.models.quantised_weights: each reads a prompt, then makes the likeliest tokens one by one.

    python -m bench.models.quantised_sides SIDE FORM FOLDER LAYERS HIDDEN THREADS

prints what memory a fresh process has after it has loaded the model and made two tokens, as JSON.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from bench.models.quantised_model import BITS, Files, Shape, step_bytes
from bench.serving.llama import LlamaServer
from bench.timing import resident_bytes
from lineate.generation import generate

OURS, THEIRS, TORCHAO, LLAMA = "lineate", "transformers", "torchao", "llama.cpp"
SIDES = (OURS, THEIRS, TORCHAO, LLAMA)
ROOM = 64  # tokens of the context beyond the longest prompt


class Ran(NamedTuple):
    """The times of one prompt and its answer."""

    prompt_seconds: float
    step_seconds: list[float]  # of each token after the first
    tokens: list[int]


class Side(Protocol):
    """A contestant with its model loaded."""

    def run(self, ids: Sequence[int], new: int) -> Ran:
        """Read a prompt and make `new` tokens."""
        ...

    def together(self, prompts: Sequence[Sequence[int]], new: int) -> float:
        """Return the tokens per second of all prompts together, after the first token of each."""
        ...

    def close(self) -> None: ...


def timed(tokens: Any) -> Ran:
    """Take all tokens `b` of an iterator; return the times and the first row."""
    times, made = [time.perf_counter()], list[int]()
    for token in tokens:
        made.append(int(token[0]))
        times.append(time.perf_counter())
    seconds = [after - before for before, after in pairwise(times)]
    return Ran(seconds[0], seconds[1:], made)


class Ours:
    """lineate's model, through generate()."""

    def __init__(self, files: Files, form: str) -> None:
        self.model = files.ours(form)
        self.step_bytes = step_bytes(self.model)

    def run(self, ids: Sequence[int], new: int) -> Ran:
        return timed(generate(self.model, torch.tensor([ids]), new, temperature=0, stop=()))

    def together(self, prompts: Sequence[Sequence[int]], new: int) -> float:
        ran = timed(generate(self.model, torch.tensor(prompts), new, temperature=0, stop=()))
        return len(prompts) * len(ran.step_seconds) / sum(ran.step_seconds)

    def close(self) -> None:
        del self.model


class Transformers:
    """transformers' model, through its own cache; the loop is ours, as its generate() costs more."""

    def __init__(self, files: Files, form: str) -> None:
        self.model = files.theirs(getattr(torch, form))

    @torch.inference_mode()
    def _tokens(self, ids: Tensor, new: int) -> Any:
        past = None
        for _ in range(new):
            out = self.model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            yield ids[:, 0]

    def run(self, ids: Sequence[int], new: int) -> Ran:
        return timed(self._tokens(torch.tensor([ids]), new))

    def together(self, prompts: Sequence[Sequence[int]], new: int) -> float:
        ran = timed(self._tokens(torch.tensor(prompts), new))
        return len(prompts) * len(ran.step_seconds) / sum(ran.step_seconds)

    def close(self) -> None:
        del self.model


class Torchao(Transformers):
    """transformers' model with weights that torchao has rounded: int8 a row, int4 in groups of 32."""

    def __init__(self, files: Files, form: str) -> None:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        super().__init__(files, "float32")
        quantize_(self.model, Int8WeightOnlyConfig() if form == "int8" else Int4WeightOnlyConfig(group_size=32))


class Llama:
    """llama.cpp's server; the times are its own."""

    def __init__(self, files: Files, form: str, binary: Path, context: int, rows: int, threads: int) -> None:
        self.logs = tempfile.TemporaryDirectory()
        options = {"--threads-batch": threads, "--parallel": rows, "--cache-ram": 0, "--ctx-checkpoints": 0}
        self.server = LlamaServer(
            binary, files.gguf(form), Path(self.logs.name), rows * (context + ROOM), threads, options
        )

    def run(self, ids: Sequence[int], new: int) -> Ran:
        return Ran(*self.server.complete(ids, new))

    def together(self, prompts: Sequence[Sequence[int]], new: int) -> float:
        return sum(self.server.complete_together(prompts, new))

    def resident(self) -> dict[str, int]:
        return resident_bytes(self.server.process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.server.__exit__()
        self.logs.cleanup()


class Opener:
    """Loads contestants.

    Args:
        files: the model's files.
        threads: of each contestant.
        llama_server: llama.cpp's program; None: without it.
        context: tokens of the longest prompt.
    """

    def __init__(self, files: Files, threads: int, llama_server: Path | None, context: int) -> None:
        self.files, self.threads, self.llama_server, self.context = files, threads, llama_server, context

    def open(self, side: str, form: str, rows: int = 1) -> Side:
        """Load a contestant in a form.

        Args:
            side: its name.
            form: of its weights.
            rows: how many prompts it answers together.
        """
        if side == LLAMA:
            assert self.llama_server is not None
            return self.llama(form, rows)
        return {OURS: Ours, THEIRS: Transformers, TORCHAO: Torchao}[side](self.files, form)

    def llama(self, form: str, rows: int = 1, context: int | None = None) -> Llama:
        assert self.llama_server is not None
        return Llama(self.files, form, self.llama_server, context or self.context, rows, self.threads)


def takes_part(side: str, form: str) -> bool:
    """Whether a contestant has weights of this form."""
    if side == THEIRS:
        return form in ("float32", "bfloat16")
    return BITS[form] < 16 if side == TORCHAO else True


def memory_of(side: str, form: str, files: Files) -> dict[str, Any]:
    """Load a contestant into this process and make two tokens; return the resident bytes before and after."""
    before = resident_bytes()
    opened = Opener(files, torch.get_num_threads(), None, 16).open(side, form)
    opened.run(list(range(16)), 2)
    return {"before": before, "after": resident_bytes()}


def main() -> None:
    side, form, folder, layers, hidden, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    print(json.dumps(memory_of(side, form, Files(Path(folder), Shape(int(layers), int(hidden))))))


if __name__ == "__main__":
    main()

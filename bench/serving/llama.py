"""llama.cpp's server as a process of its own, asked over its HTTP interface."""

import http.client
import json
import re
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

SLOT = "slot.bin"
FLOAT32 = {"--cache-type-k": "f32", "--cache-type-v": "f32", "--flash-attn": "off"}
"""Options with which it computes in float32; its defaults round keys, values and products of attention to 16 bits."""
# What its log says about states that it keeps, finds, drops or lacks.
EVENTS = re.compile(
    r"(forcing full prompt re-processing|(?:restored|created|erasing old|erased invalidated) context checkpoint.*)"
)


class Asked(NamedTuple):
    """The result of one prompt."""

    seconds: float  # to the first token
    read: int  # tokens of the prompt that were read
    tokens: list[int]  # the answer
    own_seconds: float | None = None  # what the server itself says of reading the prompt
    log: tuple[str, ...] = ()  # what the server's log says of states


class Completed(NamedTuple):
    """The server's own report on one prompt and its answer."""

    prompt_seconds: float
    step_seconds: list[float]  # of each token after the first
    tokens: list[int]


def version_of(binary: Path) -> str:
    """Return what the server says of its version and its compiler, in one line."""
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    return "; ".join(
        line.strip() for line in (done.stdout + done.stderr).splitlines() if "version" in line or "built" in line
    )


class LlamaServer:
    """A server with one slot. What that holds at the first stop goes to a file, from which every later start has it.

    Args:
        binary: the program.
        model: the GGUF file.
        folder: where its log and its slot's file go.
        context: tokens that its slots have room for together.
        threads: of the program.
        options: more options; by default those with which it computes in float32, as other contestants do.
    """

    def __init__(
        self,
        binary: Path,
        model: Path,
        folder: Path,
        context: int,
        threads: int,
        options: Mapping[str, Any] = FLOAT32,
    ) -> None:
        self.binary, self.model, self.folder = binary, model, folder
        self.log, self.told = folder / "server.log", 0
        self.options = {"--ctx-size": context, "--parallel": 1, "--threads": threads, "--log-verbosity": 4, **options}
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def start(self) -> float:
        """Start it; return the seconds that it took to read the slot's file, 0 if there is none."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        address = {"--host": "127.0.0.1", "--port": self.port}
        options = {"--model": self.model, "--slot-save-path": f"{self.folder}/"} | self.options | address
        command = [str(x) for option in options.items() for x in option]
        with self.log.open("a") as log:
            self.process = subprocess.Popen([self.binary, *command], stdout=log, stderr=subprocess.STDOUT)
        while not self._ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.binary} ended: {self.log.read_text()[-2000:]}")
            time.sleep(0.1)
        self._events()
        return self._slot("restore") if (self.folder / SLOT).exists() else 0.0

    def _ready(self) -> bool:
        try:
            return self._call("GET", "/health").status == 200
        except OSError:
            return False

    def _slot(self, action: str) -> float:
        begun = time.perf_counter()
        self._post(f"/slots/0?action={action}", {"filename": SLOT}).read()
        return time.perf_counter() - begun

    def stop(self) -> float:
        """Stop it; return the seconds that it took to write the slot's file, 0 if it was written before."""
        seconds = 0.0 if (self.folder / SLOT).exists() else self._slot("save")
        self._end()
        return seconds

    def _end(self) -> None:
        self.process.terminate()
        self.process.wait()

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        """Send a request over a connection of its own: the server closes those that wait for a few seconds."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json", "Connection": "close"})
        return connection.getresponse()

    def _post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        answer = self._call("POST", path, body)
        if answer.status != 200:
            raise RuntimeError(f"{path} was answered with {answer.status}: {answer.read().decode()[:500]}")
        return answer

    def ask(self, ids: Sequence[int], new: int = 1) -> Asked:
        """Ask for the likeliest tokens; the time is this client's, with what HTTP and JSON take."""
        body = {"prompt": list(ids), "n_predict": new, "temperature": 0, "stream": True, "ignore_eos": True}
        begun = time.perf_counter()
        first, tokens, timings = 0.0, list[int](), dict[str, Any]()
        for line in self._post("/completion", {**body, "return_tokens": True}):
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                tokens += event["tokens"]
                first = first or (time.perf_counter() if tokens else 0.0)
                timings = event.get("timings", timings)
        assert len(tokens) == new
        return Asked(first - begun, timings["prompt_n"], tokens, timings["prompt_ms"] / 1e3, self._events())

    def complete(self, ids: Sequence[int], new: int) -> Completed:
        """Read a prompt anew; return the likeliest tokens, and the times that the server gives after every token."""
        body = {"prompt": list(ids), "n_predict": new, "temperature": 0, "stream": True, "ignore_eos": True}
        body |= {"return_tokens": True, "timings_per_token": True, "cache_prompt": False}
        tokens, prompt, made = list[int](), 0.0, list[float]()
        for line in self._post("/completion", body):
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                if event["tokens"]:
                    tokens += event["tokens"]
                    prompt = event["timings"]["prompt_ms"] / 1e3
                    made.append(event["timings"]["predicted_ms"] / 1e3)
        assert len(tokens) == len(made) == new
        return Completed(prompt, [after - before for before, after in pairwise(made)], tokens)

    def complete_together(self, prompts: Sequence[Sequence[int]], new: int) -> list[float]:
        """Ask for answers to all prompts at once; return the tokens per second of each after its first token."""

        def ask(ids: Sequence[int]) -> float:
            body = {"prompt": list(ids), "n_predict": new, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
            timings = json.loads(self._post("/completion", body).read())["timings"]
            assert timings["predicted_n"] == new
            return 1e3 * (new - 1) / timings["predicted_ms"]  # the time begins with the first token

        with ThreadPoolExecutor(len(prompts)) as clients:
            return list(clients.map(ask, prompts))

    def log_probabilities(self, ids: Sequence[int], vocab: int) -> dict[int, float]:
        """Return the log-probability of each next token."""
        body = {"prompt": list(ids), "n_predict": 1, "temperature": 0, "n_probs": vocab, "cache_prompt": False}
        answer = json.loads(self._post("/completion", body).read())
        return {each["id"]: each["logprob"] for each in answer["completion_probabilities"][0]["top_logprobs"]}

    def _events(self) -> tuple[str, ...]:
        """Return what the log has said of states since the last call, or since the start."""
        with self.log.open() as log:
            log.seek(self.told)
            lines = log.read()
            self.told = log.tell()
        return tuple(found[1] for found in EVENTS.finditer(lines))

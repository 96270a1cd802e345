"""Measure how long a chat takes while other clients send prompts that are far too long, or long to read.

    python -m bench.archive.long_prompts --seconds 8 --json long-prompts.json

A real `lineate serve` answers: a small random model with a byte-level BPE of 4,096 tokens, Qwen's pieces, NFC and a
chat template, unless --model names a folder. One client asks for short chats, one after another. For each kind of
prompt, 20 other clients send one of up to 7.9 MB each, wait for the answer and send it again, from a process of their
own, until --seconds are over. The table has the median, the 95th percentile and the longest of the chat's times, alone
and next to each kind, and what the long prompts were answered with.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import torch

from bench.timing import given_command
from lineate.models import HybridLM, preset
from lineate.text.published import PublishedTokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BYTES = 7_900_000
"""Bytes of a long prompt, which the server's default --max-body takes."""
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizer cuts texts."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = (
    "The memory of linear attention is a matrix to which every token adds one key and one value. "
    "A gate decides how much of it stays, and the delta rule replaces what a key has said before.\n\n"
)
SHORT = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 24, "seed": 1}


def main() -> None:
    """Read the options, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds for each kind")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--kinds", help=f"some of {', '.join(KINDS)}, with commas between")
    parser.add_argument("--once", action="store_true", help="each client sends its prompt once")
    parser.add_argument("--preset", default="tiny", help="the shape of the random model")
    parser.add_argument("--model", help="folder of a model with its tokenizer")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    asked = parser.parse_args()
    kinds = list(KINDS) if asked.kinds is None else asked.kinds.split(",")
    with tempfile.TemporaryDirectory() as place:
        folder = asked.model or make_model(Path(place) / "model", asked.preset)
        with (
            Server(folder, asked.context) as server,
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
        ):
            pool.submit(os.getpid).result()
            report = run(server.url, pool, kinds, asked)
    show(report)
    if asked.json is not None:
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


def make_model(folder: Path, shape: str) -> Path:
    """Write a random model with a tokenizer like those of published checkpoints."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

    engine = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.normalizer = normalizers.NFC()
    engine.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    engine.decoder = decoders.ByteLevel()
    texts = [file.read_text("utf-8") for file in sorted(Path(__file__).parents[2].glob("docs/*.md"))]
    engine.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=4093, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
        ),
    )
    engine.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    files = {"tokenizer.json": engine.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    tokenizer = PublishedTokenizer(files)
    torch.manual_seed(0)
    HybridLM(preset(shape, vocab_size=tokenizer.vocab_size)).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


class Server:
    """A `lineate serve` in a process of its own."""

    def __init__(self, folder: Path, context: int) -> None:
        words = [sys.executable, "-m", "lineate.cli", "serve", str(folder), "--port", "0", "--context", str(context)]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        said = ""
        while (found := re.search(r"http://[0-9.]+:\d+", said)) is None:
            line = self.process.stderr.readline()
            if not line:
                raise RuntimeError(f"lineate serve has ended: {said}")
            said += line
        self.url = found[0]
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        until = time.monotonic() + 120
        while time.monotonic() < until:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
        raise RuntimeError("lineate serve did not begin to listen within 120 s")

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def text_body(text: str) -> tuple[str, bytes]:
    """Return a request to continue a text."""
    return COMPLETIONS, json.dumps({"prompt": text, "max_tokens": 1}).encode()


def chat_body(text: str) -> tuple[str, bytes]:
    """Return a request to answer a text."""
    return CHAT, json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 1}).encode()


def repeat(unit: str, size: int = BYTES) -> str:
    """Return a text of a size, made of one unit."""
    return (unit * (size // len(unit) + 1))[:size]


def schema_body(schema: dict[str, Any]) -> tuple[str, bytes]:
    """Return a chat whose answer must keep to a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return CHAT, json.dumps({**SHORT, "max_tokens": 4, "response_format": form}).encode()


KINDS = {
    "text": lambda: text_body(repeat(WORDS)),
    "chat": lambda: chat_body(repeat(WORDS)),
    "one letter": lambda: text_body(repeat("a")),
    "spaces": lambda: text_body(repeat(" ")),
    "markers": lambda: chat_body(repeat("<|im_end|>")),
    "brackets": lambda: chat_body(repeat("<|")),
    "escapes": lambda: (COMPLETIONS, b'{"prompt":"' + b"\\u00e9" * (BYTES // 6) + b'"}'),
    "texts": lambda: (COMPLETIONS, json.dumps({"prompt": [repeat(WORDS, BYTES // 16)] * 16}).encode()),
    "ids": lambda: (COMPLETIONS, b'{"prompt":[' + b"1," * (BYTES // 2) + b"1]}"),
    "lists": lambda: (COMPLETIONS, b'{"prompt":[' + b"[]," * (BYTES // 3) + b"[]]}"),
    "messages": lambda: (
        CHAT,
        json.dumps({"messages": [{"role": "user", "content": repeat(WORDS, BYTES // 4096 - 40)}] * 4096}).encode(),
    ),
    "tools": lambda: (
        CHAT,
        json.dumps({**SHORT, "tools": [
            {"type": "function", "function": {"name": f"f{n}", "description": repeat(WORDS, BYTES // 128 - 90)}}
            for n in range(128)
        ]}).encode(),
    ),
    "below the bound": lambda: text_body(repeat(WORDS, 40_000)),
    "one word below the bound": lambda: text_body(repeat("a", 40_000)),
    "schema": lambda: schema_body({"anyOf": [
        {"type": "object", "properties": {f"{time.time()} {m} {n}": {"type": "string"} for n in range(250)}}
        for m in range(8)
    ]}),
    "regex": lambda: schema_body({"type": "string", "pattern": "^((a|a)*|(a|b)*){1,1000}$"}),
}  # fmt: skip
"""Makes the body of each kind."""


@cache
def body_of(kind: str) -> tuple[str, bytes]:
    """Return the route and the body of a kind."""
    return KINDS[kind]()


async def press(url: str, kind: str, clients: int, seconds: float, once: bool) -> dict[str, Any]:
    """Send prompts of one kind from several clients until the time is over; return what they were answered with."""
    host, _, port = url.removeprefix("http://").partition(":")
    route, body = body_of(kind)
    head = (
        f"POST {route} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    counts: Counter[str] = Counter()
    began, end = time.monotonic(), time.monotonic() + seconds
    took: list[float] = []

    async def client() -> None:
        while True:
            sent = time.monotonic()
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(head.encode() + body)
                answer = await reader.read()
                writer.close()
                text = answer.partition(b"\r\n\r\n")[2]
                code = re.search(rb'"code":"(\w+)"', text)
                counts[answer.split(b" ", 2)[1].decode() + (f" {code[1].decode()}" if code else "")] += 1
                took.append(time.monotonic() - sent)
            except (ConnectionError, IndexError) as error:
                counts[type(error).__name__] += 1
            if once or time.monotonic() > end:
                return

    await asyncio.gather(*(client() for _ in range(clients)))
    return {
        "bytes": len(body), "answers": dict(counts), "seconds": time.monotonic() - began,
        "median_seconds": statistics.median(took) if took else None,
    }  # fmt: skip


def pressed(url: str, kind: str, clients: int, seconds: float, once: bool) -> dict[str, Any]:
    """Run `press` to its end, for a process of its own."""
    return asyncio.run(press(url, kind, clients, seconds, once))


def chats(url: str, going: Any) -> list[float]:
    """Ask for chats, one after another, while `going()` is true; return the seconds of each."""
    found = []
    with httpx.Client(base_url=url, timeout=300) as http:
        while going() or not found:
            began = time.perf_counter()
            answer = http.post(CHAT, json=SHORT)
            found.append(time.perf_counter() - began)
            assert answer.status_code == 200, answer.text
    return found


def run(url: str, pool: ProcessPoolExecutor, kinds: list[str], asked: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers of all kinds."""
    end = time.monotonic() + 2
    chats(url, lambda: time.monotonic() < end)
    rows = []
    for kind in kinds:
        end = time.monotonic() + asked.seconds / 2
        idle = chats(url, lambda end=end: time.monotonic() < end)
        pool.submit(body_of, kind).result()
        pressing = pool.submit(pressed, url, kind, asked.clients, asked.seconds, asked.once)
        time.sleep(0.02)
        busy = chats(url, lambda pressing=pressing: not pressing.done())
        rows.append({"kind": kind, "idle": numbers(idle), "busy": numbers(busy), "prompts": pressing.result()})
        print(line(rows[-1]), flush=True)
    return {
        "command": " ".join(["python -m bench.archive.long_prompts", *given_command()]),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}",
        "context": asked.context,
        "rows": rows,
    }


def numbers(seconds: list[float]) -> dict[str, float]:
    """Return how many chats there were, and the median, the 95th percentile and the longest in milliseconds."""
    ordered = sorted(seconds)
    return {
        "chats": len(ordered),
        "median_ms": round(1000 * statistics.median(ordered), 1),
        "p95_ms": round(1000 * ordered[int(0.95 * (len(ordered) - 1))], 1),
        "longest_ms": round(1000 * ordered[-1], 1),
    }


def line(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    idle, busy, prompts = row["idle"], row["busy"], row["prompts"]
    ratio = busy["median_ms"] / idle["median_ms"]
    answers = ", ".join(f"{count} x {what}" for what, count in prompts["answers"].items())
    return (
        f"{row['kind']:<25}{prompts['bytes']:>10}{idle['median_ms']:>9}{busy['median_ms']:>9}{ratio:>7.2f}"
        f"{busy['p95_ms']:>10}{busy['longest_ms']:>10}{busy['chats']:>6}  {answers}"
    )


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    print(
        f"{'prompts':<25}{'bytes':>10}{'idle ms':>9}{'busy ms':>9}{'ratio':>7}{'95% ms':>10}{'longest':>10}{'chats':>6}"
    )
    for row in report["rows"]:
        print(line(row))
    print(report["machine"])


if __name__ == "__main__":
    main()

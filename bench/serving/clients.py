"""Clients of a server under load: some read, some are slow, some leave, some send nonsense."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
SYSTEMS = tuple(f"You are helper number {n}. " + "Answer briefly and politely. " * 12 for n in range(4))
"""Beginnings that many prompts share."""
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "count"],
    "additionalProperties": False,
}
MALFORMED: tuple[bytes, ...] = (
    b"", b"{", b"[]", b'{"messages": 5}', b'{"messages": []}', b'{"messages": [{"role": "cat", "content": "x"}]}',
    b"[" * 9000, b'{"messages": [{"role": "user", "content": "x"}], "temperature": 99}', b"\xff" * 100,
    b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema"}}',
)  # fmt: skip


@dataclass
class Tally:
    """The observations of one kind of client."""

    outcomes: Counter[str] = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)
    """Seconds until the first token."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of a whole answer."""
    tokens: int = 0
    cached: int = 0
    prompt: int = 0
    faults: list[str] = field(default_factory=list)
    """What should not have happened."""

    def fault(self, what: str) -> None:
        self.outcomes["fault"] += 1
        self.faults.append(what[:300])

    def usage(self, usage: dict[str, Any]) -> None:
        self.tokens += usage["completion_tokens"]
        self.prompt += usage["prompt_tokens"]
        self.cached += usage["prompt_tokens_details"]["cached_tokens"]


class Client:
    """One client, which sends requests until it is told to stop."""

    def __init__(self, http: httpx.AsyncClient, draw: random.Random, tally: Tally, most: int) -> None:
        self.http, self.draw, self.tally, self.most = http, draw, tally, most
        self.known: dict[str, str] = {}

    def body(self, **more: Any) -> dict[str, Any]:
        """Return a chat with one of few beginnings and its own end."""
        messages = [
            {"role": "system", "content": self.draw.choice(SYSTEMS)},
            {"role": "user", "content": f"Question {self.draw.randrange(50)}: " + "why? " * self.draw.randrange(1, 30)},
        ]
        most = self.draw.randrange(1, self.most)
        return {"messages": messages, "max_tokens": most, "seed": self.draw.randrange(10**6), **more}

    async def ask(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Ask for a whole answer; None if the server refused because it is busy."""
        began = time.perf_counter()
        answer = await self.http.post(CHAT, json=body)
        if answer.status_code == 429:
            self.tally.outcomes["busy"] += 1
            await asyncio.sleep(0.2)
            return None
        if answer.status_code != 200:
            self.tally.fault(f"status {answer.status_code}: {answer.text}")
            return None
        made = answer.json()
        self.tally.outcomes["answered"] += 1
        self.tally.seconds.append(time.perf_counter() - began)
        self.tally.usage(made["usage"])
        return made

    async def stream(self, body: dict[str, Any], pause: float = 0.0, leave: int | None = None) -> None:
        """Read a stream, with a pause after each event; leave after the given number of events."""
        began, seen, done = time.perf_counter(), 0, False
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self.http.stream("POST", CHAT, json=body) as answer:
            if answer.status_code == 429:
                self.tally.outcomes["busy"] += 1
                return
            if answer.status_code != 200:
                self.tally.fault(f"status {answer.status_code}: {(await answer.aread()).decode()}")
                return
            async for line in answer.aiter_lines():
                if leave is not None and seen >= leave:
                    self.tally.outcomes["left"] += 1
                    return
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    done = True
                    continue
                value = json.loads(line.removeprefix("data: "))
                if "error" in value:
                    self.tally.fault(f"in a stream: {value['error']}")
                    return
                seen += 1
                if seen == 2:
                    self.tally.first.append(time.perf_counter() - began)
                if value.get("usage"):
                    self.tally.usage(value["usage"])
                await asyncio.sleep(pause)
        if not done:
            self.tally.fault("a stream ended without [DONE]")
            return
        self.tally.outcomes["answered"] += 1
        self.tally.seconds.append(time.perf_counter() - began)


async def steady(client: Client) -> None:
    """Ask and wait."""
    await client.ask(client.body(n=client.draw.choice((1, 1, 2))))


async def streaming(client: Client) -> None:
    """Read a stream at once."""
    await client.stream(client.body())


async def slow(client: Client) -> None:
    """Read a stream slowly."""
    await client.stream(client.body(), pause=0.02)


async def leaving(client: Client) -> None:
    """Leave in the middle of an answer, or before it begins."""
    body = client.body(max_tokens=4 * client.most, ignore_eos=True)
    if client.draw.random() < 0.5:
        await client.stream(body, leave=client.draw.randrange(1, 12))
        return
    try:
        answer = await asyncio.wait_for(client.http.post(CHAT, json=body), client.draw.random() * 0.3)
        client.tally.outcomes["busy" if answer.status_code == 429 else "answered"] += 1
    except TimeoutError:
        client.tally.outcomes["left"] += 1


async def malformed(client: Client) -> None:
    """Send what is no request."""
    content = client.draw.choice(MALFORMED)
    answer = await client.http.post(CHAT, content=content, headers={"content-type": "application/json"})
    if 400 <= answer.status_code < 500 and "error" in answer.json():
        client.tally.outcomes["refused"] += 1
    else:
        client.tally.fault(f"status {answer.status_code} for {content[:60]!r}")
    await asyncio.sleep(0.05)


async def talking(client: Client) -> None:
    """Hold a conversation of several turns; each one repeats those before."""
    body = client.body(max_tokens=max(1, client.most // 4))
    for turn in range(4):
        made = await client.ask(body)
        if made is None:
            return
        said = made["choices"][0]["message"]["content"]
        more = [{"role": "assistant", "content": said}, {"role": "user", "content": f"And then, {turn}?"}]
        body = {**body, "messages": [*body["messages"], *more]}


async def guided(client: Client) -> None:
    """Ask for JSON of a schema, and check it."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    made = await client.ask(client.body(response_format=form, max_tokens=160))
    if made is not None and made["choices"][0]["finish_reason"] == "stop":
        try:
            found = json.loads(made["choices"][0]["message"]["content"])
        except ValueError:
            found = None
        if not isinstance(found, dict) or set(found) != {"ok", "count"}:
            client.tally.fault(f"not of the schema: {made['choices'][0]['message']}")


async def repeating(client: Client) -> None:
    """Ask the same with the same seed: what else runs must not change the answer."""
    number = client.draw.randrange(3)
    question = f"Repeat {number}."
    made = await client.ask({"messages": [{"role": "user", "content": question}], "max_tokens": 16, "seed": number})
    if made is not None:
        said = made["choices"][0]["message"]["content"]
        if client.known.setdefault(question, said) != said:
            client.tally.outcomes["differing"] += 1


KINDS: dict[str, Callable[[Client], Awaitable[None]]] = {
    "steady": steady, "streaming": streaming, "slow": slow, "leaving": leaving, "malformed": malformed,
    "talking": talking, "guided": guided, "repeating": repeating,
}  # fmt: skip


def pressed(
    url: str, clients: int, seconds: float, most: int, seed: int, patience: float = 120
) -> dict[str, Tally]:  # fmt: skip
    """Run `press` to its end, for a process of its own."""
    return asyncio.run(press(url, clients, seconds, most, seed, patience))


async def press(
    url: str, clients: int, seconds: float, most: int, seed: int, patience: float
) -> dict[str, Tally]:  # fmt: skip
    """Run clients of all kinds for a time and return what each kind has seen."""
    tallies = {name: Tally() for name in KINDS}
    names = list(KINDS)
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=patience, limits=limits) as http:

        async def run(number: int) -> None:
            name = names[number % len(names)]
            client = Client(http, random.Random(seed * 1000 + number), tallies[name], most)
            while time.monotonic() < end:
                try:
                    await KINDS[name](client)
                except httpx.HTTPError as error:
                    tallies[name].fault(f"{type(error).__name__}: {error}")

        await asyncio.gather(*(run(number) for number in range(clients)))
    return tallies

"""The rate at which bodies are received: long ones wait, short ones do not, and the wait is no fault of the client."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from starlette.requests import Request

from lineate.web.errors import ApiError
from lineate.web.intake import FREE_BYTES, Intake
from lineate.web.limits import Limits
from lineate.web.responses import read_body

MIB = 2**20


class Clock:
    """Seconds that pass only where something sleeps."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds


def taken(intake, sizes):
    """Return the seconds that each part of one body waits."""

    async def run():
        received, found = 0, []
        for size in sizes:
            found.append(await intake.take(received, size))
            received += size
        return found

    return asyncio.run(run())


def test_short_bodies_do_not_wait():
    clock = Clock()
    intake = Intake(rate=MIB, clock=clock, sleep=clock.sleep)
    for _ in range(1000):
        assert taken(intake, [FREE_BYTES // 2, FREE_BYTES // 2]) == [0.0, 0.0]
    assert clock.now == 0


def test_what_is_beyond_the_first_bytes_has_the_rate():
    clock = Clock()
    intake = Intake(rate=MIB, clock=clock, sleep=clock.sleep)
    assert taken(intake, [FREE_BYTES + MIB, MIB, MIB]) == [1.0, 1.0, 1.0]
    clock.now += 100  # time in which nothing is received is not saved up
    assert taken(intake, [FREE_BYTES, 2 * MIB]) == [0.0, 2.0]


def test_all_bodies_share_the_rate():
    seconds, now = [], 0.0

    async def sleep(waited):
        seconds.append(waited)

    intake = Intake(rate=MIB, clock=lambda: now, sleep=sleep)
    for n in range(1, 5):
        assert taken(intake, [FREE_BYTES + MIB]) == [float(n)]
    assert seconds == [1.0, 2.0, 3.0, 4.0]


def request_of(parts, pause=0.0):
    """Return a request whose body arrives in parts, each after a pause."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive():
        await asyncio.sleep(pause)
        return messages.pop(0)

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


def test_waiting_for_the_rate_is_not_counted_as_the_clients_time():
    intake = Intake(rate=MIB)
    parts = [b" " * (FREE_BYTES + MIB // 2)] * 2  # waits more than the second in which the body must arrive
    body = asyncio.run(read_body(request_of(parts), Limits(body_seconds=1.0), intake))
    assert body == b"".join(parts)


def test_a_slow_client_is_still_refused():
    request = request_of([b" " * (FREE_BYTES + 1)] * 50, pause=0.02)
    with pytest.raises(ApiError) as caught:
        asyncio.run(read_body(request, Limits(body_seconds=0.1), Intake()))
    assert caught.value.status == 408


def test_without_an_intake_there_is_no_limit():
    body = asyncio.run(read_body(request_of([b" " * MIB] * 4), Limits()))
    assert len(body) == 4 * MIB


def test_too_large_a_body_is_refused_before_it_waits():
    intake = SimpleNamespace(take=None)  # must not be called
    with pytest.raises(ApiError) as caught:
        asyncio.run(read_body(request_of([b" " * 200]), Limits(body_bytes=100), intake))
    assert caught.value.status == 413

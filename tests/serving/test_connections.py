"""Connections before a request is there: heads that never end, and bytes that are no HTTP."""

import http.client
import json
import socket
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from lineate.serving.api.service import Description
from lineate.serving.app import Settings
from lineate.web.limits import Limits
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.live_server import WAIT, ScriptedEngine, live

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.fixture(scope="module")
def server():
    tokenizer = chat_tokenizer()
    engine = ScriptedEngine(tokenizer.encode, lambda request, index: "Hello.")
    description = Description("model", context=1000, slots=3, created=0, fingerprint="x")
    with live(engine, tokenizer, description, Settings(limits=Limits(head_seconds=0.3))) as server:
        yield server


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=WAIT)


def rest(connection: socket.socket) -> bytes:
    """Return what comes until the server closes the connection."""
    found = b""
    while True:
        try:
            more = connection.recv(65536)
        except ConnectionResetError:
            return found
        if not more:
            return found
        found += more


@pytest.mark.parametrize("sent", [b"", b"GET", HEAD, HEALTH + b"GET /heal"], ids=["none", "word", "half", "second"])
def test_a_head_that_never_ends(server, sent):
    with connect(server) as connection:
        connection.sendall(sent)
        assert rest(connection).count(b"HTTP/1.1 200") == sent.count(HEALTH)


@pytest.mark.cover
def test_a_head_that_trickles(server):
    """Bytes that come one by one do not prolong the time of a head."""
    with connect(server) as connection, pytest.raises(OSError):
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            connection.sendall(b"x")
            time.sleep(0.05)


@pytest.mark.cover
def test_a_body_may_take_longer_than_a_head(server):
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    with connect(server) as connection:
        connection.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:5])
        time.sleep(0.7)
        connection.sendall(body[5:])
        assert rest(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n" * 9,
        b"GET / HTTP/1.1\r\nno colon here\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -3\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 100_000,
    ],
    ids=["word", "tls", "no colon", "length", "long"],
)  # fmt: skip
def test_bytes_that_are_no_http(server, sent):
    with connect(server) as connection:
        connection.sendall(sent)
        head, _, body = rest(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"application/json" in head
    error = json.loads(body)["error"]
    assert (
        error["type"] == "invalid_request_error" and error["code"] == "invalid_http" and "HTTP/1.1" in error["message"]
    )


@pytest.mark.cover
def test_a_kept_connection_serves_again(server):
    """Times of heads end with them: a connection lives longer than any one."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    for _ in range(3):
        connection.request("GET", "/health")
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read()
        kept = connection.sock
        assert kept is not None
        time.sleep(0.4)
    connection.close()

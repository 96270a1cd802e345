"""Connections between ranks: what is sent arrives in order, and a rank that is lost, fails or differs ends the job."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lineate.parallel.job.link import JobEnded, Link, connect, difference
from lineate.parallel.job.processes import Place
from tests.support.linked import Linked, on_all

LOST = "rank {} has ended without a word: it was killed, or its machine is gone"
ABOUT = {"version": ("1", "1"), "flags": ("a", "a")}


def join(size: int, *about: dict) -> list[Link | BaseException]:
    """Return the link of every rank, each made in a thread, or what it raises."""
    store = dist.HashStore()

    def one(rank: int) -> Link | BaseException:
        try:
            return connect(store, Place(rank, size, rank), about[rank] if about else ABOUT, timedelta(seconds=30))
        except (JobEnded, ValueError) as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


def test_values_are_shared_and_gathered_in_order():
    links = join(3)
    texts = ["a\nb", "\u2028\x85", "x" * 100_000]
    for n, text in enumerate(texts):
        assert on_all(links, lambda link, text=text: link.share(text if not link.rank else None)) == [text] * 3
        assert on_all(links, lambda link, n=n: link.gather([link.rank, n])) == [[[rank, n] for rank in range(3)]] * 3
    links[0].send("step", {"a": 1})
    links[0].send("step", 0.1)
    assert [(link.receive("step"), link.receive("step")) for link in links[1:]] == [({"a": 1}, 0.1)] * 2
    for link in links:
        link.close()
    assert [link.ended for link in links] == [None] * 3


def watched(links: list[Link]) -> list[threading.Event]:
    ended = [threading.Event() for _ in links]
    for link, event in zip(links, ended, strict=True):
        link.watch(lambda _, event=event: event.set())
    return ended


def test_a_rank_that_is_lost_is_named_on_all():
    """Rank 0 waits for all ranks, rank 2 for rank 0; both learn that rank 1 is gone, whatever they wait for."""
    linked = Linked(3)
    links, ended = linked.links, watched(linked.links)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(links[0].gather, None), threads.submit(links[2].receive, "step")]
        linked.lose(1)
        for one in waiting:
            with pytest.raises(JobEnded, match="rank 1 has ended without a word"):
                one.result(30)
    assert ended[0].wait(30) and ended[2].wait(30)
    assert [links[n].ended for n in (0, 2)] == [LOST.format(1)] * 2
    assert links[0].speaker == links[2].speaker == 0
    with pytest.raises(JobEnded, match="rank 1"):
        links[0].send("step", 1)


def test_when_rank_0_is_lost_the_next_one_says_so():
    linked = Linked(3)
    links, ended = linked.links, watched(linked.links)
    linked.lose(0)
    assert ended[1].wait(30) and ended[2].wait(30)
    assert [link.speaker for link in links[1:]] == [1, 1]
    assert {link.ended for link in links[1:]} == {LOST.format(0)}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_is_named_with_its_reason(rank, monkeypatch):
    monkeypatch.setattr("lineate.parallel.job.link.GRACE_SECONDS", 0.05)
    links = Linked(2).links
    ended = watched(links)
    with pytest.raises(JobEnded, match=rf"rank {rank} failed: RuntimeError: no memory"):
        links[rank].fail(RuntimeError("no memory"))
    assert ended[1 - rank].wait(30)
    assert {link.ended for link in links} == {f"rank {rank} failed: RuntimeError: no memory"}


def test_a_rank_that_fails_because_another_was_lost_names_that_one():
    """A collective fails on rank 2 because rank 1 is gone, perhaps before rank 0 has noticed."""
    linked = Linked(3)
    links = linked.links
    with ThreadPoolExecutor(1) as threads:
        failing = threads.submit(links[2].fail, RuntimeError("connection closed by peer"))
        linked.lose(1)
        with pytest.raises(JobEnded, match="rank 1 has ended without a word"):
            failing.result(30)
    assert links[0].ended == links[2].ended


def test_ranks_out_of_step_end_the_job(monkeypatch):
    monkeypatch.setattr("lineate.parallel.job.link.GRACE_SECONDS", 0.05)
    links = Linked(2).links
    links[0].send("step", 1)
    with pytest.raises(JobEnded, match="expected share of rank 0, got step"):
        links[1].share(None)


def test_watching_late_is_not_too_late():
    linked, said = Linked(2), []
    links = linked.links
    linked.lose(1)
    with pytest.raises(JobEnded):
        links[0].gather(None)
    links[0].watch(said.append)
    assert said == [links[0].ended]


def test_a_rank_that_differs_is_refused():
    other = {"version": ("2", "two"), "flags": ("b", "b")}
    first, second, third = join(3, ABOUT, ABOUT, other)
    why = "every rank must have the same version, got two on rank 2 and 1 on rank 0"
    assert isinstance(first, ValueError) and str(first) == why
    assert isinstance(second, JobEnded) and isinstance(third, JobEnded) and str(third) == why


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (ABOUT, None),
        ({"version": ("1", "one"), "flags": ("a", "a")}, None),
        ({"version": ("1", "1")}, "every rank must have the same flags, got nothing on rank 3 and a on rank 0"),
        (ABOUT | {"more": ("x", "x")}, "every rank must have the same more, got x on rank 3 and nothing on rank 0"),
    ],
)
def test_what_differs_is_named(theirs, expected):
    assert difference(3, theirs, ABOUT) == expected


def test_a_stranger_is_ignored():
    """Rank 0 listens on a port; whoever does not know the word from the store is not one of its ranks."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(connect, store, Place(0, 2, 0), ABOUT, timedelta(seconds=30))
        host, port, _ = json.loads(store.get("lineate/link"))
        for line in (b"nonsense\n", b'["wrong", 1, {}]\n', b"[1]\n", b""):
            with socket.create_connection((host, port)) as stranger:
                stranger.sendall(line)
        second = threads.submit(connect, store, Place(1, 2, 1), ABOUT, timedelta(seconds=30))
        links = [first.result(30), second.result(30)]
    assert on_all(links, lambda link: link.gather(link.rank)) == [[0, 1]] * 2


def test_ranks_of_several_machines_meet_at_the_address_of_the_first(monkeypatch):
    """Any name of this machine that is not its loopback's usual one stands for that of another machine."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    links = join(2)
    assert on_all(links, lambda link: link.gather(link.rank)) == [[0, 1]] * 2


def test_a_rank_that_never_comes():
    with pytest.raises(TimeoutError, match=r"expected 2 ranks within 0:00:00\.100000, got 0"):
        connect(dist.HashStore(), Place(0, 2, 0), ABOUT, timedelta(seconds=0.1))

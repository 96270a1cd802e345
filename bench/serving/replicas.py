"""How much more several replicas under Ray Serve generate than one, each with the same share of a core.

    python -m bench.serving.replicas --replicas 3 --share 0.15 --seconds 30 --rounds 2 --json replicas.json

One replica and several are served in turn, over a small random model or --model FOLDER. After the start, the process of
every replica is put into a control group of its own (Linux, as root) that allows it `share` of one core, so that the
cores of the machine do not run out as replicas are added: on two cores, three replicas at 0.15 leave most of the time
to Ray, to the front and to the clients. The clients send prompts of their own without a pause, more of them than all
slots. What is counted are the tokens that the engines of all replicas generated in `seconds`, by their own metrics, and
the processor time of the replicas in that time. The ratio says what the front, the router and Ray cost; it says nothing
about the speed of a model.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
START_SECONDS = 240.0
PERIOD = 100_000
"""Microseconds of which a replica has its share."""
GROUPS = Path("/sys/fs/cgroup")


class Server:
    """A running `lineate serve --replicas`, until `end`.

    Args:
        words: The options of the command.
        environment: More variables of the environment.
    """

    def __init__(self, *words: Any, **environment: str) -> None:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        variables.pop("RAY_ADDRESS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lineate.cli", "serve", *map(str, words), "--port", "0"],
            env=variables, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.said = ""
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            _until(lambda: self.process.poll() is not None or "/v1" in self.said, "the address")
            found = re.search(r"http://127\.0\.0\.1:\d+", self.said)
            if found is None:
                raise RuntimeError(self.said)
            self.url = found[0]
            self.http = httpx.Client(base_url=self.url, timeout=START_SECONDS)
            _until(self._healthy, "the server")
        except BaseException:
            self.end()
            raise

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def end(self) -> None:
        """End it, however it is; a Ray of its own ends with it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)

    def samples(self, name: str) -> list[dict[str, Any]]:
        """The labels of all samples of a metric, with its `value`."""
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return [{**x.labels, "value": x.value} for f in families for x in f.samples if x.name == name]

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric over all samples with these labels."""
        return sum(x["value"] for x in self.samples(name) if labels.items() <= x.items())

    def processes(self) -> list[int]:
        """The ids of the processes of the replicas."""
        parents, found, ours = {}, set(), {self.process.pid}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if (path / "cmdline").read_bytes().startswith(b"ray::ServeReplica"):
                    found.add(int(path.name))
            except OSError:  # it has ended
                continue
        while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
            ours |= more
        return sorted(found & ours)


def _until(true: Any, what: str) -> None:
    end = time.monotonic() + START_SECONDS
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come within {START_SECONDS} s")
        time.sleep(0.05)


@contextlib.contextmanager
def limited(pid: int, share: float) -> Iterator[None]:
    """Let a process have a share of one core, and no more, while the block runs; it is moved to a group of its own.

    Args:
        pid: The process.
        share: The part of a core.
    """
    first = (GROUPS / "cpu" / "cpu.cfs_quota_us").exists()  # version 1 of control groups
    root = GROUPS / "cpu" if first else GROUPS
    group = root / f"lineate-bench-{pid}"
    group.mkdir()
    try:
        if first:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD)))
        else:
            (group / "cpu.max").write_text(f"{int(share * PERIOD)} {PERIOD}")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(OSError):  # the process has ended
            (root / "cgroup.procs").write_text(str(pid))
        with contextlib.suppress(OSError):
            group.rmdir()


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def press(url: str, number: int, tokens: int, stop: threading.Event, faults: list[str]) -> None:
    """Send prompts of one client, one after another, until the event is set."""
    with httpx.Client(base_url=url, timeout=START_SECONDS) as http:
        n = 0
        while not stop.is_set():
            n += 1
            text = f"{number} {n} " * 8 + f"Client {number} asks question {n}, which nobody has asked before."
            body = {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": tokens,
                "ignore_eos": True,
                "seed": n,
            }
            try:
                answer = http.post(CHAT, json=body)
                if answer.status_code != 200:
                    faults.append(answer.text)
            except httpx.HTTPError as error:
                faults.append(repr(error))


def measure(folder: Path, replicas: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Serve the given number of replicas, press them, and return what they generated and used."""
    words = (folder, "--replicas", replicas, "--slots", asked.slots, "--context", 2048, "--replica-cpus", 0.5)
    stop, faults = threading.Event(), []
    with Server(*words) as server, contextlib.ExitStack() as limits:
        pids = server.processes()
        assert len(pids) == replicas, pids
        for pid in pids:
            limits.enter_context(limited(pid, asked.share))
        clients = [
            threading.Thread(target=press, args=(server.url, n, asked.tokens, stop, faults), daemon=True)
            for n in range(asked.clients)
        ]
        for client in clients:
            client.start()
        time.sleep(asked.warm)

        def counted() -> tuple[float, float, list[float]]:
            return time.monotonic(), server.total("lineate_engine_new_tokens_total"), list(map(processor_seconds, pids))

        began, tokens, used = counted()
        time.sleep(asked.seconds)
        ended, more, after = counted()
        stop.set()
        limits.close()  # so that the last answers end soon
        for client in clients:
            client.join()
    seconds = ended - began
    return {
        "replicas": replicas,
        "tokens_per_second": (more - tokens) / seconds,
        "shares": [round((y - x) / seconds, 4) for x, y in zip(used, after, strict=True)],
        "faults": faults,
    }


def make_model(folder: Path, name: str) -> None:
    """Write a random model and its tokenizer."""
    import torch

    from lineate.models import HybridLM, preset
    from lineate.text.tokenizer import Bytes

    torch.manual_seed(0)
    HybridLM(preset(name, vocab_size=Bytes.vocab_size)).eval().save_pretrained(folder)
    Bytes().save(folder)


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.15, help="part of a core for each replica")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long tokens are counted")
    parser.add_argument("--warm", type=float, default=10.0, help="seconds of load before that")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slots", type=int, default=4, help="sequences that a replica generates at once")
    parser.add_argument("--clients", type=int, default=18)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--preset", default="small", help="size of the random model")
    parser.add_argument("--model", type=Path, help="folder of a model with its tokenizer instead")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    asked = parser.parse_args()
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = asked.model or Path(made) / "model"
        if asked.model is None:
            make_model(folder, asked.preset)
        for _ in range(asked.rounds):
            one, several = (measure(folder, n, asked) for n in (1, asked.replicas))
            ratio = several["tokens_per_second"] / one["tokens_per_second"]
            faults = one["faults"] + several["faults"]
            rounds.append({"ratio": ratio, "shares": [one["shares"], several["shares"]], "faults": faults})
            print(f"{asked.replicas} replicas generate {ratio:.2f} times what one does; cores used: "
                  f"{one['shares']} and {several['shares']}; faults: {len(faults)}",
                  flush=True)  # fmt: skip
    ratio = statistics.median(x["ratio"] for x in rounds)
    print(f"median: {ratio:.2f}")
    if asked.json is not None:
        options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(asked).items()}
        command = "python -m bench.serving.replicas"
        asked.json.write_text(
            json.dumps({"command": command, "options": options, "rounds": rounds, "ratio": ratio}, indent=1) + "\n"
        )
    sys.exit(any(x["faults"] for x in rounds))


if __name__ == "__main__":
    main()

"""lineate and one peer in turns on some cases, in a process that bench/rules/gpu_contest.py starts.

The process first imports the peer, then compiles everything and checks every result, then measures. Before the second
and the third part it waits until the file `prepare` or `measure` of its folder exists, so that nothing else runs on the
GPU while something is timed. Every line that it appends to the file `lines` is one JSON object.
"""

import gc
import json
import math
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.rules import gpu_timing
from bench.rules.gpu_adapters import BackendLog, load_peer, plans
from bench.rules.gpu_cases import Case
from bench.rules.gpu_contest_cases import NOBODY, PEERS, bound_ms, case_of
from bench.rules.gpu_inputs import PeerInputs, make_inputs
from bench.rules.gpu_peers import call_of, errors, named, summary, versions
from bench.timing import Call

CHECKED = 32768  # the longest last sequence that is compared with the float32 form, whose loop over chunks takes long
ANOTHER_FUNCTION = 0.5  # the relative error from which a result is not worth timing
ROUNDS = 6  # turns of each side


class Child:
    """The state of the process: where its lines go, and what it found out of each case before measuring."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.folder, self.who = Path(job["folder"]), job["who"]
        self.seconds, self.parent = job["seconds"], os.getppid()
        self.cases = {n: case_of(record) for n, record in job["cases"]}
        self.log = BackendLog()

    def say(self, **line: Any) -> None:
        with (self.folder / "lines").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def wait_for(self, name: str) -> None:
        while not (self.folder / name).exists():
            if os.getppid() != self.parent:
                sys.exit(f"nobody is left who could say {name}")
            time.sleep(0.02)

    def compile_ours(self) -> None:
        """Run lineate once on every case, and say so, because other processes then find its kernels in the cache."""
        for case in self.cases.values():
            call_of(case, "ours", make_inputs(case, 0))()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self.say(compiled=True)

    def check(self, case: Case) -> dict[str, Any]:
        """Compile what the peer needs for a case, and compare both sides' results with float32 and with each other."""
        x = make_inputs(case, 0)
        found: dict[str, Any] = {"errors": {}, "paths": {}, "differences": {}}
        long = (case.lengths or (case.t,))[-1] > CHECKED
        own, found["errors"]["lineate"] = result(case, "ours", x, long)
        if self.who == NOBODY:
            return found
        for path, key in PEERS[self.who].paths(case).items():
            try:
                got, wrong = result(case, key, x, long)
                differ = {n: distance(got[n], y) for n, y in own.items()}
                away = max([*wrong.values(), *differ.values()])
                if away > ANOTHER_FUNCTION:
                    raise ArithmeticError(f"its result is another function's: error {away:.2g}")
                found["paths"][path] = {"key": key, "errors": wrong, "differences": differ}
            except Exception as problem:
                traceback.print_exc()
                found.setdefault("refused", {})[path] = summary(problem)
                if "CUDA error" in str(problem):
                    raise
            torch.cuda.empty_cache()
        if not found["paths"]:
            raise RuntimeError("; ".join(filter(None, found["refused"].values())))
        return found

    def measure(self, case: Case, known: dict[str, Any], rate: float) -> dict[str, Any]:
        """Return the record of a case: lineate and the faster path of the peer, in turns."""
        sets = input_sets(case)
        sides = {"lineate": [call_of(case, "ours", x) for x in sets]}
        record: dict[str, Any] = {"errors": {"lineate": known["errors"]["lineate"]}, "bound_ms": bound_ms(case, rate)}
        record |= {"copy_bytes_per_second": rate, "refused": known.get("refused", {})}
        if self.who != NOBODY:
            path, tried = self.fastest(case, sets, known["paths"])
            chosen = known["paths"][path]
            sides["peer"] = [call_of(case, chosen["key"], x) for x in sets]
            record |= {"path": path, "tried_ms": tried, "differences": chosen["differences"]}
            record["errors"]["peer"] = chosen["errors"]
        taken = self.log.path() if self.who == "fla" else plans()
        return {**record, "plans": taken, **measure_sides(sides, self.seconds)}

    def fastest(self, case: Case, sets: list[PeerInputs], paths: dict[str, Any]) -> tuple[str, dict[str, float]]:
        """Return the path that takes the device the least time, and the milliseconds of all."""
        if len(paths) == 1:
            return next(iter(paths)), {}
        tried = {}
        for path, known in paths.items():
            calls = [call_of(case, known["key"], x) for x in sets]
            rough = statistics.median(gpu_timing.in_turns({"": calls}, 0.02, 2)[""])
            try:
                tried[path] = statistics.median(gpu_timing.graph_replays(calls, rough, 0.03))
            except Exception:  # whatever a peer raises while captured
                tried[path] = rough
        return min(tried, key=lambda path: tried[path]), tried


def result(case: Case, key: str, x: PeerInputs, long: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the named results of one call, and their errors from float32 unless the last sequence is too long."""
    call = call_of(case, key, x)
    got = call()
    torch.cuda.synchronize()
    wrong = {} if long else errors(case, key, x, got, getattr(call, "weight", None))
    return {name: y.detach() for name, y in named(case, key, x, got).items()}, wrong


def distance(a: Tensor, b: Tensor) -> float:
    """Return the relative difference (2-norm) of a tensor from another; it is infinite if one is not finite."""
    found = float((a.float() - b.float()).norm() / b.float().norm())
    return found if math.isfinite(found) else math.inf


def input_sets(case: Case) -> list[PeerInputs]:
    """Return as many sets of inputs as fill twice the L2 cache."""
    cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or 2**26
    first = make_inputs(case, 0)
    count = min(gpu_timing.AT_MOST, math.ceil(2 * cache / first.nbytes))
    return [first, *(make_inputs(case, seed) for seed in range(1, count))]


def measure_sides(sides: dict[str, list[Call]], seconds: float) -> dict[str, dict[str, Any]]:
    """Return for each side the medians of calls from Python, of the host's time, and of replayed graphs, in ms."""
    python = gpu_timing.in_turns(sides, seconds, ROUNDS)
    found: dict[str, dict[str, Any]] = {}
    graphs, counts = {}, {}
    for name, calls in sides.items():
        found[name] = {"event_ms": statistics.median(python[name]), "event_count": len(python[name]), "graph_ms": None}
        found[name]["host_ms"] = 1e3 * statistics.median(gpu_timing.host_seconds(calls, seconds / 4))
        try:
            graphs[name], counts[name] = gpu_timing.capture(calls, found[name]["event_ms"])
        except Exception as problem:  # the times from Python remain valid
            found[name]["graph_error"] = summary(problem)
            torch.cuda.synchronize()
    replays = gpu_timing.in_turns({name: [graph.replay] for name, graph in graphs.items()}, seconds, ROUNDS)
    for name, samples in replays.items():
        each = [x / counts[name] for x in samples]
        low, high = (statistics.quantiles(each, n=4)[i] for i in (0, 2))
        found[name] |= {"graph_ms": statistics.median(each), "graph_quartiles": [low, high], "graph_count": len(each)}
        graphs[name].reset()
    return found


def main(job: dict[str, Any]) -> None:
    child = Child(job)
    try:
        child.log.listen()
        torch.zeros(1, device="cuda")
        if child.who != NOBODY:
            load_peer(child.who, job["peers"])
    except Exception as problem:  # an optional package that is not there, or that lacks something
        traceback.print_exc()
        child.say(absent=summary(problem))
        return
    child.say(loaded=versions(), gpu=torch.cuda.get_device_name(), cuda=torch.version.cuda)
    child.wait_for("prepare")
    started = time.perf_counter()
    child.compile_ours()
    known = {}
    for n, case in child.cases.items():
        child.say(checks=n)
        try:
            known[n] = child.check(case)
            child.say(checked=n, errors=known[n])
        except Exception as problem:
            traceback.print_exc()
            child.say(failed=n, why=summary(problem))
            if "CUDA error" in str(problem):
                raise
        gc.collect()
        torch.cuda.empty_cache()
    child.say(ready=time.perf_counter() - started)
    child.wait_for("measure")
    rate = gpu_timing.copy_rate()
    torch.cuda.empty_cache()
    for n in known:
        child.say(measures=n)
        try:
            record = child.measure(child.cases[n], known[n], rate)
            child.say(done=n, record=record, versions=versions())
        except Exception as problem:
            traceback.print_exc()
            child.say(failed=n, why=summary(problem))
            if "CUDA error" in str(problem):
                raise
        gc.collect()
        torch.cuda.empty_cache()
    child.say(ended=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

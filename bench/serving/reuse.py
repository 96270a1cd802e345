"""Time to the first token of prompts that begin as earlier ones did, compared with a cold read and with other servers.

    python -m bench.serving.reuse [--json FILE] [--quick] [--llama-server FILE]

All sides have the same random float32 weights: Qwen3-Next's shape at hidden 1024 with 8 layers ("GGGA", dense
feed-forwards). Prompts of 4,096 tokens go through the engine with a state cache, also after a restart, when states are
read from files. transformers reads the prompt whole, and goes on from its own cache in the second turn. Every round
takes new prompts, and measures all cases one after the other; the machine disturbs them alike.

--llama-server names llama.cpp's program of that name, which answers the same prompts in the same order, over HTTP. The
weights are written for it as a GGUF file, for which the package gguf has to be installed, and it first shows that it
finds the same log-probabilities as transformers. Its slot is saved to a file at the end of the conversation, and
restored after every restart.
"""

import argparse
import copy
import importlib.metadata
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from bench.models.cpu import VOCAB, load_both, qwen3_next
from bench.serving.gguf_writer import write_gguf
from bench.serving.llama import Asked, LlamaServer, version_of
from bench.timing import OtherProcesses, cpu_model, show
from lineate.generation.choice import Sampling
from lineate.models import HybridLM
from lineate.serving.cache.cache import StateCache
from lineate.serving.cache.identity import identity_of
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.requests import Request

SPACING, TURNS, NEW, ANSWER, EDIT = 256, 10, 32, 16, 100
COLD, THEIRS_COLD, THEIRS_TURN = "a cold read", "transformers: a cold read", "transformers: the second turn"
LLAMA = "llama.cpp: "


def drawn(tokens: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


class Contestant(Protocol):
    """A server whose states go to a folder when it is restarted."""

    def start(self) -> float: ...
    def stop(self) -> float: ...
    def ask(self, ids: Sequence[int], new: int = 1) -> Asked: ...


class Server:
    """An engine whose states go to a folder when it is restarted."""

    def __init__(self, model: HybridLM, folder: Path, context: int) -> None:
        self.model, self.folder, self.context = model, folder, context
        self.start()

    def start(self) -> float:
        """Start it; return the seconds that it took to find the states in the folder."""
        identity, begun = identity_of(self.model), time.perf_counter()
        self.cache = StateCache(2 * 2**30, SPACING, self.folder, identity)
        seconds = time.perf_counter() - begun
        self.engine = Engine(self.model, slots=1, context=self.context, spacing=SPACING, cache=self.cache)
        return seconds

    def stop(self) -> float:
        """Stop it; return the seconds that it took to write the states."""
        self.engine.stop()
        begun = time.perf_counter()
        self.cache.close()
        return time.perf_counter() - begun

    def ask(self, ids: Sequence[int], new: int = 1) -> Asked:
        """Ask the engine, in this process, for the likeliest tokens."""
        first: list[float] = []
        tokens: list[int] = []
        cached = 0

        def listen(event: Any) -> None:
            nonlocal cached
            first.append(time.perf_counter())
            tokens.extend(event.tokens)
            cached = event.cached_tokens

        begun = time.perf_counter()
        self.engine.submit(Request(tuple(ids), Sampling(temperature=0), max_new_tokens=new), listen)
        while self.engine.step():
            pass
        assert len(tokens) == new
        return Asked(first[0] - begun, len(ids) - cached, tokens)


class Found:
    """The result of each case, one entry a round."""

    def __init__(self) -> None:
        self.asked: dict[str, list[Asked]] = defaultdict(list)
        self.more: dict[str, list[float]] = defaultdict(list)

    def add(self, case: str, asked: Asked) -> list[int]:
        self.asked[case].append(asked)
        return asked.tokens

    def least(self, case: str) -> float:
        return min(asked.seconds for asked in self.asked[case])


def measure_server(server: Contestant, prompt: list[int], seed: int, found: Found, who: str = "") -> list[int]:
    """Measure one round; return the answer to the first turn."""
    answer = found.add(who + COLD, server.ask(prompt, ANSWER))
    found.add(who + "the same prompt again", server.ask(prompt, ANSWER))
    found.add(who + f"other {NEW} tokens after it", server.ask([*prompt, *drawn(NEW, seed + 1)]))
    edited = list(prompt)
    edited[-EDIT] = (edited[-EDIT] + 1) % VOCAB
    found.add(who + f"an edit {EDIT} tokens before its end", server.ask(edited))
    ids, said = prompt, answer
    for turn in range(2, TURNS + 1):
        ids = [*ids, *said, *drawn(NEW, seed + turn)]
        case = {2: "the second turn", TURNS: f"turn {TURNS} of a conversation"}.get(turn, "turns between")
        said = found.add(who + case, server.ask(ids, ANSWER))
    for case, asked in {
        "the same prompt after a restart": prompt,
        f"turn {TURNS + 1} after a restart": [*ids, *said, *drawn(NEW, seed + 99)],
    }.items():
        found.more[who + "close"].append(server.stop())
        found.more[who + "open"].append(server.start())
        found.add(who + case, server.ask(asked, ANSWER))
    return answer


@torch.inference_mode()
def measure_theirs(model: Any, prompt: list[int], answer: list[int], seed: int, found: Found) -> float:
    """Measure transformers; return how far its second turn is from reading all tokens whole, relative to the logits."""
    begun = time.perf_counter()
    out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    token = out.logits[0, -1].argmax().item()
    found.add(THEIRS_COLD, Asked(time.perf_counter() - begun, len(prompt), [token]))
    past = out.past_key_values
    for each in answer[:-1]:
        model(torch.tensor([[each]]), past_key_values=past, use_cache=True)
    new = [answer[-1], *drawn(NEW, seed + 2)]
    kept = copy.deepcopy(past)
    begun = time.perf_counter()
    logits = model(torch.tensor([new]), past_key_values=kept, use_cache=True, logits_to_keep=1).logits[0, -1]
    found.add(THEIRS_TURN, Asked(time.perf_counter() - begun, len(new), [logits.argmax().item()]))
    whole = model(torch.tensor([[*prompt, *answer[:-1], *new]]), use_cache=False, logits_to_keep=1).logits[0, -1]
    return ((logits - whole).abs().max() / whole.abs().max()).item()


class Llama:
    """llama.cpp's server with the weights of transformers' model."""

    def __init__(self, binary: Path, model: Any, folder: Path, context: int) -> None:
        self.binary, self.file, self.context = binary, folder / "model.gguf", context
        write_gguf(model, self.file)
        self.about: dict[str, Any] = {"version": version_of(binary), "same_answers": []}
        with self._started(folder) as server:
            self.about |= {"options": server.options, "log_probability_difference": self._difference(model, server)}

    def _started(self, folder: Path) -> LlamaServer:
        return LlamaServer(self.binary, self.file, folder, self.context, torch.get_num_threads())

    @staticmethod
    @torch.inference_mode()
    def _difference(model: Any, server: LlamaServer) -> float:
        """Return how far its log-probabilities of the next token are from those of transformers."""
        ids = drawn(300, 0)
        theirs = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1].log_softmax(-1)
        found = server.log_probabilities(ids, VOCAB)
        assert len(found) == VOCAB
        worst = (torch.tensor([found[token] for token in range(VOCAB)]) - theirs).abs().max().item()
        assert worst < 1e-4, f"llama.cpp runs another model: log-probabilities differ by {worst:.1e}"
        return worst

    def measure(self, folder: Path, prompt: list[int], answer: list[int], seed: int, found: Found) -> None:
        """Measure one round; `answer` is our engine's to the first turn, with which its own is compared."""
        with self._started(folder) as server:
            said = measure_server(server, prompt, seed, found, LLAMA)
        self.about["same_answers"].append(said == answer)


def rows(found: Found) -> list[dict[str, Any]]:
    """Return one row a case, with ratios of the fastest rounds."""
    least = {case: found.least(case) for case in found.asked}
    results = []
    for case, asked in found.asked.items():
        row = {
            "case": case, "read_tokens": asked[-1].read, "seconds": [each.seconds for each in asked],
            "median": statistics.median(each.seconds for each in asked),
            "faster_than_cold": least[COLD] / least[case],
            "faster_than_transformers_cold": least[THEIRS_COLD] / least[case],
            "faster_than_transformers_turn": least[THEIRS_TURN] / least[case],
        }  # fmt: skip
        if LLAMA + case in least:
            row["faster_than_llama_cpp"] = least[LLAMA + case] / least[case]
        if case.startswith(LLAMA):
            row |= {"own_seconds": [each.own_seconds for each in asked], "log": asked[-1].log}
        results.append(row)
    return results


def show_results(results: list[dict[str, Any]], title: str) -> None:
    """Print a line for each case: what was read, the fastest time, and ratios."""
    ratios = {
        "faster_than_cold": "a cold read",
        "faster_than_transformers_cold": "transformers' cold read",
        "faster_than_transformers_turn": "transformers' second turn",
        "faster_than_llama_cpp": "llama.cpp",
    }
    ratios = {key: name for key, name in ratios.items() if any(key in r for r in results)}
    table = [
        [r["case"], str(r["read_tokens"]), f"{1e3 * min(r['seconds']):.1f}"]
        + [f"{r[key]:.2f}x" if key in r else "" for key in ratios]
        for r in results
    ]
    show(f"{title}: faster than ...", ["", "read", "ms", *ratios.values()], table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("bench/out/serving-reuse-cpu.json"))
    parser.add_argument("--quick", action="store_true", help="a prompt of 1,024 tokens, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server, measured too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokens, rounds = (1024, 1) if args.quick else (4096, args.rounds)
    theirs, ours = load_both(qwen3_next, True)
    assert ours.config.letters == "GGGAGGGA"
    others, found, differences = OtherProcesses(), Found(), []
    with tempfile.TemporaryDirectory() as folder:
        llama = Llama(args.llama_server, theirs, Path(folder), tokens + 1024) if args.llama_server else None
        for n in range(rounds):
            prompt, seed = drawn(tokens, 1000 * n), 1000 * n
            with tempfile.TemporaryDirectory(dir=folder) as states:
                server = Server(ours, Path(states), tokens + 1024)
                answer = measure_server(server, prompt, seed, found)
                server.stop()
            differences.append(measure_theirs(theirs, prompt, answer, seed, found))
            if llama is not None:
                with tempfile.TemporaryDirectory(dir=folder) as states:
                    llama.measure(Path(states), prompt, answer, seed, found)
            print(f"round {n + 1} of {rounds}", flush=True)
    results, busy = rows(found), others.cores()
    show_results(results, f"time to the first token after {tokens} tokens, fastest of {rounds}")
    print(f"writing all states took {max(found.more['close']):.2f} s, finding them {max(found.more['open']):.3f} s")
    print(f"transformers' second turn differs from reading whole by {max(differences):.1e} of the largest logit")
    if busy is not None and busy > OtherProcesses.BUSY:
        print(f"other processes kept {busy:.1f} cores busy: the ratios cannot be trusted")
    head = {
        "date": datetime.now(UTC).date().isoformat(), "cpu": cpu_model(), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "transformers": importlib.metadata.version("transformers"), "other_cores": busy,
        "tokens": tokens, "spacing": SPACING, "transformers_turn_difference": differences,
        "close_seconds": found.more["close"], "open_seconds": found.more["open"],
    }  # fmt: skip
    if llama is not None:
        of_slot = {"save_seconds": found.more[LLAMA + "close"][::2], "restore_seconds": found.more[LLAMA + "open"]}
        head["llama_cpp"] = {**llama.about, **of_slot}
        print(f"llama.cpp: {json.dumps(head['llama_cpp'], indent=1)}")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"header": head, "results": results}, indent=1) + "\n")
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

"""Time to the first token of prompts that begin as earlier ones did, beside a cold read and beside transformers.

    python -m bench.serving.reuse [--json FILE] [--quick]

Both sides have the same random float32 weights: Qwen3-Next's shape at hidden 1024 with 8 layers ("GGGA", dense
feed-forwards). Prompts of 4,096 tokens go through the engine with a state cache, also after a restart, when states are
read from files. transformers reads the prompt whole, and goes on from its own cache in the second turn. Every round
takes new prompts, and measures all cases one after the other; the machine disturbs them alike.
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
from typing import Any

import torch

from bench.models.cpu import VOCAB, load_both, qwen3_next
from bench.timing import OtherProcesses, cpu_model, show
from lineate.generation.choice import Sampling
from lineate.models import HybridLM
from lineate.serving.cache import StateCache
from lineate.serving.engine import Engine
from lineate.serving.identity import identity_of
from lineate.serving.requests import Request

SPACING, TURNS, NEW, ANSWER, EDIT = 256, 10, 32, 16, 100
COLD, THEIRS_COLD, THEIRS_TURN = "a cold read", "transformers: a cold read", "transformers: the second turn"


def drawn(tokens: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


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

    def ask(self, ids: Sequence[int], new: int = 1) -> tuple[float, int, list[int]]:
        """Return the seconds to the first token, the tokens of the prompt that were read, and the answer."""
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
        return first[0] - begun, len(ids) - cached, tokens


class Found:
    """The seconds of each case, one entry a round, and the tokens that it read."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.read: dict[str, int] = {}
        self.more: dict[str, list[float]] = defaultdict(list)

    def add(self, case: str, asked: tuple[float, int, list[int]]) -> list[int]:
        seconds, self.read[case], answer = asked
        self.seconds[case].append(seconds)
        return answer


def measure_ours(server: Server, prompt: list[int], seed: int, found: Found) -> list[int]:
    """Measure one round of the engine; return the answer to the first turn."""
    answer = found.add(COLD, server.ask(prompt, ANSWER))
    assert found.add("the same prompt again", server.ask(prompt, ANSWER)) == answer
    found.add(f"other {NEW} tokens after it", server.ask([*prompt, *drawn(NEW, seed + 1)]))
    edited = list(prompt)
    edited[-EDIT] = (edited[-EDIT] + 1) % VOCAB
    found.add(f"an edit {EDIT} tokens before its end", server.ask(edited))
    ids, said = prompt, answer
    for turn in range(2, TURNS + 1):
        ids = [*ids, *said, *drawn(NEW, seed + turn)]
        case = {2: "the second turn", TURNS: f"turn {TURNS} of a conversation"}.get(turn, "turns between")
        said = found.add(case, server.ask(ids, ANSWER))
    found.more["close"].append(server.stop())
    found.more["open"].append(server.start())
    found.add("the same prompt after a restart", server.ask(prompt, ANSWER))
    found.more["close"].append(server.stop())
    found.more["open"].append(server.start())
    found.add(f"turn {TURNS + 1} after a restart", server.ask([*ids, *said, *drawn(NEW, seed + 99)]))
    return answer


@torch.inference_mode()
def measure_theirs(model: Any, prompt: list[int], answer: list[int], seed: int, found: Found) -> float:
    """Measure transformers; return how far its second turn is from reading all tokens whole, relative to the logits."""
    begun = time.perf_counter()
    out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    token = out.logits[0, -1].argmax().item()
    found.add(THEIRS_COLD, (time.perf_counter() - begun, len(prompt), [token]))
    past = out.past_key_values
    for each in answer[:-1]:
        model(torch.tensor([[each]]), past_key_values=past, use_cache=True)
    new = [answer[-1], *drawn(NEW, seed + 2)]
    kept = copy.deepcopy(past)
    begun = time.perf_counter()
    logits = model(torch.tensor([new]), past_key_values=kept, use_cache=True, logits_to_keep=1).logits[0, -1]
    found.add(THEIRS_TURN, (time.perf_counter() - begun, len(new), [logits.argmax().item()]))
    whole = model(torch.tensor([[*prompt, *answer[:-1], *new]]), use_cache=False, logits_to_keep=1).logits[0, -1]
    return ((logits - whole).abs().max() / whole.abs().max()).item()


def rows(found: Found) -> list[dict[str, Any]]:
    """Return one row a case, with ratios of the fastest rounds."""
    least = {case: min(seconds) for case, seconds in found.seconds.items()}
    return [
        {
            "case": case, "read_tokens": found.read[case], "seconds": seconds,
            "median": statistics.median(seconds), "faster_than_cold": least[COLD] / least[case],
            "faster_than_transformers_cold": least[THEIRS_COLD] / least[case],
            "faster_than_transformers_turn": least[THEIRS_TURN] / least[case],
        }
        for case, seconds in found.seconds.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("bench/out/serving-reuse-cpu.json"))
    parser.add_argument("--quick", action="store_true", help="a prompt of 1,024 tokens, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokens, rounds = (1024, 1) if args.quick else (4096, args.rounds)
    theirs, ours = load_both(qwen3_next, True)
    assert ours.config.letters == "GGGAGGGA"
    others, found, differences = OtherProcesses(), Found(), []
    for n in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            server = Server(ours, Path(folder), tokens + 1024)
            prompt = drawn(tokens, 1000 * n)
            answer = measure_ours(server, prompt, 1000 * n, found)
            server.stop()
        differences.append(measure_theirs(theirs, prompt, answer, 1000 * n, found))
        print(f"round {n + 1} of {rounds}", flush=True)
    results, busy = rows(found), others.cores()
    table = [
        [
            r["case"], str(r["read_tokens"]), f"{1e3 * min(r['seconds']):.1f}", f"{r['faster_than_cold']:.1f}x",
            f"{r['faster_than_transformers_cold']:.1f}x", f"{r['faster_than_transformers_turn']:.2f}x",
        ]
        for r in results
    ]  # fmt: skip
    columns = ["", "read", "ms", "a cold read", "transformers' cold read", "transformers' second turn"]
    show(f"time to the first token after {tokens} tokens, fastest of {rounds}: faster than ...", columns, table)
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
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"header": head, "results": results}, indent=1) + "\n")
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

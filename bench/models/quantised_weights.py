"""Weights of 32, 16, 8 and 4 bits on a CPU: lineate, transformers, torchao and llama.cpp with the same weights.

    python -m bench.models.quantised_weights --llama-server FILE [--peers DIR] [--parts decode,prefill] [--json FILE]
    python -m bench.models.quantised_weights --layers 4 --hidden 256 --rounds 1 --train-steps 20    a trial of all parts

The model is Qwen3.5-like: hidden 1024, 24 layers ("GGGA"), random weights (bench/models/quantised_model.py). Its files
for all contestants are written once to --folder and kept: 8 GB. lineate and llama.cpp take turns, in an order that
changes each time. transformers and torchao follow, once, so that nothing that they leave behind can disturb that pair.

- decode: single steps after prompts of 16 and 2,048 tokens; prefill: prompts of 512 and 2,048 tokens.
- batch: 8 prompts of 16 tokens that lineate and llama.cpp continue together; llama.cpp has 8 slots and 8 clients.
- memory: what is resident in a fresh process that has loaded the model and made two tokens.
- read: how fast the threads read as many bytes as a step does, and how much of that speed lineate's steps reach.
- error: how far quantised weights take random models and a trained one from float32 (bench/models/quantised_error.py).

lineate's times are those of generate(), llama.cpp's those that its server gives, with its default options; only its
copies of earlier states are switched off. A contestant that is not there is left out, and so is a prompt that it would
read for longer than --budget.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.models.quantised_error import RANDOM, random_errors, trained_errors, trained_model
from bench.models.quantised_model import BITS, VOCAB, Files, Shape
from bench.models.quantised_sides import LLAMA, OURS, SIDES, THEIRS, TORCHAO, Opener, Ours, Ran, Side, takes_part
from bench.models.quantised_tables import show_all
from bench.serving.llama import version_of
from bench.timing import OtherProcesses, cpu_model, in_fresh_process
from lineate.quantised import rounded_activations

PARTS = ("decode", "prefill", "batch", "memory", "read", "error")
STEPS = 20  # decoding steps of one run
WARM = 64  # tokens of the prompt that warms up
SHORT, MIDDLE, LONG = 16, 512, 2048
ROWS = 8


def drawn(tokens: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


class Results:
    """All that was measured.

    Args:
        path: the JSON file, written anew after every form.
        head: what is known of the machine and the run.
    """

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path, self.head, self.begun = path, head, time.perf_counter()
        self.parts: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.left_out: list[str] = []
        self.others = OtherProcesses()

    def say(self, line: str) -> None:
        print(f"{time.perf_counter() - self.begun:5.0f} s  {line}", flush=True)

    def leave_out(self, line: str) -> None:
        if line not in self.left_out:
            self.left_out.append(line)
            self.say(f"left out: {line}")

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        about = {"seconds": time.perf_counter() - self.begun, "other_cores": self.others.cores()}
        whole = {"header": {**self.head, **about}, "left_out": self.left_out, **self.parts}
        self.path.write_text(json.dumps(whole, indent=1) + "\n")


class Measurer:
    """Measures the contestants in one form after another.

    Args:
        opener: loads contestants.
        sides: their names.
        results: where everything goes.
        rounds: how often lineate and llama.cpp are measured.
        budget: seconds that a prompt may take llama.cpp; others have half.
    """

    def __init__(self, opener: Opener, sides: Sequence[str], results: Results, rounds: int, budget: float) -> None:
        self.opener, self.sides, self.results, self.rounds, self.budget = opener, sides, results, rounds, budget
        self.failed = set[tuple[str, str]]()

    def groups(self, form: str) -> list[tuple[list[str], int, float]]:
        """Return the contestants that are measured in turn, with their rounds and the seconds that a case may take."""
        able = [name for name in self.sides if takes_part(name, form) and (name, form) not in self.failed]
        pair, others = [[x for x in able if (x in (OURS, LLAMA)) == wanted] for wanted in (True, False)]
        return [(pair, self.rounds, self.budget), *([(others, 1, self.budget / 2)] if others else [])]

    @contextmanager
    def opened(self, names: list[str], form: str, rows: int = 1) -> Iterator[dict[str, Side]]:
        """Load contestants; those that fail are left out."""
        with ExitStack() as stack:
            found: dict[str, Side] = {}
            for name in names:
                if (name, form) not in self.failed:
                    try:
                        found[name] = self.opener.open(name, form, rows)
                    except (ImportError, RuntimeError, ValueError) as error:
                        if name == OURS:
                            raise
                        self.failed.add((name, form))
                        self.results.leave_out(f"{name}, {form}: {error}")
                    else:
                        stack.callback(found[name].close)
            yield found

    def one_row(self, form: str, decode: bool, prefill: bool) -> None:
        """Measure prompts of all lengths, and single steps after them."""
        cases = {SHORT: (decode, False), MIDDLE: (False, prefill), LONG: (decode, prefill)}
        ran = {tokens: dict[str, list[Ran]]() for tokens, wanted in cases.items() if any(wanted)}
        for names, rounds, budget in self.groups(form):
            with self.opened(names, form) as sides:
                warm = {name: side.run(drawn(WARM, 0), 4) for name, side in sides.items()}
                for tokens, found in ran.items():
                    able = self._able(form, sides, warm, tokens, budget)

                    def run(side: Side, n: int, tokens: int = tokens) -> Ran:
                        return side.run(drawn(tokens, n), 1 + STEPS * cases[tokens][0])

                    found |= take_turns(able, run, max(1, rounds // 2) if tokens == LONG else rounds)
                    self.results.say(f"{form}: prompts of {tokens} tokens, {' and '.join(able) or 'nobody'}")
        for tokens, found in ran.items():
            steps, prompts = cases[tokens]
            row: dict[str, Any] = {"form": form, "tokens": tokens}
            if steps:
                seconds = {name: [s for one in own for s in one.step_seconds] for name, own in found.items()}
                self.results.parts["decode"].append({**row, "seconds": seconds, "same": same_tokens(found)})
            if prompts:
                seconds = {name: [one.prompt_seconds for one in own] for name, own in found.items()}
                self.results.parts["prefill"].append({**row, "seconds": seconds})

    def _able(
        self, form: str, sides: dict[str, Side], warm: dict[str, Ran], tokens: int, budget: float
    ) -> dict[str, Side]:
        """Return the contestants that read n tokens within the budget, judged by the warm-up."""
        found = {}
        for name, side in sides.items():
            expected = warm[name].prompt_seconds * tokens / WARM
            if name == OURS or expected < budget:
                found[name] = side
            else:
                self.results.leave_out(f"{name}, {form}, {tokens} tokens: would take {expected:.0f} s")
        return found

    def many_rows(self, form: str) -> None:
        """Measure eight prompts that lineate and llama.cpp continue together."""
        prompts = [[drawn(SHORT, 10 * n + row) for row in range(ROWS)] for n in range(self.rounds)]
        names, rounds, _ = self.groups(form)[0]
        with self.opened(names, form, ROWS) as sides:
            for side in sides.values():
                side.together(prompts[0], 3)
            rates = take_turns(sides, lambda side, n: side.together(prompts[n], 1 + STEPS), rounds)
        self.results.parts["batch"].append({"form": form, "rows": ROWS, "tokens_per_second": rates})
        self.results.say(f"{form}: {ROWS} rows")

    def memory(self, form: str) -> None:
        """Find the resident bytes of fresh processes."""
        files, row = self.opener.files, dict[str, Any]()
        for name in (name for names, *_ in self.groups(form) for name in names):
            if name == LLAMA:
                with self.opener.llama(form) as llama:
                    llama.run(list(range(SHORT)), 2)
                    row[name] = {"after": llama.resident()}
            else:
                arguments = [name, form, files.folder.parent, files.shape.layers, files.shape.hidden]
                arguments.append(self.opener.threads)
                found = in_fresh_process(
                    ["-m", "bench.models.quantised_sides", *map(str, arguments)],
                    {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                )
                if found is not None:
                    row[name] = found
                else:
                    self.results.leave_out(f"{name}, {form}: the memory of a fresh process")
        self.results.parts["memory"].append({"form": form, "bytes": row})
        self.results.say(f"{form}: memory")

    def read(self, form: str) -> None:
        """Compare lineate's steps with plain reads of as much memory."""
        side = Ours(self.opener.files, form)
        buffer = torch.ones(side.step_bytes // 4)
        side.run(drawn(SHORT, 0), 4)
        steps, reads = list[float](), list[float]()
        for n in range(self.rounds):
            steps += side.run(drawn(SHORT, n), 1 + STEPS // 2).step_seconds
            for _ in range(5):
                for plain in (buffer.sum, lambda: torch.dot(buffer, buffer)):
                    begun = time.perf_counter()
                    plain()
                    reads.append(time.perf_counter() - begun)
        row = {"form": form, "bytes": side.step_bytes, "read_seconds": reads, "step_seconds": steps}
        self.results.parts["read"].append({**row, "part": min(reads) / min(steps)})
        self.results.say(f"{form}: plain reads")


def take_turns(sides: dict[str, Side], run: Callable[[Side, int], Any], rounds: int) -> dict[str, list[Any]]:
    """Call run(side, round) for all in turn, in the other order every second round."""
    found = {name: list[Any]() for name in sides}
    for n in range(rounds):
        for name in list(sides)[:: -1 if n % 2 else 1]:
            found[name].append(run(sides[name], n))
    return found


def same_tokens(ran: dict[str, list[Ran]]) -> dict[str, float]:
    """Return the part of lineate's tokens that come before each contestant's first different one."""
    found = {}
    for name, own in ran.items():
        until, of = 0, 0
        for ours, theirs in zip(ran[OURS], own, strict=False):
            of += len(ours.tokens)
            same = [a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True)]
            until += same.index(False) if False in same else len(same)
        found[name] = until / max(1, of)
    return found


def measure_error(results: Results, folder: Path, steps: int, quick: bool) -> None:
    """Compare quantised weights with float32 ones."""
    forms = [form for form in BITS if form not in ("float32", "float16")]
    names = [name for name in RANDOM if not quick or name.startswith("tiny")]
    results.parts["random_models"] = random_errors(names, forms, seeds=1 if quick else 2)
    results.say("errors of random models")
    model, held_out, seconds = trained_model(folder, steps)
    results.head["training"] = {"steps": steps, "seconds": seconds, "held_out_bytes": len(held_out)}
    results.head["training"]["parameters"] = sum(x.numel() for x in model.parameters())
    results.say("the trained model is there")
    results.parts["trained_model"] = trained_errors(model, held_out, forms)
    results.say("errors of the trained model")


def find_sides(args: argparse.Namespace, results: Results) -> list[str]:
    """Return the contestants that are there."""
    reasons = dict[str, str]()
    if importlib.util.find_spec(THEIRS) is None:
        raise SystemExit("the model is made with transformers; install lineate[hf]")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if importlib.util.find_spec("torchao") is None:
        reasons[TORCHAO] = "the package torchao is not there"
    if args.llama_server is None:
        reasons[LLAMA] = "no --llama-server was given"
    elif importlib.util.find_spec("gguf") is None:
        reasons[LLAMA] = "the package gguf, which writes its files, is not there"
    wanted = [side for side in SIDES if args.sides is None or side in args.sides.split(",")]
    for side in wanted:
        if side in reasons:
            results.leave_out(f"{side}: {reasons[side]}")
    return [side for side in wanted if side not in reasons]


def listed(text: str, known: Sequence[str], flag: str) -> list[str]:
    """Return the words of a list in their usual order; raise SystemExit if one of them is not known."""
    words = text.split(",")
    if unknown := [word for word in words if word not in known]:
        raise SystemExit(f"{flag} must have words of {', '.join(known)}, got {unknown[0]!r}")
    return [word for word in known if word in words]


def measure_form(measurer: Measurer, form: str, parts: Sequence[str]) -> None:
    """Measure all parts but the errors in one form."""
    if "decode" in parts or "prefill" in parts:
        measurer.one_row(form, "decode" in parts, "prefill" in parts)
    for part, measure in {
        "batch": measurer.many_rows, "memory": measurer.memory, "read": measurer.read
    }.items():  # fmt: skip
        if part in parts:
            measure(form)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("bench/out/quantised-weights-cpu.json"))
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server, measured too")
    parser.add_argument("--peers", type=Path, help="a folder with the packages gguf and torchao, put on the path")
    parser.add_argument("--folder", type=Path, default=Path("bench/out/quantised-weights"), help="where files are kept")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--forms", default=",".join(BITS), help="of " + ", ".join(BITS))
    parser.add_argument("--sides", help="contestants, of " + ", ".join(SIDES))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="of lineate and llama.cpp; half as many of long prompts")
    parser.add_argument(
        "--budget", type=float, default=40, help="seconds that a prompt may take llama.cpp; others half"
    )
    parser.add_argument("--train-steps", type=int, default=400, help="steps of the trained model of the errors")
    parser.add_argument(
        "--rounded", action="store_true", help="lineate rounds rows further (lineate.quantised.rounded_activations)"
    )
    args = parser.parse_args()
    rounding = rounded_activations if args.rounded else nullcontext
    parts, forms = listed(args.parts, PARTS, "--parts"), listed(args.forms, tuple(BITS), "--forms")
    if args.sides is not None:
        listed(args.sides, SIDES, "--sides")
    if args.peers is not None:
        sys.path.insert(0, str(args.peers.absolute()))
    torch.set_num_threads(args.threads)
    shape = Shape(args.layers, args.hidden)
    head = {
        "date": datetime.now(UTC).date().isoformat(), "cpu": cpu_model(), "threads": args.threads,
        "torch": torch.__version__, "layers": shape.layers, "hidden": shape.hidden, "rounds": args.rounds,
        "rounded": args.rounded,
    }  # fmt: skip
    results = Results(args.json, head)
    sides = find_sides(args, results)
    head |= {side: importlib.metadata.version(side) for side in sides if side in (THEIRS, TORCHAO)}
    if LLAMA in sides:
        head[LLAMA] = version_of(args.llama_server)
    if set(parts) - {"error"}:
        files = Files(args.folder, shape)
        files.prepare(forms, LLAMA in sides)
        results.say("all files are there")
        opener = Opener(files, args.threads, args.llama_server, LONG)
        measurer = Measurer(opener, sides, results, args.rounds, args.budget)
        with rounding():
            for form in forms:
                measure_form(measurer, form, parts)
                results.write()
    if "error" in parts:
        with rounding():
            measure_error(results, args.folder, args.train_steps, quick=args.train_steps < 100)
    results.write()
    show_all(json.loads(args.json.read_text()))
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

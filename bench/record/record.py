"""Record the bits of some hundred calls of lineate, and report which of them changed.

    python bench/record/record.py --out before.json       before a change that must not change results
    python bench/record/record.py --compare before.json   after it: names what differs; status 1 if anything does

--only REGEX selects calls, --list prints their names, --results prints what they return, --device cuda runs larger ones
on a GPU, --triton adds kernels in Triton's interpreter. The record is of the lineate that Python imports, so PYTHONPATH
selects it. Bits depend on the processor and on torch, so compare on one machine.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import platform
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Record = dict[str, dict[str, str]]
"""For each call, and each of its results by name: a digest, or the text or number itself."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the record here")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="run again and compare with this record")
    parser.add_argument("--only", default="", metavar="REGEX", help="only calls whose name has a match")
    parser.add_argument("--list", action="store_true", help="print the names of the calls")
    parser.add_argument("--results", action="store_true", help="print the results of the calls")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--triton", action="store_true", help="on a CPU: also kernels in Triton's interpreter")
    parser.add_argument("--verbose", action="store_true", help="print each call's time, and where it failed")
    options = parser.parse_args()
    prepare(options.triton and options.device == "cpu")

    from record_cases import make_cases

    cases = make_cases(options.device, options.triton and options.device == "cpu")
    chosen = {name: case for name, case in cases.items() if re.search(options.only, name)}
    if options.list:
        print("\n".join(chosen))
        return
    old = json.loads(options.compare.read_text()) if options.compare else None
    out = options.out.resolve() if options.out else None
    started = time.perf_counter()
    new = {"versions": versions(options.device), "calls": run_all(chosen, options.device, options.verbose)}
    seconds = time.perf_counter() - started
    if out is not None:
        out.write_text(json.dumps(new, indent=0) + "\n")
    if options.results:
        for name, results in new["calls"].items():
            print(name, *(f"  {key}: {value}" for key, value in results.items()), sep="\n")
    refused = sum("error" in results for results in new["calls"].values())
    results = sum(map(len, new["calls"].values()))
    print(f"{len(chosen)} calls, {results} results, {refused} calls refused, {seconds:.0f} s")
    if old is not None and compare(old, new, options.only, set(cases)):
        sys.exit(1)


def prepare(interpreter: bool) -> None:
    """Set what must be set before torch is imported: one thread, no network, a terminal of fixed width."""
    os.environ |= {
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "MPLBACKEND": "agg",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    if interpreter:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.simplefilter("ignore")


def run_all(cases: Mapping[str, Any], device: str, verbose: bool) -> Record:
    """Run every call in a folder of its own and with its own random numbers."""
    import torch
    from record_cases import Draw

    calls: Record = {}
    home = Path.cwd()
    for number, (name, case) in enumerate(cases.items()):
        if sys.stderr.isatty():
            print(f"\r{number + 1}/{len(cases)} {name:.90}\033[K", end="", file=sys.stderr)
        draw = Draw(name, device)
        torch.manual_seed(draw.seed)
        started, said = time.perf_counter(), io.StringIO()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                with contextlib.redirect_stderr(said):
                    calls[name] = dict(flatten(case(draw)))
            except Exception as error:  # an error is a result, too
                calls[name] = {"error": f"{type(error).__name__}: {error}"}
                if verbose:
                    traceback.print_exc()
            finally:
                os.chdir(home)
        if verbose:
            print(f"{time.perf_counter() - started:8.3f} s  {name}  {calls[name].get('error', '')}", flush=True)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return calls


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Give every tensor, text and number inside a result a name and a digest."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name or "result", digest(value)
    elif isinstance(value, bytes):
        yield name or "result", hashlib.sha256(value).hexdigest()
    elif isinstance(value, str):
        yield name or "result", value
    elif isinstance(value, bool | int | float | None | torch.dtype | torch.device):
        yield name or "result", repr(value)
    else:
        for key, part in parts(value):
            yield from flatten(part, f"{name}.{key}" if name else str(key))


def parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return the named parts of a nested result."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif hasattr(value, "_asdict"):
        yield from value._asdict().items()
    elif hasattr(value, "names") and hasattr(value, "lengths"):  # a cache: only the first tokens of each row count
        for name in value.names:
            x, lengths = value[name], value.lengths
            if not isinstance(lengths, int):
                x = x.clone()
                for row, length in enumerate(lengths.tolist()):
                    x[row, length:] = 0
            yield name, x
        yield "lengths", value.lengths
    elif hasattr(value, "tensors"):
        yield from value.tensors.items()
    elif hasattr(value, "state_dict"):
        yield from value.state_dict().items()
    elif dataclasses.is_dataclass(value):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    else:
        raise TypeError(f"no digest is known for a {type(value).__name__}")


def digest(x: Any) -> str:
    """Return the sha256 of a tensor's shape, dtype and bytes."""
    import torch

    x = x.detach().cpu().contiguous()
    found = hashlib.sha256(f"{tuple(x.shape)} {x.dtype} ".encode())
    found.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def compare(old: dict[str, Any], new: dict[str, Any], only: str, known: set[str]) -> bool:
    """Print what differs, and return whether anything does."""
    for key, value in new["versions"].items():
        if old["versions"].get(key) != value:
            print(f"the record was made with {key} {old['versions'].get(key)}, this is {value}")
    before = {name: x for name, x in old["calls"].items() if re.search(only, name)}
    # A kind of call that this run did not ask for, such as those in the interpreter, has not vanished from the record.
    kinds = {name.partition("/")[0] for name in known}
    vanished = [name for name in before if name not in new["calls"] and name.partition("/")[0] in kinds]
    appeared = [name for name in new["calls"] if name not in before]
    differing = 0
    for name, results in new["calls"].items():
        if name not in before or before[name] == results:
            continue
        differing += 1
        print(f"DIFFERS   {name}")
        for key in {**before[name], **results}:
            was, now = before[name].get(key), results.get(key)
            if was != now:
                print(f"    {key}{first_difference(was, now)}")
    for word, names in (("VANISHED", vanished), ("APPEARED", appeared)):
        print(*(f"{word:9} {name}\n" for name in names), sep="", end="")
    same = len(new["calls"]) - differing - len(appeared)
    print(f"{same} calls have the same bits, {differing} differ, {len(appeared)} appeared, {len(vanished)} vanished")
    return bool(differing or appeared or vanished)


def first_difference(was: str | None, now: str | None) -> str:
    """Return the text about a differing result: that it is new or missing, or the first line in which texts differ."""
    if was is None or now is None:
        return ": only in the record" if now is None else ": not in the record"
    if all(re.fullmatch("[0-9a-f]{64}", x) for x in (was, now)):
        return ""
    old, new = [*was.splitlines(), "(end)"], [*now.splitlines(), "(end)"]
    for a, b in zip(old, new, strict=False):
        if a != b:
            alike = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            start = max(0, alike - 40)  # for long lines, show only the part near the difference
            return f"\n        was {a[start:].strip():.160}\n        now {b[start:].strip():.160}"
    return ""


def versions(device: str) -> dict[str, str]:
    """Return everything besides the code on which bits may depend."""
    import torch

    try:
        processor = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        processor = None
    found = {
        "device": device, "python": platform.python_version(), "torch": torch.__version__,
        "processor": processor[1] if processor else platform.processor() or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(), "threads": str(torch.get_num_threads()),
    }  # fmt: skip
    for name in ("triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return found


if __name__ == "__main__":
    main()

"""HybridLM compared with the same weights in transformers and flash-linear-attention, on a GPU: prefill and decoding.

    python -m bench.models.gpu [--peers DIR] [--json FILE] [--quick]

The models are those of bench.models.cpu in bfloat16. Times are between events around whole calls from Python, as a user
sees them.
"""

import argparse
import importlib.metadata
import inspect
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def step_of(advance: Callable[[Any], tuple[Tensor, Any]], past: Any) -> Callable[[], Tensor]:
    """Return a call that decodes one more token each time."""

    def step() -> Tensor:
        nonlocal past
        logits, past = advance(past)
        return logits

    return step


@torch.inference_mode()
def measure(name: str, tokens: int, batches: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    from bench.models.cpu import MODELS, VOCAB, load_both
    from bench.models.quantised_gpu import median_ms
    from lineate.decoding import Decoder

    theirs, ours = load_both(MODELS[name], dense=False, dtype=torch.bfloat16)
    theirs, ours = theirs.cuda(), ours.cuda()
    print(name, "functions of transformers from:", taken_from(theirs))
    calls: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Any]], Callable[[Tensor, Any], tuple[Tensor, Any]]]] = {
        "transformers": (
            lambda ids: unpack(theirs(ids, use_cache=True, logits_to_keep=1)),
            lambda ids, past: unpack(theirs(ids, past_key_values=past, use_cache=True)),
        ),
        "lineate": (
            lambda ids: ours(ids, last_only=True)[:2],
            lambda ids, past: ours(ids, state=past)[:2],
        ),
    }
    results = []
    for b, t in [(1, tokens), *((b, 1024) for b in batches)]:
        ids = torch.randint(VOCAB, (b, t), generator=torch.Generator().manual_seed(0)).cuda()
        what = f"prefill {b} x {t}" if t == tokens else f"decode {b} rows after {t}"
        row: dict[str, Any] = {"model": name, "what": what, "taken_from": taken_from(theirs)}
        logits = {}
        # cuDNN's attention takes 30 to 40 ms to plan every new cache length, so transformers decodes faster without it.
        torch.backends.cuda.enable_cudnn_sdp(t == tokens)
        for who, (prefill, advance) in calls.items():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            logits[who], past = prefill(ids)
            if t == tokens:
                row[who] = median_ms(partial(prefill, ids), rounds, "cuda", 2)
            else:
                token = ids[:, -1:]
                logits[who], past = advance(token, past)
                row[who] = median_ms(step_of(partial(advance, token), past), 4 * rounds, "cuda", 2)
            row[f"{who}_extra_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            del past
        if t != tokens:
            decoder = Decoder(ours, ours(ids, last_only=True).state, room=1024)
            logits["graph"] = decoder(ids[:, -1:])
            row["graph"] = median_ms(partial(decoder, ids[:, -1:]), 4 * rounds, "cuda", 2)
            row["graph_faster"] = row["transformers"] / row["graph"]
            row["graph_difference"] = (logits["graph"].float() - logits["lineate"].float()).abs().max().item()
            del decoder
        row["difference"] = (logits["lineate"].float() - logits["transformers"].float()).abs().max().item()
        row["faster"] = row["transformers"] / row["lineate"]
        results.append(row)
        print(row, flush=True)
    return results


def taken_from(model: Any) -> dict[str, str]:
    """Return the package that provided each function that transformers may take from elsewhere."""
    module, found = sys.modules[type(model).__module__], {}
    for name, function in vars(module).items():
        if inspect.isfunction(function):
            implementation = inspect.getclosurevars(function).nonlocals.get("implementation")
            if implementation is not None:
                found[name] = implementation.__module__.partition(".")[0]
    return found


def unpack(out: Any) -> tuple[Tensor, Any]:
    return out.logits[:, -1:], out.past_key_values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("bench/out/models-gpu.json"))
    parser.add_argument("--peers", type=Path, help="a folder with the peers' packages, put on the path")
    parser.add_argument("--quick", action="store_true", help="2048 tokens, fewer rounds")
    parser.add_argument("--only", choices=("GGGA", "KKKM"), help="one pattern")
    args = parser.parse_args()
    if args.peers is not None:
        sys.path.insert(0, str(args.peers))
    from bench.timing import show

    results = []
    for name in ("GGGA", "KKKM") if args.only is None else (args.only,):
        results += measure(name, *((2048, (1,), 5) if args.quick else (8192, (1, 32), 15)))
    columns = ["model", "what", "transformers ms", "lineate ms", "faster", "lineate, graph ms", "faster"]
    columns += ["extra MiB, theirs", "ours", "diff"]
    table = [
        [
            r["model"], r["what"], f"{r['transformers']:.2f}", f"{r['lineate']:.2f}", f"{r['faster']:.2f}x",
            *((f"{r['graph']:.2f}", f"{r['graph_faster']:.2f}x") if "graph" in r else ("", "")),
            f"{r['transformers_extra_mib']:.0f}", f"{r['lineate_extra_mib']:.0f}", f"{r['difference']:.1e}",
        ]
        for r in results
    ]  # fmt: skip
    show("bfloat16, medians", columns, table)
    versions = {}
    for package in ("torch", "triton", "transformers", "flash-linear-attention", "fla-core"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    head = {"date": datetime.now(UTC).date().isoformat(), "gpu": torch.cuda.get_device_name(), "versions": versions}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"header": head, "results": results}, indent=1) + "\n")
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

"""The price of batch-invariant decoding: ms of a step with and without it, and whether the bits are those of one row.

    python -m bench.models.invariant [--rows 1 8 32 256] [--forms bfloat16 int8] [--json FILE]

The model has 24 layers GGGA of 2,048 channels and a vocabulary of 248,320 (2.4 billion parameters), with random
weights. Steps follow 1,024 tokens with random contents; a GPU replays the graph that Decoder records. `same` compares
the logits of the first row in all batches, which must be equal with the option; without it they may differ.
"""

import argparse
import importlib.metadata
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.models.quantised_gpu import median_ms, model_of, state_of
from bench.timing import show
from lineate.decoding import Decoder
from lineate.models import AttentionConfig, FeedConfig, HybridConfig, HybridLM, LinearConfig, ModelState

ROWS, FORMS = (1, 8, 32, 256), ("bfloat16",)
TOKENS = 1024
"""Tokens that attention has seen."""


def config_of(hidden: int = 2048, layers: int = 24, vocab: int = 248320) -> HybridConfig:
    heads = max(1, hidden // 128)
    return HybridConfig(
        vocab, hidden, layers, "GGGA", linear=LinearConfig(heads, heads, 128, 128),
        attention=AttentionConfig(max(2, heads // 2), 2, 256, rotary_dim=64), feed=FeedConfig(hidden * 3),
    )  # fmt: skip


@torch.no_grad()
def measure(model: HybridLM, states: ModelState, rows: Sequence[int], rounds: int, device: str) -> list[dict[str, Any]]:
    """Return the ms of a step of these numbers of rows, without and with the option."""
    first: dict[bool, Tensor] = {}
    results = []
    for count in rows:
        found: dict[str, Any] = {"rows": count}
        state = states.select(torch.arange(count, device=model.device))
        ids = torch.arange(count, device=model.device)[:, None]
        for invariant in (False, True):
            began = time.perf_counter()
            decoder = Decoder(model, state, room=256, batch_invariant=invariant)
            logits = decoder(ids)[:1]
            prepared = time.perf_counter() - began
            name = "invariant" if invariant else "usual"
            found[f"{name}_ms"] = median_ms(partial(decoder, ids), rounds, device)
            found[f"{name}_same"] = torch.equal(logits, first.setdefault(invariant, logits.clone()))
            found[f"{name}_prepared_s"], found["together"] = prepared, decoder.rows_together
            del decoder
        found["price"] = found["invariant_ms"] / found["usual_ms"]
        results.append(found)
        print(found, flush=True)
    return results


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--forms", nargs="+", default=FORMS, help="bfloat16, int8, int4, fp8")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=248320)
    parser.add_argument("--json", type=Path, default=Path("bench/out/invariant.json"))
    args = parser.parse_args(given)
    results = []
    for form in args.forms:
        torch.manual_seed(0)
        model, _ = model_of(config_of(args.hidden, args.layers, args.vocab), form, args.device)
        states = state_of(model, max(args.rows), TOKENS)
        parameters = sum(x.numel() for x in model.parameters())
        own = measure(model, states, args.rows, args.rounds, args.device)
        results += [{"form": form, "parameters": parameters, **row} for row in own]
        del model, states
    columns = ["weights", "rows", "usual ms", "invariant ms", "price", "same bits, usual", "invariant"]
    table = [
        [
            row["form"], str(row["rows"]), f"{row['usual_ms']:.2f}", f"{row['invariant_ms']:.2f}",
            f"{row['price']:.2f}x", str(row["usual_same"]), str(row["invariant_same"]),
        ]
        for row in results
    ]  # fmt: skip
    show("a step, medians", columns, table)
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    versions = {name: importlib.metadata.version(name) for name in ("torch",)}
    head = {"date": datetime.now(UTC).date().isoformat(), "device": device, "versions": versions}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"header": head, "results": results}, indent=1) + "\n")
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

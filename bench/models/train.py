"""A training step of every rule and of the hybrids, compared with the same model with fla's layers, on a GPU.

    python -m bench.models.train [--peers DIR] [--json FILE] [--patterns G,K,A] [--tokens 65536]
                                 [--length 4096] [--compile]

There is one model per pattern (preset compact, about 50M parameters), trained on packed rows with AdamW, in bfloat16
autocast over float32 weights. A step is forward, backward and update; steps follow each other without waiting for the
GPU, and `alone` is a step that begins when the GPU has nothing to do and is waited for. fla's side has its mixers,
norms and feed-forwards in our blocks; softmax attention is torch's on both sides. DIR holds the package
flash-linear-attention and its dependencies. --compile: also time our blocks under torch.compile, as in
`lineate train --compile`.
"""

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models.tuning import tune_side_by_side
from bench.rules.gpu_timing import back_to_back
from bench.timing import show
from lineate.layers import kind_of
from lineate.models import HybridConfig, HybridLM, preset

PATTERNS = ("L", "R", "D", "G", "K", "A", "GGGA", "KKKM")


class Peer(nn.Module):
    """A mixer of fla with the call signature of our mixers."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor, state: None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, None]:
        out = self.mixer(x, cu_seqlens=cu_seqlens)
        return (out[0] if isinstance(out, tuple) else out), None


def make_peer(letter: str, config: HybridConfig) -> nn.Module | None:
    """Return fla's layer of the same rule and sizes, or None if it has none."""
    from fla import layers

    assert config.linear is not None
    hidden, heads, dim = config.hidden_size, config.linear.heads, config.linear.key_dim
    rule = kind_of(letter).name
    if rule == "gated_delta_rule":
        return layers.GatedDeltaNet(hidden, expand_v=1, head_dim=dim, num_heads=heads)
    if rule == "kimi_delta_attention":
        return layers.KimiDeltaAttention(hidden, expand_v=1, head_dim=dim, num_heads=heads)
    if rule == "delta_rule":
        return layers.DeltaNet(hidden_size=hidden, num_heads=heads, use_gate=True)
    if rule == "gated_linear_attention":
        return layers.GatedLinearAttention(
            hidden_size=hidden, expand_k=1.0, num_heads=heads, use_short_conv=True, gate_low_rank_dim=dim
        )
    return None  # its linear attention has neither convolution nor gate


def with_fla(config: HybridConfig) -> HybridLM:
    """Return our model with fla's mixers, norms and feed-forwards."""
    from fla.modules import GatedMLP, RMSNorm

    model = HybridLM(config)
    assert config.feed is not None
    for letter, block in zip(config.letters, model.layers, strict=True):
        if (peer := make_peer(letter, config)) is not None:
            block.mixer = Peer(peer)
        block.mixer_norm, block.feed_norm = RMSNorm(config.hidden_size), RMSNorm(config.hidden_size)
        block.feed = GatedMLP(config.hidden_size, intermediate_size=config.feed.size)
    model.norm = RMSNorm(config.hidden_size)
    return model


def make_step(model: HybridLM, ids: Tensor, bounds: Tensor) -> Callable[[], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    targets = ids.roll(-1, 1).flatten()

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            x = model.embed(ids)
            for block in model.layers:
                x, _ = block(x, None, bounds)
            logits = model.logits(model.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def busy_ms(step: Callable[[], object], steps: int = 3) -> float:
    """Return the milliseconds of a step in which the GPU runs a kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return sum(x.self_device_time_total for x in found.key_averages()) / steps / 1e3


def measure(pattern: str, sides: list[str], tokens: int, length: int, rounds: int) -> list[dict[str, Any]]:
    config = preset("compact", pattern=pattern)
    ids = torch.randint(config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0)).cuda()
    bounds = torch.arange(0, tokens + 1, length, device="cuda")
    rows = []
    for side in sides:
        torch.manual_seed(0)
        model = (with_fla(config) if side == "fla" else HybridLM(config)).cuda()
        if side == "compiled":  # as lineate train --compile does
            for block in model.layers:
                block.compile()
        step = make_step(model, ids, bounds)
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        first = time.perf_counter() - begin
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times = back_to_back([step], rounds)
        alone = [back_to_back([step], 1)[0] for _ in range(rounds)]
        busy = busy_ms(step)
        loss = step()
        rows.append({
            "pattern": pattern, "side": side, "ms": statistics.median(times), "busy_ms": busy,
            "alone_ms": statistics.median(alone), "all_ms": times, "first_s": first,
            "parameters": sum(x.numel() for x in model.parameters()), "loss": loss.item(),
            "tokens_per_s": tokens / statistics.median(times) * 1e3,
            "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
        })  # fmt: skip
        print({key: value for key, value in rows[-1].items() if key != "all_ms"}, flush=True)
        del model, step, loss
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("bench/out/train.json"))
    parser.add_argument("--peers", type=Path, help="a folder with flash-linear-attention, put on the path")
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--compile", action="store_true", help="measure our blocks under torch.compile too")
    parser.add_argument("--share", help="3/8: only fill Triton's cache, with this share of what fla tries (tuning.py)")
    args = parser.parse_args()
    if args.peers is not None:
        sys.path.insert(0, str(args.peers))
    sides = ["lineate"]
    try:
        import fla  # noqa: F401

        sides = ["fla"] if args.share else ["lineate", "fla"]
        tune_side_by_side(args.share)
    except ImportError as missing:
        print(f"fla is not importable ({missing}): lineate alone")
    sides += ["compiled"] if args.compile else []
    versions = {}
    for package in ("torch", "triton", "flash-linear-attention", "fla-core"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    head = {
        "date": datetime.now(UTC).date().isoformat(), "gpu": torch.cuda.get_device_name(), "versions": versions,
        "tokens": args.tokens, "length": args.length,
    }  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    results = []
    for pattern in args.patterns.split(","):
        results += measure(
            pattern, [x for x in sides if x != "fla" or set(pattern) != {"A"}], args.tokens, args.length, args.rounds
        )
        args.json.write_text(json.dumps({"header": head, "results": results}, indent=1) + "\n")
    table = []
    for r in results:
        against = {"lineate": "fla", "compiled": "lineate"}.get(r["side"])
        peer = next((x for x in results if x["pattern"] == r["pattern"] and x["side"] == against), None)
        ratio = f"{peer['ms'] / r['ms']:.2f}x of {against}" if peer is not None else ""
        table.append([
            r["pattern"], r["side"], f"{r['parameters'] / 1e6:.1f}", f"{r['ms']:.1f}", f"{r['alone_ms']:.1f}",
            f"{r['busy_ms']:.1f}", f"{r['ms'] / r['busy_ms']:.2f}x", f"{r['tokens_per_s'] / 1e3:.0f}",
            f"{r['peak_mib']:.0f}", ratio,
        ])  # fmt: skip
    columns = [
        "pattern",
        "layers of",
        "M parameters",
        "ms a step",
        "alone",
        "GPU busy",
        "over",
        "k tokens/s",
        "peak MiB",
        "faster",
    ]
    show(f"{args.tokens} tokens a step in sequences of {args.length}, medians", columns, table)
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

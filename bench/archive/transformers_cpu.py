"""transformers' own models with and without `lineate.integrations.transformers.enable()`, on a CPU, in one process.

    python -m bench.archive.transformers_cpu                           runs prefill, training step, decode of all models
    python -m bench.archive.transformers_cpu --only kimi,qwen          runs some models
    python -m bench.archive.transformers_cpu --profile                 also shows where the time of a prefill goes
    python -m bench.archive.transformers_cpu --json bench/out/transformers_cpu.json

Both sides are one model with random float32 weights and the same inputs; they take turns. A table gives the differences
of logits and gradients; a difference above 1e-4 ends the run with exit code 1.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

from bench import timing
from lineate.integrations.transformers import enabled

T, VOCAB, WITHIN = 2048, 4096, 1e-4
GRADIENT_T = 256  # for a backward over more tokens, transformers' KDA keeps gigabytes
SIDES = ("transformers", "lineate")


def kimi(dim: int, experts: tuple[int, int, int], dense: int) -> Any:
    """Return Kimi Linear at hidden 1024, 16 heads: KKKM, a dense layer, then layers of `experts` and a shared one."""
    count, active, size = experts
    config = transformers.KimiLinearConfig(
        vocab_size=VOCAB, hidden_size=1024, num_hidden_layers=4, intermediate_size=dense,
        layer_types=["linear_attention"] * 3 + ["full_attention"], mlp_layer_types=["dense", *["sparse"] * 3],
        num_attention_heads=16, num_key_value_heads=16, linear_num_heads=16, linear_head_dim=dim,
        kv_lora_rank=256, qk_nope_head_dim=dim, qk_rope_head_dim=dim // 2, v_head_dim=dim,
        num_experts=count, num_experts_per_token=active, moe_intermediate_size=size, pad_token_id=None,
    )  # fmt: skip
    return transformers.KimiLinearForCausalLM(config)


def qwen(heads: int, value_heads: int, dim: int, experts: tuple[int, int, int]) -> Any:
    """Return Qwen3-Next at hidden 1024: GGGA, with `experts` and a shared one in every layer."""
    count, active, size = experts
    config = transformers.Qwen3NextConfig(
        vocab_size=VOCAB, hidden_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=1,
        head_dim=256, linear_num_key_heads=heads, linear_num_value_heads=value_heads, linear_key_head_dim=dim,
        linear_value_head_dim=dim, num_experts=count, num_experts_per_tok=active, moe_intermediate_size=size,
        shared_expert_intermediate_size=size, pad_token_id=None,
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config)


# Experts: how many, how many run for a token, how wide. "narrow" has a far smaller feed-forward than the family, so
# that matrix products, which torch computes on both sides, do not hide the linear layers.
NARROW = (8, 2, 64)
MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "kimi": ("Kimi-like, 16 heads of 128", lambda: kimi(128, (64, 8, 448), 4096)),
    "kimi-narrow": ("Kimi-like, 16 heads of 128, narrow feed-forward", lambda: kimi(128, NARROW, 192)),
    "kimi64-narrow": ("Kimi-like, 16 heads of 64, narrow feed-forward", lambda: kimi(64, NARROW, 192)),
    "qwen": ("Qwen3-Next-like, 8 key and 16 value heads of 128", lambda: qwen(8, 16, 128, (64, 10, 256))),
    "qwen-narrow": (
        "Qwen3-Next-like, 8 key and 16 value heads of 128, narrow feed-forward", lambda: qwen(8, 16, 128, NARROW)
    ),
    "qwen64-narrow": (
        "Qwen3-Next-like, 16 key and 16 value heads of 64, narrow feed-forward", lambda: qwen(16, 16, 64, NARROW)
    ),
}  # fmt: skip


def on(side: str) -> Any:
    return enabled() if side == "lineate" else nullcontext()


def prefill(model: Any, ids: torch.Tensor, side: str) -> timing.Call:
    def call() -> torch.Tensor:
        with torch.no_grad(), on(side):
            return model(ids, use_cache=True, logits_to_keep=1).logits

    return call


def decode(model: Any, ids: torch.Tensor, side: str) -> timing.Call:
    """Decode one token after a prefill of 128; the state goes on from call to call, and every call costs the same."""
    with torch.no_grad(), on(side):
        cache = model(ids[:, :128], use_cache=True).past_key_values

    def call() -> torch.Tensor:
        with torch.no_grad(), on(side):
            return model(ids[:, :1], past_key_values=cache).logits

    return call


def train(model: Any, ids: torch.Tensor, side: str) -> timing.Call:
    def call() -> None:
        model.zero_grad()
        with on(side):
            model(ids, labels=ids, use_cache=False).loss.backward()

    return call


def differences(model: Any, ids: torch.Tensor) -> dict[str, float]:
    """Return the largest difference of a logit and of a gradient entry.

    The latter is also given relative to the largest entry of its tensor.
    """
    found = []
    for side in SIDES:
        with torch.no_grad(), on(side):
            logits = model(ids, use_cache=False).logits
        train(model, ids[:, :GRADIENT_T], side)()
        found.append((logits, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
        model.zero_grad()
    (logits, gradients), (other, others) = found
    apart = {name: (x - others[name]).abs().max().item() for name, x in gradients.items()}
    return {
        "logits": (logits - other).abs().max().item(),
        "largest_logit": logits.abs().max().item(),
        "gradients": max(apart.values()),
        "gradients_relative": max(x / max(1e-6, gradients[n].abs().max().item()) for n, x in apart.items()),
    }


def profile(model: Any, ids: torch.Tensor, side: str, rows: int = 12) -> list[tuple[str, float]]:
    """Print the milliseconds of one prefill for each torch operator, without those of the operators that it calls."""
    call = prefill(model, ids, side)
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        call()
    events = sorted(seen.key_averages(), key=lambda event: -event.self_cpu_time_total)
    return [(event.key.removeprefix("aten::"), event.self_cpu_time_total / 1e3) for event in events[:rows]]


def measure(name: str, rounds: int, profiled: bool) -> dict[str, Any]:
    title, make = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    ids = torch.randint(0, VOCAB, (1, T))
    found: dict[str, Any] = {"title": title, "differences": differences(model, ids)}
    print(f"  differences: {found['differences']}", flush=True)
    others = timing.OtherProcesses()
    short = ids[:, :GRADIENT_T]
    works = {
        f"prefill {T}": lambda side: prefill(model, ids, side),
        "decode 1": lambda side: decode(model, ids, side),
        f"forward+backward {GRADIENT_T}": lambda side: train(model, short, side),
    }
    for what, make_call in works.items():
        samples = timing.interleave({side: make_call(side) for side in SIDES}, rounds=rounds, budget=60.0)
        found[what] = {side: {"min": s.minimum, "median": s.median} for side, s in samples.items()}
        print(f"  {what}: " + ", ".join(f"{side} {s.minimum:.3f} s" for side, s in samples.items()), flush=True)
    found["other_cores"] = others.cores()
    if profiled:
        found["profile"] = {side: profile(model, ids, side) for side in SIDES}
    return found


def report(results: dict[str, dict[str, Any]]) -> None:
    rows, apart = [], []
    for x in results.values():
        for what, sides in x.items():
            if isinstance(sides, dict) and "lineate" in sides and "min" in sides["lineate"]:
                theirs, ours = sides["transformers"], sides["lineate"]
                ratios = [f"{theirs[kind] / ours[kind]:.2f}" for kind in ("min", "median")]
                rows.append([x["title"], what, f"{1e3 * theirs['min']:.1f}", f"{1e3 * ours['min']:.1f}", *ratios])
        d = x["differences"]
        apart.append([x["title"], *(f"{d[k]:.1e}" for k in ("logits", "gradients", "gradients_relative"))])
    columns = ["model", "what", "transformers ms", "with lineate ms", "ratio of minima", "of medians"]
    timing.show("transformers with and without lineate, b 1, float32, minima", columns, rows)
    timing.show(f"Largest differences (logits at {T} tokens, gradients at {GRADIENT_T})",
                ["model", "logits", "gradients", "of the largest entry of its tensor"], apart)  # fmt: skip
    for x in results.values():
        for side, lines in x.get("profile", {}).items():
            rows = [[key, f"{ms:.0f}"] for key, ms in lines]
            timing.show(f"{x['title']}: own time of a prefill, {side}", ["operator", "ms"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MODELS), help="names, of " + ", ".join(MODELS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    results = {}
    for name in options.only.split(","):
        print(f"{name}: {MODELS[name][0]} ...", flush=True)
        results[name] = measure(name, options.rounds, options.profile)
    print(f"{timing.cpu_model()}, {options.threads} threads, torch {torch.__version__}, "
          f"transformers {transformers.__version__}")  # fmt: skip
    report(results)
    busy = [f"{name}: {x['other_cores']:.2f}" for name, x in results.items() if (x["other_cores"] or 0) > 0.1]
    if busy:
        print(f"other processes kept cores busy ({', '.join(busy)}): ratios are not to be believed")
    if options.json:
        about = {"cpu": timing.cpu_model(), "threads": options.threads, "torch": torch.__version__,
                 "transformers": transformers.__version__, "python": platform.python_version(), "t": T}  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"about": about, "models": results}, indent=1) + "\n")
        print(f"wrote {options.json}")
    wrong = [name for name, x in results.items()
             if max(x["differences"]["logits"], x["differences"]["gradients"]) > WITHIN]  # fmt: skip
    if wrong:
        print(f"more than {WITHIN} apart: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

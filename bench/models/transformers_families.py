"""All families that `lineate.integrations.transformers.enable()` changes, with and without it, on a CPU.

    python -m bench.models.transformers_families                             all families: prefill and a decoding step
    python -m bench.models.transformers_families --only bamba,kimi_linear    some of them
    python -m bench.models.transformers_families --tokens 256 --hidden 256   smaller, to see that it works
    python -m bench.models.transformers_families --json bench/out/transformers_families.json

Both sides are one model with random float32 weights and the same inputs; they take turns. The models have 4 layers at
hidden 1024, 3 of them linear if the family has other layers. Feed-forwards are narrow, so that matrix products, which
torch computes on both sides, do not hide the linear layers. The extra memory of a prefill is that of a fresh process at
its peak beyond that before the call. Logits that differ by more than 1e-4 of
the largest end the run with exit code 1. The sparse
attention of qwen4_exp is a loop over tokens in Python on both sides.
"""

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from bench import timing
from lineate.integrations.transformers import MODEL_PATCHES, enabled

VOCAB, WITHIN = 4096, 1e-4
SIDES = ("transformers", "lineate")
LAYERS = ["linear_attention"] * 3 + ["full_attention"]
Options = dict[str, Any]
Forwards = list[tuple[Any, Callable[..., Any]]]
"""Classes and the forward that each gets."""


def shared(hidden: int) -> Options:
    return {
        "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": hidden // 4, "num_hidden_layers": 4,
        "num_attention_heads": 8, "initializer_range": 0.03,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def qwen(hidden: int) -> Options:
    return {
        "num_key_value_heads": 2, "head_dim": hidden // 8, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
        "linear_key_head_dim": hidden // 8, "linear_value_head_dim": hidden // 8, "layer_types": LAYERS,
    }  # fmt: skip


def experts(hidden: int) -> Options:
    wide = hidden // 16
    return {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": wide,
        "shared_expert_intermediate_size": wide,
    }  # fmt: skip


def latent(hidden: int) -> Options:
    """Return what the families with Kimi Delta Attention share."""
    wide = hidden // 16
    return {
        "num_attention_heads": 16, "num_key_value_heads": 16, "layer_types": LAYERS, "kv_lora_rank": hidden // 4,
        "qk_nope_head_dim": wide, "qk_rope_head_dim": wide // 2, "v_head_dim": wide, "moe_intermediate_size": wide,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }  # fmt: skip


def kda(hidden: int) -> Options:
    return {**latent(hidden), "linear_num_heads": 16, "linear_head_dim": hidden // 8}


def glm5(hidden: int) -> Options:
    return {
        **kda(hidden), "qk_rope_head_dim": 0, "q_lora_rank": hidden // 4, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "index_topk": 256, "index_head_dim": 64, "index_n_heads": 8, "hc_mult": 2,
    }  # fmt: skip


def mamba(hidden: int) -> Options:
    """Return Bamba's sizes; those of the others have other names."""
    return {
        "num_key_value_heads": 2, "mamba_n_heads": hidden // 32, "mamba_d_head": 64, "mamba_n_groups": 1,
        "mamba_d_state": 128, "mamba_expand": 2,
    }  # fmt: skip


def options(family: str, hidden: int) -> Options:
    """Return the options of a family's configuration."""
    heads = hidden // 32  # of 64, of Mamba-2 at twice the hidden size
    own: Options = {
        "qwen3_next": lambda: {**qwen(hidden), **experts(hidden)},
        "qwen3_5": lambda: qwen(hidden),
        "qwen3_5_moe": lambda: {**qwen(hidden), **experts(hidden)},
        "qwen4_exp": lambda: {
            **qwen(hidden), **experts(hidden), "indexer_n_heads": 8, "indexer_kv_heads": 1,
            "indexer_head_dim": max(64, hidden // 8),
            "indexer_budget": 256, "indexer_compress_ratio": 16, "hc_count": 2, "hc_lowrank": 64,
        },
        "kimi_linear": lambda: {**kda(hidden), "num_experts": 8, "num_experts_per_token": 2},
        "bailing_hybrid": lambda: {
            **latent(hidden), "head_dim": hidden // 8, "num_local_experts": 8, "num_experts_per_tok": 2,
            "n_group": 1, "topk_group": 1,
        },
        "glm5_next": lambda: glm5(hidden),
        "olmo_hybrid": lambda: {**qwen(hidden), "num_key_value_heads": 8, "linear_num_key_heads": 16},
        "mamba2": lambda: {"num_heads": heads, "head_dim": 64, "state_size": 128, "n_groups": 1},
        "nemotron_h": lambda: {
            "num_hidden_layers": None, "layers_block_type": LAYERS, "num_key_value_heads": 2, "head_dim": hidden // 8,
            "ssm_state_size": 128, "mamba_num_heads": heads, "mamba_head_dim": 64, "n_groups": 1,
        },
        "granitemoehybrid": lambda: {
            **mamba(hidden), "layer_types": LAYERS, "num_local_experts": 8, "num_experts_per_tok": 2,
            "shared_intermediate_size": hidden // 16, "intermediate_size": hidden // 16,
        },
        "falcon_h1": lambda: {**mamba(hidden), "mamba_d_ssm": 2 * hidden},
        "bamba": lambda: {**mamba(hidden), "attn_layer_indices": [3]},
        "zamba2": lambda: {
            "layers_block_type": ["linear_attention"] * 3 + ["hybrid"], "n_mamba_heads": heads, "mamba_d_state": 128,
        },
    }[family]()  # fmt: skip
    return {name: value for name, value in {**shared(hidden), **own}.items() if value is not None or "token" in name}


CLASSES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM"),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM"),
    "bailing_hybrid": ("BailingHybridConfig", "BailingHybridForCausalLM"),
    "glm5_next": ("Glm5NextTextConfig", "Glm5NextForConditionalGeneration"),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM"),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM"),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM"),
    "granitemoehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM"),
    "bamba": ("BambaConfig", "BambaForCausalLM"),
    "zamba2": ("Zamba2Config", "Zamba2ForCausalLM"),
}


def build(family: str, hidden: int) -> Any:
    config_class, model_class = CLASSES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**options(family, hidden))
    if family == "glm5_next":  # it has no class for text alone
        vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": hidden}
        config = transformers.Glm5NextConfig(text_config=config.to_dict(), vision_config=vision)
    return getattr(transformers, model_class)(config).eval()


def sides(family: str) -> dict[str, Forwards]:
    """Return the forwards of the family's classes on both sides; `enable` takes too long to stand in a measurement."""
    patch = next(x for x in MODEL_PATCHES if x.name == family)
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    names = (patch.layer, patch.model, patch.latent, patch.unpacked)
    owners = [getattr(module, name) for name in names if name is not None]
    theirs = [(owner, owner.forward) for owner in owners]
    with enabled():
        return {"transformers": theirs, "lineate": [(owner, owner.forward) for owner in owners]}


@contextmanager
def on(side: Forwards) -> Iterator[None]:
    """Give the classes these forwards, until others are given."""
    for owner, forward in side:
        owner.forward = forward
    yield


def prefill(model: Any, ids: Tensor, side: Forwards) -> timing.Call:
    def call() -> Tensor:
        with torch.no_grad(), on(side):
            return model(ids, use_cache=True, logits_to_keep=1).logits

    return call


def decode(model: Any, ids: Tensor, side: Forwards) -> timing.Call:
    """Decode one token after a prefill of 128; the state goes on from call to call, and every call costs the same."""
    name = "cache_params" if model.config.model_type == "mamba2" else "past_key_values"
    with torch.no_grad(), on(side):
        cache = getattr(model(ids[:, :128], use_cache=True), name)

    def call() -> Tensor:
        with torch.no_grad(), on(side):
            return model(ids[:, :1], use_cache=True, **{name: cache}).logits

    return call


def difference(model: Any, ids: Tensor, both: dict[str, Forwards]) -> float:
    """Return the largest difference of a logit, relative to the largest logit."""
    found = []
    for side in both.values():
        with torch.no_grad(), on(side):
            found.append(model(ids, use_cache=False).logits)
    return ((found[0] - found[1]).abs().max() / found[0].abs().max()).item()


def memory(family: str, side: str, hidden: int, t: int, threads: int) -> dict[str, Any] | None:
    """Return the extra bytes of a prefill in a fresh process."""
    arguments = ["-m", "bench.models.transformers_families", "--hidden", str(hidden), "--tokens", str(t)]
    arguments += ["--threads", str(threads), "--memory", f"{family}:{side}"]
    found: dict[str, Any] | None = timing.in_fresh_process(arguments, {**os.environ, **timing.EXACT_ALLOCATION})
    return found


def memory_here(family: str, side: str, hidden: int, t: int) -> None:
    """Print the extra bytes of a prefill as JSON."""
    model, ids = build(family, hidden), torch.randint(2, VOCAB, (1, t))
    forwards = sides(family)[side]
    call = prefill(model, ids, forwards)
    prefill(model, ids[:, :64], forwards)()  # loads what is loaded once
    meter = timing.meter(lambda size: torch.ones(size, dtype=torch.uint8))
    print(json.dumps({**timing.peak_extra_bytes(call), "meter": meter}))


def measure(family: str, given: argparse.Namespace) -> dict[str, Any]:
    model = build(family, given.hidden)
    ids = torch.randint(2, VOCAB, (1, given.tokens))
    both = sides(family)
    found: dict[str, Any] = {"difference": difference(model, ids, both)}
    others = timing.OtherProcesses()
    for what, make in (("prefill", prefill), ("decode", decode)):
        calls = {side: make(model, ids, forwards) for side, forwards in both.items()}
        samples = timing.interleave(calls, rounds=given.rounds, budget=given.budget)
        found[what] = {side: {"min": s.minimum, "median": s.median} for side, s in samples.items()}
    found["cores_used_by_others"] = others.cores()
    if not given.no_memory:
        del model, calls
        sizes = (given.hidden, given.tokens, given.threads)
        found["memory"] = {side: memory(family, side, *sizes) for side in SIDES}
    return found


def report(results: dict[str, dict[str, Any]], t: int) -> None:
    rows = []
    for family, x in results.items():
        cells = []
        for what in ("prefill", "decode"):
            theirs, ours = x[what]["transformers"]["min"], x[what]["lineate"]["min"]
            cells += [f"{1e3 * theirs:.1f}", f"{1e3 * ours:.1f}", f"{theirs / ours:.2f}"]
        for side in SIDES:
            found = x.get("memory", {}).get(side)
            trusted = found is not None and abs(found["meter"] - 1) < timing.METER_WITHIN
            cells.append(f"{found['bytes'] / 2**20:.0f}" if trusted else "-")
        rows.append([family, *cells, f"{x['difference']:.0e}"])
    columns = ["family", f"prefill {t}: theirs ms", "ours ms", "ratio", "decode 1: theirs ms", "ours ms", "ratio"]
    columns += ["extra MiB: theirs", "ours", "difference"]
    timing.show("transformers with and without lineate, b 1, float32, minima", columns, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CLASSES), help="names, of " + ", ".join(CLASSES))
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the prefill")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each contestant")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    if given.memory:
        memory_here(*given.memory.split(":"), given.hidden, given.tokens)
        return 0
    results = {}
    for family in given.only.split(","):
        print(f"{family} ...", flush=True)
        results[family] = measure(family, given)
    print(f"{timing.cpu_model()}, {given.threads} threads, torch {torch.__version__}, "
          f"transformers {transformers.__version__}")  # fmt: skip
    report(results, given.tokens)
    busy = [f"{name}: {x['cores_used_by_others']:.2f}" for name, x in results.items()
            if (x["cores_used_by_others"] or 0) > timing.OtherProcesses.BUSY]  # fmt: skip
    if busy:
        print(f"other processes kept cores busy ({', '.join(busy)}): ratios are not to be believed")
    if given.json:
        about = {"cpu": timing.cpu_model(), "threads": given.threads, "torch": torch.__version__,
                 "transformers": transformers.__version__, "python": platform.python_version(),
                 "t": given.tokens, "hidden": given.hidden}  # fmt: skip
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"about": about, "families": results}, indent=1) + "\n")
        print(f"wrote {given.json}")
    wrong = [name for name, x in results.items() if x["difference"] > WITHIN]
    if wrong:
        print(f"more than {WITHIN} apart: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

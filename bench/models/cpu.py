"""HybridLM compared with the same weights in transformers, on a CPU: prefill and decoding.

    python -m bench.models.cpu [--json FILE] [--quick]

The models have the families' shapes, scaled down to hidden 1024 and 8 layers: "GGGA" is Qwen3-Next, "KKKM" is Kimi
Linear, each with experts and (--dense) without. Weights are random; logits are compared in the same run.
"""

import argparse
import importlib.metadata
import json
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.timing import Samples, cpu_model, interleave, show
from lineate.models import HybridLM

HIDDEN, LAYERS, VOCAB = 1024, 8, 8192


def qwen3_next(dense: bool) -> Any:
    """Return Qwen3-Next's shape, with 4 of 32 experts instead of 10 of 512.

    The key width is hidden, the value width 2 hidden, and every 4th layer is attention.
    """
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, intermediate_size=2816,
        num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        linear_num_key_heads=8, linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
        num_experts=32, num_experts_per_tok=4, moe_intermediate_size=256, shared_expert_intermediate_size=256,
        mlp_only_layers=list(range(LAYERS)) if dense else [],
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


def kimi_linear(dense: bool) -> Any:
    """Return Kimi Linear's shape, with 4 of 32 experts instead of 8 of 256.

    The linear width is 2 hidden, and every 4th layer is latent attention.
    """
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    config = KimiLinearConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, intermediate_size=2816,
        num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32,
        v_head_dim=64, linear_num_heads=16, linear_head_dim=128,
        num_local_experts=32, num_experts_per_tok=4, moe_intermediate_size=256, n_shared_experts=1,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(LAYERS)],
        mlp_layer_types=["dense" if dense or not i else "sparse" for i in range(LAYERS)],
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return KimiLinearForCausalLM(config)


MODELS: dict[str, Callable[[bool], Any]] = {"GGGA": qwen3_next, "KKKM": kimi_linear}


def load_both(
    make: Callable[[bool], Any], dense: bool, dtype: torch.dtype = torch.float32
) -> tuple[Any, HybridLM]:  # fmt: skip
    """Return transformers' model, and our model loaded from its files."""
    torch.manual_seed(0)
    theirs = make(dense).eval().to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return theirs, HybridLM.from_pretrained(folder, progress=False)


@torch.inference_mode()
def measure(name: str, dense: bool, tokens: int, steps: int, rounds: int, budget: float) -> list[dict[str, Any]]:
    theirs, ours = load_both(MODELS[name], dense)
    assert ours.config.letters == name * 2
    ids = torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(0))
    logits: dict[str, Tensor] = {}
    label = f"{name} {'dense' if dense else 'experts'}"
    prefill = interleave(
        {
            "transformers": lambda: theirs(ids, use_cache=True, logits_to_keep=1),
            "lineate": lambda: ours(ids, last_only=True),
        },
        rounds=rounds,
        budget=budget,
        inspect=lambda key, out: logits.__setitem__(key, out.logits[:, -1]),
    )
    difference = (logits["lineate"] - logits["transformers"]).abs().max().item()
    rows = [row(label, f"prefill {tokens}", prefill, tokens, difference)]

    past = theirs(ids, use_cache=True).past_key_values
    state = ours(ids).state
    token = ids[:, -1:]

    def step_theirs() -> Tensor:
        return theirs(token, past_key_values=past, use_cache=True).logits

    def step_ours() -> Tensor:
        nonlocal state
        out = ours(token, state=state)
        state = out.state
        return out.logits

    decode = interleave(
        {"transformers": step_theirs, "lineate": step_ours},
        rounds=steps,
        budget=budget,
        inspect=lambda key, out: logits.__setitem__(key, out),
    )
    difference = (logits["lineate"] - logits["transformers"]).abs().max().item()
    return [*rows, row(label, f"decode after {tokens}", decode, 1, difference)]


def row(model: str, what: str, samples: dict[str, Samples], tokens: int, difference: float) -> dict[str, Any]:
    theirs, ours = samples["transformers"], samples["lineate"]
    return {
        "model": model, "what": what, "tokens": tokens, "difference": difference,
        "transformers_seconds": theirs.seconds, "lineate_seconds": ours.seconds,
        "faster_by_minimum": theirs.minimum / ours.minimum, "faster_by_median": theirs.median / ours.median,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("bench/out/models-cpu.json"))
    parser.add_argument("--quick", action="store_true", help="512 tokens, fewer rounds")
    parser.add_argument("--dense", action="store_true", help="also with dense feed-forwards")
    parser.add_argument("--only", choices=tuple(MODELS), help="one pattern")
    args = parser.parse_args()
    torch.set_num_threads(2)
    results = []
    for name in MODELS if args.only is None else [args.only]:
        for dense in (False, True) if args.dense else (False,):
            results += measure(name, dense, *((512, 8, 2, 10.0) if args.quick else (2048, 30, 5, 40.0)))
    table = []
    for r in results:
        ms = (min(r[f"{who}_seconds"]) * 1e3 for who in ("transformers", "lineate"))
        times = [f"{x:.1f}" for x in ms]
        table.append([r["model"], r["what"], *times, f"{r['faster_by_minimum']:.2f}x", f"{r['difference']:.1e}"])
    show("float32, fastest of the rounds", ["model", "what", "transformers ms", "lineate ms", "faster", "diff"], table)
    head = {
        "date": datetime.now(UTC).date().isoformat(), "cpu": cpu_model(), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "transformers": importlib.metadata.version("transformers"),
    }  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"header": head, "results": results}, indent=1) + "\n")
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()

"""Compare log-probabilities of llama.cpp's server and of lineate on the same GGUF files, tiny models of each family.

    python -m bench.serving.gguf_check --llama-server PATH [--out FILE]

The models are random: in F32, in Q8_0, and with the values of Q8_0 written in F32. Products with Q8_0 round activations
in llama.cpp.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from bench.serving.llama import LlamaServer, version_of
from lineate.models import HybridLM

VOCAB, TOKENS = 320, 60
SHARED = dict(vocab_size=VOCAB, hidden_size=256, intermediate_size=256, num_hidden_layers=4)
QWEN = SHARED | dict(
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=64, linear_value_head_dim=64,
)  # fmt: skip
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64)
MODELS = {
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN | EXPERTS,
    "qwen3_next": QWEN | EXPERTS | dict(mlp_only_layers=[]),
    "kimi_linear": SHARED
    | dict(
        moe_intermediate_size=64, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=64, qk_rope_head_dim=32,
        qk_nope_head_dim=32, v_head_dim=64, num_local_experts=8, num_experts_per_tok=2, n_shared_experts=1, n_group=1,
        topk_group=1, first_k_dense_replace=1,
        linear_attn_config=dict(
            head_dim=64, num_heads=4, short_conv_kernel_size=4, full_attn_layers=[4], kda_layers=[1, 2, 3]
        ),
    ),
}  # fmt: skip


def rounded(name: str, shape: tuple[int, ...]) -> str:
    """Return the type of a tensor in a file of Q8_0, as llama.cpp's quantiser chooses it."""
    plain = ("ssm_conv1d", "ssm_a", "ffn_gate_inp")
    return "F32" if len(shape) < 2 or any(part in name for part in plain) else "Q8_0"


@torch.no_grad()
def compare(binary: Path, family: str, kind: str, folder: Path) -> dict[str, object]:
    """Return the largest difference of log-probabilities, at the last of some tokens, and of the likeliest token."""
    from tests.support import gguf_files
    from tests.support.families import build

    build(family, **MODELS[family]).save_pretrained(folder / "published")
    tokens = {
        "model": "gpt2", "pre": "qwen2", "tokens": [f"t{i}" for i in range(VOCAB)], "token_type": [1] * VOCAB,
        "merges": ["t 0"], "eos_token_id": VOCAB - 1, "bos_token_id": VOCAB - 1, "add_bos_token": False,
    }  # fmt: skip
    choose = (lambda name, shape: "F32") if kind == "F32" else rounded
    decoded = kind == "Q8_0 in F32"
    file = gguf_files.write(folder / "model.gguf", folder / "published", choose, decoded=decoded, tokens=tokens)
    ids = torch.randint(3, VOCAB - 1, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    ours = HybridLM.from_pretrained(file, progress=False)(ids).logits[0, -1].float().log_softmax(0)
    with LlamaServer(binary, file, folder, context=256, threads=1) as server:
        found = server.log_probabilities(ids[0].tolist(), VOCAB)
    theirs = torch.tensor([found[i] for i in range(VOCAB)])
    return {
        "family": family,
        "type": kind,
        "largest difference": float((ours - theirs).abs().max()),
        "spread of log-probabilities": float(ours.max() - ours.min()),
        "same likeliest token": bool(ours.argmax() == theirs.argmax()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = []
    for family in MODELS:
        for kind in ("F32", "Q8_0", "Q8_0 in F32"):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(compare(asked.llama_server, family, kind, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    if asked.out is not None:
        found = {"llama.cpp": version_of(asked.llama_server), "tokens": TOKENS, "rows": rows}
        asked.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

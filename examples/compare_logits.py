"""Load a checkpoint with HybridLM and with transformers, and compare: logits, ten greedy tokens, time.

python examples/compare_logits.py [FOLDER]     of qwen3_next, qwen3_5, kimi_linear or olmo_hybrid, as on the hub

Without a folder it makes a small Qwen3-Next with random weights, saved by transformers.
"""

import sys
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from lineate.models import HybridLM


def make_checkpoint(folder: str) -> None:
    """Save a checkpoint in transformers' layout: separate projections, interleaved heads, 1 + weight in the norms."""
    config = Qwen3NextConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
        intermediate_size=256, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config)
    for name, x in model.named_parameters():
        if "norm" in name:  # initial norms are all 0 or all 1, which would hide mistakes
            torch.nn.init.normal_(x, mean=0.5, std=0.3)
    model.save_pretrained(folder)


def timed(call):
    start = time.perf_counter()
    result = call()
    return result, 1000 * (time.perf_counter() - start)


torch.manual_seed(0)
with tempfile.TemporaryDirectory() as made, torch.no_grad():
    folder = sys.argv[1] if len(sys.argv) > 1 else made
    if folder == made:
        make_checkpoint(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = HybridLM.from_pretrained(folder, dtype=torch.float32)

    ids = torch.randint(ours.config.vocab_size, (1, 512))
    ours(ids), theirs(ids)  # warm up
    (expected, ms_theirs), (out, ms_ours) = timed(lambda: theirs(ids).logits), timed(lambda: ours(ids))
    error = (out.logits - expected).abs().max() / expected.abs().max()
    print(f"{ours.config.family}, layers {ours.config.letters}: logits differ by {error:.1e} of the largest")
    print(f"512 tokens: transformers {ms_theirs:.0f} ms, lineate {ms_ours:.0f} ms")

    tokens = []
    for _ in range(10):  # the state goes from call to call
        tokens.append(out.logits[:, -1:].argmax(-1))
        out = ours(tokens[-1], state=out.state)
    greedy = theirs.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None)[0, 512:].tolist()
    print(f"greedy, transformers {greedy}\ngreedy, lineate      {torch.cat(tokens, 1)[0].tolist()}")

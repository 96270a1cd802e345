"""Speed up transformers' own Qwen3-Next, Qwen3.5, Kimi Linear and OLMo-Hybrid models, with two lines:

    from lineate.integrations import transformers as fast
    fast.enable()

This example runs transformers' own Kimi Linear, small and with random weights, on a GPU if there is one.
"""

import time

import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from lineate.integrations import transformers as fast

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
config = KimiLinearConfig(
    vocab_size=1000, hidden_size=128, num_hidden_layers=4, intermediate_size=256, num_attention_heads=4,
    num_key_value_heads=4, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
    num_local_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=64, first_k_dense_replace=1,
    n_group=1, topk_group=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    linear_attn_config=dict(
        head_dim=64, num_heads=4, short_conv_kernel_size=4, full_attn_layers=[4], kda_layers=[1, 2, 3]
    ),
)  # fmt: skip
model = KimiLinearForCausalLM(config).to(device).eval()
ids = torch.randint(3, 1000, (1, 512), device=device)


def run() -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Return logits, the embedding's gradient, and the better of two times of a forward pass and of a training step."""
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        with torch.no_grad():
            logits = model(ids).logits.cpu()
        middle = time.perf_counter()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradient = model.get_input_embeddings().weight.grad.cpu()
        seconds.append((middle - start, time.perf_counter() - middle))
    forward, training = (min(times) for times in zip(*seconds, strict=True))
    return logits, gradient, forward, training


logits, gradient, forward, training = run()
print(fast.enable())
new_logits, new_gradient, new_forward, new_training = run()
fast.disable()

for what, before, after in (("forward", forward, new_forward), ("forward and backward", training, new_training)):
    print(f"512 tokens, {what}: {before * 1e3:.0f} ms -> {after * 1e3:.0f} ms, {before / after:.1f}x")
for what, x, y in (("logits", logits, new_logits), ("gradients", gradient, new_gradient)):
    print(f"{what} differ by {(x - y).norm() / x.norm():.1e}, relative")

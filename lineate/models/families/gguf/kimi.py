"""Kimi Linear in GGUF files: architecture kimi-linear.

The changes of llama.cpp's converter, which these views revert:

    A_log          ssm_a = -exp(A_log), `1 1 heads 1`
    convolutions   `1 channels 1 taps`
    kv_b_proj      attn_k_b, `heads rank nope`: the keys' part of each head, transposed; attn_v_b, `heads value rank`
    experts        one tensor of three dims for each of gate, up and down

Older files have the unchanged kv_b_proj, as attn_kv_b. Layers of Kimi Delta Attention have no key/value heads.
"""

from typing import Any

from lineate.models.families.gguf.contents import Contents, decay_logs, present
from lineate.models.families.gguf.qwen import experts, feed
from lineate.models.fields import show
from lineate.models.files.gguf import Span, View, view

SIGMOID = 2
"""The number of sigmoid scores in expert_gating_func."""
LINEAR = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "b_proj": "ssm_beta",
    "f_a_proj": "ssm_f_a", "f_b_proj": "ssm_f_b", "g_a_proj": "ssm_g_a", "g_b_proj": "ssm_g_b", "o_norm": "ssm_norm",
}  # fmt: skip
LATENT = {
    "q_proj": "attn_q", "kv_a_proj_with_mqa": "attn_kv_a_mqa", "kv_a_layernorm": "attn_kv_a_norm",
    "o_proj": "attn_output",
}  # fmt: skip


def read_kimi(c: Contents) -> tuple[dict[str, Any], dict[str, View]]:
    """Return the config and the tensors."""
    config = _config(c)
    found = {
        "model.embed_tokens.weight": c.take("token_embd.weight"),
        "model.norm.weight": c.take("output_norm.weight"),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = c.take("output.weight")
    for i in range(config["num_hidden_layers"]):
        source, target = f"blk.{i}", f"model.layers.{i}"
        found[f"{target}.input_layernorm.weight"] = c.take(f"{source}.attn_norm.weight")
        found[f"{target}.post_attention_layernorm.weight"] = c.take(f"{source}.ffn_norm.weight")
        if i + 1 in config["linear_attn_config"]["full_attn_layers"]:
            found |= _latent(c, config, source, f"{target}.self_attn")
        else:
            found |= _linear(c, config["linear_attn_config"], source, f"{target}.self_attn")
        if i < config["first_k_dense_replace"]:
            found |= feed(c, f"{target}.mlp", source, "")
            continue
        inside = f"{target}.block_sparse_moe"
        found[f"{inside}.gate.weight"] = c.take(f"{source}.ffn_gate_inp.weight")
        found[f"{inside}.gate.e_score_correction_bias"] = c.take(f"{source}.exp_probs_b.bias")
        found |= experts(c, f"{inside}.experts", source, ("w1", "w3", "w2"))
        if config["num_shared_experts"]:
            found |= feed(c, f"{inside}.shared_experts", source, "_shexp")
    c.check()
    return config, present(found)


def _config(c: Contents) -> dict[str, Any]:
    config, layers = c.common(), c.layers()
    counts = c.each("attention.head_count_kv", layers)
    if counts is None:
        raise c.error(f"{c.architecture}.attention.head_count_kv must have a value for each layer, got one or none")
    full = [i + 1 for i, count in enumerate(counts) if count != 0]
    scores = c.number("expert_gating_func", default=SIGMOID, least=0)
    if scores != SIGMOID:
        raise c.error(f"{c.architecture}.expert_gating_func must be {SIGMOID} (sigmoid), got {scores}")
    renormalize = c.get("expert_weights_norm")
    if renormalize not in (None, True, False):
        raise c.error(f"{c.architecture}.expert_weights_norm must be true or false, got {show(renormalize)}")
    linear = next((x for i in range(layers) if (x := c.header.tensors.get(f"blk.{i}.ssm_beta.weight"))), None)
    rope = c.number("rope.dimension_count", default=64, least=0)
    keys = c.number("attention.key_length_mla")
    if keys < rope:
        raise c.error(f"{c.architecture}.attention.key_length_mla must be at least {rope}, got {keys}")
    dense = c.number("leading_dense_block_count", default=0, least=0)
    config |= {
        "model_type": "kimi_linear",
        "num_hidden_layers": layers,
        "kv_lora_rank": c.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": keys - rope,
        "v_head_dim": c.number("attention.value_length_mla"),
        "linear_attn_config": {
            "num_heads": config["num_attention_heads"] if linear is None else linear.shape[0],
            "head_dim": c.number("kda.head_dim"),
            "short_conv_kernel_size": c.number("ssm.conv_kernel"),
            "full_attn_layers": full,
        },
        "first_k_dense_replace": dense,
    }
    if dense:
        config["intermediate_size"] = c.number("feed_forward_length")
    if dense < layers:
        config |= {
            "num_experts": c.number("expert_count"),
            "num_experts_per_token": c.number("expert_used_count"),
            "moe_intermediate_size": c.number("expert_feed_forward_length"),
            "num_shared_experts": c.number("expert_shared_count", default=0, least=0),
            "routed_scaling_factor": c.real("expert_weights_scale", 1.0),
            "num_expert_group": c.number("expert_group_count", default=1),
            "topk_group": c.number("expert_group_used_count", default=1),
            "moe_renormalize": renormalize is not False,
        }
    return config


def _linear(c: Contents, sizes: dict[str, Any], source: str, target: str) -> dict[str, View | None]:
    heads, dim, taps = sizes["num_heads"], sizes["head_dim"], sizes["short_conv_kernel_size"]
    found = {f"{target}.{a}.weight": c.take(f"{source}.{b}.weight") for a, b in LINEAR.items()}
    for name in "qkv":
        shape = heads * dim, taps
        found[f"{target}.{name}_conv1d.weight"] = c.take(f"{source}.ssm_conv1d_{name}.weight", shape)
    found[f"{target}.A_log"] = c.take(f"{source}.ssm_a", (heads,), change=decay_logs)
    found[f"{target}.dt_bias"] = c.take(f"{source}.ssm_dt.bias")
    return found


def _latent(c: Contents, config: dict[str, Any], source: str, target: str) -> dict[str, View | None]:
    found = {f"{target}.{a}.weight": c.take(f"{source}.{b}.weight") for a, b in LATENT.items()}
    found[f"{target}.kv_b_proj.weight"] = _up(c, config, source)
    return found


def _up(c: Contents, config: dict[str, Any], source: str) -> View | None:
    """Return kv_b_proj: the rows of the first head's keys and values, then of the second head's, and so on."""
    if c.has(f"{source}.attn_kv_b.weight"):
        return c.take(f"{source}.attn_kv_b.weight")
    keys, values = c.stored(f"{source}.attn_k_b.weight"), c.stored(f"{source}.attn_v_b.weight")
    if keys is None or values is None:
        return None
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    wanted = {keys.name: (heads, rank, config["qk_nope_head_dim"]), values.name: (heads, config["v_head_dim"], rank)}
    for x in (keys, values):
        if x.shape != wanted[x.name]:
            raise c.error(f"{x.name} must have shape {wanted[x.name]}, got {x.shape}")
    spans, dim = [], config["v_head_dim"]
    for i in range(heads):
        spans += [Span(keys, i * rank, (i + 1) * rank, turned=True), Span(values, i * dim, (i + 1) * dim)]
    return view(spans)

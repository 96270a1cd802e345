"""Tiny random models of transformers, one of each family that lineate.integrations.transformers changes."""

import torch
import transformers

VOCAB = 97
SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
CLEAR = {"initializer_range": 0.06}
"""Weights large enough that the linear layers show in the logits, for families that scale them down."""
LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
MLPS = ["dense", "sparse", "sparse", "sparse"]
QWEN = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
SPARSE = {
    **CLEAR,
    "layer_types": LAYERS,
    "intermediate_size": None,
    "eos_token_id": 1,
    "ple_layer_ids": [2],
    "ple_embed_dim": 32,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 64,
    "split_ngram_parts": 1,
    "hc_count": 2,
    "hc_lowrank": 16,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
LATENT = {
    "num_hidden_layers": 4,
    "layer_types": LAYERS,
    "mlp_layer_types": MLPS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
}
KIMI = {**LATENT, "linear_head_dim": 16, "linear_num_heads": 4, "num_experts": 8, "num_experts_per_token": 2}
BAILING = {
    **LATENT,
    **CLEAR,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
GLM5 = {
    **LATENT,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "qk_rope_head_dim": 0,
    "q_lora_rank": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "index_topk": 16,
    "index_head_dim": 16,
    "index_n_heads": 8,  # of fewer heads all scores may be 0, and any keys are the best
    "index_kpool": 4,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "projection_intermediate_size": 32,
}
OLMO = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layer_types": LAYERS,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 24,
}
MAMBA = {
    **CLEAR,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 24,
    "n_groups": 2,
    "num_hidden_layers": 3,
    "chunk_size": 32,
}
NEMOTRON = {
    **CLEAR,
    "layers_block_type": ["linear_attention", "linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
    "num_key_value_heads": 2,
    "head_dim": 16,
    "ssm_state_size": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
BAMBA = {
    **CLEAR,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": 32,
}
GRANITE = {
    **BAMBA,
    "mamba_n_groups": 1,
    "layer_types": LAYERS,
    "position_embedding_type": "rope",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 48,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.25,
}
FALCON = {
    **BAMBA,
    "num_hidden_layers": 3,
    "mamba_d_ssm": 128,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 1.4],
}
ZAMBA = {
    **CLEAR,
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention"],
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "mamba_d_state": 24,
    "chunk_size": 32,
    "use_mem_rope": True,
    "adapter_rank": 8,
}
MODELS = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**QWEN, **EXPERTS}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", QWEN),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**QWEN, **EXPERTS}),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", {**QWEN, **EXPERTS, **SPARSE}),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", KIMI),
    "bailing_hybrid": ("BailingHybridConfig", "BailingHybridForCausalLM", BAILING),
    "glm5_next": ("Glm5NextTextConfig", "Glm5NextForConditionalGeneration", GLM5),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", OLMO),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM", MAMBA),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", NEMOTRON),
    "granitemoehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", GRANITE),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", FALCON),
    "bamba": ("BambaConfig", "BambaForCausalLM", {**BAMBA, "attn_layer_indices": [2]}),
    "zamba2": ("Zamba2Config", "Zamba2ForCausalLM", ZAMBA),
}


NAMES = [name for name, (_, model, _) in MODELS.items() if hasattr(transformers, model)]
"""The families that the installed transformers has."""
KINDS = ("qwen3_next", "qwen4_exp", "bailing_hybrid", "mamba2", "falcon_h1")
"""Families that have one of every kind of layer, for tests of what does not depend on more."""


def build(family, attention="sdpa", **changes):
    """Return a tiny random model with every norm, gate and bias away from its initial value."""
    config, model, options = MODELS[family]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**SHARED, **options, **changes})
    if family == "glm5_next":  # it has no class for text alone
        made = transformers.Glm5NextConfig(text_config=made.to_dict(), vision_config=VISION)
        made.text_config._attn_implementation = attention
    if family != "mamba2":  # it has no attention
        made._attn_implementation = attention
    built = getattr(transformers, model)(made).eval()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if name.endswith("conv1d.weight"):
                parameter.copy_(0.5 * torch.randn_like(parameter))
    return built


def tokens(*shape, seed=1):
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def restarting(lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None]


def apart(got, want):
    return (got - want).abs().max().item()


def call(model, ids, cache=None, **given):
    """Return the logits and the cache, whichever name the family has for it."""
    if model.config.model_type != "mamba2":
        out = model(ids, past_key_values=cache, **given)
        return out.logits, out.past_key_values
    out = model.backbone(ids, cache_params=cache, **given)  # the model with a head drops positions
    return model.lm_head(out.last_hidden_state), out.cache_params


def split(model, ids, cuts):
    """Return the logits of calls one after the other, which pass on the cache."""
    cache, parts, at = None, [], 0
    for part in ids.split(cuts, dim=1):
        positions = torch.arange(at, at + part.shape[1], device=ids.device)[None]
        positions = positions.expand(len(ids), -1)  # without them, Bamba begins each call at 0
        logits, cache = call(model, part, cache, use_cache=True, position_ids=positions)
        parts.append(logits)
        at += part.shape[1]
    return torch.cat(parts, 1)


def gradients(model, loss):
    model.zero_grad()
    loss().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def separate(model, ids, lengths):
    """Return the logits of sequences that are called one by one."""
    return torch.cat([call(model, part, use_cache=False)[0] for part in ids.split(lengths, dim=1)], 1)

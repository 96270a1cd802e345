"""Write transformers' Qwen3-Next with dense feed-forwards as a GGUF file that llama.cpp reads.

llama.cpp's own `qwen3next` wants experts. Qwen3.5 (`qwen35`) has the same layers with dense feed-forwards, and other
orders of weights. Its rotary frequencies take turns between the three axes of an image, whose positions are all the
same in a text. The file is written with the package `gguf`, which also rounds weights to fewer bits; `tensors` needs
torch alone.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ARCHITECTURE = "qwen35"
TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0", "Q4_0": "MOSTLY_Q4_0"}
"""The types that matrices can be written in, and what llama.cpp calls such a file."""
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
ATTENTION = {
    "self_attn.q_proj.weight": "attn_q.weight",  # of each head: the query, then its gate
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
}


def tensors(config: Any, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Return the names and values of llama.cpp's tensors, in float32.

    Args:
        config: a Qwen3NextConfig without experts in any layer.
        weights: the state of Qwen3NextForCausalLM.
    """
    yield "token_embd.weight", weights["model.embed_tokens.weight"].float()
    yield "output_norm.weight", weights["model.norm.weight"].float() + 1
    yield "output.weight", weights["lm_head.weight"].float()
    for layer, kind in enumerate(config.layer_types):
        of_layer = f"model.layers.{layer}."
        for theirs, name in {**LAYER, **(ATTENTION if kind == "full_attention" else {})}.items():
            weight = weights[of_layer + theirs].float()
            yield f"blk.{layer}.{name}", weight + 1 if weight.ndim == 1 else weight  # norms multiply by 1 + weight
        if kind == "linear_attention":
            prefix = of_layer + "linear_attn."
            linear = {key.removeprefix(prefix): x.float() for key, x in weights.items() if key.startswith(prefix)}
            for name, weight in _linear(config, linear).items():
                yield f"blk.{layer}.{name}", weight.contiguous()


def _linear(config: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a layer of Gated DeltaNet.

    transformers keeps q, k, v and z of a key head together, and value head i reads key head i // (hv / h). llama.cpp
    wants all of q, then all of k, v and z, and value head i reads key head i % h.
    """
    h, hv = config.linear_num_key_heads, config.linear_num_value_heads
    k, v, share = config.linear_key_head_dim, config.linear_value_head_dim, hv // h
    order = torch.arange(hv).view(h, share).T.reshape(-1)  # order[i]: where llama.cpp's value head i is in transformers

    def tiled(rows: Tensor) -> Tensor:  # (hv each) ... -> the same rows in llama.cpp's order of heads
        return rows.unflatten(0, (hv, -1))[order].flatten(0, 1)

    qkvz = weights["in_proj_qkvz.weight"].unflatten(0, (h, -1))  # h (k + k + share v + share v) hidden
    query, key, value, gate = (x.flatten(0, 1) for x in qkvz.split([k, k, share * v, share * v], dim=1))
    ba = weights["in_proj_ba.weight"].unflatten(0, (h, -1))  # h (share + share) hidden
    beta, alpha = (x.flatten(0, 1) for x in ba.split([share, share], dim=1))
    taps = weights["conv1d.weight"].squeeze(1)  # (h k + h k + hv v) taps
    of_keys, of_values = taps.split([2 * h * k, hv * v])
    return {
        "attn_qkv.weight": torch.cat([query, key, tiled(value)]),
        "attn_gate.weight": tiled(gate),
        "ssm_beta.weight": tiled(beta),
        "ssm_alpha.weight": tiled(alpha),
        "ssm_conv1d.weight": torch.cat([of_keys, tiled(of_values)]),
        "ssm_a": -tiled(weights["A_log"]).exp(),
        "ssm_dt.bias": tiled(weights["dt_bias"]),
        "ssm_norm.weight": weights["norm.weight"],  # this norm multiplies by its weight alone
        "ssm_out.weight": tiled(weights["out_proj.weight"].T).T,
    }


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is a matrix that may be written with fewer bits; convolutions and vectors stay in float32."""
    return len(shape) == 2 and "conv1d" not in name


def write_gguf(model: Any, path: Path, type: str = "F32") -> None:
    """Write a Qwen3NextForCausalLM with dense feed-forwards; its tokens are called t0, t1, ..., and the last one ends.

    The vocabulary is there because llama.cpp wants one. Requests send token ids.

    Args:
        model: transformers' model.
        path: the file.
        type: of matrices, a key of TYPES; the columns of all matrices must be multiples of 32 for Q8_0 and Q4_0.
    """
    import gguf

    config = model.config
    rotary = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(rotary)
    writer.add_rope_dimension_sections([len(range(axis, rotary // 2, 3)) for axis in range(3)] + [0])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    writer.add_file_type(gguf.LlamaFileType[TYPES[type]])

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{token}" for token in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(config.vocab_size - 1)
    writer.add_eos_token_id(config.vocab_size - 1)
    kind = gguf.GGMLQuantizationType[type]
    for name, tensor in tensors(config, model.state_dict()):
        values = tensor.detach().contiguous().numpy()
        if type == "F32" or not is_matrix(name, values.shape):
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

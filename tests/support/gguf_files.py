"""GGUF files of published checkpoints, written as llama.cpp's converter writes them, with the package `gguf`.

Everything is stated with whole tensors: what the converter computes, not what lineate's views undo.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lineate.models.files.checkpoint import Checkpoint

ARCHITECTURES = {
    "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "kimi_linear": "kimi-linear",
}  # fmt: skip
Tensors = dict[str, Tensor]
ENDS = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
NORMS = {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
FEED = ("gate", "up", "down")


def converted(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """Return the tensors of a GGUF file, in float32."""
    tensors = {name: x.float() for name, x in tensors.items()}
    found = {ours: tensors[f"model.{theirs}"] for theirs, ours in ENDS.items()}
    if "lm_head.weight" in tensors:
        found["output.weight"] = tensors["lm_head.weight"]
    blocks = [f"model.layers.{i}." for i in range(config["num_hidden_layers"])]
    blocks += ["mtp.layers.0."] * ("mtp.fc.weight" in tensors)
    kimi = config["model_type"] == "kimi_linear"
    for i, prefix in enumerate(blocks):
        inside = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        made = (kimi_block if kimi else qwen_block)(config, inside)
        found |= {f"blk.{i}.{name}": x for name, x in made.items()}
    if "mtp.fc.weight" in tensors:
        last = f"blk.{len(blocks) - 1}.nextn"
        found[f"{last}.eh_proj.weight"] = tensors["mtp.fc.weight"]
        found[f"{last}.enorm.weight"] = tensors["mtp.pre_fc_norm_embedding.weight"]
        found[f"{last}.hnorm.weight"] = tensors["mtp.pre_fc_norm_hidden.weight"]
        found[f"{last}.shared_head_norm.weight"] = tensors["mtp.norm.weight"]
    if not kimi:
        ends = ("norm.weight", "enorm.weight", "hnorm.weight")
        found = {
            name: x + 1 if name.endswith(ends) and not name.endswith("ssm_norm.weight") else x
            for name, x in found.items()
        }
    return {name: x.contiguous() for name, x in found.items()}


def feed(found: Tensors, inside: Tensors, source: str, names: tuple[str, str, str], suffix: str) -> None:
    for part, name in zip(FEED, names, strict=True):
        found[f"ffn_{part}{suffix}.weight"] = inside[f"{source}.{name}.weight"]


def experts(found: Tensors, inside: Tensors, source: str, names: tuple[str, str, str]) -> None:
    if f"{source}.gate_up_proj" in inside:
        gate, up = inside[f"{source}.gate_up_proj"].chunk(2, 1)
        found |= {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
        found["ffn_down_exps.weight"] = inside[f"{source}.down_proj"]
        return
    for part, name in zip(FEED, names, strict=True):
        count = sum(key.startswith(f"{source}.") and key.endswith(f".{name}.weight") for key in inside)
        found[f"ffn_{part}_exps.weight"] = torch.stack([inside[f"{source}.{e}.{name}.weight"] for e in range(count)])


def qwen_block(config: dict[str, Any], inside: Tensors) -> Tensors:
    found = {
        "attn_norm.weight": inside["input_layernorm.weight"],
        "post_attention_norm.weight": inside["post_attention_layernorm.weight"],
    }
    for theirs, ours in (ATTENTION | NORMS).items():
        if f"self_attn.{theirs}.weight" in inside:
            found[f"{ours}.weight"] = inside[f"self_attn.{theirs}.weight"]
    linear = {name.removeprefix("linear_attn."): x for name, x in inside.items() if name.startswith("linear_attn.")}
    if linear:
        found |= qwen_linear(config, linear)
    names = ("gate_proj", "up_proj", "down_proj")
    if "mlp.gate.weight" not in inside:
        feed(found, inside, "mlp", names, "")
        return found
    found["ffn_gate_inp.weight"] = inside["mlp.gate.weight"]
    experts(found, inside, "mlp.experts", names)
    feed(found, inside, "mlp.shared_expert", names, "_shexp")
    found["ffn_gate_inp_shexp.weight"] = inside["mlp.shared_expert_gate.weight"]
    return found


def qwen_linear(config: dict[str, Any], linear: Tensors) -> Tensors:
    h, hv = config["linear_num_key_heads"], config["linear_num_value_heads"]
    k, v = config["linear_key_head_dim"], config["linear_value_head_dim"]
    found = {
        "ssm_a": -linear["A_log"].exp(),
        "ssm_dt.bias": linear["dt_bias"],
        "ssm_conv1d.weight": linear["conv1d.weight"].squeeze(1),
        "ssm_norm.weight": linear["norm.weight"],
        "ssm_out.weight": linear["out_proj.weight"],
    }
    if "in_proj_qkvz.weight" in linear:
        wide = hv // h * v
        parts = linear["in_proj_qkvz.weight"].unflatten(0, (h, -1)).split([k, k, wide, wide], 1)
        q, key, value, z = (x.flatten(0, 1) for x in parts)
        return found | {
            "attn_qkv.weight": torch.cat([q, key, value]),
            "attn_gate.weight": z,
            "ssm_ba.weight": linear["in_proj_ba.weight"],
        }

    def tiled(x: Tensor, width: int) -> Tensor:
        return x.unflatten(0, (h, hv // h, width)).transpose(0, 1).flatten(0, 2)

    def values_tiled(x: Tensor) -> Tensor:
        keys, values = x.split([2 * h * k, hv * v])
        return torch.cat([keys, tiled(values, v)])

    return {
        "ssm_a": tiled(found["ssm_a"], 1),
        "ssm_dt.bias": tiled(found["ssm_dt.bias"], 1),
        "ssm_conv1d.weight": values_tiled(found["ssm_conv1d.weight"]),
        "ssm_norm.weight": found["ssm_norm.weight"],
        "ssm_out.weight": tiled(found["ssm_out.weight"].T, v).T,
        "attn_qkv.weight": values_tiled(linear["in_proj_qkv.weight"]),
        "attn_gate.weight": tiled(linear["in_proj_z.weight"], v),
        "ssm_beta.weight": tiled(linear["in_proj_b.weight"], 1),
        "ssm_alpha.weight": tiled(linear["in_proj_a.weight"], 1),
    }


def kimi_block(config: dict[str, Any], inside: Tensors) -> Tensors:
    found = {
        "attn_norm.weight": inside["input_layernorm.weight"],
        "ffn_norm.weight": inside["post_attention_layernorm.weight"],
    }
    own = {name.removeprefix("self_attn."): x for name, x in inside.items() if name.startswith("self_attn.")}
    for theirs, ours in ATTENTION.items():
        if f"{theirs}.weight" in own:
            found[f"{ours}.weight"] = own[f"{theirs}.weight"]
    if "A_log" in own:
        found["ssm_a"] = -own["A_log"].exp().view(1, 1, -1, 1)
        found["ssm_dt.bias"] = own["dt_bias"].flatten()
        for part in "qkv":
            taps = own[f"{part}_conv1d.weight"]
            found[f"ssm_conv1d_{part}.weight"] = taps.reshape(1, taps.shape[0], 1, taps.shape[-1])
        for theirs, ours in {"b_proj": "beta", "o_norm": "norm"}.items() | {x: x[:3] for x in LOW_RANK}.items():
            found[f"ssm_{ours}.weight"] = own[f"{theirs}.weight"]
    else:
        found["attn_kv_a_mqa.weight"] = own["kv_a_proj_with_mqa.weight"]
        found["attn_kv_a_norm.weight"] = own["kv_a_layernorm.weight"]
        heads, nope, v = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
        keys, values = own["kv_b_proj.weight"].view(heads, nope + v, -1).split([nope, v], 1)
        found |= {"attn_k_b.weight": keys.transpose(1, 2), "attn_v_b.weight": values}
    names = ("gate_proj", "up_proj", "down_proj")
    there = "block_sparse_moe"
    if f"{there}.gate_proj.weight" in inside:
        feed(found, inside, there, names, "")
        return found
    found["ffn_gate_inp.weight"] = inside[f"{there}.gate.weight"]
    found["exp_probs_b.bias"] = inside[f"{there}.gate.e_score_correction_bias"]
    experts(found, inside, f"{there}.experts", ("w1", "w3", "w2"))
    feed(found, inside, f"{there}.shared_experts", names, "_shexp")
    return found


LOW_RANK = ("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj")


def metadata(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the keys behind ARCHITECTURE."""
    kimi = config["model_type"] == "kimi_linear"
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config.get("max_position_embeddings", config.get("model_max_length")),
        "embedding_length": config["hidden_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }
    if config.get("intermediate_size"):
        values["feed_forward_length"] = config["intermediate_size"]
    if "moe_intermediate_size" in config:
        values["expert_count"] = config.get("num_experts", config.get("num_local_experts"))
        values["expert_used_count"] = config.get("num_experts_per_tok", config.get("num_experts_per_token"))
        values["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if kimi:
        sizes = config["linear_attn_config"] or {
            "head_dim": config["linear_head_dim"],
            "num_heads": config["linear_num_heads"],
            "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        }
        rope, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
        full = [kind == "full_attention" for kind in config["layer_types"]]
        return values | {
            "attention.head_count_kv": [int(x) for x in full],
            "attention.kv_lora_rank": rank,
            "attention.key_length": rank + rope,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
            "attention.value_length_mla": config["v_head_dim"],
            "rope.dimension_count": rope,
            "ssm.conv_kernel": sizes["short_conv_kernel_size"],
            "kda.head_dim": sizes["head_dim"],
            "expert_shared_count": config["num_shared_experts"],
            "expert_group_count": config["num_expert_group"],
            "expert_group_used_count": config["topk_group"],
            "expert_gating_func": 2,
            "expert_weights_scale": config["routed_scaling_factor"],
            "leading_dense_block_count": sum(kind == "dense" for kind in config["mlp_layer_types"]),
        }
    if "mtp.fc.weight" in tensors:
        values |= {"block_count": config["num_hidden_layers"] + 1, "nextn_predict_layers": 1}
    if "shared_expert_intermediate_size" in config:
        values["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    rope = config["rope_parameters"]
    rotary = int(config["head_dim"] * rope.get("partial_rotary_factor", 0.25))
    return values | {
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": rotary,
        "rope.dimension_sections": [len(range(axis, rotary // 2, 3)) for axis in range(3)] + [0],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "full_attention_interval": config["layer_types"].index("full_attention") + 1,
    }


def quantised(x: np.ndarray, kind: str, seed: int = 0) -> np.ndarray:
    """Return the bytes of an array in a type of blocks, `... bytes`.

    The package cannot round to the types of 256 numbers. Their blocks are random bytes with scales that give numbers
    of the array's size.
    """
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    size, nbytes = gguf.GGML_QUANT_SIZES[number]
    if size != 256:
        return gguf.quants.quantize(x, number)
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*x.shape[:-1], x.shape[-1] // size, nbytes), dtype=np.uint8)
    spread = float(np.abs(x).std() + 1e-6)
    steps = {"Q4_K": 500, "Q5_K": 1000, "Q6_K": 3000}[kind]
    scales = (spread / steps * rng.uniform(0.5, 1, blocks.shape[:-1])).astype(np.float16)
    at = 208 if kind == "Q6_K" else 0
    blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    if kind != "Q6_K":
        blocks[..., 2:4] = (scales * np.float16({"Q4_K": 7.5, "Q5_K": 15.5}[kind]))[..., None].view(np.uint8)
    return blocks.reshape(*x.shape[:-1], -1)


def write(
    file: Path,
    folder: Path,
    kind_of: Callable[[str, tuple[int, ...]], str] = lambda name, shape: "F32",
    change: Callable[[dict[str, Any], Tensors], None] | None = None,
    decoded: bool = False,
    tokens: dict[str, Any] | None = None,
    template: str | None = None,
    split: int = 0,
    general: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint's folder as a GGUF file.

    Args:
        file: to write.
        folder: of the checkpoint, as transformers saves it.
        kind_of: the type of a tensor, by its name and shape.
        change: of the metadata (keys without the architecture) and the tensors, in place.
        decoded: whether quantised tensors are written in F32, with the values that they would have.
        tokens: keys of the tokenizer, behind tokenizer.ggml.
        template: the chat template.
        split: tensors of a file, if there are to be several; 0: one file.
        general: keys behind general.
    """
    import gguf

    checkpoint = Checkpoint.open(folder)
    tensors = {name: checkpoint.read(name) for name in checkpoint.entries}
    values, made = metadata(checkpoint.config, tensors), converted(checkpoint.config, tensors)
    if change is not None:
        change(values, made)
    writer = gguf.GGUFWriter(file, ARCHITECTURES[checkpoint.config["model_type"]], split_max_tensors=split)
    for key, value in values.items():
        add(writer, f"{writer.arch}.{key}", value)
    for key, value in (general or {}).items():
        add(writer, f"general.{key}", value)
    for key, value in (tokens or {}).items():
        add(writer, f"tokenizer.ggml.{key}", value)
    if template is not None:
        writer.add_chat_template(template)
    for seed, (name, x) in enumerate(made.items()):
        kind, array = kind_of(name, tuple(x.shape)), x.numpy()
        number = gguf.GGMLQuantizationType[kind]
        if kind == "F32":
            writer.add_tensor(name, array)
        elif kind == "F16":
            writer.add_tensor(name, array.astype(np.float16))
        else:
            raw = quantised(array, kind, seed)
            if decoded:
                writer.add_tensor(name, gguf.quants.dequantize(raw, number))
            else:
                writer.add_tensor(name, raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add(writer: Any, key: str, value: Any) -> None:
    """Add a key of the type that the converter gives it."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)

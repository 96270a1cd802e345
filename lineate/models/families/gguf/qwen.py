"""Qwen3-Next and Qwen3.5 in GGUF files: architectures qwen3next, qwen35 and qwen35moe.

The changes of llama.cpp's converter, which these views revert:

    norms but that of the linear layers    weight + 1
    A_log                                  ssm_a = -exp(A_log)
    in_proj_qkvz (Qwen3-Next)              attn_qkv: q, k, v of all heads; attn_gate: z of all heads
    value heads of Qwen3.5                 head j of key head i is at j h + i, not at i (hv / h) + j: in v, z, b, a,
                                           A_log, dt_bias, in the convolution's channels, and in out_proj's columns
    experts                                one tensor of three dims for each of gate, up and down
    multi-token prediction                 a block after the others, whose own tensors are called nextn

Older files of Qwen3-Next have the unchanged in_proj_qkvz, as ssm_in.
"""

from typing import Any

from lineate.models.families.gguf.contents import Contents, centred, decay_logs, present
from lineate.models.files.gguf import Span, View, view

TYPES = {"qwen3next": "qwen3_next", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}
"""model_type of config.json by architecture."""
Spans = list[tuple[int, int]]


def read_qwen(c: Contents) -> tuple[dict[str, Any], dict[str, View]]:
    """Return the config and the tensors."""
    config = _config(c)
    found = {"model.embed_tokens.weight": c.take("token_embd.weight")}
    found["model.norm.weight"] = c.take("output_norm.weight", change=centred)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = c.take("output.weight")
    for i, kind in enumerate(config["layer_types"]):
        found |= _block(c, config, i, f"model.layers.{i}", kind == "linear_attention")
    for n in range(c.number("nextn_predict_layers", default=0, least=0)):
        found |= _prediction(c, config, config["num_hidden_layers"] + n, n)
    c.check()
    return config, present(found)


def _config(c: Contents) -> dict[str, Any]:
    config = c.common()
    blocks, predicted = c.layers(), c.number("nextn_predict_layers", default=0, least=0)
    if predicted >= blocks:
        raise c.error(f"{c.architecture}.nextn_predict_layers must be below block_count, {blocks}, got {predicted}")
    layers = blocks - predicted
    head_dim = c.number("attention.key_length", default=config["hidden_size"] // config["num_attention_heads"])
    if c.number("attention.value_length", default=head_dim) != head_dim:
        raise c.error(f"{c.architecture}.attention.value_length must be key_length, {head_dim}, got another")
    rotary = c.number("rope.dimension_count", default=head_dim, most=head_dim)
    inner, value_heads = c.number("ssm.inner_size"), c.number("ssm.time_step_rank")
    if inner % value_heads:
        raise c.error(f"{c.architecture}.ssm.inner_size must be a multiple of {value_heads} value heads, got {inner}")
    recurrent = c.each("attention.recurrent_layers", layers)
    if recurrent is None:
        interval = c.number("full_attention_interval", default=4)
        recurrent = [(i + 1) % interval != 0 for i in range(layers)]
    config |= {
        "model_type": TYPES[c.architecture],
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if x else "full_attention" for x in recurrent],
        "num_key_value_heads": c.number("attention.head_count_kv", default=config["num_attention_heads"]),
        "head_dim": head_dim,
        "rope_parameters": {
            "rope_theta": c.real("rope.freq_base", 10000.0),
            "partial_rotary_factor": (rotary + 0.5) / head_dim,  # rounded down to `rotary` channels
        },
        "linear_num_key_heads": c.number("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": c.number("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": c.number("ssm.conv_kernel"),
    }
    if value_heads % config["linear_num_key_heads"]:
        raise c.error(
            f"{c.architecture}.ssm.time_step_rank must be a multiple of ssm.group_count, "
            f"{config['linear_num_key_heads']}, got {value_heads}"
        )
    if c.architecture != "qwen35":
        size = c.number("expert_feed_forward_length")
        config |= {
            "num_experts": c.number("expert_count"),
            "num_experts_per_tok": c.number("expert_used_count"),
            "moe_intermediate_size": size,
            "shared_expert_intermediate_size": c.number("expert_shared_feed_forward_length", default=size),
            "mlp_only_layers": [i for i in range(layers) if c.has(f"blk.{i}.ffn_gate.weight")],
        }
    if c.architecture == "qwen35" or config["mlp_only_layers"]:
        config["intermediate_size"] = c.number("feed_forward_length")
    return config


def _block(c: Contents, config: dict[str, Any], i: int, target: str, linear: bool) -> dict[str, View | None]:
    source = f"blk.{i}"
    found = {
        f"{target}.input_layernorm.weight": c.take(f"{source}.attn_norm.weight", change=centred),
        f"{target}.post_attention_layernorm.weight": c.take(f"{source}.post_attention_norm.weight", change=centred),
    }
    if linear:
        found |= _linear(c, config, source, f"{target}.linear_attn")
    else:
        names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
        found |= {f"{target}.self_attn.{a}.weight": c.take(f"{source}.{b}.weight") for a, b in names.items()}
        for name in ("q_norm", "k_norm"):
            found[f"{target}.self_attn.{name}.weight"] = c.take(f"{source}.attn_{name}.weight", change=centred)
    if "num_experts" not in config or c.has(f"{source}.ffn_gate.weight"):
        return found | feed(c, f"{target}.mlp", source, "")
    found[f"{target}.mlp.gate.weight"] = c.take(f"{source}.ffn_gate_inp.weight")
    found |= experts(c, f"{target}.mlp.experts", source, ("gate_proj", "up_proj", "down_proj"))
    found |= feed(c, f"{target}.mlp.shared_expert", source, "_shexp")
    shape = 1, config["hidden_size"]
    found[f"{target}.mlp.shared_expert_gate.weight"] = c.take(f"{source}.ffn_gate_inp_shexp.weight", shape)
    return found


def feed(c: Contents, target: str, source: str, suffix: str) -> dict[str, View | None]:
    """Return a dense feed-forward, or a shared expert, whose names end in _shexp."""
    return {
        f"{target}.{part}_proj.weight": c.take(f"{source}.ffn_{part}{suffix}.weight") for part in ("gate", "up", "down")
    }


def experts(c: Contents, target: str, source: str, names: tuple[str, str, str]) -> dict[str, View | None]:
    """Return the experts one by one; names: those of gate, up and down; gate and up may be one tensor."""
    if c.has(f"{source}.ffn_gate_up_exps.weight"):
        gates = c.experts(f"{source}.ffn_gate_up_exps.weight", (0, 2))
        ups = c.experts(f"{source}.ffn_gate_up_exps.weight", (1, 2))
    else:
        gates = c.experts(f"{source}.ffn_gate_exps.weight")
        ups = c.experts(f"{source}.ffn_up_exps.weight")
    found: dict[str, View | None] = {}
    for name, views in zip(names, (gates, ups, c.experts(f"{source}.ffn_down_exps.weight")), strict=True):
        found |= {f"{target}.{e}.{name}.weight": x for e, x in enumerate(views)}
    return found


def _linear(c: Contents, config: dict[str, Any], source: str, target: str) -> dict[str, View | None]:
    h, hv = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys, v = h * config["linear_key_head_dim"], config["linear_value_head_dim"]
    tiled = c.architecture != "qwen3next" and h != hv

    def heads(width: int, first: int = 0) -> Spans:
        """Return the bounds of the value heads in lineate's order, from row `first` on, with `width` rows each."""
        share = hv // h
        order = [j * h + i for i in range(h) for j in range(share)] if tiled else range(hv)
        return [(first + n * width, first + (n + 1) * width) for n in order]

    one = heads(1)
    found = {
        f"{target}.A_log": c.take(f"{source}.ssm_a", change=decay_logs, rows=one),
        f"{target}.dt_bias": c.take(f"{source}.ssm_dt.bias", rows=one),
        f"{target}.norm.weight": c.take(f"{source}.ssm_norm.weight"),
        f"{target}.out_proj.weight": c.take(f"{source}.ssm_out.weight", columns=heads(v) if tiled else ()),
        f"{target}.conv1d.weight": c.take(f"{source}.ssm_conv1d.weight", rows=[(0, 2 * keys), *heads(v, 2 * keys)]),
    }
    if c.architecture != "qwen3next":
        qkv = [(0, 2 * keys), *heads(v, 2 * keys)]
        return found | {
            f"{target}.in_proj_qkv.weight": c.take(f"{source}.attn_qkv.weight", rows=qkv),
            f"{target}.in_proj_z.weight": c.take(f"{source}.attn_gate.weight", rows=heads(v)),
            f"{target}.in_proj_b.weight": c.take(f"{source}.ssm_beta.weight", rows=one),
            f"{target}.in_proj_a.weight": c.take(f"{source}.ssm_alpha.weight", rows=one),
        }
    found[f"{target}.in_proj_ba.weight"] = c.take(f"{source}.ssm_ba.weight")
    found[f"{target}.in_proj_qkvz.weight"] = _qkvz(c, source, h, keys // h, hv // h * v)
    return found


def _qkvz(c: Contents, source: str, h: int, k: int, wide: int) -> View | None:
    """Return in_proj_qkvz of Qwen3-Next: q, k, v, z of the first key head, then of the second, and so on."""
    if c.has(f"{source}.ssm_in.weight"):
        return c.take(f"{source}.ssm_in.weight")
    qkv, gate = c.stored(f"{source}.attn_qkv.weight"), c.stored(f"{source}.attn_gate.weight")
    if qkv is None or gate is None:
        return None
    for x, rows in ((qkv, h * (2 * k + wide)), (gate, h * wide)):
        if x.rows != rows:
            raise c.error(f"{x.name} must have {rows} rows, got shape {x.shape}")
    spans = []
    for i in range(h):
        spans += [Span(qkv, n * h * k + i * k, n * h * k + (i + 1) * k) for n in (0, 1)]
        spans.append(Span(qkv, 2 * h * k + i * wide, 2 * h * k + (i + 1) * wide))
        spans.append(Span(gate, i * wide, (i + 1) * wide))
    return view(spans)


def _prediction(c: Contents, config: dict[str, Any], i: int, n: int) -> dict[str, View | None]:
    """Return a block of multi-token prediction; the first has the projection and norms that all share."""
    found = _block(c, config, i, f"mtp.layers.{n}", linear=False)
    names = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
    if n == 0:
        found["mtp.fc.weight"] = c.take(f"blk.{i}.nextn.eh_proj.weight")
        found |= {f"mtp.{a}.weight": c.take(f"blk.{i}.nextn.{b}.weight", change=centred) for a, b in names.items()}
    for name in ("embed_tokens", "shared_head_head"):
        if c.has(f"blk.{i}.nextn.{name}.weight"):
            found[f"mtp.{name}.weight"] = c.take(f"blk.{i}.nextn.{name}.weight")
    return found

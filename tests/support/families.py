"""Tiny random transformers models of every family, and the layouts in which their checkpoints are published.

Nothing in them is symmetric and no norm is neutral; weights are small enough for float32 to be exact to 1e-5.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lineate.models.files.checkpoint import Checkpoint, save

VOCAB = 97
SPLIT_EXPERTS = ("qwen3_next", "qwen3_5_moe", "kimi_linear")
"""Families with one tensor for each of gate, up and down of an expert."""
WITH_EXPERTS = (*SPLIT_EXPERTS, "granitemoehybrid", "nemotron_h", "bailing_hybrid")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Tiny:
    """How to build a tiny model of one family."""

    config: str
    """Class names in transformers."""
    model: str
    values: dict[str, Any]


QWEN = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
    num_hidden_layers=5,
    full_attention_interval=4,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
)
EXPERTS = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, shared_expert_intermediate_size=28)
FAMILIES = {
    "qwen3_next": Tiny(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        QWEN | EXPERTS | dict(intermediate_size=36, mlp_only_layers=[1], rope_theta=10000.0),
    ),
    "qwen3_5": Tiny("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", QWEN | dict(intermediate_size=36)),
    "qwen3_5_moe": Tiny("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", QWEN | EXPERTS),
    "kimi_linear": Tiny(
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=48,
            intermediate_size=36,
            moe_intermediate_size=20,
            num_hidden_layers=5,
            num_attention_heads=3,
            num_key_value_heads=3,
            kv_lora_rank=20,
            qk_rope_head_dim=6,
            qk_nope_head_dim=8,
            v_head_dim=14,
            num_local_experts=6,
            num_experts_per_tok=3,
            n_shared_experts=2,
            n_group=2,
            topk_group=1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            max_position_embeddings=512,
            linear_attn_config=dict(
                head_dim=10, num_heads=4, short_conv_kernel_size=4, full_attn_layers=[4], kda_layers=[1, 2, 3, 5]
            ),
            first_k_dense_replace=1,
        ),
    ),
    "olmo_hybrid": Tiny(
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=48,
            intermediate_size=36,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=9,
            linear_value_head_dim=11,
            pad_token_id=0,
            eos_token_id=2,
            max_position_embeddings=512,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        ),
    ),
    "mamba2": Tiny(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=48,
            num_hidden_layers=5,
            num_heads=6,
            head_dim=16,
            expand=2,
            state_size=10,
            n_groups=3,
            conv_kernel=4,
            chunk_size=32,
            pad_token_id=0,
            eos_token_id=2,
        ),
    ),
    "granitemoehybrid": Tiny(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=48,
            intermediate_size=20,
            shared_intermediate_size=28,
            num_hidden_layers=5,
            layer_types=["linear_attention"] * 3 + ["full_attention", "linear_attention"],
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=6,
            num_experts_per_tok=3,
            mamba_n_heads=6,
            mamba_d_head=16,
            mamba_d_state=10,
            mamba_n_groups=3,
            mamba_expand=2,
            mamba_chunk_size=32,
            embedding_multiplier=3.0,
            residual_multiplier=0.7,
            attention_multiplier=0.4,
            logits_scaling=0.3,
            position_embedding_type="rope",
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            max_position_embeddings=512,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        ),
    ),
    "bamba": Tiny(
        "BambaConfig",
        "BambaForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=48,
            intermediate_size=36,
            num_hidden_layers=5,
            attn_layer_indices=[3],
            num_attention_heads=4,
            num_key_value_heads=2,
            mamba_n_heads=6,
            mamba_d_head=16,
            mamba_d_state=10,
            mamba_n_groups=3,
            mamba_chunk_size=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            max_position_embeddings=512,
        ),
    ),
    "nemotron_h": Tiny(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=48,
            layers_block_type=[
                *("linear_attention", "mlp", "linear_attention", "full_attention", "moe"),
                *("linear_attention", "moe", "linear_attention", "mlp"),
            ],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=14,
            intermediate_size=36,
            ssm_state_size=10,
            mamba_num_heads=6,
            mamba_head_dim=12,
            n_groups=3,
            chunk_size=32,
            n_routed_experts=6,
            moe_intermediate_size=20,
            moe_shared_expert_intermediate_size=28,
            num_experts_per_tok=3,
            n_group=2,
            topk_group=1,
            routed_scaling_factor=1.5,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            max_position_embeddings=512,
        ),
    ),
}
FAMILIES["bailing_hybrid"] = Tiny(
    "BailingHybridConfig",
    "BailingHybridForCausalLM",
    FAMILIES["kimi_linear"].values
    | dict(
        linear_attn_config=None,
        layer_group_size=4,
        head_dim=10,
        num_mtp_layers=0,
        rope_theta=10000.0,
        kda_lower_bound=-3.0,
        topk_group=2,
        num_local_experts=12,
        n_group=4,
    ),
)
BACKBONE = ("mamba2", "nemotron_h")
"""Families whose tensors begin with backbone."""


def build(family: str, seed: int = 0, **changes: Any) -> Any:
    """Return a transformers model in float32 and eval mode."""
    import transformers

    tiny = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, tiny.config)(**(tiny.values | changes))
    model = getattr(transformers, tiny.model)(config)
    randomise(model)
    return model.float().eval()


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Fill every parameter and the routers' biases at random, at sizes that keep the logits of order one."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= {name: x for name, x in model.named_buffers() if name.endswith("e_score_correction_bias")}
    for name, x in tensors.items():
        key = name.rpartition(".")[2]
        if key == "A_log":
            x.uniform_(-1.5, 1.0)
        elif key == "dt_bias":
            x.uniform_(-2.0, 1.0)
        elif key == "e_score_correction_bias":
            x.normal_(0, 0.3)
        elif "norm" in name:
            x.add_(0.3 * torch.randn_like(x))
        elif "conv1d" in name:
            x.normal_(0, 0.5)
        elif x.dim() >= 2:
            x.normal_(0, (1.0 if "embed" in name else 0.25) * x.shape[-1] ** -0.5)
        else:
            x.normal_(0, 0.3)


def layers_of(tensors: Tensors) -> list[str]:
    """Return the prefixes model.layers.0, model.layers.1, ..."""
    return sorted({".".join(name.split(".")[:3]) for name in tensors if name.startswith("model.layers.")})


def renamed(old: str, new: str) -> Callable[[Tensors, str], None]:
    def change(tensors: Tensors, family: str) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def without_prefix(tensors: Tensors, family: str) -> None:
    for name in [name for name in tensors if name.startswith("model.")]:
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def with_other_parts(tensors: Tensors, family: str) -> None:
    tensors["mtp.layers.0.mlp.gate_proj.weight"] = torch.zeros(3, 5)
    tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(7, 5, dtype=torch.bfloat16)
    tensors["model.rotary_emb.inv_freq"] = torch.zeros(4)


def fused_experts(transpose: bool) -> Callable[[Tensors, str], None]:
    def change(tensors: Tensors, family: str) -> None:
        gate, up, down = ("w1", "w3", "w2") if family == "kimi_linear" else ("gate_proj", "up_proj", "down_proj")
        for layer in layers_of(tensors):
            inside = next(
                (part for part in ("mlp", "block_sparse_moe") if f"{layer}.{part}.gate.weight" in tensors), ""
            )
            if not inside:
                continue
            one = f"{layer}.{inside}.experts"
            count = FAMILIES[family].values.get("num_experts", 6)
            ones = [[tensors.pop(f"{one}.{e}.{key}.weight") for e in range(count)] for key in (gate, up, down)]
            gate_up = torch.cat((torch.stack(ones[0]), torch.stack(ones[1])), 1)
            into, back = gate_up, torch.stack(ones[2])
            tensors[f"{one}.gate_up_proj"] = into.transpose(1, 2).contiguous() if transpose else into
            tensors[f"{one}.down_proj"] = back.transpose(1, 2).contiguous() if transpose else back

    return change


def kimi_experts_named_as_qwen(tensors: Tensors, family: str) -> None:
    for old, new in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        renamed(f".{old}.weight", f".{new}.weight")(tensors, family)


def in_forget_gate(tensors: Tensors, family: str) -> None:
    for key in ("f_a_proj", "f_b_proj", "dt_bias", "A_log"):
        renamed(f"self_attn.{key}", f"self_attn.forget_gate.{key}")(tensors, family)


def flat_gates(tensors: Tensors, family: str) -> None:
    for name in tensors:
        if name.endswith("A_log"):
            tensors[name] = tensors[name].flatten()
        elif name.endswith("dt_bias"):
            tensors[name] = tensors[name].view(4, 10)


def one_convolution(tensors: Tensors, family: str) -> None:
    for name in [name for name in tensors if name.endswith("q_conv1d.weight")]:
        stem = name.removesuffix("q_conv1d.weight")
        tensors[f"{stem}conv1d.weight"] = torch.cat([tensors.pop(f"{stem}{part}_conv1d.weight") for part in "qkv"])


def three_convolutions(tensors: Tensors, family: str) -> None:
    """Cut the convolution into those of q, k and v."""
    sizes = {"olmo_hybrid": (18, 18, 44)}.get(family, (16, 16, 72))
    if family == "olmo_hybrid":
        one_convolution(tensors, family)
    for name in [name for name in tensors if name.endswith(".conv1d.weight")]:
        stem = name.removesuffix("conv1d.weight")
        for part, x in zip("qkv", tensors.pop(name).split(sizes), strict=True):
            tensors[f"{stem}{part}_conv1d.weight"] = x.clone()


def olmo_names_in_memory(tensors: Tensors, family: str) -> None:
    renamed("attention_layer_norm", "input_layernorm")(tensors, family)
    renamed("feedforward_layer_norm", "post_attention_layernorm")(tensors, family)


def as_in_memory(tensors: Tensors, family: str) -> None:
    """Rename Granite's experts as transformers' model has them."""
    for old, new in (
        ("router.layer.weight", "router.weight"),
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
    ):
        renamed(old, new)(tensors, family)


def bailing_names_in_memory(tensors: Tensors, family: str) -> None:
    in_memory = {
        "word_embeddings": "embed_tokens", ".attention.dense.": ".self_attn.o_proj.",
        "expert_bias": "e_score_correction_bias",
        ".attention.f_proj": ".self_attn.forget_gate.f_proj", ".attention.A_log": ".self_attn.forget_gate.A_log",
        ".attention.dt_bias": ".self_attn.forget_gate.dt_bias", ".attention.": ".self_attn.",
    }  # fmt: skip
    for old, new in in_memory.items():
        renamed(old, new)(tensors, family)
    one_convolution(tensors, family)


def with_prediction_layer(tensors: Tensors, family: str) -> None:
    tensors["model.layers.5.eh_proj.weight"] = torch.zeros(3, 5)


def stacked_experts(tensors: Tensors, family: str) -> None:
    """Join the experts of Nemotron-H, each of which has up and down alone."""
    for stem in {name.rpartition(".experts.")[0] for name in tensors if ".experts." in name}:
        for key in ("up_proj", "down_proj"):
            ones = [tensors.pop(f"{stem}.experts.{e}.{key}.weight") for e in range(6)]
            tensors[f"{stem}.experts.{key}"] = torch.stack(ones)


def without_backbone(tensors: Tensors, family: str) -> None:
    renamed("backbone.", "model.")(tensors, family)


EVERY = tuple(family for family in FAMILIES if family not in BACKBONE)
LAYOUTS: list[tuple[str, tuple[str, ...], Callable[[Tensors, str], None]]] = [
    ("vision-language prefix", EVERY, renamed("model.", "model.language_model.")),
    ("no prefix", EVERY, without_prefix),
    ("vision, mtp, rotary tables", EVERY, with_other_parts),
    ("experts fused", SPLIT_EXPERTS, fused_experts(transpose=False)),
    ("experts fused, transposed", SPLIT_EXPERTS, fused_experts(transpose=True)),
    ("mlp for block_sparse_moe", ("kimi_linear",), renamed("block_sparse_moe", "mlp")),
    ("layer 0 mlp", ("kimi_linear",), renamed("layers.0.block_sparse_moe", "layers.0.mlp")),
    ("gate_proj for w1", ("kimi_linear",), kimi_experts_named_as_qwen),
    ("forget_gate", ("kimi_linear",), in_forget_gate),
    ("A_log (H,), dt_bias (H, D)", ("kimi_linear",), flat_gates),
    ("one convolution", ("kimi_linear", "olmo_hybrid"), one_convolution),
    ("three convolutions", ("qwen3_next", "qwen3_5", "olmo_hybrid"), three_convolutions),
    ("input_layernorm", ("olmo_hybrid",), olmo_names_in_memory),
    ("model for backbone", BACKBONE, without_backbone),
    ("embedding for embeddings", BACKBONE, renamed("embeddings.", "embedding.")),
    ("names in memory", ("granitemoehybrid",), as_in_memory),
    ("experts stacked", ("nemotron_h",), stacked_experts),
    ("names in memory", ("bailing_hybrid",), bailing_names_in_memory),
    ("a layer that predicts further tokens", ("bailing_hybrid",), with_prediction_layer),
]


def rewrite(source: Path, target: Path, change=None, config=None, max_shard_bytes: int = 10**9) -> Path:
    """Copy a checkpoint with other tensors (change, in place) and other config keys (config; None removes one)."""
    checkpoint = Checkpoint.open(source)
    tensors = {name: checkpoint.read(name) for name in checkpoint.entries}
    if change is not None:
        change(tensors)
    values = checkpoint.config | (config or {})
    values = {key: value for key, value in values.items() if not (config and key in config and config[key] is None)}
    save(target, tensors, values, max_shard_bytes)
    return target

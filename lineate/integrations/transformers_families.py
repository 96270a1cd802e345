"""Which classes of transformers lineate changes, one row a model family.

A new family adds a row here. A layer of a known kind only names its parts (DeltaParts, Mamba2Parts); another kind adds
a class with the methods of `Parts`. Only families that transformers itself has get a row: classes that a checkpoint
brings as remote code are not found.
"""

from dataclasses import dataclass, replace

from lineate.integrations.transformers_delta import DeltaParts
from lineate.integrations.transformers_layers import Parts
from lineate.integrations.transformers_mamba import Mamba2Parts


@dataclass(frozen=True)
class ModelPatch:
    """The classes of one transformers model family that lineate changes, and the parts of its linear layer."""

    name: str
    """The name of its module below transformers.models."""
    layer: str
    """The class of the linear layer."""
    model: str
    """The class of the text model, which makes the masks and calls the layers."""
    parts: Parts
    """The parts of the linear layer."""
    latent: str | None = None
    """The class of a softmax attention whose values are narrower than its keys, if lineate has a forward for it."""
    unpacked: str | None = None
    """The class of a part that mixes tokens and cannot be told where sequences begin; it gets one sequence a row."""
    one_mask: bool = False
    """Whether the softmax layers take the mask of the linear layers, and find the order of tokens themselves."""


QWEN3_NEXT = DeltaParts(qkv=("in_proj_qkvz",), write="in_proj_ba", grouped=True)
QWEN3_5 = DeltaParts()
OLMO = DeltaParts(
    qkv=("q_proj", "k_proj", "v_proj"), output_gate=("g_proj",), gate=("a_proj",), write="b_proj",
    doubles_beta="allow_neg_eigval", norm="o_norm", out="o_proj",
)  # fmt: skip
KIMI = DeltaParts(
    heads=("num_heads", "num_heads", "head_dim", "head_dim"), qkv=("q_proj", "k_proj", "v_proj"),
    output_gate=("g_a_proj", "g_b_proj"), gate=("forget_gate.f_a_proj", "forget_gate.f_b_proj"), write="b_proj",
    decay="forget_gate", norm="o_norm", out="o_proj",
)  # fmt: skip
GLM5 = replace(KIMI, lower_bound="forget_gate.safe_gate_lower_bound")
BAILING = replace(
    KIMI, output_gate=("g_proj",), gate=("forget_gate.f_proj",), lower_bound="forget_gate.lower_bound",
    bounded="forget_gate.safe_gate",
)  # fmt: skip
MAMBA2 = Mamba2Parts()
FALCON = Mamba2Parts(multipliers=("ssm_in_multiplier", "mup_vector"))

MODEL_PATCHES = (
    ModelPatch("qwen3_next", "Qwen3NextGatedDeltaNet", "Qwen3NextModel", QWEN3_NEXT),
    ModelPatch("qwen3_5", "Qwen3_5GatedDeltaNet", "Qwen3_5TextModel", QWEN3_5),
    ModelPatch("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", "Qwen3_5MoeTextModel", QWEN3_5),
    ModelPatch("qwen4_exp", "Qwen4ExpTextGatedDeltaNet", "Qwen4ExpTextModel", QWEN3_5, unpacked="Qwen4ExpTextPLELayer"),
    ModelPatch("kimi_linear", "KimiLinearDeltaAttention", "KimiLinearModel", KIMI, latent="KimiLinearAttention"),
    ModelPatch("bailing_hybrid", "BailingHybridDeltaAttention", "BailingHybridModel", BAILING),
    ModelPatch(
        "glm5_next",
        "Glm5NextTextLinearAttention",
        "Glm5NextTextModel",
        GLM5,
        unpacked="Glm5NextTextAttention",
        one_mask=True,
    ),
    ModelPatch("olmo_hybrid", "OlmoHybridGatedDeltaNet", "OlmoHybridModel", OLMO),
    ModelPatch("mamba2", "Mamba2Mixer", "Mamba2Model", MAMBA2),
    ModelPatch("nemotron_h", "NemotronHMamba2Mixer", "NemotronHModel", MAMBA2),
    ModelPatch("granitemoehybrid", "GraniteMoeHybridMambaLayer", "GraniteMoeHybridModel", MAMBA2),
    ModelPatch("falcon_h1", "FalconH1Mixer", "FalconH1Model", FALCON),
    ModelPatch("bamba", "BambaMixer", "BambaModel", MAMBA2),
    ModelPatch("zamba2", "Zamba2MambaMixer", "Zamba2Model", MAMBA2),
)

"""bench/serving/gguf_writer.py orders the weights of Qwen3-Next as llama.cpp reads those of Qwen3.5."""

import pytest
import torch
from torch.nn.functional import conv1d, linear, normalize, rms_norm, silu, softplus

import lineate
from bench.serving.gguf_writer import tensors

transformers = pytest.importorskip("transformers")
H, HV, K, HIDDEN = 2, 6, 8, 16


@pytest.fixture(scope="module")
def model():
    config = transformers.Qwen3NextConfig(
        vocab_size=32, hidden_size=HIDDEN, num_hidden_layers=4, intermediate_size=24,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        linear_num_key_heads=H, linear_num_value_heads=HV, linear_key_head_dim=K, linear_value_head_dim=K,
        mlp_only_layers=[0, 1, 2, 3],
    )  # fmt: skip
    torch.manual_seed(0)
    made = transformers.Qwen3NextForCausalLM(config).eval()
    for weight in made.parameters():
        torch.nn.init.normal_(weight)
    return made


def test_every_weight_is_written_once(model):
    written = dict(tensors(model.config, model.state_dict()))
    assert len(written) == len(list(tensors(model.config, model.state_dict())))
    assert sum(x.numel() for x in written.values()) == sum(x.numel() for x in model.state_dict().values())
    assert all(x.dtype == torch.float32 for x in written.values())


def test_norms_multiply_by_what_is_written(model):
    written = dict(tensors(model.config, model.state_dict()))
    layer, x = model.model.layers[3], torch.randn(5, HIDDEN)
    for name, module in {
        "output_norm": model.model.norm,
        "blk.3.attn_norm": layer.input_layernorm,
        "blk.3.post_attention_norm": layer.post_attention_layernorm,
        "blk.3.attn_q_norm": layer.self_attn.q_norm,
        "blk.3.attn_k_norm": layer.self_attn.k_norm,
    }.items():
        weight, given = written[f"{name}.weight"], x[:, : module.weight.numel()]
        torch.testing.assert_close(rms_norm(given, weight.shape, weight, 1e-6), module(given))


def test_linear_layer_with_value_heads_tiled_over_key_heads(model):
    """The layer as llama.cpp computes it: value head i reads key head i % h."""
    w = {key.removeprefix("blk.1."): x for key, x in tensors(model.config, model.state_dict()) if "blk.1." in key}
    x = torch.randn(1, 7, HIDDEN)
    mixed = linear(x, w["attn_qkv.weight"]).mT
    taps = w["ssm_conv1d.weight"]
    mixed = silu(conv1d(mixed, taps[:, None], padding=taps.shape[1] - 1, groups=len(taps))[..., :7]).mT
    q, k, v = (part.unflatten(-1, (-1, K)) for part in mixed.split([H * K, H * K, HV * K], dim=-1))
    q, k = (normalize(part, dim=-1).repeat(1, 1, HV // H, 1) for part in (q, k))
    log_decay = w["ssm_a"] * softplus(linear(x, w["ssm_alpha.weight"]) + w["ssm_dt.bias"])
    beta = linear(x, w["ssm_beta.weight"]).sigmoid()
    read = lineate.gated_delta_rule(q, k, v, log_decay, beta, form="recurrent").output
    gate = silu(linear(x, w["attn_gate.weight"])).unflatten(-1, (HV, K))
    out = linear((rms_norm(read, (K,), w["ssm_norm.weight"], 1e-6) * gate).flatten(-2), w["ssm_out.weight"])
    torch.testing.assert_close(out, model.model.layers[1].linear_attn(x), rtol=1e-4, atol=1e-4)

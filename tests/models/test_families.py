"""Checkpoints of every family against transformers: the same logits, from every published layout."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lineate.models import HybridLM, families
from lineate.models.families import LACKING, kimi_linear, make_plan, read_config
from lineate.models.families.values import Values
from lineate.models.files.checkpoint import Checkpoint, save
from lineate.models.files.loading import check_plan, check_tensors
from lineate.models.files.safetensors import CheckpointError, Entry
from lineate.models.hybrid import empty_model, save_pretrained
from lineate.models.inspect import describe, print_description, rows
from lineate.planning import read_model

transformers = pytest.importorskip("transformers")

from tests.support.families import (  # noqa: E402
    FAMILIES,
    LAYOUTS,
    VOCAB,
    WITH_EXPERTS,
    Tensors,
    build,
    fused_experts,
    renamed,
    rewrite,
)  # fmt: skip

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
CLOSE = 1e-5


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a family's tiny model as transformers saves it."""

    @cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        theirs(name).save_pretrained(path)
        return path

    return folder


@pytest.fixture(scope="module")
def ours(folders) -> Callable[[str], HybridLM]:
    @cache
    def load(name: str) -> HybridLM:
        return HybridLM.from_pretrained(folders(name), progress=False)

    return load


@cache
def theirs(name: str):
    return build(name)


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=CLOSE, rtol=0)


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("t", [1, 75, 300])
def test_logits_equal_those_of_transformers(family, ours, t):
    ids = tokens(2, t, seed=t)
    out = ours(family)(ids)
    assert out.logits.dtype == torch.float32
    assert_close(out.logits, theirs(family)(ids).logits)


def test_token_by_token_equals_the_full_pass(family, ours):
    model, ids = ours(family), tokens(2, 90)
    full = model(ids).logits
    out = model(ids[:, :70])
    parts = [out.logits]
    for i in range(70, 90):
        out = model(ids[:, i : i + 1], state=out.state)
        parts.append(out.logits)
    assert_close(torch.cat(parts, 1), full)


@pytest.mark.cover
def test_greedy_tokens_are_identical(family, ours):
    def continued(step) -> list[int]:
        out, state, text = tokens(1, 20, seed=5), None, []
        for _ in range(32):
            logits, state = step(out, state)
            out = logits[:, -1:].argmax(-1)
            text.append(int(out))
        return text

    def our_step(ids, state):
        out = ours(family)(ids, state=state)
        return out.logits, out.state

    def their_step(ids, cache):
        name = "cache_params" if family == "mamba2" else "past_key_values"
        out = theirs(family)(ids, **{name: cache}, use_cache=True)
        return out.logits, out[name]

    text = continued(our_step)
    assert text == continued(their_step)
    assert len(set(text)) > 1


def test_packed_rows_equal_separate_runs(family, ours):
    model, lengths = ours(family), (70, 1, 33)
    texts = [tokens(1, n, seed=n) for n in lengths]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    packed = model(torch.cat(texts, 1), cu_seqlens=bounds).logits[0].split(lengths)
    for part, text in zip(packed, texts, strict=True):
        assert_close(part, model(text).logits[0])
        assert_close(part, theirs(family)(text).logits[0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_equal_unpadded(family, ours, side):
    model, lengths, longest = ours(family), (70, 12), 70
    ids, mask = torch.zeros(2, longest, dtype=torch.long), torch.zeros(2, longest, dtype=torch.long)
    spans = [slice(0, n) if side == "right" else slice(longest - n, longest) for n in lengths]
    for row, (n, span) in enumerate(zip(lengths, spans, strict=True)):
        ids[row, span], mask[row, span] = tokens(n, seed=row), 1
    out = model(ids, attention_mask=mask)
    more = model(tokens(2, 1, seed=9), state=out.state).logits
    for row, (n, span) in enumerate(zip(lengths, spans, strict=True)):
        alone = model(torch.cat((tokens(1, n, seed=row), tokens(2, 1, seed=9)[row : row + 1]), 1)).logits[0]
        assert_close(out.logits[row, span], alone[:-1])
        assert_close(more[row], alone[-1:])


@pytest.mark.parametrize("max_shard_bytes", [10**9, 50_000])
def test_save_and_reload_give_the_same_bits(family, ours, tmp_path, max_shard_bytes):
    model = ours(family)
    save_pretrained(model, tmp_path, max_shard_bytes)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_bytes == 50_000)
    again = HybridLM.from_pretrained(tmp_path, progress=False)
    assert again.config == model.config
    assert_same_bits(again, model)
    assert not again.training
    assert torch.equal(again(tokens(1, 9)).logits, model(tokens(1, 9)).logits)


def assert_same_bits(one: HybridLM, other: HybridLM) -> None:
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(
    ("name", "change"), [pytest.param(f, c, id=f"{f}-{n}") for n, families, c in LAYOUTS for f in families]
)
def test_every_layout_loads_to_the_same_bits(folders, ours, tmp_path, name, change):
    rewrite(folders(name), tmp_path, lambda tensors: change(tensors, name))
    assert Checkpoint.open(tmp_path).shapes != Checkpoint.open(folders(name)).shapes
    assert_same_bits(HybridLM.from_pretrained(tmp_path, progress=False), ours(name))


def test_shards_load_to_the_same_bits(family, folders, ours, tmp_path):
    rewrite(folders(family), tmp_path, max_shard_bytes=60_000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert_same_bits(HybridLM.from_pretrained(tmp_path, progress=False), ours(family))


ROPE = {"rope_parameters": None, "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
CONFIGS = [
    ("qwen3_next", ROPE),
    ("qwen3_next", {"layer_types": None, "full_attention_interval": 4}),
    ("qwen3_next", {"rope_parameters": None, "rope_scaling": None}),
    ("qwen3_5", ROPE),
    ("qwen3_5", {"model_type": "qwen3_5"}),
    ("qwen3_5_moe", {"model_type": "qwen3_5_moe"}),
    ("kimi_linear", {"layer_types": None, "mlp_layer_types": None}),
    ("kimi_linear", {"linear_attn_config": None, "first_k_dense_replace": None}),
    ("kimi_linear", {"num_experts": None, "num_local_experts": 6, "moe_renormalize": None, "norm_topk_prob": True}),
    ("olmo_hybrid", {"rope_parameters": None, "rope_theta": 10000.0, "layer_types": None}),
    ("mamba2", {"time_step_limit": None}),
    ("mamba2", {"time_step_limit": [0.0, float("inf")]}),
    ("granitemoehybrid", {"layer_types": ["mamba", "mamba", "mamba", "attention", "mamba"]}),
    ("granitemoehybrid", {"layer_types": None, "layers_block_type": [*["mamba"] * 3, "attention", "mamba"]}),
    ("granitemoehybrid", {"mamba_d_head": "auto", "time_step_limit": None, "rope_parameters": None}),
    ("bailing_hybrid", {"layer_types": None, "mlp_layer_types": None}),
    ("bailing_hybrid", {"linear_head_dim": None, "linear_num_heads": None, "head_dim": 10, "rope_parameters": None}),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M-M*EMEM-"}),
    (
        "nemotron_h",
        {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "moe", "mamba", "moe", "mamba", "mlp"]},
    ),
    ("nemotron_h", {"n_groups": None, "mamba_n_groups": 3, "head_dim": None, "attention_head_dim": 14}),
]


@pytest.mark.parametrize(("name", "changes"), CONFIGS)
def test_every_spelling_of_the_config_gives_the_same_model(folders, ours, tmp_path, name, changes):
    model = HybridLM.from_pretrained(rewrite(folders(name), tmp_path, config=changes), progress=False)
    assert replace(model.config, family="") == replace(ours(name).config, family="")
    assert_same_bits(model, ours(name))


def test_config_of_kimi_as_released():
    """Layers count from 1, and the sizes of the linear layers are in a section of their own."""
    full = [4, 8, 12, 16, 20, 24, 27]
    linear = {
        "full_attn_layers": full, "kda_layers": [i for i in range(1, 28) if i not in full],
        "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
    }  # fmt: skip
    config = kimi_linear.config_from(
        {
            "model_type": "kimi_linear", "linear_attn_config": linear, "first_k_dense_replace": 1, "head_dim": 72,
            "hidden_act": "silu", "hidden_size": 2304, "intermediate_size": 9216, "kv_lora_rank": 512,
            "mla_use_nope": True, "model_max_length": 1048576, "moe_intermediate_size": 1024, "moe_layer_freq": 1,
            "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
            "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
            "num_key_value_heads": 32, "num_shared_experts": 1, "q_lora_rank": None, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
            "routed_scaling_factor": 2.446, "topk_group": 1, "use_grouped_topk": True, "v_head_dim": 128,
            "vocab_size": 163840, "eos_token_id": 163586,
        }
    )  # fmt: skip
    assert [i + 1 for i, letter in enumerate(config.letters) if letter == "M"] == full
    assert config.dense_layers == (0,) and config.eos_token_ids == (163586,)
    assert config.latent.norm_eps == 1e-6 and config.linear.norm_eps == config.norm_eps == 1e-5
    assert sum(x.numel() for x in empty_model(config).parameters()) == pytest.approx(49.1e9, rel=0.01)


def test_published_shapes(family):
    """Every tensor of the full-size model with transformers' default config has its place."""
    tiny = FAMILIES[family]
    config = getattr(transformers, tiny.config)()
    with torch.device("meta"):
        other = getattr(transformers, tiny.model)(config)
    entries = {n: Entry(Path(), x.dtype, tuple(x.shape), 0) for n, x in other.state_dict().items()}
    checkpoint = Checkpoint(Path(), json.loads(config.to_json_string(use_diff=False)), entries)
    ours = read_config(checkpoint)
    model = empty_model(ours)
    plan = make_plan(checkpoint, ours, model)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    check_plan(shapes, plan)
    check_tensors(plan, checkpoint, set(shapes))
    assert sum(x.numel() for x in model.parameters()) == sum(x.numel() for x in other.parameters())


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_text_part_of_a_vision_language_config(folders, ours, tmp_path, name):
    text = Checkpoint.open(folders(name)).config
    config = {"model_type": name, "text_config": text, "vision_config": {"depth": 1}, "tie_word_embeddings": False}
    rewrite(folders(name), tmp_path, lambda tensors: renamed("model.", "model.language_model.")(tensors, name))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same_bits(HybridLM.from_pretrained(tmp_path, progress=False), ours(name))


def test_olmo_without_positions(tmp_path):
    other = build("olmo_hybrid", rope_parameters={"rope_type": "default", "rope_theta": None})
    other.save_pretrained(tmp_path)
    model = HybridLM.from_pretrained(tmp_path, progress=False)
    assert model.config.attention.rotary_dim == 0
    assert_close(model(tokens(1, 40)).logits, other(tokens(1, 40)).logits)


def test_olmo_without_negative_eigenvalues_and_with_biases(tmp_path):
    other = build("olmo_hybrid", linear_allow_neg_eigval=False, attention_bias=True)
    other.save_pretrained(tmp_path)
    model = HybridLM.from_pretrained(tmp_path, progress=False)
    assert_close(model(tokens(1, 40)).logits, other(tokens(1, 40)).logits)


def test_qwen_with_biases_and_without_renormalising(tmp_path):
    other = build("qwen3_next", attention_bias=True, norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[])
    other.save_pretrained(tmp_path)
    model = HybridLM.from_pretrained(tmp_path, progress=False)
    assert model.config.dense_layers == (0, 2, 4)
    assert_close(model(tokens(1, 40)).logits, other(tokens(1, 40)).logits)


def test_granite_without_experts_and_positions(tmp_path):
    other = build("granitemoehybrid", num_local_experts=0, position_embedding_type=None, attention_bias=True)
    other.save_pretrained(tmp_path)
    model = HybridLM.from_pretrained(tmp_path, progress=False)
    assert model.config.experts is None and model.config.attention.rotary_dim == 0
    assert_close(model(tokens(1, 40)).logits, other(tokens(1, 40)).logits)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mamba2", {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True}),
        ("granitemoehybrid", {"mamba_proj_bias": True, "mamba_conv_bias": False, "tie_word_embeddings": True}),
        ("nemotron_h", {"use_bias": True, "use_conv_bias": False}),
    ],
)
def test_mamba_with_and_without_biases(tmp_path, name, changes):
    other = build(name, **changes)
    other.save_pretrained(tmp_path)
    model = HybridLM.from_pretrained(tmp_path, progress=False)
    assert model.config.mamba.bias and not model.config.mamba.conv_bias
    assert (model.head is None) == ("tie_word_embeddings" in changes)
    assert_close(model(tokens(1, 40)).logits, other(tokens(1, 40)).logits)


def test_steps_of_mamba_within_bounds(tmp_path):
    """transformers bounds them in a prefill; it leaves them as they are when it reads one token after others."""
    other = build("mamba2", time_step_limit=(0.2, 0.9))
    other.save_pretrained(tmp_path)
    model = HybridLM.from_pretrained(tmp_path, progress=False)
    assert (model.config.mamba.step_least, model.config.mamba.step_most) == (0.2, 0.9)
    assert_close(model(tokens(1, 40)).logits, other(tokens(1, 40)).logits)
    out = model(tokens(1, 40)[:, :39])
    assert_close(model(tokens(1, 40)[:, 39:], state=out.state).logits, other(tokens(1, 40)).logits[:, 39:])


def test_bailing_without_a_bound_of_the_decay(tmp_path):
    other = build("bailing_hybrid", kda_safe_gate=False)
    other.save_pretrained(tmp_path)
    model = HybridLM.from_pretrained(tmp_path, progress=False)
    assert model.config.linear.gate_lower_bound is None
    assert_close(model(tokens(1, 40)).logits, other(tokens(1, 40)).logits)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_tied_embeddings(tmp_path, name, head):
    other = build(name, tie_word_embeddings=True)
    other.save_pretrained(tmp_path / "a")

    def add_head(tensors: Tensors) -> None:
        tensors.pop("lm_head.weight", None)
        if head != "absent":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if head == "different":
            tensors["lm_head.weight"][VOCAB - 1, 3] += 1

    rewrite(tmp_path / "a", tmp_path / "b", add_head)
    if head == "different":
        with pytest.raises(CheckpointError, match=r"ties lm_head.weight to model.embed_tokens.weight"):
            HybridLM.from_pretrained(tmp_path / "b", progress=False)
        return
    model = HybridLM.from_pretrained(tmp_path / "b", progress=False)
    assert model.head is None
    assert_close(model(tokens(1, 40)).logits, other(tokens(1, 40)).logits)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_a_choice(family, folders, ours, dtype):
    model = HybridLM.from_pretrained(folders(family), dtype=dtype, progress=False)
    for name, x in model.state_dict().items():
        kept = name.rpartition(".")[2] in ("A_log", "dt_bias", "router_bias")
        assert x.dtype == (torch.float32 if kept else dtype)
        assert torch.equal(x, ours(family).state_dict()[name].to(x.dtype))
    assert model(tokens(1, 5)).logits.dtype == dtype


def test_dtype_none_is_that_of_most_bytes(family, folders, tmp_path):
    def halve(tensors: Tensors) -> None:
        for name, x in tensors.items():
            if x.dim() > 1 and "A_log" not in name:
                tensors[name] = x.bfloat16()

    model = HybridLM.from_pretrained(rewrite(folders(family), tmp_path, halve), progress=False)
    assert model.dtype == torch.bfloat16
    assert model.norm.weight.dtype == torch.bfloat16


@pytest.mark.cover
def test_ambiguous_experts_are_decided_by_the_other_tensor(tmp_path):
    """If 2 I = H, gate_up could be either way round, but down could not; if I = H, down is the ambiguous one."""
    for size in (24, 48):
        other = build("qwen3_5_moe", moe_intermediate_size=size)
        other.save_pretrained(tmp_path / "a")
        model = HybridLM.from_pretrained(tmp_path / "a", progress=False)
        for transpose in (False, True):
            target = tmp_path / f"{size}{transpose}"
            change = fused_experts(transpose)
            rewrite(tmp_path / "a", target, lambda tensors, change=change: change(tensors, "qwen3_5_moe"))
            assert_same_bits(HybridLM.from_pretrained(target, progress=False), model)


def test_experts_of_which_one_is_transposed_are_refused(folders, tmp_path):
    def half(tensors: Tensors) -> None:
        fused_experts(False)(tensors, "qwen3_5_moe")
        name = "model.layers.0.mlp.experts.down_proj"
        tensors[name] = tensors[name].transpose(1, 2).contiguous()

    with pytest.raises(CheckpointError, match=r"must both be .*\(6, 40, 48\), \(6, 48, 20\) or both transposed"):
        HybridLM.from_pretrained(rewrite(folders("qwen3_5_moe"), tmp_path, half), progress=False)


REFUSED = [
    ("qwen3_next", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'default', got 'yarn'"),
    ("qwen3_next", {"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "got 'linear'"),
    ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act = 'silu', got 'gelu'"),
    ("qwen3_next", {"linear_num_key_heads": None}, "must have linear_num_key_heads"),
    ("qwen3_next", {"vocab_size": "many"}, "number in vocab_size, got 'many'"),
    ("qwen3_next", {"linear_num_key_heads": 4}, "value_heads must be a multiple of heads = 4"),
    ("qwen3_next", {"quantization_config": {"quant_method": "hqq"}}, "quant_method of fp8, .*, awq, got 'hqq'"),
    ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate = True, got False"),
    ("qwen3_5", {"layer_types": ["linear_attention"] * 4 + ["sliding_attention"]}, "got 'sliding_attention'"),
    ("qwen3_5", {"layer_types": ["linear_attention"] * 3}, "must have 5 layer_types"),
    ("kimi_linear", {"q_lora_rank": 16}, "q_lora_rank = None, got 16"),
    ("kimi_linear", {"layer_types": None, "linear_attn_config": {"full_attn_layers": [0], "head_dim": 10}}, "1 .. 5"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, "got 'softmax'"),
    ("kimi_linear", {"num_key_value_heads": 6}, "num_key_value_heads = num_attention_heads = 3, got 6"),
    ("mamba2", {"hidden_act": "gelu"}, "hidden_act = 'silu', got 'gelu'"),
    ("mamba2", {"expand": 3}, r"expand x hidden_size = num_heads x head_dim = 96, got 3 x 48"),
    ("mamba2", {"n_groups": 4}, "heads must be a multiple of groups = 4, got 6"),
    ("mamba2", {"time_step_limit": [0.5]}, "two numbers in time_step_limit"),
    ("mamba2", {"time_step_limit": [0.5, {"__float__": "NaN"}]}, "two numbers in time_step_limit"),
    ("mamba2", {"time_step_limit": [0.5, 0.1]}, "step_most must be at least step_least = 0.5, got 0.1"),
    ("granitemoehybrid", {"layer_types": ["mamba"] * 4 + ["sliding"]}, "layer_types of mamba, .*, got 'sliding'"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "'rope', 'nope' or null, got 'alibi'"),
    ("granitemoehybrid", {"logits_scaling": 0}, "logits_scaling above 0, got 0"),
    ("granitemoehybrid", {"residual_multiplier": 0}, "residual_scale must be finite and above 0, got 0"),
    ("granitemoehybrid", {"mamba_d_head": 15}, "mamba_n_heads x mamba_d_head = 96, got 6 x 15"),
    ("bailing_hybrid", {"q_lora_rank": 16}, "q_lora_rank = None, got 16"),
    ("bailing_hybrid", {"kda_lower_bound": 5.0}, "gate_lower_bound must be .*below 0, got 5.0"),
    ("bailing_hybrid", {"num_key_value_heads": 1}, "num_key_value_heads = num_attention_heads = 3, got 1"),
    ("bailing_hybrid", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'default', got 'yarn'"),
    ("bailing_hybrid", {"partial_rotary_factor": 0.5}, "rotate all qk_rope_head_dim = 6 channels, got 3"),
    ("bamba", {"attn_layer_indices": [5]}, r"attn_layer_indices in 0 \.\. 4, got \[5\]"),
    ("bamba", {"mlp_bias": True}, "mlp_bias = False, got True"),
    ("nemotron_h", {"layers_block_type": ["mlp", "mamba"]}, r"a mixer before every feed-forward, got '-'.*enable\(\)"),
    ("nemotron_h", {"layers_block_type": ["mamba", "moe", "mlp"]}, r"got 'ME-', whose layer 2 follows none"),
    ("nemotron_h", {"layers_block_type": ["mamba", "rwkv"]}, "got 'rwkv'"),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M-X"}, r"signs M, \*, -, E, got 'M-X'"),
    ("nemotron_h", {"layers_block_type": None}, "must have layers_block_type, or hybrid_override_pattern"),
    ("nemotron_h", {"moe_latent_size": 8}, r"moe_latent_size = None, got 8; .*enable\(\)"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'relu2', got 'silu'"),
    ("qwen3_next", {"model_type": "llama"}, r"one of qwen3_next, .*lineate, got 'llama'"),
    ("qwen3_next", {"model_type": None}, "model_type must be one of"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_configs_that_are_not_understood_are_refused(folders, tmp_path, name, changes, message):
    rewrite(folders(name), tmp_path, config=changes)
    with pytest.raises(CheckpointError, match=message) as error:
        HybridLM.from_pretrained(tmp_path, progress=False)
    assert "config.json" in str(error.value)


@pytest.mark.parametrize("model_type", [*LACKING, "glm5_next_text"])
def test_families_whose_other_layers_are_lacking_point_to_enable(model_type, tmp_path):
    save(tmp_path, {"x": torch.zeros(1)}, {"model_type": model_type})
    what = LACKING[model_type.removesuffix("_text")]
    for read in (describe, HybridLM.from_pretrained, read_model):
        with pytest.raises(CheckpointError, match=rf"'{model_type}' has {what}, which .*transformers\.enable\(\)"):
            read(tmp_path)


def test_null_is_not_taken_for_true():
    null = Values("qwen3_next", {"norm_topk_prob": None, "tie_word_embeddings": None})
    with pytest.raises(CheckpointError, match="must have true or false in norm_topk_prob, got None"):
        null.flag("norm_topk_prob", default=True)
    assert null.flag("tie_word_embeddings", default=False) is False
    assert null.flag("not there", default=True) is True


def test_a_part_of_a_config_and_other_names_of_keys():
    values = {"depth": 2, "kinds": ["a"], "stop": 3, "width": None, "memory": {"heads": 0, "inner": {"size": "4"}}}
    v = Values("some", values)
    assert v.layers("depth") == 2 and v.eos("stop") == (3,)
    for read, message in (
        (lambda: v.part("memory").number("heads"), r"family some, in memory, is not possible: heads must be a whole"),
        (
            lambda: v.part("memory").number("size"),
            "family some, in memory, must have size, got none; its keys are heads",
        ),
        (lambda: v.part("memory").part("inner").number("size"), "some, in memory.inner, must have a number in size"),
        (lambda: v.part("kinds"), r"family some must have an object in kinds"),
        (lambda: v.words("kinds", layers="depth"), r"must have 2 kinds \(depth\), got 1"),
        (lambda: v.number("width"), "must have width, got null"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read()


def test_a_family_that_does_not_name_itself_is_named_by_its_model_type(folders, monkeypatch):
    row = families.FAMILIES["olmo_hybrid"]
    unnamed = replace(row, config_from=lambda values: replace(row.config_from(values), family="lineate"))
    monkeypatch.setitem(families.FAMILIES, "olmo_hybrid", unnamed)
    assert read_config(Checkpoint.open(folders("olmo_hybrid"))).family == "olmo_hybrid"


@pytest.mark.parametrize(
    ("name", "other"),
    [(a, b) for a in FAMILIES for b in [*FAMILIES, "lineate"] if a.removesuffix("_moe") != b.removesuffix("_moe")],
)
def test_config_of_another_family(folders, ours, tmp_path, name, other):
    rewrite(folders(name), tmp_path)
    if other == "lineate":
        config = {"model_type": "lineate", **ours(name).config.to_dict()}
    else:
        config = Checkpoint.open(folders(other)).config
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="the tensors are those of") as error:
        HybridLM.from_pretrained(tmp_path, progress=False)
    assert config["model_type"] in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_names_that_are_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in (tmp_path / "nothing", str(tmp_path / "nothing"), "no-such-name"):
        with pytest.raises(CheckpointError, match="expected a folder"):
            HybridLM.from_pretrained(name)


def test_hub_name_that_cannot_be_fetched(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def fail(name, allow_patterns):
        assert allow_patterns == ["*.json", "*.jinja", "tiktoken.model", "*.safetensors"]
        raise OSError("no connection\nand more")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"lineate/none is not a folder, and could not be fetched.*no connection"):
        HybridLM.from_pretrained("lineate/none")


def test_hub_name_that_is_fetched(folders, ours, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: str(folders("qwen3_5")))
    assert_same_bits(HybridLM.from_pretrained("lineate/some"), ours("qwen3_5"))


def test_describe(family, folders, ours):
    found, model = describe(folders(family)), ours(family)
    assert found.problem is None
    assert found.parameters == sum(x.numel() for x in model.parameters())
    assert found.bytes_on_disk == sum(x.nbytes for x in model.state_dict().values())
    assert (found.active_parameters < found.parameters) == (family in WITH_EXPERTS)
    for t in (1, 30):
        assert found.state_bytes(t) == model(tokens(1, t)).state.nbytes
    lines = dict(rows(found))
    assert lines["layers"] == f"5: {model.config.letters}"
    assert lines["family"] == json.loads((folders(family) / "config.json").read_text())["model_type"]


def test_describe_names_multipliers_and_feed_forwards(folders):
    granite, nemotron = (dict(rows(describe(folders(name)))) for name in ("granitemoehybrid", "nemotron_h"))
    assert granite["multipliers"] == "embeddings 3, residuals 0.7, logits 3.333"
    assert granite["mamba"].startswith("6 heads of 16, states of 10 in 3 groups")
    assert nemotron["feed-forward"] == "36, squared ReLU, in 2 of 5 layers" and "multipliers" not in nemotron
    assert nemotron["experts"].startswith("3 of 6 of size 20, squared ReLU, sigmoid scores, shared expert of 28")


def test_describe_says_what_would_not_load(folders, tmp_path, capsys):
    rewrite(folders("olmo_hybrid"), tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    assert "model.norm.weight" in describe(tmp_path).problem
    print_description(tmp_path)
    assert "would not load" in capsys.readouterr().out


def test_eos_tokens_of_both_files(folders, tmp_path):
    rewrite(folders("kimi_linear"), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert HybridLM.from_pretrained(tmp_path, progress=False).config.eos_token_ids == (2, 7)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")
def test_no_file_stays_open(folders):
    before = len(os.listdir("/proc/self/fd"))
    HybridLM.from_pretrained(folders("qwen3_5"), progress=False)
    assert len(os.listdir("/proc/self/fd")) == before

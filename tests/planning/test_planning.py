"""lineate.planning: bytes equal those allocated, operations equal torch's count, bounds are below measured times."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lineate.models import (
    AttentionConfig,
    FeedConfig,
    HybridConfig,
    HybridLM,
    LatentConfig,
    LinearConfig,
    MambaConfig,
    MemoryConfig,
    preset,
)
from lineate.models.inspect import describe
from lineate.planning import (
    DTYPES,
    Model,
    crossover,
    differences,
    from_numbers,
    largest_batch,
    longest_context,
    plan_memory,
    read_model,
    teaching,
    teaching_of,
    variants,
)
from lineate.planning.formulas import taught_variants
from lineate.planning.models import PLAIN_FAMILIES, mixed_ratio
from tests.support.families import FAMILIES
from tests.support.odd_models import EXPERTS, odd


def family_config(name: str, folder: Path) -> HybridConfig:
    """Return the configuration of a tiny published model, read through its config.json."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": name, **FAMILIES[name].values}))
    return read_model(folder).config


CONFIGS = {
    **{letter: odd(letter + "A") for letter in "LRDGKSTPNCEM"},
    "every letter": odd("LRDGKSTPNCEAM"),
    "no convolution": odd("GKT", linear=LinearConfig(3, 3, 8, 5, conv_size=0), memory=MemoryConfig(2, 6, conv_size=0)),
    "mamba": odd("SA", mamba=MambaConfig(4, 9, 6, conv_size=3, conv_bias=False, bias=True)),
    "gate a head": odd("M", latent=LatentConfig(5, rank=13, nope_dim=6, rope_dim=4, value_dim=7, gate="head")),
    "gate a channel": odd("M", latent=LatentConfig(5, rank=13, nope_dim=6, rope_dim=4, value_dim=7, gate="channel")),
    "mixers alone": odd("SAG", mixer_only=(0, 2), feed=FeedConfig(21, "relu2"), residual_scale=0.5),
    "experts without a gate": odd("GS", experts=replace(EXPERTS, kind="relu2"), feed=None, mixer_only=(1,)),
    "wide convolution": odd("DA", linear=LinearConfig(1, 5, 4, 3, conv_size=7)),
    "titans mlp": odd("NA", memory=MemoryConfig(3, 10, chunk=4, titans="mlp")),
    "window of its own": odd("CA", memory=MemoryConfig(3, 10, chunk=4, window=9)),
    "no window": odd("CA", memory=MemoryConfig(3, 10, chunk=4, window=0)),
    "tied": odd("GGGA", tie_embeddings=True),
    "experts": odd("GAKM", experts=EXPERTS, dense_layers=(1,)),
    "no gate, full norm": odd("A", attention=AttentionConfig(3, 3, 8, gated=False, qk_norm="full"), norm_after="A"),
}


def storages(tensors: list[Tensor]) -> int:
    """Return the bytes of the memory behind the tensors, counting each piece once."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def state_tensors(model: HybridLM, batch: int, tokens: int) -> dict[str, list[Tensor]]:
    """Return the tensors of the state that a forward leaves, by kind."""
    with torch.no_grad():
        state = model(torch.randint(model.config.vocab_size, (batch, tokens))).state
    found: dict[str, list[Tensor]] = {"memory": [], "conv": [], "cache": []}
    for layer, letter in zip(state.layers, model.config.letters, strict=True):
        for name in layer.names:
            found["cache" if letter in "AM" else "conv" if name == "conv" else "memory"].append(layer[name])
    return found


SIZES = {"bf16": ((1, 1), (3, 7), (1, 130)), "fp32": ((3, 1), (1, 7), (3, 130)), "fp16": ((3, 9),)}
ALLOCATED = [(name, dtype) for name in (*CONFIGS, *FAMILIES) for dtype in ("bf16", "fp32")]
ALLOCATED += [("every letter", "fp16"), ("tiny", "fp32")]


@pytest.mark.slow(but="values")
@pytest.mark.parametrize(("name", "dtype"), ALLOCATED)
def test_bytes_are_those_allocated(name: str, dtype: str, tmp_path: Path) -> None:
    if name in FAMILIES:
        config = family_config(name, tmp_path)
    else:
        config = preset(name) if name == "tiny" else CONFIGS[name]
    plan = plan_memory(Model(name, config, DTYPES[dtype], "config"))
    torch.manual_seed(0)
    HybridLM(config).save_pretrained(tmp_path)
    model = HybridLM.from_pretrained(tmp_path, dtype=DTYPES[dtype], progress=False)
    weights = [*model.parameters(), *model.buffers()]
    assert plan.weights == sum(x.nbytes for x in weights) == storages([x.data for x in weights])
    assert plan.parameters == sum(x.numel() for x in model.parameters())
    for batch, tokens in SIZES[dtype]:
        found = state_tensors(model, batch, tokens)
        expected = {"memory": batch * plan.memory, "conv": batch * plan.conv, "cache": plan.cache(batch, tokens)}
        for kind, tensors in found.items():
            assert sum(x.nbytes for x in tensors) == expected[kind], kind
            if batch * tokens > 1:  # the cache of one token may be a view, which the next one replaces
                assert storages(tensors) == expected[kind], kind  # they keep no more memory alive
        assert plan.state(batch, tokens) == sum(expected.values())
        assert plan.total(batch, tokens) == plan.weights + sum(expected.values())


def test_servers_figures() -> None:
    """Plans agree with a server's log of Qwen3.5-27B and others (4 sequences; a cache of 2^18 tokens in 16 bit)."""
    plan = plan_memory(read_model("qwen3-5-27b"), conv_dtype="float32")
    assert 4 * plan.memory == 576 * 2**20
    assert 4 * plan.conv == 45 * 2**19  # 22.5 MiB
    assert plan.cache(1, 2**18) == 16384 * 2**20
    assert plan.state(4, 2**16) == 576 * 2**20 + 45 * 2**19 + 16384 * 2**20
    latent = plan_memory(read_model("kimi-linear-48b"))
    assert latent.cache(1, 1, "latent") == latent.cache_per_token == (512 + 64) * 2 * 7
    assert latent.cache(1, 1, "keys and values") == 0


@pytest.mark.cover
def test_dtypes_of_the_state_are_apart() -> None:
    model = read_model("qwen3-next-80b", dtype="fp8")
    plan, half = plan_memory(model, "bf16", "fp16", "int8"), plan_memory(read_model("qwen3-next-80b"))
    assert (plan.memory, plan.conv, 2 * plan.cache_per_token) == (half.memory // 2, half.conv, half.cache_per_token)
    kept = 36 * 2 * 32 * 4  # A_log and dt_bias of 32 heads in 36 layers stay float32
    assert 2 * (plan.weights - kept) == half.weights - kept
    assert plan_memory(model).memory == half.memory


def test_teaching_numbers() -> None:
    """Numbers for --emb-dim 2048 --n-heads 16 --n-layers 48 --dtype bf16 by hand: 393216 and 524288 bytes a layer."""
    expected = {
        128: (50_331_648, 25_165_824, 31_457_280),
        4096: (1_610_612_736, 25_165_824, 421_527_552),
        32768: (12_884_901_888, 25_165_824, 3_240_099_840),
        131072: (51_539_607_552, 25_165_824, 12_903_776_256),
    }
    for tokens, numbers in expected.items():
        assert tuple(teaching(2048, 16, 48, tokens).values()) == numbers
        assert teaching_of(from_numbers(2048, 16, 48, "bf16"), tokens) == teaching(2048, 16, 48, tokens)
    assert tuple(teaching(2048, 16, 48, 100, batch=3, dtype="fp32").values()) == (235_929_600, 150_994_944, 172_228_608)
    assert teaching(10, 2, 3, 1, dtype="fp8")["3:1"] == (60 + 3 * 150) / 4  # layers need not be whole


@pytest.mark.cover
def test_what_differs_from_teaching_is_said() -> None:
    said = " ".join(differences(from_numbers(2048, 16, 48)))
    for part in ("float32", "convolution", "36,864", "1,085,440 bytes", "524,288", "0.0521 GB", "0.02517 GB"):
        assert part in said
    assert "share" not in said and "whole" not in said
    said = " ".join(differences(read_model("qwen3-next-80b")))
    for part in ("2 heads, not 16", "8 times smaller", "256 channels", "32 value heads", "0.25 times"):
        assert part in said
    said = " ".join(differences(read_model("kimi-linear-48b")))
    assert "512 + 64" in said and "of 27, 6 attend" in said
    assert "float32 whatever" not in " ".join(differences(from_numbers(64, 4, 4, dtype="fp32")))
    assert "TTT-Linear" in " ".join(differences(from_numbers(64, 4, 4, pattern="TA")))
    mamba = read_model(odd("S", attention=None, linear=None, latent=None, memory=None))
    assert "6 value heads of 7 x 5 (210 elements), not 6 of 5 x 5 (150)" in " ".join(differences(mamba))
    said = " ".join(differences(from_numbers(2048, 16, 48), 65536, "bf16", "float32", "fp8"))
    assert "recurrent state" in said and "float32 whatever" not in said and "planned in float8" in said
    for part in (
        "73,728 bytes a layer",
        "14.1% of the recurrent state",
        "598,016 bytes",
        "12.88 GB exactly",
        "0.5 times",
    ):
        assert part in said
    assert "4 bytes an element, not 2" not in said
    said = " ".join(differences(from_numbers(2048, 16, 48), state_dtype="fp8"))
    assert "planned in float8_e4m3fn: 1 bytes an element, not 2 (bfloat16)" in said


# ---- where a model comes from


def test_a_checkpoint_is_read_by_its_headers(tmp_path: Path) -> None:
    config = odd("GA")
    HybridLM(config).to(torch.float16).save_pretrained(tmp_path / "mine")
    model = read_model(tmp_path / "mine")
    assert (model.name, model.config, model.dtype, model.origin) == ("mine", config, torch.float16, "folder")
    assert plan_memory(model).weights == sum(
        x.nbytes for x in HybridLM.from_pretrained(tmp_path / "mine", progress=False).parameters()
    )
    described, plan = describe(tmp_path / "mine"), plan_memory(model)  # lineate inspect prints the same
    assert (described.memory_bytes, described.conv_bytes) == (plan.memory, plan.conv)
    assert (described.cache_bytes_per_token, described.parameters) == (plan.cache_per_token, plan.parameters)
    (tmp_path / "mine" / "model.safetensors").unlink()
    alone = read_model(str(tmp_path / "mine"))
    assert (alone.config, alone.dtype, alone.origin) == (config, torch.float16, "config.json")
    assert read_model(tmp_path / "mine" / "config.json", dtype="fp8").dtype == torch.float8_e4m3fn


LLAMA = dict(
    model_type="llama", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32,
    intermediate_size=14336, vocab_size=128256, torch_dtype="bfloat16", hidden_act="silu",
)  # fmt: skip


def test_a_plain_softmax_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    plan = plan_memory(read_model(tmp_path))
    assert plan.parameters == 8_030_261_248  # Llama 3 8B
    assert (plan.weights, plan.cache_per_token, plan.memory) == (16_060_522_496, 131_072, 0)
    assert longest_context(plan, 80 * 10**9) == (80 * 10**9 - 16_060_522_496) // 131_072


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'silu', got 'gelu'"),
        ({"kv_lora_rank": 512}, "must not have kv_lora_rank, got 512"),
        ({"layer_types": ["sliding_attention"] * 32}, "got 'sliding_attention'"),
        ({"sliding_window": 4096}, "must have no sliding_window, got 4096"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number of at least 1, got 0"),
        ({"vocab_size": None}, "must have vocab_size"),
        ({"num_attention_heads": 32.5}, "must have a number in num_attention_heads, got 32.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "must not be quantised, got awq; give a dtype"),
        ({"mlp_bias": True}, "must not have mlp_bias, got True"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "must have decoder_sparse_step = 1, got 2"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"must not have mlp_only_layers, got \[0\]"),
        # they would look like softmax attention in every layer, without their experts or with no state
        ({"model_type": "jamba"}, r"model_type must be one of bailing_hybrid, .* qwen3_next, .* got 'jamba'"),
        ({"model_type": "glm4_moe"}, "got 'glm4_moe'"),
        ({"model_type": "falcon_h1"}, "'falcon_h1' has blocks in which Mamba-2 and attention read"),
        ({"num_key_value_heads": 5}, "heads must be a multiple of kv_heads = 5"),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    with pytest.raises(ValueError, match=message):
        read_model(tmp_path)


def test_a_quantised_model_is_planned_in_a_given_dtype(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": "fp8"}}))
    assert plan_memory(read_model(tmp_path, dtype="fp8")).weights == 8_030_261_248
    values = {"model_type": "qwen3_next", **FAMILIES["qwen3_next"].values}
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "fp8"}}))
    assert read_model(tmp_path, dtype="fp8").config.family == "qwen3_next"


# qwen2 and qwen2_moe are left out, because they have biases.
@pytest.mark.parametrize("kind", sorted(PLAIN_FAMILIES.keys() - {"qwen2", "qwen2_moe"}))
def test_weights_of_plain_softmax_models_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48, vocab_size=40)
    small |= dict(num_key_value_heads=2, sliding_window=None, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    experts = ("mixtral", "qwen3_moe", "granitemoe", "flex_olmo", "minimax_m2", "olmoe")
    small |= dict(num_experts=6, num_local_experts=6, num_experts_per_tok=2) if kind in experts else {}
    config = transformers.CONFIG_MAPPING[kind](**small)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    assert plan_memory(read_model(tmp_path)).parameters == sum(x.numel() for x in made.parameters())


def test_bad_sources(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be a preset .tiny.*qwen3-next-80b.*got 'no/where/model', which is no"):
        read_model("no/where/model")
    with pytest.raises(ValueError, match=r"expected a file config.json, got none"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_model(tmp_path)
    with pytest.raises(ValueError, match=r"dtype must be one of fp32, .* got 'fp64'"):
        read_model("tiny", dtype="fp64")
    with pytest.raises(ValueError, match="pattern must be made of the letters"):
        read_model("qwen3-next-80b", pattern="GX")
    with pytest.raises(ValueError, match="emb_dim must be a multiple of n_heads = 3, got 64"):
        from_numbers(64, 3, 2)
    with pytest.raises(ValueError, match="kv_heads must divide n_heads = 4, got 3"):
        from_numbers(64, 4, 2, kv_heads=3)
    with pytest.raises(ValueError, match="n_layers must be a whole number of at least 1, got 0"):
        from_numbers(64, 4, 0)
    with pytest.raises(ValueError, match="pattern must be made of the letters"):
        from_numbers(64, 4, 2, pattern="GX")


def test_variants_are_of_the_same_sizes() -> None:
    for name, letters in {"qwen3-next-80b": "GA", "kimi-linear-48b": "KM", "tiny": "GA"}.items():
        model = read_model(name)
        made = variants(model)
        linear, full = letters
        n = model.config.n_layers
        assert [made[x].config.letters for x in ("softmax only", "linear only")] == [full * n, linear * n]
        assert made["3:1 hybrid"].config.letters == ((3 * linear + full) * n)[:n]
        assert all(x.dtype == model.dtype and x.config.experts == model.config.experts for x in made.values())
    own = odd("A", attention=AttentionConfig(5, 1, 9), linear=None, n_layers=3)
    assert variants(Model("x", own, torch.bfloat16, "config"))["linear only"].config.linear == LinearConfig(5, 5, 9, 9)
    own = odd("K", attention=None, latent=None)
    derived = variants(Model("x", own, torch.bfloat16, "config"))["softmax only"].config.attention
    assert derived == AttentionConfig(6, 6, 11)


@pytest.mark.cover
def test_other_mixers_at_the_sizes_of_a_model(tmp_path: Path) -> None:
    """Every letter fits every model: parts that the model has keep their sizes, the others get its heads."""
    for name in ("qwen3-next-80b", "kimi-linear-48b", "olmo-hybrid-7b"):
        published = read_model(name)
        for pattern in ("GGGGGGGA", "KKKM", "TPNCE", "L"):
            model = read_model(name, pattern=pattern)
            n = published.config.n_layers
            assert model.config.letters == (pattern * n)[:n] and model.name == f"{name}, {pattern}"
            assert model.dtype == published.dtype
            for part in ("linear", "attention", "latent", "feed", "experts"):
                if (kept := getattr(published.config, part)) is not None:
                    assert getattr(model.config, part) == kept
    seven = plan_memory(read_model("qwen3-next-80b", pattern="GGGGGGGA"))
    assert seven.cache_per_token == 6 * 2 * 2 * 256 * 2 and seven.memory == 42 * 32 * 128 * 128 * 4
    HybridLM(odd("GA")).save_pretrained(tmp_path / "mine")
    for source in (tmp_path / "mine", tmp_path / "mine" / "config.json"):
        assert read_model(source, pattern="AG").config == replace(read_model(source).config, pattern="AG")


@pytest.mark.parametrize(
    "pattern, n_layers, ratio",
    [
        ("GGGA", 48, (3, 1)), ("GGGGGGGA", 48, (7, 1)), ("GGGGGGGA", 8, (7, 1)), ("GGGGGGGA", 4, (7, 1)),
        ("GGAA", 48, (1, 1)), ("GGGAA", 48, (3, 2)), ("GGGAG", 5, (3, 1)), ("KKKM" * 6 + "KKM", 27, (3, 1)),
        ("G", 4, (3, 1)), ("A", 4, (3, 1)), ("AGGGGG", 12, (5, 1)),
    ],
)  # fmt: skip
def test_the_ratio_that_is_taught_is_that_of_the_pattern(pattern: str, n_layers: int, ratio: tuple[int, int]) -> None:
    model = from_numbers(2048, 16, n_layers, pattern=pattern)
    assert mixed_ratio(model.config) == ratio
    a, b = ratio
    full, delta, mixed = teaching_of(model, 4096).items()
    assert (full[0], delta[0], mixed[0]) == ("full attention", "DeltaNet", f"{a}:{b}")
    assert mixed[1] == (b * full[1] + a * delta[1]) / (a + b)
    names = list(taught_variants(model))
    assert names == ["softmax only", "linear only", f"{a}:{b} hybrid"]
    if ratio != (3, 1):
        assert taught_variants(model)[names[2]] is model
        assert f"tokens, {a}:{b} hybrid: " in " ".join(differences(model))
    whole = n_layers * b % (a + b) == 0
    assert whole == ("Layers are whole" not in " ".join(differences(model)))


# ---- what fits


@pytest.mark.parametrize("name", ["every letter", "M", "tied"])
def test_fit_is_exact(name: str) -> None:
    plan = plan_memory(Model(name, CONFIGS[name], torch.bfloat16, "config"))
    for batch in (1, 3):
        for memory_bytes in range(plan.total(batch, 0), plan.total(batch, 6), 37):
            fits = [n for n in range(8) if plan.total(batch, n) <= memory_bytes]
            assert longest_context(plan, memory_bytes, batch) == fits[-1]
    for tokens in (1, 5):
        for memory_bytes in range(plan.weights - 500, plan.total(4, tokens), 997):
            fits = [n for n in range(6) if n == 0 or plan.total(n, tokens) <= memory_bytes]
            assert largest_batch(plan, memory_bytes, tokens) == fits[-1]
    assert longest_context(plan, plan.weights) == 0


def test_what_does_not_grow_has_no_longest_context() -> None:
    plan = plan_memory(from_numbers(64, 4, 4, pattern="G"))
    assert longest_context(plan, plan.total(1, 0)) is None
    assert longest_context(plan, plan.total(1, 0) - 1) == 0


@pytest.mark.parametrize("name", ["tiny", "qwen3-next-80b", "kimi-linear-48b", "olmo-hybrid-7b"])
def test_crossover(name: str) -> None:
    model = read_model(name)
    layers = plan_memory(model).layers
    fixed = next(x.memory + x.conv for x in layers if not x.cache)
    cache = next(x.cache_per_token for x in layers if x.cache)
    assert crossover(model) == next(n for n in range(10**6) if fixed < n * cache)
    halved = crossover(
        model, cache_dtype="fp8" if model.dtype.itemsize == 2 else "bf16"
    )  # half the cache, twice the distance
    assert halved in (2 * crossover(model) - 1, 2 * crossover(model))
    assert read_model(name, dtype="float8_e4m3fn").dtype == read_model(name, dtype="fp8").dtype

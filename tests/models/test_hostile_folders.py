"""Folders from anyone: every size is bounded before anything is allocated, and every wrong value is named on one line.

One process, limited to little memory and processor time, reads all cases; the tests check its answers.
"""

import json
import os
import re
import struct
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from lineate.cli import build_app
from lineate.models import HybridConfig, preset
from lineate.models.config import (
    AttentionConfig,
    ExpertsConfig,
    FeedConfig,
    LatentConfig,
    LinearConfig,
    MambaConfig,
    MemoryConfig,
)
from lineate.planning.memory import plan_memory
from lineate.planning.models import from_numbers, read_model

pytest.importorskip("resource", reason="limits of a process are set with it")

READ = """
import json, os, resource, sys
from pathlib import Path
from lineate.models import HybridLM
from lineate.models.hybrid import empty_model
from lineate.models.inspect import describe
from lineate.models.presets import preset
from lineate.planning.memory import plan_memory
from lineate.planning.models import read_model

empty_model(preset("tiny"))  # what is imported on the way, before memory is bounded
taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (taken + 2**30, taken + 2**30))
doors = {
    "inspect": lambda folder: describe(folder).problem,
    "load": lambda folder: HybridLM.from_pretrained(folder, progress=False) and None,
    "plan": lambda folder: plan_memory(read_model(folder)) and None,
}
for folder in map(Path, sys.argv[1:]):
    used = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
    resource.setrlimit(resource.RLIMIT_CPU, (used + SECONDS, resource.RLIM_INFINITY))
    for door, read in doors.items():
        print(folder.name, door, end=" ", flush=True)
        try:
            found = {"refused": read(folder)}
        except Exception as error:
            found = {"refused": str(error), "kind": [x.__name__ for x in type(error).__mro__]}
        print(json.dumps(found), flush=True)
""".replace("SECONDS", "60")

FAMILY = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
}  # fmt: skip
KIMI = FAMILY | {
    "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_experts_per_token": 2,
    "linear_attn_config": {"num_heads": 2, "head_dim": 8, "full_attn_layers": [4], "kda_layers": [1, 2, 3]},
}  # fmt: skip
GRANITE = FAMILY | {
    "layer_types": ["mamba", "mamba", "attention", "mamba"], "shared_intermediate_size": 8, "mamba_n_heads": 4,
    "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 2, "num_local_experts": 4,
}  # fmt: skip
MAMBA = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 4, "num_heads": 4, "head_dim": 8, "state_size": 4,
    "n_groups": 2,
}  # fmt: skip
NEMOTRON = FAMILY | {
    "hybrid_override_pattern": "M-M*EM", "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 4, "n_groups": 2,
    "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 8,
}  # fmt: skip
RWKV = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 4, "head_dim": 8, "intermediate_size": 16,
    "decay_low_rank_dim": 4, "a_low_rank_dim": 4, "v_low_rank_dim": 4, "gate_low_rank_dim": 4,
}  # fmt: skip
BASES = {
    "lineate": {"model_type": "lineate", **preset("tiny", vocab_size=32).to_dict()},
    "qwen3_next": {"model_type": "qwen3_next", **FAMILY},
    "qwen3_5": {"model_type": "qwen3_5", **FAMILY},
    "kimi_linear": {"model_type": "kimi_linear", **KIMI},
    "olmo_hybrid": {"model_type": "olmo_hybrid", **FAMILY},
    "mamba2": {"model_type": "mamba2", **MAMBA},
    "granitemoehybrid": {"model_type": "granitemoehybrid", **GRANITE},
    "bamba": {"model_type": "bamba", **GRANITE},
    "nemotron_h": {"model_type": "nemotron_h", **NEMOTRON},
    "bailing_hybrid": {"model_type": "bailing_hybrid", **KIMI},
    "rwkv7": {"model_type": "rwkv7", **RWKV},
    "llama": {"model_type": "llama", **FAMILY},
}


def safetensors(header, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape, first: int = 0, last: int = 4, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


WEIGHTS = safetensors({"x": tensor([1])}, bytes(4))
DIGITS = "9" * 4000
INDEX = "model.safetensors.index.json"


def config(base: str, **changes) -> dict[str, bytes]:
    return {"config.json": json.dumps(BASES[base] | changes).encode(), "model.safetensors": WEIGHTS}


def part(base: str, name: str, **changes) -> dict[str, bytes]:
    return config(base, **{name: BASES[base][name] | changes})


def raw(text: str | bytes) -> dict[str, bytes]:
    return {"config.json": text if isinstance(text, bytes) else text.encode(), "model.safetensors": WEIGHTS}


def weights(data: bytes) -> dict[str, bytes]:
    return {"config.json": json.dumps(BASES["lineate"]).encode(), "model.safetensors": data}


def index(text: str | bytes) -> dict[str, bytes]:
    data = text if isinstance(text, bytes) else text.encode()
    return {"config.json": json.dumps(BASES["lineate"]).encode(), INDEX: data}


UNFIT, TOO_FEW = "tensors do not fit the config", ": the config's experts one by one need at least 65536 tensors, got 1"
EXPERTS = {"count": 4, "active": 2, "size": 8}
CASES = {
    # sizes
    "layers": (config("lineate", n_layers=10**9), "n_layers must be at most 4,096, got 1,000,000,000"),
    "more layers": (config("lineate", n_layers=10**15), "n_layers must be at most 4,096, got 1,000,000,000,000,000"),
    "layers beyond the tensors": (
        config("lineate", n_layers=4000),
        "layers must be at most 256, as the files have 1 ten",
    ),
    "vocabulary": (config("lineate", vocab_size=2**62), "vocab_size must be at most 16,777,216, got 4,611,"),
    "width": (config("lineate", hidden_size=2**62), "hidden_size must be at most 16,777,216"),
    "long pattern": (config("lineate", pattern="GA" * 10**6, n_layers=10**9), "n_layers must be at most 4,096"),
    "heads": (part("lineate", "linear", heads=2**40, value_heads=2**40), "LinearConfig.heads must be at most 16,777"),
    "heads and channels": (
        part("lineate", "linear", heads=2**20, value_heads=2**20, key_dim=2**20),
        "LinearConfig: heads x key_dim must be at most 16,777,216",
    ),
    "heads of all layers": (
        part("lineate", "linear", heads=2**18, value_heads=2**18, key_dim=1, value_dim=1),
        "n_layers x linear.heads must",
    ),
    "latent channels": (
        part("lineate", "latent", heads=2**17, value_dim=2**20),
        "LatentConfig: heads x value_dim must",
    ),
    "experts": (config("lineate", experts=EXPERTS | {"count": 10**9}), "ExpertsConfig.count must be at most 65,536"),
    "experts of all layers": (
        config("lineate", n_layers=8, experts=EXPERTS | {"count": 2**16}),
        "n_layers x experts.count must be at most 262,",
    ),
    "chunk": (part("lineate", "memory", chunk=10**18), "MemoryConfig.chunk must be at most 16,777,216"),
    "dense layers": (config("lineate", dense_layers=[0] * 10**5), r"dense_layers must lie in 0 \.\. 3, got"),
    "dense layer": (config("lineate", dense_layers=[10**30]), "number of dense_layers must be at most 9,223,"),
    # types
    "tied, in words": (config("lineate", tie_embeddings="false"), "tie_embeddings must be true or false, got 'false'"),
    "tied, a number": (config("lineate", tie_embeddings=0), "tie_embeddings must be true or false, got 0"),
    "gate, in words": (
        part("lineate", "attention", gated="yes"),
        "AttentionConfig.gated must be true or false, got 'y",
    ),
    "layers, in words": (config("lineate", n_layers="4"), "n_layers must be an int, got str"),
    "layers, a list": (config("lineate", n_layers=[4]), "n_layers must be an int, got list"),
    "layers, true": (config("lineate", n_layers=True), "n_layers must be an int, got bool"),
    "pattern, a list": (config("lineate", pattern=["G"]), "pattern must be text, got"),
    "activation, a list": (
        part("lineate", "linear", gate_activation=[]),
        r"gate_activation must be one of .*, got \[\]",
    ),
    "part, a number": (config("lineate", linear=5), "linear must be a LinearConfig, got 5"),
    "part, a list": (config("lineate", feed=[384]), r"feed must be a FeedConfig, got \[384\]"),
    "epsilon, in words": (config("lineate", norm_eps="1e-6"), "norm_eps must be a number, got str"),
    "epsilon, NaN": (config("lineate", norm_eps=float("nan")), "norm_eps must be finite and above 0, got nan"),
    "epsilon, infinite": (config("lineate", norm_eps=float("inf")), "norm_eps must be finite and above 0, got inf"),
    "epsilon, long": (config("lineate", norm_eps=10**39), UNFIT),
    "end, a number": (config("lineate", eos_token_ids=5), "eos_token_ids must be a list of whole numbers, got 5"),
    "end, words": (config("lineate", eos_token_ids=["a"]), "number of eos_token_ids must be an int, got str"),
    "begin, words": (config("lineate", bos_token_id="<s>"), "bos_token_id must be an int, got str"),
    "position, words": (config("lineate", max_position="long"), "max_position must be an int, got str"),
    "family, a number": (config("lineate", family=5), "family must be text, got 5"),
    "many unknown keys": (
        config("lineate", **{f"key{i}": 1 for i in range(5000)}),
        "unknown keys 'key0', .*, ...; known",
    ),
    # families
    **{
        f"{base}: {name}": (config(base, **{key: value}), message)
        for base in (
            "qwen3_next",
            "qwen3_5",
            "kimi_linear",
            "olmo_hybrid",
            "granitemoehybrid",
            "bailing_hybrid",
            "llama",
        )
        for name, key, value, message in (
            ("layers", "num_hidden_layers", 10**9, "num_hidden_layers must be at most 4,096, got 1,000,000,000"),
            ("more layers", "num_hidden_layers", 10**15, "num_hidden_layers must be at most 4,096"),
            ("layers, infinite", "num_hidden_layers", float("inf"), "must have a number in num_hidden_layers, got inf"),
            ("layers, words", "num_hidden_layers", "4", "must have a number in num_hidden_layers, got '4'"),
            ("vocabulary", "vocab_size", 2**62, "vocab_size must be at most 16,777,216"),
            ("heads", "num_attention_heads", 0, "num_attention_heads must be a whole number of at least 1, got 0"),
            ("kinds", "layer_types", ["full_attention"] * 10**5, "must have 4 layer_types .*, got 100000"),
            ("kinds, nested", "layer_types", [["full_attention"]] * 4, "must have a list of words in layer_types"),
            ("kinds, a word", "layer_types", "full_attention", "must have a list of words in layer_types, got 'full_"),
            ("tied, in words", "tie_word_embeddings", "false", "true or false in tie_word_embeddings, got 'false'"),
            (
                "quantised",
                "quantization_config",
                "fp8",
                "an object in quantization_config|must not be quantised, got fp8",
            ),
        )
    },
    "layers of Mamba-2": (config("mamba2", num_hidden_layers=10**9), "num_hidden_layers must be at most 4,096"),
    "heads of Mamba-2": (config("mamba2", num_heads=0), "num_heads must be a whole number of at least 1, got 0"),
    "states of Mamba-2": (config("mamba2", state_size=2**24), "heads x state_dim must be at most 16,777,216"),
    "words of Mamba-2": (config("mamba2", head_dim="8"), "must have a number in head_dim, got '8'"),
    "steps, an object": (config("mamba2", time_step_limit={"a": 1}), "must have two numbers in time_step_limit"),
    "steps, many": (config("mamba2", time_step_limit=[0.1] * 10**5), "must have two numbers in time_step_limit"),
    "steps, digits": (config("mamba2", time_step_limit=[0, 10**30]), UNFIT),
    "Mamba-2 without tensors": (config("mamba2"), UNFIT),
    "layers of RWKV-7": (config("rwkv7", num_hidden_layers=10**9), "num_hidden_layers must be at most 4,096"),
    "heads of RWKV-7": (config("rwkv7", head_dim=0), "head_dim must be a whole number of at least 1, got 0"),
    "ranks of RWKV-7": (config("rwkv7", gate_low_rank_dim=2**40), "gate_low_rank_dim must be at most 16,777,216"),
    "words of RWKV-7": (config("rwkv7", v_low_rank_dim="8"), "must have a number in v_low_rank_dim, got '8'"),
    "values of RWKV-7": (config("rwkv7", value_dim=[16] * 10**5), "must have the same value_dim in all 4 layers"),
    "wide values of RWKV-7": (config("rwkv7", value_dim=[2**60] * 4), "value_dim must be at most 16,777,216"),
    "RWKV-7 without tensors": (config("rwkv7"), UNFIT),
    "Granite without tensors": (config("granitemoehybrid"), UNFIT),
    "layers of Bamba": (config("bamba", attn_layer_indices=[10**30]), "number of attn_layer_indices must be at most"),
    "layers of Bamba, a word": (config("bamba", attn_layer_indices="3"), "attn_layer_indices must be a list of whole"),
    "multiplier": (config("granitemoehybrid", embedding_multiplier="12"), "number in embedding_multiplier, got '12'"),
    "logits": (config("granitemoehybrid", logits_scaling=-1), "must have logits_scaling above 0, got -1"),
    "Nemotron-H without tensors": (config("nemotron_h"), UNFIT),
    "layers of Nemotron-H": (
        config("nemotron_h", hybrid_override_pattern="M-" * 10**5),
        "must have at most 4096 layers, got 200000",
    ),
    "pattern of Nemotron-H": (config("nemotron_h", hybrid_override_pattern=["M"]), "hybrid_override_pattern of the"),
    "kinds of Nemotron-H": (config("nemotron_h", layers_block_type=[["mamba"]]), "a list of words in layers_block_ty"),
    "kinds of Nemotron-H, a word": (config("nemotron_h", layers_block_type="M-"), "a list of words in layers_block_ty"),
    "experts of Nemotron-H": (config("nemotron_h", n_routed_experts=2**16), TOO_FEW),
    "experts of a family": (config("qwen3_next", num_experts=10**9), "num_experts must be at most 16,777,216"),
    "more experts": (config("qwen3_next", num_experts=2**24), "ExpertsConfig.count must be at most 65,536"),
    "experts of Bailing-Hybrid": (config("bailing_hybrid", num_experts=2**16), TOO_FEW),
    "bound of Bailing-Hybrid": (
        config("bailing_hybrid", kda_lower_bound="-5"),
        "a number in kda_lower_bound, got '-5'",
    ),
    "experts of Kimi": (
        config("kimi_linear", num_experts=2**16),
        TOO_FEW,
    ),
    "dense layers of Qwen": (
        config("qwen3_next", num_hidden_layers=4000, mlp_only_layers=[7] * 10**5),
        "layers must be at most 256",
    ),
    "dense layers, a word": (
        config("qwen3_next", mlp_only_layers="0"),
        "mlp_only_layers must be a list of whole numbers",
    ),
    "interval": (config("qwen3_5", full_attention_interval=0), "full_attention_interval must be a whole .* 1, got 0"),
    "flag of experts": (config("qwen3_next", norm_topk_prob=1), "must have true or false in norm_topk_prob, got 1"),
    "flag of OLMo": (config("olmo_hybrid", linear_allow_neg_eigval="no"), "in linear_allow_neg_eigval, got 'no'"),
    "gate of Qwen": (config("qwen3_5", attn_output_gate=1), "must have attn_output_gate = True, got 1"),
    "bias": (config("qwen3_next", attention_bias="no"), "must have true or false in attention_bias, got 'no'"),
    "rotation": (config("qwen3_next", rope_parameters="default"), "must have an object in rope_parameters, got 'def"),
    "rotation's base": (config("qwen3_next", rope_theta="1e4"), "must have a number in rope_theta, got '1e4'"),
    "rotation's share": (
        config("qwen3_next", partial_rotary_factor=[1]),
        r"number in partial_rotary_factor, got \[1\]",
    ),
    "end of a family": (config("qwen3_next", eos_token_id="2"), "number of eos_token_id must be an int, got str"),
    "layers of Kimi": (
        part("kimi_linear", "linear_attn_config", full_attn_layers=[1] * 10**5, kda_layers=None),
        r"every layer 1 \.\. 4",
    ),
    "Kimi's part": (config("kimi_linear", linear_attn_config=[1]), "must have an object in linear_attn_config, got"),
    "Kimi's words": (config("kimi_linear", mlp_layer_types={"a": 1}), "must have a list of words in mlp_layer_types"),
    "family, a list": (config("qwen3_next", model_type=["qwen3_next"]), r"model_type"),
    "end in the other file": (
        config("qwen3_next") | {"generation_config.json": b'{"eos_token_id": {"a": 1}}'},
        "eos_token_id of generation_c",
    ),
    "other file, not JSON": (
        config("qwen3_next") | {"generation_config.json": b"\xff\xfe"},
        "generation_config.json: exp",
    ),
    # JSON
    "deep": (raw("[" * 10**5 + "]" * 10**5), "config.json: expected JSON, got a file that is not JSON"),
    "deep object": (raw('{"a":' * 10**5 + "1" + "}" * 10**5), "config.json: expected JSON"),
    "digits": (raw('{"model_type": "lineate", "n_layers": 1' + "0" * 5000 + "}"), "a number has 5001 digits"),
    "fewer digits": (raw('{"model_type": "lineate", "n_layers": 1' + "0" * 100 + "}"), "a number has 101 digits"),
    "exponent": (raw(json.dumps(BASES["lineate"])[:-1] + ', "norm_eps": 1e999999}'), "'norm_eps' stands there twice"),
    "twice": (raw('{"model_type": "lineate", "model_type": "qwen3_5"}'), "'model_type' stands there twice"),
    "long": (
        raw(b'{"a": "' + b"x" * 2**24 + b'"}'),
        "config.json: expected at most 16,777,216 bytes of JSON, got more",
    ),
    "no text": (raw(b"\x80\x81\x82"), "config.json: expected JSON"),
    "empty": (raw(b""), "config.json: expected JSON"),
    "a list": (raw("[1, 2]"), "expected a JSON object, got list"),
    "a word": (raw('"lineate"'), "expected a JSON object, got str"),
    # weights
    "dimensions": (
        weights(
            safetensors(
                b'{"x": {"dtype": "F32", "shape": ['
                + ",".join([DIGITS] * 2000).encode()
                + b'], "data_offsets": [0, 4]}}',
                bytes(4),
            )
        ),
        "a number has 4000 digits",
    ),
    "many dimensions": (weights(safetensors({"x": tensor([1] * 10**5)}, bytes(4))), "at most 64 dimensions"),
    "shape that overflows": (
        weights(safetensors({"x": tensor([2**40, 2**40])}, bytes(4))),
        "and 2.60 elements, got shape",
    ),
    "nothing, widely": (weights(safetensors({"x": tensor([0, 2**62, 2**62], 0, 0)})), "and 2.60 elements, got shape"),
    "nothing": (weights(safetensors({"x": tensor([0, 2**40], 0, 0)})), UNFIT),
    "no tensor": (weights(safetensors({})), UNFIT),
    "shape of words": (
        weights(safetensors({"x": tensor(["4"])}, bytes(4))),
        "x must have a shape and two data_offsets",
    ),
    "shape of fractions": (
        weights(safetensors({"x": tensor([1.0])}, bytes(4))),
        "x must have a shape and two data_off",
    ),
    "shape of truths": (
        weights(safetensors({"x": tensor([True])}, bytes(4))),
        "x must have a shape and two data_offsets",
    ),
    "dtype, a list": (weights(safetensors({"x": tensor([1], dtype=["F32"])}, bytes(4))), "x must have a dtype of F64"),
    "header's length": (
        weights(safetensors({}, length=2**63)),
        "at most 100000000 bytes, got a length of 9223372036854",
    ),
    "header beyond the file": (weights(safetensors({}, length=90)), "expected a header of 90 bytes, got a file of 10"),
    "overlap": (
        weights(safetensors({"x": tensor([2], 0, 8), "y": tensor([2], 4, 12)}, bytes(12))),
        "it overlaps x; the file is",
    ),
    "beyond the file": (
        weights(safetensors({"x": tensor([2**30], 0, 2**32)}, bytes(4))),
        "needs 4294967296 bytes from",
    ),
    "offsets backwards": (weights(safetensors({"x": tensor([1], 8, 4)}, bytes(4))), "must take 4 bytes, got offsets"),
    "header, deep": (weights(safetensors(b'{"x":' * 10**5)), "expected a header in JSON"),
    "long text for an entry": (weights(safetensors({"x": "y" * 10**6})), "x must have dtype, shape and data_offsets"),
    "long name": (
        weights(safetensors({"x" * 10**6: tensor([1])}, bytes(4))),
        "at most 1000 characters, got one of 1000000",
    ),
    "name that is no text": (weights(safetensors({"x\ud800": tensor([1])}, bytes(4))), r"must be text .*'x\\ud800'"),
    # shards
    "shard's long name": (
        index(json.dumps({"weight_map": {"x": "y" * 10**4}})),
        "at most 200 characters, got one of 10000",
    ),
    "shard's name": (index('{"weight_map": {"x": "\\ud800"}}'), "index.json: names must be text"),
    "many shards": (
        index(json.dumps({"weight_map": {f"x{i}": f"{i}.safetensors" for i in range(5000)}})),
        r"\.safetensors, \.\.\.; f",
    ),
    "shards elsewhere": (index('{"weight_map": {"x": "../../x.safetensors"}}'), "names of files next to it, got"),
    "shards, numbers": (index('{"weight_map": {"x": 5}}'), "expected a weight_map of tensor names to files"),
    "shards, nothing": (index('{"weight_map": {}}'), UNFIT),
    "shards twice": (index('{"weight_map": {"x": "a", "x": "b"}}'), "'x' stands there twice"),
    "index, deep": (index("[" * 10**5), "expected JSON"),
}
DOORS = ("inspect", "load", "plan")


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[tuple[str, str], dict]:
    """Return the answer of every entry point to every case; if a case ends the process, the next ones get a new one."""
    root = tmp_path_factory.mktemp("hostile")
    folders = {f"{n:03d}": name for n, name in enumerate(CASES)}
    for folder, name in folders.items():
        (root / folder).mkdir()
        for file, data in CASES[name][0].items():
            (root / folder / file).write_bytes(data)
    found: dict[tuple[str, str], dict] = {}
    waiting = list(folders)
    while waiting:
        command = [sys.executable, "-c", READ, *(str(root / folder) for folder in waiting)]
        run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert run.stdout, run.stderr
        for line in run.stdout.splitlines():
            folder, door, answer = line.split(" ", 2)
            died = {"refused": f"the process was ended (code {run.returncode}): {run.stderr[-500:]}", "kind": []}
            found[folders[folder], door] = json.loads(answer) if answer else died
        waiting = waiting[waiting.index(folder) + 1 :]
    return found


@pytest.mark.cover
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_folder_is_refused_on_one_line(answers, name):
    message = CASES[name][1]
    for door in DOORS:
        said = answers.get((name, door), {"refused": "not asked: the process was ended by the door before"})
        if message in (UNFIT, TOO_FEW) and door == "plan":  # plan reads only the sizes
            assert "kind" not in said, said
        elif name.startswith("llama") and door != "plan" and name != "llama: quantised":
            assert "model_type must be one of" in said["refused"]
        else:
            assert re.search(message, said["refused"] or ""), (door, said)
            assert "ValueError" in said.get("kind", ["ValueError"]), said
            short = "\n" not in said["refused"] and len(said["refused"]) < 1000
            assert short or message == UNFIT, said  # that message lists the tensors


def test_sizes_in_python_are_bounded_too():
    for changes, message in (
        ({"n_layers": 10**12}, "n_layers must be at most 4,096, got 1,000,000,000,000"),
        ({"vocab_size": 10**200}, "vocab_size must be at most 16,777,216, got a number of about 199 digits"),
        ({"linear": LinearConfig(2**12, 2**12, 2**13, 64)}, "LinearConfig: heads x key_dim must be at most 16,777,216"),
        ({"experts": ExpertsConfig(2**16, 2, 2**24)}, "ExpertsConfig: count x size must be at most 2,147,483,648"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(preset("tiny"), **changes)
    with pytest.raises(ValueError, match="heads x key_dim must be at most 16,777,216"):
        from_numbers(2**24, 2**12, 4, head_dim=2**24)


@pytest.mark.cover
def test_the_largest_sizes_do_not_overflow():
    """The largest allowed sizes can be planned: no tensor has more elements than torch can count."""
    width, sizes = 2**24, (2**12, 2**12, 2**12, 2**12)
    config = HybridConfig(
        vocab_size=width, hidden_size=width, n_layers=64, pattern="LRDGKSTPNCEAM", linear=LinearConfig(*sizes),
        mamba=MambaConfig(2**12, 2**12, 2**12),
        memory=MemoryConfig(2**12, 2**12), attention=AttentionConfig(2**12, 2**12, 2**12),
        latent=LatentConfig(2**12, width, 2**12, 2**12, 2**12), feed=FeedConfig(width), dense_layers=(0,),
        experts=ExpertsConfig(2**12, 2, 2**19, shared_size=width),
    )  # fmt: skip
    assert plan_memory(read_model(config)).weights > 2**55


def test_the_command_says_it_on_one_line(tmp_path):
    (tmp_path / "config.json").write_bytes(config("lineate", n_layers=10**9)["config.json"])
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    for command in ("inspect", "plan"):
        run = CliRunner().invoke(build_app(), [command, str(tmp_path)])
        said = [line for line in run.output.splitlines() if line.strip()]
        assert run.exit_code and len(said) == 1 and "n_layers must be at most 4,096" in said[0], run.output

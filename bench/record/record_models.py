"""The calls of bench/record/record.py that run models, checkpoints, training and the command line."""

import importlib
import json
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from record_cases import Case, Draw
from record_layers import fill
from torch import Tensor

import lineate
from lineate.decoding import Decoder
from lineate.generation import generate
from lineate.models import (
    AttentionConfig,
    ExpertsConfig,
    FeedConfig,
    HybridConfig,
    HybridLM,
    LatentConfig,
    LinearConfig,
    MemoryConfig,
    preset,
)

VOCAB = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "linear": LinearConfig(2, 4, 8, 6), "memory": MemoryConfig(2, 16, chunk=8),
    "attention": AttentionConfig(4, 2, 8, rotary_dim=4), "latent": LatentConfig(2, 16, 8, 4, 8), "feed": FeedConfig(40),
}  # fmt: skip
EXPERTS = ExpertsConfig(6, 2, 16, shared_size=12, shared_gate=True)
MODELS = {
    "GGGA": HybridConfig(**COMMON, n_layers=4, pattern="GGGA", zero_centred_norm=True),
    "GGA experts": HybridConfig(**COMMON, n_layers=3, pattern="GGA", experts=EXPERTS, dense_layers=(1,)),
    "KKM experts": HybridConfig(
        **COMMON | {"linear": LinearConfig(2, 2, 8, 8, gate_activation="sigmoid")}, n_layers=3, pattern="KKM",
        dense_layers=(0,), tie_embeddings=True,
        experts=ExpertsConfig(8, 2, 16, shared_size=16, scores="sigmoid", scale=2.4, groups=4, active_groups=2),
    ),
    "LRD": HybridConfig(**COMMON, n_layers=3, pattern="LRD", tie_embeddings=True),
    "GA after": HybridConfig(
        **COMMON | {"attention": AttentionConfig(4, 4, 8, gated=False, qk_norm="full")}, n_layers=2, pattern="GA",
        norm_after="A",
    ),
    "TPN": HybridConfig(**COMMON, n_layers=3, pattern="TPN"),
    "CEN mlp": HybridConfig(
        **COMMON | {"memory": MemoryConfig(2, 16, chunk=8, titans="mlp", window=5, conv_size=0)}, n_layers=3,
        pattern="CEN",
    ),
    "LRDGKTPNCEAM": HybridConfig(**COMMON, n_layers=12, pattern="LRDGKTPNCEAM"),
}  # fmt: skip
WAYS = (
    "new", "train", "packed", "mask", "split", "loss sum", "recompute", "bfloat16", "autocast", "generate", "graphed",
    "saved",
)  # fmt: skip


def run_model(draw: Draw, config: HybridConfig, how: str, t: int = 40) -> Any:
    """Run a model with random weights; `how` is one of WAYS."""
    torch.manual_seed(3)
    model = HybridLM(config)
    if how == "new":
        return {
            "weights": model,
            "repr": repr(model),
            "state": repr(model.state_spec),
            "bytes": model.state_nbytes(2, 9),
        }
    model = fill(model, draw)
    model = model.bfloat16() if how == "bfloat16" else model
    ids = draw.ids(1, 2 * t) if how in ("packed", "loss sum") else draw.ids(2, t)
    bounds = torch.tensor([0, 1, 1, t - 9, 2 * t], device=draw.device) if how in ("packed", "loss sum") else None
    if how == "generate":
        return {
            "greedy": list(generate(model, ids, 12, temperature=0)),
            "drawn": list(generate(model, ids, 12, temperature=0.9, top_k=20, top_p=0.9, seed=4)),
        }
    if how in ("graphed", "split"):
        with torch.no_grad():
            out = model(ids[:, : t // 2], last_only=how == "graphed")
            if how == "split":
                more = model(ids[:, t // 2 :], state=out.state)
                tokens = [model(ids[:, i : i + 1], state=more.state).logits for i in range(2)]
                joined = type(out.state).join([more.state, out.state])
                return {
                    "first": out.logits,
                    "more": more.logits,
                    "state": joined,
                    "tokens": tokens,
                    "repr": repr(joined),
                }
            decoder = Decoder(model, out.state, room=8)
            return {"logits": [decoder(ids[:, i : i + 1]).clone() for i in range(9)], "state": decoder.state}
    if how == "saved":
        return save_and_load(model, ids)
    for block in model.layers:
        block.recompute = how == "recompute"
    found: dict[str, Any] = {}
    with torch.autocast(draw.device, torch.bfloat16, enabled=how == "autocast"):
        if how == "loss sum":
            loss = model.loss_sum(ids, ids.roll(-1, 1), bounds)
        else:
            mask = None
            if how == "mask":  # padding on the left of one row, on the right of the other
                mask = torch.ones_like(ids)
                mask[0, :5] = mask[1, -7:] = 0
            out = model(ids, cu_seqlens=bounds, labels=ids, attention_mask=mask)
            loss, found = out.loss, {"logits": out.logits, "state": out.state}
    loss.backward()
    return found | {"loss": loss, "grads": {name: x.grad for name, x in model.named_parameters()}}


@torch.no_grad()
def save_and_load(model: HybridLM, ids: Tensor) -> Any:
    """Return the saved files, the model read back from them, and what the commands print about them."""
    model.save_pretrained("model")
    back = HybridLM.from_pretrained("model", progress=False, device=ids.device)
    files = {str(x): x.read_bytes() for x in sorted(Path("model").iterdir()) if x.suffix != ".json"}
    return {
        "files": files, "config": Path("model/config.json").read_text(), "weights": back, "logits": back(ids).logits,
        "inspect": command("inspect", "model"), "plan": command("plan", "model", "--context", "1k,8k"),
    }  # fmt: skip


# Checkpoints of other families ---------------------------------------------------------------------------------------


@cache
def family_module() -> Any:
    """Return families.py of lineate's tests, wherever it is there; it makes tiny models of every family."""
    root = Path(lineate.__file__).resolve().parents[1]
    found = next((root / "tests").rglob("families.py"), None)
    if found is None:
        raise FileNotFoundError(f"no families.py in {root / 'tests'}")
    if not (found.parent / "__init__.py").exists():  # before these folders were packages
        sys.path[:0] = [str(found.parent), str(root / "tests")]
        return importlib.import_module("families")
    sys.path.insert(0, str(root))
    return importlib.import_module(".".join(found.relative_to(root).with_suffix("").parts))


@torch.no_grad()
def run_family(draw: Draw, family: str, layout: str | None = None, dtype: str | None = None) -> Any:
    """Run a tiny model that transformers saved, possibly in another layout, and lineate reads."""
    families = family_module()
    families.build(family, seed=1).save_pretrained("theirs")
    place = Path("theirs")
    if layout is not None:
        change = next(change for name, _, change in families.LAYOUTS if name == layout)
        place = families.rewrite(place, Path("changed"), lambda tensors: change(tensors, family))
    model = HybridLM.from_pretrained(place, progress=False, dtype=dtype, device=draw.device)
    out = model(draw.ids(2, 40))
    said = {"inspect": command("inspect", str(place))} if layout is None else {}
    return {"logits": out.logits, "weights": model, "config": repr(model.config), **said}


@torch.no_grad()
def run_replaced(draw: Draw, family: str) -> Any:
    """Run a model of transformers whose linear layers run on lineate."""
    from lineate.integrations import transformers as integration

    model = family_module().build(family, seed=2).to(draw.device)
    ids = draw.ids(2, 40)
    report = integration.enable()
    try:
        return {
            "logits": model(ids).logits,
            "tokens": model.generate(ids, max_new_tokens=5, do_sample=False),
            "report": str(report),
        }
    finally:
        integration.disable()


def run_auto(draw: Draw, name: str) -> Any:
    """Run HybridLM as a model of transformers."""
    from lineate.integrations.auto import LineateConfig, LineateForCausalLM

    model = fill(LineateForCausalLM(LineateConfig.from_hybrid(MODELS[name])), draw).eval()
    ids = draw.ids(2, 30)
    out = model(ids, labels=ids)
    out.loss.backward()
    grads = {key: x.grad for key, x in model.named_parameters()}
    tokens = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    return {"logits": out.logits, "loss": out.loss, "grads": grads, "tokens": tokens}


def model_cases(device: str) -> dict[str, Case]:
    """Return cases of models of every letter, checkpoints of every family, and training."""
    cases: dict[str, Case] = {}
    for name, config in MODELS.items():
        for how in WAYS:
            if how == "graphed" and set(config.letters) & set("TPNCE"):
                continue
            cases[f"models/{name}/{how}"] = partial(run_model, config=config, how=how)
    if device == "cuda":
        for pattern in ("GGGA", "KKKM", "LRD"):
            config = replace(preset("base", pattern), vocab_size=VOCAB, n_layers=len(pattern), initializer_range=0.1)
            for how in ("train", "packed", "bfloat16", "autocast", "generate", "graphed", "split"):
                cases[f"models/{pattern} wide/{how}"] = partial(run_model, config=config, how=how, t=1024)
    try:
        families = family_module()
    except ImportError as error:  # without transformers
        print(f"checkpoints of other families are left out: {error}", file=sys.stderr)
    else:
        for family in families.FAMILIES:
            cases[f"families/{family}/as it is"] = partial(run_family, family=family)
            cases[f"families/{family}/bfloat16"] = partial(run_family, family=family, dtype="bfloat16")
            cases[f"families/{family}/in transformers"] = partial(run_replaced, family=family)
        for layout, whose, _ in families.LAYOUTS:
            for family in whose:
                cases[f"families/{family}/{layout}"] = partial(run_family, family=family, layout=layout)
        for name in ("GGGA", "KKM experts"):
            cases[f"families/own/{name}"] = partial(run_auto, name=name)
    for name, words in TRAININGS.items():
        cases[f"training/{name}"] = partial(train, words=words)
    return cases


# Training and the command line ---------------------------------------------------------------------------------------

TRAININGS: dict[str, tuple[str, ...]] = {
    "muon": (),
    "resumed": ("--steps", "12"),
    "adamw": ("--optimizer", "adamw"),
    "bfloat16": ("--dtype", "bfloat16"),
    "recompute": ("--recompute", "--accumulate", "2"),
    "wsd": ("--schedule", "wsd", "--clip", "0.1", "--seed", "7"),
    "preset KM": ("--model", "tiny", "--pattern", "KM", "--steps", "6"),
    "preset TC": ("--model", "tiny", "--pattern", "TC", "--steps", "4"),
    "tokenizer": ("--model", "tiny", "--tokenizer", "bpe:300", "--steps", "6"),
}
PHRASES = ("the memory", "forgets", "compares", "writes", "reads", "a key", "its value", "each token")


def command(*words: str) -> str:
    """Return what a command prints, and its exit status."""
    from typer.testing import CliRunner

    from lineate.cli import build_app

    with patch.object(sys, "argv", ["lineate", *words]):
        done = CliRunner().invoke(build_app(), list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return f"{done.output}\nexit status {done.exit_code}"


def train(draw: Draw, words: tuple[str, ...]) -> Any:
    """Return losses and weights of 20 steps of `lineate train`, or of 12 steps and then 8 more."""
    texts = Path("texts")
    texts.mkdir()
    for n in range(24):
        lines = [" ".join(PHRASES[(n * 5 + i * (i + j)) % len(PHRASES)] for j in range(4)) + "." for i in range(12)]
        (texts / f"{n:02}.txt").write_text("\n".join(lines))
    fill(HybridLM(replace(MODELS["GGGA"], vocab_size=257, n_layers=2, pattern="GA")), draw).cpu().save_pretrained(
        "start"
    )
    usual = {
        "--out": "run", "--model": "start", "--data": "texts", "--cache": "cache", "--length": 32, "--rows": 4,
        "--steps": 20, "--warmup": 2, "--lr": 3e-3, "--validation-fraction": 0.1, "--eval-every": 10,
        "--eval-batches": 2, "--sample-every": 0, "--save-every": 2, "--device": draw.device,
    }  # fmt: skip
    given = [x for pair in usual.items() if pair[0] not in words for x in map(str, pair)]
    command("train", *given, *words)
    if words == TRAININGS["resumed"]:
        command("train", "--resume", "run", "--steps", "20")
    metrics = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    kept = [{key: x for key, x in line.items() if "second" not in key} for line in metrics]
    model = HybridLM.from_pretrained("run/model", progress=False)
    optimizer = sorted(Path("run/checkpoints").glob("*/optimizer.safetensors"))[-1].read_bytes()
    text = command("generate", "run", "--prompt", "the ", "--tokens", "20", "--seed", "3", "--device", draw.device)
    return {"metrics": json.dumps(kept, indent=1), "weights": model, "optimizer": optimizer, "text": text}


PLANS = [
    "plan qwen3-next-80b", "plan kimi-linear-48b --layers --hardware h200 --batch 8", "plan olmo-hybrid-7b --no-train",
    "plan qwen3-5-27b --context 32k,1m --memory 80GB", "plan qwen3-5-35b-a3b --devices 4 --dtype fp8",
    "plan small --pattern LRDGKTPN --layers", "plan small --pattern CEAM --layers --recompute --optimizer muon",
    "plan tiny --batch 64,1,8 --no-train --min-ctx 1k --max-ctx 16k", "plan --teaching", "plan --teaching --pattern A",
    "plan --emb-dim 2048 --n-heads 16 --n-layers 48 --kv-heads 2 --feed-size 4096 --precision fp32",
    "plan medium --json -", "plan kimi-linear-48b --csv -", "plan large --teaching --json -",
    "plan base --bandwidth 3.35TB/s --flops 989TFLOPS --memory 79.6GiB --state-dtype bf16 --cache-dtype fp8",
    "plan", "plan smal", "plan tiny --pattern XYZ", "plan --emb-dim 64", "plan tiny --dtype fp7",
    "plan tiny --hardware h300", "inspect nowhere", "train --steps 0", "train --model nothing", "generate nowhere",
    "tasks nothing", "tasks recall --rules gnd", "--help", "--version", "plan --help", "inspect --help", "train --help",
    "generate --help", "tasks --help", "demo --help", "picture --help", "picture list", "picture nothing",
]  # fmt: skip


def numbers(file: Path) -> str:
    """Return the contents of a JSON file without measurements and versions."""

    def kept(x: Any) -> Any:
        if isinstance(x, dict):
            left = [key for key in x if "second" not in key and key not in ("torch", "python", "machine")]
            return {key: kept(x[key]) for key in left}
        return [kept(y) for y in x] if isinstance(x, list) else x

    return json.dumps(kept(json.loads(file.read_text())), indent=1)


def run_command(draw: Draw, line: str) -> str:
    return command(*line.split())


TASKS = {
    "recall": "--pairs 4 --vocab 32 --rules gdn,softmax", "overwriting": "--pairs 2 --vocab 32 --rules deltanet",
    "needle": "--vocab 32 --rules kda", "copying": "--vocab 32 --rules ttt", "induction": "--vocab 32 --rules GA",
    "selective-copying": "--pairs 4 --vocab 16 --rules lact", "parity": "--rules deltanet-2",
    "counting": "--modulus 3 --rules least-squares", "s5": "--rules titans",
    "arithmetic": "--modulus 3 --rules rwkv7", "s3": "--rules product-2", "s4": "--rules product3-2 --no-decay",
    "a5": "--rules gdn2-2", "erasing": "--rules deltanet", "adding": "--keys 3 --values 2 --rules gdn2",
}  # fmt: skip


def run_task(draw: Draw, task: str) -> Any:
    """Return all numbers except times of a few steps of `lineate tasks`."""
    words = f"tasks {task} {TASKS[task]} --steps 4 --length 32 --width 32 --heads 2 --seeds 1 --rows 8 --test-rows 16"
    command(*words.split(), "--eval-every", "2", "--out", "tasks")
    return {"numbers": numbers(Path(f"tasks/{task}.json")), "table": Path(f"tasks/{task}.md").read_text()}


def run_demo(draw: Draw) -> Any:
    command("demo", "--quick", "--out", "demo")
    return numbers(Path("demo/demo.json"))


def run_picture(draw: Draw, name: str) -> Any:
    """Return the numbers of a picture."""
    said = command("picture", name, "--quick", "--out", "pictures", "--format", "svg")
    files = {x.name: numbers(x) for x in sorted(Path("pictures").glob("*.json"))}
    return {"said": said, **files}


def task_model(draw: Draw, rule: str) -> Any:
    """Return the small model that `lineate tasks` makes for a rule."""
    from lineate.tasks.model import ModelOptions, make_config

    config = make_config(rule, 40, ModelOptions(width=32, heads=2))
    model = fill(HybridLM(config), draw)
    return {"config": repr(config), "logits": model(draw.ids(2, 20, most=40)).logits}


def command_cases() -> dict[str, Case]:
    """Return cases of commands that people type, and what they print."""
    cases: dict[str, Case] = {f"commands/{line}": partial(run_command, line=line) for line in PLANS}
    for task in TASKS:
        cases[f"tasks/{task}"] = partial(run_task, task=task)
    for rule in (
        "linear", "gla", "deltanet", "gdn", "kda", "softmax", "mla", "ttt", "ttt-mlp", "titans", "lact",
        "least-squares", "kda-2", "GA", "gdn2", "product3-2", "rwkv7",
    ):  # fmt: skip
        cases[f"tasks/model of {rule}"] = partial(task_model, rule=rule)
    cases["commands/demo --quick"] = run_demo
    for name in ("state", "attention", "growth", "forgetting", "recall", "cost"):
        cases[f"pictures/{name}"] = partial(run_picture, name=name)
    return cases

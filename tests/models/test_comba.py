"""Folders of fla's comba: the logits are those of its kernels' recurrence, in which the error precedes the decay."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.generation import generate
from lineate.models import HybridLM
from lineate.models.files.checkpoint import save
from lineate.models.files.safetensors import CheckpointError

VOCAB, HIDDEN, LAYERS, FEED, CONV = 61, 32, 2, 24, 4
COMMON = {
    "model_type": "comba", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
    "intermediate_size": FEED, "hidden_act": "swish", "norm_eps": 1e-6, "head_dim": 8, "num_heads": 2,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "conv_size": CONV, "use_short_conv": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"expand_v": 2.0},
    "grouped": {"num_v_heads": 4, "expand_v": 1.0, "tie_word_embeddings": True},
    "no gate, unread options": {
        "use_output_gate": False, "expand_v": 1.0, "use_inner_decay": False, "use_output_correction": False,
        "correction_factor": 0.02,
    },
}  # fmt: skip
models = pytest.mark.parametrize("name", MODELS)


def sizes(c: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return heads, value heads, key and value channels."""
    h, k = c["num_heads"], c["head_dim"]
    return h, c.get("num_v_heads", h), k, int(k * c["expand_v"])


def draw(c: dict[str, Any]) -> dict[str, Tensor]:
    """Return random tensors under the names of a folder; fla's blocks ignore the options of `decay` and D."""
    h, hv, k, v = sizes(c)
    shapes = {"model.embeddings.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes |= {} if c["tie_word_embeddings"] else {"lm_head.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        rows = {"q_proj": h * k, "k_proj": h * k, "v_proj": hv * v, "a_proj": hv, "b_proj": hv}
        rows |= {"g_proj": hv * v} if c.get("use_output_gate", True) else {}
        shapes |= {f"{layer}.attn.{name}.weight": (count, HIDDEN) for name, count in rows.items()}
        shapes |= {f"{layer}.attn.{x}_conv1d.weight": (rows[f"{x}_proj"], 1, CONV) for x in "qkv"}
        shapes |= {f"{layer}.attn.{x}": (hv,) for x in ("A_log", "dt_bias")}
        shapes |= {f"{layer}.attn.{x}": (h,) for x in ("decay", "D")}
        shapes |= {f"{layer}.attn.o_norm.weight": (v,), f"{layer}.attn.o_proj.weight": (HIDDEN, hv * v)}
        shapes |= {f"{layer}.{x}.weight": (HIDDEN,) for x in ("attn_norm", "mlp_norm")}
        feed = {"gate": (FEED, HIDDEN), "up": (FEED, HIDDEN), "down": (HIDDEN, FEED)}
        shapes |= {f"{layer}.mlp.{x}_proj.weight": shape for x, shape in feed.items()}
    generator = torch.Generator().manual_seed(len(shapes))
    tensors = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator)
        near = 1 + 0.3 * x if "norm" in name else x
        scale = 1.0 if len(shape) == 1 or "embeddings" in name else 1.5 * shape[-1] ** -0.5
        tensors[name] = near * scale
    return tensors


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum() + 1e-6)


def mix(c: dict[str, Any], w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Run one layer's attn on x `t hidden` with explicit transition matrices a I - beta k p^T."""
    (h, hv, k, v), t = sizes(c), len(x)
    mixed = {}
    for part in "qkv":
        y = x @ w[f"{part}_proj.weight"].T
        ahead = torch.cat((y.new_zeros(CONV - 1, y.shape[1]), y))
        taps = w[f"{part}_conv1d.weight"][:, 0]
        mixed[part] = F.silu(sum(ahead[j : j + t] * taps[:, j] for j in range(CONV)))
    beta = (x @ w["b_proj.weight"].T).sigmoid()
    output = x.new_zeros(t, hv, v)
    for head in range(hv):
        own, S = head // (hv // h), x.new_zeros(k, v)
        for i in range(t):
            a = x[i] @ w["a_proj.weight"][head] + w["dt_bias"][head]
            decay = torch.exp(-w["A_log"][head].exp() * F.softplus(a))
            key, probe = (mixed["k"][i].view(h, k)[own] * factor for factor in (1, w["decay"][own].sigmoid()))
            query = unit(mixed["q"][i].view(h, k)[own] - w["D"][own] * probe)
            key, probe, rate = unit(key), unit(probe), beta[i, head]
            move = decay * torch.eye(k, dtype=x.dtype) - rate * torch.outer(key, probe)
            S = move @ S + rate * torch.outer(key, mixed["v"][i].view(hv, v)[head])
            output[i, head] = query @ S * k**-0.5
    output = rms(output, w["o_norm.weight"])
    if "g_proj.weight" in w:
        output = output * (x @ w["g_proj.weight"].T).view(t, hv, v).sigmoid()
    return output.flatten(1) @ w["o_proj.weight"].T


def logits_of(c: dict[str, Any], tensors: dict[str, Tensor], ids: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    w = {name: x.to(dtype) for name, x in tensors.items()}
    x = w["model.embeddings.weight"][ids]
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        own = {name.removeprefix(f"{layer}attn."): y for name, y in w.items() if name.startswith(f"{layer}attn.")}
        x = x + mix(c, own, rms(x, w[f"{layer}attn_norm.weight"]))
        y = rms(x, w[f"{layer}mlp_norm.weight"])
        gate, up, down = (w[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    head = "model.embeddings.weight" if c["tie_word_embeddings"] else "lm_head.weight"
    return rms(x, w["model.norm.weight"]) @ w[head].T


def folder(name: str, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = COMMON | MODELS[name]
    tensors = draw(config)
    save(path, tensors, config)
    return config, tensors


@models
def test_logits_are_those_of_the_recurrence(name, tmp_path):
    config, tensors = folder(name, tmp_path)
    ids = torch.randint(VOCAB, (1, 40), generator=torch.Generator().manual_seed(3))
    expected = logits_of(config, tensors, ids[0])
    most = expected.abs().max()
    narrow = (logits_of(config, tensors, ids[0], torch.float32) - expected).abs().max()
    for dtype, limit in ((torch.float32, 2 * narrow + 1e-5 * most), (torch.float64, 1e-12 * most)):
        model = HybridLM.from_pretrained(tmp_path, dtype=dtype, progress=False)
        with torch.no_grad():
            logits = model(ids).logits[0]
            first = model(ids[:, :13])
            rest = model(ids[:, 13:], state=first.state).logits[0]
        assert (logits - expected).abs().max() <= limit
        assert (torch.cat((first.logits[0], rest)) - expected).abs().max() <= limit


def test_generation_saving_and_gradients(tmp_path):
    config, tensors = folder("plain", tmp_path / "theirs")
    model = HybridLM.from_pretrained(tmp_path / "theirs", dtype=torch.float64, progress=False)
    prompt = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(4))
    found = torch.stack(list(generate(model, prompt, 8, temperature=0)), 1)[0].tolist()
    ids = prompt[0].tolist()
    for _ in range(8):
        ids.append(int(logits_of(config, tensors, torch.tensor(ids))[-1].argmax()))
    assert found == ids[-8:]
    model.save_pretrained(tmp_path / "ours")
    again = HybridLM.from_pretrained(tmp_path / "ours", dtype=torch.float64, progress=False)
    assert torch.equal(again(prompt).logits, model(prompt).logits)
    model(prompt, labels=prompt).loss.backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())


def test_refused(tmp_path):
    config, tensors = folder("plain", tmp_path / "whole")
    save(tmp_path / "linear", tensors, config | {"use_short_conv": False})
    with pytest.raises(CheckpointError, match="comba must have use_short_conv = true, got false"):
        HybridLM.from_pretrained(tmp_path / "linear", progress=False)
    del tensors["model.layers.1.attn.D"]
    save(tmp_path / "part", tensors, config)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.attn\.D"):
        HybridLM.from_pretrained(tmp_path / "part", progress=False)

"""Folders of fla's gated_deltaproduct: the logits are those of the published recurrence, write by write."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.generation import generate
from lineate.models import HybridLM
from lineate.models.files.checkpoint import save

VOCAB, HIDDEN, LAYERS, FEED, CONV = 61, 32, 2, 24, 4
COMMON = {
    "model_type": "gated_deltaproduct", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
    "intermediate_size": FEED, "hidden_act": "swish", "norm_eps": 1e-6, "head_dim": 8, "num_heads": 2,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "conv_size": CONV, "use_short_conv": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "two writes": {"num_householder": 2, "use_forget_gate": True, "allow_neg_eigval": True, "expand_v": 2.0},
    "three writes, grouped": {"num_householder": 3, "use_forget_gate": True, "num_v_heads": 4, "expand_v": 1.0},
    "no decay": {"num_householder": 2, "use_forget_gate": False, "allow_neg_eigval": True, "expand_v": 1.0},
    "one write, no gate": {"use_output_gate": False, "expand_v": 1.0},
}
models = pytest.mark.parametrize("name", MODELS)


def sizes(c: dict[str, Any]) -> tuple[int, int, int, int, int]:
    """Return heads, value heads, key and value channels, and writes."""
    h, k = c["num_heads"], c["head_dim"]
    return h, c.get("num_v_heads", h), k, int(k * c["expand_v"]), c.get("num_householder", 1)


def draw(c: dict[str, Any]) -> dict[str, Tensor]:
    """Return random tensors under the names of a folder."""
    h, hv, k, v, n = sizes(c)
    shapes = {"model.embeddings.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        rows = {"q_proj": h * k, "k_proj": n * h * k, "v_proj": n * hv * v, "b_proj": n * hv}
        rows |= {"a_proj": hv} if c.get("use_forget_gate") else {}
        rows |= {"g_proj": hv * v} if c.get("use_output_gate", True) else {}
        shapes |= {f"{layer}.attn.{name}.weight": (count, HIDDEN) for name, count in rows.items()}
        widths = {"q": h * k, "k": n * h * k, "v": n * hv * v}
        shapes |= {f"{layer}.attn.{name}_conv1d.weight": (width, 1, CONV) for name, width in widths.items()}
        shapes |= {f"{layer}.attn.{x}": (hv,) for x in ("A_log", "dt_bias") if c.get("use_forget_gate")}
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
    """Run one layer's attn on x `t hidden` with explicit transition matrices."""
    (h, hv, k, v, n), t = sizes(c), len(x)
    mixed = {}
    for part in "qkv":
        y = x @ w[f"{part}_proj.weight"].T
        ahead = torch.cat((y.new_zeros(CONV - 1, y.shape[1]), y))
        taps = w[f"{part}_conv1d.weight"][:, 0]
        mixed[part] = F.silu(sum(ahead[j : j + t] * taps[:, j] for j in range(CONV)))
    beta = (x @ w["b_proj.weight"].T).sigmoid() * (2 if c.get("allow_neg_eigval") else 1)
    output = x.new_zeros(t, hv, v)
    for head in range(hv):
        own, S = head // (hv // h), x.new_zeros(k, v)
        for i in range(t):
            if c.get("use_forget_gate"):
                a = x[i] @ w["a_proj.weight"][head] + w["dt_bias"][head]
                S = torch.exp(-w["A_log"][head].exp() * F.softplus(a)) * S
            for j in range(n):
                key = unit(mixed["k"][i].view(n, h, k)[j, own])
                rate = beta[i].view(n, hv)[j, head]
                erase = torch.eye(k, dtype=x.dtype) - rate * torch.outer(key, key)
                S = erase @ S + rate * torch.outer(key, mixed["v"][i].view(n, hv, v)[j, head])
            output[i, head] = unit(mixed["q"][i].view(h, k)[own]) @ S * k**-0.5
    output = rms(output, w["o_norm.weight"])
    if "g_proj.weight" in w:
        output = output * F.silu((x @ w["g_proj.weight"].T).view(t, hv, v))
    return output.flatten(1) @ w["o_proj.weight"].T


def logits_of(c: dict[str, Any], tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    w = {name: x.double() for name, x in tensors.items()}
    x = w["model.embeddings.weight"][ids]
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        own = {name.removeprefix(f"{layer}attn."): y for name, y in w.items() if name.startswith(f"{layer}attn.")}
        x = x + mix(c, own, rms(x, w[f"{layer}attn_norm.weight"]))
        y = rms(x, w[f"{layer}mlp_norm.weight"])
        gate, up, down = (w[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    return rms(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


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
    for dtype, limit in ((torch.float32, 2e-5), (torch.float64, 1e-6)):
        model = HybridLM.from_pretrained(tmp_path, dtype=dtype, progress=False)
        with torch.no_grad():
            logits = model(ids).logits[0]
            first = model(ids[:, :13])
            rest = model(ids[:, 13:], state=first.state).logits[0]
        assert (logits - expected).abs().max() <= limit * expected.abs().max()
        assert (torch.cat((first.logits[0], rest)) - expected).abs().max() <= limit * expected.abs().max()


def test_generation_saving_and_gradients(tmp_path):
    config, tensors = folder("two writes", tmp_path / "theirs")
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

"""RWKV-7 as its authors define it, token by token, and random tensors in its two published layouts."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a small model; no two are equal, so that no layout fits by chance."""

    vocab: int = 61
    hidden: int = 24
    heads: int = 3
    layers: int = 3
    feed: int = 40
    decay: int = 5
    rate: int = 6
    value: int = 7
    gate: int = 10

    @property
    def dim(self) -> int:
        return self.hidden // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the authors' tensors, but for those of the first layer that nothing reads."""
        c = self.hidden
        shapes: dict[str, tuple[int, ...]] = {"emb.weight": (self.vocab, c), "head.weight": (self.vocab, c)}
        norms = ["ln_out", "blocks.0.ln0"]
        for i in range(self.layers):
            b, att = f"blocks.{i}", f"blocks.{i}.att"
            norms += [f"{b}.ln1", f"{b}.ln2", f"{att}.ln_x"]
            shapes |= {f"{att}.x_{x}": (1, 1, c) for x in "rwkvag"}
            ranks = {"w": self.decay, "a": self.rate, "v": self.value, "g": self.gate}
            for x, rank in ranks.items() if i else [(x, rank) for x, rank in ranks.items() if x != "v"]:
                shapes |= {f"{att}.{x}1": (c, rank), f"{att}.{x}2": (rank, c)}
                shapes |= {} if x == "g" else {f"{att}.{x}0": (1, 1, c)}
            shapes |= {f"{att}.k_k": (1, 1, c), f"{att}.k_a": (1, 1, c), f"{att}.r_k": (self.heads, self.dim)}
            shapes |= {f"{att}.{x}.weight": (c, c) for x in ("receptance", "key", "value", "output")}
            shapes |= {f"{b}.ffn.x_k": (1, 1, c), f"{b}.ffn.key.weight": (self.feed, c)}
            shapes[f"{b}.ffn.value.weight"] = (c, self.feed)
        return shapes | {f"{name}.{kind}": (c,) for name in norms for kind in ("weight", "bias")}


def draw(sizes: Sizes, seed: int = 0) -> Tensors:
    """Return random tensors in the authors' layout, in float32; no part of the model is neutral."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in sizes.shapes().items():
        x = torch.randn(shape, generator=generator)
        if ".ln" in name or name.startswith("ln_out"):
            x = 1 + 0.2 * x if name.endswith("weight") else 0.3 * x
        elif ".x_" in name:
            x = 0.5 + 0.3 * x
        elif len(shape) == 2 and name != "emb.weight":
            x = x / shape[0 if name[-2:-1] in "wavg" else 1] ** 0.5
        found[name] = x
    return found


def as_fla(z: Tensors, fused: bool = False) -> Tensors:
    """Return the tensors as flash-linear-attention names and turns them; fused: with all mixtures in one, x_x."""
    ends = {"emb.weight": "model.embeddings.weight", "head.weight": "lm_head.weight"}
    parts = {
        "ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm", "att.receptance": "attn.r_proj",
        "att.key": "attn.k_proj", "att.value": "attn.v_proj", "att.output": "attn.o_proj", "att.ln_x": "attn.g_norm",
        "ffn.key": "ffn.key", "ffn.value": "ffn.value",
    }  # fmt: skip
    found: Tensors = {}
    for name, x in z.items():
        if not name.startswith("blocks."):
            found[ends.get(name, name.replace("ln_out", "model.norm"))] = x
            continue
        _, n, rest = name.split(".", 2)
        part, _, kind = rest.rpartition(".")
        to = f"model.layers.{n}"
        if part in parts:
            found[f"{to}.{parts[part]}.{kind}"] = x
        elif part == "ffn":
            found[f"{to}.ffn.x_k"] = x.flatten()
        elif kind[1:] in ("0", "1", "2"):
            where = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}[kind[1:]]
            found[f"{to}.attn.{kind[0]}_lora.lora.{where}"] = x.flatten() if kind[1:] == "0" else x.t().contiguous()
        elif not fused or not kind.startswith("x_"):
            found[f"{to}.attn.{kind}"] = x.flatten() if kind in ("k_k", "k_a") else x
    if fused:
        for n in range(1 + max(int(name.split(".")[1]) for name in z if name.startswith("blocks."))):
            rows = [z[f"blocks.{n}.att.x_{x}"].flatten() for x in "rwkvag"]
            found[f"model.layers.{n}.attn.x_x"] = torch.stack(rows)
    return found


def fla_config(sizes: Sizes, **changes: Any) -> dict[str, Any]:
    """Return the config.json of flash-linear-attention."""
    return {
        "model_type": "rwkv7", "vocab_size": sizes.vocab, "hidden_size": sizes.hidden, "hidden_act": "sqrelu",
        "num_hidden_layers": sizes.layers, "head_dim": sizes.dim, "num_heads": sizes.heads, "hidden_ratio": 4.0,
        "intermediate_size": sizes.feed, "decay_low_rank_dim": sizes.decay, "a_low_rank_dim": sizes.rate,
        "v_low_rank_dim": sizes.value, "gate_low_rank_dim": sizes.gate, "norm_eps": 1e-5, "norm_bias": True,
        "norm_first": True, "value_dim": [sizes.hidden] * sizes.layers, "attn": None, "attn_mode": "chunk",
        "fuse_norm": False, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        "max_position_embeddings": 2048, **changes,
    }  # fmt: skip


def logits_of(z: Tensors, ids: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the logits `t vocab` of one sequence of ids `t`: the published recurrence in this dtype.

    The memory of a head is S `v k`, as in the authors' program, and is at least float32. Products and activations are
    rounded to the dtype where theirs are.
    """
    z = {name: x.to(dtype).squeeze() for name, x in z.items()}
    wide = torch.promote_types(dtype, torch.float32)
    layers = 1 + max(int(name.split(".")[1]) for name in z if name.startswith("blocks."))
    heads, dim = z["blocks.0.att.r_k"].shape
    hidden = heads * dim
    token = [torch.zeros(hidden, dtype=dtype) for _ in range(layers)]  # the last one that each time mix has seen
    feed = [torch.zeros(hidden, dtype=dtype) for _ in range(layers)]  # and each channel mix
    memory = [torch.zeros(heads, dim, dim, dtype=wide) for _ in range(layers)]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (hidden,), z[f"{name}.weight"], z[f"{name}.bias"], 1e-5)

    found = []
    for number in ids.tolist():
        x, first = norm(z["emb.weight"][number], "blocks.0.ln0"), torch.empty(0)
        for i in range(layers):
            p = f"blocks.{i}.att."
            y = norm(x, f"blocks.{i}.ln1")
            r_in, w_in, k_in, v_in, a_in, g_in = (y + (token[i] - y) * z[f"{p}x_{j}"] for j in "rwkvag")
            token[i] = y
            r, k, v = (z[f"{p}{j}.weight"] @ u for j, u in (("receptance", r_in), ("key", k_in), ("value", v_in)))
            if i == 0:
                first = v
            else:
                v = v + (first - v) * torch.sigmoid(z[f"{p}v0"] + (v_in @ z[f"{p}v1"]) @ z[f"{p}v2"])
            w = (z[f"{p}w0"] + torch.tanh(w_in @ z[f"{p}w1"]) @ z[f"{p}w2"]).to(wide)
            w = torch.exp(-(torch.tensor(-0.5, dtype=wide).exp()) * torch.sigmoid(w))
            a = torch.sigmoid(z[f"{p}a0"] + (a_in @ z[f"{p}a1"]) @ z[f"{p}a2"])
            g = torch.sigmoid(g_in @ z[f"{p}g1"]) @ z[f"{p}g2"]
            unit = F.normalize((k * z[f"{p}k_k"]).view(heads, dim), dim=-1)
            k = k * (1 + (a - 1) * z[f"{p}k_a"])
            r, k, v, a, w = (u.view(heads, dim) for u in (r, k, v, a, w))
            S, out = memory[i], []
            for h in range(heads):
                turned = torch.outer(-unit[h], unit[h] * a[h]).to(wide)
                out.append(S[h] * w[h] + S[h] @ turned + torch.outer(v[h], k[h]).to(wide))
            memory[i] = torch.stack(out)
            o = torch.stack([memory[i][h].to(dtype) @ r[h] for h in range(heads)]).view(1, hidden)
            o = F.group_norm(o, heads, z[f"{p}ln_x.weight"], z[f"{p}ln_x.bias"], dim * 1e-5).view(heads, dim)
            o = o + (r * k * z[f"{p}r_k"]).sum(-1, keepdim=True) * v
            x = x + z[f"{p}output.weight"] @ (o.flatten() * g)
            y = norm(x, f"blocks.{i}.ln2")
            inner = z[f"blocks.{i}.ffn.key.weight"] @ (y + (feed[i] - y) * z[f"blocks.{i}.ffn.x_k"])
            feed[i] = y
            x = x + z[f"blocks.{i}.ffn.value.weight"] @ inner.relu().square()
        found.append(z["head.weight"] @ norm(x, "ln_out"))
    return torch.stack(found)

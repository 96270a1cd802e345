"""Folders of flash-linear-attention's models: the logits are those of its layers, written out token by token."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineate.models import HybridLM
from lineate.models.files.checkpoint import save
from lineate.models.files.safetensors import CheckpointError
from lineate.models.inspect import describe
from lineate.planning import plan_memory, read_model

VOCAB, HIDDEN, HEADS = 97, 48, 3
Tensors = dict[str, Tensor]
COMMON = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 3, "num_heads": HEADS, "intermediate_size": 40,
    "hidden_act": "swish", "norm_eps": 1e-6, "use_short_conv": True, "conv_size": 4, "tie_word_embeddings": False,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "fuse_norm": True, "attn_mode": "chunk",
}  # fmt: skip
ATTENTION = {
    "layers": [1],
    "num_heads": 4,
    "num_kv_heads": 2,
    "qkv_bias": False,
    "window_size": None,
    "rope_theta": 100.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "gated_deltanet": {"head_dim": 10, "expand_v": 1.2, "num_v_heads": 6, "use_gate": True},
    "gated_deltanet, no gate": {"head_dim": 10, "expand_v": 2.0, "use_gate": False, "allow_neg_eigval": True},
    "gated_deltanet, attention": {"head_dim": 8, "expand_v": 1.0, "attn": ATTENTION},
    "kda": {"head_dim": 10, "expand_v": 1.2, "num_v_heads": 6},
    "kda, bounded": {"head_dim": 10, "expand_v": 1.0, "safe_gate": True, "lower_bound": -3.0},
    "delta_net": {"expand_k": 0.5, "expand_v": 1.0},
    "delta_net, gate": {"expand_k": 1.0, "expand_v": 0.5, "use_gate": True, "allow_neg_eigval": True},
    "gla": {"expand_k": 0.5, "expand_v": 1.0, "use_short_conv": False},
    "gla, convolution": {"expand_k": 0.5, "expand_v": 1.0, "attn": ATTENTION},
    "gla, no gate": {"expand_k": 0.5, "expand_v": 1.0, "use_short_conv": False, "use_output_gate": False},
}
models = pytest.mark.parametrize("name", MODELS)


def values_of(name: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": name.partition(",")[0]} | COMMON | MODELS[name] | changes


def sizes(c: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return key heads, value heads, and the channels of each."""
    if "head_dim" in c:
        return HEADS, c.get("num_v_heads", HEADS), c["head_dim"], int(c["head_dim"] * c["expand_v"])
    return HEADS, HEADS, int(HIDDEN * c["expand_k"]) // HEADS, int(HIDDEN * c["expand_v"]) // HEADS


def gated(c: dict[str, Any]) -> bool:
    usual = c["model_type"] != "delta_net"
    return bool(c.get("use_gate", c.get("use_output_gate", usual)))


def layer_shapes(c: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer's attn and their shapes."""
    if "attn" in c and layer in c["attn"]["layers"]:
        narrow = HIDDEN // c["attn"]["num_heads"] * c["attn"]["num_kv_heads"]
        rows = {"q_proj": HIDDEN, "k_proj": narrow, "v_proj": narrow, "o_proj": HIDDEN}
        return {f"{name}.weight": (count, HIDDEN) for name, count in rows.items()}
    kind, (h, hv, k, v) = c["model_type"], sizes(c)
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (h * k, HIDDEN), "k_proj.weight": (h * k, HIDDEN), "v_proj.weight": (hv * v, HIDDEN),
        "o_proj.weight": (HIDDEN, hv * v),
    }  # fmt: skip
    if c["use_short_conv"]:
        shapes |= {f"{part}_conv1d.weight": (shapes[f"{part}_proj.weight"][0], 1, 4) for part in "qkv"}
    if kind == "gla":
        shapes |= {"gk_proj.0.weight": (16, HIDDEN), "gk_proj.1.weight": (h * k, 16), "gk_proj.1.bias": (h * k,)}
        shapes["g_norm_swish_gate.weight" if gated(c) else "g_norm.weight"] = (v,)
    else:
        shapes |= {"b_proj.weight": (hv, HIDDEN), "o_norm.weight": (v,)}
    if kind == "gated_deltanet":
        shapes |= {"a_proj.weight": (hv, HIDDEN), "A_log": (hv,), "dt_bias": (hv,)}
    if kind == "kda":
        shapes |= {"f_proj.0.weight": (v, HIDDEN), "f_proj.1.weight": (hv * k, v), "A_log": (hv,), "dt_bias": (hv * k,)}
        shapes |= {"g_proj.0.weight": (v, HIDDEN), "g_proj.1.weight": (hv * v, v), "g_proj.1.bias": (hv * v,)}
    elif gated(c):
        shapes["g_proj.weight"] = (hv * v, HIDDEN)
    return shapes


def draw(c: dict[str, Any]) -> Tensors:
    """Return random tensors under the names of a folder, as small as trained ones."""
    shapes: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.attn.{name}": shape for name, shape in layer_shapes(c, i).items()}
        shapes |= {f"{layer}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "mlp_norm")}
        for name, shape in (("gate", (40, HIDDEN)), ("up", (40, HIDDEN)), ("down", (HIDDEN, 40))):
            shapes[f"{layer}.mlp.{name}_proj.weight"] = shape
    generator = torch.Generator().manual_seed(len(shapes))
    tensors = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator)
        if "norm" in name:
            tensors[name] = 1 + 0.3 * x
        elif "conv1d" in name or len(shape) == 1:
            tensors[name] = 0.5 * x
        else:
            tensors[name] = x * (1.0 if "embeddings" in name else 0.25) * shape[-1] ** -0.5
    return tensors


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def convolved(x: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return x
    return F.silu(F.conv1d(F.pad(x.T[None], (3, 0)), weight, groups=len(weight)))[0].T


def softmax_layer(c: dict[str, Any], w: Tensors, x: Tensor) -> Tensor:
    heads, kv = c["attn"]["num_heads"], c["attn"]["num_kv_heads"]
    q, k, v = (F.linear(x, w[f"{name}_proj.weight"]).unflatten(-1, (-1, HIDDEN // heads)) for name in "qkv")
    half = q.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * c["attn"]["rope_theta"] ** (-torch.arange(half).double() / half)

    def turned(y: Tensor) -> Tensor:
        cos, sin, a, b = angles.cos()[:, None], angles.sin()[:, None], y[..., :half], y[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    k, v = (y.repeat_interleave(heads // kv, 1) for y in (turned(k), v))
    scores = torch.einsum("thd,shd->hts", turned(q), k) * (2 * half) ** -0.5
    scores = scores.masked_fill(~torch.ones(len(x), len(x), dtype=torch.bool).tril(), -torch.inf)
    return F.linear(torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1), w["o_proj.weight"])


def rule_layer(c: dict[str, Any], w: Tensors, x: Tensor) -> Tensor:
    kind, (h, hv, kd, vd) = c["model_type"], sizes(c)
    q, k, v = (convolved(F.linear(x, w[f"{p}_proj.weight"]), w.get(f"{p}_conv1d.weight")) for p in "qkv")
    q, k = (y.view(len(x), h, kd) for y in (q, k))
    if kind != "gla":
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    q, k = (y.repeat_interleave(hv // h, 1) for y in (q, k))
    v = v.view(len(x), hv, vd)
    beta = None if kind == "gla" else F.linear(x, w["b_proj.weight"]).sigmoid() * (1 + c.get("allow_neg_eigval", False))
    decay = torch.zeros(len(x), hv, kd, dtype=x.dtype)
    if kind == "gla":
        low = F.linear(F.linear(x, w["gk_proj.0.weight"]), w["gk_proj.1.weight"], w["gk_proj.1.bias"])
        decay = (F.logsigmoid(low) / 16).view_as(decay)
    if kind == "gated_deltanet":
        decay = (-w["A_log"].exp() * F.softplus(F.linear(x, w["a_proj.weight"]) + w["dt_bias"]))[..., None]
    if kind == "kda":
        raw = F.linear(F.linear(x, w["f_proj.0.weight"]), w["f_proj.1.weight"]) + w["dt_bias"]
        raw, rate = raw.view_as(decay), w["A_log"].exp()[:, None]
        decay = c["lower_bound"] * (rate * raw).sigmoid() if c.get("safe_gate") else -rate * F.softplus(raw)
    S, outputs = torch.zeros(hv, kd, vd, dtype=x.dtype), []
    for t in range(len(x)):
        S = decay[t].exp()[..., None] * S
        value = v[t] if beta is None else beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
        S = S + k[t][..., None] * value[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", S, q[t]) * kd**-0.5)
    norm = next(w[name] for name in ("o_norm.weight", "g_norm_swish_gate.weight", "g_norm.weight") if name in w)
    o = rms(torch.stack(outputs), norm).flatten(1)
    if kind == "kda":
        o = o * F.linear(F.linear(x, w["g_proj.0.weight"]), w["g_proj.1.weight"], w["g_proj.1.bias"]).sigmoid()
    elif gated(c):
        o = o * F.silu(F.linear(x, w["g_proj.weight"]))
    return F.linear(o, w["o_proj.weight"])


def by_hand(c: dict[str, Any], tensors: Tensors, ids: Tensor) -> Tensor:
    """Return the logits of one sequence, in float64."""
    w = {name: x.double() for name, x in tensors.items()}
    x = w["model.embeddings.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        own = {name.removeprefix(f"{layer}attn."): y for name, y in w.items() if name.startswith(f"{layer}attn.")}
        mix = softmax_layer if "attn" in c and i in c["attn"]["layers"] else rule_layer
        x = x + mix(c, own, rms(x, w[f"{layer}attn_norm.weight"]))
        y = rms(x, w[f"{layer}mlp_norm.weight"])
        gate, up = (F.linear(y, w[f"{layer}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, w[f"{layer}mlp.down_proj.weight"])
    head = w.get("lm_head.weight", w["model.embeddings.weight"])
    return F.linear(rms(x, w["model.norm.weight"]), head)


def made(name: str, folder: Path, **changes: Any) -> tuple[dict[str, Any], Tensors]:
    c = values_of(name, **changes)
    tensors = draw(c)
    save(folder, tensors, c)
    return c, tensors


def tokens(t: int) -> Tensor:
    return torch.randint(3, VOCAB, (1, t), generator=torch.Generator().manual_seed(t))


@models
@torch.no_grad()
def test_logits_are_those_of_the_layers(name, tmp_path):
    c, tensors = made(name, tmp_path)
    model = HybridLM.from_pretrained(tmp_path, progress=False)
    exact = HybridLM.from_pretrained(tmp_path, dtype=torch.float64, progress=False)
    assert model.config.family == c["model_type"]
    for t in (1, 75, 300):
        wanted = by_hand(c, tensors, tokens(t)[0])
        torch.testing.assert_close(model(tokens(t)).logits[0], wanted.float(), atol=1e-5, rtol=0)
        torch.testing.assert_close(exact(tokens(t)).logits[0], wanted, atol=1e-9, rtol=0)
    out = model(tokens(75)[:, :70])
    wanted = by_hand(c, tensors, tokens(75)[0]).float()
    for i in range(70, 75):
        out = model(tokens(75)[:, i : i + 1], state=out.state)
        torch.testing.assert_close(out.logits[0, 0], wanted[i], atol=1e-5, rtol=0)


@models
@torch.no_grad()
def test_save_and_reload_give_the_same_bits(name, tmp_path):
    made(name, tmp_path / "a", tie_word_embeddings=True)
    model = HybridLM.from_pretrained(tmp_path / "a", progress=False)
    model.save_pretrained(tmp_path / "b")
    again = HybridLM.from_pretrained(tmp_path / "b", progress=False)
    assert again.config == model.config and model.head is None
    assert all(torch.equal(x, again.state_dict()[key]) for key, x in model.state_dict().items())
    assert torch.equal(again(tokens(9)).logits, model(tokens(9)).logits)


@models
@torch.no_grad()
def test_it_is_described_and_planned(name, tmp_path):
    _, tensors = made(name, tmp_path)
    found, model = describe(tmp_path), HybridLM.from_pretrained(tmp_path, progress=False)
    assert found.problem is None and found.parameters == sum(x.numel() for x in tensors.values())
    assert found.state_bytes(30) == model(tokens(30)).state.nbytes
    plan = plan_memory(read_model(tmp_path))
    assert plan.weights == sum(x.nbytes for x in model.state_dict().values())
    assert plan.state(1, 30) == model(tokens(30)).state.nbytes


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gated_deltanet", {"hidden_act": "gelu"}, "hidden_act = 'swish', got 'gelu'"),
    ("gated_deltanet", {"use_short_conv": False}, "use_short_conv = true, got false"),
    ("gated_deltanet", {"expand_v": 1.23}, "expand_v above 0 that makes whole channels of 10, got 1.23"),
    ("gated_deltanet", {"attnres_block_size": 4}, "attnres_block_size = None, got 4"),
    ("gated_deltanet", {"num_v_heads": 4}, "value_heads must be a multiple of heads = 3, got 4"),
    ("gated_deltanet", {"attn": ATTENTION | {"qkv_bias": True}}, "in attn, must have qkv_bias = False, got True"),
    ("gated_deltanet", {"attn": ATTENTION | {"window_size": 64}}, "in attn, must have window_size = None, got 64"),
    ("gated_deltanet", {"attn": ATTENTION | {"layers": [3]}}, r"in attn, must have layers in 0 \.\. 2"),
    ("gated_deltanet", {"attn": [ATTENTION]}, "must have an object in attn"),
    ("gated_deltanet", {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 4,096"),
    ("kda", {"lower_bound": -5.0}, "a lower_bound with safe_gate alone, got lower_bound -5.0"),
    ("kda", {"num_heads": 0}, "num_heads must be a whole number of at least 1, got 0"),
    ("delta_net", {"use_beta": False}, "use_beta = True, got False"),
    ("delta_net", {"qk_norm": "sum"}, "qk_norm = 'l2', got 'sum'"),
    ("delta_net", {"qk_activation": "relu"}, "qk_activation = 'silu', got 'relu'"),
    ("delta_net", {"num_heads": 7}, "num_heads that divides 24 and 48 channels, got 7"),
    ("gla", {"num_kv_heads": 1}, "num_kv_heads = num_heads = 3, got 1; keys shared"),
    ("gla", {"feature_map": "relu"}, "feature_map = None, got 'relu'"),
    ("gla", {"clamp_min": -2.0}, "clamp_min = None, got -2.0"),
    ("gla", {"num_heads": "3"}, "must have a number in num_heads, got '3'"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_is_not_supported_is_refused(name, changes, message, tmp_path):
    c = values_of(name)
    save(tmp_path, draw(c), c | changes)
    with pytest.raises(CheckpointError, match=message) as error:
        HybridLM.from_pretrained(tmp_path, progress=False)
    assert "config.json" in str(error.value)


def test_the_size_of_the_feed_forward_follows_from_the_ratio(tmp_path):
    """It is the next multiple of 256 at or above 2/3 of the ratio times the width."""
    c = values_of("gla", intermediate_size=None, hidden_ratio=4)
    save(tmp_path, {"x": torch.zeros(1)}, c)
    assert read_model(tmp_path).config.feed.size == 256


def test_tensors_of_another_rule_are_named(tmp_path):
    c = values_of("gated_deltanet")
    save(tmp_path, draw(c), values_of("delta_net"))
    with pytest.raises(CheckpointError, match=r"a_proj"):
        HybridLM.from_pretrained(tmp_path, progress=False)

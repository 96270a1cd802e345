"""Folders of fla's hgrn2, retnet and linear_attn: the logits are those of the published recurrences, token by token."""

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
from lineate.models.inspect import describe
from lineate.planning import plan_memory, read_model

VOCAB, HIDDEN, LAYERS = 97, 48, 3
Tensors = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
COMMON = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": 40,
    "hidden_act": "swish", "norm_eps": 1e-6, "tie_word_embeddings": False, "elementwise_affine": True,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "fuse_norm": True, "attn_mode": "chunk",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "hgrn2": {"num_heads": 3, "expand_ratio": 16},
    "hgrn2, heads": {"num_heads": 4, "expand_ratio": None},
    "hgrn2, no bounds": {"num_heads": None, "expand_ratio": 8, "use_lower_bound": False},
    "retnet": {"num_heads": 3, "expand_k": 1.0, "expand_v": 2.0},
    "retnet, relu": {"num_heads": 6, "expand_k": 0.5, "expand_v": 1.0, "feature_map": "relu", "use_short_conv": True},
    "retnet, no gate": {"num_heads": 3, "expand_k": 1.0, "use_output_gate": False, "feature_map": "swish"},
    "linear_attn": {"num_heads": 3, "expand_k": 0.5, "expand_v": 1.0},
    "linear_attn, tied": {"num_heads": 3, "tie_feature_map_qk": True, "norm_q": True},
    "linear_attn, hedgehog": {"num_heads": 3, "feature_map": "hedgehog", "norm_feature_map": True},
    "linear_attn, t2r": {"num_heads": 3, "feature_map": "t2r", "norm_q": True, "norm_k": True},
    "linear_attn, elu": {"num_heads": 4, "feature_map": "elu", "norm_feature_map": True},
    "linear_attn, elu, sums": {"num_heads": 4, "feature_map": "elu", "norm_k": True, "norm_feature_map": True},
    "linear_attn, relu": {"num_heads": 4, "feature_map": "relu"},
    "linear_attn, identity": {"num_heads": 4, "feature_map": "identity"},
}
models = pytest.mark.parametrize("name", MODELS)


def values_of(name: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": name.partition(",")[0]} | COMMON | MODELS[name] | changes


def heads_of(c: dict[str, Any]) -> int:
    if c["model_type"] == "hgrn2" and c["expand_ratio"] is not None:
        return HIDDEN // c["expand_ratio"]
    return c["num_heads"]


def sizes(c: dict[str, Any]) -> tuple[int, int, int]:
    """Return heads, and the channels of a key and of a value of one head, with fla's default factors."""
    h, kind = heads_of(c), c["model_type"]
    usual = 2.0 if kind == "retnet" else 1.0
    return h, int(HIDDEN * c.get("expand_k", 1.0)) // h, int(HIDDEN * c.get("expand_v", usual)) // h


def layer_shapes(c: dict[str, Any]) -> Shapes:
    """Return the tensors of a layer's attn and their shapes."""
    kind, (h, k, v) = c["model_type"], sizes(c)
    shapes: Shapes = {"q_proj.weight": (h * k, HIDDEN), "o_proj.weight": (HIDDEN, h * v)}
    if kind == "hgrn2":
        return shapes | {
            "f_proj.weight": (h * k, HIDDEN), "i_proj.weight": (h * v, HIDDEN), "g_norm.weight": (h * v,)
        }  # fmt: skip
    shapes |= {"k_proj.weight": (h * k, HIDDEN), "v_proj.weight": (h * v, HIDDEN)}
    if kind == "retnet":
        gated = c.get("use_output_gate", True)
        shapes["g_norm_swish_gate.weight" if gated else "g_norm.weight"] = (v,)
        return shapes | ({"g_proj.weight": (h * v, HIDDEN)} if gated else {})
    shapes["norm.weight"] = (v,)
    for part in "q" if c.get("tie_feature_map_qk") else "qk":
        found = {"elementwise_product": ("layer1", "layer2"), "t2r": ("layer",), "hedgehog": ("layer",)}
        for layer in found.get(c.get("feature_map", "elementwise_product"), ()):
            shapes[f"feature_map_{part}.{layer}.weight"] = (k, k)
            if c.get("feature_map") != "t2r":
                shapes[f"feature_map_{part}.{layer}.bias"] = (k,)
    return shapes


def draw(c: dict[str, Any]) -> Tensors:
    """Return random tensors under the names of a folder, of the order of trained ones."""
    shapes: Shapes = {"model.embeddings.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    if c["model_type"] == "hgrn2" and c.get("use_lower_bound", True):
        shapes["model.lower_bounds"] = (LAYERS, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.attn.{name}": shape for name, shape in layer_shapes(c).items()}
        shapes |= {f"{layer}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "mlp_norm")}
        for name, shape in (("gate", (40, HIDDEN)), ("up", (40, HIDDEN)), ("down", (HIDDEN, 40))):
            shapes[f"{layer}.mlp.{name}_proj.weight"] = shape
    generator = torch.Generator().manual_seed(len(shapes))
    tensors = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator)
        if "norm" in name:
            tensors[name] = 1 + 0.3 * x
        elif "feature_map" in name:
            tensors[name] = 0.3 * x + (torch.eye(*shape) if len(shape) == 2 else 1.0)
        elif "lower_bounds" in name:
            tensors[name] = x
        else:
            tensors[name] = x * (1.0 if "embeddings" in name else 0.25) * shape[-1] ** -0.5
    return tensors


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turned(x: Tensor) -> Tensor:
    """Return x `t h d` rotated by its absolute positions, first halves with second halves, base 10000."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x)).double()[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
    cos, sin, a, b = angles.cos()[:, None], angles.sin()[:, None], x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """Return the outputs of S = decay S + k v^T, o = S^T q / sqrt(k); the decay is `t h 1` or `t h k`."""
    S, outputs = q.new_zeros(q.shape[1], q.shape[2], v.shape[2]), []
    for t in range(len(q)):
        S = decay[t][..., None] * S + k[t][..., None] * v[t][:, None]
        outputs.append(torch.einsum("hkv,hk->hv", S, q[t]) * q.shape[2] ** -0.5)
    return torch.stack(outputs)


def hgrn2(c: dict[str, Any], w: Tensors, x: Tensor, bound: Tensor) -> Tensor:
    shape = (len(x), heads_of(c), -1)
    q, f, v = (F.linear(x, w[f"{name}_proj.weight"]) for name in "qfi")
    forget = bound + (1 - bound) * f.sigmoid()
    o = scan(F.silu(q).view(shape), (1 - forget).view(shape), v.view(shape), forget.view(shape))
    return rms(o.flatten(1), w["g_norm.weight"], 1e-5)


def retnet(c: dict[str, Any], w: Tensors, x: Tensor) -> Tensor:
    h = c["num_heads"]
    q, k, v = (F.linear(x, w[f"{name}_proj.weight"]).unflatten(-1, (h, -1)) for name in "qkv")
    phi = {None: lambda y: y, "relu": F.relu, "swish": F.silu}[c.get("feature_map")]
    gamma = (1 - 2.0 ** (-5 - torch.arange(h).double())).expand(len(x), h)
    o = scan(turned(phi(q)), turned(phi(k)), v, gamma[..., None])
    if not c.get("use_output_gate", True):
        return rms(o, w["g_norm.weight"]).flatten(1)
    return rms(o, w["g_norm_swish_gate.weight"]).flatten(1) * F.silu(F.linear(x, w["g_proj.weight"]))


def features(c: dict[str, Any], w: Tensors, x: Tensor, part: str) -> Tensor:
    name, part = c.get("feature_map", "elementwise_product"), "q" if c.get("tie_feature_map_qk") else part

    def affine(layer: str) -> Tensor:
        return F.linear(x, w[f"feature_map_{part}.{layer}.weight"], w.get(f"feature_map_{part}.{layer}.bias"))

    if name == "elementwise_product":
        return affine("layer1") * affine("layer2")
    if name == "hedgehog":
        return torch.cat((2 * affine("layer"), -2 * affine("layer")), -1).softmax(-1)
    if name == "t2r":
        return affine("layer").relu()
    return {"elu": F.elu(x) + 1, "relu": x.relu(), "identity": x}[name]


def linear_attn(c: dict[str, Any], w: Tensors, x: Tensor) -> Tensor:
    h = c["num_heads"]
    q, k, v = (F.linear(x, w[f"{name}_proj.weight"]).unflatten(-1, (h, -1)) for name in "qkv")
    q, k = features(c, w, q, "q"), features(c, w, k, "k")
    q = q / (q.sum(-1, True) + 1e-4) if c.get("norm_q") else q
    k = k / (k.sum(-1, True) + 1e-4) if c.get("norm_k") else k
    o = scan(q, k, v, torch.ones(len(x), h, 1, dtype=x.dtype))
    if c.get("norm_feature_map"):
        o = o / ((q * q.shape[-1] ** -0.5 * k.cumsum(0)).sum(-1, True) + 1e-10)
    return rms(o, w["norm.weight"]).flatten(1)


def by_hand(c: dict[str, Any], tensors: Tensors, ids: Tensor) -> Tensor:
    """Return the logits of one sequence, in float64."""
    w = {name: x.double() for name, x in tensors.items()}
    x = w["model.embeddings.weight"][ids]
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        own = {name.removeprefix(f"{layer}attn."): y for name, y in w.items() if name.startswith(f"{layer}attn.")}
        y = rms(x, w[f"{layer}attn_norm.weight"])
        if c["model_type"] == "hgrn2":
            shares = w.get("model.lower_bounds", torch.zeros(LAYERS, HIDDEN).double()).softmax(0)
            bound = shares.cumsum(0)[i] - shares[0] if "model.lower_bounds" in w else torch.zeros(HIDDEN).double()
            o = hgrn2(c, own, y, bound)
        else:
            o = (retnet if c["model_type"] == "retnet" else linear_attn)(c, own, y)
        x = x + F.linear(o, own["o_proj.weight"])
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
def test_logits_are_those_of_the_recurrence(name, tmp_path):
    """In one call of any length, from states split anywhere, and in packed sequences."""
    c, tensors = made(name, tmp_path)
    model = HybridLM.from_pretrained(tmp_path, progress=False)
    exact = HybridLM.from_pretrained(tmp_path, dtype=torch.float64, progress=False)
    assert model.config.family == c["model_type"]
    ids = tokens(150)
    wanted = by_hand(c, tensors, ids[0])
    for t in (1, 75, 150):
        torch.testing.assert_close(model(ids[:, :t]).logits[0], wanted[:t].float(), atol=2e-5, rtol=0)
    torch.testing.assert_close(exact(ids).logits[0], wanted, atol=2e-6, rtol=0)  # decays and bounds are float32
    parts, state = [], None
    for start, end in ((0, 1), (1, 70), (70, 71), (71, 72), (72, 140), (140, 150)):
        out = model(ids[:, start:end], state=state)
        parts.append(out.logits)
        state = out.state
    torch.testing.assert_close(torch.cat(parts, 1)[0], wanted.float(), atol=2e-5, rtol=0)
    packed = model(torch.cat((ids[:, :75], ids[:, :1], ids), 1), cu_seqlens=torch.tensor([0, 75, 76, 226]))
    expected = torch.cat((wanted[:75], wanted[:1], wanted)).float()
    torch.testing.assert_close(packed.logits[0], expected, atol=2e-5, rtol=0)


@models
@torch.no_grad()
def test_greedy_tokens_follow_the_logits(name, tmp_path):
    c, tensors = made(name, tmp_path, eos_token_id=None)
    model, ids = HybridLM.from_pretrained(tmp_path, progress=False), tokens(20)
    found = torch.stack(list(generate(model, ids, 6, temperature=0)), 1)
    wanted = by_hand(c, tensors, torch.cat((ids, found), 1)[0])
    assert torch.equal(wanted[19:25].argmax(-1), found[0])


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
    c, tensors = made(name, tmp_path)
    found, model = describe(tmp_path), HybridLM.from_pretrained(tmp_path, progress=False)
    assert found.problem is None
    added = LAYERS * c["num_heads"] if c["model_type"] == "retnet" else 0  # its decays are no tensor of the folder
    twice = [x for name, x in tensors.items() if "feature_map" in name and c.get("tie_feature_map_qk")]
    assert found.parameters == sum(x.numel() for x in [*tensors.values(), *twice]) + added
    assert found.state_bytes(30) == model(tokens(30)).state.nbytes
    plan = plan_memory(read_model(tmp_path))
    assert plan.weights == sum(x.nbytes for x in model.state_dict().values())
    assert plan.state(1, 30) == model(tokens(30)).state.nbytes


@torch.no_grad()
def test_constants_stay_float32_in_bfloat16(tmp_path):
    made("hgrn2", tmp_path / "h")
    made("retnet", tmp_path / "r")
    for folder, name in (("h", "lower_bound"), ("r", "A_log")):
        model = HybridLM.from_pretrained(tmp_path / folder, dtype=torch.bfloat16, progress=False)
        mixer = model.layers[1].mixer
        assert getattr(mixer, name).dtype == torch.float32 and mixer.in_proj.weight.dtype == torch.bfloat16
        assert model(tokens(70)).logits.isfinite().all()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("hgrn2", {"use_short_conv": True}, "use_short_conv = False, got True; a convolution before HGRN2's gates"),
    ("hgrn2", {"expand_ratio": 32}, "expand_ratio that divides hidden_size = 48, got 32"),
    ("hgrn2", {"expand_ratio": None, "num_heads": 5}, "num_heads that divides hidden_size = 48, got 5"),
    ("hgrn2", {"expand_ratio": None, "num_heads": None}, "must have num_heads, got null"),
    ("hgrn2", {"use_lower_bound": 1}, "true or false in use_lower_bound, got 1"),
    ("hgrn2", {"elementwise_affine": False}, "elementwise_affine = True, got False"),
    ("retnet", {"feature_map": "gelu"}, "feature_map null, 'silu', 'swish' or 'relu', got 'gelu'"),
    ("retnet", {"feature_map": ["relu"]}, "feature_map null, 'silu', 'swish' or 'relu', got \\['relu'\\]"),
    ("retnet", {"num_kv_heads": 1}, "num_kv_heads = num_heads = 3, got 1; keys shared"),
    ("retnet", {"num_heads": 16}, "an even number of key channels a head, which are rotated, got 3"),
    ("retnet", {"hidden_act": "gelu"}, "hidden_act = 'swish', got 'gelu'"),
    ("retnet", {"attnres_block_size": 4}, "attnres_block_size = None, got 4"),
    ("linear_attn", {"feature_map": "dpfp"}, "feature_map of identity, .* got 'dpfp'; the definition of dpfp differs"),
    ("linear_attn", {"feature_map": None}, "feature_map of identity, .* got None"),
    ("linear_attn", {"norm_q": "yes"}, "true or false in norm_q, got 'yes'"),
    ("linear_attn", {"expand_k": 0.3}, "expand_k above 0 that makes whole channels of 48, got 0.3"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_is_not_supported_is_refused(name, changes, message, tmp_path):
    c = values_of(name)
    save(tmp_path, draw(c), c | changes)
    with pytest.raises(CheckpointError, match=message) as error:
        HybridLM.from_pretrained(tmp_path, progress=False)
    assert "config.json" in str(error.value)


def test_absent_options_have_the_values_of_the_classes(tmp_path):
    def read(**values: Any) -> Any:
        save(tmp_path, {"x": torch.zeros(1)}, {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 8} | values)
        return read_model(tmp_path).config

    hgrn2 = read(model_type="hgrn2")
    assert (hgrn2.linear.heads, hgrn2.linear.key_dim, hgrn2.feed.size) == (2, 128, 768)
    retnet = read(model_type="retnet")
    assert (retnet.linear.heads, retnet.linear.key_dim, retnet.linear.value_dim) == (8, 32, 64)
    assert retnet.feed.size == 512 and retnet.linear.conv_size == 0
    assert read(model_type="retnet", hidden_ratio=None).feed.size == 768
    linear = read(model_type="linear_attn").linear
    assert (linear.heads, linear.key_dim, linear.feature_map, linear.normalize) == (4, 64, "product", False)


def test_tensors_that_are_missing_are_named(tmp_path):
    c = values_of("hgrn2")
    tensors = draw(c)
    del tensors["model.lower_bounds"]
    save(tmp_path, tensors, c)
    with pytest.raises(CheckpointError, match=r"missing \(1\):\s+model.lower_bounds"):
        HybridLM.from_pretrained(tmp_path, progress=False)
    c = values_of("linear_attn")
    tensors = {name: x for name, x in draw(c).items() if "feature_map_k.layer2" not in name}
    save(tmp_path, tensors | {"model.layers.0.attn.feature_map_k.layer2.weight": torch.zeros(3, 3)}, c)
    with pytest.raises(CheckpointError, match=r"feature_map_k.layer2"):
        HybridLM.from_pretrained(tmp_path, progress=False)
